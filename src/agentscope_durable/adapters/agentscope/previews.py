"""Text on its way, as the application's own middlewares let it through.

Rule 1: a preview is made from events that passed every middleware (EV-09, AS-30), and never from native reasoning
(EV-11).
Rule 2: nothing of a message is shown after its fact is committed (D22); a message answered from the store is not shown
again at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentscope_durable.adapters.agentscope.call_ids import CallIds
from agentscope_durable.contracts.durable_json import sanitize_text
from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.spi.harness import RunContext

__all__ = ["Previews"]


class Previews:
    """Shows the previews of one Run.

    Args:
        ids: makes the ids of the calls of one answer, as its facts will have them.
    """

    def __init__(self, context: RunContext, ids: Callable[[], CallIds]) -> None:
        self._context = context
        self._make_ids = ids
        self._ids: CallIds | None = None
        # What the model calls a call, and what it is called.
        self._calls: dict[str, str] = {}
        self._message_id = ""
        self._attempt = 0
        self._shown: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def begin(self, message_id: str, attempt: int) -> None:
        """A request is asked; what arrives from now on belongs to it."""
        if (message_id, attempt) != (self._message_id, self._attempt):
            self._message_id, self._attempt = message_id, attempt
            self._shown, self._names = {}, {}
            self._ids, self._calls = None, {}

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
                self._names[self._began(event.tool_call_id)] = event.tool_call_name
            case "TOOL_CALL_DELTA":
                given = event.tool_call_id
                self._show(EventDeltaType.TOOL_ARGUMENTS, self._calls.get(given) or self._began(given), event.delta)
            case _:
                pass

    def _began(self, given: str) -> str:
        if self._ids is None:
            self._ids = self._make_ids()
        self._calls[given] = call_id = self._ids.next(given)
        return call_id

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
