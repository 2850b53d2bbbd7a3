"""Records in a PostgreSQL database, for every process of every machine that can reach it.

Changes queue in lanes and what waits is committed together (`_postgres_lanes`). Readings have connections of their own,
and so has the heartbeat, in a thread. What the store's clock shows is the server's.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import (
    DurableError,
    HostClosed,
    InvalidRequest,
    StoreReadOnly,
    UsedAfterFork,
    WrongLoop,
)
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.inspection import DamagePage, StoreCondition
from agentscope_durable.spi.record_store import (
    LEASE_KEPT_MS,
    PAGE_MAX,
    Capabilities,
    Committed,
    Decide,
    OwnerLease,
    PartitionSize,
    Reads,
    ReadyItem,
    ReadyPage,
    ReadyRow,
    ReadyScan,
    Records,
    SessionScan,
    StoreStatistics,
)
from agentscope_durable.stores._postgres_connections import (
    Line,
    Source,
    check_schema,
    check_seconds,
    heartbeat_source,
    source_of,
)
from agentscope_durable.stores._postgres_errors import lost, translate
from agentscope_durable.stores.records._checks import check_found, check_limit, check_reads
from agentscope_durable.stores.records._postgres_clock import ServerClock, judged
from agentscope_durable.stores.records._postgres_group import Member
from agentscope_durable.stores.records._postgres_heartbeat import Renewer
from agentscope_durable.stores.records._postgres_inspection import (
    KINDS,
    SERVER,
    UNUSABLE_INDEXES,
    condition,
    damaged,
    ready_rows,
)
from agentscope_durable.stores.records._postgres_lanes import Lanes
from agentscope_durable.stores.records._postgres_reading import NO_BOUND, above, encoded, prefix_end
from agentscope_durable.stores.records._postgres_readings import Readings
from agentscope_durable.stores.records._postgres_schema import check, check_lease, create, schema_of, shared
from agentscope_durable.stores.records._postgres_tables import Tables

__all__ = ["PostgresReadOnlyStore", "PostgresRecordStore"]

READERS: Final = 2
SUBJECT: Final = "record store"

T = TypeVar("T")


class PostgresRecordStore:
    """A `RecordStore` in one schema of a PostgreSQL database. Open it with `open`."""

    writes: ClassVar[bool] = True
    """Whether opening asks for a server and a role that may."""

    def __init__(
        self,
        source: Source,
        beside: Source | None,
        tables: Tables,
        *,
        patience: float = 30.0,
        environment: Environment = SYSTEM,
        clock: ServerClock | None = None,
    ) -> None:
        """Internal: use `open`."""
        self._source = source
        self._tables = tables
        self._patience = patience
        self._environment = environment
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._clock = clock or ServerClock()
        self._lanes = Lanes(tables, source, self._clock, patience=patience)
        self._readers = [Line(source) for _ in range(READERS)]
        self._readings = Readings(self._ask, tables, self._clock, at_once=READERS)
        self._renewer = Renewer(lambda: beside or source.beside(), tables.renew, environment)

    @classmethod
    async def open(
        cls,
        where: str | Any,
        *,
        schema: str | None = None,
        initialize_schema: bool = False,
        heartbeat_dsn: str | None = None,
        statement_timeout: float = 30.0,
        environment: Environment = SYSTEM,
    ) -> Self:
        """Open the store. It only looks: no table is made, unless that is asked for.

        Args:
            where: a DSN, `postgresql://user@host/database`, or an `asyncpg` pool, which is not closed with the store.
                Of a pool up to five connections are kept for as long as the store is open.
            schema: where the tables are; None: the first schema of the connection's search path.
            initialize_schema: make the tables where they are missing; for development.
            heartbeat_dsn: where leases are renewed; None: as `where` says. They are renewed over a connection of their
                own, not over one of the pool.
            statement_timeout: seconds that one statement may take.
            environment: where threads come from.

        Raises:
            NotFound: there is no such database or schema, or no store in it.
            UnknownFormat, NotADatabase: what is there is of another release, or something else; it is left as it is.
            Forbidden: the role or its password is refused, or lacks a right.
            StoreReadOnly: the server is a standby, or takes no writes.
            Incompatible: the server is older than PostgreSQL 15.
            Unavailable: it cannot be reached now.
            InvalidRequest: an argument can never be right: an address, a name, a number; or `heartbeat_dsn` leads to
                another database.
        """
        check_seconds(statement_timeout, "statement_timeout")
        source = source_of(where)
        beside = None if heartbeat_dsn is None else heartbeat_source(heartbeat_dsn)
        tables = await _looked_at(source, schema, make=initialize_schema, writes=cls.writes)
        if beside is not None and cls.writes:
            await _same_place(source, beside, tables, environment)
        return cls(source, beside, tables, patience=statement_timeout, environment=environment)

    @staticmethod
    async def initialize_schema(where: str | Any, *, schema: str | None = None) -> None:
        """Make the tables: a step of the deployment, by a role that may create them. Twice, or two at once, is fine.

        Args:
            where: as for `open`.
            schema: where to; made if there is none. None: the first schema of the connection's search path.

        Raises:
            UnknownFormat, NotADatabase: what is there is of another release, or something else; it is left as it is.
            Forbidden: the role may not do it.
        """
        await _looked_at(source_of(where), schema, make=True, writes=True)

    @property
    def schema(self) -> str:
        """Where the tables are."""
        return self._tables.schema

    @property
    def location(self) -> str:
        """Host and database, for people."""
        return self._source.location

    # ------------------------------------------------------------ the port

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=True, shared=True, hosts_shared=True)

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        self._check()
        check_reads(reads)
        encoded(partition, "partition")
        member = Member(partition, reads, decide)
        self._lanes.put(member)
        return await member.future

    async def read(self, partition: str, reads: Reads) -> Records:
        self._check()
        check_reads(reads)
        encoded(partition, "partition")
        return await self._readings.read(partition, reads)

    async def watermarks(self, partitions: Sequence[str]) -> list[int]:
        names = [encoded(partition, "partition") for partition in partitions]
        return [last for (last,) in await self._ask(self._tables.watermarks, names)]

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        check_limit(scan.limit)
        due_ms, partition, item = scan.after or (-NO_BOUND, "", "")
        rows = await self._ask(
            self._tables.ready,
            *(scan.kind.encode(), scan.klass.encode(), self._clock.now()),
            *(due_ms, partition.encode(), item.encode(), scan.limit),
        )
        items: list[ReadyItem] = []
        next_due_ms, now_ms = None, 0
        for name, item, value, due, rev, ms in rows:
            if name is None:
                next_due_ms, now_ms = due, ms
                continue
            items.append(ReadyItem(name.decode(), item.decode(), value.decode(), due, scan.klass))
            # Whoever made it ready may be another host: what is tried on a head that is out of date is tried in vain.
            self._lanes.seen(items[-1].partition, rev)
        self._clock.witness(now_ms)
        return ReadyPage(items, now_ms, next_due_ms)

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        check_limit(limit)
        low, high = above(after, prefix), prefix_end(prefix.encode())
        rows = await self._ask(self._tables.ready_classes, kind.encode(), low, high, limit)
        return [klass.decode() for (klass,) in rows]

    async def sessions(self, scan: SessionScan) -> list[str]:
        check_limit(scan.limit)
        # The partition of no Session has the empty name.
        low = above(scan.after, scan.prefix) or b"\x00"
        rows = await self._ask(self._tables.sessions, low, prefix_end(scan.prefix.encode()), scan.limit)
        return [name.decode() for (name,) in rows]

    async def holders(self, key: str, limit: int = 2) -> list[str]:
        check_found(key)
        check_limit(limit)
        return [name.decode() for (name,) in await self._ask(self._tables.holders, encoded(key), limit)]

    async def owners(self, after: str = "", limit: int = PAGE_MAX) -> list[OwnerLease]:
        check_limit(limit)
        rows = await self._ask(self._tables.owners, after.encode(), limit)
        return [judged(name.decode(), renewed, lease, value, now) for name, renewed, lease, value, now in rows]

    def announce(self, owner: str) -> None:
        """Nothing tells of a process on another machine that it is gone, but its lease."""
        self._check_process()
        encoded(owner, "owner")

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        self._check_process()
        self._renewer.renew(encoded(owner, "owner"), lease_ms, value)

    async def release(self, owner: str) -> None:
        await self._change(self._tables.release, encoded(owner, "owner"))

    async def dead_owners(self, among: tuple[str, ...] | None = None) -> list[str]:
        self._check()
        return []

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        arguments = encoded(owner, "owner"), [kind.encode() for kind in kinds], LEASE_KEPT_MS
        [(gone,)] = await self._change(self._tables.forget, *arguments)
        return bool(gone)

    async def measure(self, partition: str) -> PartitionSize:
        rows = await self._ask(self._tables.measure, encoded(partition, "partition"))
        if not rows:
            return PartitionSize(0, 0, 0, 0, 0)
        [(head_bytes, commits, log_bytes, records, record_bytes)] = rows
        return PartitionSize(commits, log_bytes, records, record_bytes, head_bytes)

    async def statistics(self) -> StoreStatistics:
        [(stored_bytes,)] = await self._ask(self._tables.stored_bytes)
        return self._lanes.figures.told(stored_bytes)

    # ------------------------------------------------------------ how it is

    async def condition(self, *, deep: bool) -> StoreCondition:
        del deep  # What the server says of itself is the same; `damaged` reads every row.
        [row] = await self._ask(SERVER)
        invalid = [name for (name,) in await self._ask(UNUSABLE_INDEXES, self.schema)]
        return condition(row, invalid, schema=self.schema)

    async def damaged(self, partition: str, after: tuple[int, int] | None, limit: int) -> DamagePage:
        check_limit(limit)
        name = encoded(partition, "partition")
        return damaged(await self._ask(self._tables.log_rows, name, *(after or (-1, -1)), limit), after, limit)

    async def ready_of(self, partition: str) -> list[ReadyRow]:
        kinds = [kind.encode() for kind in KINDS]
        return ready_rows(await self._ask(self._tables.ready_of, encoded(partition, "partition"), kinds))

    # ------------------------------------------------------------ its end

    async def close(self) -> None:
        """Finish what is under way and close the store's own connections; a pool that was passed stays open."""
        if os.getpid() != self._pid:
            return  # A forked child has nothing of its own to close.
        self._closed = True
        await self._readings.close()
        await self._lanes.close()
        for line in self._readers:
            await line.close()
        await self._environment.call_in_thread(self._renewer.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ statements

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(SUBJECT)
        if self._closed:
            raise HostClosed(SUBJECT)

    def _check(self) -> None:
        self._check_process()
        if asyncio.get_running_loop() is not self._loop:
            raise WrongLoop(SUBJECT)

    async def _ask(self, statement: str, *arguments: Any) -> list[Any]:
        """The rows of a statement that only reads."""
        self._check()
        line = min(self._readers, key=lambda line: line.busy)
        async with line.taken():
            self._check()
            for last in (False, True):
                try:
                    await line.connected()
                    return await line.fetch(statement, arguments, timeout=self._patience)
                except Exception as error:
                    # A connection that was idle may have ended long ago.
                    if last or isinstance(error, DurableError) or not lost(error):
                        raise translate(error, self._source.location) from error
        raise AssertionError("unreachable")

    async def _change(self, statement: str, *arguments: Any) -> list[Any]:
        """A small change of its own, that may happen twice."""
        _failpoints.hit("store.release.before")
        rows = await self._ask(statement, *arguments)
        _failpoints.hit("store.release.after")
        return rows


class PostgresReadOnlyStore(PostgresRecordStore):
    """The same where nothing may be written: on a hot standby, or by a role that may only select.

    Whatever would write raises `StoreReadOnly`. A standby shows what it has received of the primary: whole, in order,
    and perhaps a little late. So a host may look dead here that is not; nothing follows from it, for whoever only
    reads takes nothing over.
    """

    writes: ClassVar[bool] = False

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        raise StoreReadOnly(self.location)

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        raise StoreReadOnly(self.location)

    def announce(self, owner: str) -> None:
        raise StoreReadOnly(self.location)

    async def release(self, owner: str) -> None:
        raise StoreReadOnly(self.location)

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        raise StoreReadOnly(self.location)


async def _looked_at(source: Source, schema: str | None, *, make: bool, writes: bool) -> Tables:
    if schema is not None:
        check_schema(schema)
    line = Line(source)
    try:
        connection = await line.connected(opening=True)
        tables = Tables(await schema_of(connection, schema, source.location, writes=writes))
        if make:
            await create(connection, tables, source.location)
        await check(connection, tables, source.location, writes=writes)
        return tables
    except Exception as error:
        raise translate(error, source.location, opening=True) from error
    finally:
        await line.close()


async def _same_place(source: Source, beside: Source, tables: Tables, environment: Environment) -> None:
    """Whether leases that are renewed beside stand where everybody looks for them.

    Else this host would be alive to itself and to nobody else: its Turns were never taken over, or while it runs them.
    """
    mine, other = Line(source), Line(beside)
    try:
        connection = await mine.connected(opening=True)
        try:
            renewing = await other.connected(opening=True)
            # The number is nobody else's, so that nobody else holds it.
            number = int.from_bytes(environment.random_bytes(8), signed=True)
            if not await shared(connection, renewing, number):
                raise InvalidRequest(f"{beside.location} is another database than the store's", path=beside.path)
            await check_lease(renewing, tables, beside.location)
        except Exception as error:
            raise translate(error, beside.location, opening=True) from error
    finally:
        await other.close()
        await mine.close()
