"""The only source of time, chance and threads outside the stores (D26).

A simulator replaces this object and gets the whole runtime under one seeded clock. Code that
needs a pause, a random id or a thread takes an `Environment` as an argument.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Thread(Protocol):
    """A started thread that can be waited for."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Environment(Protocol):
    """Promises: `monotonic` never goes back; `random_bytes` never repeats itself."""

    def monotonic(self) -> float:
        """Seconds of a clock that only rises. Compare within one process only."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def random_bytes(self, count: int) -> bytes: ...

    def start_thread(self, target: Callable[[], None], *, name: str) -> Thread:
        """Start a daemon thread named `name`."""
        ...

    async def call_in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call off the event loop."""
        ...


class SystemEnvironment:
    """The real world."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def start_thread(self, target: Callable[[], None], *, name: str) -> Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    async def call_in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.to_thread(call)


SYSTEM = SystemEnvironment()
