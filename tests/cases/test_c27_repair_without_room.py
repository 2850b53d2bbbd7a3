"""C27: each replica ran the same repair pass and published the same items again and again into a full queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.environment import SystemEnvironment
from agentscope_durable.spi.record_store import Reads, ReadyScan
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final
from tests.every_store import STORES, shelf
from tests.runtime.conftest import Hosts, kill, until

BRAINS, LOST, QUEUED, ROUNDS = 5, 100, 10, 60
WORK = [SessionKey("app", f"work-{number}") for number in range(2)]
"""A Session has at most 64 Threads at work."""


class Rounds(SystemEnvironment):
    """Counts how often its host has looked at the time, as it does in every round."""

    def __init__(self) -> None:
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return super().monotonic()


class Published(LocalWakeups):
    """Hints, counted."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def publish(self, keys: tuple[str, ...]) -> None:
        self.count += len(keys)
        super().publish(keys)


@pytest.fixture(params=STORES)
async def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Hosts]:
    async with shelf(request.param, tmp_path) as place, AsyncExitStack() as stack:
        backend: Any = await place.backend(wakeups=Published())
        backend._records = FaultyRecordStore(backend.records)
        yield Hosts(backend, stack)


@pytest.mark.case("C27")
@pytest.mark.spec("BE-13", "RT-36")
async def test_hosts_without_room_write_nothing_over_what_waits_for_them(hosts: Hosts) -> None:
    store: Any = hosts.backend.records
    gates = Gates()
    scripts = {
        "busy": [Stall(gate="busy"), final("busy")],
        "begun": [Stall(gate="lost"), final("done")],
        "": [final("done")],
    }
    harness = ScriptedHarness(scripts, gates=gates)

    environments = [Rounds() for _ in range(BRAINS)]
    options = {"parallelism": 1, "poll_interval": 0.01}
    brains = [await hosts.open(harness, environment=one, start=False, **options) for one in environments]
    busy = await brains[0].create_session(SessionKey("app", "busy"), "agent")
    for number in range(BRAINS):
        thread = await busy.create_thread(f"busy-{number}", "agent")
        await thread.submit(f"busy-{number}", "busy")
    for brain in brains:
        await brain.start()

    async def in_hand(*owners: str) -> int:
        held = [await store.ready(ReadyScan(keys.READY_LEASE, owner, None, 2 * LOST)) for owner in owners]
        return sum(len(page.items) for page in held)

    async def all_busy() -> bool:
        return await in_hand(*(brain.owner for brain in brains)) == BRAINS

    await until(all_busy)
    # Nobody has room left. A sixth host takes a hundred Turns by itself, and dies; ten more nobody has begun.
    doomed = await hosts.open(harness, parallelism=LOST, poll_interval=0.5, lease=2.0)
    work = [await doomed.create_session(key, "agent") for key in WORK]

    async def submitted(number: int, asked: str) -> Any:
        name = f"{asked}-{number}"
        thread = await work[number % 2].create_thread(name, "agent")
        return await thread.submit(name, asked)

    lost = [await submitted(number, "begun") for number in range(LOST)]
    # Each is asked until it runs, and not again: it runs until its gate is opened.
    waiting = list(lost)

    async def all_run() -> bool:
        while waiting and (await waiting[-1].status()).status is TurnStatus.RUNNING:
            waiting.pop()
        return not waiting

    await until(all_run)
    kill(doomed)
    queued = [await submitted(number, "go") for number in range(QUEUED)]

    async def expired() -> bool:
        return not any(lease.alive for lease in await store.owners() if lease.owner == doomed.owner)

    await until(expired)
    assert await in_hand(doomed.owner) == LOST

    async def state() -> tuple[list[int], int]:
        records = [await store.inner.read(keys.partition(key), Reads()) for key in (*WORK, busy.key)]
        return [one.rev for one in records], hosts.backend.wakeups().count

    before, transacted = await state(), store.calls["transact"]
    looked = [one.looks for one in environments]
    await until(lambda: all(one.looks - was > ROUNDS for one, was in zip(environments, looked, strict=True)))

    assert await state() == before, "no commit and no hint, however often they looked"
    assert store.calls["transact"] == transacted, "nor did anybody ask for one"

    # With room again, each is run once more, or once.
    gates.open("busy")
    gates.open("lost")
    for turn in (*lost, *queued):
        assert str(await turn.wait(90)) == "done"
    assert [(await turn.status()).runs for turn in (*lost, *queued)] == [2] * LOST + [1] * QUEUED
