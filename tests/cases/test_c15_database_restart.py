"""C15: one error of the database in a recovery that ran only once dropped every workflow that was still to recover."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import Retry, Unconfirmed
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import Hosts, kill, until
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

ALL = os.environ.get("DURABLE_MATRIX") == "all"
TURNS = 250 if ALL else 40
SEEDS = range(20 if ALL else 2)
LEASE = 1.0


@pytest.mark.case("C15")
@pytest.mark.backend("postgres")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
async def test_every_turn_of_a_dead_host_ends_although_the_database_restarts_in_the_takeover(
    postgres: PostgresServer,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    chance = random.Random(seed)
    gates = Gates()
    script = [say("begun"), Stall(gate="g", obedient=False), final("done")]
    async with (
        PostgresBackend.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True) as backend,
        AsyncExitStack() as stack,
    ):
        hosts = Hosts(backend, stack)
        first = await hosts.open(ScriptedHarness(script, gates=gates), parallelism=TURNS, lease=LEASE)
        turns = [
            await (await first.create_session(SessionKey("app", f"s{n}"), "agent")).submit("r1", "go")
            for n in range(TURNS)
        ]

        queued = list(turns)

        async def all_run() -> bool:
            # Each is asked for until it runs and not again: it runs until the gate is opened.
            while queued and (await queued[-1].status()).status is TurnStatus.RUNNING:
                queued.pop()
            return not queued

        await until(all_run)
        kill(first)

        # Counted are the changes that are asked for: how many of them share a statement depends on the weather.
        reached, at, changes = asyncio.Event(), chance.randint(1, 2 * TURNS), 0
        errors: list[str] = []
        transact = PostgresRecordStore.transact

        async def counted(self: PostgresRecordStore, *asked: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes >= at:
                reached.set()
            try:
                return await transact(self, *asked)
            except (Retry, Unconfirmed):
                errors.append(asked[0])
                raise

        gates.open("g")
        monkeypatch.setattr(PostgresRecordStore, "transact", counted)
        # The dead host's readings of its former self are no part of the takeover.
        second: Any = await hosts.open(ScriptedHarness(script, gates=gates), parallelism=16, lease=LEASE)
        await reached.wait()
        await asyncio.to_thread(postgres.stop_immediately)
        # It comes back when the host has met this, in a change or in looking for what to take over next.
        await until(lambda: bool(errors or hosts.errors))
        await asyncio.to_thread(postgres.start)

        for n, turn in enumerate(turns):
            again = second.get_session(SessionKey("app", f"s{n}")).get_turn(turn.turn_id)
            async with asyncio.timeout(300):
                while True:
                    try:
                        assert str(await again.wait(90)) == "done"
                        break
                    except Retry:
                        await asyncio.sleep(0.05)
            view = await again.status()
            assert (view.status, view.recovery) == (TurnStatus.COMPLETED, None), "no Turn pays for it"

        told = [record for record in caplog.records if "is tried again" in record.getMessage()]
        assert len(told) == len(errors), "each error of a Turn is told of, and the change is asked for again"
        assert second._host.asked_again >= len(errors), "and counted, as are the questions that had no answer"

        async def everybody_can_read_it() -> bool:
            explained = await second.get_session(SessionKey("app", "s0")).get_turn(turns[0].turn_id).explain()
            figures = [one.asked_again for one in explained.hosts if one.owner == second.owner]
            return figures == [second._host.asked_again]

        await until(everybody_can_read_it)
