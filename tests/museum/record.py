"""Makes an exhibit: `python -m tests.museum.record`, on the release whose store it is to be.

A host brings one Turn into each state, and the database is copied while it is at work, as a crash would leave it. Time
stands still at a moment long ago and chance comes from a seed, so a second record differs from the first only in what
the operating system decides: which task of a host was a little faster.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import apsw

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.records import STORAGE_REVISION
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.runtime.definitions import Definition
from agentscope_durable.runtime.handles import DurableSession, DurableTurn
from agentscope_durable.runtime.retention import Retention
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.environment import Environment, SystemEnvironment
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import STATE_VERSION, Gates
from tests.museum.exhibit import AGENT, ELSEWHERE, HERE, harness, key
from tests.runtime.conftest import until
from tests.servers import place
from tests.servers.server import PostgresServer

HOUR_MS = 3_600_000
MINUTE_MS = 60_000
POSTGRES = "postgres"
"""The folder of the exhibits of PostgreSQL."""
SCHEMA = "museum"
DUMP = "dump.sql.gz"


class _Seeded(SystemEnvironment):
    """Ids from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)


class _Visitors:
    """What people did in the store before it was closed for ever."""

    def __init__(self, runtime: DurableRuntime, gates: Gates) -> None:
        self._runtime = runtime
        self._gates = gates
        self.turns: dict[str, str] = {}

    async def session(self, name: str, definition: str = AGENT) -> DurableSession:
        return await self._runtime.create_session(key(name), definition)

    async def turn(self, name: str, *, into: DurableSession | None = None) -> DurableTurn:
        session = into or await self.session(name)
        turn = await session.submit(f"submit-{name}", name)
        self.turns[name] = turn.turn_id
        return turn

    async def ended(self, name: str) -> DurableTurn:
        turn = await self.turn(name)
        await _is(turn, TurnStatus.COMPLETED, TurnStatus.FAILED, TurnStatus.CANCELLED)
        return turn

    async def waiting(self, name: str, kind: WaitKind) -> DurableTurn:
        turn = await self.turn(name)

        async def waits() -> bool:
            return [one.kind for one in (await turn.status()).waiting_on] == [kind]

        await until(waits)
        return turn

    async def stalled(self, name: str, gate: str) -> DurableTurn:
        turn = await self.turn(name)
        await self._gates.reached(gate)
        return turn


async def _is(turn: DurableTurn, *statuses: TurnStatus) -> None:
    async def there() -> bool:
        return (await turn.status()).status in statuses

    await until(there)


async def fill(backend: Any, runtime: DurableRuntime, gates: Gates) -> dict[str, str]:
    """Everything that is on show. Returns the Turn of each name."""
    people = _Visitors(runtime, gates)
    await people.ended("completed")
    await people.ended("large")
    await people.ended("failed")

    cancelled = await people.waiting("cancelled", WaitKind.EXTERNAL_RESULT)
    await cancelled.cancel("cancel")
    await _is(cancelled, TurnStatus.CANCELLED)

    await people.waiting("approval", WaitKind.APPROVAL)
    await people.waiting("manual", WaitKind.EXTERNAL_RESULT)
    await people.waiting("unknown", WaitKind.TOOL_UNKNOWN)
    await people.waiting("signal", WaitKind.SIGNAL)
    await people.waiting("retry", WaitKind.RETRY)
    answered = await people.waiting("answered", WaitKind.APPROVAL)
    (asked,) = await answered.pending_interactions()
    await answered.pause("pause-answered")
    await _is(answered, TurnStatus.PAUSED)
    await answered.respond("answer-answered", asked.interaction_id, True)

    paused = await people.stalled("paused", "paused")
    await paused.pause("pause-paused")
    await _is(paused, TurnStatus.PAUSED)
    pausing = await people.stalled("pausing", "pausing")
    await pausing.pause("pause-pausing")
    await _is(pausing, TurnStatus.PAUSING)
    cancelling = await people.stalled("cancelling", "cancelling")
    await cancelling.cancel("cancel-cancelling")

    running = await people.stalled("running", "running")
    await running.steer("steer-running", "mind the step")
    await people.turn("queued", into=await people.session("running"))
    await people.stalled("in a tool", "in a tool")
    await people.waiting("external", WaitKind.TOOL_RUNNING)

    elsewhere = await people.session("elsewhere", ELSEWHERE)
    await people.turn("elsewhere", into=elsewhere)

    await _copies(people)
    await people.ended("pruned")
    events = await people.session("pruned")
    await Retention(backend).prune_events(events.key, through=(await events.snapshot()).cursor)
    for name in ("closed", "dropped"):
        await people.ended(name)
        await (await people.session(name)).close()
    await Retention(backend).drop_session(key("dropped"), reason="for the museum")
    return people.turns


