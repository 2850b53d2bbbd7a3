"""The SQLite store: the contract every store keeps, and what one shared file on a real disk adds to it."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import pytest

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import (
    CorruptRecord,
    FormatError,
    HostClosed,
    Incompatible,
    InvalidRequest,
    NotADatabase,
    Retry,
    StoreBusy,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    Unavailable,
    Uncertain,
    UnknownFormat,
)
from agentscope_durable.contracts.records import SessionHead
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.record_store import (
    LEASE_KEPT_MS,
    PAGE_MAX,
    Change,
    Column,
    Committed,
    Decide,
    Entry,
    LogRange,
    OwnerLease,
    Prune,
    Range,
    Reads,
    ReadyRow,
    ReadyScan,
    Records,
    RecordStore,
    SessionScan,
    StreamRange,
    Unchanged,
    View,
)
from agentscope_durable.stores.records import _sqlite_file, _sqlite_reader, _sqlite_writer, sqlite
from agentscope_durable.stores.records._sqlite_file import SqliteFile
from agentscope_durable.stores.records._sqlite_rows import HOLDERS
from agentscope_durable.stores.records._sums import events_sum, rest_sum
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.record_store import NOTHING, RecordStoreContract, always, change, events

ONE = LogRange(limit=PAGE_MAX)


@pytest.fixture(autouse=True)
def nothing_stays_armed() -> Iterator[None]:
    yield
    _failpoints.disarm()
    _failpoints.observe(None)


@asynccontextmanager
async def opened(place: Path, **options: object) -> AsyncGenerator[SqliteRecordStore]:
    store = await SqliteRecordStore.open(place / "durable.db", **options)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        await store.close()


async def write(store: RecordStore, *texts: str, partition: str = "p", **more: object) -> Committed:
    return await store.transact(partition, NOTHING, always(change(entry=events(*texts), **more)))  # type: ignore[arg-type]


async def log_of(store: RecordStore, partition: str = "p") -> Records:
    return await store.read(partition, Reads(log=ONE))


async def assert_sound(store: SqliteRecordStore, *partitions: str) -> None:
    """The file is whole, and the events of each partition are numbered without a gap."""
    assert await store.integrity() == []
    for partition in partitions:
        seen = 0
        while rows := (await store.read(partition, Reads(log=LogRange(after=seen, limit=PAGE_MAX)))).log:
            for row in rows:
                assert row.first == seen + 1
                seen += row.count
        assert (await store.read(partition, NOTHING)).next_seq == seen + 1


@pytest.mark.parametrize("how", ["deleted", "moved away", "replaced"])
async def test_nothing_is_written_to_a_file_that_is_not_at_its_place_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Such a commit would be acknowledged, and gone with the process."""
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    async with opened(folder) as store:
        await write(store, "a")
        store.renew("host", 1000, b"")
        if how == "deleted":
            shutil.rmtree(folder)
        else:
            folder.rename(elsewhere)
        if how == "replaced":
            async with opened(folder) as other:
                await write(other, "z")

        with pytest.raises(StoreMoved, match="deleted, moved or replaced"):
            await write(store, "b")
        with pytest.raises(StoreMoved, match="deleted, moved or replaced"):
            store.renew("host", 1000, b"")
        # Nor is it read: what it says is of the past, and nobody adds to it. A reader looks from time to time.
        monkeypatch.setattr(_sqlite_reader, "PLACE_SECONDS", 0.0)
        for ask in (store.read("p", NOTHING), store.sessions(SessionScan(prefix="p")), store.owners()):
            with pytest.raises(StoreMoved) as caught:
                await ask
            assert caught.value.location == str(folder / "durable.db")
        if how != "moved away":
            return
        elsewhere.rename(folder)
        await write(store, "b")
        store.renew("host", 1000, b"")
        await assert_sound(store, "p")
        assert (await store.read("p", NOTHING)).next_seq == 3


async def test_what_a_link_leads_to_is_watched_and_not_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_sqlite_reader, "PLACE_SECONDS", 0.0)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    async with opened(tmp_path / "link") as store:
        await write(store, "a")
        assert (await store.read("p", NOTHING)).next_seq == 2
        (tmp_path / "real").rename(tmp_path / "other")
        with pytest.raises(StoreMoved):
            await store.read("p", NOTHING)


@pytest.mark.spec("BE-02", "BE-16")
class TestSqliteRecordStore(RecordStoreContract):
    backend = "sqlite"

    async def open(self, place: Path) -> RecordStore:
        self.clock = ManualClock()
        return await SqliteRecordStore.open(place / "durable.db", clock=self.clock)

    async def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)


class TestFaultyRecordStore(RecordStoreContract):
    """Nothing armed, it keeps every promise of the store inside."""

    backend = "sqlite"

    async def open(self, place: Path) -> RecordStore:
        self.clock = ManualClock()
        return FaultyRecordStore(await SqliteRecordStore.open(place / "durable.db", clock=self.clock))

    async def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)


async def test_a_faulty_store_fails_or_loses_the_answer_of_the_call_it_was_told() -> None:
    store = FaultyRecordStore(MemoryRecordStore())
    store.fail("transact", nth=2)
    store.lose_answer("transact", nth=3)

    await write(store, "a")
    with pytest.raises(Unavailable):
        await write(store, "b")
    with pytest.raises(Uncertain):
        await write(store, "c")
    await write(store, "d")
    assert [row.events for row in (await log_of(store)).log] == [b'["a"]', b'["c"]', b'["d"]']
    assert store.calls["transact"] == 4


# ------------------------------------------------------------ the file


async def test_a_new_file_has_the_settings_of_the_layout(tmp_path: Path) -> None:
    async with opened(tmp_path / "new" / "folder") as store:
        settings = await store.settings()
        assert (settings["journal_mode"], settings["synchronous"], settings["page_size"]) == ("wal", "2", "8192")
        await write(store, "a")
    # Closed, everything is in the one file.
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["durable.db"]


async def test_many_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    stores = await asyncio.gather(*(SqliteRecordStore.open(tmp_path / "durable.db") for _ in range(8)))
    await asyncio.gather(*(write(store, "a") for store in stores))

    await assert_sound(stores[0], "p")
    assert (await log_of(stores[-1])).rev == 8
    await asyncio.gather(*(store.close() for store in stores))
    assert [path.name for path in tmp_path.iterdir()] == ["durable.db"]


