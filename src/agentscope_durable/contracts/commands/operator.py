"""What an operator asks for, and what is told of it. Public receipts are views."""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands.base import Command
from agentscope_durable.contracts.commands.executions import ExecutionCommand
from agentscope_durable.contracts.discreet import Words
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.contracts.views import DropReceipt


class ReconcileTool(ExecutionCommand, frozen=True, tag="reconcile_tool"):
    """Settle an UNKNOWN call by evidence (D19, UN-03 UN-10 UN-11 UN-13)."""

    request_id: str
    state: ExecutionState
    result: Body
    digest: str
    evidence_ref: str


class ReconcileReceipt(msgspec.Struct, frozen=True, rename="camel"):
    request_id: str
    turn_id: str
    call_id: str
    state: ExecutionState
    evidence_ref: str
    accepted_at_ms: int


class ReleaseTurn(Command, frozen=True, tag="release_turn"):
    """Let a Turn that was parked for an operator run again."""

    thread_id: str
    turn_id: str
    request_id: str


class PutPolicy(Command, frozen=True, tag="put_policy"):
    """Write one policy record; None removes it. CommitPolicy reads these (BE-18).

    Attributes:
        digest: of the value.
    """

    key: str
    request_id: str
    value: Body | None = None
    digest: str = ""


class PolicyReceipt(msgspec.Struct, frozen=True, rename="camel"):
    """A policy record was written, or removed. Kept with the request for ever: who put it there, and when."""

    request_id: str
    key: str
    removed: bool
    accepted_at_ms: int


class PruneEvents(Command, frozen=True, tag="prune_events"):
    """Drop the next batch of events that nobody is to replay any more. What they add up to stays (EV-19).

    Attributes:
        through: number of the last event to drop; None: as far as `older_than_ms` allows.
        older_than_ms: drop only what was committed at least this long ago by the store's clock.
    """

    through: int | None = None
    older_than_ms: int = 0


class Pruned(msgspec.Struct, frozen=True, rename="camel"):
    """One batch is dropped.

    Attributes:
        through: events up to this number can no longer be replayed.
        dropped: events of this batch that are gone; the others are still a part of what is shown.
        more: there may be more to drop.
    """

    through: int
    dropped: int
    more: bool


class DropSession(Command, frozen=True, tag="drop_session"):
    """Begin to drop a closed Session, or go on: the next slice of what it holds.

    Attributes:
        reason: in the operator's words; that of the first command is kept.
    """

    reason: Words = ""


class Dropped(msgspec.Struct, frozen=True, rename="camel"):
    """A slice is dropped.

    Attributes:
        more: there is more to drop.
    """

    receipt: DropReceipt
    more: bool


class PruneCheckpoints(Command, frozen=True, tag="prune_checkpoints"):
    """Drop the next batch of a Thread's settled positions, and what only they need.

    Attributes:
        through: stream position of the last one to drop; None: as far as `older_than_ms` allows.
        older_than_ms: drop only what was settled at least this long ago by the store's clock.
    """

    thread_id: str
    through: int | None = None
    older_than_ms: int = 0


class PositionsPruned(msgspec.Struct, frozen=True, rename="camel"):
    """One batch of settled positions is dropped.

    Attributes:
        through: stream position up to which there are none any more.
        positions: settled positions of this batch.
        versions: former versions of workspace entries that went with them.
        more: there may be more to drop.
    """

    through: int
    positions: int
    versions: int
    more: bool
