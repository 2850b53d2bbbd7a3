"""C53: control frames carried made-up ids; whoever came back with one of them was not given the events before it.

The part of it that is below any transport: what a stream yields, and where one can go on from.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.contracts.events import Committed, EventDelta, PreviewStarted, SnapshotReset
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.replay import cursor_after
from agentscope_durable.testing.scripted_harness import final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events

DELTAS = frozenset({EventDeltaType.MESSAGE})


@pytest.mark.case("C53")
@pytest.mark.spec("ST-02", "ST-05", "ST-06", "ST-22")
@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
async def test_a_client_that_comes_back_after_any_item_misses_and_repeats_nothing(hosts: Hosts, pruned: bool) -> None:
    runtime = await hosts.open([say("first words here"), final("the last words")])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r0", "before")).wait(SECONDS)
    so_far = await all_events(session)
    if pruned:
        await HostOperations(hosts.backend).prune_events(KEY, through=so_far[-1].cursor)
        so_far = so_far[-len((await session.list_events(None, 1000)).events) :]
    items: list[Any] = []
    cursors: list[str | None] = []
    async with session.stream_events(deltas=DELTAS) as events:
        async with asyncio.timeout(SECONDS):
            # What it replays first; then a Turn with previews, as it happens.
            while events.cursor != so_far[-1].cursor:
                items.append(await anext(events))
                cursors.append(events.cursor)
            turn = await session.submit("r1", "a")
            while not _ended(items[-1], turn.turn_id):
                items.append(await anext(events))
                cursors.append(events.cursor)
    everything = [event.sequence for event in await all_events(session)]
    end = items[-1].event.sequence

    assert {type(item) for item in items} == {
        Committed,
        PreviewStarted,
        EventDelta,
        *([SnapshotReset] if pruned else []),
    }
    for index, item in enumerate(items):
        # The cursor is that of the last fact, and a preview has none of its own.
        facts = [earlier for earlier in items[: index + 1] if isinstance(earlier, Committed | SnapshotReset)]
        assert cursors[index] == (cursor_after(facts[-1]) if facts else None)
        assert hasattr(item, "cursor") == isinstance(item, Committed)

        had = [fact.event.sequence for fact in facts if isinstance(fact, Committed)]
        rest: list[int] = []
        async with session.stream_events(after=cursors[index]) as again, asyncio.timeout(SECONDS):
            while (had + rest)[-1:] != [end]:
                following = await anext(again)
                assert isinstance(following, Committed)
                rest.append(following.event.sequence)
        assert had + rest == (everything if not pruned else list(range((had + rest)[0], end + 1)))
        assert (had + rest)[0] in ((1,) if not pruned else (everything[0], so_far[-1].sequence + 1))


def _ended(item: Any, turn_id: str) -> bool:
    return (
        isinstance(item, Committed)
        and item.event.type == "turn.status"
        and item.event.turn_id == turn_id
        and item.event.data["turn"]["status"] == "COMPLETED"
    )
