"""The state of a Session as its events fold to.

A snapshot is folded from events and nothing else (D10). It reads the parts of the timeline that can be about what was
asked for: for a Turn from its input to its end, for a Thread those of its Turns. Events whose words are said again
soon after are not opened.
"""

from __future__ import annotations

import types
from collections.abc import Generator, Iterable
from typing import Final

from agentscope_durable.backend.queries.events import check_filter, filter_keys, public_event
from agentscope_durable.backend.queries.reading import LOG_ROWS, NEAR, Reader, log_page
from agentscope_durable.backend.queries.records import thread_of, turn_of
from agentscope_durable.backend.queries.rows import Found, events_of, last_of, payload_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import CorruptRecord, SnapshotTooLarge, Unavailable
from agentscope_durable.contracts.events import EventFilter
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.contracts.records import ThreadRecord, TurnRecord, TurnRef, decode
from agentscope_durable.domain.projection import EventProjection, concerns
from agentscope_durable.domain.pruning import superseded
from agentscope_durable.spi.record_store import PAGE_MAX, Range, Reads

__all__ = ["SNAPSHOT_BYTES_MAX", "SNAPSHOT_EVENTS_MAX", "SNAPSHOT_SCAN_MAX", "get_snapshot"]

SNAPSHOT_EVENTS_MAX: Final = 100_000
"""Events one snapshot is folded from. For more, narrow it to a Thread or a Turn."""
SNAPSHOT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bodies one snapshot holds."""
SNAPSHOT_SCAN_MAX: Final = 1_000_000
"""Events one snapshot looks through. Pruning takes away what no snapshot shows."""
_ROUNDS: Final = 8

_Parts = list[tuple[int, int]]
"""Parts of a timeline as (first, last) event numbers."""


class _PrunedMeanwhile(Exception):
    """What is left of the timeline no longer folds to the state of the moment that was asked for."""


async def get_snapshot(reader: Reader, question: q.GetSnapshot) -> SnapshotView:
    for _ in range(_ROUNDS):
        try:
            return await _snapshot(reader, question.session, question.filter)
        except _PrunedMeanwhile:
            continue
    raise Unavailable("the session was pruned again and again while its snapshot was taken")


async def _snapshot(reader: Reader, session: SessionKey, narrow: EventFilter) -> SnapshotView:
    records = await reader.read(session, Reads(keys=filter_keys(narrow)))
    check_filter(records, narrow)
    watermark = records.next_seq - 1
    if narrow.turn_id is not None:
        parts = [_of_turn(turn_of(records, narrow.thread_id or "", narrow.turn_id), watermark)]
    elif narrow.thread_id is not None:
        parts = await _of_thread(reader, session, thread_of(records, narrow.thread_id), watermark)
    else:
        parts = [(1, watermark)]
    fold = EventProjection(session, narrow)
    await _fold(reader, fold, parts, watermark)
    fold.pass_over(watermark)
    return fold.snapshot()


async def _fold(reader: Reader, fold: EventProjection, parts: _Parts, watermark: int) -> None:
    """Fold the events of these parts, page by page. The first row of a part is taken whole: a Turn's events stand
    before its input as well as after it."""
    position = looked = folded = size = 0
    for first, last in parts:
        position = max(position, first - 1)
        while position < last:
            records = await reader.read(fold.session, Reads(log=log_page(after=position, through=last)))
            pruned = records.pruned_through
            if pruned > watermark:
                raise _PrunedMeanwhile
            page = list(events_of(records.log, after=fold.sequence, through=watermark))
            for row in records.log:
                _follows(row.first, max(position, pruned))
                position = last_of(row)
            shown = _shown(fold, page)
            looked += len(page)
            folded += len(shown)
            for found in shown:
                payload = payload_of(found)
                size += payload.size
                if size > SNAPSHOT_BYTES_MAX:
                    raise SnapshotTooLarge("SNAPSHOT_BYTES_MAX", SNAPSHOT_BYTES_MAX)
                fold.pass_over(found.sequence - 1)
                _ = fold.accept(await public_event(reader, fold.session, found, payload))
            if folded > SNAPSHOT_EVENTS_MAX:
                raise SnapshotTooLarge("SNAPSHOT_EVENTS_MAX", SNAPSHOT_EVENTS_MAX)
            if looked > SNAPSHOT_SCAN_MAX:
                raise SnapshotTooLarge("SNAPSHOT_SCAN_MAX", SNAPSHOT_SCAN_MAX)
            if len(records.log) < LOG_ROWS:
                # That was all there is; of what is pruned nothing need be left.
                _follows(last + 1, max(position, pruned))
                break
            await _give_way()


def _shown(fold: EventProjection, page: list[Found]) -> list[Found]:
    """The events of a page that change the fold, without those whose words are said again on it."""
    scope = EventFilter(thread_id=fold.filter.thread_id, turn_id=fold.filter.turn_id)
    found = [
        one
        for one in page
        if EventProjection.folds(one.event.type)
        and concerns(scope, one.event.type, one.event.thread_id, one.event.turn_id, None)
    ]
    unneeded = superseded([(one.sequence, one.event) for one in found])
    return [one for one in found if one.sequence not in unneeded]


def _follows(first: int, position: int) -> None:
    """Nothing is missing between an event and what was read before it."""
    if first > position + 1:
        raise CorruptRecord(f"event {position + 1}", "log row", "it is missing")


# ---- which parts of a timeline are about what ----


def _of_turn(turn: TurnRecord, watermark: int) -> tuple[int, int]:
    """A Turn begins with the commit that holds its input, and the one that ends it is the last about it."""
    return turn.input_seq, min(turn.ended_seq or watermark, watermark)


async def _of_thread(reader: Reader, session: SessionKey, thread: ThreadRecord, watermark: int) -> _Parts:
    """Where it was opened and closed, and its Turns."""
    parts = [(thread.created_seq, thread.created_seq)]
    prefix, after = keys.orders(thread.thread_id), ""
    while True:
        page = Range(prefix, after, PAGE_MAX)
        rows = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        wanted = tuple(keys.turn(decode(TurnRef, data, key=key).turn_id) for key, data in rows)
        found = (await reader.read(session, Reads(keys=wanted))).keys
        for key in wanted:
            if key not in found:
                raise CorruptRecord(key, "TurnRecord", "an order entry names a turn that does not exist")
            parts.append(_of_turn(decode(TurnRecord, found[key], key=key), watermark))
        if len(rows) < PAGE_MAX:
            break
        after = rows[-1][0]
    if thread.closed_seq:
        parts.append((thread.closed_seq, thread.closed_seq))
    return _joined(part for part in parts if part[0] <= watermark)


def _joined(parts: Iterable[tuple[int, int]]) -> _Parts:
    """The parts in order, those that overlap or are near each other as one."""
    joined: _Parts = []
    for first, last in sorted(parts):
        if joined and first - joined[-1][1] <= NEAR:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


@types.coroutine
def _give_way() -> Generator[None, None, None]:
    """Let other tasks run once: a store in memory answers without ever waiting."""
    yield
