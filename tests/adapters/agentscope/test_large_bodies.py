"""Everything an agent does, five megabytes at a time: none of it stands in a record, and all of it comes back (OB-04).

What cannot be read is never an empty value: a Turn that needs it waits (C62).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

pytest.importorskip("agentscope")

from agentscope.agent import ContextConfig

from agentscope_durable.adapters.agentscope import AgentBuilder
from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.contracts.errors import BodyMissing, DigestMismatch, Unavailable
from agentscope_durable.contracts.status import RunStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.stores.objects.cloud import S3ObjectStore
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.objects.postgres import PostgresObjectStore
from agentscope_durable.testing.scripted_model import Call, rounds_so_far
from tests.adapters.agentscope.agents import Agents, external, tool
from tests.runtime.conftest import KEY, turn_is, until
from tests.servers.fixtures import shared_postgres
from tests.servers.s3 import Server, running
from tests.servers.stores import open_bodies, schema_of

pytestmark = pytest.mark.backend("sqlite")

MIB = 1024 * 1024
PARTS = ("submitted", "fetched", "filled in", "noted", "answered")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running("localbucket", tmp_path_factory.mktemp("bucket")) as started:
        yield started


@pytest.fixture(params=["files", "bucket", pytest.param("postgres", marks=pytest.mark.backend("postgres"))])
async def objects(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ObjectStore]:
    """Where the bodies are. Those in PostgreSQL are in a table beside the records, as they are by default."""
    match request.param:
        case "files":
            yield FileObjectStore(tmp_path / "bodies")
        case "bucket":
            yield S3ObjectStore(prefix=tmp_path.name, retries=0, **request.getfixturevalue("bucket").options)
        case _:
            store = await open_bodies(shared_postgres().dsn(), schema_of(tmp_path))
            yield store
            await store.close()


class World:
    """A Turn whose message, tool result, note, question and answer are each as large as is wanted.

    Args:
        objects: where its bodies are, or what stands before that.
        inner: where they are, if something stands before it.
    """

    def __init__(self, folder: Path, objects: ObjectStore, size: int, *, inner: ObjectStore | None = None) -> None:
        self.in_postgres = isinstance(inner or objects, PostgresObjectStore)
        self.folder = folder
        self.objects = objects
        self.text = {part: f"{part} ".ljust(size, part[0]) for part in PARTS}
        self.asked: list[int] = []
        self.read: list[Any] = []
        self.agents = Writers(self)

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        number = rounds_so_far(messages)
        self.asked.append(number)
        return [
            Call("fetch", id="c1"),
            Call("note", id="c2"),
            Call("form", id="c3"),
            Call("recall", id="c4"),
            self.text["answered"],
        ][number]

    def opening(self) -> Any:
        if not self.in_postgres:
            return LocalBackend.open(self.folder / "store", object_store=self.objects, synchronous="NORMAL")
        given = None if isinstance(self.objects, PostgresObjectStore) else self.objects
        return PostgresBackend.open(shared_postgres().dsn(), schema=schema_of(self.folder), object_store=given)

    @asynccontextmanager
    async def host(self) -> AsyncIterator[DurableRuntime]:
        async with self.opening() as backend:
            runtime = DurableRuntime(
                backend=backend,
                harnesses=[Harness("assistant", "v1", self.agents.adapter())],
                poll_interval=0.02,
                close_timeout=0.5,
            )
            async with runtime:
                await runtime.start()
                yield runtime

    async def until_the_form(self, runtime: DurableRuntime) -> Any:
        session = await runtime.create_session(KEY, "assistant")
        turn = await session.submit("r1", self.text["submitted"])
        await turn_is(turn, "WAITING")
        return turn

    async def fill_in(self, turn: Any) -> None:
        [question] = await turn.pending_interactions()
        await turn.respond("a1", question.interaction_id, self.text["filled in"])

    async def asked_in_postgres(self, *statements: str) -> list[Any]:
        connection = await asyncpg.connect(shared_postgres().dsn())
        try:
            return [await connection.fetch(statement) for statement in statements]
        finally:
            await connection.close()

    async def largest(self) -> dict[str, int]:
        """The largest value of each column of each table of the records."""
        if self.in_postgres:
            schema = schema_of(self.folder)
            [columns] = await self.asked_in_postgres(
                "select table_name, column_name from information_schema.columns"
                f" where table_schema='{schema}' and table_name<>'durable_body' and data_type='bytea'"
            )
            sizes = await self.asked_in_postgres(
                *(f"select coalesce(max(octet_length({name})), 0) from {schema}.{table}" for table, name in columns)
            )
            return {f"{table}.{name}": size for (table, name), [(size,)] in zip(columns, sizes, strict=True)}
        connection = apsw.Connection(str(self.folder / "store" / "durable.db"), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            tables = [name for (name,) in connection.execute("select name from sqlite_schema where type='table'")]
            return {
                f"{table}.{column[1]}": connection.execute(
                    f'select coalesce(max(length(cast("{column[1]}" as blob))), 0) from "{table}"'
                ).get
                for table in tables
                for column in connection.execute(f'pragma table_info("{table}")').fetchall()
            }
        finally:
            connection.close()

    async def journal(self) -> str:
        """The object that holds the newest native block which stands outside of the records."""
        if self.in_postgres:
            [rows] = await self.asked_in_postgres(
                f"select journal from {schema_of(self.folder)}.durable_log where journal is not null order by rev desc"
            )
        else:
            connection = apsw.Connection(str(self.folder / "store" / "durable.db"), flags=apsw.SQLITE_OPEN_READONLY)
            try:
                rows = [*connection.execute("select journal from log where journal is not null order by id desc")]
            finally:
                connection.close()
        from agentscope_durable.contracts.bodies import column_reference

        return next(found.name for (row,) in rows if (found := column_reference(bytes(row))) is not None)


class Writers(Agents):
    def __init__(self, world: World) -> None:
        # Nothing is compressed or cut, and an answer comes in few pieces.
        super().__init__(
            world.folder,
            world.script,
            model={"context_size": 10**9, "chunk_chars": MIB},
            context_config=lambda: ContextConfig(tool_result_limit=10**9),
        )
        self.world = world

    def describe(self, binding: Any) -> AgentBuilder:
        from agentscope.tool import Toolkit

        workspace, world = binding.workspace(), self.world

        async def fetch() -> str:
            return world.text["fetched"]

        async def note() -> str:
            await workspace.put(["notes"], "a", world.text["noted"])
            return "done"

        async def recall() -> str:
            world.read.append((await workspace.get(["notes"], "a")).value)
            return "done"

        described = super().describe(binding)
        described.arguments["toolkit"] = Toolkit(tools=[*map(tool, (fetch, note, recall)), external("form")])
        return described


@pytest.mark.spec("OB-04", "OB-02")
async def test_none_of_it_stands_in_a_record_and_all_of_it_comes_back(objects: ObjectStore, tmp_path: Path) -> None:
    world = World(tmp_path, objects, 5 * MIB)
    async with world.host() as first:
        turn = await world.until_the_form(first)
    # Another process goes on: its agent has everything from the store.
    async with world.host() as second:
        turn = second.get_session(KEY).get_turn(turn.turn_id)
        await world.fill_in(turn)
        view = await turn_is(turn, "COMPLETED")
        assert view.error is None
        assert (await turn.result()).text == world.text["answered"]
        assert world.read == [world.text["noted"]]

        session = second.get_session(KEY)
        said = [message.text async for message in _all(session)]
        assert said[0] == world.text["submitted"] and said[-1] == world.text["answered"]
        calls = {call.call_id: call for call in await turn.list_tools()}
        assert _words(calls["c1"].result) == world.text["fetched"]
        assert _words(calls["c3"].result) == world.text["filled in"]
    assert world.asked == [0, 1, 2, 3, 4]

    largest = await world.largest()
    assert largest and all(size <= INLINE_MAX_BYTES for size in largest.values()), largest
    partition = keys.partition(KEY)
    sizes = [len(await objects.get(partition, name)) for name in await objects.list(partition)]
    assert sum(size > 5 * MIB for size in sizes) >= len(PARTS)


async def _all(session: Any) -> AsyncIterator[Any]:
    cursor: str | None = None
    while True:
        page = await session.history(cursor=cursor)
        for message in page.items:
            yield message
        cursor = page.cursor
        if cursor is None:
            return


def _words(result: Any) -> str:
    """The text of a tool result: an agent's own, or what a person gave."""
    if "value" in result:
        return result["value"]
    return "".join(block["text"] for block in result["content"])


