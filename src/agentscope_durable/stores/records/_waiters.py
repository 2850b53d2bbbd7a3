"""Callers on event loops who wait for what a thread does.

One hop per event loop and batch: a hop costs more than a small statement does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

log = logging.getLogger("agentscope_durable.stores")


class Waiter:
    """A caller who waits on some event loop for what a thread of the store does."""

    __slots__ = ("answer", "error", "future", "loop")

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[object] = self.loop.create_future()
        self.answer: object = None
        self.error: BaseException | None = None


def tell(waiters: Sequence[Waiter]) -> None:
    """Give the answers out: one hop per event loop, however many wait there."""
    first = waiters[0].loop
    if all(waiter.loop is first for waiter in waiters):
        _hop(first, waiters)
        return
    loops: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        loops.setdefault(waiter.loop, []).append(waiter)
    for loop, group in loops.items():
        _hop(loop, group)


def _hop(loop: asyncio.AbstractEventLoop, waiters: Sequence[Waiter]) -> None:
    try:
        loop.call_soon_threadsafe(_resolve, waiters)
    except RuntimeError:
        log.debug("an event loop was closed before its answer came; what was committed stays")


def _resolve(waiters: Sequence[Waiter]) -> None:
    for waiter in waiters:
        future = waiter.future
        if future.done():  # The caller was cancelled; what was written stays.
            continue
        error = waiter.error
        if error is None:
            future.set_result(waiter.answer)
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError("the decision raised StopIteration"))
        else:
            future.set_exception(error)
