"""The only source of time, chance and threads outside the stores (D26).

A simulator replaces this object and gets the whole runtime under one seeded clock. Code that
needs a pause, a random id or a thread takes an `Environment` as an argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from agentscope_durable.contracts.errors import Misuse

T = TypeVar("T")


class Thread(Protocol):
    """A started thread that can be waited for."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Timer(Protocol):
    """A call that has not come yet."""

    def cancel(self) -> None:
        """It does not come any more. Safe when it has."""
        ...


class Environment(Protocol):
    """Promises: `monotonic` never goes back; `random_bytes` never repeats itself."""

    def monotonic(self) -> float:
        """Seconds of a clock that only rises. Compare within one process only."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        """Call it on the running event loop in so many seconds: a wait that needs no task."""
        ...

    def random_bytes(self, count: int) -> bytes: ...

    def start_thread(self, target: Callable[[], None], *, name: str) -> Thread:
        """Start a daemon thread named `name`."""
        ...

    async def call_in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call off the event loop."""
        ...


DRAWN_AT_ONCE = 1024
"""Random bytes that the system is asked for at once."""


class _Chance:
    """The system's random bytes. Every call for them gives up the interpreter, and a busy event loop then waits for it.

    A child of a fork draws its own: it would else give out the same ones as its parent.
    """

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._drawn, self._at = b"", 0

    def take(self, count: int) -> bytes:
        with self._lock:
            if self._at + count > len(self._drawn):
                self._drawn, self._at = os.urandom(max(count, DRAWN_AT_ONCE)), 0
            self._at += count
            return self._drawn[self._at - count : self._at]


_chance = _Chance()


class SystemEnvironment:
    """The real world."""

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def after(self, seconds: float, call: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(seconds, call)

    def random_bytes(self, count: int) -> bytes:
        return _chance.take(count)

    def start_thread(self, target: Callable[[], None], *, name: str) -> Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    async def call_in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.to_thread(call)


async def call_in_own_thread(
    environment: Environment, call: Callable[[], T], *, name: str, to_its_end: bool = False
) -> T:
    """Run an application's blocking call in a thread of its own.

    It may block for hours: in a pool that others wait for, a handful of such calls would stop everything else. What it
    raises is raised here, of any kind. A cancelled caller leaves the thread running, and a program may end over it.

    Args:
        to_its_end: a cancellation of the caller is passed over, so that the outcome is known.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def tell(value: T | None, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((value, error))

    def work() -> None:
        try:
            answer = context.run(call), None
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            answer = None, error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            loop.call_soon_threadsafe(tell, *answer)

    environment.start_thread(work, name=name)
    while not ended.done():
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            if not to_its_end:
                raise
    value, error = ended.result()
    if error is not None:
        raise RuntimeError("the call raised StopIteration") if isinstance(error, StopIteration) else error
    return cast("T", value)


SYSTEM = SystemEnvironment()

RECOVER_EVERY_STEP = "DURABLE_RECOVER_EVERY_STEP"


def recovers_every_step() -> bool:
    """Whether the surroundings ask each host to drop its Runs after each Step and to take them over.

    Raises:
        Misuse: the variable is set to something else than 1 or 0.
    """
    value = os.environ.get(RECOVER_EVERY_STEP, "")
    if value not in ("", "0", "1"):
        raise Misuse(f"{RECOVER_EVERY_STEP} is 1 or 0, not {value!r}")
    return value == "1"
