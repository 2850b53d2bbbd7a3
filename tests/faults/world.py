"""One process on simulated time, over a store that the test makes fail. The same number fails the same thing again."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import Retry
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.record_store import Change, Committed, Decide, Reads, Unchanged, View
from agentscope_durable.stores.records import sqlite
from agentscope_durable.stores.records._sqlite_file import Synchronous
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.simulated_loop import (
    SimulatedClock,
    SimulatedEnvironment,
    SimulatedHeartbeat,
    SimulatedLoop,
)
from tests.faults.story import Account, Client, judge, runtime_of

SEED = "faults"
DATABASE = "durable.db"
HOUR_MS = 3_600_000
OPENINGS_MAX = 3
CHECKPOINT_PAGES = 16


class _Driven:
    """A store whose threads are waited for while the simulated clock stands still."""

    def __init__(self, loop: SimulatedLoop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner
        self.commits: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return partial(self._call, found) if inspect.iscoroutinefunction(found) else found

    async def _call(self, method: Any, *arguments: Any, **named: Any) -> Any:
        return self._loop.drive(method(*arguments, **named))

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        """As the store's. The ids of acknowledged commits are remembered."""
        ids: list[str] = []

        def noted(view: View, now_ms: int) -> Change | Unchanged:
            change = decide(view, now_ms)
            ids.append(change.commit_id if isinstance(change, Change) else "")
            return change

        committed: Committed = await self._call(self._inner.transact, partition, reads, noted)
        if committed.changed:
            self.commits.append(ids[-1])
        return committed


class _Backend(TransactionalSessionBackend):
    loop: SimulatedLoop

    def heartbeat(self, owner: str, lease_ms: int, published: bytes) -> Any:
        return SimulatedHeartbeat(self.loop, self.records, owner, lease_ms, published)


class World:
    """A process over a store.

    Args:
        folder: where the SQLite file is; None: the store is in memory.
        account: what happened before.
        boot: the machine has been started so many times.
        full: each commit is on the disk before it is acknowledged (`synchronous`).
    """

    def __init__(
        self, folder: Path | None, account: Account | None = None, *, boot: int = 1, full: bool = True
    ) -> None:
        self.account = account or Account()
        self.loop = SimulatedLoop(SEED)
        self.errors: list[BaseException] = []
        self.reconciled = 0
        self._synchronous: Synchronous = "FULL" if full else "NORMAL"
        clock = SimulatedClock(self.loop, start_ms=1_700_000_000_000 + boot * HOUR_MS)
        clock.boot_id = f"boot {boot}"  # type: ignore[misc]
        self._environment = SimulatedEnvironment(self.loop, f"{SEED} {boot}")
        self._inner: Any = MemoryRecordStore(clock) if folder is None else self._open(folder / DATABASE, clock)
        self._driven = _Driven(self.loop, self._inner)
        self.store = FaultyRecordStore(self._driven)  # type: ignore[arg-type]

    def _open(self, path: Path, clock: SimulatedClock) -> SqliteRecordStore:
        for _ in range(OPENINGS_MAX):
            environment = SimulatedEnvironment(self.loop, f"{SEED} store")
            opening = SqliteRecordStore.open(path, clock=clock, environment=environment, synchronous=self._synchronous)
            try:
                # Of two readers it would be chance which one reads, and so how much each has to read.
                with mock.patch.object(sqlite, "READERS", 1):
                    store = self.loop.drive(opening)
            except Retry as error:
                self.errors.append(error)
            else:
                # So small a story would else never move its log into the file.
                store._writer.connection.wal_autocheckpoint(CHECKPOINT_PAGES)
                return store
        raise AssertionError(f"the store cannot be opened: {self.errors}")

    @property
    def commits(self) -> list[str]:
        """Ids of the commits that were acknowledged, in order."""
        return list(self._driven.commits)

    def _backend(self) -> _Backend:
        backend = _Backend(self.store, wakeups=LocalWakeups(), environment=self._environment)
        backend.loop = self.loop
        return backend

    def play(self) -> None:
        """Tell the story to its end."""
        self.loop.run(self._play())

    async def _play(self) -> None:
        backend = self._backend()
        runtime = runtime_of(self.account, backend, self._environment, on_error=self.errors.append)
        client = Client(self.account, runtime, backend, self._environment)
        async with runtime:
            await client.tell()
        self.reconciled = client.reconciled

    def judge(self) -> list[str]:
        """What does not hold, now that nothing fails any more."""
        self.store.heal()
        return self.loop.run(judge(self.account, self._backend()))

    def integrity(self) -> list[str]:
        return self.loop.run(self._driven.integrity())

    def close(self) -> None:
        self.loop.run(self._driven.close())
        self.loop.bury()
