"""How a Turn ends: nothing of it stays open, and the next in the queue may start.

Questions are closed with a reason and unapplied inputs end visibly, in the very commit that ends
the Turn, so that nobody can answer a dead question and no later Turn waits behind it (IN-13, C43).
"""

from __future__ import annotations

from collections.abc import Iterator

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
)
from agentscope_durable.contracts.status import ExecutionState, InteractionState, SignalState, TurnStatus, WaitKind
from agentscope_durable.domain.change import Draft
from agentscope_durable.domain.execution import settle_execution
from agentscope_durable.domain.turn import move

_ASKS = frozenset({WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT})


def next_in_queue(thread_id: str) -> Range:
    return Range(keys.queues(thread_id), limit=1)


def queue_after(thread: ThreadRecord, ordinal: int) -> tuple[Range, ...]:
    """Where to look for the successor of a Turn: nowhere if none was admitted since."""
    return (next_in_queue(thread.thread_id),) if thread.next_ordinal > ordinal + 1 else ()


def reads_finish(thread_id: str, turn_id: str) -> Reads:
    """What every end of a Turn looks at."""
    return Reads(keys=(keys.thread(thread_id), keys.turn(turn_id)), ranges=(next_in_queue(thread_id),))


def end_turn(draft: Draft, thread: ThreadRecord, record: TurnRecord, state: TurnState, status: TurnStatus) -> TurnState:
    """Make the Turn terminal and let its successor start. Returns the state it ends with.

    The caller has already taken the Thread out of the head, and stores nothing of the Turn itself.
    """
    before = record.state
    reason = status.value.lower()
    _require(draft, thread, record, state)
    close_questions(draft, record, state, reason)
    expire_inputs(draft, record, state, reason)
    _end_controls(draft, record, state, status, reason)
    ended = replace(
        move(record.turn_id, state, status),
        cancel="",
        pause="",
        paused_revision=0,
        conditions=(),
        inputs=0,
        steers=0,
        operator="",
        settle_ms=0,
    )
    ended = draft.show(record, before, ended)
    draft.put(keys.turn(record.turn_id), replace(record, state=ended, ended_seq=draft.last_seq))
    if thread.current == record.turn_id:
        advance(draft, thread, record.ordinal)
    return ended


def _successors(draft: Draft, thread: ThreadRecord, ordinal: int) -> Iterator[tuple[str, TurnRef]]:
    for page in queue_after(thread, ordinal):
        yield from draft.page(page, TurnRef)


def advance(draft: Draft, thread: ThreadRecord, ordinal: int) -> None:
    """After the Turn of this ordinal the oldest queued one becomes the current one, or the Thread is idle (Q-01)."""
    for key, successor in _successors(draft, thread, ordinal):
        draft.delete(key)
        thread = replace(thread, current=successor.turn_id)
        record = draft.get(keys.turn(successor.turn_id), TurnRecord)
        if record is None:
            raise CorruptRecord(key, "TurnRef", "a queue entry names a turn that does not exist")
        draft.schedule(thread, successor.turn_id, record.state)
        break
    else:
        thread = replace(thread, current="")
        draft.unready(keys.READY_TURN, thread.thread_id)
    draft.put(keys.thread(thread.thread_id), thread)


def _end_controls(draft: Draft, record: TurnRecord, state: TurnState, status: TurnStatus, reason: str) -> None:
    """An accepted cancel has become true, or something else came first; so did a pause that waited for a boundary."""
    ends: list[tuple[str, str, bool]] = []
    if state.pause and state.status is not TurnStatus.PAUSED:
        ends.append((state.pause, "pause", False))
    if state.cancel:
        ends.append((state.cancel, "cancel", status is TurnStatus.CANCELLED))
    for request_id, operation, applied in ends:
        draft.emit(
            "signal.applied" if applied else "signal.expired",
            SignalChanged(request_id=request_id, operation=operation, reason=None if applied else reason),
            thread_id=record.thread_id,
            turn_id=record.turn_id,
        )


def close_questions(draft: Draft, record: TurnRecord, state: TurnState, reason: str) -> None:
    """Close what nobody has answered, and cancel the calls that waited: an answer that came too late starts nothing."""
    for condition in [c for c in state.conditions if c.kind in _ASKS]:
        key = keys.interaction(record.turn_id, condition.id)
        interaction = draft.get(key, InteractionRecord)
        if interaction is not None and interaction.state is InteractionState.PENDING:
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
            _ = settle_execution(draft, record, state, execution, ExecutionState.CANCELLED, None)


def _require(draft: Draft, thread: ThreadRecord, record: TurnRecord, state: TurnState) -> None:
    """Everything the end of this Turn looks at, in one round."""
    asks = [c for c in state.conditions if c.kind in _ASKS]
    successors = _successors(draft, thread, record.ordinal) if thread.current == record.turn_id else ()
    ranges: tuple[Range, ...] = ()
    if state.inputs:
        ranges += (_inputs(record.turn_id),)
    if state.signals:
        ranges += (_signals(record.turn_id),)
    draft.require(
        tuple(keys.interaction(record.turn_id, c.id) for c in asks)
        + tuple(keys.execution(record.turn_id, c.call_id) for c in asks)
        + tuple(keys.turn(ref.turn_id) for _, ref in successors),
        ranges,
    )


def _inputs(turn_id: str) -> Range:
    return Range(keys.inputs(turn_id), limit=PAGE_MAX)


def _signals(turn_id: str) -> Range:
    return Range(keys.all_signals(turn_id), limit=PAGE_MAX)


def expire_inputs(draft: Draft, record: TurnRecord, state: TurnState, reason: str) -> None:
    """Inputs and signals that were accepted and never applied end EXPIRED, with an event (D20)."""
    if state.inputs:
        for key, pending in draft.page(_inputs(record.turn_id), InputRecord):
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
        for key, signal in draft.page(_signals(record.turn_id), SignalRecord):
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
