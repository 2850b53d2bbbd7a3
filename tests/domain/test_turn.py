"""When a Turn may move, and when a host may take it: the tables, read aloud."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from agentscope_durable.contracts.commands import ClaimPurpose
from agentscope_durable.contracts.errors import InvalidTransition
from agentscope_durable.contracts.records import Condition, Failure, Recovery, TurnState
from agentscope_durable.contracts.status import TERMINAL, TurnStatus, WaitKind
from agentscope_durable.domain.turn import MOVES, after_pause, at_rest, due_ms, move, purpose, settling, unsettled

S = TurnStatus
NOW = 10_000
FAILURE = Failure("ValueError", "a defect")


def waits_for(kind: WaitKind, *, ready: bool = False, deadline_ms: int = 0) -> Condition:
    return Condition(kind=kind, id="x", call_id="c1", since_ms=1, ready=ready, deadline_ms=deadline_ms)


def backoff(until_ms: int) -> Recovery:
    return Recovery(3, 1000, 30_000, 1, until_ms, Failure("OSError", "no", retryable=True))


APPROVAL = waits_for(WaitKind.APPROVAL)
ANSWERED = waits_for(WaitKind.APPROVAL, ready=True)
RUNNING = waits_for(WaitKind.TOOL_RUNNING)
ENDED = waits_for(WaitKind.TOOL_RUNNING, ready=True)
UNKNOWN = waits_for(WaitKind.TOOL_UNKNOWN)
CHILD = waits_for(WaitKind.CHILD)


# ---- moves ----


@pytest.mark.parametrize(("here", "there"), list(product(TurnStatus, TurnStatus)))
def test_a_turn_moves_as_the_table_says_and_no_other_way(here: TurnStatus, there: TurnStatus) -> None:
    before = TurnState(status=here, revision=5, runs=1)
    if here is there:
        assert move("t1", before, there) is before, "staying is not a move"
    elif there in MOVES[here]:
        assert move("t1", before, there) == replace(before, status=there)
    else:
        with pytest.raises(InvalidTransition) as refused:
            move("t1", before, there)
        assert (refused.value.turn_id, refused.value.status, refused.value.to) == ("t1", here, there)


def test_the_table_knows_every_status_and_no_way_back_from_the_end() -> None:
    assert set(MOVES) == set(TurnStatus)
    assert {status for status, ways in MOVES.items() if not ways} == TERMINAL
    reachable, seen = {S.QUEUED}, set[TurnStatus]()
    while reachable - seen:
        status = (reachable - seen).pop()
        seen.add(status)
        reachable |= MOVES[status]
    assert seen == set(TurnStatus), "each status can be come to from QUEUED"


# ---- when a host may take a Turn that nobody owns ----


@pytest.mark.parametrize(
    ("state", "due"),
    [
        pytest.param(TurnState(status=S.QUEUED), 0, id="a queued one now"),
        pytest.param(TurnState(status=S.RUNNING), 0, id="one whose host gave it back"),
        pytest.param(TurnState(status=S.PAUSING), 0, id="one whose host was lost before the pause"),
        pytest.param(TurnState(status=S.PAUSED, pause="p"), None, id="a paused one not before resume"),
        pytest.param(TurnState(status=S.PAUSED, pause="p", recovery=backoff(1)), None, id="nor at its retry"),
        pytest.param(TurnState(status=S.WAITING), 0, id="a waiting one that waits for nothing"),
        pytest.param(TurnState(status=S.WAITING, conditions=(APPROVAL,)), None, id="not before the answer"),
        pytest.param(TurnState(status=S.WAITING, conditions=(RUNNING, APPROVAL)), None, id="nor while a tool runs"),
        pytest.param(TurnState(status=S.WAITING, conditions=(UNKNOWN,)), None, id="nor over an unknown outcome"),
        pytest.param(TurnState(status=S.WAITING, conditions=(CHILD,)), None, id="nor before the delegated one ends"),
        pytest.param(TurnState(status=S.WAITING, conditions=(APPROVAL, ENDED)), 0, id="as soon as one can be applied"),
        pytest.param(
            TurnState(status=S.WAITING, conditions=(waits_for(WaitKind.SIGNAL),)), None, id="a signal without a time"
        ),
        pytest.param(
            TurnState(
                status=S.WAITING,
                conditions=(
                    APPROVAL,
                    waits_for(WaitKind.SIGNAL, deadline_ms=900),
                    waits_for(WaitKind.SIGNAL, deadline_ms=500),
                ),
            ),
            500,
            id="at the first of its times",
        ),
        pytest.param(TurnState(status=S.WAITING, recovery=backoff(700)), 700, id="in backoff at its time"),
        pytest.param(
            TurnState(status=S.WAITING, recovery=backoff(700), conditions=(ANSWERED,)), 700, id="whatever comes in it"
        ),
        pytest.param(
            TurnState(status=S.WAITING, recovery=backoff(0), conditions=(APPROVAL,)), None, id="nor after its retry"
        ),
        pytest.param(TurnState(status=S.WAITING, operator="look"), None, id="not before a person has looked"),
        pytest.param(
            TurnState(status=S.WAITING, operator="look", conditions=(ANSWERED,)), None, id="whatever was answered"
        ),
        pytest.param(TurnState(status=S.WAITING, cancel="k", conditions=(APPROVAL,)), 0, id="cancelled: to settle it"),
        pytest.param(
            TurnState(status=S.WAITING, cancel="k", recovery=backoff(9**9)), 0, id="cancelled: without the backoff"
        ),
        pytest.param(TurnState(status=S.WAITING, cancel="k", operator="look"), 0, id="cancelled: without the person"),
        pytest.param(
            TurnState(status=S.WAITING, cancel="k", conditions=(RUNNING,)), None, id="not over a running tool"
        ),
        pytest.param(
            TurnState(status=S.WAITING, failure=FAILURE, conditions=(UNKNOWN,)), None, id="nor an unknown one"
        ),
        pytest.param(TurnState(status=S.WAITING, failure=FAILURE, settle_ms=800), 800, id="failed: when it is time"),
        *(
            pytest.param(TurnState(status=status, cancel="k", conditions=(ENDED,)), None, id=f"never when {status}")
            for status in sorted(TERMINAL)
        ),
    ],
)
def test_a_host_may_take_it(state: TurnState, due: int | None) -> None:
    assert due_ms(state) == due


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (TurnState(), ClaimPurpose.RUN),
        (TurnState(status=S.WAITING, recovery=backoff(NOW)), ClaimPurpose.RUN),
        (TurnState(status=S.WAITING, recovery=backoff(NOW + 1)), None),
        (TurnState(status=S.WAITING, conditions=(APPROVAL,)), None),
        (TurnState(status=S.WAITING, cancel="k"), ClaimPurpose.SETTLE),
        (TurnState(status=S.WAITING, failure=FAILURE, settle_ms=NOW + 1), None),
    ],
)
def test_what_a_host_that_takes_it_does_with_it(state: TurnState, wanted: ClaimPurpose | None) -> None:
    assert purpose(state, NOW) is wanted


# ---- settlement ----


def test_a_cancelled_or_failed_turn_is_to_be_settled_until_it_has_ended() -> None:
    assert settling(TurnState(status=S.RUNNING, cancel="k"))
    assert settling(TurnState(status=S.WAITING, failure=FAILURE))
    assert not settling(TurnState(status=S.WAITING, recovery=backoff(1)))
    assert not settling(TurnState(status=S.FAILED, failure=FAILURE))


def test_only_effects_whose_outcome_is_open_hold_a_settlement() -> None:
    signal = waits_for(WaitKind.SIGNAL)
    state = TurnState(conditions=(APPROVAL, RUNNING, ENDED, UNKNOWN, signal, CHILD))

    assert unsettled(state) == (RUNNING, UNKNOWN, CHILD)


@pytest.mark.parametrize("status", [S.RUNNING, S.PAUSING, S.PAUSED, S.WAITING])
def test_at_rest_a_turn_that_is_to_be_settled_is_waiting_so_that_its_reasons_are_seen(status: TurnStatus) -> None:
    state = TurnState(status=status, cancel="k", pause="p", paused_revision=3)
    rested = at_rest("t1", state)

    assert rested.status is S.WAITING
    # A pause that was never reached is told of at the end; one that was is over.
    assert (rested.pause, rested.paused_revision) == (("", 0) if status is S.PAUSED else ("p", 3))


@pytest.mark.parametrize("status", sorted(S))
def test_at_rest_any_other_turn_stays_as_it_is(status: TurnStatus) -> None:
    state = TurnState(status=status)

    assert at_rest("t1", state) is state


# ---- the end of a pause ----


@pytest.mark.parametrize(
    ("state", "to"),
    [
        pytest.param(TurnState(runs=0), S.QUEUED, id="it never ran"),
        pytest.param(TurnState(runs=1), S.RUNNING, id="nothing else holds it"),
        pytest.param(TurnState(runs=1, conditions=(ANSWERED, RUNNING)), S.RUNNING, id="something can be applied"),
        pytest.param(TurnState(runs=1, conditions=(APPROVAL,)), S.WAITING, id="nobody has answered"),
        pytest.param(TurnState(runs=1, conditions=(UNKNOWN,)), S.WAITING, id="an outcome is unknown"),
        pytest.param(TurnState(runs=1, recovery=backoff(NOW + 1)), S.WAITING, id="its retry is not due"),
        pytest.param(TurnState(runs=1, recovery=backoff(NOW)), S.RUNNING, id="its retry is due"),
        pytest.param(TurnState(runs=1, operator="look"), S.WAITING, id="a person must look"),
    ],
)
def test_resume_lifts_the_pause_and_nothing_else(state: TurnState, to: TurnStatus) -> None:
    assert after_pause(replace(state, status=S.PAUSED, pause="p"), NOW) is to
