"""Large bodies in a table of the PostgreSQL store, by the contract of every object store."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from agentscope_durable.contracts.bodies import object_digest
from agentscope_durable.contracts.errors import NotFound, TooLarge
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.stores.objects import postgres as module
from agentscope_durable.stores.objects.postgres import PostgresObjectStore
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.object_store import InspectedObjectStoreContract
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of


@pytest.mark.spec("OB-02", "OB-07")
@pytest.mark.case("C87")
class TestPostgresObjectStore(InspectedObjectStoreContract):
    backend = "postgres"

    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer) -> None:
        self.dsn = postgres.dsn()

    async def open(self, place: Path) -> ObjectStore:
        self.schema = schema_of(place)
        await PostgresRecordStore.initialize_schema(self.dsn, schema=self.schema)
        return await PostgresObjectStore.open(self.dsn, schema=self.schema)

    async def damage(self, store: ObjectStore, partition: str, digest: str, content: bytes) -> None:
        connection = await asyncpg.connect(self.dsn)
        changed = await connection.execute(
            f"update {self.schema}.durable_body set content=$1 where name=$2", content, digest.encode()
        )
        await connection.close()
        assert changed == "UPDATE 1"

    async def test_folders_are_listed_once_each_in_order(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            assert isinstance(store, PostgresObjectStore)
            for partition in ("a", "b", "c"):
                for content in (b"1", b"2"):
                    await store.put(partition, object_digest(content), content)
            every = sorted(store.folder_of(partition) for partition in ("a", "b", "c"))

            assert await store.folders() == every
            assert await store.folders(after=every[0], limit=1) == every[1:2]
            assert await store.folders(after=every[-1]) == []

    async def test_what_the_table_cannot_hold_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "OBJECT_BYTES_MAX", 10)
        async with self.opened(tmp_path) as store:
            with pytest.raises(TooLarge):
                await store.put("p", object_digest(b"x" * 11), b"x" * 11)

    async def test_where_no_table_is_it_says_how_to_make_it(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match="initialize_schema"):
            await PostgresObjectStore.open(self.dsn, schema="nowhere")
