"""Hints within a process: merged, thread-safe, and never a reason to fail."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentscope_durable.runtime.hints import ANYTHING, PENDING_KEYS_MAX, LocalWakeups, ringing
from agentscope_durable.runtime.tasks import Bell
from agentscope_durable.spi.environment import SYSTEM


async def test_a_listener_hears_its_keys_merged() -> None:
    wakeups = LocalWakeups()
    async with wakeups.listen(frozenset({"a", "b"})) as heard:
        wakeups.publish(("a", "c"))
        wakeups.publish(("b", "a"))

        assert await anext(heard) == {"a", "b"}
        wakeups.publish(("c",))
        wakeups.publish((ANYTHING,))
        assert await anext(heard) == {ANYTHING}


async def test_without_keys_everything_is_heard() -> None:
    wakeups = LocalWakeups()
    async with wakeups.listen() as heard:
        wakeups.publish(("a",))
        assert await anext(heard) == {"a"}


async def test_a_listener_that_looks_away_is_told_that_anything_may_have_changed() -> None:
    wakeups = LocalWakeups()
    async with wakeups.listen() as heard:
        for number in range(2 * PENDING_KEYS_MAX):
            wakeups.publish((f"k{number}",))
        found = await anext(heard)

    assert ANYTHING in found
    assert len(found) <= PENDING_KEYS_MAX


async def test_nothing_is_told_after_leaving() -> None:
    wakeups = LocalWakeups()
    async with wakeups.listen() as heard:
        pass
    wakeups.publish(("a",))

    assert not wakeups._listeners and not wakeups._for_all
    del heard


async def test_threads_publish_to_listeners_of_several_loops() -> None:
    wakeups = LocalWakeups()
    ready, got = threading.Event(), threading.Event()

    async def listen_elsewhere() -> None:
        async with wakeups.listen() as heard:
            ready.set()
            seen: set[str] = set()
            while "last" not in seen:
                seen |= await anext(heard)
            got.set()

    other = threading.Thread(target=lambda: asyncio.run(listen_elsewhere()))
    other.start()
    await asyncio.to_thread(ready.wait, 10)
    async with wakeups.listen() as heard:
        publishers = [threading.Thread(target=lambda n=n: wakeups.publish((f"k{n}",))) for n in range(20)]
        for publisher in publishers:
            publisher.start()
        for publisher in publishers:
            await asyncio.to_thread(publisher.join)
        seen: set[str] = set()
        while len(seen) < 20:
            seen |= await anext(heard)
    wakeups.publish(("last",))

    assert await asyncio.to_thread(got.wait, 10)
    await asyncio.to_thread(other.join)


async def test_a_listener_whose_loop_has_ended_is_no_error() -> None:
    wakeups = LocalWakeups()

    async def leave_without_closing() -> None:
        context = wakeups.listen()
        kept.append(context)
        await context.__aenter__()

    kept: list[object] = []
    await asyncio.to_thread(lambda: asyncio.run(leave_without_closing()))

    async with wakeups.listen() as heard:
        wakeups.publish(("a",))
        async with asyncio.timeout(90):
            assert await anext(heard) == {"a"}, "and keeps the hint from nobody"


@pytest.mark.spec("BE-12")
async def test_a_transport_that_fails_is_silent_and_polling_goes_on() -> None:
    class Broken:
        def publish(self, keys):
            raise OSError

        def listen(self, keys=None):
            raise OSError("no transport")

    bell = Bell()
    async with ringing(Broken(), None, bell):
        assert await bell.wait(SYSTEM, 0.01) is False


async def test_a_bell_is_rung_once_however_often() -> None:
    bell = Bell()
    for _ in range(5):
        bell.ring()

    assert await bell.wait(SYSTEM, 10) is True
    assert await bell.wait(SYSTEM, 0) is False
    waiting = asyncio.create_task(bell.wait(SYSTEM, 10))
    await asyncio.sleep(0)
    bell.ring()
    assert await waiting is True
