"""Hosts that share one PostgreSQL: each Turn is run once, in its order, by whichever host takes it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import RunStatus
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of


@pytest.mark.spec("PG-11", "PG-07", "RC-21")
@pytest.mark.backend("postgres")
async def test_a_hundred_turns_of_two_hosts_run_once_each_and_in_order(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    schema = schema_of(tmp_path)
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    async with AsyncExitStack() as stack:
        runtimes: list[DurableRuntime] = []
        for _ in range(2):
            backend = await stack.enter_async_context(PostgresBackend.open(postgres.dsn(), schema=schema))
            harness = Harness("agent", "v1", ScriptedHarness([final("{context}")]))
            runtime = DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05, parallelism=4)
            runtimes.append(await stack.enter_async_context(runtime))
        sessions = [await runtimes[n % 2].create_session(SessionKey("app", f"s{n}"), "agent") for n in range(10)]

        # Each host admits Turns of every Session, in the order of their numbers.
        async def submit(n: int) -> None:
            for number in range(10):
                await runtimes[(n + number) % 2].get_session(sessions[n].key).submit(f"r{number}", f"task {number}")

        for runtime in runtimes:
            await runtime.start()
        await asyncio.gather(*(submit(n) for n in range(10)))

        owners: set[str] = set()
        for session in sessions:
            views = (await session.list_turns()).items
            texts: list[str] = []
            for view in views:
                turn = session.get_turn(view.turn_id)
                texts.append(str(await turn.wait(90)).split("task")[-1].strip())
                [run] = (await turn.list_runs()).items
                assert run.status is RunStatus.COMPLETED
                owners.add(run.owner)
            assert len(texts) == 10 and texts == sorted(texts), texts
        assert len(owners) == 2, "both had something to do"
