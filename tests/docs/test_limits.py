"""docs/limits.md is compared with the code: a bound that is changed in one place only fails here."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| [^|]+ \| (?P<value>[^|]+) \| `(?P<name>[\w.]+)` \|", re.MULTILINE)
ROWS = [(match["name"], match["value"].strip()) for match in ROW.finditer(PAGE)]
UNITS = {"KiB": 2**10, "MiB": 2**20, "ms": 1, "s": 1}


def number(text: str) -> float:
    """`64 KiB` is 65536, `5 s` is 5, `10,000` is 10000."""
    found = re.fullmatch(r"([\d,.]+)(?: (KiB|MiB|ms|s))?", text)
    assert found, f"{text!r} is not a number with a unit of this page"
    return float(found[1].replace(",", "")) * UNITS.get(found[2] or "", 1)


def present(name: str) -> object:
    """`contracts.ids.ID_CHARS_MAX`, or `runtime.runtime.DurableRuntime.lease`: the default of an argument."""
    *parts, last = name.split(".")
    path = "agentscope_durable"
    found: object = importlib.import_module(path)
    for part in parts:
        path = f"{path}.{part}"
        inner = inspect.ismodule(found) and part.islower()
        found = importlib.import_module(path) if inner else getattr(found, part)
    if inspect.ismodule(found):
        return getattr(found, last)
    assert callable(found)
    return inspect.signature(found).parameters[last].default


@pytest.mark.parametrize(("name", "value"), ROWS, ids=lambda text: text)
def test_a_bound_is_what_the_page_says(name: str, value: str) -> None:
    assert present(name) == number(value)


def test_every_bound_of_the_page_is_compared() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and re.search(r"`[a-z_.]+\.[\w.]+` \|$", line)]

    assert len(rows) == len(ROWS) > 30
