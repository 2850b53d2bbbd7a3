"""A clean process that forks a child for each program it is asked to run.

A program must die by a real SIGKILL and be continued in a process that knows nothing of it. Starting a new interpreter
for each would cost seconds of imports, so one process imports the libraries, opens nothing, and forks: a child begins
with the code and with nothing else.

Rule: between the import and the fork nothing is opened: no store, no event loop, no thread. `main` checks the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from agentscope_durable import _failpoints

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 90.0
"""How long one child may take."""


class Ended(NamedTuple):
    """How a child ended: its exit code, or the signal that killed it; and what it wrote."""

    code: int
    signal: int
    output: str

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL


class ForkServer:
    """Runs programs in children of one clean process.

        with ForkServer("tests.census.scenario") as forks:
            ended = forks.run("tests.census.scenario:play", {"directory": "..."}, failpoint="store.commit.before:3")

    Args:
        modules: what the clean process imports before it forks for the first time.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.census.forks", *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DURABLE_FAILPOINT": "", "PYTHONWARNINGS": "ignore", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=90)
        self._process.stdout.close()

    def run(self, program: str, job: Mapping[str, Any], *, failpoint: str = "", seconds: float = SECONDS_MAX) -> Ended:
        """Call an async function `module:name` with `job` in a new child, and wait for its end.

        Args:
            failpoint: `name:nth`, where the child is to be killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"program": program, "job": dict(job), "failpoint": failpoint, "seconds": seconds}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        return Ended(**json.loads(answer))


def main(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What a library prints must not look like an answer.
    for line in sys.stdin:
        threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
        assert threads == 1, f"an import has started {threads - 1} threads: a fork would copy their locks"
        answers.write(json.dumps(_fork(json.loads(line))._asdict()) + "\n")
        answers.flush()


def _fork(request: dict[str, Any]) -> Ended:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(request, write)
    os.close(write)
    output = bytearray()
    deadline = time.monotonic() + request["seconds"]
    os.set_blocking(read, False)
    status: int | None = None
    while status is None:
        with contextlib.suppress(BlockingIOError):
            output += os.read(read, 65536)
        pid, ended = os.waitpid(child, os.WNOHANG)
        if pid:
            status = ended
        elif time.monotonic() > deadline:
            os.kill(child, signal.SIGABRT)  # faulthandler shows where it stood.
            _, status = os.waitpid(child, 0)
        else:
            time.sleep(0.002)
    with contextlib.suppress(BlockingIOError):
        while more := os.read(read, 65536):
            output += more
    os.close(read)
    text = output.decode(errors="replace")
    if os.WIFSIGNALED(status):
        return Ended(-1, os.WTERMSIG(status), text)
    return Ended(os.WEXITSTATUS(status), 0, text)


def _child(request: dict[str, Any], write: int) -> None:
    code = 1
    try:
        os.dup2(write, 1)
        os.dup2(write, 2)
        faulthandler.enable()
        if request["failpoint"]:
            name, _, nth = request["failpoint"].partition(":")
            _failpoints.arm(name, nth=int(nth))
        module, _, name = request["program"].partition(":")
        asyncio.run(getattr(importlib.import_module(module), name)(request["job"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
