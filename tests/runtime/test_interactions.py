"""Questions a Turn asks of people (group IN)."""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.contracts.errors import AlreadyDecided, DurableError, InvalidRequest, NotFound
from agentscope_durable.contracts.status import ExecutionState, InteractionKind, InteractionState, TurnStatus, WaitKind
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.testing.scripted_harness import (
    ScriptedHarness,
    approval,
    external,
    final,
    local,
    manual,
    together,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused, turn_is, until


async def asking(hosts: Hosts, script, **options):
    runtime = await hosts.open(script, **options)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn_is(turn, TurnStatus.WAITING)
    return runtime, turn


@pytest.mark.spec("IN-01", "IN-12")
async def test_open_questions_are_listed(hosts: Hosts) -> None:
    _, turn = await asking(hosts, [together(approval("restart", unit="x"), manual("ask", text="why?")), final()])
    first, second = sorted(await turn.pending_interactions(), key=lambda one: one.name)

    assert (first.kind, second.kind) == (InteractionKind.EXTERNAL_RESULT, InteractionKind.APPROVAL)
    # The exact text the model gave.
    assert (first.arguments, second.arguments) == ('{"text":"why?"}', '{"unit":"x"}')
    assert {view.state for view in (first, second)} == {InteractionState.PENDING}
    assert {reason.id for reason in (await turn.status()).waiting_on} == {first.interaction_id, second.interaction_id}


@pytest.mark.spec("IN-02")
async def test_an_approval_takes_true_or_false(hosts: Hosts) -> None:
    _, turn = await asking(hosts, [approval("t", value="restarted"), final("{results}")])
    (question,) = await turn.pending_interactions()
    for wrong in ("yes", 1, None, {"approved": True}):
        await refused(turn.respond("a0", question.interaction_id, wrong), InvalidRequest)
    await turn.respond("a1", question.interaction_id, True)

    assert str(await turn.wait(SECONDS)) == "restarted"


@pytest.mark.spec("IN-02")
@pytest.mark.parametrize("answer", [{"n": 1}, "text", False, None, [1, 2]], ids=repr)
async def test_a_manual_tool_takes_any_json(hosts: Hosts, answer) -> None:
    _, turn = await asking(hosts, [manual("ask"), final("{results}")])
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, answer)
    await turn.wait(SECONDS)
    (tool,) = await turn.list_tools()

    assert tool.result.get("value") == answer
    assert tool.state is ExecutionState.COMPLETED


@pytest.mark.spec("IN-03", "IN-09")
async def test_one_of_racing_answers_wins(hosts: Hosts) -> None:
    _, turn = await asking(hosts, [approval("t"), final("{results}")])
    (question,) = await turn.pending_interactions()
    outcomes = await asyncio.gather(
        *(turn.respond(f"a{number}", question.interaction_id, number % 2 == 0) for number in range(8)),
        return_exceptions=True,
    )
    await turn.wait(SECONDS)
    lost = [outcome for outcome in outcomes if isinstance(outcome, DurableError)]

    assert len(lost) == 7
    assert len([e for e in await all_events(turn) if e.type == "interaction.resolved"]) == 1


@pytest.mark.spec("IN-03")
async def test_a_question_of_another_turn_is_not_found(hosts: Hosts) -> None:
    runtime, turn = await asking(hosts, [approval("t"), final()])
    session = runtime.get_session(KEY)
    other = await (await session.create_thread("x", "agent")).submit("r2", "b")
    (question,) = await turn.pending_interactions()

    await refused(other.respond("a1", question.interaction_id, True), NotFound)
    assert (await turn.status()).status is TurnStatus.WAITING


@pytest.mark.spec("IN-04")
async def test_nobody_answers_for_an_executor(hosts: Hosts) -> None:
    release = asyncio.Event()

    async def work() -> str:
        await release.wait()
        return "worked"

    _, turn = await asking(
        hosts, [external("hands", "work"), final()], executors={"hands": FunctionExecutor({"work": work})}
    )
    (tool,) = await turn.list_tools()
    assert await turn.pending_interactions() == []
    for guess in (tool.execution_id, tool.call_id):
        await refused(turn.respond(f"a-{guess}", guess, "faked"), NotFound)
    release.set()
    await turn.wait(SECONDS)


