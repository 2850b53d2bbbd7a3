"""C23: before an agent says its first word, its input is fetched and its factory may connect to half the world.

A cancel, a pause, the end of the host and a takeover reach each of these at once, and what is broken off is told so.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope_durable.adapters.agentscope import AgentScopeAdapter
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime import watch
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.objects.postgres import PostgresObjectStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_model import Call
from tests.adapters.agentscope.agents import Agents, tool
from tests.every_store import PERSISTENT, backend_with_bodies
from tests.runtime.conftest import KEY, SECONDS, turn_is, until

pytestmark = pytest.mark.case("C23")

LEASE = 0.5
LARGE = "x" * (2 * INLINE_MAX_BYTES)
PLACES = ["factory", "input", "tool list", "result"]

on_each = pytest.mark.parametrize(("place", "backend"), [(place, store) for store in PERSISTENT for place in PLACES])
"""A control and a takeover come out of the store, and so does what an input and a result are fetched from."""


class Slow:
    """What takes for ever the first time, and whether it was told to stop."""

    def __init__(self) -> None:
        self.begun, self.broken_off, self.let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.obedient = True

    async def stay(self) -> None:
        if self.begun.is_set():
            return
        self.begun.set()
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                self.broken_off.set()
                if self.obedient:
                    raise


class World:
    """One conversation, in which one thing is slow.

    Attributes:
        hosts: the first one has begun the Turn.
    """

    def __init__(self, folder: Path, store: str = "sqlite", clock: ManualClock | None = None) -> None:
        self.folder, self.store, self.clock, self.slow = folder, store, clock, Slow()
        self.agents = Agents(folder, ["done"])
        self.input = "go"
        self.hosts: list[DurableRuntime] = []
        self.adapter = AgentScopeAdapter.for_react(self.factory)
        self.in_factory = False

    async def factory(self, binding: Any) -> Any:
        if self.in_factory:
            await self.slow.stay()
        return self.agents.describe(binding)

    def slow_in(self, place: str, patch: pytest.MonkeyPatch) -> None:
        if place == "factory":
            self.in_factory = True
        elif place == "tool list":
            self.agents.arguments["workspace"] = lambda: SlowTools(self.slow)
        else:
            bodies = FileObjectStore if self.store == "sqlite" else PostgresObjectStore
            get = bodies.get

            async def slowly(store: Any, partition: str, digest: str) -> bytes:
                await self.slow.stay()
                return await get(store, partition, digest)

            patch.setattr(bodies, "get", slowly)
            if place == "input":
                self.input = LARGE
            else:
                # A Run that takes in the outcome of a call: a person has given a large result.
                from tests.adapters.agentscope.agents import external

                self.agents = Agents(
                    self.folder, [[Call("ask", id="c1", arguments={"x": 1})], "done"], tools=lambda: [external("ask")]
                )

    @asynccontextmanager
    async def begun(self, place: str) -> AsyncIterator[Any]:
        """A Turn whose first or second Run does not get beyond its beginning."""
        async with backend_with_bodies(self.store, self.folder, self.clock) as backend:
            self.backend = backend
            first = await self.open("first")
            try:
                session = await first.create_session(KEY, "assistant")
                turn = await session.submit("r1", self.input)
                if place == "result":
                    await turn_is(turn, "WAITING")
                    (question,) = await turn.pending_interactions()
                    await turn.respond("a1", question.interaction_id, {"text": LARGE})
                await self.slow.begun.wait()
                yield turn
            finally:
                self.slow.let_go.set()
                for host in reversed(self.hosts):
                    await host.close()

    async def open(self, name: str) -> DurableRuntime:
        host = DurableRuntime(
            backend=self.backend,
            harnesses=[Harness("assistant", "v1", self.adapter)],
            poll_interval=0.02,
            lease=LEASE,
            host_name=name,
            close_timeout=10 * SECONDS,
        )
        self.hosts.append(host)
        await host.start()
        return host


class SlowTools:
    """A workspace that has to connect before it can tell its tools."""

    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    async def list_tools(self) -> list[Any]:
        await self._slow.stay()
        return []

    async def list_skills(self) -> list[Any]:
        return []

    async def offload_context(self, *_: Any, **__: Any) -> str:
        return ""

    async def offload_tool_result(self, *_: Any, **__: Any) -> str:
        return ""


@on_each
async def test_a_cancel_breaks_off_what_is_slow_and_the_next_turn_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, backend: str
) -> None:
    world = World(tmp_path, backend)
    world.slow_in(place, monkeypatch)
    async with world.begun(place) as turn:
        asked = world.agents.requests
        await turn.cancel("c1")
        await world.slow.broken_off.wait()
        await turn_is(turn, TurnStatus.CANCELLED)

        assert world.agents.requests == asked
        assert [run.status for run in await turn.list_runs()][-1] == "CANCELLED"
        following = await world.hosts[0].get_session(KEY).submit("r2", "and now?")
        await turn_is(following, "COMPLETED")


@on_each
async def test_a_pause_breaks_off_what_is_slow_and_resume_begins_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, backend: str
) -> None:
    world = World(tmp_path, backend)
    world.slow_in(place, monkeypatch)
    async with world.begun(place) as turn:
        await turn.pause("p1")
        paused = await turn_is(turn, TurnStatus.PAUSED)
        assert world.slow.broken_off.is_set()

        await turn.resume("p2", paused.revision)
        assert str(await turn.wait(SECONDS)) == "done"


@on_each
async def test_the_end_of_its_host_breaks_off_what_is_slow_and_another_host_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, backend: str
) -> None:
    world = World(tmp_path, backend)
    world.slow_in(place, monkeypatch)
    async with world.begun(place) as turn:
        async with asyncio.timeout(SECONDS):
            await world.hosts[0].close()
        assert world.slow.broken_off.is_set()
        second = await world.open("second")
        turn = second.get_session(KEY).get_turn(turn.turn_id)

        assert str(await turn.wait(SECONDS)) == "done"
        assert [run.status for run in await turn.list_runs()][-2:] == ["RELEASED", "COMPLETED"]


@on_each
async def test_a_takeover_breaks_off_what_is_slow_in_the_former_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, backend: str
) -> None:
    # Not cancelled by force after a while: the Run hears of it.
    monkeypatch.setattr(watch, "FENCED_SECONDS", 10 * SECONDS)
    clock = ManualClock()
    world = World(tmp_path, backend, clock)
    world.slow_in(place, monkeypatch)
    async with world.begun(place) as turn:
        heartbeat = world.hosts[0]._heartbeat
        assert heartbeat is not None
        heartbeat._stopping.set()
        await world.open("second")

        async def ended() -> bool:
            clock.advance(int(LEASE * 900))
            return (await turn.status()).status.terminal

        await until(ended)
        async with asyncio.timeout(SECONDS):
            await world.slow.broken_off.wait()
        assert str(await turn.result()) == "done"
        assert [run.status for run in await turn.list_runs()][-2:] == ["LOST", "COMPLETED"]


@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("place", ["factory", "input"])
async def test_what_does_not_let_itself_be_broken_off_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    world = World(tmp_path)
    world.slow.obedient = False
    world.slow_in(place, monkeypatch)
    async with world.begun(place) as turn:
        await turn.cancel("c1")
        await turn_is(turn, TurnStatus.CANCELLED)
        assert world.slow.broken_off.is_set() and not world.slow.let_go.is_set()
        assert "was given up and is still running" in caplog.text

        await turn_is(await world.hosts[0].get_session(KEY).submit("r2", "and now?"), "COMPLETED")
        world.slow.let_go.set()
    assert (world.agents.requests, world.agents.built) == (1, 2 if place == "factory" else 1)


@pytest.mark.backend("sqlite")
async def test_a_factory_that_ends_the_program_ends_its_run(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.slow.begun.set()

    async def leaves(binding: Any) -> Any:
        sys.exit(3)

    world.adapter = AgentScopeAdapter.for_react(leaves)
    async with world.begun("factory") as turn:
        view = await turn_is(turn, TurnStatus.FAILED)
        assert view.error is not None and "SystemExit" in view.error.kind


@pytest.mark.backend("sqlite")
async def test_what_a_factory_sets_is_seen_by_the_tools_of_its_agent(tmp_path: Path) -> None:
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
    seen: list[str] = []

    async def look() -> str:
        seen.append(tenant.get())
        return "seen"

    world = World(tmp_path)
    world.slow.begun.set()
    world.agents = Agents(tmp_path, [[Call("look", id="c1")], "done"], tools=lambda: [tool(look)])

    async def factory(binding: Any) -> Any:
        tenant.set("acme")
        return world.agents.describe(binding)

    world.adapter = AgentScopeAdapter.for_react(factory)
    async with world.begun("factory") as turn:
        assert str(await turn.wait(SECONDS)) == "done"
    assert seen == ["acme"] and tenant.get() == "nobody"
