"""Whether a PostgreSQL store is sound: what the server says of itself, and what each log row's sums say of the row."""

from __future__ import annotations

from typing import Any, Final

from agentscope_durable.contracts.keys import READY_DISPATCH, READY_LEASE, READY_RUNNING, READY_TURN
from agentscope_durable.contracts.records import STORAGE_FORMAT, STORAGE_REVISION
from agentscope_durable.spi.inspection import DamagedRow, DamagePage, StoreCondition
from agentscope_durable.spi.record_store import ReadyRow
from agentscope_durable.stores.records._sums import events_sum, rest_sum

__all__ = ["KINDS", "SERVER", "UNUSABLE_INDEXES", "condition", "damaged", "ready_rows"]

LONG_SECONDS: Final = 3600
"""A transaction that is open for so long keeps the server from clearing away what commits have replaced."""
NOT_VISIBLE: Final = "connections of other roles are not visible to this role"
KINDS: Final = (READY_TURN, READY_DISPATCH, READY_LEASE, READY_RUNNING)

SERVER: Final = """select current_setting('server_version'), current_setting('fsync'),
    current_setting('synchronous_commit'), current_setting('full_page_writes'), current_setting('data_checksums'),
    longest, hidden, (select count(*) from pg_prepared_xacts where database=current_database())
    from (select coalesce(extract(epoch from max(clock_timestamp() - xact_start))::bigint, 0) longest,
        count(*) filter (where backend_type is null) hidden
        from pg_stat_activity where datname=current_database() and pid<>pg_backend_pid()) others"""
"""To whoever has no right to see more, the server shows of another role's connection that it is there, and no more."""

UNUSABLE_INDEXES: Final = """select c.relname::text from pg_index i join pg_class c on c.oid=i.indexrelid
    join pg_namespace n on n.oid=c.relnamespace
    where n.nspname=$1 and c.relname like 'durable\\_%' and not i.indisvalid order by 1"""


def condition(row: Any, invalid: list[str], *, schema: str) -> StoreCondition:
    version, fsync, synchronous, full_pages, checksums, longest, hidden, prepared = row
    risks: list[str] = []
    if fsync != "on":
        risks.append("fsync is off: a crash of the machine can lose or damage everything that is stored")
    if synchronous == "off":
        risks.append("synchronous_commit is off: a crash of the server loses commits that were acknowledged")
    if full_pages != "on":
        risks.append("full_page_writes is off: a crash of the machine can damage pages that were being written")
    if longest >= LONG_SECONDS:
        risks.append(
            f"a transaction has been open for {longest} seconds: what commits replaced is kept, and they become slower"
        )
    if prepared:
        risks.append(f"{prepared} prepared transactions wait to be ended: they keep rows as an open transaction does")
    return StoreCondition(
        facts={
            "format": f"{STORAGE_FORMAT} ({STORAGE_REVISION})",
            "postgresql": str(version),
            "schema": schema,
            "fsync": str(fsync),
            "synchronousCommit": str(synchronous),
            "fullPageWrites": str(full_pages),
            "dataChecksums": str(checksums),
            "longestTransactionSeconds": str(longest) if not hidden else f"{longest}, and {hidden} {NOT_VISIBLE}",
        },
        faults=tuple(f"the index {name} is not valid: reindex it" for name in invalid),
        risks=tuple(risks),
    )


def damaged(rows: list[Any], after: tuple[int, int] | None, limit: int) -> DamagePage:
    found: list[DamagedRow] = []
    place = after
    for first, rev, count, stream, at, events, private, journal, of_events, of_rest in rows:
        place = (first, rev)
        parts: list[str] = []
        # Pruning leaves a sum with what it leaves.
        if of_events != (None if events is None else events_sum(events)):
            parts.append("events")
        if of_rest != rest_sum(private or b"", journal or b""):
            parts.append("native state or facts of its Run")
        if parts:
            found.append(DamagedRow(first, count, "" if stream is None else stream.decode(), at, " and ".join(parts)))
    return DamagePage(tuple(found), len(rows), place if len(rows) == limit else None)


def ready_rows(rows: list[Any]) -> list[ReadyRow]:
    return [
        ReadyRow(kind=kind.decode(), klass=klass.decode(), due_ms=due_ms, item=item.decode(), value=value.decode())
        for kind, klass, due_ms, item, value in rows
    ]
