"""Messages, by their index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from agentscope_durable.backend.queries.events import check_filter, filter_keys
from agentscope_durable.backend.queries.pages import cursor_after, is_full, one_more, page_limit, position_of
from agentscope_durable.backend.queries.reading import Reader, log_page
from agentscope_durable.backend.queries.records import state_of, turn_of
from agentscope_durable.backend.queries.rows import Found, Payload, events_of, payload_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import CorruptRecord, LimitExceeded, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.records import MessageIndex, TurnRecord, decode, ordinal_of
from agentscope_durable.contracts.views import OutcomeView, Page
from agentscope_durable.domain.ids import input_message_id
from agentscope_durable.domain.projection import message_of
from agentscope_durable.domain.turn_view import error_of
from agentscope_durable.spi.record_store import PAGE_MAX, Range, Reads

__all__ = ["MESSAGE_SCAN_MAX", "get_history", "get_message", "get_outcome"]

MESSAGE_SCAN_MAX: Final = 10_000
"""Index entries one question looks through for the messages of a Thread, a Turn or an id."""
_FIRST_LOOK: Final = 16
"""Index entries read at first for one message; most Turns have fewer."""


async def get_history(reader: Reader, question: q.GetHistory) -> Page:
    session, narrow = question.session, question.filter
    limit = page_limit(question.limit)
    after = position_of("history", question.cursor, keys.MESSAGES, session)
    records = await reader.read(session, Reads(keys=filter_keys(narrow)))
    check_filter(records, narrow)
    until = ""
    if narrow.turn_id is not None:
        start, until = _reach(turn_of(records, narrow.thread_id or "", narrow.turn_id))
        after = after or start
    entries: list[tuple[int, MessageIndex]] = []
    more = True
    scanned = 0
    size = one_more(limit)
    # One more than the page, to know whether there is another.
    while more and len(entries) <= limit and scanned < MESSAGE_SCAN_MAX:
        page = Range(keys.MESSAGES, after, size)
        rows = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        more = len(rows) == page.limit
        scanned += len(rows)
        # What is asked for may be far apart.
        size = min(size * 4, PAGE_MAX)
        for key, data in rows:
            if until and key > until:
                more = False
                break
            index = decode(MessageIndex, data, key=key)
            if narrow.thread_id not in (None, index.thread_id) or narrow.turn_id not in (None, index.turn_id):
                continue
            entries.append((_first_of(key), index))
        if rows:
            after = rows[-1][0]
    items, shown = await _messages(reader, session, entries[:limit], narrow.run_id)
    if shown < len(entries):
        # The page is full, of messages or of bytes.
        after = keys.message(entries[shown - 1][0])
    elif not more:
        return Page(tuple(items))
    return Page(tuple(items), cursor_after("history", after, session))


async def _messages(
    reader: Reader, session: SessionKey, entries: Sequence[tuple[int, MessageIndex]], run_id: str | None = None
) -> tuple[list[Message], int]:
    """The messages of index entries, and how many entries were looked at before the page was full."""
    found = await reader.events_at(session, {seq for first, index in entries for seq in (first, index.seq)})
    items: list[Message] = []
    size = 0
    for count, (first, index) in enumerate(entries):
        newest = found[index.seq]
        if run_id is not None and newest.event.run_id != run_id:
            continue
        payload = payload_of(newest)
        size += payload.size
        if is_full(items, size):
            return items, count
        items.append(await _message(reader, session, index, found[first], newest, payload))
    return items, len(entries)


async def _message(
    reader: Reader, session: SessionKey, index: MessageIndex, first: Found, newest: Found, payload: Payload
) -> Message:
    """
    Args:
        first: the event that first told it.
        newest: the one that tells it as it is, and its `payload`.
    """
    try:
        return message_of(
            await payload.open(reader.bodies, session),
            sequence=first.sequence,
            created_at_ms=first.at_ms,
            withdrawn=index.flag == "withdrawn",
            expired=index.flag == "expired",
        )
    except (msgspec.ValidationError, KeyError, ValueError) as error:
        raise CorruptRecord(f"event {newest.sequence}", newest.event.type, str(error)) from error


async def get_message(reader: Reader, question: q.GetMessage) -> Message:
    session, message_id = question.session, question.message_id
    if question.sequence:
        message = await _at(reader, session, message_id, question.sequence)
        if message is not None:
            return message
    after, until = keys.MESSAGES, ""
    # Messages of a Turn are named after it; it tells where to look.
    turn_id = message_id.rpartition(".")[0]
    turn_key = keys.turn(turn_id)
    records = await reader.read(session, Reads(keys=(turn_key,)))
    if turn_key in records.keys:
        turn = decode(TurnRecord, records.keys[turn_key], key=turn_key)
        after, until = _reach(turn)
        state = state_of(records, turn)
        # The newest answer and the first input are what is asked for most.
        known = {state.message_id: state.message_seq, input_message_id(turn_id): turn.input_seq}
        sequence = known.get(message_id, 0)
        if sequence:
            message = await _at(reader, session, message_id, sequence)
            if message is not None:
                return message
    scanned = 0
    size = _FIRST_LOOK
    while True:
        page = Range(keys.MESSAGES, after, size)
        rows = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        for key, data in rows:
            index = decode(MessageIndex, data, key=key)
            if index.message_id == message_id:
                return (await _messages(reader, session, [(_first_of(key), index)]))[0][0]
        scanned += len(rows)
        if len(rows) < size or (until and rows[-1][0] >= until):
            raise NotFound("message", message_id)
        if scanned >= MESSAGE_SCAN_MAX:
            raise LimitExceeded("MESSAGE_SCAN_MAX", MESSAGE_SCAN_MAX)
        after = rows[-1][0]
        size = min(size * 4, PAGE_MAX)


async def get_outcome(reader: Reader, question: q.GetOutcome) -> OutcomeView:
    session = question.session
    records = await reader.read(session, Reads(keys=(keys.turn(question.turn_id),)))
    turn = turn_of(records, question.thread_id, question.turn_id)
    state = state_of(records, turn)
    message = None
    if state.result is not None and state.result.message_id:
        # Mostly it is the newest one, and its only version: then it is found at once.
        newest = state.result.message_id == state.message_id
        asked = q.GetMessage(
            session=session, message_id=state.result.message_id, sequence=state.message_seq if newest else 0
        )
        message = await get_message(reader, asked)
    return OutcomeView(status=state.status, error=error_of(state), message=message)


async def _at(reader: Reader, session: SessionKey, message_id: str, sequence: int) -> Message | None:
    """The message that an event first told, in one reading unless there is a later version; None if it is another."""
    key = keys.message(sequence)
    here = log_page(after=sequence - 1, through=sequence, rows=1)
    records = await reader.read(session, Reads(keys=(key,), log=here))
    if key not in records.keys:
        return None
    index = decode(MessageIndex, records.keys[key], key=key)
    if index.message_id != message_id:
        return None
    for found in events_of(records.log, after=sequence - 1, through=sequence):
        if index.seq == sequence:
            return await _message(reader, session, index, found, found, payload_of(found))
    return (await _messages(reader, session, [(sequence, index)]))[0][0]


def _reach(turn: TurnRecord) -> tuple[str, str]:
    """Between which keys the messages of a Turn stand in the index: after the first, and not after the second ("" while
    it goes on)."""
    return keys.message(turn.input_seq - 1), keys.message(turn.ended_seq) if turn.ended_seq else ""


def _first_of(key: str) -> int:
    """The first sequence of a message, from the key of its index entry."""
    return ordinal_of(key, keys.MESSAGES)
