"""The ordinary tests with DURABLE_RECOVER_EVERY_STEP=1: every Run is dropped after each Step and taken over.

Some tests say how many Runs, Steps or requests there are, and the switch makes more of them. `tests/counts_runs.txt`
names these, each with its reason; they get the mark `counts_runs` and are left out, and the list is printed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentscope_durable.spi.environment import RECOVER_EVERY_STEP

COUNTS_RUNS_FILE = Path(__file__).resolve().parents[1] / "counts_runs.txt"
ON = os.environ.get(RECOVER_EVERY_STEP) == "1"


def marked(path: Path = COUNTS_RUNS_FILE) -> dict[str, str]:
    """Test (`tests/a/test_b.py::test_c`) to the reason; "" where none is given."""
    found: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            test, _, reason = line.partition(" ")
            found[test] = reason.strip()
    return found


COUNTS_RUNS = marked()


def test_of(nodeid: str) -> str:
    """The name without parameters."""
    return nodeid.partition("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = COUNTS_RUNS.get(test_of(item.nodeid))
        if reason is None:
            continue
        item.add_marker(pytest.mark.counts_runs(reason))
        if ON:
            item.add_marker(pytest.mark.skip(f"counts_runs: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ON:
        return
    left_out = {test_of(report.nodeid) for report in terminalreporter.stats.get("skipped", ())}
    terminalreporter.section(f"{RECOVER_EVERY_STEP}=1: what counts Runs is left out")
    for test in sorted(left_out & COUNTS_RUNS.keys()):
        terminalreporter.write_line(f"{test}  {COUNTS_RUNS[test]}")
