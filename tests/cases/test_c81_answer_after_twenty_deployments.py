"""C81 (vercel/workflow#1203): an approval that takes longer than its deployment's life can still be answered.

The answer is stored when it is given, whoever is running by then. What the Turn waits for after that is said by
version, and it goes on when a host with that version comes.
"""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.status import Actor, ReasonKind, TurnStatus, WaitKind
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final
from tests.runtime.conftest import KEY, SECONDS, Hosts, turn_is

DAY_MS = 24 * 3_600_000
DEPLOYMENTS = 20


@pytest.mark.case("C81")
@pytest.mark.spec("DX-03")
async def test_an_answer_is_taken_after_twenty_deployments(hosts: Hosts, clock: ManualClock) -> None:
    first = await hosts.open([approval("deploy"), final("done")], version="v1")
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    for number in range(2, DEPLOYMENTS + 2):
        clock.advance(60 * DAY_MS // DEPLOYMENTS)
        deployed = await hosts.open(ScriptedHarness([final("of another version")]), version=f"v{number}")
        if number <= DEPLOYMENTS:
            await deployed.close()
    turn = deployed.get_session(KEY).get_turn(turn.turn_id)

    # The question is as open as on the first day.
    explanation = await turn.explain()
    [asked] = await turn.pending_interactions()
    assert [(reason.kind, reason.id) for reason in explanation.reasons] == [(ReasonKind.APPROVAL, asked.interaction_id)]
    assert explanation.now_ms - asked.opened_at_ms >= 57 * DAY_MS
    await turn.respond("answer", asked.interaction_id, True)

    # The answer is stored; what is missing now is the version, and those that are there are named.
    [reason] = (await turn.explain()).reasons
    assert (reason.kind, reason.id, reason.actor) == (ReasonKind.DEFINITION_MISSING, "agent@v1", Actor.OPERATOR)
    assert f"agent@v{DEPLOYMENTS + 1}" in reason.text
    assert [waiting.kind for waiting in (await turn.status()).waiting_on] == [WaitKind.DEFINITION_MISSING]
    assert await turn.pending_interactions() == []
    assert (await turn.status()).runs == 1

    await hosts.open([approval("deploy"), final("done")], version="v1")
    assert str(await turn.wait(SECONDS)) == "done"
    assert [run.number for run in (await turn.list_runs()).items] == [1, 2]
