"""Settled states of AgentScope agents: restored and forked without an agent, refused when they cannot be continued."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("agentscope")

from agentscope.message import AssistantMsg, TextBlock, UserMsg
from agentscope.state import AgentState
from msgspec.structs import replace

from agentscope_durable.adapters.agentscope import (
    STATE_VERSION,
    AgentScopeCheckpointCodec,
    AgentScopeCheckpoints,
)
from agentscope_durable.adapters.agentscope.checkpoint import CheckpointWriter
from agentscope_durable.assembly import LocalBackend, MemoryBackend
from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.commands import Claim, Claimed, CommitStep, CreateSession, RunEnd, RunEndKind
from agentscope_durable.contracts.errors import CorruptRecord, DurableError, Incompatible
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.journal import Base, Block, CheckpointRow, Field, JournalBatch, MessageMeta
from agentscope_durable.contracts.questions import LoadCheckpoint, LoadThread
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import Audience
from agentscope_durable.journal.checkpoint import fold, to_state_json
from agentscope_durable.journal.position import POSITION_FIELD
from agentscope_durable.runtime.runtime import Definition, DurableRuntime, Harness
from agentscope_durable.spi.checkpoint import JournalRow, NativeBaseline
from agentscope_durable.testing.scripted_model import Call
from tests.adapters.agentscope.agents import Agents, tool

SOURCE = Path(__file__).resolve().parents[3] / "src"
KEY = ThreadKey(SessionKey("app", "c1"), "main")
OTHER = ThreadKey(SessionKey("app", "c2"), "branch")
BINDING = Binding("assistant", "v1", STATE_VERSION)
SECRET = "the code is 4711"


def agents(folder: Path) -> Agents:
    """An agent that calls a tool and then tells how many messages it was given."""

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if any(block.type == "tool_result" for block in messages[-1].content):
            return f"I was given {len(messages)} messages."
        return ["Let me see.", Call("look", {"at": "it"})]

    async def look(at: str) -> str:
        """Look."""
        return f"{at} is fine. " * 40

    return Agents(folder, script, tools=lambda: [tool(look, is_read_only=True)])


async def conversation(backend: Any, made: Agents, turns: int = 3) -> list[str]:
    """A Session after some Turns; its settled positions."""
    harness = Harness("assistant", "v1", made.adapter())
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        session = await runtime.create_session(KEY.session, "assistant")
        await runtime.start()
        for number in range(turns):
            await session.call(f"r{number}", f"question {number}", timeout=90)
        return [checkpoint.position for checkpoint in await session.main_thread().checkpoints()]


async def rows_at(backend: Any, thread: ThreadKey, position: str) -> list[JournalRow]:
    at = stream_position(thread, position)
    where = {"session": thread.session, "thread_id": thread.thread_id}
    stored = await backend.query(LoadCheckpoint(**where, at=at), audience=Audience.HOST)
    return await backend.query(
        LoadThread(**where, first=stored.base_at, last=at, digest=stored.digest), audience=Audience.HOST
    )


def state_of(rows: Sequence[JournalRow]) -> dict[str, Any]:
    """The agent's state as JSON, and where execution stands under its own name."""
    return json.loads(to_state_json(fold((row.at, JournalBatch.decode(row.journal, position=row.at)) for row in rows)))


def native(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != POSITION_FIELD}


def baseline(rows: Sequence[JournalRow] | Sequence[CheckpointRow], **fields: Any) -> NativeBaseline:
    stored = [row for row in rows if isinstance(row, JournalRow)]
    if not stored:
        stored = [JournalRow(1, JournalBatch(0, (), tuple(rows), base=True).encode())]  # type: ignore[arg-type]
    return NativeBaseline(
        **{"source": KEY, "target": KEY, "binding": BINDING, "writer": "2.0.11", "rows": tuple(stored), **fields}
    )


def whole(state: Any) -> list[CheckpointRow]:
    return list(CheckpointWriter().base(state).rows)


# ---- what is restored ----


