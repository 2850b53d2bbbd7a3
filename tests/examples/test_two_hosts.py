"""The example with two hosts does what its README says, on a real PostgreSQL and with a real kill."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("agentscope")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "examples" / "integrated" / "two_hosts" / "run.py"
PROMISES = 5


@pytest.mark.backend("postgres")
@pytest.mark.spec("PG-11")
async def test_the_brain_that_lives_goes_on_with_the_work_of_the_one_that_was_killed(
    database: str, tmp_path: Path
) -> None:
    for _ in range(2):  # what the first story left in the database does not disturb the second
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(RUN), "--database", database, "--directory", str(tmp_path / "two-hosts"),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "160", "PYTHONWARNINGS": "ignore"},
        )  # fmt: skip
        told = (await process.communicate())[0].decode()
        assert process.returncode == 0, told
        assert told.count("✓") == PROMISES, told
