"""A clean process that forks a child for each telling of a story: `python -m agentscope_durable.testing.kit.forks`.

A story must die by a real SIGKILL and be continued by a process that knows nothing of it. A new interpreter for each
would cost seconds of imports, so one process imports the test module, opens nothing, and forks: a child begins with the
code and with nothing else.

Rule: a fork copies one thread, and the locks of all. If an import of the user's has started a thread, every telling
gets a new interpreter instead, which is slower and as true.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Ended", "Processes"]

RUN = "agentscope_durable.testing.kit.play:run"
PRELOADED = (
    "agentscope_durable.testing.kit.play",
    "agentscope_durable.stores.records.sqlite",
    "agentscope_durable.stores.objects.filesystem",
    "agentscope_durable.runtime.scheduler",
)
AGENTSCOPE = ("agentscope.agent", "agentscope.event", "agentscope.middleware", "agentscope.tool", "json_repair")
"""Loaded before the first fork if they are installed, and not by every child anew."""

ONE_THREAD = ("OPENBLAS", "OMP", "MKL")
"""Libraries below numpy that start threads when they are imported, unless they are told not to."""


class Ended(NamedTuple):
    """How a process ended: its exit code, or the signal that killed it; and what it printed."""

    code: int
    signal: int
    output: str

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL


class Processes:
    """Tells stories of one test module in processes of their own.

    Args:
        module, file: the test module, found by its name where that leads to the file, else by the file.
        folder: where the processes write what they print.
        run: `module:function`, called in each process with the test module and the job.
        preloaded: modules imported before the first fork.
        environment: what the processes find in their environment besides this one's.
    """

    def __init__(
        self,
        module: str,
        file: str,
        folder: Path,
        *,
        run: str = RUN,
        preloaded: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if preloaded is None:
            preloaded = (*PRELOADED, *(AGENTSCOPE if importlib.util.find_spec("agentscope") else ()))
        self._where = {"module": module, "file": file, "run": run, "preloaded": list(preloaded)}
        self._folder = folder
        self._environment = dict(environment or {})
        self._server: subprocess.Popen[str] | None = None
        self.threads: list[str] = []
        """Threads that importing the module started; if there are any, every process is a new interpreter."""

    def begin(self) -> None:
        server = self._start(["--serve", json.dumps(self._where)])
        assert server.stdout is not None
        hello = server.stdout.readline()
        if not hello:
            raise ImportError(f"{self._where['file']} cannot be imported in a process of its own: {self._said()}")
        self.threads = json.loads(hello)
        if self.threads or not hasattr(os, "fork"):
            _end(server)
        else:
            self._server = server

    def end(self) -> None:
        if self._server is not None:
            _end(self._server)

    def run(self, job: Mapping[str, Any], *, seconds: float) -> Ended:
        """Do what `job` says, and wait for the end of the process."""
        output = self._folder / "output"
        output.write_bytes(b"")
        request = json.dumps({"job": dict(job), "output": str(output), "seconds": seconds})
        if self._server is None:
            alone = self._start(["--once", json.dumps(self._where), request])
            try:
                code = alone.wait(seconds)
            except subprocess.TimeoutExpired:
                alone.send_signal(signal.SIGABRT)  # faulthandler shows where it stood
                code = alone.wait()
            _end(alone)
        else:
            assert self._server.stdin is not None and self._server.stdout is not None
            _ = self._server.stdin.write(request + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
            if not answer:
                raise RuntimeError(f"the process that forks has ended: {self._said()}")
            code = int(answer)
        text = output.read_text(encoding="utf-8", errors="replace")
        return Ended(-1, -code, text) if code < 0 else Ended(code, 0, text)

    def _start(self, arguments: list[str]) -> subprocess.Popen[str]:
        environment = {
            **{f"{library}_NUM_THREADS": "1" for library in ONE_THREAD},
            **os.environ,
            "DURABLE_FAILPOINT": "",
            **self._environment,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        with (self._folder / "imports").open("wb") as errors:
            return subprocess.Popen(  # noqa: S603 - this very interpreter
                [sys.executable, "-m", __name__, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def _said(self) -> str:
        return (self._folder / "imports").read_text(encoding="utf-8", errors="replace").strip()[-4000:]


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    _ = process.wait()


# ------------------------------------------------------------ in the other process


def load(where: Mapping[str, Any]) -> Any:
    """The test module, imported as this process finds it."""
    name, file = where["module"], where["file"]
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if (
        found is not None
        and found.origin is not None
        and Path(found.origin).exists()
        and Path(file).samefile(found.origin)
    ):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _threads() -> list[str]:
    """Threads of this process besides the first, those of C libraries included."""
    tasks = Path("/proc/self/task")
    if tasks.is_dir():
        return [task.name for task in tasks.iterdir() if task.name != str(os.getpid())]
    import threading

    return [one.name for one in threading.enumerate() if one is not threading.main_thread()]


def _serve(where: Mapping[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    _ = os.dup2(2, 1)  # What a library prints must not look like an answer.
    module = load(where)
    for name in where["preloaded"]:
        _ = importlib.import_module(name)
    _ = answers.write(json.dumps(_threads()) + "\n")
    answers.flush()
    for line in sys.stdin:
        _ = answers.write(f"{_fork(module, where['run'], json.loads(line))}\n")
        answers.flush()


def _fork(module: Any, run: str, request: dict[str, Any]) -> int:
    """The exit code of a child, or minus the signal that ended it."""
    # The child keeps the writing end until it is gone, however it goes. What it executes does not inherit it.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _child(module, run, request)
    os.close(write)
    ready, _, _ = select.select([read], [], [], request["seconds"])
    os.close(read)
    if not ready:
        os.kill(child, signal.SIGABRT)  # faulthandler shows where it stood.
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _child(module: Any, run: str, request: dict[str, Any]) -> None:
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        for there, here in ((nothing, 0), (output, 1), (output, 2)):
            _ = os.dup2(there, here)
        faulthandler.enable()
        home, _, name = run.partition(":")
        getattr(importlib.import_module(home), name)(module, request["job"])
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the process that asked is told
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    mode, told, *rest = sys.argv[1:]
    if mode == "--serve":
        _serve(json.loads(told))
    else:
        place = json.loads(told)
        _child(load(place), place["run"], json.loads(rest[0]))