async def _copies(people: _Visitors) -> None:
    """A Thread that was restored, and one that was forked from it."""
    await people.ended("restored")
    session = await people.session("restored")
    again = await session.submit("submit-again", "again")
    await _is(again, TurnStatus.COMPLETED)
    thread = session.main_thread()
    page = await thread.checkpoints()
    await thread.restore(page.items[0].position, page.current, "restore")
    await people.session("forked")
    await thread.fork(page.items[0].position, ThreadKey(key("forked")), "fork")
    forked = await (await people.session("forked")).submit("submit-forked", "forked")
    people.turns["forked"] = forked.turn_id
    await _is(forked, TurnStatus.COMPLETED)


Copy = Callable[[], Awaitable[None]]


async def make(target: Path) -> None:
    """The exhibit of SQLite, in a folder that does not exist yet."""
    environment = _Seeded(11)
    with tempfile.TemporaryDirectory() as name:
        source = Path(name)
        backend = await LocalBackend.open(source, clock=ManualClock(), environment=environment)

        async def copy() -> None:
            # The database as it stands, in one file, while the host is at work.
            connection = apsw.Connection(str(source / "durable.db"), flags=apsw.SQLITE_OPEN_READONLY)
            connection.execute("vacuum into ?", (str(target / "durable.db"),))
            connection.close()
            shutil.copytree(source / "objects", target / "objects")

        await _filled(target, backend, environment, copy, retry_ms=HOUR_MS)


async def make_postgres(target: Path) -> None:
    """The same in PostgreSQL, as a plain dump, packed. The clock is the server's: what is waited for comes due soon."""
    environment = _Seeded(11)
    with PostgresServer(place.postgres_15()) as server:
        backend = await PostgresBackend.open(
            server.dsn(), schema=SCHEMA, initialize_schema=True, environment=environment
        )

        async def copy() -> None:
            dump = [server.programs / "pg_dump", "--inserts", "--no-owner", f"--schema={SCHEMA}", server.dsn()]
            told = subprocess.run(dump, capture_output=True, check=True, text=True).stdout
            # What is for psql alone is left out, so that any client can restore it.
            lines = (line for line in told.splitlines() if line and not line.startswith(("--", "\\")))
            (target / DUMP).write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))

        await _filled(target, backend, environment, copy, retry_ms=MINUTE_MS)


async def _filled(target: Path, backend: Any, environment: Environment, copy: Copy, *, retry_ms: int) -> None:
    gates = Gates()
    elsewhere = Definition(ELSEWHERE, "v1", STATE_VERSION)
    runtime = DurableRuntime(
        backend=backend,
        harnesses=[harness(gates)],
        executors={HERE: gates_executor(gates)},
        definitions=[elsewhere],
        recovery_policy=RecoveryPolicy(max_retries=3, initial_backoff_ms=retry_ms, max_backoff_ms=retry_ms),
        poll_interval=0.05,
        parallelism=32,
        close_timeout=0.1,
        host_name="museum",
        environment=environment,
    )
    async with runtime:
        await runtime.start()
        turns = await fill(backend, runtime, gates)
        target.mkdir(parents=True)
        await copy()
    await backend.close()
    about = {
        "release": version("agentscope-durable"),
        "revision": STORAGE_REVISION,
        "turns": dict(sorted(turns.items())),
        "files": {str(path.relative_to(target)): digest(path) for path in sorted(target.rglob("*")) if path.is_file()},
    }
    (target / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def gates_executor(gates: Gates) -> Any:
    from agentscope_durable.executors.function import FunctionExecutor

    async def work() -> str:
        await gates.passed("external")
        return "worked"

    return FunctionExecutor({"work": work})


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


async def main() -> None:
    museum = Path(__file__).parent
    for where, maker in ((museum / STORAGE_REVISION, make), (museum / POSTGRES / STORAGE_REVISION, make_postgres)):
        if where.exists():
            print(f"{where} is there already; an exhibit is never changed")
        else:
            await maker(where)
            print(where)


if __name__ == "__main__":
    asyncio.run(main())
