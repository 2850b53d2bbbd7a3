"""C58: a write that had timed out and been applied was repeated, and de-duplication looked only at neighbours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import Uncertain
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.every_store import on_every_store, shelf
from tests.runtime.conftest import KEY, all_events


@pytest.mark.case("C58")
@pytest.mark.spec("EV-05", "EV-07", "AD-07")
@on_every_store
async def test_a_repeat_after_a_lost_answer_tells_of_it_once(backend: str, tmp_path: Path) -> None:
    async with shelf(backend, tmp_path) as place:
        await _repeat_after_lost_answers(FaultyRecordStore(await place.records()))


async def _repeat_after_lost_answers(store: FaultyRecordStore) -> None:
    harnesses = [Harness("agent", "v1", ScriptedHarness([final()]))]
    async with DurableRuntime(backend=TransactionalSessionBackend(store), harnesses=harnesses) as runtime:
        store.lose_answer()
        with pytest.raises(Uncertain):
            await runtime.create_session(KEY, "agent")
        session = await runtime.create_session(KEY, "agent")
        for number, write in enumerate(
            (
                lambda: session.create_thread("side", "agent"),
                lambda: session.submit("r1", "go"),
                lambda: session.get_thread("side").submit("r2", "go"),
            )
        ):
            store.lose_answer()
            with pytest.raises(Uncertain):
                await write()
            # Others write in between, in this Session too.
            await asyncio.gather(*(session.submit(f"other-{number}-{n}", "go") for n in range(3)))
            await write()

        events = await all_events(session)
        told = [
            (event.type, event.thread_id, event.data.get("requestId"))
            for event in events
            if event.type != "turn.status"
        ]
        created = {("session.created", None, None), ("thread.created", "main", None), ("thread.created", "side", None)}
        assert created < set(told)
        assert len(told) == len(set(told)), "each fact once"
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert len((await session.list_turns()).items) == 1 + 3 * 3
        assert len((await session.get_thread("side").list_turns()).items) == 1
