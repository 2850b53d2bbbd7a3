"""(k) What does it take to drop a large Session, and whom does that hold up?

A closed Session with 100,000 events in 50,000 commits of about 1 KB, and 100,000 records, on SQLite with FULL, is
dropped while another Session commits one small change after the other. Printed: how long it takes, its slices, what
the neighbour's commits take meanwhile and take alone, and what stays.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path

from agentscope_durable import HostOperations, LocalBackend, SessionKey
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.commands import CloseSession, CreateSession
from agentscope_durable.contracts.records import Binding
from agentscope_durable.spi.record_store import Change, Entry, Reads, Unchanged, View
from benchmarks.measure import percentile

LARGE, NEIGHBOUR = SessionKey("bench", "large"), SessionKey("bench", "neighbour")
COMMITS, RECORDS_EACH, AT_ONCE = 50_000, 2, 500
ALONE = 200


async def fill(backend: LocalBackend) -> None:
    """Rows and records of the sizes that an agent's commits leave."""
    body = b'["' + os.urandom(200).hex().encode() + b'","' + os.urandom(200).hex().encode() + b'"]'
    value = b'"' + os.urandom(150).hex().encode() + b'"'

    async def commit(number: int) -> None:
        def decide(view: View, now_ms: int) -> Change | Unchanged:
            assert view.head is not None
            entry = Entry(events=body, count=2, private=b"[1]", journal=b"[" + b"1" * 300 + b"]")
            puts = tuple((f"request/r{number:06}-{n}", value) for n in range(RECORDS_EACH))
            return Change(head=view.head, commit_id=f"{number:032x}", entry=entry, puts=puts)

        await backend.records.transact(keys.partition(LARGE), Reads(), decide)

    for start in range(0, COMMITS, AT_ONCE):
        await asyncio.gather(*(commit(start + number) for number in range(AT_ONCE)))


async def small_commit(backend: LocalBackend, number: int) -> float:
    def decide(view: View, now_ms: int) -> Change | Unchanged:
        assert view.head is not None
        return Change(head=view.head, commit_id=f"{number:032x}", entry=Entry(private=b"[1]"))

    started = time.perf_counter()
    await backend.records.transact(keys.partition(NEIGHBOUR), Reads(), decide)
    return time.perf_counter() - started


async def measure(directory: Path) -> dict[str, float]:
    async with LocalBackend.open(directory) as backend:
        for session in (LARGE, NEIGHBOUR):
            await backend.execute(CreateSession(session=session, binding=Binding("agent", "v1", "s1")))
        await fill(backend)
        await backend.execute(CloseSession(session=LARGE))
        alone = [await small_commit(backend, number) for number in range(ALONE)]

        beside: list[float] = []
        done = asyncio.Event()

        async def neighbour() -> None:
            while not done.is_set():
                beside.append(await small_commit(backend, ALONE + len(beside)))

        living = asyncio.ensure_future(neighbour())
        before = (await backend.records.statistics()).changes
        started, cpu = time.perf_counter(), time.process_time()
        receipt = await HostOperations(backend).drop_session(LARGE)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        done.set()
        await living
        size = await backend.records.measure(keys.partition(LARGE))
        slices = (await backend.records.statistics()).changes - before - len(beside)
        return {
            "events": receipt.events,
            "records": receipt.records,
            "seconds": seconds,
            "CPU seconds": cpu,
            "slices": slices,
            "ms per slice": seconds / slices * 1000,
            "neighbour commit p50 ms": percentile(beside, 0.5) * 1000,
            "neighbour commit p99 ms": percentile(beside, 0.99) * 1000,
            "neighbour alone p50 ms": percentile(alone, 0.5) * 1000,
            "neighbour alone p99 ms": percentile(alone, 0.99) * 1000,
            "bytes that stay": size.head_bytes + size.record_bytes + size.log_bytes,
        }


def run() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as directory:
        return {"k drop, 100,000 events": asyncio.run(measure(Path(directory)))}
