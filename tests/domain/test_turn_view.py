"""How a stored Turn looks from outside."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import Condition, Failure, Recovery, Result, TurnRecord, TurnState
from agentscope_durable.contracts.status import TERMINAL, TurnStatus, WaitKind
from agentscope_durable.contracts.views import ErrorView, RecoveryPolicy, ResultView, RunStepRefView, TurnView
from agentscope_durable.domain.turn_view import NEXT_ACTION, turn_view

SESSION = SessionKey("app", "s1")
FAILURE = Failure("TimeoutError", "the model did not answer", retryable=True)
QUERY_TIME = {WaitKind.HOST, WaitKind.DEFINITION_MISSING}


def _view(**changes: Any) -> TurnView:
    state = replace(TurnState(status=TurnStatus.WAITING, revision=7, updated_ms=900), **changes)
    record = TurnRecord("t1", "main", 3, "r1", created_ms=100, input_seq=4, state=TurnState())
    return turn_view(SESSION, record, state)


@pytest.mark.spec("PR-19")
def test_a_view_holds_what_the_record_and_the_state_say() -> None:
    view = _view(status=TurnStatus.RUNNING, runs=2, inputs=1)

    assert view == TurnView(
        session=SESSION,
        thread_id="main",
        turn_id="t1",
        request_id="r1",
        ordinal=3,
        status=TurnStatus.RUNNING,
        revision=7,
        created_at_ms=100,
        updated_at_ms=900,
        runs=2,
        pending_inputs=1,
    )


def test_a_turn_that_never_changed_was_updated_when_it_was_made() -> None:
    assert _view(updated_ms=0).updated_at_ms == 100


@pytest.mark.spec("PR-19")
def test_a_delegated_turn_names_its_parent() -> None:
    record = TurnRecord("t1", "main", 1, "r1", created_ms=1, input_seq=1, state=TurnState())
    parent = RunStepRefView(run_id="t0.1", step_id="t0.1.s1")

    assert turn_view(SESSION, record, record.state, parent=parent).parent == parent


@pytest.mark.parametrize(
    ("kind", "until"),
    [
        (WaitKind.APPROVAL, 0),
        (WaitKind.EXTERNAL_RESULT, 0),
        (WaitKind.TOOL_RUNNING, 0),
        (WaitKind.TOOL_UNKNOWN, 0),
        (WaitKind.CHILD, 0),
        (WaitKind.SIGNAL, 0),
        (WaitKind.SIGNAL, 5000),
    ],
)
def test_a_waiting_turn_names_each_open_condition_and_what_to_do(kind: WaitKind, until: int) -> None:
    call = "" if kind is WaitKind.SIGNAL else "c1"

    [waiting] = _view(conditions=(Condition(kind, "id1", call, since_ms=500, deadline_ms=until),)).waiting_on

    assert (waiting.kind, waiting.id, waiting.since_ms) == (kind, "id1", 500)
    assert waiting.call_id == (call or None)
    assert waiting.until_ms == (until or None)
    assert waiting.next_action.endswith(".")


def test_every_reason_to_wait_has_a_next_action() -> None:
    # A missing definition is named with its versions (domain/unclaimed).
    assert set(NEXT_ACTION) == set(WaitKind) - {WaitKind.DEFINITION_MISSING}


def test_an_answered_condition_holds_nothing_any_more() -> None:
    conditions = (
        Condition(WaitKind.APPROVAL, "i1", "c1", since_ms=1, ready=True),
        Condition(WaitKind.APPROVAL, "i2", "c2", since_ms=2),
    )

    assert [waiting.id for waiting in _view(conditions=conditions).waiting_on] == ["i2"]


@pytest.mark.parametrize("status", [TurnStatus.RUNNING, TurnStatus.PAUSING, *sorted(TERMINAL)])
def test_a_turn_that_runs_or_has_ended_waits_for_nothing(status: TurnStatus) -> None:
    conditions = (Condition(WaitKind.TOOL_RUNNING, "x1", "c1", since_ms=1),)

    assert _view(status=status, conditions=conditions, operator="look").waiting_on == ()


@pytest.mark.spec("CT-14")
def test_a_paused_turn_says_what_will_hold_it_after_resume() -> None:
    recovery = Recovery(3, 1000, 30_000, failures=1, next_retry_at_ms=4000, last_error=FAILURE)
    conditions = (Condition(WaitKind.APPROVAL, "i1", "c1", since_ms=1),)

    waiting = _view(status=TurnStatus.PAUSED, conditions=conditions, recovery=recovery).waiting_on

    assert [one.kind for one in waiting] == [WaitKind.APPROVAL, WaitKind.RETRY]
    assert waiting[1].until_ms == 4000


@pytest.mark.spec("RC-12", "RC-14")
def test_a_turn_in_backoff_says_since_when_and_until_when() -> None:
    recovery = Recovery(3, 1000, 30_000, failures=3, next_retry_at_ms=9000, last_error=FAILURE)

    view = _view(recovery=recovery)

    [waiting] = view.waiting_on
    assert (waiting.kind, waiting.since_ms, waiting.until_ms) == (WaitKind.RETRY, 5000, 9000)
    assert view.recovery is not None
    assert view.recovery.policy == RecoveryPolicy(3, 1000, 30_000)
    assert (view.recovery.failures, view.recovery.next_retry_at_ms) == (3, 9000)
    assert view.recovery.last_error == ErrorView("TimeoutError", "the model did not answer", True)


@pytest.mark.spec("RC-14")
def test_a_turn_that_never_failed_has_no_recovery() -> None:
    assert _view().recovery is None


@pytest.mark.spec("SE-02")
def test_a_cancelled_turn_waits_for_its_effects_and_not_for_questions() -> None:
    conditions = (
        Condition(WaitKind.APPROVAL, "i1", "c1", since_ms=1),
        Condition(WaitKind.TOOL_UNKNOWN, "x2", "c2", since_ms=2),
        Condition(WaitKind.SIGNAL, "x.k", "", since_ms=3),
    )
    recovery = Recovery(3, 1000, 30_000, failures=1, next_retry_at_ms=9000, last_error=FAILURE)

    view = _view(cancel="r9", conditions=conditions, recovery=recovery)

    assert view.cancel_requested
    assert [waiting.id for waiting in view.waiting_on] == ["x2"]


def test_settlement_that_is_tried_again_later_says_when() -> None:
    [waiting] = _view(failure=FAILURE, settle_ms=7000).waiting_on

    assert (waiting.kind, waiting.until_ms) == (WaitKind.RETRY, 7000)


def test_a_failure_for_good_is_shown_while_effects_are_open_and_after_the_end() -> None:
    error = ErrorView("TimeoutError", "the model did not answer", True)

    assert _view(failure=FAILURE).error == error
    assert _view(status=TurnStatus.FAILED, failure=FAILURE).error == error


def test_a_turn_that_needs_a_person_says_why() -> None:
    [waiting] = _view(operator="the Turn was taken over 6 times without a new checkpoint").waiting_on

    assert waiting.kind is WaitKind.OPERATOR
    assert "taken over 6 times" in waiting.next_action


def test_a_terminal_turn_is_not_being_cancelled_any_more() -> None:
    assert _view(status=TurnStatus.RUNNING, cancel="r9").cancel_requested
    assert not _view(status=TurnStatus.COMPLETED, cancel="r9").cancel_requested


def test_the_result_of_a_silent_agent_has_no_message() -> None:
    assert _view(status=TurnStatus.COMPLETED, result=Result("", 0)).result == ResultView(None, "completed")
    assert _view(status=TurnStatus.COMPLETED, result=Result("m1", 9, "exceed_max_iters")).result == ResultView(
        "m1", "exceed_max_iters"
    )


@pytest.mark.spec("PR-22")
def test_no_stored_state_says_what_only_the_moment_of_asking_knows() -> None:
    conditions = tuple(Condition(kind, "i", "c", since_ms=1) for kind in WaitKind if kind not in QUERY_TIME)

    view = _view(conditions=conditions, operator="x")

    assert view.lease is None
    assert not QUERY_TIME & {waiting.kind for waiting in view.waiting_on}


def test_a_view_is_the_same_after_a_journey_through_json() -> None:
    recovery = Recovery(3, 1000, 30_000, failures=1, next_retry_at_ms=4000, last_error=FAILURE)
    view = _view(recovery=recovery, conditions=(Condition(WaitKind.SIGNAL, "x.k", "", 1, deadline_ms=9),))

    assert msgspec.json.decode(msgspec.json.encode(view), type=TurnView) == view
