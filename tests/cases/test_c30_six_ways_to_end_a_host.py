"""C30: the polite exit could not tell a shutdown from a user's cancel, and a hard kill was safer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.census.forks import ForkServer

WAYS = (
    "SIGTERM",
    "SIGINT",
    "SIGTERM twice",
    "SIGKILL",
    "loop closed under it",
    "KeyboardInterrupt in a tool",
)


@pytest.mark.case("C30")
@pytest.mark.spec("LF-02")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("way", WAYS)
def test_however_a_host_ends_its_turn_goes_on_and_ends_the_same(forks: ForkServer, tmp_path: Path, way: str) -> None:
    job = {"folder": str(tmp_path), "way": way}
    ended = forks.run("tests.cases.programs:end_some_way", job)
    assert ended.code != 0, f"it was to end early: {ended.output}"
    assert ended.signal != signal.SIGABRT, f"it did not end by itself: {ended.output}"

    second = forks.run("tests.cases.programs:finish", job)
    assert second.code == 0, f"{ended.output}\n{second.output}"
    told = json.loads(second.output.splitlines()[-1])
    assert told["said"] == ["go", "one", "done"]
    assert told["runs"][-1] == "COMPLETED"
    assert "CANCELLED" not in told["runs"]
    assert "FAILED" not in told["runs"]
