"""C41: passing another context on resume lost the recorded approval, and it was asked for again."""

from __future__ import annotations

import pytest

from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final
from tests.runtime.conftest import KEY, Hosts, all_events, kill, turn_is

SCRIPT = [approval("pay", amount=1), final("{results}")]


@pytest.mark.case("C41")
async def test_a_stored_answer_is_honoured_by_a_host_that_is_set_up_differently(hosts: Hosts) -> None:
    asking = ScriptedHarness(
        [approval("pay", amount=1), final("{results}")], tools={"pay": lambda amount: "old account"}
    )
    first = await hosts.open(asking)
    session = await first.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await turn_is(turn, "WAITING")
    (question,) = await turn.pending_interactions()
    kill(first)

    # Answered while no host is there, by a client that runs nothing.
    api = await hosts.open()
    answered = api.get_session(KEY).get_turn(turn.turn_id)
    await answered.respond("yes", question.interaction_id, True)
    assert await answered.pending_interactions() == []

    # Other credentials, another factory, other options: none of it has a say in what was answered.
    paying = ScriptedHarness(
        [approval("pay", amount=1), final("{results}")], tools={"pay": lambda amount: "new account"}
    )
    await hosts.open(paying, lease=5.0, parallelism=1, host_name="somewhere-else")
    await turn_is(answered, "COMPLETED")

    assert str(await answered.result()) == "new account"
    assert (asking.ledger.count("tool"), paying.ledger.count("tool")) == (0, 1)
    asked = [event for event in await all_events(answered) if event.type == "interaction.requested"]
    assert [event.data["interactionId"] for event in asked] == [question.interaction_id]
