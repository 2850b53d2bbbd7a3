"""The statements of the SQLite store, and rows in and out.

Their texts are few and constant, so that SQLite keeps every one of them prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import product
from typing import Any, Final, Protocol, cast

from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.keys import FOUND
from agentscope_durable.spi.record_store import COLUMNS, Column, LogRange, LogRow, OwnerLease, Range, StreamRange
from agentscope_durable.stores.records._clock import LeaseRow, RisingClock, judge


class Rows(Protocol):
    """What a statement gives back. The schema is strict about what is written; see `check_kinds` for what is read."""

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


Execute = Callable[..., Rows]

HOST_P = 0
"""`head.p` of the partition of no Session."""
OWNER = "owner/"
"""Leases stand in that partition under this prefix."""
NO_BOUND = 2**62
FOUND_BY_KEY = f"key>='{FOUND}' and key<'{FOUND[:-1]}0'"
"""Which records an index finds in every partition; "0" follows the "/" that ends their prefix."""
CHUNKS = (64, 32, *range(16, 0, -1))
"""Rows per statement: many rows in one statement cost the interpreter lock once."""


def _many(insert: str, width: int, upsert: str = "") -> dict[int, str]:
    """One statement per chunk size, so that their texts stay few and prepared."""
    row = f"({','.join('?' * width)})"
    return {size: f"insert into {insert} values {','.join([row] * size)} {upsert}" for size in CHUNKS}  # noqa: S608


LOG_INSERT = _many(
    "log(p, first, rev, count, at_ms, commit_id, stream, at, events, private, journal, events_sum, rest_sum)", 13
)
HEAD_UPSERT = _many(
    "head(p, name, rev, next_seq, pruned, value)",
    6,
    "on conflict(p) do update set "
    "rev=excluded.rev, next_seq=excluded.next_seq, pruned=excluded.pruned, value=excluded.value",
)
REC_UPSERT = _many("rec(p, key, value)", 3, "on conflict(p, key) do update set value=excluded.value")
REC_DELETE = "delete from rec where p=? and key=?"
READY_UPSERT = _many(
    "ready(kind, p, item, klass, due_ms, value)",
    6,
    "on conflict(kind, p, item) do update set klass=excluded.klass, due_ms=excluded.due_ms, value=excluded.value",
)
READY_DELETE = {
    size: f"delete from ready where (kind, p, item) in (values {','.join(['(?,?,?)'] * size)})"  # noqa: S608
    for size in CHUNKS
}
READY_ERASE = "delete from ready where kind=? and p=?"
LOG_ERASE = "delete from log where id in (select id from log where p=? order by first, rev limit ?)"
PRUNE = "update log set events=?, events_sum=? where p=? and first=? and count>0"

HEAD = "select p, rev, next_seq, pruned, value from head where name=?"
WATERMARK = "select next_seq - 1 from head where name=?"
REC = "select value from rec where p=? and key=?"
HOLDERS = f"""select head.name from rec join head on head.p=rec.p
    where key=? and {FOUND_BY_KEY} order by head.name limit ?"""  # noqa: S608 - constants only
LAST_P = "select coalesce(max(p), 0) from head"
LAST_MS = "select at_ms from log order by id desc limit 1"
COMMITTED = "select 1 from log where p=? and first=? and rev=? and commit_id=?"
# `b""`, a blob, is above every text: the upper bound where there is none.
PAGE_AFTER = "select key, value from rec where p=? and key>? and key<? order by key limit ?"
PAGE_FROM = "select key, value from rec where p=? and key>=? and key<? order by key limit ?"
NAMES_AFTER = "select name from head where name>? and name<? order by name limit ?"
NAMES_FROM = "select name from head where name>=? and name<? order by name limit ?"
_LOG = """select {columns} from log
    where p=?1 and count>0 and events is not null and first+count>?2+1 and first<=?3 and first>=coalesce(
        (select first from log where p=?1 and first<=?2+1 and count>0 order by first desc, rev desc limit 1), 0)
    order by first, rev limit ?4"""
_STREAM = "select {columns} from log where p=? and stream=? and at>=? and at<=? order by at, id limit ?"


@cache
def _row(columns: tuple[Column, ...]) -> str:
    """The columns of a row. One that nobody asked for is not read: the rest of a long row stays on the disk."""
    bodies = ", ".join(column.value if column in columns else f"null as {column.value}" for column in COLUMNS)
    return f"first, count, rev, at_ms, commit_id, {bodies}, stream, at"


@cache
def head_statement(keys: int) -> str:
    """A partition with so many of its records and the time of the newest commit, in one row: one statement is one
    snapshot, and each statement costs the interpreter lock twice."""
    found = [f"(select value from rec where rec.p=head.p and key=?{2 + at})" for at in range(keys)]  # noqa: S608
    columns = ", ".join(("p", "rev", "next_seq", "pruned", "value", f"({LAST_MS})", *found))
    return f"select {columns} from head where name=?1"  # noqa: S608


@cache
def log_statement(columns: tuple[Column, ...]) -> str:
    return _LOG.format(columns=_row(columns))


@cache
def stream_statement(columns: tuple[Column, ...]) -> str:
    return _STREAM.format(columns=_row(columns))


READY = """select head.name, ready.item, ready.value, ready.due_ms from ready join head on head.p=ready.p
    where kind=? and klass=? and due_ms<=? and (due_ms, ready.p, item)>(?, ?, ?)
    order by due_ms, ready.p, item limit ?"""
# One step of the index for each class: a class with a long queue costs no more than one with a short one.
NEXT_CLASS_AFTER = "select klass from ready where kind=? and klass>? and klass<? order by klass limit 1"
NEXT_CLASS_FROM = "select klass from ready where kind=? and klass>=? and klass<? order by klass limit 1"
READY_ANY = "select 1 from ready where kind=? and klass=? limit 1"
NEXT_DUE = "select due_ms from ready where kind=? and klass=? and due_ms>? order by due_ms limit 1"
LOG_SIZE = """select count(*), coalesce(sum(coalesce(length(events), 0) + coalesce(length(private), 0)
    + coalesce(length(journal), 0)), 0) from log where p=?"""
REC_SIZE = "select count(*), coalesce(sum(length(cast(key as blob)) + length(value)), 0) from rec where p=?"
OWNERS = "select key, value from rec where p=0 and key>? and key<'owner0' order by key limit ?"


def records_page(run: Execute, p: int, r: Range) -> list[tuple[str, bytes]]:
    after = r.after >= r.prefix
    statement = PAGE_AFTER if after else PAGE_FROM
    return run(statement, (p, r.after if after else r.prefix, prefix_end(r.prefix), r.limit)).fetchall()


def prefix_end(prefix: str) -> str | bytes:
    """The least text that is above everything with this prefix, in the order of code points."""
    while prefix:
        last = ord(prefix[-1])
        if last < 0x10FFFF:
            # Surrogates are no text: the code point after U+D7FF is U+E000.
            return prefix[:-1] + chr(0xE000 if last == 0xD7FF else last + 1)
        prefix = prefix[:-1]
    return b""


def owner_lease(run: Execute, owner: str, clock: RisingClock) -> OwnerLease:
    rows = run(REC, (HOST_P, OWNER + owner)).fetchall()
    return judge(owner, LeaseRow.decode(rows[0][0]) if rows else None, clock)


def log_page(run: Execute, p: int, r: LogRange) -> list[LogRow]:
    return _log_rows(run(log_statement(r.columns), (p, r.after, r.through or NO_BOUND, r.limit)))


def stream_page(run: Execute, p: int, r: StreamRange) -> list[LogRow]:
    return _log_rows(run(stream_statement(r.columns), (p, r.stream, r.first, r.last or NO_BOUND, r.limit)))


Kinds = frozenset[tuple[type, ...]]


def kinds(*columns: type | tuple[type, ...]) -> Kinds:
    """The kinds a row's columns may have."""
    return frozenset(product(*(column if isinstance(column, tuple) else (column,) for column in columns)))


