"""C71: a connection that was held across a long call of a model was closed by the pooler.

The part of PostgreSQL: through PgBouncer in transaction mode, and a proxy that cuts what is idle. How long a call takes
is up to a gate, and idle connections are cut while it is closed: they have then been idle for as long as any are.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import RunStatus
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.stores._postgres_connections import SESSION_SETTINGS
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, approval, external, final, local, say
from tests.runtime.conftest import SECONDS, texts, turn_is, until
from tests.servers.fixtures import NewDatabase, Proxied
from tests.servers.proxy import Message
from tests.servers.server import PgBouncerServer, PostgresServer

pytestmark = pytest.mark.backend("postgres")

ROUTE = "ops"
GATES = ("model", "local", "external", "last")
SCRIPT = [
    say("thinking aloud", gate="model"),
    local("look", value="seen", gate="local"),
    external(ROUTE, "page"),
    final("{results}", gate="last"),
]
ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
SAMPLE = 8
"""Statements that are lost in an ordinary run, of some thirty."""
TELLINGS_MAX = 5
"""How often a story is told in which a statement is to be lost."""
WAYS = [
    ("request", "proxy"),
    ("answer", "pgbouncer"),
    *([("request", "pgbouncer"), ("answer", "proxy")] if ALL else ()),
]
CONNECTING = ("select pg_backend_pid()", SESSION_SETTINGS)
"""What is said to make a connection. That it cannot be made is told to the caller, who asks again."""


@pytest.fixture
def narrow(postgres: PostgresServer) -> Iterator[PgBouncerServer]:
    """PgBouncer in transaction mode with one connection to the server: who holds it keeps everybody waiting."""
    with PgBouncerServer(postgres, default_pool_size="1") as pooler:
        yield pooler


@asynccontextmanager
async def at_work(dsn: str, gates: Gates, ledger: EffectLedger, **options: Any) -> AsyncGenerator[DurableRuntime]:
    async def page() -> str:
        ledger.append("page")
        await gates.passed("external")
        return "paged"

    async with (
        PostgresBackend.open(dsn, initialize_schema=True) as backend,
        DurableRuntime(
            backend=backend,
            harnesses=[Harness("agent", "v1", ScriptedHarness(SCRIPT, ledger=ledger, gates=gates))],
            executors={ROUTE: FunctionExecutor({"page": page})},
            poll_interval=0.05,
            **options,
        ) as runtime,
    ):
        await runtime.start()
        yield runtime


@pytest.mark.case("C71")
@pytest.mark.spec("PG-01")
@pytest.mark.parametrize("through", ["pgbouncer", "proxy"])
async def test_no_connection_and_no_transaction_is_held_across_a_call(
    postgres: PostgresServer,
    narrow: PgBouncerServer,
    new_database: NewDatabase,
    proxied: Proxied,
    tmp_path: Path,
    through: str,
) -> None:
    database = await new_database(postgres)
    proxy = await proxied(narrow if through == "pgbouncer" else postgres)
    gates, ledger = Gates(), EffectLedger(tmp_path / "ledger")
    administrator = await asyncpg.connect(postgres.dsn())

    async def nothing_is_held() -> bool:
        """No connection of the host has a transaction, as the server sees it."""
        held = "select count(*) from pg_stat_activity where datname = $1 and xact_start is not null"
        return await administrator.fetchval(held, database) == 0

    async with at_work(postgres.dsn(database, port=proxy.port), gates, ledger) as runtime:
        session = await runtime.create_session(SessionKey("app", "c1"), "agent")
        turn = await session.submit("r1", "go")
        for gate in GATES:
            await gates.reached(gate)
            await until(nothing_is_held)
            # The one connection of the pool is there for everybody else.
            beside = await asyncpg.connect(narrow.dsn(database), statement_cache_size=0)
            assert await beside.fetchval("select 1", timeout=SECONDS) == 1
            await beside.close()
            connected = proxy.connected
            proxy.cut()
            gates.open(gate)
            # What the host needs next, it asks over a connection that it makes now.
            await until(lambda before=connected: proxy.connected > before)

        assert str(await turn.wait(SECONDS)) == "seen, paged"
        view = await turn.status()
        assert view.recovery is None
        statuses = {run.status for run in await turn.list_runs()}
        assert statuses <= {RunStatus.SUSPENDED, RunStatus.COMPLETED}, "no Run was lost over it, and none failed"
    assert (ledger.count("model"), ledger.count("tool"), ledger.count("page")) == (4, 1, 1)
    await administrator.close()


# ------------------------------------------------------------ every statement survives one reconnect


class Statement:
    """The message that executes a statement, as long as it is wanted."""

    def __init__(self, text: str) -> None:
        self.text: str | None = text

    def __call__(self, message: Message) -> bool:
        return message.statement == self.text


async def tell(runtime: DurableRuntime, operations: HostOperations, key: SessionKey) -> list[tuple[str, str]]:
    """A Turn from its submission to its Session's drop, with everything that people ask meanwhile."""
    session = await runtime.create_session(key, "agent")
    turn = await session.submit("r1", "go")
    await turn_is(turn, "WAITING")
    (question,) = await turn.pending_interactions()
    await turn.steer("s1", "mind the cache")
    await turn.respond("a1", question.interaction_id, True)
    await turn.wait(SECONDS)
    await turn.explain()
    await runtime.list_sessions(key.namespace)
    assert (await operations.find_turn(turn.turn_id)).session == key
    await operations.doctor(deep=True, session=key)
    await operations.watchdog()
    await operations.measure(key)
    await operations.measure_store()
    said = await texts(session)
    await session.close()
    await operations.drop_session(key)
    return said


