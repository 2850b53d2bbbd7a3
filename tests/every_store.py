"""The stores that stories run on. A new store is one line in `STORES`, and every story runs on it too.

    @on_every_store                                     a story with an argument `backend`, which names the store
    async def test_it_holds(backend: str, tmp_path):
        async with shelf(backend, tmp_path) as place:
            store = await place.records()               as often as the story has processes

What is only tested on SQLite is about its file, its locks between processes, or the command, which opens a folder.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from tests.servers.fixtures import shared_postgres
from tests.servers.stores import open_bodies, open_postgres, schema_of

Clock = Callable[[], int]


async def _memory(place: Path, clock: Clock | None) -> RecordStore:
    return MemoryRecordStore(clock)


async def _sqlite(place: Path, clock: Clock | None) -> RecordStore:
    options: dict[str, Any] = {} if clock is None else {"clock": clock}
    return await SqliteRecordStore.open(place / "durable.db", synchronous="NORMAL", **options)


async def _postgres(place: Path, clock: Clock | None) -> RecordStore:
    return await open_postgres(shared_postgres().dsn(), schema_of(place), clock)


STORES: Final[dict[str, Callable[[Path, Clock | None], Awaitable[RecordStore]]]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgres": _postgres,
}
"""Opens the store of a place: called again for the same place, the same records, if the store is persistent.

`clock` is the store's, moved by hand (`ManualClock`); None is the real one.
"""

PERSISTENT: Final = tuple(name for name in STORES if name != "memory")

on_every_store = pytest.mark.parametrize("backend", STORES)


class Shelf:
    """One place where records are kept, opened as often as a story has processes. Use `shelf`."""

    def __init__(self, name: str, place: Path, clock: Clock | None) -> None:
        self.name = name
        self.place = place
        self.wakeups = LocalWakeups()
        self._clock = clock
        self._opened: list[RecordStore] = []

    async def records(self) -> RecordStore:
        """A connection of one's own to what is kept here; the same store, where there is but one process."""
        if self._opened and not self._opened[0].capabilities.persistent:
            return self._opened[0]
        self._opened.append(await STORES[self.name](self.place, self._clock))
        return self._opened[-1]

    async def backend(self, **options: Any) -> TransactionalSessionBackend:
        """A whole backend, whose large bodies are files beside the records."""
        options = {"wakeups": self.wakeups, **options}
        return TransactionalSessionBackend(await self.records(), FileObjectStore(self.place / "objects"), **options)

    async def close(self) -> None:
        for store in reversed(self._opened):
            await store.close()


@asynccontextmanager
async def shelf(name: str, place: Path, clock: Clock | None = None) -> AsyncGenerator[Shelf]:
    there = Shelf(name, place, clock)
    try:
        yield there
    finally:
        await there.close()


@asynccontextmanager
async def backend_with_bodies(name: str, place: Path, clock: Any) -> AsyncGenerator[TransactionalSessionBackend]:
    """As an application opens it, with its own place for large bodies: a folder beside a file, or a table."""
    if name == "sqlite":
        async with LocalBackend.open(place / "store", synchronous="NORMAL", clock=clock) as backend:
            yield backend
        return
    async with shelf(name, place, clock) as there:
        objects = await open_bodies(shared_postgres().dsn(), schema_of(place))
        try:
            yield TransactionalSessionBackend(await there.records(), objects, wakeups=there.wakeups)
        finally:
            await objects.close()
