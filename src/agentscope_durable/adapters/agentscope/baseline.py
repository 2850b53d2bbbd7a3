"""A settled state of an AgentScope agent, made ready to be restored or forked.

Rule 1: rows in, rows out (CK-02). No agent is built and nothing of AgentScope but its state and message classes is
imported, which bring no model's SDK; where AgentScope is not installed, not even these.
Rule 2: nothing passes that cannot be continued (CK-04). Every row folds, every message and block is one, and where
AgentScope is installed its own classes read all of it: one message at a time, so that memory does not grow with them.
Rule 3: bodies are moved as they are. What is put anew is who the state belongs to, and that no Turn has begun on it.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from agentscope_durable.adapters.agentscope.checkpoint import restore, restore_message
from agentscope_durable.adapters.agentscope.library import installed_version
from agentscope_durable.adapters.agentscope.native import native_session_id, readable
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord, Incompatible, MissingExtra
from agentscope_durable.contracts.journal import STATE_VERSION, CheckpointRow, JournalBatch
from agentscope_durable.journal.checkpoint import (
    CheckpointState,
    fold,
    message_json,
    to_state_json,
    whole_rows,
)
from agentscope_durable.journal.position import (
    POSITION_FIELD,
    AgentExecutionPosition,
    PositionWriter,
    read_position,
)
from agentscope_durable.spi.checkpoint import NativeBaseline

__all__ = ["AgentScopeCheckpointCodec", "AgentScopeCheckpoints"]

_OWNER: Final = "session_id"
_encode: Final = msgspec.json.Encoder().encode


class AgentScopeCheckpointCodec:
    """What the codec reads and writes.

    Attributes:
        STATE_VERSION: the format of the native state, for the `Definition` of a host that does not run it (RT-28).
    """

    STATE_VERSION: Final = STATE_VERSION


class AgentScopeCheckpoints:
    """`DurableRuntime(checkpoints={"assistant": AgentScopeCheckpoints.restore})`, on a host without the agent."""

    @staticmethod
    def restore(baseline: NativeBaseline, /) -> tuple[CheckpointRow, ...]:
        """A settled baseline as the rows of the Thread that gets it: a `CheckpointCodec`.

        Raises:
            Incompatible: another state version, or the installed AgentScope cannot read it (CK-13).
            CorruptRecord: the rows do not fold, or what they fold to is no state.
        """
        if baseline.binding.state_version != STATE_VERSION:
            raise Incompatible(
                f"the checkpoint of thread {baseline.source.thread_id!r}",
                required=f"native state {baseline.binding.state_version}",
                present=STATE_VERSION,
            )
        checkpoint = fold(
            (row.at, JournalBatch.decode(row.journal, position=row.at)) for row in baseline.rows if row.journal
        )
        fields = dict(checkpoint.fields)
        position = read_position(fields.pop(POSITION_FIELD, None))
        if baseline.target != baseline.source:
            fields[_OWNER] = msgspec.Raw(_encode(native_session_id(baseline.target)))
        checkpoint = replace(checkpoint, fields=fields)
        _check(checkpoint)
        # The Turn that ended here is over; the next one finds the agent's name, and hints nobody has seen yet.
        fresh = AgentExecutionPosition(agent=position.agent, carried=position.carried)
        return (*whole_rows(checkpoint), *PositionWriter().rows(fresh, base=True))


class _Meta(msgspec.Struct):
    id: str
    name: str
    role: str


class _Block(msgspec.Struct):
    type: str


_owner: Final = msgspec.json.Decoder(str)
_meta: Final = msgspec.json.Decoder(_Meta)
_block: Final = msgspec.json.Decoder(_Block)


def _check(checkpoint: CheckpointState) -> None:
    """Whether an agent can go on from it.

    Raises:
        CorruptRecord, Incompatible: see `AgentScopeCheckpoints.restore`.
    """
    if not isinstance(owner := checkpoint.fields.get(_OWNER), msgspec.Raw):
        raise CorruptRecord("native state", "AgentState", f"it has no {_OWNER}")
    try:
        _ = _owner.decode(owner)
        for message in checkpoint.messages:
            _ = _meta.decode(message.meta)
            for block in message.blocks:
                _ = _block.decode(block)
    except UNREADABLE as error:
        raise CorruptRecord("native state", "AgentState", str(error)) from error
    try:
        installed = installed_version()
    except MissingExtra:
        return
    with readable(installed):
        _ = restore(to_state_json(replace(checkpoint, messages=())))
        for i, message in enumerate(checkpoint.messages):
            _ = restore_message(message_json(message), i)
