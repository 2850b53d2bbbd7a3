"""Threads: whether a host would find their work, and whether their native state is what was written."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from agentscope_durable.backend.queries.examination.report import ASK, Report, spoken
from agentscope_durable.backend.queries.reading import LOG_ROWS, Reader
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Column, ReadyRow, Records
from agentscope_durable.contracts.checkpoint import position_of
from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.records import CheckpointRecord, ThreadRecord, TurnRecord, decode, ordinal_of
from agentscope_durable.contracts.status import Severity
from agentscope_durable.domain.examination import Chain, schedule_fault
from agentscope_durable.spi.inspection import InspectedRecords
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Range,
    Reads,
    StreamRange,
)

__all__ = ["all_threads", "examine_thread"]

GOOD_TRIES: Final = 20
"""Settled positions that are looked at, from the newest on, to find one that is good."""


async def all_threads(
    reader: Reader, session: SessionKey, report: Report
) -> AsyncIterator[tuple[Records, ThreadRecord]]:
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


async def examine_thread(
    reader: Reader,
    session: SessionKey,
    records: Records,
    thread: ThreadRecord,
    ready: list[ReadyRow] | None,
    report: Report,
) -> None:
    active = None if records.head is None else records.head.threads.get(thread.thread_id)
    where = {"session": session, "thread_id": thread.thread_id, "turn_id": thread.current or None}
    subject = f"thread {thread.thread_id!r} of {spoken(session)}"
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
                report.find("log", Severity.DAMAGE, f"position {at} of {subject}", fault, ASK, **where)
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
            yield ordinal_of(key, prefix), decode(CheckpointRecord, data, key=key)
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
