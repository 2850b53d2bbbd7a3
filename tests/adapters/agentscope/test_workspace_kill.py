"""Killed at any place between a write and its result, an agent's files come to what they would have been (WS-07).

The process is killed with SIGKILL, at each commit, object, tool and request that the story passes, before and after;
the next one goes on from the store alone. `test_crash_matrix` plays the same stories with pairs of kills, and with an
interpreter of its own for each recovery.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("agentscope")

from tests.adapters.agentscope.test_crash_matrix import Forks, check


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


FILES = {
    "files": {
        "workspace/src/a.txt": [{"text": "one one\ntwo\n"}, 2],
        "workspace/large.txt": [{"text": "x" * 70_000}, 1],
    },
    "notes": {
        "notes/before a round": [["line 1", "line 2", "line 3"], 3],
        "notes/after a round": [["line 1", "line 2", "line 3"], 3],
        "notes/in a tool": [["line 1", "line 2"], 2],
        "notes/after a tool": [["line 1", "line 2"], 2],
        "notes/after the reply": [["line 1"], 1],
    },
    "aside": {"workspace/sessions/thread/context-0001.jsonl": [1, 1]},
}


@pytest.mark.timeout(300)  # Two processes for each of up to fifty places.
@pytest.mark.spec("WS-07", "AS-15")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("scenario", FILES)
def test_files_are_written_once_wherever_the_process_is_killed(scenario: str, forks: Forks, tmp_path: Path) -> None:
    base = forks.base(scenario, tmp_path)
    assert base["files"] == FILES[scenario]
    for number, place in enumerate(base["passed"]):
        folder = tmp_path / str(number)
        assert forks.play(folder, scenario, place) == {"killed": 9}, f"{scenario}: {place} was not reached"
        check(scenario, base, forks.play(folder, scenario), [place])


@pytest.mark.spec("WS-07", "AS-11")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize(
    ("place", "note"), [("noted", ["about to", 1]), ("effect", ["about to", 1]), ("", ["done", 2])]
)
def test_what_a_tool_wrote_that_is_not_run_again_is_there(
    place: str, note: list[object], forks: Forks, tmp_path: Path
) -> None:
    """It says how far the tool came; whoever settles the call reads it, and the tool is not started again."""
    killed = forks.play(tmp_path, "careless", place)
    assert killed == {"killed": 9} if place else killed["status"] == "COMPLETED"
    report = forks.play(tmp_path, "careless")
    assert report["status"] == "COMPLETED" and report["errors"] == []
    assert report["files"] == {"notes/act": note}
    assert report["effects"].get("effect", 0) == (0 if place == "noted" else 1)
