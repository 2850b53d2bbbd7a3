"""Hints within one process: something changed, look again.

Rule: a hint carries no fact. It may be lost, doubled or late, and everything is still right, because every listener
also polls. So publishing never blocks, never raises, and merges what a slow listener has not looked at yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from typing import Protocol, runtime_checkable

from agentscope_durable.runtime.tasks import stop
from agentscope_durable.spi.backend import Wakeups

log = logging.getLogger("agentscope_durable.runtime")

PENDING_KEYS_MAX = 1024
"""Keys kept for one listener; beyond that it is told that anything may have changed."""

ANYTHING = "*"


class Ringable(Protocol):
    def ring(self) -> None: ...


@runtime_checkable
class Ringing(Protocol):
    """What a transport can do besides: ring a bell on the event loop, without a task that listens."""

    def ring(self, keys: frozenset[str], bell: Ringable) -> AbstractContextManager[None]:
        """While entered, the bell is rung when one of the keys is hinted."""
        ...


class _Told(Protocol):
    def tell(self, *keys: str) -> None: ...


class _Ringer:
    """Rings a bell on the event loop it was made on."""

    def __init__(self, bell: Ringable) -> None:
        self._loop = asyncio.get_running_loop()
        self._bell = bell
        self._called = False

    def tell(self, *keys: str) -> None:
        """Called from any thread. One call into the loop, however many hints there are until it comes."""
        del keys
        if _running_loop() is self._loop:
            self._bell.ring()
        elif not self._called:
            self._called = True
            try:
                self._loop.call_soon_threadsafe(self._ring)
            except RuntimeError:
                # The loop is closed: there is nobody to tell any more.
                return

    def _ring(self) -> None:
        self._called = False
        self._bell.ring()


class _Listener:
    """What one listener has not looked at yet."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._wake = asyncio.Event()

    def tell(self, *keys: str) -> None:
        """Called from any thread. One call into the loop per batch, however many hints there are."""
        with self._lock:
            waiting = bool(self._pending)
            self._pending.update(keys)
            if len(self._pending) > PENDING_KEYS_MAX:
                self._pending = {ANYTHING}
        if not waiting:
            if _running_loop() is self._loop:
                # Through the loop's door for other threads it costs a message to itself.
                self._wake.set()
                return
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
    """`Wakeups` for the listeners of this process, on any number of event loops.

    A hint costs what it concerns: those who listen for other keys are not looked at.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[_Told, None] = {}
        self._for_all: tuple[_Told, ...] = ()
        self._by_key: dict[str, tuple[_Told, ...]] = {}

    def publish(self, keys: tuple[str, ...]) -> None:
        if ANYTHING in keys:
            with self._lock:
                everyone = list(self._listeners)
            for listener in everyone:
                listener.tell(ANYTHING)
            return
        for listener in self._for_all:
            listener.tell(*keys)
        for key in keys:
            for listener in self._by_key.get(key, ()):
                listener.tell(key)

    @asynccontextmanager
    async def listen(self, keys: frozenset[str] | None = None) -> AsyncGenerator[AsyncIterator[frozenset[str]]]:
        listener = _Listener()
        with self._told(listener, keys):
            yield listener.heard()

    @contextmanager
    def ring(self, keys: frozenset[str], bell: Ringable) -> Generator[None]:
        with self._told(_Ringer(bell), keys):
            yield

    @contextmanager
    def _told(self, listener: _Told, keys: frozenset[str] | None) -> Generator[None]:
        with self._lock:
            self._listeners[listener] = None
            if keys is None:
                self._for_all = (*self._for_all, listener)
            for key in keys or ():
                self._by_key[key] = (*self._by_key.get(key, ()), listener)
        try:
            yield
        finally:
            with self._lock:
                del self._listeners[listener]
                if keys is None:
                    self._for_all = _without(self._for_all, listener)
                for key in keys or ():
                    rest = _without(self._by_key[key], listener)
                    if rest:
                        self._by_key[key] = rest
                    else:
                        del self._by_key[key]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _without(listeners: tuple[_Told, ...], one: _Told) -> tuple[_Told, ...]:
    return tuple(listener for listener in listeners if listener is not one)


@asynccontextmanager
async def ringing(wakeups: Wakeups, keys: frozenset[str] | None, bell: Ringable) -> AsyncGenerator[None]:
    """While entered, the bell rings when one of the keys is hinted. A transport that fails leaves it silent.

    What was hinted before is the caller's to look for, once it is entered.
    """
    if keys is not None and isinstance(wakeups, Ringing):
        with ExitStack() as stack:
            try:
                stack.enter_context(wakeups.ring(keys, bell))
            except Exception as error:  # noqa: BLE001 - hints only make it sooner; polling goes on
                log.warning("no hints: %s", type(error).__name__)
            yield
        return
    task = asyncio.create_task(_pump(wakeups, keys, bell), name="hints")
    try:
        yield
    finally:
        await stop(task)


async def _pump(wakeups: Wakeups, keys: frozenset[str] | None, bell: Ringable) -> None:
    try:
        async with wakeups.listen(keys) as heard:
            # What was hinted until one listened is found by looking once.
            bell.ring()
            async for _ in heard:
                bell.ring()
    except Exception as error:  # noqa: BLE001 - hints only make it sooner; polling goes on
        log.warning("no more hints: %s", type(error).__name__)
