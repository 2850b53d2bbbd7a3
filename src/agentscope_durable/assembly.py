"""Concrete parts put together, so that an application names one thing.

async with LocalBackend.open("./durable") as backend: ...      # or: backend = await LocalBackend.open("./durable")
async with PostgresBackend.open("postgresql://app@db/app") as backend: ...
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from agentscope_durable.backend.policy import check_policy
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import InvalidRequest, NotFound, StoreReadOnly
from agentscope_durable.contracts.views import VacuumReceipt
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.spi import live
from agentscope_durable.spi.backend import Wakeups
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.object_store import CheckedObjectStore, ObjectStore
from agentscope_durable.spi.policy import CommitPolicy
from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.transports.machine import MachineBus, MachineLiveEvents

__all__ = ["LiveEvents", "LocalBackend", "MemoryBackend", "PostgresBackend"]

B = TypeVar("B", bound=TransactionalSessionBackend)

DATABASE = "durable.db"
OBJECTS = "objects"
SOCKETS = "live"


class LiveEvents:
    """Where previews travel."""

    @staticmethod
    def local() -> LocalLiveEvents:
        """Within the runtimes that are given this object, in one process (ST-24)."""
        return LocalLiveEvents()

    @staticmethod
    def machine(directory: str | os.PathLike[str], *, environment: Environment = SYSTEM) -> MachineLiveEvents:
        """Between all processes of this machine that name the same folder (D22), best effort.

        `LocalBackend` uses its own folder by itself. This is for a store that is somewhere else: give the folder to
        every runtime, and `close` what this returns in the end.
        """
        return MachineBus(Path(directory), environment=environment).live


class LocalBackend(TransactionalSessionBackend):
    """Everything in one folder of this machine: SQLite for records, files for large bodies (or an object store).

    All processes of the machine may open the same folder.
    """

    @staticmethod
    def open(
        directory: str | os.PathLike[str],
        *,
        create: bool = True,
        read_only: bool = False,
        wakeups: Wakeups | None = None,
        live_events: live.LiveEvents | None = None,
        policy: CommitPolicy | None = None,
        object_store: ObjectStore | None = None,
        environment: Environment = SYSTEM,
        **sqlite: Any,
    ) -> _Opening[LocalBackend]:
        """Open the folder, creating it if there is none. Await the result, or use it with `async with`.

        Args:
            directory: holds `durable.db`, `objects/`, `hosts/` and `live/`.
            create: make a store where there is none; False raises `NotFound` there.
            read_only: nothing is created, written, migrated or locked, and what would write raises `StoreReadOnly`.
                Works while hosts are running, after they were killed, and on a copy or a disk that cannot be written.
            wakeups: transport of change hints; by default between the processes that have the folder open.
            live_events: transport of previews; by default between these processes, too.
            policy: authorisation inside the transaction (BE-18).
            object_store: where bodies over 64 KiB go; by default files in `objects/`. Always give the same one: bodies
                do not move. It is the application's, and is not closed with the backend (OB-03).
            environment: time, chance and threads.
            sqlite: options of `SqliteRecordStore.open`: busy_timeout, synchronous, allow_network_filesystem, strict;
                of a store that is only read: busy_timeout, allow_network_filesystem.

        Raises:
            NotFound: there is no store, and none is to be made.
            NotADatabase, UnknownFormat: what is there is something else; it is left as it is.
            InvalidRequest, Misuse: an argument can never be right.
        """
        _check_parts(object_store, policy)
        place = _Place(Path(directory), create=create and not read_only, read_only=read_only)
        return _Opening(lambda: _open_local(place, wakeups, live_events, policy, object_store, environment, sqlite))

    def __init__(
        self, records: RecordStore, objects: ObjectStore, *, bus: MachineBus | None = None, **options: Any
    ) -> None:
        """Internal: use `open`."""
        super().__init__(records, objects, **options)
        self._bus = bus

    async def vacuum(self) -> VacuumReceipt:
        """Rewrite the database without the room that is no longer used (D6). Nobody can write meanwhile.

        Raises:
            Unavailable: a host is alive; stop all of them first.
            StoreReadOnly: it was opened to be read only.
        """
        from agentscope_durable.stores.records.sqlite import SqliteRecordStore

        if not isinstance(self.records, SqliteRecordStore):
            raise StoreReadOnly("this store")
        before, after = await self.records.vacuum()
        return VacuumReceipt(before_bytes=before, after_bytes=after)

    async def close(self) -> None:
        await super().close()
        if self._bus is not None:
            await self._bus.close()

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Opening(Generic[B]):
    """What `open` gives: nothing is opened before it is awaited or entered."""

    def __init__(self, call: Callable[[], Awaitable[B]]) -> None:
        self._call = call
        self._backend: B | None = None

    def __await__(self) -> Generator[Any, None, B]:
        return self._call().__await__()

    async def __aenter__(self) -> B:
        self._backend = await self._call()
        return self._backend

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._backend is not None:
            await self._backend.close()


async def _open_local(
    place: _Place,
    wakeups: Wakeups | None,
    live_events: live.LiveEvents | None,
    policy: CommitPolicy | None,
    objects: ObjectStore | None,
    environment: Environment,
    sqlite: dict[str, Any],
) -> LocalBackend:
    directory = place.directory
    await environment.call_in_thread(place.prepare)
    if isinstance(objects, CheckedObjectStore) and not place.read_only:
        await objects.check()
    # SQLite is loaded when a store is opened, not when the name `LocalBackend` is (D29).
    records: RecordStore
    options: dict[str, Any] = {"environment": environment, **sqlite}
    if place.read_only:
        from agentscope_durable.stores.records.sqlite_read_only import SqliteReadOnlyStore

        records = await SqliteReadOnlyStore.open(directory / DATABASE, **options)
    else:
        from agentscope_durable.stores.records.sqlite import SqliteRecordStore

        records = await SqliteRecordStore.open(directory / DATABASE, **options)
    bus = None
    if wakeups is None or live_events is None:
        bus = MachineBus(directory / SOCKETS, environment=environment, read_only=place.read_only)
        try:
            await bus.opened()
        except BaseException:
            await records.close()
            await bus.close()
            raise
    return LocalBackend(
        records,
        objects or FileObjectStore(directory / OBJECTS),
        bus=bus,
        wakeups=wakeups or (bus and bus.wakeups),
        live_events=live_events or (bus and bus.live),
        policy=policy,
        environment=environment,
        owns_store=True,
    )


def _check_parts(object_store: ObjectStore | None, policy: CommitPolicy | None) -> None:
    """Before anything is opened, so that nothing stays open; and by the names these have here."""
    if object_store is not None and not isinstance(getattr(object_store, "persistent", None), bool):
        raise InvalidRequest(
            f"an object store declares whether it is `persistent`; {type(object_store).__name__} does not",
            path="object_store",
        )
    check_policy(policy)


class _Place(NamedTuple):
    """A folder, and what may be done to it."""

    directory: Path
    create: bool
    read_only: bool

    def prepare(self) -> None:
        if self.create:
            _make_folder(self.directory)
            return
        try:
            there = (self.directory / DATABASE).exists()
        except (OSError, ValueError) as error:
            raise InvalidRequest(
                f"the folder {str(self.directory)!r} cannot be read: {error}", path="directory"
            ) from error
        if not there:
            raise NotFound("store", str(self.directory))


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise StoreReadOnly(str(directory)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"the folder {str(directory)!r} cannot be made: {reason}", path="directory") from error


class MemoryBackend(TransactionalSessionBackend):
    """Everything in this process's memory: for tests and for trying things out. Nothing survives it."""

    def __init__(
        self,
        *,
        wakeups: Wakeups | None = None,
        policy: CommitPolicy | None = None,
        environment: Environment = SYSTEM,
    ) -> None:
        from agentscope_durable.stores.records.memory import MemoryRecordStore

        super().__init__(
            MemoryRecordStore(),
            wakeups=wakeups or LocalWakeups(),
            policy=policy,
            environment=environment,
            owns_store=True,
        )


