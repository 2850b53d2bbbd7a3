"""What does one durable step cost?

(a) sequential: a plain step commit, through the backend, against one raw 1 KB commit in the same run.
(b) 64 Turns in flight: step commits per second, and CPU, commits and bytes per step.

Both in SQLite, and in PostgreSQL 15 on this machine, over TCP, with every setting of durability on.

A step commit is what an adapter's commit is (RECORDS): a 1 KB native block, a message event and a second
event of 0.4 KB each, Step and model facts, the message index; random content, every check on.
"""

from __future__ import annotations

import asyncio
import base64
import os
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import msgspec

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.commands import (
    Claim,
    Claimed,
    CommitStep,
    CreateSession,
    CustomEvent,
    MessageOut,
    RunEnd,
    RunEndKind,
    StepReceipt,
    SubmitTurn,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.journal import JournalBatch, JournalEntry
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import Audience, ModelStatus, StepPhase
from agentscope_durable.domain import ids
from agentscope_durable.spi.record_store import RecordStore
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from benchmarks.measure import PAYLOAD_BYTES, RawSqlite, machine, median, percentile
from tests.servers import place
from tests.servers.server import PostgresServer

STEPS = 10
BINDING = Binding("bench", "v1", "state-v1")
OWNER = "bench-host"


def text(count: int) -> str:
    """`count` random characters: nothing a page can compress."""
    return base64.b64encode(os.urandom(count * 3 // 4 + 3)).decode()[:count]


def native_block(position: int, *, base: bool) -> bytes:
    payload = msgspec.Raw(msgspec.json.encode({"content": [{"type": "text", "text": text(860)}], "usage": [900, 120]}))
    entry = JournalEntry(type="model/result", payload=payload)
    return JournalBatch(expected_head=position, entries=(entry,), checkpoint=(), base=base).encode()


class TurnDriver:
    """One Session with its Turns, driven as a host drives them."""

    def __init__(self, backend: TransactionalSessionBackend, session: SessionKey) -> None:
        self._backend = backend
        self._session = session
        self._turns = 0

    async def create(self) -> None:
        await self._backend.execute(CreateSession(session=self._session, binding=BINDING))

    async def begin(self) -> Claimed:
        self._turns += 1
        content = body_of([{"type": "text", "text": text(200)}])
        await self._backend.execute(
            SubmitTurn(
                session=self._session,
                thread_id="main",
                request_id=f"request-{self._turns}",
                content=content,
                digest=f"{self._turns:064x}",
            )
        )
        claimed: Claimed = await self._backend.execute(
            Claim(session=self._session, thread_id="main", owner=OWNER, served=(BINDING.ready_class,)),
            audience=Audience.HOST,
        )
        return claimed

    def step(self, claimed: Claimed, position: int, number: int) -> CommitStep:
        run = claimed.run_id
        step = ids.step_id(run, 1)
        message = ids.message_id(claimed.turn_id, number)
        # The first checkpoint of a Thread is its whole state.
        base = number == 1 and not claimed.base_at
        return CommitStep(
            session=self._session,
            thread_id="main",
            turn_id=claimed.turn_id,
            run_id=run,
            fence=claimed.fence,
            expected_position=position,
            journal=native_block(position, base=base),
            checkpoint=True,
            base=base,
            writer="2.0.11",
            reasoning=number,
            steps=(StepFact(step, run, 1, StepPhase.MODEL if number % 2 else StepPhase.ACTING),),
            models=(
                ModelFact(
                    ids.model_call_id(run, number),
                    run,
                    step,
                    1,
                    ModelStatus.COMPLETED,
                    model="scripted",
                    message_id=message,
                    attempt=1,
                    usage=Usage(900, 120),
                    complete=True,
                    elapsed_ms=812,
                ),
            ),
            messages=(MessageOut(message_id=message, content=body_of([{"type": "text", "text": text(240)}])),),
            events=(CustomEvent("x.bench.progress", body_of({"note": text(300)})),),
        )

    async def turn(self, latencies: list[float]) -> None:
        claimed = await self.begin()
        position = claimed.position
        for number in range(1, STEPS + 1):
            command = self.step(claimed, position, number)
            started = time.perf_counter()
            receipt: StepReceipt = await self._backend.execute(command, audience=Audience.HOST)
            latencies.append(time.perf_counter() - started)
            position = receipt.position
        end = CommitStep(
            session=self._session,
            thread_id="main",
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            expected_position=position,
            end=RunEnd(kind=RunEndKind.COMPLETED, message_id=ids.message_id(claimed.turn_id, STEPS)),
        )
        await self._backend.execute(end, audience=Audience.HOST)


class RawPostgres:
    """One random 1 KB row a commit, or a group of rows a commit, over one connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, server: PostgresServer) -> RawPostgres:
        raw = cls(await asyncpg.connect(server.dsn()))
        await raw._connection.execute("create table if not exists raw(id bigint generated always as identity, v bytea)")
        return raw

    async def commit(self, rows: int = 1) -> float:
        """Seconds of one commit of `rows` rows."""
        bodies = [os.urandom(PAYLOAD_BYTES) for _ in range(rows)]
        started = time.perf_counter()
        await self._connection.execute("insert into raw(v) select unnest($1::bytea[])", bodies)
        return time.perf_counter() - started

    async def close(self) -> None:
        await self._connection.close()


class InSqlite:
    """A store and the floor under it, in a folder."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "durable.db"
        self._raw = RawSqlite(directory)

    async def open(self) -> RecordStore:
        return await SqliteRecordStore.open(self._path)

    async def commit(self, rows: int = 1) -> float:
        return self._raw.commit(rows)

    async def stored_bytes(self) -> int:
        return self._path.stat().st_size

    async def close(self) -> None:
        self._raw.close()


class InPostgres:
    """A store and the floor under it, in a server of its own."""

    def __init__(self, directory: Path) -> None:
        del directory
        self._server = PostgresServer(place.postgres_15())
        self._raw: RawPostgres | None = None

    async def open(self) -> RecordStore:
        self._raw = await RawPostgres.open(self._server)
        return await PostgresRecordStore.open(self._server.dsn(), initialize_schema=True)

    async def commit(self, rows: int = 1) -> float:
        assert self._raw is not None
        return await self._raw.commit(rows)

    async def stored_bytes(self) -> int:
        store = await PostgresRecordStore.open(self._server.dsn())
        found = (await store.statistics()).stored_bytes
        await store.close()
        return found

    async def close(self) -> None:
        assert self._raw is not None
        await self._raw.close()
        await asyncio.to_thread(self._server.close)


Store = InSqlite | InPostgres


async def sequential(where: Store, turns: int = 60) -> dict[str, float]:
    """(a): step commits one at a time, raw commits between them."""
    store = await where.open()
    backend = TransactionalSessionBackend(store, owns_store=True)
    await asyncio.to_thread(store.renew, OWNER, 600_000, b"")
    driver = TurnDriver(backend, SessionKey("bench", "sequential"))
    await driver.create()
    latencies: list[float] = []
    floor: list[float] = []
    await driver.turn([])
    cpu = time.process_time()
    for _ in range(turns):
        await driver.turn(latencies)
        floor += [await where.commit() for _ in range(STEPS)]
    cpu = time.process_time() - cpu
    await backend.close()
    await where.close()
    step, base = median(latencies) * 1e3, median(floor) * 1e3
    return {
        "step p50 ms": step,
        "step p95 ms": percentile(latencies, 0.95) * 1e3,
        "raw p50 ms": base,
        "x raw": step / base,
    }


async def in_flight(where: Store, width: int = 64, seconds: float = 4.0) -> dict[str, float]:
    """(b): `width` Turns at once, each in its own Session."""
    store = await where.open()
    backend = TransactionalSessionBackend(store, owns_store=True)
    await asyncio.to_thread(store.renew, OWNER, 600_000, b"")
    latencies: list[float] = []
    stop = time.perf_counter() + seconds

    async def worker(number: int) -> None:
        count = 0
        while time.perf_counter() < stop:
            count += 1
            driver = TurnDriver(backend, SessionKey("bench", f"session-{number}-{count}"))
            await driver.create()
            await driver.turn(latencies)

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker(number) for number in range(width)))
    elapsed, cpu = time.perf_counter() - started, time.process_time() - cpu
    await backend.close()
    steps = len(latencies)
    commits = steps * (STEPS + 4) / STEPS
    grouped = [await where.commit(50) for _ in range(40)]
    stored = await where.stored_bytes()
    await where.close()
    rows = 50 / median(grouped)
    return {
        "steps/s": steps / elapsed,
        "commits/s": commits / elapsed,
        "raw grouped rows/s": rows,
        "of raw": commits / elapsed / rows,
        "step p50 ms": median(latencies) * 1e3,
        "step p99 ms": percentile(latencies, 0.99) * 1e3,
        "CPU us/commit": cpu / commits * 1e6,
        "bytes/step": stored / steps,
    }


STORES: dict[str, Callable[[Path], Store]] = {"": InSqlite, " PostgreSQL": InPostgres}


def run() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    ways: dict[str, Callable[[Store], Awaitable[dict[str, float]]]] = {
        "a sequential": sequential,
        "b 64 in flight": in_flight,
    }
    for store, made in STORES.items():
        for name, measure in ways.items():
            with tempfile.TemporaryDirectory() as directory:
                results[name + store] = asyncio.run(_measured(made, Path(directory), measure))
    return results


async def _measured(
    made: Callable[[Path], Store], directory: Path, measure: Callable[[Store], Awaitable[dict[str, float]]]
) -> dict[str, float]:
    return await measure(made(directory))


if __name__ == "__main__":
    print(machine())
    for name, values in run().items():
        print(name, "  ".join(f"{key}={value:.4g}" for key, value in values.items()))
