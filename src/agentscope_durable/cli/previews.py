"""What is on its way: previews as they are shown between facts, and taken away when their fact comes (D22).

Rule 1: a preview is never a fact. It is drawn over and over in one place, and nothing of it stays on the screen.
Rule 2: text goes on where it ended. A piece that begins elsewhere has lost what was before it, and ends its preview; a
later attempt of a message replaces the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from agentscope_durable.contracts.events import EventDelta, PreviewStarted, PublicEvent

__all__ = ["Preview", "Previews"]

SHOWN_CHARS: Final = 2000
"""The end of a preview that is shown; the whole comes with its fact."""
PREVIEWS_MAX: Final = 64
"""Previews on the screen at once; the one that began first goes first."""


class Preview(NamedTuple):
    """Text on its way.

    Attributes:
        call_id: the call whose arguments it is, None for a message.
        reached: characters so far, whether they are kept or not.
        tail: the last of them.
    """

    message_id: str
    attempt: int
    call_id: str | None
    name: str | None
    reached: int = 0
    tail: str = ""


class Previews:
    """What is on its way now, in the order in which it began."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str | None], Preview] = {}

    def __iter__(self) -> Iterator[Preview]:
        return iter(tuple(self._found.values()))

    def __bool__(self) -> bool:
        return bool(self._found)

    def started(self, preview: PreviewStarted) -> None:
        key = preview.message_id, preview.call_id
        known = self._found.pop(key, None)
        if known is not None and known.attempt > preview.attempt:
            self._found[key] = known
            return
        self._found[key] = Preview(preview.message_id, preview.attempt, preview.call_id, preview.name)
        while len(self._found) > PREVIEWS_MAX:
            del self._found[next(iter(self._found))]

    def delta(self, delta: EventDelta) -> None:
        key = delta.message_id, delta.call_id
        known = self._found.get(key)
        if known is None or known.attempt != delta.attempt:
            return
        if known.reached != delta.offset:
            del self._found[key]
            return
        tail = (known.tail + delta.text)[-SHOWN_CHARS:]
        self._found[key] = known._replace(reached=known.reached + len(delta.text), tail=tail)

    def fact(self, event: PublicEvent) -> None:
        """Take away what this fact replaces or makes void."""
        data = event.data
        for key, preview in list(self._found.items()):
            message_id, call_id = key
            if event.type == "message.completed":
                gone = call_id is None and message_id == data.get("messageId")
            elif event.type == "message.abandoned":
                gone = message_id == data.get("messageId") and preview.attempt <= int(data.get("attempt", 1))
            elif event.type == "tool.requested":
                # Another Turn may have a call of this id.
                gone = call_id is not None and call_id == data.get("callId") and _of(event, message_id)
            else:
                gone = event.type == "turn.status" and _ended(data) and _of(event, message_id)
            if gone:
                del self._found[key]

    def clear(self) -> None:
        self._found.clear()


def _of(event: PublicEvent, message_id: str) -> bool:
    """Whether the message is one of the event's Turn."""
    return event.turn_id is not None and message_id.startswith(f"{event.turn_id}.")


def _ended(data: dict[str, Any]) -> bool:
    return data.get("turn", {}).get("status") in ("COMPLETED", "FAILED", "CANCELLED")