@pytest.mark.spec("CK-02", "CK-11")
@pytest.mark.case("C69")
async def test_each_position_restores_the_very_state_and_no_agent_is_built(tmp_path: Path) -> None:
    backend, made = MemoryBackend(), agents(tmp_path)
    positions = await conversation(backend, made)
    wanted = [native(state_of(await rows_at(backend, KEY, position))) for position in positions]
    built, requests = made.built, made.requests
    definition = Definition("assistant", "v1", AgentScopeCheckpointCodec.STATE_VERSION)
    async with DurableRuntime(
        backend=backend, definitions=[definition], checkpoints={"assistant": AgentScopeCheckpoints.restore}
    ) as api:
        thread = api.get_session(KEY.session).main_thread()
        current = positions[-1]
        for number in (0, 2, 1, 1, 0):
            restored = await thread.restore(positions[number], current, f"restore-{current}")
            current = restored.position
            rows = await rows_at(backend, KEY, current)
            assert native(state_of(rows)) == wanted[number]
            assert len(rows) == 1, "it begins an epoch of its own"
    assert (made.built, made.requests) == (built, requests)

    # The next Turn goes on with it: the agent is given what the first Turn left, and the new question.
    async with DurableRuntime(backend=backend, harnesses=[Harness("assistant", "v1", made.adapter())]) as runtime:
        await runtime.start()
        answer = await runtime.get_session(KEY.session).call("next", "and now?", timeout=90)
        # The system's, the two of the first Turn, the new question, and what was done about it.
        assert str(answer) == "I was given 5 messages."
        settled = (await runtime.get_session(KEY.session).main_thread().checkpoints()).current
    after = native(state_of(await rows_at(backend, KEY, settled)))
    assert after["context"][: len(wanted[0]["context"])] == wanted[0]["context"]


@pytest.mark.spec("CK-10")
async def test_a_fork_names_its_own_thread_and_nothing_else_is_changed(tmp_path: Path) -> None:
    backend, made = MemoryBackend(), agents(tmp_path)
    positions = await conversation(backend, made, 2)
    wanted = native(state_of(await rows_at(backend, KEY, positions[0])))
    async with DurableRuntime(backend=backend, harnesses=[Harness("assistant", "v1", made.adapter())]) as runtime:
        await runtime.create_session(OTHER.session, "assistant")
        branch = await runtime.get_session(KEY.session).main_thread().fork(positions[0], OTHER, "fork")
        [forked] = await branch.checkpoints()
        state = state_of(await rows_at(backend, OTHER, forked.position))
        assert native(state) == {**wanted, "session_id": "c2--branch"}
        assert wanted["session_id"] == "c1"
        # No Turn has begun on it; the agent's name stays, under which its calls are filed.
        assert (state[POSITION_FIELD]["turn"], state[POSITION_FIELD]["phase"]) == ("", "ready")
        assert state[POSITION_FIELD]["agent"] == "a"
        await runtime.start()
        assert await branch.call("r1", "and here?", timeout=90)


