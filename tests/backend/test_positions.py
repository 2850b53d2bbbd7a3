"""Which settled positions of a Thread are kept, and that everything they need is kept with them, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.checkpoint import position_of, stream_position
from agentscope_durable.contracts.errors import CheckpointPruned, InvalidRequest
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.records import EntryRecord, UsesRecord, decode
from agentscope_durable.domain import positions
from agentscope_durable.domain.workspace import entries_to_restore
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.record_store import PAGE_MAX, Range, Reads
from agentscope_durable.testing.manual_clock import ManualClock
from tests.backend.world import BINDING, SESSION, World
from tests.every_store import STORES, shelf

MAIN = ThreadKey(SESSION, "main")
NOW = 2**40
"""Above every position."""
Files = dict[str, str]


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@asynccontextmanager
async def desk(backend: str, place: Path) -> AsyncGenerator[Desk]:
    clock = ManualClock()
    async with shelf(backend, place, clock) as there:
        world = World(store=await there.records(), clock=clock)
        yield Desk(await world.open())


@pytest.fixture
async def one(backend: str, tmp_path: Path) -> AsyncGenerator[Desk]:
    async with desk(backend, tmp_path) as one:
        yield one


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "POSITIONS_BATCH", 3)


class Desk:
    """A Thread whose Turns write files, and what it should hold at each position, kept beside it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.operations = HostOperations(world.backend)
        self.now: Files = {}
        self.at: dict[str, Files] = {}
        self._texts = itertools.count(1)
        self._requests = itertools.count(1)

    async def entries(self, at: int = NOW) -> Any:
        return await self.world.ask(q.EntriesAt(session=SESSION, thread_id="main", at=at))

    async def stored(self, at: int) -> Any:
        return await self.world.ask(q.LoadCheckpoint(session=SESSION, thread_id="main", at=at))

    async def counted(self) -> Any:
        return await self.world.ask(q.GetWorkspace(session=SESSION, thread_id="main"))

    async def turn(self, *commits: dict[str, str | None]) -> str:
        """A Turn of so many commits, each of which writes these files (None deletes). Returns its position."""
        await self.world.submit("write")
        await self.world.claim()
        for commit in commits:
            present = {entry.path[0]: entry for entry in await self.entries()}
            counted = await self.counted()
            changes: list[c.EntryCommit] = []
            for number, (name, text) in enumerate(commit.items(), counted.numbers + 1):
                before = present.get(name)
                expected = 0 if before is None else before.version
                if text is None:
                    if before is not None:
                        changes.append(c.EntryCommit(path=(name,), expected=expected))
                        del self.now[name]
                    continue
                changes.append(
                    c.EntryCommit(
                        path=(name,),
                        expected=expected,
                        version=max(expected, counted.floor) + 1,
                        number=number,
                        size=len(text),
                        content=body_of({"text": text}),
                    )
                )
                self.now[name] = text
            await self.world.commit(
                journal=f'["native {next(self._texts)}"]'.encode(),
                checkpoint=True,
                base=True,
                workspace=tuple(changes),
            )
        await self.world.finish()
        return await self.settled()

    async def settled(self) -> str:
        current = (await self.listed()).current
        self.at[current] = dict(self.now)
        return current

    async def listed(self) -> Any:
        return await self.world.ask(q.ListCheckpoints(session=SESSION, thread_id="main", limit=PAGE_MAX))

    def restore_command(self, position: str, current: str) -> c.RestoreThread:
        return c.RestoreThread(
            session=SESSION,
            thread_id="main",
            request_id=f"restore-{next(self._requests)}",
            at=number_of(position),
            expected_at=number_of(current),
        )

    async def restore(self, position: str) -> None:
        stored = await self.stored(number_of(position))
        wanted, present = await self.entries(stored.through), await self.entries()
        native = c.NativeState(
            binding=BINDING,
            head=stored.head,
            journal=b'["copied"]',
            writer="",
            workspace=entries_to_restore(present, wanted, (await self.counted()).floor),
        )
        command = self.restore_command(position, (await self.listed()).current)
        await self.world.do(replace(command, native=native))
        self.now = dict(self.at[position])
        await self.settled()

    async def holds(self, entries: Any) -> Files:
        found: Files = {}
        for entry in entries:
            body = await self.world.ask(q.GetContent(session=SESSION, thread_id="main", number=entry.number))
            content = await self.world.backend.open_body(SESSION, body)
            found[entry.path[0]] = content.decode().removeprefix('{"text":"').removesuffix('"}')
        return found

    async def check(self) -> None:
        """Every position there is tells what was there, and what none needs is not stored."""
        assert await self.holds(await self.entries()) == self.now
        there = await self.listed()
        for view in there:
            stored = await self.stored(number_of(view.position))
            assert await self.holds(await self.entries(stored.through)) == self.at[view.position], view.position
        reads = {name: Range(f"{name}/", limit=PAGE_MAX) for name in ("entry", "former", "content", "uses")}
        found = (await self.world.store.read(keys.partition(SESSION), Reads(ranges=tuple(reads.values())))).ranges
        referring = [decode(EntryRecord, data).number for name in ("entry", "former") for _, data in found[reads[name]]]
        stored = [int(key.rpartition("/")[2]) for key, _ in found[reads["content"]]]
        uses = {int(key.rpartition("/")[2]): decode(UsesRecord, data).more for key, data in found[reads["uses"]]}
        assert stored == sorted(set(referring)), "a content is kept as long as something refers to it"
        assert {number: referring.count(number) - 1 for number in stored if referring.count(number) > 1} == uses


