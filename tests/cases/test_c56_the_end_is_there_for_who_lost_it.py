"""C56: the final answer was stored and wiped at once, so a client that lost its connection found nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentscope_durable.contracts.commands import CommitStep
from agentscope_durable.contracts.events import Committed
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.testing.scripted_harness import final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events


class Around:
    """The backend of the host that runs the Turn: something happens around the commit that ends it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.around: Callable[[Awaitable[Any]], Awaitable[Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def execute(self, command: Any, **options: Any) -> Any:
        work = self._backend.execute(command, **options)
        if isinstance(command, CommitStep) and command.end is not None and self.around is not None:
            return await self.around(work)
        return await work


@pytest.mark.case("C56")
@pytest.mark.spec("DX-08", "ST-05", "ST-19")
@pytest.mark.parametrize("cut", ["before", "during", "after", "delivered, not saved"])
async def test_the_last_event_can_be_replayed_whenever_the_connection_was_cut(hosts: Hosts, cut: str) -> None:
    backend = Around(hosts.backend)
    brain = await hosts.open([say("one"), final("the answer")], backend=backend)
    await brain.create_session(KEY, "agent")
    api = await hosts.open()
    session = api.get_session(KEY)
    connection = session.stream_events(deltas={EventDeltaType.MESSAGE})
    cut_off = asyncio.Event()

    async def disconnect() -> None:
        await connection.aclose()
        cut_off.set()

    async def around(work: Awaitable[Any]) -> Any:
        if cut == "before":
            await disconnect()
            return await work
        ending = asyncio.ensure_future(work)
        if cut == "during":
            await asyncio.sleep(0)
            await disconnect()
        answer = await ending
        if cut == "after":
            await disconnect()
        return answer

    backend.around = around
    saved: str | None = None
    seen: list[Any] = []
    async with connection:
        turn = await session.submit("r1", "a")
        async with asyncio.timeout(SECONDS):
            async for item in connection:
                if not isinstance(item, Committed):
                    continue
                if _ends(item.event) and cut == "delivered, not saved":
                    # The consumer dies with the last event in its hands.
                    break
                seen.append(item.event)
                saved = item.cursor
    if cut != "delivered, not saved":
        async with asyncio.timeout(SECONDS):
            await cut_off.wait()
    assert str(await turn.wait(SECONDS)) == "the answer"

    # The client comes back to another host, again and again, and much later.
    for _ in range(3):
        again = (await hosts.open()).get_session(KEY)
        rest: list[Any] = []
        async with again.stream_events(after=saved) as events, asyncio.timeout(SECONDS):
            while not (rest and _ends(rest[-1])) and not (seen and _ends(seen[-1])):
                rest.append((await anext(events)).event)
        assert seen + rest == await all_events(again)
        assert _ends((seen + rest)[-1])
        assert str(await again.get_turn(turn.turn_id).result()) == "the answer"
        assert [message.text for message in await again.history()] == ["a", "one", "the answer"]


def _ends(event: Any) -> bool:
    return event.type == "turn.status" and event.data["turn"]["status"] == "COMPLETED"
