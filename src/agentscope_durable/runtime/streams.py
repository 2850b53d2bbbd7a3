"""One Session's timeline as it happens: facts in order, and the previews between them.

Rule 1: facts come from the store by cursor, without gap or repeat; hints and polling only say when to look (ST-06,
ST-10). A cursor that has expired yields a snapshot that replaces what the reader has (ST-07).
Rule 2: a preview is shown where it belongs: after the facts that were there when it began, before the fact that
completes it, and never after that (D22, ST-21).
Rule 3: reading is all a stream does. Closing it, losing it or being slow changes nothing else (ST-29).
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from agentscope_durable.contracts.errors import HostClosed, InvalidRequest, Retry, StoreMoved
from agentscope_durable.contracts.events import (
    Committed,
    EventFilter,
    PreviewStarted,
    PublicEvent,
    SessionStreamEvent,
    SnapshotReset,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.options import EventDeltaType, EventStreamOptions
from agentscope_durable.domain.projection import matches
from agentscope_durable.runtime.door import SUBJECT, Door
from agentscope_durable.runtime.feeds import Feed
from agentscope_durable.runtime.live import PreviewQueue, Subject, preview_key, subject
from agentscope_durable.runtime.replay import Fact, Replay, cursor_after
from agentscope_durable.runtime.tasks import Bell
from agentscope_durable.spi.live import Preview

log = logging.getLogger("agentscope_durable.runtime")

BACKLOG_MAX = 400
"""Facts that wait for a reader. One that is further behind reads the rest from the store when it comes to it."""
VOIDS_MAX = 1024
"""Messages and calls whose facts were shown, remembered so that a late preview of one is dropped."""

_KINDS = {"message": EventDeltaType.MESSAGE, "tool_arguments": EventDeltaType.TOOL_ARGUMENTS}

OnRetry = Callable[[Exception], None]

Sink = Callable[[SessionStreamEvent], Awaitable[None] | None]


class SessionEventStream:
    """Facts, and previews where asked for: `async with stream as events: async for event in events: ...`.

    It begins when it is entered (or first iterated), needs no started runtime, and goes on until it is closed. One
    reader at a time. The runtime's end raises `HostClosed` in it: the timeline has not ended with it.

    Attributes:
        cursor: after the last fact that was handed out; None before the first.
    """

    def __init__(
        self,
        door: Door,
        session: SessionKey,
        narrow: EventFilter,
        options: EventStreamOptions,
        *,
        on_retry: OnRetry | None = None,
    ) -> None:
        """Internal. `on_retry` is told of readings that fail and are tried again."""
        self._replay = Replay(door.query, session, narrow, options.after)
        self._door = door
        self._session = session
        self._filter = narrow
        self._deltas = delta_types(options.deltas)
        self._on_retry = on_retry
        self._bell = Bell()
        self._stack: AsyncExitStack | None = None
        self._feed: Feed | None = None
        self._joined = False
        self._facts: deque[Fact] = deque()
        self._out: deque[SessionStreamEvent] = deque()
        self._after = options.after
        self._last: Fact | None = None
        self._behind = True
        self._previews = PreviewQueue(self._wants, self._bell.ring)
        # The attempt up to which previews of a message or call are void.
        self._voids: OrderedDict[Subject, int] = OrderedDict()
        self._announced: Preview | None = None
        self._closed = False
        self._aborted = False

    @property
    def cursor(self) -> str | None:
        return self._after if self._last is None else cursor_after(self._last)

    # ---- life ----

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _open(self) -> None:
        if self._stack is not None or self._closed:
            return
        self._door.check()
        stack = self._stack = AsyncExitStack()
        self._door.opened(self)
        stack.callback(self._door.ended, self)
        if self._deltas:
            # Before the first look at the store, so that the previews of a very fast agent are not missed (ST-27).
            self._door.live.attach(self._session, self._previews)
            stack.callback(self._door.live.detach, self._session, self._previews)
        self._feed = await stack.enter_async_context(self._door.feeds.of(self._session))
        stack.callback(self._feed.leave, self, self._filter)

    async def aclose(self) -> None:
        """End the stream. A reader that waits in it stops. Safe to call twice."""
        self._closed = True
        self._bell.ring()
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    def abort(self) -> None:
        """The runtime ends."""
        self._aborted = True
        self._bell.ring()

    # ---- reading ----

    def __aiter__(self) -> AsyncIterator[SessionStreamEvent]:
        return self

    async def __anext__(self) -> SessionStreamEvent:
        if self._stack is None:
            await self._open()
        while True:
            if self._closed:
                raise StopAsyncIteration
            if self._aborted:
                raise HostClosed(SUBJECT)
            found = self._next()
            if found is not None:
                return found
            if self._behind:
                await self._read()
            elif not await self._bell.wait(self._door.environment, None if self._joined else self._door.poll_interval):
                # The feed fails, so nobody else looks.
                self._behind = True

    async def for_each(self, sink: Sink) -> None:
        """Give everything to `sink`, one after the other, until the stream is closed.

        What the sink raises ends the loop and is raised here; `cursor` then still stands before that fact.
        """
        async with self:
            while True:
                before = self._last
                try:
                    event = await self.__anext__()
                except StopAsyncIteration:
                    return
                try:
                    waiting = sink(event)
                    if waiting is not None:
                        await waiting
                except BaseException:
                    self._last = before
                    raise

    def _next(self) -> SessionStreamEvent | None:
        """The next thing that is here already; None when it is time to read or to wait."""
        while not self._out:
            if self._facts:
                self._show(self._facts.popleft())
            elif not self._previews:
                return None
            elif isinstance(self._previews.first, PreviewStarted) and self._previews.first is not self._announced:
                # What was a fact when the preview began is shown before it: read first.
                self._announced = self._previews.first
                self._behind = True
                return None
            elif self._behind and isinstance(self._previews.first, PreviewStarted):
                return None
            else:
                self._preview(self._previews.pop())
        found = self._out.popleft()
        if isinstance(found, Committed | SnapshotReset):
            self._last = found
        return found

    def _show(self, fact: Fact) -> None:
        if self._deltas:
            if isinstance(fact, Committed):
                self._end_previews(fact.event)
            else:
                # The snapshot may hold the facts of any of them.
                self._previews.clear()
        self._out.append(fact)

    def _end_previews(self, event: PublicEvent) -> None:
        """What waits of a message or call comes before its fact, and nothing of it comes after."""
        data = event.data
        if event.type in ("message.completed", "message.abandoned"):
            message_id = str(data["messageId"])
            done = event.type == "message.completed"
            for preview in self._previews.take_message(message_id):
                self._preview(preview)
            self._void(("", message_id), _EVERY if done else int(data.get("attempt", 1)))
            self._previews.close_message(message_id, None if done else int(data.get("attempt", 1)))
        elif event.type == "tool.requested":
            call = event.turn_id or "", str(data["callId"])
            for preview in self._previews.take_call(*call):
                self._preview(preview)
            self._void(call, _EVERY)
            self._previews.close_call(*call)

    def _preview(self, preview: Preview) -> None:
        """Show it, unless its fact was shown before."""
        void = max(self._voids.get(("", preview.message_id), 0), self._voids.get(subject(preview), 0))
        if preview.attempt > void:
            self._out.append(preview)

    def _void(self, what: Subject, attempt: int) -> None:
        self._voids[what] = max(self._voids.pop(what, 0), attempt)
        while len(self._voids) > VOIDS_MAX:
            self._voids.popitem(last=False)

    def _wants(self, preview: Preview) -> bool:
        narrow = self._filter
        return (
            _KINDS.get(preview.kind) in self._deltas
            # No preview says of which Run it is: under such a filter there are facts alone.
            and narrow.run_id is None
            and narrow.thread_id in (None, preview.thread_id)
            and narrow.turn_id in (None, preview.turn_id)
        )

    def end_preview(self, preview: Preview) -> None:
        """Show no more of it: its reader cannot take it."""
        self._void(subject(preview), preview.attempt)
        self._out = deque(
            item
            for item in self._out
            if isinstance(item, Committed | SnapshotReset) or preview_key(item) != preview_key(preview)
        )

    # ---- facts ----

    def take(self, fact: Committed) -> None:
        """From the feed."""
        if fact.event.sequence <= self._replay.position:
            return
        if len(self._facts) >= BACKLOG_MAX:
            assert self._feed is not None
            self._feed.leave(self, self._filter)
            self.lost(fact.event.sequence - 1)
            return
        self._replay.position = fact.event.sequence
        if matches(self._filter, fact.event):
            self._facts.append(fact)
            self._bell.ring()

    def lost(self, position: int) -> None:
        self._replay.position = max(self._replay.position, position)
        self._joined = False
        self._behind = True
        self._bell.ring()

    async def _read(self) -> None:
        assert self._feed is not None
        self._behind = False
        if self._joined:
            await self._feed.look()
            return
        try:
            facts = await self._replay.read()
        except (HostClosed, StoreMoved):
            # Reading again tells nothing more.
            raise
        except Retry as error:
            # Reading again repeats nothing and misses nothing.
            if self._on_retry is not None:
                self._on_retry(error)
            else:
                log.warning("events cannot be read now: %s", error.what, extra={"session_id": self._session.session_id})
            await self._door.environment.sleep(self._door.poll_interval)
            self._behind = True
            return
        self._facts.extend(facts)
        if self._replay.behind:
            self._behind = True
        elif self._feed.join(self, self._filter, self._replay.position):
            self._joined = True
        elif not self._feed.failing:
            # It has told others more than this one has read.
            self._behind = True


_EVERY = 1 << 30
"""No attempt is above it."""


def delta_types(given: Iterable[EventDeltaType]) -> frozenset[EventDeltaType]:
    """The kinds of previews that are asked for; one alone is text, and must not be taken for its letters.

    Raises:
        InvalidRequest: there is no such kind.
    """
    try:
        return frozenset(EventDeltaType(delta) for delta in ((given,) if isinstance(given, str) else given))
    except (TypeError, ValueError):
        known = ", ".join(repr(one.value) for one in EventDeltaType)
        raise InvalidRequest(f"there are previews of {known}", path="deltas") from None
