"""(f) What does it cost to look at a long conversation, and to prune it?

Conversations of 100 and of 10,000 messages on SQLite, two messages a Turn, with a native block at each commit. Read
ratios: what grows with the answer is given per message, and what must not grow as 10,000 to 100. Costs are CPU time of
the process, all threads of it, as medians of several looks, those of both sizes taken in turn: reading waits for
nothing but the processor, and a shared machine would drown the rest.

- replay: an `EventProjection` folds 100,000 events; per event, and that as a multiple of a fold of
  10,000. What is above 1 there is the garbage collector, and the same for 300,000.
- snapshot: the whole per message; a Turn and a Thread of one Turn beside all the others; the whole after pruning.
- last page: the last 100 messages of the history, and the last 100 events.
- prune: everything, with what it leaves of the store's bytes and how long its commits are.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentscope_durable import EventProjection, HostOperations, LocalBackend, SessionKey
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.events import EventFilter, PublicEvent
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import Audience, StepPhase, StepStatus
from agentscope_durable.domain import ids
from agentscope_durable.spi.record_store import Column, LogRange, Reads
from benchmarks.measure import median, percentile

SMALL, LARGE = 100, 10_000
REPLAYED, REPLAYED_SMALL = 100_000, 10_000
LOOKS = 7
PAGE = 100
BINDING = Binding("assistant", "v1", "state-1")
OWNER = "bench"


class Conversation:
    """A Session with so many messages, made by the commands that a host sends."""

    def __init__(self, backend: Any, messages: int) -> None:
        self.backend = backend
        self.messages = messages
        self.session = SessionKey("bench", f"reading-{messages}")
        self.first = ("main", "")
        self.beside = ("beside", "")

    async def make(self) -> None:
        await self.backend.execute(c.CreateSession(session=self.session, binding=BINDING))
        await self.backend.execute(c.CreateThread(session=self.session, thread_id="beside", binding=BINDING))
        await asyncio.to_thread(self.backend.records.renew, OWNER, 3_600_000, b"")
        for number in range(self.messages // 2):
            turn_id = await self._turn("main", number)
            if number == 0:
                self.first = ("main", turn_id)
                self.beside = ("beside", await self._turn("beside", -1))

    async def _turn(self, thread: str, number: int) -> str:
        content = body_of([{"type": "text", "text": os.urandom(150).hex()}])
        await self.backend.execute(
            c.SubmitTurn(
                session=self.session, thread_id=thread, request_id=f"r{number}", content=content, digest=str(number)
            )
        )
        claimed: c.Claimed = await self.backend.execute(
            c.Claim(session=self.session, thread_id=thread, owner=OWNER, served=(BINDING.ready_class,)),
            audience=Audience.HOST,
        )
        step, message = ids.step_id(claimed.run_id, 1), ids.message_id(claimed.turn_id, 1)
        begun = StepFact(step, claimed.run_id, 1, StepPhase.REASONING)
        over = StepFact(step, claimed.run_id, 1, StepPhase.REASONING, status=StepStatus.COMPLETED)
        position = claimed.position
        for parts in (
            {"steps": (begun,), "reasoning": 1},
            {
                "steps": (over,),
                "messages": (c.MessageOut(message_id=message, content=content),),
                "end": c.RunEnd(kind=c.RunEndKind.COMPLETED, message_id=message),
            },
        ):
            command = c.CommitStep(
                session=self.session,
                thread_id=thread,
                turn_id=claimed.turn_id,
                run_id=claimed.run_id,
                fence=claimed.fence,
                expected_position=position,
                journal=b'["' + os.urandom(400).hex().encode() + b'"]',
                **parts,
            )
            position = (await self.backend.execute(command, audience=Audience.HOST)).position
        return claimed.turn_id

    async def snapshot(self, *narrow: str) -> None:
        await self.backend.query(q.GetSnapshot(session=self.session, filter=EventFilter(*narrow)))

    async def history(self, cursor: str | None) -> None:
        await self.backend.query(q.GetHistory(session=self.session, cursor=cursor, limit=PAGE))

    async def events(self, cursor: str | None) -> None:
        await self.backend.query(q.ListEvents(session=self.session, cursor=cursor, limit=PAGE))

    async def last_pages(self) -> tuple[str | None, str | None]:
        """Cursors before the last full page of the history, and of the events."""
        history: list[str | None] = [None]
        while (page := await self.backend.query(q.GetHistory(session=self.session, cursor=history[-1]))).cursor:
            history.append(page.cursor)
        events: list[str | None] = [None]
        while True:
            page = await self.backend.query(q.ListEvents(session=self.session, cursor=events[-1], limit=PAGE))
            if page.cursor == page.high_watermark:
                return history[-2], events[-2]
            events.append(page.cursor)

    async def all_events(self) -> list[PublicEvent]:
        found: list[PublicEvent] = []
        cursor = None
        while True:
            page = await self.backend.query(q.ListEvents(session=self.session, cursor=cursor, limit=1000))
            found += page.events
            cursor = page.cursor
            if cursor == page.high_watermark:
                return found


async def seconds(looks: int, *calls: Callable[[], Awaitable[Any]]) -> list[float]:
    """CPU seconds of each, the median of so many looks, taken in turn so that all meet the same weather."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(looks):
        for times, call in zip(taken, calls, strict=True):
            started = time.process_time()
            await call()
            times.append(time.process_time() - started)
    return [median(times) for times in taken]


