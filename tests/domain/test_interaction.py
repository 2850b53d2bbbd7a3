"""Questions are answered once, by whoever is asked, and each answer reaches the call that asked."""

from __future__ import annotations

from itertools import permutations

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import AlreadyDecided, InvalidRequest, NotFound, RequestConflict
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, InteractionState
from agentscope_durable.domain import ids
from tests.domain.stage import FOR_GOOD, Owner, Stage, gated, local, question

S = ExecutionState
I = InteractionState  # noqa: E741 - the state of an interaction, beside that of a call


def asking() -> tuple[Stage, Owner]:
    """A Turn that waits for the approval `i1` of its call `c2`."""
    stage = Stage()
    owner = stage.running()
    owner.asks()
    owner.suspends()
    return stage, owner


@pytest.mark.spec("IN-12")
def test_a_turn_that_asks_is_waiting_and_says_for_what() -> None:
    stage, owner = asking()

    [reason] = stage.view(owner.turn).waiting_on
    assert (stage.status(owner.turn), reason.kind, reason.id, reason.call_id) == ("WAITING", "approval", "i1", "c2")
    owner = stage.claim("b")
    assert owner.claimed.purpose is c.ClaimPurpose.NOTHING


@pytest.mark.spec("IN-02")
def test_an_approval_takes_a_boolean_and_a_manual_tool_any_json() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks("c2", "i1")
    owner.asks_for_result("c3", "i2")
    owner.suspends()

    for answer in ("yes", 1, {"approved": True}, None):
        with stage.refuses(InvalidRequest) as refused:
            stage.respond(owner.turn, "i1", answer, f"a {answer}")
        assert refused.value.path == "response"
    stage.respond(owner.turn, "i1", False, "a1")
    stage.respond(owner.turn, "i2", {"signed": "by hand"}, "a2")
    assert stage.interaction(owner.turn, "i2").state is I.RESOLVED


@pytest.mark.spec("IN-05", "IN-06")
def test_an_answer_is_an_event_and_a_public_message() -> None:
    stage, owner = asking()
    stage.respond(owner.turn, "i1", True, "a1")

    [resolved] = stage.events("interaction.resolved")
    assert (resolved.data["interactionId"], resolved.data["outcome"], resolved.data["response"]) == (
        "i1",
        "answered",
        True,
    )
    message = stage.world.fold.projection.history()[-1]
    assert (message.role, message.interaction_id, message.request_id, message.input_kind) == (
        "user",
        "i1",
        "a1",
        "respond",
    )


@pytest.mark.spec("IN-03", "IN-09")
def test_the_first_answer_stands() -> None:
    stage, owner = asking()
    receipt = stage.respond(owner.turn, "i1", True, "a1")

    assert stage.respond(owner.turn, "i1", True, "a1") == receipt
    for answer, request_id in ((False, "a2"), (True, "a3")):
        with stage.refuses(AlreadyDecided) as refused:
            stage.respond(owner.turn, "i1", answer, request_id)
        assert refused.value.interaction_id == "i1"


@pytest.mark.spec("IN-03")
def test_a_question_belongs_to_one_turn() -> None:
    stage, owner = asking()
    other = stage.submit("r2")

    with stage.refuses(NotFound):
        stage.respond(other, "i1", True)
    with stage.refuses(NotFound):
        stage.respond(owner.turn, "i9", True)


@pytest.mark.spec("IN-04")
def test_nobody_answers_in_place_of_an_executor() -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()
    owner.suspends()

    for identity in ("c1", stage.execution(owner.turn).execution_id, ids.interaction_id(owner.turn, "c1")):
        with stage.refuses(NotFound):
            stage.respond(owner.turn, identity, {"state": "success"})
    assert stage.execution(owner.turn).state is S.INTENT


def test_an_answer_lets_the_turn_go_on_and_is_applied_with_the_checkpoint_that_contains_it() -> None:
    stage, owner = asking()
    assert stage.due() is None
    stage.respond(owner.turn, "i1", True, "a1")
    assert stage.due() == 0

    owner = stage.claim("b")
    owner.tool("c2", S.RUNNING, name="delete", answers=("i1",))

    assert stage.interaction(owner.turn).state is I.APPLIED
    assert stage.signals()["a1"] == "APPLIED"
    assert stage.execution(owner.turn, "c2").state is S.RUNNING