@pytest.mark.spec("CK-02")
@pytest.mark.parametrize("installed", [True, False])
async def test_a_host_without_models_or_even_without_agentscope_restores(tmp_path: Path, installed: bool) -> None:
    async with LocalBackend.open(tmp_path / "store") as backend:
        positions = await conversation(backend, agents(tmp_path), 2)
    hide = """
import importlib.metadata as m
real = m.version
def version(name):
    if name == "agentscope": raise m.PackageNotFoundError(name)
    return real(name)
m.version, sys.modules["agentscope"] = version, None
"""
    code = f"""
import asyncio, sys
{"" if installed else hide}
from agentscope_durable import DurableRuntime, LocalBackend, SessionKey
from agentscope_durable.adapters.agentscope import AgentScopeCheckpoints

async def main():
    async with LocalBackend.open({str(tmp_path / "store")!r}) as backend:
        checkpoints = {{"assistant": AgentScopeCheckpoints.restore}}
        async with DurableRuntime(backend=backend, checkpoints=checkpoints) as api:
            thread = api.get_session(SessionKey("app", "c1")).main_thread()
            print((await thread.restore({positions[0]!r}, {positions[1]!r}, "restore")).settled)

asyncio.run(main())
heavy = ("openai", "anthropic", "dashscope", "mcp", "starlette", "numpy")
loaded = sorted(m for m in sys.modules if m.split(".")[0] in heavy or m in ("agentscope.agent", "agentscope.model"))
assert not loaded, loaded
assert {installed} is bool(sys.modules.get("agentscope.state"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, "RESTORED"), done.stderr


# ---- what is refused ----


def damaged() -> dict[str, tuple[list[CheckpointRow], type[DurableError]]]:
    state = AgentState(session_id="c1", context=[UserMsg("user", [TextBlock(text=SECRET)])])
    good = whole(state)
    meta = next(i for i, row in enumerate(good) if isinstance(row, MessageMeta))

    def but(i: int, row: CheckpointRow) -> list[CheckpointRow]:
        return [*good[:i], row, *good[i + 1 :]]

    owner = next(i for i, row in enumerate(good) if isinstance(row, Field) and row.name == "session_id")
    reply = next(i for i, row in enumerate(good) if isinstance(row, Field) and row.name == "reply_context")
    return {
        "no owner": ([row for i, row in enumerate(good) if i != owner], CorruptRecord),
        "an owner that is no text": (but(owner, Field("session_id", None, msgspec.Raw(b"7"))), CorruptRecord),
        "a message without an id": (but(meta, MessageMeta(0, msgspec.Raw(b'{"name":"a"}'), 0)), CorruptRecord),
        "a block that is none": (but(meta + 1, Block(0, 0, msgspec.Raw(b'"4711"'))), CorruptRecord),
        "a block of a message that is not there": (but(meta + 1, Block(7, 0, msgspec.Raw(b"{}"))), CorruptRecord),
        "a position that is none": ([*good, Field(POSITION_FIELD, None, msgspec.Raw(b'{"phase":"?"}'))], CorruptRecord),
        "no state at all": ([Base()], CorruptRecord),
        "a block of a later release": (
            but(meta + 1, Block(0, 0, msgspec.Raw(b'{"type":"hologram","id":"1"}'))),
            Incompatible,
        ),
        "a field as it is in no release here": (
            but(reply, Field("reply_context", None, msgspec.Raw(b'{"cur_iter":"many"}'))),
            Incompatible,
        ),
    }


@pytest.mark.spec("CK-04", "CK-13")
@pytest.mark.parametrize("what", damaged())
def test_a_state_that_cannot_be_continued_is_refused(what: str) -> None:
    rows, error = damaged()[what]
    with pytest.raises(error) as refused:
        AgentScopeCheckpoints.restore(baseline(rows))
    assert "4711" not in f"{refused.value} {refused.value!r}", "an error shows no body"


@pytest.mark.spec("CK-04", "CK-13")
def test_another_state_version_is_incompatible() -> None:
    rows = whole(AgentState(session_id="c1"))
    with pytest.raises(Incompatible) as refused:
        AgentScopeCheckpoints.restore(baseline(rows, binding=replace(BINDING, state_version="agentscope-v3")))
    assert (refused.value.required, refused.value.present) == ("native state agentscope-v3", STATE_VERSION)


# ---- what it costs ----

MESSAGES = 2000
WORDS = "word " * 80


async def test_thousands_of_messages_are_restored_in_a_few_times_their_own_size(tmp_path: Path) -> None:
    """A long Turn: each message came with a commit of its own."""
    async with LocalBackend.open(tmp_path, synchronous="NORMAL") as backend:
        size = await _long_turn(backend)
        async with DurableRuntime(backend=backend, checkpoints={"assistant": AgentScopeCheckpoints.restore}) as api:
            thread = api.get_session(KEY.session).main_thread()
            [settled] = await thread.checkpoints()
            tracemalloc.start()
            try:
                restored = await thread.restore(settled.position, settled.position, "restore")
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
        assert peak < 4 * size, f"{peak / size:.1f} times the state"
        rows = await rows_at(backend, KEY, restored.position)
        assert len(rows) == 1
        assert len(state_of(rows)["context"]) == MESSAGES
        assert native(state_of(rows)) == native(state_of(await rows_at(backend, KEY, settled.position)))


async def _long_turn(backend: LocalBackend) -> int:
    """A Turn of MESSAGES commits; returns about how many bytes of JSON its state is."""
    from agentscope_durable.contracts.bodies import body_of
    from agentscope_durable.contracts.commands import SubmitTurn

    where = {"session": KEY.session, "thread_id": "main"}
    await backend.execute(CreateSession(session=KEY.session, binding=BINDING))
    await backend.execute(SubmitTurn(**where, request_id="r1", content=body_of([]), digest="d"))
    claim = Claim(**where, owner="host", served=(BINDING.ready_class,))
    claimed: Claimed = await backend.execute(claim, audience=Audience.HOST)
    state, writer = AgentState(session_id="c1"), CheckpointWriter()
    position, size = claimed.position, 0
    for number in range(MESSAGES):
        state.context.append(AssistantMsg("a", [TextBlock(text=f"{number} {WORDS}")]))
        delta = writer.delta(state)
        batch = JournalBatch(position, (), delta.rows, delta.base).encode()
        size += len(batch)
        receipt = await backend.execute(
            CommitStep(
                **where,
                turn_id=claimed.turn_id,
                run_id=claimed.run_id,
                fence=claimed.fence,
                expected_position=position,
                journal=batch,
                checkpoint=True,
                base=delta.base,
                writer="2.0.11",
                end=RunEnd(kind=RunEndKind.COMPLETED) if number == MESSAGES - 1 else None,
            ),
            audience=Audience.HOST,
        )
        position = receipt.position
    return size
