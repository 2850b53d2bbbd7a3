"""What becomes of the bodies of large files that an agent writes, and writes over."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agentscope")

from agentscope_durable.adapters.agentscope import DurableWorkspace
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.domain.objects import ORPHAN_AGE_MS
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_model import Call, by_round
from tests.adapters.agentscope.test_workspace import NS, Writers, played
from tests.every_store import on_every_store, shelf


def text(n: int) -> str:
    return f"{n} ".ljust(100_000, "x")


@on_every_store
@pytest.mark.spec("OB-04")
async def test_a_file_that_was_written_over_goes_when_no_position_needs_it(backend: str, tmp_path: Path) -> None:
    clock = ManualClock(4_000_000_000_000)
    async with shelf(backend, tmp_path, clock) as place:
        store = await place.backend(wakeups=None)
        operations = HostOperations(store)
        written = 0

        async def write(ws: DurableWorkspace) -> None:
            nonlocal written
            written += 1
            await ws.put(NS, "a", text(written))

        first = (*(Call("write", {}, id=f"first-{n}") for n in range(3)), "done")
        second = (*(Call("write", {}, id=f"second-{n}") for n in range(2)), "done")
        writers = Writers(tmp_path / "writers", by_round(*first, *second), write=write)
        stage = await writers.stage(backend=store)
        partition, thread = keys.partition(stage.session), ThreadKey(stage.session, stage.thread_id)

        async def left() -> list[int]:
            """Which of the texts still stand in the object store, after a day and a sweep."""
            clock.advance(ORPHAN_AGE_MS + 1)
            _ = await operations.sweep_objects()
            assert (await operations.doctor(deep=True)).sound
            bodies = [await store.objects.get(partition, name) for name in await store.objects.list(partition)]
            return [n for n in range(1, written + 1) if any(body == f'"{text(n)}"'.encode() for body in bodies)]

        assert await played(stage, "r1") == "COMPLETED"
        # Nothing can come back to what the same Turn has written over.
        assert await left() == [3]
        assert await played(stage, "r2") == "COMPLETED"
        # The position after the first Turn needs what it left.
        assert await left() == [3, 5]
        _ = await operations.prune_checkpoints(thread, older_than=0)
        assert await left() == [5]
