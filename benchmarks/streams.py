"""What does it cost to look, and how soon does one see?

(g) How soon: from the return of a `submit` to the callback of a subscription, in the same process and in another one;
    and how soon a Run of it in another process is seen here. With the folder's sockets, as is the default, and
    without, when only polling tells (twice a second, as is the default). A bare reading of the same page beside it.
(h) 1,000 idle observers: what they add to a commit of a Session, to a second in which nothing happens, and to memory.
    Waits and streams of 1,000 Turns of one Session, and subscriptions to 1,000 Sessions.
(i) Replay of 100,000 events: pages of `list_events`, `stream_events`, a subscription, and a stream that is folded into
    an `EventProjection`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agentscope_durable import (
    Committed,
    Definition,
    DurableRuntime,
    EventProjection,
    EventStreamOptions,
    Harness,
    LocalBackend,
    SessionKey,
)
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from benchmarks.measure import machine, median, percentile

KEY = SessionKey("bench", "streams")
DEFINITION = Definition("agent", "v1", ScriptedHarness([]).state_version)
SUBMITS = 200
POLLED = 12
OBSERVERS = 1000
COMMITS = 50
IDLE_SECONDS = 4.0
EVENTS = 100_000
SECONDS_MAX = 120.0
DEFAULTS = EventStreamOptions.defaults()


@asynccontextmanager
async def runtime_over(folder: Path, *, sockets: bool = True, **options: Any) -> AsyncGenerator[DurableRuntime]:
    transports = {} if sockets else {"wakeups": LocalWakeups()}
    async with (
        LocalBackend.open(folder, **transports) as backend,
        DurableRuntime(backend=backend, **options) as runtime,
    ):
        yield runtime


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not condition():
            await asyncio.sleep(0.01)


# ------------------------------------------------------------ another process


def tell(what: str, **facts: Any) -> None:
    os.write(1, (json.dumps({"what": what, "at": time.monotonic(), **facts}) + "\n").encode())


async def other(options: dict[str, Any]) -> None:
    """Observe, or run Turns, and tell when; the clock is the machine's."""
    harnesses = [Harness("agent", "v1", ScriptedHarness([final()]))] if options["role"] == "brain" else []
    async with runtime_over(Path(options["folder"]), sockets=options["sockets"], harnesses=harnesses) as runtime:
        session = runtime.get_session(KEY)
        if harnesses:
            await runtime.start()
            tell("up")
            await asyncio.Event().wait()

        async def seen(item: Any) -> None:
            tell("seen", sequence=item.event.sequence)

        async with session.subscribe_events(DEFAULTS, seen):
            tell("up")
            await asyncio.Event().wait()


