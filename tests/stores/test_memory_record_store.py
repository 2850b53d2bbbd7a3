"""The store in memory, by the contract every store keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.record_store import RecordStoreContract


@pytest.mark.spec("BE-02", "BE-16")
class TestMemoryRecordStore(RecordStoreContract):
    backend = "memory"

    async def open(self, place: Path) -> RecordStore:
        self.clock = ManualClock()
        return MemoryRecordStore(self.clock)

    async def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)


async def test_the_default_clock_runs() -> None:
    store = MemoryRecordStore()
    store.renew("host-1", 60_000, b"")

    [lease] = await store.owners()
    assert lease.alive
