"""`durable events --follow`: what happens, until Ctrl+C; through the death of hosts, and on from a cursor."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.cli.events import _Lines, _Screen, summary
from agentscope_durable.contracts.events import Committed, EventDelta, PreviewStarted, PublicEvent, SnapshotReset
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.projection import Projection, SnapshotView
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import Definition, DurableRuntime
from agentscope_durable.testing.scripted_harness import approval, final
from tests.cli.conftest import KEY, SESSION, environment
from tests.kill.host import KEY as KILL_KEY
from tests.kill.live_host import KEY as LIVE_KEY
from tests.kill.test_kill import Folder
from tests.runtime.conftest import Hosts, all_events, turn_is, until

pytestmark = pytest.mark.backend("sqlite")
SECONDS = 90.0


class Follower:
    """`durable events --follow` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    @classmethod
    async def begin(cls, store: Path, *arguments: str) -> Follower:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentscope_durable", "events", *arguments, "--follow", "--store", str(store),
            env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(process)

    async def until(self, seen: Callable[[str], bool]) -> None:
        """Read on until a line is seen."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            while not (self.lines and seen(self.lines[-1])):
                line = await self.process.stdout.readline()
                assert line, (self.lines, await self.stderr())
                self.lines.append(line.decode().rstrip("\n"))

    async def stderr(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def interrupt(self) -> tuple[int, str]:
        """Ctrl+C."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            rest, said = await asyncio.gather(self.process.stdout.read(), self.stderr())
            self.lines += rest.decode().splitlines()
            return await self.process.wait(), said

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
async def followers() -> AsyncIterator[list[Follower]]:
    begun: list[Follower] = []
    yield begun
    for follower in begun:
        if follower.process.returncode is None:
            follower.process.kill()
        await follower.process.wait()


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    for process in folder.processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_goes_on_through_the_death_of_its_host_and_again_from_its_cursor(
    folder: Folder, followers: list[Follower]
) -> None:
    place = f"{KILL_KEY.namespace}/{KILL_KEY.session_id}"
    first = await folder.host()
    await folder.says("submitted")
    follower = await Follower.begin(folder.path, place, "--json")
    followers.append(follower)
    folder.open("work")
    await folder.reached("g")
    await follower.until(lambda line: '"tool.applied"' in line)
    first.kill()
    await first.wait()
    # The dead host's Run is closed by the next one, and this reader hears of it.
    await folder.host()
    await follower.until(lambda line: '"LOST"' in line)
    seen = len(follower.events)
    code, said = await follower.interrupt()

    assert code == 130
    assert said.strip() == f"go on with: --after {follower.events[-1]['cursor']}"
    again = await Follower.begin(folder.path, place, "--json", "--after", follower.events[-1]["cursor"])
    followers.append(again)
    folder.open("g")
    await again.until(lambda line: '"COMPLETED"' in line and '"turn.status"' in line)
    await again.interrupt()
    found = [event["event"]["sequence"] for event in (*follower.events, *again.events)]
    assert found == list(range(1, len(found) + 1)) and len(found) > seen
    assert all(event["type"] == "event" for event in follower.events)


async def test_it_waits_for_what_happens_next_whoever_does_it(
    hosts: Hosts, tmp_path: Path, followers: list[Follower]
) -> None:
    runtime = await hosts.open([approval("deploy"), final()])
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("other", "agent")
    follower = await Follower.begin(tmp_path, SESSION, "--thread", "other")
    followers.append(follower)
    elsewhere = await session.submit("r1", "go")
    await turn_is(elsewhere, TurnStatus.WAITING)
    turn = await other.submit("r2", "go")

    await follower.until(lambda line: "WAITING" in line)

    assert all(turn.turn_id in line or "thread.created" in line for line in follower.lines), follower.lines
    code, said = await follower.interrupt()
    assert code == 130 and "--after e1-" in said


async def test_a_page_and_a_stream_tell_the_same(hosts: Hosts, tmp_path: Path, followers: list[Follower]) -> None:
    runtime = await hosts.open([final()])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await turn.wait(SECONDS)
    follower = await Follower.begin(tmp_path, turn.turn_id, "--json")
    followers.append(follower)

    await follower.until(lambda line: '"COMPLETED"' in line and '"turn.status"' in line)

    assert [event["event"] for event in follower.events] == [
        msgspec.json.decode(msgspec.json.encode(event)) for event in await all_events(turn)
    ]


