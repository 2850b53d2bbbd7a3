"""How a Turn ends: nothing of it stays open, and the next in the queue may start.

Questions are closed with a reason and unapplied inputs end visibly, in the very commit that ends
the Turn, so that nobody can answer a dead question and no later Turn waits behind it (IN-13, C43).
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import PAGE_MAX, Range, Reads
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.events import InteractionResolved, SignalChanged
from agentscope_durable.contracts.records import (
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    MessageIndex,
    SignalRecord,
    ThreadRecord,
    TurnRecord,
    TurnRef,
    TurnState,
    decode,
)
from agentscope_durable.contracts.status import ExecutionState, InteractionState, SignalState, TurnStatus, WaitKind
from agentscope_durable.domain.change import Draft
from agentscope_durable.domain.execution import settle_execution
from agentscope_durable.domain.turn import move

_ASKS = frozenset({WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT})


def next_in_queue(thread_id: str) -> Range:
    return Range(keys.queues(thread_id), limit=1)


def reads_finish(thread_id: str, turn_id: str) -> Reads:
    """What every end of a Turn looks at."""
    return Reads(keys=(keys.thread(thread_id), keys.turn(turn_id)), ranges=(next_in_queue(thread_id),))


def end_turn(
    draft: Draft, thread: ThreadRecord, record: TurnRecord, state: TurnState, status: TurnStatus
) -> ThreadRecord:
    """Make the Turn terminal and let its successor start. Returns the Thread as it is then.

    The caller has already taken the Thread out of the head, and stores nothing of the Turn itself.
    """
    before = record.state
    reason = status.value.lower()
    _require(draft, record, state)
    state = close_interactions(draft, record, state, reason)
    expire_inputs(draft, record, state, reason)
    for control, operation in ((state.pause, "pause"), (state.cancel, "cancel")):
        if control:
            applied = operation == "cancel" and status is TurnStatus.CANCELLED
            draft.emit(
                "signal.applied" if applied else "signal.expired",
                SignalChanged(request_id=control, operation=operation, reason=None if applied else reason),
                thread_id=record.thread_id,
                turn_id=record.turn_id,
            )
    ended = replace(
        move(record.turn_id, state, status),
        cancel="",
        pause="",
        conditions=(),
        inputs=0,
        steers=0,
        operator="",
        settle_ms=0,
    )
    ended = draft.show(record, before, ended)
    draft.put(keys.turn(record.turn_id), replace(record, state=ended))
    if thread.current == record.turn_id:
        thread = advance(draft, thread)
    return thread


def advance(draft: Draft, thread: ThreadRecord) -> ThreadRecord:
    """The oldest queued Turn becomes the current one, or the Thread is idle (Q-01)."""
    rows = draft.view.page(next_in_queue(thread.thread_id))
    if not rows:
        thread = replace(thread, current="")
        draft.unready(keys.READY_TURN, thread.thread_id)
    else:
        key, data = rows[0]
        successor = decode(TurnRef, data, key=key).turn_id
        draft.delete(key)
        thread = replace(thread, current=successor)
        record = draft.get(keys.turn(successor), TurnRecord)
        if record is None:
            raise CorruptRecord(keys.turn(successor), "TurnRecord", "a queue entry names a turn that does not exist")
        draft.schedule(thread, successor, record.state)
    draft.put(keys.thread(thread.thread_id), thread)
    return thread


def close_interactions(draft: Draft, record: TurnRecord, state: TurnState, reason: str) -> TurnState:
    for condition in [c for c in state.conditions if c.kind in _ASKS]:
        key = keys.interaction(record.turn_id, condition.id)
        interaction = draft.get(key, InteractionRecord)
        if interaction is None or interaction.state is not InteractionState.PENDING:
            continue
        draft.put(key, replace(interaction, state=InteractionState.CLOSED, reason=reason))
        draft.emit(
            "interaction.resolved",
            InteractionResolved(
                interaction_id=condition.id, call_id=condition.call_id, outcome="closed", reason=reason
            ),
            thread_id=record.thread_id,
            turn_id=record.turn_id,
        )
        execution = draft.get(keys.execution(record.turn_id, condition.call_id), ExecutionRecord)
        if execution is not None and not execution.state.terminal:
            # It never ran, and now it never will.
            state = settle_execution(draft, record, state, execution, ExecutionState.CANCELLED, None)
    return state


def _require(draft: Draft, record: TurnRecord, state: TurnState) -> None:
    asks = [c for c in state.conditions if c.kind in _ASKS]
    ranges: tuple[Range, ...] = ()
    if state.inputs:
        ranges += (_inputs(record.turn_id),)
    if state.signals:
        ranges += (_signals(record.turn_id),)
    draft.require(
        tuple(keys.interaction(record.turn_id, c.id) for c in asks)
        + tuple(keys.execution(record.turn_id, c.call_id) for c in asks),
        ranges,
    )


def _inputs(turn_id: str) -> Range:
    return Range(keys.inputs(turn_id), limit=PAGE_MAX)


def _signals(turn_id: str) -> Range:
    return Range(keys.all_signals(turn_id), limit=PAGE_MAX)


def expire_inputs(draft: Draft, record: TurnRecord, state: TurnState, reason: str) -> None:
    """Inputs and signals that were accepted and never applied end EXPIRED, with an event (D20)."""
    if state.inputs:
        for key, data in draft.view.page(_inputs(record.turn_id)):
            pending = draft.get(key, InputRecord) or decode(InputRecord, data, key=key)
            if pending.state is SignalState.ACCEPTED:
                draft.put(key, replace(pending, state=SignalState.EXPIRED))
                flag_message(draft, pending, record, "expired")
                draft.emit(
                    "signal.expired",
                    SignalChanged(
                        request_id=pending.request_id,
                        operation=pending.kind,
                        message_id=pending.message_id,
                        reason=reason,
                    ),
                    thread_id=record.thread_id,
                    turn_id=record.turn_id,
                )
    if state.signals:
        for key, data in draft.view.page(_signals(record.turn_id)):
            signal = draft.get(key, SignalRecord) or decode(SignalRecord, data, key=key)
            if signal.state is SignalState.ACCEPTED:
                draft.put(key, replace(signal, state=SignalState.EXPIRED))
                draft.emit(
                    "signal.expired",
                    SignalChanged(request_id=signal.request_id, operation="signal", key=signal.key, reason=reason),
                    thread_id=record.thread_id,
                    turn_id=record.turn_id,
                )


def flag_message(draft: Draft, pending: InputRecord, record: TurnRecord, flag: str) -> None:
    """The user's message stays in history and says what became of it (OPEN 21)."""
    draft.put(
        keys.message(pending.seq),
        MessageIndex(
            message_id=pending.message_id,
            turn_id=record.turn_id,
            thread_id=record.thread_id,
            seq=pending.seq,
            flag=flag,
        ),
    )
