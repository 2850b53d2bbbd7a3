"""C82: runs ended as "corrupted log" with no way to repair; only cancel was left."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.errors import CorruptRecord, TurnFailed, Unfinished
from agentscope_durable.contracts.events import PublicEvent
from agentscope_durable.contracts.status import SettledBy, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final, say
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, all_events, refused, turn_is
from tests.servers.fixtures import shared_postgres
from tests.servers.stores import schema_of

pytestmark = pytest.mark.case("C82")

SCRIPT = {
    "": [say("hm"), final("I know: {context}")],
    "deploy": [say("I will"), approval("deploy"), final("deployed")],
}
DATABASE = "durable.db"


def opening(folder: Path, store: str) -> Any:
    if store == "postgres":
        return PostgresBackend.open(shared_postgres().dsn(), schema=schema_of(folder), initialize_schema=True)
    return LocalBackend.open(folder, synchronous="NORMAL")


@asynccontextmanager
async def host(folder: Path, store: str = "sqlite") -> AsyncGenerator[tuple[DurableRuntime, HostOperations]]:
    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    async with (
        opening(folder, store) as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime,
    ):
        await runtime.start()
        yield runtime, HostOperations(backend, checkpoints={"agent": ScriptedHarness.restore})


async def interrupted(folder: Path, *said: str, store: str = "sqlite") -> str:
    """A Thread that was told these things, and a Turn of it that waits for an approval; the Turn's id."""
    async with host(folder, store) as (runtime, _):
        session = await runtime.create_session(KEY, "agent")
        for text in said:
            await session.call(text, text)
        turn = await session.submit("deploy", "deploy")
        await turn_is(turn, where=lambda view: any(one.kind is WaitKind.APPROVAL for one in view.waiting_on))
        return turn.turn_id


def native_rows(database: apsw.Connection) -> list[tuple[int, bytes]]:
    return list(database.execute("select id, journal from log where journal is not null and stream='main' order by at"))


def altered(database: apsw.Connection) -> None:
    row, block = native_rows(database)[-1]
    database.execute("update log set journal=? where id=?", (bytes(block)[:-2] + b" " + bytes(block)[-2:], row))


def truncated(database: apsw.Connection) -> None:
    for row, _ in native_rows(database)[-2:]:
        database.execute("update log set journal=null where id=?", (row,))


def garbage(database: apsw.Connection) -> None:
    row, _ = native_rows(database)[-1]
    database.execute("update log set journal=? where id=?", (b"\x00\xff", row))


def contradicted(database: apsw.Connection) -> None:
    """A second row at the same position says something else."""
    row, _ = native_rows(database)[-1]
    _doubled(database, row, b'[1,[],[["t",0]],false]')


def _doubled(database: apsw.Connection, row: int, journal: bytes | None = None) -> None:
    columns = [name for _, name, *_ in database.execute("pragma table_info(log)") if name not in ("id", "rev")]
    names = ", ".join(columns)
    database.execute(
        f"insert into log(rev, {names}) select rev + 1000000, {names} from log where id=?",
        (row,),
    )
    if journal is not None:
        database.execute("update log set journal=? where id=?", (journal, database.last_insert_rowid()))


def doubled(database: apsw.Connection) -> None:
    for row, _ in native_rows(database):
        _doubled(database, row)


def from_the_second_turn_on(database: apsw.Connection) -> None:
    for row, block in native_rows(database):
        database.execute("update log set journal=? where id=?", (_said_otherwise(bytes(block)), row))


def _said_otherwise(block: bytes) -> bytes:
    return block.replace(b'"text":"b"', b'"text":"B"')


def damage(folder: Path, how: Callable[[apsw.Connection], None]) -> None:
    database = apsw.Connection(str(folder / DATABASE))
    how(database)
    database.close()


