"""Sessions and their Threads."""

from __future__ import annotations

from agentscope_durable.backend.queries.pages import cut, cut_rows, one_more, page_limit, position_of
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import head_of, thread_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import SessionHead, ThreadRecord, decode
from agentscope_durable.contracts.views import Page, SessionView, ThreadView
from agentscope_durable.domain.resources import binding_view
from agentscope_durable.spi.record_store import Range, Reads, SessionScan

__all__ = [
    "get_session",
    "get_thread",
    "list_all_sessions",
    "list_sessions",
    "list_threads",
    "session_view",
    "thread_view",
]


async def list_sessions(reader: Reader, question: q.ListSessions) -> Page:
    return await _sessions(reader, keys.namespace_prefix(question.namespace), question.cursor, question.limit)


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
    return SessionView(session=session, status=head.status, created_at_ms=head.created_ms)


def thread_view(session: SessionKey, record: ThreadRecord) -> ThreadView:
    return ThreadView(
        session=session,
        thread_id=record.thread_id,
        binding=binding_view(record.binding),
        status=record.status,
        created_at_ms=record.created_ms,
        current_turn_id=record.current or None,
    )
