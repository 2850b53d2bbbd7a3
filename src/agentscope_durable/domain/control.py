"""Controls of a Turn that is under way: each is admitted atomically and applied at a boundary.

A receipt says "admitted", never "done". A Turn that has ended refuses every new control and is
not changed by it (CT-24); an id used before the end still gets its first receipt.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import AddInput, Cancel, Pause, Request, Resume, Signal, Withdraw
from agentscope_durable.contracts.errors import (
    InputSettled,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    RevisionConflict,
    Terminal,
)
from agentscope_durable.contracts.events import MessageCompleted, SignalChanged
from agentscope_durable.contracts.records import (
    PENDING_INPUTS_MAX,
    InputRecord,
    RequestRecord,
    SignalRecord,
    TurnRecord,
    TurnState,
)
from agentscope_durable.contracts.status import SignalState, TurnStatus, WaitKind
from agentscope_durable.contracts.views import CommandReceipt
from agentscope_durable.domain import ids
from agentscope_durable.domain.admission import reads_request, remember, repeated, say
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.execution import stop_executions
from agentscope_durable.domain.finish import end_turn, flag_message, reads_finish
from agentscope_durable.domain.turn import after_pause, move, settling

INPUTS_MAX = 1000
"""Steer and inject inputs one Turn accepts in its life; its end reads them in one page."""
SIGNALS_MAX = 1000
"""Signals one Turn accepts in its life."""


def reads_control(c: AddInput | Withdraw | Pause | Resume | Signal) -> Reads:
    return Reads(keys=(*reads_request(c), keys.turn(c.turn_id)))


def admitted(draft: Draft, c: Request, operation: str, arguments: dict[str, str]) -> CommandReceipt | None:
    return repeated(draft, c.request_id, operation, {"thread": c.thread_id, **arguments}, CommandReceipt)


def live_turn(draft: Draft, thread_id: str, turn_id: str) -> TurnRecord:
    """The Turn, if a control may still change it.

    Raises:
        Terminal: it has ended.
    """
    record = draft.turn(thread_id, turn_id)
    if record.state.status.terminal:
        raise Terminal(turn_id, record.state.status)
    return record


def accept(
    draft: Draft,
    c: Request,
    operation: str,
    arguments: dict[str, str],
    record: TurnRecord,
    after: TurnState,
    *,
    ordinal: int = 0,
) -> Change:
    """Store the changed Turn and the request, and answer with a receipt."""
    return _receipt(draft, c, operation, arguments, record, draft.store_turn(record, after), ordinal=ordinal)


def _receipt(
    draft: Draft,
    c: Request,
    operation: str,
    arguments: dict[str, str],
    record: TurnRecord,
    after: TurnState,
    *,
    ordinal: int = 0,
) -> Change:
    receipt = CommandReceipt(
        request_id=c.request_id,
        operation=operation,
        thread_id=c.thread_id,
        turn_id=record.turn_id,
        accepted_at_ms=draft.now_ms,
        revision=after.revision,
    )
    remember(draft, c.request_id, operation, {"thread": c.thread_id, **arguments}, receipt, ordinal=ordinal)
    return draft.change(receipt)


def _signal_event(
    draft: Draft, c: Request, operation: str, turn_id: str, state: SignalState, *, reason: str | None = None
) -> None:
    """What became of a control: `signal.accepted`, `signal.applied` or `signal.expired`."""
    draft.emit(
        f"signal.{state.value.lower()}",
        SignalChanged(request_id=c.request_id, operation=operation, reason=reason),
        thread_id=c.thread_id,
        turn_id=turn_id,
    )


# ---- steer, inject, withdraw ----


def add_input(c: AddInput, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Steer or inject: kept for the next boundary of the Turn; alone it meets no condition (CT-26)."""
    if c.kind not in ("steer", "inject"):
        raise InvalidRequest(f"input kind must be steer or inject, not {c.kind!r}", path="kind")
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"turn": c.turn_id, "input": c.digest}
    if (earlier := admitted(draft, c, c.kind, arguments)) is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    state = record.state
    if state.inputs >= PENDING_INPUTS_MAX:
        raise LimitExceeded("pending inputs of a turn", PENDING_INPUTS_MAX)
    if state.input_ordinal >= INPUTS_MAX:
        raise LimitExceeded("inputs of a turn", INPUTS_MAX)
    ordinal = state.input_ordinal + 1
    message_id = ids.added_message_id(c.turn_id, ordinal)
    seq = say(
        draft,
        MessageCompleted(
            message_id=message_id, role="user", content=c.content, request_id=c.request_id, input_kind=c.kind
        ),
        c.thread_id,
        c.turn_id,
    )
    draft.put(
        keys.input_(c.turn_id, ordinal),
        InputRecord(
            request_id=c.request_id, kind=c.kind, ordinal=ordinal, message_id=message_id, seq=seq, accepted_ms=now_ms
        ),
    )
    draft.refer(c.content)
    _signal_event(draft, c, c.kind, c.turn_id, SignalState.ACCEPTED)
    after = replace(
        state,
        inputs=state.inputs + 1,
        steers=state.steers + (c.kind == "steer"),
        input_ordinal=ordinal,
    )
    return accept(draft, c, c.kind, arguments, record, after, ordinal=ordinal)


