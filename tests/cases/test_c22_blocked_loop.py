"""C22: a synchronous call blocked the event loop, heartbeats stopped, and a healthy run was declared dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from agentscope_durable.contracts.status import ExecutionState, RunStatus, WaitKind
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, final, local
from tests.cases.programs import job_of, opening
from tests.census.forks import ForkServer
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, turn_is, until

LEASE = 0.8
"""Seconds. The shortest that a loaded machine keeps; the cases last some of these, by the real clock."""


@pytest.mark.case("C22")
@pytest.mark.spec("TM-09")
@pytest.mark.backend("sqlite")
async def test_a_host_whose_loop_is_blocked_keeps_its_work(forks: ForkServer, tmp_path: Path) -> None:
    """On SQLite alone: to a server a renewal takes longer than this lease when the machine is busy."""
    job = {**job_of("sqlite", tmp_path), "lease": LEASE, "seconds": 3 * LEASE}
    blocked = asyncio.create_task(asyncio.to_thread(forks.run, "tests.cases.programs:block_the_loop", job))
    await until((tmp_path / "held").exists)

    ledger = EffectLedger(tmp_path / "effects")
    harness = ScriptedHarness([local("hold"), final("{results}")], ledger=ledger)
    async with opening(job) as store:
        other = DurableRuntime(
            backend=store, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.02, lease=LEASE
        )
        async with other:
            await other.start()
            ended = await blocked
            assert ended.code == 0, ended.output

    assert ledger.count("tool") == 1
    (owner,) = json.loads(ended.output.splitlines()[-1])["runs"]
    assert owner.startswith("blocked-")
    assert "the event loop was blocked for" in ended.output


@pytest.mark.case("C22")
@pytest.mark.spec("RC-02")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_a_host_that_could_not_even_renew_is_refused_and_tells_what_it_knows(
    forks: ForkServer, tmp_path: Path, backend: str
) -> None:
    """SIGSTOP is C code that holds everything: no thread renews. Its process lives on, so only the lease can tell."""
    job = {**job_of(backend, tmp_path), "lease": LEASE}
    first = asyncio.create_task(asyncio.to_thread(forks.run, "tests.cases.programs:work_to_a_gate", job))
    await until((tmp_path / "gate.reached").exists)
    frozen = int((tmp_path / "pid").read_text())
    os.kill(frozen, signal.SIGSTOP)
    try:
        ledger = EffectLedger(tmp_path / "effects")
        harness = ScriptedHarness([local("pay", gate="gate"), final("{results}")], ledger=ledger, gates=Gates(tmp_path))
        async with opening(job) as store:
            second = DurableRuntime(
                backend=store, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.02, lease=LEASE
            )
            async with second:
                session = second.get_session(KEY)
                (view,) = await session.list_turns()
                turn = session.get_turn(view.turn_id)
                await second.start()
                # A payment that was started and whose outcome nobody here knows.
                view = await turn_is(turn, "WAITING")
                assert [waiting.kind for waiting in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]

                # The old owner wakes up and finishes its tool. It may not commit; what it knows is taken as a fact.
                Gates(tmp_path).open("gate")
                os.kill(frozen, signal.SIGCONT)
                await turn_is(turn, "COMPLETED")
                (call,) = await turn.list_tools()
                assert (call.state, call.result["value"]) == (ExecutionState.COMPLETED, "ok")
                runs = list(await turn.list_runs())
                assert (runs[0].status, runs[0].owner[:6]) == (RunStatus.LOST, "first-")
                # Who runs the rest is whoever is faster: the old host lives again.
                assert {run.owner for run in runs} <= {runs[0].owner, second.owner}
    finally:
        # It may have ended as soon as it heard of the end of the Turn.
        with contextlib.suppress(ProcessLookupError):
            os.kill(frozen, signal.SIGCONT)
    ended = await first
    assert ended.code == 0, ended.output
    assert ledger.count("tool") == 1
