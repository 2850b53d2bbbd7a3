"""Fail the n-th operation: the story is told once for each call of its store, and that call fails.

It fails before anything is done, or after it was done (the answer is lost). Until a telling passes without a failure,
so no call is left out. Time is simulated: the same number fails the same call again.

`DURABLE_MATRIX=all` (or `make faults`) fails each call; an ordinary run a seeded sample.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentscope_durable.testing.faulty_record_store import EVERY
from tests.faults.world import World

ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
SAMPLE = {"memory": 40, "sqlite": 12}
"""Calls that fail in an ordinary run."""
LIKELY = {"fail": 400, "lose_answer": 100}
"""A telling has more calls than this, and more that write."""
CALLS_MAX = 5000
"""More, and the story does not end."""


def told(place: Path | None, how: str, nth: int) -> tuple[bool, list[str]]:
    """Whether the n-th call was there to fail, and what does not hold after all."""
    if place is not None:
        place.mkdir(parents=True)
    world = World(place)
    try:
        getattr(world.store, how)(EVERY, nth=nth)
        world.play()
        failed = not world.store.left()
        wrong = world.judge()
        if world.reconciled:
            wrong.append(f"{world.reconciled} outcomes were not known, and no host was lost")
        happened = [(line["turn"], line["call"]) for line in world.account.effects.lines("tool")]
        wrong += [
            f"{call} of {turn} ran twice" for turn, call in sorted({x for x in happened if happened.count(x) > 1})
        ]
        return failed, wrong
    finally:
        world.close()


def numbers(backend: str, how: str) -> Iterator[int]:
    """Each call from the first on; in an ordinary run some of them."""
    if ALL:
        yield from range(1, CALLS_MAX)
        raise AssertionError("the story does not end")
    yield from sorted(random.Random(f"{SEED} {backend} {how}").sample(range(1, LIKELY[how]), SAMPLE[backend]))


@pytest.mark.spec("BE-29")
@pytest.mark.case("C58")
@pytest.mark.matrix
@pytest.mark.timeout(0 if ALL else 900)
@pytest.mark.parametrize("how", ["fail", "lose_answer"])
@pytest.mark.parametrize("backend", ["memory", "sqlite"])
def test_any_call_of_the_store_may_fail_once(backend: str, how: str, tmp_path: Path) -> None:
    wrong: dict[int, list[str]] = {}
    failures = 0
    for nth in numbers(backend, how):
        failed, broken = told(None if backend == "memory" else tmp_path / str(nth), how, nth)
        failures += failed
        if broken:
            wrong[nth] = broken
        if not failed and ALL:
            break
    assert not wrong, f"{how} of call n on {backend}: {wrong}"
    assert failures >= SAMPLE[backend] // 2
    # The story has an end: beyond it nothing fails, and nothing is wrong.
    assert told(None if backend == "memory" else tmp_path / "beyond", how, CALLS_MAX) == (False, [])
