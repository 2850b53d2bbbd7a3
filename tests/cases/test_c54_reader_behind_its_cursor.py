"""C54: a reader that resumes at "seq > last" could pass a number whose transaction commits later."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import _failpoints
from agentscope_durable.contracts.events import EventFilter, PublicEvent
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.every_store import STORES, shelf
from tests.runtime.conftest import KEY, all_events

WRITERS = 16
EACH = 12


@pytest.fixture(autouse=True)
def held_transactions() -> Iterator[None]:
    """Numbers have been given out, and the commit takes its time: a random one, in the thread that writes."""
    chance = random.Random(54)

    def hold(name: str) -> None:
        if name == "store.commit.before":
            time.sleep(chance.random() / 500)

    _failpoints.observe(hold)
    yield
    _failpoints.observe(None)


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def backends(backend: str, tmp_path: Path) -> AsyncGenerator[list[Any]]:
    """Two writers' and a reader's. Each has connections of its own, as three processes would."""
    async with shelf(backend, tmp_path) as place:
        yield [await place.backend() for _ in range(3)]


async def follow(session: Any, done: asyncio.Event, narrow: EventFilter | None = None) -> list[PublicEvent]:
    """Poll without a pause, each time from the cursor of the last answer, until nothing more comes."""
    seen: list[PublicEvent] = []
    cursor = None
    while True:
        last = done.is_set()
        page = await session.list_events(cursor, 7, narrow)
        seen += page.events
        cursor = page.cursor
        if last and cursor == page.high_watermark:
            return seen
        await asyncio.sleep(0)


@pytest.mark.case("C54")
@pytest.mark.spec("EV-06", "EV-01", "FI-12")
async def test_a_reader_that_resumes_from_its_cursor_misses_nothing(backends: list[Any]) -> None:
    async with AsyncExitStack() as stack:
        runtimes = [
            await stack.enter_async_context(
                DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness([final()]))])
            )
            for backend in backends
        ]
        session = await runtimes[0].create_session(KEY, "agent")
        for number in range(WRITERS):
            await session.create_thread(f"t{number}", "agent")

        async def write(number: int) -> None:
            thread = runtimes[number % 2].get_session(KEY).get_thread(f"t{number}")
            for request in range(EACH):
                turn = await thread.submit(f"{number}-{request}", "go")
                if request % 3 == 0:
                    await turn.cancel(f"{number}-{request}-cancel")

        done = asyncio.Event()
        reader = runtimes[2].get_session(KEY)
        narrow = EventFilter("t3")
        readers = [asyncio.ensure_future(follow(reader, done, each)) for each in (None, None, narrow)]
        await asyncio.gather(*map(write, range(WRITERS)))
        done.set()
        whole, again, narrowed = await asyncio.gather(*readers)

        full = await all_events(reader)
        assert whole == again == full
        assert [event.sequence for event in full] == list(range(1, len(full) + 1))
        assert narrowed == [event for event in full if event.thread_id == "t3"]
        fold = EventProjection(KEY)
        assert all(fold.accept(event) for event in whole)
        assert fold.snapshot() == await reader.snapshot()
