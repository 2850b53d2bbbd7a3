"""The workload that is the same for all, with the standard library alone: it runs in the peers' environment too.

A Turn is an admission, ten durable steps and a result that the client reads back. A step calls a function that returns
1 KB of random text, and what it returned is durable before the next step begins.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

STEPS = 10
WIDTH = 64
"""Turns in flight at once."""
RECOVERED_TURNS = 20
RECOVERED_STEPS = 60
STEP_SECONDS = 0.1
"""How long a step takes where the worker is killed."""
WARM_TURNS = 5
HISTORIES = (10, 1_000, 5_000)


_RANDOM = random.Random()


def payload(number: int) -> dict[str, Any]:
    """1 KB as JSON, of which no part can be compressed or was there before."""
    return {"i": number, "tool": "fs.read", "content": base64.b64encode(_RANDOM.randbytes(729)).decode()}


class Log:
    """When each step of each Turn was run, in a file that outlives the process. One write a line, so none is torn."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def ran(self, turn: int | str, step: int) -> None:
        os.write(self._file, f"{turn} {step} {time.monotonic()}\n".encode())


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def one_by_one(turn: Callable[[int], object], count: int) -> dict[str, float]:
    """Milliseconds a step, where one Turn follows the other."""
    for number in range(WARM_TURNS):
        turn(-1 - number)
    taken = []
    for number in range(count):
        started = time.perf_counter()
        turn(number)
        taken.append(time.perf_counter() - started)
    return {"ms/step": median_ms(taken) / STEPS}


async def one_by_one_async(turn: Callable[[int], Awaitable[object]], count: int) -> dict[str, float]:
    for number in range(WARM_TURNS):
        await turn(-1 - number)
    taken = []
    for number in range(count):
        started = time.perf_counter()
        await turn(number)
        taken.append(time.perf_counter() - started)
    return {"ms/step": median_ms(taken) / STEPS}


def in_flight(turn: Callable[[int], object], seconds: float) -> dict[str, float]:
    """Steps a second with 64 threads, each with one Turn after the other."""
    for number in range(WARM_TURNS):
        turn(-1 - number)
    done: list[int] = []
    started = time.perf_counter()

    def worker(lane: int) -> None:
        number = lane
        while time.perf_counter() - started < seconds:
            turn(number)
            done.append(number)
            number += WIDTH

    threads = [threading.Thread(target=worker, args=(lane,)) for lane in range(WIDTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"steps/s": len(done) * STEPS / (time.perf_counter() - started), "turns": len(done) + WARM_TURNS}


async def in_flight_async(turn: Callable[[int], Awaitable[object]], seconds: float) -> dict[str, float]:
    for number in range(WARM_TURNS):
        await turn(-1 - number)
    done: list[int] = []
    started = time.perf_counter()

    async def worker(lane: int) -> None:
        number = lane
        while time.perf_counter() - started < seconds:
            await turn(number)
            done.append(number)
            number += WIDTH

    await asyncio.gather(*(worker(lane) for lane in range(WIDTH)))
    return {"steps/s": len(done) * STEPS / (time.perf_counter() - started), "turns": len(done) + WARM_TURNS}


def files(folder: str) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def job() -> dict[str, Any]:
    return json.loads(sys.argv[1])


def answer(**values: object) -> None:
    """What the benchmark wants to know, as the last line."""
    print(json.dumps(values), flush=True)
