"""docs/promises.md says how each promise is checked, and what it names is there.

A promise without its limit, or with the name of a test that was renamed away, is worse than none.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
PROMISES = [f"P{number}" for number in range(1, 16)]
TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)`")


def section(promise: str) -> str:
    found = re.search(rf"^### {promise}\b.*?(?=^##)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/promises.md has no section {promise}"
    return found[0]


@cache
def names(path: str) -> frozenset[str]:
    """`test_x`, `TestY` and `TestY::test_x` of a file, with what its classes inherit from a contract suite left out."""
    found: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}::{inner.name}")
    return frozenset(found)


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_has_its_limit_and_its_tests(promise: str) -> None:
    text = section(promise)

    assert "**Limit.**" in text
    assert "**Checked by**" in text
    assert TEST.search(text), f"{promise} names no test"


@pytest.mark.parametrize(("path", "name"), sorted(set(TEST.findall(PAGE))), ids="".join)
def test_a_test_that_is_named_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"docs/promises.md names {path}, which is not there"
    assert name.removeprefix("::") in names(path), f"{path} has no {name.removeprefix('::')}"


def test_what_is_not_promised_is_said() -> None:
    assert re.search(r"^## What is not promised$", PAGE, re.MULTILINE)
