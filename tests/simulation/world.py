"""The world of a simulated story: hosts, clients, hands and a store, each an actor of one loop.

Everything that leaves a process goes through a `Link` (the store), `Hints` or `Effects`, where it may be late, lost,
done twice or cut off, and where what really happened is noted for the audit.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from agentscope_durable import _failpoints
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.commands import AnyCommand
from agentscope_durable.contracts.errors import HostClosed, Unavailable, Uncertain
from agentscope_durable.contracts.journal import STATE_VERSION as JOURNAL
from agentscope_durable.runtime.definitions import Definition, Harness
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.executor import (
    Cancelled,
    ExecutionRequest,
    ExecutorCapabilities,
    Failed,
    Outcome,
    Running,
    Succeeded,
    ToolError,
    Unknown,
)
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from agentscope_durable.stores.records._sqlite_writer import Member
from agentscope_durable.stores.records._waiters import _resolve
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.scripted_harness import STATE_VERSION, Gates, ScriptedHarness
from agentscope_durable.testing.simulated_loop import (
    ACTOR,
    SimulatedClock,
    SimulatedEnvironment,
    SimulatedHeartbeat,
    SimulatedLoop,
)
from tests.simulation.notes import Noting
from tests.simulation.schedule import (
    CLIENTS,
    HOSTS,
    OWNER,
    REAL,
    ROUTE,
    Deaf,
    Freeze,
    Jump,
    Kill,
    Point,
    Schedule,
    Stop,
    Store,
    Storm,
)

AGENT = "agent"

COMMAND: contextvars.ContextVar[AnyCommand | None] = contextvars.ContextVar("command", default=None)


class Killed(BaseException):
    """The process was killed here: what catches this runs no further."""


class Backend(TransactionalSessionBackend):
    """The real one; it says which command a transaction is for, and its heartbeat beats on the simulated clock."""

    link: Link

    async def execute(self, command: AnyCommand, **options: Any) -> Any:
        token = COMMAND.set(command)
        try:
            return await super().execute(command, **options)
        finally:
            COMMAND.reset(token)

    def heartbeat(self, owner: str, lease_ms: int, published: bytes) -> Any:
        return SimulatedHeartbeat(self.link.world.loop, self.link, owner, lease_ms, published)  # type: ignore[arg-type]


class InlineSqlite(SqliteRecordStore):
    """The store without its threads: what one of them would be given is done on the spot, by the same code.

    A story asks for one thing at a time and the world stands still meanwhile, so threads would only pass it on.
    """

    def _start(self) -> None:
        """There is nobody to start."""

    def _submit(self, where: Any, job: Any) -> None:
        super()._submit(where, job)
        assert where.get_nowait() is job
        if where is self._readings:
            self._read(self._readers[0], job)
        elif isinstance(job, Member):
            with self._gate:
                self._commit([job])
        else:
            with self._gate:
                self._run(job)
        _resolve((job,))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for reader in self._readers:
            reader.connection.close()
        self._renewer.close()
        self._writer.connection.close()
        self._locks.close()


class Link:
    """A record store as one process reaches it."""

    def __init__(self, world: World, slot: str, actor: str, inner: Any) -> None:
        self.world = world
        self.slot = slot
        self.actor = actor
        self.inner = inner
        self._random = random.Random(f"link {world.plan.seed} {actor}")

    @property
    def capabilities(self) -> Any:
        return self.inner.capabilities

    def _latency(self) -> float:
        most = self.world.latency
        return self._random.uniform(0.1, 1.0) * most * (10 if self._random.random() < 0.05 else 1)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        world = self.world
        if world.cut(self.actor):
            raise HostClosed("store of a dead host")
        fault = world.fault_of(self.slot, method)
        loop = world.loop
        go, back = self._latency(), self._latency()
        answer: asyncio.Future[Any] = loop.create_future()
        if fault is not None:
            if fault.how == "fail":
                await asyncio.sleep(go)
                raise Unavailable("the simulated store was away")
            if fault.how in ("slow", "ghost"):
                go += fault.seconds
            if fault.how == "ghost":
                loop.call_later(back, _fail, answer, Uncertain("the commit", reason="the connection broke"))
            if fault.how == "killed":
                loop.call_later(go / 2, world.kill, self.slot, fault.back, context=world.context)
        apply = (self._apply, method, arguments, named, COMMAND.get(), answer, back, fault)
        loop.call_later(go, *apply, context=world.store_context)
        return await answer

    def _apply(
        self, method: str, arguments: Any, named: Any, command: Any, answer: Any, back: float, fault: Store | None
    ) -> None:
        world = self.world
        if world.loop.is_dead(self.actor) and (self._random.random() < 0.5 or world.store_closed(self.inner)):
            return  # It was still in the process, or in a socket that was closed with it.
        result: Any = None
        error: BaseException | None = None
        try:
            result = world.loop.drive(getattr(self.inner, method)(*arguments, **named))
        except Exception as raised:
            error = raised
        if method == "transact":
            # The rule with its command and seed bound, as the backend gives it.
            seed = arguments[2].args[1]
            world.audit.applied(self.slot, self.actor, command, seed, result, error)
        if method == "release" and error is None:
            world.audit.released(*arguments)
        if fault is not None and fault.how == "dead":
            world.kill(self.slot, fault.back)
            return
        if fault is not None and fault.how == "lost" and error is None:
            error = Uncertain("the commit", reason="the answer was lost")
            world.audit.sometimes["an answer was lost"] += 1
        tell = (_answer, answer, result) if error is None else (_fail, answer, error)
        world.loop.call_later(back, *tell, context=world.loop.context_of(self.actor))

    # ---- the socket ----

    def __getattr__(self, name: str) -> Any:
        """Every other method that the store has."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        found = getattr(self.inner, name)
        reached = partial(self._call, name) if inspect.iscoroutinefunction(found) else found
        # Looked up once: this is where every call of every host passes.
        self.__dict__[name] = reached
        return reached

    def announce(self, owner: str) -> None:
        if not self.world.cut(self.actor):
            self.inner.announce(owner)

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        if self.world.cut(self.actor):
            return
        fault = self.world.fault_of(self.slot, "renew")
        if fault is not None and fault.how in ("fail", "slow", "ghost"):
            raise Unavailable("the simulated store was away")
        self.inner.renew(owner, lease_ms, value)
        self.world.audit.renewed(owner, self.actor, lease_ms)
        if fault is not None and fault.how in ("killed", "dead"):
            self.world.kill(self.slot, fault.back)

    async def close(self) -> None:
        """The world closes its stores."""


