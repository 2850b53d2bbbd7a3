"""Killed at any place, once or twice, a Turn comes to the same end: same state, same messages, nothing done twice.

Every place: before and after each commit, each request and each local tool, inside tools and in the middle of streams.
The process that is killed is a forked child of one that imported the libraries and opened nothing; a single kill is
recovered by a new interpreter of its own. `DURABLE_MATRIX=all` runs every pair of kills instead of a seeded sample, and
every single one on PostgreSQL.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from tests.adapters.agentscope.scenarios import SCENARIOS
from tests.servers.fixtures import shared_postgres

ALL = os.environ.get("DURABLE_MATRIX") == "all"
PAIRS = 8
"""Pairs of kills for each scenario in an ordinary run."""
POSTGRES_SINGLES, POSTGRES_PAIRS = 2, 1
"""The same on PostgreSQL. With `DURABLE_MATRIX=all` it is every single one, and `PAIRS` pairs."""
SEED = 7
AT_ONCE = 2
"""Interpreters that recover at the same time: the imports of one beside what another one does."""
ROOT = Path(__file__).resolve().parents[3]
SAME = (
    "status",
    "finish",
    "errors",
    "state",
    "summary",
    "iterations",
    "replies",
    "structured",
    "tasks",
    "groups",
    "messages",
    "files",
    "open",
    "completed",
)
"""What must not depend on where a process was killed."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore"}


class Forks:
    """A process that imported everything, opened nothing, and forks a child for each job."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.agentscope.crash", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        self.bases: dict[str, dict[str, Any]] = {}

    def play(self, folder: Path, scenario: str, kill: str = "", dsn: str = "") -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        job = {"folder": str(folder), "scenario": scenario, "kill": kill, "dsn": dsn}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def base(self, scenario: str, folder: Path) -> dict[str, Any]:
        """The same story, uncut; its `passed` are the places to cut at."""
        if scenario not in self.bases:
            report = self.play(folder / "base", scenario)
            assert "exception" not in report, report["exception"]
            assert report["status"] == "COMPLETED" and report["errors"] == [] and report["open"] == 0
            self.bases[scenario] = report
        return self.bases[scenario]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        _ = self._process.wait()


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def recovered(job: dict[str, Any]) -> dict[str, Any]:
    """The report of a new interpreter that has seen nothing of what it recovers."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.agentscope.crash", "one", json.dumps(job)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=True,
    )
    return json.loads(done.stdout)


def check(scenario: str, base: dict[str, Any], report: dict[str, Any], killed: list[str]) -> None:
    where = f"{scenario}, killed at {' then '.join(killed)}"
    assert "exception" not in report, f"{where}: {report.get('exception')}"
    for name in SAME:
        assert report[name] == base[name], f"{where}: {name}"
    # Each request beyond those of an uncut run was under way at a kill, and stands as LOST.
    assert base["requests"] <= report["requests"] <= base["requests"] + report["lost"], where
    assert report["lost"] <= len(killed), where
    for tool in SCENARIOS[scenario].never:
        assert report["effects"].get(tool, 0) <= base["effects"][tool], f"{where}: {tool} ran twice"
    for effect, times in base["effects"].items():
        assert report["effects"].get(effect, 0) <= times + len(killed), f"{where}: {effect}"


@pytest.mark.matrix
@pytest.mark.timeout(0 if ALL else 1800)  # An interpreter for each of up to seventy places.
@pytest.mark.spec("AS-09", "AS-10", "AS-13", "AS-14", "AS-15", "AS-17", "AS-29", "TP-02", "TF-04", "TF-05", "MC-03")
@pytest.mark.spec("EV-16", "MC-08", "TJ-27", "TJ-28", "TJ-34")
@pytest.mark.case("C04", "C08", "C10")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_any_one_place(scenario: str, forks: Forks, tmp_path: Path) -> None:
    base = forks.base(scenario, tmp_path)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        reports: list[Future[dict[str, Any]]] = []
        for number, place in enumerate(base["passed"]):
            folder = tmp_path / str(number)
            assert forks.play(folder, scenario, place) == {"killed": 9}, f"{scenario}: {place} was not reached"
            reports.append(pool.submit(recovered, {"folder": str(folder), "scenario": scenario}))
        for place, report in zip(base["passed"], reports, strict=True):
            check(scenario, base, report.result(), [place])


@pytest.mark.matrix
@pytest.mark.spec("AS-17", "AS-29", "TP-02")
@pytest.mark.case("C04", "C10")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_two_places(scenario: str, forks: Forks, tmp_path: Path) -> None:
    """The first process dies at one place, the one that recovers at another, the third goes to the end."""
    base = forks.base(scenario, tmp_path)
    pairs = list(itertools.product(base["passed"], repeat=2))
    if not ALL:
        pairs = random.Random(f"{SEED} {scenario}").sample(pairs, PAIRS)
    for first, group in itertools.groupby(sorted(pairs), key=lambda pair: pair[0]):
        dead = tmp_path / "dead"
        assert forks.play(dead, scenario, first) == {"killed": 9}, f"{scenario}: {first} was not reached"
        for _, second in group:
            # What the first process left is the same for each second place, so it dies once and is copied.
            folder = tmp_path / "again"
            shutil.copytree(dead, folder)
            killed = [first]
            report = forks.play(folder, scenario, second)
            if "killed" in report:
                killed.append(second)
                report = forks.play(folder, scenario)
            check(scenario, base, report, killed)
            shutil.rmtree(folder)
        shutil.rmtree(dead)


@pytest.mark.matrix
@pytest.mark.timeout(0 if ALL else 1800)
@pytest.mark.spec("AS-09", "AS-10", "AS-13", "AS-17", "AS-29", "TP-02", "PG-07")
@pytest.mark.case("C04", "C08", "C10")
@pytest.mark.backend("postgres")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_anywhere_on_postgresql_it_is_the_same_as_uncut_on_sqlite(
    scenario: str, forks: Forks, tmp_path: Path
) -> None:
    base = forks.base(scenario, tmp_path)
    places = base["passed"]
    chance = random.Random(f"{SEED} {scenario}")
    singles = places if ALL else chance.sample(places, POSTGRES_SINGLES)
    pairs = chance.sample(list(itertools.product(places, repeat=2)), PAIRS if ALL else POSTGRES_PAIRS)
    for number, places in enumerate([*((place,) for place in singles), *pairs]):
        folder, killed = tmp_path / str(number), []
        for place in (*places, ""):
            report = forks.play(folder, scenario, place, shared_postgres().dsn())
            if "killed" not in report:
                break
            killed.append(place)
        assert killed[:1] == [places[0]], f"{scenario}: {places[0]} was not reached"
        check(scenario, base, report, killed)
