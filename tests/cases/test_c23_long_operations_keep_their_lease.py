"""C23: seven of ten kinds of long operation sent no heartbeat, so they lost their lease and no cancel reached them.

Here every kind there is lasts for five periods of the lease, by the store's clock, while another host waits for its
death; then its Turn is cancelled. A failpoint or an awaited promise to an adapter, an executor or an object store that
no kind names fails the first test, so a new kind of operation cannot be missed.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope_durable import _failpoints
from agentscope_durable.adapters.agentscope import AgentScopeAdapter, ToolBinding, in_thread
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.contracts.status import ReasonKind, TurnStatus
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.executor import (
    Cancelled,
    ExecutionRequest,
    Executor,
    ExecutorCapabilities,
    Outcome,
    Running,
)
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.objects.postgres import PostgresObjectStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_model import Call, Stall, Text
from tests.adapters.agentscope.agents import Agents, tool
from tests.every_store import PERSISTENT, backend_with_bodies
from tests.runtime.conftest import KEY, SECONDS, kill, turn_is, until

pytestmark = pytest.mark.case("C23")

LEASE = 0.3
"""Seconds: a host renews it every third of them, and the store's clock is moved by nearly as much after each."""
PERIODS = 5
STEP_MS = int(LEASE * 900)
LARGE = "x" * (2 * INLINE_MAX_BYTES)
RETRY_AFTER = 0.01


