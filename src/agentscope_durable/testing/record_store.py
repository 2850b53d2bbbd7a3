"""The contract of a `RecordStore`: every promise of the port, as tests.

A provider's whole test file is a subclass::

    class TestMyRecordStore(RecordStoreContract):
        async def open(self, place: Path) -> RecordStore:
            return await MyRecordStore.open(place / "store")

The tests are coroutines: run them with pytest-asyncio. `pass_time` is worth overriding where the
store's clock can be moved by hand; without that the suite waits a few milliseconds of real time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import DurableError, HostClosed, InvalidRequest, WrongLoop
from agentscope_durable.contracts.keys import HOST_PARTITION
from agentscope_durable.contracts.records import ACTIVE_THREADS_MAX, RunState, SessionHead, ThreadHead, TurnState
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.record_store import (
    HEAD_MAX_BYTES,
    LEASE_KEPT_MS,
    NEED_ROUNDS_MAX,
    PAGE_MAX,
    Change,
    Column,
    Committed,
    Decide,
    Entry,
    Erase,
    LogRange,
    LogRow,
    Need,
    PartitionSize,
    Prune,
    Range,
    Reads,
    ReadyItem,
    ReadyRow,
    ReadyScan,
    Records,
    RecordStore,
    SessionScan,
    StreamRange,
    Unchanged,
    View,
)

_commits = itertools.count(1)

HEAD = SessionHead(namespace="test", session_id="s", created_ms=1)
NOTHING = Reads()


class Refusal(Exception):
    """What a decision of these tests raises."""


def commit_id() -> str:
    return f"{next(_commits):032x}"


def events(*texts: str) -> Entry:
    """An entry with one event per text."""
    array = "[" + ",".join(f'"{text}"' for text in texts) + "]"
    return Entry(events=array.encode() if texts else b"", count=len(texts))


def change(
    *,
    head: SessionHead = HEAD,
    entry: Entry | None = None,
    puts: tuple[tuple[str, bytes | None], ...] = (),
    ready: tuple[ReadyRow, ...] = (),
    unready: tuple[tuple[str, str], ...] = (),
    receipt: object = None,
    hints: tuple[str, ...] = (),
    prune: Prune | None = None,
    erase: Erase | None = None,
) -> Change:
    return Change(
        head=head,
        commit_id=commit_id(),
        entry=entry,
        puts=puts,
        ready=ready,
        unready=unready,
        receipt=receipt,
        hints=hints,
        prune=prune,
        erase=erase,
    )


def always(answer: Change | Unchanged) -> Decide:
    return lambda view, now_ms: answer


class RecordStoreContract:
    """Subclass it, give it `open`, and every promise is checked under the name it has in the port."""

    pytestmark = pytest.mark.asyncio

    async def open(self, place: Path) -> RecordStore:
        """Open a store at `place`. Called again for the same place, it opens the same records again."""
        raise NotImplementedError

    async def pass_time(self, milliseconds: int) -> None:
        """Let at least this much time pass on the store's clock."""
        await SYSTEM.sleep((milliseconds + 1) / 1000)

    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncGenerator[RecordStore]:
        store = await self.open(place)
        try:
            yield store
        finally:
            await store.close()

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

    # ------------------------------------------------------------ numbered

    async def test_numbered_events_are_dense_in_commit_order(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            counts = [0, 1, 3, 0, 2, 0, 0, 5, 1]
            jobs = [
                store.transact(name, NOTHING, always(change(entry=events(*"e" * count) if count else None)))
                for name in ("p", "q")
                for count in counts
            ]
            done = await asyncio.gather(*jobs)

            for name, answers in (("p", done[: len(counts)]), ("q", done[len(counts) :])):
                records = await store.read(name, Reads(log=LogRange(limit=PAGE_MAX)))
                expected = 1
                for row in records.log:
                    assert row.first == expected
                    expected += row.count
                assert records.next_seq == expected == sum(counts) + 1
                assert records.rev == len(counts)
                assert [row.rev for row in records.log] == sorted(row.rev for row in records.log)
                assert [bool(one.first_seq) for one in answers] == [bool(count) for count in counts]

    async def test_numbered_a_reader_that_resumes_at_its_cursor_misses_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            seen: list[int] = []
            writing = True

            async def write(count: int) -> None:
                for _ in range(20):
                    await store.transact("p", NOTHING, always(change(entry=events(*"e" * count))))

            async def follow() -> None:
                last = False
                while not last:
                    last = not writing
                    await asyncio.sleep(0)
                    for row in (await store.read("p", Reads(log=LogRange(after=seen[-1] if seen else 0)))).log:
                        seen.extend(range(row.first, row.first + row.count))

            following = asyncio.ensure_future(follow())
            await asyncio.gather(*(write(count) for count in (1, 2, 3, 1, 2, 3, 1, 2)))
            writing = False
            await following

            assert seen == list(range(1, 20 * 15 + 1))

    async def test_numbered_watermarks_tell_the_last_event_of_each(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            assert await store.watermarks(["p", ""]) == [0, 0]
            for count in (3, 0, 2):
                entry = events(*"e" * count) if count else None
                await store.transact("p", NOTHING, always(change(entry=entry)))
                await store.transact("q", NOTHING, always(change(entry=None)))

            assert await store.watermarks(["nobody", "q", "p", "p"]) == [0, 0, 5, 5]
            assert await store.watermarks([]) == []
            many = [f"s{number}" for number in range(PAGE_MAX)]
            assert await store.watermarks(many) == [0] * PAGE_MAX

    async def test_numbered_a_log_page_begins_with_the_row_that_holds_the_next_event(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for count in (3, 0, 2, 0, 0, 1):  # events 1-3, 4-5, 6
                entry = Entry(events=b"[]", count=count) if count else Entry(private=b"[1]")
                await store.transact("p", NOTHING, always(change(entry=entry)))

            async def firsts(log: LogRange) -> list[int]:
                return [row.first for row in (await store.read("p", Reads(log=log))).log]

            assert await firsts(LogRange()) == [1, 4, 6]
            assert await firsts(LogRange(after=1)) == [1, 4, 6]
            assert await firsts(LogRange(after=2)) == [1, 4, 6]
            assert await firsts(LogRange(after=3)) == [4, 6]
            assert await firsts(LogRange(after=5)) == [6]
            assert await firsts(LogRange(after=6)) == []
            assert await firsts(LogRange(after=1, limit=2)) == [1, 4]
            assert await firsts(LogRange(through=3)) == [1]
            assert await firsts(LogRange(through=5)) == [1, 4]
            assert await firsts(LogRange(after=4, through=5)) == [4]
            assert await firsts(LogRange(after=3, through=3)) == []

    async def test_numbered_a_stream_is_read_by_position(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for at in range(1, 8):
                entry = Entry(journal=f"block {at}".encode(), stream="main", at=at)
                await store.transact("p", NOTHING, always(change(entry=entry)))
                await store.transact("p", NOTHING, always(change(entry=Entry(b"[1]", 1, stream="other", at=at * 10))))
                await store.transact("p", NOTHING, always(change(entry=events("x"))))

            asked = {
                StreamRange("main"): [1, 2, 3, 4, 5, 6, 7],
                StreamRange("main", first=3, last=5): [3, 4, 5],
                StreamRange("main", first=6): [6, 7],
                StreamRange("main", last=2): [1, 2],
                StreamRange("main", first=2, limit=2): [2, 3],
                StreamRange("other", first=30, last=41): [30, 40],
                StreamRange("absent"): [],
            }
            found = (await store.read("p", Reads(streams=tuple(asked)))).streams
            assert {r: [row.at for row in rows] for r, rows in found.items()} == asked
            assert [row.journal for row in found[StreamRange("main", last=2)]] == [b"block 1", b"block 2"]
            assert [row.count for row in found[StreamRange("other", first=30, last=41)]] == [1, 1]

    # ------------------------------------------------------------ pruned

    async def _four_rows(self, store: RecordStore) -> None:
        """Events 1-2, 3-4, 5-6 and 7-8, and a row without events between each two."""
        for n in range(1, 5):
            entry = Entry(b'["a","b"]', 2, private=b"p", journal=b"j", stream="main", at=n)
            await store.transact("p", NOTHING, always(change(entry=entry)))
            await store.transact("p", NOTHING, always(change(entry=Entry(private=b"between"))))

    async def test_pruned_events_are_gone_and_the_rows_keep_their_numbers_and_the_rest(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await self._four_rows(store)

            async def state() -> tuple[int, dict[int, bytes]]:
                records = await store.read("p", Reads(log=LogRange(), streams=(StreamRange("main"),)))
                stream = records.streams[StreamRange("main")]
                assert [(row.first, row.count, row.private, row.journal) for row in stream] == [
                    (first, 2, b"p", b"j") for first in (1, 3, 5, 7)
                ]
                left = {row.first: row.events for row in stream if row.events}
                assert {row.first: row.events for row in records.log} == left, "a row without events is in no log page"
                return records.pruned_through, left

            whole, left = b'["a","b"]', b'[null,"b"]'
            await store.transact("p", NOTHING, always(change(prune=Prune(4, ((1, b""), (3, left))))))
            assert await state() == (4, {3: left, 5: whole, 7: whole})
            await store.transact("p", NOTHING, always(change(prune=Prune(6))))
            assert await state() == (6, {3: left, 5: whole, 7: whole})
            # Again, and with a row that was pruned before; and what was written last in the same change stays.
            entry = Entry(b'["next"]', 1, private=b"p", journal=b"j", stream="next", at=1)
            last = change(entry=entry, prune=Prune(8, ((3, b""), (5, b""), (7, b""))))
            assert (await store.transact("p", NOTHING, always(last))).first_seq == 9
            records = await store.read("p", Reads(log=LogRange(), streams=(StreamRange("main"),)))
            assert [(row.first, row.events) for row in records.log] == [(9, b'["next"]')]
            assert [row.events for row in records.streams[StreamRange("main")]] == [b"", b"", b"", b""]
            assert records.pruned_through == 8

    async def test_pruned_what_is_pruned_stays_so_and_what_is_not_written_is_not_pruned(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await self._four_rows(store)
            await store.transact("p", NOTHING, always(change(prune=Prune(4))))

            for wrong in (Prune(3), Prune(9), Prune(6, ((7, b""),)), Prune(6, ((0, b""),))):
                with pytest.raises(InvalidRequest):
                    await store.transact("p", NOTHING, always(change(entry=events("no"), prune=wrong)))
            records = await store.read("p", NOTHING)
            assert (records.pruned_through, records.next_seq) == (4, 9)

    async def test_pruned_a_decision_sees_the_log_it_prunes(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await self._four_rows(store)
            page = LogRange(after=2, through=6, columns=(Column.EVENTS,))
            seen: list[tuple[int, list[LogRow]]] = []

            def look(view: View, now_ms: int) -> Change:
                seen.append((view.pruned_through, view.log(page)))
                return change(prune=Prune(4, ((3, b""),)))

            await store.transact("p", NOTHING, look)
            await store.transact("p", NOTHING, look)

            [(before, rows), (after, again)] = seen
            assert (before, after) == (0, 4)
            assert [(row.first, row.count, row.events) for row in rows] == [(3, 2, b'["a","b"]'), (5, 2, b'["a","b"]')]
            assert [row.first for row in again] == [5]

    # ------------------------------------------------------------ erased

    async def test_erased_the_oldest_rows_of_the_log_go_whole_and_the_numbers_go_on(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await self._four_rows(store)  # 8 rows: each second one without events
            stream = StreamRange("main")

            async def left() -> tuple[list[int], list[int], int]:
                records = await store.read("p", Reads(log=LogRange(), streams=(stream,)))
                assert (await store.measure("p")).commits <= records.rev
                return [row.first for row in records.log], [row.at for row in records.streams[stream]], records.rev

            await store.transact("p", NOTHING, always(change(erase=Erase(3))))
            assert await left() == ([5, 7], [3, 4], 9)
            assert (await store.measure("p")).commits == 9 - 3
            # More than there are; and what the same change writes stays.
            entry = Entry(b'["last"]', 1, stream="main", at=9)
            last = await store.transact("p", NOTHING, always(change(entry=entry, erase=Erase(PAGE_MAX))))
            assert last.first_seq == 9
            assert await left() == ([9], [9], 10)
            assert (await store.measure("p")).commits == 1
            assert (await store.transact("p", NOTHING, always(change(entry=events("next"))))).first_seq == 10
            assert await store.sessions(SessionScan("")) == ["p"]

    async def test_erased_a_decision_knows_how_many_rows_there_are(self, tmp_path: Path) -> None:
        """It counts: `rev` rows were written, and of what was erased it keeps the sum itself."""

        def drop(view: View, now_ms: int) -> Change:
            return change(erase=Erase(2), receipt=view.rev)

        async with self.opened(tmp_path) as store:
            assert (await store.transact("p", NOTHING, drop)).receipt == 0
            await store.transact("p", NOTHING, always(change()))
            await store.transact("p", NOTHING, always(change()))
            assert (await store.transact("p", NOTHING, drop)).receipt == 3
            done = await asyncio.gather(*(store.transact("p", NOTHING, drop) for _ in range(3)))
            assert {one.receipt for one in done} == {4, 5, 6}
            # Written 7: 2 were erased by the second, and then each erased what there was, and left its own.
            assert (await store.measure("p")).commits == 1

    async def test_erased_ready_rows_go_by_kind_and_those_of_others_stay(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            rows = tuple(ReadyRow(kind, "c", 1, item) for kind in ("turn", "lease", "kept") for item in ("a", "b"))
            for name in ("p", "q"):
                await store.transact(name, NOTHING, always(change(entry=events("e"), ready=rows)))
            new = (ReadyRow("turn", "c", 1, "new"),)
            await store.transact("p", NOTHING, always(change(ready=new, erase=Erase(0, ("turn", "lease")))))

            found: dict[str, list[tuple[str, str]]] = {}
            for kind in ("turn", "lease", "kept"):
                items = (await store.ready(ReadyScan(kind, "c"))).items
                found[kind] = sorted((item.partition, item.item) for item in items)
            others = [("q", "a"), ("q", "b")]
            assert found == {
                "turn": [("p", "new"), *others],
                "lease": others,
                "kept": [("p", "a"), ("p", "b"), *others],
            }
            assert [row.first for row in (await read(store, log=LogRange())).log] == [1]

    async def test_erased_what_is_refused_erases_nothing(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await self._four_rows(store)
            defects = (
                change(erase=Erase(PAGE_MAX + 1)),
                change(erase=Erase(-1)),
                change(erase=Erase(3), prune=Prune(100)),
                change(erase=Erase(3), entry=Entry(events=b"", count=1)),
            )
            for defect in defects:
                with pytest.raises(InvalidRequest):
                    await store.transact("p", NOTHING, always(defect))
            assert (await store.measure("p")).commits == 8

    async def test_bounded_a_reading_holds_the_columns_that_were_asked_for(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await self._four_rows(store)
            for columns in ((), (Column.EVENTS,), (Column.JOURNAL,), (Column.PRIVATE, Column.JOURNAL)):
                log = LogRange(columns=columns, limit=1)
                stream = StreamRange("main", columns=columns, limit=1)
                records = await store.read("p", Reads(log=log, streams=(stream,)))
                whole = {Column.EVENTS: b'["a","b"]', Column.PRIVATE: b"p", Column.JOURNAL: b"j"}
                for row in (*records.log, *records.streams[stream]):
                    assert (row.first, row.count, row.stream, row.at) == (1, 2, "main", 1)
                    assert {column: getattr(row, column) for column in whole} == {
                        column: value if column in columns else b"" for column, value in whole.items()
                    }

    # ------------------------------------------------------------ timed

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

    # ------------------------------------------------------------ bounded

    async def test_bounded_a_page_of_records_is_in_order_of_keys(self, tmp_path: Path) -> None:
        keys = [
            "a/1",
            "a/10",
            "a/2",
            "a/%2F",
            "a/é",
            "a/\U0001f600",
            "a/\U0010ffff",
            "a/\U0010ffff\U0010ffff",
            "a",
            "a0",
            "b/1",
            "A/1",
        ]
        async with self.opened(tmp_path) as store:
            await store.transact("p", NOTHING, always(change(puts=tuple((key, key.encode()) for key in keys))))
            inside = sorted(key for key in keys if key.startswith("a/"))
            asked = {
                Range("a/"): inside,
                Range("a/", limit=3): inside[:3],
                Range("a/", after=inside[2], limit=3): inside[3:6],
                Range("a/", after=inside[-1]): [],
                Range("a/\U0010ffff"): inside[-2:],
                Range("", limit=PAGE_MAX): sorted(keys),
                Range("", after="b"): ["b/1"],
                Range("absent"): [],
            }
            ranges = (await store.read("p", Reads(ranges=tuple(asked)))).ranges
            assert {r: [key for key, _ in page] for r, page in ranges.items()} == asked

            def look(view: View, now_ms: int) -> Unchanged:
                return Unchanged({r: [key for key, _ in view.page(r)] for r in asked})

            assert (await store.transact("p", Reads(ranges=tuple(asked)), look)).receipt == asked

    async def test_bounded_ready_work_is_paged_oldest_first(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for n in range(6):
                rows = tuple(ReadyRow("turn", "c", 100 + n % 3, f"i{m}", f"{n}/{m}") for m in range(2))
                others = (ReadyRow("turn", "other", 1, "x"), ReadyRow("dispatch", "c", 1, "y"))
                await store.transact(f"p{n}", NOTHING, always(change(ready=rows + others)))

            found: list[ReadyItem] = []
            after: tuple[int, str, str] | None = None
            while items := (await store.ready(ReadyScan("turn", "c", after=after, limit=5))).items:
                assert len(items) <= 5
                found += items
                after = (items[-1].due_ms, items[-1].partition, items[-1].item)

            assert [item.due_ms for item in found] == sorted(item.due_ms for item in found)
            assert sorted((item.partition, item.item, item.value) for item in found) == [
                (f"p{n}", f"i{m}", f"{n}/{m}") for n in range(6) for m in range(2)
            ]
            assert {item.klass for item in found} == {"c"}

    async def test_bounded_classes_of_ready_work_are_listed_once_each_by_prefix(self, tmp_path: Path) -> None:
        classes = ["a\x1fv1", "a\x1fv2", "a\x1f\U0010ffff", "ab\x1fv1", "b"]
        async with self.opened(tmp_path) as store:
            for number in range(4):
                rows = [ReadyRow("turn", klass, number, klass) for klass in classes]
                rows.append(ReadyRow("dispatch", "a\x1fother", number, "x"))
                # Far in the future, and listed all the same: it says where to look, not what is due.
                rows.append(ReadyRow("turn", "a\x1flater", 1 << 60, "later"))
                await store.transact(f"p{number}", NOTHING, always(change(ready=tuple(rows))))
            wanted = sorted(["a\x1flater", *classes[:3]])

            assert await store.ready_classes("turn", "a\x1f") == wanted
            assert await store.ready_classes("turn", "") == sorted(["a\x1flater", *classes])
            paged: list[str] = []
            while page := await store.ready_classes("turn", "a\x1f", paged[-1] if paged else "", 2):
                assert len(page) <= 2
                paged += page
            assert paged == wanted
            assert await store.ready_classes("lease", "a\x1f") == []

    async def test_bounded_a_ready_row_is_replaced_and_removed(self, tmp_path: Path) -> None:
        async def items(klass: str) -> list[tuple[str, int, str]]:
            return [(i.item, i.due_ms, i.value) for i in (await store.ready(ReadyScan("turn", klass))).items]

        async with self.opened(tmp_path) as store:
            first = (ReadyRow("turn", "c", 1, "main", "v1"), ReadyRow("turn", "c", 1, "second", "v1"))
            await store.transact("p", NOTHING, always(change(ready=first)))
            await store.transact("p", NOTHING, always(change(ready=(ReadyRow("turn", "d", 2, "main", "v2"),))))
            assert await items("c") == [("second", 1, "v1")]
            assert await items("d") == [("main", 2, "v2")]

            # Removed and written by the same change, it is there.
            both = change(unready=(("turn", "main"), ("turn", "second")), ready=(ReadyRow("turn", "d", 3, "main"),))
            await store.transact("p", NOTHING, always(both))
            assert await items("c") == []
            assert await items("d") == [("main", 3, "")]
            await store.transact("p", NOTHING, always(change(unready=(("turn", "main"), ("dispatch", "absent")))))
            assert await items("d") == []

    async def test_bounded_sessions_are_paged_by_name(self, tmp_path: Path) -> None:
        names = sorted([*(f"app\x00s{n}" for n in range(7)), "app2\x00s", "ap\x00s", "app\x00\U0010ffff"])
        async with self.opened(tmp_path) as store:
            for name in [HOST_PARTITION, *reversed(names)]:
                await store.transact(name, NOTHING, always(change()))

            assert await store.sessions(SessionScan("", limit=PAGE_MAX)) == names
            ours = [name for name in names if name.startswith("app\x00")]
            found: list[str] = []
            while page := await store.sessions(SessionScan("app\x00", after=found[-1] if found else "", limit=3)):
                assert len(page) <= 3
                found += page
            assert found == ours

    async def test_bounded_a_turn_is_found_in_whatever_partition_it_is(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for number in range(5):
                one = change(puts=((f"turn/t{number}", b"{}"), ("thread/main", b"{}"), ("turn/twin", b"{}")))
                await store.transact(f"s{number}", NOTHING, always(one))
            await store.transact("s1", NOTHING, always(change(puts=(("turn/t2", b"{}"), ("turn/t4", None)))))

            assert await store.holders("turn/t3") == ["s3"]
            assert await store.holders("turn/t2") == ["s1", "s2"]
            assert await store.holders("turn/twin", limit=3) == ["s0", "s1", "s2"]
            assert await store.holders("turn/t") == []
            for key in ("thread/main", "turn", ""):
                with pytest.raises(DurableError):
                    await store.holders(key)

    async def test_bounded_owners_are_paged_by_name(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            for n in range(5):
                store.renew(f"host/{n}%", 10_000, str(n).encode())
            page = await store.owners(limit=2)
            rest = await store.owners(after=page[-1].owner)

            assert [lease.owner for lease in page + rest] == [f"host/{n}%" for n in range(5)]
            assert [lease.value for lease in page + rest] == [b"0", b"1", b"2", b"3", b"4"]
            assert len(page) == 2

    async def test_bounded_a_limit_is_never_cut_silently(self, tmp_path: Path) -> None:
        """Else a reader would take a full page for the last one."""
        async with self.opened(tmp_path) as store:
            for limit in (0, -1, PAGE_MAX + 1):
                asked: list[Callable[[], object]] = [
                    lambda n=limit: store.read("p", Reads(ranges=(Range("", limit=n),))),
                    lambda n=limit: store.read("p", Reads(log=LogRange(limit=n))),
                    lambda n=limit: store.read("p", Reads(streams=(StreamRange("m", limit=n),))),
                    lambda n=limit: store.transact("p", Reads(ranges=(Range("", limit=n),)), always(change())),
                    lambda n=limit: store.ready(ReadyScan("turn", "c", limit=n)),
                    lambda n=limit: store.sessions(SessionScan("", limit=n)),
                    lambda n=limit: store.owners(limit=n),
                ]
                for ask in asked:
                    with pytest.raises(DurableError):
                        await ask()  # type: ignore[misc]

    # ------------------------------------------------------------ heads, handles, loops

    # ------------------------------------------------------------ measured

    async def test_measured_a_partition_takes_what_was_written_to_it(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            assert await store.measure("p") == PartitionSize(0, 0, 0, 0, 0)
            entry = Entry(events=b'["a","b"]', count=2, private=b"[1]", journal=b"block", stream="main", at=7)
            await store.transact("p", NOTHING, always(change(entry=entry, puts=(("k/\u00e4", b"12"), ("gone", b"3")))))
            await store.transact("p", NOTHING, always(change(puts=(("gone", None), ("k/b", b"123")))))
            await store.transact("other", NOTHING, always(change(entry=events("x" * 1000))))
            size = await store.measure("p")

            assert (size.commits, size.log_bytes) == (2, len('["a","b"]') + len("[1]") + len("block"))
            assert (size.records, size.record_bytes) == (2, len("k/\u00e4".encode()) + 2 + len("k/b") + 3)
            assert 0 < size.head_bytes < 1000
            # A million bytes more, and it says so.
            await store.transact("p", NOTHING, always(change(entry=Entry(journal=b"j" * 1_000_000))))
            assert (await store.measure("p")).log_bytes == size.log_bytes + 1_000_000

    async def test_measured_what_was_changed_is_counted(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            before = await store.statistics()
            await asyncio.gather(*(store.transact(f"p{n}", NOTHING, always(change())) for n in range(20)))
            await store.transact("p", NOTHING, always(Unchanged(None)))
            after = await store.statistics()

            assert after.changes == before.changes + 20
            assert 1 <= after.transactions - before.transactions <= 20
            assert (after.busy, after.waited_ms >= after.longest_ms) == (before.busy, True)
            assert (after.stored_bytes > 0) is store.capabilities.persistent

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


async def read(
    store: RecordStore,
    *,
    keys: tuple[str, ...] = (),
    owners: tuple[str, ...] = (),
    log: LogRange | None = None,
    streams: tuple[StreamRange, ...] = (),
) -> Records:
    return await store.read("p", Reads(keys=keys, owners=owners, log=log, streams=streams))
