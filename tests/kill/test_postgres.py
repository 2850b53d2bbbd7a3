"""Hosts on PostgreSQL that really die: `kill -9` at a commit, and another host goes on when the lease has run out."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.status import ExecutionState, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.executor import Succeeded
from tests.kill.host import KEY
from tests.kill.test_kill import SECONDS, Folder, ended, folder
from tests.servers.server import PostgresServer
from tests.servers.stores import schema_of

__all__ = ["folder"]

pytestmark = pytest.mark.backend("postgres")
LEASE = 1.0
"""Nothing but the lease tells a host on another machine that this one is gone."""


@pytest.mark.spec("AD-01", "RC-01", "PG-11")
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nth", [2, 4, 6, 8])
async def test_whichever_commit_a_host_dies_at_another_one_ends_the_turn(
    folder: Folder, postgres: PostgresServer, tmp_path: Path, side: str, nth: int
) -> None:
    place = {"dsn": postgres.dsn(), "schema": schema_of(tmp_path)}
    await PostgresBackend.initialize_schema(place["dsn"], schema=place["schema"])
    for gate in ("g", "work"):
        folder.open(gate)
    first = await folder.host(failpoint=f"store.commit.{side}:{nth}", lease=LEASE, **place)
    assert await ended(first) == -signal.SIGKILL
    second = await folder.host(lease=LEASE, **place)
    async with (
        PostgresBackend.open(place["dsn"], schema=place["schema"]) as backend,
        DurableRuntime(backend=backend, poll_interval=0.05) as runtime,
    ):

        async def seen() -> Any:
            """The Turn, when it has ended or nobody but a person can say what became of its call."""
            items = (await runtime.get_session(KEY).list_turns()).items
            unknown = [reason for view in items for reason in view.waiting_on if reason.kind is WaitKind.TOOL_UNKNOWN]
            return items[0] if items and (unknown or items[0].status.terminal) else None

        view: Any = None
        async with asyncio.timeout(SECONDS):
            while (view := await seen()) is None:
                await asyncio.sleep(0.02)
        if not view.status.terminal:
            turn = runtime.get_session(KEY).get_turn(view.turn_id)
            (call,) = [tool for tool in await turn.list_tools() if tool.state is ExecutionState.UNKNOWN]
            await HostOperations(backend).reconcile_tool(
                turn, call.call_id, request_id="e1", result=Succeeded(value="seen"), evidence_ref="ticket 1"
            )
        assert await ended(second) == 0
        [view] = (await runtime.get_session(KEY).list_turns()).items
        assert view.status is TurnStatus.COMPLETED
        # What has no promise to be done again was done once at most.
        assert folder.ledger.count("work") <= 1
