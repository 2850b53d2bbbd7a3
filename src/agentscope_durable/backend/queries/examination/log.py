"""Everything a Session holds: every commit, every record."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from agentscope_durable.backend.queries.examination.report import ASK, Report, spoken
from agentscope_durable.backend.queries.reading import LOG_ROWS, Reader, log_page
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Severity
from agentscope_durable.domain.examination import place, record_fault
from agentscope_durable.spi.inspection import InspectedRecords
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    LogRow,
    Range,
    Reads,
)

__all__ = ["event_rows", "examine_log", "examine_records"]


async def examine_log(reader: Reader, session: SessionKey, report: Report) -> None:
    records = await reader.read(session, Reads())

    async def missing(first: int, until: int) -> None:
        # What was pruned while it was looked at is no damage.
        first = max(first, (await reader.read(session, Reads())).pruned_through + 1)
        count = until - first
        if count <= 0:
            return
        subject = f"{place(first, count, '', 0)} of {spoken(session)}"
        report.find("log", Severity.DAMAGE, subject, "it is missing", ASK, session=session)

    # Below that, rows may have no events any more.
    expected = records.pruned_through + 1
    async for row in event_rows(reader, session):
        if expected < row.first < records.next_seq:
            await missing(expected, row.first)
        expected = max(expected, row.first + row.count)
    if expected < records.next_seq:
        await missing(expected, records.next_seq)
    if not isinstance(reader.records, InspectedRecords):
        return
    after: tuple[int, int] | None = None
    while True:
        page = await reader.records.damaged(keys.partition(session), after, LOG_ROWS)
        report.look("log", page.looked_at)
        for row in page.rows:
            subject = f"{place(row.first, row.count, row.stream, row.at)} of {spoken(session)}"
            problem = f"its {row.parts} is not what was written"
            report.find("log", Severity.DAMAGE, subject, problem, ASK, session=session, thread_id=row.stream or None)
        after = page.after
        if after is None:
            return


async def examine_records(reader: Reader, session: SessionKey, report: Report) -> None:
    after = ""
    while True:
        page = Range("", after, PAGE_MAX)
        rows: Sequence[tuple[str, bytes]] = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        report.look("records", len(rows))
        for key, data in rows:
            fault = record_fault(key, data)
            if fault is not None:
                report.find("records", Severity.DAMAGE, f"record {key!r}", fault, ASK, session=session)
        if len(rows) < PAGE_MAX:
            return
        after = rows[-1][0]


async def event_rows(reader: Reader, session: SessionKey) -> AsyncIterator[LogRow]:
    """Rows of the Session that hold events, in their order."""
    records = await reader.read(session, Reads())
    position, last = 0, records.next_seq - 1
    while position < last:
        page = log_page(after=position, through=last)
        log = (await reader.read(session, Reads(log=page))).log
        for row in log:
            position = max(position, row.first + row.count - 1)
            yield row
        if not log:
            return
