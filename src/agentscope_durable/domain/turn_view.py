"""How a stored Turn looks from outside.

Rule 1: this is the only place that turns a `TurnState` into a `TurnView`. The decision that writes a state puts this
view into its `turn.status` event, a query computes it again from the stored state, and so both say the same (PR-22).
Rule 2: nothing here looks at a clock or another record. What depends on the moment of asking (lease, `host`,
`definition_missing`) is laid on top by the query and is no part of any event.
"""

from __future__ import annotations

from typing import Final

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import Condition, Failure, Recovery, TurnRecord, TurnState
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.contracts.views import (
    ErrorView,
    RecoveryPolicy,
    RecoveryView,
    ResultView,
    RunStepRefView,
    TurnView,
    Waiting,
)
from agentscope_durable.domain.retry import backoff_ms
from agentscope_durable.domain.turn import settling, unsettled

__all__ = ["NEXT_ACTION", "error_of", "error_view", "recovery_view", "turn_view", "waiting_on"]

NEXT_ACTION: Final[dict[WaitKind, str]] = {
    WaitKind.APPROVAL: "Answer the interaction with true or false.",
    WaitKind.EXTERNAL_RESULT: "Answer the interaction with the tool's result as JSON.",
    WaitKind.TOOL_RUNNING: "Wait until the tool ends; the Turn goes on by itself.",
    WaitKind.TOOL_UNKNOWN: "Find out what the tool did and reconcile the call with that evidence.",
    WaitKind.CHILD: "Wait until the delegated Turn ends, or see what that one waits for.",
    WaitKind.SIGNAL: "Send a signal with this key.",
    WaitKind.RETRY: "Wait until it is tried again; cancel to stop trying.",
    WaitKind.OPERATOR: "Look at the Turn and release it, or cancel it.",
    WaitKind.HOST: "Start a host that serves this definition, or wait until one has room.",
}
"""What a person can do about each reason, in one sentence. Of a missing definition `domain/unclaimed` says more."""

_SIGNAL_OR_TIME: Final = "Send a signal with this key, or wait until its time has passed."
_SETTLEMENT: Final = "Wait until the Turn's effects are looked at again; then it ends."


def turn_view(
    session: SessionKey, record: TurnRecord, state: TurnState, *, parent: RunStepRefView | None = None
) -> TurnView:
    """The view of a Turn, without what depends on the moment of asking.

    Args:
        session: the Session the Turn is in.
        record: the part that never changes; its own `state` is not looked at.
        state: the state to show: the head's while a host owns the Turn, else the record's.
        parent: for a delegated Turn: the Run and Step that asked for it.
    """
    status = state.status
    terminal = status.terminal
    return TurnView(
        session=session,
        thread_id=record.thread_id,
        turn_id=record.turn_id,
        request_id=record.request_id,
        ordinal=record.ordinal,
        status=status,
        revision=state.revision,
        created_at_ms=record.created_ms,
        updated_at_ms=state.updated_ms or record.created_ms,
        cancel_requested=state.cancel != "" and not terminal,
        waiting_on=waiting_on(record.turn_id, state) if status.held else (),
        recovery=None if state.recovery is None else recovery_view(state.recovery),
        result=None
        if state.result is None
        else ResultView(message_id=state.result.message_id or None, finish_reason=state.result.finish_reason),
        error=error_of(state),
        runs=state.runs,
        pending_inputs=state.inputs,
        parent=parent,
    )


def waiting_on(turn_id: str, state: TurnState) -> tuple[Waiting, ...]:
    """Why a Turn that is not running does not advance; () when it could.

    A PAUSED Turn lists what will hold it after `resume` (CT-14); that it is paused its status says.
    """
    if not state.conditions and state.recovery is None and not state.operator and not state.settle_ms:
        return ()
    ending = settling(state)
    # Questions and waits end with a Turn that was cancelled or has failed; only effects hold it (SE-02).
    open_conditions = unsettled(state) if ending else (c for c in state.conditions if not c.ready)
    reasons = [_condition(condition) for condition in open_conditions]
    if ending:
        # Cancel and failure skip the backoff (CT-17); what they may wait for is the next look at the effects.
        if state.settle_ms:
            reasons.append(
                Waiting(
                    kind=WaitKind.RETRY,
                    id=turn_id,
                    since_ms=state.updated_ms,
                    next_action=_SETTLEMENT,
                    until_ms=state.settle_ms,
                )
            )
    elif state.recovery is not None and state.recovery.next_retry_at_ms:
        reasons.append(_retry(turn_id, state.recovery))
    if state.operator:
        reasons.append(
            Waiting(
                kind=WaitKind.OPERATOR,
                id=turn_id,
                since_ms=state.updated_ms,
                next_action=f"{NEXT_ACTION[WaitKind.OPERATOR]} Why: {state.operator}",
            )
        )
    return tuple(reasons)


def recovery_view(recovery: Recovery) -> RecoveryView:
    return RecoveryView(
        policy=RecoveryPolicy(
            max_retries=recovery.max_retries,
            initial_backoff_ms=recovery.initial_backoff_ms,
            max_backoff_ms=recovery.max_backoff_ms,
        ),
        failures=recovery.failures,
        next_retry_at_ms=recovery.next_retry_at_ms or None,
        last_error=error_view(recovery.last_error),
    )


def error_view(failure: Failure) -> ErrorView:
    return ErrorView(kind=failure.kind, message=failure.message, retryable=failure.retryable)


def error_of(state: TurnState) -> ErrorView | None:
    """A failure for good is shown as soon as it is known, also while effects keep the Turn from ending."""
    if state.failure is not None:
        return error_view(state.failure)
    if state.status is TurnStatus.FAILED and state.recovery is not None:
        return error_view(state.recovery.last_error)
    return None


def _condition(condition: Condition) -> Waiting:
    kind = condition.kind
    until = condition.deadline_ms or None
    return Waiting(
        kind=kind,
        id=condition.id,
        since_ms=condition.since_ms,
        next_action=_SIGNAL_OR_TIME if until is not None and kind is WaitKind.SIGNAL else NEXT_ACTION[kind],
        call_id=condition.call_id or None,
        until_ms=until,
    )


def _retry(turn_id: str, recovery: Recovery) -> Waiting:
    waited_ms = backoff_ms(recovery.initial_backoff_ms, recovery.max_backoff_ms, recovery.failures)
    return Waiting(
        kind=WaitKind.RETRY,
        id=turn_id,
        since_ms=recovery.next_retry_at_ms - waited_ms,
        next_action=NEXT_ACTION[WaitKind.RETRY],
        until_ms=recovery.next_retry_at_ms,
    )
