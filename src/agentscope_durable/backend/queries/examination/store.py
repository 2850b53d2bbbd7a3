"""The store itself, its hosts, and which Sessions there are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from agentscope_durable.backend.queries.examination.report import ASK, Report
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Severity
from agentscope_durable.spi.inspection import InspectedRecords
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    OwnerLease,
    ReadyScan,
    SessionScan,
)

__all__ = ["all_sessions", "examine_hosts", "examine_store"]

SESSIONS_PAGE: Final = 200
HELD_MAX: Final = 1000
"""Threads and calls of a host that is gone are counted up to this."""


async def examine_store(reader: Reader, report: Report) -> dict[str, str]:
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
        report.find("store", Severity.DAMAGE, "the file", fault, ASK)
    for risk in condition.risks:
        report.find("store", Severity.TROUBLE, "the file", risk, "Correct that before hosts write it again.")
    for name in condition.drafts:
        report.find(
            "store",
            Severity.NOTE,
            name,
            "it was left when the store was made, and is no part of it",
            "The next host that opens the store removes it.",
        )
    report.look("locks", len(condition.strays))
    for name in condition.strays:
        report.find(
            "locks", Severity.NOTE, name, "no host holds it and no lease names it", "A host removes it in time."
        )
    return condition.facts


async def examine_hosts(reader: Reader, report: Report) -> None:
    # Each has a lease before it owns anything, so who is found to own something before the leases are read is found
    # among them, or is gone.
    told: set[str] = set()
    for kind in (keys.READY_LEASE, keys.READY_RUNNING):
        async for owner in _without_lease(reader, kind):
            if owner not in told:
                told.add(owner)
                await _gone(reader, report, owner, "has no lease")
    dead = set(await reader.records.dead_owners())
    async for lease in _leases(reader):
        report.look("hosts")
        if not lease.alive or lease.owner in dead:
            gone = "is dead" if lease.owner in dead else "has not renewed its lease in time"
            await _gone(reader, report, lease.owner, gone)


async def _gone(reader: Reader, report: Report, owner: str, gone: str) -> None:
    threads = await _held(reader, keys.READY_LEASE, owner)
    calls = await _held(reader, keys.READY_RUNNING, owner)
    if threads or calls:
        of_both = ((threads, "Thread"), (calls, "call"))
        held = ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for count, what in of_both if count)
        report.find(
            "hosts",
            Severity.TROUBLE,
            owner,
            f"it {gone} and still owns {held}",
            "Start a host that has their definitions and routes: it takes them over at its next look.",
        )


async def _held(reader: Reader, kind: str, owner: str) -> int:
    return len((await reader.records.ready(ReadyScan(kind, owner, limit=HELD_MAX))).items)


async def _leases(reader: Reader) -> AsyncIterator[OwnerLease]:
    after = ""
    while True:
        page = await reader.records.owners(after)
        for lease in page:
            yield lease
        if len(page) < PAGE_MAX:
            return
        after = page[-1].owner


async def _without_lease(reader: Reader, kind: str) -> AsyncIterator[str]:
    """Who owns something of a kind and has no lease, a page at a time."""
    after = ""
    while True:
        page = await reader.records.ready_classes(kind, "", after)
        without = dict.fromkeys(page)
        async for lease in _leases(reader):
            without.pop(lease.owner, None)
        for owner in without:
            yield owner
        if len(page) < PAGE_MAX:
            return
        after = page[-1]


async def all_sessions(reader: Reader, report: Report) -> AsyncIterator[SessionKey]:
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
