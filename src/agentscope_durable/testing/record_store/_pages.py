"""Pages of records, of work, of Sessions and of owners: bounded, in order, never cut silently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.keys import HOST_PARTITION
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Column,
    LogRange,
    Range,
    Reads,
    ReadyItem,
    ReadyRow,
    ReadyScan,
    SessionScan,
    StreamRange,
    Unchanged,
    View,
)
from agentscope_durable.testing.record_store._stage import NOTHING, StoreStage, always, change, four_rows


class PagesContract(StoreStage):
    """What a listing promises."""

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

    async def test_bounded_a_reading_holds_the_columns_that_were_asked_for(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as store:
            await four_rows(store)
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
