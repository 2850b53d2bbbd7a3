"""Large bodies: those that are referred to, and those that belong to nobody."""

from __future__ import annotations

from typing import Final

from agentscope_durable.backend.queries.examination.log import event_rows
from agentscope_durable.backend.queries.examination.report import ASK, Report
from agentscope_durable.backend.queries.examination.store import all_sessions
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import COLUMNS
from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import ObjectRecord, ThreadRecord, decode
from agentscope_durable.contracts.status import Severity
from agentscope_durable.domain.examination import mentions, place
from agentscope_durable.spi.inspection import InspectedObjects
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Range,
    Reads,
)

__all__ = ["ORPHAN_AGE_MS", "examine_objects", "examine_strangers"]

ORPHAN_AGE_MS: Final = 24 * 3_600_000
"""A body that no commit has referred to for so long is referred to by none (D11)."""
FOLDERS_PAGE: Final = 1000


async def examine_objects(reader: Reader, session: SessionKey, report: Report) -> None:
    objects = reader.bodies.objects
    if objects is None:
        report.skip("objects", "this backend keeps none")
        return
    partition = keys.partition(session)
    known_until, after = "", ""
    while True:
        page = Range(keys.OBJECTS, after, PAGE_MAX)
        records = await reader.read(session, Reads(ranges=(page,)))
        rows = records.ranges[page]
        for key, data in rows:
            digest = key.removeprefix(keys.OBJECTS)
            report.look("objects")
            try:
                record = decode(ObjectRecord, data, key=key)
                there = await objects.exists(partition, digest)
                if there and report.deep:
                    _ = await objects.get(partition, digest)
            except DurableError as error:
                users = await _users(reader, session, digest)
                report.fault("objects", f"object {digest}, used by {users}", error, session)
                continue
            referred = record.state == "referenced"
            if referred and not there:
                users = await _users(reader, session, digest)
                problem = f"it is referred to and is not there; used by {users}"
                report.find("objects", Severity.DAMAGE, f"object {digest}", problem, ASK, session=session)
            elif not referred and there and records.now_ms - record.marked_ms > ORPHAN_AGE_MS:
                problem = f"no commit refers to it; {record.size} bytes"
                report.find(
                    "objects", Severity.NOTE, f"object {digest}", problem, "It may be deleted.", session=session
                )
        end = "" if len(rows) < PAGE_MAX else rows[-1][0].removeprefix(keys.OBJECTS)
        await _unknown(reader, session, {key.removeprefix(keys.OBJECTS) for key, _ in rows}, known_until, end, report)
        if len(rows) < PAGE_MAX:
            return
        known_until, after = end, rows[-1][0]


async def _unknown(
    reader: Reader, session: SessionKey, known: set[str], after: str, through: str, report: Report
) -> None:
    """Bodies with a name above `after`, up to `through`, that no record speaks of."""
    objects = reader.bodies.objects
    assert objects is not None
    while True:
        names = await objects.list(keys.partition(session), after, PAGE_MAX)
        for name in names:
            if through and name > through:
                return
            if name not in known:
                report.look("objects")
                problem = "no record speaks of it"
                report.find("objects", Severity.NOTE, f"object {name}", problem, "It may be deleted.", session=session)
        if len(names) < PAGE_MAX:
            return
        after = names[-1]


async def _users(reader: Reader, session: SessionKey, digest: str) -> str:
    """The commits that refer to an object, as people find them again."""
    found: list[str] = []
    page = Range(keys.THREADS, limit=PAGE_MAX)
    for key, data in (await reader.read(session, Reads(ranges=(page,)))).ranges[page]:
        thread_id = decode(ThreadRecord, data, key=key).thread_id
        for column in COLUMNS:
            async for row in reader.stream(session, thread_id, 1, 0, column):
                if mentions(row, digest):
                    found.append(place(row.first, row.count, row.stream, row.at))
    async for row in event_rows(reader, session):
        if not row.stream and mentions(row, digest):
            found.append(place(row.first, row.count, row.stream, row.at))
    return ", ".join(found[:5]) or "a record"


async def examine_strangers(reader: Reader, report: Report) -> None:
    """Bodies of Sessions that are not there."""
    objects = reader.bodies.objects
    if not isinstance(objects, InspectedObjects):
        return
    after = ""
    while True:
        folders = await objects.folders(after, FOLDERS_PAGE)
        left = set(folders)
        if left:
            async for session in all_sessions(reader, report):
                left.discard(objects.folder_of(keys.partition(session)))
        for name in sorted(left):
            problem = "its bodies belong to a Session that is not in this store"
            report.find("objects", Severity.NOTE, f"folder {name}", problem, "It may be deleted.")
        if len(folders) < FOLDERS_PAGE:
            return
        after = folders[-1]
