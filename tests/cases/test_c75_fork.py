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
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, turn_is
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

SECONDS = 90


def opening(job: dict[str, Any]) -> Any:
    """A backend over the store of this test: in a folder, or in a schema of a server."""
    if "dsn" in job:
        return PostgresBackend.open(job["dsn"], schema=job["schema"], initialize_schema=True)
    return LocalBackend.open(job["folder"])


async def fork_before_work(job: dict[str, Any]) -> None:
    """As a pre-forking server with an application that it loaded first: opened and idle, then forked for each worker.

    A worker is refused what was opened before; it opens for itself, and both go on.
    """
    harness = ScriptedHarness([final("{context}")])
    async with opening(job) as backend:
        runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05)
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            for number in range(2):
                child = os.fork()
                if child == 0:
                    os._exit(_refused_then_opened(session, backend, job, f"worker {number}"))
                await _ended(child)
            await runtime.start()
            for view in await session.list_turns():
                await turn_is(session.get_turn(view.turn_id), "COMPLETED")
            assert sorted(view.request_id for view in await session.list_turns()) == ["of worker 0", "of worker 1"]


def _refused_then_opened(session: Any, backend: Any, job: dict[str, Any], name: str) -> int:
    """0 when what the parent had opened was refused, and what this process opens works."""
    signal.alarm(SECONDS)  # A hang is a failure too.
    asyncio.events._set_running_loop(None)
    for use in (lambda: session.submit("r1", "of the child"), lambda: backend.owners()):
        try:
            asyncio.new_event_loop().run_until_complete(use())
        except UsedAfterFork:
            continue
        except BaseException as error:
            os.write(1, f"{name}: {error!r}\n".encode())
        return 1
    try:
        submit_in_child(job, name)
    except BaseException as error:
        os.write(1, f"{name}: {error!r}\n".encode())
        return 2
    return 0


async def _ended(child: int) -> None:
    """Wait for a child, which must end well."""
    async with asyncio.timeout(SECONDS):
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            await asyncio.sleep(0.01)
    assert os.WIFEXITED(status), f"the child died of signal {os.WTERMSIG(status)}"
    assert os.WEXITSTATUS(status) == 0, f"the child ended with {os.WEXITSTATUS(status)}: it says why"


async def fork_a_runtime(job: dict[str, Any]) -> None:
    """Fork while a Turn is under way; the child tries to use everything, the parent finishes."""
    gates = Gates()
    harness = ScriptedHarness([Stall(gate="busy"), final("{context}")], gates=gates)
    async with opening(job) as backend:
        runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05)
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            turn = await session.submit("r1", "of the parent")
            await gates.reached("busy")
            child = os.fork()
            if child == 0:
                os._exit(_refused_all(runtime, backend, session, turn))
            await _ended(child)
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


def submit_in_child(job: dict[str, Any], name: str) -> None:
    async def submit() -> None:
        async with opening(job) as backend, DurableRuntime(backend=backend) as runtime:
            await runtime.get_session(KEY).submit(f"of {name}", name)

    asyncio.run(submit())


@pytest.fixture
def job(backend: str, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Where the store is."""
    if backend == "sqlite":
        return {"folder": str(tmp_path)}
    postgres: PostgresServer = request.getfixturevalue("postgres")
    return {"dsn": postgres.dsn(), "schema": schema_of(tmp_path)}


@pytest.mark.case("C75")
@pytest.mark.parametrize("backend", PERSISTENT)
def test_a_forked_child_is_refused_and_its_parent_goes_on(forks: ForkServer, job: dict[str, Any], backend: str) -> None:
    """On a server this also says that no connection is shared: what the child would send, the parent's would hear."""
    ended = forks.run("tests.cases.test_c75_fork:fork_a_runtime", job)
    assert ended.code == 0, ended.output


@pytest.mark.case("C75")
@pytest.mark.parametrize("backend", PERSISTENT)
def test_workers_of_a_server_that_loaded_the_application_first_open_for_themselves(
    forks: ForkServer, job: dict[str, Any], backend: str
) -> None:
    ended = forks.run("tests.cases.test_c75_fork:fork_before_work", job)
    assert ended.code == 0, ended.output


@pytest.mark.case("C75")
@pytest.mark.parametrize(("backend", "method"), [("sqlite", "spawn"), ("sqlite", "forkserver"), ("postgres", "spawn")])
async def test_a_child_that_opens_for_itself_works_beside_its_parent(
    job: dict[str, Any], backend: str, method: str
) -> None:
    async with opening(job) as parents:
        runtime = DurableRuntime(
            backend=parents,
            harnesses=[Harness("agent", "v1", ScriptedHarness([final("{context}")]))],
            poll_interval=0.05,
        )
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            context = multiprocessing.get_context(method)
            child = context.Process(target=submit_in_child, args=(job, method))
            await asyncio.to_thread(child.start)
            await asyncio.to_thread(child.join)
            assert child.exitcode == 0
            (view,) = await session.list_turns()
            await turn_is(session.get_turn(view.turn_id), "COMPLETED")
            assert view.request_id == f"of {method}"
