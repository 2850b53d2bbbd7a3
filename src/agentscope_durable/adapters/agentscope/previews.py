"""Text on its way, as the application's own middlewares let it through.

Rule 1: a preview is made from events that passed every middleware (EV-09, AS-30), and never from native reasoning
(EV-11).
Rule 2: nothing of a message is shown after its fact is committed (D22); a message answered from the store is not shown
again at all.
"""

from __future__ import annotations

from typing import Any

from agentscope_durable.contracts.durable_json import sanitize_text
from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.spi.harness import RunContext

__all__ = ["Previews"]


class Previews:
    """Shows the previews of one Run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._message_id = ""
        self._attempt = 0
        self._shown: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def begin(self, message_id: str, attempt: int) -> None:
        """A request is asked; what arrives from now on belongs to it."""
        if (message_id, attempt) != (self._message_id, self._attempt):
            self._message_id, self._attempt = message_id, attempt
            self._shown, self._names = {}, {}

    def end(self) -> None:
        """The fact is committed, or nothing will come any more."""
        self._message_id = ""

    def see(self, event: Any) -> None:
        """One native event, after all middlewares."""
        if not self._message_id:
            return
        match event.type:
            case "TEXT_BLOCK_DELTA":
                self._show(EventDeltaType.MESSAGE, "", event.delta)
            case "TOOL_CALL_START":
                self._names[event.tool_call_id] = event.tool_call_name
            case "TOOL_CALL_DELTA":
                self._show(EventDeltaType.TOOL_ARGUMENTS, event.tool_call_id, event.delta)
            case _:
                pass

    def _show(self, kind: EventDeltaType, call_id: str, text: str) -> None:
        if not text:
            return
        text = sanitize_text(text)
        offset = self._shown.get(call_id, 0)
        # Counted although nobody looks: whoever comes later must see that the beginning is missing.
        self._shown[call_id] = offset + len(text)
        context = self._context
        if not context.wants_previews():
            return
        start, message_id, attempt, call = context.start, self._message_id, self._attempt, call_id or None
        if offset == 0:
            name = self._names.get(call_id)
            context.preview(PreviewStarted(kind, start.thread_id, start.turn_id, message_id, attempt, call, name))
        context.preview(EventDelta(kind, start.thread_id, start.turn_id, message_id, attempt, offset, text, call))
