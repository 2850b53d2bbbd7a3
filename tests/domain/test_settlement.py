"""A cancelled or failed Turn ends when its effects are known, in one commit, outside any Run."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.commands import ClaimPurpose, ExecutionAction, RunEndKind
from agentscope_durable.contracts.errors import Fenced, InvalidRequest, InvalidTransition, NotFound
from agentscope_durable.contracts.records import Failure
from agentscope_durable.contracts.status import ExecutionState
from tests.domain.stage import FOR_GOOD, LEASE_MS, TRY_AGAIN, Owner, Stage, external

S = ExecutionState
NO_STORE = Failure("OSError", "the store does not answer")


def failing(stage: Stage, state: ExecutionState | None = None) -> Owner:
    """A Turn that failed for good while its call `c1` was under way."""
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    if state is not None:
        stage.outcome(owner.turn, state)
    owner.fails(FOR_GOOD)
    return owner


@pytest.mark.spec("SE-01")
def test_after_a_failure_for_good_what_was_issued_is_asked_to_stop_under_its_own_id() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(tools=(external("c1"), external("c2")))
    stage.dispatch(owner.turn, "c1")
    original = stage.execution(owner.turn, "c1").execution_id

    owner.fails(FOR_GOOD)

    assert (stage.status(owner.turn), stage.reasons(owner.turn)) == ("WAITING", ["tool_running"])
    error = stage.view(owner.turn).error
    assert error is not None and error.kind == "ValueError", "the failure is shown as soon as it is known"
    assert stage.execution(owner.turn, "c2").state is S.CANCELLED, "never started, so over at once"
    grant = stage.dispatch(owner.turn, "c1")
    assert (grant.action, grant.execution_id) == (ExecutionAction.CANCEL, original)


@pytest.mark.spec("SE-02")
def test_an_unknown_effect_keeps_a_failed_turn_waiting_until_it_is_known() -> None:
    stage = Stage()
    owner = failing(stage, S.UNKNOWN)
    stage.pass_time(10**9)

    assert (stage.status(owner.turn), stage.reasons(owner.turn), stage.due()) == ("WAITING", ["tool_unknown"], None)
    assert stage.claim("b").claimed.purpose is ClaimPurpose.NOTHING
    stage.reconcile(owner.turn)
    settling = stage.claim("b")
    assert settling.claimed.purpose is ClaimPurpose.SETTLE
    assert settling.claimed.failure == FOR_GOOD
    settling.settle(applied=("c1",))

    assert stage.status(owner.turn) == "FAILED"
    error = stage.view(owner.turn).error
    assert error is not None and error.message == "a defect"


@pytest.mark.spec("SE-05", "SE-10")
def test_settlement_starts_no_run_and_applies_results_at_no_place() -> None:
    stage = Stage()
    owner = failing(stage, S.COMPLETED)
    settling = stage.claim("b")
    assert (settling.run, settling.claimed.run_number) == ("", 0)

    settling.settle(applied=("c1",))

    assert stage.view(owner.turn).runs == 1
    assert keys.run(owner.turn, 2) not in stage.world.dump.records
    assert len(stage.events("run.started")) == 1
    tool = stage.world.fold.projection.tools[f"main/{owner.turn}/c1"]
    assert (tool.applied_at, tool.applied_at_ms) == (None, stage.clock())


def test_cleaned_state_confirmed_results_and_the_end_are_one_commit() -> None:
    stage = Stage()
    owner = failing(stage, S.COMPLETED)
    behind = stage.submit("r2")
    settling = stage.claim("b")

    settling.settle(journal=b"[clean]", checkpoint=True, base=True, writer="2.0.8", applied=("c1",))

    change = stage.change
    assert change is not None and change.entry is not None
    at = settling.position + 1
    assert (change.entry.journal, change.entry.stream, change.entry.at) == (b"[clean]", "main", at)
    assert {keys.turn(owner.turn), keys.execution(owner.turn, "c1")} <= set(dict(change.puts))
    assert stage.turn(owner.turn).last_at == at
    thread = stage.thread()
    assert (thread.checkpoint_at, thread.base_at, thread.settled_at, thread.writer) == (at, at, at, "2.0.8")
    assert thread.current == behind
    claimed = stage.claim("d").claimed
    assert (claimed.turn_id, claimed.checkpoint_at, claimed.position) == (behind, at, at + 1)


def test_a_settlement_that_cleaned_nothing_keeps_the_state_there_was() -> None:
    stage = Stage()
    owner = stage.running()
    owner.checkpoint()
    owner.fails(FOR_GOOD)
    stage.claim("b").settle()

    assert (stage.thread().checkpoint_at, stage.thread().settled_at) == (2, 2)


def test_a_cancelled_run_is_settled_by_its_owner_under_the_same_fence() -> None:
    stage = Stage()
    owner = stage.running()
    stage.cancel(owner.turn)
    owner.end(RunEndKind.CANCELLED)
    active = stage.world.dump.active("main")
    assert active is not None and (active.fence, active.owner, active.run.run_id) == (1, "a", "")

    owner.settle()
    assert (stage.status(owner.turn), stage.run(owner.turn).status.value) == ("CANCELLED", "CANCELLED")


def test_a_turn_that_was_cancelled_and_then_failed_is_cancelled() -> None:
    for failure in (TRY_AGAIN, FOR_GOOD):
        stage = Stage()
        owner = stage.running()
        stage.cancel(owner.turn)
        owner.fails(failure)

        recovery = stage.view(owner.turn).recovery
        assert recovery is not None and (recovery.failures, recovery.next_retry_at_ms) == (1, None)
        assert stage.due() == 0
        stage.claim("b").settle()
        assert stage.status(owner.turn) == "CANCELLED"


# ---- what is refused ----


def test_only_a_turn_that_is_to_be_settled_and_whose_effects_are_known_is_settled() -> None:
    stage = Stage()
    owner = failing(stage)
    stage.outcome(owner.turn)
    settling = stage.claim("b")
    with stage.refuses(NotFound):
        settling.settle(applied=("nothing",))

    stage = Stage()
    owner = stage.running()
    with stage.refuses(Fenced):
        owner.settle()
    stage.cancel(owner.turn)
    owner.calls_hands()
    stage.dispatch(owner.turn)
    owner.end(RunEndKind.CANCELLED)
    assert stage.execution(owner.turn).state is S.CANCELLED, "an intent after the cancel was never started"

    stage = Stage()
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    stage.cancel(owner.turn)
    owner.end(RunEndKind.CANCELLED)
    with stage.refuses(InvalidTransition) as refused:
        owner.settle()
    assert refused.value.to == "settled"
    with stage.refuses(InvalidTransition):
        owner.settle(applied=("c1",))


def test_a_result_that_nobody_has_is_not_applied() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks()
    owner.fails(FOR_GOOD)

    with stage.refuses(InvalidRequest) as refused:
        stage.claim("b").settle(applied=("c2",))
    assert refused.value.path == "applied"


# ---- later ----


def test_a_settlement_that_must_wait_gives_the_turn_back_and_an_outcome_wakes_it() -> None:
    stage = Stage()
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    stage.cancel(owner.turn)
    stage.pause(owner.turn, "p")
    owner.end(RunEndKind.CANCELLED)

    owner.postpone()

    assert (stage.status(owner.turn), stage.reasons(owner.turn), stage.due()) == ("WAITING", ["tool_running"], None)
    stage.outcome(owner.turn, S.CANCELLED)
    assert stage.due() == 0
    stage.claim("b").settle(applied=("c1",))
    assert stage.status(owner.turn) == "CANCELLED"


def test_a_settlement_that_fails_is_tried_again_ever_later() -> None:
    stage = Stage()
    owner = failing(stage, S.COMPLETED)
    waits: list[int | None] = []
    for _ in range(7):
        settling = stage.claim("b")
        assert settling.claimed.purpose is ClaimPurpose.SETTLE
        settling.postpone(NO_STORE)
        waits.append(stage.due())
        [reason] = stage.view(owner.turn).waiting_on
        assert (reason.kind.value, reason.until_ms) == ("retry", stage.clock() + (waits[-1] or 0))
        assert stage.claim("b").claimed.purpose is ClaimPurpose.NOTHING
        stage.pass_time(waits[-1] or 0)

    assert waits == [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    stage.claim("b").postpone(NO_STORE)
    stage.cancel(owner.turn)
    assert stage.due() == 0, "a cancel asks for it now"
    settling = stage.claim("b")
    settling.postpone()
    assert (stage.due(), stage.reasons(owner.turn)) == (0, []), "a host that only goes away leaves no wait behind"
    stage.claim("d").settle(applied=("c1",))
    assert stage.status(owner.turn) == "CANCELLED"


@pytest.mark.spec("SE-11")
def test_another_host_finishes_a_settlement_whose_host_was_lost() -> None:
    stage = Stage()
    owner = failing(stage, S.COMPLETED)
    lost = stage.claim("b")
    lost.postpone(NO_STORE)
    stage.pass_time(1_000)
    lost = stage.claim("b")
    stage.pass_time(LEASE_MS)

    settling = stage.claim("d")

    assert (settling.claimed.purpose, settling.claimed.lost_run) == (ClaimPurpose.SETTLE, "")
    assert stage.state(owner.turn).settle_tries == 1
    with stage.refuses(Fenced):
        lost.settle()
    settling.settle(applied=("c1",))
    assert stage.status(owner.turn) == "FAILED"


def test_a_host_that_is_lost_before_its_cancelled_run_has_ended_leaves_a_turn_that_says_why_it_waits() -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.calls_hands()
    stage.dispatch(lost.turn)
    stage.cancel(lost.turn)
    stage.dies("a")

    claimed = stage.claim("b").claimed

    assert claimed == c.Claimed(purpose=ClaimPurpose.NOTHING, turn_id=lost.turn, now_ms=stage.clock())
    assert (stage.status(lost.turn), stage.reasons(lost.turn)) == ("WAITING", ["tool_running"])
