"""C14: in a rolling restart old and new had one identity; the old one took the work back, and exited with it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import RunStatus
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, local
from tests.every_store import PERSISTENT, shelf
from tests.runtime.conftest import KEY, SECONDS, Hosts, kill, until

NAME = "web-1"
LEASE = 0.5
SCRIPT = {"": [local("look"), Stall(gate="g"), final("done")], "next": [final("next")]}
ORDERS = [
    ("polls", "recovers", "exits"),
    ("recovers", "polls", "exits"),
    ("polls", "exits", "recovers"),
]
"""Of the old host's poll, its exit and the new one's recovery. Who has exited polls no more."""


@pytest.mark.case("C14")
@pytest.mark.spec("LF-01")
@pytest.mark.parametrize("exit", ["cleanly", "killed"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_the_new_host_of_the_name_ends_the_turn_whatever_the_old_one_does(
    backend: str, tmp_path: Path, order: tuple[str, ...], exit: str
) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    async with shelf(backend, tmp_path) as place, AsyncExitStack() as stack:
        hosts = Hosts(await place.backend(), stack)

        async def open_host(gates: Gates) -> DurableRuntime:
            harness = ScriptedHarness(SCRIPT, ledger=ledger, gates=gates)
            options = {"host_name": NAME, "lease": LEASE, "close_timeout": 0.05}
            # As in another process: a connection of its own.
            return await hosts.open(harness, backend=await place.backend(), **options)

        closed, opened = Gates(), Gates()
        opened.open("g")
        old = await open_host(closed)
        session = await old.create_session(KEY, "agent")
        turn = await session.submit("r1", "go")
        await closed.reached("g")
        draining = asyncio.create_task(old.drain(None))
        await until(lambda: old._host.draining)
        # There is work for whoever looks.
        elsewhere = SessionKey("app", "c2")
        following = await (await old.create_session(elsewhere, "agent")).submit("r2", "next")

        new: DurableRuntime | None = None
        for act in order:
            match act:
                case "polls":
                    # A scan that was under way when the draining began.
                    await old._scheduler._scan()
                    assert {run.owner for run in await turn.list_runs()} == {old.owner}
                case "exits" if exit == "cleanly":
                    await old.close()
                case "exits":
                    kill(old)
                case _:
                    new = await open_host(opened)
        assert new is not None and new.owner != old.owner
        assert all(host.owner.startswith(f"{NAME}-") for host in (old, new))

        again = new.get_session(KEY).get_turn(turn.turn_id)
        assert str(await again.wait(SECONDS)) == "done"
        left = RunStatus.RELEASED if exit == "cleanly" else RunStatus.LOST
        runs = [(run.owner, run.status) for run in await again.list_runs()]
        assert runs == [(old.owner, left), (new.owner, RunStatus.COMPLETED)]
        assert ledger.count("tool") == 1

        waiting = new.get_session(elsewhere).get_turn(following.turn_id)
        assert str(await waiting.wait(SECONDS)) == "next"
        assert {run.owner for run in await waiting.list_runs()} == {new.owner}, "who drains claims nothing"
        await old.close()
        await draining
