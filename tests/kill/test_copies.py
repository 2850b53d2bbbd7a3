"""A process that dies in a restore or a fork: the target has all of the copy, or nothing of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import _failpoints
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import NotFound
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.status import SettledBy
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.census.forks import ForkServer
from tests.runtime.conftest import all_events, refused

pytestmark = pytest.mark.backend("sqlite")

SOURCE = ThreadKey(SessionKey("kill", "source"), "main")
TARGET = ThreadKey(SessionKey("kill", "target"), "branch")
LARGE = "x" * 200_000
"""Its state is an object, not a row."""
PLACES = sorted(name for name in _failpoints.NAMES if name.startswith(("store.commit", "object.put")))
HITS_MAX = 10


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[DurableRuntime]:
    harness = Harness("agent", "v1", ScriptedHarness([final("I know: {context}")]))
    async with (
        LocalBackend.open(folder, synchronous="NORMAL") as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime,
    ):
        yield runtime


async def prepared(folder: Path) -> list[str]:
    """A Thread with two settled positions, and the Session that a fork goes to."""
    async with opened(folder) as runtime:
        session = await runtime.create_session(SOURCE.session, "agent")
        await runtime.create_session(TARGET.session, "agent")
        await runtime.start()
        for text in (LARGE, "b"):
            await session.call(text[:9], text, timeout=90)
        return [checkpoint.position for checkpoint in await session.main_thread().checkpoints()]


async def fork(job: dict[str, Any]) -> None:
    async with opened(Path(job["folder"])) as runtime:
        thread = runtime.get_session(SOURCE.session).main_thread()
        await thread.fork(job["positions"][0], TARGET, "fork")


async def restore(job: dict[str, Any]) -> None:
    async with opened(Path(job["folder"])) as runtime:
        thread = runtime.get_session(SOURCE.session).main_thread()
        await thread.restore(*job["positions"], "restore")


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer("tests.kill.test_copies") as server:
        yield server


def kills(forks: ForkServer, program: str, origin: Path, positions: list[str]) -> Iterator[Path]:
    """A folder for each place where the program can die, as it is left there."""
    died = 0
    for place in PLACES:
        for nth in range(1, HITS_MAX):
            folder = origin.with_name(f"{place}-{nth}")
            shutil.copytree(origin, folder)
            job = {"folder": str(folder), "positions": positions}
            ended = forks.run(f"tests.kill.test_copies:{program}", job, failpoint=f"{place}:{nth}")
            if not ended.killed:
                assert ended.code == 0, ended.output
                break
            died += 1
            yield folder
            shutil.rmtree(folder)
    assert died >= 6, "an object and two commits, before and after each"


@pytest.mark.spec("CK-16", "CK-17", "AD-17")
def test_after_a_kill_in_a_fork_the_target_has_it_or_not_and_a_repeat_makes_it_once(
    tmp_path: Path, forks: ForkServer
) -> None:
    origin = tmp_path / "origin"
    positions = asyncio.run(prepared(origin))

    async def look(folder: Path) -> None:
        async with opened(folder) as runtime:
            session = runtime.get_session(TARGET.session)
            branch = session.get_thread(TARGET.thread_id)
            events = [event.type for event in await all_events(session)]
            assert events[:2] == ["session.created", "thread.created"]
            if len(events) == 2:
                await refused(branch.view(), NotFound)
            else:
                assert events[2:] == ["thread.created", "thread.forked"]
                [copied] = await branch.checkpoints()
                assert copied.settled is SettledBy.FORKED
            thread = runtime.get_session(SOURCE.session).main_thread()
            assert [one.position for one in await thread.checkpoints()] == positions
            await thread.fork(positions[0], TARGET, "fork")
            assert [event.type for event in await all_events(session)][2:] == ["thread.created", "thread.forked"]
            await runtime.start()
            assert str(await branch.call("r1", "c", timeout=90)) == f"I know: {LARGE}, c"

    for folder in kills(forks, "fork", origin, positions):
        asyncio.run(look(folder))


@pytest.mark.spec("AD-17")
def test_after_a_kill_in_a_restore_the_thread_stands_where_it_stood_or_is_restored(
    tmp_path: Path, forks: ForkServer
) -> None:
    origin = tmp_path / "origin"
    positions = asyncio.run(prepared(origin))

    async def look(folder: Path) -> None:
        async with opened(folder) as runtime:
            session = runtime.get_session(SOURCE.session)
            thread = session.main_thread()
            page = await thread.checkpoints()
            assert [one.position for one in page][:2] == positions
            told = [event.type for event in await all_events(session)].count("thread.restored")
            assert (len(page), told) in ((2, 0), (3, 1))
            assert page.current == page.items[-1].position
            await thread.restore(*positions, "restore")
            assert len(await thread.checkpoints()) == 3
            await runtime.start()
            assert str(await session.call("r1", "c", timeout=90)) == f"I know: {LARGE}, c"

    for folder in kills(forks, "restore", origin, positions):
        asyncio.run(look(folder))
