"""The clock of a PostgreSQL store: the server's, as far as its answers tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agentscope_durable.spi.record_store import OwnerLease
from agentscope_durable.stores.records._clock import RisingClock

__all__ = ["ServerClock", "absent", "judged"]


class _LastAnswer:
    """The server's wall clock, carried on since its last answer by this process's monotonic clock.

    The answer was on its way for a moment, so this is never ahead of the server.
    """

    boot_id = "server"

    def __init__(self, monotonic_ms: Callable[[], int]) -> None:
        self.boot_ms = monotonic_ms
        self._offset_ms = 0
        self._heard = False

    def hear(self, server_ms: int) -> None:
        self._offset_ms = server_ms - self.boot_ms()
        self._heard = True

    def wall_ms(self) -> int:
        return self._offset_ms + self.boot_ms() if self._heard else 0


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class ServerClock:
    """`now_ms` of the store: follows the server's wall clock and never runs back. Any thread may ask.

    Args:
        monotonic_ms: what time passes by between two answers; for tests.
    """

    def __init__(self, monotonic_ms: Callable[[], int] = _monotonic_ms) -> None:
        self._server = _LastAnswer(monotonic_ms)
        self._rising = RisingClock(self._server)
        self._lock = threading.Lock()

    def hear(self, server_ms: int) -> None:
        """What the server's clock showed while it worked on the answer that has just come."""
        with self._lock:
            self._server.hear(server_ms)

    def witness(self, stored_ms: int) -> None:
        self._rising.witness(stored_ms)

    def now(self) -> int:
        return self._rising.now()


def judged(owner: str, renewed_ms: int, lease_ms: int, value: bytes, server_ms: int) -> OwnerLease:
    """A lease by the server's clock, as it was when the lease was read.

    A renewal that is further in the future than the lease is long was dated by a clock that has been set back: it
    counts as expired, so that a step of the clock neither keeps a dead host alive nor kills a living one for longer
    than it takes to renew.
    """
    age_ms = server_ms - renewed_ms
    remaining_ms = lease_ms - max(age_ms, 0)
    if age_ms < -max(lease_ms, 0):
        remaining_ms = min(remaining_ms, -1)
    return OwnerLease(owner, remaining_ms > 0, remaining_ms, max(age_ms, 0), value)


def absent(owner: str) -> OwnerLease:
    """Of an owner that has no lease."""
    return OwnerLease(owner, alive=False, remaining_ms=-1, age_ms=0)
