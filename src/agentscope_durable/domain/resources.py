"""Sessions and Threads: made once, closed once, never closed over unfinished work."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import PAGE_MAX, Change, Range, Reads, Unchanged, View
from agentscope_durable.contracts.commands import CloseSession, CloseThread, CreateSession, CreateThread, Done
from agentscope_durable.contracts.errors import (
    Closed,
    CorruptRecord,
    DefinitionConflict,
    InvalidRequest,
    LimitExceeded,
    SessionDropped,
    Unfinished,
)
from agentscope_durable.contracts.events import SessionClosed, SessionCreated, ThreadClosed, ThreadCreated
from agentscope_durable.contracts.identity import MAIN_THREAD_ID
from agentscope_durable.contracts.records import Binding, SessionHead, ThreadRecord, decode
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.contracts.views import BindingView
from agentscope_durable.domain.change import Draft, begin

THREADS_MAX = 3 * PAGE_MAX
"""Threads of one Session: `close` reads them all in one transaction, and a rule may ask for more only twice (D10)."""


def reads_create_session(_: CreateSession) -> Reads:
    return Reads(keys=(keys.thread(MAIN_THREAD_ID),))


def create_session(c: CreateSession, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Session and main Thread appear together, or not at all (RT-11).

    A repeat with the same definition name changes nothing, whatever version is current now (AD-16).
    """
    if view.head is not None:
        if view.head.status.gone:
            raise SessionDropped(keys.spell(c.session))
        main = decode(ThreadRecord, view.get(keys.thread(MAIN_THREAD_ID)) or b"", key=keys.thread(MAIN_THREAD_ID))
        _same_definition("session", c.session.session_id, main.binding, c.binding)
        return Unchanged(Done(changed=False))
    head = SessionHead(namespace=c.session.namespace, session_id=c.session.session_id, created_ms=now_ms)
    draft = Draft(view, c.session, seed, now_ms, head)
    draft.emit("session.created", SessionCreated(created_at_ms=now_ms))
    open_thread(draft, MAIN_THREAD_ID, c.binding)
    return draft.change(Done(changed=True))


def reads_create_thread(c: CreateThread) -> Reads:
    return Reads(keys=(keys.thread(c.thread_id),))


def create_thread(c: CreateThread, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    draft = begin(view, c.session, seed, now_ms)
    existing = draft.get(keys.thread(c.thread_id), ThreadRecord)
    if existing is not None:
        _same_definition("thread", c.thread_id, existing.binding, c.binding)
        return Unchanged(Done(changed=False))
    if draft.head.status is ResourceStatus.CLOSED:
        raise Closed("session", c.session.session_id)
    if draft.head.thread_count >= THREADS_MAX:
        raise LimitExceeded("threads of a session", THREADS_MAX)
    open_thread(draft, c.thread_id, c.binding)
    return draft.change(Done(changed=True))


def open_thread(draft: Draft, thread_id: str, binding: Binding) -> None:
    draft.head = replace(draft.head, thread_count=draft.head.thread_count + 1)
    created = ThreadCreated(binding=binding_view(binding), created_at_ms=draft.now_ms)
    seq = draft.emit("thread.created", created, thread_id=thread_id)
    draft.put(
        keys.thread(thread_id),
        ThreadRecord(thread_id=thread_id, binding=binding, created_ms=draft.now_ms, created_seq=seq),
    )


def _shut(draft: Draft, thread: ThreadRecord) -> None:
    seq = draft.emit("thread.closed", ThreadClosed(), thread_id=thread.thread_id)
    draft.put(keys.thread(thread.thread_id), replace(thread, status=ResourceStatus.CLOSED, closed_seq=seq))


def binding_view(binding: Binding) -> BindingView:
    """The definition a Thread is pinned to, as users see it."""
    return BindingView(
        harness=binding.harness,
        definition_version=binding.definition_version,
        state_version=binding.state_version,
    )


def _same_definition(kind: str, identity: str, existing: Binding, wanted: Binding) -> None:
    if existing.harness != wanted.harness:
        raise DefinitionConflict(kind, identity, requested=wanted.harness, existing=existing.harness)


def reads_close_thread(c: CloseThread) -> Reads:
    return Reads(keys=(keys.thread(c.thread_id),))


def close_thread(c: CloseThread, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Refused over unfinished Turns, which go on (RT-42). The main Thread closes with its Session."""
    draft = begin(view, c.session, seed, now_ms)
    thread = draft.thread(c.thread_id)
    if thread.status is ResourceStatus.CLOSED:
        return Unchanged(Done(changed=False))
    if c.thread_id == MAIN_THREAD_ID:
        raise InvalidRequest("the main thread closes together with its session", path="thread_id")
    if thread.current:
        raise Unfinished("thread", c.thread_id, turns=1)
    _shut(draft, thread)
    return draft.change(Done(changed=True))


_THREAD_PAGE = Range(keys.THREADS, limit=PAGE_MAX)


def reads_close_session(_: CloseSession) -> Reads:
    return Reads(ranges=(_THREAD_PAGE,))


def close_session(c: CloseSession, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Closes every Thread in the same commit; refused while any has an unfinished Turn (RT-42)."""
    draft = begin(view, c.session, seed, now_ms)
    if draft.head.status is ResourceStatus.CLOSED:
        return Unchanged(Done(changed=False))
    threads = list(_all_threads(draft))
    unfinished = sum(1 for thread in threads if thread.current)
    if unfinished:
        raise Unfinished("session", c.session.session_id, turns=unfinished)
    for thread in threads:
        if thread.status is ResourceStatus.OPEN:
            _shut(draft, thread)
    draft.head = replace(draft.head, status=ResourceStatus.CLOSED, closed_ms=now_ms)
    draft.emit("session.closed", SessionClosed(closed_at_ms=now_ms))
    return draft.change(Done(changed=True))


def _all_threads(draft: Draft) -> Iterator[ThreadRecord]:
    page, left = _THREAD_PAGE, draft.head.thread_count
    while left > 0:
        found = dict(draft.page(page, ThreadRecord))
        if not found:
            raise CorruptRecord(keys.THREADS, "ThreadRecord", f"{left} threads of the session are missing")
        yield from found.values()
        left -= len(found)
        page = Range(keys.THREADS, after=max(found), limit=PAGE_MAX)
