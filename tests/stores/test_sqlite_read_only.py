"""A SQLite store that is only looked at: it is read whatever its hosts did, and stays as it was, byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import apsw
import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import (
    CorruptRecord,
    HostClosed,
    NotADatabase,
    NotFound,
    StoreMoved,
    StoreReadOnly,
    UnknownFormat,
)
from agentscope_durable.spi.record_store import PAGE_MAX, LogRange, Reads, RecordStore, SessionScan
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.stores.records.sqlite_read_only import SqliteReadOnlyStore
from agentscope_durable.testing.record_store import NOTHING, always, change, events

pytestmark = pytest.mark.backend("sqlite")

SECONDS_MAX = 90
ROOT = Path(__file__).resolve().parents[2]
ALL = Reads(log=LogRange(limit=PAGE_MAX))

# A host that writes one event for each line it is given, and says so; it ends with its standard input.
HOST = """
import asyncio, sys
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.record_store import NOTHING, always, change, events

async def main():
    store = await SqliteRecordStore.open(sys.argv[1], synchronous="NORMAL")
    store.announce("host-1")
    store.renew("host-1", 3_600_000, b"[]")
    for line in sys.stdin:
        await store.transact("s", NOTHING, always(change(entry=events(line.strip()))))
        print(line.strip(), flush=True)
    await store.close()

asyncio.run(main())
"""


class Host:
    """A process that has the store open and writes when it is told to."""

    def __init__(self, database: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, str(database)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        )

    def write(self, word: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline().strip() == word

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(SECONDS_MAX) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS_MAX)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "durable.db")
    yield host
    host.kill()
    for pipe in (host.process.stdin, host.process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


@asynccontextmanager
async def looked_at(place: Path) -> AsyncGenerator[SqliteReadOnlyStore]:
    store = await SqliteReadOnlyStore.open(place / "durable.db")
    try:
        yield store
    finally:
        await store.close()


def traces(place: Path) -> dict[str, tuple[str, int]]:
    """Every file there is, its content and when it was written."""
    return {
        str(path.relative_to(place)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in sorted(place.rglob("*"))
        if path.is_file()
    }


async def words(store: SqliteReadOnlyStore) -> list[str]:
    records = await store.read("s", ALL)
    return [word for row in records.log for word in json.loads(row.events)]


async def test_a_store_that_its_hosts_have_left_is_read_and_nothing_is_made_beside_it(
    tmp_path: Path, host: Host
) -> None:
    host.write("one")
    host.leave()
    before = traces(tmp_path)

    async with looked_at(tmp_path) as store:
        assert await words(store) == ["one"]
        assert await store.sessions(SessionScan(prefix="s")) == ["s"]
        assert await store.dead_owners() == ["host-1"]

    assert traces(tmp_path) == before
    assert "durable.db-wal" not in before


async def test_a_store_is_read_while_a_host_writes_it(tmp_path: Path, host: Host) -> None:
    host.write("one")

    async with looked_at(tmp_path) as store:
        assert await words(store) == ["one"]
        host.write("two")
        assert await words(store) == ["one", "two"]
        [lease] = await store.owners()
        assert lease.alive
        assert await store.dead_owners() == []


async def test_reading_does_not_keep_a_host_from_leaving_a_clean_store(tmp_path: Path, host: Host) -> None:
    host.write("one")

    async with looked_at(tmp_path) as store:
        assert await words(store) == ["one"]
        host.leave()
        assert sorted(path.name for path in tmp_path.glob("durable.db*")) == ["durable.db"]
        assert await words(store) == ["one"]

    assert sorted(path.name for path in tmp_path.glob("durable.db*")) == ["durable.db"]


@pytest.mark.parametrize("gone", [(), ("durable.db-shm",)], ids=["as it was left", "copied without its index"])
async def test_a_store_whose_host_was_killed_is_read_and_not_recovered(
    tmp_path: Path, host: Host, gone: tuple[str, ...]
) -> None:
    host.write("one")
    host.kill()
    for name in gone:
        (tmp_path / name).unlink()
    before = traces(tmp_path)
    assert (tmp_path / "durable.db-wal").stat().st_size > 0

    async with looked_at(tmp_path) as store:
        assert await words(store) == ["one"]
        assert await store.dead_owners() == ["host-1"]

    assert traces(tmp_path) == before


# Everything is imported before the rights are dropped: the interpreter may lie where only its owner can read.
AS_NOBODY = """
import asyncio, concurrent.futures.thread, os, sys
import agentscope_durable.stores.records.sqlite, agentscope_durable.stores.records.sqlite_read_only
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import StoreReadOnly
from agentscope_durable.spi.record_store import LogRange, Reads

async def main():
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        await LocalBackend.open(sys.argv[1])
    except StoreReadOnly:
        print("not to be written")
    async with LocalBackend.open(sys.argv[1], read_only=True) as backend:
        print((await backend.records.read("s", Reads(log=LogRange()))).log[0].events.decode())