KILLED = """
    import os, signal, sys, apsw
    from pathlib import Path
    from agentscope_durable.spi.environment import SYSTEM
    from agentscope_durable.stores.records._sqlite_file import SqliteFile

    def trace(cursor, statement, bindings):
        if statement.startswith(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    apsw.connection_hooks.append(lambda connection: connection.set_exec_trace(trace))
    SqliteFile(Path(sys.argv[1]), busy_timeout=1, synchronous="FULL").prepare(SYSTEM)
"""


@pytest.mark.parametrize(("moment", "left"), [("commit", ["new", "new-journal"]), ("pragma journal_mode", ["new"])])
async def test_what_a_killed_making_left_goes_at_the_next_opening(tmp_path: Path, moment: str, left: list[str]) -> None:
    path = tmp_path / "durable.db"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(path), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert sorted(found.suffix[1:] for found in tmp_path.iterdir()) == left
    others = [tmp_path / name for name in ("durable.db.new", "durable.db.bak", "other.db.0123456789abcdef.new")]
    for other in others:
        other.touch()

    async with opened(tmp_path) as store:
        await write(store, "a")

    assert sorted(tmp_path.iterdir()) == sorted([path, *others]), "nothing else is ours to remove"


@pytest.mark.parametrize("moment", ["begin", "insert into meta", "commit", "pragma journal_mode"])
def test_a_maker_that_is_too_late_takes_the_store_that_swept_its_draft_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "durable.db"
    met: list[str] = []

    def trace(cursor: object, statement: str, bindings: object) -> bool:
        if statement.startswith(moment) and not met:
            met.append(statement)
            SqliteFile(path, busy_timeout=1, synchronous="FULL").prepare(SYSTEM)
            assert [found.name for found in tmp_path.iterdir()] == ["durable.db"]
        return True

    monkeypatch.setattr(apsw, "connection_hooks", [lambda connection: connection.set_exec_trace(trace)])

    SqliteFile(path, busy_timeout=1, synchronous="FULL").prepare(SYSTEM)

    assert met and [found.name for found in tmp_path.iterdir()] == ["durable.db"]


def content_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def foreign(path: Path, statements: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statements).fetchall()
    connection.close()


def ours(path: Path, statements: str) -> None:
    async def create() -> None:
        await (await SqliteRecordStore.open(path)).close()

    asyncio.run(create())
    foreign(path, statements)


STRANGERS: dict[str, tuple[Callable[[Path], object], type[FormatError]]] = {
    "another database": (lambda path: foreign(path, "create table t(x)"), NotADatabase),
    "another database in WAL": (lambda path: foreign(path, "pragma journal_mode=wal; create table t(x)"), NotADatabase),
    "another database with our version": (
        lambda path: foreign(path, "create table t(x); pragma user_version=8"),
        NotADatabase,
    ),
    "an empty file": (lambda path: path.write_bytes(b""), NotADatabase),
    "text": (lambda path: path.write_bytes(b"hello " * 5000), NotADatabase),
    "version 7": (lambda path: ours(path, "pragma user_version=7"), UnknownFormat),
    "version 9": (lambda path: ours(path, "pragma user_version=9"), UnknownFormat),
    "no version": (lambda path: ours(path, "pragma user_version=0"), UnknownFormat),
    "another revision": (lambda path: ours(path, "update meta set value='8.dev0' where key='revision'"), UnknownFormat),
    "no revision": (lambda path: ours(path, "delete from meta"), UnknownFormat),
    "no meta": (lambda path: ours(path, "drop table meta"), UnknownFormat),
}


@pytest.mark.spec("BE-27")
@pytest.mark.parametrize("kind", STRANGERS)
def test_a_file_of_another_format_is_refused_and_keeps_every_byte(tmp_path: Path, kind: str) -> None:
    make, error = STRANGERS[kind]
    path = tmp_path / "durable.db"
    make(path)
    before = content_of(tmp_path)

    for _ in range(2):
        with pytest.raises(error) as raised:
            asyncio.run(SqliteRecordStore.open(path))  # type: ignore[arg-type]
        assert raised.value.location == str(path)
    assert content_of(tmp_path) == before


def test_a_foreign_database_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "durable.db"
    user = apsw.Connection(str(path))
    user.execute("pragma journal_mode=wal; create table t(x); insert into t values(1)").fetchall()
    before = content_of(tmp_path)
    assert set(before) == {"durable.db", "durable.db-wal", "durable.db-shm"}

    with pytest.raises(NotADatabase):
        asyncio.run(SqliteRecordStore.open(path))  # type: ignore[arg-type]
    assert content_of(tmp_path) == before
    user.close()


async def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(NotADatabase):
        await SqliteRecordStore.open(tmp_path)


