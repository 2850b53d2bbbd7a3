"""What restore and fork read and write, and where their bodies go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import COLUMN_REFERENCE, INLINE_MAX_BYTES, decode_reference
from agentscope_durable.contracts.change import Change, View
from agentscope_durable.contracts.errors import CorruptRecord, DurableError, Incompatible, NotFound
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.records import CheckpointRecord, decode, encode
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.record_store import Committed, Decide, Reads, Records
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, say
from tests.runtime.conftest import all_events, refused

KEY = SessionKey("app", "source")
TARGET = SessionKey("app", "target")
SCRIPT = (say("hm"), final("I know: {context}"))
LARGE = "x" * (5 * 1024 * 1024)


# ---- how much ----


class CountingStore(MemoryRecordStore):
    """Counts rows read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.read_rows = 0
        self.changes: list[Change] = []

    async def read(self, partition: str, reads: Reads) -> Records:
        records = await super().read(partition, reads)
        self.read_rows += len(records.keys) + len(records.log)
        self.read_rows += sum(map(len, records.ranges.values())) + sum(map(len, records.streams.values()))
        return records

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        def counted(view: View, now_ms: int) -> Any:
            decided = decide(view, now_ms)
            if isinstance(decided, Change):
                self.changes.append(decided)
            return decided

        self.read_rows += len(reads.keys)
        return await super().transact(partition, reads, counted)

    def forget(self) -> None:  # type: ignore[override]
        self.read_rows = 0
        self.changes = []


@pytest.mark.spec("BE-25")
@pytest.mark.parametrize("turns", [2, 30])
async def test_a_restore_and_a_fork_cost_the_rows_of_one_epoch_and_one_commit_whatever_came_before(turns: int) -> None:
    store = CountingStore()
    backend = TransactionalSessionBackend(store, wakeups=LocalWakeups())
    harness = Harness("agent", "v1", ScriptedHarness([final("so")]))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        for number in range(turns):
            await session.call(f"r{number}", "a")
        thread = session.main_thread()
    async with DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
        thread = runtime.get_session(KEY).main_thread()
        page = await thread.checkpoints()
        second = page.items[1]
        store.forget()
        restored = await thread.restore(second.position, page.current, "restore")
        # Asked, position, Thread, the stream from the base to the position (two commits of each Turn and the second
        # one's claim), the workspace then and now, decided.
        assert store.read_rows == 3 + 2 + 1 + 5 + 3 + 3
        [change] = store.changes
        assert change.entry is not None
        assert sorted(key for key, _ in change.puts) == [
            keys.checkpoint("main", change.entry.at),
            keys.request("restore"),
            keys.thread("main"),
        ]
        assert (change.entry.count, change.ready, change.unready) == (1, (), ())

        store.forget()
        await thread.fork(restored.position, ThreadKey(KEY, "branch"), "fork")
        # The same, and the stream is one row: a restored position is a base. The workspace is that of then, and how far
        # it is counted now. At the end one more look whether the position is still there.
        assert store.read_rows == 2 + 2 + 1 + 1 + 2 + 2 + 2
        [change] = store.changes
        assert sorted(key for key, _ in change.puts) == [
            keys.checkpoint("branch", 1),
            keys.request("fork"),
            keys.thread("branch"),
        ]
        assert change.entry is not None
        assert change.entry.count == 2


# ---- where to ----


async def told(backend: LocalBackend, *said: str) -> None:
    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.create_session(TARGET, "agent")
        await runtime.start()
        for text in said:
            await session.call(text[:20], text, timeout=90)


def removed(folder: Path, session: SessionKey) -> None:
    """Everything of a Session is gone: its rows, its records and its objects."""
    database = apsw.Connection(str(folder / "durable.db"))
    [(p,)] = database.execute("select p from head where name=?", (keys.partition(session),))
    for table in ("log", "rec", "ready", "head"):
        database.execute(f"delete from {table} where p=?", (p,))
    database.close()


