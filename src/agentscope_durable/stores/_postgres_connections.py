"""Where the PostgreSQL store's connections come from, and how one is kept.

Rule 1: a connection is kept for as long as it works. To take one from a pool for each statement would cost a second
round trip, with which the pool clears it.
Rule 2: what is set for a session is set only where the session is ours: behind a pooler that hands a server to another
client after each transaction, nothing is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from agentscope_durable.contracts.errors import InvalidRequest, Misuse, Unavailable
from agentscope_durable.stores._postgres_driver import asyncpg
from agentscope_durable.stores._postgres_errors import FAULTS, lost, translate

__all__ = [
    "CONNECT_SECONDS",
    "DsnSource",
    "Line",
    "PoolSource",
    "Source",
    "check_schema",
    "check_seconds",
    "heartbeat_source",
    "quoted",
    "source_of",
]

log = logging.getLogger("agentscope_durable.stores")

SESSION_SETTINGS: Final = "set plan_cache_mode = force_generic_plan; set enable_seqscan = off; set jit = off"
"""What suits statements that are short and always the same. Only where the connection is ours from end to end."""
SESSION_RESET: Final = "reset plan_cache_mode; reset enable_seqscan; reset jit"
CONNECT_SECONDS: Final = 10.0
HEARTBEAT: Final = "heartbeat_dsn"
CLOSE_SECONDS: Final = 5.0
POOL_MIN: Final = 6
"""Connections that are kept of a pool: of commits two, of contended Sessions one, of readings two, of bodies one."""
_NO_CERTIFICATE: Final = "the certificate of the server, or one for it, is not accepted"
ANOTHER_LOOP: Final = "the pool belongs to another event loop than the one the store is opened on"
STATEMENT_SECONDS_MAX: Final = 24 * 3600
NAME_BYTES_MAX: Final = 63
"""Of an identifier."""
STATEMENTS_CACHED: Final = 256
"""Prepared statements of a connection: more than the store has texts."""


class Source(Protocol):
    """Gives connections and takes them back."""

    location: str
    path: str
    """The argument it was given as: where an error says that the address is at fault."""

    async def connect(self) -> Any: ...

    async def give_back(self, connection: Any) -> None: ...

    def beside(self) -> Source:
        """The same place for another thread with a loop of its own."""
        ...


class DsnSource:
    """Connections that this store opens and closes.

    Args:
        arguments, named: of `asyncpg.connect`.
        connect: what to call instead of it.
        path: the argument it was given as.
    """

    def __init__(
        self,
        location: str,
        *arguments: Any,
        connect: Callable[..., Any] = asyncpg.connect,
        path: str = "dsn",
        **named: Any,
    ) -> None:
        self.location = location
        self.path = path
        self._connect = connect
        self._arguments = arguments
        self._named = named

    async def connect(self) -> Any:
        named = {"timeout": CONNECT_SECONDS, "statement_cache_size": STATEMENTS_CACHED, **self._named}
        connection = await self._connect(*self._arguments, **named)
        try:
            if not await _direct(connection) and named["statement_cache_size"]:
                # A prepared statement is a thing of a session as well, and there each transaction may have another.
                await connection.close()
                connection = await self._connect(*self._arguments, **(named | {"statement_cache_size": 0}))
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def give_back(self, connection: Any) -> None:
        with contextlib.suppress(*FAULTS):
            await connection.close(timeout=CLOSE_SECONDS)

    def beside(self) -> Source:
        return self


class PoolSource:
    """Connections of a pool that belongs to the application: never closed here."""

    path = "dsn"

    def __init__(self, pool: Any) -> None:
        if pool.get_max_size() < POOL_MIN:
            raise InvalidRequest(
                f"the pool has room for {pool.get_max_size()} connections, and up to {POOL_MIN} of it are kept: "
                f"give it a max_size of {POOL_MIN} and what else uses it",
                path="max_size",
            )
        self._pool = pool
        self.location = _location_of_pool(pool)

    async def connect(self) -> Any:
        loop = getattr(self._pool, "_loop", None)
        if loop is not None and loop is not asyncio.get_running_loop():
            # Before it is tried: a connection that two threads use at once ends the process.
            raise Misuse(ANOTHER_LOOP)
        connection = await self._pool.acquire(timeout=CONNECT_SECONDS)
        try:
            await _direct(connection)
        except BaseException:
            connection.terminate()
            await self.give_back(connection)
            raise
        return connection

    async def give_back(self, connection: Any) -> None:
        # The pool itself may be closed or terminated by now: then it has the connection already.
        with contextlib.suppress(*FAULTS):
            if not connection.is_closed():
                await connection.execute(SESSION_RESET, timeout=CLOSE_SECONDS)
        with contextlib.suppress(*FAULTS):
            await self._pool.release(connection, timeout=CLOSE_SECONDS)

    def beside(self) -> Source:
        # asyncpg has no public way to ask a pool where it connects to, and a heartbeat must not wait for its loop.
        arguments = getattr(self._pool, "_connect_args", None)
        named = getattr(self._pool, "_connect_kwargs", None)
        if arguments is None or named is None:
            raise InvalidRequest(
                "this release of asyncpg does not tell where the pool connects to: pass heartbeat_dsn= as well",
                path="heartbeat_dsn",
            )
        kept = {
            name: value for name, value in named.items() if name not in ("loop", "connection_class", "record_class")
        }
        return DsnSource(self.location, *arguments, connect=getattr(self._pool, "_connect", asyncpg.connect), **kept)


def check_schema(schema: Any) -> str:
    """
    Raises:
        InvalidRequest: no schema can have such a name.
    """
    try:
        size = len(schema.encode()) if isinstance(schema, str) and "\x00" not in schema else 0
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= NAME_BYTES_MAX:
        raise InvalidRequest(f"a schema's name is a text of 1 to {NAME_BYTES_MAX} bytes", path="schema")
    return schema


def check_seconds(seconds: Any, path: str) -> float:
    """
    Raises:
        InvalidRequest: no statement can be given so long.
    """
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not 0 < seconds <= STATEMENT_SECONDS_MAX:
        raise InvalidRequest(f"it is a number of seconds over 0, up to {STATEMENT_SECONDS_MAX}", path=path)
    return seconds


def quoted(name: str) -> str:
    """A name as an identifier in a statement."""
    return '"' + name.replace('"', '""') + '"'


def source_of(where: Any) -> Source:
    """A source for a DSN or for a pool of the application's."""
    if isinstance(where, str):
        return DsnSource(_location_of_dsn(where, "dsn"), where)
    if isinstance(where, asyncpg.Pool):
        return PoolSource(where)
    raise InvalidRequest(f"a store is opened by a DSN or an asyncpg pool, not a {type(where).__name__}", path="dsn")


