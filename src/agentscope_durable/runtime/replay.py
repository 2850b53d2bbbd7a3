"""A timeline read by cursor: page after page, and a snapshot where the cursor has expired.

Rule 1: it begins at the beginning, or after a cursor. A timeline whose beginning was pruned begins with a snapshot, so
that nobody mistakes the rest of it for the whole (ST-34).
Rule 2: only what was read moves the position, so a failed look repeats nothing and misses nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from agentscope_durable.contracts.change import PAGE_MAX
from agentscope_durable.contracts.errors import CursorExpired, InvalidRequest, Misuse
from agentscope_durable.contracts.events import (
    Committed,
    EventFilter,
    EventPage,
    SnapshotReset,
    cursor_of,
    sequence_of,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import check_key
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.contracts.questions import GetSnapshot, ListEvents
from agentscope_durable.spi.backend import SessionBackend

__all__ = ["PAGE", "Fact", "Replay", "SessionEventClient", "cursor_after"]

PAGE = 200
"""Events looked at in one reading."""

Fact = Committed | SnapshotReset
"""What a timeline holds for a reader that was away: never a preview."""


def cursor_after(fact: Fact) -> str:
    """Where to go on when this one has been taken."""
    return fact.cursor if isinstance(fact, Committed) else fact.snapshot.cursor


class Replay:
    """Reads on from a position.

    Args:
        ask: puts a question to the backend.
        after: a cursor; None begins at the first event.

    Attributes:
        position: number of the last event that was read.
        behind: False once the last reading reached the end of the timeline.

    Raises:
        InvalidCursor: `after` is malformed, or of another Session.
    """

    def __init__(
        self, ask: Callable[[Any], Awaitable[Any]], session: SessionKey, narrow: EventFilter, after: str | None
    ) -> None:
        self._ask = ask
        self.session = session
        self.filter = narrow
        self.position = sequence_of(session, after)
        self.behind = True

    async def read(self, limit: int = PAGE) -> list[Fact]:
        """What comes next, looking at `limit` events at most; it may be [] although there is more.

        Raises:
            NotFound: there is no such Session, or not what the filter names.
            InvalidCursor: the position is ahead of the timeline.
        """
        cursor = cursor_of(self.session, self.position)
        try:
            page: EventPage = await self._ask(
                ListEvents(session=self.session, filter=self.filter, cursor=cursor, limit=limit, seek=True)
            )
        except CursorExpired:
            snapshot: SnapshotView = await self._ask(GetSnapshot(session=self.session, filter=self.filter))
            self.position = sequence_of(self.session, snapshot.cursor)
            self.behind = True
            return [SnapshotReset(snapshot)]
        self.position = sequence_of(self.session, page.cursor)
        self.behind = page.cursor != page.high_watermark
        return [Committed(event) for event in page.events]


class SessionEventClient:
    """A timeline for a host that polls by itself: no task, no thread, no listening (ST-20).

        client = SessionEventClient(backend, session, after=saved)
        for fact in await client.poll():
            apply(fact)
            client.acknowledge(fact)

    What was not acknowledged is given again by the next `poll`: at least once, like everywhere (ST-19).

    Args:
        backend: an open backend; no runtime is needed.
        session: whose timeline.
        filter: what of it; None for all.
        after: the cursor of the last fact that was applied; None for the beginning.

    Raises:
        InvalidCursor: `after` is malformed, or of another Session.
    """

    def __init__(
        self,
        backend: SessionBackend,
        session: SessionKey,
        filter: EventFilter | None = None,
        *,
        after: str | None = None,
    ) -> None:
        check_key(session)
        if filter is not None and not isinstance(filter, EventFilter):
            raise InvalidRequest("a filter is an EventFilter", path="filter")
        self._replay = Replay(backend.query, session, filter or EventFilter(), after)
        self._waiting: deque[Fact] = deque()
        self._cursor = after

    @property
    def cursor(self) -> str | None:
        """After the last fact that was acknowledged: what to save. None before the first."""
        return self._cursor

    @property
    def caught_up(self) -> bool:
        """Whether the last `poll` reached the end of the timeline."""
        return not self._replay.behind

    async def poll(self, limit: int = PAGE) -> tuple[Fact, ...]:
        """Everything that is not acknowledged, in order; if that is nothing, the next of it.

        Args:
            limit: events looked at, 1 to 1000. () may mean that none of them passed the filter: see `caught_up`.
        """
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PAGE_MAX:
            raise InvalidRequest(f"a limit is a whole number from 1 to {PAGE_MAX}", path="limit")
        if not self._waiting:
            self._waiting.extend(await self._replay.read(limit))
        return tuple(self._waiting)

    def acknowledge(self, fact: Fact) -> None:
        """This one and those before it are applied; they are not given again.

        Raises:
            Misuse: it is not one of those that `poll` gave and that are not acknowledged yet.
        """
        if not any(fact is waiting for waiting in self._waiting):
            raise Misuse("acknowledge takes a fact that poll has given and that was not acknowledged before")
        while self._waiting.popleft() is not fact:
            pass
        self._cursor = cursor_after(fact)
