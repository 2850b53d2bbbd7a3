"""Proves the two stores of this folder: each promise of the sockets is a test, under its name."""

from pathlib import Path

from folder_objects import FolderObjects
from journal_store import JournalStore

from agentscope_durable import TransactionalSessionBackend
from agentscope_durable.testing import ObjectStoreContract, RecordStoreContract, SessionBackendContract


class TestRecords(RecordStoreContract):
    async def open(self, place: Path) -> JournalStore:
        return await JournalStore.open(place / "journal")


class TestObjects(ObjectStoreContract):
    async def open(self, place: Path) -> FolderObjects:
        return FolderObjects(place)

    async def damage(self, store: FolderObjects, partition: str, name: str, content: bytes) -> None:
        store._path(partition, name).write_bytes(content)


class TestBackend(SessionBackendContract):
    async def open(self, place: Path) -> TransactionalSessionBackend:
        records = await JournalStore.open(place / "journal")
        return TransactionalSessionBackend(records, FolderObjects(place / "objects"), owns_store=True)
