"""The transports of one process keep the promises of their ports."""

from __future__ import annotations

from pathlib import Path

from agentscope_durable.assembly import LiveEvents
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.testing import LiveEventsContract, WakeupsContract


class TestLocalLiveEvents(LiveEventsContract):
    _one: LocalLiveEvents | None = None

    async def open(self, place: Path) -> LocalLiveEvents:
        self._one = self._one or LiveEvents.local()
        return self._one


class TestLocalWakeups(WakeupsContract):
    _one: LocalWakeups | None = None

    async def open(self, place: Path) -> LocalWakeups:
        self._one = self._one or LocalWakeups()
        return self._one
