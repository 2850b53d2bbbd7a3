"""C18: after recovery the run sat between two finished steps, and everything behind it waited, with no error shown."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.status import RunStatus, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, Hosts, kill, turn_is

LEASE = 30.0


@pytest.mark.case("C18")
@pytest.mark.spec("RC-01")
async def test_a_turn_lost_between_steps_goes_on_and_so_do_those_behind_it(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    script = [say("one"), say("two"), Stall(gate="between"), say("three"), Stall(gate="later"), final()]
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

    # Recovered, and held between two steps: the host that has it now is seen within one period, and nobody behind it.
    operations = HostOperations(hosts.backend)
    gates.forget("between")
    second = await hosts.open(ScriptedHarness({"T1": script, "": [final()]}, gates=gates), lease=LEASE)
    await gates.reached("between")
    assert (await operations.watchdog(LEASE)).owned == 0
    for period in range(1, 11):
        clock.advance(int(LEASE * 1000))
        # For the thread that renews no time has passed.
        hosts.backend.records.renew(second.owner, int(LEASE * 1000), b"")
        watched = await operations.watchdog(LEASE)
        assert (watched.owned, watched.unclaimed, watched.age_max_ms) == (1, 0, period * LEASE * 1000)
        (stall,) = (await operations.stalled(LEASE)).items
        assert (stall.turn_id, stall.owner, stall.alive) == (turns[0].turn_id, second.owner, True)

    # It advances by one step, and shows no more.
    gates.open("between")
    await gates.reached("later")
    watched = await operations.watchdog(LEASE)
    assert (watched.owned, watched.unclaimed, watched.age_max_ms) == (0, 0, 0)
    gates.open("later")
    session = second.get_session(KEY)
    for turn in turns:
        await turn_is(session.get_turn(turn.turn_id), "COMPLETED")

    runs = list(await session.get_turn(turns[0].turn_id).list_runs())
    assert [run.status for run in runs] == [RunStatus.LOST, RunStatus.COMPLETED]
    assert runs[1].resumed_from_step_id is not None
    said = [message.text for message in await session.history() if message.role == "assistant"]
    assert said == ["one", "two", "three", "done", "done", "done", "done", "done"]
