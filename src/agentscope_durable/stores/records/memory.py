"""Records in this process's memory: the shortest store that keeps every promise but `durable`.

It is the oracle other stores are compared with, so it does everything the plain way: one lock, one
dictionary per table, and bytes instead of live objects, so that no decision can reach into what is
stored.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

from msgspec.structs import replace

from agentscope_durable.contracts.errors import HostClosed, Misuse
from agentscope_durable.contracts.records import SessionHead, decode
from agentscope_durable.spi.record_store import (
    COLUMNS,
    LEASE_KEPT_MS,
    NEED_ROUNDS_MAX,
    PAGE_MAX,
    Capabilities,
    Change,
    Column,
    Committed,
    Decide,
    Erase,
    LogRange,
    LogRow,
    Need,
    OwnerLease,
    PartitionSize,
    Prune,
    Range,
    Reads,
    ReadyItem,
    ReadyPage,
    ReadyRow,
    ReadyScan,
    Records,
    SessionScan,
    StoreStatistics,
    StreamRange,
    Unchanged,
)
from agentscope_durable.stores.records._checks import (
    NO_ENTRY,
    check_commit_id,
    check_entry,
    check_erase,
    check_found,
    check_limit,
    check_prune,
    check_reads,
    encode_head,
)
from agentscope_durable.stores.records._clock import CallableClock, LeaseRow, RisingClock, judge, lease_row


class _Session:
    """The records of one partition."""

    def __init__(self) -> None:
        self.head: bytes | None = None
        self.rev = 0
        self.next_seq = 1
        self.pruned = 0
        self.log: list[LogRow] = []
        self.records: dict[str, bytes] = {}

    def page(self, r: Range) -> list[tuple[str, bytes]]:
        found = sorted(key for key in self.records if key.startswith(r.prefix) and key > r.after)
        return [(key, self.records[key]) for key in found[: r.limit]]

    def rows(self, r: LogRange) -> list[LogRow]:
        start = bisect_left(self.log, r.after + 1, key=_last)
        found = (row for row in map(self.log.__getitem__, range(start, len(self.log))) if row.events)
        page = islice(takewhile(lambda row: not r.through or row.first <= r.through, found), r.limit)
        return [_only(row, r.columns) for row in page]

    def stream(self, r: StreamRange) -> list[LogRow]:
        found = [
            row for row in self.log if row.stream == r.stream and r.first <= row.at and (not r.last or row.at <= r.last)
        ]
        return [_only(row, r.columns) for row in sorted(found, key=lambda row: row.at)[: r.limit]]


class _View:
    def __init__(self, store: MemoryRecordStore, session: _Session, partition: str, reads: Reads) -> None:
        self._store = store
        self._session = session
        self._reads = reads
        self.head = store.head(partition, session)
        self.next_seq = session.next_seq
        self.rev = session.rev
        self.pruned_through = session.pruned

    def get(self, key: str) -> bytes | None:
        if key not in self._reads.keys:
            raise Need(Reads(keys=(key,)))
        return self._session.records.get(key)

    def page(self, r: Range) -> list[tuple[str, bytes]]:
        if r not in self._reads.ranges:
            raise Need(Reads(ranges=(r,)))
        return self._session.page(r)

    def log(self, r: LogRange) -> list[LogRow]:
        if r != self._reads.log:
            raise Need(Reads(log=r))
        return self._session.rows(r)

    def owner(self, owner: str) -> OwnerLease:
        if owner not in self._reads.owners:
            raise Need(Reads(owners=(owner,)))
        return self._store.lease(owner)


class MemoryRecordStore:
    """A `RecordStore` without a disk.

    Args:
        clock: the wall clock in milliseconds; None for the real one. If it has a method `boot_ms`,
            leases are judged by that.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = RisingClock(CallableClock(clock or _steady_clock()))
        self._lock = threading.RLock()
        self._sessions: dict[str, _Session] = {}
        self._ready: dict[tuple[str, str, str], ReadyRow] = {}
        self._leases: dict[str, LeaseRow] = {}
        self._changes = 0
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=False, shared=False)

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        committed = self._transact(partition, reads, decide)
        await asyncio.sleep(0)  # A loop over the store gives others their turn, as with any other store.
        return committed

    def _transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        with self._open():
            now_ms = self._clock.now()
            session = self._sessions.get(partition) or _Session()
            for _ in range(NEED_ROUNDS_MAX + 1):
                check_reads(reads)
                try:
                    change = decide(_View(self, session, partition, reads), now_ms)
                except Need as need:
                    reads = reads.merged(need.reads)
                    continue
                if isinstance(change, Unchanged):
                    return Committed(change.receipt, 0, False)
                return self._write(partition, session, change, now_ms)
            raise Misuse(f"a decision asked for more records {NEED_ROUNDS_MAX + 1} times")

    def _write(self, partition: str, session: _Session, change: Change, now_ms: int) -> Committed:
        # Everything that can be refused is refused before the first write.
        head, commit_id, entry = encode_head(change.head), check_commit_id(change.commit_id), change.entry or NO_ENTRY
        check_entry(entry)
        check_prune(change.prune, after=session.pruned, before=session.next_seq)
        check_erase(change.erase)
        if change.erase is not None:
            self._erase(partition, session, change.erase)
        first = session.next_seq
        session.head = head
        session.rev += 1
        session.next_seq += entry.count
        session.log.append(
            LogRow(
                first=first,
                count=entry.count,
                rev=session.rev,
                at_ms=now_ms,
                commit_id=commit_id.hex(),
                events=entry.events,
                private=entry.private,
                journal=entry.journal,
                stream=entry.stream,
                at=entry.at if entry.stream else 0,
            )
        )
        for key, value in change.puts:
            if value is None:
                session.records.pop(key, None)
            else:
                session.records[key] = value
        for kind, item in change.unready:
            self._ready.pop((kind, partition, item), None)
        for row in change.ready:
            self._ready[row.kind, partition, row.item] = row
        if change.prune is not None:
            self._prune(session, change.prune)
        self._sessions[partition] = session
        self._changes += 1
        return Committed(change.receipt, first if entry.count else 0, True, change.hints)

    def _erase(self, partition: str, session: _Session, erase: Erase) -> None:
        del session.log[: erase.rows]
        for key in [key for key in self._ready if key[0] in erase.kinds and key[1] == partition]:
            del self._ready[key]

    def _prune(self, session: _Session, prune: Prune) -> None:
        session.pruned = prune.through
        for first, events in prune.rows:
            index = bisect_left(session.log, first, key=_last)
            session.log[index] = replace(session.log[index], events=events)

    async def read(self, partition: str, reads: Reads) -> Records:
        await asyncio.sleep(0)
        check_reads(reads)
        with self._open():
            session = self._sessions.get(partition) or _Session()
            return Records(
                head=self.head(partition, session),
                rev=session.rev,
                next_seq=session.next_seq,
                pruned_through=session.pruned,
                now_ms=self._clock.now(),
                keys={key: session.records[key] for key in reads.keys if key in session.records},
                ranges={r: session.page(r) for r in reads.ranges},
                owners={owner: self.lease(owner) for owner in reads.owners},
                log=session.rows(reads.log) if reads.log else [],
                streams={r: session.stream(r) for r in reads.streams},
            )

    async def watermarks(self, partitions: Sequence[str]) -> list[int]:
        await asyncio.sleep(0)
        with self._open():
            found = [self._sessions.get(partition) for partition in partitions]
            return [0 if session is None else session.next_seq - 1 for session in found]

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        await asyncio.sleep(0)
        check_limit(scan.limit)
        with self._open():
            now_ms = self._clock.now()
            rows = sorted(
                (row.due_ms, partition, row.item, row.value)
                for (kind, partition, _), row in self._ready.items()
                if kind == scan.kind and row.klass == scan.klass
            )
        later = [due_ms for due_ms, *_ in rows if due_ms > now_ms]
        due = [row for row in rows if row[0] <= now_ms and (scan.after is None or row[:3] > scan.after)]
        items = [ReadyItem(partition, item, value, due_ms, scan.klass) for due_ms, partition, item, value in due]
        return ReadyPage(items[: scan.limit], now_ms, later[0] if later else None)

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        await asyncio.sleep(0)
        check_limit(limit)
        with self._open():
            found = {row.klass for (of, _, _), row in self._ready.items() if of == kind and row.klass > after}
        return sorted(klass for klass in found if klass.startswith(prefix))[:limit]

    async def sessions(self, scan: SessionScan) -> list[str]:
        check_limit(scan.limit)
        with self._open():
            found = sorted(name for name in self._sessions if name.startswith(scan.prefix) and name > scan.after)
            return found[: scan.limit]

    async def holders(self, key: str, limit: int = 2) -> list[str]:
        check_found(key)
        check_limit(limit)
        with self._open():
            return sorted(name for name, session in self._sessions.items() if key in session.records)[:limit]

    async def owners(self, after: str = "", limit: int = PAGE_MAX) -> list[OwnerLease]:
        check_limit(limit)
        with self._open():
            return [self.lease(owner) for owner in sorted(o for o in self._leases if o > after)[:limit]]

    def announce(self, owner: str) -> None:
        """Who uses this store ends with it: there is nothing to tell."""
        with self._open():
            del owner

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        with self._open():
            self._leases[owner] = lease_row(self._clock, lease_ms, value)

    async def release(self, owner: str) -> None:
        with self._open():
            self._leases.pop(owner, None)

    async def dead_owners(self, among: tuple[str, ...] | None = None) -> list[str]:
        with self._open():
            return []

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        with self._open():
            if owner not in self._leases:
                return True
            left = any(kind in kinds and row.klass == owner for (kind, _, _), row in self._ready.items())
            if left or self.lease(owner).remaining_ms > -LEASE_KEPT_MS:
                return False
            del self._leases[owner]
            return True

    async def measure(self, partition: str) -> PartitionSize:
        with self._open():
            session = self._sessions.get(partition) or _Session()
            return PartitionSize(
                commits=len(session.log),
                log_bytes=sum(len(row.events) + len(row.private) + len(row.journal) for row in session.log),
                records=len(session.records),
                record_bytes=sum(len(key.encode()) + len(value) for key, value in session.records.items()),
                head_bytes=len(session.head or b""),
            )

    async def statistics(self) -> StoreStatistics:
        with self._open():
            # One thread, one lock: nobody waits, and nothing is stored.
            return StoreStatistics(
                changes=self._changes,
                transactions=self._changes,
                busy=0,
                waited_ms=0,
                longest_ms=0,
                locked_ms=0,
                stored_bytes=0,
            )

    async def close(self) -> None:
        self._closed = True

    def _open(self) -> threading.RLock:
        if self._closed:
            raise HostClosed("record store")
        return self._lock

    def lease(self, owner: str) -> OwnerLease:
        return judge(owner, self._leases.get(owner), self._clock)

    def head(self, partition: str, session: _Session) -> SessionHead | None:
        return None if session.head is None else decode(SessionHead, session.head, key=partition)


def _last(row: LogRow) -> int:
    """Number of the last event up to and including this row."""
    return row.first + row.count - 1


def _only(row: LogRow, columns: tuple[Column, ...]) -> LogRow:
    """The row with the columns that were asked for."""
    return replace(row, **{column.value: b"" for column in COLUMNS if column not in columns})


def _steady_clock() -> Callable[[], int]:
    """The wall clock as it was at the start, going on at the speed of the monotonic clock: it never jumps."""
    offset_ms = time.time_ns() // 1_000_000 - time.monotonic_ns() // 1_000_000
    return lambda: offset_ms + time.monotonic_ns() // 1_000_000
