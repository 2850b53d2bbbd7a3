"""Short, consistent readings of the SQLite store."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar, cast

import apsw

from agentscope_durable.contracts.keys import HOST_PARTITION
from agentscope_durable.contracts.records import SessionHead, decode
from agentscope_durable.spi.record_store import (
    OwnerLease,
    PartitionSize,
    Reads,
    ReadyItem,
    ReadyPage,
    ReadyScan,
    Records,
    SessionScan,
)
from agentscope_durable.stores.records._clock import LeaseRow, RisingClock, judge
from agentscope_durable.stores.records._sqlite_file import SqliteFile
from agentscope_durable.stores.records._sqlite_rows import (
    HEAD,
    HOLDERS,
    HOST_P,
    LAST_MS,
    LAST_MS_KINDS,
    LOG_SIZE,
    NAMES_AFTER,
    NAMES_FROM,
    NEXT_CLASS_AFTER,
    NEXT_CLASS_FROM,
    NEXT_DUE,
    NO_BOUND,
    OWNER,
    OWNERS,
    READY,
    REC,
    REC_SIZE,
    WATERMARK,
    Execute,
    check_kinds,
    head_statement,
    log_page,
    owner_lease,
    prefix_end,
    records_page,
    stream_page,
)

T = TypeVar("T")

SINGLE_MAX = 8
"""Records that are read in one statement at most."""
HEADS_MAX = 1024
"""Decoded heads a reader keeps at most."""
PLACE_SECONDS = 1.0
"""Between two looks whether the file that is read is at its place."""


def single(reads: Reads) -> bool:
    """Whether one statement reads it."""
    plain = not (reads.ranges or reads.owners or reads.log or reads.streams)
    return plain and len(reads.keys) <= SINGLE_MAX


class Reader:
    """Short, consistent readings on a connection that cannot write. One thread's own."""

    def __init__(self, connection: apsw.Connection, clock: RisingClock) -> None:
        self.connection = connection
        self.run = cast("Execute", connection.cursor().execute)
        self._clock = clock
        # Decoded heads, each with the bytes it was decoded from.
        self._heads: dict[str, tuple[bytes, SessionHead]] = {}
        self._looked = 0.0

    def check_place(self, file: SqliteFile) -> None:
        """Nobody writes any more to a file that was deleted, moved or replaced: no writer is there to tell of it.

        Raises:
            StoreMoved: it is not at its place. Asked again at the next reading.
        """
        now = time.monotonic()
        if now - self._looked >= PLACE_SECONDS:
            file.check_place(self.connection)
            self._looked = now

    def answer(self, call: Callable[[Reader], T]) -> T:
        """What `call` says, of the snapshot of `together` if there is one."""
        if self.connection.in_transaction:
            return call(self)
        with self.together():
            return call(self)

    @contextmanager
    def together(self) -> Generator[None]:
        """One snapshot for everything that is read in here."""
        self.run("begin")
        try:
            for row in self.run(LAST_MS).fetchall():
                check_kinds(row, LAST_MS_KINDS, "log row")
                self._clock.witness(row[0])
            yield
        finally:
            # A fault of the disk may have ended it, and is what is to be told: not that there is nothing to end.
            if self.connection.in_transaction:
                self.run("rollback")

    def records(self, partition: str, reads: Reads) -> Records:
        """What a question wants to see, of the snapshot of `together` or of one of its own."""
        found = self._single(partition, reads) if single(reads) else None
        return self.answer(lambda reader: reader._records(partition, reads)) if found is None else found

    def _single(self, partition: str, reads: Reads) -> Records | None:
        """By one statement; None where there is no such partition."""
        rows = self.run(head_statement(len(reads.keys)), (partition, *reads.keys)).fetchall()
        if not rows:
            return None
        _, rev, next_seq, pruned, value, last_ms, *values = rows[0]
        if last_ms is not None:
            check_kinds((last_ms,), LAST_MS_KINDS, "log row")
            self._clock.witness(last_ms)
        return Records(
            head=self._head(partition, value),
            rev=rev,
            next_seq=next_seq,
            pruned_through=pruned,
            now_ms=self._clock.now(),
            keys={key: value for key, value in zip(reads.keys, values, strict=True) if value is not None},
            ranges={},
            owners={},
            log=[],
            streams={},
        )

    def _records(self, partition: str, reads: Reads) -> Records:
        run = self.run
        rows = run(HEAD, (partition,)).fetchall()
        head: SessionHead | None = None
        p, rev, next_seq, pruned = HOST_P if partition == HOST_PARTITION else -1, 0, 1, 0
        if rows:
            p, rev, next_seq, pruned, value = rows[0]
            head = self._head(partition, value)
        keys: dict[str, bytes] = {}
        for key in reads.keys:
            for (value,) in run(REC, (p, key)).fetchall():
                keys[key] = value
        return Records(
            head=head,
            rev=rev,
            next_seq=next_seq,
            pruned_through=pruned,
            now_ms=self._clock.now(),
            keys=keys,
            ranges={r: records_page(run, p, r) for r in reads.ranges},
            owners={owner: owner_lease(run, owner, self._clock) for owner in reads.owners},
            log=log_page(run, p, reads.log) if reads.log else [],
            streams={r: stream_page(run, p, r) for r in reads.streams},
        )

    def _head(self, partition: str, value: bytes) -> SessionHead:
        cached = self._heads.get(partition)
        if cached is not None and cached[0] == value:
            return cached[1]
        head = decode(SessionHead, value, key=partition)
        if len(self._heads) >= HEADS_MAX:
            self._heads.clear()
        self._heads[partition] = (value, head)
        return head

    def watermarks(self, partitions: Sequence[str]) -> list[int]:
        return [sum(last for (last,) in self.run(WATERMARK, (partition,))) for partition in partitions]

    def ready(self, scan: ReadyScan) -> ReadyPage:
        now_ms = self._clock.now()
        due_ms, p, item = -NO_BOUND, -1, ""
        if scan.after is not None:
            due_ms, partition, item = scan.after
            rows = self.run(HEAD, (partition,)).fetchall()
            p = rows[0][0] if rows else -1
        found = self.run(READY, (scan.kind, scan.klass, now_ms, due_ms, p, item, scan.limit)).fetchall()
        later = self.run(NEXT_DUE, (scan.kind, scan.klass, now_ms)).fetchall()
        items = [ReadyItem(name, item, value, due_ms, scan.klass) for name, item, value, due_ms in found]
        return ReadyPage(items, now_ms, later[0][0] if later else None)

    def ready_classes(self, kind: str, prefix: str, after: str, limit: int) -> list[str]:
        end = prefix_end(prefix)
        classes: list[str] = []
        statement, at = (NEXT_CLASS_AFTER, after) if after >= prefix else (NEXT_CLASS_FROM, prefix)
        while len(classes) < limit and (found := self.run(statement, (kind, at, end)).fetchall()):
            classes.append(found[0][0])
            statement, at = NEXT_CLASS_AFTER, found[0][0]
        return classes

    def sessions(self, scan: SessionScan) -> list[str]:
        after = scan.after >= scan.prefix
        # The partition of no Session has the empty name, which is above nothing.
        statement = NAMES_AFTER if after else NAMES_FROM
        bounds = (scan.after if after else scan.prefix, prefix_end(scan.prefix), scan.limit)
        return [name for (name,) in self.run(statement, bounds)]

    def holders(self, key: str, limit: int) -> list[str]:
        # The bounds say nothing new about the key; they let SQLite see that the index applies.
        return [name for (name,) in self.run(HOLDERS, (key, limit))]

    def measure(self, partition: str) -> PartitionSize:
        [(p, head_bytes)] = [(row[0], len(row[4])) for row in self.run(HEAD, (partition,))] or [(-1, 0)]
        [(commits, log_bytes)] = self.run(LOG_SIZE, (p,)).fetchall()
        [(records, record_bytes)] = self.run(REC_SIZE, (p,)).fetchall()
        return PartitionSize(commits, log_bytes, records, record_bytes, head_bytes)

    def owners(self, after: str, limit: int) -> list[OwnerLease]:
        rows = self.run(OWNERS, (OWNER + after, limit)).fetchall()
        return [judge(key[len(OWNER) :], LeaseRow.decode(value), self._clock) for key, value in rows]

    def owner_names(self) -> list[str]:
        return [key[len(OWNER) :] for key, _ in self.run(OWNERS, (OWNER, -1))]
