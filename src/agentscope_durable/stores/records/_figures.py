"""How busy a store's writer is (BE-28)."""

from __future__ import annotations

import time

from agentscope_durable.contracts.errors import StoreBusy
from agentscope_durable.spi.record_store import StoreStatistics

__all__ = ["Figures"]


class Figures:
    """Counted by whoever writes, read by others.

    Attributes:
        transactions: that were committed.
        locked: seconds that the lock was waited for.
    """

    def __init__(self) -> None:
        self.transactions = 0
        self.locked = 0.0
        self._changes = self._busy = 0
        self._waited = self._longest = 0.0

    def count(self, began: float, error: BaseException | None, *, changed: bool) -> None:
        """A change that waited since `began`, on the monotonic clock, has its outcome."""
        waited = time.monotonic() - began
        self._waited += waited
        self._longest = max(self._longest, waited)
        self._changes += changed
        self._busy += isinstance(error, StoreBusy)

    def told(self, stored_bytes: int) -> StoreStatistics:
        return StoreStatistics(
            changes=self._changes,
            transactions=self.transactions,
            busy=self._busy,
            waited_ms=int(self._waited * 1000),
            longest_ms=int(self._longest * 1000),
            locked_ms=int(self.locked * 1000),
            stored_bytes=stored_bytes,
        )
