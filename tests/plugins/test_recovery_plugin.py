"""The list of what is left out when every Step begins with a recovery."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.plugins.recovery_plugin import COUNTS_RUNS, COUNTS_RUNS_FILE

ROOT = Path(__file__).resolve().parents[2]
REASON_WORDS = 3
MARKED_MAX = 60
"""More tests that cannot live with a recovery in every Step are a sign that something else is wrong."""


def functions(path: Path) -> set[str]:
    """Tests of a file, those of its classes as `Class::test`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_each_test_that_counts_runs_is_there_and_says_why() -> None:
    for test, reason in COUNTS_RUNS.items():
        path, _, name = test.partition("::")
        assert name in functions(ROOT / path), f"{COUNTS_RUNS_FILE.name}: there is no {test}"
        assert len(reason.split()) >= REASON_WORDS, f"{COUNTS_RUNS_FILE.name}: {test} needs a reason"


def test_the_list_is_in_order_and_short() -> None:
    tests = [line.split(" ")[0] for line in COUNTS_RUNS_FILE.read_text(encoding="utf-8").splitlines()]
    tests = [test for test in tests if test.startswith("tests/")]
    assert tests == sorted(set(tests))
    assert len(tests) <= MARKED_MAX
