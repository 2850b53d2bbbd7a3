"""C34: a turn whose next attempt was a day away could not be ended before that attempt."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.status import RunStatus, TurnStatus, WaitKind
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.testing.scripted_harness import Fail, ScriptedHarness, final
from tests.runtime.conftest import KEY, Hosts, turn_is

DAY_MS = 24 * 3_600_000


@pytest.mark.case("C34")
async def test_a_cancel_does_not_wait_for_the_next_attempt_and_makes_none(hosts: Hosts) -> None:
    policy = RecoveryPolicy(max_retries=3, initial_backoff_ms=DAY_MS, max_backoff_ms=DAY_MS)
    harness = ScriptedHarness({"T1": [Fail(kind="OSError"), final()], "": [final()]})
    runtime = await hosts.open(harness, recovery_policy=policy)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "T1")
    behind = await session.submit("r2", "T2")
    view = await turn_is(turn, "WAITING")
    (waiting,) = view.waiting_on
    assert waiting.kind is WaitKind.RETRY
    assert waiting.until_ms is not None and waiting.until_ms - waiting.since_ms > DAY_MS // 2

    await turn.cancel("stop")
    await turn_is(turn, "CANCELLED")
    await turn_is(behind, "COMPLETED")

    assert [run.status for run in await turn.list_runs()] == [RunStatus.FAILED]
    assert harness.ledger.count("model") == 1  # The second Turn's.
    assert (await turn.status()).status is TurnStatus.CANCELLED