@pytest.mark.spec("CK-17")
@pytest.mark.backend("sqlite")
async def test_a_fork_needs_nothing_of_its_source_any_more(tmp_path: Path) -> None:
    objects = FileObjectStore(tmp_path / "objects")
    async with LocalBackend.open(tmp_path, synchronous="NORMAL") as backend:
        await told(backend, LARGE, "b")
        async with DurableRuntime(backend=backend, checkpoints={"agent": ScriptedHarness.restore}) as api:
            thread = api.get_session(KEY).main_thread()
            [first, _] = await thread.checkpoints()
            await thread.fork(first.position, ThreadKey(TARGET, "branch"), "fork")
        source, target = keys.partition(KEY), keys.partition(TARGET)
        journal = _newest_journal(tmp_path, TARGET)
        assert journal.startswith(COLUMN_REFERENCE)
        reference = decode_reference(journal)
        assert reference.size > len(LARGE) > INLINE_MAX_BYTES
        assert await objects.list(target) == [reference.name]
        for digest in await objects.list(source):
            await objects.delete(source, digest)
    removed(tmp_path, KEY)
    async with LocalBackend.open(tmp_path, synchronous="NORMAL") as backend:
        harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
        async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
            await refused(runtime.get_session(KEY).view(), NotFound)
            await runtime.start()
            branch = runtime.get_session(TARGET).get_thread("branch")
            assert str(await branch.call("next", "c", timeout=90)) == f"I know: {LARGE}, c"
            # The request is answered as it was, though nothing could be copied any more.
            gone = runtime.get_session(KEY).main_thread()
            assert (await gone.fork(first.position, ThreadKey(TARGET, "branch"), "fork")).key == branch.key


def _newest_journal(folder: Path, session: SessionKey) -> bytes:
    database = apsw.Connection(str(folder / "durable.db"))
    [(journal,)] = database.execute(
        "select journal from log join head using (p) where name=? and journal is not null order by id desc limit 1",
        (keys.partition(session),),
    )
    database.close()
    return bytes(journal)


# ---- what was altered ----


def alter(folder: Path, table: str, column: str, where: str, change: Callable[[bytes], bytes]) -> None:
    database = apsw.Connection(str(folder / "durable.db"))
    select = f"select rowid, {column} from {table} where {where}"
    for row, value in list(database.execute(select)):
        database.execute(f"update {table} set {column}=? where rowid=?", (change(bytes(value)), row))
    database.close()


def another_digest(stored: bytes) -> bytes:
    return encode(replace(decode(CheckpointRecord, stored), digest="0" * 32))


ALTERATIONS: dict[str, tuple[tuple[str, str, str, Callable[[bytes], bytes]], type[DurableError]]] = {
    "a row": (
        ("log", "journal", "journal is not null", lambda value: value.replace(b'"text":"a"', b'"text":"z"')),
        CorruptRecord,
    ),
    "the state version": (
        ("rec", "value", "key='thread/main'", lambda value: value.replace(b"scripted-1", b"scripted-0")),
        Incompatible,
    ),
    "the digest": (("rec", "value", "key like 'checkpoint/%'", another_digest), CorruptRecord),
}


@pytest.mark.spec("CK-04", "CK-13", "BE-20", "BE-21")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("what", ALTERATIONS)
async def test_what_was_altered_is_not_restored_and_nothing_is_changed(tmp_path: Path, what: str) -> None:
    async with LocalBackend.open(tmp_path, synchronous="NORMAL") as backend:
        await told(backend, "a", "b")
    place, error = ALTERATIONS[what]
    alter(tmp_path, *place)
    async with (
        LocalBackend.open(tmp_path, synchronous="NORMAL") as backend,
        DurableRuntime(backend=backend, checkpoints={"agent": ScriptedHarness.restore}) as api,
    ):
        session, target = api.get_session(KEY), api.get_session(TARGET)
        thread = session.main_thread()
        before = await all_events(session), await all_events(target)
        first, second = [checkpoint.position for checkpoint in await thread.checkpoints()]
        await refused(thread.restore(first, second, "restore"), error)
        await refused(thread.fork(first, ThreadKey(TARGET, "branch"), "fork"), error)
        assert (await all_events(session), await all_events(target)) == before
