"""An observer that the runtime calls: one item after the other, until it is closed.

Rule 1: an item counts as delivered when the callback has returned. Until then it is delivered again, after a pause, and
nothing is passed over; only then does the cursor move (ST-11). So delivery is at least once (ST-19).
Rule 2: facts are never held up by a preview. A preview that the callback cannot take ends there, until its fact.
Rule 3: closing takes effect at once, from anywhere, the callback itself included. A callback under way may finish.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Self

from agentscope_durable.contracts.errors import HostClosed, SessionDropped, WrongLoop
from agentscope_durable.contracts.events import Committed, SessionStreamEvent, SnapshotReset
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.keys import spell
from agentscope_durable.runtime.classify import ends_the_program
from agentscope_durable.runtime.door import Door
from agentscope_durable.runtime.observers import Listener
from agentscope_durable.runtime.replay import cursor_after
from agentscope_durable.runtime.streams import OnRetry, SessionEventStream

__all__ = ["EventSubscription"]

Open = Callable[[str | None, OnRetry], SessionEventStream]
"""Makes the stream that goes on after a cursor."""

_calls: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar("_calls", default=())
"""The calls of listeners that this code was begun in, also where it runs in a task or a thread of its own."""


class EventSubscription:
    """What `subscribe_events` gives. It works from then on, whether the runtime is started or not (ST-18).

    It may be used with `async with`, which closes it at the end. Its methods may be called from any thread.
    """

    def __init__(self, door: Door, session: SessionKey, listener: Listener, open: Open, *, after: str | None) -> None:
        """Internal: begins at once. Use `subscribe_events`."""
        self._door = door
        self._session = session
        self._call_listener = door.observers.caller(listener)
        self._open = open
        self._cursor = after
        self._failure: BaseException | None = None
        self._closed = False
        # The call of the listener that is under way.
        self._call_now: object | None = None
        self._loop = asyncio.get_running_loop()
        self._task = door.subscribed(self, self._run())

    def cursor(self) -> str | None:
        """After the last fact whose callback returned; None before the first. Previews do not move it (ST-22)."""
        return self._cursor

    def last_failure(self) -> BaseException | None:
        """What the callback or the backend raised last; it stays when a later try succeeded. None if nothing did."""
        return self._failure

    def is_closed(self) -> bool:
        """No callback begins any more."""
        return self._closed

    def close(self) -> Awaitable[None]:
        """Deliver nothing more. It changes nothing else, and may be repeated (ST-16, ST-29).

        Returns:
            something that may be awaited, on the runtime's loop, until a callback under way has finished. From within
            that callback, and from tasks it has begun, it is over at once.
        """
        if not self._closed:
            self._closed = True
            with contextlib.suppress(RuntimeError):  # The loop is closed, and the subscription with it.
                self._loop.call_soon_threadsafe(self._interrupt)
        return _Closing(self._ended)

    def _interrupt(self) -> None:
        if self._call_now is None:
            self._task.cancel()

    async def _ended(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop("subscription")
        if self._call_now is not None and any(call is self._call_now for call in _calls.get()):
            # The callback may wait for this very task, as with `asyncio.wait_for`: waiting for it here ends never.
            return
        if not self._task.done():
            await asyncio.wait({self._task})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- the work ----

    async def _run(self) -> None:
        try:
            while not self._closed:
                try:
                    async with self._open(self._cursor, self._failed) as stream:
                        await self._follow(stream)
                except HostClosed as error:
                    self._failure = self._failure if self._door.closed else error
                    return
                except SessionDropped as error:
                    # Nothing will come of it any more, however often it is asked.
                    self._failed(error, "a subscription has ended")
                    return
                except Exception as error:  # noqa: BLE001 - tried again from where it stands (ST-11)
                    self._failed(error)
                    await self._pause()
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._closed = True

    async def _follow(self, stream: SessionEventStream) -> None:
        async for item in stream:
            delivered = await self._deliver(item)
            if self._closed:
                return
            if not delivered and not isinstance(item, Committed | SnapshotReset):
                stream.end_preview(item)

    async def _deliver(self, item: SessionStreamEvent) -> bool:
        """Call until it returns; a preview once. False if it did not."""
        fact = isinstance(item, Committed | SnapshotReset)
        while not self._closed:
            if await self._call(item):
                if isinstance(item, Committed | SnapshotReset):
                    self._cursor = cursor_after(item)
                return True
            if not fact:
                break
            await self._pause()
        return False

    async def _call(self, item: SessionStreamEvent) -> bool:
        async with self._door.observers.places:
            self._call_now = call = object()
            inside = _calls.set((*_calls.get(), call))
            try:
                if self._closed:
                    return False
                await self._call_listener(item)
            except BaseException as error:
                # A cancellation of something it waited for, or an exit, ends neither this subscription nor the loop.
                if isinstance(error, asyncio.CancelledError) and self._task.cancelling():
                    raise
                if ends_the_program(error, self._task):
                    raise
                self._failed(error)
                if isinstance(error, SessionDropped) and error.session == spell(self._session):
                    # What it is called about is gone: no later call would end otherwise.
                    self._closed = True
                return False
            finally:
                self._call_now = None
                _calls.reset(inside)
            return True

    async def _pause(self) -> None:
        if not self._closed:
            await self._door.environment.sleep(self._door.poll_interval)

    def _failed(self, error: BaseException, what: str = "a subscription is tried again") -> None:
        self._failure = error
        self._door.report(error, what, session_id=self._session.session_id)


class _Closing:
    """`close()` takes effect without it; awaiting it waits for the end."""

    def __init__(self, ended: Callable[[], Awaitable[None]]) -> None:
        self._ended = ended

    def __await__(self) -> Generator[object, None, None]:
        return self._ended().__await__()
