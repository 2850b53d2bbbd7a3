"""What is on the page: facts, and what is on its way.

Rule 1: a fact comes from the store and stays: a message, the end of a tool, the end of a Turn. It is shown once, on
whatever way it came: read from the history when the page was opened, or told by an event.
Rule 2: what is on its way is redrawn, and goes: the words of an answer that is not complete, a tool that runs, a
question that is open. Words whose answer was given up disappear; words whose answer is complete give way to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentscope_durable import (
    Committed,
    DurableSession,
    EventDelta,
    EventProjection,
    ExecutionState,
    InteractionView,
    Message,
    PreviewStarted,
    PublicEvent,
    SessionKey,
    SessionStreamEvent,
    SnapshotReset,
    ToolView,
    TurnView,
)

RUNNING = (ExecutionState.INTENT, ExecutionState.RUNNING)
TOLD = (ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED, ExecutionState.DENIED)
MARK = {ExecutionState.COMPLETED: "✓"}


@dataclass(frozen=True)
class Line:
    """One fact, as people read it.

    Attributes:
        name: of the fact: it is shown once.
        at_ms: when it became one, by the store's clock.
    """

    name: tuple[object, ...]
    at_ms: int
    who: str
    text: str


class Page:
    """One conversation, as one client sees it."""

    def __init__(self, key: SessionKey) -> None:
        self._state = EventProjection(key)
        self._shown: set[tuple[object, ...]] = set()
        self.previews: dict[tuple[str, int], str] = {}
        """By message and attempt: the same message may begin again."""

    @property
    def cursor(self) -> str:
        """Where the events go on after what is on the page."""
        return self._state.cursor

    async def load(self, session: DurableSession) -> list[Line]:
        """Build the page from the snapshot and the history; the lines are what it begins with, oldest first."""
        self._state.reset(await session.snapshot())
        messages: list[Message] = []
        cursor: str | None = None
        while True:
            page = await session.history(cursor)
            # A message that came after the snapshot is told by an event.
            messages += [message for message in page if message.sequence <= self._state.sequence]
            cursor = page.cursor
            if cursor is None:
                break
        return self._all(messages)

    def accept(self, event: SessionStreamEvent) -> list[Line]:
        """Take what the stream gives; the lines are what is new."""
        match event:
            case PreviewStarted():
                self.previews[event.message_id, event.attempt] = ""
            case EventDelta():
                text = self.previews.get((event.message_id, event.attempt))
                if text is not None and len(text) == event.offset:
                    self.previews[event.message_id, event.attempt] = text + event.text
                else:  # something is missing: wait for the fact
                    self.previews.pop((event.message_id, event.attempt), None)
            case Committed():
                return self._fact(event.event)
            case SnapshotReset():  # the cursor was too old: the snapshot replaces what we have
                self._state.reset(event.snapshot)
                self.previews.clear()
                return self._all(self._state.projection.history())
        return []

    def _fact(self, event: PublicEvent) -> list[Line]:
        if not self._state.accept(event):
            return []
        state, data = self._state.projection, event.data
        match event.type:
            case "message.completed":
                self._drop(data["messageId"])
                return self._new([_of_message(state.messages[data["messageId"]])])
            case "message.abandoned":
                self._drop(data["messageId"], data["attempt"])
            case "tool.completed":
                tools = [tool for tool in state.tools.values() if tool.call_id == data["callId"]]
                return self._new([_of_tool(tool) for tool in tools if tool.turn_id == event.turn_id])
            case "turn.status" if _is_told(turn := state.turns[event.turn_id or ""]):
                return self._new([_of_turn(turn)])
        return []

    def _all(self, messages: list[Message]) -> list[Line]:
        state = self._state.projection
        lines = [_of_message(message) for message in messages]
        lines += [_of_tool(tool) for tool in state.tools.values() if tool.state in TOLD]
        lines += [_of_turn(turn) for turn in state.turns.values() if _is_told(turn)]
        return self._new(sorted(lines, key=lambda line: line.at_ms))

    def _drop(self, message_id: str, attempt: int | None = None) -> None:
        for key in [key for key in self.previews if key[0] == message_id and attempt in (None, key[1])]:
            del self.previews[key]

    def _new(self, lines: list[Line]) -> list[Line]:
        new = [line for line in lines if line.name not in self._shown]
        self._shown.update(line.name for line in new)
        return new

    # ---- what is on its way ----

    @property
    def turn_id(self) -> str | None:
        """The oldest Turn that has not ended: the one that is under way."""
        thread = self._state.projection.threads.get("main")
        return None if thread is None else thread.current_turn_id

    @property
    def running(self) -> list[ToolView]:
        return [tool for tool in self._state.projection.tools.values() if tool.state in RUNNING]

    @property
    def questions(self) -> list[InteractionView]:
        asked = self._state.projection.interactions.values()
        return sorted((one for one in asked if one.state == "PENDING"), key=lambda one: one.opened_at_ms)


def _of_message(message: Message) -> Line:
    who = "you" if message.role == "user" else "agent"
    if message.input_kind == "steer":
        who = "you, steering"
    mark = " (not applied)" if message.expired else ""
    return Line(("message", message.id, message.revision), message.created_at_ms, who, message.text + mark)


def _of_tool(tool: ToolView) -> Line:
    mark = MARK.get(tool.state, f"{tool.state}:")
    return Line(
        ("tool", tool.turn_id, tool.call_id), tool.received_at_ms or 0, "tool", f"{mark} {tool.name} → {_said(tool)}"
    )


def _said(tool: ToolView) -> str:
    """The text of a tool's result."""
    result: dict[str, Any] = tool.result or {}
    parts = [part.get("text", "") for part in result.get("content") or ()]
    return " ".join(parts) or str(result.get("value") or result.get("reason") or "")


def _is_told(turn: TurnView) -> bool:
    """The end of a Turn is worth a line if its last message does not say it."""
    return turn.status in ("FAILED", "CANCELLED")


def _of_turn(turn: TurnView) -> Line:
    why = f": {turn.error.message}" if turn.error else ""
    return Line(("turn", turn.turn_id), turn.updated_at_ms, "task", f"{turn.status}{why}")