@pytest.mark.spec("DX-08", "ST-07")
async def test_a_cursor_that_was_pruned_brings_a_snapshot_and_then_what_follows(
    hosts: Hosts, tmp_path: Path, followers: list[Follower]
) -> None:
    runtime = await hosts.open([final("done")])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r1", "go")).wait(SECONDS)
    early = (await session.list_events(limit=2)).cursor
    await HostOperations(hosts.backend).prune_events(KEY, older_than=0)

    follower = await Follower.begin(tmp_path, SESSION, "--json", "--after", early)
    followers.append(follower)
    await follower.until(lambda line: '"reset"' in line)
    later = await session.submit("r2", "more")
    await follower.until(lambda line: later.turn_id in line and '"COMPLETED"' in line)

    reset, *rest = follower.events
    assert (reset["type"], {event["type"] for event in rest}) == ("reset", {"event"})
    said = [message["content"][0]["text"] for message in reset["snapshot"]["projection"]["messages"].values()]
    assert "done" in said
    assert reset["cursor"] == reset["snapshot"]["cursor"]


@pytest.mark.spec("ST-24")
async def test_text_on_its_way_in_another_process_is_shown_before_its_fact(
    tmp_path: Path, followers: list[Follower]
) -> None:
    """Through the sockets in the store's folder, although the store is only read (D22)."""
    host = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kill.live_host", json.dumps({"folder": str(tmp_path), "role": "brain"}),
        env=environment(),
    )  # fmt: skip
    place = f"{LIVE_KEY.namespace}/{LIVE_KEY.session_id}"
    try:
        await until(lambda: (tmp_path / "said").exists())
        follower = await Follower.begin(tmp_path, place, "--json", "--previews")
        plain = await Follower.begin(tmp_path, place, "--json")
        followers += [follower, plain]
        for one in (follower, plain):
            await one.until(lambda line: '"thread.created"' in line)
        async with LocalBackend.open(tmp_path) as backend, DurableRuntime(backend=backend) as runtime:
            turn = await runtime.get_session(LIVE_KEY).submit("r1", "go")
            await follower.until(lambda line: '"preview.delta"' in line)
            (tmp_path / "g.open").touch()
            await turn.wait(SECONDS)
        for one in (follower, plain):
            await one.until(lambda line: '"COMPLETED"' in line and '"turn.status"' in line)
    finally:
        host.kill()
        await host.wait()

    kinds = [event["type"] for event in follower.events]
    assert kinds.index("preview.started") < kinds.index("preview.delta")
    pieces = [event for event in follower.events if event["type"] == "preview.delta"]
    [said] = [
        event["event"]["data"]
        for event in follower.events
        if event["type"] == "event" and event["event"]["data"].get("role") == "assistant"
    ]
    assert said["content"][0]["text"].startswith("".join(piece["text"] for piece in pieces))
    assert [piece["offset"] for piece in pieces][0] == 0
    assert {event["type"] for event in plain.events} == {"event"}


async def test_previews_that_a_pipe_cannot_show_are_said_to_be_missing(
    hosts: Hosts, tmp_path: Path, followers: list[Follower]
) -> None:
    runtime = await hosts.open([final()], start=False)
    await runtime.create_session(KEY, "agent")
    follower = await Follower.begin(tmp_path, SESSION, "--previews")
    followers.append(follower)
    await follower.until(lambda line: "thread.created" in line)

    _, said = await follower.interrupt()

    assert said.splitlines()[0] == "text on its way is shown on a terminal, or with --json"


# ------------------------------------------------------------ what is on its way


def started(attempt: int = 1) -> PreviewStarted:
    return PreviewStarted("message", "main", "t1", "t1.r1", attempt)


def fact(event: str, /, **data: Any) -> Committed:
    return Committed(PublicEvent(type=event, session=KEY, sequence=7, at_ms=0, data=data, turn_id="t1"))


