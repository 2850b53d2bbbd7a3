"""A change: all of it or nothing, beside others, and what became of it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.records import ACTIVE_THREADS_MAX, RunState, SessionHead, ThreadHead, TurnState
from agentscope_durable.spi.record_store import (
    HEAD_MAX_BYTES,
    NEED_ROUNDS_MAX,
    PAGE_MAX,
    Change,
    Committed,
    Entry,
    LogRange,
    Need,
    Range,
    Reads,
    ReadyItem,
    ReadyRow,
    ReadyScan,
    StreamRange,
    Unchanged,
    View,
)
from agentscope_durable.testing.record_store._stage import (
    HEAD,
    NOTHING,
    Refusal,
    StoreStage,
    always,
    change,
    commit_id,
    events,
    read,
)


class ChangesContract(StoreStage):
    """What `transact` promises of one change."""

    # ------------------------------------------------------------ atomic

    async def test_atomic_every_write_of_a_change_is_visible_together(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            entry = Entry(events=b'["a","b"]', count=2, private=b"[1]", journal=b"block", stream="main", at=7)
            committed = await store.transact(
                "p",
                NOTHING,
                always(
                    change(
                        entry=entry,
                        puts=(("turn/1", b"{}"), ("order/1", b"x")),
                        ready=(ReadyRow("turn", "class", 0, "main", "v"),),
                        receipt="done",
                        hints=("session",),
                    )
                ),
            )

            assert committed == Committed("done", 1, True, ("session",))
            records = await read(store, keys=("turn/1", "order/1", "absent"), log=LogRange())
            assert records.head == HEAD
            assert (records.rev, records.next_seq, records.pruned_through) == (1, 3, 0)
            assert records.keys == {"turn/1": b"{}", "order/1": b"x"}
            [row] = records.log
            assert (row.first, row.count, row.rev, row.stream, row.at) == (1, 2, 1, "main", 7)
            assert (row.events, row.private, row.journal) == (b'["a","b"]', b"[1]", b"block")
            assert len(row.commit_id) == 32
            assert 0 < row.at_ms <= records.now_ms
            assert (await store.ready(ReadyScan("turn", "class"))).items == [ReadyItem("p", "main", "v", 0, "class")]

    async def test_atomic_an_error_raised_by_the_decision_writes_nothing(self, tmp_path: Path) -> None:
        def refuse(view: View, now_ms: int) -> Change:
            raise Refusal("no")

        async with self.opened(tmp_path) as store:
            with pytest.raises(Refusal):
                await store.transact("p", NOTHING, refuse)
            assert (await store.read("p", NOTHING)).head is None

            await store.transact("p", NOTHING, always(change(entry=events("a"))))
            with pytest.raises(Refusal):
                await store.transact("p", NOTHING, refuse)
            records = await store.read("p", NOTHING)
            assert (records.rev, records.next_seq) == (1, 2)

    async def test_atomic_a_change_that_is_refused_writes_nothing(self, tmp_path: Path) -> None:
        thread = ThreadHead(1, "o" * (HEAD_MAX_BYTES // ACTIVE_THREADS_MAX), 0, 0, 0, "t", TurnState(), RunState())
        too_large = SessionHead("test", "s", 1, threads={str(n): thread for n in range(ACTIVE_THREADS_MAX)})
        defects = [
            Change(head=too_large, commit_id=commit_id(), puts=(("k", b"v"),)),
            Change(head=HEAD, commit_id="not hexadecimal", puts=(("k", b"v"),)),
            change(entry=Entry(events=b"[1]", count=0), puts=(("k", b"v"),)),
            change(entry=Entry(events=b"", count=1), puts=(("k", b"v"),)),
        ]
        async with self.opened(tmp_path) as store:
            for defect in defects:
                with pytest.raises(DurableError):
                    await store.transact("p", NOTHING, always(defect))
            records = await read(store, keys=("k",))
            assert records.head is None
            assert records.keys == {}

    async def test_atomic_a_repeated_request_changes_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, always(change(entry=events("a"))))

            committed = await store.transact("p", NOTHING, always(Unchanged("the first receipt")))

            assert committed == Committed("the first receipt", 0, False)
            assert (await store.read("p", NOTHING)).rev == 1

    async def test_atomic_a_record_is_replaced_and_deleted(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, always(change(puts=(("a", b"1"), ("b", b"1"), ("c", b"1")))))
            await store.transact("p", NOTHING, always(change(puts=(("a", b"2"), ("b", None), ("absent", None)))))

            assert (await read(store, keys=("a", "b", "c"))).keys == {"a": b"2", "c": b"1"}

    # ------------------------------------------------------------ isolated

    async def test_isolated_no_change_of_a_partition_is_lost(self, tmp_path: Path) -> None:
        def count(view: View, now_ms: int) -> Change:
            number = int(view.get("counter") or b"0") + 1
            return change(puts=(("counter", str(number).encode()),), entry=events(str(number)), receipt=number)

        async with self.opened(tmp_path) as store:
            done = await asyncio.gather(*(store.transact("p", Reads(keys=("counter",)), count) for _ in range(200)))

            assert sorted(one.receipt for one in done) == list(range(1, 201))  # type: ignore[type-var]
            assert (await read(store, keys=("counter",))).keys == {"counter": b"200"}
            assert all(one.receipt == one.first_seq for one in done)

    async def test_isolated_each_change_decides_on_what_the_former_wrote(self, tmp_path: Path) -> None:
        everything = Range("item/", limit=PAGE_MAX)
        reads = Reads(keys=("last",), ranges=(everything,))

        def append(view: View, now_ms: int) -> Change:
            page = view.page(everything)
            number = len(page)
            assert view.next_seq == number + 1
            assert (view.head is None) == (number == 0)
            assert view.head is None or view.head.created_ms == number
            assert view.get("last") == (str(number).encode() if number else None)
            assert [key for key, _ in page] == [f"item/{n:06d}" for n in range(1, number + 1)]
            return change(
                head=SessionHead("test", "s", number + 1),
                puts=((f"item/{number + 1:06d}", b"x"), ("last", str(number + 1).encode())),
                entry=events("e"),
            )

        async with self.opened(tmp_path) as store:
            await asyncio.gather(*(store.transact("p", reads, append) for _ in range(60)))

            assert (await store.read("p", NOTHING)).rev == 60

    async def test_isolated_partitions_do_not_see_each_other(self, tmp_path: Path) -> None:
        names = [
            "a",
            "a\x00",
            "a\x00b",
            "A",
            "ä",
            "a\u0308",
            "../a",
            "a/b",
            "a%2Fb",
            "CON",
            "a.",
            "\U0001f600",
            "x" * 513,
        ]
        async with self.opened(tmp_path) as store:
            for name in names:
                await store.transact(name, NOTHING, always(change(puts=(("k", name.encode()),), entry=events("e"))))

            for name in names:
                records = await store.read(name, Reads(keys=("k",), ranges=(Range("k"),)))
                assert records.keys == {"k": name.encode()}
                assert records.ranges == {Range("k"): [("k", name.encode())]}
                assert (records.rev, records.next_seq) == (1, 2)

    async def test_isolated_a_reading_is_one_moment(self, tmp_path: Path) -> None:
        """Head, records and log of one `read` agree, however many changes run beside it."""

        def step(view: View, now_ms: int) -> Change:
            n = view.next_seq
            return change(
                head=SessionHead("test", "s", n),
                puts=(("n", str(n).encode()),),
                entry=Entry(b"[1]", 1, stream="m", at=n),
            )

        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, step)

            async def write() -> None:
                for _ in range(50):
                    await store.transact("p", NOTHING, step)

            async def look() -> None:
                for _ in range(25):
                    records = await read(store, keys=("n",), log=LogRange(limit=PAGE_MAX), streams=(StreamRange("m"),))
                    assert records.head is not None
                    seen = records.head.created_ms
                    assert records.keys == {"n": str(seen).encode()}
                    assert records.next_seq == seen + 1
                    assert len(records.log) == records.rev == seen
                    assert [row.at for row in records.streams[StreamRange("m")]] == list(range(1, seen + 1))

            await asyncio.gather(write(), look(), write(), look())

    # ------------------------------------------------------------ durable

    async def test_durable_what_was_written_is_there_after_opening_again(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await store.transact(
                "p",
                NOTHING,
                always(change(entry=events("a", "b"), puts=(("k", b"v"),), ready=(ReadyRow("turn", "c", 0, "i"),))),
            )
        async with self.opened(tmp_path) as store:
            records = await read(store, keys=("k",), log=LogRange())
            page = await store.ready(ReadyScan("turn", "c"))
            if store.capabilities.persistent:
                assert (records.head, records.rev, records.next_seq) == (HEAD, 1, 3)
                assert records.keys == {"k": b"v"}
                assert [row.events for row in records.log] == [b'["a","b"]']
                assert [item.item for item in page.items] == ["i"]
                assert (await store.transact("p", NOTHING, always(change(entry=events("c"))))).first_seq == 3
            else:
                assert records.head is None
                assert page.items == []

    async def test_durable_what_was_written_is_there_though_nobody_closed_the_store(self, tmp_path: Path) -> None:
        """As after a `kill -9`: what is only written when it is closed was never written."""
        here, there = tmp_path / "here", tmp_path / "there"
        here.mkdir()
        async with self.opened(here) as store:
            if not store.capabilities.persistent:
                return
            await store.transact("p", NOTHING, always(change(entry=events("a"), puts=(("k", b"v"),))))
            store.renew("host-1", 60_000, b"published")
            if not store.capabilities.shared:
                # Its files as they are at this moment, on another machine.
                shutil.copytree(here, there)
            async with self.opened(here if store.capabilities.shared else there) as again:
                records = await read(again, keys=("k",), log=LogRange())
                assert (records.keys, [row.events for row in records.log]) == ({"k": b"v"}, [b'["a"]'])
                assert [lease.value for lease in await again.owners()] == [b"published"]

    async def test_durable_a_second_handle_sees_the_same_records(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as first, self.opened(tmp_path) as second:
            await first.transact("p", NOTHING, always(change(entry=events("a"))))
            if not first.capabilities.shared:
                assert (await second.read("p", NOTHING)).head is None
                return
            done: list[Committed] = []
            for store in (first, second, second, first):
                done.append(await store.transact("p", NOTHING, always(change(entry=events("x")))))

            assert [one.first_seq for one in done] == [2, 3, 4, 5]
            assert (await first.read("p", NOTHING)).rev == (await second.read("p", NOTHING)).rev == 5

    # ------------------------------------------------------------ honest

    async def test_honest_a_lost_answer_is_settled_by_the_commit_id(self, tmp_path: Path) -> None:
        """The caller is gone before the answer; the commit id tells what happened, whoever wrote since."""
        mine = change(entry=events("mine"))
        async with self.opened(tmp_path) as store:
            before = await store.transact("p", NOTHING, always(change(entry=events("before"))))
            call = asyncio.ensure_future(store.transact("p", NOTHING, always(mine)))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await store.transact("p", NOTHING, always(change(entry=events("another writer"))))

            records = await read(store, log=LogRange(after=before.first_seq))

            found = [row for row in records.log if row.commit_id == mine.commit_id]
            assert len(found) == records.rev - 2
            assert [row.events for row in found] == [b'["mine"]'] * len(found)

    # ------------------------------------------------------------ repeatable

    async def test_repeatable_what_was_not_declared_is_asked_for(self, tmp_path: Path) -> None:
        page = Range("turn/")

        def wants_more(view: View, now_ms: int) -> Unchanged:
            return Unchanged((view.get("a"), view.page(page), view.owner("host-1").alive))

        async with self.opened(tmp_path) as store:
            store.renew("host-1", 10_000, b"")
            await store.transact("p", NOTHING, always(change(puts=(("a", b"1"), ("turn/1", b"t")))))

            assert (await store.transact("p", NOTHING, wants_more)).receipt == (b"1", [("turn/1", b"t")], True)

    async def test_repeatable_only_the_last_answer_is_written(self, tmp_path: Path) -> None:
        rounds: list[int] = []

        def decide(view: View, now_ms: int) -> Change:
            rounds.append(view.next_seq)
            if len(rounds) <= NEED_ROUNDS_MAX:
                raise Need(Reads(keys=(f"k{len(rounds)}",)))
            assert [view.get(f"k{n}") for n in range(1, len(rounds))] == [None] * NEED_ROUNDS_MAX
            return change(entry=events(f"round {len(rounds)}"))

        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, decide)

            records = await store.read("p", Reads(log=LogRange()))
            assert [row.events for row in records.log] == [f'["round {NEED_ROUNDS_MAX + 1}"]'.encode()]
            assert records.rev == 1

    async def test_repeatable_a_decision_cannot_ask_for_ever(self, tmp_path: Path) -> None:
        rounds: list[int] = []

        def insatiable(view: View, now_ms: int) -> Change:
            rounds.append(1)
            raise Need(Reads(keys=(f"k{len(rounds)}",)))

        async with self.opened(tmp_path) as store:
            with pytest.raises(DurableError):
                await store.transact("p", NOTHING, insatiable)
            assert len(rounds) == NEED_ROUNDS_MAX + 1
            assert (await store.read("p", NOTHING)).head is None

    # ------------------------------------------------------------ fair

    async def test_fair_one_partitions_failure_is_its_own(self, tmp_path: Path) -> None:
        def refuse(view: View, now_ms: int) -> Change:
            raise Refusal(str(view.next_seq))

        oversized = Change(head=HEAD, commit_id="too short")
        async with self.opened(tmp_path) as store:
            jobs: list[asyncio.Future[Committed]] = []
            for n in range(120):
                decide = (always(change(entry=events("e"))), refuse, always(oversized), always(Unchanged(1)))[n % 4]
                jobs.append(asyncio.ensure_future(store.transact(f"p{n % 8}", NOTHING, decide)))
            done = await asyncio.gather(*jobs, return_exceptions=True)

            for n, answer in enumerate(done):
                expected = (Committed, Refusal, DurableError, Committed)[n % 4]
                assert isinstance(answer, expected), (n, answer)
            for name in ("p0", "p4"):
                assert (await store.read(name, NOTHING)).next_seq == 16

    async def test_fair_a_cancelled_caller_harms_no_other(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            jobs = [
                asyncio.ensure_future(store.transact("p", NOTHING, always(change(entry=events("e")))))
                for _ in range(40)
            ]
            await asyncio.sleep(0)
            for job in jobs[::2]:
                job.cancel()
            done = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(answer, Committed) for answer in done[1::2])

            # Whatever became of the cancelled ones, they are whole, and the numbers are dense.
            await store.transact("p", NOTHING, always(change(entry=events("last"))))
            records = await store.read("p", Reads(log=LogRange(limit=PAGE_MAX)))
            assert [row.first for row in records.log] == list(range(1, records.next_seq))
            assert records.rev >= 21
