"""Stores of former revisions, as their hosts left them: what can be read is read and gone on with, the rest is refused.

A copy is opened, never an exhibit itself.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.errors import NotADatabase, NotFound, SessionDropped, UnknownFormat
from agentscope_durable.contracts.records import STORAGE_FORMAT, STORAGE_REVISION
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.runtime.turn import DurableTurn
from agentscope_durable.spi.executor import Succeeded
from agentscope_durable.testing import census
from agentscope_durable.testing.scripted_harness import Gates
from tests.museum.exhibit import AGENT, ELSEWHERE, HERE, LARGE, SHOWN, harness, key
from tests.museum.record import DUMP, POSTGRES, SCHEMA, digest
from tests.servers.fixtures import NewDatabase, shared_postgres

MUSEUM = Path(__file__).parent
EXHIBITS = sorted(str(path.parent.relative_to(MUSEUM)) for path in MUSEUM.glob("**/about.json"))
"""Those of SQLite by their revision, those of PostgreSQL with their folder before it."""
SECONDS = 90.0


def about(name: str) -> dict[str, Any]:
    return json.loads((MUSEUM / name / "about.json").read_text(encoding="utf-8"))


def of_postgres(name: str) -> bool:
    return name.startswith(f"{POSTGRES}/")


READABLE = [name for name in EXHIBITS if about(name)["revision"] == STORAGE_REVISION]
REFUSED = [name for name in EXHIBITS if name not in READABLE]
NEWEST = [next(name for name in READABLE if of_postgres(name) is there) for there in (False, True)]


class Copied:
    """A copy of an exhibit of SQLite."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.turns: dict[str, str] = about(name)["turns"]
        self.folder = folder / "store"
        shutil.copytree(MUSEUM / name, self.folder, ignore=shutil.ignore_patterns("about.json"))

    def open(self, *, read_only: bool = False) -> Any:
        if read_only:
            return LocalBackend.open(self.folder, read_only=True)
        return LocalBackend.open(self.folder, synchronous="NORMAL")

    async def contents(self) -> dict[str, str]:
        return files(self.folder)

    async def change(self, statement: str) -> None:
        connection = apsw.Connection(str(self.folder / "durable.db"))
        connection.execute(statement)
        connection.close()


class Restored:
    """An exhibit of PostgreSQL, in a database of its own."""

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.turns: dict[str, str] = about(name)["turns"]
        self._dsn = dsn

    async def restore(self) -> None:
        await self.change(gzip.decompress((MUSEUM / self.name / DUMP).read_bytes()).decode())

    def open(self, *, read_only: bool = False) -> Any:
        return PostgresBackend.open(self._dsn, schema=SCHEMA, read_only=read_only)

    async def contents(self) -> dict[str, str]:
        """Every row of every table."""
        connection = await asyncpg.connect(self._dsn)
        try:
            tables = await connection.fetch("select tablename from pg_tables where schemaname = $1", SCHEMA)
            found = {}
            for (table,) in tables:
                rows = await connection.fetch(f"select t::text from {SCHEMA}.{table} t order by 1")
                found[table] = "\n".join(row for (row,) in rows)
            return found
        finally:
            await connection.close()

    async def change(self, statement: str) -> None:
        connection = await asyncpg.connect(self._dsn)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
async def copied(tmp_path: Path, request: pytest.FixtureRequest, new_database: NewDatabase) -> Copied | Restored:
    if not of_postgres(request.param):
        return Copied(request.param, tmp_path)
    server = shared_postgres()
    restored = Restored(request.param, server.dsn(await new_database(server)))
    await restored.restore()
    return restored


def test_this_revision_is_on_show() -> None:
    recorded = {of_postgres(name) for name in READABLE}
    assert recorded == {False, True}, f"revision {STORAGE_REVISION} is not recorded: python -m tests.museum.record"


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_is_as_it_was_recorded(name: str) -> None:
    found = files(MUSEUM / name)
    del found["about.json"]

    assert found == about(name)["files"]


@pytest.mark.spec("BE-27")
@pytest.mark.parametrize("copied", READABLE, indirect=True)
async def test_everything_is_read_as_it_was_left_and_reading_changes_nothing(copied: Copied | Restored) -> None:
    before = await copied.contents()
    turns = copied.turns

    async with copied.open(read_only=True) as backend, DurableRuntime(backend=backend) as runtime:
        for shown, what in SHOWN.items():
            session = runtime.get_session(key(what.session or shown))
            assert (await session.get_turn(turns[shown]).status()).status is what.recorded, shown
            assert await census.calls_answered(backend, session.key) == []
            assert shown == "pruned" or await census.replay_agrees(backend, session.key) == []
        (dump,) = await runtime.get_session(key("large")).get_turn(turns["large"]).list_tools()
        assert dump.result["value"] == "x" * LARGE
        with pytest.raises(SessionDropped):
            await runtime.get_session(key("dropped")).view()
        findings = await HostOperations(backend).doctor(deep=True)
        assert [one for one in findings.findings if one.severity == "damage"] == []

    assert await copied.contents() == before


