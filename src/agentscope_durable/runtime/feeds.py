"""One look at a Session for everybody of this runtime who watches it.

Rule 1: a commit is read and decoded once, however many streams, subscriptions and waits there are, and told to those
alone whose Thread or Turn it concerns. Who only waits for the ends of Turns is woken by nothing else, and has nothing
else decoded. Who waits alone in a Session is only woken: to look at his Turn costs him what reading for him would.
Rule 2: one question in `poll_interval` tells which of all watched Sessions have moved; hints make it sooner (ST-10). An
idle watcher costs memory and nothing else.
Rule 3: a feed is a shortcut and never the only way. Whom it cannot serve, because they are behind or because reading
fails, it tells so, and they read for themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import PAGE_MAX
from agentscope_durable.contracts.errors import CursorExpired, DurableError
from agentscope_durable.contracts.events import Committed, EventFilter, EventPage, PublicEvent, cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import ListEvents, Watermarks
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.domain.change import ends_hint, session_hint
from agentscope_durable.runtime.hints import ringing
from agentscope_durable.runtime.replay import PAGE
from agentscope_durable.runtime.tasks import Bell, Tasks, stop
from agentscope_durable.spi.backend import Wakeups
from agentscope_durable.spi.environment import Environment, Timer

log = logging.getLogger("agentscope_durable.runtime")

TOLD_AT_ONCE = 1000
"""Facts handed to watchers before others get the event loop."""

_ENDS = ("turn.status",)
"""All that a wait for the end of a Turn must read."""

Scope = tuple[str | None, str | None]
"""Thread and Turn that a watcher is narrowed to."""


class Watcher(Protocol):
    """Called on the event loop; must not block and must not raise."""

    def take(self, fact: Committed) -> None:
        """The next fact of its Thread or Turn. It may leave the feed instead of taking it."""
        ...

    def lost(self, position: int) -> None:
        """The feed tells no more. Everything up to `position` was told; the watcher reads on for itself."""
        ...


class Feed:
    """The end of one Session's timeline, as it grows."""

    def __init__(
        self,
        ask: Callable[[Any], Awaitable[Any]],
        wakeups: Wakeups,
        environment: Environment,
        tasks: Tasks,
        session: SessionKey,
    ) -> None:
        self._ask = ask
        self._wakeups = wakeups
        self._environment = environment
        self._tasks = tasks
        self.session = session
        self.users = 0
        self._task: asyncio.Task[None] | None = None
        self._hints = AsyncExitStack()
        self._bell = Bell()
        # None until somebody who watches has told it, or the timeline was looked at.
        self._position: int | None = None
        self._polled: int | None = None
        self._failing = False
        self._ended = False
        self._watchers: dict[Scope, dict[Watcher, None]] = {}
        self._waits: dict[str, dict[Bell, None]] = {}
        self._untold: dict[Bell, None] = {}
        """Those of them that look for themselves, until the position is known from which on they are told."""
        self._looks: list[asyncio.Future[None]] = []

    async def open(self) -> None:
        """From here on hints ring it."""
        ends = frozenset({ends_hint(keys.partition(self.session))})
        await self._hints.enter_async_context(ringing(self._wakeups, ends, self))

    async def close(self) -> None:
        await self._hints.aclose()
        if self._task is not None:
            await stop(self._task)

    # ---- for those who watch ----

    @property
    def failing(self) -> bool:
        """It could not read: nobody is told anything, and whoever waits must look for himself."""
        return self._failing or self._ended

    def join(self, watcher: Watcher, narrow: EventFilter, position: int) -> bool:
        """Tell `watcher` every fact after `position`; it may be told earlier ones, too.

        False if that cannot be: the feed has passed it, or is failing. Then it reads on for itself and asks again.
        """
        if self.failing or position < (self._position or 0):
            return False
        if self._position is None:
            self._position = position
        if not self._watchers:
            # From now on every commit counts, and not the ends of Turns alone.
            self._work()
        self._watchers.setdefault(_scope(narrow), {})[watcher] = None
        return True

    def leave(self, watcher: Watcher, narrow: EventFilter) -> None:
        """Tell it nothing more. Twice is fine."""
        scope = _scope(narrow)
        watchers = self._watchers.get(scope, {})
        watchers.pop(watcher, None)
        if not watchers:
            self._watchers.pop(scope, None)

    @contextmanager
    def ending(self, turn_id: str, bell: Bell) -> Generator[None]:
        """While entered, the bell rings when the Turn has ended, and when the feed cannot know. After `look`."""
        self._waits.setdefault(turn_id, {})[bell] = None
        if self._alone:
            self._untold[bell] = None
        try:
            yield
        finally:
            self._untold.pop(bell, None)
            waits = self._waits[turn_id]
            del waits[bell]
            if not waits:
                del self._waits[turn_id]

    async def look(self) -> None:
        """Come back when everything that is committed now has been told, or the feed is failing.

        At once where one waits alone: he looks for himself.
        """
        if self._ended or self._alone:
            return
        looked = asyncio.get_running_loop().create_future()
        self._looks.append(looked)
        self._work()
        await looked

    # ---- the work ----

    def ring(self) -> None:
        """Something may have moved."""
        if self._alone:
            self._wake_alone()
        else:
            self._work()

    def moved(self, watermark: int) -> bool:
        """Whether there is something to read, if this is the number of the newest event."""
        seen = self._polled if self._alone else self._position
        self._polled = watermark
        return self._failing or (self._watched and seen != watermark)

    @property
    def _watched(self) -> bool:
        return bool(self._watchers or self._waits)

    @property
    def _alone(self) -> bool:
        """Nobody watches, and the end of one Turn at most is waited for."""
        return not self._watchers and not self._failing and len(self._waits) <= 1

    def _wake_alone(self) -> None:
        """What happens from here on is not followed, until there are others."""
        self._position = None
        for waits in self._waits.values():
            self._untold.update(waits)
        self._ring()

    def _ring(self) -> None:
        for waits in self._waits.values():
            for bell in waits:
                bell.ring()

    def _work(self) -> None:
        self._bell.ring()
        if self._task is None and not self._ended:
            self._task = self._tasks.start(self._run(), name="feed")

    async def _run(self) -> None:
        """Read whenever it is rung, until cancelled."""
        try:
            every = frozenset({session_hint(keys.partition(self.session))})
            hears_every = False
            async with AsyncExitStack() as more:
                while True:
                    await self._bell.wait(self._environment, None)
                    if hears_every is not bool(self._watchers):
                        hears_every = not hears_every
                        if hears_every:
                            await more.enter_async_context(ringing(self._wakeups, every, self._bell))
                        else:
                            await more.aclose()
                    await self._turn()
        finally:
            self.end()

    def end(self) -> None:
        """Nobody is told anything any more."""
        self._ended = True
        self._let_go()
        self._looked(self._looks)

    async def _turn(self) -> None:
        looks, self._looks = self._looks, []
        try:
            await self._read()
            self._failing = False
        except CursorExpired:
            # Pruned before it was read. Each one finds out for himself what that means for him.
            self._let_go()
            self._position = None
            self._bell.ring()
        except Exception as error:  # noqa: BLE001 - who watches reads for himself, and tells his caller what he meets
            if not self._failing:
                reason = error.what if isinstance(error, DurableError) else type(error).__name__
                log.warning("events cannot be read: %s", reason, extra={"session_id": self.session.session_id})
            self._failing = True
            self._let_go()
        finally:
            self._looked(looks)

    async def _read(self) -> None:
        if not self._watched:
            # They are still reading on for themselves, or were let go: only see whether it works again.
            self._position = None
            if self._failing:
                await self._ask(ListEvents(session=self.session, limit=1))
            return
        if self._alone:
            self._wake_alone()
            return
        if self._position is None:
            page: EventPage = await self._ask(ListEvents(session=self.session, limit=1))
            if self._position is None:
                self._position = sequence_of(self.session, page.high_watermark)
                untold, self._untold = self._untold, {}
                for bell in untold:
                    bell.ring()
                return
        told = 0
        while self._watched:
            whole = bool(self._watchers)
            page = await self._ask(
                ListEvents(
                    session=self.session,
                    cursor=cursor_of(self.session, self._position),
                    limit=PAGE,
                    types=() if whole else _ENDS,
                )
            )
            if not whole and self._watchers:
                # Somebody came meanwhile who wants all of it.
                continue
            for event in page.events:
                told += self._tell(event)
                if told > TOLD_AT_ONCE:
                    told = 0
                    await asyncio.sleep(0)
            self._position = sequence_of(self.session, page.cursor)
            if page.cursor == page.high_watermark:
                return

    def _tell(self, event: PublicEvent) -> int:
        """How many were told."""
        told = 0
        fact = Committed(event)
        places = ((None, None), (event.thread_id, None), (event.thread_id, event.turn_id))
        for scope in dict.fromkeys(places):
            for watcher in tuple(self._watchers.get(scope, ())):
                watcher.take(fact)
                told += 1
        # From here on whoever stands before this event has missed it, and is not let in.
        self._position = event.sequence
        if event.type in _ENDS and event.turn_id in self._waits and TurnStatus(event.data["turn"]["status"]).terminal:
            for bell in self._waits[event.turn_id]:
                bell.ring()
        return told

    def _let_go(self) -> None:
        watchers, self._watchers = self._watchers, {}
        for group in watchers.values():
            for watcher in group:
                watcher.lost(self._position or 0)
        self._ring()

    @staticmethod
    def _looked(looks: list[asyncio.Future[None]]) -> None:
        for looked in looks:
            if not looked.done():
                looked.set_result(None)


