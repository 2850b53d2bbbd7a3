"""Previews and hints between processes that really die (D22, ST-25). Nobody here polls: see `live_host`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import SOCKETS, LocalBackend
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.handles import DurableSession
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.testing.ledger import EffectLedger
from tests.kill.live_host import KEY, NEVER, TEXT
from tests.runtime.conftest import all_events, until

ROOT = Path(__file__).resolve().parents[2]
HALF = "one two three "
pytestmark = pytest.mark.backend("sqlite")


class Folder:
    """One store, its Brains and observers, and an application that only submits and looks."""

    def __init__(self, path: Path, stack: AsyncExitStack) -> None:
        self.path = path
        self.said = EffectLedger(path / "said")
        self.seen = EffectLedger(path / "seen")
        self.processes: list[asyncio.subprocess.Process] = []
        self._stack = stack

    async def start(self, role: str, **job: Any) -> asyncio.subprocess.Process:
        count = self.said.count(role)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.kill.live_host",
            json.dumps({"folder": str(self.path), "role": role, **job}),
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        )
        self.processes.append(process)
        await until(lambda: self.said.count(role) > count)
        return process

    async def application(self) -> DurableSession:
        backend = await self._stack.enter_async_context(LocalBackend.open(self.path, synchronous="NORMAL"))
        runtime = await self._stack.enter_async_context(DurableRuntime(backend=backend, poll_interval=NEVER))
        return runtime.get_session(KEY)

    def open_the_gate(self) -> None:
        (self.path / "g.open").touch()

    def shown(self, turn_id: str, attempt: int = 1) -> str:
        """The text that the observer's previews of a Turn make up; each continues the one before."""
        text = ""
        for line in self.seen.lines():
            if line["name"] == "delta" and (line["turn"], line["attempt"]) == (turn_id, attempt):
                assert line["offset"] == len(text)
                text += line["text"]
        return text

    def facts(self, turn_id: str) -> list[str]:
        return [line["type"] for line in self.seen.lines() if line["name"] == "fact" and line["turn"] == turn_id]


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Folder]:
    async with AsyncExitStack() as stack:
        folder = Folder(tmp_path, stack)
        try:
            yield folder
        finally:
            for process in folder.processes:
                if process.returncode is None:
                    process.kill()
                await process.wait()


async def kill(process: asyncio.subprocess.Process) -> None:
    process.kill()
    await process.wait()


@pytest.mark.spec("ST-25", "RC-03", "BE-03")
async def test_a_submit_in_one_process_wakes_another_and_its_end_wakes_who_waits(folder: Folder) -> None:
    folder.open_the_gate()
    await folder.start("brain")
    session = await folder.application()

    # The first could have been found by the look that every start begins with; the others by hints alone.
    for number in range(5):
        turn = await session.submit(f"r{number}", "go")
        assert str(await turn.wait(90)) == TEXT


@pytest.mark.spec("ST-25", "ST-27", "ST-21", "ST-23")
async def test_previews_cross_and_come_before_their_fact(folder: Folder) -> None:
    brain = await folder.start("brain")
    await folder.start("observer")
    session = await folder.application()
    turn = await session.submit("r1", "go")
    await until(lambda: folder.shown(turn.turn_id) == HALF)
    folder.open_the_gate()
    assert str(await turn.wait(90)) == TEXT
    count = len(await all_events(turn))
    await until(lambda: len(folder.facts(turn.turn_id)) == count)
    kinds = [
        line["name"] if line["name"] != "fact" else line["type"]
        for line in folder.seen.lines()
        if line["turn"] == turn.turn_id
    ]

    assert folder.shown(turn.turn_id) == TEXT
    assert kinds.count("start") == 1
    last = max(index for index, kind in enumerate(kinds) if kind == "delta")
    assert "message.completed" in kinds[last:]
    assert brain.returncode is None
    assert len(list((folder.path / SOCKETS).iterdir())) == 3


