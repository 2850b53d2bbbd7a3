"""The PostgreSQL store: the contract every store keeps, and what a server that others share adds to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.record_store import RecordStoreContract

DSN = "postgresql://postgres@127.0.0.1:55415/postgres"


@pytest.mark.spec("BE-02", "BE-16")
class TestPostgresRecordStore(RecordStoreContract):
    backend = "postgres"

    async def open(self, place: Path) -> RecordStore:
        return await PostgresRecordStore.open(DSN, schema=str(place)[-60:], initialize_schema=True)
