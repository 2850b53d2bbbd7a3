"""Several hosts on one PostgreSQL, while connections are cut, answers lost, the server crashes and hosts are killed.

What was acknowledged is there in the end, whatever happened in between, and nothing of it is there twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import Retry, Unconfirmed
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import ScriptedHarness
from tests.kill.fleet import SCRIPT
from tests.runtime.conftest import all_events, texts, until
from tests.servers.fixtures import Proxied
from tests.servers.proxy import Proxy, executes
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(20 if os.environ.get("DURABLE_MATRIX") == "all" else 2)
HOSTS = 2
SESSIONS = 6
TURNS = 3
LEASE = 1.0
SECONDS = 300.0
T = TypeVar("T")


async def again(ask: Callable[[], Awaitable[T]]) -> T:
    """What a caller does who wants an answer: ask until there is one, with the same request id."""
    while True:
        try:
            return await ask()
        except (Retry, Unconfirmed):
            await asyncio.sleep(0.02)


class Fleet:
    """Host processes behind one proxy."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self.processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Fleet:
        for _ in range(HOSTS):
            await self.launch()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in list(self.processes):
            await self.kill(process)

    async def launch(self) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        self.processes.append(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.kill.fleet", json.dumps(self._job), env=environment
            )
        )

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        self.processes.remove(process)
        process.kill()
        await process.wait()


async def disturb(how: str, chance: random.Random, proxy: Proxy, server: PostgresServer, fleet: Fleet) -> None:
    match how:
        case "cut":
            proxy.cut()
        case "answer":
            proxy.lose_answer(executes("durable_log"))
        case "request":
            proxy.lose_request(executes("durable_log"))
        case "crash" | "restart":
            await asyncio.to_thread(server.kill if how == "crash" else server.stop_immediately)
            await asyncio.to_thread(server.start)
        case "host":
            await fleet.kill(chance.choice(fleet.processes))
            await fleet.launch()
        case _:
            raise ValueError(how)


@pytest.mark.spec("AD-01", "AD-07", "RC-01", "PG-11")
@pytest.mark.backend("postgres")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
async def test_nothing_acknowledged_is_lost_and_nothing_is_there_twice(
    postgres: PostgresServer, proxied: Proxied, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    schema = schema_of(tmp_path)
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    proxy = await proxied(postgres)
    ledger = EffectLedger(tmp_path / "ledger")
    dsn = postgres.dsn(port=proxy.port)
    job = {"dsn": dsn, "schema": schema, "ledger": str(ledger.path), "lease": LEASE}
    definition = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    accepted: dict[SessionKey, list[str]] = {}

    async with (
        asyncio.timeout(SECONDS),
        Fleet(job) as fleet,
        PostgresBackend.open(dsn, schema=schema) as backend,
        DurableRuntime(backend=backend, harnesses=[definition], poll_interval=0.05) as client,
    ):

        async def converse(number: int) -> None:
            key = SessionKey("fleet", f"s{number}")
            session = await again(lambda: client.create_session(key, "agent"))
            for count in range(TURNS):
                turn = await again(lambda count=count: session.submit(f"r{count}", f"input {count}"))
                accepted.setdefault(key, []).append(turn.turn_id)
                assert str(await again(turn.wait)) == "two, done"

        conversations = [asyncio.create_task(converse(number)) for number in range(SESSIONS)]
        disturbances = ["cut", "answer", "request", "crash", "restart", "host", "answer", "cut"]
        chance.shuffle(disturbances)
        for how in disturbances:
            # Each meets work: some of it has been done since the last one, and some is left.
            seen = len(ledger.lines())
            await until(lambda seen=seen: len(ledger.lines()) > seen + 2 or all(task.done() for task in conversations))
            await disturb(how, chance, proxy, postgres, fleet)
        await asyncio.gather(*conversations)

        for key, turn_ids in accepted.items():
            session = await again(lambda key=key: _there(client, key))
            turns = (await again(session.list_turns)).items
            assert [turn.turn_id for turn in turns] == turn_ids
            assert {turn.status for turn in turns} == {TurnStatus.COMPLETED}
            answers = [("assistant", "one"), ("assistant", "three"), ("assistant", "two, done")]
            expected = [line for n in range(TURNS) for line in [("user", f"input {n}"), *answers]]
            assert await again(lambda session=session: _texts(session)) == expected
            numbers = [event.sequence for event in await again(lambda session=session: all_events(session))]
            assert numbers == list(range(1, len(numbers) + 1))
    # A request that is on record as made is not made again under the same number.
    asked = Counter((line["message"], line["attempt"]) for line in ledger.lines("model"))
    assert asked and set(asked.values()) == {1}


async def _there(client: DurableRuntime, key: SessionKey) -> Any:
    session = client.get_session(key)
    await session.view()
    return session


async def _texts(session: Any) -> list[tuple[str, str]]:
    return [line for line in await texts(session) if line[1]]
