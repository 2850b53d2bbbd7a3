"""Where an agent's execution stands: saved in the commit of the state it belongs to, so that the two never disagree.

Rule 1: reasoning progress is cumulative over the Runs of a Turn and has nothing to do with the Steps of a Run (TP-01).
A recovered Run continues the count; a new Turn begins at zero.
Rule 2: the position is a field of its own beside the native state's fields, changed member by member. It holds what
recovery needs and the native state cannot say: which phase, what has a receipt, what has to be told later.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from agentscope_durable.contracts.discreet import discreet
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.journal import CheckpointRow, Drop, Field

__all__ = [
    "POSITION_FIELD",
    "AgentExecutionPosition",
    "ExecutionPhase",
    "FinalAnswer",
    "PositionWriter",
    "read_position",
]

POSITION_FIELD: Final = "execution_position"
"""The checkpoint field that holds the position. It is no field of the native state."""

_RECEIPT: Final = "receipt:"
_encode: Final = msgspec.json.Encoder().encode
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ExecutionPhase(StrEnum):
    """What the last commit left to do."""

    READY = "ready"
    """Nothing of the Turn is committed."""
    REASONING = "reasoning"
    """The state is what the model was, or will be, given; its answer is not stored."""
    ANSWERED = "answered"
    """The model's answer is stored and not yet in the state."""
    ACTING = "acting"
    """Tool calls of the answer are under way, or wait for something outside."""
    ENDED = "ended"
    """The reply is complete."""


class FinalAnswer(msgspec.Struct, frozen=True, array_like=True):
    """How the reply ended: the public message that is its result, and why it ended."""

    message_id: str
    finish_reason: str


class AgentExecutionPosition(msgspec.Struct):
    """The position of one Turn's execution (TP-01).

    Attributes:
        turn_id: the Turn it speaks of; another one has not begun.
        phase: what is left to do.
        reasoning: reasoning rounds begun in this Turn, over all its Runs.
        iteration: the native iteration count when the present round began.
        agent: name of the agent, under which the native state files its calls.
        final: how the reply ended, in phase ENDED.
        carried: native hint blocks that a replayed round could not take in, for the next one.
        receipts: answers of auxiliary calls since the last reasoning checkpoint, by stable key.
        directory: folder of the agent's local workspace; "" if it has none.
    """

    turn_id: str = ""
    phase: ExecutionPhase = ExecutionPhase.READY
    reasoning: int = 0
    iteration: int = 0
    agent: str = ""
    final: FinalAnswer | None = None
    carried: list[msgspec.Raw] = []
    receipts: dict[str, msgspec.Raw] = {}
    directory: str = ""

    def __repr__(self) -> str:
        return discreet(self)

    def members(self) -> dict[str, bytes]:
        """The position as it is stored, by member."""
        stored = {
            "turn": _encode(self.turn_id),
            "phase": _encode(self.phase),
            "reasoning": _encode(self.reasoning),
            "iteration": _encode(self.iteration),
            "agent": _encode(self.agent),
            "final": _encode(self.final),
            "carried": _encode(self.carried),
            "directory": _encode(self.directory),
        }
        stored |= {f"{_RECEIPT}{key}": bytes(receipt) for key, receipt in self.receipts.items()}
        return stored


class _Stored(msgspec.Struct):
    turn: str = ""
    phase: ExecutionPhase = ExecutionPhase.READY
    reasoning: int = 0
    iteration: int = 0
    agent: str = ""
    final: FinalAnswer | None = None
    carried: list[msgspec.Raw] = []
    directory: str = ""

    def __repr__(self) -> str:
        return discreet(self)


def read_position(field: msgspec.Raw | Mapping[str, msgspec.Raw] | None) -> AgentExecutionPosition:
    """The position in a folded checkpoint; that of nothing begun when there is none.

    Raises:
        CorruptRecord: it is no position.
    """
    if field is None:
        return AgentExecutionPosition()
    try:
        members = _members.decode(field) if isinstance(field, msgspec.Raw) else field
        stored = msgspec.json.decode(_encode(members), type=_Stored)
    except UNREADABLE as error:
        raise CorruptRecord(POSITION_FIELD, "AgentExecutionPosition", str(error)) from error
    return AgentExecutionPosition(
        turn_id=stored.turn,
        phase=stored.phase,
        reasoning=stored.reasoning,
        iteration=stored.iteration,
        agent=stored.agent,
        final=stored.final,
        carried=[raw.copy() for raw in stored.carried],
        receipts={
            key.removeprefix(_RECEIPT): msgspec.Raw(bytes(member))
            for key, member in members.items()
            if key.startswith(_RECEIPT)
        },
        directory=stored.directory,
    )


class PositionWriter:
    """The rows by which a position differs from what is stored of it. Like a state's, they count as stored at once."""

    def __init__(self, stored: Mapping[str, bytes] | None = None) -> None:
        self._stored: dict[str, bytes] | None = None if stored is None else dict(stored)

    def rows(self, position: AgentExecutionPosition, *, base: bool) -> tuple[CheckpointRow, ...]:
        """What changed; the whole position for a base, and when nothing is stored yet."""
        members = position.members()
        before, self._stored = self._stored, members
        if base or before is None:
            raw = {name: msgspec.Raw(body) for name, body in members.items()}
            return (Field(POSITION_FIELD, None, msgspec.Raw(_encode(raw))),)
        changed: list[CheckpointRow] = [
            Field(POSITION_FIELD, name, msgspec.Raw(body)) for name, body in members.items() if before.get(name) != body
        ]
        return (*changed, *(Drop(POSITION_FIELD, name) for name in before if name not in members))