class Other:
    """Another process, and what it tells."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, folder: Path, role: str, *, sockets: bool) -> Other:
        options = {"folder": str(folder), "role": role, "sockets": sockets}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.streams", json.dumps(options), stdout=asyncio.subprocess.PIPE
        )
        one = cls(process)
        await one.next("up")
        return one

    async def next(self, what: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                told = json.loads(await self._process.stdout.readline())
                if told["what"] == what:
                    return told

    async def end(self) -> None:
        self._process.kill()
        await self._process.wait()


# ------------------------------------------------------------ (g) how soon


async def same_process() -> tuple[list[float], list[float]]:
    """Seconds to the callback, and of a bare reading of what the callback is given."""
    with tempfile.TemporaryDirectory() as name:
        async with runtime_over(Path(name), definitions=[DEFINITION]) as runtime:
            session = await runtime.create_session(KEY, "agent")
            seen: dict[int, float] = {}

            async def note(item: Any) -> None:
                seen[item.event.sequence] = time.monotonic()

            session.subscribe_events(DEFAULTS, note)
            await until(lambda: 2 in seen)
            waits: list[float] = []
            reads: list[float] = []
            for number in range(SUBMITS):
                await session.submit(f"r{number}", "go")
                at, last = time.monotonic(), 2 * number + 4
                await until(lambda last=last: last in seen)
                waits.append(max(0.0, seen[last] - at))
                cursor = (await session.list_events(limit=1)).high_watermark
                at = time.monotonic()
                await session.list_events(cursor)
                reads.append(time.monotonic() - at)
            return waits, reads


async def across(role: str, *, sockets: bool, count: int) -> list[float]:
    """Seconds from the return of a submit to the callback, or the Run, in another process."""
    with tempfile.TemporaryDirectory() as name:
        async with runtime_over(Path(name), sockets=sockets, definitions=[DEFINITION]) as runtime:
            session = await runtime.create_session(KEY, "agent")
            process = await Other.start(Path(name), role, sockets=sockets)
            waits: list[float] = []
            for number in range(count):
                # Somewhere between two polls of the other one.
                await asyncio.sleep(0.03 + 0.037 * (number % 13))
                turn = await session.submit(f"r{number}", "go")
                at = time.monotonic()
                if role == "observer":
                    last = 2 * number + 4
                    while (told := await process.next("seen"))["sequence"] != last:
                        pass
                    waits.append(max(0.0, told["at"] - at))
                else:
                    async with turn.stream_events() as events, asyncio.timeout(SECONDS_MAX):
                        while not (await turn.status()).runs:
                            await anext(events)
                    waits.append(time.monotonic() - at)
                    await turn.wait(SECONDS_MAX)
            await process.end()
            return waits


async def how_soon() -> dict[str, float]:
    here, reads = await same_process()
    there = await across("observer", sockets=True, count=SUBMITS // 4)
    there_polled = await across("observer", sockets=False, count=POLLED)
    brain = await across("brain", sockets=True, count=SUBMITS // 8)
    brain_polled = await across("brain", sockets=False, count=POLLED)
    return {
        "bare reading p50 ms": 1000 * median(reads),
        "same process p50 ms": 1000 * median(here),
        "same process p99 ms": 1000 * percentile(here, 0.99),
        "same process, x reading": median(here) / median(reads),
        "another process p50 ms": 1000 * median(there),
        "another process p99 ms": 1000 * percentile(there, 0.99),
        "without sockets p50 ms": 1000 * median(there_polled),
        "Run is seen p50 ms": 1000 * median(brain),
        "Run is seen p99 ms": 1000 * percentile(brain, 0.99),
        "Run is seen, no sockets p50 ms": 1000 * median(brain_polled),
    }


# ------------------------------------------------------------ (h) idle observers


class Counted:
    """How often the store is asked."""

    def __init__(self, backend: LocalBackend) -> None:
        self.asked = 0
        self._query = backend.query
        backend.query = self.query  # type: ignore[method-assign]

    async def query(self, question: Any, **options: Any) -> Any:
        self.asked += 1
        return await self._query(question, **options)


async def commits(session: Any, counted: Counted, tag: str) -> tuple[float, float]:
    """CPU seconds and questions of a commit, one at a time."""
    busy = session.get_thread("busy")
    cpu, asked = time.process_time(), counted.asked
    for number in range(COMMITS):
        await busy.submit(f"{tag}-{number}", "x")
        await asyncio.sleep(0.01)
    return (time.process_time() - cpu) / COMMITS, (counted.asked - asked) / COMMITS


async def attach(kind: str, runtime: DurableRuntime, turns: list[Any], counted: Counted, stack: AsyncExitStack) -> None:
    """One idle observer for each Turn, or for as many Sessions; come back when each has caught up."""
    reached: set[Any] = set()

    async def stream(turn: Any) -> None:
        async with turn.stream_events() as events:
            async for item in events:
                reached.add((turn.turn_id, item.event.sequence))

    async def note(item: Any) -> None:
        reached.add((item.event.session, item.event.sequence))

    for number, turn in enumerate(turns):
        if kind == "sessions":
            session = runtime.get_session(SessionKey("bench", f"s{number}"))
            await stack.enter_async_context(session.subscribe_events(DEFAULTS, note))
        else:
            task = asyncio.create_task(turn.wait() if kind == "waits" else stream(turn))
            stack.push_async_callback(_end, task)
    if kind != "waits":
        await until(lambda: len(reached) == 2 * len(turns))
    asked = -1
    while asked != counted.asked:
        asked = counted.asked
        await asyncio.sleep(0.1)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def idle(kind: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        async with LocalBackend.open(name) as backend:
            counted = Counted(backend)
            async with DurableRuntime(backend=backend, definitions=[DEFINITION]) as runtime:
                session = await runtime.create_session(KEY, "agent")
                await session.create_thread("busy", "agent")
                turns = [await session.submit(f"r{number}", "go") for number in range(OBSERVERS)]
                for number in range(OBSERVERS if kind == "sessions" else 0):
                    await runtime.create_session(SessionKey("bench", f"s{number}"), "agent")
                async with AsyncExitStack() as stack:
                    await attach(kind, runtime, turns[:1], counted, stack)
                    one, _ = await commits(session, counted, "one")
                gc.collect()
                tracemalloc.start()
                async with AsyncExitStack() as stack:
                    await attach(kind, runtime, turns, counted, stack)
                    gc.collect()
                    held, _ = tracemalloc.get_traced_memory()
                    tracemalloc.stop()
                    cpu, asked = time.process_time(), counted.asked
                    await asyncio.sleep(IDLE_SECONDS)
                    resting = (time.process_time() - cpu) / IDLE_SECONDS
                    polls = (counted.asked - asked) / IDLE_SECONDS
                    many, questions = await commits(session, counted, "many")
    return {
        f"{kind}, KB each": held / OBSERVERS / 1024,
        f"{kind}, commit, x of one observer": many / one,
        f"{kind}, questions per commit": questions,
        f"{kind}, questions per idle s": polls,
        f"{kind}, CPU ms per idle s": 1000 * resting,
    }


# ------------------------------------------------------------ (i) replay


async def replay() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        async with (
            LocalBackend.open(name, synchronous="NORMAL") as backend,
            DurableRuntime(backend=backend, definitions=[DEFINITION]) as runtime,
        ):
            session = await runtime.create_session(KEY, "agent")

            async def fill(part: int) -> None:
                thread = await session.create_thread(f"t{part}", "agent")
                for number in range(EVENTS // 2 // 64 + 1):
                    await thread.submit(f"r{part}-{number}", "a message of some forty characters or so")

            await asyncio.gather(*(fill(part) for part in range(64)))

            async def pages() -> None:
                cursor, count = None, 0
                while count < EVENTS:
                    page = await session.list_events(cursor, 200)
                    cursor, count = page.cursor, count + len(page.events)

            async def stream(fold: EventProjection | None = None) -> None:
                count = 0
                async with session.stream_events() as events:
                    async for item in events:
                        assert isinstance(item, Committed)
                        if fold is not None:
                            fold.accept(item.event)
                        count += 1
                        if count == EVENTS:
                            return

            async def subscribe(listener: Any, done: asyncio.Event) -> None:
                async with session.subscribe_events(DEFAULTS, listener):
                    await done.wait()

            def observer() -> tuple[Any, asyncio.Event]:
                done = asyncio.Event()

                async def count(item: Any) -> None:
                    if item.event.sequence == EVENTS:
                        done.set()

                return count, done

            rates: dict[str, float] = {}
            fold = EventProjection(KEY)
            for title, work in (
                ("pages", pages()),
                ("stream", stream()),
                ("subscription", subscribe(*observer())),
                ("projection", stream(fold)),
            ):
                gc.collect()
                started = time.process_time()
                await work
                rates[title] = EVENTS / (time.process_time() - started)
            assert len(fold.projection.turns) >= EVENTS // 2 - 64
    return {
        "list_events, events/CPU s": rates["pages"],
        "stream_events, of that": rates["stream"] / rates["pages"],
        "subscription, of that": rates["subscription"] / rates["pages"],
        "EventProjection, of that": rates["projection"] / rates["pages"],
        "EventProjection, events/CPU s": rates["projection"],
    }


async def measure() -> dict[str, dict[str, float]]:
    observers: dict[str, float] = {}
    for kind in ("waits", "streams", "sessions"):
        observers |= await idle(kind)
    return {
        "g how soon it is seen": await how_soon(),
        f"h {OBSERVERS} idle observers": observers,
        f"i replay of {EVENTS} events": await replay(),
    }


def run() -> dict[str, dict[str, float]]:
    return asyncio.run(measure())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(other(json.loads(sys.argv[1])))
    else:
        print(machine())
        for name, values in run().items():
            print(name)
            for key, value in values.items():
                print(f"  {key:36} {value:.4g}")
