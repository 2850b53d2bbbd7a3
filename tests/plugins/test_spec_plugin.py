"""The report of the specification's coverage, seen from outside: a small suite run in a subprocess."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SUITE = """
import pytest

@pytest.mark.spec("AD-07")
@pytest.mark.parametrize("backend", ["memory", "sqlite"])
def test_one(backend):
    assert backend == "memory"

@pytest.mark.spec("AD-08", "AD-09")
@pytest.mark.case("C22")
def test_two(): ...

@pytest.mark.spec("AD-09")
@pytest.mark.skip
def test_three(): ...

@pytest.mark.spec("AD-10")
@pytest.mark.skip
def test_four(): ...

@pytest.mark.spec("AD-11")
@pytest.mark.xfail(strict=False)
def test_five():
    assert False

@pytest.fixture
def broken():
    raise RuntimeError("setup")

@pytest.mark.spec("AD-12")
def test_six(broken): ...

@pytest.mark.spec("AD-13")
class TestSqlite:
    backend = "sqlite"

    def test_seven(self): ...
"""


def run(suite: str, tmp_path: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    (tmp_path / "test_suite.py").write_text(suite, encoding="utf-8")
    report = tmp_path / "out" / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.plugins.spec_plugin", "-p", "no:cacheprovider"]
    ini = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), f"--spec-report={report}"]
    done = subprocess.run(
        [*command, *ini, *options, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return done, report


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_a_report_gives_each_id_its_outcome_per_backend(tmp_path: Path, options: tuple[str, ...]) -> None:
    done, path = run(SUITE, tmp_path, *options)

    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["ids"] == {
        "AD-07": {"memory": "passed", "sqlite": "failed"},
        "AD-08": {"any": "passed"},
        "AD-09": {"any": "passed"},
        "AD-10": {"any": "skipped"},
        "AD-11": {"any": "skipped"},
        "AD-12": {"any": "failed"},
        "AD-13": {"sqlite": "passed"},
        "C22": {"any": "passed"},
    }
    assert report["tests"]["AD-09"] == {
        "test_suite.py::test_three": "skipped",
        "test_suite.py::test_two": "passed",
    }


def test_an_unknown_id_fails_the_collection(tmp_path: Path) -> None:
    markers = ['spec("AD-99")', 'spec("C22")', 'case("AD-07")', "spec"]
    for number, marker in enumerate(markers):
        (tmp_path / f"test_{number}.py").write_text(f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(): ...\n")
    done, _ = run("", tmp_path)

    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert done.stdout.count("is not in docs/specification-ids.txt") == len(markers)


def test_an_unknown_id_on_one_parameter_fails_too(tmp_path: Path) -> None:
    parameter = 'pytest.param(1, marks=pytest.mark.spec("AD-99"))'
    suite = f'import pytest\n\n@pytest.mark.parametrize("x", [{parameter}])\ndef test_it(x): ...\n'
    done, _ = run(suite, tmp_path)

    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert "spec('AD-99') is not in docs/specification-ids.txt" in done.stderr


def test_the_summary_counts_a_statement_once(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    ids = {"AD-07": {"memory": "passed", "sqlite": "failed"}, "AD-08": {"memory": "passed", "sqlite": "skipped"}}
    report.write_text(json.dumps({"ids": ids, "tests": {"AD-07": {"test_a": "failed"}}}), encoding="utf-8")
    names = tmp_path / "ids.txt"
    names.write_text("# ids\n== AD Admission\nAD-07 AD-08 AD-09\n== C Cases\nC01\n", encoding="utf-8")

    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "spec_coverage.py"), str(report), "--ids", str(names)],
        capture_output=True,
        text=True,
        check=True,
    )

    assert [line.split()[-5:] for line in done.stdout.splitlines() if line.startswith("AD")] == [list("30111")]
    assert "failing:\n  AD-07" in done.stdout
    assert "untested:\n  AD-09\n  C01" in done.stdout