def _scope(narrow: EventFilter) -> Scope:
    return narrow.thread_id, narrow.turn_id


class Feeds:
    """The feeds of one runtime: one for each Session that somebody watches."""

    def __init__(
        self, ask: Callable[[Any], Awaitable[Any]], wakeups: Wakeups, environment: Environment, poll_interval: float
    ) -> None:
        self._ask = ask
        self._wakeups = wakeups
        self._environment = environment
        self._poll_interval = poll_interval
        self._feeds: dict[SessionKey, Feed] = {}
        self._tasks = Tasks()
        self._timer: Timer | None = None
        self._poller: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def of(self, session: SessionKey) -> AsyncGenerator[Feed]:
        """The Session's feed, which works while somebody is in here."""
        feed = self._feeds.get(session)
        if feed is None:
            feed = self._feeds[session] = Feed(self._ask, self._wakeups, self._environment, self._tasks, session)
            await feed.open()
        if self._timer is None and self._poller is None:
            self._rest()
        feed.users += 1
        try:
            yield feed
        finally:
            feed.users -= 1
            if not feed.users:
                await self._drop(feed)

    async def _drop(self, feed: Feed) -> None:
        if self._feeds.get(feed.session) is feed:
            del self._feeds[feed.session]
        await feed.close()
        if self._feeds:
            return
        if self._timer is not None:
            self._timer.cancel()
        poller, self._timer, self._poller = self._poller, None, None
        if poller is not None:
            await stop(poller)

    def _rest(self) -> None:
        self._timer = self._environment.after(self._poll_interval, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._poller = self._tasks.start(self._poll(), name="poll")

    async def _poll(self) -> None:
        """Hints may be lost, and other machines send none: ask which Sessions have moved."""
        feeds = list(self._feeds.values())
        for start in range(0, len(feeds), PAGE_MAX):
            part = feeds[start : start + PAGE_MAX]
            for feed, watermark in zip(part, await self._watermarks(part), strict=True):
                if feed.moved(watermark):
                    feed.ring()
        self._poller = None
        self._rest()

    async def _watermarks(self, feeds: list[Feed]) -> tuple[int, ...]:
        try:
            found: tuple[int, ...] = await self._ask(Watermarks(sessions=tuple(feed.session for feed in feeds)))
            if len(found) == len(feeds):
                return found
        except Exception as error:  # noqa: BLE001 - each feed looks for itself then, and meets what there is
            log.debug("watermarks cannot be read: %s", type(error).__name__)
        return (-1,) * len(feeds)

    def close(self) -> None:
        """End all of them: those who watch are told, and find the runtime closed."""
        for feed in self._feeds.values():
            feed.end()
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()

    async def wait(self, timeout: float) -> bool:
        return await self._tasks.wait(timeout)
