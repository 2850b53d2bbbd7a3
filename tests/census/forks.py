"""Programs of the tests in children of one clean process: that of the users' kit, with another thing to run.

Rule: between the import and the fork nothing is opened: no store, no event loop, no thread. The last is checked.
"""

from __future__ import annotations

import asyncio
import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentscope_durable import _failpoints
from agentscope_durable.testing.kit.forks import Ended, Processes

SECONDS_MAX = 90.0
"""How long one child may take."""


class ForkServer:
    """Runs programs in children of one clean process.

        with ForkServer("tests.census.scenario") as forks:
            ended = forks.run("tests.census.scenario:play", {"directory": "..."}, failpoint="store.commit.before:3")

    Args:
        modules: what the clean process imports before it forks for the first time.
    """

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._processes = Processes(
            __name__,
            __file__,
            Path(self._folder.name),
            run=f"{__name__}:call",
            preloaded=modules,
            # What a program prints last is its answer.
            environment={"PYTHONWARNINGS": "ignore"},
        )

    def __enter__(self) -> Self:
        self._processes.begin()
        threads = self._processes.threads
        assert not threads, f"an import has started threads {threads}: a fork would copy their locks"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._processes.end()
        self._folder.cleanup()

    def run(self, program: str, job: Mapping[str, Any], *, failpoint: str = "", seconds: float = SECONDS_MAX) -> Ended:
        """Call an async function `module:name` with `job` in a new child, and wait for its end.

        Args:
            failpoint: `name:nth`, where the child is to be killed.
        """
        return self._processes.run({"program": program, "job": dict(job), "failpoint": failpoint}, seconds=seconds)


def call(_module: Any, request: dict[str, Any]) -> None:
    """In the child."""
    if request["failpoint"]:
        name, _, nth = request["failpoint"].partition(":")
        _failpoints.arm(name, nth=int(nth))
    module, _, name = request["program"].partition(":")
    asyncio.run(getattr(importlib.import_module(module), name)(request["job"]))
