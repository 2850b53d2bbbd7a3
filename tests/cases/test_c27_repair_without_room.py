"""C27: each replica ran the same repair pass and published the same items again and again into a full queue."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.environment import SystemEnvironment
from agentscope_durable.spi.record_store import Reads, ReadyScan
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final
from tests.every_store import STORES, shelf
from tests.runtime.conftest import Hosts, kill, until

BRAINS, LOST, ROUNDS = 5, 100, 60
WORK = SessionKey("app", "work")


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
    harness = ScriptedHarness({"busy": [Stall(gate="busy"), final("busy")], "": [final("done")]}, gates=gates)

    environments = [Rounds() for _ in range(BRAINS)]
    options = {"parallelism": 1, "poll_interval": 0.01}
    brains = [await hosts.open(harness, environment=one, start=False, **options) for one in environments]
    busy = await brains[0].create_session(SessionKey("app", "busy"), "agent")
    for number in range(BRAINS):
        thread = await busy.create_thread(f"busy-{number}", "agent")
        await thread.submit(f"busy-{number}", "busy")
    for brain in brains:
        await brain.start()

    async def owned() -> bool:
        owners = {lease.owner for lease in await store.owners()}
        held = [await store.ready(ReadyScan(keys.READY_LEASE, owner)) for owner in owners]
        return sum(len(page.items) for page in held) == BRAINS

    await until(owned)
    # Nobody has room left. A sixth host has taken a hundred Turns by itself, and dies.
    work = await brains[0].create_session(WORK, "agent")
    turns = []
    for number in range(LOST):
        thread = await work.create_thread(f"t{number:03}", "agent")
        turns.append(await thread.submit(f"r{number}", "go"))

    async def state() -> tuple[int, int, int]:
        records = [await store.inner.read(keys.partition(key), Reads()) for key in (WORK, busy.key)]
        return records[0].rev, records[1].rev, hosts.backend.wakeups().count

    before, transacted = await state(), store.calls["transact"]
    looked = [one.looks for one in environments]
    await until(lambda: all(one.looks - was > ROUNDS for one, was in zip(environments, looked, strict=True)))

    assert await state() == before, "no commit and no hint, however often they looked"
    assert store.calls["transact"] == transacted, "nor did anybody ask for one"

    # With room again, each is run once.
    gates.open("busy")
    for turn in turns:
        assert str(await turn.wait(90)) == "done"
    assert [(await turn.status()).runs for turn in turns] == [1] * LOST


@pytest.mark.case("C27")
async def test_turns_of_a_dead_host_are_left_alone_by_hosts_without_room_and_then_run_on_once(hosts: Hosts) -> None:
    store: Any = hosts.backend.records
    gates = Gates()
    script = {"busy": [Stall(gate="busy"), final("busy")], "": [Stall(gate="lost"), final("done")]}
    harness = ScriptedHarness(script, gates=gates)
    doomed = await hosts.open(harness, parallelism=10, poll_interval=0.01, lease=2.0)
    work = await doomed.create_session(WORK, "agent")
    turns = [await (await work.create_thread(f"t{n}", "agent")).submit(f"r{n}", "go") for n in range(10)]

    async def all_run() -> bool:
        return all([(await turn.status()).status == "RUNNING" for turn in turns])

    await until(all_run)
    environment = Rounds()
    busy = await doomed.create_session(SessionKey("app", "busy"), "agent")
    brain = await hosts.open(harness, parallelism=1, poll_interval=0.01, environment=environment, start=False)
    await busy.submit("busy", "busy")
    await brain.start()
    await gates.reached("busy")
    kill(doomed)

    async def expired() -> bool:
        return not any(lease.alive for lease in await store.owners() if lease.owner == doomed.owner)

    await until(expired)

    async def state() -> int:
        return (await store.inner.read(keys.partition(WORK), Reads())).rev

    before, looked = await state(), environment.looks
    await until(lambda: environment.looks - looked > ROUNDS)
    assert await state() == before

    gates.open("busy")
    gates.open("lost")
    for turn in turns:
        assert str(await turn.wait(90)) == "done"
    assert [(await turn.status()).runs for turn in turns] == [2] * 10
