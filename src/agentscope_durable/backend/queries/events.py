"""Public events and their filters."""

from __future__ import annotations

from agentscope_durable.backend.queries.pages import is_full, page_limit
from agentscope_durable.backend.queries.reading import Reader, log_page
from agentscope_durable.backend.queries.records import run_key, run_of, thread_of, turn_of
from agentscope_durable.backend.queries.rows import Found, Payload, events_of, last_of, payload_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import CorruptRecord, CursorExpired, InvalidCursor, InvalidRequest
from agentscope_durable.contracts.events import EventFilter, EventPage, PublicEvent, cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.domain.projection import concerns
from agentscope_durable.spi.record_store import PAGE_MAX, Reads, Records

__all__ = ["check_filter", "filter_keys", "list_events", "public_event", "watermarks"]


async def list_events(reader: Reader, question: q.ListEvents) -> EventPage:
    session, narrow = question.session, question.filter
    limit = page_limit(question.limit)
    position = sequence_of(session, question.cursor)
    last = 0
    wanted = filter_keys(narrow)
    events: list[PublicEvent] = []
    size = 0
    checked = beginning = False
    if question.seek and position == 0 and narrow.turn_id is not None:
        records = await reader.read(session, Reads(keys=wanted))
        check_filter(records, narrow)
        checked = beginning = True
        position = turn_of(records, narrow.thread_id or "", narrow.turn_id).input_seq - 1
    while True:
        # Only as far as the page can reach: `limit` counts the events looked at (FI-10).
        rows = log_page(after=position, through=last or position + limit, rows=limit)
        records = await reader.read(session, Reads(keys=() if checked else wanted, log=rows))
        if not checked:
            check_filter(records, narrow)
            checked = True
        watermark = records.next_seq - 1
        if beginning and records.log:
            # The commit that admitted the Turn, whole.
            position = min(position, records.log[0].first - 1)
            beginning = False
        if position > watermark:
            raise InvalidCursor("this cursor is ahead of the timeline", path="cursor")
        if position < records.pruned_through:
            if last:
                # Pruned while this page was read: it ends here.
                return EventPage(tuple(events), cursor_of(session, position), cursor_of(session, watermark))
            if question.cursor is not None:
                raise CursorExpired(position, oldest=records.pruned_through)
            # Without a cursor: everything that is kept.
            position = records.pruned_through
            continue
        last = last or position + limit
        _check_whole(records, position, min(last, watermark))
        full = False
        for found in events_of(records.log, after=position, through=last):
            event = found.event
            if (not question.types or event.type in question.types) and concerns(
                narrow, event.type, event.thread_id, event.turn_id, event.run_id
            ):
                payload = payload_of(found)
                size += payload.size
                full = is_full(events, size)
                if full:
                    break
                events.append(await public_event(reader, session, found, payload))
            position = found.sequence
        if full or position >= min(last, watermark):
            return EventPage(tuple(events), cursor_of(session, position), cursor_of(session, watermark))


def _check_whole(records: Records, position: int, through: int) -> None:
    """Every number that was given out after `position` is there: a reader would else pass over what is missing, or wait
    for it for ever, reading again and again (EV-06).

    Raises:
        CorruptRecord: the log has a hole.
    """
    for row in records.log:
        if row.first > position + 1:
            break
        position = max(position, last_of(row))
    else:
        if records.log or position >= through:
            return
    raise CorruptRecord(f"event {position + 1}", "public event", "it is counted, and not in the log")


async def watermarks(reader: Reader, question: q.Watermarks) -> tuple[int, ...]:
    if len(question.sessions) > PAGE_MAX:
        raise InvalidRequest(f"at most {PAGE_MAX} sessions in one question", path="sessions")
    return tuple(await reader.records.watermarks([keys.partition(session) for session in question.sessions]))


async def public_event(reader: Reader, session: SessionKey, found: Found, payload: Payload) -> PublicEvent:
    """The event as readers see it."""
    event = found.event
    return PublicEvent(
        type=event.type,
        session=session,
        sequence=found.sequence,
        at_ms=found.at_ms,
        data=await payload.open(reader.bodies, session),
        thread_id=event.thread_id or None,
        turn_id=event.turn_id or None,
        run_id=event.run_id or None,
        step_id=event.step_id or None,
    )


def filter_keys(narrow: EventFilter) -> tuple[str, ...]:
    """What must be read to know that a filter names things that are inside each other (FI-03)."""
    wanted: list[str] = []
    if narrow.thread_id is not None:
        wanted.append(keys.thread(narrow.thread_id))
    if narrow.turn_id is not None:
        wanted.append(keys.turn(narrow.turn_id))
        if narrow.run_id is not None:
            key = run_key(narrow.turn_id, narrow.run_id)
            if key is not None:
                wanted.append(key)
    return tuple(wanted)


def check_filter(records: Records, narrow: EventFilter) -> None:
    """
    Raises:
        NotFound: the filter names a thing that is not, or is not inside the thing around it.
    """
    if narrow.thread_id is not None:
        _ = thread_of(records, narrow.thread_id)
        if narrow.turn_id is not None:
            _ = turn_of(records, narrow.thread_id, narrow.turn_id)
            if narrow.run_id is not None:
                _ = run_of(records, narrow.turn_id, narrow.run_id)
