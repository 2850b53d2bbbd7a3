"""C23: long operations sent no heartbeat, so they lost their lease and a cancel could not reach them.

The part of it that is about observers: callbacks that last for many lease periods hold up neither lease nor cancel.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agentscope_durable.contracts.options import EventStreamOptions
from agentscope_durable.contracts.status import RunStatus, TurnStatus
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, turn_is, until

LEASE = 0.6
"""Seconds: a host renews it every third of them, and the store's clock is moved by nearly as much after each."""
PERIODS = 4


@pytest.mark.case("C23")
@pytest.mark.spec("ST-15", "ST-09", "TM-09")
async def test_observers_that_never_come_back_cost_no_lease_and_delay_no_cancel(
    hosts: Hosts, clock: ManualClock
) -> None:
    gates, go_on, go_on_there = Gates(), asyncio.Event(), threading.Event()
    script = [say("one"), Stall(gate="g"), final("never")]
    runtime = await hosts.open(ScriptedHarness(script, gates=gates), lease=LEASE, host_name="busy")
    session = await runtime.create_session(KEY, "agent")
    begun: list[str] = []

    async def waits(item: Any) -> None:
        begun.append("waits")
        await go_on.wait()

    def blocks(item: Any) -> None:
        begun.append("blocks")
        assert go_on_there.wait(SECONDS)

    def fails(item: Any) -> None:
        raise RuntimeError("again and again")

    for listener in (waits, blocks, fails, waits, blocks, fails):
        session.subscribe_events(EventStreamOptions.defaults(), listener)
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    await until(lambda: len(begun) == 2)
    # Another host waits for its death.
    other = await hosts.open(ScriptedHarness(script, gates=gates), lease=LEASE, host_name="other")
    for _ in range(PERIODS):
        for one in (runtime, other):
            # The second one is dated after the clock was moved: the first may have been under way then.
            for _ in range(2):
                renewed_at = one._heartbeat.last_renewal
                await until(lambda one=one, renewed_at=renewed_at: one._heartbeat.last_renewal > renewed_at)
        clock.advance(int(LEASE * 900))
    view = await turn.status()
    assert view.status is TurnStatus.RUNNING
    assert view.lease is not None and view.lease.alive

    await turn.cancel("c1")
    await turn_is(turn, "CANCELLED")
    assert len(begun) == 2
    (run,) = await turn.list_runs()
    assert (run.owner, run.status) == (runtime.owner, RunStatus.CANCELLED)
    go_on.set()
    go_on_there.set()
