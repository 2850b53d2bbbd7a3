"""C21: clean-up stopped the heartbeat first, so work that was still finishing was taken over."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, final, local
from tests.runtime.conftest import KEY, Hosts, turn_is, until

LEASE = 0.5


@pytest.mark.case("C21")
async def test_a_draining_host_renews_until_its_last_work_is_committed(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([local("long", gate="long"), final("{results}")], gates=gates)
    first = await hosts.open(harness, lease=LEASE)
    second = await hosts.open(harness, start=False, lease=LEASE, poll_interval=0.02)
    session = await first.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await gates.reached("long")
    await second.start()
    began = time.monotonic()

    draining = asyncio.create_task(first.drain(timeout=30))
    await until(lambda: time.monotonic() - began > 3 * LEASE)
    view = await turn.status()
    assert view.lease is not None and view.lease.alive and view.lease.owner == first.owner
    assert view.lease.age_ms < LEASE * 1000
    assert not draining.done()
    gates.open("long")
    assert await draining

    await turn_is(turn, "COMPLETED")
    assert [run.owner for run in await turn.list_runs()] == [first.owner]
    assert harness.ledger.count("tool") == 1
