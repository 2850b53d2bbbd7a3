"""Which statements of the specification were tested, and how that ended.

    @pytest.mark.spec("AD-07", "AD-08")     the test proves these statements
    @pytest.mark.case("C22")                the test is this failure of another system

A marker with an id that `docs/specification-ids.txt` does not have is a collection error: a typing
mistake must not look like coverage. `--spec-report=FILE` writes id -> backend -> outcome. The
backend of a test is, first match: the marker `backend("sqlite")`, a parameter called `backend`, an
attribute `backend = "sqlite"` of the test class; otherwise "any".

Rule: only a test that ran and passed proves anything. Skipped (and an expected failure) is "skipped".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

IDS_FILE = Path(__file__).resolve().parents[2] / "docs" / "specification-ids.txt"
MARKERS = ("spec", "case")
# What a test's phases (setup, call, teardown) add up to, and a statement's tests: the worst wins.
# A skip is the weakest: one test that passed on a backend proves the statement there.
SEVERITY = {"skipped": 0, "passed": 1, "failed": 2}


def known_ids(path: Path = IDS_FILE) -> dict[str, frozenset[str]]:
    """The ids each marker may name."""
    ids: dict[str, set[str]] = {marker: set() for marker in MARKERS}
    marker = "spec"
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            marker = "case" if line.split()[1] == "C" else "spec"
        elif not line.startswith("#"):
            ids[marker].update(line.split())
    return {marker: frozenset(found) for marker, found in ids.items()}


KNOWN = known_ids()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spec-report", metavar="FILE", help="write the specification's ids and their outcomes as JSON")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--spec-report")
    # Under xdist the reports of all workers arrive in the controller: it alone writes.
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Report(Path(path)), "spec-report")


def _unknown(markers: Iterator[pytest.Mark]) -> list[str]:
    return [
        f"{mark.name}({name!r})"
        for mark in markers
        if mark.name in KNOWN
        for name in (mark.args or ("",))
        if name not in KNOWN[mark.name]
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse unknown ids here: an error in this place fails the collection of the file, under xdist too."""
    unknown = _unknown(metafunc.definition.iter_markers())
    if unknown:
        raise pytest.Collector.CollectError(
            f"{metafunc.definition.nodeid}: {', '.join(unknown)} is not in docs/{IDS_FILE.name}"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # A contract suite has no marks: they would be unknown in the project of whoever uses it.
        stated = set(getattr(getattr(item, "function", None), "spec", ()))
        # The marks of a single parameter set are known only now.
        unknown = _unknown(item.iter_markers()) + sorted(stated - KNOWN["spec"])
        if unknown:
            raise pytest.UsageError(f"{item.nodeid}: {', '.join(unknown)} is not in docs/{IDS_FILE.name}")
        ids = sorted({name for marker in MARKERS for mark in item.iter_markers(marker) for name in mark.args} | stated)
        if ids:
            # user_properties travel with the report from an xdist worker to the controller.
            item.user_properties.append(("spec", {"ids": ids, "backend": backend_of(item)}))


def backend_of(item: pytest.Item) -> str:
    mark = item.get_closest_marker("backend")
    if mark is not None:
        return str(mark.args[0])
    callspec = getattr(item, "callspec", None)
    value: Any = None if callspec is None else callspec.params.get("backend")
    if value is None:
        value = getattr(getattr(item, "cls", None), "backend", None)
        return value if isinstance(value, str) else "any"
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


class _Report:
    """Adds up the phases of each test, then the tests of each id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spec = dict(report.user_properties).get("spec")
        if spec is None:
            return
        test = self._tests.setdefault(report.nodeid, {**spec, "outcome": "skipped"})
        # Only the call proves something; setup and teardown can only spoil it.
        if report.when == "call" or report.failed:
            outcome = "skipped" if hasattr(report, "wasxfail") else report.outcome
            test["outcome"] = max(test["outcome"], outcome, key=SEVERITY.__getitem__)

    def pytest_sessionfinish(self) -> None:
        ids: dict[str, dict[str, str]] = {}
        tests: dict[str, dict[str, str]] = {}
        for nodeid, test in sorted(self._tests.items()):
            for name in test["ids"]:
                backends = ids.setdefault(name, {})
                earlier = backends.get(test["backend"], "skipped")
                backends[test["backend"]] = max(earlier, test["outcome"], key=SEVERITY.__getitem__)
                tests.setdefault(name, {})[nodeid] = test["outcome"]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"ids": ids, "tests": tests}, indent=1, sort_keys=True), encoding="utf-8")
