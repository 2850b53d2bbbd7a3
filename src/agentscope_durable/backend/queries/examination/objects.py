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
from agentscope_durable.contracts.records import ObjectRecord, ObjectState, ThreadRecord, decode
from agentscope_durable.contracts.status import Severity
from agentscope_durable.domain.examination import mentions, place
from agentscope_durable.domain.objects import is_orphan
from agentscope_durable.spi.inspection import InspectedObjects
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Range,
    Reads,
)

__all__ = ["examine_objects", "examine_strangers"]

FOLDERS_PAGE: Final = 1000
SWEEP: Final = "A sweep removes it."
SWEPT: Final = (("sweep",),)
LOOK: Final = "If no other store uses this place for its bodies, a sweep removes it with --strangers. Look first."
STRANGE: Final = (("sweep", "--strangers", "--dry-run"),)


async def examine_objects(reader: Reader, session: SessionKey, report: Report) -> None:
    objects = reader.bodies.objects
    if objects is None:
        report.skip("objects", "this backend keeps none")
        return
    partition = keys.partition(session)
    known_until, after = "", ""
    while True:
        page = Range(keys.OBJECTS, after, PAGE_MAX)
        # Of a Session that was dropped, marks are left until its bodies are swept.
        records = await reader.records.read(partition, Reads(ranges=(page,)))
        rows = records.ranges[page]
        for key, data in rows:
            name = key.removeprefix(keys.OBJECTS)
            report.look("objects")
            try:
                record = decode(ObjectRecord, data, key=key)
                there = await objects.exists(partition, name)
                if there and report.deep:
                    _ = await objects.get(partition, name)
            except DurableError as error:
                users = await _users(reader, session, name)
                report.fault("objects", f"object {name}, used by {users}", error, session)
                continue
            if record.state is ObjectState.REFERENCED and not there:
                users = await _users(reader, session, name)
                problem = f"it is referred to and is not there; used by {users}"
                report.find("objects", Severity.DAMAGE, f"object {name}", problem, ASK, session=session)
            elif is_orphan(record, records.now_ms):
                problem = f"no commit refers to it; {record.size} bytes"
                report.find("objects", Severity.NOTE, f"object {name}", problem, SWEEP, session=session, commands=SWEPT)
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
                about = f"object {name}"
                report.find("objects", Severity.NOTE, about, problem, LOOK, session=session, commands=STRANGE)
        if len(names) < PAGE_MAX:
            return
        after = names[-1]


async def _users(reader: Reader, session: SessionKey, name: str) -> str:
    """The commits that refer to an object, as people find them again."""
    found: list[str] = []
    page = Range(keys.THREADS, limit=PAGE_MAX)
    for key, data in (await reader.read(session, Reads(ranges=(page,)))).ranges[page]:
        thread_id = decode(ThreadRecord, data, key=key).thread_id
        for column in COLUMNS:
            async for row in reader.stream(session, thread_id, 1, 0, column):
                if mentions(row, name):
                    found.append(place(row.first, row.count, row.stream, row.at))
    async for row in event_rows(reader, session):
        if not row.stream and mentions(row, name):
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
            report.find("objects", Severity.NOTE, f"folder {name}", problem, LOOK, commands=STRANGE)
        if len(folders) < FOLDERS_PAGE:
            return
        after = folders[-1]
