"""The end of a Run may have to look at more than any other commit, each time at what the last look has named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from tests.backend.world import LARGE, SESSION, World
from tests.every_store import STORES, shelf


@pytest.mark.spec("BE-17", "WS-01")
@pytest.mark.parametrize("store", STORES)
async def test_a_last_commit_that_replaces_a_large_file_and_wakes_the_next_turn_is_taken(
    store: str, tmp_path: Path
) -> None:
    """It asks for the queue, for the content that it replaces, for the next Turn, and for all large bodies' marks."""
    async with shelf(store, tmp_path, None) as place:
        backend = TransactionalSessionBackend(await place.records(), MemoryObjectStore())
        world = await World(backend=backend).open()
        first, second = await world.submit("one"), await world.submit("two")
        await world.claim()
        await world.commit(journal=b'["one"]', checkpoint=True, base=True, workspace=(await _file(world, 1),))
        message = f"{first}.r1"
        await world.commit(
            journal=b'["two"]',
            checkpoint=True,
            base=True,
            workspace=(await _file(world, 2),),
            messages=(c.MessageOut(message_id=message, content=await world.text(LARGE)),),
            end=c.RunEnd(kind=c.RunEndKind.COMPLETED, message_id=message),
        )

        assert (await world.turn(first)).status is TurnStatus.COMPLETED
        entry = await world.ask(q.GetEntry(session=SESSION, thread_id="main", path=("notes",)))
        assert (entry.version, entry.number) == (2, 2)
        assert (await world.claim()).turn_id == second


async def _file(world: World, version: int) -> Any:
    content = await world.body({"text": f"{version}" + LARGE})
    return c.EntryCommit(
        path=("notes",), expected=version - 1, version=version, number=version, size=len(LARGE), content=content
    )