def heartbeat_source(dsn: Any) -> Source:
    """A source for where leases are renewed. Errors say that it is this one."""
    if not isinstance(dsn, str):
        raise InvalidRequest(f"leases are renewed at a DSN, not a {type(dsn).__name__}", path=HEARTBEAT)
    return DsnSource(f"{_location_of_dsn(dsn, HEARTBEAT)}, the {HEARTBEAT}", dsn, path=HEARTBEAT)


async def _direct(connection: Any) -> bool:
    """Whether the session is ours from end to end; if so, it is set up for what the store sends."""
    direct = await connection.fetchval("select pg_backend_pid()") == connection.get_server_pid()
    if direct:
        await connection.execute(SESSION_SETTINGS)
    return direct


class Line:
    """One connection that is kept, for one user after the other, first come first served.

    Args:
        source: where it comes from.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._lock = asyncio.Lock()
        self._connection: Any = None
        self._waiting = 0

    @property
    def location(self) -> str:
        return self._source.location

    @property
    def busy(self) -> int:
        """Who uses it or waits for it."""
        return self._waiting

    @asynccontextmanager
    async def taken(self) -> AsyncGenerator[Line]:
        """Nobody else uses it meanwhile."""
        self._waiting += 1
        try:
            async with self._lock:
                yield self
        finally:
            self._waiting -= 1

    async def connected(self, *, opening: bool = False) -> Any:
        """The connection, made now if there is none. Nothing was sent when this fails.

        Args:
            opening: the store is being opened, so that what is refused is the caller's to correct.
        """
        connection = self._connection
        if connection is None or connection.is_closed():
            await self.drop()
            try:
                connection = self._connection = await self._source.connect()
            except Exception as error:
                raise _unconnected(error, self._source, opening=opening) from error
        return connection

    async def fetch(self, statement: str, arguments: Sequence[Any], *, timeout: float) -> list[Any]:
        connection = self._connection
        try:
            return await connection.fetch(statement, *arguments, timeout=timeout)
        except BaseException as error:
            if lost(error):
                await self.drop()
            raise

    async def run(self, script: str, *, timeout: float) -> None:
        """Statements without arguments or rows."""
        connection = self._connection
        try:
            await connection.execute(script, timeout=timeout)
        except BaseException as error:
            if lost(error):
                await self.drop()
            raise

    async def drop(self) -> None:
        """Let a connection go that may not work any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            if not connection.is_closed():
                connection.terminate()
            await self._source.give_back(connection)

    async def close(self) -> None:
        async with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                await self._source.give_back(connection)


