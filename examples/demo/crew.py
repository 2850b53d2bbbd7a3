"""The supervisor's half: starts brains, hears them, and kills them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

BRAIN = Path(__file__).with_name("brain.py")
STOP_SECONDS = 10.0
ENVIRONMENT = {
    "DURABLE_FAILPOINT": "",
    "PYTHONWARNINGS": "ignore",
    # A pool of threads for matrices would make a process unfit to fork.
    "OPENBLAS_NUM_THREADS": "1",
}


class Brain:
    """A running brain, known by its process id.

    Attributes:
        heard: what it tells, until None: it has ended.
        killed_by: the signal that ended it; 0: none did.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.heard: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.killed_by = 0
        self.ended = asyncio.Event()

    def kill(self) -> None:
        """`kill -9`: no handler runs, nothing is flushed, nothing is given back."""
        os.kill(self.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """Ask it to close politely."""
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)
            async with asyncio.timeout(STOP_SECONDS):
                await self.ended.wait()

    async def words(self) -> AsyncIterator[dict[str, Any]]:
        """What it tells, to its end."""
        while (told := await self.heard.get()) is not None:
            yield told

    def end(self, killed_by: int) -> None:
        self.killed_by = killed_by
        self.ended.set()
        self.heard.put_nowait(None)


class Crew:
    """Starts brains: new interpreters, or with `nursery` forks of a process that has only imported things."""

    def __init__(self, *, nursery: bool) -> None:
        self._nursery = nursery
        self._process: asyncio.subprocess.Process | None = None
        self._born: asyncio.Queue[int] = asyncio.Queue()
        self._brains: dict[int, Brain] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Crew:
        if self._nursery:
            self._process = await self._start("--nursery", stdin=asyncio.subprocess.PIPE)
            self._own(self._hear_nursery(self._process))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for brain in list(self._brains.values()):
            if not brain.ended.is_set():
                with contextlib.suppress(ProcessLookupError):
                    brain.kill()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def hire(self, options: Mapping[str, Any]) -> Brain:
        """A new brain. It works as soon as it has started."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.write((json.dumps(dict(options)) + "\n").encode())
            await self._process.stdin.drain()
            return self._brains[await self._born.get()]
        process = await self._start(json.dumps(dict(options)))
        brain = self._brains[process.pid] = Brain(process.pid)
        self._own(self._hear_brain(process, brain))
        return brain

    async def _start(self, argument: str, stdin: int = asyncio.subprocess.DEVNULL) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            str(BRAIN),
            argument,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
        )

    async def _hear_brain(self, process: asyncio.subprocess.Process, brain: Brain) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            brain.heard.put_nowait(json.loads(line))
        code = await process.wait()
        brain.end(-code if code < 0 else 0)

    async def _hear_nursery(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        early: dict[int, list[dict[str, Any]]] = {}
        async for line in process.stdout:
            told = json.loads(line)
            match told["kind"]:
                case "born":
                    brain = self._brains[told["brain"]] = Brain(told["brain"])
                    for one in early.pop(brain.pid, ()):
                        brain.heard.put_nowait(one)
                    self._born.put_nowait(brain.pid)
                case "died":
                    self._brains[told["brain"]].end(told["signal"])
                case "ready":
                    pass
                case _ if told["pid"] in self._brains:
                    self._brains[told["pid"]].heard.put_nowait(told)
                case _:
                    early.setdefault(told["pid"], []).append(told)

    def _own(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
