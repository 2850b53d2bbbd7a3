"""Whether a store is sound: every check, made in pages, and each finding down to the record it is about (C82).

Rule 1: it reads and changes nothing. What is wrong is told, and stays as it is.
Rule 2: damage in one place keeps nobody from looking at the next: a fault is a finding, and the examination goes on.
Rule 3: memory is bounded by a page and by FINDINGS_MAX, however large the store is.
"""

from __future__ import annotations

from agentscope_durable.backend.queries.examination.log import examine_log, examine_records
from agentscope_durable.backend.queries.examination.objects import examine_objects, examine_strangers
from agentscope_durable.backend.queries.examination.report import CHECKS, DEEP, Report, spoken
from agentscope_durable.backend.queries.examination.store import all_sessions, examine_hosts, examine_store
from agentscope_durable.backend.queries.examination.threads import all_threads, examine_thread
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.change import ReadyRow
from agentscope_durable.contracts.errors import DurableError, NotFound, SessionDropped
from agentscope_durable.contracts.examination import Examination
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import ResourceStatus, Severity
from agentscope_durable.spi.inspection import InspectedRecords
from agentscope_durable.spi.record_store import Reads

__all__ = ["CHECKS", "DEEP", "examine"]


async def examine(reader: Reader, question: q.Examine) -> Examination:
    report = Report(deep=question.deep)
    store: dict[str, str] = {}
    if question.session is None:
        store = await examine_store(reader, report)
        await examine_hosts(reader, report)
        async for session in all_sessions(reader, report):
            await _session(reader, session, report)
        await examine_strangers(reader, report)
    else:
        records = await reader.records.read(keys.partition(question.session), Reads())
        if records.head is None:
            raise NotFound("session", f"{question.session.namespace}/{question.session.session_id}")
        for name in ("store", "hosts", "locks"):
            report.skip(name, "one Session is looked at")
        await _session(reader, question.session, report)
    return report.view(store)


async def _session(reader: Reader, session: SessionKey, report: Report) -> None:
    report.look("sessions")
    try:
        try:
            await _whole(reader, session, report)
        except SessionDropped:
            # Before, or while it was looked at: neither is damage.
            await _dropped(reader, session, report)
    except DurableError as error:
        report.fault("sessions", spoken(session), error, session)


async def _whole(reader: Reader, session: SessionKey, report: Report) -> None:
    _ = await reader.read(session, Reads())
    ready = await _ready_of(reader, session, report)
    async for records, thread in all_threads(reader, session, report):
        await examine_thread(reader, session, records, thread, ready, report)
    await examine_objects(reader, session, report)
    if report.deep:
        await examine_log(reader, session, report)
        await examine_records(reader, session, report)


async def _dropped(reader: Reader, session: SessionKey, report: Report) -> None:
    head = (await reader.records.read(keys.partition(session), Reads())).head
    if head is not None and head.status is ResourceStatus.DROPPING:
        action = "Drop it again: that goes on where it stopped."
        report.find("sessions", Severity.NOTE, spoken(session), "it is being dropped", action, session=session)
    else:
        await examine_objects(reader, session, report)


async def _ready_of(reader: Reader, session: SessionKey, report: Report) -> list[ReadyRow] | None:
    if isinstance(reader.records, InspectedRecords):
        return await reader.records.ready_of(keys.partition(session))
    for name in ("schedule", "log"):
        report.skip(name, "this store tells nothing of that")
    return None