async def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await write(store, "a")
    path = tmp_path / "durable.db"
    program = """
        import asyncio, os, sys
        from agentscope_durable.contracts.errors import StoreReadOnly
        from agentscope_durable.stores.records.sqlite import SqliteRecordStore
        # Once beforehand: what is imported late may lie where the other user cannot read.
        asyncio.run(SqliteRecordStore.open(sys.argv[2]))
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            asyncio.run(SqliteRecordStore.open(sys.argv[1]))
        except StoreReadOnly:
            print("read-only")
    """
    # Every folder above must be passable for the other user, and none may let it write.
    path.chmod(0o444)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder) != "/tmp":
            folder.chmod(folder.stat().st_mode | 0o055)
    before = content_of(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(path), str(tmp_path / "other" / "x.db")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "read-only\n", done.stderr
    assert content_of(tmp_path) == before


async def test_a_store_that_becomes_read_only_says_so_and_recovers(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await write(store, "a")
        store._writer.connection.execute("pragma query_only=1")
        with pytest.raises(StoreReadOnly):
            await write(store, "b")
        assert (await log_of(store)).rev == 1
        store._writer.connection.execute("pragma query_only=0")
        assert (await write(store, "b")).first_seq == 2


MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/export /mnt/shared nfs4 rw 0 0
/dev/vdb /mnt/shared/local\\040disk xfs rw 0 0
//nas/x /mnt/nas cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "refused"),
    [("/srv/x.db", ""), ("/mnt/shared/x.db", "nfs4"), ("/mnt/shared/local disk/x.db", ""), ("/mnt/nas/a/x", "cifs")]
    + [("/mnt/sharedx/y.db", "")],
)
def test_a_network_filesystem_is_refused(path: str, refused: str) -> None:
    if not refused:
        _sqlite_file.check_filesystem(Path(path), MOUNTS)
        return
    with pytest.raises(InvalidRequest, match=f"{refused}.*allow_network_filesystem"):
        _sqlite_file.check_filesystem(Path(path), MOUNTS)


async def test_a_network_filesystem_can_be_allowed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentscope_durable.stores.records import sqlite

    monkeypatch.setattr(sqlite, "read_mounts", lambda: f"server:/x {os.path.realpath(tmp_path)} nfs rw 0 0\n")
    with pytest.raises(InvalidRequest):
        await SqliteRecordStore.open(tmp_path / "durable.db")
    assert list(tmp_path.iterdir()) == []
    async with opened(tmp_path, allow_network_filesystem=True) as store:
        await write(store, "a")


@pytest.mark.case("C74")
def test_a_sqlite_that_can_corrupt_the_file_is_warned_about_or_refused() -> None:
    for number in (3007000, 3040001, 3051002, 3052000):
        with pytest.warns(RuntimeWarning, match="3\\.x\\.y"):
            _sqlite_file.check_version(number, "3.x.y", strict=False)
        with pytest.raises(Incompatible):
            _sqlite_file.check_version(number, "3.x.y", strict=True)
    for number in (3051003, 3052001, 3054001):
        _sqlite_file.check_version(number, "3.x.y", strict=True)


@pytest.mark.case("C74")
async def test_one_connection_of_a_store_checkpoints(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        assert store._renewer.pragma("wal_autocheckpoint") == 0
        assert all(reader.connection.pragma("wal_autocheckpoint") == 0 for reader in store._readers)
        assert all(reader.connection.readonly("main") for reader in store._readers)
        assert int((await store.settings())["wal_autocheckpoint"]) > 0


async def test_a_vacuum_waits_until_no_host_lives(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for n in range(50):
            await write(store, "x" * 10_000, partition=f"p{n}")
        store.renew("host-1", 60_000, b"")
        store.renew("host-2", 60_000, b"")
        with pytest.raises(Unavailable, match="'host-1', 'host-2'. Stop every host: .* run the vacuum again"):
            await store.vacuum()
        await store.release("host-1")
        await store.release("host-2")
        await store.vacuum()
        await assert_sound(store, "p0", "p49")
        assert (await write(store, "more", partition="p7")).first_seq == 2


@pytest.mark.case("C61")
async def test_a_head_that_does_not_decode_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await write(store, "a")
        await write(store, "b", partition="q")
    connection = apsw.Connection(str(tmp_path / "durable.db"))
    connection.execute("update head set value=? where name='p'", (b'["only a namespace"]',))
    async with opened(tmp_path) as store:
        jobs = [write(store, "c"), write(store, "d", partition="q"), store.read("p", NOTHING)]
        first, second, third = await asyncio.gather(*jobs, return_exceptions=True)
        for answer in (first, third):
            assert isinstance(answer, CorruptRecord)
            assert (answer.key, answer.type_name) == ("p", "SessionHead")
        assert isinstance(second, Committed)
    assert connection.execute("select value from head where name='p'").fetchall() == [(b'["only a namespace"]',)]
    connection.close()


# ------------------------------------------------------------ what a commit writes


@pytest.mark.spec("BE-15")
async def test_a_step_writes_one_log_row_one_head_and_its_record(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        many = tuple((f"item/{n}", b"x" * 500) for n in range(2000))
        await store.transact("p", NOTHING, always(change(puts=many)))
        connection = store._writer.connection
        before, size = connection.total_changes(), wal_size(tmp_path)

        entry = Entry(b'["a","b"]', 2, b"[1]", b"block", "main", 1)
        await store.transact("p", NOTHING, always(change(entry=entry, puts=(("execution/t/1", b"{}"),))))

        assert connection.total_changes() - before == 3
        # One megabyte of records, and a few pages of 8 KB are written.
        assert wal_size(tmp_path) - size < 100_000


def wal_size(folder: Path) -> int:
    return (folder / "durable.db-wal").stat().st_size


@pytest.mark.case("C12")
async def test_every_commit_stands_between_its_failpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own trace of every connection that can write is matched with the failpoints passed."""
    story: list[str] = []
    connect = _sqlite_file.SqliteFile.connect
    watched: list[apsw.Connection] = []

    def watching(self: _sqlite_file.SqliteFile, **options: bool) -> apsw.Connection:
        connection = connect(self, **options)
        if not connection.readonly("main"):
            watched.append(connection)

            def hook() -> bool:  # Called for every transaction that wrote something, however it was written.
                story.append("write")
                return False

            def trace(event: dict[str, object]) -> None:  # A vacuum is the one write that goes past the hook.
                if str(event["sql"]).lower().startswith("vacuum"):
                    story.append("write")

            connection.set_commit_hook(hook)
            connection.trace_v2(apsw.SQLITE_TRACE_STMT, trace)
        return connection

    monkeypatch.setattr(_sqlite_file.SqliteFile, "connect", watching)
    _failpoints.observe(story.append)
    async with opened(tmp_path) as store:
        jobs = [write(store, "e", partition=f"p{n % 7}", puts=(("k", b"v"),)) for n in range(100)]
        jobs.append(write(store, ready=(ReadyRow("turn", "c", 0, "i"),)))
        await asyncio.gather(*jobs)
        await write(store, "a", puts=(("k", None),), unready=(("turn", "i"),))
        await write(store, prune=Prune(1, ((1, b""),)))
        await store.transact("p", NOTHING, always(Unchanged(None)))
        store.announce("host-1")
        store.renew("host-1", 60_000, b"")
        await store.dead_owners()
        await store.owners()
        await store.release("host-1")
        await store.vacuum()
        await store.integrity()
        await log_of(store)
    _failpoints.observe(None)

    assert len(watched) == 2
    assert {name.rsplit(".", 1)[0] for name in story} - {"write"} == {"store.commit", "store.renew", "store.release"}
    while story:
        before, during, after = story[:3]
        assert before.endswith(".before")
        assert during == "write"
        assert after == before.replace(".before", ".after")
        del story[:3]


async def test_more_sessions_than_heads_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sqlite_writer, "HEADS_MAX", 3)
    monkeypatch.setattr(_sqlite_reader, "HEADS_MAX", 3)
    names = [f"p{n}" for n in range(20)]
    async with opened(tmp_path) as store:
        for _ in range(3):
            await asyncio.gather(*(write(store, "a", "b", partition=name) for name in names * 2))
        assert {(await store.read(name, NOTHING)).rev for name in names} == {6}
        await assert_sound(store, *names)


# ------------------------------------------------------------ faults of a group


class Turnstile:
    """A lock that tells when someone waits for it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()

    def __enter__(self) -> None:
        self.reached.set()
        self.open.wait()

    def __exit__(self, *error: object) -> None:
        return None


async def grouped(store: SqliteRecordStore, *decides: Decide) -> list[object]:
    """Changes of one partition that are certain to be in one group: they queue up while the writer is held."""
    gate, turnstile = store._gate, Turnstile()
    store._gate = turnstile  # type: ignore[assignment]
    first = asyncio.ensure_future(store.transact("blocker", NOTHING, always(Unchanged(None))))
    await until(turnstile.reached.is_set)
    jobs = [asyncio.ensure_future(store.transact("p", Reads(keys=("k",)), decide)) for decide in decides]
    await until(lambda: store._changes.qsize() == len(jobs))
    turnstile.open.set()
    done = await asyncio.gather(first, *jobs, return_exceptions=True)
    store._gate = gate
    return list(done[1:])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def boom(name: str) -> None:
    raise OSError("injected")


async def test_a_fault_before_the_commit_makes_the_group_be_tried_one_by_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await write(store, "a")
        _failpoints.arm("store.commit.before", boom)
        done = await grouped(store, *[always(change(entry=events(str(n)))) for n in range(10)])

        assert [answer.first_seq for answer in done] == list(range(2, 12))  # type: ignore[attr-defined]
        await assert_sound(store, "p")


async def test_a_defect_of_one_change_is_not_the_groups(tmp_path: Path) -> None:
    """The database itself refuses it, when the whole group is written."""
    async with opened(tmp_path) as store:
        good = [always(change(entry=events("e"))) for _ in range(4)]
        bad = always(change(puts=(("k", "text where bytes belong"),)))  # type: ignore[arg-type]
        worse = always(change(ready=("no row",)))  # type: ignore[arg-type]
        done = await grouped(store, *good, bad, *good, worse, *good)

        failed = [n for n, answer in enumerate(done) if isinstance(answer, Exception)]
        assert failed == [4, 9]
        await assert_sound(store, "p")
        assert (await log_of(store)).rev == 12


@pytest.mark.case("C58")
async def test_an_unknown_outcome_is_looked_up_by_the_commit_id(tmp_path: Path) -> None:
    """The fault comes after the commit, and another process writes before the look-up."""
    async with opened(tmp_path) as store, opened(tmp_path) as other:

        def fault(name: str) -> None:
            asyncio.run(write(other, "theirs"))
            raise OSError("the answer is lost")

        await write(store, "a")
        _failpoints.arm("store.commit.after", fault)
        done = await grouped(store, *[always(change(entry=events(str(n)))) for n in range(3)])

        assert [answer.first_seq for answer in done] == [2, 3, 4]  # type: ignore[attr-defined]
        assert (await write(store, "b")).first_seq == 6
        texts = [row.events for row in (await log_of(store)).log]
        assert texts == [b'["a"]', b'["0"]', b'["1"]', b'["2"]', b'["theirs"]', b'["b"]']


async def test_an_outcome_that_cannot_be_known_is_uncertain(tmp_path: Path) -> None:
    def repeat(view: View, now_ms: int) -> Unchanged:
        return Unchanged(view.get("k"))

    async with opened(tmp_path) as store:
        await write(store, "a")
        faults = iter([True])
        store._writer.connection.set_commit_hook(lambda: next(faults, False))
        done = await grouped(store, always(change(puts=(("k", b"v"),))), repeat, always(change()))

        assert isinstance(done[0], Uncertain)
        assert isinstance(done[2], Uncertain)
        # It wrote nothing itself, so it decides again, without what may not have happened.
        assert isinstance(done[1], Committed)
        assert done[1].receipt is None
        assert (await write(store, "b")).first_seq == 2
        await assert_sound(store, "p")


@pytest.mark.parametrize("method", ["renew", "release"])
async def test_a_lost_answer_about_a_lease_is_uncertain(tmp_path: Path, method: str) -> None:
    async with opened(tmp_path) as store:
        store.renew("host-1", 60_000, b"")
        for side, error in (("before", OSError), ("after", Uncertain)):
            _failpoints.arm(f"store.{method}.{side}", boom)
            with pytest.raises(error):
                if method == "renew":
                    store.renew("host-1", 60_000, b"")
                else:
                    await store.release("host-1")
        store.renew("host-2", 60_000, b"")
        await write(store, "a")
        assert [lease.owner for lease in await store.owners()][-1] == "host-2"


async def test_a_full_disk_is_typed_and_passes(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await write(store, "a")
        connection = store._writer.connection
        pages = int(connection.pragma("page_count"))  # type: ignore[arg-type]
        connection.execute(f"pragma max_page_count={pages + 20}").fetchall()

        small = always(change(entry=events("small")))
        large = always(change(puts=(("k", b"x" * 1_000_000),)))
        done = await grouped(store, small, large, small)

        assert isinstance(done[0], Committed)
        assert isinstance(done[1], StoreFull)
        assert isinstance(done[1], Retry)
        assert isinstance(done[2], Committed)
        assert (await store.read("p", Reads(keys=("k",)))).keys == {}
        connection.execute("pragma max_page_count=1000000").fetchall()
        assert isinstance(await store.transact("p", NOTHING, large), Committed)
        await assert_sound(store, "p")


# ------------------------------------------------------------ other processes' locks


@pytest.mark.case("C73")
@pytest.mark.parametrize("what", ["transact", "renew", "release", "open"])
async def test_a_lock_of_another_process_is_waited_for(tmp_path: Path, what: str) -> None:
    async with opened(tmp_path) as store:
        await write(store, "a")
        store.renew("host-1", 60_000, b"")
        holder = Holder(tmp_path / "durable.db")

        async def again() -> None:
            await (await SqliteRecordStore.open(tmp_path / "durable.db")).close()

        waiting = asyncio.ensure_future(
            {
                "transact": lambda: write(store, "b"),
                "renew": lambda: SYSTEM.call_in_thread(lambda: store.renew("host-1", 60_000, b"")),
                "release": lambda: store.release("host-1"),
                "open": again,
            }[what]()
        )
        # Readers are not kept out, and see the state before.
        assert (await log_of(store)).rev == 1
        if what != "open":  # Opening needs no lock of a writer.
            assert not waiting.done()
        holder.let_go()
        await waiting


@pytest.mark.case("C73", "C62")
async def test_past_the_budget_the_store_is_busy_and_nothing_was_written(tmp_path: Path) -> None:
    async with opened(tmp_path, busy_timeout=0.05) as store:
        await write(store, "a")
        holder = Holder(tmp_path / "durable.db")
        jobs = [write(store, "b"), store.release("host-1")]
        jobs.append(SYSTEM.call_in_thread(lambda: store.renew("host-1", 60_000, b"")))
        for answer in await asyncio.gather(*jobs, return_exceptions=True):
            assert isinstance(answer, StoreBusy)
            assert isinstance(answer, Retry)
        holder.let_go()
        assert (await write(store, "b")).first_seq == 2
        assert await store.owners() == []


@pytest.mark.case("C73")
@pytest.mark.spec("BE-28")
async def test_contention_can_be_seen_in_figures(tmp_path: Path) -> None:
    budget_ms = 50
    async with opened(tmp_path, busy_timeout=budget_ms / 1000) as store:
        await write(store, "a")
        before = await store.statistics()
        assert (before.changes, before.transactions, before.busy) == (1, 1, 0)
        holder = Holder(tmp_path / "durable.db")
        answers = await asyncio.gather(*(write(store, "b") for _ in range(3)), return_exceptions=True)
        holder.let_go()
        assert {type(answer) for answer in answers} == {StoreBusy}
        after = await store.statistics()
        assert (after.changes, after.busy) == (1, 3)
        assert after.locked_ms >= before.locked_ms + budget_ms
        assert after.longest_ms >= budget_ms
        assert after.waited_ms >= after.longest_ms


class Holder:
    """Another process that holds the write lock."""

    def __init__(self, path: Path) -> None:
        program = """
            import apsw, sys
            connection = apsw.Connection(sys.argv[1])
            connection.execute("begin immediate")
            print("held", flush=True)
            sys.stdin.readline()
            connection.execute("rollback")
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"held\n"

    def let_go(self) -> None:
        self._process.communicate(b"\n")


async def test_a_heartbeat_goes_before_a_long_queue(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        jobs = [asyncio.ensure_future(write(store, "e", puts=(("k", b"x" * 2000),))) for _ in range(3000)]
        await asyncio.sleep(0)
        await SYSTEM.call_in_thread(lambda: store.renew("host-1", 60_000, b""))
        left = store._changes.qsize()
        await asyncio.gather(*jobs)

        assert left > 0
        assert [lease.alive for lease in await store.owners()] == [True]


async def test_readings_that_wait_share_a_snapshot_and_none_suffers_from_another(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        for name in "abc":
            await write(store, "e", partition=name)
        connection = apsw.Connection(str(tmp_path / "durable.db"))
        connection.execute("update head set value=? where name='b'", (b'["only a namespace"]',))
        connection.close()
        begun: list[str] = []
        for reader in store._readers:
            reader.connection.set_exec_trace(lambda _, sql, __: sql != "begin" or begun.append(sql) is None)
        # Both readers are held until all of it waits.
        busy, go_on = threading.Barrier(sqlite.READERS + 1), threading.Event()
        held = [asyncio.ensure_future(store._beside(lambda: (busy.wait(), go_on.wait()))) for _ in store._readers]
        await SYSTEM.call_in_thread(busy.wait)
        jobs = [asyncio.ensure_future(store.read(name, NOTHING)) for name in "abcabc"]
        await until(lambda: store._readings.qsize() == len(jobs))
        go_on.set()
        done = await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.gather(*held)

    assert [type(one).__name__ for one in done] == ["Records", "CorruptRecord", "Records"] * 2
    # One reader takes them all, unless the other was there in the middle of it.
    assert 1 <= len(begun) <= 2


async def test_a_record_that_another_process_wrote_is_seen_by_the_next_decision(tmp_path: Path) -> None:
    """What a writer remembers of records holds only as long as nobody else writes."""

    def seen(view: View, now_ms: int) -> Change:
        return change(receipt=view.get("k"), puts=(("own", b"1"),))

    async with opened(tmp_path) as one, opened(tmp_path) as other:
        for value in (b"1", b"2", None, b"3"):
            await other.transact("p", NOTHING, always(change(puts=(("k", value),))))
            for _ in range(2):
                assert (await one.transact("p", Reads(keys=("k",)), seen)).receipt == value


# ------------------------------------------------------------ time


HOUR = 3_600_000


@pytest.mark.case("C25")
@pytest.mark.spec("BE-23")
@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_of_the_wall_clock_neither_steals_nor_freezes_a_lease(tmp_path: Path, jump: int) -> None:
    clock = ManualClock()

    async def lease() -> OwnerLease:
        owners = (await store.read("p", Reads(owners=("host-1",)))).owners
        return owners["host-1"]

    async with opened(tmp_path, clock=clock) as store:
        store.renew("host-1", 30_000, b"")
        clock.advance(10_000)
        clock.jump(jump)
        assert ((await lease()).alive, (await lease()).remaining_ms) == (True, 20_000)
        clock.advance(19_999)
        assert (await lease()).alive
        clock.advance(1)
        assert not (await lease()).alive
        store.renew("host-1", 30_000, b"")
        clock.jump(-jump)
        assert ((await lease()).alive, (await lease()).age_ms) == (True, 0)


@pytest.mark.case("C25")
async def test_now_never_runs_back_nor_stands_still_nor_stays_wrong(tmp_path: Path) -> None:
    clock = ManualClock(10 * HOUR)
    async with opened(tmp_path, clock=clock) as store:

        async def now() -> int:
            await write(store, "e")
            return (await log_of(store)).log[-1].at_ms

        assert await now() == 10 * HOUR
        clock.jump(-HOUR)
        assert await now() == 10 * HOUR
        # At half speed, whether it is asked once or often.
        clock.advance(1000)
        assert await now() == 10 * HOUR + 500
        for _ in range(1000):
            clock.advance(1)
            await store.read("p", NOTHING)
        assert await now() == 10 * HOUR + 1000
        # After two hours of it both agree again.
        clock.advance(2 * HOUR)
        assert await now() == clock() == 11 * HOUR + 2000
        clock.advance(7)
        assert await now() == clock()


@pytest.mark.case("C25")
async def test_the_stores_time_is_kept_in_the_store(tmp_path: Path) -> None:
    """A process whose wall clock is behind goes on from the last stored instant; so does a reader beside a writer."""
    late, early = ManualClock(10 * HOUR), ManualClock(9 * HOUR)
    async with opened(tmp_path, clock=late) as store, opened(tmp_path, clock=early) as other:
        assert (await other.read("p", NOTHING)).now_ms == 9 * HOUR
        await write(store, "a")
        assert (await other.read("p", NOTHING)).now_ms == 10 * HOUR
        assert (await other.ready(ReadyScan("turn", "c"))).now_ms == 10 * HOUR
        await write(other, "b")
        assert [row.at_ms for row in (await log_of(other)).log] == [10 * HOUR, 10 * HOUR]
    async with opened(tmp_path, clock=ManualClock(HOUR)) as store:
        await write(store, "c")
        assert (await log_of(store)).log[-1].at_ms == 10 * HOUR


async def test_a_lease_of_another_boot_has_expired(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock=clock) as store:
        store.renew("host-1", HOUR, b"v")
        clock.jump(5000)
        clock.reboot("boot-2")
        [lease] = await store.owners()
        assert (lease.alive, lease.age_ms, lease.value) == (False, 5000, b"v")
        assert lease.remaining_ms < 0
        store.renew("host-1", HOUR, b"v")
        assert (await store.owners())[0].alive
        # Where the boot has no name, a renewal in the future gives it away.
        clock.advance(1000)
        store.renew("host-1", HOUR, b"v")
        clock.reboot("boot-2")
        assert not (await store.owners())[0].alive


# ------------------------------------------------------------ processes that die


PROGRAM = """
import asyncio, itertools, os, sys
from agentscope_durable.spi.record_store import LogRange, Reads
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.record_store import NOTHING, always, change, events

async def main():
    store = await SqliteRecordStore.open(sys.argv[1])
    async def session(name):
        for n in range(int(sys.argv[3])):
            done = await store.transact(name, NOTHING, always(change(entry=events(f"{n}", "x" * (n * 37 % 3000)),
                puts=((f"k/{n % 11}", b"y" * (n * 53 % 5000)), ("last", str(n).encode())))))
            os.write(1, f"{name} {done.first_seq}\\n".encode())
    await asyncio.gather(*(session(name) for name in sys.argv[2].split(",")))
    await store.close()

asyncio.run(main())
"""


def writer_process(path: Path, names: str, count: int, failpoint: str = "") -> subprocess.Popen[bytes]:
    environment = os.environ | {"DURABLE_FAILPOINT": failpoint}
    command = [sys.executable, "-c", PROGRAM, str(path), names, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def acknowledged(lines: list[bytes]) -> dict[str, int]:
    """The highest first number each Session was told. A torn last line was not told."""
    told: dict[str, int] = {}
    for line in lines:
        if line.endswith(b"\n"):
            name, first = line.decode().split()
            told[name] = max(told.get(name, 0), int(first))
    return told


@pytest.mark.spec("LO-08")
@pytest.mark.parametrize("seed", range(3))
async def test_a_kill_at_any_moment_leaves_a_sound_store_with_every_acknowledged_change(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    names = "a,b,c,d,e,f"
    told: dict[str, int] = {}
    for _ in range(6):
        process = writer_process(tmp_path / "durable.db", names, 100_000)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(chance.randrange(1, 400))]
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        told |= acknowledged(lines)

        async with opened(tmp_path) as store:
            await assert_sound(store, *names.split(","))
            for name, first in told.items():
                records = await store.read(name, Reads(keys=("last",)))
                assert records.next_seq >= first + 2
                assert records.rev * 2 == records.next_seq - 1
    assert told


@pytest.mark.spec("LO-08")
@pytest.mark.case("C12")
@pytest.mark.parametrize("side", ["before", "after"])
async def test_a_kill_at_each_commit_leaves_all_of_it_or_nothing(tmp_path: Path, side: str) -> None:
    done = 0
    for nth in (1, 2, 3, 5, 8):
        process = writer_process(tmp_path / "durable.db", "a", 100, f"store.commit.{side}:{nth}")
        lines, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        # Committed and told, but for the last one: killed before its commit, or before its answer.
        assert len(lines.splitlines()) == nth - 1
        done += nth - 1 if side == "before" else nth
        async with opened(tmp_path) as store:
            await assert_sound(store, "a")
            assert (await log_of(store, "a")).rev == done


@pytest.mark.spec("LO-04")
@pytest.mark.case("C54")
async def test_two_processes_write_one_session(tmp_path: Path) -> None:
    """Numbers stay dense, no commit is lost, and a reader that follows its cursor sees each event once, in order."""
    count = 150
    path = tmp_path / "durable.db"
    processes = [writer_process(path, "one,one,one", count) for _ in range(2)]
    outputs: list[list[bytes]] = [[], []]
    threads = [
        threading.Thread(target=lambda o=o, p=p: o.extend(p.stdout.readlines()))  # type: ignore[union-attr]
        for o, p in zip(outputs, processes, strict=True)
    ]
    for thread in threads:
        thread.start()
    seen: list[int] = []
    async with opened(tmp_path) as store:
        over = False
        while not over:
            over = not any(thread.is_alive() for thread in threads)
            for row in (await store.read("one", Reads(log=LogRange(after=seen[-1] if seen else 0)))).log:
                seen.extend(range(row.first, row.first + row.count))
        while rows := (await store.read("one", Reads(log=LogRange(after=seen[-1], limit=PAGE_MAX)))).log:
            for row in rows:
                seen.extend(range(row.first, row.first + row.count))
        assert [process.wait() for process in processes] == [0, 0]

        total = 2 * 3 * count
        assert seen == list(range(1, 2 * total + 1))
        assert (await store.read("one", NOTHING)).rev == total
        told = sorted(int(line.split()[1]) for output in outputs for line in output)
        assert told == list(range(1, 2 * total, 2))
        await assert_sound(store, "one")


HOST = """
import asyncio, sys
from agentscope_durable.stores.records.sqlite import SqliteRecordStore

async def main():
    store = await SqliteRecordStore.open(sys.argv[1], withhold_os_lock=sys.argv[3] == "withheld")
    store.announce(sys.argv[2])
    if sys.argv[3] != "silent":
        store.renew(sys.argv[2], 600_000, b"")
    print("alive", flush=True)
    sys.stdin.readline()
    if sys.argv[3] == "polite":
        await store.release(sys.argv[2])
    await store.close()

asyncio.run(main())
"""


def host_process(path: Path, owner: str, manner: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", HOST, str(path), owner, manner]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"alive\n"
    return process


async def test_a_killed_host_is_known_to_be_dead_at_once(tmp_path: Path) -> None:
    path = tmp_path / "durable.db"
    async with opened(tmp_path) as store:
        names = ("killed", "withheld", "polite", "Living:1")
        killed, withheld, polite, living = (host_process(path, name, name) for name in names)
        store.announce("me")
        store.renew("me", 600_000, b"")
        assert await store.dead_owners() == []

        for process in (killed, withheld):
            process.kill()
            process.wait()
        polite.communicate(b"\n")
        # The lease of the killed one still runs; its lock says more. Of the other nothing is known but the lease.
        assert await store.dead_owners() == ["killed"]
        assert await store.dead_owners(("withheld", "killed", "me", "Living:1")) == ["killed"]
        assert await store.dead_owners(("withheld", "me")) == []
        assert {lease.owner for lease in await store.owners() if lease.alive} == {
            "Living:1",
            "killed",
            "me",
            "withheld",
        }

        # The takeover is done: its lease is released, and its file is removed. A living host's file stays.
        for owner in ("killed", "withheld", "Living:1"):
            await store.release(owner)
        assert await store.dead_owners() == []
        assert len(os.listdir(tmp_path / "hosts")) == 2
        living.communicate(b"\n")
        await store.release("me")
    for process in (killed, withheld, polite, living):
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.mark.parametrize("silent", ["host-1", "Host:1"])
async def test_the_lock_file_of_a_host_that_died_before_its_first_renewal_is_swept(tmp_path: Path, silent: str) -> None:
    async def files() -> set[str]:
        await store.dead_owners()
        return set(os.listdir(tmp_path / "hosts"))

    async with opened(tmp_path) as store:
        died, killed, beginning = (
            host_process(tmp_path / "durable.db", name, manner)
            for name, manner in ((silent, "silent"), ("killed", "renewed"), ("beginning", "silent"))
        )
        for process in (died, killed):
            process.kill()
            process.wait()
        assert len(await files()) == 3, "who is no host removes nothing"

        store.announce("me")
        # The lease of the killed one names its file, which says that it is dead; the other is alive and about to renew.
        assert await files() == {"killed.lock", "beginning.lock", "me.lock"}
        assert await store.dead_owners() == ["killed"]
        beginning.communicate(b"\n")
        await store.release("me")
    for process in (died, killed, beginning):
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


async def test_a_host_of_the_same_process_that_was_closed_is_dead(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        other = await SqliteRecordStore.open(tmp_path / "durable.db")
        other.announce("host-1")
        other.announce("host-1")
        other.renew("host-1", 600_000, b"")
        assert await store.dead_owners() == []
        assert await other.dead_owners() == []
        await other.close()
        assert await store.dead_owners() == ["host-1"]
        with pytest.raises(HostClosed):
            other.announce("host-1")


@pytest.mark.case("C75")
def test_a_forked_child_is_told_and_the_parent_goes_on(tmp_path: Path) -> None:
    program = """
        import asyncio, os, sys
        from agentscope_durable.contracts.errors import UsedAfterFork
        from agentscope_durable.spi.record_store import ReadyScan, SessionScan
        from agentscope_durable.stores.records.sqlite import SqliteRecordStore
        from agentscope_durable.testing.record_store import NOTHING, always, change, events

        async def use(store):
            told = 0
            for ask in (
                lambda: store.transact("p", NOTHING, always(change())),
                lambda: store.read("p", NOTHING),
                lambda: store.ready(ReadyScan("turn", "c")),
                lambda: store.sessions(SessionScan("")),
                lambda: store.owners(),
                lambda: store.release("host"),
                lambda: store.dead_owners(),
            ):
                try:
                    await ask()
                except UsedAfterFork:
                    told += 1
            for ask in (lambda: store.renew("host", 1, b""), lambda: store.announce("host")):
                try:
                    ask()
                except UsedAfterFork:
                    told += 1
            await store.close()
            return told

        async def main():
            store = await SqliteRecordStore.open(sys.argv[1])
            store.announce("host")
            store.renew("host", 600_000, b"")
            writing = [asyncio.ensure_future(store.transact("p", NOTHING, always(change(entry=events("e")))))
                for _ in range(500)]
            await asyncio.sleep(0)
            children = []
            for _ in range(5):
                children.append(os.fork())
                if children[-1] == 0:
                    return store
            await asyncio.gather(*writing)
            told = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            assert told == [9] * 5, told
            assert (await store.transact("p", NOTHING, always(change(entry=events("e"))))).first_seq == 501
            assert await store.integrity() == []
            await store.close()

        # In the child the parent's loop must not be touched: it gets a loop of its own.
        loop = asyncio.new_event_loop()
        inherited = loop.run_until_complete(main())
        if inherited is not None:
            asyncio.events._set_running_loop(None)
            sys.exit(asyncio.new_event_loop().run_until_complete(use(inherited)))
        print("sound")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(tmp_path / "durable.db")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "sound\n", done.stderr
    assert done.returncode == 0


@pytest.mark.case("C75")
async def test_a_forked_child_does_not_keep_its_dead_parent_alive(tmp_path: Path) -> None:
    program = """
        import asyncio, os, sys
        from agentscope_durable.stores.records.sqlite import SqliteRecordStore

        async def main():
            store = await SqliteRecordStore.open(sys.argv[1])
            store.announce("host-1")
            store.renew("host-1", 600_000, b"")
            return store

        store = asyncio.run(main())
        if os.fork() == 0:
            print("ready", flush=True)
            sys.stdin.readline()
            os._exit(0)
        os.wait()
    """
    async with opened(tmp_path) as store:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program), str(tmp_path / "durable.db")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"ready\n"
        assert await store.dead_owners() == []
        process.kill()
        process.wait()
        assert await store.dead_owners() == ["host-1"]
        process.stdin.close()  # Ends the child.
        process.stdout.read()
        process.stdout.close()


async def test_an_open_that_was_cancelled_leaves_no_thread(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    opening = asyncio.ensure_future(SqliteRecordStore.open(tmp_path / "durable.db"))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with opened(tmp_path) as store:
        await write(store, "a")
    left = {thread.name for thread in threading.enumerate() if thread.name.startswith("sqlite-")}
    assert left <= before


# ------------------------------------------------------------ the oracle


@pytest.mark.parametrize("seed", range(8))
async def test_it_answers_as_the_store_in_memory_does(tmp_path: Path, seed: int) -> None:
    """The same random story told to both stores; every answer and every reading is compared."""
    chance = random.Random(seed)
    clock = ManualClock()
    # Where leases are stored is a store's own affair: the partition of no Session is told about without any.
    leases = seed % 2 == 1
    partitions = ["app" if leases else "", "app\x00a", "app\x00b", "apq\x00a"]
    keys = ["a/1", "a/2", "a/10", "b/é", "b/\U0010ffff", "c"]
    ranges = (Range("a/", limit=2), Range("", limit=100), Range("b/", after="b/é"), Range("a/", after="a/10"))
    page = LogRange(after=chance.randrange(4), limit=20, columns=(Column.EVENTS,))
    reads = Reads(keys=tuple(keys), ranges=ranges, owners=("host-1", "host-2"), log=page)

    def story(number: int) -> tuple[str, Decide]:
        partition, count, kind = chance.choice(partitions), chance.choice([0, 0, 1, 2, 3]), chance.random()
        puts = tuple((chance.choice(keys), chance.choice([None, b"1", b"22"])) for _ in range(chance.randrange(4)))
        rows = tuple(
            ReadyRow(
                "turn", chance.choice("cd"), clock() + chance.choice([-5, 0, 50]), chance.choice("xy"), str(number)
            )
            for _ in range(chance.randrange(3))
        )
        unready = tuple(("turn", chance.choice("xyz")) for _ in range(chance.randrange(2)))
        stream = chance.choice(["", "main", "side"])
        entry = None
        if kind > 0.2:
            text = b"[" + b",".join([b'"e"'] * count) + b"]" if count else b""
            entry = Entry(text, count, b"[1]" if kind > 0.6 else b"", b"j", stream, number if stream else 0)
        prune = chance.choice([0, 0, 0, 0, chance.randrange(1, 60)])
        left = chance.choice([b"", b"[null]"])

        def decide(view: View, now_ms: int) -> Change | Unchanged:
            log = view.log(page)
            seen = (view.head, view.next_seq, [view.get(key) for key in keys], [view.page(r) for r in ranges], log)
            through = min(view.pruned_through + prune, view.next_seq - 1)
            if kind > 0.95:
                raise LookupError(str(seen))
            if kind > 0.85:
                return Unchanged(seen)
            return Change(
                head=SessionHead("n", "s", number),
                commit_id=f"{number:032x}",
                entry=entry,
                puts=puts,
                ready=rows,
                unready=unready,
                receipt=(seen, [view.owner(owner) for owner in ("host-1", "host-2")], now_ms),
                prune=Prune(through, tuple((row.first, left) for row in log if row.first <= through))
                if prune
                else None,
            )

        return partition, decide

    async def told(
        store: RecordStore, stories: list[tuple[str, Callable[[View, int], Change | Unchanged]]]
    ) -> list[object]:
        jobs = [store.transact(partition, reads, decide) for partition, decide in stories]
        return [repr(answer) for answer in await asyncio.gather(*jobs, return_exceptions=True)]

    async def all_of(store: RecordStore) -> list[object]:
        found: list[object] = []
        everything = Reads(
            keys=tuple(keys),
            ranges=ranges,
            owners=("host-1", "host-2"),
            log=LogRange(after=chance_after, limit=7),
            streams=(StreamRange("main", limit=5), StreamRange("side", first=10, last=90)),
        )
        for partition in [*partitions, "absent"]:
            found.append(await store.read(partition, everything))
            found.append((await log_of(store, partition)).log)
        for klass in "cde":
            page = await store.ready(ReadyScan("turn", klass, limit=100))
            found.append((sorted(page.items, key=repr), page.next_due_ms, page.now_ms))
        found.append(await store.sessions(SessionScan("app\x00")))
        found.append(await store.sessions(SessionScan("", after="app\x00a", limit=2)))
        found.append(await store.owners())
        return found

    memory = MemoryRecordStore(clock)
    async with opened(tmp_path, clock=clock) as store:
        number = 0
        for _ in range(12):
            stories = [story(number + n + 1) for n in range(chance.randrange(1, 12))]
            number += len(stories)
            for one in (memory, store):
                if leases:
                    one.renew(f"host-{1 + number % 2}", 40, str(number).encode())
            assert await told(store, stories) == await told(memory, stories)
            chance_after = chance.randrange(30)
            assert await all_of(store) == await all_of(memory)
            clock.advance(chance.randrange(30))
            clock.jump(chance.choice([0, 0, 100, -100]))
        await assert_sound(store)


@pytest.mark.parametrize(
    "options",
    [{"synchronous": "OFF"}, {"synchronous": "full"}, {"busy_timeout": -1}, {"busy_timeout": math.nan}],
    ids=str,
)
async def test_a_setting_that_keeps_no_promise_is_refused(tmp_path: Path, options: dict) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        await SqliteRecordStore.open(tmp_path / "durable.db", **options)
    assert os.listdir(tmp_path) == []


async def test_a_path_that_is_too_long_for_sqlite_is_the_callers_affair(tmp_path: Path) -> None:
    """Not a fault that passes."""
    with pytest.raises(InvalidRequest, match="at most 480 bytes"):
        await SqliteRecordStore.open(tmp_path.joinpath(*["x" * 100] * 5) / "durable.db")


async def test_a_lock_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("not a folder")
    async with opened(tmp_path) as store:
        with pytest.raises(Unavailable, match="hosts"):
            store.announce("host-1")


async def test_a_killed_host_that_left_nothing_is_forgotten_with_its_lock_and_a_frozen_one_is_kept(
    tmp_path: Path,
) -> None:
    path = tmp_path / "durable.db"
    async with opened(tmp_path) as store:
        killed, frozen = host_process(path, "killed", "killed"), host_process(path, "frozen", "frozen")
        frozen.send_signal(signal.SIGSTOP)
        killed.kill()
        killed.wait()
        store.renew("frozen", -2 * LEASE_KEPT_MS, b"")

        assert await store.forget("killed", ("lease",))
        assert not await store.forget("frozen", ("lease",))
        assert {lease.owner for lease in await store.owners()} == {"frozen"}
        assert os.listdir(tmp_path / "hosts") == ["frozen.lock"]
        frozen.kill()
        frozen.wait()
        assert await store.forget("frozen", ("lease",))
        assert os.listdir(tmp_path / "hosts") == []
    for process in (killed, frozen):
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


# ------------------------------------------------------------ one id is enough, and each row has its sum


async def test_a_turn_is_found_through_an_index(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        plan = await store._ask(lambda reader: list(reader.run(f"explain query plan {HOLDERS}", ("turn/t1", 2))))

    steps = [str(step[-1]) for step in plan]
    assert any("USING INDEX rec_found" in step for step in steps), steps
    assert not any(step.startswith("SCAN") for step in steps), steps


async def test_every_log_row_says_by_itself_whether_it_is_what_was_written(tmp_path: Path) -> None:
    entries = [events("one", "two"), Entry(private=b"[1]", journal=b"native", stream="main", at=1), Entry()]
    async with opened(tmp_path) as store:
        for entry in entries:
            await store.transact("s", NOTHING, always(change(entry=entry)))
        rows = await store._ask(
            lambda reader: list(
                reader.run("select events, private, journal, events_sum, rest_sum from log order by id")
            )
        )

    assert len(rows) == len(entries)
    for found, private, journal, of_events, of_rest in rows:
        assert of_events == (None if found is None else events_sum(found))
        assert of_rest == rest_sum(private or b"", journal or b"")
    assert len({row[-1] for row in rows}) == 2
