"""The command on a store in PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.cli.store import without_password
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from tests.servers.server import PostgresServer
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
