"""Bringing a Thread's context back, or into another Thread: restore, fork, repair.

Rule 1: three commands, each with one meaning (C83). Resuming a paused Turn is none of them: it changes no context.
Rule 2: nothing is overwritten. A restore appends a copy of the former baseline, so every position before it stays one
to come back to, and what follows costs what it would have cost then. A fork writes into a Thread without a history.
Rule 3: only settled positions, and only while no Turn is unfinished: nobody's work is taken away from under it (CK-05,
CK-06). An operator's repair is the one exception, and ends the Turn that it takes the context from.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.checkpoint import position_of
from agentscope_durable.contracts.commands import (
    ForkThread,
    NativeState,
    RepairReceipt,
    RepairThread,
    RestoreThread,
)
from agentscope_durable.contracts.errors import (
    Closed,
    DefinitionConflict,
    HasHistory,
    InvalidRequest,
    InvalidTransition,
    LimitExceeded,
    NotFound,
    PositionConflict,
    RevisionConflict,
    Unfinished,
)
from agentscope_durable.contracts.events import ThreadForked, ThreadRestored
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.records import (
    Binding,
    CheckpointRecord,
    CheckpointSource,
    Failure,
    ThreadRecord,
    TurnState,
)
from agentscope_durable.contracts.status import ResourceStatus, SettledBy, TurnStatus
from agentscope_durable.contracts.views import CheckpointSourceView, CheckpointView
from agentscope_durable.domain.admission import remember, repeated
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.control import live_turn
from agentscope_durable.domain.execution import stop_executions
from agentscope_durable.domain.finish import end_turn, reads_finish
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.positions import check_kept
from agentscope_durable.domain.resources import THREADS_MAX, binding_view, open_thread
from agentscope_durable.domain.turn import at_rest, settling, unsettled
from agentscope_durable.domain.workspace import commit_entries, count_on, reads_entries

# ---- restore ----


def reads_restore(c: RestoreThread) -> Reads:
    return _reads(c).merged(Reads(keys=(keys.checkpoint(c.thread_id, c.at),)))


def _reads(c: RestoreThread | ForkThread | RepairThread) -> Reads:
    reads = Reads(keys=(keys.request(c.request_id), keys.thread(c.thread_id)))
    native = c.native
    if native is None or not (native.workspace or native.floor or native.numbers):
        return reads
    return reads.merged(reads_entries(c.thread_id, native.workspace))


def restore_thread(c: RestoreThread, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """The Thread's context becomes what it was at a settled position.

    Raises:
        Unfinished: a Turn of it is not done (CK-05).
        PositionConflict: it does not stand where the caller saw it.
        NotFound: there is no settled position of that name (CK-06).
        CheckpointPruned: there was.
    """
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"thread": c.thread_id, "position": str(c.at), "expected_position": str(c.expected_at)}
    earlier = repeated(draft, c.request_id, "restore", arguments, CheckpointView)
    if earlier is not None:
        return Unchanged(earlier)
    thread = draft.thread(c.thread_id)
    _must_be_open(draft, thread)
    if thread.current:
        raise Unfinished("thread", c.thread_id, turns=1)
    _stands_at(c.session, thread, c.expected_at)
    _settled(draft, thread, c.at)
    if c.native is None:
        return Unchanged(None)
    installed = _install(draft, thread, c.native, SettledBy.RESTORED, ThreadKey(c.session, c.thread_id), c.at)
    _tell_restored(draft, installed.receipt)
    remember(draft, c.request_id, "restore", arguments, installed.receipt)
    return draft.change(installed.receipt)


# ---- fork ----


def reads_fork(c: ForkThread) -> Reads:
    return _reads(c)


def fork_thread(c: ForkThread, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """A Thread begins with the context of another one; it is made here if it is not there yet (CK-16).

    Raises:
        InvalidRequest: another namespace, or the source itself.
        NotFound: the target's Session does not exist (CK-09).
        Unfinished, HasHistory: the target has had Turns, or a context.
        DefinitionConflict: it is pinned to another definition or version (CK-10).
    """
    target = ThreadKey(c.session, c.thread_id)
    if c.source.session.namespace != c.session.namespace:
        raise InvalidRequest("a thread is forked within its namespace", path="target_thread_key")
    if c.source == target:
        raise InvalidRequest("a thread cannot be forked into itself: restore it", path="target_thread_key")
    if view.head is None:
        raise NotFound("session", f"{c.session.namespace}/{c.session.session_id}").advising(
            "Make it first with create_session: a fork makes the Thread, and never its Session"
        )
    draft = begin(view, c.session, seed, now_ms)
    source = msgspec.json.encode((c.source.session.session_id, c.source.thread_id)).decode()
    arguments = {"thread": c.thread_id, "source": source, "position": str(c.at)}
    earlier = repeated(draft, c.request_id, "fork", arguments, CheckpointView)
    if earlier is not None:
        return Unchanged(earlier)
    thread = draft.get(keys.thread(c.thread_id), ThreadRecord)
    if thread is not None:
        _must_be_open(draft, thread)
        if thread.current:
            raise Unfinished("thread", c.thread_id, turns=1)
        if thread.next_ordinal > 1 or thread.position:
            raise HasHistory(c.thread_id)
    elif draft.head.status is ResourceStatus.CLOSED:
        raise Closed("session", c.session.session_id)
    elif draft.head.thread_count >= THREADS_MAX:
        raise LimitExceeded("threads of a session", THREADS_MAX)
    if c.native is None:
        return Unchanged(None)
    if thread is None:
        open_thread(draft, c.thread_id, c.native.binding)
        thread = draft.thread(c.thread_id)
    elif thread.binding != c.native.binding:
        raise DefinitionConflict(
            "thread", c.thread_id, requested=_name(c.native.binding), existing=_name(thread.binding)
        )
    installed = _install(draft, thread, c.native, SettledBy.FORKED, c.source, c.at)
    receipt = installed.receipt
    assert receipt.source is not None
    draft.emit("thread.forked", ThreadForked(position=receipt.position, source=receipt.source), thread_id=c.thread_id)
    remember(draft, c.request_id, "fork", arguments, receipt)
    return draft.change(receipt)


def _name(binding: Binding) -> str:
    return f"{binding.harness}@{binding.definition_version} ({binding.state_version})"


# ---- repair ----


def reads_repair(c: RepairThread) -> Reads:
    return reads_finish(c.thread_id, c.turn_id).merged(
        _reads(c).merged(Reads(keys=(keys.checkpoint(c.thread_id, c.at),)))
    )


def repair_thread(c: RepairThread, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """End a Turn that cannot go on, with the context of a settled position instead of its own (C82).

    A Turn ends FAILED or CANCELLED with its effects known and a state that the next one can use (SE-04). Where its own
    state cannot be read there is none to clean, so a former one takes its place, and both become true together.

    Raises:
        InvalidTransition: the Turn waits for no operator, or an effect of it is not known yet: reconcile it first.
        PositionConflict, NotFound: as in `restore_thread`.
    """
    draft = begin(view, c.session, seed, now_ms)
    arguments = {
        "thread": c.thread_id,
        "turn": c.turn_id,
        "position": str(c.at),
        "expected_position": str(c.expected_at),
    }
    earlier = repeated(draft, c.request_id, "repair", arguments, RepairReceipt)
    if earlier is not None:
        return Unchanged(earlier)
    thread = draft.thread(c.thread_id)
    record = live_turn(draft, c.thread_id, c.turn_id)
    state = record.state
    if c.thread_id in draft.head.threads or not _parked(state):
        raise InvalidTransition(c.turn_id, state.status, "ended by a repair")
    _stands_at(c.session, thread, c.expected_at)
    if c.at:
        _settled(draft, thread, c.at)
    if c.native is None:
        return Unchanged(None)
    reason = state.operator
    state = stop_executions(draft, record, state)
    if unsettled(state):
        raise InvalidTransition(c.turn_id, "waiting for the outcome of a tool", "ended by a repair")
    if not settling(state):
        kind, _, _ = reason.partition(":")
        state = replace(state, failure=Failure(kind=kind if kind.isidentifier() else "Parked", message=reason))
    state = at_rest(c.turn_id, replace(state, operator=""))
    installed = _install(draft, thread, c.native, SettledBy.RESTORED, ThreadKey(c.session, c.thread_id), c.at)
    status = TurnStatus.CANCELLED if state.cancel else TurnStatus.FAILED
    end_turn(draft, installed.thread, replace(record, last_at=installed.thread.position), state, status)
    if c.at:
        _tell_restored(draft, installed.receipt)
    else:
        draft.emit("thread.restored", ThreadRestored(), thread_id=c.thread_id)
    receipt = RepairReceipt(
        request_id=c.request_id,
        turn_id=c.turn_id,
        status=status,
        position=installed.receipt.position if c.at else None,
        accepted_at_ms=now_ms,
    )
    remember(draft, c.request_id, "repair", arguments, receipt)
    return draft.change(receipt)


def _parked(state: TurnState) -> bool:
    """A person must look, or it could not be settled: by itself it will not end."""
    return state.operator != "" or (settling(state) and state.settle_tries > 0)


# ---- what they have in common ----


def checkpoint_view(key: ThreadKey, binding: Binding, at: int, record: CheckpointRecord) -> CheckpointView:
    """A settled position as users see it."""
    source = None
    if record.source is not None:
        session = SessionKey(key.session.namespace, record.source.session_id)
        origin = ThreadKey(session, record.source.thread_id)
        source = CheckpointSourceView(
            session=session, thread_id=origin.thread_id, position=position_of(origin, record.source.at)
        )
    return CheckpointView(
        session=key.session,
        thread_id=key.thread_id,
        position=position_of(key, at),
        created_at_ms=record.created_ms,
        settled=record.settled,
        binding=binding_view(binding),
        writer=record.writer,
        turn_id=record.turn_id or None,
        source=source,
    )


class _Installed(NamedTuple):
    thread: ThreadRecord
    receipt: CheckpointView


def _install(
    draft: Draft, thread: ThreadRecord, native: NativeState, settled: SettledBy, source: ThreadKey, source_at: int
) -> _Installed:
    """Append the copied baseline as a base of its own, with its entries, and let the Thread stand on it.

    Raises:
        RevisionConflict: the Thread has had a commit since the copy was made.
    """
    if native.head != thread.position:
        raise RevisionConflict("thread", thread.thread_id, expected=native.head, actual=thread.position)
    if bool(native.journal) is not bool(source_at):
        raise InvalidRequest("a position is restored with its native state, and the beginning without", path="native")
    at = thread.position + 1
    draft.native(thread.thread_id, at, native.journal)
    digest = chained("", native.journal) if native.journal else ""
    stands_at = at if native.journal else 0
    record = CheckpointRecord(
        base_at=at,
        through=at,
        digest=digest,
        writer=native.writer,
        created_ms=draft.now_ms,
        settled=settled,
        source=CheckpointSource(source.session.session_id, source.thread_id, source_at),
    )
    if stands_at:
        draft.put(keys.checkpoint(thread.thread_id, at), record)
    # A new fence, too: a state that a host keeps alive from before is worthless.
    thread = replace(
        thread,
        fence=thread.fence + 1,
        position=at,
        base_at=stands_at,
        checkpoint_at=stands_at,
        settled_at=stands_at,
        writer=native.writer,
        chain=digest,
        digest=digest,
    )
    draft.put(keys.thread(thread.thread_id), thread)
    if native.workspace:
        commit_entries(draft, thread.thread_id, at, native.workspace)
    if native.floor or native.numbers:
        count_on(draft, thread.thread_id, floor=native.floor, numbers=native.numbers)
    key = ThreadKey(draft.session, thread.thread_id)
    return _Installed(thread, checkpoint_view(key, thread.binding, at, record))


def _tell_restored(draft: Draft, receipt: CheckpointView) -> None:
    assert receipt.source is not None
    draft.emit(
        "thread.restored",
        ThreadRestored(position=receipt.position, restored_from=receipt.source.position),
        thread_id=receipt.thread_id,
    )


def _must_be_open(draft: Draft, thread: ThreadRecord) -> None:
    if draft.head.status is ResourceStatus.CLOSED:
        raise Closed("session", draft.session.session_id)
    if thread.status is ResourceStatus.CLOSED:
        raise Closed("thread", thread.thread_id)


def _stands_at(session: SessionKey, thread: ThreadRecord, expected_at: int) -> None:
    if thread.settled_at != expected_at:
        key = ThreadKey(session, thread.thread_id)
        raise PositionConflict(
            thread.thread_id,
            expected=position_of(key, expected_at) if expected_at else None,
            actual=position_of(key, thread.settled_at) if thread.settled_at else None,
        )


def _settled(draft: Draft, thread: ThreadRecord, at: int) -> None:
    """There is a settled checkpoint at that position."""
    if draft.get(keys.checkpoint(thread.thread_id, at), CheckpointRecord) is None:
        check_kept(draft.session, thread, at)
        raise NotFound("checkpoint", position_of(ThreadKey(draft.session, thread.thread_id), at))
