"""What the tool calls of an answer are called.

Rule: a call has an id that no other call of its Turn has, because AgentScope never runs a repeated one. Models repeat
them: some begin anew with each answer. The preview of a call and its fact ask in the same order and get the same id.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

__all__ = ["CALL_ID_CHARS_MAX", "CallIds", "unique_calls"]

CALL_ID_CHARS_MAX: Final = 128
"""Characters of a call id that are kept; room for what makes it unique."""


class CallIds:
    """Ids for the calls of one answer.

    Args:
        used: ids of the Turn's former calls.
        reasoning: number of the round.
        forgotten: there may be former calls that `used` does not name, so that each id gets the round's number.
    """

    def __init__(self, used: Iterable[str], *, reasoning: int, forgotten: bool) -> None:
        self._used = set(used)
        self._reasoning = reasoning
        self._forgotten = forgotten

    def next(self, given: str) -> str:
        """The id of the next call, which the model calls `given`."""
        call_id = _clean(given)
        if self._forgotten or not call_id:
            call_id = f"{call_id or 'call'}.r{self._reasoning}"
        base, number = call_id, 1
        while call_id in self._used:
            number += 1
            call_id = f"{base}.{self._reasoning}.{number}"
        self._used.add(call_id)
        return call_id


def unique_calls(blocks: Iterable[Any], ids: CallIds) -> list[Any]:
    """The blocks of an answer, each call under its own id."""
    unique: list[Any] = []
    for block in blocks:
        if block.type == "tool_call":
            call_id = ids.next(block.id)
            if call_id != block.id:
                block = block.model_copy(update={"id": call_id})
        unique.append(block)
    return unique


def _clean(call_id: str) -> str:
    """An id that may stand in a record; "" when nothing of it can be used."""
    printable = "".join(c for c in call_id if c.isprintable() and not 0xD800 <= ord(c) <= 0xDFFF)
    return printable[:CALL_ID_CHARS_MAX]
