"""What does one commit cost at the record store, measured against a raw SQLite commit of 1 KB?

    python benchmarks/store_floor.py [--seconds 3] [--repeat 3] [--directory .] [--synchronous FULL]

A *step commit* is what a Turn writes again and again: one log row (native journal block 0.9 KB, two
events of 0.4 KB, private facts 0.4 KB), the head of 300 bytes, one record of 60 bytes; random text,
a decision that takes 20 us. Everything runs in one process and interleaved, so compare the ratios, not the
milliseconds of two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import apsw
import msgspec

from agentscope_durable.contracts.records import RunState, SessionHead, ThreadHead, TurnState, encode
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.spi.record_store import Change, Committed, Decide, Entry, Reads, RecordStore, View
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore

DECIDE_SECONDS = 20e-6
TEXT = random.Random(7)


def text(size: int) -> str:
    return TEXT.randbytes(size // 2 + 1).hex()[:size]


class Content:
    """Bodies made beforehand, so that the benchmark measures the store and not the making of text."""

    def __init__(self, kinds: int = 256) -> None:
        self.entries = [
            (
                msgspec.json.encode([{"text": text(385)}, {"text": text(385)}]),
                msgspec.json.encode([text(395)]),
                msgspec.json.encode({"block": text(905)}),
            )
            for _ in range(kinds)
        ]
        turn = TurnState(status=TurnStatus.RUNNING, revision=12, runs=1, reasoning=4, last_step=text(32), updated_ms=1)
        run = RunState(text(32), 1, 1_700_000_000_000, 3, 9, text(32))
        thread = ThreadHead(1, text(32), 12, 3, 11, text(32), turn, run)
        self.head = SessionHead("bench", text(36), 1_700_000_000_000, threads={"main": thread})
        self.puts = [(f"execution/{text(32)}/{n}", msgspec.json.encode([text(56)])) for n in range(kinds)]


def step(content: Content, number: int) -> Decide:
    def decide(view: View, now_ms: int) -> Change:
        started = time.perf_counter()
        head = view.head or content.head
        events, private, journal = content.entries[number % len(content.entries)]
        change = Change(
            head=SessionHead(head.namespace, head.session_id, now_ms, head.status, dict(head.threads)),
            commit_id=f"{number:032x}",
            entry=Entry(events, 2, private, journal, "main", number),
            puts=(content.puts[number % len(content.puts)],),
        )
        while time.perf_counter() - started < DECIDE_SECONDS:
            pass
        return change

    return decide


def raw(directory: Path, seconds: float, synchronous: str) -> list[float]:
    """One thread, one statement per commit: the floor of this disk and of SQLite."""
    connection = apsw.Connection(str(directory / "raw.db"))
    run = connection.cursor().execute
    run("pragma page_size=8192")
    run("pragma journal_mode=wal").fetchall()
    run(f"pragma synchronous={synchronous}")
    run("create table if not exists t(id integer primary key, body blob)")
    taken: list[float] = []
    bodies = [text(1000).encode() for _ in range(64)]
    end = time.perf_counter() + seconds
    while (started := time.perf_counter()) < end:
        run("insert into t(body) values(?)", (bodies[len(taken) % 64],))
        taken.append(time.perf_counter() - started)
    connection.close()
    return taken


async def drive(store: RecordStore, content: Content, seconds: float, flying: int) -> tuple[list[float], float, float]:
    numbers = itertools.count(1)
    taken: list[float] = []

    async def session(name: str) -> None:
        while (started := time.perf_counter()) < end:
            committed: Committed = await store.transact(name, Reads(), step(content, next(numbers)))
            assert committed.changed
            taken.append(time.perf_counter() - started)

    warm = f"warm-{flying}"
    for _ in range(50):
        await store.transact(warm, Reads(), step(content, next(numbers)))
    begun, cpu = time.perf_counter(), time.process_time()
    end = begun + seconds
    await asyncio.gather(*(session(f"{warm}-{n}") for n in range(flying)))
    return taken, time.perf_counter() - begun, time.process_time() - cpu


def line(name: str, taken: list[float], elapsed: float, cpu: float | None, floor: float | None) -> str:
    ordered = sorted(taken)
    p50, p99 = ordered[len(ordered) // 2] * 1e3, ordered[int(len(ordered) * 0.99)] * 1e3
    ratio = f"{p50 / floor:5.1f}x" if floor else "  1.0x"
    each = "" if cpu is None else f"  {cpu / len(taken) * 1e6:4.0f} us CPU each"
    return f"{name:28} p50 {p50:7.3f} ms ({ratio} raw)  p99 {p99:7.2f} ms  {len(taken) / elapsed:9,.0f}/s{each}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where the files are made; default: the system's own")
    parser.add_argument("--synchronous", default="FULL", choices=["NORMAL", "FULL", "EXTRA"])
    options = parser.parse_args()
    content = Content()
    seconds: float = options.seconds
    bodies = content.entries[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {platform.platform()}")
    print(f"bytes: events {len(bodies[0])}, private {len(bodies[1])}, journal {len(bodies[2])}, ", end="")
    print(f"head {len(encode(content.head))}, record {len(content.puts[0][1])}; decide {DECIDE_SECONDS * 1e6:.0f} us")
    results: dict[str, list[tuple[float, float, float]]] = {}
    for turn in range(options.repeat):
        with tempfile.TemporaryDirectory(dir=options.directory) as name:
            directory = Path(name)
            floor = raw(directory, seconds / 2, options.synchronous)
            p50 = statistics.median(floor) * 1e3
            async with await SqliteRecordStore.open(
                directory / "durable.db", synchronous=options.synchronous, allow_network_filesystem=True
            ) as store:
                if turn == 0:
                    print("settings:", ", ".join(f"{k}={v}" for k, v in (await store.settings()).items()))
                print(line("raw 1 KB commit", floor, sum(floor), None, None))
                commits = 0
                for flying in (1, 64):
                    gc.collect()
                    taken, elapsed, cpu = await drive(store, content, seconds, flying)
                    print(line(f"sqlite, {flying} in flight", taken, elapsed, cpu, p50))
                    found = statistics.median(taken) * 1e3
                    results.setdefault(f"sqlite, {flying} in flight", []).append(
                        (found, found / p50, len(taken) / elapsed)
                    )
                    commits += len(taken)
                assert await store.integrity() == []
            size = (directory / "durable.db").stat().st_size
            print(f"{'':28} {size / commits:,.0f} bytes of file per commit")
        memory = MemoryRecordStore()
        taken, elapsed, cpu = await drive(memory, content, seconds / 3, 64)
        print(line("memory, 64 in flight", taken, elapsed, cpu, p50))
    print(f"medians of {options.repeat}:")
    for name, runs in results.items():
        p50, ratio, rate = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:28} p50 {p50:7.3f} ms ({ratio:5.1f}x raw)  {rate:9,.0f} commits/s")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