def reads_withdraw(c: Withdraw) -> Reads:
    return reads_control(c).merged(Reads(keys=(keys.request(c.target_request_id),)))


def withdraw(c: Withdraw, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Take back an input that no checkpoint contains yet; exactly one of the two wins (CT-03, CT-04)."""
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"turn": c.turn_id, "target": c.target_request_id}
    if (earlier := admitted(draft, c, "withdraw", arguments)) is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    target = draft.get(keys.request(c.target_request_id), RequestRecord)
    if target is None or target.operation not in ("steer", "inject") or target.arguments.get("turn") != c.turn_id:
        raise NotFound("input of this turn", c.target_request_id)
    key = keys.input_(c.turn_id, target.ordinal)
    pending = draft.get(key, InputRecord)
    if pending is None:
        raise NotFound("input of this turn", c.target_request_id)
    if pending.state is not SignalState.ACCEPTED:
        raise InputSettled(c.target_request_id, pending.state)
    draft.put(key, replace(pending, state=SignalState.WITHDRAWN))
    flag_message(draft, pending, record, "withdrawn")
    draft.emit(
        "signal.withdrawn",
        SignalChanged(request_id=pending.request_id, operation=pending.kind, message_id=pending.message_id),
        thread_id=c.thread_id,
        turn_id=c.turn_id,
    )
    state = record.state
    after = replace(state, inputs=state.inputs - 1, steers=state.steers - (pending.kind == "steer"))
    return accept(draft, c, "withdraw", arguments, record, after)


# ---- cancel ----


def reads_cancel(c: Cancel) -> Reads:
    return reads_finish(c.thread_id, c.turn_id).merged(Reads(keys=reads_request(c)))


def cancel(c: Cancel, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """A Turn that never ran is cancelled at once (CT-07); any other is settled first (CT-08)."""
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"turn": c.turn_id}
    if (earlier := admitted(draft, c, "cancel", arguments)) is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    state = record.state
    owned = draft.active(c.thread_id, c.turn_id) is not None
    if state.runs == 0 and not owned:
        thread = draft.thread(c.thread_id)
        if thread.current != c.turn_id:
            draft.delete(keys.queue(c.thread_id, record.ordinal))
        ended = end_turn(draft, thread, record, replace(state, cancel=c.request_id), TurnStatus.CANCELLED)
        return _receipt(draft, c, "cancel", arguments, record, ended)
    if state.cancel:
        _signal_event(draft, c, "cancel", c.turn_id, SignalState.EXPIRED, reason=_same(state.cancel))
        return accept(draft, c, "cancel", arguments, record, state)
    _signal_event(draft, c, "cancel", c.turn_id, SignalState.ACCEPTED)
    recovery = state.recovery
    if recovery is not None and recovery.next_retry_at_ms:
        # Nothing is tried again (CT-17).
        recovery = replace(recovery, next_retry_at_ms=0)
    after = replace(
        stop_executions(draft, record, state), cancel=c.request_id, recovery=recovery, operator="", settle_ms=0
    )
    return accept(draft, c, "cancel", arguments, record, after)


def _same(request_id: str) -> str:
    """Why a control that is already asked for has no effect of its own, so that its end can be told at once."""
    return f"request {request_id!r} asks for the same"


# ---- pause and resume ----


def pause(c: Pause, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """An owned Turn goes through PAUSING to a boundary; any other is PAUSED at once (CT-09)."""
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"turn": c.turn_id}
    if (earlier := admitted(draft, c, "pause", arguments)) is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    state = record.state
    owned = draft.active(c.thread_id, c.turn_id) is not None
    after = state
    if settling(state):
        # A cancelled or failed Turn ends, and no pause holds it (D4).
        _signal_event(draft, c, "pause", c.turn_id, SignalState.EXPIRED, reason="the turn is being settled")
    elif state.status is TurnStatus.PAUSED:
        _signal_event(draft, c, "pause", c.turn_id, SignalState.APPLIED)
    elif state.pause:
        _signal_event(draft, c, "pause", c.turn_id, SignalState.EXPIRED, reason=_same(state.pause))
    elif owned:
        _signal_event(draft, c, "pause", c.turn_id, SignalState.ACCEPTED)
        after = replace(move(c.turn_id, state, TurnStatus.PAUSING), pause=c.request_id)
    else:
        after = paused(draft, record, replace(state, pause=c.request_id))
    return accept(draft, c, "pause", arguments, record, after)


def paused(draft: Draft, record: TurnRecord, state: TurnState) -> TurnState:
    """The accepted pause has become true. Any revision from now to its end is good for `resume` (D4)."""
    draft.emit(
        "signal.applied",
        SignalChanged(request_id=state.pause, operation="pause"),
        thread_id=record.thread_id,
        turn_id=record.turn_id,
    )
    return replace(move(record.turn_id, state, TurnStatus.PAUSED), paused_revision=state.revision + 1)


def resume(c: Resume, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Lift the pause that was observed, and nothing else (CT-11, CT-14)."""
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"turn": c.turn_id, "expected_revision": str(c.expected_revision)}
    if (earlier := admitted(draft, c, "resume", arguments)) is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    state = record.state
    if state.status is not TurnStatus.PAUSED or not state.paused_revision <= c.expected_revision <= state.revision:
        now = "" if state.status is TurnStatus.PAUSED else state.status
        raise RevisionConflict("turn", c.turn_id, expected=c.expected_revision, actual=state.revision, status=now)
    _signal_event(draft, c, "resume", c.turn_id, SignalState.APPLIED)
    after = move(c.turn_id, state, after_pause(state, now_ms))
    after = replace(after, pause="", paused_revision=0)
    return accept(draft, c, "resume", arguments, record, after)


