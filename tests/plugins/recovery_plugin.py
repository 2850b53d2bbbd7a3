"""The ordinary tests with DURABLE_RECOVER_EVERY_STEP=1: every Run is dropped after each Step and taken over.

Some tests say how many Runs, Steps or requests there are, and the switch makes more of them. `tests/counts_runs.txt`
names these, each with its reason; they get the mark `counts_runs` and are left out, and the list is printed.

Most tests drive no Run, and the switch changes nothing in them. Nobody keeps a list of these: the ordinary run notes
them with `--note-switch=FILE`, and `--where-switch=FILE` leaves out what was noted, as long as the sources are the
same. A test is noted only if all tests of its file passed and nothing in any of them

- looked at the switch, which a host does after each commit of a Run, or
- began a process that inherits the switch and may be a host, or forked.

So a host is only left out where it commits for no Run, and then the switch does nothing. What was not noted is run.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.util
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.runtime.host import Host
from agentscope_durable.spi.environment import RECOVER_EVERY_STEP

ROOT = Path(__file__).resolve().parents[2]
COUNTS_RUNS_FILE = ROOT / "tests" / "counts_runs.txt"
ON = os.environ.get(RECOVER_EVERY_STEP) == "1"

SOURCES = (
    "src",
    "tests",
    "examples",
    "tools",
    "docs",
    "README.md",
    "README_zh.md",
    "pyproject.toml",
    "constraints.txt",
)
SOURCE_ENDINGS = {".py", ".md", ".toml", ".txt"}
NO_HOST = {"git", "initdb", "pgbouncer", "postgres", "psql", "ruff", "uname"}
"""Programs that are begun by tests and read no switch of ours. Every other may be a host."""
NO_HOST_SCRIPTS = {"supervise.py"}
"""Scripts of Python of which the same holds: it begins the servers above."""
TOUCHED = "switch"
"""The property of a report: the switch may change this test."""


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


def file_of(nodeid: str) -> str:
    """What shares fixtures: they may be made, and their hosts commit, in any test of the file."""
    return nodeid.partition("::")[0]


def digest_of(root: Path = ROOT) -> str:
    """Of everything that decides what a test does."""
    files: list[Path] = []
    for name in SOURCES:
        place = root / name
        files += [place] if place.is_file() else [file for file in place.rglob("*") if file.suffix in SOURCE_ENDINGS]
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(f"{file.relative_to(root)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


def may_be_host(command: Any, environment: Any) -> bool:
    """Whether a process that is begun so may have a host that hears of the switch."""
    if RECOVER_EVERY_STEP not in (os.environ if environment is None else environment):
        return False
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    names = [os.path.basename(os.fsdecode(word)) for word in words]
    return names[0] not in NO_HOST and NO_HOST_SCRIPTS.isdisjoint(names)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-switch", metavar="FILE", help=f"write which tests {RECOVER_EVERY_STEP} cannot change")
    parser.addoption("--where-switch", metavar="FILE", help=f"leave out what {RECOVER_EVERY_STEP} cannot change")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--note-switch")
    if path is None:
        return
    # A process that a test begins inherits it or does not: that is seen only where it is set.
    os.environ.setdefault(RECOVER_EVERY_STEP, "0")
    watch = Watch()
    watch.begin()
    config.pluginmanager.register(watch, "switch-watch")
    # Under xdist the reports of all workers arrive in the controller: it alone writes.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Note(Path(path)), "switch-note")


class Watch:
    """Sees what the switch may change, in the process that runs the tests."""

    def __init__(self) -> None:
        self._item: pytest.Item | None = None

    def touched(self) -> None:
        """The test that is running, or the last one, is one of those."""
        if self._item is not None and (TOUCHED, True) not in self._item.user_properties:
            self._item.user_properties.append((TOUCHED, True))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._item = item
        return (yield)

    def begin(self) -> None:
        """Look at hosts, at the processes that are begun, and at forks."""
        touched = self.touched

        def look(host: Host) -> bool:
            touched()
            return bool(host.__dict__["recover_every_step"])

        def put(host: Host, value: bool) -> None:
            host.__dict__["recover_every_step"] = value

        Host.recover_every_step = property(look, put)  # pyright: ignore[reportAttributeAccessIssue]

        begin: Callable[..., None] = subprocess.Popen.__init__

        def process(popen: Any, args: Any, *more: Any, **named: Any) -> None:
            # `env` is the eleventh argument; nobody counts that far, and who did would be noted.
            if may_be_host(args, named.get("env")):
                touched()
            begin(popen, args, *more, **named)

        subprocess.Popen.__init__ = process  # pyright: ignore[reportAttributeAccessIssue]
        spawn: Callable[..., int] = multiprocessing.util.spawnv_passfds

        def spawned(*arguments: Any) -> int:
            touched()
            return spawn(*arguments)

        multiprocessing.util.spawnv_passfds = spawned
        os.register_at_fork(before=touched)


class Note:
    """Writes which tests the switch cannot change."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = digest_of()
        self._passed: set[str] = set()
        self._touched: set[str] = set()
        """Files."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or dict(report.user_properties).get(TOUCHED):
            self._touched.add(file_of(report.nodeid))
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        untouched = sorted(test for test in self._passed if file_of(test) not in self._touched)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        note = {"sources": self._digest, "untouched": untouched}
        self._path.write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def untouched(path: Path, digest: str) -> frozenset[str]:
    """The tests that the note leaves out; none where there is no note, or one of other sources."""
    if not path.exists():
        return frozenset()
    note = json.loads(path.read_text(encoding="utf-8"))
    return frozenset(note["untouched"] if note["sources"] == digest else ())


def split(items: Iterable[pytest.Item], without: frozenset[str]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """What is run, and what is left out."""
    run: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        (left if item.nodeid in without else run).append(item)
    return run, left


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        reason = COUNTS_RUNS.get(test_of(item.nodeid))
        if reason is None:
            continue
        item.add_marker(pytest.mark.counts_runs(reason))
        if ON:
            item.add_marker(pytest.mark.skip(f"counts_runs: {reason}"))
    path = config.getoption("--where-switch")
    if path is not None:
        items[:], left = split(items, untouched(Path(path), digest_of()))
        config.hook.pytest_deselected(items=left)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--where-switch")
    if path is not None:
        left = len(untouched(Path(path), digest_of()))
        terminalreporter.section(f"{RECOVER_EVERY_STEP}: {left} tests that it cannot change are left out")
        if not left:
            terminalreporter.write_line(f"{path} is not there, or was written for other sources: all tests were run")
    if not ON:
        return
    left_out = {test_of(report.nodeid) for report in terminalreporter.stats.get("skipped", ())}
    terminalreporter.section(f"{RECOVER_EVERY_STEP}=1: what counts Runs is left out")
    for test in sorted(left_out & COUNTS_RUNS.keys()):
        terminalreporter.write_line(f"{test}  {COUNTS_RUNS[test]}")