def _unconnected(error: Exception, source: Source, *, opening: bool) -> BaseException:
    location = source.location
    if "different loop" in str(error):
        return Misuse(ANOTHER_LOOP)
    if isinstance(error, asyncpg.InterfaceError) and "not initialized" in str(error):
        return Misuse("the pool has not been opened: `await asyncpg.create_pool(...)`, or enter it")
    if isinstance(error, ValueError):
        if not opening:
            # The address was one. A file it names, of certificates or of passwords, is being replaced.
            unavailable = Unavailable(f"the store {location!r} cannot be connected to: {type(error).__name__}")
            return unavailable.advising("Look at the files that its address names, of certificates and passwords")
        what = _NO_CERTIFICATE if isinstance(error, ssl.SSLError) else "this is no address of a PostgreSQL server"
        return InvalidRequest(f"{what}: {type(error).__name__}", path=source.path)
    if opening and (never := _never(error)):
        return InvalidRequest(never, path=source.path)
    return translate(error, location, opening=opening)


def _never(error: Exception) -> str:
    """Why the server would refuse this address tomorrow as well; "" if it might not. No value of it is told."""
    state = getattr(error, "sqlstate", None) if isinstance(error, asyncpg.PostgresError) else None
    if state == "42704":
        return f"an option of the address is unknown to the server: {error}"
    if state in ("22023", "42601"):
        return f"an option of the address has a value that the server does not take ({state})"
    if type(error) is ConnectionError and "rejected SSL" in str(error):
        return "the address asks for TLS, and the server has none"
    return ""


def _location_of_dsn(dsn: str, path: str) -> str:
    """Host and database for people; never a password."""
    try:
        parts = urlsplit(dsn)
    except ValueError:
        # Not with its text: a password may stand in it.
        raise InvalidRequest("this is no address of a PostgreSQL server", path=path) from None
    if parts.scheme not in ("postgres", "postgresql"):
        raise InvalidRequest("a DSN begins with postgresql://", path=path)
    host = parts.netloc.rpartition("@")[2] or "local"
    return f"postgresql://{host}{parts.path}"


def _location_of_pool(pool: Any) -> str:
    arguments: Sequence[Any] = getattr(pool, "_connect_args", None) or ()
    named: dict[str, Any] = getattr(pool, "_connect_kwargs", None) or {}
    if arguments and isinstance(arguments[0], str):
        with contextlib.suppress(InvalidRequest):
            return _location_of_dsn(arguments[0], "dsn")
    if named.get("host"):
        return f"postgresql://{named['host']}:{named.get('port') or 5432}/{named.get('database') or ''}"
    return "postgresql"
