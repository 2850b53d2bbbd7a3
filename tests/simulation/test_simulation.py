"""Stories of hosts, clients and faults under one clock, judged by the specification.

`make simulate SEED=7` plays one, `SEEDS=10000` many. Here a few are played each time, every one that ever failed, and
with each known bug planted as many as it takes to find it.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.__main__ import kept, store_of
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import draw
from tests.simulation.shrink import shrink
from tests.simulation.story import play

SEEDS = int(os.environ.get("SEEDS", "40"))
CHUNK = 10
MUTANT_SEEDS = 60


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.timeout(600)
@pytest.mark.spec("BE-17", "LF-10", "RC-03")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_whatever_goes_wrong_every_promise_is_kept_and_everything_ends(first: int) -> None:
    for seed in range(first, min(first + CHUNK, SEEDS)):
        outcome = play(draw(seed, store_of(seed)))
        assert outcome.violation is None, f"REPLAY seed={seed} store={store_of(seed)}: {outcome.violation}"


@pytest.mark.timeout(600)
def test_a_story_that_failed_once_does_not_fail_again() -> None:
    for why, plan in kept():
        assert play(plan).violation is None, why


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    with MUTANTS[name]():
        for seed in range(MUTANT_SEEDS):
            if play(draw(seed)).failed:
                return
    pytest.fail(f"{name} was not found within {MUTANT_SEEDS} seeds")


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_one_seed_is_one_story(store: str) -> None:
    first, again = play(draw(3, store)), play(draw(3, store))

    assert (first.trace, first.steps, first.seconds) == (again.trace, again.steps, again.seconds)
    assert first.audit.commands == again.audit.commands


def test_a_failing_story_is_cut_down_to_what_it_needs() -> None:
    with MUTANTS["gap_in_sequence"]():
        outcome = next(one for seed in range(20) if (one := play(draw(seed))).failed)
        small = shrink(outcome, tries=4)

    assert small.failed
    assert small.plan.faults == ()
    assert len(small.plan.wishes) < len(outcome.plan.wishes)
