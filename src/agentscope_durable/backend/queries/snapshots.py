"""The state of a Session as its events fold to."""

from __future__ import annotations

import types
from collections.abc import Generator
from typing import Final

from agentscope_durable.backend.queries.events import check_filter, filter_keys, public_event
from agentscope_durable.backend.queries.reading import Reader, log_page
from agentscope_durable.backend.queries.records import turn_of
from agentscope_durable.backend.queries.rows import events_of, weight
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import CorruptRecord, CursorExpired, LimitExceeded
from agentscope_durable.contracts.events import EventFilter, PublicEvent, cursor_of
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.domain.projection import EventProjection, concerns
from agentscope_durable.spi.record_store import Reads

__all__ = ["SNAPSHOT_BYTES_MAX", "SNAPSHOT_EVENTS_MAX", "get_snapshot"]

SNAPSHOT_EVENTS_MAX: Final = 100_000
"""Events one snapshot folds. A longer timeline is read in pages, or narrowed to a Turn, whose fold begins with it."""
SNAPSHOT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bodies one snapshot holds."""


async def get_snapshot(reader: Reader, question: q.GetSnapshot) -> SnapshotView:
    session, narrow = question.session, question.filter
    records = await reader.read(session, Reads(keys=filter_keys(narrow)))
    check_filter(records, narrow)
    watermark = records.next_seq - 1
    position = 0
    if narrow.turn_id is not None:
        # A Turn begins with the commit that holds its input.
        position = turn_of(records, narrow.thread_id or "", narrow.turn_id).input_seq - 1
    if position < records.pruned_through:
        raise CursorExpired(position, oldest=records.pruned_through)
    if watermark - position > SNAPSHOT_EVENTS_MAX:
        raise LimitExceeded("SNAPSHOT_EVENTS_MAX", SNAPSHOT_EVENTS_MAX)
    fold = EventProjection(session, narrow)
    scope = EventFilter(thread_id=narrow.thread_id, turn_id=narrow.turn_id)
    size = 0
    while position < watermark:
        page = log_page(after=position, through=watermark)
        log = (await reader.read(session, Reads(log=page))).log
        if not log:
            raise CorruptRecord(f"event {position + 1}", "log row", "it is missing")
        # The first row is taken whole: a Turn's events stand before its input as well as after it.
        for found in events_of(log, after=fold.sequence, through=watermark):
            event = found.event
            if not EventProjection.folds(event.type) or not concerns(
                scope, event.type, event.thread_id, event.turn_id, None
            ):
                # Counted, so that the fold sees no gap; what it says is not looked at.
                public = PublicEvent(type="", session=session, sequence=found.sequence, at_ms=found.at_ms, data={})
            else:
                size += weight(event)
                if size > SNAPSHOT_BYTES_MAX:
                    raise LimitExceeded("SNAPSHOT_BYTES_MAX", SNAPSHOT_BYTES_MAX)
                public = await public_event(reader, session, found)
            _ = fold.accept(public)
            position = found.sequence
        await _give_way()
    return SnapshotView(
        session=session, cursor=cursor_of(session, watermark), projection=fold.projection, filter=narrow
    )


@types.coroutine
def _give_way() -> Generator[None, None, None]:
    """Let other tasks run once: a store in memory answers without ever waiting."""
    yield
