"""C30: the polite exit could not tell a shutdown from a user's cancel, and a hard kill was safer.

The host is the program that docs/limits.md recommends, in a process of its own, with limits that a test can wait for.
Its Turn outlives both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import TurnCancelled
from agentscope_durable.contracts.status import ExecutionState, ReplayRule, RunStatus, TurnStatus
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, local, say
from tests.cases.programs import job_of, opening
from tests.docs.test_examples import runnable
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, refused, turn_is, until

ROOT = Path(__file__).resolve().parents[2]
LIMITS = "DRAIN_SECONDS, CLOSE_SECONDS = {drain}, 0.3"
SHORT, LONG = 0.3, 600.0
OPENS = 'LocalBackend.open("./durable")'
INTERRUPT = "KeyboardInterrupt in a tool"
CLOSED_LOOP = "loop closed under it"
WAYS = ("SIGTERM", "SIGINT", "SIGTERM twice", "SIGKILL", CLOSED_LOOP, INTERRUPT)

ON_EACH = [*((way, "sqlite") for way in WAYS), ("SIGTERM", "postgres"), ("SIGKILL", "postgres")]
"""What the process does is its own affair. What the next host finds, and when, is the store's."""


def make_harness(folder: Path, *, interrupts: bool = False) -> Harness:
    """The agent of the story. Its second tool holds the Turn for as long as its gate is closed, whoever asks."""
    ledger = EffectLedger(folder / "effects")

    def look() -> str:
        ledger.append("look")
        if interrupts:
            raise KeyboardInterrupt
        return "seen"

    script = [
        say("one"),
        local("look", rule=ReplayRule.SAFE),
        say("two"),
        Stall(gate="held", obedient=False),
        final("{results}"),
    ]
    return Harness("agent", "v1", ScriptedHarness(script, ledger=ledger, gates=Gates(folder), tools={"look": look}))


def recommended() -> str:
    """The program of docs/limits.md, without what the page hides."""
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    section = page[page.index("### A host of its own") : page.index("### Jupyter")]
    return runnable("\n".join(_shown(section)))


def _shown(section: str) -> Iterator[str]:
    hidden = False
    for line in section.splitlines():
        hidden = hidden or line == "<!--"
        if not hidden:
            yield line
        hidden = hidden and line != "-->"


# The loop ends and is closed, the process does not: an embedding that forgot the host.
CLOSES_ITS_LOOP = """
import sys

async def begin():
    backend = await LocalBackend.open("./durable")
    runtime = DurableRuntime(backend=backend, harnesses=[harness], lease=1.0)
    await runtime.start()
    while not Path("held.reached").exists():
        await asyncio.sleep(0.01)
    return runtime

loop = asyncio.new_event_loop()
kept = loop.run_until_complete(begin())
loop.close()
Path("closed").touch()
sys.stdin.read()
"""


