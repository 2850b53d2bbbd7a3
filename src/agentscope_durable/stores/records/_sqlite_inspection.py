"""Whether a SQLite store is sound: what SQLite says of the file, and what each log row's sums say of the row."""

from __future__ import annotations

from typing import Final

import apsw

from agentscope_durable.contracts.keys import READY_DISPATCH, READY_LEASE, READY_RUNNING, READY_TURN
from agentscope_durable.contracts.records import STORAGE_FORMAT, STORAGE_REVISION
from agentscope_durable.spi.inspection import DamagedRow, DamagePage, StoreCondition
from agentscope_durable.spi.record_store import ReadyRow
from agentscope_durable.stores.records._host_locks import HostLocks
from agentscope_durable.stores.records._sqlite_file import SqliteFile, version_risk
from agentscope_durable.stores.records._sqlite_reader import Reader
from agentscope_durable.stores.records._sqlite_rows import check_kinds, kinds
from agentscope_durable.stores.records._sums import events_sum, rest_sum

__all__ = ["condition", "damaged", "ready_of"]

FAULTS_MAX: Final = 100
"""Faults SQLite lists at most; a file that has so many is beyond a list."""
_KINDS: Final = (READY_TURN, READY_DISPATCH, READY_LEASE, READY_RUNNING)

_BLOB, _TEXT, _SUM = (bytes, type(None)), (str, type(None)), (int, type(None))
_ROW_KINDS: Final = kinds(int, int, int, _TEXT, int, _BLOB, _BLOB, _BLOB, _SUM, int)

_VERSIONS: Final = 18
"""Where a file says how it is written and read: twice 2 for a write-ahead log."""

_P = "select p from head where name=?"
_LOG = """select first, rev, count, stream, at, events, private, journal, events_sum, rest_sum from log
    where p=? and (first, rev)>(?, ?) order by first, rev limit ?"""
_READY = "select kind, klass, due_ms, item, value from ready where kind=? and p=? order by item"


def condition(reader: Reader, file: SqliteFile, locks: HostLocks, *, deep: bool) -> StoreCondition:
    connection = reader.connection
    check = "integrity_check" if deep else "quick_check"
    said = [str(line) for (line,) in reader.run(f"pragma {check}({FAULTS_MAX})")]
    # As the file says it. A connection that reads a file which nobody has open speaks of itself.
    _, header = connection.read("main", 0, _VERSIONS, 2)
    mode = "wal" if header == b"\x02\x02" else str(connection.pragma("journal_mode"))
    facts = {
        "format": f"{STORAGE_FORMAT} ({STORAGE_REVISION})",
        "sqlite": apsw.sqlite_lib_version(),
        "apsw": apsw.apsw_version(),
        "journalMode": mode,
        "pageSize": str(connection.pragma("page_size")),
        "pages": str(connection.pragma("page_count")),
        "freePages": str(connection.pragma("freelist_count")),
    }
    risks = [version_risk(apsw.SQLITE_VERSION_NUMBER, apsw.sqlite_lib_version())]
    if mode != "wal":
        risks.append(f"its journal mode is {mode}, and not wal: hosts would keep each other from working")
    return StoreCondition(
        facts=facts,
        faults=tuple(line for line in said if line != "ok"),
        risks=tuple(risk for risk in risks if risk),
        strays=tuple(locks.strays(reader.owner_names())),
        drafts=tuple(draft.name for draft in file.drafts()),
    )


def damaged(reader: Reader, partition: str, after: tuple[int, int] | None, limit: int) -> DamagePage:
    found: list[DamagedRow] = []
    place = after
    looked_at = 0
    for (p,) in reader.run(_P, (partition,)).fetchall():
        for row in reader.run(_LOG, (p, *(after or (-1, -1)), limit)):
            check_kinds(row, _ROW_KINDS, "log row")
            first, rev, count, stream, at, events, private, journal, of_events, of_rest = row
            looked_at += 1
            place = (first, rev)
            parts: list[str] = []
            # Pruning leaves a sum with what it leaves.
            if of_events != (None if events is None else events_sum(events)):
                parts.append("events")
            if of_rest != rest_sum(private or b"", journal or b""):
                parts.append("native state or facts of its Run")
            if parts:
                found.append(DamagedRow(first, count, stream or "", at, " and ".join(parts)))
    return DamagePage(tuple(found), looked_at, place if looked_at == limit else None)


def ready_of(reader: Reader, partition: str) -> list[ReadyRow]:
    found: list[ReadyRow] = []
    for (p,) in reader.run(_P, (partition,)).fetchall():
        for kind in _KINDS:
            for name, klass, due_ms, item, value in reader.run(_READY, (kind, p)):
                found.append(ReadyRow(kind=name, klass=klass, due_ms=due_ms, item=item, value=value))
    return found
