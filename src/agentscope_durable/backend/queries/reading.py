"""Consistent readings of one Session, each of a bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from msgspec.structs import replace

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.backend.queries.records import head_of
from agentscope_durable.backend.queries.rows import Found, events_of, last_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import CorruptRecord, LimitExceeded
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Column,
    LogRange,
    LogRow,
    OwnerLease,
    Range,
    Reads,
    Records,
    RecordStore,
    StreamRange,
)

__all__ = ["LISTING_MAX", "LOG_ROWS", "NEAR", "Reader", "log_page"]

LOG_ROWS: Final = 200
"""Log rows of one read: short enough that no reader holds the store up."""
LISTING_MAX: Final = 10_000
"""Tool calls, interactions, inputs or signals of one Turn that are listed without pages."""
NEAR: Final = 64
"""Events between two wanted ones that are rather read over than read around."""
_OWNER_ROUNDS: Final = 3
_OWNERS_SEEN: Final = 4
"""Owners whose leases are read along: mostly the Thread's is one of them, and only its head says so."""


def log_page(*, after: int, through: int, rows: int = PAGE_MAX) -> LogRange:
    """The events of the next rows of the log up to `through`, at most LOG_ROWS of them."""
    return LogRange(after=after, limit=min(rows, LOG_ROWS), through=through, columns=(Column.EVENTS,))


class Reader:
    """Reads Sessions of one store.

    Args:
        records: where the records are.
        bodies: opens what is too large for a record.
    """

    def __init__(self, records: RecordStore, bodies: Bodies) -> None:
        self.records = records
        self.bodies = bodies
        self._owners: tuple[str, ...] = ()

    async def read(self, session: SessionKey, reads: Reads) -> Records:
        """One consistent reading of an existing Session."""
        records = await self.records.read(keys.partition(session), reads)
        _ = head_of(records, session)
        return records

    async def read_owned(self, session: SessionKey, reads: Reads, thread_id: str) -> tuple[Records, OwnerLease | None]:
        """A reading together with the lease of the Thread's owner, None when nobody owns it."""
        records = await self.read(session, replace(reads, owners=self._owners))
        for _ in range(_OWNER_ROUNDS):
            active = head_of(records, session).threads.get(thread_id)
            if active is None:
                return records, None
            if active.owner in records.owners:
                break
            # Read again, so that state and lease are of one moment.
            self._owners = (active.owner, *self._owners[: _OWNERS_SEEN - 1])
            records = await self.read(session, replace(reads, owners=(active.owner,)))
        active = head_of(records, session).threads.get(thread_id)
        return records, None if active is None else records.owners.get(active.owner)

    async def alive(self, lease: OwnerLease) -> bool:
        """Whether the owner is, as far as the store can know: a lease runs on after `kill -9`, its lock does not (D14).

        Nothing is looked at where the lease has run out, and one owner's lock where it has not.
        """
        return lease.alive and not await self.records.dead_owners((lease.owner,))

    async def all_under(self, session: SessionKey, prefix: str) -> list[tuple[str, bytes]]:
        """Every record under a prefix, page by page."""
        found: list[tuple[str, bytes]] = []
        after = ""
        while True:
            page = Range(prefix, after, PAGE_MAX)
            rows = (await self.read(session, Reads(ranges=(page,)))).ranges[page]
            found.extend(rows)
            if len(rows) < PAGE_MAX:
                return found
            if len(found) >= LISTING_MAX:
                raise LimitExceeded("LISTING_MAX", LISTING_MAX)
            after = rows[-1][0]

    async def events_at(self, session: SessionKey, sequences: set[int]) -> dict[int, Found]:
        """Events by their numbers. Neighbours are read together."""
        wanted = sorted(sequences)
        found: dict[int, Found] = {}
        start = 0
        while start < len(wanted):
            stop = start + 1
            while stop < len(wanted) and wanted[stop] - wanted[stop - 1] <= NEAR:
                stop += 1
            position, through = wanted[start] - 1, wanted[stop - 1]
            while position < through:
                page = log_page(after=position, through=through)
                log = (await self.read(session, Reads(log=page))).log
                for one in events_of(log, after=position, through=through):
                    if one.sequence in sequences:
                        found[one.sequence] = one
                if len(log) < LOG_ROWS:
                    break
                position = last_of(log[-1])
            start = stop
        missing = sequences - found.keys()
        if missing:
            raise CorruptRecord(f"event {min(missing)}", "log row", "a record refers to it, and it is not there")
        return found

    async def stream(
        self, session: SessionKey, stream: str, first: int, last: int, column: Column
    ) -> AsyncIterator[LogRow]:
        """Rows of a Thread's stream from `first` to `last` (0: the newest), oldest first, with one of their columns."""
        while True:
            page = StreamRange(stream=stream, first=first, last=last, limit=LOG_ROWS, columns=(column,))
            rows = (await self.read(session, Reads(streams=(page,)))).streams[page]
            for row in rows:
                yield row
            if len(rows) < LOG_ROWS:
                return
            first = rows[-1].at + 1
