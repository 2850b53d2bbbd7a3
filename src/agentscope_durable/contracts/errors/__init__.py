"""Every error of this library, and whose move it is.

::

    DurableError
      Rejected       asked like this it can never succeed  -> change the request, the state or the program
      Retry          nothing was changed                   -> ask again, with the same request id
      Unconfirmed    it may have happened, or not          -> query, or repeat with the same request id, never a new one

Rule 1: callers catch a class or a branch and read its attributes; nobody parses a text.
Rule 2: every parameter of an error's constructor is a fact, kept as the attribute of the same name, so that an error
survives a copy, a process boundary and the wire (`to_wire`, `from_wire`) without a second table.
Rule 3: a message says what happened, to which id, and what to do next. It never holds a body, a value or a secret:
errors end up in logs.

These files are the one table: `error_table()` reads it back, and `docs/errors.md` is generated from that.
An outcome is not an error: a tool that failed, or may have run, is a value.
"""

from __future__ import annotations

from agentscope_durable.contracts.errors.base import DurableError, ErrorCode, Rejected, Retry, Unconfirmed
from agentscope_durable.contracts.errors.program import (
    AgentFactoryError,
    MissingExtra,
    Misuse,
    NoCheckpointCodec,
    NoExecutionConfiguration,
    PolicyFailed,
    TurnCancelled,
    TurnFailed,
    UsedAfterFork,
    WrongLoop,
)
from agentscope_durable.contracts.errors.request import (
    CheckpointPruned,
    CursorExpired,
    EventGap,
    Forbidden,
    InvalidCursor,
    InvalidRequest,
    NotFound,
    PolicyRefused,
    SessionDropped,
    SnapshotTooLarge,
    TooLarge,
)
from agentscope_durable.contracts.errors.retry import (
    BodySwept,
    EntryBusy,
    HostClosed,
    LimitExceeded,
    NotFinished,
    StoreBusy,
    StoreFull,
    StoreMoved,
    StoreReadOnly,
    Unavailable,
    WaitTimeout,
)
from agentscope_durable.contracts.errors.state import (
    AlreadyDecided,
    BodyMissing,
    Closed,
    Conflict,
    CorruptRecord,
    DefinitionConflict,
    DigestMismatch,
    EntryConflict,
    Fenced,
    FormatError,
    HasHistory,
    Incompatible,
    InputsChanged,
    InputSettled,
    InvalidTransition,
    NotADatabase,
    NotClosed,
    PositionConflict,
    RequestConflict,
    RevisionConflict,
    Terminal,
    Unfinished,
    UnknownFormat,
)
from agentscope_durable.contracts.errors.table import ErrorRow, branch_of, error_table, from_wire, leaves, said, to_wire
from agentscope_durable.contracts.errors.unconfirmed import Uncertain

__all__ = [
    "AgentFactoryError",
    "AlreadyDecided",
    "BodyMissing",
    "BodySwept",
    "CheckpointPruned",
    "Closed",
    "Conflict",
    "CorruptRecord",
    "CursorExpired",
    "DefinitionConflict",
    "DigestMismatch",
    "DurableError",
    "EntryBusy",
    "EntryConflict",
    "ErrorCode",
    "ErrorRow",
    "EventGap",
    "Fenced",
    "Forbidden",
    "FormatError",
    "HasHistory",
    "HostClosed",
    "Incompatible",
    "InputSettled",
    "InputsChanged",
    "InvalidCursor",
    "InvalidRequest",
    "InvalidTransition",
    "LimitExceeded",
    "MissingExtra",
    "Misuse",
    "NoCheckpointCodec",
    "NoExecutionConfiguration",
    "NotADatabase",
    "NotClosed",
    "NotFinished",
    "NotFound",
    "PolicyFailed",
    "PolicyRefused",
    "PositionConflict",
    "Rejected",
    "RequestConflict",
    "Retry",
    "RevisionConflict",
    "SessionDropped",
    "SnapshotTooLarge",
    "StoreBusy",
    "StoreFull",
    "StoreMoved",
    "StoreReadOnly",
    "Terminal",
    "TooLarge",
    "TurnCancelled",
    "TurnFailed",
    "Unavailable",
    "Uncertain",
    "Unconfirmed",
    "Unfinished",
    "UnknownFormat",
    "UsedAfterFork",
    "WaitTimeout",
    "WrongLoop",
    "branch_of",
    "error_table",
    "from_wire",
    "leaves",
    "said",
    "to_wire",
]
