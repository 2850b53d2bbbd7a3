"""The contract of `Wakeups`: every promise of the port, as tests.

A provider's whole test file is a subclass::

    class TestMyWakeups(WakeupsContract):
        async def open(self, place: Path) -> Wakeups:
            return MyWakeups(place)

Hints may be lost at any time, so the suite publishes again where it waits for one to be heard.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agentscope_durable.spi.backend import Wakeups
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.testing.live_events import SECONDS, until

ANYTHING = "*"
AGAIN = 0.02
"""Seconds after which a hint that was not heard is published again."""


async def heard(listening: AsyncIterator[frozenset[str]], wakeups: Wakeups, *keys: str) -> frozenset[str]:
    """What is heard next while `keys` are published."""
    async with asyncio.timeout(SECONDS):
        following = asyncio.ensure_future(anext(listening))
        while not following.done():
            wakeups.publish(keys)
            await asyncio.wait({following}, timeout=AGAIN)
        return following.result()


async def heard_until(wanted: str, listening: AsyncIterator[frozenset[str]], wakeups: Wakeups, *keys: str) -> set[str]:
    """All that is heard until `wanted` is, while `keys` are published: one published again may come late."""
    found: set[str] = set()
    while wanted not in found:
        found |= await heard(listening, wakeups, *keys)
    return found


class WakeupsContract:
    """Subclass it, give it `open`, and every promise is checked under the name it has in the port."""

    pytestmark = pytest.mark.asyncio

    async def open(self, place: Path) -> Wakeups:
        """One end of the transport at `place`. Called again, it may give another end of it, or the same object."""
        raise NotImplementedError

    async def close(self, end: Wakeups) -> None:
        """No more of this end."""

    @asynccontextmanager
    async def ends(self, place: Path) -> AsyncGenerator[tuple[Wakeups, Wakeups]]:
        """A writer's end and a listener's."""
        writer, listener = await self.open(place), await self.open(place)
        try:
            yield writer, listener
        finally:
            await self.close(listener)
            await self.close(writer)

    async def test_heard_keyed_a_listener_hears_its_keys_alone(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (writer, listener), listener.listen(frozenset({"a", "b"})) as listening:
            assert await heard(listening, writer, "a", "c") == {"a"}
            assert await heard_until("b", listening, writer, "c", "b") <= {"a", "b"}
            assert await heard(listening, writer, ANYTHING) <= {"a", "b", ANYTHING}

    async def test_heard_who_listens_to_all_hears_all(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (writer, listener), listener.listen() as listening:
            assert await heard(listening, writer, "a") == {"a"}
            assert await heard_until("b", listening, writer, "b") <= {"a", "b"}

    async def test_heard_by_listeners_of_several_loops(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (writer, listener):
            got: set[str] = set()
            ready, done = threading.Event(), threading.Event()

            async def elsewhere() -> None:
                async with listener.listen(frozenset({"a"})) as listening:
                    ready.set()
                    got.update(await anext(listening))
                    done.set()

            other = asyncio.create_task(SYSTEM.call_in_thread(lambda: asyncio.run(elsewhere())))
            await until(ready.is_set)
            await until(done.is_set, lambda: writer.publish(("a",)))
            await other

            assert got == {"a"}

    async def test_merged_who_does_not_look_is_told_once_or_that_anything_changed(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (writer, listener), listener.listen() as listening:
            for number in range(20_000):
                writer.publish((f"k{number % 5000}",))
            found = await heard(listening, writer, "last")

            assert ANYTHING in found or len(found) == len(set(found)) <= 5001

    async def test_harmless_publishing_waits_for_nobody(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (writer, listener):
            ready, published = threading.Event(), threading.Event()

            async def blocked() -> None:
                context = listener.listen(frozenset({"a"}))
                await context.__aenter__()
                ready.set()
                # Nothing of this loop runs until everything was published; then it ends without leaving.
                assert published.wait(SECONDS)

            other = asyncio.create_task(SYSTEM.call_in_thread(lambda: asyncio.run(blocked())))
            await until(ready.is_set)
            for _ in range(20_000):
                writer.publish(("a", "b"))
            published.set()
            with suppress(RuntimeError):
                await other
            writer.publish(("a",))

    async def test_left_nothing_is_told_after_leaving(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (writer, listener):
            async with listener.listen(frozenset({"a"})) as left:
                pass
            async with listener.listen(frozenset({"a"})) as stays:
                assert await heard(stays, writer, "a") == {"a"}
                following = asyncio.ensure_future(anext(left))
                assert await heard(stays, writer, "a") == {"a"}
                assert not following.done()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
