"""Reading a SQLite store without leaving a trace, whether a host is running, was killed, or left long ago.

Nothing is created, recovered, migrated or written, and no writer waits for a reader here. A disk that cannot be written
and a copy of the files are read like any store.

Rule 1: what stands beside the file says how it may be read. With log and index, hosts may be there: the index is
mapped for reading only, and SQLite's own locks keep the reading whole. With the log alone (a copy), an index of it is
made in memory. With neither, everything is in the file.
Rule 2: in the last two cases nobody writes, but somebody may begin to. So a reading counts only if the files are the
same after it as before it; else it is made again, and by then the index is there.
Rule 3: a connection lives for one reading. Between two of them nothing is held: no lock, no page, no descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

import apsw

from agentscope_durable.contracts.errors import DurableError, HostClosed, NotFound, StoreBusy, StoreMoved, StoreReadOnly
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.record_store import (
    Committed,
    Decide,
    Reads,
    StoreStatistics,
)
from agentscope_durable.stores.records._clock import RisingClock, StoreClock, SystemClock
from agentscope_durable.stores.records._host_locks import HostLocks
from agentscope_durable.stores.records._sqlite_file import SqliteFile, check_filesystem, read_mounts
from agentscope_durable.stores.records._sqlite_reader import Reader
from agentscope_durable.stores.records._sqlite_readings import SqliteReadings

__all__ = ["SqliteReadOnlyStore"]

ROUNDS: Final = 20
"""How often a reading is made again because somebody began to write during it."""
SUBJECT: Final = "record store"

_IN_FILE: Final = "?mode=ro&immutable=1"
_WITH_HOSTS: Final = "?mode=ro&readonly_shm=1"
# Without the system's locks and shared memory: in exclusive mode the index of the log is made on the heap.
_LOG_ALONE: Final = "?mode=ro&vfs=unix-none"

T = TypeVar("T")


class _Stat(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int


class _Beside(NamedTuple):
    """What stands at a store's place at one moment; equal at two moments means that nobody wrote between them."""

    file: _Stat
    log: _Stat | None
    indexed: bool

    @property
    def how(self) -> str:
        if self.log is None:
            return _IN_FILE
        return _WITH_HOSTS if self.indexed else _LOG_ALONE


class SqliteReadOnlyStore(SqliteReadings):
    """A `RecordStore` that can only be read. Open it with `open`; whatever would write raises `StoreReadOnly`."""

    def __init__(self, file: SqliteFile, clock: RisingClock, locks: HostLocks, environment: Environment) -> None:
        """Internal: use `open`."""
        self._file = file
        self._clock = clock
        self._locks = locks
        self._environment = environment
        self._closed = False
        file_now = self._beside().file
        self._opened = file_now.device, file_now.inode

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = 30.0,
        allow_network_filesystem: bool = False,
        lock_dir: str | os.PathLike[str] | None = None,
        clock: StoreClock | None = None,
        environment: Environment = SYSTEM,
    ) -> Self:
        """Open the store for reading.

        Args:
            path: the database file.
            busy_timeout: seconds to wait for another process's lock before `StoreBusy`.
            allow_network_filesystem: read it there although hosts seem to be using it.
            lock_dir: folder of the hosts' lock files; default `hosts` beside the file.
            clock: the machine's clocks; for tests.
            environment: where threads come from.

        Raises:
            NotFound: there is no such file.
            NotADatabase, UnknownFormat: the file is something else; every byte of it is as it was.
        """
        there = Path(path)

        def look() -> Self:
            # SQLite looks for the log beside the file itself, not beside a link to it.
            file = SqliteFile(Path(os.path.realpath(there)), busy_timeout=busy_timeout, synchronous="FULL")
            locks = HostLocks(there.parent / "hosts" if lock_dir is None else Path(lock_dir))
            store = cls(file, RisingClock(clock or SystemClock()), locks, environment)
            if store._beside().how is _WITH_HOSTS and not allow_network_filesystem:
                check_filesystem(there, read_mounts())
            file.inspect(lambda: store._connect(store._beside().how))
            return store

        return await environment.call_in_thread(look)

    # ------------------------------------------------------------ reading

    async def statistics(self) -> StoreStatistics:
        # Nothing is written here.
        stored_bytes = await self._ask(lambda _: self._file.stored_bytes())
        return StoreStatistics(0, 0, 0, 0, 0, 0, stored_bytes)

    async def dead_owners(self, among: tuple[str, ...] | None = None) -> list[str]:
        if among is None:
            return await self._ask(lambda reader: self._locks.dead(reader.owner_names()))
        return await self._environment.call_in_thread(lambda: self._locks.dead(among))

    async def close(self) -> None:
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ what it does not do

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        raise StoreReadOnly(self._file.location)

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        raise StoreReadOnly(self._file.location)

    def announce(self, owner: str) -> None:
        raise StoreReadOnly(self._file.location)

    async def release(self, owner: str) -> None:
        raise StoreReadOnly(self._file.location)

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        raise StoreReadOnly(self._file.location)

    # ------------------------------------------------------------ one reading

    async def _ask(self, call: Callable[[Reader], T], *, short: bool = False) -> T:
        del short  # each has a snapshot of its own
        if self._closed:
            raise HostClosed(SUBJECT)
        return await self._environment.call_in_thread(lambda: self._reading(call))

    def _reading(self, call: Callable[[Reader], T]) -> T:
        for _ in range(ROUNDS):
            before = self._found()
            try:
                answer = self._once(before.how, call)
            except (apsw.Error, DurableError, UnicodeDecodeError) as error:
                # It may be the error of a moment that has passed.
                if self._holds(before):
                    raise self._file.translate(error) from error
                continue
            if before.how is _WITH_HOSTS or self._holds(before):
                return answer
        raise StoreBusy(self._file.location)

    def _once(self, how: str, call: Callable[[Reader], T]) -> T:
        connection = self._connect(how)
        try:
            return Reader(connection, self._clock).answer(call)
        finally:
            connection.close()

    def _holds(self, before: _Beside) -> bool:
        """Whether a reading made since then was made of one state of the files."""
        now = self._found()
        return now.how is before.how if before.how is _WITH_HOSTS else now == before

    def _connect(self, how: str) -> apsw.Connection:
        connection = self._file.look(how)
        # Closing the last connection would move the log into the file.
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self._file.wait_for_locks(connection)
        connection.execute("pragma trusted_schema=off").fetchall()
        if how is _LOG_ALONE:
            connection.execute("pragma locking_mode=exclusive").fetchall()
        return connection

    def _found(self) -> _Beside:
        """What stands at the place of the store that was opened.

        Raises:
            StoreMoved: nothing, or another store.
        """
        try:
            found = self._beside()
        except NotFound as error:
            raise StoreMoved(self._file.location) from error
        if (found.file.device, found.file.inode) != self._opened:
            raise StoreMoved(self._file.location)
        return found

    def _beside(self) -> _Beside:
        path = self._file.path
        file = _stat(path)
        if file is None:
            raise NotFound("store", self._file.location)
        log = _stat(path.with_name(f"{path.name}-wal"))
        return _Beside(file, log, os.path.lexists(f"{path}-shm"))


def _stat(path: Path) -> _Stat | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Stat(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
