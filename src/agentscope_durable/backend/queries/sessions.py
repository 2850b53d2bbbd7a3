"""Sessions and their Threads."""

from __future__ import annotations

from agentscope_durable.backend.queries.pages import cut, cut_rows, one_more, page_limit, position_of
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import get, head_of, thread_of
from agentscope_durable.backend.queries.sizes import measure_session
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import NotClosed, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import (
    DropRecord,
    PolicyRecord,
    SessionHead,
    ThreadRecord,
    decode,
    decode_json,
)
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.contracts.views import AgedSession, DropReceipt, Page, PolicyRecordView, SessionView, ThreadView
from agentscope_durable.domain.dropping import drop_receipt
from agentscope_durable.domain.resources import binding_view
from agentscope_durable.spi.record_store import Range, Reads, SessionScan

__all__ = [
    "get_dropped",
    "get_session",
    "get_thread",
    "list_all_sessions",
    "list_closed",
    "list_policies",
    "list_sessions",
    "list_threads",
    "session_view",
    "thread_view",
]


async def list_sessions(reader: Reader, question: q.ListSessions) -> Page:
    prefix = keys.namespace_prefix(question.namespace)
    page = await _sessions(reader, prefix, question.cursor, question.limit)
    # What is left of a dropped Session is the operator's.
    return Page(tuple(view for view in page if not view.status.gone), page.cursor)


async def list_all_sessions(reader: Reader, question: q.ListAllSessions) -> Page:
    return await _sessions(reader, "", question.cursor, question.limit)


async def _sessions(reader: Reader, prefix: str, cursor_before: str | None, limit: int) -> Page:
    limit = page_limit(limit)
    after = position_of("sessions", cursor_before, prefix)
    scan = SessionScan(prefix=prefix, after=after, limit=one_more(limit))
    names, cursor = cut("sessions", await reader.records.sessions(scan), limit)
    items: list[SessionView] = []
    for name in names:
        head = (await reader.records.read(name, Reads())).head
        if head is not None:
            items.append(session_view(keys.session_of(name), head))
    return Page(tuple(items), cursor)


async def list_closed(reader: Reader, question: q.ListClosed) -> Page:
    """Each Session of the page with its age judged by the store's clock; tombstones are passed over."""
    limit = page_limit(question.limit)
    scan = SessionScan(prefix="", after=position_of("sessions", question.cursor, ""), limit=one_more(limit))
    names, cursor = cut("sessions", await reader.records.sessions(scan), limit)
    items: list[AgedSession] = []
    for name in names:
        records = await reader.records.read(name, Reads())
        head = records.head
        if head is None or head.status is ResourceStatus.DROPPED:
            continue
        closed = head.status is ResourceStatus.CLOSED and records.now_ms - head.closed_ms >= question.older_than_ms
        aged = closed or head.status is ResourceStatus.DROPPING
        items.append(AgedSession(session=keys.session_of(name), status=head.status, aged=aged))
    return Page(tuple(items), cursor)


async def list_policies(reader: Reader, question: q.ListPolicies) -> Page:
    limit = page_limit(question.limit)
    page = Range(
        keys.POLICIES, position_of("policies", question.cursor, keys.POLICIES, question.session), one_more(limit)
    )
    records = await reader.read(question.session, Reads(ranges=(page,)))
    rows, cursor = cut_rows("policies", records.ranges[page], limit, question.session)
    items: list[PolicyRecordView] = []
    for key, data in rows:
        record = decode(PolicyRecord, data, key=key)
        items.append(
            PolicyRecordView(
                key=keys.unescape(key.removeprefix(keys.POLICIES)),
                value=decode_json(record.value.inline, key=key),
                request_id=record.request_id,
                put_at_ms=record.put_ms,
            )
        )
    return Page(tuple(items), cursor)


async def get_dropped(reader: Reader, question: q.GetDropped) -> DropReceipt:
    """What is kept of a dropped Session; of any other closed one what a drop would find. It looks at each of its rows.

    Raises:
        NotFound: there is no such Session.
        NotClosed: it is open.
    """
    session = question.session
    records = await reader.records.read(keys.partition(session), Reads(keys=(keys.DROPPED,)))
    if records.head is None:
        raise NotFound("session", f"{session.namespace}/{session.session_id}")
    told = get(records, keys.DROPPED, DropRecord)
    if told is not None:
        return drop_receipt(session, told)
    if records.head.status is ResourceStatus.OPEN:
        raise NotClosed(keys.spell(session))
    size = await measure_session(reader, q.MeasureSession(session=session))
    found = DropRecord(
        begun_ms=0,
        reason="",
        events=size.events,
        commits=size.commits,
        records=size.records - size.objects,
        record_bytes=size.record_bytes,
        objects=size.objects,
        object_bytes=size.object_bytes,
    )
    return drop_receipt(session, found)


async def get_session(reader: Reader, question: q.GetSession) -> SessionView:
    records = await reader.read(question.session, Reads())
    return session_view(question.session, head_of(records, question.session))


async def get_thread(reader: Reader, question: q.GetThread) -> ThreadView:
    records = await reader.read(question.session, Reads(keys=(keys.thread(question.thread_id),)))
    return thread_view(question.session, thread_of(records, question.thread_id))


async def list_threads(reader: Reader, question: q.ListThreads) -> Page:
    limit = page_limit(question.limit)
    page = Range(keys.THREADS, position_of("threads", question.cursor, keys.THREADS, question.session), one_more(limit))
    records = await reader.read(question.session, Reads(ranges=(page,)))
    rows, cursor = cut_rows("threads", records.ranges[page], limit, question.session)
    items = (thread_view(question.session, decode(ThreadRecord, data, key=key)) for key, data in rows)
    return Page(tuple(items), cursor)


def session_view(session: SessionKey, head: SessionHead) -> SessionView:
    return SessionView(
        session=session,
        status=head.status,
        created_at_ms=head.created_ms,
        closed_at_ms=head.closed_ms or None,
    )


def thread_view(session: SessionKey, record: ThreadRecord) -> ThreadView:
    return ThreadView(
        session=session,
        thread_id=record.thread_id,
        binding=binding_view(record.binding),
        status=record.status,
        created_at_ms=record.created_ms,
        current_turn_id=record.current or None,
    )
