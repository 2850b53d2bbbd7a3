"""C75: forked children shared a database socket: hangs, crashes, and one user's rows read by another."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.errors import UsedAfterFork
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final
from tests.census.forks import ForkServer
from tests.runtime.conftest import KEY, turn_is
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

SECONDS = 90


async def fork_a_runtime(job: dict[str, Any]) -> None:
    """Fork while a Turn is under way; the child tries to use everything, the parent finishes."""
    gates = Gates()
    harness = ScriptedHarness([Stall(gate="busy"), final("{context}")], gates=gates)
    opening: Any = (
        PostgresBackend.open(job["dsn"], schema=job["schema"], initialize_schema=True)
        if "dsn" in job
        else LocalBackend.open(job["folder"])
    )
    async with opening as backend:
        runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05)
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            turn = await session.submit("r1", "of the parent")
            await gates.reached("busy")
            child = os.fork()
            if child == 0:
                os._exit(_refused_all(runtime, backend, session, turn))
            async with asyncio.timeout(SECONDS):
                while True:
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        break
                    await asyncio.sleep(0.01)
            assert os.WIFEXITED(status), f"the child died of signal {os.WTERMSIG(status)}"
            assert os.WEXITSTATUS(status) == 0, f"the child's use number {os.WEXITSTATUS(status)} was not refused"
            gates.open("busy")
            await turn_is(turn, "COMPLETED")
            assert str(await turn.result()) == "of the parent"
            assert len(await session.list_turns()) == 1


def _refused_all(runtime: Any, backend: Any, session: Any, turn: Any) -> int:
    """0 when the child was refused every time; the number of the first use that was not."""
    signal.alarm(SECONDS)  # A hang is a failure too.
    asyncio.events._set_running_loop(None)
    uses = (
        lambda: session.submit("r2", "of the child"),
        lambda: turn.status(),
        lambda: runtime.create_session(KEY, "agent"),
        lambda: runtime.start(),
        lambda: session.list_events(),
        lambda: backend.owners(),
        lambda: backend.dead_owners(),
        lambda: backend.put_body(KEY, b"x" * 100_000),
    )
    for number, use in enumerate(uses, start=1):
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(use())
        except UsedAfterFork:
            continue
        except BaseException as error:
            os.write(1, f"use {number}: {error!r}\n".encode())
            return number
        return number
    return 0


def submit_in_child(folder: str, name: str) -> None:
    async def submit() -> None:
        async with LocalBackend.open(folder) as backend, DurableRuntime(backend=backend) as runtime:
            await runtime.get_session(KEY).submit(f"of {name}", name)

    asyncio.run(submit())


@pytest.mark.case("C75")
@pytest.mark.backend("sqlite")
def test_a_forked_child_is_refused_and_its_parent_goes_on(forks: ForkServer, tmp_path: Path) -> None:
    ended = forks.run("tests.cases.test_c75_fork:fork_a_runtime", {"folder": str(tmp_path)})
    assert ended.code == 0, ended.output


@pytest.mark.case("C75")
@pytest.mark.backend("postgres")
def test_a_forked_child_shares_no_connection_with_its_parent(
    forks: ForkServer, postgres: PostgresServer, tmp_path: Path
) -> None:
    ended = forks.run(
        "tests.cases.test_c75_fork:fork_a_runtime", {"dsn": postgres.dsn(), "schema": schema_of(tmp_path)}
    )
    assert ended.code == 0, ended.output


@pytest.mark.case("C75")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_a_child_that_opens_for_itself_works_beside_its_parent(tmp_path: Path, method: str) -> None:
    async with LocalBackend.open(tmp_path) as backend:
        runtime = DurableRuntime(
            backend=backend,
            harnesses=[Harness("agent", "v1", ScriptedHarness([final("{context}")]))],
            poll_interval=0.05,
        )
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            context = multiprocessing.get_context(method)
            child = context.Process(target=submit_in_child, args=(str(tmp_path), method))
            await asyncio.to_thread(child.start)
            await asyncio.to_thread(child.join)
            assert child.exitcode == 0
            (view,) = await session.list_turns()
            await turn_is(session.get_turn(view.turn_id), "COMPLETED")
            assert view.request_id == f"of {method}"