def test_a_manual_result_is_the_result_of_its_call() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks_for_result("c3", "i2")
    owner.suspends()
    assert stage.reasons(owner.turn) == ["external_result"]

    stage.respond(owner.turn, "i2", "signed", "a1")

    call = stage.execution(owner.turn, "c3")
    assert (call.state, call.received_ms) == (S.COMPLETED, stage.clock())
    tool = stage.world.fold.projection.tools[f"main/{owner.turn}/c3"]
    assert tool.result == {"value": "signed"}
    owner = stage.claim("b")
    owner.tool("c3", S.COMPLETED, applied=True, answers=("i2",))
    owner.answers()
    assert stage.status(owner.turn) == "COMPLETED"


def test_a_denied_call_does_not_fail_its_turn() -> None:
    stage, owner = asking()
    stage.respond(owner.turn, "i1", False)

    owner = stage.claim("b")
    owner.tool("c2", S.DENIED, applied=True, answers=("i1",))
    owner.answers()

    assert (stage.execution(owner.turn, "c2").state, stage.status(owner.turn)) == (S.DENIED, "COMPLETED")


def test_an_answer_that_was_taken_in_before_its_call_starts_is_not_asked_for_again() -> None:
    stage, owner = asking()
    stage.respond(owner.turn, "i1", True)
    owner = stage.claim("b")
    owner.checkpoint(answers=("i1",))

    assert stage.execution(owner.turn, "c2").state is S.REQUESTED, "it waits for nobody, and nobody has started it"
    with stage.refuses(InvalidRequest):
        owner.step(interactions=(question("i1", "c2"),))
    owner.tool("c2", S.RUNNING, name="delete")
    assert owner.step(answers=("i1",)).ready == 0, "said twice, and nothing happens"


# ---- what a Run may not do ----


def test_a_call_does_not_start_before_there_is_an_answer() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks()

    for then in (local("c2"), c.ToolCommit(call_id="c2", state=S.INTENT, kind=ExecutionKind.EXTERNAL, route="h")):
        with stage.refuses(InvalidRequest) as refused:
            owner.step(tools=(then,))
        assert refused.value.path == "tools"
    with stage.refuses(InvalidRequest) as refused:
        owner.step(answers=("i1",))
    assert refused.value.path == "answers"


def test_a_call_that_waits_for_somebody_asks_in_the_same_commit() -> None:
    """Otherwise the Turn would wait for nobody, without a reason that can be seen (P9)."""
    stage = Stage()
    owner = stage.running()

    with stage.refuses(InvalidRequest):
        owner.step(tools=(gated("c2"),))
    with stage.refuses(InvalidRequest):
        owner.step(tools=(c.ToolCommit(call_id="c3", state=S.INTENT, kind=ExecutionKind.MANUAL),))


def test_a_question_that_is_asked_again_stands_as_it_is() -> None:
    stage, owner = asking()
    stage.respond(owner.turn, "i1", False, "a1")
    owner = stage.claim("b")

    owner.step(tools=(gated("c2"),), interactions=(question("i1", "c2"),))

    asked = stage.interaction(owner.turn)
    assert (asked.state, asked.request_id) == (I.RESOLVED, "a1")
    assert len(stage.events("interaction.requested")) == 1
    assert len(stage.state(owner.turn).conditions) == 1


# ---- many at once ----


@pytest.mark.case("C39")
def test_five_equal_calls_are_answered_in_any_order_and_each_answer_reaches_its_own() -> None:
    answers = {"c0": True, "c1": False, "c2": True, "c3": False, "c4": True}
    for order in permutations(answers):
        stage = Stage()
        owner = stage.running()
        turn = owner.turn
        asked = {call: ids.interaction_id(turn, call) for call in answers}
        assert len(set(asked.values())) == 5
        owner.step(
            tools=tuple(gated(call) for call in answers),
            interactions=tuple(question(asked[call], call) for call in answers),
        )
        owner.suspends()
        for number, call in enumerate(order):
            stage.respond(turn, asked[call], answers[call], f"answer {call}")
            if number == 2:
                # Three are answered: a host takes them in, and is gone before it has started the last of them.
                owner = stage.claim("b")
                for early in order[:2]:
                    take(owner, early, asked[early], answers[early])
                stage.dies("b")
        owner = stage.claim("d", dead=("b",))
        for call in order[2:]:
            take(owner, call, asked[call], answers[call])
        owner.answers()

        assert stage.status(turn) == "COMPLETED"
        for call, answer in answers.items():
            record = stage.execution(turn, call)
            assert (record.state, record.attempt) == (S.COMPLETED if answer else S.DENIED, 1)
            assert stage.interaction(turn, asked[call]).request_id == f"answer {call}"
        assert len(stage.events("interaction.requested")) == 5
        assert len(stage.events("tool.started")) == 3


