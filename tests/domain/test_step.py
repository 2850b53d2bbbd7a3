"""The owner's commit: everything that became true since the last one, at once, and as little of it as can be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.change import ReadyRow
from agentscope_durable.contracts.commands import RunEndKind
from agentscope_durable.contracts.errors import (
    Fenced,
    InputsChanged,
    InvalidRequest,
    InvalidTransition,
    LimitExceeded,
    NotFound,
    RevisionConflict,
)
from agentscope_durable.contracts.events import LEGACY_TYPES, PAYLOADS
from agentscope_durable.contracts.log import ModelFact, StepFact
from agentscope_durable.contracts.records import OPEN_CONDITIONS_MAX, ObjectRecord, ObjectState
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    ModelStatus,
    ReplayRule,
    StepPhase,
    StepStatus,
)
from tests.domain.stage import FOR_GOOD, TRY_AGAIN, Owner, Stage, external, gated, local, question, text

S = ExecutionState


def says(owner: Owner, **fields: Any) -> c.StepReceipt:
    """What one round of an agent commits: native state, a Step, a model request and its message."""
    body = text("x" * 1000)
    return owner.checkpoint(
        steps=(owner.fact(1, StepPhase.MODEL),),
        models=(owner.model(ModelStatus.COMPLETED),),
        messages=(c.MessageOut(message_id="m1", content=body),),
        **fields,
    )


# ---- what a commit costs ----


def test_a_plain_step_writes_one_log_row_one_head_row_and_at_most_one_record() -> None:
    """COUNTED: RECORDS, "plain step commit". The store adds the log row and the head row to what is counted here."""
    stage = Stage()
    owner = stage.running()
    owner.begins(1)
    commits: list[tuple[str, Any, int, int]] = [
        ("native state", lambda: owner.checkpoint(), 0, 0),
        ("a model request", lambda: owner.step(models=(owner.model(),), reasoning=1, attempt=1), 0, 0),
        ("a message", lambda: says(owner), 1, 0),
        ("an application event", lambda: owner.step(events=(c.CustomEvent("x.app.note", body_of(1)),)), 0, 0),
        ("a local tool begins", lambda: owner.starts_local("c1"), 1, 0),
        ("it ends", lambda: owner.tool("c1", S.COMPLETED, result=body_of({}), applied=True), 1, 0),
        ("an intent", lambda: owner.calls_hands("c2"), 1, 1),
        ("a wait", lambda: owner.step(waits=(c.WaitCondition("x.go"),)), 0, 0),
        ("a Step ends", lambda: owner.step(steps=(owner.fact(1, status=StepStatus.COMPLETED),)), 0, 0),
    ]
    for name, commit, records, ready in commits:
        log, rev = len(stage.store._sessions[keys.partition(stage.session)].log), stage.world.dump.rev
        commit()
        change = stage.change
        assert change is not None
        assert (len(change.puts), len(change.ready), change.unready) == (records, ready, ()), name
        assert len(stage.store._sessions[keys.partition(stage.session)].log) == log + 1
        assert stage.world.dump.rev == rev + 1
        assert stage.rounds == 0, f"{name}: everything it reads is declared"


def test_what_a_commit_holds_is_stored_once() -> None:
    stage = Stage()
    owner = stage.running()
    owner.begins(1)
    says(owner)

    change = stage.change
    assert change is not None and change.entry is not None
    stored = [change.entry.events, change.entry.private, change.entry.journal, *(value for _, value in change.puts)]
    assert sum(b"x" * 1000 in (part or b"") for part in stored) == 1


# ---- one transaction ----


@pytest.mark.spec("BE-17")
def test_lease_native_state_intents_inputs_and_events_become_true_together_or_not_at_all() -> None:
    stage = Stage()
    owner = stage.running()
    stage.steer(owner.turn, "s1")
    whole: dict[str, Any] = {
        "journal": b"[1]",
        "checkpoint": True,
        "base": True,
        "writer": "2.0.8",
        "steps": (owner.fact(1),),
        "messages": (c.MessageOut(message_id="m1", content=text("so")),),
        "tools": (external("c1"),),
        "inputs": (1,),
        "events": (c.CustomEvent("x.app.note", body_of(1)),),
    }
    parts: list[tuple[type[Exception], dict[str, Any]]] = [
        (Fenced, {"fence": 9}),
        (RevisionConflict, {"expected_position": owner.position - 1}),
        (InputsChanged, {"inputs": (1, 2)}),
        (InvalidRequest, {"events": (c.CustomEvent("turn.status", body_of(1)),)}),
        (InvalidRequest, {"tools": (external("c1"), c.ToolCommit(call_id="c2", state=S.UNKNOWN))}),
        (NotFound, {"answers": ("i1",)}),
        (NotFound, {"signals": ("x.go",)}),
        (InvalidRequest, {"waits": (c.WaitCondition("pause"),)}),
    ]
    for error, part in parts:
        with stage.refuses(error):
            owner.step(**{**whole, **part})

    owner.step(**whole)
    active = stage.world.dump.active("main")
    assert active is not None
    assert (active.position, active.checkpoint_at, active.base_at, active.writer) == (2, 2, 2, "2.0.8")
    change = stage.change
    assert change is not None and change.entry is not None
    assert (change.entry.journal, change.entry.stream, change.entry.at) == (b"[1]", "main", 2)
    assert stage.signals()["s1"] == "APPLIED"
    assert stage.execution(owner.turn).state is S.INTENT
    [event] = stage.events("x.app.note")
    assert (event.data["value"], event.run_id, event.step_id) == (1, owner.run, f"{owner.run}.s1")


def test_a_commit_stands_where_its_owner_thinks_or_not_at_all() -> None:
    stage = Stage()
    owner = stage.running()
    command = owner.step_command()
    owner.step()

    with stage.refuses(RevisionConflict) as refused:
        stage.do(command)
    assert (refused.value.kind, refused.value.expected, refused.value.actual) == ("thread", 1, 2)


def test_only_a_base_moves_the_place_from_which_state_is_rebuilt() -> None:
    stage = Stage()
    owner = stage.running()
    owner.checkpoint()
    owner.step(journal=b"[2]", checkpoint=True, writer="2.0.9")
    owner.step(journal=b"[3]")

    active = stage.world.dump.active("main")
    assert active is not None
    assert (active.base_at, active.checkpoint_at, active.position, active.writer) == (2, 3, 4, "2.0.9")
    owner.suspends()
    thread = stage.thread()
    assert (thread.base_at, thread.checkpoint_at, thread.position, thread.writer) == (2, 3, 5, "2.0.9")
    claimed = stage.claim("b").claimed
    assert (claimed.base_at, claimed.checkpoint_at, claimed.position) == (2, 3, 6)


def test_a_settlement_commits_no_steps() -> None:
    stage = Stage()
    owner = stage.running()
    stage.cancel(owner.turn)
    owner.end(RunEndKind.CANCELLED)

    with stage.refuses(InvalidRequest):
        stage.do(c.CommitStep(**{**owner._identity(""), "expected_position": owner.position}))


# ---- Steps, requests and messages ----


@pytest.mark.spec("EV-25")
def test_steps_and_their_phases_are_events() -> None:
    stage = Stage()
    owner = stage.running()
    for phase in (StepPhase.REASONING, StepPhase.MODEL, StepPhase.MODEL, StepPhase.FINALIZATION):
        owner.begins(1, phase)
    owner.step(steps=(owner.fact(1, StepPhase.FINALIZATION, StepStatus.COMPLETED), owner.fact(2)))

    told = [(e.type, e.step_id, e.data.get("phase") or e.data.get("status")) for e in stage.events("step.")]
    first, second = f"{owner.run}.s1", f"{owner.run}.s2"
    assert told == [
        ("step.started", first, "REASONING"),
        ("step.phase", first, "MODEL"),
        ("step.phase", first, "FINALIZATION"),
        ("step.ended", first, "COMPLETED"),
        ("step.started", second, "REASONING"),
    ]


def test_the_next_run_resumes_from_the_latest_step_also_if_that_has_ended() -> None:
    stage = Stage()
    owner = stage.running()
    owner.begins(1)
    owner.step(steps=(owner.fact(1, status=StepStatus.COMPLETED),))
    owner.step(steps=(owner.fact(2), owner.fact(2, status=StepStatus.COMPLETED)))
    owner.end(RunEndKind.RELEASED)

    assert stage.claim("b").claimed.resumed_from == f"{owner.run}.s2"


def test_the_end_of_a_run_closes_its_step_and_its_requests() -> None:
    stage = Stage()
    owner = stage.running()
    owner.begins(1, models=(owner.model(), owner.model(request=2, message="m2")))
    owner.step(models=(owner.model(ModelStatus.FAILED),))
    owner.suspends()

    told = [fact for fact in stage.private() if isinstance(fact, ModelFact)]
    assert [(fact.request, fact.status) for fact in told] == [(2, ModelStatus.CANCELLED)]
    [step] = [fact for fact in stage.private() if isinstance(fact, StepFact)]
    assert step.status is StepStatus.COMPLETED
    assert [e.data["messageId"] for e in stage.events("message.abandoned")] == ["m2"]


def test_a_step_ends_without_ending_the_one_that_is_open() -> None:
    stage = Stage()
    owner = stage.running()
    owner.begins(1)
    owner.begins(2)
    owner.step(steps=(owner.fact(1, status=StepStatus.COMPLETED),))
    active = stage.world.dump.active("main")
    assert active is not None and active.run.step_id == f"{owner.run}.s2"


def test_an_attempt_that_was_given_up_is_told() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(abandons=(c.Abandon("m1", 1, "the provider cut it off"),))

    [event] = stage.events("message.abandoned")
    assert event.data == {"messageId": "m1", "attempt": 1, "reason": "the provider cut it off"}
    assert (event.turn_id, event.run_id) == (owner.turn, owner.run)


def test_a_message_that_is_completed_again_keeps_its_place_in_history() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(messages=(c.MessageOut(message_id="m1", content=text("draft")),))
    first = stage.state(owner.turn).message_seq
    owner.step(messages=(c.MessageOut(message_id="m2", content=text("next")),))
    owner.step(messages=(c.MessageOut(message_id="m1", content=text("final"), revision=2, first_seq=first),))

    assert stage.messages() == ["hi", "final", "next"]
    assert keys.message(first) in dict(stage.change.puts if stage.change else ())


def test_every_large_body_of_a_commit_is_marked_as_referred_to() -> None:
    """Otherwise a sweep would take it for an orphan after a day (D11)."""
    stage = Stage()
    owner = stage.running()

    def large(name: str) -> Any:
        return bodies[name]

    names = ("journal", "text", "structured", "arguments", "result", "asked", "event")
    bodies = {name: stage.large(name.encode()) for name in names}
    owner.step(
        journal=b"@" + msgspec.json.encode(large("journal")),
        messages=(c.MessageOut(message_id="m1", content=large("text"), structured=large("structured")),),
        tools=(external_with(large("arguments")), c.ToolCommit(call_id="c2", state=S.FAILED, result=large("result"))),
        interactions=(
            c.InteractionCommit(
                interaction_id="i1", call_id="c3", kind=question("i1", "c3").kind, name="n", arguments=large("asked")
            ),
        ),
        events=(c.CustomEvent("x.app.note", large("event")),),
    )

    change = stage.change
    assert change is not None
    marked = {key for key, _ in change.puts if key.startswith("object/")}
    assert marked == {keys.object_(body.name) for body in bodies.values()}
    assert {stage.get(key, ObjectRecord).state for key in marked} == {ObjectState.REFERENCED}
    assert stage.rounds == 1, "only a commit with large bodies asks for their marks, for all of them at once"


def external_with(arguments: Any) -> c.ToolCommit:
    return c.ToolCommit(
        call_id="c1", state=S.INTENT, name="n", kind=ExecutionKind.EXTERNAL, route="hands", arguments=arguments
    )


# ---- tools ----


def test_an_intent_is_offered_to_the_dispatchers_of_its_route() -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()

    item = f"{owner.turn}/c1"
    value = keys.dispatch_value("hands", "main")
    assert stage.ready(keys.READY_DISPATCH, item) == ReadyRow(keys.READY_DISPATCH, "hands", stage.clock(), item, value)
    [event] = stage.events("tool.requested")
    assert event.data["executionId"] == stage.execution(owner.turn).execution_id
    assert owner.calls_hands().position == owner.position, "said twice, it is one intent"
    assert len(stage.state(owner.turn).conditions) == 1


@pytest.mark.spec("PR-07")
def test_a_local_call_has_no_execution_id_and_stands_in_the_same_view() -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("c1")
    owner.calls_hands("c2")

    tools = stage.world.fold.projection.tools
    assert tools[f"main/{owner.turn}/c1"].execution_id is None
    assert tools[f"main/{owner.turn}/c2"].execution_id is not None


@pytest.mark.spec("EV-23")
def test_a_call_tells_where_it_came_from_and_where_its_result_went_in() -> None:
    stage = Stage()
    first = stage.running()
    first.begins(1)
    first.calls_hands()
    first.suspends()
    stage.dispatch(first.turn)
    stage.outcome(first.turn)
    tool = f"main/{first.turn}/c1"
    assert stage.world.fold.projection.tools[tool].applied_at is None

    second = stage.claim("b")
    command = second.step_command(
        journal=b"[]",
        checkpoint=True,
        base=True,
        steps=(second.fact(1, StepPhase.APPLYING_RESULTS),),
        tools=(c.ToolCommit(call_id="c1", state=S.COMPLETED, applied=True),),
    )
    stage.do(command)

    view = stage.world.fold.projection.tools[tool]
    assert view.origin is not None and (view.origin.run_id, view.origin.step_id) == (first.run, f"{first.run}.s1")
    assert view.applied_at is not None
    assert (view.applied_at.run_id, view.applied_at.step_id) == (second.run, f"{second.run}.s1")
    change = stage.change
    assert change is not None and change.entry is not None and change.entry.journal, "with the checkpoint that has it"


@pytest.mark.spec("RC-15")
@pytest.mark.parametrize("stored", ReplayRule)
@pytest.mark.parametrize("present", ReplayRule)
@pytest.mark.parametrize("lost", [False, True], ids=["in its own run", "after its host was lost"])
def test_a_tool_is_started_again_only_if_its_stored_and_its_present_rule_say_so(
    stored: ReplayRule, present: ReplayRule, lost: bool
) -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("c1", stored)
    if lost:
        owner.fails(TRY_AGAIN)
        stage.pass_time(1_000)
        owner = stage.claim("b")
        assert owner.run

    if stored is present is ReplayRule.SAFE:
        owner.starts_local("c1", present)
        assert stage.execution(owner.turn).attempt == 2
    else:
        with stage.refuses(InvalidRequest):
            owner.starts_local("c1", present)
        owner.tool("c1", S.UNKNOWN)
        assert (stage.execution(owner.turn).state, stage.execution(owner.turn).attempt) == (S.UNKNOWN, 1)


def test_a_tool_whose_rules_agree_again_later_may_still_be_run() -> None:
    """Declared safe, deployed as unsafe when it was lost, and deployed as safe again."""
    stage = Stage()
    owner = stage.running()
    owner.starts_local("c1", ReplayRule.SAFE)
    owner.asks("c2", "i1")
    stage.dies("a")
    owner = stage.claim("b")
    owner.tool("c1", S.UNKNOWN)
    owner.suspends()
    assert stage.reasons(owner.turn) == ["tool_unknown", "approval"]
    stage.respond(owner.turn, "i1", False)
    owner = stage.claim("b")

    owner.starts_local("c1", ReplayRule.SAFE)

    assert (stage.execution(owner.turn).state, stage.execution(owner.turn).attempt) == (S.RUNNING, 2)
    owner.tool("c1", S.COMPLETED)
    with stage.refuses(InvalidRequest):
        owner.starts_local("c1", ReplayRule.SAFE)
    assert stage.execution(owner.turn).state is S.COMPLETED, "what is known is not done again"


def test_an_approved_call_may_be_performed_elsewhere_with_other_arguments() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks("c2", "i1")
    stage.respond(owner.turn, "i1")
    edited = stage.large(b"edited")
    owner.tool("c2", S.INTENT, kind=ExecutionKind.EXTERNAL, route="hands", arguments=edited, answers=("i1",))

    call = stage.execution(owner.turn, "c2")
    assert (call.kind, call.route, call.arguments, call.name) == (ExecutionKind.EXTERNAL, "hands", edited, "delete")
    assert stage.get(keys.object_(edited.name), ObjectRecord).state is ObjectState.REFERENCED
    assert stage.dispatch(owner.turn, "c2").arguments == edited


def test_a_call_that_was_refused_before_its_question_was_answered_still_has_that_question() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks("c2", "i1")
    owner.tool("c2", S.DENIED, applied=True)
    owner.suspends()
    assert stage.reasons(owner.turn) == ["approval"]

    stage.respond(owner.turn, "i1")
    owner = stage.claim("b")
    owner.step(answers=("i1",))
    owner.answers()
    assert (stage.status(owner.turn), stage.execution(owner.turn, "c2").state) == ("COMPLETED", S.DENIED)


def test_a_run_tells_what_became_of_its_own_local_tools_only() -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("c1")
    owner.tool("c1", S.UNKNOWN)
    owner.tool("c1", S.COMPLETED)
    assert stage.execution(owner.turn).state is S.COMPLETED, "the Run that started it may know better later"

    owner.starts_local("c2")
    stage.dies("a")
    other = stage.claim("b")
    with stage.refuses(InvalidRequest):
        other.tool("c2", S.COMPLETED)


@pytest.mark.parametrize("state", [S.RUNNING, S.COMPLETED, S.FAILED, S.CANCELLED, S.UNKNOWN])
def test_what_became_of_an_external_call_is_told_by_its_executor_and_not_by_the_run(state: ExecutionState) -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()

    for kind in ExecutionKind:
        with stage.refuses(InvalidRequest):
            owner.tool("c1", state, kind=kind, rule=ReplayRule.SAFE)
    stage.dispatch(owner.turn)
    with stage.refuses(InvalidRequest):
        owner.tool("c1", state, kind=ExecutionKind.EXTERNAL)
    with stage.refuses(InvalidRequest):
        owner.tool("c1", state, applied=True)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (ExecutionKind.LOCAL, S.INTENT),
        (ExecutionKind.LOCAL, S.UNKNOWN),
        (ExecutionKind.EXTERNAL, S.RUNNING),
        (ExecutionKind.MANUAL, S.RUNNING),
    ],
)
def test_a_call_of_each_kind_starts_in_its_own_way(kind: ExecutionKind, state: ExecutionState) -> None:
    stage = Stage()
    owner = stage.running()

    with stage.refuses(InvalidRequest):
        owner.step(
            tools=(c.ToolCommit(call_id="c1", state=state, kind=kind, route="hands"),),
            interactions=(question("i1", "c1"),),
        )


def test_a_call_that_cannot_even_start_has_its_definite_error_at_once() -> None:
    stage = Stage()
    owner = stage.running()
    owner.tool("c1", S.FAILED, name="write", result=body_of({"state": "error"}), applied=True)

    call = stage.execution(owner.turn)
    assert (call.state, call.started_ms, call.applied_at is not None) == (S.FAILED, 0, True)
    assert not stage.state(owner.turn).conditions


def test_an_outcome_is_applied_once_whatever_the_run_takes_it_for() -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("c1")
    owner.tool("c1", S.COMPLETED)
    for state in (S.UNKNOWN, S.COMPLETED, S.FAILED):
        owner.tool("c1", state, applied=True)

    assert stage.execution(owner.turn).state is S.COMPLETED
    assert len(stage.events("tool.applied")) == 1
    with stage.refuses(InvalidRequest):
        owner.tool("c1", S.FAILED)


def test_a_turn_has_so_many_open_calls_and_no_more() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(tools=tuple(external(f"c{n}") for n in range(OPEN_CONDITIONS_MAX)))

    for more in (
        {"tools": (external("more"),)},
        {"tools": (gated("more"),), "interactions": (question("i", "more"),)},
        {"waits": (c.WaitCondition("x.go"),)},
    ):
        with stage.refuses(LimitExceeded) as refused:
            owner.step(**more)
        assert refused.value.limit == OPEN_CONDITIONS_MAX


# ---- the end of a Run ----


@pytest.mark.spec("SE-12")
def test_a_steer_that_was_accepted_before_the_answer_was_final_gets_one_more_round() -> None:
    stage = Stage()
    owner = stage.running()
    stage.steer(owner.turn, "s1", "not that one")

    receipt = owner.answers("done")

    assert (receipt.ended, receipt.inputs, stage.status(owner.turn)) == (False, 1, "RUNNING")
    assert stage.messages() == ["hi", "not that one", "done"]
    owner.checkpoint(inputs=(1,))
    assert owner.answers("done again", message="m2").ended
    assert (stage.status(owner.turn), stage.signals()["s1"]) == ("COMPLETED", "APPLIED")


@pytest.mark.spec("SE-12")
def test_an_inject_does_not_reopen_an_answer_nor_does_a_steer_without_budget() -> None:
    for kind, end in (("inject", {}), ("steer", {"finish_reason": "exceed_max_iters"})):
        stage = Stage()
        owner = stage.running()
        getattr(stage, kind)(owner.turn, "s1", "late")

        assert owner.answers(**end).ended

        assert (stage.status(owner.turn), stage.signals()["s1"]) == ("COMPLETED", "EXPIRED")
        assert stage.messages()[1] == "late (expired)"


@pytest.mark.spec("SE-07", "SE-12")
@pytest.mark.parametrize("state", [None, S.UNKNOWN], ids=["running", "unknown"])
def test_nobody_calls_a_turn_done_over_a_tool_that_is_under_way(state: ExecutionState | None) -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    if state is not None:
        stage.outcome(owner.turn, state)

    with stage.refuses(InvalidTransition):
        owner.answers()
    assert owner.suspends().ended
    assert stage.status(owner.turn) == "WAITING"


def test_a_pause_that_was_accepted_first_beats_the_completion() -> None:
    stage = Stage()
    owner = stage.running()
    stage.pause(owner.turn)

    assert owner.answers("the answer").ended

    assert (stage.status(owner.turn), stage.view(owner.turn).result) == ("PAUSED", None)
    assert stage.messages() == ["hi", "the answer"], "the answer is stored"
    stage.resume(owner.turn)
    owner = stage.claim("b")
    owner.end(RunEndKind.COMPLETED, message_id="m1")
    result = stage.view(owner.turn).result
    assert (stage.status(owner.turn), result and result.message_id) == ("COMPLETED", "m1")


@pytest.mark.spec("CT-05")
def test_a_completion_that_commits_first_beats_the_cancel() -> None:
    stage = Stage()
    owner = stage.running()
    stage.cancel(owner.turn)
    stage.pause(owner.turn, "p")

    assert owner.answers().ended

    assert (stage.status(owner.turn), stage.view(owner.turn).cancel_requested) == ("COMPLETED", False)
    assert stage.signals() == {"cancel": "EXPIRED", "p": "EXPIRED"}


def test_a_cancel_does_not_wait_for_a_steer() -> None:
    stage = Stage()
    owner = stage.running()
    stage.steer(owner.turn, "s1")
    stage.cancel(owner.turn)

    assert owner.answers().ended
    assert (stage.status(owner.turn), stage.signals()["s1"]) == ("COMPLETED", "EXPIRED")


def test_a_run_that_stopped_for_a_pause_nobody_wants_any_more_goes_on() -> None:
    stage = Stage()
    owner = stage.running()
    owner.end(RunEndKind.PAUSED)

    assert (stage.status(owner.turn), stage.due()) == ("RUNNING", 0)


def test_a_run_does_not_end_in_a_way_that_nobody_asked_for() -> None:
    stage = Stage()
    owner = stage.running()

    for end in (
        c.RunEnd(kind=RunEndKind.CANCELLED),
        c.RunEnd(kind=RunEndKind.FAILED),
        c.RunEnd(kind=RunEndKind.COMPLETED, failure=FOR_GOOD),
    ):
        with stage.refuses(InvalidRequest) as refused:
            owner.step(end=end)
        assert (refused.value.path or "").startswith("end")


def test_a_run_may_leave_its_turn_to_a_person_if_it_is_suspended() -> None:
    """In any other way to end nobody would see why the Turn does not go on (P9)."""
    for kind in RunEndKind:
        stage = Stage()
        owner = stage.running()
        if kind is RunEndKind.CANCELLED:
            stage.cancel(owner.turn)
        end = c.RunEnd(kind=kind, operator="damaged", failure=TRY_AGAIN if kind is RunEndKind.FAILED else None)
        if kind is not RunEndKind.SUSPENDED:
            with stage.refuses(InvalidRequest) as refused:
                owner.step(end=end)
            assert refused.value.path == "end.operator"
            continue
        owner.step(end=end)
        assert (stage.status(owner.turn), stage.reasons(owner.turn), stage.due()) == ("WAITING", ["operator"], None)
        stage.release_turn(owner.turn)
        assert stage.due() == 0

        owner = stage.claim("b")
        stage.cancel(owner.turn)
        owner.step(end=end)
        assert (stage.reasons(owner.turn), stage.due()) == ([], 0), "a cancelled Turn needs nobody's leave to end"


def test_a_local_tool_that_its_run_leaves_behind_is_lost_however_the_run_ends() -> None:
    for kind in (RunEndKind.SUSPENDED, RunEndKind.PAUSED, RunEndKind.RELEASED, RunEndKind.CANCELLED):
        stage = Stage()
        owner = stage.running()
        owner.step(tools=(local("c1"), local("c2", ReplayRule.SAFE)))
        if kind is RunEndKind.CANCELLED:
            stage.cancel(owner.turn)
        owner.end(kind)

        assert stage.execution(owner.turn, "c1").state is S.UNKNOWN
        again = S.CANCELLED if kind is RunEndKind.CANCELLED else S.RUNNING
        assert stage.execution(owner.turn, "c2").state is again
        if kind is RunEndKind.SUSPENDED:
            assert stage.due() == 0, "the one that may be run again is a reason to go on"


def test_a_result_names_the_event_of_its_message() -> None:
    stage = Stage()
    owner = stage.running()
    owner.answers("the answer")

    result = stage.state(owner.turn).result
    assert result is not None
    event = stage.events()[result.message_seq - 1]
    assert (event.type, event.data["content"][0]["text"]) == ("message.completed", "the answer")
    assert stage.thread().settled_at == stage.thread().checkpoint_at


@pytest.mark.spec("EV-13")
@pytest.mark.parametrize(
    "name",
    [
        *sorted(PAYLOADS),
        *sorted(LEGACY_TYPES),
        "foo.bar",
        "artifact.created",
        "message.note",
        "x",
        "x.",
        "x.app",
        "x..note",
        "x.app.",
        "X.app.note",
        "x.app.no te",
        "x.app." + "n" * 128,
    ],
)
def test_an_applications_event_has_a_name_of_its_own_and_none_of_ours(name: str) -> None:
    stage = Stage()
    owner = stage.running()
    with stage.refuses(InvalidRequest) as refused:
        owner.step(events=(c.CustomEvent(name, body_of({"messageId": "m", "content": []})),))
    assert refused.value.path == "type"

    owner.step(events=(c.CustomEvent("x.app.note", body_of({"done": 1})),))
    [event] = stage.events("x.app.note")
    assert event.data == {"value": {"done": 1}}
