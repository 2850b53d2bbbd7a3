"""What a Session looks like after its events: resources, Turns, messages, tool calls, questions, signals.

Rule 1: a projection is made by folding public events and by nothing else (`domain/projection`), on the server and in
an observer alike, so both have the same one at the same cursor (PR-03).
Rule 2: the maps are maps. Their order means nothing; a message's place is its `sequence` (PR-12), a Turn's its
`ordinal` within the Thread.
"""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.events import EventFilter
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.keys import escape
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.views import InteractionView, SessionView, SignalView, ThreadView, ToolView, TurnView

__all__ = ["Projection", "SnapshotView", "tool_key"]


def tool_key(thread_id: str, turn_id: str, call_id: str) -> str:
    """The key of a tool call in `Projection.tools` (PR-05): the same call id in two Turns is two calls.

    Each id is escaped (`%25` for "%", `%2F` for "/") and they are joined by "/", so that the key is plain text in JSON
    and no id can pretend to be part of another.
    """
    return f"{escape(thread_id)}/{escape(turn_id)}/{escape(call_id)}"


class Projection(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The state that events have built up to a cursor. JSON throughout; nothing native or private is in it (PR-01).

    Attributes:
        session: the Session itself; None under any filter (FI-08).
        threads: by thread id; one under a filter by Thread, none under a filter by Turn or Run (FI-06, FI-07).
        turns: by turn id, ended ones too. Query-time fields (`lease`, and `host` or `definition_missing` in
            `waiting_on`) are not in them.
        messages: by logical message id; sort them by `sequence` to get history (PR-12).
        tools: by `tool_key(thread_id, turn_id, call_id)`.
        interactions: by interaction id: every question of these Turns, from PENDING to RESOLVED or CLOSED. That an
            answer was applied is told by the tool call, so no entry here becomes APPLIED.
        signals: by request id: every accepted control or input that had an event, and what became of it.
    """

    session: SessionView | None = None
    threads: dict[str, ThreadView] = {}
    turns: dict[str, TurnView] = {}
    messages: dict[str, Message] = {}
    tools: dict[str, ToolView] = {}
    interactions: dict[str, InteractionView] = {}
    signals: dict[str, SignalView] = {}

    def history(self) -> list[Message]:
        """The messages in the order of their first public sequence (PR-11)."""
        return sorted(self.messages.values(), key=lambda message: message.sequence)


class SnapshotView(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A projection and where to go on after it (ST-33).

    Attributes:
        cursor: of the newest event of the Session when the snapshot was taken. The events after it, folded into
            `projection`, give every later snapshot under the same filter.
        filter: what the snapshot was narrowed to.
    """

    session: SessionKey
    cursor: str
    projection: Projection
    filter: EventFilter = EventFilter()
