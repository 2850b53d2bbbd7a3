from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.record_store import RecordStoreContract

class TestSqliteRecordStore(RecordStoreContract):
    backend = "sqlite"

    async def open(self, place: Path) -> RecordStore:
        self.clock = ManualClock()
        return await SqliteRecordStore.open(place / "durable.db", clock=self.clock)

    async def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
