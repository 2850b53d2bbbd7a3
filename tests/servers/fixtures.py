"""Servers as fixtures: started when a test first asks for one, ended with the process that runs the tests.

Each pytest-xdist worker has its own, so a test may restart what it is given: within a worker the tests run one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import cache

import asyncpg
import pytest

from tests.servers import place
from tests.servers.proxy import Proxy
from tests.servers.server import PgBouncerServer, PostgresServer

_numbers = itertools.count(1)

NewDatabase = Callable[[PostgresServer], Awaitable[str]]
"""Make an empty database on the server; its name."""
Proxied = Callable[[PostgresServer | PgBouncerServer], Awaitable[Proxy]]
"""Put a proxy before the server."""


@cache
def _postgres_15() -> PostgresServer:
    return PostgresServer(place.postgres_15())


def shared_postgres() -> PostgresServer:
    """The PostgreSQL 15 of this process, for what is no fixture. It ends with the process."""
    return _running(_postgres_15())


@pytest.fixture(scope="session")
def running_postgres() -> PostgresServer:
    return _postgres_15()


@pytest.fixture
def postgres(running_postgres: PostgresServer) -> PostgresServer:
    """PostgreSQL 15, the oldest supported; running, whatever the test before did to it."""
    return _running(running_postgres)


@pytest.fixture(scope="session")
def running_postgres_18() -> Iterator[PostgresServer]:
    with PostgresServer(place.postgres_18()) as server:
        yield server


@pytest.fixture
def postgres_18(running_postgres_18: PostgresServer) -> PostgresServer:
    """PostgreSQL 18, the newest."""
    return _running(running_postgres_18)


@pytest.fixture(scope="session")
def pgbouncer(running_postgres: PostgresServer) -> Iterator[PgBouncerServer]:
    """PgBouncer in transaction mode before `postgres`. With asyncpg: `statement_cache_size=0`."""
    with PgBouncerServer(running_postgres) as server:
        yield server


@pytest.fixture
async def new_database() -> AsyncIterator[NewDatabase]:
    """A function that makes an empty database on a server. It is dropped after the test."""
    made: list[tuple[PostgresServer, str]] = []

    async def new(server: PostgresServer) -> str:
        name = f"t{next(_numbers)}"
        await _tell(server, f"create database {name}")
        made.append((server, name))
        return name

    yield new
    for server, name in made:
        await _tell(_running(server), f"drop database {name} with (force)")


@pytest.fixture
async def database(postgres: PostgresServer, new_database: NewDatabase) -> str:
    """The address of an empty database on `postgres`."""
    return postgres.dsn(await new_database(postgres))


@pytest.fixture
async def proxied() -> AsyncIterator[Proxied]:
    """A function that puts a proxy before a server: connect with `server.dsn(name, port=proxy.port)`."""
    async with AsyncExitStack() as stack:

        async def before(server: PostgresServer | PgBouncerServer) -> Proxy:
            return await stack.enter_async_context(Proxy(server.port))

        yield before


def _running(server: PostgresServer) -> PostgresServer:
    if not server.pid:
        server.start()
    return server


async def _tell(server: PostgresServer, command: str) -> None:
    connection = await asyncpg.connect(server.dsn())
    try:
        await connection.execute(command)
    finally:
        await connection.close()
