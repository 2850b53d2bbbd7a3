"""The store's clock: what time it is, and whether a host's lease still runs.

Rule 1: `now_ms` follows the wall clock and never runs back. When the wall clock is set back, the
store's clock goes on at half speed until the two meet again: it neither stands still (a retry due
in a second would wait for an hour) nor stays wrong for ever.
Rule 2: leases are judged by the machine's boot-time clock, which nobody can set, so that a jump of
the wall clock neither steals a lease nor freezes one. A lease of another boot has expired.
"""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.spi.record_store import OwnerLease


class StoreClock(Protocol):
    """Where a store of one machine takes its time from. Tests put their own in its place."""

    @property
    def boot_id(self) -> str:
        """The same for every process since the machine started, and never again."""
        ...

    def wall_ms(self) -> int: ...

    def boot_ms(self) -> int:
        """Milliseconds since the machine started, sleep included; the same clock in every process."""
        ...


class SystemClock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self.boot_id = _boot_id()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return _boot_ns() // 1_000_000


class CallableClock:
    """A clock made of one function; its boot-time clock is the function's own, where it has one."""

    boot_id = "callable"

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self.wall_ms = wall_ms
        self.boot_ms: Callable[[], int] = getattr(wall_ms, "boot_ms", wall_ms)


class RisingClock:
    """`now_ms` as Rule 1 has it. Any thread may ask."""

    def __init__(self, clock: StoreClock) -> None:
        self.boot = clock
        self._lock = threading.Lock()
        self._last = 0
        # The store's time and the boot time at which the wall clock was found to be behind.
        self._behind: tuple[int, int] | None = None

    def now(self) -> int:
        wall = self.boot.wall_ms()
        with self._lock:
            if wall >= self._last:
                self._behind = None
                self._last = wall
                return wall
            boot = self.boot.boot_ms()
            if self._behind is None:
                self._behind = (self._last, boot)
            since, started = self._behind
            self._last = max(self._last, since + (boot - started) // 2)
            return self._last

    def witness(self, stored_ms: int) -> None:
        """A stored instant is in the past, whatever this process's wall clock says."""
        with self._lock:
            if stored_ms > self._last:
                self._last = stored_ms
                self._behind = None


class LeaseRow(NamedTuple):
    """What `renew` writes."""

    boot_id: str
    boot_ms: int
    lease_ms: int
    now_ms: int
    value: bytes

    def encode(self) -> bytes:
        row = (self.boot_id, self.boot_ms, self.lease_ms, self.now_ms, base64.b64encode(self.value).decode())
        return msgspec.json.encode(row)

    @classmethod
    def decode(cls, data: bytes) -> LeaseRow:
        """
        Raises:
            CorruptRecord: it is no lease; it is left as it is.
        """
        try:
            boot_id, boot_ms, lease_ms, now_ms, value = msgspec.json.decode(data, type=tuple[str, int, int, int, str])
            return cls(boot_id, boot_ms, lease_ms, now_ms, base64.b64decode(value, validate=True))
        except (TypeError, ValueError, *UNREADABLE) as error:
            raise CorruptRecord("host", "LeaseRow", str(error)) from error


def lease_row(clock: RisingClock, lease_ms: int, value: bytes) -> LeaseRow:
    return LeaseRow(clock.boot.boot_id, clock.boot.boot_ms(), lease_ms, clock.now(), value)


def judge(owner: str, row: LeaseRow | None, clock: RisingClock) -> OwnerLease:
    """The lease as it stands now."""
    if row is None:
        return OwnerLease(owner, alive=False, remaining_ms=-1, age_ms=0)
    age_ms = clock.boot.boot_ms() - row.boot_ms
    # A renewal in the future is one of another boot, on a platform that has no boot id.
    if row.boot_id != clock.boot.boot_id or age_ms < 0:
        age_ms = max(0, clock.now() - row.now_ms)
        return OwnerLease(owner, False, min(-1, row.lease_ms - age_ms), age_ms, row.value)
    remaining_ms = row.lease_ms - age_ms
    return OwnerLease(owner, remaining_ms > 0, remaining_ms, age_ms, row.value)


def _boot_ns() -> int:
    boottime: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    # Where there is no such clock, monotonic counts from the boot as well (macOS, Windows).
    return time.monotonic_ns() if boottime is None else time.clock_gettime_ns(boottime)


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return "unknown"
