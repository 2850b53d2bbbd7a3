"""Stories of hosts, clients and faults under one clock, judged by the specification.

`make simulate SEED=7` plays one, `SEEDS=10000` many. Here 200 are played each time, every one that ever failed, and
with each known bug planted as many as it takes to find it. All are played in processes that give names in sets the
same order everywhere: what is red here is red under `make simulate`, and what is green here is green everywhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import reduce
from pathlib import Path

import msgspec
import pytest

from tests.simulation.__main__ import Piece, kept
from tests.simulation.mutants import FORMER, MUTANTS
from tests.simulation.schedule import REAL, SCRIPTED, draw
from tests.simulation.shrink import shrink
from tests.simulation.sometimes import unreached
from tests.simulation.story import play

SEEDS = int(os.environ.get("SEEDS", "200"))
CHUNK = 50
REAL_SEEDS = 20
MUTANT_SEEDS = 60
REAL_FIRST = 10
"""Stories of every kind: with and without a theme."""
MINUTES = 25


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


def simulate(*arguments: str) -> str:
    """What the command says; it must succeed."""
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.fixture
def counts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of this test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "stories"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.spec("BE-17", "LF-10", "RC-03")
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_whatever_goes_wrong_every_promise_is_kept_and_everything_ends(first: int, counts: Path) -> None:
    """Whichever piece ends last also looks whether every hard state was reached in all of them together."""
    written = counts / f"{first}.part"
    simulate("--first", str(first), "--seeds", str(min(CHUNK, SEEDS - first)), "--counts", str(written))
    written.rename(written.with_suffix(".json"))

    pieces = [msgspec.json.decode(path.read_bytes(), type=Piece) for path in counts.glob("*.json")]
    whole = reduce(Piece.plus, pieces)
    if whole.seeds == SEEDS:
        assert unreached(whole.sometimes, whole.seeds) == []


@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.spec("BE-17", "LF-10", "RC-03")
def test_agents_of_agentscope_keep_every_promise_in_the_same_stories() -> None:
    pytest.importorskip("agentscope")
    simulate("--agent", REAL, "--first", str(REAL_FIRST), "--seeds", str(REAL_SEEDS))


@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("agent", [SCRIPTED, REAL])
def test_a_story_that_failed_once_fails_no_more_and_would_if_the_bug_came_back(agent: str) -> None:
    if agent == REAL:
        pytest.importorskip("agentscope")
    said = simulate("--kept", "--agent", agent)

    assert [line.partition(":")[0] for line in said.splitlines()] == [
        bug or f"seed {plan.seed}" for bug, plan in kept() if plan.agent == agent
    ]


def test_every_bug_that_was_found_has_its_story() -> None:
    assert {bug for bug, _ in kept() if bug} == FORMER.keys()


@pytest.mark.timeout(60 * MINUTES)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    assert f"mutant {name}: found within" in simulate("--mutant", name, "--seeds", str(MUTANT_SEEDS))


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
