"""Where an application's observers are called: apart from its agents, and never more than a few at once.

Rule 1: a callback that blocks holds a thread of its own, and its place among the observers. It never holds the event
loop, where the agents are (ST-15).
Rule 2: places are given in the order in which they were asked for, so that one busy observer does not starve another.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
from collections.abc import Awaitable, Callable
from typing import Any

from agentscope_durable.contracts.events import SessionStreamEvent
from agentscope_durable.spi.environment import Environment

__all__ = ["OBSERVER_PARALLELISM", "Listener", "Observers"]

OBSERVER_PARALLELISM = 2
"""Callbacks of observers that run at once, if the application names no number (ST-14)."""

Listener = Callable[[SessionStreamEvent], Awaitable[None] | None]
"""An observer: a coroutine function, called on the event loop; or a function, called in a thread, which may block."""

Call = Callable[[SessionStreamEvent], Awaitable[None]]


class Observers:
    """The observers of one runtime.

    Args:
        parallelism: callbacks that run at once.
    """

    def __init__(self, environment: Environment, parallelism: int) -> None:
        self.places = asyncio.Semaphore(parallelism)
        """`async with` it around each call."""
        self._threads = _Threads(environment, parallelism)

    def caller(self, listener: Listener) -> Call:
        """How to call this one: it comes back when the listener is done, and raises what that raises."""
        is_async = inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(listener.__call__)

        async def call(item: SessionStreamEvent) -> None:
            waiting = listener(item) if is_async else await self._threads.run(lambda: listener(item))
            if waiting is not None and inspect.isawaitable(waiting):
                await waiting

        return call

    def close(self) -> None:
        """Threads without work end; one that is in a callback ends after it."""
        self._threads.close()


class _Threads:
    """Threads for calls that may block: at most `most`, started when there is work for them.

    Its methods are called on the event loop.
    """

    def __init__(self, environment: Environment, most: int) -> None:
        self._environment = environment
        self._most = most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0

    async def run(self, call: Callable[[], Any]) -> Any:
        """What the call returns or raises, of any kind. A caller that is cancelled leaves it running."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        context = contextvars.copy_context()

        def tell(value: Any, error: BaseException | None) -> None:
            self._busy -= 1
            if not ended.done():
                ended.set_result((value, error))

        def work() -> None:
            try:
                answer = context.run(call), None
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                answer = None, error
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
                loop.call_soon_threadsafe(tell, *answer)

        self._busy += 1
        if self._started < min(self._busy, self._most):
            self._environment.start_thread(self._work, name=f"observer-{self._started}")
            self._started += 1
        self._calls.put(work)
        value, error = await ended
        if error is not None:
            raise error
        return value

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def close(self) -> None:
        for _ in range(self._started):
            self._calls.put(None)
