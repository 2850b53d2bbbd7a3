"""What a step costs a PostgreSQL server, counted: statements, round trips and rows, however long the Session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import CorruptRecord, InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.record_store import Change, LogRange, Reads, ReadyRow, ReadyScan, View
from agentscope_durable.stores._postgres_connections import Line
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.record_store._stage import NOTHING, always, change
from tests.backend.world import World
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")
STEPS = 40


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Every statement that goes to the server, one round trip each."""
    statements: list[str] = []
    fetch, run = Line.fetch, Line.run

    async def counted_fetch(self: Line, statement: str, arguments: Any, *, timeout: float) -> Any:
        statements.append(statement)
        return await fetch(self, statement, arguments, timeout=timeout)

    async def counted_run(self: Line, script: str, *, timeout: float) -> None:
        statements.append(script)
        await run(self, script, timeout=timeout)

    monkeypatch.setattr(Line, "fetch", counted_fetch)
    monkeypatch.setattr(Line, "run", counted_run)
    yield statements


async def world_in(store: PostgresRecordStore, name: str = "s1") -> World:
    world = World(SessionKey("app", name), backend=TransactionalSessionBackend(store))
    await world.open()
    await world.submit()
    # Not before the loop: it blocks, and is called by a thread of its own.
    await asyncio.to_thread(world.alive)
    world.alive = lambda *_: None  # type: ignore[method-assign]
    await world.claim()
    return world


@pytest.mark.spec("BE-15")
async def test_a_step_is_one_statement_one_log_row_one_head_and_at_most_one_record(
    postgres: PostgresServer, tmp_path: Path, sent: list[str]
) -> None:
    schema = schema_of(tmp_path)
    counts: dict[str, tuple[int, int, int]] = {}
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema, initialize_schema=True)
    world = await world_in(store)
    administrator = await asyncpg.connect(postgres.dsn())

    async def rows() -> dict[str, tuple[int, int, int]]:
        """Inserts and updates of each table, and how many of the updates stayed on their page."""
        # A server process tells its figures when it ends.
        for lane in store._lanes._lanes:
            await lane.line.close()
        found = await administrator.fetch(
            "select relname::text, n_tup_ins, n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where schemaname=$1",
            schema,
        )
        return {name: (inserted, updated, hot) for name, inserted, updated, hot in found}

    before = await rows()
    sent.clear()
    for number in range(1, STEPS + 1):
        await world.say(f"step {number}", reasoning=number)
    statements = list(sent)
    async with asyncio.timeout(90):
        while (after := await rows())["durable_log"][0] - before["durable_log"][0] < STEPS:
            await asyncio.sleep(0.05)
    for name, figures in after.items():
        counts[name] = tuple(new - old for new, old in zip(figures, before[name], strict=True))  # type: ignore[assignment]
    await administrator.close()
    await store.close()

    assert len(statements) == STEPS
    assert counts["durable_log"] == (STEPS, 0, 0)
    assert counts["durable_head"][:2] == (0, STEPS)
    assert counts["durable_head"][2] >= STEPS * 0.9, "the head is rewritten on its page"
    assert sum(counts["durable_rec"][:2]) <= STEPS
    assert counts["durable_ready"][:2] == counts["durable_owner"][:2] == (0, 0)


@pytest.mark.spec("BE-15")
async def test_a_claim_and_an_end_are_one_statement_each_where_this_process_wrote_last(
    postgres: PostgresServer, tmp_path: Path, sent: list[str]
) -> None:
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True)
    world = await world_in(store)
    await world.finish()
    await world.submit()
    sent.clear()
    await world.claim()
    claim = len(sent)
    await world.say("one")
    sent.clear()
    await world.finish()
    end = len(sent)
    await store.close()

    assert (claim, end) == (1, 1)


