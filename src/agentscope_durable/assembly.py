"""Concrete parts put together, so that an application names one thing.

async with LocalBackend.open("./durable") as backend: ...      # or: backend = await LocalBackend.open("./durable")
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

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

__all__ = ["LiveEvents", "LocalBackend", "MemoryBackend"]

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
    ) -> _Opening:
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
        """
        place = _Place(Path(directory), create=create and not read_only, read_only=read_only)
        return _Opening(place, wakeups, live_events, policy, object_store, environment, sqlite)

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


class _Opening:
    """What `LocalBackend.open` gives: nothing is opened before it is awaited or entered."""

    def __init__(
        self,
        place: _Place,
        wakeups: Wakeups | None,
        live_events: live.LiveEvents | None,
        policy: CommitPolicy | None,
        objects: ObjectStore | None,
        environment: Environment,
        sqlite: dict[str, Any],
    ) -> None:
        self._place = place
        self._wakeups = wakeups
        self._live_events = live_events
        self._policy = policy
        self._objects = objects
        self._environment = environment
        self._sqlite = sqlite
        self._backend: LocalBackend | None = None

    def __await__(self) -> Generator[Any, None, LocalBackend]:
        return self._open().__await__()

    async def __aenter__(self) -> LocalBackend:
        self._backend = await self._open()
        return self._backend

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._backend is not None:
            await self._backend.close()

    async def _open(self) -> LocalBackend:
        place, directory = self._place, self._place.directory
        await self._environment.call_in_thread(place.prepare)
        if isinstance(self._objects, CheckedObjectStore) and not place.read_only:
            await self._objects.check()
        # SQLite is loaded when a store is opened, not when the name `LocalBackend` is (D29).
        records: RecordStore
        options: dict[str, Any] = {"environment": self._environment, **self._sqlite}
        if place.read_only:
            from agentscope_durable.stores.records.sqlite_read_only import SqliteReadOnlyStore

            records = await SqliteReadOnlyStore.open(directory / DATABASE, **options)
        else:
            from agentscope_durable.stores.records.sqlite import SqliteRecordStore

            records = await SqliteRecordStore.open(directory / DATABASE, **options)
        bus = None
        if self._wakeups is None or self._live_events is None:
            bus = MachineBus(directory / SOCKETS, environment=self._environment, read_only=place.read_only)
            try:
                await bus.opened()
            except BaseException:
                await records.close()
                await bus.close()
                raise
        return LocalBackend(
            records,
            self._objects or FileObjectStore(directory / OBJECTS),
            bus=bus,
            wakeups=self._wakeups or (bus and bus.wakeups),
            live_events=self._live_events or (bus and bus.live),
            policy=self._policy,
            environment=self._environment,
            owns_store=True,
        )


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
