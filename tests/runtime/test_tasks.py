"""Waiting loses no cancellation (a host that could not be cancelled would hang when its program ends)."""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.runtime.tasks import Bell, stop
from agentscope_durable.spi.environment import SYSTEM


async def test_a_cancellation_that_meets_the_clean_up_is_raised_when_it_is_done() -> None:
    ended: list[str] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append("inner")

    inner = asyncio.ensure_future(slow_to_end())
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(stop(inner))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert ended == ["inner"]


@pytest.mark.parametrize("turns", range(8))
async def test_a_bell_can_be_cancelled_at_any_moment(turns: int) -> None:
    bell = Bell()

    async def loop() -> None:
        while True:
            await bell.wait(SYSTEM, 0.0005)

    waiting = asyncio.ensure_future(loop())
    for _ in range(20):
        await asyncio.sleep(0.0005)
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(90):
        with pytest.raises(asyncio.CancelledError):
            await waiting
