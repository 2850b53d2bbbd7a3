"""C12: a process is killed at every failpoint it passes; another one goes on; the five standing checks hold.

The list of places is not written here. It is what the story passes when nobody kills it, and every name of the registry
must be in it: a new durable write or external call that the story does not pass fails `test_every_failpoint_is_passed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentscope_durable import _failpoints
from agentscope_durable.testing.census import Point, points
from tests.census.forks import ForkServer

PROGRAM = "tests.census.scenario"
PARTS = 3
"""Each name with many places is spread over this many tests, so that workers share them."""


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer(PROGRAM) as server:
        yield server


class Census:
    """The places of one world, found by one run without a kill."""

    def __init__(self, forks: ForkServer, world: str, folder: Path) -> None:
        self._forks = forks
        self._world = world
        self._folder = folder
        ended = forks.run(f"{PROGRAM}:trace", {"world": world, "folder": str(folder / "whole")})
        assert ended.code == 0, ended.output
        self.passed: list[str] = json.loads(ended.output.splitlines()[-1])

    def places(self, name: str, part: int) -> list[Point]:
        return [point for point in points(self.passed) if point.name == name and point.nth % PARTS == part]

    def kill_at(self, point: Point) -> tuple[bool, list[str]]:
        """Whether a process died there, and what is wrong after another one has finished the story."""
        job = {"world": self._world, "folder": str(self._folder / f"{point.name}-{point.nth}")}
        first = self._forks.run(f"{PROGRAM}:play", job, failpoint=str(point))
        if not first.killed and first.code:
            return False, [f"the first process failed: {first.output}"]
        if first.killed:
            second = self._forks.run(f"{PROGRAM}:play", job)
            if second.code:
                return True, [f"the second process ended with {second.code}/{second.signal}: {second.output}"]
        judged = self._forks.run(f"{PROGRAM}:verdict", job)
        if judged.code:
            return first.killed, [f"the check failed: {judged.output}"]
        return first.killed, json.loads(judged.output.splitlines()[-1])


@pytest.fixture(scope="module")
def scripted(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Census:
    return Census(forks, "scripted", tmp_path_factory.mktemp("census"))


@pytest.mark.case("C12")
def test_every_failpoint_is_passed_by_the_story(scripted: Census) -> None:
    passed = set(scripted.passed)
    assert sorted(_failpoints.NAMES - passed) == []
    assert {name.partition(".")[0] for name in passed} == {"store", "object", "executor", "model", "tool"}


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", sorted(_failpoints.NAMES))
@pytest.mark.backend("sqlite")
def test_a_kill_at_any_failpoint_breaks_no_promise(scripted: Census, name: str, part: int) -> None:
    places = scripted.places(name, part)
    died = 0
    wrong: dict[str, list[str]] = {}
    for point in places:
        killed, problems = scripted.kill_at(point)
        died += killed
        if problems:
            wrong[str(point)] = problems
    assert not wrong, json.dumps(wrong, indent=1)
    # Timing may take away the last passes of a name; most must be real.
    assert died * 2 >= len(places), f"only {died} of {len(places)} places were reached"
