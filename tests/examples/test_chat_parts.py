"""The parts of the recoverable chat by themselves: what the page folds, how it is drawn, what the outbox keeps."""

from __future__ import annotations

import asyncio
import importlib
import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")
pytest.importorskip("rich")

from rich.console import Console
from rich.live import Live

from agentscope_durable import (
    Committed,
    Definition,
    DurableRuntime,
    EventDelta,
    LocalBackend,
    PreviewStarted,
    PublicEvent,
    SessionKey,
)
from agentscope_durable.adapters.agentscope import STATE_VERSION
from agentscope_durable.testing.openai_server import OpenAIServer
from tests.examples.terminals import Screen
from tests.examples.test_recoverable_chat import CHAT, environment, facts, page

KEY = SessionKey("recoverable-chat", "main")
MODULES = ("agent", "page", "screen", "chat")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's own modules, by name."""
    monkeypatch.syspath_prepend(str(CHAT))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


# ------------------------------------------------------------ the page


def started(attempt: int) -> PreviewStarted:
    return PreviewStarted("message", "main", "t1", "m1", attempt)


def words(attempt: int, offset: int, text: str) -> EventDelta:
    return EventDelta("message", "main", "t1", "m1", attempt, offset, text)


def fact(sequence: int, kind: str, **data: Any) -> Committed:
    return Committed(PublicEvent(kind, KEY, sequence, 1000 + sequence, data, thread_id="main", turn_id="t1"))


def completed(sequence: int, text: str, *, attempt: int = 1) -> Committed:
    content = [{"type": "text", "text": text}]
    return fact(sequence, "message.completed", messageId="m1", role="assistant", content=content, attempt=attempt)


def test_words_disappear_with_their_attempt_and_give_way_to_their_answer(modules: Any) -> None:
    shown = modules("page").Page(KEY)
    for event in (started(1), words(1, 0, "Go"), words(1, 2, " to")):
        assert shown.accept(event) == []
    assert shown.previews == {("m1", 1): "Go to"}

    assert shown.accept(fact(1, "message.abandoned", messageId="m1", attempt=1, reason="lost")) == []
    assert shown.previews == {}

    shown.accept(started(2))
    shown.accept(words(2, 0, "Stay"))
    [line] = shown.accept(completed(2, "Stay here", attempt=2))
    assert (line.who, line.text, shown.previews) == ("agent", "Stay here", {})
    # Delivered twice, it is shown once.
    assert shown.accept(completed(2, "Stay here", attempt=2)) == []


def test_words_with_a_hole_are_not_shown(modules: Any) -> None:
    shown = modules("page").Page(KEY)
    for event in (started(1), words(1, 0, "Go"), words(1, 5, "the sea"), words(1, 12, " and back")):
        shown.accept(event)

    assert shown.previews == {}


# ------------------------------------------------------------ the screen


def drawn(output: io.StringIO) -> list[str]:
    """The rows of a terminal after that output."""
    seen = Screen()
    seen.feed(output.getvalue().replace("\n", "\r\n").encode())
    return [row.rstrip() for row in seen.rows]


def test_a_small_terminal_keeps_the_last_words_and_the_line_that_is_typed(modules: Any) -> None:
    screen = modules("screen")
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=30, height=12, legacy_windows=False)
    long = " ".join(f"word{number}" for number in range(60))
    with Live(console=console, auto_refresh=False, transient=True) as live:
        terminal = screen.Terminal(live)
        for end in range(0, len(long), 7):
            terminal.show(screen.Now(words={("m1", 1): long[:end]}, tools=["weather"], status="RUNNING"))
        for key in "你好x\x7f":
            assert terminal.key(key) is None
        rows = drawn(output)
        # Drawn in place: as many rows as the terminal may lose to it, once.
        assert rows[-3:] == ["⋯ weather", "RUNNING", "> 你好"]
        assert len(rows) <= 12 and sum("word50" in row for row in rows) == 1

        assert terminal.key("\r") == "你好"
        terminal.say("agent", long)
        terminal.show(screen.Now(status="nothing is under way"))
    assert " ".join(drawn(output)).split() == ["agent:", *long.split()]


# ------------------------------------------------------------ the outbox


def test_the_outbox_keeps_the_order_and_what_was_written_by_one_that_died(modules: Any, tmp_path: Path) -> None:
    outbox = modules("chat").Outbox(tmp_path)
    for text in ("first", "second", "third"):
        outbox.put(operation="submit", text=text)
    (tmp_path / "chat-1.part").write_text('{"half": ')  # died while it wrote: never acknowledged, never sent

    another = modules("chat").Outbox(tmp_path)
    assert [request["text"] for request in another.requests()] == ["first", "second", "third"]
    assert len({request["request_id"] for request in another.requests()}) == 3
    outbox.remove(outbox.requests()[0]["request_id"])
    outbox.remove("chat-of-nobody")
    assert [request["text"] for request in another.requests()] == ["second", "third"]


# ------------------------------------------------------------ a real endpoint


async def test_a_real_endpoint_is_used_when_the_environment_names_one(modules: Any, tmp_path: Path) -> None:
    agent = modules("agent")
    folder = tmp_path / "chat"
    async with OpenAIServer(agent.script) as server:
        named = {"DURABLE_MODEL_BASE_URL": server.base_url, "DURABLE_MODEL": "gpt-of-this-machine"}
        brain = await asyncio.create_subprocess_exec(
            *(sys.executable, "brain.py", str(folder), "--word", "0"),
            cwd=CHAT,
            env={**environment(), **named},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            await page(folder, "Plan a day in Nice")
            definition = Definition(agent.NAME, agent.VERSION, STATE_VERSION)
            async with (
                LocalBackend.open(folder / "store") as backend,
                DurableRuntime(backend=backend, definitions=[definition]) as runtime,
                runtime.get_session(KEY).stream_events() as events,
            ):
                async for event in events:
                    if isinstance(event, Committed) and event.event.type == "interaction.requested":
                        break
        finally:
            with suppress(ProcessLookupError):
                brain.kill()
            await brain.wait()
        assert {request["model"] for request in server.requests} == {"gpt-of-this-machine"}
    told = facts(await page(folder))
    assert told[:2] == ["you: Plan a day in Nice", "agent: A day in Nice. I look at the sky and at the timetable."]