def replay(events: list[PublicEvent], count: int) -> float:
    """CPU us per event of a fold of `count` events: those of the conversation, and its Turns again under other
    names."""
    fold = EventProjection(events[0].session)
    numbered = [_renamed(events, number) for number in range(count)]
    started = time.process_time()
    for event in numbered:
        fold.accept(event)
    projection = fold.projection
    taken = time.process_time() - started
    assert fold.sequence == count and projection.turns
    return taken / count * 1e6


def _renamed(events: list[PublicEvent], number: int) -> PublicEvent:
    event = events[number % len(events)]
    again = number // len(events)
    if not again or event.turn_id is None:
        return _numbered(event, number + 1, {})
    suffix = f"-{again}"
    data = dict(event.data)
    for name in ("messageId", "requestId"):
        if name in data:
            data[name] += suffix
    if "turn" in data:
        turn = data["turn"]
        data["turn"] = turn | {"turnId": turn["turnId"] + suffix, "ordinal": turn["ordinal"] + again * len(events)}
    return _numbered(event, number + 1, {"data": data, "turn_id": event.turn_id + suffix})


def _numbered(event: PublicEvent, sequence: int, changes: dict[str, Any]) -> PublicEvent:
    return replace(event, sequence=sequence, **changes)


async def prune(conversation: Conversation) -> dict[str, float]:
    backend, commits = conversation.backend, list[float]()
    transact = backend.records.transact

    async def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        committed = await transact(*arguments)
        commits.append(time.perf_counter() - started)
        return committed

    before = await size(conversation)
    backend.records.transact = timed
    started = time.perf_counter()
    receipt = await HostOperations(backend).prune_events(conversation.session, older_than=0)
    taken = time.perf_counter() - started
    del backend.records.transact
    return {
        "events looked at/s": int(receipt.cursor.rpartition("-")[2]) / taken,
        "dropped": float(receipt.dropped),
        "commit p50 ms": median(commits) * 1e3,
        "commit p99 ms": percentile(commits, 0.99) * 1e3,
        "bytes of events left": await size(conversation) / before,
    }


async def size(conversation: Conversation) -> float:
    """Bytes of the log's events."""
    total, after = 0, 0
    while True:
        page = LogRange(after=after, limit=1000, columns=(Column.EVENTS,))
        rows = (await conversation.backend.records.read(keys.partition(conversation.session), Reads(log=page))).log
        total += sum(len(row.events) for row in rows)
        if len(rows) < 1000:
            return float(total)
        after = rows[-1].first + rows[-1].count - 1


async def measure(directory: Path) -> dict[str, dict[str, float]]:
    async with LocalBackend.open(directory, synchronous="NORMAL") as backend:
        small, large = Conversation(backend, SMALL), Conversation(backend, LARGE)
        await small.make()
        await large.make()
        whole_small, whole = await seconds(LOOKS, small.snapshot, large.snapshot)
        turn_small, turn = await seconds(
            LOOKS * 5, lambda: small.snapshot(*small.first), lambda: large.snapshot(*large.first)
        )
        thread_small, thread = await seconds(
            LOOKS * 5, lambda: small.snapshot("beside"), lambda: large.snapshot("beside")
        )
        ends = [await conversation.last_pages() for conversation in (small, large)]
        history_small, history = await seconds(
            LOOKS * 5, lambda: small.history(ends[0][0]), lambda: large.history(ends[1][0])
        )
        events_small, events_large = await seconds(
            LOOKS * 5, lambda: small.events(ends[0][1]), lambda: large.events(ends[1][1])
        )
        events = await large.all_events()
        replayed = median([replay(events, REPLAYED) for _ in range(3)])
        replayed_small = median([replay(events, REPLAYED_SMALL) for _ in range(9)])
        pruned = await prune(large)
        (whole_pruned,) = await seconds(LOOKS, large.snapshot)
        (turn_pruned,) = await seconds(LOOKS * 5, lambda: large.snapshot(*large.first))
    return {
        f"f replay of {REPLAYED:,} events": {
            "events per CPU s": 1e6 / replayed,
            f"CPU us/event, x of {REPLAYED_SMALL:,}": replayed / replayed_small,
        },
        f"f snapshot, {LARGE:,} messages and {SMALL}": {
            "CPU ms": whole * 1e3,
            f"per message, x of {SMALL}": whole / LARGE / (whole_small / SMALL),
            f"one Turn, x of {SMALL}": turn / turn_small,
            f"one Thread, x of {SMALL}": thread / thread_small,
            "pruned, x of not pruned": whole_pruned / whole,
            "one Turn pruned, x of not pruned": turn_pruned / turn,
        },
        f"f last page, {LARGE:,} messages and {SMALL}": {
            "history, CPU ms": history * 1e3,
            f"history, x of {SMALL}": history / history_small,
            f"events, x of {SMALL}": events_large / events_small,
        },
        f"f prune, {LARGE:,} messages": pruned,
    }


def run() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as place:
        return asyncio.run(measure(Path(place)))


if __name__ == "__main__":
    for title, answers in run().items():
        print(title, "  ".join(f"{key}={value:.4g}" for key, value in answers.items()))
