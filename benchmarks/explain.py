"""(j) Does `explain` cost more when there are more Turns?

Stores of 1,000, 10,000 and 100,000 Turns: half of them ended or queued in one Thread, the others in Sessions of ten.
Asked is what a person asks who has nothing but a Turn's id: where it is, and why it does not advance; of the head of
the long queue, which waits for an answer, and of the last Turn in it. Rows are what the store gave for it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.commands import (
    Cancel,
    Claim,
    Claimed,
    CommitStep,
    CreateSession,
    InteractionCommit,
    RunEnd,
    RunEndKind,
    SubmitTurn,
    ToolCommit,
)
from agentscope_durable.contracts.explanation import Explanation
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import ExplainTurn, FindTurn
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import Audience, ExecutionState, InteractionKind, ReasonKind
from agentscope_durable.domain import ids
from agentscope_durable.spi.record_store import Records
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from benchmarks.measure import machine, median, percentile

SIZES = (1_000, 10_000, 100_000)
PER_SESSION = 10
ASKED = 200
AT_ONCE = 256
BINDING = Binding("assistant", "v1", "state-v1")
HOST = "bench-host"
LONG = SessionKey("bench", "long")


class Counted:
    """A store that counts the rows it gives."""

    def __init__(self, inner: SqliteRecordStore) -> None:
        self._inner = inner
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in ("read", "ready", "owners", "dead_owners", "holders", "sessions"):
            return found

        async def counted(*arguments: Any, **options: Any) -> Any:
            answer = await found(*arguments, **options)
            self.rows += _rows(answer)
            return answer

        return counted


def _rows(answer: Any) -> int:
    if isinstance(answer, Records):
        pages = [*answer.ranges.values(), *answer.streams.values(), answer.log, answer.keys, answer.owners]
        return 1 + sum(len(page) for page in pages)
    return len(getattr(answer, "items", answer))


async def submit(backend: TransactionalSessionBackend, session: SessionKey, number: int) -> str:
    content = body_of([{"type": "text", "text": "go"}])
    command = SubmitTurn(
        session=session, thread_id="main", request_id=f"r{number}", content=content, digest=f"{number:064x}"
    )
    return (await backend.execute(command)).turn_id


async def wait_for_an_answer(backend: TransactionalSessionBackend, session: SessionKey) -> str:
    """The head of the queue asks for an approval and waits."""
    claimed: Claimed = await backend.execute(
        Claim(session=session, thread_id="main", owner=HOST, served=(BINDING.ready_class,)), audience=Audience.HOST
    )
    question = ids.interaction_id(claimed.turn_id, "call-1")
    arguments = body_of("{}")
    asks = CommitStep(
        session=session,
        thread_id="main",
        turn_id=claimed.turn_id,
        run_id=claimed.run_id,
        fence=claimed.fence,
        expected_position=claimed.position,
        tools=(
            ToolCommit(call_id="call-1", state=ExecutionState.AWAITING_APPROVAL, name="deploy", arguments=arguments),
        ),
        interactions=(
            InteractionCommit(
                interaction_id=question,
                call_id="call-1",
                kind=InteractionKind.APPROVAL,
                name="deploy",
                arguments=arguments,
            ),
        ),
        end=RunEnd(kind=RunEndKind.SUSPENDED),
    )
    await backend.execute(asks, audience=Audience.HOST)
    return claimed.turn_id


async def fill(backend: TransactionalSessionBackend, count: int) -> tuple[str, str]:
    """`count` Turns; returns the head of the long queue and its last Turn."""
    await backend.execute(CreateSession(session=LONG, binding=BINDING))
    # A quarter has ended: they were cancelled before they ran.
    for start in range(0, count // 4, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count // 4))
        turns = await asyncio.gather(*(submit(backend, LONG, number) for number in numbers))
        for number, turn_id in zip(numbers, turns, strict=True):
            await backend.execute(Cancel(session=LONG, thread_id="main", request_id=f"c{number}", turn_id=turn_id))
    head = await submit(backend, LONG, count // 4)
    _ = await wait_for_an_answer(backend, LONG)
    last = head
    for start in range(count // 4 + 1, count // 2, AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, count // 2))
        last = (await asyncio.gather(*(submit(backend, LONG, number) for number in numbers)))[-1]
    keys = [SessionKey("bench", f"s{number:06}") for number in range(count // 2 // PER_SESSION)]
    for start in range(0, len(keys), AT_ONCE):
        some = keys[start : start + AT_ONCE]
        await asyncio.gather(*(backend.execute(CreateSession(session=key, binding=BINDING)) for key in some))
        await asyncio.gather(*(submit(backend, key, number) for key in some for number in range(PER_SESSION)))
    return head, last


async def measure(directory: Path, count: int) -> dict[str, float]:
    path = directory / "durable.db"
    async with await SqliteRecordStore.open(path, synchronous="NORMAL") as store:
        notice = msgspec.json.encode(HostNotice(classes=(BINDING.ready_class,), parallelism=4))
        await asyncio.to_thread(store.renew, HOST, 3_600_000, notice)
        head, last = await fill(TransactionalSessionBackend(store), count)
    async with await SqliteRecordStore.open(path) as store:
        counted = Counted(store)
        backend = TransactionalSessionBackend(counted)  # type: ignore[arg-type]
        found: dict[str, float] = {}
        for name, turn_id, kind in (("head", head, ReasonKind.APPROVAL), ("last", last, ReasonKind.QUEUED_BEHIND)):
            times: list[float] = []
            counted.rows = 0
            for _ in range(ASKED):
                started = time.perf_counter()
                key = await backend.query(FindTurn(turn_id=turn_id), audience=Audience.OPERATOR)
                told: Explanation = await backend.query(
                    ExplainTurn(session=key.session, thread_id=key.thread_id, turn_id=key.turn_id)
                )
                times.append(time.perf_counter() - started)
                assert told.reasons[0].kind is kind, told.reasons
            found |= {
                f"{name} p50 ms": median(times) * 1e3,
                f"{name} p95 ms": percentile(times, 0.95) * 1e3,
                f"{name} rows": counted.rows / ASKED,
            }
        return found | {"MB": path.stat().st_size / 1e6}


def run() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for count in SIZES:
        with tempfile.TemporaryDirectory() as place:
            answer = asyncio.run(measure(Path(place), count))
        results[f"j explain, {count} Turns"] = answer
    return results


if __name__ == "__main__":
    print(machine())
    for title, answers in run().items():
        print(title, "  ".join(f"{key}={value:.4g}" for key, value in answers.items()))
