"""Tells a story on the simulated loop: hours pass in a moment, and a number decides who goes next and when a host dies.

Rule: it is one process. What your module keeps in memory lives on when a host is killed, and what waits for a real
thread, socket or file does not belong here. `play` kills real processes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.environment import Thread
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.kit import effects, play
from agentscope_durable.testing.kit.story import Story
from agentscope_durable.testing.simulated_loop import (
    Overrun,
    SimulatedClock,
    SimulatedEnvironment,
    SimulatedHeartbeat,
    SimulatedLoop,
    Stuck,
)

__all__ = ["Told", "tell"]

CLIENT = "client"
LEASE = 30.0
POLL = 10.0
STEPS_MAX = 2_000_000
"""Callbacks of one telling. A bound for what hangs."""
NOBODY = -1
"""In the place of the process that nobody killed: here the dead and the living are one."""


class Told(NamedTuple):
    """What came of one telling.

    Attributes:
        found: the verdict, or what ended the story.
        steps: callbacks until the client had what it waited for.
        seconds: simulated ones until then.
        killed: at which callback each host died.
    """

    found: dict[str, Any] | str
    steps: int
    seconds: float
    killed: tuple[int, ...]


class _Done:
    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


class _Environment(SimulatedEnvironment):
    """Threads do their work on the spot: a real one would end whenever the machine likes."""

    def start_thread(self, target: Callable[[], None], *, name: str) -> Thread:
        del name
        target()
        return _Done()


class _Backend(TransactionalSessionBackend):
    loop: SimulatedLoop

    def heartbeat(self, owner: str, lease_ms: int, published: bytes) -> Any:
        return SimulatedHeartbeat(self.loop, self.records, owner, lease_ms, published)


class _Stage:
    """Hosts, one after the other, and a client that outlives them."""

    def __init__(self, story: Story, seed: int) -> None:
        self.seed = seed
        self.loop = SimulatedLoop(seed, steps_max=STEPS_MAX)
        self.world = play.World(story, None)
        self._records = MemoryRecordStore(SimulatedClock(self.loop))
        self._objects = MemoryObjectStore()
        self._hints = LocalWakeups()
        self._host = ""
        self._runtime: DurableRuntime | None = None
        self.killed: list[int] = []
        self.over = False

    def backend(self, actor: str) -> _Backend:
        backend = _Backend(
            self._records,
            self._objects,
            wakeups=self._hints,
            environment=_Environment(self.loop, f"{self.seed} {actor}"),
        )
        backend.loop = self.loop
        return backend

    def runtime(self, actor: str) -> DurableRuntime:
        environment = _Environment(self.loop, f"{self.seed} runtime {actor}")
        return DurableRuntime(
            backend=self.backend(actor),
            harnesses=[self.world.harness(environment)],
            executors=self.world.executors(),
            host_name=actor,
            lease=LEASE,
            poll_interval=POLL,
            environment=environment,
        )

    def boot(self) -> None:
        self._host = f"host-{len(self.killed) + 1}"
        self._runtime = self.runtime(self._host)
        self.loop.start(self._runtime.start(), actor=self._host)

    def kill(self) -> None:
        """The host is gone, wherever it was; another one comes, and finds the Turn when the lease is over."""
        self.loop.kill(self._host)
        self.killed.append(self.loop.steps)
        self.boot()

    async def story(self) -> tuple[int, float]:
        client = self.runtime(CLIENT)
        await client.create_session(play.KEY, play.DEFINITION)
        self.boot()
        await play.tell(self.world, client)
        steps, seconds = self.loop.steps, self.loop.now
        self.over = True
        # So that the living can see that the dead are gone, and that nothing more comes of it.
        await self.loop.rest(2 * LEASE)
        assert self._runtime is not None
        await self.loop.start(self._runtime.close(), actor=self._host)
        await client.close()
        return steps, seconds


def _bury(loop: SimulatedLoop) -> None:
    """What the dead say when they are woken to be ended is no news."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        loop.bury()
    finally:
        logging.disable(before)


def tell(story: Story, seed: int, *, steps: int = 0, kills: int = 0) -> Told:
    """One telling; the same number is the same telling.

    Args:
        steps: how many callbacks it usually takes, so that a moment within them can be drawn.
        kills: how many hosts are killed, each between two callbacks.
    """
    stage = _Stage(story, seed)
    moments = iter(sorted(random.Random(f"kills {seed}").randrange(1, steps) for _ in range(kills)))  # noqa: S311 - as above

    def strike() -> None:
        if not stage.over:
            stage.kill()
            arm()

    def arm() -> None:
        moment = next(moments, None)
        if moment is not None:
            # What a kill costs moves everything behind it.
            stage.loop.at_step(max(moment, stage.loop.steps + 1), strike)

    world, passed = stage.world, list[str]()
    effects.record_in(world.ledger)
    play.observe(play.noting(passed, world.ledger))
    try:
        arm()
        took, seconds = stage.loop.run(stage.story())
        found: dict[str, Any] | str = {**stage.loop.run(play.verdict(world, stage.backend("judge"))), "pid": NOBODY}
    except (Stuck, Overrun) as error:
        took, seconds, found = stage.loop.steps, stage.loop.now, f"the story does not end: {error}"
    finally:
        play.observe(None)
        effects.record_in(None)
        _bury(stage.loop)
    return Told(found, took, seconds, tuple(stage.killed))