# ---- extension signals ----


def signal(c: Signal, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """An `x.*` signal meets a wait condition, or is kept until one is opened (CT-18, CT-20)."""
    if not c.key.startswith("x.") or len(c.key) < 3:
        raise InvalidRequest(f"a signal key must begin with 'x.', not {c.key!r}", path="key")
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"turn": c.turn_id, "key": c.key, "payload": c.digest}
    if (earlier := admitted(draft, c, "signal", arguments)) is not None:
        return Unchanged(earlier)
    record = live_turn(draft, c.thread_id, c.turn_id)
    state = record.state
    if state.signals >= SIGNALS_MAX:
        raise LimitExceeded("signals of a turn", SIGNALS_MAX)
    ordinal = state.signals + 1
    draft.put(
        keys.signal(c.turn_id, c.key, ordinal),
        SignalRecord(request_id=c.request_id, key=c.key, payload=c.payload, ordinal=ordinal, accepted_ms=now_ms),
    )
    draft.refer(c.payload)
    draft.emit(
        "signal.accepted",
        SignalChanged(request_id=c.request_id, operation="signal", key=c.key),
        thread_id=c.thread_id,
        turn_id=c.turn_id,
    )
    conditions = tuple(
        replace(condition, ready=True) if condition.kind is WaitKind.SIGNAL and condition.id == c.key else condition
        for condition in state.conditions
    )
    return accept(
        draft, c, "signal", arguments, record, replace(state, signals=ordinal, conditions=conditions), ordinal=ordinal
    )
