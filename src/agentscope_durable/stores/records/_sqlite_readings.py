"""What a store in SQLite answers without writing, however it comes to its readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from agentscope_durable.spi.inspection import DamagePage, StoreCondition
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Capabilities,
    OwnerLease,
    PartitionSize,
    Reads,
    ReadyPage,
    ReadyRow,
    ReadyScan,
    Records,
    SessionScan,
)
from agentscope_durable.stores.records._checks import check_found, check_limit, check_reads
from agentscope_durable.stores.records._host_locks import HostLocks
from agentscope_durable.stores.records._sqlite_file import SqliteFile
from agentscope_durable.stores.records._sqlite_inspection import condition, damaged, ready_of
from agentscope_durable.stores.records._sqlite_reader import Reader

T = TypeVar("T")


class SqliteReadings(ABC):
    """The reading half of a `RecordStore`, and what can be told of its health."""

    _file: SqliteFile
    _locks: HostLocks

    @abstractmethod
    async def _ask(self, call: Callable[[Reader], T], *, short: bool = False) -> T:
        """What a reader answers, in one snapshot.

        Args:
            short: it takes so little that others may wait for it in the same snapshot. It opens one itself if it needs
                one and there is none.
        """

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=True, shared=True)

    async def read(self, partition: str, reads: Reads) -> Records:
        check_reads(reads)
        return await self._ask(lambda reader: reader.records(partition, reads), short=True)

    async def watermarks(self, partitions: Sequence[str]) -> list[int]:
        return await self._ask(lambda reader: reader.answer(lambda there: there.watermarks(partitions)), short=True)

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        check_limit(scan.limit)
        return await self._ask(lambda reader: reader.ready(scan))

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        check_limit(limit)
        return await self._ask(lambda reader: reader.ready_classes(kind, prefix, after, limit))

    async def sessions(self, scan: SessionScan) -> list[str]:
        check_limit(scan.limit)
        return await self._ask(lambda reader: reader.sessions(scan))

    async def holders(self, key: str, limit: int = 2) -> list[str]:
        check_found(key)
        check_limit(limit)
        return await self._ask(lambda reader: reader.holders(key, limit))

    async def owners(self, after: str = "", limit: int = PAGE_MAX) -> list[OwnerLease]:
        check_limit(limit)
        return await self._ask(lambda reader: reader.owners(after, limit))

    async def condition(self, *, deep: bool) -> StoreCondition:
        return await self._ask(lambda reader: condition(reader, self._file, self._locks, deep=deep))

    async def damaged(self, partition: str, after: tuple[int, int] | None, limit: int) -> DamagePage:
        check_limit(limit)
        return await self._ask(lambda reader: damaged(reader, partition, after, limit))

    async def ready_of(self, partition: str) -> list[ReadyRow]:
        return await self._ask(lambda reader: ready_of(reader, partition))

    async def measure(self, partition: str) -> PartitionSize:
        return await self._ask(lambda reader: reader.measure(partition))
