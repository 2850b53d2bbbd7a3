"""A whole world of hosts on one event loop, under one clock, decided by one number.

Rule 1: an actor is what would be a process: a host, a client, the store. Its callbacks run in the order that asyncio
promises; which actor goes next is drawn from the seed.
Rule 2: nothing is waited for. When no actor has anything to do, the clock goes to the next timer.
Rule 3: a frozen actor is a stopped process: it runs nothing, and when it thaws all its timers are late. A killed one is
dead: nothing of it runs again, not even its `finally`.

    loop = SimulatedLoop(seed=7)
    loop.start(one_host(), actor="a")
    loop.start(another_host(), actor="b")
    loop.run(the_story())
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import math
import random
import sys
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

from agentscope_durable.spi.environment import SYSTEM, Thread
from agentscope_durable.spi.record_store import RecordStore

__all__ = ["ACTOR", "Overrun", "SimulatedClock", "SimulatedEnvironment", "SimulatedHeartbeat", "SimulatedLoop", "Stuck"]

T = TypeVar("T")

ACTOR: Final = contextvars.ContextVar("actor", default="world")
"""Which actor the running callback belongs to. Tasks pass it on to what they begin."""

RENEWALS_PER_LEASE: Final = 3
THREAD_SECONDS: Final = 60.0
"""Real seconds that `drive` waits for a thread before it gives up."""


class Stuck(Exception):
    """The story cannot go on: nobody has anything to do and no timer is set."""


class Overrun(Exception):
    """The story took more callbacks than it may."""


class _Future(asyncio.Future[Any]):
    """asyncio keeps futures in sets; numbers instead of addresses keep the order of these the same in every run."""

    def __init__(self, *, loop: SimulatedLoop) -> None:
        self._number = loop.number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    def __init__(self, work: Coroutine[Any, Any, Any], *, loop: SimulatedLoop, **options: Any) -> None:
        self._number = loop.number()
        super().__init__(work, loop=loop, **options)

    def forget(self) -> None:
        """It is never to end; nobody need be told."""
        self._log_destroy_pending = False

    def __hash__(self) -> int:
        return self._number


class _Actor:
    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: deque[asyncio.Handle] = deque()
        self.late: list[asyncio.Handle] = []
        self.frozen = False
        self.dead = False
        self.tasks: dict[_Task, None] = {}


class SimulatedLoop(asyncio.AbstractEventLoop):
    """See the top of this file.

    Args:
        seed: decides who goes next.
        stay: how likely the actor that ran last goes on while others are ready; 0 mixes them most.
        steps_max: callbacks that one `run` may take.
    """

    def __init__(self, seed: int | str, *, stay: float = 0.0, steps_max: int = 5_000_000) -> None:
        self._random = random.Random(f"loop {seed}")  # noqa: S311 - a seed is what it is for
        self._stay = stay
        self._steps_max = steps_max
        self._now = 0.0
        self._numbers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle, _Actor]] = []
        self._actors: dict[str, _Actor] = {}
        self._ready: list[_Actor] = []
        self._last: _Actor | None = None
        self._running = False
        self._closed = False
        self._main = threading.get_ident()
        self._arrived = threading.Condition()
        self._from_threads: deque[asyncio.Handle] = deque()
        self._until: float = math.inf
        self._then: Callable[[], None] | None = None
        self.steps = 0
        self.trace = 0
        """A number that says in which order everything ran: equal for equal stories."""
        self.errors: list[dict[str, Any]] = []
        """What asyncio reports of exceptions that nobody took."""

    # ------------------------------------------------------------ actors

    def _actor(self, name: str) -> _Actor:
        actor = self._actors.get(name)
        if actor is None:
            actor = self._actors[name] = _Actor(name)
        return actor

    def _own(self, context: contextvars.Context | None) -> _Actor:
        return self._actor(ACTOR.get() if context is None else context.get(ACTOR, "world"))

    def start(self, work: Coroutine[Any, Any, T], *, actor: str, name: str | None = None) -> asyncio.Task[T]:
        """Begin a task of an actor, which is made if there is none of this name."""
        return self.create_task(work, name=name, context=self.context_of(actor))

    def context_of(self, actor: str) -> contextvars.Context:
        context = contextvars.copy_context()
        context.run(ACTOR.set, actor)
        return context

    def freeze(self, actor: str) -> None:
        """Stop it where it stands, as SIGSTOP does."""
        one = self._actor(actor)
        one.frozen = True
        self._rest(one)

    def thaw(self, actor: str) -> None:
        one = self._actor(actor)
        one.frozen = False
        one.ready.extend(one.late)
        one.late.clear()
        if one.ready and one not in self._ready:
            self._ready.append(one)

    def kill(self, actor: str) -> None:
        """End it, as SIGKILL does."""
        one = self._actor(actor)
        one.dead = True
        # Kept for `bury`: a task whose next step is thrown away could not even be cancelled.
        one.late.extend(one.ready)
        one.ready.clear()
        self._rest(one)

    def _rest(self, actor: _Actor) -> None:
        if actor in self._ready:
            self._ready.remove(actor)

    def is_dead(self, actor: str) -> bool:
        return actor in self._actors and self._actors[actor].dead

    def is_frozen(self, actor: str) -> bool:
        return actor in self._actors and self._actors[actor].frozen

    def at_step(self, number: int, call: Callable[[], None]) -> None:
        """Call it between two callbacks, when so many have run. The last such call counts."""
        self._until, self._then = number, call

    # ------------------------------------------------------------ running

    def run(self, story: Coroutine[Any, Any, T]) -> T:
        """Run until this coroutine has ended; the others stand still then.

        Raises:
            Stuck, Overrun: it did not end.
        """
        task = self.create_task(story)
        self._run_while(lambda: not task.done(), strict=True)
        return task.result()

    def bury(self, seconds: float = 600.0) -> None:
        """After the story: end all that is left in an orderly way, so that nothing is ended by the garbage collector.

        The dead come back for this, to be cancelled: whatever they are given must lead nowhere by then.
        """
        for actor in self._actors.values():
            actor.dead = False
            self.thaw(actor.name)
        until = self._now + seconds

        def left() -> list[_Task]:
            return [task for actor in self._actors.values() for task in actor.tasks if not task.done()]

        while (tasks := left()) and self._now < until:
            for task in tasks:
                task.cancel()
            deadline = self._now + 30.0
            self._run_while(lambda deadline=deadline: bool(left()) and self._now < deadline, strict=False)
        for task in left():
            task.forget()
        self._closed = True

    def _run_while(self, wanted: Callable[[], bool], *, strict: bool) -> None:
        before = sys.get_asyncgen_hooks()
        collecting = gc.isenabled()
        gc.disable()  # When garbage is found must not decide who goes next.
        sys.set_asyncgen_hooks(finalizer=self._finish_generator)
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        self._running = True
        limit = self.steps + self._steps_max
        try:
            while wanted():
                if not self._step():
                    if strict:
                        raise Stuck(f"nothing to do at {self._now:.3f} s")
                    return
                if self.steps > limit:
                    raise Overrun(f"{self._steps_max} callbacks, at {self._now:.3f} s")
        finally:
            self._running = False
            asyncio._set_running_loop(previous)
            sys.set_asyncgen_hooks(*before)
            if collecting:
                gc.enable()

    def _step(self) -> bool:
        """One callback; False when there is none, now or later."""
        if self.steps >= self._until and (then := self._then) is not None:
            self._until, self._then = math.inf, None
            then()
        self._take_from_threads()
        ready = self._ready
        while not ready:
            if not self._next_timer():
                return False
        if len(ready) == 1:
            actor = ready[0]
        elif self._last in ready and self._random.random() < self._stay:
            assert self._last is not None
            actor = self._last
        else:
            actor = ready[int(self._random.random() * len(ready))]
        self._last = actor
        handle = actor.ready.popleft()
        if not actor.ready:
            ready.remove(actor)
        if not handle.cancelled():
            self.steps += 1
            self.trace = hash((self.trace, len(actor.ready), len(self._timers), len(ready)))
            handle._run()
        return True

    def _next_timer(self) -> bool:
        """Go to the next timer and make what is due then ready."""
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            return False
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            _, _, handle, actor = heapq.heappop(self._timers)
            handle._scheduled = False
            if handle.cancelled():
                continue
            if actor.frozen:
                actor.late.append(handle)
            else:
                self._put(handle, actor)
        return True

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end while the world stands still. It may wait for threads, and for nothing else.

        So a store with threads of its own answers at one moment of the simulated time, whatever the machine does.
        """
        try:
            waits_for = work.send(None)
            while True:
                while waits_for is not None and not waits_for.done():
                    self._hear_a_thread()
                waits_for = work.send(None)
        except StopIteration as stop:
            return stop.value

    def _hear_a_thread(self) -> None:
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._from_threads, THREAD_SECONDS):
                raise Stuck("a thread was waited for, and did not answer")
            handles, self._from_threads = list(self._from_threads), deque()
        for handle in handles:
            handle._run()

    def _take_from_threads(self) -> None:
        if not self._from_threads:
            return
        with self._arrived:
            handles, self._from_threads = list(self._from_threads), deque()
        for handle in handles:
            self._put(handle, self._actor("threads"))

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed and not self._own(None).dead:
            self.create_task(generator.aclose())

    # ------------------------------------------------------------ what asyncio asks of a loop

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    @property
    def now(self) -> float:
        """Simulated seconds since the beginning."""
        return self._now

    def time(self) -> float:
        return self._now

    def _put(self, handle: asyncio.Handle, actor: _Actor) -> None:
        if self._closed:
            return
        if actor.dead:
            actor.late.append(handle)
            return
        if not actor.ready and not actor.frozen:
            self._ready.append(actor)
        actor.ready.append(handle)

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._put(handle, self._own(context))
        return handle

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        if threading.get_ident() == self._main:
            return self.call_soon(callback, *args, context=context)
        handle = asyncio.Handle(callback, args, self, context)
        with self._arrived:
            self._from_threads.append(handle)
            self._arrived.notify()
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._set(when, callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._set(self._now + delay, callback, args, context)

    def _set(self, when: float, callback: Callable[..., object], args: Any, context: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        actor = self._own(context)
        if not self._closed:
            handle._scheduled = True
            heapq.heappush(self._timers, (when, self.number(), handle, actor))
        return handle

    def after(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Call it in so many simulated seconds, for the actor that asks."""
        return self._set(self._now + seconds, callback, (), None)

    async def rest(self, seconds: float) -> None:
        """As `asyncio.sleep`, on this loop."""
        if seconds <= 0:
            await _Pause()
            return
        woken = self.create_future()
        timer = self._set(self._now + seconds, _wake, (woken,), None)
        try:
            await woken
        finally:
            timer.cancel()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> asyncio.Task[Any]:
        actor = self._own(context)
        task = _Task(coro, loop=self, name=name, context=context)
        # Held strongly: what the dead were doing must not be closed, which would run their `finally`.
        actor.tasks[task] = None
        task.add_done_callback(lambda done: actor.tasks.pop(task, None))
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """What `asyncio.to_thread` calls: it is done on the spot, at one moment of the simulated time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it is told
            done.set_exception(error)
        return done

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    async def shutdown_asyncgens(self) -> None:
        """They are finished when they are dropped."""


class SimulatedClock:
    """The clocks of the one machine that the world is on: pass it to a store as its `clock`.

    `boot_ms` follows the loop; the wall clock can be set.
    """

    boot_id = "simulated"

    def __init__(self, loop: SimulatedLoop, *, start_ms: int = 1_700_000_000_000) -> None:
        self._loop = loop
        self._start_ms = start_ms

    def __call__(self) -> int:
        return self.wall_ms()

    def wall_ms(self) -> int:
        return self._start_ms + int(self._loop.now * 1000)

    def boot_ms(self) -> int:
        return 60_000 + int(self._loop.now * 1000)

    def jump(self, milliseconds: int) -> None:
        """Set the wall clock forward or back; no time passes."""
        self._start_ms += milliseconds


class _Pause:
    """One turn of the loop for the others."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class SimulatedEnvironment:
    """Time and chance of one actor. Threads are real: only what is awaited through `SimulatedLoop.drive` may use them.

    Args:
        seed: of the random bytes; every actor needs its own.
    """

    def __init__(self, loop: SimulatedLoop, seed: str) -> None:
        self._loop = loop
        self._random = random.Random(f"bytes {seed}")  # noqa: S311 - a seed is what it is for

    def monotonic(self) -> float:
        return self._loop.now

    async def sleep(self, seconds: float) -> None:
        await self._loop.rest(seconds)

    def after(self, seconds: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        return self._loop.after(seconds, call)

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def start_thread(self, target: Callable[[], None], *, name: str) -> Thread:
        return SYSTEM.start_thread(target, name=name)

    async def call_in_thread(self, call: Callable[[], T]) -> T:
        await _Pause()
        return call()


class SimulatedHeartbeat:
    """A `Heartbeat` on the timers of the loop: that of a frozen host does not beat either.

    A backend's own beats in a thread, by the real clock. In a simulated world give the hosts a backend whose
    `heartbeat` makes one of these.

    Args:
        records: the store, as this host reaches it.
    """

    def __init__(self, loop: SimulatedLoop, records: RecordStore, owner: str, lease_ms: int, published: bytes) -> None:
        self._loop = loop
        self._records = records
        self._owner = owner
        self._lease_ms = lease_ms
        self._published = published
        self._began = self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self._last_renewal = 0.0
        self._failure: BaseException | None = None

    @property
    def last_renewal(self) -> float:
        return self._last_renewal

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def publish(self, published: bytes) -> None:
        self._published = published

    def start(self) -> None:
        if self._began or self._stopping:
            return
        self._records.announce(self._owner)
        self._renew()
        if self._failure is not None:
            raise self._failure
        self._began = True
        self._timer = self._loop.after(self._lease_ms / 1000 / RENEWALS_PER_LEASE, self._beat)

    def _beat(self) -> None:
        self._renew()
        self._timer = self._loop.after(self._lease_ms / 1000 / RENEWALS_PER_LEASE, self._beat)

    def _renew(self) -> None:
        try:
            self._records.renew(self._owner, self._lease_ms, self._published)
        except Exception as error:  # noqa: BLE001 - the next beat tries again; the runtime sees `failure`
            self._failure = error
        else:
            self._failure = None
            self._last_renewal = self._loop.now

    async def stop(self, *, release: bool = True) -> None:
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()
        if release and self._began:
            self._began = False
            await self._records.release(self._owner)


def _wake(future: asyncio.Future[Any]) -> None:
    if not future.done():
        future.set_result(None)