NATIVE = "select rev, journal from {log} where journal is not null and stream='main'::bytea order by at desc limit $1"
COLUMNS = "at_ms, at, count, events_sum, rest_sum, commit_id, stream, private, events"
AGAIN = (
    f"insert into {{log}}(p, first, rev, {COLUMNS}, journal)"
    f" select p, first, rev + 1000000, {COLUMNS}, $1 from {{log}} where rev=$2"
)
IN_POSTGRES: dict[Any, tuple[int | None, str, Callable[[bytes], bytes]]] = {
    altered: (1, "update {log} set journal=$1 where rev=$2", lambda block: block[:-2] + b" " + block[-2:]),
    truncated: (2, "update {log} set journal=nullif($1::bytea, journal) where rev=$2", bytes),
    garbage: (1, "update {log} set journal=$1 where rev=$2", lambda _: b"\x00\xff"),
    contradicted: (1, AGAIN, lambda _: b'[1,[],[["t",0]],false]'),
    doubled: (None, AGAIN, bytes),
    from_the_second_turn_on: (None, "update {log} set journal=$1 where rev=$2", _said_otherwise),
}
"""The same damages there: to so many of the last blocks (None: all), by which statement, with what instead."""


async def damage_in_postgres(folder: Path, how: Callable[[apsw.Connection], None]) -> None:
    times, statement, instead = IN_POSTGRES[how]
    log = f"{schema_of(folder)}.durable_log"
    connection = await asyncpg.connect(shared_postgres().dsn())
    try:
        for rev, block in await connection.fetch(NATIVE.format(log=log), times):
            assert await connection.execute(statement.format(log=log), instead(block), rev) in (
                "UPDATE 1",
                "INSERT 0 1",
            )
    finally:
        await connection.close()


async def damaged(folder: Path, store: str, how: Callable[[apsw.Connection], None]) -> None:
    if store == "postgres":
        await damage_in_postgres(folder, how)
    else:
        damage(folder, how)


def told(events: list[PublicEvent]) -> list[tuple[int, str]]:
    return [(event.sequence, event.type) for event in events]


async def parked(runtime: DurableRuntime, turn_id: str) -> Any:
    """The Turn goes on and finds what was done to its Thread."""
    turn = runtime.get_session(KEY).get_turn(turn_id)
    [asked] = await turn.pending_interactions()
    await turn.respond("yes", asked.interaction_id, True)
    await turn_is(turn, where=lambda view: any(one.kind is WaitKind.OPERATOR for one in view.waiting_on))
    return turn


@pytest.mark.parametrize("backend", PERSISTENT)
async def test_a_row_that_is_there_twice_says_nothing_new(tmp_path: Path, backend: str) -> None:
    turn_id = await interrupted(tmp_path, "a", "b", store=backend)
    async with host(tmp_path, backend) as (runtime, _):
        before = told(await all_events(runtime.get_session(KEY)))

    await damaged(tmp_path, backend, doubled)
    async with host(tmp_path, backend) as (runtime, operations):
        session = runtime.get_session(KEY)
        assert told(await all_events(session)) == before
        turn = session.get_turn(turn_id)
        [asked] = await turn.pending_interactions()
        await turn.respond("yes", asked.interaction_id, True)
        assert str(await turn.wait(90)) == "deployed"
        positions = [checkpoint.position for checkpoint in await session.main_thread().checkpoints()]
        for position in positions:
            assert await operations.export_checkpoint(session.main_thread().key, position)
        await session.main_thread().restore(positions[0], positions[-1], "restore")
        assert str(await session.call("c", "c")) == "I know: a, c"