def _answer(future: Any, result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: Any, error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class ObjectLink:
    """The object store as one process reaches it: late, and cut off with the process."""

    persistent = False

    def __init__(self, world: World, slot: str, actor: str) -> None:
        self._world = world
        self._slot = slot
        self._actor = actor
        self._random = random.Random(f"objects {world.plan.seed} {actor}")

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        world = self._world
        if world.cut(self._actor):
            raise HostClosed("object store of a dead host")
        fault = world.fault_of(self._slot, "object")
        await asyncio.sleep(self._random.uniform(0.1, 2.0) * world.latency)
        if fault is not None and fault.how == "fail":
            raise Unavailable("the simulated object store was away")
        if fault is not None:
            await asyncio.sleep(fault.seconds)
        if method == "put":
            # The places that a store with a disk passes.
            world.passed("object.put.before")
        answer = await getattr(world.objects, method)(*arguments, **named)
        if method == "put":
            world.passed("object.put.after")
        if fault is not None and fault.how in ("killed", "dead"):
            world.kill(self._slot, fault.back)
            await asyncio.sleep(0)
        await asyncio.sleep(self._random.uniform(0.1, 2.0) * world.latency)
        if world.cut(self._actor):
            raise HostClosed("object store of a dead host")
        return answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._world.objects, name)
        return partial(self._call, name) if inspect.iscoroutinefunction(found) else found

    async def close(self) -> None:
        """The world's."""


class Hints:
    """`Wakeups` between processes: they may be lost, doubled, late and out of order."""

    def __init__(self, world: World, actor: str) -> None:
        self._world = world
        self._actor = actor
        self.local = LocalWakeups()
        self._random = random.Random(f"hints {world.plan.seed} {actor}")

    def publish(self, keys: tuple[str, ...]) -> None:
        world = self._world
        if world.cut(self._actor):
            return
        for actor, hub in list(world.hubs.items()):
            if world.deaf or self._random.random() < world.hints_lost:
                continue
            for _ in range(2 if self._random.random() < 0.1 else 1):
                late = self._random.choice((0.0, 0.001, 0.05, 2.0))
                world.loop.call_later(late, hub.local.publish, keys, context=world.loop.context_of(actor))

    def listen(self, keys: frozenset[str] | None = None) -> AbstractAsyncContextManager[AsyncIterator[frozenset[str]]]:
        return self._heard(keys)

    @asynccontextmanager
    async def _heard(self, keys: frozenset[str] | None) -> AsyncGenerator[AsyncIterator[frozenset[str]]]:
        async with self.local.listen(keys) as heard:
            yield heard


