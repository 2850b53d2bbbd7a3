"""C62: any error of reading was taken for "incompatible checkpoint", which was deleted, and the work began afresh.

The statement that loads a Thread's native state fails where SQLite would fail it, or PostgreSQL. What may pass is asked
again until it has passed; what stays is for a person or another release. Neither costs a byte of what is stored, nor an
answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import asyncpg
import pytest

pytest.importorskip("agentscope")

from agentscope_durable.adapters.agentscope import AgentScopeAdapter, adapter
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.status import RunStatus, TurnStatus, WaitKind
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_model import Call, Stall, Text, rounds_so_far
from tests.adapters.agentscope.agents import Agents, external, tool
from tests.every_store import PERSISTENT, shelf
from tests.runtime.conftest import KEY, kill, turn_is, until
from tests.servers.fixtures import shared_postgres
from tests.servers.stores import schema_of

pytestmark = pytest.mark.case("C62")

LEASE = 0.9
"""Seconds of the clock that a test moves; by the real one, a host says what it can run every third of them."""
TIMES = 3
"""Loads that fail, one after the other: as many as the default policy has retries."""
LOAD = {"sqlite": "stream=?", "postgres": "stream=g.stream"}
"""Only the load of a native state reads the log by stream with the column of native blocks."""


class World:
    """A Turn that pays, asks a person for a form, and then answers. What the model was asked is counted by round."""

    def __init__(self, folder: Path, clock: ManualClock, store: str = "sqlite") -> None:
        self.folder = folder
        self.clock = clock
        self.store = store
        self.asked: list[int] = []
        self.stalls = False
        self.stalled = asyncio.Event()

        async def pay() -> str:
            self.agents.ledger.append("pay")
            return "paid"

        self.agents = Agents(folder, self.script, tools=lambda: [tool(pay), external("form")])

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        number = rounds_so_far(messages)
        self.asked.append(number)
        if number == 0:
            return [Text("first I pay"), Call("pay", id="c1")]
        if number == 1:
            return Call("form", id="c2")
        return [Stall(reached=self.stalled)] if self.stalls else "done"

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[Any]:
        if self.store == "sqlite":
            async with LocalBackend.open(self.folder / "store", synchronous="NORMAL", clock=self.clock) as backend:
                yield backend
        else:
            async with shelf(self.store, self.folder, self.clock) as place:
                yield await place.backend()

    @asynccontextmanager
    async def host(self, made: AgentScopeAdapter | None = None) -> AsyncIterator[DurableRuntime]:
        async with self.opening() as backend:
            runtime = DurableRuntime(
                backend=backend,
                harnesses=[Harness("assistant", "v1", made or self.agents.adapter())],
                poll_interval=0.02,
                lease=LEASE,
                close_timeout=0.5,
                recovery_policy=RecoveryPolicy(max_retries=TIMES, initial_backoff_ms=0, max_backoff_ms=0),
            )
            async with runtime:
                yield runtime

    def execute(self, sql: str, *values: Any) -> list[Any]:
        connection = apsw.Connection(str(self.folder / "store" / "durable.db"))
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.close()

    async def log(self) -> list[Any]:
        """Every row of every commit."""
        if self.store == "sqlite":
            return self.execute("select * from log order by id")
        return await self._in_postgres("select * from {log} order by p, rev, first")

    async def stored(self) -> list[Any]:
        """The native blocks, each with what names its row."""
        if self.store == "sqlite":
            return self.execute("select id, journal from log where journal is not null order by id")
        return await self._in_postgres("select rev, journal from {log} where journal is not null order by rev")

    async def damage(self, row: int, block: bytes) -> None:
        """Other bytes in the place of a native block, or what stood there."""
        if self.store == "sqlite":
            self.execute("update log set journal=? where id=?", block, row)
        else:
            await self._in_postgres("update {log} set journal=$1 where rev=$2", block, row)

    async def _in_postgres(self, statement: str, *values: Any) -> list[Any]:
        connection = await asyncpg.connect(shared_postgres().dsn())
        try:
            found = await connection.fetch(statement.format(log=f"{schema_of(self.folder)}.durable_log"), *values)
            return [tuple(one) for one in found]
        finally:
            await connection.close()


class Loads:
    """The first `times` statements that load a native state raise, on whichever connection."""

    def __init__(self, store: str, times: int, error: Callable[[], Exception], patch: pytest.MonkeyPatch) -> None:
        self._load = LOAD[store]
        self._times = times
        self._error = error
        self.seen = 0
        if store == "sqlite":
            patch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, self._watch])
        else:
            fetch = asyncpg.Connection.fetch

            async def fetched(connection: Any, sql: str, *values: Any, **named: Any) -> Any:
                self._statement(None, sql, values)
                return await fetch(connection, sql, *values, **named)

            patch.setattr(asyncpg.Connection, "fetch", fetched)

    def _watch(self, connection: apsw.Connection) -> None:
        connection.exec_trace = self._statement

    def _statement(self, _cursor: apsw.Cursor | None, sql: str, _bindings: Any) -> bool:
        if self._load in sql and "journal" in sql:
            self.seen += 1
            if self.seen <= self._times:
                raise self._error()
        return True


async def waits_for_the_form(runtime: DurableRuntime) -> Any:
    session = await runtime.create_session(KEY, "assistant")
    await runtime.start()
    turn = await session.submit("r1", "go")
    await turn_is(turn, "WAITING")
    return turn


async def fill_in(turn: Any) -> None:
    [question] = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, "filled in")


async def says(turn: Any, kind: WaitKind, text: str) -> bool:
    """Whether the Turn waits for this, and tells why. No event announces what no host can run."""
    explained = await turn.explain()
    named = any(text in one.text + one.next_action for one in explained.reasons)
    return named and [one.kind for one in explained.turn.waiting_on] == [kind]


def fails(store: str, error: Callable[[], Exception], id: str, *, costs_a_run: bool = False) -> Any:
    return pytest.param(store, error, costs_a_run, id=f"{store}-{id}")


@pytest.mark.parametrize("way", ["resume", "takeover"])
@pytest.mark.parametrize(
    ("backend", "error", "costs_a_run"),
    [
        fails("sqlite", lambda: apsw.BusyError("database is locked"), "busy"),
        fails("sqlite", lambda: apsw.IOError("disk I/O error"), "I/O error"),
        fails("sqlite", lambda: apsw.PermissionsError("access permission denied"), "permission"),
        fails("sqlite", lambda: apsw.CantOpenError("unable to open database file"), "permission to open"),
        # What a store does not translate is met as it is: it ends the Run, and the next one is tried.
        fails("sqlite", lambda: PermissionError(13, "Permission denied"), "permission of the system", costs_a_run=True),
        fails("sqlite", lambda: TimeoutError("too slow"), "timeout", costs_a_run=True),
        fails("postgres", lambda: asyncpg.LockNotAvailableError("canceled due to lock timeout"), "busy"),
        fails("postgres", lambda: asyncpg.PostgresIOError("could not read block 3"), "I/O error"),
        fails("postgres", lambda: asyncpg.InsufficientPrivilegeError("permission denied"), "permission"),
        # Over a network the driver's words are the store's too.
        fails("postgres", lambda: PermissionError(13, "Permission denied"), "permission of the system"),
        fails("postgres", lambda: TimeoutError("too slow"), "timeout"),
        fails("postgres", lambda: asyncpg.QueryCanceledError("statement timeout"), "timeout of the server"),
    ],
)
async def test_what_may_pass_is_asked_again_and_the_turn_goes_on_by_itself(
    tmp_path: Path,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    backend: str,
    error: Callable[[], Exception],
    costs_a_run: bool,
) -> None:
    world = World(tmp_path, clock, backend)
    async with world.host() as first:
        turn = await waits_for_the_form(first)
        if way == "takeover":
            world.stalls = True
            await fill_in(turn)
            await asyncio.wait_for(world.stalled.wait(), 30)
            heartbeat = first._heartbeat
            assert heartbeat is not None
            kill(first)
            # A renewal that is under way would be dated after the clock was moved, and the dead host lived on.
            await heartbeat.stop(release=False)
            clock.advance(int(LEASE * 1000) + 1000)
    world.stalls = False
    before, runs = await world.log(), 2 if way == "takeover" else 1

    loads = Loads(backend, TIMES, error, monkeypatch)
    async with world.host() as second:
        await second.start()
        turn = second.get_session(KEY).get_turn(turn.turn_id)
        if way == "resume":
            await fill_in(turn)
        # Questions that wait at the same time share a statement, so one of the test's own would share the failure.
        await until(lambda: loads.seen > TIMES)
        view = await turn_is(turn, "COMPLETED")
        assert (await turn.result()).text == "done"
        assert (0 if view.recovery is None else view.recovery.failures) == (TIMES if costs_a_run else 0)
        assert view.runs == runs + 1 + (TIMES if costs_a_run else 0)
    # The answer that the lost host waited for was never committed; each that was is asked for once.
    assert world.asked == ([0, 1, 2] if way == "resume" else [0, 1, 2, 2])
    assert world.agents.did("pay") == 1
    assert (await world.log())[: len(before)] == before


@pytest.mark.spec("BE-21")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_a_bad_digest_parks_the_turn_and_its_bytes_stay(tmp_path: Path, clock: ManualClock, backend: str) -> None:
    world = World(tmp_path, clock, backend)
    async with world.host() as first:
        turn = await waits_for_the_form(first)
    row, block = (await world.stored())[0]
    await world.damage(row, bytes(block)[:-3] + b" " + bytes(block)[-3:])
    before = await world.stored()

    async with world.host() as second:
        await second.start()
        turn = second.get_session(KEY).get_turn(turn.turn_id)
        await fill_in(turn)
        await until(partial(says, turn, WaitKind.OPERATOR, "DigestMismatch"))
        view = await turn.status()
        assert (view.recovery, view.error, view.lease) == (None, None, None)
        assert (await turn.list_runs()).items[-1].status is RunStatus.SUSPENDED
        assert await world.stored() == before, "nothing is deleted, and no state is written"

        # Put right by a person, it goes on from where it stood.
        await world.damage(row, block)
        await HostOperations(second._host.backend).release(turn, request_id="op1")
        await turn_is(turn, "COMPLETED")
    assert world.asked == [0, 1, 2]
    assert world.agents.did("pay") == 1


class OfFormat99(AgentScopeAdapter):
    """An adapter whose journal is written in a format that no release knows."""

    @property
    def state_version(self) -> str:
        return "agentscope-thread-journal-v99"


@pytest.mark.parametrize("what", ["writer", "format"])
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_an_unknown_version_is_named_and_left_to_a_host_that_reads_it(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, what: str, backend: str
) -> None:
    world = World(tmp_path, clock, backend)

    def newer() -> AgentScopeAdapter:
        kind = OfFormat99 if what == "format" else AgentScopeAdapter
        with monkeypatch.context() as library:
            if what == "writer":
                library.setattr(adapter, "require", lambda: "99.0.0")
            return kind.for_react(world.agents.describe, accept_untested_agentscope=True)

    async with world.host(newer()) as first:
        turn = await waits_for_the_form(first)
    before, blocks = await world.log(), await world.stored()

    async with world.host() as second:
        await second.start()
        turn = second.get_session(KEY).get_turn(turn.turn_id)
        await fill_in(turn)
        named = "v99" if what == "format" else "99.0.0"
        await until(partial(says, turn, WaitKind.DEFINITION_MISSING, named))
        view = await turn.status()
        assert view.status is not TurnStatus.FAILED
        assert (view.recovery, view.error) == (None, None)
        assert (await world.log())[: len(before)] == before
        assert await world.stored() == blocks

    async with world.host(newer()) as third:
        await third.start()
        await turn_is(third.get_session(KEY).get_turn(turn.turn_id), "COMPLETED")
    assert world.asked == [0, 1, 2]
    assert world.agents.did("pay") == 1
