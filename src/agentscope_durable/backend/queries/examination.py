"""Whether a store is sound: every check, made in pages, and each finding down to the record it is about (C82).

Rule 1: it reads and changes nothing. What is wrong is told, and stays as it is.
Rule 2: damage in one place keeps nobody from looking at the next: a fault is a finding, and the examination goes on.
Rule 3: memory is bounded by a page and by FINDINGS_MAX, however large the store is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from agentscope_durable.backend.queries.reading import LOG_ROWS, Reader, log_page
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.change import COLUMNS, Column, ReadyRow, Records
from agentscope_durable.contracts.checkpoint import position_of
from agentscope_durable.contracts.errors import DurableError, NotFound
from agentscope_durable.contracts.examination import FINDINGS_MAX, CheckView, Examination, Finding
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.records import CheckpointRecord, ObjectRecord, ThreadRecord, TurnRecord, decode
from agentscope_durable.contracts.status import Severity
from agentscope_durable.domain.examination import Chain, mentions, place, record_fault, schedule_fault
from agentscope_durable.spi.inspection import InspectedObjects, InspectedRecords
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    LogRow,
    Range,
    Reads,
    ReadyScan,
    SessionScan,
    StreamRange,
)

__all__ = ["CHECKS", "examine"]

CHECKS: Final[dict[str, str]] = {
    "store": "what the store itself finds wrong with its file",
    "hosts": "hosts that are gone and still own work",
    "locks": "lock files that belong to no host",
    "sessions": "heads of Sessions and their Threads",
    "schedule": "work that no host would ever find",
    "threads": "native state from the last base to the last checkpoint, against its digest",
    "objects": "large bodies that are referred to, or belong to nobody",
    "log": "every commit, against its sums",
    "records": "every record",
    "checkpoints": "every settled position, against its digest",
}
"""Every check, in the order in which they are told, and what it looks at."""
DEEP: Final = ("log", "records", "checkpoints")
"""Checks that read everything there is."""

ORPHAN_AGE_MS: Final = 24 * 3_600_000
"""A body that no commit has referred to for so long is referred to by none (D11)."""
SESSIONS_PAGE: Final = 200
FOLDERS_PAGE: Final = 1000
HELD_MAX: Final = 1000
"""Threads and calls of a host that is gone are counted up to this."""
GOOD_TRIES: Final = 20
"""Settled positions that are looked at, from the newest on, to find one that is good."""
_ASK: Final = "Keep the store as it is and make a copy of it; restore a backup, or repair it from that copy."


async def examine(reader: Reader, question: q.Examine) -> Examination:
    report = _Report(deep=question.deep)
    store: dict[str, str] = {}
    if question.session is None:
        store = await _store(reader, report)
        await _hosts(reader, report)
        async for session in _sessions(reader, report):
            await _session(reader, session, report)
        await _strangers(reader, report)
    else:
        records = await reader.records.read(keys.partition(question.session), Reads())
        if records.head is None:
            raise NotFound("session", f"{question.session.namespace}/{question.session.session_id}")
        for name in ("store", "hosts", "locks"):
            report.skip(name, "one Session is looked at")
        await _session(reader, question.session, report)
    return report.view(store)


class _Report:
    """What was looked at and found, bounded."""

    def __init__(self, *, deep: bool) -> None:
        self.deep = deep
        self._looked_at = dict.fromkeys(CHECKS, 0)
        self._found = dict.fromkeys(CHECKS, 0)
        self._skipped: dict[str, str] = {} if deep else dict.fromkeys(DEEP, "it reads everything: with --deep only")
        self._findings: list[Finding] = []
        self._worst: set[Severity] = set()

    def look(self, check: str, count: int = 1) -> None:
        self._looked_at[check] += count

    def skip(self, check: str, why: str) -> None:
        self._skipped[check] = why

    def find(self, check: str, severity: Severity, subject: str, problem: str, next_action: str, **where: Any) -> None:
        self._found[check] += 1
        self._worst.add(severity)
        if len(self._findings) < FINDINGS_MAX:
            self._findings.append(Finding(check, severity, subject, problem, next_action, **where))

    def fault(self, check: str, subject: str, error: DurableError, session: SessionKey | None = None) -> None:
        """Something could not even be read."""
        self.find(check, Severity.DAMAGE, subject, error.what, _ASK, session=session)

    def view(self, store: dict[str, str]) -> Examination:
        order = list(Severity)
        findings = sorted(self._findings, key=lambda finding: order.index(finding.severity))
        checks = tuple(
            CheckView(
                name=name,
                about=about,
                looked_at=self._looked_at[name],
                findings=self._found[name],
                skipped=self._skipped.get(name),
            )
            for name, about in CHECKS.items()
        )
        return Examination(
            sound=not self._worst - {Severity.NOTE},
            store=store,
            checks=checks,
            findings=tuple(findings),
            more=sum(self._found.values()) - len(findings),
            deep=self.deep,
        )


# ------------------------------------------------------------ the store and its hosts


async def _store(reader: Reader, report: _Report) -> dict[str, str]:
    records = reader.records
    if not isinstance(records, InspectedRecords):
        for name in ("store", "locks"):
            report.skip(name, "this store tells nothing of that")
        return {}
    report.look("store")
    try:
        condition = await records.condition(deep=report.deep)
    except DurableError as error:
        report.fault("store", "the file", error)
        return {}
    for fault in condition.faults:
        report.find("store", Severity.DAMAGE, "the file", fault, _ASK)
    for risk in condition.risks:
        report.find("store", Severity.TROUBLE, "the file", risk, "Correct that before hosts write it again.")
    report.look("locks", len(condition.strays))
    for name in condition.strays:
        report.find(
            "locks", Severity.NOTE, name, "no host holds it and no lease names it", "A host removes it in time."
        )
    return condition.facts


async def _hosts(reader: Reader, report: _Report) -> None:
    dead = set(await reader.records.dead_owners())
    after = ""
    while True:
        page = await reader.records.owners(after)
        for lease in page:
            report.look("hosts")
            if lease.alive and lease.owner not in dead:
                continue
            threads = await _held(reader, keys.READY_LEASE, lease.owner)
            calls = await _held(reader, keys.READY_RUNNING, lease.owner)
            if threads or calls:
                held = ", ".join(f"{count} {what}" for count, what in ((threads, "Threads"), (calls, "calls")) if count)
                gone = "is dead" if lease.owner in dead else "has not renewed its lease in time"
                report.find(
                    "hosts",
                    Severity.TROUBLE,
                    lease.owner,
                    f"it {gone} and still owns {held}",
                    "Start a host that has their definitions and routes: it takes them over at its next look.",
                )
        if len(page) < PAGE_MAX:
            return
        after = page[-1].owner


async def _held(reader: Reader, kind: str, owner: str) -> int:
    return len((await reader.records.ready(ReadyScan(kind, owner, limit=HELD_MAX))).items)


async def _sessions(reader: Reader, report: _Report) -> AsyncIterator[SessionKey]:
    after = ""
    while True:
        try:
            names = await reader.records.sessions(SessionScan(prefix="", after=after, limit=SESSIONS_PAGE))
        except DurableError as error:
            report.fault("sessions", "the list of Sessions", error)
            return
        for name in names:
            yield keys.session_of(name)
        if len(names) < SESSIONS_PAGE:
            return
        after = names[-1]


# ------------------------------------------------------------ one Session


async def _session(reader: Reader, session: SessionKey, report: _Report) -> None:
    report.look("sessions")
    try:
        ready = await _ready_of(reader, session, report)
        async for records, thread in _threads(reader, session, report):
            await _thread(reader, session, records, thread, ready, report)
        await _objects(reader, session, report)
        if report.deep:
            await _log(reader, session, report)
            await _records(reader, session, report)
    except DurableError as error:
        report.fault("sessions", _spoken(session), error, session)


async def _ready_of(reader: Reader, session: SessionKey, report: _Report) -> list[ReadyRow] | None:
    if isinstance(reader.records, InspectedRecords):
        return await reader.records.ready_of(keys.partition(session))
    for name in ("schedule", "log"):
        report.skip(name, "this store tells nothing of that")
    return None


async def _threads(reader: Reader, session: SessionKey, report: _Report) -> AsyncIterator[tuple[Records, ThreadRecord]]:
    after = ""
    while True:
        page = Range(keys.THREADS, after, PAGE_MAX)
        records = await reader.read(session, Reads(ranges=(page,)))
        rows = records.ranges[page]
        for key, data in rows:
            try:
                yield records, decode(ThreadRecord, data, key=key)
            except DurableError as error:
                report.fault("sessions", f"record {key!r}", error, session)
        if len(rows) < PAGE_MAX:
            return
        after = rows[-1][0]


async def _thread(
    reader: Reader,
    session: SessionKey,
    records: Records,
    thread: ThreadRecord,
    ready: list[ReadyRow] | None,
    report: _Report,
) -> None:
    active = None if records.head is None else records.head.threads.get(thread.thread_id)
    where = {"session": session, "thread_id": thread.thread_id, "turn_id": thread.current or None}
    subject = f"thread {thread.thread_id!r} of {_spoken(session)}"
    turn: TurnRecord | None = None
    if thread.current:
        turn_key = keys.turn(thread.current)
        data = (await reader.read(session, Reads(keys=(turn_key,)))).keys.get(turn_key)
        try:
            turn = None if data is None else decode(TurnRecord, data, key=turn_key)
        except DurableError as error:
            report.fault("sessions", f"record {turn_key!r}", error, session)
            ready = None
    if ready is not None:
        report.look("schedule")
        lost = schedule_fault(thread, turn, active, ready)
        # What was read a moment ago may have moved on: a finding stands only if it is still so.
        if lost is not None and await _still(reader, session, thread.thread_id, lost):
            action = "Pause and resume the Turn: its place in the index is written again with its state."
            report.find("schedule", Severity.DAMAGE, subject, lost, action, **where)
    base, last = (thread.base_at, thread.checkpoint_at) if active is None else (active.base_at, active.checkpoint_at)
    digest, position = (thread.digest, thread.position) if active is None else (active.digest, active.position)
    report.look("threads")
    faults = await _chain_faults(reader, session, thread.thread_id, base, last, digest) if last else {}
    if position > last:
        # Without the newest commit, this is not all that was written.
        newest = Chain(position, position)
        await _feed(reader, session, thread.thread_id, newest)
        faults |= newest.faults("")
    if 0 in faults:
        faults = await _altered(reader, session, thread.thread_id, base, last) or faults
    if faults:
        action, commands = await _remedy(reader, session, thread)
        for at, fault in faults.items():
            about = f"position {at} of {subject}" if at else f"positions {base} to {last} of {subject}"
            report.find("threads", Severity.DAMAGE, about, fault, action, commands=commands, **where)
    if report.deep:
        # Whether each row is what was written, its own sums say where there are such.
        whole = Chain(1, position, decode=not isinstance(reader.records, InspectedRecords))
        await _feed(reader, session, thread.thread_id, whole)
        for at, fault in whole.faults("").items():
            if at not in faults:
                report.find("log", Severity.DAMAGE, f"position {at} of {subject}", fault, _ASK, **where)
        async for at, record in _checkpoints(reader, session, thread.thread_id):
            report.look("checkpoints")
            bad = await _chain_faults(reader, session, thread.thread_id, record.base_at, at, record.digest)
            if bad:
                name = position_of(ThreadKey(session, thread.thread_id), at)
                problem = "; ".join(f"position {place}: {fault}" if place else fault for place, fault in bad.items())
                action = "Do not go back to it; the positions that are not listed here are good."
                report.find("checkpoints", Severity.DAMAGE, f"{name} of {subject}", problem, action, **where)


async def _still(reader: Reader, session: SessionKey, thread_id: str, fault: str) -> bool:
    """Whether a fault of the schedule is there when everything is read once more."""
    assert isinstance(reader.records, InspectedRecords)
    wanted = keys.thread(thread_id)
    records = await reader.read(session, Reads(keys=(wanted,)))
    ready = await reader.records.ready_of(keys.partition(session))
    thread = decode(ThreadRecord, records.keys[wanted], key=wanted)
    turn_key = keys.turn(thread.current)
    again = await reader.read(session, Reads(keys=(turn_key,)))
    turn = None if turn_key not in again.keys else decode(TurnRecord, again.keys[turn_key], key=turn_key)
    active = None if again.head is None else again.head.threads.get(thread_id)
    return schedule_fault(thread, turn, active, ready) == fault


async def _chain_faults(
    reader: Reader, session: SessionKey, thread_id: str, base: int, last: int, digest: str
) -> dict[int, str]:
    chain = Chain(base, last)
    await _feed(reader, session, thread_id, chain)
    return chain.faults(digest)


async def _feed(reader: Reader, session: SessionKey, thread_id: str, chain: Chain) -> None:
    """The rows of a chain, doubles included, page by page."""
    first = chain.first
    while first <= chain.last:
        page = StreamRange(thread_id, first=first, last=chain.last, limit=LOG_ROWS, columns=(Column.JOURNAL,))
        rows = (await reader.read(session, Reads(streams=(page,)))).streams[page]
        for row in rows:
            chain.add(row)
        if len(rows) < LOG_ROWS:
            return
        first = rows[-1].at + 1


async def _altered(reader: Reader, session: SessionKey, thread_id: str, base: int, last: int) -> dict[int, str]:
    """Which rows of a chain that does not add up were altered, as their own sums say."""
    found: dict[int, str] = {}
    if isinstance(reader.records, InspectedRecords):
        after: tuple[int, int] | None = None
        while True:
            page = await reader.records.damaged(keys.partition(session), after, LOG_ROWS)
            for row in page.rows:
                if row.stream == thread_id and base <= row.at <= last:
                    found[row.at] = f"its {row.parts} is not what was written"
            after = page.after
            if after is None:
                break
    return found


async def _checkpoints(
    reader: Reader, session: SessionKey, thread_id: str
) -> AsyncIterator[tuple[int, CheckpointRecord]]:
    """Settled positions of a Thread, oldest first."""
    prefix, after = keys.checkpoints(thread_id), ""
    while True:
        page = Range(prefix, after, PAGE_MAX)
        rows = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        for key, data in rows:
            yield int(key.removeprefix(prefix)), decode(CheckpointRecord, data, key=key)
        if len(rows) < PAGE_MAX:
            return
        after = rows[-1][0]


async def _remedy(reader: Reader, session: SessionKey, thread: ThreadRecord) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """From where a damaged Thread can go on: its newest settled position that is good."""
    key = ThreadKey(session, thread.thread_id)
    newest: deque[tuple[int, CheckpointRecord]] = deque(maxlen=GOOD_TRIES)
    async for found in _checkpoints(reader, session, thread.thread_id):
        newest.append(found)
    for at, record in reversed(newest):
        if not await _chain_faults(reader, session, thread.thread_id, record.base_at, at, record.digest):
            name = position_of(key, at)
            action = (
                f"Only this Thread is concerned. Its newest good position is {name}: keep a copy, then go back to it."
            )
            if thread.current:
                current = () if not thread.settled_at else ("--expected", position_of(key, thread.settled_at))
                return action, (("repair", thread.current, "--position", name, *current),)
            return action, (("checkpoints", keys.spell(session), "--thread", thread.thread_id),)
    return "Only this Thread is concerned. No settled position of it is good: its agent has to begin anew.", ()


# ------------------------------------------------------------ large bodies


async def _objects(reader: Reader, session: SessionKey, report: _Report) -> None:
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
                report.find("objects", Severity.DAMAGE, f"object {digest}", problem, _ASK, session=session)
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
    reader: Reader, session: SessionKey, known: set[str], after: str, through: str, report: _Report
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
    async for row in _rows(reader, session):
        if not row.stream and mentions(row, digest):
            found.append(place(row.first, row.count, row.stream, row.at))
    return ", ".join(found[:5]) or "a record"


async def _rows(reader: Reader, session: SessionKey) -> AsyncIterator[LogRow]:
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


async def _strangers(reader: Reader, report: _Report) -> None:
    """Bodies of Sessions that are not there."""
    objects = reader.bodies.objects
    if not isinstance(objects, InspectedObjects):
        return
    after = ""
    while True:
        folders = await objects.folders(after, FOLDERS_PAGE)
        left = set(folders)
        if left:
            async for session in _sessions(reader, report):
                left.discard(objects.folder_of(keys.partition(session)))
        for name in sorted(left):
            problem = "its bodies belong to a Session that is not in this store"
            report.find("objects", Severity.NOTE, f"folder {name}", problem, "It may be deleted.")
        if len(folders) < FOLDERS_PAGE:
            return
        after = folders[-1]


# ------------------------------------------------------------ everything there is


async def _log(reader: Reader, session: SessionKey, report: _Report) -> None:
    records = await reader.read(session, Reads())

    def missing(first: int, count: int) -> None:
        subject = f"{place(first, count, '', 0)} of {_spoken(session)}"
        report.find("log", Severity.DAMAGE, subject, "it is missing", _ASK, session=session)

    # Below that, rows may have no events any more.
    expected = records.pruned_through + 1
    async for row in _rows(reader, session):
        if expected < row.first < records.next_seq:
            missing(expected, row.first - expected)
        expected = max(expected, row.first + row.count)
    if expected < records.next_seq:
        missing(expected, records.next_seq - expected)
    if not isinstance(reader.records, InspectedRecords):
        return
    after: tuple[int, int] | None = None
    while True:
        page = await reader.records.damaged(keys.partition(session), after, LOG_ROWS)
        report.look("log", page.looked_at)
        for row in page.rows:
            subject = f"{place(row.first, row.count, row.stream, row.at)} of {_spoken(session)}"
            problem = f"its {row.parts} is not what was written"
            report.find("log", Severity.DAMAGE, subject, problem, _ASK, session=session, thread_id=row.stream or None)
        after = page.after
        if after is None:
            return


async def _records(reader: Reader, session: SessionKey, report: _Report) -> None:
    after = ""
    while True:
        page = Range("", after, PAGE_MAX)
        rows: Sequence[tuple[str, bytes]] = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        report.look("records", len(rows))
        for key, data in rows:
            fault = record_fault(key, data)
            if fault is not None:
                report.find("records", Severity.DAMAGE, f"record {key!r}", fault, _ASK, session=session)
        if len(rows) < PAGE_MAX:
            return
        after = rows[-1][0]


def _spoken(session: SessionKey) -> str:
    return f"session {keys.spell(session)}"
