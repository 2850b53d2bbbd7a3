"""A record store of one's own: dictionaries, and a file with one line for each change.

It is small, and it keeps every promise of `spi.record_store.RecordStore` for one process: `test_own_store.py` proves
that. It shows what a store has to do, and not how to do it fast: it reads its whole file when it is opened, and holds
everything in memory.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from agentscope_durable import HostClosed, InvalidRequest, Misuse, TooLarge
from agentscope_durable.contracts.keys import FOUND
from agentscope_durable.contracts.records import SessionHead, decode, encode
from agentscope_durable.spi.record_store import (
    COLUMNS,
    HEAD_MAX_BYTES,
    LEASE_KEPT_MS,
    NEED_ROUNDS_MAX,
    PAGE_MAX,
    Capabilities,
    Change,
    Committed,
    Decide,
    Entry,
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

SUBJECT = "journal store"


class Line(msgspec.Struct, array_like=True):
    """One change, or one lease, as it stands in the file."""

    now_ms: int
    partition: str = ""
    head: msgspec.Raw = msgspec.Raw(b"null")
    commit_id: str = ""
    entry: tuple[bytes, int, bytes, bytes, str, int] = (b"", 0, b"", b"", "", 0)
    puts: list[tuple[str, bytes | None]] = []
    ready: list[tuple[str, str, int, str, str]] = []
    unready: list[tuple[str, str]] = []
    prune: tuple[int, list[tuple[int, bytes]]] | None = None
    erase: tuple[int, list[str]] | None = None
    owner: str = ""
    lease: tuple[int, int, bytes] | None = None
    """Until when, renewed when, and what the host published; None with an owner: its lease is gone."""


class Partition:
    """The records of one Session."""

    def __init__(self) -> None:
        self.head: SessionHead | None = None
        self.head_bytes = 0
        self.rev = 0
        self.next_seq = 1
        self.pruned = 0
        self.log: list[LogRow] = []
        self.records: dict[str, bytes] = {}

    def page(self, r: Range) -> list[tuple[str, bytes]]:
        found = sorted(key for key in self.records if key.startswith(r.prefix) and key > r.after)
        return [(key, self.records[key]) for key in found[: r.limit]]

    def rows(self, r: LogRange) -> list[LogRow]:
        found = [row for row in self.log if row.events and row.first + row.count - 1 > r.after]
        return [only(row, r.columns) for row in found if not r.through or row.first <= r.through][: r.limit]

    def stream(self, r: StreamRange) -> list[LogRow]:
        found = [
            row for row in self.log if row.stream == r.stream and r.first <= row.at and (not r.last or row.at <= r.last)
        ]
        return [only(row, r.columns) for row in sorted(found, key=lambda row: row.at)[: r.limit]]


def only(row: LogRow, columns: tuple[Any, ...]) -> LogRow:
    return replace(row, **{column.value: b"" for column in COLUMNS if column not in columns})


class Seen:
    """What a decision sees. What it did not declare it must ask for; it is never answered with nothing."""

    def __init__(self, store: JournalStore, partition: Partition, reads: Reads) -> None:
        self._store, self._partition, self._reads = store, partition, reads
        self.head, self.rev = partition.head, partition.rev
        self.next_seq, self.pruned_through = partition.next_seq, partition.pruned

    def get(self, key: str) -> bytes | None:
        if key not in self._reads.keys:
            raise Need(Reads(keys=(key,)))
        return self._partition.records.get(key)

    def page(self, r: Range) -> list[tuple[str, bytes]]:
        if r not in self._reads.ranges:
            raise Need(Reads(ranges=(r,)))
        return self._partition.page(r)

    def log(self, r: LogRange) -> list[LogRow]:
        if r != self._reads.log:
            raise Need(Reads(log=r))
        return self._partition.rows(r)

    def owner(self, owner: str) -> OwnerLease:
        if owner not in self._reads.owners:
            raise Need(Reads(owners=(owner,)))
        return self._store.lease(owner)


class JournalStore:
    """Open it with `open`. One process at a time."""

    capabilities = Capabilities(persistent=True, shared=False)

    def __init__(self, path: Path) -> None:
        self._lock = threading.RLock()
        self._partitions: dict[str, Partition] = {}
        self._ready: dict[tuple[str, str, str], ReadyRow] = {}
        self._leases: dict[str, tuple[int, int, bytes]] = {}
        self._last_ms = self._changes = 0
        self._closed = False
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            for line in path.read_bytes().splitlines():
                self._apply(msgspec.json.decode(line, type=Line))
        self._file = path.open("ab")

    @classmethod
    async def open(cls, path: Path) -> JournalStore:
        return cls(path)

    # ---- changes ----

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        committed = self._transact(partition, reads, decide)
        await asyncio.sleep(0)
        return committed

    def _transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        with self._open():
            now_ms, there = self._now(), self._partitions.get(partition) or Partition()
            for _ in range(NEED_ROUNDS_MAX + 1):
                check_reads(reads)
                try:
                    change = decide(Seen(self, there, reads), now_ms)
                except Need as need:
                    reads = reads.merged(need.reads)
                    continue
                if isinstance(change, Unchanged):
                    return Committed(change.receipt, 0, False)
                line, first = checked(change, there, partition, now_ms), there.next_seq
                # The line is in the file before anybody sees the change.
                self._write(line)
                self._apply(line)
                self._changes += 1
                return Committed(change.receipt, first if line.entry[1] else 0, True, change.hints)
            raise Misuse(f"a decision asked for more records {NEED_ROUNDS_MAX + 1} times")

    def _write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def _apply(self, line: Line) -> None:
        self._last_ms = max(self._last_ms, line.now_ms)
        if line.owner:
            if line.lease is None:
                self._leases.pop(line.owner, None)
            else:
                self._leases[line.owner] = line.lease
            return
        there = self._partitions.setdefault(line.partition, Partition())
        if line.erase is not None:
            del there.log[: line.erase[0]]
            for key in [key for key in self._ready if key[0] in line.erase[1] and key[1] == line.partition]:
                del self._ready[key]
        events, count, private, journal, stream, at = line.entry
        head = bytes(line.head)
        there.head, there.head_bytes = decode(SessionHead, head), len(head)
        there.rev += 1
        there.log.append(
            LogRow(
                first=there.next_seq,
                count=count,
                rev=there.rev,
                at_ms=line.now_ms,
                commit_id=line.commit_id,
                events=events,
                private=private,
                journal=journal,
                stream=stream,
                at=at,
            )
        )
        there.next_seq += count
        for key, value in line.puts:
            if value is None:
                there.records.pop(key, None)
            else:
                there.records[key] = value
        for kind, item in line.unready:
            self._ready.pop((kind, line.partition, item), None)
        for kind, klass, due_ms, item, value in line.ready:
            self._ready[kind, line.partition, item] = ReadyRow(kind, klass, due_ms, item, value)
        if line.prune is not None:
            there.pruned, rows = line.prune
            left = dict(rows)
            there.log = [
                replace(row, events=left[row.first]) if row.count and row.first in left else row for row in there.log
            ]

    # ---- readings ----

    async def read(self, partition: str, reads: Reads) -> Records:
        check_reads(reads)
        with self._open():
            there = self._partitions.get(partition) or Partition()
            return Records(
                head=there.head,
                rev=there.rev,
                next_seq=there.next_seq,
                pruned_through=there.pruned,
                now_ms=self._now(),
                keys={key: there.records[key] for key in reads.keys if key in there.records},
                ranges={r: there.page(r) for r in reads.ranges},
                owners={owner: self.lease(owner) for owner in reads.owners},
                log=there.rows(reads.log) if reads.log else [],
                streams={r: there.stream(r) for r in reads.streams},
            )

    async def watermarks(self, partitions: Sequence[str]) -> list[int]:
        with self._open():
            return [self._partitions[name].next_seq - 1 if name in self._partitions else 0 for name in partitions]

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        check_limit(scan.limit)
        with self._open():
            now_ms = self._now()
            rows = sorted(
                (row.due_ms, partition, row.item, row.value)
                for (kind, partition, _), row in self._ready.items()
                if kind == scan.kind and row.klass == scan.klass
            )
        later = [due_ms for due_ms, *_ in rows if due_ms > now_ms]
        due = [row for row in rows if row[0] <= now_ms and (scan.after is None or row[:3] > scan.after)]
        items = [ReadyItem(name, item, value, due_ms, scan.klass) for due_ms, name, item, value in due[: scan.limit]]
        return ReadyPage(items, now_ms, later[0] if later else None)

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        check_limit(limit)
        with self._open():
            found = {row.klass for (of, _, _), row in self._ready.items() if of == kind and row.klass > after}
        return sorted(klass for klass in found if klass.startswith(prefix))[:limit]

    async def sessions(self, scan: SessionScan) -> list[str]:
        check_limit(scan.limit)
        with self._open():
            return sorted(n for n in self._partitions if n.startswith(scan.prefix) and n > scan.after)[: scan.limit]

    async def holders(self, key: str, limit: int = 2) -> list[str]:
        check_limit(limit)
        if not key.startswith(FOUND):
            raise InvalidRequest("no index finds such records in every partition", path="key")
        with self._open():
            return sorted(name for name, there in self._partitions.items() if key in there.records)[:limit]

    async def measure(self, partition: str) -> PartitionSize:
        with self._open():
            there = self._partitions.get(partition) or Partition()
            return PartitionSize(
                commits=len(there.log),
                log_bytes=sum(len(row.events) + len(row.private) + len(row.journal) for row in there.log),
                records=len(there.records),
                record_bytes=sum(len(key.encode()) + len(value) for key, value in there.records.items()),
                head_bytes=there.head_bytes,
            )

    async def statistics(self) -> StoreStatistics:
        with self._open():
            size = os.fstat(self._file.fileno()).st_size
            return StoreStatistics(self._changes, self._changes, 0, 0, 0, 0, size)

    # ---- hosts ----

    def announce(self, owner: str) -> None:
        with self._open():
            del owner

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        with self._open():
            now_ms = self._now()
            self._record(Line(now_ms, owner=owner, lease=(now_ms + lease_ms, now_ms, value)))

    async def release(self, owner: str) -> None:
        with self._open():
            self._record(Line(self._now(), owner=owner))

    async def owners(self, after: str = "", limit: int = PAGE_MAX) -> list[OwnerLease]:
        check_limit(limit)
        with self._open():
            return [self.lease(owner) for owner in sorted(name for name in self._leases if name > after)[:limit]]

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
            self._record(Line(self._now(), owner=owner))
            return True

    def lease(self, owner: str) -> OwnerLease:
        until_ms, renewed_ms, value = self._leases.get(owner, (0, 0, b""))
        now_ms = self._now()
        return OwnerLease(owner, until_ms > now_ms, until_ms - now_ms, now_ms - renewed_ms, value)

    def _record(self, line: Line) -> None:
        self._write(line)
        self._apply(line)

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            self._file.close()

    # ---- what all of them need ----

    def _open(self) -> threading.RLock:
        if self._closed:
            raise HostClosed(SUBJECT)
        return self._lock

    def _now(self) -> int:
        """The store's clock. It never runs back, not even when the file is opened again."""
        self._last_ms = max(self._last_ms, time.time_ns() // 1_000_000)
        return self._last_ms


def checked(change: Change, there: Partition, partition: str, now_ms: int) -> Line:
    """The change as a line. Everything that can be refused is refused here, before anything is written."""
    head, entry, prune, erase = encode(change.head), change.entry or Entry(), change.prune, change.erase
    if len(head) > HEAD_MAX_BYTES:
        raise TooLarge("session head", size_bytes=len(head), limit_bytes=HEAD_MAX_BYTES)
    if len(change.commit_id) != 32 or not set(change.commit_id) <= set("0123456789abcdef"):
        raise InvalidRequest("a commit id is 32 hex digits", path="commit_id")
    if (entry.count > 0) != (entry.events != b"") or entry.count < 0:
        raise InvalidRequest("an entry counts its events", path="count")
    check_prune(prune, there)
    check_erase(erase)
    return Line(
        now_ms=now_ms,
        partition=partition,
        head=msgspec.Raw(head),
        commit_id=change.commit_id,
        entry=(entry.events, entry.count, entry.private, entry.journal, entry.stream, entry.at if entry.stream else 0),
        puts=list(change.puts),
        ready=[(row.kind, row.klass, row.due_ms, row.item, row.value) for row in change.ready],
        unready=list(change.unready),
        prune=None if prune is None else (prune.through, list(prune.rows)),
        erase=None if erase is None else (erase.rows, list(erase.kinds)),
    )


def check_prune(prune: Prune | None, there: Partition) -> None:
    if prune is None:
        return
    if not there.pruned <= prune.through < there.next_seq:
        raise InvalidRequest(f"events up to {prune.through} cannot be pruned")
    if any(not 0 < first <= prune.through for first, _ in prune.rows):
        raise InvalidRequest("a row is changed that is not pruned")


def check_erase(erase: Erase | None) -> None:
    if erase is not None and not 0 <= erase.rows <= PAGE_MAX:
        raise InvalidRequest("a change erases up to PAGE_MAX rows", path="rows")


def check_limit(limit: int) -> None:
    """A page that came back short is the last one: so a limit is never cut silently."""
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"a page has a limit of 1 to {PAGE_MAX}", path="limit")


def check_reads(reads: Reads) -> None:
    pages: list[Callable[[], int]] = [lambda r=r: r.limit for r in (*reads.ranges, *reads.streams)]
    for limit in pages:
        check_limit(limit())
    if reads.log is not None:
        check_limit(reads.log.limit)
