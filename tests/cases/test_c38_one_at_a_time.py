"""C38: the strategy field was accepted and ignored, and two runs wrote the same conversation at once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, local
from tests.cases.programs import job_of, opening
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, SECONDS, Hosts, refused

PROCESSES = 5
EACH = 10
CLIENT = """
import asyncio, sys
from agentscope_durable import DurableRuntime, LocalBackend, PostgresBackend, SessionKey

async def main(place, number, each):
    opening = PostgresBackend.open(place) if "://" in place else LocalBackend.open(place)
    async with opening as backend, DurableRuntime(backend=backend) as runtime:
        session = runtime.get_session(SessionKey("app", "c1"))
        await asyncio.gather(*(session.submit(f"r{number}-{n}", f"{number}-{n}") for n in range(each)))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.case("C38")
@pytest.mark.spec("Q-01")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_fifty_submits_from_five_processes_run_one_at_a_time_in_the_order_of_admission(
    tmp_path: Path, backend: str
) -> None:
    active, most, order = 0, 0, []

    async def busy() -> str:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return "ok"

    harness = ScriptedHarness([local("busy"), final("{input}")], tools={"busy": busy})
    job = job_of(backend, tmp_path)
    place = f"{job['dsn']}?search_path={job['schema']}" if "dsn" in job else str(tmp_path / "store")
    async with opening(job) as store:
        hosts = [
            DurableRuntime(backend=store, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05)
            for _ in range(2)
        ]
        session = await hosts[0].create_session(KEY, "agent")
        for host in hosts:
            await host.start()
        clients = [
            await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, place, str(number), str(EACH))
            for number in range(PROCESSES)
        ]
        assert [await client.wait() for client in clients] == [0] * PROCESSES

        turns: list[Any] = []
        cursor = None
        while page := await session.list_turns(cursor, 20):
            turns += page
            cursor = page.cursor
            if cursor is None:
                break
        assert len(turns) == PROCESSES * EACH
        for turn in turns:
            await session.get_turn(turn.turn_id).wait(SECONDS)
            [run] = await session.get_turn(turn.turn_id).list_runs()
            order.append((run.started_at_ms, run.ended_at_ms))
        for host in hosts:
            await host.close()
    assert most == 1
    assert [turn.ordinal for turn in turns] == sorted(turn.ordinal for turn in turns)
    for (_, ended), (began, _) in zip(order, order[1:], strict=False):
        assert ended <= began, "a Turn began before the one admitted before it had ended"


@pytest.mark.case("C38")
async def test_an_option_that_does_not_exist_is_refused_and_nothing_is_stored(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    unknown: Any = {"multitask_strategy": "reject"}
    with pytest.raises(TypeError, match="multitask_strategy"):
        await session.submit("r1", "a", **unknown)
    document = {"version": "1", "content": [{"type": "text", "text": "a"}], "multitaskStrategy": "reject"}
    error = await refused(session.submit("r1", document), InvalidRequest)
    assert "multitaskStrategy" in str(error)
    assert len(await session.list_turns()) == 0
