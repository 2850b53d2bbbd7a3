"""Where the PostgreSQL store's tables come from, and what opening it looks at."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import (
    DurableError,
    Forbidden,
    HostClosed,
    Incompatible,
    InvalidRequest,
    Misuse,
    NotADatabase,
    NotFound,
    StoreReadOnly,
    Unavailable,
    UnknownFormat,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import STORAGE_FORMAT, STORAGE_REVISION
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from agentscope_durable.stores.records._postgres_schema import schema_of as look
from agentscope_durable.stores.records._postgres_tables import TABLES
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.record_store import NOTHING, always, change
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.runtime.conftest import until
from tests.servers.fixtures import NewDatabase
from tests.servers.server import PgBouncerServer, PostgresServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")
KEY = SessionKey("app", "c1")


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return schema_of(tmp_path)


@pytest.fixture
async def administrator(postgres: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres.dsn())
    yield connection
    await connection.close()


@pytest.fixture
async def role(administrator: asyncpg.Connection, schema: str) -> AsyncIterator[str]:
    """A role that may do nothing."""
    name = f"r_{schema}"
    await administrator.execute(f"create role {name} login")
    yield name
    await administrator.execute(f"drop owned by {name}")
    await administrator.execute(f"drop role {name}")


async def tables(administrator: asyncpg.Connection, schema: str) -> list[str]:
    rows = await administrator.fetch("select tablename::text from pg_tables where schemaname=$1 order by 1", schema)
    return [name for (name,) in rows]


async def turn_ends(backend: Any) -> None:
    """A Turn is run to its end over this backend."""
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
        await runtime.start()
        session = await runtime.create_session(KEY, "agent")
        assert str(await session.call("r1", "go", timeout=90)) == "done"


@pytest.mark.spec("PG-03")
async def test_the_tables_are_made_once_however_often_and_by_however_many(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str
) -> None:
    await asyncio.gather(*(PostgresBackend.initialize_schema(postgres.dsn(), schema=schema) for _ in range(4)))
    made = await tables(administrator, schema)
    async with PostgresBackend.open(postgres.dsn(), schema=schema) as backend:
        await turn_ends(backend)
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)

    assert made == sorted(f"durable_{name}" for name in TABLES)
    assert await tables(administrator, schema) == made
    async with (
        PostgresBackend.open(postgres.dsn(), schema=schema) as backend,
        DurableRuntime(backend=backend) as runtime,
    ):
        assert (await runtime.get_session(KEY).view()).session == KEY


@pytest.mark.spec("PG-04")
async def test_a_start_needs_no_right_to_make_tables(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str, role: str
) -> None:
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    await administrator.execute(f"grant usage on schema {schema} to {role}")
    await administrator.execute(f"grant select, insert, update, delete on all tables in schema {schema} to {role}")
    dsn = postgres.dsn().replace("durable@", f"{role}@")

    async with PostgresBackend.open(dsn, schema=schema) as backend:
        await turn_ends(backend)
    with pytest.raises(Forbidden):
        await PostgresBackend.initialize_schema(dsn, schema=f"{schema}_other")


@pytest.mark.spec("PG-04")
async def test_a_missing_schema_is_named_and_nothing_is_made(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str
) -> None:
    with pytest.raises(NotFound, match="initialize_schema"):
        await PostgresBackend.open(postgres.dsn(), schema=schema)
    assert not await administrator.fetchval("select to_regnamespace($1) is not null", schema)

    await administrator.execute(f"create schema {schema}")
    with pytest.raises(NotFound, match="initialize_schema"):
        await PostgresBackend.open(postgres.dsn(), schema=schema)
    assert await tables(administrator, schema) == []


@pytest.mark.spec("PG-05")
async def test_for_development_the_tables_are_made_with_the_start(postgres: PostgresServer, schema: str) -> None:
    async with PostgresBackend.open(postgres.dsn(), schema=schema, initialize_schema=True) as backend:
        await turn_ends(backend)


@pytest.mark.spec("PG-06")
async def test_the_search_path_says_where_unless_the_schema_is_named(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str
) -> None:
    for name in (schema, f"{schema}_other"):
        await administrator.execute(f"create schema {name}")
    there = f"{postgres.dsn()}?search_path={schema}"
    await PostgresBackend.initialize_schema(there)
    await PostgresBackend.initialize_schema(there, schema=f"{schema}_other")

    async with PostgresBackend.open(there) as first, PostgresBackend.open(there, schema=f"{schema}_other") as second:
        await turn_ends(first)
        assert (await first.records.read(f"{KEY.namespace}\x00{KEY.session_id}", NOTHING)).head is not None
        assert (await second.records.read(f"{KEY.namespace}\x00{KEY.session_id}", NOTHING)).head is None
    with pytest.raises(NotFound):
        await PostgresBackend.open(f"{postgres.dsn()}?search_path=nowhere_at_all")


@pytest.mark.spec("PG-10", "PG-09")
async def test_large_bodies_go_to_the_object_store_that_was_given_and_else_beside_the_records(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str
) -> None:
    large = b'"' + b"x" * 100_000 + b'"'
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    mine = MemoryObjectStore()
    for given in (None, mine):
        backend = await PostgresBackend.open(postgres.dsn(), schema=schema, object_store=given)
        await turn_ends(backend)
        body = await backend.put_body(KEY, large)
        assert await backend.open_body(KEY, body) == large
        await backend.close()

    assert await administrator.fetchval(f"select count(*) from {schema}.durable_body") == 1
    assert len(await mine.list(f"{KEY.namespace}\x00{KEY.session_id}")) == 1, "and it was not closed"


@pytest.mark.spec("PG-08")
async def test_without_a_transport_hints_stay_within_the_process(postgres: PostgresServer, schema: str) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with (
        PostgresBackend.open(postgres.dsn(), schema=schema, initialize_schema=True) as backend,
        # It looks by itself once in an hour only: what it does, it was told.
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=3600) as runtime,
    ):
        await runtime.start()
        session = await runtime.create_session(KEY, "agent")
        assert str(await session.call("r1", "go", timeout=90)) == "done"


@pytest.mark.spec("PG-01", "PG-09")
@pytest.mark.parametrize("cached", [256, 0])
async def test_a_pool_of_the_applications_is_used_and_left_open(
    postgres: PostgresServer, schema: str, cached: int
) -> None:
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    async with asyncpg.create_pool(postgres.dsn(), min_size=1, max_size=8, statement_cache_size=cached) as pool:
        backend = await PostgresBackend.open(pool, schema=schema)
        await turn_ends(backend)
        await backend.close()
        await backend.close()

        assert pool.get_idle_size() == pool.get_size() > 0, "every connection came back"
        assert await pool.fetchval("select 1") == 1
        assert await pool.fetchval("show plan_cache_mode") == "auto", "and as it was"
        with pytest.raises(HostClosed):
            await backend.owners()


async def test_a_pool_that_cannot_serve_is_refused_with_the_reason(postgres: PostgresServer, schema: str) -> None:
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    async with asyncpg.create_pool(postgres.dsn(), min_size=0, max_size=5) as small:
        with pytest.raises(InvalidRequest, match="room for 5"):
            await PostgresBackend.open(small, schema=schema)
    with pytest.raises(Misuse, match="has not been opened"):
        await PostgresBackend.open(asyncpg.create_pool(postgres.dsn(), min_size=0), schema=schema)
    async with asyncpg.create_pool(postgres.dsn(), min_size=0, max_size=6) as pool:

        async def elsewhere() -> None:
            with pytest.raises(Misuse, match="another event loop"):
                await asyncio.wait_for(PostgresRecordStore.open(pool, schema=schema), 30)

        # A pool that has been used on its own loop cannot be used on another.
        await pool.fetchval("select 1")
        await asyncio.to_thread(asyncio.run, elsewhere())


@pytest.mark.spec("PG-01")
async def test_a_pooler_that_changes_the_server_with_each_transaction_may_stand_between(
    postgres: PostgresServer, pgbouncer: PgBouncerServer, schema: str
) -> None:
    await PostgresBackend.initialize_schema(pgbouncer.dsn(), schema=schema)
    async with PostgresBackend.open(pgbouncer.dsn(), schema=schema) as backend:
        await turn_ends(backend)
        other = await PostgresBackend.open(pgbouncer.dsn(), schema=schema)
        # Two who write one Session meet behind its lock, and there a transaction has several statements.
        jobs = [
            store.transact("p", NOTHING, always(change()))
            for _ in range(20)
            for store in (backend.records, other.records)
        ]
        await asyncio.gather(*jobs)
        assert (await backend.records.read("p", NOTHING)).rev == 40
        await other.close()
    async with (
        asyncpg.create_pool(pgbouncer.dsn(), min_size=0, max_size=6, statement_cache_size=0) as pool,
        PostgresBackend.open(pool, schema=schema) as backend,
    ):
        assert (await backend.records.read("p", NOTHING)).rev == 40
    # Nothing that is set for a session is left on a server process that the next client gets.
    through = await asyncpg.connect(pgbouncer.dsn(), statement_cache_size=0)
    for _ in range(8):
        assert await through.fetchval("show plan_cache_mode") == "auto"
    await through.close()


@pytest.mark.spec("PT-12", "BE-27")
@pytest.mark.parametrize(
    ("column", "found"),
    [("format", "7"), ("format", "9"), ("format", None), ("revision", "8.dev1"), ("revision", None)],
)
async def test_a_store_of_another_release_is_refused_and_left_as_it_is(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str, column: str, found: str | None
) -> None:
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    meta = f"{schema}.durable_meta"
    if found is None:
        await administrator.execute(f"delete from {meta} where key=$1", column)
    else:
        await administrator.execute(f"update {meta} set value=$2 where key=$1", column, found)
    before = await administrator.fetch(f"select * from {meta} order by key")

    for ask in (
        lambda: PostgresRecordStore.open(postgres.dsn(), schema=schema),
        lambda: PostgresRecordStore.open(postgres.dsn(), schema=schema, initialize_schema=True),
        lambda: PostgresRecordStore.initialize_schema(postgres.dsn(), schema=schema),
    ):
        with pytest.raises(UnknownFormat) as caught:
            await ask()
        assert caught.value.supported == f"{STORAGE_FORMAT} ({STORAGE_REVISION})"
    assert await administrator.fetch(f"select * from {meta} order by key") == before


async def test_tables_of_these_names_that_are_something_else_are_left_alone(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str
) -> None:
    await administrator.execute(f"create schema {schema}")
    await administrator.execute(f"create table {schema}.durable_log(mine int)")

    with pytest.raises(NotADatabase):
        await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)

    assert await tables(administrator, schema) == ["durable_log"]


async def test_a_right_that_is_missing_is_named(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str, role: str
) -> None:
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    dsn = postgres.dsn().replace("durable@", f"{role}@")
    with pytest.raises(Forbidden, match=schema):
        await PostgresBackend.open(dsn, schema=schema)
    await administrator.execute(f"grant usage on schema {schema} to {role}")
    await administrator.execute(f"grant select on all tables in schema {schema} to {role}")
    await administrator.execute(f"grant insert, update, delete on {schema}.durable_log to {role}")
    with pytest.raises(Forbidden, match="durable_head") as caught:
        await PostgresBackend.open(dsn, schema=schema)
    assert "durable_log" not in str(caught.value)


async def test_what_a_role_may_not_see_of_others_is_not_said_to_be_nothing(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str, role: str
) -> None:
    """A transaction that stays open makes commits slower; it is mostly somebody's at a prompt, with another role."""
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    await administrator.execute(f"grant usage on schema {schema} to {role}")
    await administrator.execute(f"grant select, insert, update, delete on all tables in schema {schema} to {role}")
    store = await PostgresRecordStore.open(postgres.dsn().replace("durable@", f"{role}@"), schema=schema)

    async def longest() -> str:
        return (await store.condition(deep=False)).facts["longestTransactionSeconds"]

    async with administrator.transaction():
        await administrator.execute("select pg_current_xact_id()")
        assert "not visible to this role" in await longest()

        other = await asyncpg.connect(postgres.dsn())
        await other.execute(f"grant pg_read_all_stats to {role}")
        await other.close()

        async def seen() -> bool:
            return int(await longest()) >= 1

        await until(seen)
    await store.close()