class Place:
    """A folder, a host's process in it, and the Turn as the application sees it."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.folder = folder
        self.job = job_of(backend, folder)
        self.processes: list[asyncio.subprocess.Process] = []

    async def host(self, *, drain: float = SHORT, interrupts: bool = False, ending: str = "") -> Any:
        program = "\n".join(
            [
                "from pathlib import Path",
                "from tests.cases.test_c30_six_ways_to_end_a_host import make_harness",
                f"harness = make_harness(Path('.'), interrupts={interrupts})",
                self.program(),
                LIMITS.format(drain=drain),
                ending or "asyncio.run(serve())",
            ]
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def program(self) -> str:
        """The recommended program, which opens the store of this place."""
        text = recommended()
        assert text.count(OPENS) == 1
        if "dsn" in self.job:
            dsn, schema = self.job["dsn"], self.job["schema"]
            text = text.replace(OPENS, f"PostgresBackend.open({dsn!r}, schema={schema!r})")
            text = text.replace("DurableRuntime(", "DurableRuntime(lease=1.0, ", 1)
        return f"from agentscope_durable import PostgresBackend\n{text}"

    def opening(self) -> Any:
        return opening(self.job) if "dsn" in self.job else LocalBackend.open(self.folder / "durable")

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Any]:
        """The Session of an application that runs no agents."""
        async with AsyncExitStack() as stack:
            backend = await stack.enter_async_context(self.opening())
            harnesses = [make_harness(self.folder)]
            runtime = await stack.enter_async_context(
                DurableRuntime(backend=backend, harnesses=harnesses, poll_interval=0.05)
            )
            yield await runtime.create_session(KEY, "agent")

    def reached(self) -> bool:
        return (self.folder / "held.reached").exists()

    def forget(self) -> None:
        (self.folder / "held.reached").unlink()

    def open(self) -> None:
        (self.folder / "held.open").touch()

    async def end(self, way: str) -> tuple[int | None, str]:
        """Run a host until the Turn is held in it, and end it in this way; its exit code and what it said."""
        process = await self.host(
            drain=LONG if way == "SIGTERM twice" else SHORT,
            interrupts=way == INTERRUPT,
            ending=CLOSES_ITS_LOOP if way == CLOSED_LOOP else "",
        )
        if way == CLOSED_LOOP:
            await until((self.folder / "closed").exists)
            return process.returncode, ""
        if way != INTERRUPT:
            await until(self.reached)
            process.send_signal(signal.SIGKILL if way == "SIGKILL" else getattr(signal, way.split(" ")[0]))
        if way == "SIGTERM twice":
            await until(lambda: not _handles(process.pid, signal.SIGTERM))
            process.send_signal(signal.SIGTERM)
        _, said = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, said.decode()


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (number - 1) & 1)


@pytest.fixture
async def place(tmp_path: Path, backend: str) -> AsyncIterator[Place]:
    place = Place(tmp_path, backend)
    yield place
    for process in place.processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


ENDS = {
    "SIGTERM": 0,
    "SIGINT": 0,
    "SIGTERM twice": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
    CLOSED_LOOP: None,
    INTERRUPT: -signal.SIGINT,
}
"""What the process leaves; None: it is still there."""


@pytest.mark.case("C30")
@pytest.mark.spec("LF-02")
@pytest.mark.parametrize(("way", "backend"), ON_EACH)
async def test_however_a_host_ends_its_turn_goes_on_and_ends_the_same(place: Place, way: str) -> None:
    async with place.session() as session:
        turn = await session.submit("r1", "go")
        code, said = await place.end(way)
        assert code == ENDS[way], said
        view = await turn.status()
        assert view.status in (TurnStatus.RUNNING, TurnStatus.WAITING)
        assert not view.cancel_requested
        assert view.error is view.recovery is None
        if place.reached():
            place.forget()

        # Another host goes on, and ends when it is asked to, with nothing in hand.
        second = await place.host()
        await until(place.reached)
        place.open()
        await turn_is(turn, "COMPLETED")
        second.send_signal(signal.SIGTERM)
        _, said = await asyncio.wait_for(second.communicate(), 60)
        assert second.returncode == 0, said.decode()

        # The same end in all six ways.
        assert [message.text for message in await session.history()] == ["go", "one", "two", "seen"]
        view = await turn.status()
        assert (view.status, view.error, view.recovery, view.cancel_requested) == (
            TurnStatus.COMPLETED,
            None,
            None,
            False,
        )
        (call,) = await turn.list_tools()
        assert call.state is ExecutionState.COMPLETED
        first_run, *others = [run.status for run in await turn.list_runs()]
        assert first_run in (RunStatus.RELEASED, RunStatus.LOST)
        assert others[-1] is RunStatus.COMPLETED
        assert not {RunStatus.CANCELLED, RunStatus.FAILED} & {first_run, *others}


@pytest.mark.case("C30")
@pytest.mark.spec("AD-20")
@pytest.mark.parametrize("way", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_only_a_stored_cancel_makes_it_cancelled(place: Place, way: str) -> None:
    async with place.session() as session:
        turn = await session.submit("r1", "go")
        await place.end(way)
        assert (await turn.status()).status is TurnStatus.RUNNING
        await turn.cancel("c1")
        second = await place.host()
        await until(lambda: _ended(turn))
        await refused(turn.result(), TurnCancelled)
        second.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(second.wait(), 60) == 0
        # It was settled, and nothing ran for that.
        assert len(await turn.list_runs()) == 1


async def _ended(turn: Any) -> bool:
    return (await turn.status()).status.terminal
