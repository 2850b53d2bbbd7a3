"""One reading of the PostgreSQL store: everything that is asked, in one statement, as of one moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from agentscope_durable.contracts.errors import InvalidRequest, TooLarge
from agentscope_durable.contracts.records import SessionHead, decode
from agentscope_durable.spi.record_store import (
    Column,
    LogRange,
    LogRow,
    OwnerLease,
    Range,
    Reads,
    StreamRange,
)
from agentscope_durable.stores.records._postgres_clock import absent, judged

__all__ = ["KEY_BYTES_MAX", "Answer", "HeadRow", "Question", "encoded", "prefix_end"]

KEY_BYTES_MAX: Final = 2600
"""Bytes of a name or a key: PostgreSQL's index takes 2,704 of a row's."""
NO_BOUND: Final = 2**62
_CLOCK, _HEAD, _KEY, _RANGE, _OWNER, _LOG, _STREAM, _COMMIT = range(8)


class HeadRow(NamedTuple):
    """A head as stored or about to be. Never changed, only replaced. `p` is None of a Session that is not stored."""

    p: int | None
    rev: int
    next_seq: int
    pruned: int
    at_ms: int
    head: SessionHead | None


NEW: Final = HeadRow(None, 0, 1, 0, 0, None)


def encoded(text: str, what: str = "key") -> bytes:
    """A text as it is stored and looked for.

    Raises:
        InvalidRequest: it is no Unicode text.
        TooLarge: no index could find it.
    """
    try:
        value = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"a {what} holds a lone surrogate", path=what) from error
    if len(value) > KEY_BYTES_MAX:
        raise TooLarge(what, size_bytes=len(value), limit_bytes=KEY_BYTES_MAX)
    return value


def prefix_end(prefix: bytes) -> bytes:
    """What is above every UTF-8 with this prefix, and below or equal to everything else that is above it."""
    # A byte 0xFF is in no UTF-8.
    return prefix + b"\xff"


def above(after: str, prefix: str) -> bytes:
    """The least bytes that a page beginning after this key may begin with."""
    return after.encode() + b"\x00" if after >= prefix else prefix.encode()


class Question:
    """What is to be read of some partitions. The head of each comes with it."""

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        self._keys: dict[tuple[int, str], None] = {}
        self._ranges: dict[tuple[int, Range], None] = {}
        self._owners: dict[str, None] = {}
        self._logs: dict[tuple[int, LogRange], None] = {}
        self._streams: dict[tuple[int, StreamRange], None] = {}
        self._commits: dict[tuple[int, int, int, bytes], None] = {}

    def add(self, partition: str, reads: Reads) -> None:
        n = self.partition(partition)
        for key in reads.keys:
            self._keys[n, key] = None
        for page in reads.ranges:
            self._ranges[n, page] = None
        for owner in reads.owners:
            self._owners[owner] = None
        if reads.log is not None:
            self._logs[n, reads.log] = None
        for stream in reads.streams:
            self._streams[n, stream] = None

    def partition(self, name: str) -> int:
        return self.partitions.setdefault(name, len(self.partitions) + 1)

    def commit(self, partition: str, first: int, rev: int, commit_id: bytes) -> None:
        """Ask whether a commit happened, by the place it would have taken."""
        self._commits[self.partition(partition), first, rev, commit_id] = None

    def statement(self) -> tuple[tuple[str, ...], list[Any]]:
        """The parts of the statement, and its arguments."""
        parts: list[str] = []
        arguments: list[Any] = [[encoded(name, "partition") for name in self.partitions]]

        def part(name: str, rows: Sequence[tuple[Any, ...]]) -> None:
            if rows:
                parts.append(name)
                arguments.extend(map(list, zip(*rows, strict=True)))

        part("keys", [(n, key.encode(errors="surrogatepass")) for n, key in self._keys])
        part(
            "ranges",
            [(n, above(r.after, r.prefix), prefix_end(r.prefix.encode()), r.limit) for n, r in self._ranges],
        )
        part("owners", [(encoded(owner, "owner"),) for owner in self._owners])
        part("logs", [(n, r.after, r.through or NO_BOUND, r.limit, *_wanted(r.columns)) for n, r in self._logs])
        part(
            "streams",
            [
                (n, encoded(r.stream, "stream"), r.first, r.last or NO_BOUND, r.limit, *_wanted(r.columns))
                for n, r in self._streams
            ],
        )
        part("commits", list(self._commits))
        return tuple(parts), arguments

    def answered(self, rows: Sequence[Any]) -> Answer:
        answer = Answer()
        names = list(self.partitions)
        keys, ranges, owners = list(self._keys), list(self._ranges), list(self._owners)
        logs, streams, commits = list(self._logs), list(self._streams), list(self._commits)
        for row in rows:
            part, n = row[0], row[1] - 1
            if part == _CLOCK:
                answer.server_ms = row[2]
            elif part == _HEAD:
                answer.heads[names[n]] = (row[2], row[3], row[4], row[5], row[6], row[7])
            elif part == _KEY:
                place, key = keys[n]
                answer.keys[names[place - 1], key] = row[7]
            elif part == _RANGE:
                place, page = ranges[n]
                answer.pages.setdefault((names[place - 1], page), []).append((row[7].decode(), row[8]))
            elif part == _OWNER:
                answer.leases[owners[n]] = (row[2], row[3], row[7])
            elif part == _LOG:
                place, log = logs[n]
                answer.logs.setdefault((names[place - 1], log), []).append(_log_row(row))
            elif part == _STREAM:
                place, stream = streams[n]
                answer.streams.setdefault((names[place - 1], stream), []).append(_log_row(row))
            elif part == _COMMIT:
                place, first, rev, commit_id = commits[n]
                # How many there are, and the oldest row of the log that has not been erased.
                answer.commits[names[place - 1], first, rev, commit_id] = row[2] > 0, row[3]
        answer.sort()
        return answer


class Answer:
    """What was read. Heads are decoded by whoever keeps them."""

    def __init__(self) -> None:
        self.server_ms = 0
        self.heads: dict[str, tuple[int, int, int, int, int, bytes]] = {}
        self.keys: dict[tuple[str, str], bytes] = {}
        self.pages: dict[tuple[str, Range], list[tuple[str, bytes]]] = {}
        self.leases: dict[str, tuple[int, int, bytes]] = {}
        self.logs: dict[tuple[str, LogRange], list[LogRow]] = {}
        self.streams: dict[tuple[str, StreamRange], list[LogRow]] = {}
        self.commits: dict[tuple[str, int, int, bytes], tuple[bool, int | None]] = {}

    def sort(self) -> None:
        """The parts of one statement come in no promised order."""
        for page in self.pages.values():
            page.sort()
        for rows in self.logs.values():
            rows.sort(key=lambda row: (row.first, row.rev))
        for rows in self.streams.values():
            rows.sort(key=lambda row: (row.at, row.rev))

    def head(self, partition: str) -> HeadRow:
        found = self.heads.get(partition)
        if found is None:
            return NEW
        p, rev, next_seq, pruned, at_ms, value = found
        return HeadRow(p, rev, next_seq, pruned, at_ms, decode(SessionHead, value, key=partition))

    def owner(self, owner: str) -> OwnerLease:
        row = self.leases.get(owner)
        return absent(owner) if row is None else judged(owner, *row, self.server_ms)


def _wanted(columns: tuple[Column, ...]) -> tuple[bool, bool, bool]:
    return Column.EVENTS in columns, Column.PRIVATE in columns, Column.JOURNAL in columns


def _log_row(row: Any) -> LogRow:
    stream = row[11]
    return LogRow(
        first=row[2],
        count=row[3],
        rev=row[4],
        at_ms=row[5],
        commit_id=row[7].hex(),
        events=row[8] or b"",
        private=row[9] or b"",
        journal=row[10] or b"",
        stream="" if stream is None else stream.decode(),
        at=row[6],
    )
