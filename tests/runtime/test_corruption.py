"""What is stored is checked before it is used, and what cannot be read is left as it is."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from msgspec.structs import replace

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Reads
from agentscope_durable.contracts.errors import DigestMismatch
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import LoadThread
from agentscope_durable.contracts.records import ThreadRecord, decode
from agentscope_durable.contracts.status import Audience, RunStatus, TurnStatus, WaitKind
from agentscope_durable.domain.frame import chained
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import STATE_VERSION, WRITER, ScriptedHarness, approval, final, think

KEY = SessionKey("app", "corrupted")
SCRIPT = (think("first"), approval("deploy"), final("done"))


async def waits_for(turn: object, kind: WaitKind) -> None:
    async with turn.stream_events() as events:  # type: ignore[attr-defined]
        async for _ in events:
            view = await turn.status()  # type: ignore[attr-defined]
            if any(waiting.kind is kind for waiting in view.waiting_on):
                return


def damage(database: Path) -> bytes:
    """Flip one character in the newest native block; returns the bytes as they are now."""
    connection = apsw.Connection(str(database))
    row, block = connection.execute(
        "select rowid, journal from log where journal is not null order by rowid desc limit 1"
    ).fetchone()
    changed = bytes(block)[:-3] + b" " + bytes(block)[-3:]
    connection.execute("update log set journal=? where rowid=?", (changed, row))
    connection.close()
    return changed


def newest_block(database: Path) -> bytes:
    connection = apsw.Connection(str(database))
    [(block,)] = connection.execute(
        "select journal from log where journal is not null order by rowid desc limit 1"
    ).fetchall()
    connection.close()
    return bytes(block)


@pytest.mark.case("C61")
@pytest.mark.spec("BE-20", "BE-21")
async def test_a_native_block_that_was_altered_is_not_restored_and_not_thrown_away(tmp_path: Path) -> None:
    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    async with (
        LocalBackend.open(tmp_path) as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime,
    ):
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        await waits_for(turn, WaitKind.APPROVAL)
    stored = damage(tmp_path / "durable.db")

    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    async with (
        LocalBackend.open(tmp_path) as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime,
    ):
        await runtime.start()
        turn = runtime.get_session(KEY).get_turn(turn.turn_id)
        [asked] = await turn.pending_interactions()
        await turn.respond("r2", asked.interaction_id, True)
        await waits_for(turn, WaitKind.OPERATOR)

        view = await turn.status()
        runs = (await turn.list_runs()).items
        assert view.status is TurnStatus.WAITING
        reason = next(w.next_action for w in view.waiting_on if w.kind is WaitKind.OPERATOR)
        assert "DigestMismatch" in reason
        assert runs[-1].status is RunStatus.SUSPENDED
        assert newest_block(tmp_path / "durable.db") == stored

        # The operator may let it try again; it is still not thrown away.
        await HostOperations(backend).release(turn, request_id="op1")
        await waits_for(turn, WaitKind.OPERATOR)
        assert newest_block(tmp_path / "durable.db") == stored


@pytest.mark.spec("BE-20")
async def test_with_the_native_state_stands_what_it_is_and_what_it_must_add_up_to(tmp_path: Path) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((think("first"), think("second"), final("done"))))
    async with (
        LocalBackend.open(tmp_path) as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime,
    ):
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        await session.call("r1", "go", timeout=90)
        key = keys.thread("main")
        found = (await backend.records.read(keys.partition(KEY), Reads(keys=(key,)))).keys[key]
        frame = decode(ThreadRecord, found)
        binding = frame.binding
        assert (binding.harness, binding.definition_version, binding.state_version) == ("agent", "v1", STATE_VERSION)
        assert frame.writer == WRITER
        assert 0 < frame.base_at <= frame.checkpoint_at <= frame.position

        # The digest is of the native blocks from the base to the checkpoint, and of nothing else.
        question = LoadThread(session=KEY, thread_id="main", first=frame.base_at, last=frame.checkpoint_at)
        digest = ""
        for row in await backend.query(question, audience=Audience.HOST):
            digest = chained(digest, row.journal)
        assert digest == frame.digest != ""
        with pytest.raises(DigestMismatch):
            await backend.query(replace(question, digest="0" * 64), audience=Audience.HOST)
        # What a position is called outside is a text of its own.
        [settled] = await session.main_thread().checkpoints()
        assert isinstance(settled.position, str)