def says(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


COMPLETED = fact("message.completed", messageId="t1.r1", role="assistant", content=says("Hello"))
APPROVAL = {"status": "WAITING", "waitingOn": [{"kind": "approval"}]}


def test_previews_are_lines_of_their_own_and_have_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _Lines()
    delta = EventDelta("message", "main", "t1", "t1.r1", 1, 0, "Hel")
    call = EventDelta("tool_arguments", "main", "t1", "t1.r1", 1, 0, "{", call_id="c1")
    snapshot = SnapshotReset(SnapshotView(session=KEY, cursor="e1-x-9", projection=Projection()))
    for event in (started(), delta, PreviewStarted("tool_arguments", "main", "t1", "t1.r1", 1, "c1", "t"), call):
        lines.take(event)
    assert lines.cursor is None
    lines.take(COMPLETED)
    lines.take(snapshot)

    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[1] == {
        "type": "preview.delta", "kind": "message", "threadId": "main", "turnId": "t1", "messageId": "t1.r1",
        "attempt": 1, "offset": 0, "text": "Hel",
    }  # fmt: skip
    assert [event["type"] for event in told] == [
        "preview.started", "preview.delta", "preview.started", "preview.delta", "event", "reset",
    ]  # fmt: skip
    assert (told[2]["callId"], told[2]["name"]) == ("c1", "t")
    assert told[5]["cursor"] == lines.cursor == "e1-x-9"


def on_a_terminal(pieces: list[str], *, columns: int = 80, lines: int = 24) -> str:
    """What a process writes to its terminal that is shown a message in pieces, and then its fact."""
    program = (
        "import tests.cli.test_follow as t\n"
        "from agentscope_durable.contracts.events import EventDelta\n"
        "screen, offset = t._Screen(), 0\n"
        "with screen.open():\n"
        "    screen.take(t.started())\n"
        f"    for text in {pieces!r}:\n"
        "        screen.take(EventDelta('message', 'main', 't1', 't1.r1', 1, offset, text))\n"
        "        offset += len(text)\n"
        "    screen.take(t.COMPLETED)\n"
        "assert screen.cursor == t.COMPLETED.cursor\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        size = environment(TERM="xterm", COLUMNS=str(columns), LINES=str(lines))
        os.execve(sys.executable, [sys.executable, "-c", program], size)
    said = b""
    with suppress(OSError):
        while piece := os.read(terminal, 65536):
            said += piece
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    assert status == 0, said.decode()
    return said.decode()


def test_text_on_its_way_that_is_longer_than_a_line_is_folded_and_its_end_is_shown() -> None:
    words = [f"word{number} " for number in range(60)]

    frames = on_a_terminal(words, columns=40, lines=6).split("\x1b[2m… t1.r1: ")

    for number, frame in enumerate(frames[1:]):
        assert f"word{number}" in frame, "each word is seen when it has come"
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frames[-1].partition("\x1b[2K")[0]).split("\r\n")
    assert len(last) <= 5 and all(len(line) <= 40 for line in last), last


def test_on_a_terminal_text_on_its_way_is_drawn_over_and_gone_when_its_fact_is_there() -> None:
    """In a process with a terminal: what remains on the screen is facts alone."""
    text = on_a_terminal(["Hel", "lo, ter", "minal\x1b[31m"])

    assert "… t1.r1: Hello, terminal\\x1b[31m" in text and "\x1b[31m" not in text
    assert "\x1b[2K" in text, "the preview was drawn over"
    assert "message.completed t1 assistant: Hello" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_without_a_terminal_there_is_nothing_to_draw_over(capsys: pytest.CaptureFixture[str]) -> None:
    screen = _Screen()
    with screen.open():
        screen.take(started())
        screen.take(EventDelta("message", "main", "t1", "t1.r1", 1, 0, "Hel"))
        screen.take(COMPLETED)
        screen.take(SnapshotReset(SnapshotView(session=KEY, cursor="e1-x-9", projection=Projection())))

    out = capsys.readouterr().out
    assert "Hello" in out and "…" not in out
    assert "no longer kept" in out and screen.cursor == "e1-x-9"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (fact("turn.status", turn=APPROVAL), "WAITING waits for approval"),
        (fact("turn.status", turn={"status": "FAILED", "error": {"kind": "E", "message": "m"}}), "FAILED E: m"),
        (fact("message.completed", role="user", content=[{"type": "image"}, *says("a")]), "user: [image]a"),
        (fact("tool.completed", name="t", state="COMPLETED", callId="c1"), "t COMPLETED c1"),
        (fact("interaction.requested", kind="APPROVAL", name="t", interactionId="i1"), "APPROVAL t i1"),
        (fact("run.ended", status="LOST"), "LOST"),
        (fact("signal.expired", requestId="r1", operation="steer", reason="over"), "steer r1 over"),
        (fact("x.app.progress", value={"at": 1}), '{"value":{"at":1}}'),
        (fact("session.closed"), ""),
        (fact("message.completed", role="user", content=says("x" * 500)), "user: " + "x" * 113 + "…"),
    ],
)
def test_an_event_in_a_few_words(event: Committed, said: str) -> None:
    assert summary(event.event) == said


async def test_a_follower_outlives_the_folder_being_opened_and_closed(
    tmp_path: Path, followers: list[Follower]
) -> None:
    """Nobody is there, then somebody is, then nobody: between them the log of the file comes and goes."""

    async def submit(number: int) -> str:
        definition = Definition("agent", "v1", "state-1")
        async with (
            LocalBackend.open(tmp_path) as backend,
            DurableRuntime(backend=backend, definitions=[definition]) as runtime,
        ):
            session = await runtime.create_session(SessionKey("app", "c1"), "agent")
            return (await session.submit(f"r{number}", "go")).turn_id

    await submit(0)
    follower = await Follower.begin(tmp_path, SESSION, "--json")
    followers.append(follower)
    for number in range(1, 4):
        turn_id = await submit(number)
        await follower.until(lambda line, turn_id=turn_id: turn_id in line and "QUEUED" in line)

    await until(lambda: not (tmp_path / "durable.db-wal").exists())
    sequences = [event["event"]["sequence"] for event in follower.events]
    assert sequences == list(range(1, len(sequences) + 1))