class SimulatedGates(Gates):
    """`wait <seconds>`, and `cut <id> <times> <seconds>`: the first so many passages raise."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    async def passed(self, name: str) -> None:
        words = name.split(" ")
        await asyncio.sleep(float(words[-1]))
        if words[0] == "cut" and self._world.cuts[name] < int(words[2]):
            self._world.cuts[name] += 1
            self._world.audit.sometimes["a model stream was cut"] += 1
            raise ConnectionError("the model's stream was cut")


class Effects:
    """What really happened outside: one entry per effect, in order."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.begun: Counter[str] = Counter()
        self.ended: dict[str, list[str]] = {}
        self.models: list[tuple[float, str, str, int]] = []
        self.lines: list[tuple[float, str, str]] = []

    def append(self, name: str, **facts: Any) -> None:
        """As `EffectLedger`."""
        actor = ACTOR.get()
        if self._world.cut(actor):
            return
        self.lines.append((self._world.loop.time(), actor, f"{name} {facts}"))
        if name == "model":
            self.models.append((self._world.loop.time(), actor, facts["message"], facts["attempt"]))

    async def work(self, effect: str, seconds: float, how: str, **edited: Any) -> str:
        """A tool in the agent's process."""
        world = self._world
        if world.cut(ACTOR.get()):
            raise HostClosed("a dead host's tool")
        self.begun[effect] += 1
        value = f"{effect}#{self.begun[effect]}{'!' if edited else ''}"
        self.lines.append((world.loop.time(), ACTOR.get(), f"tool {value} begins"))
        await asyncio.sleep(seconds)
        if world.cut(ACTOR.get()):
            raise HostClosed("a dead host's tool")
        return self.finish(effect, how, value)

    def finish(self, effect: str, how: str, value: str) -> str:
        if how == "raise":
            raise RuntimeError(f"{value} raised")
        if how == "error":
            self.ended.setdefault(effect, []).append(f"{value} failed")
            raise ToolError(f"{value} failed")
        self.ended.setdefault(effect, []).append(value)
        self.lines.append((self._world.loop.time(), ACTOR.get(), f"tool {value} ends"))
        return value


