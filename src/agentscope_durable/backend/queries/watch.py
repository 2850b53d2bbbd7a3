"""What does not get on although nothing holds it: the watchdog's list (C18).

Rule: it reads the ready index, which has a row for each Thread that a host owns or could take, and then those Threads.
Idle Sessions are in no index, so they cost nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from agentscope_durable.backend.queries.pages import cursor_after, page_limit, uncursor
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import active_of, get
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import InvalidCursor, InvalidRequest
from agentscope_durable.contracts.records import ThreadRecord, TurnRecord
from agentscope_durable.contracts.views import StallPage, StallView
from agentscope_durable.domain.turn import could_go_on, due_ms
from agentscope_durable.spi.record_store import PAGE_MAX, Reads, ReadyItem, ReadyScan, StreamRange

__all__ = ["list_stalled"]

_KINDS: Final = (keys.READY_LEASE, keys.READY_TURN)
"""What is owned comes first: it is little, and it is what nobody else can take."""

_Place = tuple[int, str, tuple[int, str, str] | None]
"""Where a listing goes on: the kind, the class and the row it stands after."""


async def list_stalled(reader: Reader, question: q.ListStalled) -> StallPage:
    limit = page_limit(question.limit)
    if isinstance(question.after_ms, bool) or not isinstance(question.after_ms, int) or question.after_ms < 0:
        raise InvalidRequest("a time in milliseconds is a whole number from 0 on", path="after_ms")
    start: _Place = (0, "", None)
    if question.cursor is not None:
        start = uncursor("stalled threads", question.cursor, _Place)
        if not 0 <= start[0] < len(_KINDS):
            raise InvalidCursor("this is not a cursor of stalled threads", path="cursor")
    items: list[StallView] = []
    looked = age_max_ms = 0
    before = start
    async for place, item in _candidates(reader, start, limit):
        if looked == limit:
            return StallPage(tuple(items), cursor_after("stalled threads", before), looked, age_max_ms)
        looked += 1
        before = place
        view = await _stall(reader, item, owned=place[0] == 0)
        if view is not None:
            age_max_ms = max(age_max_ms, view.age_ms)
            if view.age_ms >= question.after_ms:
                items.append(view)
    return StallPage(tuple(items), None, looked, age_max_ms)


async def _candidates(reader: Reader, start: _Place, limit: int) -> AsyncIterator[tuple[_Place, ReadyItem]]:
    """Threads that are owned or due, from a place on, each with its own place."""
    first, klass, after = start
    for number in range(first, len(_KINDS)):
        kind = _KINDS[number]
        while True:
            if after is None:
                found = await reader.records.ready_classes(kind, "", klass, 1)
                if not found:
                    break
                klass = found[0]
            size = min(limit + 1, PAGE_MAX)
            page = await reader.records.ready(ReadyScan(kind, klass, after, size))
            for item in page.items:
                after = (item.due_ms, item.partition, item.item)
                yield (number, klass, after), item
            if len(page.items) < size:
                after = None
        klass, after = "", None


async def _stall(reader: Reader, item: ReadyItem, *, owned: bool) -> StallView | None:
    """How long a Thread has not got on; None if something holds it, or it is not as the index said any more."""
    session, thread_id, turn_id = keys.session_of(item.partition), item.item, item.value
    wanted = Reads(keys=(keys.thread(thread_id), keys.turn(turn_id)), owners=(item.klass,) if owned else ())
    records = await reader.records.read(item.partition, wanted)
    thread = get(records, keys.thread(thread_id), ThreadRecord)
    turn = get(records, keys.turn(turn_id), TurnRecord)
    if thread is None or turn is None or thread.current != turn_id:
        return None
    active = active_of(records, turn)
    if (active is not None) is not owned or (active is not None and active.owner != item.klass):
        return None
    state = turn.state if active is None else active.turn
    if not could_go_on(state, records.now_ms, owned=owned):
        return None
    since_ms = max(state.updated_ms, due_ms(state) or 0) if active is None else active.run.started_ms
    position = thread.position if active is None else active.position
    if position:
        last = StreamRange(thread_id, first=position, last=position, limit=1, columns=())
        rows = (await reader.records.read(item.partition, Reads(streams=(last,)))).streams[last]
        since_ms = max([since_ms, *(row.at_ms for row in rows)])
    return StallView(
        session=session,
        thread_id=thread_id,
        turn_id=turn_id,
        status=state.status,
        age_ms=max(0, records.now_ms - since_ms),
        owner=None if active is None else active.owner,
        fence=0 if active is None else active.fence,
        alive=owned and await reader.alive(records.owners[item.klass]),
        requesting=active is not None and bool(active.run.models),
    )