def number_of(position: str) -> int:
    return stream_position(MAIN, position)


# ---- stories ----


async def test_old_positions_go_and_those_that_stay_have_all_their_files(one: Desk) -> None:
    first = await one.turn({"a": "1", "b": "1"})
    second = await one.turn({"a": "2"}, {"a": "2b", "b": None})
    third = await one.turn({"a": "3", "c": "3"})
    await one.check()

    receipt = await one.operations.prune_checkpoints(MAIN, through=first)

    assert (receipt.positions, receipt.versions) == (1, 2), "of a and b, what only the first position could tell"
    assert [view.position for view in await one.listed()] == [second, third]
    await one.check()
    receipt = await one.operations.prune_checkpoints(MAIN, older_than=0)
    assert receipt.positions == 1
    assert [view.position for view in await one.listed()] == [third], "the one it stands on stays"
    await one.check()
    assert (await one.operations.prune_checkpoints(MAIN, older_than=0)).positions == 0


async def test_who_asks_for_a_dropped_one_is_told_so(one: Desk) -> None:
    first = await one.turn({"a": "1"})
    second = await one.turn({"a": "2"})
    await one.operations.prune_checkpoints(MAIN, through=first)

    with pytest.raises(CheckpointPruned) as refused:
        await one.stored(number_of(first))
    assert (refused.value.thread_id, refused.value.position) == ("main", first)
    with pytest.raises(CheckpointPruned):
        await one.world.do(one.restore_command(first, second))
    # One that was never there is another matter.
    with pytest.raises(InvalidRequest):
        await one.operations.prune_checkpoints(MAIN, through=position_of(ThreadKey(SESSION, "other"), 3))
    with pytest.raises(InvalidRequest):
        await one.operations.prune_checkpoints(MAIN)


async def test_by_age_only_what_was_settled_long_enough_ago_goes(one: Desk) -> None:
    old = await one.turn({"a": "1"})
    one.world.clock.advance(5000)
    young = await one.turn({"a": "2"})
    newest = await one.turn({"a": "3"})

    assert (await one.operations.prune_checkpoints(MAIN, older_than=6)).positions == 0
    assert (await one.operations.prune_checkpoints(MAIN, older_than=5)).positions == 1
    assert old not in [view.position for view in await one.listed()]
    assert [view.position for view in await one.listed()] == [young, newest]


async def test_a_content_that_a_restore_brought_back_stays_as_long_as_either_needs_it(one: Desk) -> None:
    first = await one.turn({"a": "1"})
    await one.turn({"a": "2"})
    await one.restore(first)
    await one.check()
    back = await one.settled()

    await one.operations.prune_checkpoints(MAIN, older_than=0)
    assert [view.position for view in await one.listed()] == [back]
    assert one.now == {"a": "1"}
    await one.check()
    await one.turn({"a": "4"})
    await one.operations.prune_checkpoints(MAIN, older_than=0)
    await one.check()


@pytest.mark.usefixtures("small_batches")
async def test_it_works_in_batches_and_may_stop_between_them(one: Desk) -> None:
    for number in range(8):
        await one.turn({"a": str(number), "b": str(number)}, {"a": f"{number}b"})
    command = c.PruneCheckpoints(session=SESSION, thread_id="main")
    positions_gone = versions = batches = 0
    while True:
        pruned: c.PositionsPruned = await one.world.do(command)
        assert pruned.positions <= 3 and pruned.versions <= 3
        await one.check()
        positions_gone, versions, batches = positions_gone + pruned.positions, versions + pruned.versions, batches + 1
        if not pruned.more:
            break
    assert (positions_gone, versions) == (7, 14)
    assert batches >= 5


async def test_a_thread_at_work_may_be_pruned(one: Desk) -> None:
    await one.turn({"a": "1"})
    settled = await one.turn({"a": "2"})
    await one.world.submit("go on")
    await one.world.claim()
    await one.operations.prune_checkpoints(MAIN, older_than=0)
    await one.world.commit(journal=b'["n"]', checkpoint=True, base=True)
    await one.world.finish()
    assert [view.position for view in await one.listed()][0] == settled
    await one.settled()
    await one.check()
    with pytest.raises(CheckpointPruned):
        await one.stored(2)


# ---- any history ----


async def live(one: Desk, seed: int, acts: int) -> None:
    chance = random.Random(seed)
    texts = itertools.count(1)
    for _ in range(acts):
        listed = [view.position for view in await one.listed()]
        act = chance.random()
        if act < 0.55 or not listed:
            commits = [
                {
                    name: None if chance.random() < 0.2 else str(next(texts))
                    for name in chance.sample("abc", chance.randint(1, 3))
                }
                for _ in range(chance.randint(1, 3))
            ]
            await one.turn(*commits)
        elif act < 0.8:
            await one.restore(chance.choice(listed))
        else:
            await one.operations.prune_checkpoints(MAIN, through=chance.choice(listed))
        await one.check()


@pytest.mark.case("C69")
@pytest.mark.parametrize("backend", STORES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_after_any_history_every_position_that_is_kept_has_its_files_and_no_other_does(backend: str, seed: int) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as place:
            async with desk(backend, Path(place)) as one:
                await live(one, seed, 12)

    asyncio.run(run())
