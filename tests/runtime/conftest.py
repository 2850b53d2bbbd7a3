"""What the stories of this folder share: a backend, a host over it, and ways to wait for what should happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.backend import Wakeups
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.scripted_harness import Action, ScriptedHarness

SECONDS = 30.0
"""A wait that takes this long has failed."""
KEY = SessionKey("app", "c1")


class Store:
    """One place of storage that several hosts open."""

    def __init__(self, kind: str, records: Any, wakeups: Wakeups) -> None:
        self.kind = kind
        self.records = records
        self.wakeups = wakeups

    def backend(self, *, wakeups: Wakeups | None = None, **options: Any) -> TransactionalSessionBackend:
        return TransactionalSessionBackend(self.records, wakeups=wakeups or self.wakeups, **options)


@pytest.fixture(params=["memory", "sqlite"], name="backend_kind")
def _backend_kind(request):
        records: Any = MemoryRecordStore()
    else:
        records = await SqliteRecordStore.open(tmp_path / "durable.db", synchronous="NORMAL")
    yield Store(request.param, records, LocalWakeups())
    await records.close()


@pytest.fixture
def backend(store: Store) -> TransactionalSessionBackend:
    return store.backend()


class Hosts:
    """Opens runtimes over one backend and closes them at the end of the test, the last first."""

    def __init__(self, backend: TransactionalSessionBackend, stack: AsyncExitStack) -> None:
        self.backend = backend
        self._stack = stack
        self.errors: list[BaseException] = []

    async def open(
        self,
        script: Sequence[Action] | ScriptedHarness | None = None,
        *,
        name: str = "agent",
        version: str = "v1",
        start: bool = True,
        **options: Any,
    ) -> DurableRuntime:
        """A runtime with one scripted harness; without a script an API host."""
        if script is not None:
            adapter = script if isinstance(script, ScriptedHarness) else ScriptedHarness(script)
            options.setdefault("harnesses", [Harness(name, version, adapter)])
        options.setdefault("poll_interval", 0.05)
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


async def turn_is(turn: Any, *statuses: str, where: Callable[[Any], bool] = lambda view: True) -> Any:
    """Wait until the Turn is in one of these statuses (and `where` holds); returns its view."""
    async with asyncio.timeout(SECONDS), turn.stream_events() as events:
        view = await turn.status()
        while not ((not statuses or view.status in statuses) and where(view)):
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

