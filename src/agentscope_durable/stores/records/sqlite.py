"""Records in one SQLite file, for every process of one machine.

One thread writes: changes queue up, and what waits is committed together (`_sqlite_writer`). A few
threads read. A heartbeat writes on a connection of its own and goes before the queue. The event loop
never touches the disk.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, cast, get_args

import apsw

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import (
    HostClosed,
    InvalidRequest,
    StoreBusy,
    StoreFull,
    StoreReadOnly,
    Unavailable,
    Uncertain,
    UsedAfterFork,
)
from agentscope_durable.spi.environment import SYSTEM, Environment, Thread
from agentscope_durable.spi.record_store import (
    LEASE_KEPT_MS,
    Committed,
    Decide,
    Reads,
    StoreStatistics,
)
from agentscope_durable.stores.records._checks import check_reads
from agentscope_durable.stores.records._clock import LeaseRow, RisingClock, StoreClock, SystemClock, judge, lease_row
from agentscope_durable.stores.records._host_locks import HostLocks
from agentscope_durable.stores.records._sqlite_file import (
    SqliteFile,
    Synchronous,
    check_filesystem,
    check_version,
    read_mounts,
)
from agentscope_durable.stores.records._sqlite_reader import Reader
from agentscope_durable.stores.records._sqlite_readings import SqliteReadings
from agentscope_durable.stores.records._sqlite_rows import (
    HOST_P,
    OWNER,
    OWNERS,
    READY_ANY,
    REC,
    REC_DELETE,
    REC_UPSERT,
    Execute,
    owner_lease,
)
from agentscope_durable.stores.records._sqlite_writer import Member, Writer, transaction
from agentscope_durable.stores.records._waiters import Waiter, tell

__all__ = ["SqliteRecordStore"]

log = logging.getLogger("agentscope_durable.stores")

GROUP_MAX = 128
"""Changes committed together at most."""
READ_GROUP_MAX = 16
"""Readings that share a snapshot at most."""
READERS = 2
NAMED_MAX = 10
"""Living hosts that a refused vacuum names."""
SUBJECT = "record store"

T = TypeVar("T")


class _Job(Waiter):
    """Anything else a thread of the store does for a caller."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call


class _ReadJob(Waiter):
    __slots__ = ("call", "short")

    def __init__(self, call: Callable[[Reader], object], *, short: bool) -> None:
        super().__init__()
        self.call = call
        self.short = short