def check_kinds(row: tuple[object, ...], allowed: Kinds, name: str) -> None:
    """SQLite checks the kind of a value when it is written, and hands out what a broken page says.

    Raises:
        CorruptRecord: a column is of a kind that was never written.
    """
    if tuple(map(type, row)) not in allowed:
        raise CorruptRecord(name, "row", "a column is not of the kind that was written")


_BLOB: Final = (bytes, type(None))
_TEXT: Final = (str, type(None))
LAST_MS_KINDS: Final = kinds(int)
_LOG_KINDS: Final = kinds(int, int, int, int, bytes, _BLOB, _BLOB, _BLOB, _TEXT, int)


def _log_rows(rows: Iterable[tuple[object, ...]]) -> list[LogRow]:
    found: list[LogRow] = []
    for row in rows:
        check_kinds(row, _LOG_KINDS, "log row")
        first, count, rev, at_ms, commit_id, events, private, journal, stream, at = cast(
            "tuple[int, int, int, int, bytes, bytes | None, bytes | None, bytes | None, str | None, int]", row
        )
        found.append(
            LogRow(
                first=first,
                count=count,
                rev=rev,
                at_ms=at_ms,
                commit_id=commit_id.hex(),
                events=events or b"",
                private=private or b"",
                journal=journal or b"",
                stream=stream or "",
                at=at,
            )
        )
    return found
