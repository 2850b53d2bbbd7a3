"""C43: a cancel looked for the open approval in the wrong place, and each later message was refused for ever."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.errors import Conflict, Terminal
from agentscope_durable.contracts.status import InteractionState
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final, manual, together
from tests.runtime.conftest import KEY, Hosts, all_events, turn_is


@pytest.mark.case("C43")
async def test_a_cancel_closes_the_question_and_lets_the_next_turn_start(hosts: Hosts) -> None:
    harness = ScriptedHarness({"T1": [together(approval("pay"), manual("sign")), final()], "": [final("next")]})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "T1")
    behind = await session.submit("r2", "T2")
    await turn_is(turn, "WAITING", where=lambda view: len(view.waiting_on) == 2)
    questions = await turn.pending_interactions()

    await turn.cancel("stop")
    await turn_is(behind, "COMPLETED")
    await turn_is(turn, "CANCELLED")

    events = await all_events(session)
    closed = [event for event in events if event.type == "interaction.resolved"]
    assert sorted(event.data["interactionId"] for event in closed) == sorted(q.interaction_id for q in questions)
    assert all(event.data["outcome"] == "closed" and event.data["reason"] for event in closed)
    # Nobody ever saw a cancelled Turn with an open question: they end in one transaction, or the question first.
    ended = next(
        event for event in events if event.type == "turn.status" and event.data["turn"]["status"] == "CANCELLED"
    )
    assert all(event.sequence < ended.sequence for event in closed)
    assert await turn.pending_interactions() == []
    projection = (await session.snapshot()).projection
    assert {one.state for one in projection.interactions.values()} == {InteractionState.CLOSED}

    for number, question in enumerate(questions):
        with pytest.raises((Conflict, Terminal)):
            await turn.respond(f"late-{number}", question.interaction_id, True)
    assert harness.ledger.count("tool") == 0
    assert str(await behind.result()) == "next"


@pytest.mark.case("C43")
async def test_a_failure_closes_it_too(hosts: Hosts) -> None:
    class Poisoned(ScriptedHarness):
        """Fails for good when it is asked to apply an answer."""

        async def run(self, context):
            if context.start.number > 1:
                raise ValueError("cannot go on")
            return await super().run(context)

    harness = Poisoned({"T1": [together(approval("pay"), approval("sign")), final()], "": [final("next")]})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "T1")
    await turn_is(turn, "WAITING", where=lambda view: len(view.waiting_on) == 2)
    first, second = await turn.pending_interactions()

    await turn.respond("yes", first.interaction_id, True)
    await turn_is(turn, "FAILED")

    projection = (await session.snapshot()).projection
    assert projection.interactions[second.interaction_id].state is InteractionState.CLOSED
    assert await turn.pending_interactions() == []
    with pytest.raises((Conflict, Terminal)):
        await turn.respond("late", second.interaction_id, True)
