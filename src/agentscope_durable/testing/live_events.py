"""The contract of `LiveEvents`: every promise of the port, as tests.

A provider's whole test file is a subclass::

    class TestMyLiveEvents(LiveEventsContract):
        async def open(self, place: Path) -> LiveEvents:
            return MyLiveEvents(place)

Previews may be lost at any time, so the suite publishes again where it waits for one to arrive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.live import LiveEvents, Preview

SECONDS = 90.0
HERE, THERE = SessionKey("app", "here"), SessionKey("app", "there")


def preview(number: int, text: str = "x") -> EventDelta:
    return EventDelta("message", "main", "t", "m", 1, number, text)


class Seen:
    """A listener that keeps what it was told, and where."""

    def __init__(self) -> None:
        self.previews: list[Preview] = []
        self.threads: set[int] = set()

    def __call__(self, preview: Preview) -> None:
        self.previews.append(preview)
        self.threads.add(threading.get_ident())

    @property
    def numbers(self) -> list[int]:
        return [one.offset for one in self.previews if isinstance(one, EventDelta)]


async def until(condition: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            meanwhile()
            await SYSTEM.sleep(0.005)


class LiveEventsContract:
    """Subclass it, give it `open`, and every promise is checked under the name it has in the port."""

    pytestmark = pytest.mark.asyncio

    async def open(self, place: Path) -> LiveEvents:
        """One end of the transport at `place`. Called again, it may give another end of it, or the same object."""
        raise NotImplementedError

    async def close(self, end: LiveEvents) -> None:
        """No more of this end."""

    @asynccontextmanager
    async def ends(self, place: Path) -> AsyncGenerator[tuple[LiveEvents, LiveEvents]]:
        """A producer's end and an observer's."""
        producer, observer = await self.open(place), await self.open(place)
        try:
            yield producer, observer
        finally:
            await self.close(observer)
            await self.close(producer)

    async def test_told_ordered_previews_arrive_once_and_in_order(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            seen, number = Seen(), 0

            def publish() -> None:
                nonlocal number
                producer.publish(HERE, preview(number))
                number += 1

            observer.attach(HERE, seen)
            await until(lambda: producer.wanted(HERE))
            await until(lambda: len(seen.numbers) >= 50, publish)

            assert seen.numbers == sorted(set(seen.numbers))
            observer.detach(HERE, seen)

    async def test_told_what_arrives_is_what_was_published(self, tmp_path: Path) -> None:
        start = PreviewStarted("tool_arguments", "main", "t", "m", 2, "c1", "look")
        delta = EventDelta("tool_arguments", "main", "t", "m", 2, 7, '{"ü": "\U0001f600', "c1")
        async with self.ends(tmp_path) as (producer, observer):
            seen = Seen()
            observer.attach(HERE, seen)
            await until(lambda: producer.wanted(HERE))
            await until(lambda: start in seen.previews, lambda: producer.publish(HERE, start))
            await until(lambda: delta in seen.previews, lambda: producer.publish(HERE, delta))

            assert set(seen.previews) == {start, delta}
            observer.detach(HERE, seen)

    async def test_scoped_previews_of_another_session_never_arrive(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            here, there = Seen(), Seen()
            observer.attach(HERE, here)
            observer.attach(THERE, there)
            await until(lambda: producer.wanted(HERE) and producer.wanted(THERE))

            def publish() -> None:
                producer.publish(HERE, preview(1))
                producer.publish(THERE, preview(2))
                producer.publish(SessionKey("app", "nobody's"), preview(3))

            await until(lambda: bool(here.numbers and there.numbers), publish)

            assert (set(here.numbers), set(there.numbers)) == ({1}, {2})
            observer.detach(HERE, here)
            observer.detach(THERE, there)

    async def test_at_home_a_listener_is_called_on_its_own_loop(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            mine, theirs = Seen(), Seen()
            ready, done = threading.Event(), threading.Event()

            async def elsewhere() -> None:
                observer.attach(HERE, theirs)
                ready.set()
                await until(done.is_set)
                observer.detach(HERE, theirs)

            observer.attach(HERE, mine)
            other = asyncio.create_task(SYSTEM.call_in_thread(lambda: asyncio.run(elsewhere())))
            await until(ready.is_set)
            await until(lambda: producer.wanted(HERE))
            await until(lambda: bool(mine.numbers and theirs.numbers), lambda: producer.publish(HERE, preview(1)))
            done.set()
            await other

            assert mine.threads == {threading.get_ident()}
            assert theirs.threads.isdisjoint(mine.threads) and len(theirs.threads) == 1
            observer.detach(HERE, mine)

    async def test_harmless_a_listener_that_raises_is_its_own_affair(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            seen = Seen()

            def broken(preview: Preview) -> None:
                raise RuntimeError("an observer's defect")

            observer.attach(HERE, broken)
            observer.attach(HERE, seen)
            await until(lambda: producer.wanted(HERE))
            await until(lambda: len(seen.numbers) >= 3, lambda: producer.publish(HERE, preview(1)))

            observer.detach(HERE, broken)
            observer.detach(HERE, seen)

    async def test_harmless_a_loop_that_is_blocked_or_gone_holds_nobody_up(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            seen = Seen()
            ready, published = threading.Event(), threading.Event()

            async def blocked() -> None:
                observer.attach(HERE, seen)
                ready.set()
                # Nothing of this loop runs until everything was published.
                assert published.wait(SECONDS)

            other = asyncio.create_task(SYSTEM.call_in_thread(lambda: asyncio.run(blocked())))
            await until(ready.is_set)
            await until(lambda: producer.wanted(HERE))
            for number in range(20_000):
                producer.publish(HERE, preview(number, "x" * 100))
            published.set()
            await other
            # It ended without a word, and its listener is still attached.
            producer.publish(HERE, preview(1))

            assert seen.numbers == sorted(set(seen.numbers))
            observer.detach(HERE, seen)

    @pytest.mark.parametrize("text", ["\ud800", "x" * 10_000_000], ids=["no text", "too much"])
    async def test_harmless_what_cannot_be_carried_is_left_out(self, tmp_path: Path, text: str) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            seen = Seen()
            observer.attach(HERE, seen)
            await until(lambda: producer.wanted(HERE))
            producer.publish(HERE, preview(1, text))
            await until(lambda: 2 in seen.numbers, lambda: producer.publish(HERE, preview(2)))

            observer.detach(HERE, seen)

    async def test_detached_nothing_is_told_any_more(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            gone, stays = Seen(), Seen()
            observer.attach(HERE, gone)
            observer.attach(HERE, stays)
            await until(lambda: producer.wanted(HERE))
            await until(lambda: bool(gone.numbers), lambda: producer.publish(HERE, preview(1)))
            observer.detach(HERE, gone)
            observer.detach(HERE, gone)
            count = len(gone.numbers)
            await until(lambda: 2 in stays.numbers, lambda: producer.publish(HERE, preview(2)))

            assert len(gone.numbers) == count
            observer.detach(HERE, stays)

    async def test_wanted_says_whether_somebody_listens(self, tmp_path: Path) -> None:
        async with self.ends(tmp_path) as (producer, observer):
            first, second = Seen(), Seen()
            assert not producer.wanted(HERE)
            observer.attach(HERE, first)
            observer.attach(HERE, second)
            await until(lambda: producer.wanted(HERE))
            assert observer.wanted(HERE)
            assert not producer.wanted(THERE)
            observer.detach(HERE, first)
            await until(lambda: bool(second.numbers), lambda: producer.publish(HERE, preview(1)))
            assert producer.wanted(HERE)
            observer.detach(HERE, second)
            await until(lambda: not producer.wanted(HERE))
            assert not observer.wanted(HERE)