# ---- what cannot be read ----


async def _says(turn: Any, *words: str) -> bool:
    """Whether the Turn waits for a person and tells why."""
    explained = await turn.explain()
    told = " ".join(one.text + one.next_action for one in explained.reasons)
    waits = [one.kind for one in explained.turn.waiting_on] == [WaitKind.OPERATOR]
    return waits and all(word in told for word in words)


@pytest.mark.case("C62")
@pytest.mark.spec("OB-02")
@pytest.mark.parametrize("what", ["missing", "altered"])
async def test_a_turn_whose_native_state_cannot_be_read_waits_and_goes_on_when_it_is_brought_back(
    objects: ObjectStore, tmp_path: Path, what: str
) -> None:
    world = World(tmp_path, objects, 100_000)
    async with world.host() as first:
        turn = await world.until_the_form(first)
    name, partition = await world.journal(), keys.partition(KEY)
    content = await objects.get(partition, name)
    await objects.delete(partition, name)
    if what == "altered":
        await write_behind(objects, partition, name, content[:-1] + b"?")

    async with world.host() as second:
        turn = second.get_session(KEY).get_turn(turn.turn_id)
        await world.fill_in(turn)
        kind = BodyMissing if what == "missing" else DigestMismatch
        await until(partial(_says, turn, kind.__name__, name))
        view = await turn.status()
        assert (view.recovery, view.error, view.lease) == (None, None, None)
        assert (await turn.list_runs()).items[-1].status is RunStatus.SUSPENDED
        found = await HostOperations(second._host.backend).doctor(deep=True)
        assert not found.sound and any(name in finding.subject for finding in found.findings)

        await objects.delete(partition, name)
        await objects.put(partition, name, content)
        await HostOperations(second._host.backend).release(turn, request_id="op1")
        await turn_is(turn, "COMPLETED")
        assert (await turn.result()).text == world.text["answered"]
        assert (await HostOperations(second._host.backend).doctor(deep=True)).findings == ()
    assert world.asked == [0, 1, 2, 3, 4], "no answer of the model was asked for twice"


