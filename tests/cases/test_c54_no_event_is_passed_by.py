"""C54: a reader that went on after the last number it knew passed events whose transaction was committed later."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import _failpoints
from agentscope_durable.contracts.events import Committed, PublicEvent
from agentscope_durable.contracts.options import EventStreamOptions
from agentscope_durable.runtime.replay import SessionEventClient
from agentscope_durable.runtime.runtime import Definition, DurableRuntime
from tests.cases.programs import job_of, opening
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, SECONDS, all_events, until

WRITERS, STORES, TURNS = 16, 4, 12
HELD_SECONDS_MAX = 0.004
"""How long a transaction is held open, at most, between the numbers it gives and its commit."""
DEFINITION = Definition("agent", "v1", "s1")


@pytest.mark.case("C54")
@pytest.mark.spec("ST-06", "EV-04")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_readers_that_go_on_from_their_cursor_see_each_event_once(backend: str, tmp_path: Path) -> None:
    """Sixteen writers, over four connections that take turns; readers on further ones look all the time."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance, lock = random.Random(seed), threading.Lock()
    hold = threading.Event()

    def keep_open(name: str) -> None:
        if name == "store.commit.before":
            with lock:
                seconds = chance.uniform(0, HELD_SECONDS_MAX)
            hold.wait(seconds)

    async with AsyncExitStack() as stack:
        sessions = []
        for _ in range(STORES + 1):
            opened = await stack.enter_async_context(opening({**job_of(backend, tmp_path), "synchronous": "NORMAL"}))
            runtime = DurableRuntime(backend=opened, definitions=[DEFINITION], poll_interval=0.01)
            await stack.enter_async_context(runtime)
            sessions.append(await runtime.create_session(KEY, "agent"))
        for number in range(WRITERS):
            await sessions[0].create_thread(f"t{number}", "agent")
        start = len(await all_events(sessions[0]))
        expected = start + 2 * WRITERS * TURNS
        pages: list[PublicEvent] = []
        streamed: list[PublicEvent] = []
        subscribed: list[PublicEvent] = []
        polled: list[PublicEvent] = []

        async def write(number: int) -> None:
            thread = sessions[number % STORES].get_thread(f"t{number}")
            for turn in range(TURNS):
                await thread.submit(f"w{number}-{turn}", f"{number} {turn}")

        async def page_after_page(session: Any) -> None:
            cursor = None
            while len(pages) < expected:
                page = await session.list_events(cursor, 3)
                pages.extend(page.events)
                cursor = page.cursor

        async def stream(session: Any) -> None:
            async with session.stream_events() as events:
                while len(streamed) < expected:
                    streamed.append((await anext(events)).event)

        async def poll(backend: Any) -> None:
            client = SessionEventClient(backend, KEY)
            while len(polled) < expected:
                for fact in await client.poll(5):
                    assert isinstance(fact, Committed)
                    polled.append(fact.event)
                    client.acknowledge(fact)

        async def take(item: Any) -> None:
            subscribed.append(item.event)

        sessions[1].subscribe_events(EventStreamOptions.defaults(), take)
        _failpoints.observe(keep_open)
        try:
            async with asyncio.timeout(4 * SECONDS):
                readers = [page_after_page(sessions[-1]), stream(sessions[0]), poll(sessions[-1]._door._backend)]
                await asyncio.gather(*readers, *(write(number) for number in range(WRITERS)))
        finally:
            _failpoints.observe(None)
        await until(lambda: len(subscribed) >= expected)
        whole = await all_events(sessions[-1])

    assert [event.sequence for event in whole] == list(range(1, expected + 1))
    assert pages == streamed == polled == subscribed == whole
    # Each writer's own events are in the order in which it was answered.
    for number in range(WRITERS):
        said = [
            event.data["content"][0]["text"]
            for event in whole
            if event.type == "message.completed" and event.thread_id == f"t{number}"
        ]
        assert said == [f"{number} {turn}" for turn in range(TURNS)]