@pytest.mark.spec("BE-27")
@pytest.mark.parametrize("copied", READABLE, indirect=True)
async def test_a_host_of_this_release_brings_every_turn_to_its_end(copied: Copied | Restored) -> None:
    turns = copied.turns
    gates = Gates()
    for gate in ("paused", "pausing", "cancelling", "running", "in a tool"):
        gates.open(gate)
    async with (
        asyncio.timeout(SECONDS),
        copied.open() as backend,
        DurableRuntime(
            backend=backend,
            harnesses=[harness(gates), harness(gates, ELSEWHERE)],
            executors={HERE: FunctionExecutor({"work": _never})},
            poll_interval=0.05,
            parallelism=32,
        ) as runtime,
    ):
        await runtime.start()
        for shown, what in SHOWN.items():
            turn = runtime.get_session(key(what.session or shown)).get_turn(turns[shown])
            await _help(turn, HostOperations(backend))
            assert (await turn.status()).status is what.reaches, shown
            if what.answer is not None:
                assert str(await turn.result()) == what.answer, shown
        # A Session of that time takes new work, and its agent knows what was said.
        again = await runtime.get_session(key("restored")).submit("submit-today", "again")
        assert str(await again.wait()) == "knows restored, again"
        repeated = await runtime.create_session(key("completed"), AGENT)
        assert (await repeated.submit("submit-completed", "completed")).turn_id == turns["completed"]

    async with copied.open() as backend:
        for shown, what in SHOWN.items():
            session = key(what.session or shown)
            wrong = [
                *await census.calls_answered(backend, session),
                *await census.nothing_stuck(backend, session, routes=[HERE]),
                *await census.answers_once(backend, session),
            ]
            assert wrong == [], shown


async def _never() -> str:
    raise AssertionError("what was started long ago is not started again")


async def _help(turn: DurableTurn, operations: HostOperations) -> None:
    """Do what people have to do until the Turn has ended."""
    while not (view := await turn.status()).status.terminal:
        if view.status is TurnStatus.PAUSED:
            await turn.resume(f"resume-{view.revision}", view.revision)
        for waiting in view.waiting_on:
            match waiting.kind:
                case WaitKind.APPROVAL:
                    await turn.respond("answer", waiting.id, True)
                case WaitKind.SIGNAL:
                    await turn.signal("signal", waiting.id, None)
                case WaitKind.TOOL_UNKNOWN:
                    await operations.reconcile_tool(
                        turn,
                        waiting.call_id or "",
                        request_id="evidence",
                        result=Succeeded(value="verified"),
                        evidence_ref="the museum's own book",
                    )
                case WaitKind.EXTERNAL_RESULT:
                    await turn.respond("told", waiting.id, "told by a person")
                case _:
                    pass
        await asyncio.sleep(0.02)


# ------------------------------------------------------------ what is not understood is left alone


@pytest.mark.spec("BE-27")
@pytest.mark.parametrize("copied", REFUSED, indirect=True)
async def test_a_development_revision_of_the_past_is_refused_and_keeps_every_byte(copied: Copied | Restored) -> None:
    await _refused(copied, UnknownFormat)


NEWER: dict[str, tuple[str, str]] = {
    "the next format": (
        f"pragma user_version={STORAGE_FORMAT + 1}",
        f"update museum.durable_meta set value='{STORAGE_FORMAT + 1}' where key='format'",
    ),
    "the next revision": (
        "update meta set value='8.dev999' where key='revision'",
        "update museum.durable_meta set value='8.dev999' where key='revision'",
    ),
    "no format": ("pragma user_version=0", "delete from museum.durable_meta where key='format'"),
    "a revision nobody wrote": (
        "delete from meta where key='revision'",
        "delete from museum.durable_meta where key='revision'",
    ),
}
"""What is done to an exhibit of SQLite and to one of PostgreSQL."""


@pytest.mark.spec("BE-27")
@pytest.mark.parametrize("change", NEWER.values(), ids=NEWER.keys())
@pytest.mark.parametrize("copied", NEWEST, indirect=True)
async def test_a_store_of_a_release_that_is_not_here_yet_is_refused_and_keeps_every_byte(
    copied: Copied | Restored, change: tuple[str, str]
) -> None:
    await copied.change(change[of_postgres(copied.name)])
    await _refused(copied, UnknownFormat)


@pytest.mark.parametrize("copied", NEWEST[:1], indirect=True)
async def test_a_database_of_somebody_else_is_refused_and_keeps_every_byte(copied: Copied) -> None:
    await copied.change("pragma application_id=1")
    await _refused(copied, NotADatabase)


async def _refused(copied: Copied | Restored, error: type[Exception]) -> None:
    before = await copied.contents()
    for read_only in (False, True):
        with pytest.raises(error) as refused:
            async with copied.open(read_only=read_only):
                pass
        assert not isinstance(refused.value, NotFound)
    assert await copied.contents() == before
