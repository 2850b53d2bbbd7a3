"""Who owns a task, and how a loop is woken.

Rule 1: a task has an owner that holds it strongly and waits for it. The event loop keeps weak references only, so a
task that nobody owns may vanish in the middle.
Rule 2: a loop sleeps on a `Bell` with a bound. Ringing makes it sooner; not ringing makes it late, never wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any

from agentscope_durable.spi.contained import own_tasks
from agentscope_durable.spi.environment import Environment


class Tasks:
    """The tasks of one host."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def owns_caller(self) -> bool:
        """Whether the caller runs in one of these tasks."""
        return not self._tasks.isdisjoint(own_tasks())

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until all have ended, except the caller's own; False when the time was up first.

        The caller may be one of them: a tool that closes its own host must not wait for itself (LF-09).
        """
        others = self._tasks - own_tasks()
        if not others:
            return True
        _, running = await asyncio.wait(others, timeout=timeout)
        return not running

    def cancel(self) -> None:
        """Ask all to stop, except the caller's own."""
        for task in self._tasks - own_tasks():
            task.cancel()


class Bell:
    """Wakes one waiting loop. Rings that nobody waited for are one ring."""

    def __init__(self) -> None:
        self._rung = False
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        self._rung = True
        for waiting in self._waiting:
            _wake(waiting)

    async def wait(self, environment: Environment, seconds: float | None) -> bool:
        """Sleep until rung or `seconds` have passed; True if it was rung. None sleeps until it is rung."""
        if not self._rung and (seconds is None or seconds > 0):
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            timer = None if seconds is None else environment.after(seconds, partial(_wake, waiting))
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
                if timer is not None:
                    timer.cancel()
        rung, self._rung = self._rung, False
        return rung


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks of one's own and wait until they have ended. What they raise was theirs and is over.

    A cancellation of the caller meanwhile is the caller's: it is raised when the tasks have ended, never lost.
    """
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while waiting := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            _ = task.exception()
    if cancelled is not None:
        raise cancelled
