"""Concrete parts put together, so that an application names one thing.

async with LocalBackend.open("./durable") as backend: ...      # or: backend = await LocalBackend.open("./durable")
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import TracebackType
from typing import Any

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import InvalidRequest, StoreReadOnly
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.spi.backend import CommitPolicy, Wakeups
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.stores.objects.filesystem import FileObjectStore

__all__ = ["LocalBackend", "MemoryBackend"]

DATABASE = "durable.db"
OBJECTS = "objects"


class LocalBackend(TransactionalSessionBackend):
    """Everything in one folder of this machine: SQLite for records, files for large bodies.

    All processes of the machine may open the same folder.
    """

    @staticmethod
    def open(
        directory: str | os.PathLike[str],
        *,
        wakeups: Wakeups | None = None,
        policy: CommitPolicy | None = None,
        environment: Environment = SYSTEM,
        **sqlite: Any,
    ) -> _Opening:
        """Open the folder, creating it if there is none. Await the result, or use it with `async with`.

        Args:
            directory: holds `durable.db`, `objects/` and `hosts/`.
            wakeups: transport of change hints; by default within this process, other processes poll.
            policy: authorisation inside the transaction (BE-18).
            environment: time, chance and threads.
            sqlite: options of `SqliteRecordStore.open`: busy_timeout, synchronous, allow_network_filesystem, strict.
        """
        return _Opening(Path(directory), wakeups or LocalWakeups(), policy, environment, sqlite)

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Opening:
    """What `LocalBackend.open` gives: nothing is opened before it is awaited or entered."""

    def __init__(
        self,
        directory: Path,
        wakeups: Wakeups,
        policy: CommitPolicy | None,
        environment: Environment,
        sqlite: dict[str, Any],
    ) -> None:
        self._directory = directory
        self._wakeups = wakeups
        self._policy = policy
        self._environment = environment
        self._sqlite = sqlite
        self._backend: LocalBackend | None = None

    def __await__(self) -> Generator[Any, None, LocalBackend]:
        return self._open().__await__()

    async def __aenter__(self) -> LocalBackend:
        self._backend = await self._open()
        return self._backend

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._backend is not None:
            await self._backend.close()

    async def _open(self) -> LocalBackend:
        # SQLite is loaded when a store is opened, not when the name `LocalBackend` is (D29).
        from agentscope_durable.stores.records.sqlite import SqliteRecordStore

        directory = self._directory
        await self._environment.call_in_thread(lambda: _make_folder(directory))
        records = await SqliteRecordStore.open(directory / DATABASE, environment=self._environment, **self._sqlite)
        return LocalBackend(
            records,
            FileObjectStore(directory / OBJECTS),
            wakeups=self._wakeups,
            policy=self._policy,
            environment=self._environment,
            owns_store=True,
        )


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except PermissionError as error:
        raise StoreReadOnly(str(directory)) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"the folder {str(directory)!r} cannot be made: {reason}", path="directory") from error


class MemoryBackend(TransactionalSessionBackend):
    """Everything in this process's memory: for tests and for trying things out. Nothing survives it."""

    def __init__(
        self,
        *,
        wakeups: Wakeups | None = None,
        policy: CommitPolicy | None = None,
        environment: Environment = SYSTEM,
    ) -> None:
        from agentscope_durable.stores.records.memory import MemoryRecordStore

        super().__init__(
            MemoryRecordStore(),
            wakeups=wakeups or LocalWakeups(),
            policy=policy,
            environment=environment,
            owns_store=True,
        )