async def write_behind(objects: ObjectStore, partition: str, name: str, content: bytes) -> None:
    """Other bytes under the name, as a disk or a person might leave them."""
    if isinstance(objects, PostgresObjectStore):
        scope = bytes.fromhex(objects.folder_of(partition))
        await objects._ask(objects._put, scope, name.encode(), content, writes=True)
    elif isinstance(objects, FileObjectStore):
        objects._path(partition, name).write_bytes(content)
    else:
        assert isinstance(objects, S3ObjectStore)
        objects._operator.write(objects._path(partition, name), content)


class Refusing:
    """An object store that does not let anybody in for a while."""

    def __init__(self, behind: ObjectStore) -> None:
        self._behind = behind
        self.closed = False
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._behind, name)
        if name not in ("get", "put", "exists"):
            return method

        async def answered(*arguments: Any) -> Any:
            if self.closed:
                self.asked += 1
                raise Unavailable("the object store refused a request: ExpiredToken")
            return await method(*arguments)

        return answered


@pytest.mark.case("C62")
async def test_a_turn_whose_native_state_cannot_be_read_now_goes_on_by_itself_and_loses_nothing(
    objects: ObjectStore, tmp_path: Path
) -> None:
    refusing = Refusing(objects)
    world = World(tmp_path, refusing, 100_000, inner=objects)  # type: ignore[arg-type]
    async with world.host() as first:
        turn = await world.until_the_form(first)
        await world.fill_in(turn)
    refusing.closed = True
    async with world.host() as second:
        turn = second.get_session(KEY).get_turn(turn.turn_id)

        async def asked() -> bool:
            return refusing.asked >= 3

        await until(asked)
        assert not (await turn.status()).status.terminal
        refusing.closed = False
        view = await turn_is(turn, "COMPLETED")
        assert (view.recovery, view.error) == (None, None)
    assert world.asked == [0, 1, 2, 3, 4]


@pytest.mark.spec("OB-02")
async def test_records_opened_with_another_object_store_say_so(objects: ObjectStore, tmp_path: Path) -> None:
    world = World(tmp_path, objects, 100_000)
    async with world.host() as first:
        _ = await world.until_the_form(first)
    world.objects = FileObjectStore(tmp_path / "elsewhere")
    async with world.opening() as backend:
        async with DurableRuntime(backend=backend) as api:
            with pytest.raises(BodyMissing) as raised:
                await api.get_session(KEY).history()
        assert str(tmp_path / "elsewhere") in str(raised.value) and "app/c1" in str(raised.value)
        assert not (await HostOperations(backend).doctor()).sound
