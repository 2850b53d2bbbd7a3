"""Bad weather for tests: a busy machine, on any machine, from a seed.

`make weather SEED=7` runs the tests while every event loop stands still now and then for some milliseconds and threads
change places at odd moments. A test that waits for less than it relies on fails here today, instead of once in a
thousand runs on a machine that is busier than ours. Sleeping takes no processor: many workers fit on one core.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from asyncio import base_events
from typing import Any

import pytest

STILL = 0.15
"""The share of a loop's turns before which it stands still."""
STILL_SECONDS = (0.0005, 0.002, 0.006, 0.015)
"""For how long; the longer ones come seldom."""
WEIGHTS = (8, 8, 3, 1)
SWITCH_SECONDS = (0.000_01, 0.005, 0.03)
"""After how long one thread is made to give way to another."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--weather", metavar="SEED", help="run the tests as if the machine were busy")


class Weather:
    """What the loops of this process run into.

    Args:
        seed: the same for a test, wherever and after whatever it runs; what the operating system adds is its own.
    """

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._chance = random.Random(seed)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._chance = random.Random(f"{self._seed}/{item.nodeid}")
        sys.setswitchinterval(self._chance.choice(SWITCH_SECONDS))
        return (yield)

    def stand(self) -> None:
        """Let some time pass, or none."""
        if self._chance.random() < STILL:
            time.sleep(self._chance.choices(STILL_SECONDS, WEIGHTS)[0])


def pytest_configure(config: pytest.Config) -> None:
    seed = config.getoption("--weather")
    if seed is None:
        return
    weather = Weather(seed)
    turn = base_events.BaseEventLoop._run_once  # pyright: ignore[reportAttributeAccessIssue]

    def slow_turn(loop: asyncio.AbstractEventLoop) -> None:
        weather.stand()
        turn(loop)

    base_events.BaseEventLoop._run_once = slow_turn  # pyright: ignore[reportAttributeAccessIssue]
    config.pluginmanager.register(weather, "weather-of-this-run")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--weather")
    return None if seed is None else f"weather: --weather {seed}, pid {os.getpid()}"
