"""The users' kit, from outside: a project of somebody else's with the wheel installed, and pytest run there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = Path(__file__).with_name("outside")
SECONDS_MAX = 900
"""A bound for what hangs: it starts some dozen processes, and a busy machine is slow."""

pytestmark = pytest.mark.timeout(SECONDS_MAX + 60)


class Project(NamedTuple):
    folder: Path
    site: Path

    def pytest(self, *arguments: str) -> dict[str, str | None]:
        """What became of each test: None for one that passed, else what it said."""
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON", "COV"))
        }
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", f"--junit-xml={report}", *arguments],
            cwd=self.folder,
            env={**environment, "PYTHONPATH": str(self.site), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
        assert report.is_file(), done.stdout + done.stderr
        found: dict[str, str | None] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            failure = next((child for child in case if child.tag in ("failure", "error")), None)
            found[case.attrib["name"]] = None if failure is None else f"{failure.get('message')}\n{failure.text}"
        return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    dist, site, folder = tmp_path / "dist", tmp_path / "site", tmp_path / "project"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", dist], cwd=ROOT, check=True)
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    folder.mkdir()
    (folder / "pytest.ini").write_text(
        "[pytest]\nfilterwarnings = error::pytest.PytestUnhandledThreadExceptionWarning\n"
    )
    shutil.copy(OUTSIDE / "my_app.py", folder)
    shutil.copy(OUTSIDE / "survives.py", folder / "test_survives.py")
    shutil.copy(OUTSIDE / "threads.py", folder / "test_threads.py")
    return Project(folder, site)


GOOD = {
    "test_good",
    "test_killed_in_the_middle_of_an_effect",
    "test_killed_and_killed_again",
    "test_an_effect_with_a_key",
    "test_hours_pass_in_a_moment",
    "test_killed_anywhere_and_killed_again",
    "test_a_story_that_nobody_can_find",
    "test_a_name_that_is_no_failpoint",
    "test_with_a_thread",
}
WRONG = {
    "test_declared_safe_and_is_not": [
        "does not survive a kill at 1 of 1 places",
        "killed at tool.local.after:1 (after a tool of the agent, pass 1)",
        "tool 'charge'",
        "had its effect 'charge' 2 times: it is declared safe to run again, ran again after the kill, and is not safe",
        "replay: pytest test_survives.py::test_declared_safe_and_is_not --durable-kill tool.local.after:1",
    ],
    "test_declared_safe_and_is_not_under_simulated_time": [
        "of 100 simulated tellings",
        "killed at callback ",
        "had its effect 'charge' 2 times: it is declared safe to run again, ran again after the kill, and is not safe",
        "replay: pytest test_survives.py::test_declared_safe_and_is_not_under_simulated_time --durable-telling ",
    ],
    "test_kept_in_memory": [
        "tool 'recall'",
        "there is no note",
        "milk",
        "what it kept in memory died with the process",
    ],
    "test_kept_in_memory_and_insisting": ["tool 'recall_or_fail'", "failed in the process that nobody killed"],
    "test_a_place_that_is_not_passed": ["does not pass object.put.before:1; it passes:", "tool.local.after:2"],
}


def test_a_good_agent_passes_and_a_wrong_one_is_told_what_is_wrong_with_it(project: Project) -> None:
    found = project.pytest()

    assert {name for name, said in found.items() if said is None} == GOOD, found
    assert found.keys() - GOOD == WRONG.keys()
    for name, words in WRONG.items():
        assert [word for word in words if word not in (found[name] or "")] == [], found[name]

    # What a failure prints after `replay` kills there and nowhere else.
    again = project.pytest("test_threads.py", "--durable-kill", "tool.local.after:1", "--durable-seed", "8")
    assert again == {"test_with_a_thread": None}

    # And what it prints for a simulated telling tells that one again, and no other.
    number = (
        (found["test_declared_safe_and_is_not_under_simulated_time"] or "")
        .partition("--durable-telling ")[2]
        .split()[0]
    )
    (said,) = project.pytest("-k", "under_simulated_time", "--durable-telling", number).values()
    assert said is not None and "does not survive 1 of 1 simulated tellings" in said
    assert project.pytest("-k", "under_simulated_time", "--durable-telling", str(int(number) + 1)) == {
        "test_declared_safe_and_is_not_under_simulated_time": None
    }


def test_the_plugin_costs_nothing_at_the_start_of_pytest() -> None:
    program = (
        "import sys, pytest; before = set(sys.modules)\n"
        "import agentscope_durable.testing.kit.plugin\n"
        "print(*sorted(name for name in set(sys.modules) - before))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    loaded = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS_MAX,
    ).stdout.split()
    kit = "agentscope_durable.testing.kit"
    assert set(loaded) - {"__future__"} == {"agentscope_durable", "agentscope_durable.testing", kit, f"{kit}.plugin"}