async def test_who_looks_again_finds_what_is_remembered_and_what_is_not(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Of two that wait together one must read its Session, and the other comes to a second record on its way."""
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True)
    await store.transact("p", NOTHING, always(change(puts=(("old", b"0"),))))
    await store.transact("p", NOTHING, always(change(puts=tuple((f"k{n}", b"%d" % n) for n in range(8)))))

    def decide(*keys: str) -> Any:
        def found(view: View, now_ms: int) -> Change:
            return change(receipt=[view.get(key) for key in keys])

        return found

    async def receipts(*wanted: tuple[str, ...]) -> list[Any]:
        jobs = [store.transact("p", Reads(keys=keys[:1]), decide(*keys)) for keys in wanted]
        return [committed.receipt for committed in await asyncio.gather(*jobs)]

    # The oldest of what was written is not remembered any more.
    assert await receipts(("old",), ("k6", "k7")) == [[b"0"], [b"6", b"7"]]
    assert await receipts(("old", "k7"), ("k0", "k1"), ("none", "k3")) == [[b"0", b"7"], [b"0", b"1"], [None, b"3"]]
    assert await receipts(("k2", "old"), ("k4", "k5")) == [[b"2", b"0"], [b"4", b"5"]]
    await store.close()


async def test_a_scan_of_ready_work_tells_that_another_host_wrote_a_session(
    postgres: PostgresServer, tmp_path: Path, sent: list[str]
) -> None:
    schema = schema_of(tmp_path)
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema, initialize_schema=True)
    other = await PostgresRecordStore.open(postgres.dsn(), schema=schema)
    await store.transact("p", NOTHING, always(change()))
    row = ReadyRow(kind="turn", klass="k", due_ms=0, item="i", value="v")
    await other.transact("p", NOTHING, always(change(ready=(row,))))
    assert len((await store.ready(ReadyScan("turn", "k", None, 10))).items) == 1
    sent.clear()
    await store.transact("p", NOTHING, always(change()))
    statements = list(sent)
    await store.close()
    await other.close()

    assert len(statements) == 2, "a reading and a commit: no race was lost"


@pytest.mark.spec("BE-15")
async def test_what_waits_together_goes_together(postgres: PostgresServer, tmp_path: Path, sent: list[str]) -> None:
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True)
    worlds = [await world_in(store, f"s{number}") for number in range(24)]
    sent.clear()
    await asyncio.gather(*(world.say("together") for world in worlds))
    statements = len(sent)
    sizes = [await store.measure(f"app\x00s{number}") for number in range(24)]
    await store.close()

    assert statements <= 4, "two lanes, one group each, and perhaps one more"
    assert len({(size.commits, size.records) for size in sizes}) == 1


@pytest.mark.spec("BE-15")
async def test_readings_that_wait_go_together_and_each_has_its_own_answer(
    postgres: PostgresServer, tmp_path: Path, sent: list[str]
) -> None:
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True)
    for number in range(3):
        world = await world_in(store, f"s{number}")
        for _ in range(number):
            await world.say("something")
    names = [f"app\x00s{number}" for number in range(3)]
    alone = [await store.read(name, Reads(log=LogRange(after=0, limit=50))) for name in names]
    sent.clear()
    log, no_log = Reads(log=LogRange(after=0, limit=50)), Reads()
    together = await asyncio.gather(
        *(store.read(name, reads) for _ in range(20) for name in names for reads in (log, no_log)),
        *(store.read("app\x00nobody", no_log) for _ in range(20)),
    )
    statements = len(sent)
    await store.close()

    assert statements <= 10
    for number in range(0, 120, 2):
        expected = alone[number % 6 // 2]
        assert (together[number].log, together[number].head) == (expected.log, expected.head)
        assert (together[number + 1].log, together[number + 1].rev) == ([], expected.rev)
    assert len({len(records.log) for records in alone}) == 3
    assert {records.head for records in together[120:]} == {None}


async def test_a_reading_that_fails_fails_alone(postgres: PostgresServer, tmp_path: Path) -> None:
    schema = schema_of(tmp_path)
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema, initialize_schema=True)
    for number in range(3):
        await world_in(store, f"s{number}")
    administrator = await asyncpg.connect(postgres.dsn())
    await administrator.execute(f"update \"{schema}\".durable_head set value = 'x' where name = 'app\\000s1'::bytea")
    await administrator.close()
    unreadable = Reads(owners=("\udcff",))
    asked = [("app\x00s0", Reads()), ("app\x00s1", Reads()), ("app\x00s2", unreadable), ("app\x00s2", Reads())]
    first, damaged, refused, last = await asyncio.gather(
        *(store.read(name, reads) for name, reads in asked), return_exceptions=True
    )
    await store.close()

    assert isinstance(damaged, CorruptRecord)
    assert isinstance(refused, InvalidRequest)
    assert not isinstance(first, BaseException) and first.head is not None
    assert not isinstance(last, BaseException) and last.head is not None


async def test_a_reading_is_answered_whenever_it_comes(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the moment in which the one that served the former reading finds nothing more to do."""
    monkeypatch.setattr("agentscope_durable.stores.records.postgres.READERS", 1)
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True)
    async with asyncio.timeout(60):
        for _ in range(3):
            assert (await store.read("nobody", Reads())).head is None
    await store.close()


@pytest.mark.spec("BE-15", "BE-28")
async def test_a_step_of_a_long_session_touches_no_more_pages_than_one_of_a_short_one(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    schema = schema_of(tmp_path)
    store = await PostgresRecordStore.open(postgres.dsn(), schema=schema, initialize_schema=True)
    world = await world_in(store)
    administrator = await asyncpg.connect(postgres.dsn())
    number = 0

    async def said(steps: int) -> int:
        """Pages of tables and indexes that so many steps touched."""
        nonlocal number
        before, rows = await _touched(administrator, store, schema)
        for _ in range(steps):
            number += 1
            await world.say("x" * 400, reasoning=number)
        async with asyncio.timeout(90):
            while True:
                after, now = await _touched(administrator, store, schema)
                if now >= rows + steps:
                    return after - before
                await asyncio.sleep(0.05)

    await said(5)
    short = await said(30)
    await said(400)
    long = await said(30)
    await administrator.close()
    await store.close()

    assert long <= short * 1.5 + 30, "an index may have become a level deeper"


async def _touched(administrator: asyncpg.Connection, store: PostgresRecordStore, schema: str) -> tuple[int, int]:
    """Pages touched so far, and rows of the log, as told by server processes that have ended."""
    for lane in store._lanes._lanes:
        await lane.line.close()
    [(pages, rows)] = await administrator.fetch(
        """select sum(heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit)::bigint,
            sum(case when i.relname='durable_log' then n_tup_ins else 0 end)::bigint
            from pg_statio_user_tables i join pg_stat_user_tables t using(relid) where i.schemaname=$1""",
        schema,
    )
    return pages, rows
