"""The log: numbered without gaps, pruned, erased, and measured."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Change,
    Column,
    Entry,
    Erase,
    LogRange,
    LogRow,
    PartitionSize,
    Prune,
    Reads,
    ReadyRow,
    ReadyScan,
    SessionScan,
    StreamRange,
    Unchanged,
    View,
)
from agentscope_durable.testing.record_store._stage import NOTHING, StoreStage, always, change, events, four_rows, read


class LogContract(StoreStage):
    """What the log promises."""

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

    async def test_pruned_events_are_gone_and_the_rows_keep_their_numbers_and_the_rest(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await four_rows(store)

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
            await four_rows(store)
            await store.transact("p", NOTHING, always(change(prune=Prune(4))))

            for wrong in (Prune(3), Prune(9), Prune(6, ((7, b""),)), Prune(6, ((0, b""),))):
                with pytest.raises(InvalidRequest):
                    await store.transact("p", NOTHING, always(change(entry=events("no"), prune=wrong)))
            records = await store.read("p", NOTHING)
            assert (records.pruned_through, records.next_seq) == (4, 9)

    async def test_pruned_a_decision_sees_the_log_it_prunes(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await four_rows(store)
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
            await four_rows(store)  # 8 rows: each second one without events
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
            await four_rows(store)
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
