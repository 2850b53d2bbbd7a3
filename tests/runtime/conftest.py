"""What the stories of this folder share: a backend, hosts over it, and ways to wait for what should happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import HostClosed
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Action, ScriptedHarness
from tests.every_store import STORES, shelf

SECONDS = 90.0
"""A wait that takes this long has failed."""
KEY = SessionKey("app", "c1")


@pytest.fixture
def clock() -> ManualClock:
    """The store's clock, for a test that asks for it: no time passes for the store but what the test lets pass."""
    return ManualClock()


@pytest.fixture(params=STORES)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[TransactionalSessionBackend]:
    clock: Any = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    async with shelf(request.param, tmp_path, clock) as place:
        # Every body in the records.
        yield TransactionalSessionBackend(await place.records(), wakeups=place.wakeups)


class Hosts:
    """Opens runtimes over one backend and closes them at the end of the test, the last first."""

    def __init__(self, backend: TransactionalSessionBackend, stack: AsyncExitStack) -> None:
        self.backend = backend
        self._stack = stack
        self.errors: list[BaseException] = []

    async def open(
        self,
        script: Sequence[Action] | HarnessAdapter | None = None,
        *,
        name: str = "agent",
        version: str = "v1",
        start: bool = True,
        **options: Any,
    ) -> DurableRuntime:
        """A runtime with one scripted harness; without a script or harnesses an API host."""
        if script is not None:
            adapter: Any = ScriptedHarness(script) if isinstance(script, Sequence) else script
            options.setdefault("harnesses", [Harness(name, version, adapter)])
        options.setdefault("poll_interval", 0.05)
        options.setdefault("close_timeout", 0.5)
        options.setdefault("on_error", self.errors.append)
        options.setdefault("backend", self.backend)
        runtime = await self._stack.enter_async_context(DurableRuntime(**options))
        if start and (options.get("harnesses") or options.get("executors")):
            await runtime.start()
        return runtime


@pytest.fixture
async def hosts(backend: TransactionalSessionBackend) -> AsyncGenerator[Hosts]:
    async with AsyncExitStack() as stack:
        yield Hosts(backend, stack)


class _Nowhere:
    """The backend as a host sees it that has been cut off: nothing it sends arrives."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    async def execute(self, command: Any, **_: Any) -> Any:
        raise HostClosed(f"backend of a dead host ({type(command).__name__})")

    async def query(self, question: Any, **_: Any) -> Any:
        raise HostClosed("backend of a dead host")

    ready = ready_classes = owners = dead_owners = forget_owner = put_body = open_body = query

    def wakeups(self) -> Any:
        return self._backend.wakeups()


def kill(runtime: DurableRuntime) -> None:
    """This host is gone, as far as the store can see: it renews nothing, commits nothing and gives nothing back."""
    runtime._host.backend = _Nowhere(runtime._host.backend)
    runtime._host.draining = runtime._host.closing = True
    if runtime._heartbeat is not None:
        runtime._heartbeat._stopping.set()
        runtime._heartbeat = None
    runtime._runner.tell()


async def turn_is(turn: Any, *statuses: str, where: Callable[[Any], bool] = lambda view: True) -> Any:
    """Wait until the Turn is in one of these statuses (and `where` holds); returns its view."""
    async with asyncio.timeout(SECONDS), turn.stream_events() as events:
        view = await turn.status()
        while not ((not statuses or view.status in statuses) and where(view)):
            assert not (statuses and view.status.terminal), f"it has ended: {view}"
            await anext(events)
            view = await turn.status()
        return view


async def until(condition: Callable[[], Awaitable[bool] | bool]) -> None:
    """Wait for something that nothing announces."""
    async with asyncio.timeout(SECONDS):
        while True:
            found = condition()
            if not isinstance(found, bool):
                found = await found
            if found:
                return
            await asyncio.sleep(0.005)


async def all_events(handle: Any) -> list[Any]:
    """Every event there is."""
    events: list[Any] = []
    cursor = None
    while True:
        page = await handle.list_events(cursor, 1000)
        events += page.events
        cursor = page.cursor
        if cursor == page.high_watermark:
            return events


async def texts(handle: Any) -> list[tuple[str, str]]:
    return [(message.role.value, message.text) for message in await handle.history()]


async def refused(awaitable: Awaitable[Any], error: type[BaseException]) -> Any:
    with pytest.raises(error) as caught:
        await awaitable
    return caught.value
