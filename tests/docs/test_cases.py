"""docs/cases.md names tests that are there, and no case as untested that has one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cases.md"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_cases", ROOT / "tools" / "gen_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_cases_says_what_is_so(tool: ModuleType) -> None:
    assert tool.stale(PAGE.read_text(encoding="utf-8")) == [], "run `make docs`"


def test_every_case_of_the_specification_has_its_line(tool: ModuleType) -> None:
    ids = (ROOT / "docs" / "specification-ids.txt").read_text(encoding="utf-8").split("== C ")[1]

    assert set(tool.CASES) == {word for word in ids.split() if word[:1] == "C" and word[1:].isdigit()}
    assert tool.LATER.keys() <= tool.CASES.keys()


def test_a_test_that_was_renamed_away_makes_the_table_stale(tool: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (name, *_) = sorted(tool.named(page)["C22"])

    assert tool.stale(page.replace(name, f"{name}_of_old")) == [
        f"C22 names {name}_of_old, which is not there or has no such mark"
    ]


def test_a_case_that_says_it_has_no_test_and_has_one_makes_the_table_stale(tool: ModuleType) -> None:
    tests = tool.tests_by_case()
    del tests["C22"]

    assert tool.stale(tool.page(tests)) == ["C22 has tests now"]
