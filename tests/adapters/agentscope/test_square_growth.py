"""C67: each model call stored the whole conversation again, so what a Turn wrote grew with the square of its calls."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from agentscope.message import AssistantMsg, UserMsg
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.records import Binding, encode
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.record_store import Change, Unchanged, View
from agentscope_durable.testing.scripted_model import Call, Text, scripted_model
from benchmarks.growth import seed
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY
from tests.servers.fixtures import shared_postgres
from tests.servers.stores import schema_of

TOKENS = 200_000
RESULT_BYTES = 5_000
AT_ONCE = 5
"""Calls of one answer: the more answers, the longer the agent itself takes over such a context."""


def text(chance: random.Random, size: int) -> str:
    """Words that do not compress into each other."""
    return chance.randbytes(size // 2).hex()


class Writes:
    """Counts the bytes that reach the store, whatever table they go to, and those that become objects before that."""

    def __init__(self, backend: Any) -> None:
        self.bytes = 0
        self.commits = 0
        self._transact = backend.records.transact
        backend.records.transact = self._counted
        # A whole state is large: it would be an object, and a short reference in the log.
        objects = backend._bodies.objects
        self._put = objects.put
        objects.put = self._put_counted

    async def _put_counted(self, partition: str, name: str, content: bytes) -> None:
        self.bytes += len(content)
        await self._put(partition, name, content)

    async def _counted(self, partition: str, reads: Any, decide: Any) -> Any:
        written = [0]

        def counted(view: View, now_ms: int) -> Change | Unchanged:
            change = decide(view, now_ms)
            written[0] = _size(change) if isinstance(change, Change) else 0
            return change

        committed = await self._transact(partition, reads, counted)
        self.bytes += written[0]
        self.commits += bool(written[0])
        return committed


def _size(change: Change) -> int:
    entry = change.entry
    log = 0 if entry is None else len(entry.events) + len(entry.private) + len(entry.journal)
    puts = sum(len(key) + len(value or b"") for key, value in change.puts)
    ready = sum(len(encode(row)) for row in change.ready)
    return len(encode(change.head)) + log + puts + ready


def opening(folder: Path, store: str) -> Any:
    if store == "postgres":
        return PostgresBackend.open(shared_postgres().dsn(), schema=schema_of(folder), initialize_schema=True)
    return LocalBackend.open(folder, synchronous="NORMAL")


async def written(folder: Path, store: str, calls: int) -> tuple[int, int, int]:
    """Bytes a Turn with so many tool calls writes, those of its new content, and its commits."""
    chance = random.Random(67)
    content = 0

    def new(size: int) -> str:
        nonlocal content
        content += size
        return text(chance, size)

    def script(messages: Any, tools: Any, choice: Any, number: int) -> list[Any]:
        if number * AT_ONCE >= calls:
            return [Text(new(200))]
        return [Text(new(200)), *(Call("read", {"at": number * AT_ONCE + at}) for at in range(AT_ONCE))]

    def read(at: int) -> str:
        """Read a part of something."""
        return new(RESULT_BYTES)

    def make_agent(binding: Any) -> AgentBuilder:
        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
        return AgentBuilder(
            name="assistant",
            system_prompt="You read.",
            model=scripted_model(script, context_size=100_000_000),
            toolkit=Toolkit(tools=[FunctionTool(read, permission=allowed)]),
        )

    state = AgentState(session_id="long")
    for number in range(400):
        made = UserMsg if number % 2 == 0 else AssistantMsg
        state.context.append(made("somebody", text(chance, 4 * TOKENS // 400)))
    adapter = AgentScopeAdapter.for_react(make_agent)
    async with (
        opening(folder, store) as backend,
        DurableRuntime(backend=backend, harnesses=[Harness("assistant", "v1", adapter)]) as runtime,
    ):
        session = await runtime.create_session(KEY, "assistant")
        await seed(backend, KEY, Binding("assistant", "v1", adapter.state_version), state.model_dump_json().encode())
        writes = Writes(backend)
        await runtime.start()
        turn = await session.submit("r1", "read all of it")
        await turn.wait(timeout=120)
        assert len(await turn.list_tools()) == calls
    return writes.bytes, content, writes.commits


@pytest.mark.case("C67")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_what_a_turn_writes_grows_with_what_is_new_and_not_with_its_square(tmp_path: Path, backend: str) -> None:
    small, small_content, small_commits = await written(tmp_path / "small", backend, 50)
    large, large_content, large_commits = await written(tmp_path / "large", backend, 100)

    for stored, content in ((small, small_content), (large, large_content)):
        assert content < stored <= 3 * content, f"{stored} bytes for {content}"
    # Twice the calls, twice the bytes; what is written once for a Turn is small beside it.
    assert 1.8 * small < large < 2.2 * small
    assert large_commits < 2.1 * small_commits
