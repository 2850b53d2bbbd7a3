"""Durable task admission and recovery for AgentScope agents.

This is the application's API. Providers import `agentscope_durable.spi` and `.testing`; an option is one more import
(`.adapters.agentscope`). Nothing is loaded before it is used: importing this costs next to nothing, starts nothing, and
needs no optional dependency.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentscope_durable.assembly import LiveEvents, LocalBackend, PostgresBackend
    from agentscope_durable.backend.transaction import TransactionalSessionBackend
    from agentscope_durable.contracts.errors import (
        AgentFactoryError,
        AlreadyDecided,
        CheckpointPruned,
        Closed,
        Conflict,
        CorruptRecord,
        CursorExpired,
        DefinitionConflict,
        DigestMismatch,
        DurableError,
        ErrorCode,
        EventGap,
        Fenced,
        Forbidden,
        FormatError,
        HasHistory,
        HostClosed,
        Incompatible,
        InputSettled,
        InvalidCursor,
        InvalidRequest,
        InvalidTransition,
        LimitExceeded,
        MissingExtra,
        Misuse,
        NoCheckpointCodec,
        NoExecutionConfiguration,
        NotADatabase,
        NotClosed,
        NotFinished,
        NotFound,
        PolicyFailed,
        PolicyRefused,
        PositionConflict,
        Rejected,
        RequestConflict,
        Retry,
        RevisionConflict,
        SessionDropped,
        SnapshotTooLarge,
        StoreBusy,
        StoreFull,
        StoreMoved,
        StoreReadOnly,
        Terminal,
        TooLarge,
        TurnCancelled,
        TurnFailed,
        Unavailable,
        Uncertain,
        Unconfirmed,
        Unfinished,
        UnknownFormat,
        UsedAfterFork,
        WaitTimeout,
        WrongLoop,
    )
    from agentscope_durable.contracts.events import (
        Committed,
        EventDelta,
        EventFilter,
        EventPage,
        PreviewStarted,
        PublicEvent,
        SessionStreamEvent,
        SnapshotReset,
    )
    from agentscope_durable.contracts.examination import CheckView, Examination, Finding
    from agentscope_durable.contracts.explanation import Explanation, HostView, Reason
    from agentscope_durable.contracts.identity import MAIN_THREAD_ID, SessionKey, ThreadKey, TurnKey
    from agentscope_durable.contracts.messages import (
        Audio,
        Base64,
        Image,
        Input,
        InputKind,
        Message,
        Role,
        Text,
        Url,
        Video,
    )
    from agentscope_durable.contracts.options import EventDeltaType, EventStreamOptions
    from agentscope_durable.contracts.status import (
        Actor,
        ExecutionKind,
        ExecutionState,
        InteractionKind,
        InteractionState,
        ModelStatus,
        ReasonKind,
        ReplayRule,
        ResourceStatus,
        RunStatus,
        SettledBy,
        Severity,
        StepPhase,
        StepStatus,
        TurnStatus,
        WaitKind,
    )
    from agentscope_durable.contracts.views import (
        CheckpointPage,
        CheckpointPruneReceipt,
        CheckpointView,
        CommandReceipt,
        DropReceipt,
        InteractionView,
        ModelCallView,
        Page,
        PolicyRecordView,
        RecoveryPolicy,
        RetainReport,
        RunView,
        SessionSizeView,
        SessionView,
        StallPage,
        StallView,
        StepView,
        StoreView,
        ThreadView,
        ToolView,
        TurnView,
        Waiting,
        WatchView,
    )
    from agentscope_durable.domain.projection import EventProjection
    from agentscope_durable.executors.function import FunctionExecutor
    from agentscope_durable.runtime.handles import DurableSession, DurableThread, DurableTurn
    from agentscope_durable.runtime.operations import HostOperations
    from agentscope_durable.runtime.replay import SessionEventClient
    from agentscope_durable.runtime.runtime import Definition, DurableRuntime, Harness, HarnessResolver
    from agentscope_durable.runtime.streams import SessionEventStream
    from agentscope_durable.runtime.subscriptions import EventSubscription
    from agentscope_durable.spi.executor import Cancelled, Failed, Succeeded, ToolError
    from agentscope_durable.spi.policy import CommitPolicy, PolicyRequest, PolicyView

__all__ = [
    "Actor",
    "AgentFactoryError",
    "AlreadyDecided",
    "Audio",
    "Base64",
    "Cancelled",
    "CheckView",
    "CheckpointPage",
    "CheckpointPruneReceipt",
    "CheckpointPruned",
    "CheckpointView",
    "Closed",
    "CommandReceipt",
    "CommitPolicy",
    "Committed",
    "Conflict",
    "CorruptRecord",
    "CursorExpired",
    "Definition",
    "DefinitionConflict",
    "DigestMismatch",
    "DropReceipt",
    "DurableError",
    "DurableRuntime",
    "DurableSession",
    "DurableThread",
    "DurableTurn",
    "ErrorCode",
    "EventDelta",
    "EventDeltaType",
    "EventFilter",
    "EventGap",
    "EventPage",
    "EventProjection",
    "EventStreamOptions",
    "EventSubscription",
    "Examination",
    "ExecutionKind",
    "ExecutionState",
    "Explanation",
    "Failed",
    "Fenced",
    "Finding",
    "Forbidden",
    "FormatError",
    "FunctionExecutor",
    "Harness",
    "HarnessResolver",
    "HasHistory",
    "HostClosed",
    "HostOperations",
    "HostView",
    "Image",
    "Incompatible",
    "Input",
    "InputKind",
    "InputSettled",
    "InteractionKind",
    "InteractionState",
    "InteractionView",
    "InvalidCursor",
    "InvalidRequest",
    "InvalidTransition",
    "LimitExceeded",
    "LiveEvents",
    "LocalBackend",
    "MAIN_THREAD_ID",
    "Message",
    "MissingExtra",
    "Misuse",
    "ModelCallView",
    "ModelStatus",
    "NoCheckpointCodec",
    "NoExecutionConfiguration",
    "NotADatabase",
    "NotClosed",
    "NotFinished",
    "NotFound",
    "Page",
    "PolicyFailed",
    "PolicyRecordView",
    "PolicyRefused",
    "PolicyRequest",
    "PolicyView",
    "PositionConflict",
    "PostgresBackend",
    "PreviewStarted",
    "PublicEvent",
    "Reason",
    "ReasonKind",
    "RecoveryPolicy",
    "Rejected",
    "ReplayRule",
    "RequestConflict",
    "ResourceStatus",
    "RetainReport",
    "Retry",
    "RevisionConflict",
    "Role",
    "RunStatus",
    "RunView",
    "SessionDropped",
    "SessionEventClient",
    "SessionEventStream",
    "SessionKey",
    "SessionSizeView",
    "SessionStreamEvent",
    "SessionView",
    "SettledBy",
    "Severity",
    "SnapshotReset",
    "SnapshotTooLarge",
    "StallPage",
    "StallView",
    "StepPhase",
    "StepStatus",
    "StepView",
    "StoreBusy",
    "StoreFull",
    "StoreMoved",
    "StoreReadOnly",
    "StoreView",
    "Succeeded",
    "Terminal",
    "Text",
    "ThreadKey",
    "ThreadView",
    "TooLarge",
    "ToolError",
    "ToolView",
    "TransactionalSessionBackend",
    "TurnCancelled",
    "TurnFailed",
    "TurnKey",
    "TurnStatus",
    "TurnView",
    "Unavailable",
    "Uncertain",
    "Unconfirmed",
    "Unfinished",
    "UnknownFormat",
    "Url",
    "UsedAfterFork",
    "Video",
    "WaitKind",
    "WaitTimeout",
    "Waiting",
    "WatchView",
    "WrongLoop",
]

_HOMES = {
    "assembly": "LiveEvents LocalBackend PostgresBackend",
    "backend.transaction": "TransactionalSessionBackend",
    "contracts.errors": (
        "AgentFactoryError AlreadyDecided CheckpointPruned Closed Conflict CorruptRecord CursorExpired"
        " DefinitionConflict DigestMismatch DurableError ErrorCode EventGap Fenced Forbidden FormatError HasHistory"
        " HostClosed Incompatible InputSettled InvalidCursor InvalidRequest InvalidTransition LimitExceeded"
        " MissingExtra Misuse NoCheckpointCodec NoExecutionConfiguration NotADatabase NotClosed NotFinished NotFound"
        " PolicyFailed PolicyRefused PositionConflict Rejected RequestConflict Retry RevisionConflict"
        " SessionDropped SnapshotTooLarge StoreBusy StoreFull StoreMoved StoreReadOnly Terminal TooLarge"
        " TurnCancelled TurnFailed Unavailable Uncertain Unconfirmed Unfinished UnknownFormat UsedAfterFork"
        " WaitTimeout WrongLoop"
    ),
    "contracts.events": (
        "Committed EventDelta EventFilter EventPage PreviewStarted PublicEvent SessionStreamEvent SnapshotReset"
    ),
    "contracts.examination": "CheckView Examination Finding",
    "contracts.explanation": "Explanation HostView Reason",
    "contracts.identity": "MAIN_THREAD_ID SessionKey ThreadKey TurnKey",
    "contracts.messages": "Audio Base64 Image Input InputKind Message Role Text Url Video",
    "contracts.options": "EventDeltaType EventStreamOptions",
    "contracts.status": (
        "Actor ExecutionKind ExecutionState InteractionKind InteractionState ModelStatus ReasonKind ReplayRule"
        " ResourceStatus RunStatus SettledBy Severity StepPhase StepStatus TurnStatus WaitKind"
    ),
    "contracts.views": (
        "CheckpointPage CheckpointPruneReceipt CheckpointView CommandReceipt DropReceipt InteractionView"
        " ModelCallView Page PolicyRecordView RecoveryPolicy RetainReport RunView SessionSizeView SessionView"
        " StallPage StallView StepView StoreView ThreadView ToolView TurnView Waiting WatchView"
    ),
    "domain.projection": "EventProjection",
    "executors.function": "FunctionExecutor",
    "runtime.handles": "DurableSession DurableThread DurableTurn",
    "runtime.operations": "HostOperations",
    "runtime.runtime": "Definition DurableRuntime Harness HarnessResolver",
    "runtime.replay": "SessionEventClient",
    "runtime.streams": "SessionEventStream",
    "runtime.subscriptions": "EventSubscription",
    "spi.executor": "Cancelled Failed Succeeded ToolError",
    "spi.policy": "CommitPolicy PolicyRequest PolicyView",
}
"""Where each name lives."""

_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

# A library does not decide where logs go (D25).
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