async def test_who_only_reads_needs_no_right_to_write(
    postgres: PostgresServer, administrator: asyncpg.Connection, schema: str, role: str
) -> None:
    async with PostgresBackend.open(postgres.dsn(), schema=schema, initialize_schema=True) as backend:
        await turn_ends(backend)
    dsn = postgres.dsn().replace("durable@", f"{role}@")
    await administrator.execute(f"grant usage on schema {schema} to {role}")
    with pytest.raises(Forbidden, match="reading the store") as caught:
        await PostgresBackend.open(dsn, schema=schema, read_only=True)
    assert "insert" not in str(caught.value)
    await administrator.execute(f"grant select on all tables in schema {schema} to {role}")
    with pytest.raises(Forbidden, match="reading and writing"):
        await PostgresBackend.open(dsn, schema=schema)
    with pytest.raises(InvalidRequest):
        await PostgresBackend.open(dsn, schema=schema, read_only=True, initialize_schema=True)

    async with (
        PostgresBackend.open(dsn, schema=schema, read_only=True) as backend,
        DurableRuntime(backend=backend) as runtime,
    ):
        (view,) = (await runtime.get_session(KEY).list_turns()).items
        assert view.status == "COMPLETED"
        with pytest.raises(StoreReadOnly):
            await runtime.get_session(KEY).submit("r9", "go")
        records: Any = backend.records
        with pytest.raises(StoreReadOnly):
            records.renew("host", 1000, b"")
        with pytest.raises(StoreReadOnly):
            records.announce("host")
        for write in (records.release("host"), records.forget("host", ())):
            with pytest.raises(StoreReadOnly):
                await write


