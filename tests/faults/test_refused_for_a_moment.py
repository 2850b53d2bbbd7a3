"""PostgreSQL refuses a host's role, a right of it or a table for a moment: a password is changed, a schema restored.

The store was opened, so nobody asked wrongly: a Turn that needs it meanwhile waits, and is then done as if nothing had
been. Before, a refusal was an answer, and a healthy Turn ended FAILED over it, or a tool that had ended was UNKNOWN.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import Unavailable
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, local, say
from tests.runtime.conftest import until
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

pytestmark = pytest.mark.backend("postgres")

LARGE = "y" * 200_000
"""More than stands in the records: it goes into the table of bodies."""


class Refusal(NamedTuple):
    """What an operator does to the store, and takes back. `{s}` is its schema, `{r}` the role of the host."""

    begins: str
    ends: str
    meets: str
    """What the Turn asks its backend for when it meets it."""
    cut: str = ""
    """The connections of the store that end, for else they would go on as they are."""


REFUSALS = {
    "no login, readers cut": Refusal("alter role {r} nologin", "alter role {r} login", "query", cut="readers"),
    "no login, bodies cut": Refusal("alter role {r} nologin", "alter role {r} login", "put_body", cut="bodies"),
    "no right to write bodies": Refusal(
        "revoke insert on {s}.durable_body from {r}", "grant insert on {s}.durable_body to {r}", "put_body"
    ),
    "no table of bodies": Refusal(
        "alter table {s}.durable_body rename to elsewhere",
        "alter table {s}.elsewhere rename to durable_body",
        "put_body",
    ),
    "no right to commit": Refusal(
        "revoke insert on {s}.durable_log from {r}", "grant insert on {s}.durable_log to {r}", "execute"
    ),
    "no schema": Refusal("alter schema {s} rename to {s}_away", "alter schema {s}_away rename to {s}", "execute"),
}


@pytest.fixture
async def administrator(postgres: PostgresServer) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(postgres.dsn())
    yield connection
    await connection.close()


def refusals_of(backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, BaseException]]:
    """Errors that the host gets from its backend from now on, each with what it asked for."""
    met: list[tuple[str, BaseException]] = []

    def watched(name: str) -> Any:
        ask = getattr(backend, name)

        async def asked(*arguments: Any, **named: Any) -> Any:
            try:
                return await ask(*arguments, **named)
            except Exception as error:
                if named.get("audience", Audience.HOST) is Audience.HOST:
                    met.append((name, error))
                raise

        return asked

    for name in ("query", "execute", "put_body"):
        monkeypatch.setattr(backend, name, watched(name))
    return met


def server_processes(backend: Any, which: str) -> list[int]:
    """The processes of the server that serve these connections."""
    lines = {"readers": backend.records._readers, "bodies": [backend._own_objects._line], "": []}[which]
    return [line._connection.get_server_pid() for line in lines if line._connection is not None]


@pytest.mark.spec("RC-07", "OB-08")
@pytest.mark.case("C15")
@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_what_is_refused_for_a_moment_is_waited_for(
    postgres: PostgresServer,
    administrator: asyncpg.Connection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
) -> None:
    schema = schema_of(tmp_path)
    role = f"r_{schema}"

    async def operator(command: str) -> None:
        await administrator.execute(command.format(s=schema, r=role))

    await PostgresBackend.initialize_schema(postgres.dsn(), schema=schema)
    await operator("create role {r} login")
    await operator("grant usage on schema {s} to {r}")
    await operator("grant select, insert, update, delete on all tables in schema {s} to {r}")
    gates, ledger = Gates(), EffectLedger(tmp_path / "ledger")
    script = [
        Stall(gate="go", obedient=False),
        local("charge", value=LARGE),
        say("charged"),
        final("{inputs} {results}"),
    ]
    harness = Harness("agent", "v1", ScriptedHarness(script, gates=gates, ledger=ledger))
    dsn = postgres.dsn().replace("durable@", f"{role}@")
    async with (
        PostgresBackend.open(dsn, schema=schema) as backend,
        # Its lease is none of this story.
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05, lease=600) as runtime,
    ):
        await runtime.start()
        session = await runtime.create_session(SessionKey("app", "c1"), "agent")
        turn = await session.submit("r1", "go")
        await gates.reached("go")
        await turn.steer("s1", "mind this")

        await operator(refusal.begins)
        for process in server_processes(backend, refusal.cut):
            await administrator.execute("select pg_terminate_backend($1)", process)
        met = refusals_of(backend, monkeypatch)
        gates.open("go")
        await until(lambda: any(name == refusal.meets for name, _ in met))
        await operator(refusal.ends)

        answer = str(await turn.wait(90))
        assert {type(error) for _, error in met} == {Unavailable}
        view = await turn.status()
        [call] = await turn.list_tools()
        assert (view.runs, view.error, str(call.state)) == (1, None, "COMPLETED")
        assert ledger.count("tool") == 1
        assert "mind this" in answer and LARGE in answer
    await operator("drop owned by {r}")
    await operator("drop role {r}")
