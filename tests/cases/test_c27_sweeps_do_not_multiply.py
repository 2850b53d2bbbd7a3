"""C27: each replica ran the same repair pass, and together they wrote without end.

Hosts are told of that elsewhere; this is about the sweep, which is likely to stand in the crontab of every machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentscope_durable.contracts import keys
from agentscope_durable.domain.objects import ORPHAN_AGE_MS
from agentscope_durable.spi.record_store import Reads
from agentscope_durable.testing.manual_clock import ManualClock
from tests.backend.test_sweep import SESSION, START, Sweeping
from tests.every_store import on_every_store, shelf

pytestmark = pytest.mark.case("C27")

SWEEPS = 5
LOST = 7


@on_every_store
async def test_five_sweeps_at_once_write_what_one_writes(backend: str, tmp_path: Path) -> None:
    clock = ManualClock(START)
    async with shelf(backend, tmp_path, clock) as place:
        sweeps = [Sweeping(await place.backend(), clock) for _ in range(SWEEPS)]
        first = sweeps[0]
        await first.created()
        used = await first.used(0)
        for n in range(1, LOST + 1):
            await first.lost(n)

        async def commits() -> int:
            return (await (await place.records()).read(keys.partition(SESSION), Reads())).rev

        before = await commits()
        _ = await asyncio.gather(*(at.sweep() for at in sweeps))
        assert await commits() == before, "what is too young is looked at, and nothing is written about it"

        clock.advance(ORPHAN_AGE_MS + 1)
        _ = await asyncio.gather(*(at.sweep() for at in sweeps))
        assert await commits() == before + 2, "one of them marks, and one of them forgets"
        assert await first.names() == [used.name]
        _ = await asyncio.gather(*(at.sweep() for at in sweeps))
        assert await commits() == before + 2
