"""Tool calls that are performed elsewhere: who starts one, and what became of it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands.base import Command
from agentscope_durable.contracts.records import RunStepRef
from agentscope_durable.contracts.status import ExecutionState


class ExecutionCommand(Command, frozen=True):
    thread_id: str
    turn_id: str
    call_id: str


class ClaimExecution(ExecutionCommand, frozen=True, tag="claim_execution"):
    """Start an external execution, once: granted to one host under a fence of its own.

    The receipt says what to do: start, query, cancel, or nothing.

    Attributes:
        again: as in `Claim`: a start granted to this host whose answer was lost is still the one start.
    """

    owner: str
    dead: tuple[str, ...] = ()
    again: bool = False


class RecordOutcome(ExecutionCommand, frozen=True, tag="record_outcome"):
    """What became of an external execution.

    Attributes:
        execution_id: must be that of the call.
        state: a terminal state, UNKNOWN, or RUNNING (still going, ask again later).
        result: outcome as the agent will see it.
        retry_after_ms: for RUNNING and UNKNOWN: when to look again.
    """

    execution_id: str
    state: ExecutionState
    result: Body | None = None
    retry_after_ms: int = 0


class ExecutionAction(StrEnum):
    START = "start"
    QUERY = "query"
    CANCEL = "cancel"
    NOTHING = "nothing"


class ExecutionGrant(msgspec.Struct, frozen=True, rename="camel"):
    """What a dispatcher may do with an execution now."""

    action: ExecutionAction
    execution_id: str = ""
    name: str = ""
    route: str = ""
    arguments: Body | None = None
    origin: RunStepRef | None = None
    tries: int = 0


class OutcomeRecorded(msgspec.Struct, frozen=True, rename="camel"):
    """`settled`: the call has its final outcome; False for a late fact that changed nothing."""

    state: ExecutionState
    settled: bool
