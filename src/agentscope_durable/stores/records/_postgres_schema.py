"""The store's place in a database: made once by whoever may, and only looked at by everybody else."""

from __future__ import annotations

from typing import Any, Final

from agentscope_durable.contracts.errors import (
    Forbidden,
    Incompatible,
    InvalidRequest,
    NotADatabase,
    NotFound,
    StoreReadOnly,
    UnknownFormat,
)
from agentscope_durable.contracts.records import STORAGE_FORMAT, STORAGE_REVISION
from agentscope_durable.stores._postgres_connections import quoted
from agentscope_durable.stores._postgres_driver import asyncpg
from agentscope_durable.stores.records._postgres_tables import Tables

__all__ = ["SERVER_MIN", "check", "check_lease", "create", "schema_of", "shared"]

SERVER_MIN: Final = 150000
_LOCK: Final = 0x41674475_0000_0008
"""`AgDu` and the format: whoever makes tables holds it, so that two who begin at once do not meet."""

_SERVER: Final = """select current_setting('server_version_num')::int, current_setting('server_version'),
    pg_is_in_recovery() or current_setting('transaction_read_only')='on', current_schema()"""
_RIGHTS: Final = """select name from unnest($1::text[]) name, unnest($2::text[]) needed
    where not has_table_privilege(name, needed) group by name"""
READS: Final = ("select",)
WRITES: Final = ("select", "insert", "update", "delete")
"""Rights on each table: of who looks only, and of a host."""
RENEWS: Final = ("select", "insert", "update")
"""Rights on the table of leases, of who renews them."""


async def schema_of(connection: Any, schema: str | None, location: str, *, writes: bool) -> str:
    """The schema to use: the one that is named, or the first of the connection's search path.

    Args:
        writes: the server must take them.

    Raises:
        Incompatible: the server is too old.
        StoreReadOnly: it is a standby, or takes no writes.
        NotFound: the search path leads nowhere.
    """
    [(number, text, read_only, current)] = await connection.fetch(_SERVER)
    if number < SERVER_MIN:
        raise Incompatible("the PostgreSQL store", required="PostgreSQL 15 or later", present=f"PostgreSQL {text}")
    if read_only and writes:
        raise StoreReadOnly(location)
    if schema is None and current is None:
        raise NotFound("schema", f"{location}, of the search path")
    return current if schema is None else schema


async def create(connection: Any, tables: Tables, location: str) -> None:
    """Make what is missing. Twice, or two at once, is fine; what is of another format stays as it is."""
    async with connection.transaction():
        await connection.execute(f"select pg_advisory_xact_lock({_LOCK})")
        if not await connection.fetchval("select to_regnamespace($1) is not null", quoted(tables.schema)):
            try:
                await connection.execute(f"create schema {quoted(tables.schema)}")
            except asyncpg.ReservedNameError as error:
                raise InvalidRequest("PostgreSQL keeps such names for itself", path="schema") from error
        meta = tables.names["meta"]
        if await connection.fetchval("select to_regclass($1) is not null", meta):
            await _check_format(connection, tables, location)
        try:
            for statement in tables.create():
                await connection.execute(statement)
        except (asyncpg.UndefinedColumnError, asyncpg.WrongObjectTypeError) as error:
            raise NotADatabase(location) from error
        insert = f"insert into {meta}(key, value) values($1, $2) on conflict(key) do nothing"
        await connection.execute(insert, "format", str(STORAGE_FORMAT))
        await connection.execute(insert, "revision", STORAGE_REVISION)
        await _check_columns(connection, tables, location)


async def check(connection: Any, tables: Tables, location: str, *, writes: bool) -> None:
    """Whether this release can work here, or only look. Changes nothing.

    Raises:
        NotFound: the tables have not been made.
        UnknownFormat: they are of another release.
        NotADatabase: tables of these names are something else.
        Forbidden: the role may not read or write them.
    """
    try:
        there = await connection.fetchval("select to_regclass($1) is not null", tables.names["meta"])
        if not there:
            raise NotFound("store", f"{location}, schema {tables.schema}").advising(
                "Make its tables once, with a role that may: `await PostgresBackend.initialize_schema(dsn)`"
            )
        await _check_format(connection, tables, location)
        await _check_columns(connection, tables, location)
        names = [name for table, name in tables.names.items() if table != "meta"]
        needed = WRITES if writes else READS
        if missing := await connection.fetch(_RIGHTS, names, needed):
            raise _forbidden(location, ", ".join(sorted(name for (name,) in missing)), needed)
    except asyncpg.InsufficientPrivilegeError as error:
        raise _forbidden(location, f"schema {tables.schema}", WRITES if writes else READS) from error


async def check_lease(connection: Any, tables: Tables, location: str) -> None:
    """Whether leases can be renewed over this connection. Changes nothing.

    Raises:
        Forbidden: the role may not do it.
    """
    table = tables.names["owner"]
    try:
        allowed = not await connection.fetch(_RIGHTS, [table], RENEWS)
    except asyncpg.InsufficientPrivilegeError:
        allowed = False
    if not allowed:
        raise Forbidden("renewing leases", identity=f"{location}: {table}").advising(
            f"Grant the role {', '.join(RENEWS)} on it, and usage of its schema"
        )


async def shared(one: Any, other: Any, number: int) -> bool:
    """Whether two connections lead to the same database: what one has locked there, the other cannot lock.

    Args:
        number: the lock, which nobody else has.
    """
    async with one.transaction():
        await one.execute(f"select pg_advisory_xact_lock({number})")
        async with other.transaction():
            return not await other.fetchval(f"select pg_try_advisory_xact_lock({number})")


async def _check_format(connection: Any, tables: Tables, location: str) -> None:
    try:
        rows = dict(await connection.fetch(f"select key, value from {tables.names['meta']}"))  # noqa: S608 - ours
    except asyncpg.UndefinedColumnError as error:
        raise NotADatabase(location) from error
    found, revision = rows.get("format", "missing"), rows.get("revision", "missing")
    supported = f"{STORAGE_FORMAT} ({STORAGE_REVISION})"
    if found != str(STORAGE_FORMAT):
        raise UnknownFormat(location, found=found, supported=supported)
    if revision != STORAGE_REVISION:
        raise UnknownFormat(location, found=f"{found} ({revision})", supported=supported)


async def _check_columns(connection: Any, tables: Tables, location: str) -> None:
    try:
        await connection.execute(tables.probe())
    except (asyncpg.UndefinedColumnError, asyncpg.UndefinedTableError) as error:
        raise NotADatabase(location) from error


def _forbidden(location: str, what: str, needed: tuple[str, ...]) -> Forbidden:
    operation = "reading and writing the store" if needed is WRITES else "reading the store"
    return Forbidden(operation, identity=f"{location}: {what}").advising(
        f"Grant the role {', '.join(needed)} on the store's tables, and usage of its schema"
    )
