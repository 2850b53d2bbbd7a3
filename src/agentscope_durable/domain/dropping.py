"""How a closed Session goes, and what stays of it.

Rule 1: first it is nobody's any more, then it goes. The first commit says that it is being dropped; from there on no
command and no question finds anything in it, so it does not matter in which order its records go, or where that stops.
Rule 2: a slice is one commit of bounded size. Stopped or killed between two of them, the Session says that it is being
dropped, and can be dropped on.
Rule 3: its name stays taken. A request id never lapses (D16): were the name free again, a request that is repeated
after the drop would be a new one and run twice. What stays is its head, one row of the log, and what was dropped.
Rule 4: of a body in the object store the mark stays, as of one that no commit refers to, for the sweep to find it. What
a fork has copied from it is the fork's own.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Erase, Range, Reads, Unchanged, View
from agentscope_durable.contracts.commands import Dropped, DropSession
from agentscope_durable.contracts.errors import NotClosed, NotFound, Unfinished
from agentscope_durable.contracts.events import SessionDropped
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import DropRecord, ObjectRecord, ObjectState, decode
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.contracts.views import DropReceipt
from agentscope_durable.domain.change import Draft

__all__ = ["DROP_RECORDS", "DROP_ROWS", "drop_receipt", "drop_session", "reads_drop"]

DROP_RECORDS: Final = 250
"""Records one slice drops. Each may hold a body of 64 KiB."""
DROP_ROWS: Final = 500
"""Rows of the log one slice drops."""

_KINDS: Final = (keys.READY_TURN, keys.READY_DISPATCH, keys.READY_LEASE, keys.READY_RUNNING)


def reads_drop(_: DropSession) -> Reads:
    return Reads(keys=(keys.DROPPED,))


def drop_session(c: DropSession, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Begin, or drop the next slice. A Session that is dropped already is told of again.

    Raises:
        NotFound: there is none.
        NotClosed: it is open.
        Unfinished: a host owns a Thread of it.
    """
    head, told = view.head, view.get(keys.DROPPED)
    if head is None:
        raise NotFound("session", f"{c.session.namespace}/{c.session.session_id}")
    if head.status is ResourceStatus.OPEN:
        raise NotClosed(keys.spell(c.session))
    if head.threads:
        raise Unfinished("session", keys.spell(c.session), turns=len(head.threads))
    draft = Draft(view, c.session, seed, now_ms, head)
    if told is None:
        record = DropRecord(begun_ms=now_ms, reason=c.reason, events=view.next_seq - 1, commits=view.rev)
        draft.head = replace(head, status=ResourceStatus.DROPPING)
        draft.put(keys.DROPPED, record)
        draft.emit("session.dropped", SessionDropped(dropped_at_ms=now_ms))
        return draft.change(Dropped(receipt=drop_receipt(c.session, record), more=True))
    record = decode(DropRecord, told, key=keys.DROPPED)
    if head.status is ResourceStatus.DROPPED:
        return Unchanged(Dropped(receipt=drop_receipt(c.session, record), more=False))
    record = record if record.listed else _drop_records(draft, record)
    rows = min(DROP_ROWS, view.rev - record.erased)
    record = replace(record, erased=record.erased + rows)
    done = record.listed and record.erased == view.rev
    if done:
        record = replace(record, dropped_ms=now_ms)
        draft.head = replace(head, status=ResourceStatus.DROPPED, thread_count=0)
    draft.put(keys.DROPPED, record)
    change = draft.change(Dropped(receipt=drop_receipt(c.session, record), more=not done))
    # Nobody waits for it.
    return replace(change, erase=Erase(rows, _KINDS), hints=())


def _drop_records(draft: Draft, record: DropRecord) -> DropRecord:
    page = Range("", record.after, DROP_RECORDS)
    found = draft.view.page(page)
    records = record_bytes = objects = object_bytes = 0
    for key, value in found:
        if key == keys.DROPPED:
            continue
        if key.startswith(keys.OBJECTS):
            body = decode(ObjectRecord, value, key=key)
            # Nobody is about to refer to it: the sweep need not wait.
            draft.put(key, replace(body, state=ObjectState.PENDING, marked_ms=0, kept=False, uses=0))
            objects, object_bytes = objects + 1, object_bytes + body.size
            continue
        draft.delete(key)
        records, record_bytes = records + 1, record_bytes + len(key.encode()) + len(value)
    return replace(
        record,
        after=found[-1][0] if found else record.after,
        listed=len(found) < DROP_RECORDS,
        records=record.records + records,
        record_bytes=record.record_bytes + record_bytes,
        objects=record.objects + objects,
        object_bytes=record.object_bytes + object_bytes,
    )


def drop_receipt(session: SessionKey, record: DropRecord) -> DropReceipt:
    return DropReceipt(
        session=session,
        reason=record.reason,
        begun_at_ms=record.begun_ms,
        dropped_at_ms=record.dropped_ms or None,
        events=record.events,
        commits=record.commits,
        records=record.records,
        record_bytes=record.record_bytes,
        objects=record.objects,
        object_bytes=record.object_bytes,
    )
