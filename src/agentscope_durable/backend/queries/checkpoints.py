"""Settled positions of a Thread."""

from __future__ import annotations

from agentscope_durable.backend.queries.pages import one_more, page_limit
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import get, thread_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.checkpoint import position_of, stream_position
from agentscope_durable.contracts.errors import InvalidCursor, NotFound
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.records import CheckpointRecord, decode, ordinal_of
from agentscope_durable.contracts.views import CheckpointPage
from agentscope_durable.domain.checkpoint import checkpoint_view
from agentscope_durable.domain.positions import check_kept
from agentscope_durable.spi.checkpoint import StoredCheckpoint
from agentscope_durable.spi.record_store import PAGE_MAX, Range, Reads

__all__ = ["list_checkpoints", "load_checkpoint"]


async def list_checkpoints(reader: Reader, question: q.ListCheckpoints) -> CheckpointPage:
    limit = page_limit(question.limit)
    thread_key = ThreadKey(question.session, question.thread_id)
    prefix, after, at = keys.checkpoints(thread_key.thread_id), "", 0
    if question.after is not None:
        at = stream_position(thread_key, question.after, path="after")
        after = keys.checkpoint(thread_key.thread_id, at)
    page = Range(prefix, after, one_more(limit))
    records = await reader.read(question.session, Reads(keys=(keys.thread(thread_key.thread_id),), ranges=(page,)))
    thread = thread_of(records, thread_key.thread_id)
    if at > thread.settled_at:
        raise InvalidCursor("this position is ahead of the thread", path="after")
    rows = records.ranges[page]
    items = tuple(
        checkpoint_view(thread_key, thread.binding, ordinal_of(key, prefix), decode(CheckpointRecord, data, key=key))
        for key, data in rows[:limit]
    )
    more = len(rows) > limit or len(rows) == PAGE_MAX
    current = position_of(thread_key, thread.settled_at) if thread.settled_at else None
    return CheckpointPage(items, items[-1].position if more else None, current)


async def load_checkpoint(reader: Reader, question: q.LoadCheckpoint) -> StoredCheckpoint:
    key = keys.checkpoint(question.thread_id, question.at)
    records = await reader.read(question.session, Reads(keys=(keys.thread(question.thread_id), key)))
    thread = thread_of(records, question.thread_id)
    record = get(records, key, CheckpointRecord)
    if record is None and question.at:
        check_kept(question.session, thread, question.at)
        raise NotFound("checkpoint", position_of(ThreadKey(question.session, question.thread_id), question.at))
    return StoredCheckpoint(
        binding=thread.binding,
        base_at=0 if record is None else record.base_at,
        digest="" if record is None else record.digest,
        writer="" if record is None else record.writer,
        head=thread.position,
        through=0 if record is None else record.through,
    )