@pytest.mark.case("C71")
@pytest.mark.spec("BE-29")
@pytest.mark.matrix
@pytest.mark.timeout(900 if ALL else 300)
@pytest.mark.parametrize(("lost", "through"), WAYS)
async def test_every_statement_of_a_host_survives_the_end_of_its_connection(
    postgres: PostgresServer,
    pgbouncer: PgBouncerServer,
    new_database: NewDatabase,
    proxied: Proxied,
    tmp_path: Path,
    lost: str,
    through: str,
) -> None:
    database = await new_database(postgres)
    await PostgresBackend.initialize_schema(postgres.dsn(database))
    proxy = await proxied(pgbouncer if through == "pgbouncer" else postgres)
    harness = ScriptedHarness([approval("deploy"), final("{inputs}")], ledger=EffectLedger(tmp_path / "ledger"))
    missed: list[str] = []
    async with (
        PostgresBackend.open(postgres.dsn(database, port=proxy.port)) as backend,
        DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.02, lease=0.6
        ) as runtime,
    ):
        heard: set[str] = set()
        proxy.lose_request(lambda message: _note(heard, message.statement))
        await runtime.start()
        operations = HostOperations(backend)
        session = (SessionKey("app", f"s{number}") for number in itertools.count())

        async def told() -> list[tuple[str, str]]:
            return await tell(runtime, operations, next(session))

        # How changes share a statement is up to the weather: what is said each time can be lost.
        spoken: list[set[str]] = []
        for _ in range(3):
            heard.clear()
            expected = await told()
            spoken.append(set(heard))
        always = sorted(set.intersection(*spoken))
        chosen = always if ALL else random.Random(SEED).sample(always, SAMPLE)
        for text in chosen:
            wanted = Statement(text)
            done: asyncio.Event = getattr(proxy, f"lose_{lost}")(wanted)
            for _ in range(TELLINGS_MAX):
                assert await told() == expected, text
                if done.is_set():
                    break
            else:
                missed.append(text)
            wanted.text = None  # It is not lost later.
    assert len(missed) <= len(chosen) // 4, missed


def _note(heard: set[str], statement: str) -> bool:
    """Nothing is chosen; it is only listened."""
    if statement and statement not in CONNECTING:
        heard.add(statement)
    return False
