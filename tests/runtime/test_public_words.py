"""What applications see, and what they never need."""

from __future__ import annotations

import ast
import inspect
import typing
from pathlib import Path

import msgspec
import pytest

import agentscope_durable
from agentscope_durable import contracts
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Reads
from agentscope_durable.contracts.events import Committed, EventDelta, PreviewStarted, SessionStreamEvent, SnapshotReset
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.contracts.questions import LoadThread
from agentscope_durable.contracts.records import TurnRecord, decode
from agentscope_durable.contracts.status import Audience
from agentscope_durable.runtime.handles import DurableSession, DurableThread, DurableTurn
from agentscope_durable.testing.scripted_harness import final, say, think
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events

ROOT = Path(agentscope_durable.__file__).parent


@pytest.mark.spec("EV-27", "ST-01")
def test_both_kinds_of_event_come_in_one_closed_union() -> None:
    assert set(typing.get_args(SessionStreamEvent)) == {Committed, PreviewStarted, EventDelta, SnapshotReset}


@pytest.mark.spec("ST-02", "EV-02")
def test_only_a_committed_event_has_a_cursor_and_a_number() -> None:
    for preview in (PreviewStarted, EventDelta, SnapshotReset):
        assert not hasattr(preview, "cursor")
        assert "sequence" not in preview.__struct_fields__


@pytest.mark.spec("EV-24")
@pytest.mark.parametrize("handle", [DurableSession, DurableThread, DurableTurn])
def test_no_handle_speaks_of_native_or_journal_events(handle: type) -> None:
    for name, method in inspect.getmembers(handle, inspect.isfunction):
        if name.startswith("_"):
            continue
        words = str(inspect.signature(method))
        assert "Journal" not in words and "AgentEvent" not in words, f"{handle.__name__}.{name}{words}"
    assert not [name for name in agentscope_durable.__all__ if "Journal" in name or name.startswith("Native")]


@pytest.mark.spec("PT-01")
def test_the_public_words_live_in_contracts_and_are_one_import_away() -> None:
    homes = {
        inspect.getmodule(getattr(agentscope_durable, name)).__name__.split(".")[1]  # type: ignore[union-attr]
        for name in ("SessionKey", "TurnView", "Message", "TurnStatus", "RunView", "CommandReceipt")
    }

    assert homes == {contracts.__name__.split(".")[1]}


@pytest.mark.spec("TF-02", "TJ-41")
def test_the_native_journal_knows_no_durable_runtime() -> None:
    rooms: set[str] = set()
    for file in (ROOT / "journal").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("agentscope_durable."):
                rooms.add((node.module or "").split(".")[1])

    assert rooms <= {"contracts", "spi", "journal"}


@pytest.mark.spec("RT-52")
def test_the_core_loads_no_adapter_and_no_agent_library() -> None:
    for room in ("contracts", "domain", "spi", "backend", "runtime", "executors"):
        for file in (ROOT / room).glob("*.py"):
            text = file.read_text()
            assert "agentscope_durable.adapters" not in text, file
            assert "import agentscope\n" not in text and "from agentscope." not in text, file


@pytest.mark.spec("EV-02", "EV-10", "EV-03")
async def test_previews_are_seen_by_who_is_there_and_by_nobody_later(hosts: Hosts) -> None:
    host = await hosts.open([say("one two three"), final("the end")])
    session = await host.create_session(KEY, "agent")

    async with session.stream_events(deltas={EventDeltaType.MESSAGE}) as events:
        turn = await session.submit("r1", "go")
        seen = []
        async for event in events:
            seen.append(event)
            if (
                isinstance(event, Committed)
                and event.event.type == "turn.status"
                and event.event.data["turn"]["status"] == "COMPLETED"
            ):
                break
    await turn.wait(SECONDS)

    assert any(isinstance(event, EventDelta) for event in seen)
    stored = await all_events(session)
    assert [event.sequence for event in stored] == [
        event.event.sequence for event in seen if isinstance(event, Committed)
    ]
    assert not [event for event in stored if event.type in ("message.delta", "tool.arguments.delta")]
    async with session.stream_events(deltas={EventDeltaType.MESSAGE}) as events:
        async for event in events:
            assert isinstance(event, Committed)
            if event.event.sequence == stored[-1].sequence:
                break
    history = (await session.history()).items
    assert [message.text for message in history] == ["go", "one two three", "the end"]


@pytest.mark.spec("MG-05", "EV-11")
async def test_the_result_is_a_public_message_without_native_reasoning(hosts: Hosts) -> None:
    host = await hosts.open([think("a private thought"), final("the answer")])
    session = await host.create_session(KEY, "agent")
    seen: list[object] = []
    async with session.stream_events(deltas=set(EventDeltaType)) as events:
        turn = await session.submit("r1", "go")
        result = await turn.wait(SECONDS)
        last = (await all_events(session))[-1].sequence
        async for event in events:
            seen.append(event)
            if isinstance(event, Committed) and event.event.sequence == last:
                break

    assert isinstance(result, Message)
    assert result.text == "the answer"
    # The thought is stored, with the agent's state, and stands in nothing that anybody is shown. As JSON: a repr
    # shows no content at all.
    first, last_at = await native_rows(hosts, turn)
    stored = await hosts.backend.query(
        LoadThread(session=KEY, thread_id="main", first=first, last=last_at), audience=Audience.HOST
    )
    assert any(b"a private thought" in row.journal for row in stored)
    shown: list[object] = [result, *seen, *await all_events(session), *(await session.history()).items]
    shown += [await session.snapshot(), await turn.snapshot(), await turn.status(), await turn.list_tools()]
    for run in await turn.list_runs():
        shown += [*(await turn.list_steps(run.run_id)).items, *(await turn.list_model_calls(run.run_id)).items]
    assert len(shown) > 20
    assert "the answer" in msgspec.json.encode(shown).decode()
    assert "private" not in msgspec.json.encode(shown).decode()


async def native_rows(hosts: Hosts, turn: DurableTurn) -> tuple[int, int]:
    """Stream positions of a Turn's first and last commit."""
    record = await hosts.backend.records.read(keys.partition(KEY), Reads(keys=(keys.turn(turn.turn_id),)))
    found = decode(TurnRecord, record.keys[keys.turn(turn.turn_id)])
    return found.first_at, found.last_at
