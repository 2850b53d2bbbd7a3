"""A tool call outside the agent: started at most once, asked for as often as it takes, and never guessed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.commands import ExecutionAction, RunEndKind
from agentscope_durable.contracts.errors import InvalidRequest, InvalidTransition, NotFound, RequestConflict
from agentscope_durable.contracts.records import ObjectRecord
from agentscope_durable.contracts.status import Audience, ExecutionKind, ExecutionState
from agentscope_durable.domain.execution import MOVES, RECHECK_MS
from agentscope_durable.domain.rules import RULES
from tests.domain.stage import LEASE_MS, Owner, Stage, external

S = ExecutionState
A = ExecutionAction


def sent() -> tuple[Stage, Owner]:
    """A Turn that waits for its external call `c1`, which nobody has started."""
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()
    owner.suspends()
    return stage, owner


def started() -> tuple[Stage, Owner]:
    stage, owner = sent()
    assert stage.dispatch(owner.turn).action is A.START
    return stage, owner


def test_the_table_knows_every_state_and_no_way_back_from_an_outcome() -> None:
    assert set(MOVES) == set(ExecutionState)
    assert {state for state, ways in MOVES.items() if not ways} == {state for state in S if state.terminal}


# ---- the one start ----


def test_a_start_is_granted_once_and_says_what_to_do() -> None:
    stage, owner = sent()

    grant = stage.dispatch(owner.turn)

    call = stage.execution(owner.turn)
    assert (grant.action, grant.execution_id, grant.name, grant.route) == (
        A.START,
        call.execution_id,
        "restart",
        "hands",
    )
    assert grant.origin == call.origin and grant.arguments is not None
    assert (call.state, call.owner, call.fence, call.started_ms) == (S.RUNNING, "hands", 1, stage.clock())
    assert [e.data["state"] for e in stage.events("tool.started")] == ["RUNNING"]
    for owner_id in ("hands", "others"):
        again = stage.dispatch(owner.turn, owner=owner_id).action
        assert again is (A.QUERY if owner_id == "hands" else A.NOTHING)


def test_after_its_dispatcher_was_lost_an_execution_is_asked_for_and_not_started() -> None:
    stage, owner = started()
    original = stage.execution(owner.turn).execution_id
    assert stage.dispatch(owner.turn, owner="others").action is A.NOTHING, "whoever started it lives"

    stage.pass_time(LEASE_MS)
    grant = stage.dispatch(owner.turn, owner="others")

    assert (grant.action, grant.execution_id, grant.tries) == (A.QUERY, original, 1)
    assert (stage.execution(owner.turn).owner, stage.execution(owner.turn).fence) == ("others", 2)
    assert stage.dispatch(owner.turn, owner="third", dead=("others",)).action is A.QUERY


def test_a_dispatcher_that_never_heard_of_its_start_is_granted_that_same_start_again() -> None:
    stage, owner = started()
    again = c.ClaimExecution(
        session=stage.session, thread_id="main", turn_id=owner.turn, call_id="c1", owner="hands", again=True
    )

    grant = stage.do(again)
    assert (grant.action, grant.tries) == (A.START, 0)
    assert stage.change is None
    assert stage.do(replace(again, owner="others")).action is A.NOTHING
    assert stage.do(replace(again, again=False)).action is A.QUERY
    assert stage.do(again).action is A.QUERY, "since it was asked for, it may have been started"


def test_a_start_that_was_never_heard_of_is_void_once_the_turn_is_cancelled() -> None:
    stage, owner = started()
    stage.cancel(owner.turn)
    again = c.ClaimExecution(
        session=stage.session, thread_id="main", turn_id=owner.turn, call_id="c1", owner="hands", again=True
    )

    assert stage.do(again).action is A.NOTHING
    assert (stage.execution(owner.turn).state, stage.due()) == (S.CANCELLED, 0)


def test_each_look_at_what_is_not_known_is_counted() -> None:
    """A dispatcher waits longer each time."""
    stage, owner = started()
    for tries in range(1, 4):
        stage.outcome(owner.turn, S.UNKNOWN if tries == 1 else S.RUNNING, retry_after_ms=1)
        assert stage.execution(owner.turn).tries == 2 * tries - 1
        assert stage.dispatch(owner.turn).tries == 2 * tries


def test_only_external_calls_that_are_under_way_are_for_dispatchers() -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("local")
    owner.asks("gated", "i1")
    owner.asks_for_result("manual", "i2")
    owner.tool("asked", S.REQUESTED, name="n", kind=ExecutionKind.EXTERNAL, route="hands")

    for call in ("local", "gated", "manual", "asked"):
        assert stage.dispatch(owner.turn, call).action is A.NOTHING
        assert stage.change is None
    with stage.refuses(NotFound):
        stage.dispatch(owner.turn, "nothing")


# ---- outcomes ----


@pytest.mark.spec("PR-08")
def test_that_it_ended_that_this_was_received_and_that_it_was_applied_are_three_facts() -> None:
    stage, owner = started()
    tool = f"main/{owner.turn}/c1"

    def facts() -> tuple[str, bool, bool]:
        view = stage.world.fold.projection.tools[tool]
        return view.state.value, view.received_at_ms is not None, view.applied_at_ms is not None

    assert facts() == ("RUNNING", False, False)
    stage.outcome(owner.turn)
    assert facts() == ("COMPLETED", True, False)
    owner = stage.claim("b")
    owner.tool("c1", S.COMPLETED, applied=True)
    assert facts() == ("COMPLETED", True, True)


@pytest.mark.parametrize("state", [S.COMPLETED, S.FAILED, S.CANCELLED])
def test_an_outcome_wakes_its_turn(state: ExecutionState) -> None:
    stage, owner = started()
    assert (stage.reasons(owner.turn), stage.due()) == (["tool_running"], None)

    assert stage.outcome(owner.turn, state) == c.OutcomeRecorded(state, settled=True)

    assert (stage.reasons(owner.turn), stage.due(), stage.status(owner.turn)) == ([], 0, "WAITING")


def test_an_outcome_that_comes_while_the_agent_runs_is_told_with_its_next_commit() -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    assert owner.step().ready == 0
    revision = stage.state(owner.turn).revision

    stage.outcome(owner.turn)

    assert owner.step().ready == 1
    assert stage.state(owner.turn).revision == revision, "a running Turn shows no reasons, so nothing has changed"


def test_an_execution_that_goes_on_is_looked_at_again() -> None:
    stage, owner = started()
    item = f"{owner.turn}/c1"

    for wait, due in ((1_000, 1_000), (0, RECHECK_MS)):
        stage.outcome(owner.turn, S.RUNNING, retry_after_ms=wait)
        row = stage.ready(keys.READY_DISPATCH, item)
        assert row is not None and row.due_ms == stage.clock() + due
        assert stage.ready(keys.READY_RUNNING, item) is None, "from any host that serves the route"
        assert stage.dispatch(owner.turn, owner="others").action is A.QUERY


def test_an_outcome_is_that_of_the_call_it_names() -> None:
    stage, owner = started()

    with stage.refuses(InvalidRequest) as refused:
        stage.outcome(owner.turn, execution_id="another")
    assert refused.value.path == "execution_id"
    for state in (S.REQUESTED, S.INTENT, S.AWAITING_APPROVAL, S.DENIED):
        with stage.refuses(InvalidRequest) as refused:
            stage.outcome(owner.turn, state)
        assert refused.value.path == "state"


def test_what_an_executor_tells_is_about_external_calls() -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("local")
    owner.asks_for_result("manual", "i2")

    for call in ("local", "manual"):
        with stage.refuses(InvalidRequest):
            stage.outcome(owner.turn, S.COMPLETED, call)


# ---- unknown, and late ----


@pytest.mark.case("C03")
@pytest.mark.spec("UN-12")
def test_an_outcome_nobody_can_confirm_stays_unknown_until_the_truth_arrives_and_is_applied_once() -> None:
    stage, owner = started()
    original = stage.execution(owner.turn).execution_id
    stage.outcome(owner.turn, S.UNKNOWN)

    assert (stage.status(owner.turn), stage.reasons(owner.turn), stage.due()) == ("WAITING", ["tool_unknown"], None)
    stage.pass_time(2 * 3_600_000)
    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING
    assert stage.dispatch(owner.turn).action is A.QUERY, "asked for, and never sent again"
    assert stage.outcome(owner.turn, S.COMPLETED) == c.OutcomeRecorded(S.COMPLETED, settled=True)
    assert stage.due() == 0
    assert stage.outcome(owner.turn, S.COMPLETED) == c.OutcomeRecorded(S.COMPLETED, settled=False)
    assert stage.change is None

    owner = stage.claim("b")
    owner.tool("c1", S.COMPLETED, applied=True)
    owner.answers()
    assert stage.execution(owner.turn).execution_id == original
    assert len(stage.events("tool.started")) == len(stage.events("tool.applied")) == 1


@pytest.mark.case("C03")
@pytest.mark.spec("UN-12")
def test_after_a_reconciliation_a_late_outcome_is_an_audit_record_and_nothing_else() -> None:
    stage, owner = started()
    stage.outcome(owner.turn, S.UNKNOWN)
    stage.reconcile(owner.turn, state=S.FAILED)
    events, state = len(stage.events()), stage.state(owner.turn)

    assert stage.outcome(owner.turn, S.COMPLETED, result="late") == c.OutcomeRecorded(S.FAILED, settled=False)

    call = stage.execution(owner.turn)
    assert (call.state, call.evidence, call.late_state) == (S.FAILED, "ticket-7", S.COMPLETED)
    assert call.late is not None
    assert (len(stage.events()), stage.state(owner.turn)) == (events, state)
    stage.outcome(owner.turn, S.CANCELLED)
    assert stage.change is None, "the first one that came late is kept"


def test_a_late_outcome_without_a_result_and_one_that_is_stored_elsewhere_are_kept_as_well() -> None:
    stage, owner = started()
    stage.outcome(owner.turn, S.CANCELLED)
    large = stage.large(b"large")
    command = c.RecordOutcome(
        session=stage.session,
        thread_id="main",
        turn_id=owner.turn,
        call_id="c1",
        execution_id=stage.execution(owner.turn).execution_id,
        state=S.COMPLETED,
        result=large,
    )
    stage.do(command)
    assert stage.get(keys.object_(large.name), ObjectRecord).state == "referenced", (
        "it is referred to, so no sweep takes it"
    )

    stage, owner = started()
    stage.outcome(owner.turn)
    stage.do(replace(command, execution_id=stage.execution(owner.turn).execution_id, state=S.FAILED, result=None))
    assert stage.execution(owner.turn).late_state is S.FAILED
    stage.do(replace(command, execution_id=stage.execution(owner.turn).execution_id, state=S.FAILED, result=None))
    assert stage.change is None


def test_what_was_unknown_may_be_found_running() -> None:
    stage, owner = started()
    stage.outcome(owner.turn, S.UNKNOWN, retry_after_ms=1_000)
    assert stage.reasons(owner.turn) == ["tool_unknown"]
    row = stage.ready(keys.READY_DISPATCH, f"{owner.turn}/c1")
    assert row is not None and row.due_ms == stage.clock() + 1_000
    stage.pass_time(1_000)
    stage.dispatch(owner.turn, owner="others")

    stage.outcome(owner.turn, S.RUNNING)

    assert (stage.reasons(owner.turn), stage.execution(owner.turn).state) == (["tool_running"], S.RUNNING)


def test_an_execution_that_was_found_running_is_never_started() -> None:
    """Whoever found it: nothing may conclude that a send was not admitted (D19)."""
    stage, owner = sent()
    stage.outcome(owner.turn, S.RUNNING)

    assert stage.dispatch(owner.turn).action is A.QUERY


# ---- reconciliation ----


@pytest.mark.spec("UN-03")
def test_only_what_is_unknown_is_reconciled() -> None:
    stage, owner = sent()
    with stage.refuses(InvalidTransition):
        stage.reconcile(owner.turn)
    stage.dispatch(owner.turn)
    with stage.refuses(InvalidTransition):
        stage.reconcile(owner.turn)
    stage.outcome(owner.turn)
    with stage.refuses(InvalidTransition):
        stage.reconcile(owner.turn)
    with stage.refuses(NotFound):
        stage.reconcile(owner.turn, "nothing")


@pytest.mark.spec("UN-10")
def test_a_reconciliation_needs_an_outcome_and_evidence_of_it() -> None:
    stage, owner = started()
    stage.outcome(owner.turn, S.UNKNOWN)

    for state in set(S) - {S.COMPLETED, S.FAILED, S.CANCELLED}:
        with stage.refuses(InvalidRequest) as refused:
            stage.reconcile(owner.turn, state=state)
        assert refused.value.path == "state"
    with stage.refuses(InvalidRequest) as refused:
        stage.reconcile(owner.turn, evidence="")
    assert refused.value.path == "evidence_ref"


@pytest.mark.spec("UN-11")
def test_a_repeated_reconciliation_returns_its_receipt_and_another_one_under_its_id_conflicts() -> None:
    stage, owner = started()
    stage.outcome(owner.turn, S.UNKNOWN)
    receipt = stage.reconcile(owner.turn)

    assert stage.reconcile(owner.turn) == receipt
    assert stage.change is None
    for other, field in (
        ({"result": "other"}, "result"),
        ({"state": S.FAILED}, "state"),
        ({"evidence": "ticket-8"}, "evidence"),
        ({"call": "c2"}, "call"),
    ):
        with stage.refuses(RequestConflict) as refused:
            stage.reconcile(owner.turn, **other)
        assert refused.value.field == field


@pytest.mark.spec("UN-06", "UN-13")
@pytest.mark.parametrize("local", [False, True], ids=["external", "local"])
def test_a_reconciled_call_goes_on_by_the_ordinary_path_with_its_first_origin(local: bool) -> None:
    assert RULES[c.ReconcileTool].audience is Audience.OPERATOR
    stage = Stage()
    first = stage.running()
    first.begins(1)
    if local:
        first.starts_local()
        stage.dies("a")
        stage.claim("b").suspends()
    else:
        first.calls_hands()
        first.suspends()
        stage.dispatch(first.turn)
        stage.outcome(first.turn, S.UNKNOWN)
    assert stage.due() is None

    receipt = stage.reconcile(first.turn)

    assert (receipt.state, receipt.evidence_ref, receipt.accepted_at_ms) == (S.COMPLETED, "ticket-7", stage.clock())
    assert stage.due() == 0
    last = stage.claim("d")
    last.tool("c1", S.COMPLETED, applied=True)
    last.answers()
    call = stage.execution(first.turn)
    assert (call.origin.run_id, call.origin.step_id) == (first.run, f"{first.run}.s1")
    assert call.applied_at is not None and call.applied_at.run_id == last.run
    assert len(stage.events("tool.applied")) == 1


# ---- cancel ----


def test_what_was_not_started_is_cancelled_at_once_and_never_starts() -> None:
    stage, owner = sent()
    stage.cancel(owner.turn)

    call = stage.execution(owner.turn)
    assert (call.state, call.started_ms, call.cancel_requested, stage.due()) == (S.CANCELLED, 0, True, 0)
    assert stage.dispatch(owner.turn).action is A.NOTHING


def test_an_intent_that_its_run_commits_after_the_cancel_is_not_started_either() -> None:
    stage = Stage()
    owner = stage.running()
    stage.cancel(owner.turn)
    owner.calls_hands()

    assert stage.dispatch(owner.turn).action is A.NOTHING
    assert stage.execution(owner.turn).state is S.CANCELLED
    owner.end(RunEndKind.CANCELLED)
    owner.settle(applied=("c1",))
    assert stage.status(owner.turn) == "CANCELLED"


@pytest.mark.spec("SE-01")
def test_what_was_started_is_asked_to_stop_under_its_own_id() -> None:
    stage, owner = started()
    original = stage.execution(owner.turn).execution_id
    stage.cancel(owner.turn)

    call = stage.execution(owner.turn)
    assert (call.state, call.cancel_requested) == (S.RUNNING, True)
    grant = stage.dispatch(owner.turn)
    assert (grant.action, grant.execution_id) == (A.CANCEL, original)
    assert len(stage.events("tool.cancel_requested")) == 1


@pytest.mark.spec("SE-09")
def test_a_tool_that_was_faster_than_the_cancel_keeps_its_true_result() -> None:
    stage, owner = started()
    stage.cancel(owner.turn)
    stage.dispatch(owner.turn)
    stage.outcome(owner.turn, S.COMPLETED, result="done after all")

    stage.claim("b").settle(applied=("c1",))

    view = stage.world.fold.projection.tools[f"main/{owner.turn}/c1"]
    assert (view.state, view.result, view.cancel_requested) == (S.COMPLETED, {"value": "done after all"}, True)
    assert stage.status(owner.turn) == "CANCELLED"


def test_a_cancel_that_nobody_has_passed_on_is_still_to_be_passed_on_when_the_outcome_becomes_unknown() -> None:
    stage, owner = started()
    stage.cancel(owner.turn)
    stage.outcome(owner.turn, S.UNKNOWN)

    assert stage.reasons(owner.turn) == ["tool_unknown"]
    assert stage.ready(keys.READY_DISPATCH, f"{owner.turn}/c1") is not None
    assert stage.dispatch(owner.turn, owner="others").action is A.CANCEL
    stage.outcome(owner.turn, S.CANCELLED)
    stage.claim("b").settle(applied=("c1",))
    assert stage.status(owner.turn) == "CANCELLED"


def test_several_calls_are_each_on_their_own() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(tools=(external("c1"), external("c2"), external("c3")))
    owner.suspends()
    ids = {stage.execution(owner.turn, call).execution_id for call in ("c1", "c2", "c3")}
    assert len(ids) == 3
    stage.dispatch(owner.turn, "c1")
    stage.dispatch(owner.turn, "c2")
    stage.outcome(owner.turn, S.UNKNOWN, "c1")
    stage.outcome(owner.turn, S.FAILED, "c2")

    assert stage.reasons(owner.turn) == ["tool_unknown", "tool_running"]
    assert stage.due() == 0, "one can be applied"
    owner = stage.claim("b")
    owner.tool("c2", S.FAILED, applied=True)
    owner.suspends()
    assert (stage.reasons(owner.turn), stage.due()) == (["tool_unknown", "tool_running"], None)


def test_arguments_travel_with_the_grant_and_a_local_calls_arguments_are_stored_once() -> None:
    stage = Stage()
    owner = stage.running()
    owner.starts_local("c1")
    owner.calls_hands("c2")

    assert bytes(stage.execution(owner.turn, "c1").arguments.inline) == b"null"
    grant = stage.dispatch(owner.turn, "c2")
    assert grant.arguments is not None and bytes(grant.arguments.inline) == bytes(body_of("{}").inline)
