"""Live agent state kept between two Runs of a Thread on this host, so that a short wait does not fold the journal anew.

Rule: it is a copy of what is stored, or it is not used. An entry serves only the very next owner of the Thread, at the
checkpoint it was kept at; anything else (another host in between, a settlement, a restore) makes it worthless.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from agentscope_durable.contracts.identity import ThreadKey

LIVE_STATE_BYTES_MAX = 64 * 1024 * 1024
"""Estimated bytes of live state kept by one host; the longest unused goes first."""


class _Kept(NamedTuple):
    checkpoint_at: int
    fence: int
    size_bytes: int
    value: Any


class LiveStates:
    def __init__(self, bytes_max: int = LIVE_STATE_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[ThreadKey, _Kept] = OrderedDict()

    def take(self, thread: ThreadKey, *, checkpoint_at: int, fence: int) -> Any:
        """The live state for the owner under `fence`, or None. It is handed over: two Runs never share it."""
        kept = self._kept.pop(thread, None)
        if kept is None:
            return None
        self._bytes -= kept.size_bytes
        return kept.value if (kept.checkpoint_at, kept.fence + 1) == (checkpoint_at, fence) else None

    def put(self, thread: ThreadKey, value: Any, size_bytes: int, *, checkpoint_at: int, fence: int) -> None:
        self.drop(thread)
        if size_bytes > self._bytes_max:
            return
        self._kept[thread] = _Kept(checkpoint_at, fence, size_bytes, value)
        self._bytes += size_bytes
        while self._bytes > self._bytes_max:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def drop(self, thread: ThreadKey) -> None:
        kept = self._kept.pop(thread, None)
        if kept is not None:
            self._bytes -= kept.size_bytes
