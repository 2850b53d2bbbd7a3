"""What the project says about itself is what its metadata says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.spec("RT-53")
def test_it_says_alpha_in_the_readme_in_the_version_and_in_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert "**Alpha.**" in (ROOT / "README.md").read_text()
    assert re.search(r"\.dev\d+$", project["version"])
    assert "Development Status :: 3 - Alpha" in project["classifiers"]


@pytest.mark.spec("RT-51")
def test_only_what_the_checks_run_is_claimed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [name for name in project["classifiers"] if name.startswith("Programming Language :: Python :: ")]

    assert pythons == ["Programming Language :: Python :: 3.11"]
    assert "Python 3.11 on Linux is what the checks run" in (ROOT / "README.md").read_text()
