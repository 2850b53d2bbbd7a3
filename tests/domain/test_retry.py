"""A failed invocation is tried again, later and later, so often and no more; nothing hurries it and nothing forgets."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.commands import ClaimPurpose, RunEndKind
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.domain.retry import backoff_ms
from tests.domain.stage import FOR_GOOD, TRY_AGAIN, Owner, Stage

S = ExecutionState


def test_the_wait_doubles_from_the_first_to_the_cap_for_any_number_of_failures() -> None:
    assert [backoff_ms(1000, 30_000, failures) for failures in range(1, 8)] == [
        1000,
        2000,
        4000,
        8000,
        16_000,
        30_000,
        30_000,
    ]
    assert backoff_ms(1000, 30_000, 10**9) == 30_000
    assert backoff_ms(0, 30_000, 5) == 0


@pytest.mark.spec("RC-11", "RC-16", "RC-17", "RC-20")
def test_by_default_a_turn_is_tried_three_more_times_after_one_two_and_four_seconds() -> None:
    stage = Stage()
    turn = stage.submit()
    waits: list[int] = []
    for number in range(1, 5):
        owner = stage.claim(f"host {number}")
        assert owner.claimed.run_number == number
        owner.fails()
        if number < 4:
            due = stage.due()
            assert due is not None and stage.reasons(turn) == ["retry"]
            waits.append(due)
            stage.pass_time(due - 1)
            assert stage.claim().claimed.purpose is ClaimPurpose.NOTHING
            stage.pass_time(1)

    assert waits == [1000, 2000, 4000]
    view = stage.view(turn)
    assert (view.status, view.runs, view.recovery and view.recovery.failures) == ("WAITING", 4, 4)
    assert stage.claim().claimed.purpose is ClaimPurpose.SETTLE, "no invocation follows, only the settlement"
    assert [stage.run(turn, number).status.value for number in range(1, 5)] == ["FAILED"] * 4
    assert {stage.run(turn, number).failure for number in range(1, 5)} == {TRY_AGAIN}
    assert {e.data["error"]["kind"] for e in stage.events("run.ended")} == {"TimeoutError"}


@pytest.mark.spec("RC-11")
def test_the_wait_never_exceeds_the_cap() -> None:
    stage = Stage()
    stage.submit()
    waits: list[int | None] = []
    for _ in range(8):
        stage.claim().fails(policy=RecoveryPolicy(max_retries=8))
        waits.append(stage.due())
        stage.pass_time(waits[-1] or 0)

    assert waits == [1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000]


@pytest.mark.spec("RC-12", "RC-14", "EV-21")
def test_the_first_failure_keeps_its_policy_its_count_and_its_time() -> None:
    stage = Stage()
    owner = stage.running()
    assert stage.view(owner.turn).recovery is None
    policy = RecoveryPolicy(max_retries=5, initial_backoff_ms=700, max_backoff_ms=900)
    owner.fails(policy=policy)

    recovery = stage.view(owner.turn).recovery
    assert recovery is not None
    assert (recovery.policy, recovery.failures) == (policy, 1)
    assert (recovery.next_retry_at_ms, recovery.last_error.kind) == (stage.clock() + 700, "TimeoutError")
    [event] = stage.events("turn.recovery")
    assert event.data["recovery"]["nextRetryAtMs"] == stage.clock() + 700
    [reason] = stage.view(owner.turn).waiting_on
    assert (reason.since_ms, reason.until_ms) == (stage.clock(), stage.clock() + 700)


@pytest.mark.spec("RC-13")
def test_another_host_with_another_policy_changes_nothing() -> None:
    stage = Stage()
    turn = stage.submit()
    first = RecoveryPolicy(max_retries=2, initial_backoff_ms=500, max_backoff_ms=10_000)
    generous = RecoveryPolicy(max_retries=100, initial_backoff_ms=1, max_backoff_ms=1)
    stage.claim("a").fails(policy=first)
    for wait in (500, 1000):
        assert stage.due() == wait
        stage.pass_time(wait)
        stage.claim("b").fails(policy=generous)

    recovery = stage.view(turn).recovery
    assert recovery is not None and (recovery.policy, recovery.failures) == (first, 3)
    assert stage.claim("b").claimed.purpose is ClaimPurpose.SETTLE


@pytest.mark.spec("RC-13")
def test_signals_answers_inputs_and_results_do_not_shorten_a_backoff() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.calls_hands()
    owner.asks("c2", "i1")
    owner.step(waits=(c.WaitCondition("x.go"),))
    stage.dispatch(turn)
    owner.fails()

    stage.pass_time(400)
    for happens in (
        lambda: stage.steer(turn),
        lambda: stage.signal(turn, "x.go"),
        lambda: stage.respond(turn, "i1"),
        lambda: stage.outcome(turn),
        lambda: stage.withdraw(turn, "steer"),
    ):
        happens()
        assert stage.due() == 600
    stage.pass_time(600)
    assert stage.claim("b").claimed.run_number == 2


@pytest.mark.spec("CT-16", "RC-13")
def test_a_pause_in_the_backoff_beats_the_retry_and_keeps_its_time() -> None:
    stage = Stage()
    owner = stage.running()
    owner.fails()
    at = stage.clock() + 1000
    stage.pause(owner.turn)
    stage.pass_time(400)

    assert (stage.status(owner.turn), stage.due()) == ("PAUSED", None)
    stage.resume(owner.turn)
    assert (stage.status(owner.turn), stage.due()) == ("WAITING", 600)

    stage.pause(owner.turn, "p2")
    stage.pass_time(5_000)
    assert stage.claim("b").claimed.purpose is ClaimPurpose.NOTHING, "no retry at its time"
    recovery = stage.view(owner.turn).recovery
    assert recovery is not None and (recovery.failures, recovery.next_retry_at_ms) == (1, at)
    stage.resume(owner.turn, "u2")
    assert (stage.status(owner.turn), stage.due()) == ("RUNNING", 0)


@pytest.mark.spec("CT-16")
def test_a_retryable_failure_while_pausing_is_paused_with_its_time() -> None:
    stage = Stage()
    owner = stage.running()
    stage.pause(owner.turn)
    owner.fails()

    assert (stage.status(owner.turn), stage.signals()["pause"]) == ("PAUSED", "APPLIED")
    recovery = stage.view(owner.turn).recovery
    assert recovery is not None and recovery.next_retry_at_ms == stage.clock() + 1000
    stage.resume(owner.turn)
    assert (stage.status(owner.turn), stage.due()) == ("WAITING", 1000)


@pytest.mark.spec("CT-16")
def test_a_failure_for_good_while_pausing_goes_to_settlement_at_once() -> None:
    stage = Stage()
    owner = stage.running()
    stage.pause(owner.turn)
    owner.fails(FOR_GOOD)

    assert (stage.status(owner.turn), stage.due()) == ("WAITING", 0)
    stage.claim("b").settle()
    assert (stage.status(owner.turn), stage.signals()["pause"]) == ("FAILED", "EXPIRED")


@pytest.mark.spec("CT-16", "CT-17")
def test_a_cancel_settles_at_once_also_while_paused_in_a_backoff() -> None:
    stage = Stage()
    owner = stage.running()
    owner.fails()
    stage.pause(owner.turn)
    stage.cancel(owner.turn)

    assert (stage.status(owner.turn), stage.due()) == ("WAITING", 0)
    stage.claim("b").settle()
    assert stage.status(owner.turn) == "CANCELLED"
    assert stage.signals() == {"pause": "APPLIED", "cancel": "APPLIED"}
    recovery = stage.view(owner.turn).recovery
    assert recovery is not None and recovery.next_retry_at_ms is None, "nothing is due any more"


@pytest.mark.spec("RC-17")
def test_a_failure_that_no_retry_can_help_ends_the_invocations() -> None:
    stage = Stage()
    owner = stage.running()
    owner.fails(FOR_GOOD)
    stage.pass_time(10**9)

    settling = stage.claim("b")
    assert settling.claimed.purpose is ClaimPurpose.SETTLE
    settling.settle()
    assert (stage.status(owner.turn), stage.view(owner.turn).runs) == ("FAILED", 1)


@pytest.mark.spec("RC-24")
def test_a_retry_whose_time_passed_while_no_host_was_up_runs_once() -> None:
    stage = Stage()
    owner = stage.running()
    owner.fails()
    stage.pass_time(10**9)

    again = stage.claim("b")
    assert again.claimed.run_number == 2
    assert stage.claim("d").claimed.purpose is ClaimPurpose.NOTHING
    again.answers()
    assert stage.status(owner.turn) == "COMPLETED"


def test_the_count_is_never_reset_within_a_turn() -> None:
    stage = Stage()
    owner = stage.running()
    owner.fails()
    stage.pass_time(1000)
    owner = stage.claim()
    owner.checkpoint(steps=(owner.fact(1),))
    owner.asks()
    owner.suspends()
    stage.respond(owner.turn, "i1")
    owner = stage.claim()
    owner.fails()

    recovery = stage.view(owner.turn).recovery
    assert recovery is not None and recovery.failures == 2
    assert stage.due() == 2000


@pytest.mark.spec("RC-15")
def test_no_retry_starts_a_call_again_whose_outcome_is_unknown() -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands("c1")
    owner.starts_local("c2")
    stage.dispatch(owner.turn)
    stage.outcome(owner.turn, S.UNKNOWN)
    owner.fails(TRY_AGAIN)
    stage.pass_time(1000)

    again: Owner = stage.claim("b")
    assert [stage.execution(again.turn, call).state for call in ("c1", "c2")] == [S.UNKNOWN, S.UNKNOWN]
    assert stage.dispatch(again.turn).action is c.ExecutionAction.QUERY
    with stage.refuses(InvalidRequest):
        again.starts_local("c2")
    again.end(RunEndKind.SUSPENDED)
    assert stage.reasons(again.turn) == ["tool_unknown", "tool_unknown"]