asyncio.run(main())
"""


@pytest.mark.parametrize("left", ["closed", "killed", "killed, without its index"])
def test_a_copy_on_a_disk_that_cannot_be_written_is_read(tmp_path: Path, host: Host, left: str) -> None:
    host.write("one")
    host.leave() if left == "closed" else host.kill()
    # Not below the test's own folder, which nobody else may enter.
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "copy"
        shutil.copytree(tmp_path, copy)
        if left == "killed, without its index":
            (copy / "durable.db-shm").unlink()
        for path in (*copy.rglob("*"), copy):
            path.chmod(0o555 if path.is_dir() else 0o444)
        Path(name).chmod(0o755)
        before = traces(copy)

        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(copy)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

        assert done.stdout.splitlines() == ["not to be written", '["one"]'], done.stderr
        assert traces(copy) == before
        copy.chmod(0o755)


@pytest.mark.parametrize("gone", [(), ("durable.db-shm",)], ids=["left", "copied without its index"])
async def test_a_reading_during_which_somebody_begins_to_write_is_made_again(
    tmp_path: Path, host: Host, gone: tuple[str, ...]
) -> None:
    host.write("one")
    host.kill() if gone else host.leave()
    for name in gone:
        (tmp_path / name).unlink()
    second = Host(tmp_path / "durable.db")
    seen: list[int] = []

    def read(reader) -> int:
        found = len(reader.records("s", ALL).log)
        if not seen:
            second.write("two")
        seen.append(found)
        return found

    try:
        async with looked_at(tmp_path) as store:
            assert await store._ask(read) == 2
    finally:
        second.kill()
        for pipe in (second.process.stdin, second.process.stdout):
            assert pipe is not None
            pipe.close()
    assert seen == [1, 2]


async def test_an_error_of_a_moment_that_has_passed_is_not_told(tmp_path: Path) -> None:
    async with await SqliteRecordStore.open(tmp_path / "durable.db") as store:
        await store.transact("s", NOTHING, always(change(entry=events("one"))))
    tries: list[int] = []

    def torn(reader) -> int:
        tries.append(1)
        if len(tries) == 1:
            os.utime(tmp_path / "durable.db", ns=(1, 1))
            raise CorruptRecord("a page", "page", "half of it is new")
        return len(reader.records("s", ALL).log)

    async with looked_at(tmp_path) as store:
        assert await store._ask(torn) == 1
        with pytest.raises(CorruptRecord, match="for good"):

            def broken(reader) -> None:
                raise CorruptRecord("a page", "page", "for good")

            await store._ask(broken)


async def test_what_would_write_is_refused(tmp_path: Path) -> None:
    async with await SqliteRecordStore.open(tmp_path / "durable.db") as store:
        await store.transact("s", NOTHING, always(change(entry=events("one"))))
    before = traces(tmp_path)

    async with looked_at(tmp_path) as store:
        with pytest.raises(StoreReadOnly):
            await store.transact("s", NOTHING, always(change()))
        for write in (lambda: store.renew("h", 1, b""), lambda: store.announce("h")):
            with pytest.raises(StoreReadOnly):
                write()
        for awaited in (store.release("h"), store.forget("h", ())):
            with pytest.raises(StoreReadOnly):
                await awaited
    with pytest.raises(HostClosed):
        await store.read("s", NOTHING)

    assert traces(tmp_path) == before


def test_it_has_every_method_of_a_record_store() -> None:
    promised = {name for name in vars(RecordStore) if not name.startswith("_")}

    assert "transact" in promised
    assert promised <= set(dir(SqliteReadOnlyStore))


# ------------------------------------------------------------ what is taken away


@pytest.mark.parametrize("how", ["deleted", "moved away", "replaced"])
async def test_a_store_that_is_not_at_its_place_any_more_is_not_read(tmp_path: Path, host: Host, how: str) -> None:
    host.write("one")
    host.leave()
    file, elsewhere = tmp_path / "durable.db", tmp_path / "elsewhere.db"
    async with looked_at(tmp_path) as store:
        assert await words(store) == ["one"]
        if how == "deleted":
            file.unlink()
        else:
            file.rename(elsewhere)
        if how == "replaced":
            # The same words at the same place, and another file: a copy that was put back, say.
            shutil.copyfile(elsewhere, file)
        for _ in range(2):
            with pytest.raises(StoreMoved) as caught:
                await words(store)
            assert str(file) in str(caught.value)
        if how == "moved away":
            elsewhere.rename(file)
            assert await words(store) == ["one"]


# ------------------------------------------------------------ what cannot be opened


async def test_where_there_is_no_store_none_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()

    for place in (tmp_path / "missing", tmp_path / "empty"):
        for options in ({"read_only": True}, {"create": False}):
            with pytest.raises(NotFound) as caught:
                await LocalBackend.open(place, **options)
            assert str(place) in str(caught.value)

    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]
    assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"a letter to somebody", b"SQLite format 3\x00" + b"\xff" * 4096], ids=["empty", "text", "damaged"]
)
async def test_a_file_that_is_no_store_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "durable.db").write_bytes(content)
    before = traces(tmp_path)

    with pytest.raises(NotADatabase):
        await LocalBackend.open(tmp_path, read_only=True)

    assert traces(tmp_path) == before


async def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "durable.db"))
    connection.execute("pragma journal_mode=wal").fetchall()
    connection.execute("create table t(a)")
    connection.close()
    before = traces(tmp_path)

    with pytest.raises(NotADatabase):
        await LocalBackend.open(tmp_path, read_only=True)

    assert traces(tmp_path) == before


@pytest.mark.spec("BE-27", "PT-12")
@pytest.mark.parametrize(
    "newer", ["pragma user_version=9", "update meta set value='9.9' where key='revision'"], ids=["format", "revision"]
)
async def test_a_store_of_a_newer_release_is_refused_and_left_as_it_is(tmp_path: Path, newer: str) -> None:
    await (await LocalBackend.open(tmp_path)).close()
    connection = apsw.Connection(str(tmp_path / "durable.db"))
    connection.execute(newer)
    connection.close()
    before = traces(tmp_path)

    with pytest.raises(UnknownFormat) as caught:
        await LocalBackend.open(tmp_path, read_only=True)

    assert "9" in caught.value.found
    assert traces(tmp_path) == before