@pytest.mark.parametrize(
    ("dsn", "error"),
    [
        ("postgresql://durable@127.0.0.1:{port}/no_such_database", NotFound),
        ("postgresql://durable@127.0.0.1:1/postgres", Unavailable),
        ("mysql://somewhere", InvalidRequest),
        (7, InvalidRequest),
    ],
)
async def test_where_no_store_can_be_is_said(postgres: PostgresServer, dsn: Any, error: type[DurableError]) -> None:
    where = dsn.format(port=postgres.port) if isinstance(dsn, str) else dsn
    with pytest.raises(error):
        await PostgresBackend.open(where)


HERE = "postgresql://durable@127.0.0.1:{port}/postgres"


@pytest.mark.parametrize(
    ("dsn", "options", "path"),
    [
        ("postgresql://durable@[::1/postgres", {}, "dsn"),
        ("postgresql://durable@127.0.0.1:abc/postgres", {}, "dsn"),
        (f"{HERE}?sslmode=bogus", {}, "dsn"),
        (f"{HERE}?sslmode=require", {}, "dsn"),
        (f"{HERE}?bogus=1", {}, "dsn"),
        (f"{HERE}?statement_timeout=soon", {}, "dsn"),
        (HERE, {"schema": 5}, "schema"),
        (HERE, {"schema": "\ud800"}, "schema"),
        (HERE, {"schema": "x" * 64}, "schema"),
        (HERE, {"schema": "pg_mine", "initialize_schema": True}, "schema"),
        (HERE, {"statement_timeout": "5"}, "statement_timeout"),
        (HERE, {"statement_timeout": True}, "statement_timeout"),
        (HERE, {"statement_timeout": float("nan")}, "statement_timeout"),
        (HERE, {"statement_timeout": 1e9}, "statement_timeout"),
    ],
    ids=lambda value: str(value)[-40:].encode("ascii", "replace").decode(),
)
async def test_what_can_never_be_right_is_named_and_not_to_be_asked_again(
    postgres: PostgresServer, dsn: str, options: dict[str, Any], path: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await PostgresBackend.open(dsn.format(port=postgres.port), **options)
    assert caught.value.path == path
    assert "soon" not in str(caught.value), "no value is told: it may be a secret"


@pytest.mark.case("C18")
async def test_leases_are_renewed_where_everybody_looks_for_them_or_the_store_is_not_opened(
    postgres: PostgresServer, new_database: NewDatabase, administrator: asyncpg.Connection, schema: str, role: str
) -> None:
    """A host whose lease stood in another database was alive to itself alone, and its Turns were never taken over."""
    another = postgres.dsn(await new_database(postgres))
    for place in (postgres.dsn(), another):
        await PostgresBackend.initialize_schema(place, schema=schema)
    dsn = postgres.dsn().replace("durable@", f"{role}@")
    refusals: list[tuple[str, type[DurableError], str]] = [
        (another, InvalidRequest, "another database"),
        ("nonsense", InvalidRequest, "heartbeat_dsn"),
        ("postgresql://durable@[::1/postgres", InvalidRequest, "heartbeat_dsn"),
        (f"{postgres.dsn()}?sslmode=bogus", InvalidRequest, "heartbeat_dsn"),
        ("postgresql://durable@127.0.0.1:1/postgres", Unavailable, "heartbeat_dsn"),
        (f"{postgres.dsn()}_not_there", NotFound, "heartbeat_dsn"),
        (dsn, Forbidden, "durable_owner"),
    ]
    for heartbeat, error, names in refusals:
        with pytest.raises(error, match=names) as caught:
            await PostgresBackend.open(postgres.dsn(), schema=schema, heartbeat_dsn=heartbeat)
        assert not isinstance(caught.value, InvalidRequest) or caught.value.path == "heartbeat_dsn"
    with pytest.raises(InvalidRequest, match="heartbeat_dsn"):
        nothing: Any = 7
        await PostgresBackend.open(postgres.dsn(), schema=schema, heartbeat_dsn=nothing)

    await administrator.execute(f"grant usage on schema {schema} to {role}")
    await administrator.execute(f"grant select, insert, update on {schema}.durable_owner to {role}")
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with (
        PostgresBackend.open(postgres.dsn(), schema=schema, heartbeat_dsn=dsn) as backend,
        DurableRuntime(backend=backend, harnesses=[harness]) as runtime,
    ):
        await runtime.start()
        [lease] = await backend.owners()
        assert (lease.owner, lease.alive) == (runtime.owner, True)
        seen = "select count(*) from pg_stat_activity where usename=$1"
        assert await administrator.fetchval(seen, role) == 1, "and over that connection"


@pytest.mark.spec("PG-01")
async def test_leases_may_go_past_the_pooler(postgres: PostgresServer, pgbouncer: PgBouncerServer, schema: str) -> None:
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    ways = [(pgbouncer.dsn(), postgres.dsn()), (postgres.dsn(), pgbouncer.dsn())]
    for where, heartbeat in ways:
        async with PostgresBackend.open(where, schema=schema, heartbeat_dsn=heartbeat) as backend:
            records: Any = backend.records
            await asyncio.to_thread(records.renew, "host", 60_000, b"")
            assert [lease.owner for lease in await backend.owners()] == ["host"]


async def test_no_error_tells_a_password(postgres: PostgresServer) -> None:
    with pytest.raises(DurableError) as caught:
        await PostgresBackend.open(f"postgresql://durable:secret@127.0.0.1:{postgres.port}/no_such_database")
    assert "secret" not in str(caught.value)
    assert "no_such_database" in str(caught.value)


class _Server:
    """What a server tells of itself."""

    def __init__(self, number: int, *, standby: bool = False) -> None:
        self._row = (number, f"{number // 10000}.1", standby, "public")

    async def fetch(self, statement: str) -> list[tuple[Any, ...]]:
        return [self._row]


async def test_an_old_server_and_a_standby_are_refused() -> None:
    with pytest.raises(Incompatible, match="15 or later"):
        await look(_Server(140009), None, "here", writes=True)
    with pytest.raises(StoreReadOnly):
        await look(_Server(180000, standby=True), None, "here", writes=True)
    assert await look(_Server(150000), None, "here", writes=True) == "public"


@pytest.mark.spec("PG-02")
def test_without_the_driver_everything_else_works_and_opening_names_the_extra() -> None:
    program = """
import sys
sys.modules["asyncpg"] = None
import asyncio
import agentscope_durable
from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import MissingExtra
for ask in (PostgresBackend.open("postgresql://x"), PostgresBackend.initialize_schema("postgresql://x")):
    async def wait():
        return await ask
    try:
        asyncio.run(wait())
    except MissingExtra as error:
        print(error)
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert printed.count("pip install 'agentscope-durable[postgres]'") == 2
