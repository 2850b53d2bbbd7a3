"""What a change has become when the connection to PostgreSQL ends, others write too, or the server refuses."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.contracts.errors import (
    Forbidden,
    InvalidRequest,
    Misuse,
    NotFound,
    Retry,
    StoreBusy,
    StoreFull,
    StoreReadOnly,
    TooLarge,
    Unavailable,
    Uncertain,
)
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Change,
    Committed,
    Erase,
    LogRange,
    Range,
    Reads,
    ReadyRow,
    View,
)
from agentscope_durable.stores._postgres_connections import DsnSource, Line
from agentscope_durable.stores._postgres_errors import translate
from agentscope_durable.stores.records import _postgres_contended
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.testing.record_store import NOTHING, always, change, events
from tests.servers.fixtures import Proxied
from tests.servers.proxy import executes
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")
SECONDS = 90.0
ALL = LogRange(limit=PAGE_MAX)


@pytest.fixture
def schema(tmp_path: Path) -> str:
    return schema_of(tmp_path)


@asynccontextmanager
async def opened(dsn: str, schema: str, **options: Any) -> AsyncGenerator[PostgresRecordStore]:
    store = await PostgresRecordStore.open(dsn, schema=schema, initialize_schema=True, **options)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def beside(dsn: str) -> AsyncGenerator[asyncpg.Connection]:
    """Somebody else at the same server."""
    connection = await asyncpg.connect(dsn)
    try:
        yield connection
    finally:
        await connection.close()


async def write(store: PostgresRecordStore, *texts: str, partition: str = "p", **more: Any) -> Committed:
    return await store.transact(partition, NOTHING, always(change(entry=events(*texts), **more)))


async def written(store: PostgresRecordStore, partition: str = "p") -> list[bytes]:
    """Events of a partition, its numbers checked to be dense."""
    records = await store.read(partition, Reads(log=ALL))
    expected = 1
    for row in records.log:
        assert row.first == expected
        expected += row.count
    assert records.next_seq == expected
    return [row.events for row in records.log]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await condition():
            await asyncio.sleep(0.01)


# ------------------------------------------------------------ a connection that ends


@pytest.mark.spec("BE-29", "BE-02")
@pytest.mark.parametrize("lost", ["request", "answer"])
@pytest.mark.parametrize("known", [True, False])
async def test_a_commit_whose_connection_ends_happens_once(
    postgres: PostgresServer, proxied: Proxied, schema: str, lost: str, known: bool
) -> None:
    proxy = await proxied(postgres)
    async with opened(postgres.dsn(port=proxy.port), schema) as store:
        if known:
            await write(store, "before")
        done = getattr(proxy, f"lose_{lost}")(executes("insert into " + f'"{schema}"."durable_log"'))
        committed = await write(store, "mine", receipt="r")

        assert done.is_set()
        assert (committed.receipt, committed.first_seq, committed.changed) == ("r", 2 if known else 1, True)
        await write(store, "after")
        assert await written(store) == [*([b'["before"]'] if known else []), b'["mine"]', b'["after"]']


@pytest.mark.spec("BE-29")
@pytest.mark.parametrize("lost", ["request", "answer"])
async def test_a_group_whose_connection_ends_happens_once_for_each(
    postgres: PostgresServer, proxied: Proxied, schema: str, lost: str
) -> None:
    proxy = await proxied(postgres)

    def count(view: View, now_ms: int) -> Change:
        number = int(view.get("n") or b"0") + 1
        ready = ReadyRow("turn", "c", 0, f"i{number}")
        return change(puts=(("n", str(number).encode()),), entry=events(str(number)), ready=(ready,), receipt=number)

    async with opened(postgres.dsn(port=proxy.port), schema) as store:
        await write(store, "first", partition="s1")
        done = getattr(proxy, f"lose_{lost}")(executes("with i as"))
        jobs = [store.transact(f"s{n % 6}", Reads(keys=("n",)), count) for n in range(24)]
        answers = await asyncio.gather(*jobs)

        assert done.is_set()
        assert collections.Counter(answer.receipt for answer in answers) == dict.fromkeys(range(1, 5), 6)
        for n in range(6):
            before = [b'["first"]'] if n == 1 else []
            assert await written(store, f"s{n}") == before + [f'["{k}"]'.encode() for k in range(1, 5)]
            assert (await store.read(f"s{n}", Reads(keys=("n",)))).keys == {"n": b"4"}


@pytest.mark.spec("BE-29")
async def test_the_commit_of_a_contended_session_happens_once_when_its_answer_is_lost(
    postgres: PostgresServer, proxied: Proxied, schema: str
) -> None:
    proxy = await proxied(postgres)
    async with opened(postgres.dsn(port=proxy.port), schema) as store, opened(postgres.dsn(), schema) as other:
        await write(store, "a")
        await write(other, "b")
        done = proxy.lose_answer(executes("commit"))
        await write(store, "c")

        assert done.is_set()
        assert await written(other) == [b'["a"]', b'["b"]', b'["c"]']


async def test_what_cannot_be_looked_up_is_uncertain_and_what_was_not_sent_is_not(
    postgres: PostgresServer, proxied: Proxied, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_postgres_contended, "SETTLE_SECONDS", 0.3)
    proxy = await proxied(postgres)
    async with opened(postgres.dsn(port=proxy.port), schema) as store, opened(postgres.dsn(), schema) as other:
        await write(store, "a")
        lost = proxy.lose_answer(executes("durable_log"))
        await proxy.refuse()
        with pytest.raises(Uncertain):
            await write(store, "b")
        assert lost.is_set()
        with pytest.raises(Retry):
            await write(store, "c")
        with pytest.raises(Retry):
            await store.read("p", NOTHING)

        assert await written(other) == [b'["a"]', b'["b"]']
        await proxy.accept()
        await write(store, "d")
        assert await written(store) == [b'["a"]', b'["b"]', b'["d"]']


async def test_a_commit_whose_row_was_erased_before_it_was_looked_up_is_uncertain(
    postgres: PostgresServer, proxied: Proxied, schema: str
) -> None:
    proxy = await proxied(postgres)
    async with opened(postgres.dsn(port=proxy.port), schema) as store, opened(postgres.dsn(), schema) as other:
        await write(store, "a")
        lost = proxy.lose_answer(executes("durable_log"))
        await proxy.refuse()
        call = asyncio.ensure_future(write(store, "b"))
        async with asyncio.timeout(SECONDS):
            await lost.wait()
        await other.transact("p", NOTHING, always(change(erase=Erase(PAGE_MAX))))
        await proxy.accept()

        with pytest.raises(Uncertain):
            await call
        assert (await store.read("p", NOTHING)).next_seq == 3, "it had happened, once"


async def test_a_commit_that_may_still_arrive_is_not_said_to_be_refused(
    postgres: PostgresServer, proxied: Proxied, schema: str
) -> None:
    asked: list[int] = []

    def decide(view: View, now_ms: int) -> Change:
        """Refused when it is decided again: as what depends on the time may be."""
        asked.append(now_ms)
        if len(asked) > 1:
            raise LookupError("too late")
        return change(entry=events("b"))

    proxy = await proxied(postgres)
    async with opened(postgres.dsn(port=proxy.port), schema) as store:
        await write(store, "a")
        lost = proxy.lose_request(executes("durable_log"))
        with pytest.raises(Uncertain):
            await store.transact("p", NOTHING, decide)
        assert lost.is_set() and len(asked) == 2
        assert await written(store) == [b'["a"]']


async def test_a_cancelled_caller_leaves_the_write_alone(
    postgres: PostgresServer, proxied: Proxied, schema: str
) -> None:
    proxy = await proxied(postgres)
    async with opened(postgres.dsn(port=proxy.port), schema) as store:
        await write(store, "a")
        stalled = proxy.stall_at(executes("durable_log"))
        call = asyncio.ensure_future(write(store, "b"))
        async with asyncio.timeout(SECONDS):
            await stalled.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        proxy.flow()

        assert (await write(store, "c")).first_seq == 3
        assert await written(store) == [b'["a"]', b'["b"]', b'["c"]']


async def test_connections_that_the_server_ends_are_replaced(postgres: PostgresServer, schema: str) -> None:
    async with opened(postgres.dsn(), schema) as store, beside(postgres.dsn()) as administrator:
        await write(store, "a")
        store.renew("host", 10_000, b"")
        await store.read("p", NOTHING)
        for round in range(3):
            ended = await administrator.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity where pid<>pg_backend_pid()"
            )
            assert len(ended) >= 3
            await asyncio.gather(write(store, f"b{round}"), write(store, f"c{round}", partition="q"))
            store.renew("host", 10_000, b"again")
            assert (await store.read("p", Reads(owners=("host",)))).owners["host"].value == b"again"
        assert len(await written(store)) == 4


@pytest.mark.parametrize("how", ["stop_immediately", "kill", "stop"])
async def test_a_server_that_restarts_loses_nothing_that_was_acknowledged(
    postgres: PostgresServer, schema: str, how: str
) -> None:
    acknowledged: list[str] = []
    uncertain: list[str] = []
    async with opened(postgres.dsn(), schema) as store:
        ending = asyncio.Event()

        async def writer(name: str) -> None:
            for n in range(10_000):
                if ending.is_set():
                    return
                try:
                    await write(store, f"{name}-{n}", partition=name)
                except Uncertain:
                    uncertain.append(f"{name}-{n}")
                except Retry:
                    await asyncio.sleep(0.02)
                else:
                    acknowledged.append(f"{name}-{n}")

        writers = [asyncio.ensure_future(writer(f"s{n}")) for n in range(8)]

        async def some(count: int) -> bool:
            return len(acknowledged) >= count

        await until(lambda: some(100))
        await asyncio.to_thread(getattr(postgres, how))
        await asyncio.to_thread(postgres.start)
        before = len(acknowledged)
        await until(lambda: some(before + 100))
        ending.set()
        await asyncio.gather(*writers)

        stored = [text.decode()[2:-2] for n in range(8) for text in await written(store, f"s{n}")]
        assert len(stored) == len(set(stored)), "none happened twice"
        assert set(acknowledged) <= set(stored) <= set(acknowledged) | set(uncertain)


# ------------------------------------------------------------ what the server refuses


async def test_a_server_that_takes_no_writes_is_read_and_says_so(postgres: PostgresServer, schema: str) -> None:
    async with opened(postgres.dsn(), schema) as store, beside(postgres.dsn()) as administrator:
        await write(store, "a")

        async def read_only(value: str) -> None:
            await administrator.execute(f"alter system set default_transaction_read_only = {value}")
            await administrator.execute("select pg_reload_conf()")
            await until(lambda: shows(store, value))

        async def shows(store: PostgresRecordStore, value: str) -> bool:
            rows = await store._ask("show default_transaction_read_only")
            return rows[0][0] == value

        try:
            await read_only("on")

            async def refused() -> bool:
                try:
                    await write(store, "b")
                except StoreReadOnly:
                    return True
                return False

            await until(refused)
            assert (await store.read("p", NOTHING)).head is not None
            with pytest.raises(StoreReadOnly):
                await PostgresRecordStore.open(postgres.dsn(), schema=schema)
        finally:
            await administrator.execute("set default_transaction_read_only = off")
            await read_only("off")
        await until(lambda: _writes(store))


async def _writes(store: PostgresRecordStore) -> bool:
    try:
        await write(store, "c")
    except StoreReadOnly:
        return False
    return True


async def test_a_table_that_somebody_holds_is_waited_for_within_the_bound(
    postgres: PostgresServer, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_postgres_contended, "SETTLE_SECONDS", 0.2)
    async with opened(postgres.dsn(), schema, statement_timeout=0.2) as store, beside(postgres.dsn()) as other:
        await write(store, "a")
        async with asyncio.timeout(SECONDS):
            async with other.transaction():
                await other.execute(f'lock table "{schema}".durable_log in access exclusive mode')
                with pytest.raises((Uncertain, Retry)):
                    await write(store, "b")
            # Whatever became of it, it is settled now, and everything goes on.
            await write(store, "c")
        assert [row for row in await written(store) if row != b'["b"]'] == [b'["a"]', b'["c"]']


async def test_a_server_without_room_for_a_connection_is_asked_again_later(
    postgres: PostgresServer, schema: str
) -> None:
    async with beside(postgres.dsn()) as administrator:
        await PostgresRecordStore.initialize_schema(postgres.dsn(), schema=schema)
        role = f"few_{schema}"
        await administrator.execute(f"create role {role} login superuser connection limit 0")
        dsn = postgres.dsn().replace("durable@", f"{role}@")
        try:
            # A superuser is not limited by his role; so this one is none.
            await administrator.execute(f"alter role {role} nosuperuser")
            with pytest.raises(Unavailable):
                await PostgresRecordStore.open(dsn, schema=schema)
        finally:
            await administrator.execute(f"drop role {role}")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (asyncpg.DiskFullError("x"), StoreFull),
        (asyncpg.TooManyConnectionsError("x"), Unavailable),
        (asyncpg.CannotConnectNowError("x"), Unavailable),
        (asyncpg.OutOfMemoryError("x"), Unavailable),
        (asyncpg.ReadOnlySQLTransactionError("x"), StoreReadOnly),
        (asyncpg.DeadlockDetectedError("x"), StoreBusy),
        (asyncpg.SerializationError("x"), StoreBusy),
        (asyncpg.QueryCanceledError("x"), StoreBusy),
        (asyncpg.LockNotAvailableError("x"), StoreBusy),
        (asyncpg.ProgramLimitExceededError("x"), Misuse),
        (asyncpg.ConnectionDoesNotExistError("x"), Unavailable),
        (asyncpg.InterfaceError("x"), Unavailable),
        (asyncpg.InternalClientError("x"), Unavailable),
        (ConnectionRefusedError(), Unavailable),
        (TimeoutError(), Unavailable),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
)
def test_each_fault_of_the_server_has_its_error(error: BaseException, expected: type[BaseException]) -> None:
    ours = translate(error, "postgresql://db/app")

    assert type(ours) is expected
    assert ours.__cause__ is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (asyncpg.InsufficientPrivilegeError("x"), Forbidden),
        (asyncpg.InvalidPasswordError("x"), Forbidden),
        (asyncpg.InvalidAuthorizationSpecificationError("x"), Forbidden),
        (asyncpg.InvalidCatalogNameError("x"), NotFound),
        (asyncpg.InvalidSchemaNameError("x"), NotFound),
        (asyncpg.UndefinedTableError("x"), NotFound),
        (asyncpg.UndefinedColumnError("x"), NotFound),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
)
def test_what_refuses_the_opening_may_pass_when_the_store_is_open(error: Any, expected: type[BaseException]) -> None:
    opening = translate(error, "postgresql://db/app", opening=True)
    open_ = translate(error, "postgresql://db/app")

    assert (type(opening), type(open_)) == (expected, Unavailable)
    assert opening.__cause__ is open_.__cause__ is error
    # Whoever waits reads why, and what is to be done about it.
    assert "running Turns go on by themselves" in str(open_) and str(error.sqlstate) in str(open_)


async def test_an_address_that_has_worked_is_no_wrong_address() -> None:
    async def connect(**_: Any) -> Any:
        raise asyncpg.ClientConfigurationError("a file of certificates that the address names is not there")

    line = Line(DsnSource("postgresql://db/app", connect=connect))

    with pytest.raises(InvalidRequest, match="dsn"):
        await line.connected(opening=True)
    with pytest.raises(Unavailable, match="certificates"):
        await line.connected()


@pytest.mark.case("C63")
async def test_a_text_that_cannot_be_stored_or_found_is_refused_and_no_neighbour_with_it(
    postgres: PostgresServer, schema: str
) -> None:
    long = "k" * 2601
    wrong: list[tuple[Change, type[BaseException]]] = [
        (change(puts=(("\ud800", b""),)), InvalidRequest),
        (change(puts=((long, b""),)), TooLarge),
        (change(ready=(ReadyRow("turn", "\udfff", 0, "i"),)), InvalidRequest),
    ]
    async with opened(postgres.dsn(), schema) as store:
        fine = change(puts=(("a\x00b", b"\x00"), ("k" * 2600, b"v")), ready=(ReadyRow("turn", "c\x00", 0, "\x00"),))
        jobs = [store.transact("p", NOTHING, always(bad)) for bad, _ in wrong]
        done = await asyncio.gather(*jobs, store.transact("p", NOTHING, always(fine)), return_exceptions=True)

        for answer, (_, error) in zip(done, wrong, strict=False):
            assert isinstance(answer, error)
        assert isinstance(done[-1], Committed)
        records = await store.read("p", Reads(keys=("a\x00b",), ranges=(Range("a"),)))
        assert records.keys == {"a\x00b": b"\x00"}
        assert records.ranges == {Range("a"): [("a\x00b", b"\x00")]}
        for use in (lambda: store.transact("\ud800", NOTHING, always(fine)), lambda: store.read(long, NOTHING)):
            with pytest.raises((InvalidRequest, TooLarge)):
                await use()


# ------------------------------------------------------------ others who write


@pytest.mark.spec("PG-11", "BE-16")
async def test_two_stores_that_write_one_session_both_get_on(postgres: PostgresServer, schema: str) -> None:
    def count(view: View, now_ms: int) -> Change:
        number = int(view.get("n") or b"0") + 1
        assert view.next_seq == number
        return change(puts=(("n", str(number).encode()),), entry=events(str(number)), receipt=number)

    async with opened(postgres.dsn(), schema) as first, opened(postgres.dsn(), schema) as second:
        done: dict[int, list[Any]] = {0: [], 1: []}

        async def work(which: int, store: PostgresRecordStore) -> None:
            # Neither ends before the other has got on: who only got on when the other has ended would never do.
            while min(len(done[0]), len(done[1])) < 100:
                done[which].append((await store.transact("p", Reads(keys=("n",)), count)).receipt)

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(work(n % 2, (first, second)[n % 2]) for n in range(8)))

        numbers = sorted(done[0] + done[1])
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(await written(first)) == len(numbers)


async def test_a_session_that_somebody_holds_keeps_no_other_waiting(postgres: PostgresServer, schema: str) -> None:
    async with opened(postgres.dsn(), schema) as store, beside(postgres.dsn()) as holder:
        names = [f"s{n}" for n in range(12)]
        await asyncio.gather(*(write(store, "a", partition=name) for name in names))
        async with holder.transaction():
            await holder.execute(f'select from "{schema}".durable_head where name=$1 for update', b"s0")
            held = asyncio.ensure_future(write(store, "b", partition="s0"))
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(write(store, "b", partition=name) for name in names[1:]))
            assert not held.done()
        async with asyncio.timeout(SECONDS):
            await held
        assert await written(store, "s0") == [b'["a"]', b'["b"]']


async def test_an_answer_that_writes_nothing_is_never_given_by_an_old_head(
    postgres: PostgresServer, schema: str
) -> None:
    def refuse_second(view: View, now_ms: int) -> Change:
        if view.next_seq == 2:
            raise LookupError("there is one event only")
        return change(entry=events("mine"), receipt=view.next_seq)

    async with opened(postgres.dsn(), schema) as store, opened(postgres.dsn(), schema) as other:
        await write(store, "a")
        await write(other, "b")

        assert (await store.transact("p", NOTHING, refuse_second)).receipt == 3