def take(owner: Owner, call: str, interaction: str, approved: bool) -> None:
    """Do what was answered: run the tool, or tell the agent that it may not."""
    if approved:
        owner.tool(call, S.RUNNING, name="delete", answers=(interaction,))
        owner.tool(call, S.COMPLETED, applied=True)
    else:
        owner.tool(call, S.DENIED, applied=True, answers=(interaction,))


# ---- the end ----


@pytest.mark.case("C43")
@pytest.mark.spec("IN-13")
@pytest.mark.parametrize("how", ["cancelled", "failed"])
@pytest.mark.parametrize("answered", [False, True], ids=["open", "answered too late"])
def test_a_turn_that_ends_closes_its_questions_and_the_next_one_starts(how: str, answered: bool) -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.asks("c2", "i1")
    behind = stage.submit("r2")
    if how == "failed":
        owner.fails(FOR_GOOD)
    else:
        owner.suspends()
        stage.cancel(turn)
    if answered:
        stage.respond(turn, "i1", True, "a0")

    stage.claim("b").settle()

    assert stage.status(turn) == how.upper()
    asked = stage.interaction(turn)
    assert asked.state is (I.RESOLVED if answered else I.CLOSED)
    closed = [e.data for e in stage.events("interaction.resolved") if e.data["outcome"] == "closed"]
    assert [event["reason"] for event in closed] == ([] if answered else [how])
    assert stage.execution(turn, "c2").state is S.CANCELLED, "the tool never runs"
    with stage.refuses(AlreadyDecided):
        stage.respond(turn, "i1", True, "too late")
    assert stage.claim("b").turn == behind


def test_a_pause_in_front_of_an_answer_keeps_the_question() -> None:
    stage, owner = asking()
    stage.pause(owner.turn)
    assert stage.reasons(owner.turn) == ["approval"]

    stage.resume(owner.turn)
    stage.respond(owner.turn, "i1", True)
    assert (stage.status(owner.turn), stage.due()) == ("WAITING", 0)


def test_a_run_may_end_over_an_open_question_and_then_nobody_is_asked_any_more() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks()
    owner.answers()

    assert stage.interaction(owner.turn).state is I.CLOSED
    assert stage.interaction(owner.turn).reason == "completed"


# ------------------------------------------------------------ an approval that changes the call


@pytest.mark.spec("IN-02", "PR-22")
def test_an_approval_may_change_the_arguments_of_its_call() -> None:
    stage, owner = asking()
    stage.respond(owner.turn, "i1", True, "a1", arguments='{"unit":"b"}')

    # Question, call, event and fold say the same; the stage compares the last two after every command.
    record = stage.interaction(owner.turn)
    assert (record.edited, record.arguments) == (body_of('{"unit":"b"}'), body_of("{}"))
    assert stage.execution(owner.turn, "c2").arguments == body_of('{"unit":"b"}')
    [resolved] = stage.events("interaction.resolved")
    assert (resolved.data["response"], resolved.data["editedArguments"]) == (True, '{"unit":"b"}')
    projection = stage.world.fold.projection
    assert projection.interactions["i1"].edited_arguments == '{"unit":"b"}'
    assert projection.tools[f"main/{owner.turn}/c2"].arguments == '{"unit":"b"}'

    owner = stage.claim("b")
    owner.tool("c2", S.RUNNING, name="delete", answers=("i1",))
    assert stage.execution(owner.turn, "c2").arguments == body_of('{"unit":"b"}')


@pytest.mark.spec("IN-02")
def test_only_an_approval_that_is_true_changes_arguments() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks("c2", "i1")
    owner.asks_for_result("c3", "i2")
    owner.suspends()

    for interaction, answer in (("i1", False), ("i2", True), ("i2", {"signed": "by hand"})):
        with stage.refuses(InvalidRequest) as refused:
            stage.respond(owner.turn, interaction, answer, arguments="{}")
        assert refused.value.path == "arguments"


@pytest.mark.spec("IN-09")
def test_changed_arguments_are_part_of_the_request() -> None:
    stage, owner = asking()
    receipt = stage.respond(owner.turn, "i1", True, "a1", arguments='{"unit":"b"}')

    assert stage.respond(owner.turn, "i1", True, "a1", arguments='{"unit":"b"}') == receipt
    for arguments in (None, '{"unit":"c"}'):
        with stage.refuses(RequestConflict) as refused:
            stage.respond(owner.turn, "i1", True, "a1", arguments=arguments)
        assert refused.value.field == "arguments"
    with stage.refuses(AlreadyDecided):
        stage.respond(owner.turn, "i1", True, "a2", arguments='{"unit":"c"}')