@pytest.mark.spec("IN-05", "IN-09")
async def test_an_answer_is_an_event_and_a_repeat_gets_the_first_receipt(hosts: Hosts) -> None:
    _, turn = await asking(hosts, [approval("t"), final()])
    (question,) = await turn.pending_interactions()
    receipt = await turn.respond("a1", question.interaction_id, True)
    assert await turn.respond("a1", question.interaction_id, True) == receipt
    await turn.wait(SECONDS)
    assert await turn.respond("a1", question.interaction_id, True) == receipt
    await refused(turn.respond("a2", question.interaction_id, False), AlreadyDecided)

    (event,) = [e for e in await all_events(turn) if e.type == "interaction.resolved"]
    assert event.data["interactionId"] == question.interaction_id
    assert event.data["response"] is True


@pytest.mark.spec("IN-07")
async def test_a_question_survives_a_restart(hosts: Hosts) -> None:
    runtime, turn = await asking(hosts, [approval("t"), final("{results}")])
    (before,) = await turn.pending_interactions()
    await runtime.close()
    later = await hosts.open([approval("t"), final("{results}")])
    turn = later.get_session(KEY).get_turn(turn.turn_id)
    (after,) = await turn.pending_interactions()
    assert after == before
    await turn.respond("a1", after.interaction_id, True)

    assert str(await turn.wait(SECONDS)) == "ok"


@pytest.mark.spec("IN-08", "CT-13")
async def test_an_answer_given_while_paused_takes_effect_after_resume(hosts: Hosts) -> None:
    harness = ScriptedHarness([approval("t"), final("{results}")])
    _, turn = await asking(hosts, harness)
    await turn.pause("p1")
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)
    view = await turn.status()
    assert view.status is TurnStatus.PAUSED
    assert harness.ledger.count("tool") == 0
    await turn.resume("u1", view.revision)
    await turn.wait(SECONDS)

    assert harness.ledger.count("tool") == 1


@pytest.mark.spec("IN-10")
async def test_a_denial_lets_the_agent_go_on(hosts: Hosts) -> None:
    harness = ScriptedHarness([approval("t"), final("{results}")])
    _, turn = await asking(hosts, harness)
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, False)

    assert str(await turn.wait(SECONDS)) == "denied by the user"
    assert harness.ledger.count("tool") == 0
    (tool,) = await turn.list_tools()
    assert tool.state is ExecutionState.DENIED


@pytest.mark.spec("IN-13")
async def test_cancel_closes_the_questions_and_the_next_turn_starts(hosts: Hosts) -> None:
    harness = ScriptedHarness({"a": [approval("t"), final()], "": [final("ok")]})
    runtime, turn = await asking(hosts, harness)
    following = await runtime.get_session(KEY).submit("r2", "b")
    (question,) = await turn.pending_interactions()
    await turn.cancel("c1")
    await turn_is(turn, TurnStatus.CANCELLED)

    assert await turn.pending_interactions() == []
    (event,) = [e for e in await all_events(turn) if e.type == "interaction.resolved"]
    assert (event.data["outcome"], event.data["reason"]) == ("closed", "cancelled")
    await refused(turn.respond("a1", question.interaction_id, True), DurableError)
    assert harness.ledger.count("tool") == 0
    assert str(await following.wait(SECONDS)) == "ok"


@pytest.mark.spec("IN-01")
async def test_answers_are_applied_as_they_come(hosts: Hosts) -> None:
    harness = ScriptedHarness(
        [together(approval("one", value="1"), manual("two"), local("three", value="3")), final("{results}")]
    )
    _, turn = await asking(hosts, harness)
    questions = {question.name: question for question in await turn.pending_interactions()}
    await turn.respond("a1", questions["two"].interaction_id, "2")
    await until(lambda: _waits_for(turn, questions["one"].interaction_id))
    await turn.respond("a2", questions["one"].interaction_id, True)

    assert str(await turn.wait(SECONDS)) == "3, 2, 1"


async def _waits_for(turn, interaction_id: str) -> bool:
    view = await turn.status()
    return [(reason.kind, reason.id) for reason in view.waiting_on] == [(WaitKind.APPROVAL, interaction_id)]
