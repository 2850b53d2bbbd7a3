"""The same commands against every store: memory is the oracle, and what differs is a defect of one of the two.

The commands come from two places that know nothing of each other: random histories of players who know little of each
other, and what real hosts, clients and operators sent in simulated stories, zombies and lost answers among them.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.domain import pruning
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from tests.domain.stage import BINDING, SESSION, text
from tests.domain.test_invariants import HOSTS, THREADS, Advance, Do, Gone, Helpers, Jump, Renew
from tests.simulation.differential import Differential, Differs, Side, missing
from tests.simulation.record import recorded
from tests.simulation.schedule import draw

HISTORIES = int(os.environ.get("HISTORIES", "8"))
HISTORIES_MAX = 200
"""Histories after which every command must have succeeded, been refused and been fenced."""
STORIES = (23, 34)
"""Without a theme, so that much happens in them."""
LENGTH = 100

Open = Callable[[ManualClock, str], Any]


@pytest.fixture(params=["sqlite", "postgres"])
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Opens a store to compare with: its name, the store, and whether it runs under the clock of the test."""
    if request.param == "postgres":
        server = request.getfixturevalue("postgres")

    @asynccontextmanager
    async def opened(clock: ManualClock, name: str) -> AsyncIterator[Side]:
        if request.param == "sqlite":
            store: Any = await SqliteRecordStore.open(tmp_path / name / "durable.db", synchronous="NORMAL", clock=clock)
        else:
            store = await PostgresRecordStore.open(server.dsn(), schema=f"d{os.getpid()}{name}", initialize_schema=True)
        try:
            yield Side(request.param, store, dated=request.param == "sqlite")
        finally:
            await store.close()

    return opened


class Operators(Helpers):
    """After a history: operators repair what was parked, prune, sweep and drop, also what is not there."""

    def repair(self) -> None:
        """A Turn whose hosts are lost until a person must look, and is then ended."""
        self._act(self._command(c.CreateThread, thread_id="parked", binding=BINDING))
        submit = self._command(
            c.SubmitTurn, thread_id="parked", request_id=self._request_id(), content=text("hi"), digest="hi"
        )
        admitted = self._act(submit)
        if admitted is None:
            return  # The Session was closed.
        for owner in HOSTS:
            self._act(Renew(owner, 30_000))
            served = (BINDING.ready_class,)
            claim = c.Claim(session=SESSION, thread_id="parked", owner=owner, served=served, takeovers_max=0)
            self._act(Do(claim, self._seed()))
            self._act(Gone(owner))
        position = self.dump.position("parked")
        ask = c.RepairThread(
            session=SESSION,
            thread_id="parked",
            request_id=self._request_id(),
            turn_id=admitted.turn_id,
            at=0,
            expected_at=0,
            native=self._native(position, empty=True),
        )
        for _ in range(2):
            self._act(Do(ask, self._seed()))

    def operate(self) -> list[Any]:
        """Where the others do not see it: they go on with what they remember."""
        acts = self.acts
        for _ in range(6):
            session = SESSION if self._chance(0.8) else SessionKey("app", "nobody's")
            digest = f"{self.random.randrange(4):064x}"
            command = self._some(
                (
                    c.PruneCheckpoints(
                        session=session,
                        thread_id=self._some((*THREADS, "nobody")),
                        through=self._some((None, 1, 5, 20)),
                    ),
                    c.RecordObject(session=session, digest=digest, size=5),
                    c.SweepObjects(session=session, after="", limit=self._some((1, 100))),
                    c.ForgetObjects(session=session, names=(digest,)),
                    c.DropSession(session=session, reason="it was asked for"),
                )
            )
            acts.insert(self.random.randrange(1, len(acts)), Do(command, self._seed()))
        return acts

    def drop(self) -> list[Any]:
        """Everything ends, and then everything goes."""
        self.finish()
        closing = [c.CloseSession(session=SESSION), *[c.DropSession(session=SESSION, reason="over")] * 4]
        return [*self.acts, *(Do(command, self._seed()) for command in closing)]


def histories() -> Iterator[list[Any]]:
    for seed in range(HISTORIES_MAX):
        players = Operators(seed)
        players.play(LENGTH)
        if seed % 3 == 1:
            players.repair()
        yield players.drop() if seed % 3 == 0 else players.operate()


