"""C56: the final answer was stored and wiped at once, so a client that lost the connection found nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import _failpoints
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import CursorExpired
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final
from tests.every_store import PERSISTENT, shelf
from tests.runtime.conftest import KEY, all_events, turn_is

RETENTION = timedelta(days=30)
ANSWER = "forty-two"
pytestmark = pytest.mark.backend("sqlite")


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    _failpoints.disarm()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=PERSISTENT)
async def backend(
    request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock
) -> AsyncGenerator[TransactionalSessionBackend]:
    async with shelf(request.param, tmp_path, clock) as place:
        yield TransactionalSessionBackend(await place.records(), wakeups=place.wakeups)


def is_end(event: Any, turn: Any) -> bool:
    return event.type == "turn.status" and event.turn_id == turn.turn_id and event.data["turn"]["status"] == "COMPLETED"


@pytest.mark.case("C56")
@pytest.mark.spec("EV-01", "EV-19", "ST-06")
@pytest.mark.parametrize("cut", ["before", "store.commit.before", "store.commit.after", "after"])
async def test_the_end_can_be_replayed_wherever_the_connection_was_cut(
    backend: TransactionalSessionBackend, clock: ManualClock, cut: str
) -> None:
    gates = Gates()
    harness = ScriptedHarness([Stall(gate="g"), final(ANSWER)], gates=gates)
    async with DurableRuntime(
        backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05, lease=10.0**7
    ) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "what is the answer?")
        stream = session.stream_events()
        await stream.__aenter__()
        reading = asyncio.ensure_future(_read(stream, turn))
        await gates.reached("g")

        if cut.startswith("store"):
            # Cut from the thread that writes, in the middle of the commit.
            loop = asyncio.get_running_loop()
            closing: list[Any] = []

            def close(name: str) -> None:
                closing.append(asyncio.run_coroutine_threadsafe(stream.aclose(), loop))

            _failpoints.arm(cut, close)
            gates.open("g")
            await turn_is(turn, "COMPLETED")
            await asyncio.wrap_future(closing[0])
        elif cut == "before":
            await stream.aclose()
            gates.open("g")
            await turn_is(turn, "COMPLETED")
        else:
            gates.open("g")
            await reading
            await stream.aclose()
        seen = await reading
        # What was shown last may never have reached the screen: the client saved the cursor before it.
        saved = seen[-2].cursor if len(seen) > 1 else None

        # For the full retention time, however often it is pruned.
        operations = HostOperations(backend)
        for days in (0, 10, 19):
            clock.advance(days * 24 * 3600 * 1000)
            assert (await operations.prune_events(KEY, older_than=RETENTION)).dropped == 0
            async with session.stream_events(after=saved) as events:
                replayed = await _read(events, turn)
            assert sum(is_end(event, turn) for event in replayed) == 1
            whole = [*seen[:-1], *replayed]
            assert whole == (await all_events(session))[: replayed[-1].sequence]

        # And then the answer is still there.
        clock.advance(2 * 24 * 3600 * 1000)
        assert (await operations.prune_events(KEY, older_than=RETENTION)).dropped > 0
        with pytest.raises(CursorExpired):
            await session.list_events(whole[0].cursor)
        assert str(await turn.result()) == ANSWER
        assert (await session.snapshot()).projection.turns[turn.turn_id].status == "COMPLETED"
        assert [message.text for message in await session.history()] == ["what is the answer?", ANSWER]


async def _read(stream: Any, turn: Any) -> list[Any]:
    """Facts, until the stream or the Turn has ended."""
    seen: list[Any] = []
    async for item in stream:
        seen.append(item.event)
        if is_end(item.event, turn):
            break
    return seen
