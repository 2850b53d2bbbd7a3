"""Hints within one process: something changed, look again.

Rule: a hint carries no fact. It may be lost, doubled or late, and everything is still right, because every listener
also polls. So publishing never blocks, never raises, and merges what a slow listener has not looked at yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from agentscope_durable.runtime.tasks import stop
from agentscope_durable.spi.backend import Wakeups

log = logging.getLogger("agentscope_durable.runtime")

PENDING_KEYS_MAX = 1024
"""Keys kept for one listener; beyond that it is told that anything may have changed."""

ANYTHING = "*"


class _Listener:
    """What one listener has not looked at yet. `keys` is None when it listens to all."""

    def __init__(self, keys: frozenset[str] | None) -> None:
        self._keys = keys
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._wake = asyncio.Event()

    def tell(self, keys: tuple[str, ...]) -> None:
        """Called from any thread. One call into the loop per batch, however many hints there are."""
        wanted = keys if self._keys is None else [key for key in keys if key == ANYTHING or key in self._keys]
        if not wanted:
            return
        with self._lock:
            waiting = bool(self._pending)
            self._pending.update(wanted)
            if len(self._pending) > PENDING_KEYS_MAX:
                self._pending = {ANYTHING}
        if not waiting:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                # The listener's loop is closed: there is nobody to tell any more.
                return

    async def heard(self) -> AsyncIterator[frozenset[str]]:
        while True:
            await self._wake.wait()
            self._wake.clear()
            with self._lock:
                pending, self._pending = frozenset(self._pending), set()
            if pending:
                yield pending


class LocalWakeups:
    """`Wakeups` for the listeners of this process, on any number of event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[_Listener, ...] = ()

    def publish(self, keys: tuple[str, ...]) -> None:
        for listener in self._listeners:
            listener.tell(keys)

    @asynccontextmanager
    async def listen(self, keys: frozenset[str] | None = None) -> AsyncGenerator[AsyncIterator[frozenset[str]]]:
        listener = _Listener(keys)
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield listener.heard()
        finally:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)


class Ringable(Protocol):
    def ring(self) -> None: ...


@asynccontextmanager
async def ringing(wakeups: Wakeups, keys: frozenset[str] | None, bell: Ringable) -> AsyncGenerator[None]:
    """While entered, the bell rings when one of the keys is hinted. A transport that fails leaves it silent."""
    task = asyncio.create_task(_pump(wakeups, keys, bell), name="hints")
    try:
        yield
    finally:
        await stop(task)


async def _pump(wakeups: Wakeups, keys: frozenset[str] | None, bell: Ringable) -> None:
    try:
        async with wakeups.listen(keys) as heard:
            # What was hinted before one listened is found by looking once.
            bell.ring()
            async for _ in heard:
                bell.ring()
    except Exception as error:  # noqa: BLE001 - hints only make it sooner; polling goes on
        log.warning("no more hints: %s", type(error).__name__)
