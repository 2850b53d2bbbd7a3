"""The disk below SQLite fails: an error at the n-th read, write or sync, and a disk that is full for a while.

The same story as in `test_store_calls`, and the same is asked of it. The file must be sound in the end.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import Unavailable
from agentscope_durable.spi.record_store import PAGE_MAX, LogRange, Reads
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.record_store import NOTHING, always, change, events
from tests.faults.disk import FULL, disk_below
from tests.faults.world import DATABASE, World

pytestmark = pytest.mark.backend("sqlite")

ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
SAMPLE = 6
FAULTS = {"read": ("read", 1, None), "write": ("write", 1, None), "sync": ("sync", 1, None), "full": ("log", 4, FULL)}
"""What fails, how often in a row, and with which of SQLite's codes; None is an I/O error.

A full disk is met at the log alone. When SQLite moves the log into the file after a commit, it passes over it; of one
that is written in Python it would look as if the commit had failed.
"""


def told(folder: Path, fault: str, nth: int) -> tuple[int, list[str], int]:
    """How often the disk failed, what does not hold after all, and how many such operations there were."""
    folder.mkdir(parents=True)
    World(folder).close()
    what, times, code = FAULTS[fault]
    with disk_below(folder / DATABASE) as disk:
        disk.fail(what, nth, times=times, code=code)
        world = World(folder)
        try:
            world.play()
            disk.heal()
            wrong = [*world.judge(), *world.integrity()]
            if world.reconciled:
                wrong.append(f"{world.reconciled} outcomes were not known, and no host was lost")
        finally:
            disk.heal()
            world.close()
    again = World(folder, world.account, boot=2)
    try:
        wrong += [*again.judge(), *again.integrity()]
    finally:
        again.close()
    return disk.failed, wrong, disk.done[what]


def numbers(fault: str, most: int) -> Iterator[int]:
    if ALL:
        yield from range(1, most + 1)
    else:
        yield from sorted(random.Random(f"{SEED} {fault}").sample(range(1, most + 1), SAMPLE))


@pytest.mark.matrix
@pytest.mark.timeout(0 if ALL else 900)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_disk_may_fail_at_any_time(fault: str, tmp_path: Path) -> None:
    failed, wrong, most = told(tmp_path / "whole", fault, 10**9)
    assert (failed, wrong) == (0, [])
    broken: dict[int, list[str]] = {}
    failures = 0
    for nth in numbers(fault, most):
        failed, wrong, _ = told(tmp_path / str(nth), fault, nth)
        failures += failed > 0
        if wrong:
            broken[nth] = wrong
    assert not broken, f"{fault} number n: {broken}"
    assert failures >= SAMPLE // 2


async def test_a_reading_that_meets_a_fault_tells_of_the_fault(tmp_path: Path) -> None:
    """SQLite ends the transaction itself then, and that there is none to end is no news."""
    path = tmp_path / DATABASE
    async with await SqliteRecordStore.open(path) as store:
        await store.transact("p", NOTHING, always(change(entry=events("a"))))
    with disk_below(path) as disk:
        async with await SqliteRecordStore.open(path) as store:
            everything = Reads(log=LogRange(limit=PAGE_MAX))
            disk.fail("read", disk.done["read"] + 1, times=1000)
            for _ in range(3):
                with pytest.raises(Unavailable, match="failed"):
                    await store.read("p", everything)
            assert disk.failed
            disk.heal()
            assert len((await store.read("p", everything)).log) == 1
