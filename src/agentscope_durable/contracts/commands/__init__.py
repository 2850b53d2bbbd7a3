"""Everything that can be asked to change. `domain/rules.py` says who may ask and what decides.

A command names its Session; identifiers in it were checked when it was made by a handle, and are
checked again where it enters. Bodies in it are JSON already.
"""

from __future__ import annotations

from agentscope_durable.contracts.commands.base import Command, Done, Request
from agentscope_durable.contracts.commands.checkpoints import (
    ForkThread,
    NativeState,
    RepairReceipt,
    RepairThread,
    RestoreThread,
)
from agentscope_durable.contracts.commands.executions import (
    ClaimExecution,
    ExecutionAction,
    ExecutionCommand,
    ExecutionGrant,
    OutcomeRecorded,
    RecordOutcome,
)
from agentscope_durable.contracts.commands.host import (
    Abandon,
    Claim,
    Claimed,
    ClaimPurpose,
    CommitStep,
    CustomEvent,
    EntryCommit,
    FileFact,
    InteractionCommit,
    MessageOut,
    OwnerCommand,
    PostponeSettlement,
    RunEnd,
    RunEndKind,
    SettleTurn,
    StepReceipt,
    ToolCommit,
    WaitCondition,
)
from agentscope_durable.contracts.commands.objects import (
    ForgetObjects,
    ObjectMarked,
    ObjectsMarked,
    RecordObject,
    SweepObjects,
)
from agentscope_durable.contracts.commands.operator import (
    Dropped,
    DropSession,
    PolicyReceipt,
    PositionsPruned,
    PruneCheckpoints,
    Pruned,
    PruneEvents,
    PutPolicy,
    ReconcileReceipt,
    ReconcileTool,
    ReleaseTurn,
)
from agentscope_durable.contracts.commands.public import (
    AddInput,
    Cancel,
    CloseSession,
    CloseThread,
    CreateSession,
    CreateThread,
    Pause,
    Respond,
    Resume,
    Signal,
    SubmitTurn,
    TurnAdmitted,
    Withdraw,
)

__all__ = [
    "Abandon",
    "AddInput",
    "AnyCommand",
    "Cancel",
    "Claim",
    "ClaimExecution",
    "ClaimPurpose",
    "Claimed",
    "CloseSession",
    "CloseThread",
    "Command",
    "CommitStep",
    "CreateSession",
    "CreateThread",
    "CustomEvent",
    "Done",
    "DropSession",
    "Dropped",
    "EntryCommit",
    "ExecutionAction",
    "ExecutionCommand",
    "ExecutionGrant",
    "FileFact",
    "ForgetObjects",
    "ForkThread",
    "InteractionCommit",
    "MessageOut",
    "NativeState",
    "ObjectMarked",
    "ObjectsMarked",
    "OutcomeRecorded",
    "OwnerCommand",
    "Pause",
    "PolicyReceipt",
    "PositionsPruned",
    "PostponeSettlement",
    "PruneCheckpoints",
    "PruneEvents",
    "Pruned",
    "PutPolicy",
    "ReconcileReceipt",
    "ReconcileTool",
    "RecordObject",
    "RecordOutcome",
    "ReleaseTurn",
    "RepairReceipt",
    "RepairThread",
    "Request",
    "Respond",
    "RestoreThread",
    "Resume",
    "RunEnd",
    "RunEndKind",
    "SettleTurn",
    "Signal",
    "StepReceipt",
    "SubmitTurn",
    "SweepObjects",
    "ToolCommit",
    "TurnAdmitted",
    "WaitCondition",
    "Withdraw",
]

AnyCommand = (
    CreateSession
    | CreateThread
    | CloseSession
    | CloseThread
    | SubmitTurn
    | AddInput
    | Withdraw
    | Cancel
    | Pause
    | Resume
    | Respond
    | Signal
    | RestoreThread
    | ForkThread
    | RepairThread
    | Claim
    | CommitStep
    | SettleTurn
    | PostponeSettlement
    | FileFact
    | ClaimExecution
    | RecordOutcome
    | ReconcileTool
    | ReleaseTurn
    | PutPolicy
    | PruneEvents
    | DropSession
    | PruneCheckpoints
    | RecordObject
    | SweepObjects
    | ForgetObjects
)
