"""C18: after recovery the run sat between two finished steps, and everything behind it waited, with no error shown."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.status import RunStatus, TurnStatus, WaitKind
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, Hosts, kill, turn_is

LEASE = 30.0


@pytest.mark.case("C18")
@pytest.mark.spec("RC-01")
async def test_a_turn_lost_between_steps_goes_on_and_so_do_those_behind_it(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    script = [say("one"), say("two"), Stall(gate="between"), say("three"), final()]
    first = await hosts.open(ScriptedHarness({"T1": script, "": [final()]}, gates=gates), lease=LEASE)
    session = await first.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", f"T{number}") for number in range(1, 6)]
    await gates.reached("between")
    kill(first)

    # Nobody is there: the reason can be seen as soon as the lease is over, and the four behind wait for the first.
    clock.advance(int(LEASE * 1000) + 1)
    view = await (await hosts.open()).get_session(KEY).get_turn(turns[0].turn_id).status()
    assert (view.status, [waiting.kind for waiting in view.waiting_on]) == (TurnStatus.RUNNING, [WaitKind.HOST])
    assert view.lease is not None and not view.lease.alive

    gates.open("between")
    second = await hosts.open(ScriptedHarness({"T1": script, "": [final()]}, gates=gates), lease=LEASE)
    session = second.get_session(KEY)
    for turn in turns:
        await turn_is(session.get_turn(turn.turn_id), "COMPLETED")

    runs = list(await session.get_turn(turns[0].turn_id).list_runs())
    assert [run.status for run in runs] == [RunStatus.LOST, RunStatus.COMPLETED]
    assert runs[1].resumed_from_step_id is not None
    said = [message.text for message in await session.history() if message.role == "assistant"]
    assert said == ["one", "two", "three", "done", "done", "done", "done", "done"]