@pytest.mark.spec("ST-23", "ST-26", "EV-09")
@pytest.mark.case("C31")
async def test_a_producer_that_is_killed_in_the_middle_leaves_half_a_preview_and_no_fact(folder: Folder) -> None:
    first = await folder.start("brain")
    await folder.start("observer")
    session = await folder.application()
    turn = await session.submit("r1", "go")
    await until(lambda: folder.shown(turn.turn_id) == HALF)
    left = {path.name for path in (folder.path / SOCKETS).iterdir()}
    await kill(first)
    folder.open_the_gate()
    await folder.start("brain")

    assert str(await turn.wait(90)) == TEXT
    count = len(await all_events(turn))
    await until(lambda: len(folder.facts(turn.turn_id)) == count)
    assert folder.shown(turn.turn_id, 1) == HALF
    assert folder.shown(turn.turn_id, 2) == TEXT
    assert "message.abandoned" in folder.facts(turn.turn_id)
    lines = folder.seen.lines()
    abandoned = next(index for index, line in enumerate(lines) if line.get("type") == "message.abandoned")
    assert not any(line["name"] == "delta" and line["attempt"] == 1 for line in lines[abandoned:])
    # The dead one's socket is gone, the others are there, and the new one's.
    now = {path.name for path in (folder.path / SOCKETS).iterdir()}
    assert len(now) == len(left) == 3 and len(now & left) == 2


@pytest.mark.spec("ST-26", "ST-29", "ST-33")
@pytest.mark.parametrize("both", [False, True], ids=["observer", "both"])
async def test_an_observer_that_is_killed_changes_nothing_and_another_sees_what_follows(
    folder: Folder, both: bool
) -> None:
    brain = await folder.start("brain")
    observer = await folder.start("observer")
    session = await folder.application()
    turn = await session.submit("r1", "go")
    await until(lambda: folder.shown(turn.turn_id) == HALF)
    await kill(observer)
    if both:
        await kill(brain)
    folder.open_the_gate()
    if both:
        await folder.start("brain")
    assert str(await turn.wait(90)) == TEXT

    folder.seen.path.unlink()
    await folder.start("observer")
    again = await session.submit("r2", "go")
    assert str(await again.wait(90)) == TEXT
    count = len(await all_events(again))
    await until(lambda: len(folder.facts(again.turn_id)) == count)
    assert folder.shown(again.turn_id) == TEXT
    # It begins with the whole timeline; what was a preview in it is not shown again.
    assert folder.shown(turn.turn_id) == ""
    assert folder.facts(turn.turn_id) == [event.type for event in await all_events(turn)]
    assert (await turn.status()).status is TurnStatus.COMPLETED


@pytest.mark.spec("ST-25", "ST-29")
async def test_a_process_that_may_only_read_sees_everything_as_it_happens(folder: Folder) -> None:
    await folder.start("brain")
    before = sorted(path.name for path in (folder.path / SOCKETS).iterdir())
    await folder.start("observer", read_only=True)
    assert sorted(path.name for path in (folder.path / SOCKETS).iterdir()) == before
    session = await folder.application()
    turn = await session.submit("r1", "go")
    await until(lambda: folder.shown(turn.turn_id) == HALF)
    folder.open_the_gate()
    await turn.wait(90)
    count = len(await all_events(turn))
    await until(lambda: len(folder.facts(turn.turn_id)) == count)

    assert folder.shown(turn.turn_id) == TEXT


@pytest.mark.spec("ST-26")
async def test_a_frozen_observer_holds_nobody_up(folder: Folder) -> None:
    await folder.start("brain")
    observer = await folder.start("observer")
    session = await folder.application()
    observer.send_signal(signal.SIGSTOP)
    try:
        folder.open_the_gate()
        for number in range(3):
            assert str(await (await session.submit(f"r{number}", "go")).wait(90)) == TEXT
    finally:
        observer.send_signal(signal.SIGCONT)
    everything = await all_events(session)
    await until(lambda: folder.seen.count("fact") == len(everything))
    assert [line["sequence"] for line in folder.seen.lines() if line["name"] == "fact"] == list(
        range(1, len(everything) + 1)
    )
