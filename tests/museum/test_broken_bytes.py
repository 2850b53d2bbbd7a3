"""A broken byte in what is stored gives the documented error: no other one, no hang, no crash.

The bytes are those of a recorded store, so that every kind of record, log column and journal row is among them.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.backend.queries.rows import Found, payload_of, tool_changed
from agentscope_durable.contracts import records
from agentscope_durable.contracts.bodies import column_reference
from agentscope_durable.contracts.errors import CorruptRecord, DurableError
from agentscope_durable.contracts.journal import JournalBatch
from agentscope_durable.contracts.log import decode_events, decode_facts
from agentscope_durable.contracts.records import STORAGE_REVISION
from agentscope_durable.contracts.results import read_notice
from agentscope_durable.journal.checkpoint import base_rows, fold, to_state_json
from agentscope_durable.journal.position import POSITION_FIELD, read_position
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.stores.records._clock import LeaseRow
from tests.museum.exhibit import SHOWN, key
from tests.museum.test_museum import MUSEUM, about

EXHIBIT = MUSEUM / STORAGE_REVISION
KINDS = sorted(
    (kind for kind in vars(records).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)),
    key=lambda kind: kind.__name__,
)
MANY = 200
"""Broken bytes that cannot all go unnoticed."""
DEEP = b"[" * 100_000
"""Nesting that no reader follows to its end."""


@cache
def column(query: str) -> list[bytes]:
    connection = apsw.Connection(f"file:{EXHIBIT / 'durable.db'}?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | 64)
    found = [bytes(value) for (value,) in connection.execute(query) if value]
    connection.close()
    assert found, query
    return found


# ------------------------------------------------------------ readers of stored bytes


def _record(data: bytes) -> None:
    """As a record of each kind; the last refusal is raised, after all have been asked."""
    refused: CorruptRecord | None = None
    for kind in KINDS:
        try:
            records.decode(kind, data)
        except CorruptRecord as error:
            refused = error
    if refused is not None:
        raise refused


def _either() -> Any:
    class Either:
        def __enter__(self) -> None: ...

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
            return isinstance(error, CorruptRecord)

    return Either()


def _events(data: bytes) -> None:
    for event in decode_events(data, 1):
        if event is not None:
            with _either():
                payload_of(Found(1, 0, event))
            with _either():
                tool_changed(Found(1, 0, event))


def _journal(data: bytes) -> None:
    batch = JournalBatch.decode(data, position=7)
    state = fold([(batch.expected_head + 1, msgspec.structs.replace(batch, expected_head=0))])
    if state.base_at is not None:
        base_rows(to_state_json(state))
        read_position(state.fields.get(POSITION_FIELD))


READERS: dict[str, tuple[str, Callable[[bytes], object]]] = {
    "record": ("select value from rec", _record),
    "events": ("select events from log", _events),
    "facts": ("select private from log", lambda data: decode_facts(data, "here")),
    "journal": ("select journal from log", _journal),
    "reference": ("select journal from log", lambda data: column_reference(b"@" + data)),
    "lease": ("select value from rec where key like 'owner/%'", LeaseRow.decode),
    "notice": ("select value from rec where key like 'owner/%'", read_notice),
}


@st.composite
def broken(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Stored bytes with a few of them changed, gone, doubled, or new."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "cut", "drop", "insert", "repeat"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "drop":
                del data[at : at + draw(st.integers(1, 8))]
            case "insert":
                data[at:at] = draw(
                    st.sampled_from([b"\x00", b"\xff", b"\xed\xa0\x80", b"[", b'"', b"9" * 40, b"null", b"1e999", b"-"])
                )
            case _:
                data[at:at] = data[at : at + 40]
    return bytes(data)


@pytest.mark.case("C61")
@pytest.mark.parametrize("reader", READERS)
@given(data=st.data())
def test_a_broken_byte_is_read_as_something_else_or_is_a_corrupt_record(reader: str, data: st.DataObject) -> None:
    query, read = READERS[reader]
    with _either():
        read(data.draw(broken(column(query))))


@pytest.mark.case("C61")
@pytest.mark.parametrize("reader", [name for name in READERS if name != "notice"])
def test_nesting_without_end_is_a_corrupt_record(reader: str) -> None:
    """msgspec ends it with RecursionError, which is none of its own errors; it went through every reader (0033)."""
    with pytest.raises(CorruptRecord):
        READERS[reader][1](DEEP)


def test_what_a_strange_host_published_says_nothing() -> None:
    for published in (DEEP, b"\xff", b"[true]", b"[1e999]", b'"x"'):
        assert read_notice(published).classes == ()


# ------------------------------------------------------------ a whole store


@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("seed", [*range(12), 1144])
async def test_a_store_with_broken_bytes_answers_or_raises_its_own_errors(tmp_path: Path, seed: int) -> None:
    """Bytes of records and rows, and bytes of SQLite's own pages."""
    folder = tmp_path / "store"
    shutil.copytree(EXHIBIT, folder)
    chance = random.Random(seed)
    path = folder / "durable.db"
    content = bytearray(path.read_bytes())
    count = chance.choice((1, 10, MANY))
    for _ in range(count):
        # Not the first page: without it, it is no database, which is a test of its own.
        content[chance.randrange(4096, len(content))] = chance.randrange(256)
    path.write_bytes(content)

    async with asyncio.timeout(90):
        try:
            async with LocalBackend.open(folder, read_only=True) as backend, DurableRuntime(backend=backend) as runtime:
                noticed = await _look_everywhere(backend, runtime)
        except DurableError:
            noticed = 1
    assert noticed or count < MANY


async def _look_everywhere(backend: Any, runtime: DurableRuntime) -> int:
    """How many looks were refused, and what doctor found. Any other error goes through."""
    turns = about(STORAGE_REVISION)["turns"]
    operations = HostOperations(backend)
    looks: list[Callable[[], Any]] = [operations.list_sessions]
    for shown, what in SHOWN.items():
        session = runtime.get_session(key(what.session or shown))
        turn = session.get_turn(turns[shown])
        looks += [session.snapshot, session.history, session.list_turns, session.main_thread().checkpoints]
        looks += [turn.status, turn.explain, turn.list_tools, turn.list_runs, turn.pending_interactions]
    noticed = 0
    for look in looks:
        try:
            await look()
        except DurableError:
            noticed += 1
    try:
        return noticed + len((await operations.doctor(deep=True)).findings)
    except DurableError:
        return noticed + 1
