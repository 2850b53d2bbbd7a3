"""Large bodies in a table of the PostgreSQL store: no second system is needed, and a backup holds both.

A body is one row, so it is there entirely or not at all. PostgreSQL keeps it beside the table, uncompressed.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any, Final, Self

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import (
    DurableError,
    HostClosed,
    InvalidRequest,
    NotFound,
    TooLarge,
    Uncertain,
    UsedAfterFork,
    WrongLoop,
)
from agentscope_durable.stores._postgres_connections import Line, check_schema, check_seconds, quoted, source_of
from agentscope_durable.stores._postgres_errors import lost, translate
from agentscope_durable.stores.objects._names import check_limit, check_name, folder_name, not_found, verify

__all__ = ["OBJECT_BYTES_MAX", "PostgresObjectStore"]

OBJECT_BYTES_MAX: Final = 256 * 1024 * 1024
"""PostgreSQL takes 1 GiB in a field, and needs several times that in memory."""
SUBJECT: Final = "object store"


class PostgresObjectStore:
    """An `ObjectStore` in the table `durable_body`, which `PostgresBackend.initialize_schema` makes. Use `open`."""

    persistent = True

    def __init__(self, line: Line, schema: str, *, timeout: float) -> None:
        """Internal: use `open`."""
        self._line = line
        self._schema = schema
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._closed = False
        table = f"{quoted(schema)}.durable_body"
        self._put = f"insert into {table}(scope, name, content) values($1, $2, $3) on conflict do nothing"
        self._get = f"select content from {table} where scope=$1 and name=$2"  # noqa: S608 - a name we quoted
        self._exists = f"select 1 from {table} where scope=$1 and name=$2"  # noqa: S608 - a name we quoted
        self._delete = f"delete from {table} where scope=$1 and name=$2"  # noqa: S608 - a name we quoted
        self._list = f"select name from {table} where scope=$1 and name>$2 order by name limit $3"  # noqa: S608
        self._folders = f"""with recursive f(scope, n) as (
            (select scope, 1 from {table} where scope>$1 order by scope limit 1)
            union all
            select (select b.scope from {table} b where b.scope>f.scope order by b.scope limit 1), f.n + 1
                from f where f.scope is not null and f.n<$2)
            select scope from f where scope is not null order by scope"""  # noqa: S608 - a name we quoted

    @classmethod
    async def open(cls, where: str | Any, *, schema: str | None = None, timeout: float = 60.0) -> Self:
        """Open it where a record store is, or would be.

        Args:
            where: a DSN or an `asyncpg` pool, of which one connection is kept while this is open.
            schema: where the table is; None: the first schema of the connection's search path.
            timeout: seconds that one body may take.

        Raises:
            NotFound: the table has not been made.
            InvalidRequest: an argument can never be right.
        """
        check_seconds(timeout, "timeout")
        if schema is not None:
            check_schema(schema)
        source = source_of(where)
        line = Line(source)
        try:
            connection = await line.connected(opening=True)
            found = await connection.fetchval("select coalesce($1::text, current_schema())", schema)
            name = f"{quoted(found or '')}.durable_body"
            if not found or not await connection.fetchval("select to_regclass($1) is not null", name):
                raise NotFound("object store", f"{source.location}, schema {found}").advising(
                    "Make its tables once, with a role that may: `await PostgresBackend.initialize_schema(dsn)`"
                )
        except Exception as error:
            await line.close()
            raise translate(error, source.location, opening=True) from error
        return cls(line, found, timeout=timeout)

    async def put(self, partition: str, name: str, content: bytes) -> None:
        check_name(name)
        if len(content) > OBJECT_BYTES_MAX:
            raise TooLarge("object", size_bytes=len(content), limit_bytes=OBJECT_BYTES_MAX)
        verify(name, content)
        if await self.exists(partition, name):
            return
        _failpoints.hit("object.put.before")
        await self._ask(self._put, _scope(partition), name.encode(), content, writes=True)
        _failpoints.hit("object.put.after")

    async def get(self, partition: str, name: str) -> bytes:
        check_name(name)
        rows = await self._ask(self._get, _scope(partition), name.encode())
        if not rows:
            raise not_found(name, f"{self._line.location}, schema {self._schema}")
        return verify(name, rows[0][0])

    async def exists(self, partition: str, name: str) -> bool:
        check_name(name)
        return bool(await self._ask(self._exists, _scope(partition), name.encode()))

    async def delete(self, partition: str, name: str) -> None:
        check_name(name)
        await self.remove_from(folder_name(partition), name)

    async def remove_from(self, folder: str, name: str) -> None:
        _failpoints.hit("object.delete.before")
        await self._ask(self._delete, bytes.fromhex(folder), name.encode(), writes=True)
        _failpoints.hit("object.delete.after")

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        return await self.names_in(folder_name(partition), after, limit)

    async def names_in(self, folder: str, after: str = "", limit: int = 1000) -> list[str]:
        check_limit(limit)
        rows = await self._ask(self._list, bytes.fromhex(folder), after.encode(), limit)
        return [name.decode() for (name,) in rows]

    def folder_of(self, partition: str) -> str:
        return folder_name(partition)

    async def folders(self, after: str = "", limit: int = 1000) -> list[str]:
        check_limit(limit)
        return [scope.hex() for (scope,) in await self._ask(self._folders, _after(after), limit)]

    async def close(self) -> None:
        if os.getpid() != self._pid:
            return  # A forked child has nothing of its own to close.
        self._closed = True
        await self._line.close()

    async def _ask(self, statement: str, *arguments: Any, writes: bool = False) -> list[Any]:
        if os.getpid() != self._pid:
            raise UsedAfterFork(SUBJECT)
        if self._closed:
            raise HostClosed(SUBJECT)
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop(SUBJECT)
        line = self._line
        async with line.taken():
            if self._closed:
                raise HostClosed(SUBJECT)
            for last in (False, True):
                sent = False
                try:
                    await line.connected()
                    sent = True
                    return await line.fetch(statement, arguments, timeout=self._timeout)
                except Exception as error:
                    # Each of these may be done twice, and a connection that was idle may have ended long ago.
                    if lost(error) and not last:
                        continue
                    if sent and writes and lost(error):
                        raise Uncertain("the write of an object", reason=type(error).__name__) from error
                    if isinstance(error, DurableError):
                        raise
                    raise translate(error, line.location) from error
        raise AssertionError("unreachable")


def _scope(partition: str) -> bytes:
    """A Session's name is of any length and any characters; its hash is not."""
    return bytes.fromhex(folder_name(partition))


def _after(name: str) -> bytes:
    """What a page of folders goes on after."""
    try:
        return bytes.fromhex(name)
    except ValueError as error:
        raise InvalidRequest("a page goes on after a folder that it gave", path="after") from error
