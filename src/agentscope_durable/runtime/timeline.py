"""What Session, Thread and Turn have in common: they are views of one timeline (RT-20).

Rule: a view narrows and never renumbers. The same event has the same number through every handle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, overload

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.events import EventFilter, EventPage
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.options import EventDeltaType, EventStreamOptions
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.contracts.questions import GetHistory, GetSnapshot, ListEvents
from agentscope_durable.contracts.views import Page
from agentscope_durable.runtime.door import Door
from agentscope_durable.runtime.observers import Listener
from agentscope_durable.runtime.streams import OnRetry, SessionEventStream, delta_types
from agentscope_durable.runtime.subscriptions import EventSubscription

__all__ = ["PAGE_LIMIT", "Timeline"]

PAGE_LIMIT = 100
"""Items of a page when the caller names no limit; at most 1000."""


class Timeline:
    def __init__(self, door: Door, session: SessionKey, narrow: EventFilter) -> None:
        self._door = door
        self._session = session
        self._narrow = narrow

    # ---- pages ----

    @overload
    async def list_events(
        self, cursor: str | None = None, limit: int = PAGE_LIMIT, filter: EventFilter | None = None
    ) -> EventPage: ...
    @overload
    async def list_events(
        self, filter: EventFilter, cursor: str | None = None, limit: int = PAGE_LIMIT
    ) -> EventPage: ...
    async def list_events(self, *given: Any, **named: Any) -> EventPage:
        """Committed events after `cursor`, in order (EV-03). A filter may also stand first.

        Args:
            cursor: of an event or page of this Session; None begins at the first event that is kept.
            limit: events looked at, 1 to 1000; those outside this handle's view count too (FI-10).
            filter: narrows further; it must lie within this handle's view.

        Raises:
            CursorExpired: the events after the cursor were pruned.
            InvalidCursor: it is malformed, of another Session, or of the future.
        """
        given, named = _filter_first(given, named)
        return await self._list_events(*given, **named)

    async def _list_events(
        self, cursor: str | None = None, limit: int = PAGE_LIMIT, filter: EventFilter | None = None
    ) -> EventPage:
        return await self._door.query(
            ListEvents(session=self._session, filter=self._within(filter), cursor=cursor, limit=limit)
        )

    # ---- as it happens ----

    @overload
    def stream_events(
        self,
        options: EventStreamOptions | None = None,
        *,
        filter: EventFilter | None = None,
        after: str | None = None,
        deltas: Iterable[EventDeltaType] = (),
    ) -> SessionEventStream: ...
    @overload
    def stream_events(
        self,
        filter: EventFilter,
        options: EventStreamOptions | None = None,
        *,
        after: str | None = None,
        deltas: Iterable[EventDeltaType] = (),
    ) -> SessionEventStream: ...
    def stream_events(self, *given: Any, **named: Any) -> SessionEventStream:
        """Facts as they happen, and previews of the kinds asked for (ST-03..ST-07). A filter may also stand first.

        Open it before `submit` and no preview of that Turn is missed (ST-27). It observes only; closing it changes
        nothing.

        Args:
            options: `after` and `deltas` in one object, instead of the two.
            filter: narrows further; it must lie within this handle's view.
            after: continue after this cursor; None replays all that is kept, or begins with a snapshot if events were
                pruned.
            deltas: previews wanted on this stream.

        Raises:
            InvalidCursor: `after` is malformed or of another Session; one of the future is refused when it is read.
        """
        given, named = _filter_first(given, named)
        return self._stream_events(*given, **named)

    def _stream_events(
        self,
        options: EventStreamOptions | None = None,
        *,
        filter: EventFilter | None = None,
        after: str | None = None,
        deltas: Iterable[EventDeltaType] = (),
    ) -> SessionEventStream:
        return SessionEventStream(self._door, self._session, self._within(filter), _options(options, after, deltas))

    @overload
    def subscribe_events(
        self,
        options: EventStreamOptions | None = None,
        listener: Listener | None = None,
        *,
        filter: EventFilter | None = None,
        after: str | None = None,
        deltas: Iterable[EventDeltaType] = (),
    ) -> EventSubscription: ...
    @overload
    def subscribe_events(
        self,
        filter: EventFilter,
        options: EventStreamOptions | None = None,
        listener: Listener | None = None,
        *,
        after: str | None = None,
        deltas: Iterable[EventDeltaType] = (),
    ) -> EventSubscription: ...
    def subscribe_events(self, *given: Any, **named: Any) -> EventSubscription:
        """Call `listener` with everything that `stream_events` would yield, from now on (ST-08, ST-32).

        The runtime calls it, one item after the other. A coroutine function is called on the event loop; any other
        function in a thread, so that it may block. What it raises is told to `on_error`, and the same fact is delivered
        again after `poll_interval`; nothing is skipped.

        Args:
            options, filter, after, deltas: as for `stream_events`. A filter may also stand first.
            listener: takes one `SessionStreamEvent`.

        Returns:
            The subscription: close it when the observer has gone. The runtime's end closes it too.
        """
        given, named = _filter_first(given, named)
        return self._subscribe_events(*given, **named)

    def _subscribe_events(
        self,
        options: EventStreamOptions | None = None,
        listener: Listener | None = None,
        *,
        filter: EventFilter | None = None,
        after: str | None = None,
        deltas: Iterable[EventDeltaType] = (),
    ) -> EventSubscription:
        if not callable(listener):
            raise InvalidRequest("a listener is a function that takes one event", path="listener")
        narrow, chosen = self._within(filter), _options(options, after, deltas)

        def open(cursor: str | None, on_retry: OnRetry) -> SessionEventStream:
            going_on = EventStreamOptions(after=cursor, deltas=chosen.deltas)
            return SessionEventStream(self._door, self._session, narrow, going_on, on_retry=on_retry)

        _ = open(chosen.after, lambda error: None)  # What cannot be is refused here, and not to `on_error`.
        self._door.check()
        return EventSubscription(self._door, self._session, listener, open, after=chosen.after)

    # ---- states ----

    async def _snapshot(self, filter: EventFilter | None) -> SnapshotView:
        return await self._door.query(GetSnapshot(session=self._session, filter=self._within(filter)))

    async def _history(self, narrow: EventFilter, cursor: str | None, limit: int) -> Page:
        return await self._door.query(GetHistory(session=self._session, filter=narrow, cursor=cursor, limit=limit))

    def _within(self, narrow: EventFilter | None) -> EventFilter:
        own = self._narrow
        if narrow is None:
            return own
        if not isinstance(narrow, EventFilter):
            raise InvalidRequest("a filter is an EventFilter", path="filter")
        for name in ("thread_id", "turn_id"):
            mine, given = getattr(own, name), getattr(narrow, name)
            if mine is not None and given not in (None, mine):
                raise InvalidRequest(f"{given!r} lies outside this handle's view", path=f"filter.{name}")
        return EventFilter(
            thread_id=own.thread_id or narrow.thread_id,
            turn_id=own.turn_id or narrow.turn_id,
            run_id=own.run_id or narrow.run_id,
        )


def _filter_first(given: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(filter, ...)` says the same as `(..., filter=filter)`."""
    if given and isinstance(given[0], EventFilter) and "filter" not in named:
        return given[1:], {**named, "filter": given[0]}
    return given, dict(named)


def _options(
    options: EventStreamOptions | None, after: str | None, deltas: Iterable[EventDeltaType]
) -> EventStreamOptions:
    if options is None:
        return EventStreamOptions(after=after, deltas=delta_types(deltas))
    if not isinstance(options, EventStreamOptions):
        raise InvalidRequest("options are EventStreamOptions", path="options")
    if after is not None or deltas:
        raise InvalidRequest("give options, or after and deltas, not both", path="options")
    return options