async def replay(differential: Differential, acts: list[Any]) -> None:
    for act in acts:
        match act:
            case Advance(milliseconds=milliseconds):
                await differential.advance(milliseconds)
            case Jump(milliseconds=milliseconds):
                await differential.jump(milliseconds)
            case Renew(owner=owner, lease_ms=lease_ms):
                await differential.renew(owner, lease_ms)
            case Gone(owner=owner):
                await differential.release(owner)
            case Do(command=command, seed=seed):
                await differential.do(command, seed)
            case _:
                raise AssertionError(act)


class FarAhead:
    """A clock by which everything that could ever be due is due."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def __call__(self) -> int:
        return self._clock() + 10**12

    def boot_ms(self) -> int:
        return self._clock.boot_ms()


def oracle(clock: ManualClock, side: Side) -> MemoryRecordStore:
    return MemoryRecordStore(clock if side.dated else FarAhead(clock))


@lru_cache(maxsize=1)
def chosen() -> list[tuple[int, list[Any]]]:
    """Histories in which, together, every command succeeds, is refused and is fenced; and a few more.

    Found on the store in memory alone: a story costs little there, and much where each commit is flushed.
    """
    reached: dict[int, tuple[list[Any], set[tuple[str, str]]]] = {}
    wanted, open_ends = set(missing(Counter())), set(missing(Counter()))
    for seed, acts in enumerate(histories()):
        clock = ManualClock()
        alone = Differential(clock, [Side("memory", MemoryRecordStore(clock), True)])
        asyncio.run(replay(alone, acts))
        reached[seed] = (acts, wanted - set(missing(alone.seen)))
        open_ends -= reached[seed][1]
        if not open_ends and seed + 1 >= HISTORIES:
            break
    assert not open_ends, f"{HISTORIES_MAX} histories never saw {sorted(open_ends)}"
    picked: list[int] = []
    while wanted:
        best = max(reached, key=lambda seed: len(reached[seed][1] & wanted))
        picked.append(best)
        wanted -= reached[best][1]
    picked += [seed for seed in reached if seed not in picked][: max(0, HISTORIES - len(picked))]
    return [(seed, reached[seed][0]) for seed in picked]


@pytest.mark.timeout(600)
@pytest.mark.spec("BE-01", "BE-02", "BE-17")
def test_stores_answer_and_keep_the_same_for_every_command(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PRUNE_ROWS", 9)
    seen: Counter[tuple[type[Any], str]] = Counter()

    async def compare(seed: int, acts: list[Any]) -> None:
        clock = ManualClock()
        async with other(clock, f"h{seed}") as side:
            differential = Differential(clock, [Side("memory", oracle(clock, side), side.dated), side])
            try:
                await replay(differential, acts)
            except Differs as error:
                pytest.fail(f"SEED={seed}: {error}")
            seen.update(differential.seen)

    for seed, acts in chosen():
        asyncio.run(compare(seed, acts))
    assert not missing(seen)


@pytest.mark.timeout(600)
@pytest.mark.spec("BE-01", "BE-02", "RC-02")
async def test_stores_answer_and_keep_the_same_for_what_hosts_under_faults_send(other: Any) -> None:
    seen = 0
    for seed in STORIES:
        acts = recorded(draw(seed))
        clock = ManualClock()
        async with other(clock, f"s{seed}") as side:
            differential = Differential(clock, [Side("memory", oracle(clock, side), side.dated), side])
            try:
                await replay(differential, acts)
            except Differs as error:
                pytest.fail(f"REPLAY seed={seed}: {error}")
            seen += differential.seen.total()
    assert seen > 100


async def test_a_store_that_forgets_a_record_is_found() -> None:
    class Forgetful(MemoryRecordStore):
        def _write(self, partition: str, session: Any, change: Any, now_ms: int) -> Any:
            committed = super()._write(partition, session, change, now_ms)
            for key in [key for key in session.records if key.startswith("input/")]:
                del session.records[key]
            return committed

    clock = ManualClock()
    with pytest.raises(Differs):
        for acts in histories():
            sides = [Side("memory", MemoryRecordStore(clock), True), Side("forgetful", Forgetful(clock), True)]
            await replay(Differential(clock, sides), acts)
            clock = ManualClock()
