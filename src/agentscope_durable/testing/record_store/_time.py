"""The store's clock: leases, and work that is due."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.record_store import (
    LEASE_KEPT_MS,
    Change,
    LogRange,
    Reads,
    ReadyRow,
    ReadyScan,
    SessionScan,
    Unchanged,
    View,
)
from agentscope_durable.testing.record_store._stage import NOTHING, StoreStage, always, change, events, read


class TimeContract(StoreStage):
    """What the store promises about time: it judges by its own clock."""

    async def test_timed_now_never_runs_back(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            seen: list[int] = []

            def look(view: View, now_ms: int) -> Change:
                seen.append(now_ms)
                return change(entry=events("e"))

            for _ in range(10):
                await store.transact("p", NOTHING, look)
                records = await store.read("p", Reads(log=LogRange()))
                seen.append(records.now_ms)
                assert records.log[-1].at_ms == seen[-2]
                seen.append((await store.ready(ReadyScan("turn", "c"))).now_ms)
            assert seen == sorted(seen)

    async def test_timed_a_lease_runs_out_by_the_stores_clock(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            lease_ms = 10_000
            store.renew("host-1", lease_ms, b"\x00published")
            store.renew("host-2", 1, b"")
            await self.pass_time(2)

            owners = (await read(store, owners=("host-1", "host-2", "host-3"))).owners
            assert set(owners) == {"host-1", "host-2", "host-3"}
            alive = owners["host-1"]
            assert (alive.owner, alive.alive, alive.value) == ("host-1", True, b"\x00published")
            assert 0 < alive.remaining_ms <= lease_ms
            assert alive.age_ms == lease_ms - alive.remaining_ms
            assert not owners["host-2"].alive
            assert owners["host-2"].remaining_ms <= 0
            assert not owners["host-3"].alive

            store.renew("host-2", lease_ms, b"again")
            assert (await read(store, owners=("host-2",))).owners["host-2"].alive

    async def test_timed_a_decision_sees_the_lease(self, tmp_path: Path) -> None:
        def look(view: View, now_ms: int) -> Unchanged:
            return Unchanged((view.owner("host-1").alive, view.owner("host-2").alive))

        async with self.opened(tmp_path) as store:
            store.renew("host-1", 10_000, b"")
            reads = Reads(owners=("host-1", "host-2"))
            assert (await store.transact("p", reads, look)).receipt == (True, False)

    async def test_timed_a_host_that_is_announced_has_no_lease_yet_and_is_not_dead(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for _ in range(2):
                store.announce("host-1")
            assert (await store.owners(), await store.dead_owners()) == ([], [])

            store.renew("host-1", 10_000, b"")
            assert [lease.owner for lease in await store.owners()] == ["host-1"]
            assert await store.dead_owners() == []
            assert await store.dead_owners(("host-1", "nobody")) == []

            await store.release("host-1")
            store.announce("host-2")
            await store.release("host-2")
            assert (await store.owners(), await store.dead_owners()) == ([], [])

    async def test_timed_a_released_lease_has_expired_at_once(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for owner in ("host-1", "host-2"):
                store.renew(owner, 10_000, b"")
            await store.release("host-1")
            await store.release("never there")

            assert [lease.owner for lease in await store.owners()] == ["host-2"]
            assert not (await read(store, owners=("host-1",))).owners["host-1"].alive

    async def test_timed_the_lease_of_a_host_that_left_nothing_is_forgotten_when_it_is_gone_for_good(
        self, tmp_path: Path
    ) -> None:
        gone, kinds = -2 * LEASE_KEPT_MS, ("lease", "running")
        async with self.opened(tmp_path) as store:
            for owner, lease_ms in (
                ("alive", 10_000),
                ("frozen", -1),
                ("empty", gone),
                ("owner", gone),
                ("hand", gone),
            ):
                store.renew(owner, lease_ms, b"")
            rows = (ReadyRow("lease", "owner", 0, "main"), ReadyRow("running", "hand", 0, "t/c"))
            rows += (ReadyRow("turn", "empty", 0, "main"),)
            await store.transact("p", NOTHING, always(change(ready=rows)))

            forgotten = {
                name: await store.forget(name, kinds) for name in ("alive", "frozen", "empty", "owner", "hand")
            }
            assert forgotten == {"alive": False, "frozen": False, "empty": True, "owner": False, "hand": False}
            assert {lease.owner for lease in await store.owners()} == {"alive", "frozen", "owner", "hand"}

            # What it left was taken over: now it goes. Twice, and by two hosts at once, is fine.
            await store.transact("p", NOTHING, always(change(unready=(("lease", "main"), ("running", "t/c")))))
            found = await asyncio.gather(*(store.forget(name, kinds) for name in ("owner", "owner", "hand", "empty")))
            assert found == [True] * 4
            assert {lease.owner for lease in await store.owners()} == {"alive", "frozen"}

            store.renew("empty", 10_000, b"")
            assert (await read(store, owners=("empty",))).owners["empty"].alive

    async def test_timed_renewing_changes_no_session(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, always(change(entry=events("a"))))
            before = await store.read("p", NOTHING)
            for _ in range(3):
                store.renew("host-1", 10_000, b"x" * 2000)
            after = await store.read("p", NOTHING)

            assert (after.rev, after.next_seq, after.head) == (before.rev, before.next_seq, before.head)
            assert await store.sessions(SessionScan("")) == ["p"]

    async def test_timed_a_lease_is_renewed_from_any_thread_beside_a_queue_of_changes(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            busy = [
                store.transact(f"p{n % 5}", NOTHING, always(change(entry=events("e"), puts=(("k", b"v" * 1000),))))
                for n in range(300)
            ]
            renewals = [SYSTEM.call_in_thread(lambda n=n: store.renew(f"host-{n}", 10_000, b"")) for n in range(4)]
            await asyncio.gather(*busy, *renewals)

            assert [lease.owner for lease in await store.owners() if lease.alive] == [f"host-{n}" for n in range(4)]

    async def test_timed_ready_rows_appear_when_they_are_due(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            now_ms = (await store.read("p", NOTHING)).now_ms
            rows = (ReadyRow("turn", "c", now_ms - 1, "due"), ReadyRow("turn", "c", now_ms + 5_000, "later"))
            soon = ReadyRow("turn", "c", now_ms + 40, "soon")
            await store.transact("p", NOTHING, always(change(ready=(*rows, soon))))

            page = await store.ready(ReadyScan("turn", "c"))
            if page.now_ms < soon.due_ms:
                assert [item.item for item in page.items] == ["due"]
                assert page.next_due_ms == soon.due_ms
            await self.pass_time(40)
            page = await store.ready(ReadyScan("turn", "c"))
            assert [item.item for item in page.items] == ["due", "soon"]
            assert page.next_due_ms == now_ms + 5_000
            assert (await store.ready(ReadyScan("turn", "other"))).next_due_ms is None
