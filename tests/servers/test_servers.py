"""The servers that other tests lean on do what they say."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import asyncpg
import pytest

from tests.servers.fixtures import Proxied
from tests.servers.place import ROOT
from tests.servers.proxy import executes, is_number
from tests.servers.server import PgBouncerServer, PostgresServer

SECONDS = 90.0


async def rows(dsn: str) -> list[int]:
    connection = await asyncpg.connect(dsn, statement_cache_size=0)
    try:
        return [row["n"] for row in await connection.fetch("select n from seen order by n")]
    finally:
        await connection.close()


@pytest.fixture
async def seen(database: str) -> str:
    """The address of a database with a table `seen`."""
    connection = await asyncpg.connect(database)
    await connection.execute("create table seen (n int)")
    await connection.close()
    return database


def through(dsn: str, port: int) -> str:
    """The same database by way of another port."""
    return f"{dsn.rsplit(':', 1)[0]}:{port}/{dsn.rsplit('/', 1)[1]}"


async def test_both_versions_promise_durability(postgres: PostgresServer, postgres_18: PostgresServer) -> None:
    for server, version in ((postgres, "15"), (postgres_18, "18")):
        connection = await asyncpg.connect(server.dsn())
        assert (await connection.fetchval("show server_version")).startswith(version)
        for promise in ("fsync", "synchronous_commit", "full_page_writes"):
            assert await connection.fetchval(f"show {promise}") == "on"
        await connection.close()


@pytest.mark.parametrize("how", ["stop", "stop_immediately", "kill"])
async def test_what_is_committed_survives_every_end(postgres: PostgresServer, seen: str, how: str) -> None:
    connection = await asyncpg.connect(seen)
    await connection.execute("insert into seen values (1)")
    getattr(postgres, how)()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.execute("insert into seen values (2)")
    postgres.start()
    assert await rows(seen) == [1]


async def test_a_transaction_pool_forgets_what_a_connection_prepared(pgbouncer: PgBouncerServer, seen: str) -> None:
    """So a driver behind it must not prepare by name, and this pool is a real test of that."""
    dsn = through(seen, pgbouncer.port)
    assert await rows(dsn) == []
    first, other = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    backend = "select pg_backend_pid()"
    mine = await first.fetchval(backend)
    async with other.transaction():
        # The other client has this one's server process now, and so this one gets another.
        assert await other.fetchval("select pg_backend_pid() as other", timeout=SECONDS) == mine
        with pytest.raises(asyncpg.InvalidSQLStatementNameError):
            await first.fetchval(backend)
    await first.close()
    await other.close()


@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("prepared", [False, True])
async def test_a_cut_falls_before_the_work_or_after_it(
    postgres: PostgresServer, proxied: Proxied, seen: str, lost: str, prepared: bool
) -> None:
    proxy = await proxied(postgres)
    connection = await asyncpg.connect(through(seen, proxy.port))
    insert = "insert into seen values (1)"
    statement = await connection.prepare(insert)
    done = getattr(proxy, f"lose_{lost}")(executes("INSERT INTO seen"))
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await (statement.fetch() if prepared else connection.execute(insert))
    async with asyncio.timeout(SECONDS):
        await done.wait()
    assert await rows(seen) == ([] if lost == "request" else [1])


async def test_a_commit_whose_answer_is_lost_is_a_commit(postgres: PostgresServer, proxied: Proxied, seen: str) -> None:
    proxy = await proxied(postgres)
    connection = await asyncpg.connect(through(seen, proxy.port))
    done = proxy.lose_answer(executes("COMMIT"))
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        async with connection.transaction():
            await connection.execute("insert into seen values (1)")
            assert not done.is_set()
    assert done.is_set()
    assert await rows(seen) == [1]


async def test_a_cut_at_the_nth_message_leaves_the_messages_before_it(
    postgres: PostgresServer, proxied: Proxied, seen: str
) -> None:
    proxy = await proxied(postgres)
    connection = await asyncpg.connect(through(seen, proxy.port))
    proxy.lose_request(is_number(3))
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        for n in range(9):
            await connection.execute(f"insert into seen values ({n})")
    assert await rows(seen) == [0, 1]


async def test_a_stalled_statement_is_done_when_it_flows_again(
    postgres: PostgresServer, proxied: Proxied, seen: str
) -> None:
    proxy = await proxied(postgres)
    connection = await asyncpg.connect(through(seen, proxy.port))
    stalled = proxy.stall_at(executes("insert"))
    inserting = asyncio.ensure_future(connection.execute("insert into seen values (1)"))
    async with asyncio.timeout(SECONDS):
        await stalled.wait()
    assert await rows(seen) == []
    assert not inserting.done()
    proxy.flow()
    await inserting
    assert await rows(seen) == [1]
    await connection.close()


async def test_nobody_connects_while_it_refuses(postgres: PostgresServer, proxied: Proxied, seen: str) -> None:
    proxy = await proxied(postgres)
    connection = await asyncpg.connect(through(seen, proxy.port))
    await proxy.refuse()
    with pytest.raises(OSError):
        await asyncpg.connect(through(seen, proxy.port))
    await connection.execute("insert into seen values (1)")
    proxy.cut()
    with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
        await connection.execute("insert into seen values (2)")
    await proxy.accept()
    assert await rows(through(seen, proxy.port)) == [1]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
async def test_servers_end_with_whoever_started_them(how: signal.Signals) -> None:
    program = (
        "import json, time\n"
        "from tests.servers import place\n"
        "from tests.servers.server import *\n"
        "s = PostgresServer(place.postgres_15()); b = PgBouncerServer(s)\n"
        "print(json.dumps([[s.pid, str(s.folder)], [b.pid, str(b.folder)]]), flush=True)\n"
        "time.sleep(1000)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    started = json.loads(await process.stdout.readline())
    assert all(Path(f"/proc/{pid}").exists() and Path(folder).exists() for pid, folder in started)
    process.send_signal(how)
    await process.wait()
    async with asyncio.timeout(SECONDS):
        while any(Path(f"/proc/{pid}").exists() or Path(folder).exists() for pid, folder in started):
            await asyncio.sleep(0.01)
