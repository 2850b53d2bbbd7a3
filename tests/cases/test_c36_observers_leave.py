"""C36: closing the local stream looked like an end; the work went on unseen, and the next request collided with it.

The observers of this process. Those behind HTTP have their story where that is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentscope_durable.contracts.errors import WaitTimeout
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, Hosts, refused, turn_is


async def close_the_stream(hosts: Hosts, turn: Any) -> None:
    async with turn.stream_events() as events:
        await anext(events)


async def drop_the_iterator(hosts: Hosts, turn: Any) -> None:
    """Without a word, as when a connection is cut."""
    stream = turn.stream_events()
    events = await stream.__aenter__()
    await anext(events)
    del events, stream


async def time_out(hosts: Hosts, turn: Any) -> None:
    await refused(turn.wait(0.01), WaitTimeout)


async def cancel_the_future(hosts: Hosts, turn: Any) -> None:
    for task in (asyncio.ensure_future(turn.wait()), asyncio.ensure_future(_follow(turn))):
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def close_the_runtime(hosts: Hosts, turn: Any) -> None:
    """The observer's whole process ends."""
    api = await hosts.open()
    events = api.get_session(KEY).stream_events()
    await anext(await events.__aenter__())
    await api.close()


async def _follow(turn: Any) -> None:
    async with turn.stream_events() as events:
        async for _ in events:
            pass


WAYS: list[Callable[[Hosts, Any], Awaitable[None]]] = [
    close_the_stream,
    drop_the_iterator,
    time_out,
    cancel_the_future,
    close_the_runtime,
]


@pytest.mark.case("C36")
@pytest.mark.spec("AD-20", "ST-29", "ST-16")
@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
async def test_whoever_leaves_takes_nothing_with_them_and_only_a_cancel_stops_the_turn(
    hosts: Hosts, leave: Callable[[Hosts, Any], Awaitable[None]]
) -> None:
    gates = Gates()
    script = {"": [say("at work"), Stall(gate="work"), final("done")], "next": [final("next")]}
    runtime = await hosts.open(ScriptedHarness(script, gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await gates.reached("work")

    await leave(hosts, turn)

    view = await turn.status()
    assert (view.status, view.cancel_requested) == ("RUNNING", False)
    following = await session.submit("r2", "next")
    assert (await following.status()).status == "QUEUED", "it does not collide with what goes on"
    gates.open("work")
    assert str(await turn.wait(90)) == "done"
    assert str(await following.wait(90)) == "next"
    assert (await turn.status()).runs == 1


@pytest.mark.case("C36")
async def test_a_cancel_stops_it_though_nobody_looks(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([say("at work"), Stall(gate="work"), final("done")], gates=gates))
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("work")
    await close_the_stream(hosts, turn)
    await turn.cancel("stop")
    assert (await turn_is(turn, "CANCELLED")).status == "CANCELLED"
