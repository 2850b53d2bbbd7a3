"""C01: an unrelated signal woke a run whose step was still executing, and the step was started again."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.errors import NotFound
from agentscope_durable.contracts.keys import READY_TURN, partition
from agentscope_durable.contracts.records import Binding
from agentscope_durable.domain.change import ready_hint, session_hint
from agentscope_durable.testing.scripted_harness import STATE_VERSION, Gates, ScriptedHarness, final, local
from tests.runtime.conftest import KEY, Hosts, all_events, refused, turn_is

STIMULI = 50
CLASS = Binding("agent", "v1", STATE_VERSION).ready_class


@pytest.mark.case("C01")
async def test_a_tool_that_is_executing_is_not_started_again_by_whatever_else_happens(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([local("charge", gate="paid"), final("{results} {inputs}")], gates=gates)
    runtime = await hosts.open(harness)
    other = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay")
    await gates.reached("paid")

    for number in range(STIMULI):
        await turn.steer(f"steer-{number}", "hurry")
        if number % 5 == 0:
            await turn.inject(f"inject-{number}", "a note")
            await refused(turn.respond(f"answer-{number}", "no-such-question", True), NotFound)
            await session.submit("r1", "pay")
        hosts.backend.wakeups().publish((session_hint(partition(KEY)), ready_hint(READY_TURN, CLASS), "*"))
        await runtime.start()
        await other.start()
    runs = list(await turn.list_runs())
    gates.open("paid")
    await turn_is(turn, "COMPLETED")

    assert len(runs) == len(await turn.list_runs()) == 1
    assert harness.ledger.count("tool") == 1
    events = [event.type for event in await all_events(turn)]
    assert events.count("tool.completed") == events.count("tool.applied") == 1
    assert "hurry" in str(await turn.result())
