"""How many journal operations may be under way at once, each kind in a channel of its own.

Rule 1: commits, maintenance and lease work never wait for each other (TM-09): a store that stalls commits must not
cost the lease.
Rule 2: a larger cap or queue does not raise what a store can write; it only moves where one waits (TM-07). The caps
are there so that a backlog shows as back pressure instead of as memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Final
from weakref import WeakKeyDictionary

import msgspec

from agentscope_durable.contracts.errors import InvalidRequest

__all__ = ["COMMIT_CHANNEL", "Channel", "Channels", "JournalScheduling"]

COMMIT_CHANNEL: Final = "agentscope-session-commit"
MAINTENANCE_CHANNEL: Final = "agentscope-session-maintenance"
LEASE_CHANNEL: Final = "agentscope-session-lease"

_PREFIX: Final = "AGENTSCOPE_JOURNAL_"


class JournalScheduling(msgspec.Struct, frozen=True, kw_only=True):
    """The caps (TM-06). Environment variables of the same names override the defaults: AGENTSCOPE_JOURNAL_...

    Attributes:
        commit_thread_cap: commits under way at once. Commits that wait together share one write of the store, so this
            is far above the number of writers.
        maintenance_thread_cap: maintenance operations at once.
        lease_thread_cap: lease operations at once.
        task_queue_capacity: increments of one execution that wait for its commit.
    """

    commit_thread_cap: int = 64
    maintenance_thread_cap: int = 2
    lease_thread_cap: int = 2
    task_queue_capacity: int = 1024

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is at least 1, not {getattr(self, name)}", path=name)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> JournalScheduling:
        """The settings of this process.

        Raises:
            InvalidRequest: a variable is not a number of at least 1.
        """
        settings: dict[str, int] = {}
        for name in cls.__struct_fields__:
            text = environ.get(_PREFIX + name.upper(), "")
            if not text:
                continue
            if not text.isascii() or not text.isdigit():
                raise InvalidRequest(f"{_PREFIX}{name.upper()} is a whole number, not {text!r}", path=name)
            settings[name] = int(text)
        return cls(**settings)


class Channel:
    """A named bound: at most `cap` holders at once, in the order they came."""

    def __init__(self, name: str, cap: int) -> None:
        self.name = name
        self.cap = cap
        self._held = 0
        # One host may be opened on one loop after the other; waiters of different loops cannot share a queue.
        self._bounds: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def held(self) -> int:
        """Holders now."""
        return self._held

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        bound = self._bounds.get(loop)
        if bound is None:
            bound = self._bounds[loop] = asyncio.Semaphore(self.cap)
        _ = await bound.acquire()
        self._held += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held -= 1
        self._bounds[asyncio.get_running_loop()].release()


class Channels:
    """The three channels of one host."""

    def __init__(self, scheduling: JournalScheduling | None = None) -> None:
        self.scheduling = scheduling or JournalScheduling.from_environment()
        self.commit = Channel(COMMIT_CHANNEL, self.scheduling.commit_thread_cap)
        self.maintenance = Channel(MAINTENANCE_CHANNEL, self.scheduling.maintenance_thread_cap)
        self.lease = Channel(LEASE_CHANNEL, self.scheduling.lease_thread_cap)
