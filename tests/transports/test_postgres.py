"""Hints through PostgreSQL: the contract of `Wakeups`, and what happens when a server or a pooler is in the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import InvalidRequest, Unavailable
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.backend import Wakeups
from agentscope_durable.testing import WakeupsContract
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from agentscope_durable.testing.wakeups import ANYTHING, heard
from agentscope_durable.transports import postgres as module
from agentscope_durable.transports.postgres import PostgresWakeups
from tests.servers.fixtures import Proxied
from tests.servers.server import PgBouncerServer, PostgresServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")
SECONDS = 90.0


@pytest.mark.spec("BE-03", "PG-08")
class TestPostgresWakeups(WakeupsContract):
    backend = "postgres"

    @pytest.fixture(autouse=True)
    def server(self, postgres: PostgresServer) -> None:
        self.dsn = postgres.dsn()

    async def open(self, place: Path) -> Wakeups:
        return await PostgresWakeups.open(self.dsn, channel=schema_of(place))

    async def close(self, end: Wakeups) -> None:
        assert isinstance(end, PostgresWakeups)
        await end.close()


@pytest.mark.spec("BE-03", "BE-13")
async def test_a_connection_that_was_lost_is_made_again_and_anything_may_have_changed(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    channel = schema_of(tmp_path)
    async with (
        await PostgresWakeups.open(postgres.dsn(), channel=channel) as writer,
        await PostgresWakeups.open(postgres.dsn(), channel=channel) as listener,
        listener.listen(frozenset({"a"})) as listening,
    ):
        assert await heard(listening, writer, "a") == {"a"}
        administrator = await asyncpg.connect(postgres.dsn())
        await administrator.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid<>pg_backend_pid() and datname='postgres'"
        )
        await administrator.close()
        async with asyncio.timeout(SECONDS):
            while ANYTHING not in await anext(listening):
                pass
        # And what is published reaches the other side again.
        async with asyncio.timeout(SECONDS):
            while "a" not in await heard(listening, writer, "a"):
                pass


@pytest.mark.case("C76")
async def test_many_keys_go_in_few_notifications_and_too_many_are_anything(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    channel = schema_of(tmp_path)
    async with await PostgresWakeups.open(postgres.dsn(), channel=channel) as wakeups:
        few = list(wakeups._payloads([f"s:{number:024x}" for number in range(600)]))
        assert 2 <= len(few) <= module.PAYLOADS_MAX
        assert all(len(payload) < 8000 for payload in few)
        assert sum(payload.count("s:") for payload in few) == 600
        many = list(wakeups._payloads([f"s:{number:024x}" for number in range(5000)]))
        strange = list(wakeups._payloads(["k" * 10_000]))
        assert [payload.partition("|")[2] for payload in (*many, *strange)] == [ANYTHING, ANYTHING]
        assert list(wakeups._payloads([])) == []


async def test_behind_a_pooler_it_is_refused_and_without_a_server_it_says_so(
    postgres: PostgresServer, pgbouncer: PgBouncerServer
) -> None:
    with pytest.raises(InvalidRequest, match="pooler"):
        await PostgresWakeups.open(pgbouncer.dsn())
    with pytest.raises(Unavailable):
        await PostgresWakeups.open("postgresql://durable@127.0.0.1:1/postgres")
    with pytest.raises(InvalidRequest):
        await PostgresWakeups.open(postgres.dsn(), channel="c" * 64)
    nothing: Any = 7
    for no_dsn in (nothing, "nonsense", "postgresql://durable@127.0.0.1:abc/postgres"):
        with pytest.raises(InvalidRequest, match="dsn"):
            await PostgresWakeups.open(no_dsn)


@pytest.mark.spec("PG-08", "PG-09", "PG-11", "BE-06", "BE-12")
async def test_a_host_hears_what_another_process_submits_and_no_commit_depends_on_it(
    postgres: PostgresServer, proxied: Proxied, tmp_path: Path
) -> None:
    schema = schema_of(tmp_path)
    proxy = await proxied(postgres)
    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with (
        await PostgresWakeups.open(postgres.dsn(port=proxy.port), channel=schema) as mine,
        await PostgresWakeups.open(postgres.dsn(), channel=schema) as theirs,
        PostgresBackend.open(postgres.dsn(), schema=schema, wakeups=theirs) as brain,
        PostgresBackend.open(postgres.dsn(), schema=schema, wakeups=mine) as api,
        # It looks by itself once in an hour only: what it does, it was told.
        DurableRuntime(backend=brain, harnesses=[harness], poll_interval=3600) as host,
        DurableRuntime(backend=api, definitions=[]) as door,
    ):
        await host.start()
        await host.create_session(SessionKey("app", "c1"), "agent")
        session = door.get_session(SessionKey("app", "c1"))
        turn = await session.submit("r1", "go")
        async with asyncio.timeout(SECONDS):
            assert str(await turn.wait(SECONDS)) == "done"
        # Without the connection of the hints a commit is a commit.
        await proxy.refuse()
        proxy.cut()
        assert (await session.submit("r2", "go")).turn_id
        await mine.close()
        assert (await session.submit("r3", "go")).turn_id
