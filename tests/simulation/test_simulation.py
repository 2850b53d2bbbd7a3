"""Stories of hosts, clients and faults under one clock, judged by the specification.

`make simulate SEED=7` plays one, `SEEDS=10000` many. Here a few are played each time, every one that ever failed, and
with each known bug planted as many as it takes to find it.
"""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from tests.simulation.__main__ import kept, store_of
from tests.simulation.mutants import FORMER, MUTANTS
from tests.simulation.schedule import Schedule, draw
from tests.simulation.shrink import shrink
from tests.simulation.story import play

SEEDS = int(os.environ.get("SEEDS", "40"))
CHUNK = 10
MUTANT_SEEDS = 60
TELLINGS = 100


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
@pytest.mark.parametrize(("bug", "plan"), kept(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_story_that_failed_once_fails_no_more_and_would_if_the_bug_came_back(bug: str, plan: Schedule) -> None:
    """In what order everything runs changes with the product, so a kept story is told in several."""
    tellings = [replace(plan, seed=seed) for seed in (plan.seed, *range(TELLINGS))]
    with FORMER[bug]():
        found = next((telling for telling in tellings if play(telling).failed), None)

    assert found is not None
    for telling in (found, *tellings[:20]):
        assert play(telling).violation is None


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
