"""The PostgreSQL store: the contract every store keeps, and what a server that others share adds to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.record_store import RecordStoreContract
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of


@pytest.mark.spec("BE-02", "BE-16")
class TestPostgresRecordStore(RecordStoreContract):
    """On the oldest supported version."""

    backend = "postgres"

    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer) -> None:
        self.dsn = postgres.dsn()

    async def open(self, place: Path) -> RecordStore:
        return await PostgresRecordStore.open(self.dsn, schema=schema_of(place), initialize_schema=True)


class TestPostgresRecordStoreOnTheNewestServer(RecordStoreContract):
    backend = "postgres"

    @pytest.fixture(autouse=True)
    def server(self, postgres_18: PostgresServer) -> None:
        self.dsn = postgres_18.dsn()

    async def open(self, place: Path) -> RecordStore:
        return await PostgresRecordStore.open(self.dsn, schema=schema_of(place), initialize_schema=True)