@pytest.mark.spec("BE-20", "BE-21")
@pytest.mark.parametrize(
    ("how", "backend"),
    [(how, store) for how in (altered, truncated, garbage, contradicted) for store in PERSISTENT],
    ids=lambda value: getattr(value, "__name__", value),
)
async def test_a_damaged_tail_stops_its_thread_alone_until_an_operator_goes_back(
    tmp_path: Path, how: Callable[[apsw.Connection], None], backend: str
) -> None:
    turn_id = await interrupted(tmp_path, "a", "b", store=backend)
    await damaged(tmp_path, backend, how)
    async with host(tmp_path, backend) as (runtime, operations):
        session = runtime.get_session(KEY)
        thread = session.main_thread()
        turn = await parked(runtime, turn_id)
        waiting = await session.submit("c", "c")
        # Others go on.
        other = await session.create_thread("other", "agent")
        assert str(await other.call("o1", "elsewhere")) == "I know: elsewhere"

        # A restore is a user's and takes nobody's work away; what was settled can be told and exported.
        page = await thread.checkpoints()
        assert len(page) == 2
        await refused(thread.restore(page.current, page.current, "restore"), Unfinished)
        exported = json.loads(await operations.export_checkpoint(thread.key, page.current))
        assert (exported["harness"], exported["position"]) == ("agent", page.current)
        assert '"text":"b"' in json.dumps(exported["journal"], separators=(",", ":"))

        receipt = await operations.repair(turn, page.current, expected_position=page.current, request_id="repair")
        view = await turn.status()
        assert (receipt.status, view.status) == (TurnStatus.FAILED, TurnStatus.FAILED)
        assert view.error is not None
        assert view.error.kind in ("DigestMismatch", "CorruptRecord")
        await refused(turn.wait(90), TurnFailed)
        # The next in the queue goes on from there; nobody has to submit it again.
        assert str(await waiting.wait(90)) == "I know: a, b, c"
        restored = (await thread.checkpoints(page.current)).items[0]
        assert (restored.position, restored.settled, restored.turn_id) == (receipt.position, SettledBy.RESTORED, None)
        repeated = await operations.repair(turn, page.current, expected_position=page.current, request_id="repair")
        assert repeated == receipt
        # Both positions before the damage are good for ever.
        await thread.restore(page.items[0].position, (await thread.checkpoints()).current, "first")
        assert str(await session.call("d", "d")) == "I know: a, d"


@pytest.mark.parametrize("backend", PERSISTENT)
async def test_a_turn_whose_cancel_cannot_be_settled_is_ended_by_a_repair(tmp_path: Path, backend: str) -> None:
    turn_id = await interrupted(tmp_path, "a", store=backend)
    await damaged(tmp_path, backend, altered)
    async with host(tmp_path, backend) as (runtime, operations):
        session = runtime.get_session(KEY)
        turn = session.get_turn(turn_id)
        await turn.cancel("cancel")
        # Its settlement would clean a state that cannot be read: it is tried again and again, and said to be.
        await turn_is(turn, where=lambda view: any(one.until_ms for one in view.waiting_on))
        page = await session.main_thread().checkpoints()
        receipt = await operations.repair(turn, page.current, expected_position=page.current, request_id="repair")
        assert (receipt.status, (await turn.status()).status) == (TurnStatus.CANCELLED, TurnStatus.CANCELLED)
        assert str(await session.call("b", "b")) == "I know: a, b"


@pytest.mark.parametrize("backend", PERSISTENT)
async def test_where_the_damage_reaches_further_the_position_before_it_is_taken_or_the_beginning(
    tmp_path: Path, backend: str
) -> None:
    turn_id = await interrupted(tmp_path, "a", "b", store=backend)
    await damaged(tmp_path, backend, from_the_second_turn_on)
    async with host(tmp_path, backend) as (runtime, operations):
        session = runtime.get_session(KEY)
        thread = session.main_thread()
        turn = await parked(runtime, turn_id)
        first, second = [checkpoint.position for checkpoint in await thread.checkpoints()]
        before = told(await all_events(session))
        await refused(operations.export_checkpoint(thread.key, second), CorruptRecord)
        fields = {"expected_position": second, "request_id": "repair"}
        await refused(operations.repair(turn, second, **fields), CorruptRecord)
        await refused(thread.fork(second, type(thread.key)(KEY, "branch"), "fork"), CorruptRecord)
        assert told(await all_events(session)) == before, "nothing was changed"
        await operations.repair(turn, first, **fields)
        assert str(await session.call("c", "c")) == "I know: a, c"

    turn_id = await interrupted(tmp_path / "other", store=backend)
    await damaged(tmp_path / "other", backend, altered)
    async with host(tmp_path / "other", backend) as (runtime, operations):
        session = runtime.get_session(KEY)
        turn = await parked(runtime, turn_id)
        assert (await session.main_thread().checkpoints()).current is None
        receipt = await operations.repair(turn, None, expected_position=None, request_id="repair")
        assert receipt.position is None
        assert str(await session.call("x", "x")) == "I know: x"
        assert (await session.main_thread().checkpoints()).current is not None
