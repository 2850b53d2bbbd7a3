"""C12: a process is killed at every failpoint it passes; another one goes on; the five standing checks hold.

The list of places is not written here. It is what the story passes when nobody kills it, and every name of the registry
must be in it: a new durable write or external call that the story does not pass fails a test of this file.

`ScriptedHarness` is killed at every place each time; an AgentScope agent at a seeded sample, and at every place with
`DURABLE_MATRIX=all`.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentscope_durable.testing.census import FAILPOINTS, Point, points
from tests.census.forks import ForkServer

PROGRAM = "tests.census.scenario"
ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
PARTS = 8
"""The places of a story are spread over this many tests, so that workers share them."""
SAMPLE = 40
"""Places at which the AgentScope agent is killed in an ordinary run."""

ELSEWHERE = {"object.delete.before", "object.delete.after"}
"""An operator's sweep passes them, and no Turn: tests/backend/test_sweep.py kills there."""

PAIRS = 8
"""Stories with two kills or three, in an ordinary run."""


class Census:
    """The places of one story, found by one telling without a kill."""

    def __init__(self, forks: ForkServer, world: str, folder: Path) -> None:
        self._forks = forks
        self._world = world
        self._folder = folder
        ended = forks.run(f"{PROGRAM}:trace", {"world": world, "folder": str(folder / "whole")})
        assert ended.code == 0, ended.output
        self.passed: list[str] = json.loads(ended.output.splitlines()[-1])

    @property
    def places(self) -> list[Point]:
        # By name and pass, not by the moment: what runs at the same time may come in any order.
        return sorted(points(self.passed))

    def kill_at(self, *places: Point) -> tuple[int, list[str]]:
        """How many processes died, each at its place, and what is wrong after another one has finished the story."""
        name = "+".join(f"{point.name}-{point.nth}" for point in places)
        job = {"world": self._world, "folder": str(self._folder / name)}
        died = 0
        for place in (*places, None):
            ended = self._forks.run(f"{PROGRAM}:play", job, failpoint=str(place or ""))
            died += ended.killed
            if not ended.killed and ended.code:
                return died, [f"a process ended with {ended.code}, signal {ended.signal}: {ended.output}"]
            if not ended.killed:
                break
        judged = self._forks.run(f"{PROGRAM}:verdict", job)
        if judged.code:
            return died, [f"the check failed: {judged.output}"]
        return died, json.loads(judged.output.splitlines()[-1])

    def kill_at_each(self, places: Sequence[Point]) -> None:
        died = 0
        wrong: dict[str, list[str]] = {}
        for point in places:
            killed, problems = self.kill_at(point)
            died += killed
            if problems:
                wrong[str(point)] = problems
        assert not wrong, json.dumps(wrong, indent=1)
        # Timing may take away the last passes of a name; nearly all must be real.
        assert died >= len(places) * 0.8, f"only {died} of {len(places)} places were reached"

    def kill_twice(self, count: int) -> None:
        """Kill whoever recovers as well, and sometimes whoever recovers from that."""
        chance = random.Random(SEED)
        wrong: dict[str, list[str]] = {}
        for _ in range(count):
            places = chance.sample(self.places, chance.choice((2, 2, 3)))
            _, problems = self.kill_at(*places)
            if problems:
                wrong[" then ".join(map(str, places))] = problems
        assert not wrong, json.dumps(wrong, indent=1)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Census]:
    with ForkServer(PROGRAM) as forks:
        yield Census(forks, "scripted", tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def agentscope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Census]:
    pytest.importorskip("agentscope")
    with ForkServer(PROGRAM, "tests.census.agentscope_world") as forks:
        yield Census(forks, "agentscope", tmp_path_factory.mktemp("agentscope"))


@pytest.mark.case("C12")
@pytest.mark.backend("sqlite")
def test_every_failpoint_is_passed_by_the_story(scripted: Census) -> None:
    assert FAILPOINTS - set(scripted.passed) == ELSEWHERE


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_any_failpoint_breaks_no_promise(scripted: Census, part: int) -> None:
    scripted.kill_at_each(scripted.places[part::PARTS])


@pytest.mark.case("C12")
@pytest.mark.backend("sqlite")
def test_every_failpoint_is_passed_by_an_agentscope_agent(agentscope: Census) -> None:
    assert FAILPOINTS - set(agentscope.passed) == ELSEWHERE


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_any_failpoint_of_an_agentscope_agent_breaks_no_promise(agentscope: Census, part: int) -> None:
    places = agentscope.places
    if not ALL:
        places = sorted(random.Random(SEED).sample(places, SAMPLE))
    agentscope.kill_at_each(places[part::PARTS])


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.backend("sqlite")
def test_a_kill_of_whoever_recovers_breaks_none_either(scripted: Census) -> None:
    scripted.kill_twice(100 if ALL else PAIRS)


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.backend("sqlite")
def test_a_kill_of_whoever_recovers_an_agentscope_agent_breaks_none_either(agentscope: Census) -> None:
    agentscope.kill_twice(100 if ALL else PAIRS)