class PostgresBackend(TransactionalSessionBackend):
    """Everything in one schema of a PostgreSQL database, 15 or later: records, and large bodies beside them.

    Any number of hosts on any number of machines may open it. It needs the extra `[postgres]`.
    """

    @staticmethod
    def open(
        where: str | Any,
        *,
        schema: str | None = None,
        initialize_schema: bool = False,
        read_only: bool = False,
        object_store: ObjectStore | None = None,
        wakeups: Wakeups | None = None,
        live_events: live.LiveEvents | None = None,
        policy: CommitPolicy | None = None,
        heartbeat_dsn: str | None = None,
        statement_timeout: float = 30.0,
        environment: Environment = SYSTEM,
    ) -> _Opening[PostgresBackend]:
        """Open the database. Await the result, or use it with `async with`.

        Nothing is made there: `initialize_schema` is a step of the deployment (PG-03, PG-04).

        Args:
            where: a DSN, `postgresql://user@host/database`, or a pool made by `asyncpg.create_pool`. Of a pool up to
                six connections are kept while this is open; it is not closed with it, and must be closed after it.
            schema: where the tables are; None: the first schema of the connection's search path (PG-06).
            initialize_schema: make the tables where they are missing; for development (PG-05).
            read_only: nothing is written, so a hot standby will do, and a role that may only select; what would write
                raises `StoreReadOnly`.
            object_store: where bodies over 64 KiB go, not closed with the backend; None: a table beside the records.
            wakeups: transport of change hints between hosts; by default they stay within this process, and other hosts
                find what changed by polling (PG-08). It is not closed with the backend.
            live_events: transport of previews; by default within this process.
            policy: authorisation inside the transaction (BE-18).
            heartbeat_dsn: where leases are renewed, over a connection of their own: another way to the same database;
                None: as `where` says.
            statement_timeout: seconds that one statement may take.
            environment: time, chance and threads.

        Raises:
            MissingExtra: asyncpg is not installed.
            NotFound: there is no such database or schema, or no store in it.
            UnknownFormat, NotADatabase: what is there is of another release, or something else; it is left as it is.
            Forbidden: the role or its password is refused, or lacks a right.
            StoreReadOnly: the server is a standby, or takes no writes, and not only reading was asked for.
            Incompatible: the server is older than PostgreSQL 15.
            Unavailable: it cannot be reached now.
            InvalidRequest, Misuse: an argument can never be right, or not with another one; or `heartbeat_dsn` leads to
                another database.
        """
        if read_only and initialize_schema:
            raise InvalidRequest("who only reads makes no tables", path="initialize_schema")
        _check_parts(object_store, policy)

        async def opened() -> PostgresBackend:
            from agentscope_durable.stores.objects.postgres import PostgresObjectStore
            from agentscope_durable.stores.records.postgres import PostgresReadOnlyStore, PostgresRecordStore

            records = await (PostgresReadOnlyStore if read_only else PostgresRecordStore).open(
                where,
                schema=schema,
                initialize_schema=initialize_schema,
                heartbeat_dsn=heartbeat_dsn,
                statement_timeout=statement_timeout,
                environment=environment,
            )
            own: ObjectStore | None = None
            try:
                if isinstance(object_store, CheckedObjectStore) and not read_only:
                    await object_store.check()
                if object_store is None:
                    own = await PostgresObjectStore.open(where, schema=records.schema, timeout=statement_timeout)
            except BaseException:
                await records.close()
                raise
            return PostgresBackend(
                records,
                object_store or own,
                own_objects=own,
                wakeups=wakeups or LocalWakeups(),
                live_events=live_events or LiveEvents.local(),
                policy=policy,
                environment=environment,
                owns_store=True,
            )

        return _Opening(opened)

    @staticmethod
    async def initialize_schema(where: str | Any, *, schema: str | None = None) -> None:
        """Make the tables: a step of the deployment, by a role that may create them. Twice, or two at once, is fine.

        Args:
            where: a DSN or an `asyncpg` pool.
            schema: where to, made if there is none; None: the first schema of the connection's search path.

        Raises:
            MissingExtra: asyncpg is not installed.
            UnknownFormat, NotADatabase: what is there is of another release, or something else; it is left as it is.
            Forbidden: the role may not do it.
        """
        from agentscope_durable.stores.records.postgres import PostgresRecordStore

        await PostgresRecordStore.initialize_schema(where, schema=schema)

    def __init__(
        self, records: RecordStore, objects: ObjectStore | None, *, own_objects: ObjectStore | None, **options: Any
    ) -> None:
        """Internal: use `open`."""
        super().__init__(records, objects, **options)
        self._own_objects = own_objects

    async def close(self) -> None:
        """Close what this opened itself: neither a pool, nor an object store, nor wakeups that were passed (PG-09)."""
        await super().close()
        if self._own_objects is not None:
            await self._own_objects.close()

    async def __aenter__(self) -> PostgresBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
