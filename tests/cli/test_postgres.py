"""The command on a store in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.cli.store import without_password
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import StoreReadOnly
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.runtime.conftest import until
from tests.servers.server import PostgresServer, StandbyServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")
SESSION = "app/c1"


@pytest.fixture
def url(postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{postgres.dsn()}?search_path={schema_of(tmp_path)}"


@pytest.fixture
async def backend(postgres: PostgresServer, tmp_path: Path) -> AsyncGenerator[PostgresBackend]:
    async with PostgresBackend.open(postgres.dsn(), schema=schema_of(tmp_path), initialize_schema=True) as backend:
        yield backend


async def test_a_store_in_postgresql_is_looked_at_and_controlled_as_a_folder_is(
    backend: PostgresBackend, url: str, typed: Callable[..., Any], postgres: PostgresServer
) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        await runtime.start()
        await runtime.create_session(SessionKey("app", "c1"), "agent")
        submitted = await typed("submit", SESSION, "go", "--store", url, "--json")
        turn = submitted.json["turnId"]
        assert str(await runtime.get_session(SessionKey("app", "c1")).get_turn(turn).wait(90)) == "done"

    assert SESSION in (await typed("sessions", "--store", url)).out
    assert "done" in (await typed("result", turn, "--store", url)).out
    sound = (await typed("doctor", "--deep", "--store", url, "--json")).json
    assert sound["sound"] is True
    assert sound["store"]["postgresql"].startswith("15")
    assert sound["store"]["fsync"] == sound["store"]["fullPageWrites"] == "on"
    assert (await typed("vacuum", "--store", url, code=2)).err


async def test_doctor_names_what_endangers_what_is_stored(
    backend: PostgresBackend, url: str, typed: Callable[..., Any], postgres: PostgresServer, tmp_path: Path
) -> None:
    async with DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness((final(),)))]) as host:
        await host.start()
        session = await host.create_session(SessionKey("app", "c1"), "agent")
        await session.call("r1", "go", timeout=90)
    administrator = await asyncpg.connect(postgres.dsn())
    schema = schema_of(tmp_path)
    await administrator.execute(f"update {schema}.durable_log set events=events || '\\x20' where events is not null")
    loose = f"{url}&synchronous_commit=off"

    found = (await typed("doctor", "--deep", "--store", loose, "--json", code=10)).json

    await administrator.close()
    problems = [finding["problem"] for finding in found["findings"]]
    assert any("synchronous_commit is off" in problem for problem in problems)
    assert any(finding["severity"] == "damage" for finding in found["findings"])
    assert found["store"]["synchronousCommit"] == "off"


async def test_where_no_store_is_it_says_how_to_make_one(postgres: PostgresServer, typed: Callable[..., Any]) -> None:
    missing = await typed("sessions", "--store", f"{postgres.dsn()}?search_path=pg_catalog", code=None)

    assert missing.code == 3
    assert "initialize_schema" in missing.err


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("postgresql://me:secret@db/app", "postgresql://me@db/app"),
        ("postgresql://me@db/app", "postgresql://me@db/app"),
        ("./durable", "./durable"),
        ("./a:b@c", "./a:b@c"),
    ],
)
def test_a_password_is_not_printed(given: str, printed: str) -> None:
    assert without_password(given) == printed


# ------------------------------------------------------------ letting go


async def test_what_is_closed_is_dropped_and_what_is_old_is_pruned_as_in_a_folder(
    backend: PostgresBackend, url: str, typed: Callable[..., Any]
) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((final("x" * 100_000),)))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        await runtime.start()
        for name in ("c1", "c2", "c3"):
            session = await runtime.create_session(SessionKey("app", name), "agent")
            for number in (1, 2):
                await session.call(f"r{number}", "go", timeout=60)

    async def command(*arguments: str, code: int = 0) -> Any:
        return await typed(*arguments, "--store", url, "--json", code=code)

    listed = (await command("checkpoints", SESSION)).json
    current = listed["items"][-1]["position"]
    assert (await command("prune-checkpoints", SESSION, "--through", current)).json["positions"] == 1
    assert len((await command("checkpoints", SESSION)).json["items"]) == 1

    assert (await command("drop", SESSION, code=4)).error["message"]
    assert (await command("close", SESSION)).json["status"] == "CLOSED"
    would = (await command("drop", SESSION, "--dry-run")).json
    assert would["droppedAtMs"] is None and would["events"] > 0
    dropped = (await command("drop", SESSION, "--reason", "asked for")).json
    assert (dropped["events"], dropped["reason"]) == (would["events"], "asked for")
    assert (await command("history", SESSION, code=9)).error["code"] == "DROPPED"

    await command("close", "app/c2")
    report = (await command("retain", "--closed-older-than", "0s", "--events-older-than", "0s")).json
    assert [one["sessionId"] for one in report["dropped"]] == ["c2"] and report["events"] > 0

    # The bodies of the two that were dropped go with the next sweep, and no others.
    async def bodies() -> list[list[str]]:
        partitions = [keys.partition(SessionKey("app", name)) for name in ("c1", "c2", "c3")]
        return [await backend.objects.list(one) for one in partitions]

    first, second, third = await bodies()
    assert first and second and third
    assert (await command("sweep")).json["swept"] == len(first) + len(second)
    assert await bodies() == [[], [], third]
    assert (await command("sweep")).json["swept"] == 0
    assert "x" * 100_000 in (await command("history", "app/c3")).out
    assert (await command("doctor", "--deep")).json["sound"] is True


# ------------------------------------------------------------ a standby


@pytest.mark.timeout(300)  # Twenty commands and a server that is copied.
async def test_what_only_looks_needs_no_primary(
    backend: PostgresBackend, url: str, typed: Callable[..., Any], postgres: PostgresServer, tmp_path: Path
) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((final("x" * 100_000),)))
    administrator = await asyncpg.connect(postgres.dsn())
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        await runtime.start()
        session = await runtime.create_session(SessionKey("app", "c1"), "agent")
        turn = await session.submit("r1", "go")
        await turn.wait(60)
        with await asyncio.to_thread(StandbyServer, postgres) as standby:
            there = url.replace(str(postgres.port), str(standby.port))
            reader = await asyncpg.connect(standby.dsn())
            later = await session.submit("r2", "go on")
            await later.wait(60)
            written = await administrator.fetchval("select pg_current_wal_insert_lsn()::text")

            async def received() -> bool:
                return await reader.fetchval("select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", written)

            await until(received)

            for looks in (
                ("sessions",),
                ("session", SESSION),
                ("threads", SESSION),
                ("turns", SESSION),
                ("turn", turn.turn_id),
                ("history", SESSION),
                ("events", SESSION),
                ("checkpoints", SESSION),
                ("result", turn.turn_id),
                ("runs", turn.turn_id),
                ("tools", turn.turn_id),
                ("explain", later.turn_id),
                ("doctor", "--deep"),
                ("sweep", "--dry-run"),
                ("retain", "--closed-older-than", "1d", "--dry-run"),
            ):
                told = (await typed(*looks, "--store", there, "--json")).out
                if looks[0] in ("session", "history", "result"):
                    assert told == (await typed(*looks, "--store", url, "--json")).out, looks
            for writes in (
                ("submit", SESSION, "more"),
                ("cancel", turn.turn_id),
                ("close", SESSION),
                ("sweep",),
            ):
                refused = await typed(*writes, "--store", there, "--json", code=None)
                assert refused.error["code"] == "UNAVAILABLE" and "cannot be written" in refused.err, writes
            with pytest.raises(StoreReadOnly):
                await PostgresBackend.open(standby.dsn(), schema=schema_of(tmp_path))
            await reader.close()
    await administrator.close()
