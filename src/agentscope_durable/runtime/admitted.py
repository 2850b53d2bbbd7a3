"""Inputs that this runtime has admitted itself: the Run that begins with one need not read it back.

Rule: it is a shortcut and no truth. What is kept here is what was stored, an input never changes, and what is not here
any more is read. A stored input that is damaged afterwards is met by whoever reads it, and not by the Run that begins.
"""

from __future__ import annotations

from typing import Final

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.messages import Content, Input

__all__ = ["Admitted"]

BYTES_MAX: Final = 1024 * 1024
"""What is kept at most: the newest."""
ENTRY_BYTES: Final = 256
"""What each costs besides its content."""

_blocks = msgspec.json.Decoder(tuple[Content, ...])


class Admitted:
    """Inputs of Turns that have not begun."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}
        self._bytes = 0

    def keep(self, turn_id: str, content: Body) -> None:
        """This is stored as what the Turn begins with."""
        if content.is_reference or turn_id in self._kept:
            return
        blocks = bytes(content.inline)
        self._kept[turn_id] = blocks
        self._bytes += len(blocks) + ENTRY_BYTES
        while self._bytes > BYTES_MAX:
            _ = self._pop(next(iter(self._kept)))

    def take(self, turn_id: str) -> Input | None:
        """The input, once; None if it must be read."""
        return Input(content=_blocks.decode(self._pop(turn_id))) if turn_id in self._kept else None

    def _pop(self, turn_id: str) -> bytes:
        blocks = self._kept.pop(turn_id)
        self._bytes -= len(blocks) + ENTRY_BYTES
        return blocks
