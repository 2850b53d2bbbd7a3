"""C25: replicas with different clocks judged one lease differently, and a fast clock stole work that was in hand.

The part of PostgreSQL: what counts is the server's clock, as a statement finds it, and it may be set forward and back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agentscope_durable.spi.record_store import LogRange, OwnerLease, Reads, RecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.record_store import NOTHING, always, change, events
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.every_store import shelf
from tests.runtime.conftest import KEY, Hosts, texts, until
from tests.servers.fixtures import shared_postgres
from tests.servers.stores import open_postgres, schema_of

pytestmark = [pytest.mark.case("C25"), pytest.mark.spec("BE-23"), pytest.mark.backend("postgres")]

MINUTE = 60_000
HOUR = 60 * MINUTE
LEASE = 30_000


@pytest.fixture
def server() -> ManualClock:
    return ManualClock(10 * HOUR)


@pytest.fixture
async def store(tmp_path: Path, server: ManualClock) -> AsyncGenerator[RecordStore]:
    async with shelf("postgres", tmp_path, server) as place:
        yield await place.records()


async def lease_of(store: RecordStore, owner: str = "host-1") -> OwnerLease:
    [seen] = [lease for lease in await store.owners() if lease.owner == owner]
    assert (await store.read("p", Reads(owners=(owner,)))).owners[owner] == seen, "the same to whoever decides"
    return seen


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_takes_a_lease_away_until_it_is_renewed_and_gives_none_back(
    store: RecordStore, server: ManualClock, jump: int
) -> None:
    store.renew("host-1", LEASE, b"")
    store.renew("dead", LEASE, b"")
    server.advance(LEASE - 1)
    store.renew("host-1", LEASE, b"")
    server.advance(1)
    assert ((await lease_of(store)).alive, (await lease_of(store, "dead")).alive) == (True, False)

    for step in (jump, -jump):
        server.jump(step)
        assert not (await lease_of(store, "dead")).alive
        assert not (await lease_of(store)).alive
        store.renew("host-1", LEASE, b"")
        assert ((await lease_of(store)).alive, (await lease_of(store)).remaining_ms) == (True, LEASE)
    server.advance(LEASE)
    assert not (await lease_of(store)).alive


async def test_a_step_that_is_shorter_than_the_lease_takes_none_away(store: RecordStore, server: ManualClock) -> None:
    store.renew("host-1", LEASE, b"")
    server.advance(10_000)
    for step, left in ((5_000, 15_000), (-5_000, 20_000), (-20_000, LEASE), (-19_999, LEASE)):
        server.jump(step)
        assert ((await lease_of(store)).alive, (await lease_of(store)).remaining_ms) == (True, left)
    # Nor does anybody who dies keep what he has for longer than the step and the lease.
    server.advance(29_999 + LEASE - 1)
    assert (await lease_of(store)).alive
    server.advance(1)
    assert not (await lease_of(store)).alive


async def test_times_never_run_back_nor_stand_still_nor_stay_wrong(store: RecordStore, server: ManualClock) -> None:
    async def now() -> int:
        await store.transact("p", NOTHING, always(change(entry=events("e"))))
        return (await store.read("p", Reads(log=LogRange()))).log[-1].at_ms

    assert await now() == 10 * HOUR
    server.jump(-HOUR)
    assert await now() == 10 * HOUR
    # At half speed, whether it is asked once or often.
    server.advance(1000)
    assert await now() == 10 * HOUR + 500
    for _ in range(10):
        server.advance(100)
        await store.read("p", NOTHING)
    assert await now() == 10 * HOUR + 1000
    # After two hours of it both agree again.
    server.advance(2 * HOUR)
    assert await now() == server() == 11 * HOUR + 2000
    # A process knows of it with the next answer, and is never ahead of the server.
    server.jump(HOUR)
    assert await now() <= server()
    assert await now() == server() == 12 * HOUR + 2000


class OfHost:
    """The clock of a host whose own time is another one; what it hears of the server's is the server's."""

    def __init__(self, server: ManualClock, ahead: int) -> None:
        self._server = server
        self.ahead = ahead

    def __call__(self) -> int:
        return self._server()

    def boot_ms(self) -> int:
        return self._server.boot_ms() + self.ahead


async def test_the_clocks_of_hosts_do_not_matter(tmp_path: Path, server: ManualClock) -> None:
    clocks = [OfHost(server, ahead) for ahead in (-10 * MINUTE, 0, 10 * MINUTE)]
    async with AsyncExitStack() as stack:
        stores = []
        for clock in clocks:
            stores.append(await open_postgres(shared_postgres().dsn(), schema_of(tmp_path), clock))
            stack.push_async_callback(stores[-1].close)

        async def seen() -> set[tuple[int, int]]:
            return {((await store.read("p", NOTHING)).now_ms, (await lease_of(store)).remaining_ms) for store in stores}

        stores[2].renew("host-1", LEASE, b"")
        assert await seen() == {(server(), LEASE)}
        server.advance(10_000)
        assert await seen() == {(server(), LEASE - 10_000)}
        # One stands still for a while, as that of a machine does which is asleep.
        clocks[0].ahead -= HOUR
        server.advance(LEASE - 10_001)
        assert await seen() == {(server(), 1)}
        server.advance(1)
        assert {(await lease_of(store)).alive for store in stores} == {False}


@pytest.mark.parametrize("jump", [2 * HOUR, -2 * HOUR])
async def test_turns_that_a_jump_of_the_clock_takes_from_a_living_host_end_once(
    tmp_path: Path, server: ManualClock, jump: int
) -> None:
    gates = Gates()
    harness = ScriptedHarness([say("kept"), Stall(gate="g"), final("done")], gates=gates)
    async with shelf("postgres", tmp_path, server) as place, AsyncExitStack() as stack:
        hosts = Hosts(await place.backend(), stack)
        # It does not renew while the story is told.
        first = await hosts.open(harness, parallelism=5, lease=HOUR / 1000)
        session = await first.create_session(KEY, "agent")
        threads = [await session.create_thread(f"t{n}", "agent") for n in range(5)]
        turns = [await thread.submit(f"r{n}", "go") for n, thread in enumerate(threads)]

        async def all_are_with(owner: str) -> bool:
            seen = [await texts(thread) for thread in threads]
            leases = [(await turn.status()).lease for turn in turns]
            held = all(lease is not None and lease.owner == owner for lease in leases)
            return held and all(("assistant", "kept") in one for one in seen)

        await until(lambda: all_are_with(first.owner))
        server.jump(jump)
        second = await hosts.open(harness, parallelism=5, lease=HOUR / 1000)
        await until(lambda: all_are_with(second.owner))
        gates.open("g")

        for turn in turns:
            assert str(await turn.wait(90)) == "done"
        assert {[*await turn.list_runs()][-1].owner for turn in turns} == {second.owner}
        assert [await texts(thread) for thread in threads] == [
            [("user", "go"), ("assistant", "kept"), ("assistant", "done")]
        ] * len(threads)
