"""Record stores in PostgreSQL for tests: each place has a schema, and time may be moved by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentscope_durable.stores._postgres_connections import Source, source_of
from agentscope_durable.stores.objects.postgres import PostgresObjectStore
from agentscope_durable.stores.records._postgres_clock import ServerClock
from agentscope_durable.stores.records._postgres_tables import Tables
from agentscope_durable.stores.records.postgres import PostgresRecordStore

CLOCK = "current_setting('durable.clock')::bigint"


def schema_of(place: Path) -> str:
    """One for each place."""
    return f"s{hashlib.sha256(str(place).encode()).hexdigest()[:16]}"


async def open_postgres(dsn: str, schema: str, clock: Callable[[], int] | None = None) -> PostgresRecordStore:
    """A store in a schema, which is made if there is none.

    Args:
        clock: the server's, as the test moves it; None is the real one.
    """
    if clock is None:
        return await PostgresRecordStore.open(dsn, schema=schema, initialize_schema=True)
    await PostgresRecordStore.initialize_schema(dsn, schema=schema)
    passes: Any = getattr(clock, "boot_ms", clock)
    clocked: Any = _ClockedSource(source_of(dsn), clock)
    return PostgresRecordStore(clocked, None, Tables(schema, clock=CLOCK), clock=ServerClock(passes))


async def open_bodies(dsn: str, schema: str) -> PostgresObjectStore:
    """The table of large bodies in a schema, which is made if there is none."""
    await PostgresRecordStore.initialize_schema(dsn, schema=schema)
    return await PostgresObjectStore.open(dsn, schema=schema)


class _ClockedSource:
    """Connections to a server whose clock shows what the test's does."""

    def __init__(self, source: Source, clock: Callable[[], int]) -> None:
        self.location = source.location
        self._source = source
        self._clock = clock

    async def connect(self) -> Any:
        return _Clocked(await self._source.connect(), self._clock)

    async def give_back(self, connection: Any) -> None:
        await self._source.give_back(connection.connection)

    def beside(self) -> Any:
        return self


class _Clocked:
    """A connection that sets the clock before each statement."""

    def __init__(self, connection: Any, clock: Callable[[], int]) -> None:
        self.connection = connection
        self._clock = clock

    async def fetch(self, statement: str, *arguments: Any, timeout: float) -> Any:
        await self.connection.execute(f"set durable.clock = {self._clock()}")
        return await self.connection.fetch(statement, *arguments, timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)