class SqliteRecordStore(SqliteReadings):
    """A `RecordStore` in one file, shared by the processes of one machine. Open it with `open`."""

    def __init__(
        self, file: SqliteFile, clock: RisingClock, locks: HostLocks, *, hold_locks: bool, environment: Environment
    ) -> None:
        """Internal: connects. Use `open`."""
        self._file = file
        self._clock = clock
        self._locks = locks
        self._hold_locks = hold_locks
        self._environment = environment
        self._pid = os.getpid()
        self._closed = False
        self._sweeps = False
        self._entry = threading.Lock()
        # Who writes: the writer's thread or a heartbeat, and how many heartbeats wait.
        self._gate = threading.Lock()
        self._waiting = 0
        self._calm = threading.Event()
        self._calm.set()
        self._changes: queue.SimpleQueue[Member | _Job | None] = queue.SimpleQueue()
        self._readings: queue.SimpleQueue[_ReadJob | _Job | None] = queue.SimpleQueue()
        # The first connection recovers the log of a killed process; the others are then quick.
        self._writer = Writer(file.connect(checkpoints=True), file, clock)
        self._renewer = file.connect()
        self._readers = [Reader(file.connect(readonly=True), clock) for _ in range(READERS)]
        self._reading: list[Thread] = []
        self._writing: Thread | None = None

    def _start(self) -> None:
        start = self._environment.start_thread
        for number, reader in enumerate(self._readers):
            self._reading.append(start(lambda reader=reader: self._read_loop(reader), name=f"sqlite-reader-{number}"))
        self._writing = start(self._write_loop, name="sqlite-writer")

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        busy_timeout: float = 30.0,
        synchronous: Synchronous = "FULL",
        allow_network_filesystem: bool = False,
        lock_dir: str | os.PathLike[str] | None = None,
        withhold_os_lock: bool = False,
        strict: bool = False,
        clock: StoreClock | None = None,
        environment: Environment = SYSTEM,
    ) -> Self:
        """Open the store, creating the file if there is none.

        Args:
            path: the database file.
            busy_timeout: seconds to wait for another process's lock before `StoreBusy`.
            synchronous: FULL survives a power failure; NORMAL survives `kill -9` only.
            allow_network_filesystem: open it there although its locks do not work between machines.
            lock_dir: folder of the hosts' lock files; default `hosts` beside the file.
            withhold_os_lock: hold no lock file, so that only an expired lease tells that this host is gone.
            strict: refuse a SQLite with the WAL-reset defect instead of warning.
            clock: the machine's clocks; for tests.
            environment: where threads come from.

        Raises:
            NotADatabase, UnknownFormat: the file is something else; every byte of it is as it was.
            StoreReadOnly, StoreBusy, StoreFull, Unavailable: it cannot be opened now.
            InvalidRequest: it lies on a network filesystem.
            Incompatible: with `strict`, the SQLite in use can corrupt it.
        """
        there = Path(path)
        if synchronous not in get_args(Synchronous):
            known = ", ".join(get_args(Synchronous))
            raise InvalidRequest(f"synchronous is one of {known}, not {synchronous!r}", path="synchronous")
        if not busy_timeout >= 0:
            raise InvalidRequest(f"a busy_timeout is not {busy_timeout!r} seconds", path="busy_timeout")

        def connect() -> Self:
            check_version(apsw.SQLITE_VERSION_NUMBER, apsw.sqlite_lib_version(), strict=strict)
            if not allow_network_filesystem:
                check_filesystem(there, read_mounts())
            file = SqliteFile(there, busy_timeout=busy_timeout, synchronous=synchronous)
            file.prepare(environment)
            locks = HostLocks(there.parent / "hosts" if lock_dir is None else Path(lock_dir))
            rising = RisingClock(clock or SystemClock())
            try:
                return cls(file, rising, locks, hold_locks=not withhold_os_lock, environment=environment)
            except apsw.Error as error:
                raise file.translate(error) from error

        store = await environment.call_in_thread(connect)
        # Not before: an `open` that is cancelled leaves no threads behind, only connections that are collected.
        store._start()
        return store

    # ------------------------------------------------------------ the port

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        check_reads(reads)
        member = Member(partition, reads, decide)
        self._submit(self._changes, member)
        return cast("Committed", await member.future)

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        self._check_process()

        def write(run: Execute) -> None:
            # Dated when the lock is held: a lease must not lose the time it waited.
            row = lease_row(self._clock, lease_ms, value).encode()
            run(REC_UPSERT[1], (HOST_P, OWNER + owner, row))

        with self._entry:
            self._waiting += 1
            self._calm.clear()
        try:
            if not self._gate.acquire(timeout=self._file.busy_timeout):
                raise StoreBusy(self._file.location)
            try:
                if self._closed:
                    raise HostClosed(SUBJECT)
                renewer = self._renewer
                transaction(renewer, cast("Execute", renewer.execute), self._file, "store.renew", write)
            finally:
                self._gate.release()
        finally:
            with self._entry:
                self._waiting -= 1
                if not self._waiting:
                    self._calm.set()

    async def release(self, owner: str) -> None:
        def write() -> None:
            self._writer.transaction("store.release", lambda run: run(REC_DELETE, (HOST_P, OWNER + owner)))
            self._locks.drop(owner)

        await self._do(write)

    def announce(self, owner: str) -> None:
        """Hold this host's lock file until `release` or the end of the process."""
        self._check_process()
        if self._closed:
            raise HostClosed(SUBJECT)
        self._sweeps = True
        if not self._hold_locks:
            return
        try:
            self._locks.hold(owner)
        except OSError as error:
            raise self._translate(error) from error

    def _translate(self, error: OSError) -> Exception:
        location = str(self._locks.folder)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(location)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnly(location)
        return Unavailable(f"the folder of the hosts' locks {location!r} cannot be used: {error.strerror}")

    async def dead_owners(self, among: tuple[str, ...] | None = None) -> list[str]:
        def look(reader: Reader) -> list[str]:
            if self._sweeps:
                # Once for each host that starts.
                self._sweeps = False
                self._locks.sweep(reader.owner_names)
            return self._locks.dead(reader.owner_names())

        if among is None:
            return await self._ask(look)
        strange = [owner for owner in among if not self._locks.holds(owner)]
        return await self._beside(lambda: self._locks.dead(strange)) if strange else []

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        def remove(run: Execute) -> bool:
            lease = owner_lease(run, owner, self._clock)
            gone = self._locks.dead((owner,)) or (
                lease.remaining_ms <= -LEASE_KEPT_MS and not self._locks.living(owner)
            )
            left = any(run(READY_ANY, (kind, owner)).fetchall() for kind in kinds)
            if not gone or left:
                return not run(REC, (HOST_P, OWNER + owner)).fetchall()
            run(REC_DELETE, (HOST_P, OWNER + owner))
            return True

        def write() -> bool:
            done = [False]
            self._writer.transaction("store.release", lambda run: done.append(remove(run)))
            if done[-1]:
                self._locks.drop(owner)
            return done[-1]

        return bool(await self._do(write))

    async def statistics(self) -> StoreStatistics:
        # The writer's own figures: not waited for, as one may want to know why it is slow.
        return await self._beside(lambda: self._writer.figures.told(self._file.stored_bytes()))

    async def close(self) -> None:
        if os.getpid() != self._pid:
            return  # A forked child has nothing of its own to close.
        with self._entry:
            if not self._closed:
                self._closed = True
                self._changes.put(None)
                for _ in self._readers:
                    self._readings.put(None)
        if self._writing is not None:
            await self._environment.call_in_thread(self._writing.join)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ care of the file

    async def vacuum(self) -> tuple[int, int]:
        """Rewrite the file without its free pages. It locks every writer out meanwhile.

        Returns:
            Bytes before and after, log included.

        Raises:
            Unavailable: a host holds a live lease and is not known to be dead; its heartbeat would be kept waiting.
        """

        def rewrite() -> tuple[int, int]:
            writer, before = self._writer, self._file.stored_bytes()
            alive: list[str] = []
            for key, value in writer.run(OWNERS, (OWNER, -1)).fetchall():
                lease = judge(key, LeaseRow.decode(value), self._clock)
                if lease.alive and not self._locks.dead((key[len(OWNER) :],)):
                    alive.append(key[len(OWNER) :])
            if alive:
                named = ", ".join(repr(owner) for owner in alive[:NAMED_MAX])
                more = f" and {len(alive) - NAMED_MAX} more" if len(alive) > NAMED_MAX else ""
                raise Unavailable(f"the file cannot be rewritten while hosts are alive: {named}{more}").advising(
                    "Stop every host: drain it, then close it. Then run the vacuum again"
                )
            _failpoints.hit("store.commit.before")
            try:
                writer.run("vacuum")
                # It was written to the log; only with that in the file does the file become smaller.
                writer.run("pragma wal_checkpoint(truncate)").fetchall()
            except apsw.Error as error:
                raise self._file.translate(error) from error
            _failpoints.hit("store.commit.after")
            return before, self._file.stored_bytes()

        return cast("tuple[int, int]", await self._do(rewrite))

    async def integrity(self) -> list[str]:
        """What SQLite finds wrong with the file; [] when it is sound."""

        def check(reader: Reader) -> list[str]:
            return [str(line) for (line,) in reader.run("pragma integrity_check") if line != "ok"]

        return await self._ask(check)

    async def settings(self) -> dict[str, str]:
        """The settings in force, read back from the writing connection."""

        def look() -> dict[str, str]:
            names = ("journal_mode", "synchronous", "page_size", "cache_size", "wal_autocheckpoint", "auto_vacuum")
            found = {name: str(self._writer.connection.pragma(name)) for name in names}
            return found | {"sqlite": apsw.sqlite_lib_version(), "apsw": apsw.apsw_version()}

        return cast("dict[str, str]", await self._do(look))

    # ------------------------------------------------------------ threads

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(SUBJECT)

    def _submit(self, where: queue.SimpleQueue[T | None], job: T) -> None:
        self._check_process()
        with self._entry:
            if self._closed:
                raise HostClosed(SUBJECT)
            where.put(job)

    async def _ask(self, call: Callable[[Reader], T], *, short: bool = False) -> T:
        job = _ReadJob(call, short=short)
        self._submit(self._readings, job)
        return cast("T", await job.future)

    async def _beside(self, call: Callable[[], T]) -> T:
        """What lies beside the database, which is not read for it."""
        job = _Job(call)
        self._submit(self._readings, job)
        return cast("T", await job.future)

    async def _do(self, call: Callable[[], object]) -> object:
        job = _Job(call)
        self._submit(cast("queue.SimpleQueue[_Job | None]", self._changes), job)
        return await job.future

    def _read_loop(self, reader: Reader) -> None:
        ended = False
        while not ended and (job := self._readings.get()) is not None:
            # What waits and is short shares a snapshot and a hop: both cost more than most readings do.
            group: list[_ReadJob] = []
            while isinstance(job, _ReadJob) and job.short:
                group.append(job)
                job = None
                if len(group) == READ_GROUP_MAX:
                    break
                try:
                    job = self._readings.get_nowait()
                except queue.Empty:
                    break
                ended = job is None
            if group:
                self._read_together(reader, group)
                tell(group)
            if job is not None:
                self._read(reader, job)
                tell((job,))
        reader.connection.close()

    def _read_together(self, reader: Reader, group: list[_ReadJob]) -> None:
        if len(group) > 1:
            try:
                reader.check_place(self._file)
                with reader.together():
                    for job in group:
                        self._read(reader, job)
                return
            except Exception as error:  # noqa: BLE001 - each of them meets what there is, and tells its caller
                log.debug("%d readings cannot share a snapshot: %r", len(group), error)
        for job in group:
            job.answer, job.error = None, None
            self._read(reader, job)

    def _read(self, reader: Reader, job: _ReadJob | _Job) -> None:
        try:
            if isinstance(job, _Job):
                job.answer = job.call()
            else:
                reader.check_place(self._file)
                job.answer = job.call(reader) if job.short else reader.answer(job.call)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            job.error = self._file.translate(error)

    def _write_loop(self) -> None:
        # A forked child never leaves this frame, so there these connections are never closed.
        writer, renewer = self._writer, self._renewer
        job: Member | _Job | None = None
        while True:
            job = self._changes.get()
            group: list[Member] = []
            while isinstance(job, Member):
                group.append(job)
                if len(group) == GROUP_MAX:
                    break
                try:
                    job = self._changes.get_nowait()
                except queue.Empty:
                    break
            if not self._calm.is_set():
                # Heartbeats go first: one that waits behind a long queue would look dead.
                self._calm.wait(self._file.busy_timeout)
            if group:
                with self._gate:
                    self._commit(group)
                tell(group)
            if job is None:
                break
            if isinstance(job, _Job):
                with self._gate:
                    self._run(job)
                tell((job,))
        for thread in self._reading:
            thread.join()
        with self._gate:
            # The last connection to close moves the log into the file and removes it.
            renewer.close()
            writer.connection.close()
        self._locks.close()

    def _commit(self, group: list[Member]) -> None:
        try:
            self._writer.commit(group)
        except Exception as error:
            log.exception("the store's writer failed in an unforeseen way")
            for member in group:
                member.error = Uncertain("the commit", reason=repr(error))
        for member in group:
            changed = member.error is None and member.written is not None
            self._writer.figures.count(member.began, member.error, changed=changed)

    def _run(self, job: _Job) -> None:
        try:
            job.answer = job.call()
        except Exception as error:  # noqa: BLE001 - it is the caller's
            job.error = self._file.translate(error)
