"""C12: a process is killed at every failpoint it passes; another one goes on; the five standing checks hold.

The list of places is not written here. It is what the story passes when nobody kills it, and every name of the registry
must be in it: a new durable write or external call that the story does not pass fails a test of this file.

`ScriptedHarness` on SQLite is killed at every place each time; an AgentScope agent, and both on PostgreSQL, at a seeded
sample, and at every place with `DURABLE_MATRIX=all`.
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
from tests.every_store import PERSISTENT
from tests.servers.fixtures import shared_postgres

PROGRAM = "tests.census.scenario"
ALL = os.environ.get("DURABLE_MATRIX") == "all"
SEED = int(os.environ.get("DURABLE_SEED", "7"))
PARTS = 8
"""The places of a story are spread over this many tests, so that workers share them."""
SAMPLES = {("agentscope", "sqlite"): 40, ("scripted", "postgres"): 16, ("agentscope", "postgres"): 6}
"""Places at which an agent is killed in an ordinary run."""
REACHED = {"sqlite": 0.8, "postgres": 0.5}
"""How many of the places must be there again in another telling. Timing may take away the last passes of a name; on
PostgreSQL it says as well which commits share a statement."""

ELSEWHERE = {"object.delete.before", "object.delete.after"}
"""An operator's sweep passes them, and no Turn: tests/backend/test_sweep.py kills there."""

MANY = 10
"""From so many places on it can be said how many were reached."""

PAIRS = {"sqlite": 8, "postgres": 2}
"""Stories with two kills or three, in an ordinary run."""


class Census:
    """The places of one story, found by one telling without a kill."""

    def __init__(self, forks: ForkServer, world: str, backend: str, folder: Path) -> None:
        self._forks = forks
        self._world = world
        self._backend = backend
        self._folder = folder
        self._tried = self._died = 0
        ended = forks.run(f"{PROGRAM}:trace", self._job("whole"))
        assert ended.code == 0, ended.output
        self.passed: list[str] = json.loads(ended.output.splitlines()[-1])

    def _job(self, name: str) -> dict[str, str]:
        # Another test may have stopped the server: it is there whenever it is asked for.
        dsn = shared_postgres().dsn() if self._backend == "postgres" else ""
        return {"world": self._world, "folder": str(self._folder / name), "dsn": dsn}

    @property
    def places(self) -> list[Point]:
        # By name and pass, not by the moment: what runs at the same time may come in any order.
        found = sorted(points(self.passed))
        if self._backend == "postgres":
            # Short leases are renewed again and again, as long as the telling takes.
            found = [point for point in found if not (point.name.startswith("store.renew") and point.nth > 1)]
        return found

    @property
    def chosen(self) -> list[Point]:
        """Where it is killed in this run."""
        sample = SAMPLES.get((self._world, self._backend))
        if ALL or sample is None:
            return self.places
        return sorted(random.Random(SEED).sample(self.places, sample))

    def kill_at(self, *places: Point) -> tuple[int, list[str]]:
        """How many processes died, each at its place, and what is wrong after another one has finished the story."""
        name = "+".join(f"{point.name}-{point.nth}" for point in places)
        job = self._job(name)
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
        wrong: dict[str, list[str]] = {}
        for point in places:
            killed, problems = self.kill_at(point)
            self._tried += 1
            self._died += killed
            if problems:
                wrong[str(point)] = problems
        assert not wrong, json.dumps(wrong, indent=1)
        if self._tried >= MANY:
            assert self._died >= self._tried * REACHED[self._backend], f"{self._died} of {self._tried} were reached"

    def kill_twice(self) -> None:
        """Kill whoever recovers as well, and sometimes whoever recovers from that."""
        count = 100 if ALL else PAIRS[self._backend]
        chance = random.Random(SEED)
        wrong: dict[str, list[str]] = {}
        for _ in range(count):
            places = chance.sample(self.places, chance.choice((2, 2, 3)))
            _, problems = self.kill_at(*places)
            if problems:
                wrong[" then ".join(map(str, places))] = problems
        assert not wrong, json.dumps(wrong, indent=1)


MODULES = (PROGRAM, "asyncpg", "agentscope_durable.stores.records.postgres")


@pytest.fixture(scope="module", params=PERSISTENT)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def scripted(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Census]:
    with ForkServer(*MODULES) as forks:
        yield Census(forks, "scripted", backend, tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def agentscope(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Census]:
    pytest.importorskip("agentscope")
    with ForkServer(*MODULES, "tests.census.agentscope_world") as forks:
        yield Census(forks, "agentscope", backend, tmp_path_factory.mktemp("agentscope"))


@pytest.mark.case("C12")
def test_every_failpoint_is_passed_by_the_story(scripted: Census) -> None:
    assert FAILPOINTS - set(scripted.passed) == ELSEWHERE


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_any_failpoint_breaks_no_promise(scripted: Census, part: int) -> None:
    scripted.kill_at_each(scripted.chosen[part::PARTS])


@pytest.mark.case("C12")
def test_every_failpoint_is_passed_by_an_agentscope_agent(agentscope: Census) -> None:
    assert FAILPOINTS - set(agentscope.passed) == ELSEWHERE


@pytest.mark.case("C12")
@pytest.mark.matrix
@pytest.mark.parametrize("part", range(PARTS))
def test_a_kill_at_any_failpoint_of_an_agentscope_agent_breaks_no_promise(agentscope: Census, part: int) -> None:
    agentscope.kill_at_each(agentscope.chosen[part::PARTS])


@pytest.mark.case("C12")
@pytest.mark.matrix
def test_a_kill_of_whoever_recovers_breaks_none_either(scripted: Census) -> None:
    scripted.kill_twice()


@pytest.mark.case("C12")
@pytest.mark.matrix
def test_a_kill_of_whoever_recovers_an_agentscope_agent_breaks_none_either(agentscope: Census) -> None:
    agentscope.kill_twice()
