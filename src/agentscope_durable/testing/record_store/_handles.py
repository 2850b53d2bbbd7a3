"""What is about the handle: opening, closing, event loops, and what every one of them gives back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import HostClosed, WrongLoop
from agentscope_durable.contracts.keys import HOST_PARTITION
from agentscope_durable.contracts.records import RunState, SessionHead, ThreadHead, TurnState
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.record_store import Committed, Reads, ReadyScan, SessionScan, Unchanged, View
from agentscope_durable.testing.record_store._stage import NOTHING, StoreStage, always, change, events


class HandlesContract(StoreStage):
    """What a handle promises."""

    async def test_the_head_comes_back_as_it_was_written(self, tmp_path: Path) -> None:
        turn = TurnState(revision=9, cancel="c", last_step="step")
        thread = ThreadHead(3, "host-1", 7, 5, 6, "turn-1", turn, RunState("run-1", 2, steps=4))
        head = SessionHead("näme", "s\U0001f600", 12, status=ResourceStatus.CLOSED, threads={"main": thread})

        def look(view: View, now_ms: int) -> Unchanged:
            return Unchanged(view.head)

        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, always(change(head=head)))
            assert (await store.transact("p", NOTHING, look)).receipt == head
            assert (await store.transact("p", Reads(fresh=True), look)).receipt == head
            assert (await store.read("p", NOTHING)).head == head

    async def test_the_partition_of_no_session_keeps_records_too(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            store.renew("host-1", 10_000, b"")
            await store.transact(HOST_PARTITION, NOTHING, always(change(puts=(("policy/x", b"1"),), entry=events("e"))))

            records = await store.read(HOST_PARTITION, Reads(keys=("policy/x",)))
            assert (records.keys, records.rev) == ({"policy/x": b"1"}, 1)
            assert [lease.owner for lease in await store.owners()] == ["host-1"]

    async def test_closing_twice_is_fine_and_later_use_raises(self, tmp_path: Path) -> None:
        store = await self.open(tmp_path)
        await store.transact("p", NOTHING, always(change()))
        await asyncio.gather(store.close(), store.close())
        await store.close()

        for ask in (
            lambda: store.transact("p", NOTHING, always(change())),
            lambda: store.read("p", NOTHING),
            lambda: store.ready(ReadyScan("turn", "c")),
            lambda: store.sessions(SessionScan("")),
            lambda: store.owners(),
            lambda: store.dead_owners(),
            lambda: store.release("host-1"),
            lambda: store.forget("host-1", ("lease",)),
        ):
            with pytest.raises(HostClosed):
                await ask()
        for tell in (lambda: store.renew("host-1", 1000, b""), lambda: store.announce("host-1")):
            with pytest.raises(HostClosed):
                tell()

    async def test_a_change_under_way_is_finished_by_close(self, tmp_path: Path) -> None:
        store = await self.open(tmp_path)
        jobs = [asyncio.ensure_future(store.transact("p", NOTHING, always(change()))) for _ in range(20)]
        await asyncio.sleep(0)
        await store.close()

        assert all(isinstance(answer, Committed) for answer in await asyncio.gather(*jobs))

    async def test_another_event_loop_is_served_or_refused_clearly(self, tmp_path: Path) -> None:
        def elsewhere() -> object:
            async def use() -> object:
                committed = await store.transact("p", NOTHING, always(change(entry=events("b"))))
                return committed.first_seq, (await store.read("p", NOTHING)).next_seq

            try:
                return asyncio.run(use())
            except WrongLoop as error:
                return error

        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, always(change(entry=events("a"))))
            answer = await asyncio.wait_for(SYSTEM.call_in_thread(elsewhere), 30)
            assert isinstance(answer, WrongLoop) or answer == (2, 3)
