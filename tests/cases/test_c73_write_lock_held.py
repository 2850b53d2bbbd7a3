"""C73: the lock error was retried in the body and not in the read before it; a big write held the lock too long."""

from __future__ import annotations

import asyncio
from pathlib import Path

import apsw
import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import Retry, StoreBusy
from agentscope_durable.contracts.status import RunStatus
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, local
from tests.runtime.conftest import KEY, refused, turn_is

BUSY = 0.3
"""Seconds a statement waits for the lock before it is refused."""


def held(folder: Path) -> apsw.Connection:
    """Another program that has begun to write and does not end."""
    connection = apsw.Connection(str(folder / "durable.db"))
    connection.execute("begin immediate")
    connection.execute("create table somebody_elses(x)")
    return connection


@pytest.mark.case("C73")
@pytest.mark.backend("sqlite")
async def test_a_lock_within_the_budget_is_waited_for(tmp_path: Path) -> None:
    async with LocalBackend.open(tmp_path, busy_timeout=20) as backend:
        runtime = DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness([local("act"), final()]))]
        )
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            other = held(tmp_path)
            submitting = asyncio.create_task(session.submit("r1", "go"))
            done, _ = await asyncio.wait({submitting}, timeout=2 * BUSY)
            assert not done
            other.execute("rollback")
            turn = await submitting
            assert await turn.wait(30) is not None


@pytest.mark.case("C73")
@pytest.mark.backend("sqlite")
async def test_beyond_the_budget_it_is_a_typed_error_and_no_turn_fails_of_it(tmp_path: Path) -> None:
    gates = Gates()
    harness = ScriptedHarness([Stall(gate="in hand"), local("act"), final("{results}")], gates=gates)
    async with LocalBackend.open(tmp_path, busy_timeout=BUSY) as backend:
        runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05)
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            turn = await session.submit("r1", "go")
            await gates.reached("in hand")

            other = held(tmp_path)
            error = await refused(session.submit("r2", "go"), StoreBusy)
            assert isinstance(error, Retry)
            assert await session.history() is not None  # Reading goes on meanwhile.
            # The Run wants to commit now, meets the lock a few times over, and goes on when it is gone.
            gates.open("in hand")
            await refused(session.submit("r2", "go"), StoreBusy)
            await refused(session.submit("r2", "go"), StoreBusy)
            other.execute("rollback")

            await turn_is(turn, "COMPLETED")
            assert [run.status for run in await turn.list_runs()] == [RunStatus.COMPLETED]
            assert (await turn.status()).recovery is None
            assert harness.ledger.count("tool") == 1
            again = await session.submit("r2", "go")
            await turn_is(again, "COMPLETED")
            assert len(await session.list_turns()) == 2
