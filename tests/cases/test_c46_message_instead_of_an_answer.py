"""C46: somebody sent an ordinary message while an approval was open, and the approval was used up or asked again."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, turn_is


@pytest.mark.case("C46")
@pytest.mark.spec("Q-02", "IN-01")
async def test_a_submit_queues_behind_and_a_steer_is_held_while_an_approval_is_open(hosts: Hosts) -> None:
    ran: list[int] = []
    harness = ScriptedHarness(
        [approval("pay", amount=1), final("paid, then: {inputs}")], tools={"pay": lambda amount: ran.append(amount)}
    )
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay")
    await turn_is(turn, "WAITING")
    [question] = await turn.pending_interactions()

    behind = await session.submit("r2", "and another thing")
    await turn.steer("s1", "hurry")
    # Whatever comes of them must have come when a later command was admitted.
    await turn.inject("i1", "by the way")

    view = await behind.status()
    assert view.status is TurnStatus.QUEUED
    assert turn.turn_id in str(await behind.explain()), "whoever looks is told what it stands behind"
    view = await turn.status()
    assert (view.status, view.pending_inputs) == (TurnStatus.WAITING, 2)
    assert [(waiting.kind, waiting.id) for waiting in view.waiting_on] == [(WaitKind.APPROVAL, question.interaction_id)]
    assert await turn.pending_interactions() == [question]
    assert ran == []

    await turn.respond("a1", question.interaction_id, True)
    answer = str(await turn.wait(SECONDS))
    assert "hurry" in answer
    [second] = (await turn_is(behind, "WAITING")).waiting_on
    assert second.id != question.interaction_id, "the next Turn asks for itself"
    asked = [event for event in await all_events(turn) if event.type == "interaction.requested"]
    assert len(asked) == 1
    assert ran == [1]
