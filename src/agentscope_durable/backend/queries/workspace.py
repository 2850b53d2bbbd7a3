"""The workspace of a Thread: entries now, and entries as of a settled position."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from agentscope_durable.backend.queries.pages import page_limit
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import get, thread_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.errors import NotFound, Unavailable
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import EntryRecord, WorkspaceRecord, decode
from agentscope_durable.contracts.views import EntryView, WorkspaceView
from agentscope_durable.contracts.workspace import EntryPath, check_namespace, check_path
from agentscope_durable.spi.record_store import PAGE_MAX, Range, Reads

__all__ = ["entries_at", "get_content", "get_entry", "get_workspace", "list_entries"]

_ROUNDS: Final = 8
"""Looks at an entry that changes between the look at it and that at its content."""


async def get_workspace(reader: Reader, question: q.GetWorkspace) -> WorkspaceView:
    thread, key = keys.thread(question.thread_id), keys.workspace(question.thread_id)
    records = await reader.read(question.session, Reads(keys=(thread, key)))
    _ = thread_of(records, question.thread_id)
    counted = get(records, key, WorkspaceRecord) or WorkspaceRecord()
    return WorkspaceView(entries=counted.entries, size_bytes=counted.size, numbers=counted.numbers, floor=counted.floor)


async def get_entry(reader: Reader, question: q.GetEntry) -> EntryView | None:
    path = check_path(question.path)
    thread, key = keys.thread(question.thread_id), keys.entry(question.thread_id, path)
    for _round in range(_ROUNDS):
        records = await reader.read(question.session, Reads(keys=(thread, key)))
        _ = thread_of(records, question.thread_id)
        record = get(records, key, EntryRecord)
        if record is None:
            return None
        content = await _content(reader, question.session, question.thread_id, record.number)
        if content is not None:
            return replace(_view(path, record), content=content)
        # Written over in between, by the Turn that had written it.
    raise Unavailable(f"workspace entry {'/'.join(path)!r} changes faster than it can be read")


async def _content(reader: Reader, session: SessionKey, thread_id: str, number: int) -> Body | None:
    key = keys.content(thread_id, number)
    return get(await reader.read(session, Reads(keys=(key,))), key, Body)


async def get_content(reader: Reader, question: q.GetContent) -> Body:
    content = await _content(reader, question.session, question.thread_id, question.number)
    if content is None:
        raise NotFound("workspace content", str(question.number))
    return content


async def list_entries(reader: Reader, question: q.ListEntries) -> tuple[EntryView, ...]:
    prefix = keys.entries(question.thread_id, check_namespace(question.namespace))
    after = keys.entry(question.thread_id, check_path(question.after, path="after")) if question.after else ""
    page = Range(prefix, after, page_limit(question.limit))
    thread = keys.thread(question.thread_id)
    records = await reader.read(question.session, Reads(keys=(thread,), ranges=(page,)))
    _ = thread_of(records, question.thread_id)
    return tuple(_view(keys.entry_path(key), decode(EntryRecord, data, key=key)) for key, data in records.ranges[page])


async def entries_at(reader: Reader, question: q.EntriesAt) -> tuple[EntryView, ...]:
    """Costs the entries there are and what was replaced since then, whatever came before.

    The Thread may go on meanwhile. Present entries are read first: what is replaced after that is found among the
    replaced, which are read last.
    """
    thread_id, at = question.thread_id, question.at
    records = await reader.read(question.session, Reads(keys=(keys.thread(thread_id),)))
    _ = thread_of(records, thread_id)
    found: dict[EntryPath, EntryRecord | None] = {}
    for key, data in await _all(reader, question.session, keys.entries(thread_id)):
        record = decode(EntryRecord, data, key=key)
        found[keys.entry_path(key)] = record if record.at <= at else None
    replaced: set[EntryPath] = set()
    prefix, after = keys.formers(thread_id), keys.formers_after(thread_id, at)
    for key, data in await _all(reader, question.session, prefix, after):
        path = keys.entry_path(key)
        if path not in replaced:
            # The first time it was replaced since then: this is what stood there until then.
            replaced.add(path)
            record = decode(EntryRecord, data, key=key)
            found[path] = record if record.at <= at else None
    return tuple(_view(path, record) for path, record in found.items() if record is not None)


async def _all(reader: Reader, session: SessionKey, prefix: str, after: str = "") -> list[tuple[str, bytes]]:
    """Every record under a prefix, page by page. Of an entry there are a hundred bytes."""
    found: list[tuple[str, bytes]] = []
    while True:
        page = Range(prefix, after, PAGE_MAX)
        rows = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        found.extend(rows)
        if len(rows) < PAGE_MAX:
            return found
        after = rows[-1][0]


def _view(path: EntryPath, record: EntryRecord) -> EntryView:
    return EntryView(
        path=path,
        version=record.version,
        number=record.number,
        size_bytes=record.size,
        modified_at_ms=record.modified_ms,
    )
