"""C17: one poisonous item in a claimed batch made the dispatcher skip the rest, which stayed claimed."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.commands import SubmitTurn
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.runtime.runtime import Definition
from agentscope_durable.testing.scripted_harness import STATE_VERSION, final
from tests.runtime.conftest import Hosts, turn_is

BATCH = 20
FOREIGN, POISON = 3, 7


@pytest.mark.case("C17")
async def test_one_bad_turn_of_a_batch_is_that_turns_alone(hosts: Hosts) -> None:
    api = await hosts.open(
        definitions=[Definition("agent", "v1", STATE_VERSION), Definition("elsewhere", "v1", STATE_VERSION)]
    )
    turns = []
    for number in range(1, BATCH + 1):
        key = SessionKey("app", f"c{number}")
        session = await api.create_session(key, "elsewhere" if number == FOREIGN else "agent")
        if number == POISON:
            # What no handle admits: content that no release knows.
            admitted = await hosts.backend.execute(
                SubmitTurn(
                    session=key,
                    thread_id="main",
                    request_id="r1",
                    content=body_of([{"type": "hologram", "data": 1}]),
                    digest="0" * 64,
                )
            )
            turns.append(session.get_turn(admitted.turn_id))
        else:
            turns.append(await session.submit("r1", "go"))

    await hosts.open([final()])
    for number, turn in enumerate(turns, start=1):
        if number not in (FOREIGN, POISON):
            await turn_is(turn, "COMPLETED")

    foreign = await turns[FOREIGN - 1].status()
    assert (foreign.status, foreign.lease, foreign.recovery) == (TurnStatus.QUEUED, None, None)
    assert [waiting.kind for waiting in foreign.waiting_on] == [WaitKind.DEFINITION_MISSING]
    # Nobody owns it, its bytes are as they were, and a person can read why (C61): another release may know the content.
    poisoned = await turn_is(turns[POISON - 1], "WAITING")
    assert [waiting.kind for waiting in poisoned.waiting_on] == [WaitKind.OPERATOR]
    assert "hologram" in poisoned.waiting_on[0].next_action
    assert poisoned.lease is None
    await turns[POISON - 1].cancel("give up")
    await turn_is(turns[POISON - 1], "CANCELLED")

    await hosts.open([final()], name="elsewhere")
    await turn_is(turns[FOREIGN - 1], "COMPLETED")
