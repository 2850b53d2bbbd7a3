"""Processes that really die: `kill -9`, and the signals a host gets when it is asked to stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.status import ExecutionState, RunStatus, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.executor import Succeeded
from agentscope_durable.testing.ledger import EffectLedger
from tests.kill.host import KEY
from tests.runtime.conftest import until

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 90.0
pytestmark = pytest.mark.backend("sqlite")


class Folder:
    """One store with its ledgers, and the processes that use it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ledger = EffectLedger(path / "ledger")
        self.said = EffectLedger(path / "said")
        self.processes: list[asyncio.subprocess.Process] = []

    async def host(self, *, failpoint: str = "", **job: object) -> asyncio.subprocess.Process:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "DURABLE_FAILPOINT": failpoint}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.kill.host", json.dumps({"folder": str(self.path), **job}), env=environment
        )
        self.processes.append(process)
        return process

    async def says(self, name: str) -> None:
        await until(lambda: self.said.count(name) > 0)

    def answer(self) -> str:
        """What the Turn answered, if the last that was said is that it has ended."""
        last = self.said.lines()[-1]
        assert last["name"] == "ended"
        return last["answer"]

    async def reached(self, gate: str) -> None:
        await until(lambda: (self.path / f"{gate}.reached").exists())

    def open(self, gate: str) -> None:
        (self.path / f"{gate}.open").touch()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[tuple]:
        """The Turn as another process sees it, and the operator's tools."""
        async with (
            LocalBackend.open(self.path, synchronous="NORMAL") as backend,
            DurableRuntime(backend=backend, poll_interval=0.05) as runtime,
        ):
            (view,) = (await runtime.get_session(KEY).list_turns()).items
            yield runtime.get_session(KEY).get_turn(view.turn_id), HostOperations(backend)


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    for process in folder.processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(SECONDS):
        return await process.wait()


@pytest.mark.spec("AD-01", "RT-54")
async def test_a_turn_whose_submit_returned_survives(folder: Folder) -> None:
    process = await folder.host(run=False, hang=True)
    await folder.says("submitted")
    process.kill()
    await ended(process)

    async with folder.turn() as (turn, _):
        assert len(folder.said.lines()) == folder.said.count("submitted", turn=turn.turn_id) == 1
        assert (await turn.status()).status is TurnStatus.QUEUED


@pytest.mark.spec("AD-07", "AD-01")
@pytest.mark.parametrize("side", ["before", "after"])
async def test_a_process_that_dies_in_submit_asks_again(folder: Folder, side: str) -> None:
    # The first commit makes the Session, the second admits the Turn.
    first = await folder.host(run=False, hang=True, failpoint=f"store.commit.{side}:2")
    assert await ended(first) == -signal.SIGKILL
    assert folder.said.lines() == []
    second = await folder.host(run=False, hang=True)
    await folder.says("submitted")
    second.kill()

    async with folder.turn() as (turn, _):
        assert len(folder.said.lines()) == folder.said.count("submitted", turn=turn.turn_id) == 1


@pytest.mark.spec("RT-02", "RT-09", "RC-01", "RC-02", "RT-54")
async def test_a_waiting_host_takes_over_from_a_killed_one_at_once(folder: Folder) -> None:
    """The lease lasts an hour: only the knowledge that the process is gone lets the other one go on."""
    folder.open("work")
    first = await folder.host(hang=True)
    await folder.reached("g")
    second = await folder.host()
    await until(lambda: folder.said.count("started") == 2)
    first.kill()
    folder.open("g")
    assert await ended(second) == 0

    assert folder.answer() == "2, worked"
    assert folder.ledger.count("tool") == folder.ledger.count("work") == 1
    assert folder.ledger.count("model") == 4
    async with folder.turn() as (turn, _):
        runs = (await turn.list_runs()).items
        # The tool may have been so fast that its Run did not have to wait for it.
        statuses = [run.status for run in runs if run.status is not RunStatus.SUSPENDED]
        assert statuses == [RunStatus.LOST, RunStatus.COMPLETED]
        assert len({run.owner for run in runs}) == 2
        assert (await turn.status()).recovery is None


@pytest.mark.spec("RC-01")
async def test_whoever_asks_learns_at_once_that_a_host_was_killed(folder: Folder) -> None:
    """The lease lasts an hour, and nobody is there to take over: the status and the watchdog say so all the same."""
    folder.open("work")
    host = await folder.host(hang=True)
    await folder.reached("g")
    async with folder.turn() as (turn, operations):
        before = await turn.status()
        assert before.lease is not None and before.lease.alive and before.waiting_on == ()
        assert (await operations.watchdog(0)).owned == 1
        host.kill()
        await ended(host)

        view = await turn.status()
        assert view.lease is not None and not view.lease.alive
        assert (view.status, view.lease.owner, view.lease.fence) == (
            TurnStatus.RUNNING,
            before.lease.owner,
            before.lease.fence,
        )
        assert [waiting.kind for waiting in view.waiting_on] == [WaitKind.HOST]
        assert ((await operations.watchdog(0)).owned, (await operations.watchdog(0)).unclaimed) == (0, 1)


@pytest.mark.spec("RC-01", "BE-23")
async def test_without_the_lock_the_lease_alone_rules(folder: Folder) -> None:
    folder.open("work")
    first = await folder.host(hang=True, lease=1.0, withhold_os_lock=True)
    await folder.reached("g")
    first.kill()
    await ended(first)
    folder.open("g")
    second = await folder.host(lease=1.0, withhold_os_lock=True)
    assert await ended(second) == 0

    assert folder.answer() == "2, worked"
    assert folder.ledger.count("tool") == 1


@pytest.mark.spec("UN-12", "SE-02", "UN-13")
async def test_an_execution_that_died_with_its_process_is_settled_by_evidence(folder: Folder) -> None:
    folder.open("g")
    first = await folder.host(hang=True)
    await folder.reached("work")
    first.kill()
    await ended(first)
    second = await folder.host()
    async with folder.turn() as (turn, operations):

        async def unknown() -> bool:
            return [reason.kind for reason in (await turn.status()).waiting_on] == [WaitKind.TOOL_UNKNOWN]

        await until(unknown)
        (call,) = [tool for tool in await turn.list_tools() if tool.state is ExecutionState.UNKNOWN]
        await operations.reconcile_tool(
            turn, call.call_id, request_id="e1", result=Succeeded(value="seen"), evidence_ref="ticket 1"
        )
    assert await ended(second) == 0

    assert folder.answer() == "2, seen"
    assert folder.ledger.count("work") == 1


@pytest.mark.case("C30")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda how: how.name)
async def test_a_signal_never_ends_a_turn(folder: Folder, how: signal.Signals) -> None:
    folder.open("work")
    first = await folder.host(hang=True)
    await folder.reached("g")
    first.send_signal(how)
    await ended(first)
    folder.open("g")
    second = await folder.host()
    assert await ended(second) == 0

    assert folder.answer() == "2, worked"
    assert folder.ledger.count("tool") == folder.ledger.count("work") == 1
    async with folder.turn() as (turn, _):
        view = await turn.status()
        assert view.recovery is None
        assert RunStatus.CANCELLED not in {run.status for run in await turn.list_runs()}
