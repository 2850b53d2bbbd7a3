"""Options of a stream."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EventDeltaType(StrEnum):
    """Which previews a connection asks for (ST-03)."""

    MESSAGE = "message"
    TOOL_ARGUMENTS = "tool_arguments"


class EventStreamOptions(msgspec.Struct, frozen=True):
    """How to observe.

    Attributes:
        after: cursor to continue after; None replays everything that is kept.
        deltas: previews wanted on this connection; none by default.
    """

    after: str | None = None
    deltas: frozenset[EventDeltaType] = frozenset()

    @classmethod
    def defaults(cls) -> EventStreamOptions:
        return cls()