class Hands:
    """Tools of another service: they go on whatever becomes of the host that began them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.calls: dict[str, asyncio.Task[str]] = {}
        self.cancelled: set[str] = set()
        self.starts: Counter[str] = Counter()

    def executor(self, actor: str) -> Executor:
        return Executor(self._world, self, actor)

    def begin(self, execution_id: str, arguments: dict[str, Any]) -> asyncio.Task[str]:
        self.starts[execution_id] += 1
        if execution_id not in self.calls:
            task = self._world.loop.start(self._work(execution_id, arguments), actor="hands")
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
            self.calls[execution_id] = task
        return self.calls[execution_id]

    def patient(self, execution_id: str) -> bool:
        return random.Random(f"hands {self._world.plan.seed} {execution_id}").random() < 0.3

    async def _work(self, execution_id: str, arguments: dict[str, Any]) -> str:
        return await self._world.effects.work(**arguments)


class Executor:
    """`Executor` in a host: asks the service."""

    def __init__(self, world: World, hands: Hands, actor: str) -> None:
        self._world = world
        self._hands = hands
        self._actor = actor
        self.capabilities = ExecutorCapabilities(query=world.plan.may_query, cancel=world.plan.may_cancel)

    def _check(self) -> None:
        if self._world.cut(self._actor):
            raise HostClosed("a dead host's executor")

    async def execute(self, request: ExecutionRequest) -> Outcome:
        self._check()
        arguments = msgspec.json.decode(request.arguments)
        self._world.audit.executing(request.execution_id)
        await asyncio.sleep(self._world.latency)
        self._check()
        task = self._hands.begin(request.execution_id, arguments)
        if self.capabilities.query and self._hands.patient(request.execution_id):
            # It takes the work, and is to be asked for the outcome later.
            return Running(2.0)
        await asyncio.wait({task})
        await asyncio.sleep(self._world.latency)
        return self._outcome(task)

    @staticmethod
    def _outcome(task: asyncio.Task[str]) -> Outcome:
        if not task.done():
            return Running(2.0)
        if task.cancelled():
            return Cancelled("stopped")
        error = task.exception()
        if isinstance(error, ToolError):
            return Failed(str(error))
        if error is not None:
            return Unknown(str(error))
        return Succeeded(task.result())

    async def query(self, request: ExecutionRequest) -> Outcome:
        self._check()
        await asyncio.sleep(self._world.latency)
        task = self._hands.calls.get(request.execution_id)
        if task is None:
            return Unknown("the service does not know it")
        return self._outcome(task)

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        self._check()
        await asyncio.sleep(self._world.latency)
        task = self._hands.calls.get(request.execution_id)
        if task is None:
            return Unknown("the service does not know it")
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        return self._outcome(task)


class World:
    """See the top of this file."""

    def __init__(self, plan: Schedule, audit: Any, folder: Path | None = None) -> None:
        self.plan = plan
        self.audit = audit
        self.loop = SimulatedLoop(plan.seed, stay=plan.stay)
        self.clock = SimulatedClock(self.loop)
        self.context = self.loop.context_of("world")
        self.store_context = self.loop.context_of("store")
        self.environment = SimulatedEnvironment(self.loop, f"world {plan.seed}")
        self.latency = plan.latency
        self.hints_lost = plan.hints_lost
        self.deaf = False
        self.faulty = True
        self.hubs: dict[str, Hints] = {}
        self.live = LocalLiveEvents()
        self.objects = MemoryObjectStore()
        self.effects = Effects(self)
        self.hands = Hands(self)
        self.cuts: Counter[str] = Counter()
        self.errors: list[tuple[float, str, BaseException]] = []
        self.actors: dict[str, str] = {}
        self.runtimes: dict[str, DurableRuntime] = {}
        self.stopping: set[str] = set()
        self._incarnations: Counter[str] = Counter()
        self._weather = random.Random(f"weather {plan.seed}")
        self._passages: Counter[tuple[str, str]] = Counter()
        self._returning: Counter[str] = Counter()
        self._stores: dict[str, list[Any]] = {}
        self._closed: set[int] = set()
        self._shut = False
        self._folder = folder
        self._truth: Any = None
        self._memory: MemoryRecordStore | None = None
        self._index_faults()

    def _index_faults(self) -> None:
        self._armed: list[list[Any]] = []
        self._storms: list[Storm] = []
        self._points = {(f.host, f.name, f.nth): f for f in self.plan.faults if isinstance(f, Point)}

    @property
    def hosts(self) -> tuple[str, ...]:
        return HOSTS[: self.plan.hosts]

    # ---- stores ----

    def open_store(self, name: str) -> Any:
        """The store as one process opens it."""
        if self.plan.store == "memory":
            self._memory = self._memory or MemoryRecordStore(self.clock)
            return self._memory
        if self._folder is None:
            shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
            self._folder = Path(tempfile.mkdtemp(prefix="story-", dir=shm))
        environment = SimulatedEnvironment(self.loop, f"store {name}")
        opening = InlineSqlite.open(
            self._folder / "durable.db", synchronous="NORMAL", clock=self.clock, environment=environment
        )
        store = self.loop.drive(opening)
        self._stores.setdefault(name, []).append(store)
        return store

    @property
    def truth(self) -> Any:
        """The store as it is."""
        self._truth = self._truth or self.open_store("truth")
        return self._truth

    def store_closed(self, inner: Any) -> bool:
        return id(inner) in self._closed

    def _close_store(self, name: str) -> None:
        for store in self._stores.pop(name, []):
            self._closed.add(id(store))
            # As the end of a process does: the locks of its files are free at once.
            for descriptor in store._locks._held.values():
                os.close(descriptor)
            store._locks._held.clear()
            self.loop.drive(store.close())

    def close(self) -> None:
        _failpoints.observe(None)
        for name in list(self._stores):
            self._close_store(name)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- processes ----

    def cut(self, actor: str) -> bool:
        """Nothing this actor does has an effect any more."""
        return self._shut or self.loop.is_dead(actor)

    def backend(self, slot: str, actor: str) -> Backend:
        link = Link(self, slot, actor, self.open_store(actor))
        self.hubs[actor] = hub = Hints(self, actor)
        environment = SimulatedEnvironment(self.loop, f"{self.plan.seed} {actor}")
        objects: Any = ObjectLink(self, slot, actor)
        backend = Backend(link, objects, wakeups=hub, live_events=self.live, environment=environment)  # type: ignore[arg-type]
        backend.link = link
        return backend

    def runtime(self, slot: str, actor: str, **options: Any) -> DurableRuntime:
        plan = self.plan
        environment = SimulatedEnvironment(self.loop, f"{plan.seed} runtime {actor}")
        return DurableRuntime(
            backend=self.backend(slot, actor),
            poll_interval=plan.poll,
            lease=plan.lease,
            takeovers_max=plan.takeovers_max,
            host_name=actor.replace(".", "-"),
            environment=environment,
            on_error=lambda error: self.errors.append((self.loop.time(), actor, error)),
            **options,
        )

    def boot(self, slot: str) -> None:
        """A host begins, if none of this name is there."""
        if slot not in self.hosts or slot in self.actors:
            return
        self._incarnations[slot] += 1
        actor = f"{slot}.{self._incarnations[slot]}"
        self.actors[slot] = actor
        self.loop.start(self._live(slot, actor), actor=actor, name=f"host {actor}")

    async def _live(self, slot: str, actor: str) -> None:
        runtime = self.runtime(
            slot,
            actor,
            harnesses=[Harness(AGENT, "v1", self._agents(actor))],
            executors={ROUTE: self.hands.executor(actor)},
        )
        self.runtimes[actor] = runtime
        self.audit.hosts[runtime.owner] = actor
        while True:
            try:
                await runtime.start()
                return
            except Unavailable:
                await asyncio.sleep(1.0)

    def _agents(self, actor: str) -> Any:
        gates = SimulatedGates(self)
        if self.plan.agent == REAL:
            # Not before it is wanted: AgentScope takes seconds to import.
            from tests.simulation.real_agent import adapter

            return adapter(self, actor, gates)
        return Noting(
            self.plan.scripts,
            ledger=self.effects,  # type: ignore[arg-type]
            gates=gates,
            tools={"work": self.effects.work},
        )

    @property
    def codecs(self) -> dict[str, Any]:
        if self.plan.agent == REAL:
            from agentscope_durable.adapters.agentscope import AgentScopeAdapter

            return {AGENT: AgentScopeAdapter.restore}
        return {AGENT: ScriptedHarness.restore}

    def _named(self, slot: str) -> str:
        """A host, or the one that owns a Thread now."""
        if slot != OWNER:
            return slot
        owners = [actor.partition(".")[0] for actor in self.audit.owners()]
        return owners[0] if owners else HOSTS[0]

    def kill(self, slot: str, back: float) -> None:
        slot = self._named(slot)
        actor = self.actors.pop(slot, None)
        if actor is None or not self.faulty:
            if actor is not None:
                self.actors[slot] = actor
            return
        self.audit.killed(actor)
        self.stopping.discard(slot)
        self.loop.kill(actor)
        self.hubs.pop(actor, None)
        self._close_store(actor)
        self.loop.call_later(back, self.boot, slot, context=self.context)

    def stop(self, slot: str, how: str, back: float) -> None:
        slot = self._named(slot)
        actor = self.actors.get(slot)
        if actor is None or slot in self.stopping or self.loop.is_frozen(actor) or actor not in self.runtimes:
            return
        self.stopping.add(slot)
        self.loop.start(self._stop(slot, actor, how, back), actor=actor, name=f"stop {actor}")

    async def _stop(self, slot: str, actor: str, how: str, back: float) -> None:
        runtime = self.runtimes[actor]
        if how == "drain":
            await runtime.drain(10.0)
        await runtime.close()
        self.audit.sometimes["a host was " + ("drained" if how == "drain" else "closed")] += 1
        self.loop.call_soon(self._gone, slot, actor, back, context=self.context)

    def _gone(self, slot: str, actor: str, back: float) -> None:
        if self.actors.get(slot) != actor:
            return
        self.stopping.discard(slot)
        del self.actors[slot]
        self.hubs.pop(actor, None)
        self.audit.left(actor)
        self.loop.kill(actor)
        self._close_store(actor)
        self.loop.call_later(back, self.boot, slot, context=self.context)

    def freeze(self, slot: str, seconds: float) -> None:
        slot = self._named(slot)
        actor = self.actors.get(slot)
        if actor is None or not self.faulty or self.loop.is_frozen(actor):
            return
        self.loop.freeze(actor)
        self.audit.frozen(actor, seconds)
        self.loop.call_later(seconds, self._thaw, actor, context=self.context)

    def _thaw(self, actor: str) -> None:
        if self.loop.is_frozen(actor) and not self.loop.is_dead(actor):
            self.loop.thaw(actor)

    # ---- what goes wrong ----

    def fault_of(self, who: str, method: str) -> Store | None:
        if not self.faulty:
            return None
        for entry in self._armed:
            slot, fault = entry[0], entry[2]
            if slot != who or fault.method != method:
                continue
            entry[1] -= 1
            if not entry[1]:
                self._armed.remove(entry)
                self.audit.sometimes[f"a {method} met: {fault.how}"] += 1
                return fault
        if method == "transact":
            for storm in self._storms:
                if self._weather.random() < storm.rate:
                    self.audit.sometimes[f"a {method} met: {storm.how}"] += 1
                    return Store(0.0, who, method, 1, storm.how, self._weather.choice((0.1, 1.0, 4.0)))
        return None

    def _arm(self, fault: Store) -> None:
        self._armed.append([self._named(fault.who), fault.nth, fault])

    def passed(self, name: str) -> None:
        if threading.get_ident() != self.loop._main:
            return
        actor = ACTOR.get()
        slot = actor.partition(".")[0]
        if slot not in HOSTS or self.cut(actor):
            return
        self._passages[slot, name] += 1
        point = self._points.get((slot, name, self._passages[slot, name]))
        if point is not None and self.faulty and self.actors.get(slot) == actor:
            self.audit.sometimes[f"killed at {name}"] += 1
            self.kill(slot, point.back)
            raise Killed

    def arm(self) -> None:
        """Everything that goes wrong at a time."""
        _failpoints.observe(self.passed)
        for fault in self.plan.faults:
            match fault:
                case Kill(at=at, host=host, back=back):
                    self.at(at, self.kill, host, back)
                case Freeze(at=at, host=host, seconds=seconds):
                    self.at(at, self.freeze, host, seconds)
                case Stop(at=at, host=host, how=how, back=back):
                    self.at(at, self.stop, host, how, back)
                case Jump(at=at, seconds=seconds):
                    self.at(at, self._jump, seconds)
                case Deaf(at=at, seconds=seconds):
                    self.at(at, self._deafen, True)
                    self.at(at + seconds, self._deafen, False)
                case Store(at=at):
                    self.at(at, self._arm, fault)
                case Storm(at=at, seconds=seconds):
                    self.at(at, self._storms.append, fault)
                    self.at(at + seconds, self._storms.remove, fault)
                case Point():
                    pass

    def at(self, when: float, call: Any, *arguments: Any) -> None:
        self.loop.call_at(when, call, *arguments, context=self.context)

    def _jump(self, seconds: int) -> None:
        if self.faulty:
            self.audit.jumped(seconds)
            self.clock.jump(seconds * 1000)

    def _deafen(self, deaf: bool) -> None:
        self.deaf = deaf and self.faulty

    def heal(self) -> None:
        """From here on nothing goes wrong."""
        self.faulty = False
        self.deaf = False
        self._armed.clear()
        self.hints_lost = 0.0
        self.latency = min(self.latency, 0.01)
        for slot in self.hosts:
            actor = self.actors.get(slot)
            if actor is not None and self.loop.is_frozen(actor):
                self.loop.thaw(actor)
            self.boot(slot)

    def shut(self) -> None:
        """The story is over: nothing has an effect any more."""
        self._shut = True
        _failpoints.observe(None)
        self.loop.bury()

    # ---- clients ----

    def client(self, name: str) -> DurableRuntime:
        return self.runtime(
            name,
            name,
            definitions=[Definition(AGENT, "v1", JOURNAL if self.plan.agent == REAL else STATE_VERSION)],
            checkpoints=self.codecs,
        )

    def begin(self, work: Coroutine[Any, Any, Any], actor: str) -> asyncio.Task[Any]:
        return self.loop.start(work, actor=actor)


__all__ = ["AGENT", "CLIENTS", "World"]
