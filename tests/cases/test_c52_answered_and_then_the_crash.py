"""C52: the answer was stored, the process died before the tool ran, and nothing could get the task on any more."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.errors import AlreadyDecided, NotFound, RequestConflict
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final
from tests.runtime.conftest import KEY, SECONDS, Hosts, kill, refused, turn_is

SCRIPT = [approval("pay", amount=1), final("done")]


@pytest.mark.case("C52")
async def test_after_a_crash_behind_the_answer_it_stands_and_the_turn_goes_on_by_itself(hosts: Hosts) -> None:
    ran: list[int] = []
    harness = ScriptedHarness(SCRIPT, tools={"pay": lambda amount: ran.append(amount)})
    first = await hosts.open(harness)
    session = await first.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay")
    await turn_is(turn, "WAITING")
    [question] = await turn.pending_interactions()
    kill(first)

    # A page that runs nothing: the answer is the last thing that is committed.
    page = await hosts.open()
    turn = page.get_session(KEY).get_turn(turn.turn_id)
    receipt = await turn.respond("a1", question.interaction_id, True)
    assert ran == []

    assert await turn.respond("a1", question.interaction_id, True) == receipt
    await refused(turn.respond("a2", question.interaction_id, False), AlreadyDecided)
    await refused(turn.respond("a3", question.interaction_id, True), AlreadyDecided)
    await refused(turn.respond("a1", question.interaction_id, False), RequestConflict)
    await refused(turn.respond("a1", question.interaction_id, True, arguments={"amount": 999}), RequestConflict)
    behind = await page.get_session(KEY).submit("r2", "next")
    assert (await behind.status()).status is TurnStatus.QUEUED

    await hosts.open(harness)
    assert str(await turn.wait(SECONDS)) == "done"
    assert ran == [1]
    await turn_is(behind, "WAITING")


@pytest.mark.case("C52")
async def test_a_forged_or_foreign_answer_is_refused_and_nothing_runs(hosts: Hosts) -> None:
    ran: list[int] = []
    harness = ScriptedHarness(SCRIPT, tools={"pay": lambda amount: ran.append(amount)})
    runtime = await hosts.open(harness)
    mine = await (await runtime.create_session(KEY, "agent")).submit("r1", "pay")
    other = await (await runtime.create_session(SessionKey("other-user", "c1"), "agent")).submit("r1", "pay")
    await turn_is(mine, "WAITING")
    await turn_is(other, "WAITING")
    [question] = await mine.pending_interactions()

    await refused(other.respond("a1", question.interaction_id, True), NotFound)
    await refused(mine.respond("a1", "made-up", True), NotFound)
    for turn in (mine, other):
        assert (await turn.status()).status is TurnStatus.WAITING
    assert ran == []
