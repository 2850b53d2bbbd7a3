"""A loop that decides by a seed, for tests of a whole world."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.environment import Environment
from agentscope_durable.testing.simulated_loop import (
    Overrun,
    SimulatedClock,
    SimulatedEnvironment,
    SimulatedLoop,
    Stuck,
)


def interleaving(seed: int, *, stay: float = 0.0) -> str:
    loop, said = SimulatedLoop(seed, stay=stay), []

    async def talker(name: str) -> None:
        for _ in range(6):
            said.append(name)
            await asyncio.sleep(0)

    async def story() -> None:
        await asyncio.gather(*(loop.start(talker(name), actor=name) for name in "ab"))

    loop.run(story())
    return "".join(said)


def test_a_seed_decides_who_goes_next_and_decides_the_same_again() -> None:
    assert interleaving(1) == interleaving(1)
    assert len({interleaving(seed) for seed in range(20)}) > 10


def test_an_actor_keeps_the_order_that_asyncio_promises() -> None:
    loop, seen = SimulatedLoop(0), []

    async def story() -> None:
        for number in range(50):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(0)

    loop.run(story())

    assert seen == list(range(50))


def test_hours_pass_in_no_time() -> None:
    loop = SimulatedLoop(0)
    began = time.monotonic()

    async def story() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7200):
                await asyncio.Event().wait()
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert loop.run(story()) == 10_800
    assert time.monotonic() - began < 5


def test_a_frozen_actor_does_nothing_and_is_late_for_everything_when_it_thaws() -> None:
    loop, beats = SimulatedLoop(0), []

    async def beating() -> None:
        while True:
            await asyncio.sleep(1)
            beats.append(loop.time())

    async def story() -> None:
        loop.start(beating(), actor="a")
        await asyncio.sleep(2.5)
        loop.freeze("a")
        await asyncio.sleep(10)
        loop.thaw("a")
        await asyncio.sleep(2)

    loop.run(story())
    loop.bury()

    assert beats == [1, 2, 12.5, 13.5]


def test_a_killed_actor_runs_nothing_more_not_even_its_finally() -> None:
    loop, said = SimulatedLoop(0), []

    async def working() -> None:
        try:
            await asyncio.sleep(5)
            said.append("done")
        finally:
            said.append("finally")

    async def story() -> None:
        loop.start(working(), actor="a")
        await asyncio.sleep(1)
        loop.kill("a")
        await asyncio.sleep(100)

    loop.run(story())
    assert said == []

    loop.bury()
    assert said == ["finally"], "when the story is over it is ended in an orderly way"


def test_a_story_that_cannot_go_on_says_so() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.get_running_loop().create_future()

    async def never_rests() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(Stuck):
        (stuck := SimulatedLoop(0)).run(waits_for_nobody())
    with pytest.raises(Overrun):
        (busy := SimulatedLoop(0, steps_max=1000)).run(never_rests())
    stuck.bury()
    busy.bury()


def test_what_a_thread_answers_comes_at_one_moment_of_the_simulated_time() -> None:
    loop = SimulatedLoop(0)

    async def answered() -> int:
        future = loop.create_future()
        threading.Thread(target=lambda: loop.call_soon_threadsafe(future.set_result, 7)).start()
        return await future

    async def story() -> tuple[int, float]:
        await asyncio.sleep(3)
        return loop.drive(answered()), loop.time()

    assert loop.run(story()) == (7, 3)


def test_the_environment_sleeps_on_the_simulated_clock_and_draws_from_its_seed() -> None:
    loop = SimulatedLoop(0)
    environment: Environment = SimulatedEnvironment(loop, "a")

    async def story() -> float:
        await environment.sleep(60)
        assert await environment.call_in_thread(lambda: 5) == 5
        return environment.monotonic()

    assert loop.run(story()) == 60
    assert environment.random_bytes(8) == SimulatedEnvironment(SimulatedLoop(9), "a").random_bytes(8)
    assert environment.random_bytes(8) != SimulatedEnvironment(loop, "b").random_bytes(8)


def test_the_clock_follows_the_loop_and_can_be_set() -> None:
    loop = SimulatedLoop(0)
    clock = SimulatedClock(loop, start_ms=1000)

    async def story() -> None:
        await asyncio.sleep(2)

    loop.run(story())
    assert (clock.wall_ms(), clock.boot_ms()) == (3000, 62_000)

    clock.jump(-3_600_000)
    assert (clock(), clock.boot_ms()) == (3000 - 3_600_000, 62_000)


def test_hints_of_the_runtime_are_heard_on_it() -> None:
    loop = SimulatedLoop(0)

    async def story() -> frozenset[str]:
        hints = LocalWakeups()
        async with hints.listen(frozenset({"k"})) as heard:
            loop.call_later(5, hints.publish, ("k",))
            async for keys in heard:
                return keys
        raise AssertionError

    assert loop.run(story()) == {"k"}
    loop.bury()


def test_a_moment_between_two_callbacks_can_be_named_and_is_the_same_each_time() -> None:
    def killed_at(number: int) -> str:
        loop, said = SimulatedLoop(3), []

        async def talker() -> None:
            while True:
                said.append(loop.steps)
                await asyncio.sleep(1)

        async def story() -> None:
            loop.start(talker(), actor="a")
            await asyncio.sleep(10)

        loop.at_step(number, lambda: loop.kill("a"))
        loop.run(story())
        loop.bury()
        return str(said)

    assert killed_at(5) == killed_at(5)
    assert len(killed_at(5)) < len(killed_at(12))


def test_the_work_of_a_thread_is_done_on_the_spot() -> None:
    loop = SimulatedLoop(0)

    def broken() -> None:
        raise ValueError("broken")

    async def story() -> bool:
        with pytest.raises(ValueError, match="broken"):
            await asyncio.to_thread(broken)
        return await asyncio.to_thread(threading.get_ident) == threading.get_ident()

    assert loop.run(story())