class Gate:
    """Where an operation stays until the test lets it go on: the first who comes, for a coroutine or for a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached, self.go_on, self._go_on = asyncio.Event(), asyncio.Event(), threading.Event()

    async def stay(self) -> None:
        if self.reached.is_set():
            return
        self.reached.set()
        await self.go_on.wait()

    def block(self, _name: str = "") -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        assert self._go_on.wait(SECONDS)

    def open(self) -> None:
        self.go_on.set()
        self._go_on.set()


class Hands:
    """An executor whose answers to one kind of question take their time."""

    def __init__(self, gate: Gate, slow: str) -> None:
        self._gate = gate
        self._slow = slow
        self.asked: Counter[str] = Counter()

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=True, cancel=True)

    async def _answer(self, name: str, outcome: Outcome) -> Outcome:
        self.asked[name] += 1
        if name == self._slow:
            await self._gate.stay()
        return outcome

    async def execute(self, request: ExecutionRequest) -> Outcome:
        return await self._answer("execute", Running(RETRY_AFTER))

    async def query(self, request: ExecutionRequest) -> Outcome:
        return await self._answer("query", Running(RETRY_AFTER))

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        return await self._answer("cancel", Cancelled("stopped"))


class World:
    """One Turn of an agent and what its long operation is made of; two hosts over one store."""

    def __init__(self, folder: Path, clock: ManualClock, store: str) -> None:
        self.folder, self.clock, self.store, self.gate = folder, clock, store, Gate()
        self.input = "go"
        self.cancels_when: Callable[[], bool] | None = None
        self.hands = Hands(self.gate, "")
        self.answer: Sequence[Any] = ["done"]
        self.options: dict[str, Any] = {}
        self.tools: list[Callable[[], Any]] = []
        self.adapter: Callable[[Agents], HarnessAdapter] = Agents.adapter

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        answered = any(block.type == "tool_result" for message in messages for block in message.content)
        return "done" if answered else list(self.answer)

    def requests(self) -> int:
        return self.agents.requests

    def asked(self) -> Counter[str]:
        """How often each part of the world outside was asked for something."""
        return self.hands.asked + Counter(model=self.requests())

    def there(self) -> bool:
        self.clock.advance(1)  # An executor that runs is asked again when its time has come.
        return self.gate.reached.is_set()

    @asynccontextmanager
    async def hosts(self) -> AsyncIterator[tuple[DurableRuntime, DurableRuntime]]:
        agents = self.agents = Agents(
            self.folder,
            self.script,
            tools=lambda: [make() for make in self.tools],
            model=self.options,
            bindings=[ToolBinding("work", "hands", input_schema=OBJECT, description="Work.", permission="allow")],
        )
        adapter = self.adapter(agents)
        async with backend_with_bodies(self.store, self.folder, self.clock) as backend:

            def host(name: str) -> DurableRuntime:
                return DurableRuntime(
                    backend=backend,
                    harnesses=[Harness("assistant", "v1", adapter)],
                    executors={"hands": self.hands},
                    poll_interval=0.02,
                    lease=LEASE,
                    host_name=name,
                    close_timeout=0.5,
                )

            async with host("first") as first, host("second") as second:
                await first.start()
                try:
                    yield first, second
                finally:
                    self.gate.open()
                    _failpoints.disarm()

    async def pass_periods(self, *alive: DurableRuntime) -> None:
        """Five periods go by for the store. Each of these hosts renews in each part of them, or this does not end."""
        for _ in range(-(-PERIODS * 10 // 9)):
            for one in alive:
                # The first one may have been under way when the clock was moved: the second is dated after it.
                for _ in range(2):
                    renewed_at = one._heartbeat.last_renewal
                    await until(lambda one=one, at=renewed_at: one._heartbeat.last_renewal > at)
            self.clock.advance(STEP_MS)


OBJECT = {"type": "object", "properties": {}}


# ------------------------------------------------------------ the kinds


@dataclass(frozen=True)
class Kind:
    """A kind of long operation.

    Attributes:
        prepare: makes the world one in which it lasts until the gate opens.
        of: the failpoints it stands between and the promises it is an answer to.
        says: after the cancel the Turn says this of what it waits for; "": it is broken off, and nothing is waited for.
        outside: the Turn waits for it without an owner.
    """

    prepare: Callable[[World, pytest.MonkeyPatch], None]
    of: frozenset[str]
    says: str = ""
    outside: bool = False


KINDS: dict[str, Kind] = {}


def kind(name: str, *of: str, says: str = "", outside: bool = False) -> Callable[[Any], Any]:
    def add(prepare: Any) -> Any:
        KINDS[name] = Kind(prepare, frozenset(of), says, outside)
        return prepare

    return add


@kind("model call", "model.request", "HarnessAdapter.run")
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    world.options["stream"] = False
    world.answer = [Stall(world.gate.go_on, world.gate.reached), "never"]


@kind("model stream", "model.request", "HarnessAdapter.run")
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    world.answer = [Text("half of it, and "), Stall(world.gate.go_on, world.gate.reached), "never"]


@kind("agent being made", "HarnessAdapter.run")
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    def slowly(agents: Agents) -> AgentScopeAdapter:
        async def factory(binding: Any) -> Any:
            await world.gate.stay()
            return agents.describe(binding)

        return AgentScopeAdapter.for_react(factory)

    world.adapter = slowly


@kind("local tool", "tool.local", "HarnessAdapter.run")
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    async def act() -> str:
        await world.gate.stay()
        return "acted"

    world.tools, world.answer = [lambda: tool(act)], [Call("act", id="c1")]


@kind(
    "local tool in a thread",
    "tool.local",
    "HarnessAdapter.run",
    says="It ends when the outcome of 1 call is known: c1.",
)
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    def act() -> str:
        world.gate.block()
        return "acted"

    world.tools, world.answer = [lambda: tool(in_thread(act), name="act")], [Call("act", id="c1")]


@kind(
    "upload of a large body", "object.put", "ObjectStore.put", says="It ends when the outcome of 1 call is known: c1."
)
def _(world: World, patch: pytest.MonkeyPatch) -> None:
    put = PostgresObjectStore.put

    async def slowly(self: PostgresObjectStore, partition: str, name: str, content: bytes) -> None:
        await world.gate.stay()
        await put(self, partition, name, content)

    async def act() -> str:
        if world.store == "sqlite":
            _failpoints.arm("object.put.before", world.gate.block)
        else:
            # A file is written by a thread; what is sent to a server is awaited.
            patch.setattr(PostgresObjectStore, "put", slowly)
        return LARGE

    world.tools, world.answer = [lambda: tool(act)], [Call("act", id="c1")]


@kind("download of a large body", "ObjectStore.get")
def _(world: World, patch: pytest.MonkeyPatch) -> None:
    bodies = FileObjectStore if world.store == "sqlite" else PostgresObjectStore
    get = bodies.get

    async def slowly(self: Any, partition: str, digest: str) -> bytes:
        # Whoever asks: the settlement must not need it.
        world.gate.reached.set()
        await world.gate.go_on.wait()
        return await get(self, partition, digest)

    patch.setattr(bodies, "get", slowly)
    world.input = LARGE


@kind("execution elsewhere", "executor.start", "Executor.execute", outside=True)
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    world.hands, world.answer = Hands(world.gate, "execute"), [Call("work", id="c1")]


@kind("question about an execution", "executor.query", "Executor.query", outside=True)
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    world.hands, world.answer = Hands(world.gate, "query"), [Call("work", id="c1")]


@kind(
    "stopping an execution",
    "executor.cancel",
    "Executor.cancel",
    outside=True,
    says="It was asked to stop and has not confirmed that.",
)
def _(world: World, _patch: pytest.MonkeyPatch) -> None:
    world.hands, world.answer = Hands(world.gate, "cancel"), [Call("work", id="c1")]
    world.cancels_when = lambda: world.hands.asked["execute"] > 0


@kind("settlement", "HarnessAdapter.settle", says="It is being settled on host first")
def _(world: World, patch: pytest.MonkeyPatch) -> None:
    settle = AgentScopeAdapter.settle

    async def slowly(self: AgentScopeAdapter, context: Any) -> Any:
        await world.gate.stay()
        return await settle(self, context)

    patch.setattr(AgentScopeAdapter, "settle", slowly)
    world.answer = [Stall(), "never"]
    world.cancels_when = lambda: world.requests() > 0


NOT_LONG = {
    "store.commit": "one transaction of bounded size: who waits for its lock gives up, and asks again (C73)",
    "store.renew": "the heartbeat itself",
    "store.release": "the end of a heartbeat",
    "ObjectStore.exists": "looked up by whoever clears away, who owns no Turn",
    "object.delete": "done by whoever clears away, who owns no Turn",
    "ObjectStore.delete": "done by whoever clears away, who owns no Turn",
    "ObjectStore.list": "done by whoever clears away, who owns no Turn",
    "ObjectStore.close": "the end of a store: no Turn is owned then",
}
"""What no kind of long operation is made of, and why."""


def test_every_operation_there_is_belongs_to_a_kind() -> None:
    places = {name.rpartition(".")[0] for name in _failpoints.NAMES}
    promises = {
        f"{protocol.__name__}.{name}"
        for protocol in (HarnessAdapter, Executor, ObjectStore)
        for name, member in vars(protocol).items()
        if inspect.iscoroutinefunction(member) and not name.startswith("_")
    }
    named = {one for kind in KINDS.values() for one in kind.of}
    assert named | NOT_LONG.keys() == places | promises
    assert not named & NOT_LONG.keys()


@pytest.mark.spec("TM-09")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_it_keeps_its_lease_and_hears_of_a_cancel(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    kind, world = KINDS[name], World(tmp_path, clock, backend)
    kind.prepare(world, monkeypatch)
    async with world.hosts() as (first, second):
        session = await first.create_session(KEY, "assistant")
        turn = await session.submit("r1", world.input)
        if world.cancels_when is not None:
            await until(world.cancels_when)
            await turn.cancel("c1")
        await until(world.there)
        if kind.outside:
            await turn_is(turn, "WAITING")
        await second.start()
        before, asked = await turn.status(), world.asked()

        await world.pass_periods(first, second)
        view = await turn.status()
        assert view.status is before.status and not view.status.terminal
        assert (await owners(turn)) == [first.owner]
        assert world.asked() == asked
        if kind.outside:
            # Nobody owns the Turn meanwhile; who performs its call is not asked a second time.
            assert (view.lease, view.status) == (None, TurnStatus.WAITING)
        else:
            assert view.lease is not None and view.lease.alive
            assert (view.lease.owner, view.lease.fence) == (first.owner, before.lease.fence)

        await turn.cancel("c1")
        if kind.says:
            # It may not be broken off: it is kept, for as long as it takes, and the Turn says what it waits for.
            await world.pass_periods(first, second)
            view, explained = await turn.status(), await turn.explain()
            assert view.cancel_requested and not view.status.terminal
            assert explained.reasons[0].kind is ReasonKind.CANCELLING
            assert any(kind.says in reason.text for reason in explained.reasons)
            world.gate.open()
        # The store's clock stands still, so what is broken off has heard of it within the period of the cancel.
        await until(partial(has_ended, turn, clock if kind.outside else None))
        assert (await turn.status()).status is TurnStatus.CANCELLED
        assert (await owners(turn)) == [first.owner]
        assert world.requests() == asked["model"], "a Run that has heard of a cancel asks the model nothing more"


@pytest.mark.parametrize("backend", PERSISTENT)
async def test_a_host_that_renews_no_more_loses_the_same_work(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """So that the story above can fail."""
    world = World(tmp_path, clock, backend)
    KINDS["model stream"].prepare(world, monkeypatch)
    async with world.hosts() as (first, second):
        session = await first.create_session(KEY, "assistant")
        turn = second.get_session(KEY).get_turn((await session.submit("r1", "go")).turn_id)
        await until(world.there)
        await second.start()
        kill(first)
        await world.pass_periods(second)

        async def taken() -> bool:
            return await owners(turn) == [first.owner, second.owner]

        await until(taken)


async def owners(turn: Any) -> list[str]:
    """Which hosts have run it, first to last."""
    return [run.owner for run in await turn.list_runs()]


async def has_ended(turn: Any, clock: ManualClock | None) -> bool:
    if clock is not None:
        clock.advance(5)  # An executor is asked again when its time has come.
    return (await turn.status()).status.terminal
