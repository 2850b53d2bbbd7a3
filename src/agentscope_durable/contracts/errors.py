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

This file is the one table: `error_table()` reads it back, and `docs/errors.md` is generated from that.
An outcome is not an error: a tool that failed, or may have run, is a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, NamedTuple, Self, cast

import msgspec

from agentscope_durable.contracts.identity import ThreadKey

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
    "InvalidCursor",
    "InvalidRequest",
    "InputSettled",
    "InputsChanged",
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
    "NotStarted",
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
    "error_table",
    "from_wire",
    "to_wire",
]


class ErrorCode(StrEnum):
    """The word an error has on the wire, in the CLI's JSON and in stored failures. Never renamed (HT-27)."""

    INVALID_REQUEST = "INVALID_REQUEST"
    TOO_LARGE = "TOO_LARGE"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    TERMINAL = "TERMINAL"
    CLOSED = "CLOSED"
    FENCED = "FENCED"
    INCOMPATIBLE = "INCOMPATIBLE"
    CORRUPT = "CORRUPT"
    FORBIDDEN = "FORBIDDEN"
    CURSOR_EXPIRED = "CURSOR_EXPIRED"
    DROPPED = "DROPPED"
    MISUSE = "MISUSE"
    MISSING_EXTRA = "MISSING_EXTRA"
    AGENT_FACTORY = "AGENT_FACTORY"
    TURN_FAILED = "TURN_FAILED"
    TURN_CANCELLED = "TURN_CANCELLED"
    NOT_FINISHED = "NOT_FINISHED"
    TIMEOUT = "TIMEOUT"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    UNAVAILABLE = "UNAVAILABLE"
    UNCERTAIN = "UNCERTAIN"


def _revive(cls: type[DurableError], what: str, facts: Mapping[str, object], advice: str | None = None) -> DurableError:
    """Make an error again from its parts, without asking its constructor to write the sentence anew."""
    error = cls.__new__(cls)
    for name, fact in facts.items():
        setattr(error, name, fact)
    DurableError.__init__(error, what)
    return error if advice is None else error.advising(advice)


class DurableError(Exception):
    """Anything this library raises on purpose."""

    code: ClassVar[ErrorCode]
    http_status: ClassVar[int]
    exit_code: ClassVar[int]
    advice: str
    """What to do next: one sentence. The documentation has that of the class; `advising` gives an instance its own."""

    what: str
    """What happened, and to which id: the message without the advice."""

    request: str | None = None
    """The request id it was asked with, noted by an edge that drew one for its user. It is told beside the facts and is
    none of them: who chose the id knows it."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}. {self.advice}")

    @property
    def own_advice(self) -> str | None:
        """The advice this instance was given; None: that of its class."""
        return vars(self).get("advice")

    def advising(self, advice: str) -> Self:
        """The same error with advice for the place it is raised at, where that of its class does not fit."""
        self.advice = advice
        # Not by `args`: an ImportError says what it was made with.
        super().__init__(f"{self.what}. {advice}")
        return self

    @classmethod
    def fact_names(cls) -> tuple[str, ...]:
        """The attributes an instance carries: its constructor's parameters, then those of its parents (Rule 2)."""
        names: dict[str, None] = {}
        for ancestor in cls.__mro__:
            if ancestor is DurableError:
                break
            if "__init__" in vars(ancestor):
                code = ancestor.__init__.__code__
                names |= dict.fromkeys(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
        return tuple(names)

    def facts(self) -> dict[str, object]:
        """The facts of this instance by name. A fact an older peer did not send is None."""
        return {name: getattr(self, name, None) for name in self.fact_names()}

    def __reduce__(self) -> tuple[object, ...]:
        return _revive, (type(self), self.what, self.facts(), self.own_advice)


# ------------------------------------------------------------ branches


class Rejected(DurableError):
    """Asked like this it can never succeed; nothing was changed."""

    code = ErrorCode.INVALID_REQUEST
    http_status = 400
    exit_code = 2
    advice = "Change the request before asking again"


class Retry(DurableError):
    """Nothing was changed; the same request may succeed later."""

    code = ErrorCode.UNAVAILABLE
    http_status = 503
    exit_code = 75
    advice = "Ask again later, with the same request id"


class Unconfirmed(DurableError):
    """It may have happened, or not."""

    code = ErrorCode.UNCERTAIN
    http_status = 502
    exit_code = 76
    advice = "Query the outcome, or repeat the request with the SAME request id; a new id could do it twice"


# ------------------------------------------------------------ Rejected: the request


class InvalidRequest(Rejected):
    """The request is not well formed, or a value in it is not allowed (AD-24, PT-04..PT-10)."""

    code = ErrorCode.INVALID_REQUEST
    http_status = 400
    exit_code = 2
    advice = "Correct the value named here; nothing was stored"

    def __init__(self, reason: str, *, path: str | None = None) -> None:
        self.reason: str = reason
        # Where in the request, like "$.content[0].source"; None: the request as a whole.
        self.path: str | None = path
        super().__init__(reason if path is None else f"{reason}, at {path}")


class InvalidCursor(InvalidRequest):
    """The cursor was not made by this Session, or was altered."""

    advice = "Use a cursor that this Session gave, unchanged, or None to start at the beginning"


class TooLarge(Rejected):
    """A body is larger than its named bound."""

    code = ErrorCode.TOO_LARGE
    http_status = 413
    exit_code = 2
    advice = "Send less, or send large content as a URL"

    def __init__(self, subject: str, *, size_bytes: int, limit_bytes: int) -> None:
        self.subject: str = subject
        self.size_bytes: int = size_bytes
        self.limit_bytes: int = limit_bytes
        super().__init__(f"the {subject} has {size_bytes} bytes, more than {limit_bytes}")


class SnapshotTooLarge(Rejected):
    """A snapshot would need more than one of its named bounds."""

    code = ErrorCode.TOO_LARGE
    http_status = 413
    exit_code = 2
    advice = "Narrow it to a Thread or a Turn, or read the history in pages; pruned events count for less"

    def __init__(self, bound: str, limit: int) -> None:
        self.bound: str = bound
        self.limit: int = limit
        super().__init__(f"the snapshot is beyond {bound}, which is {limit}")


class NotFound(Rejected):
    """There is no such Session, Thread, Turn, Run, Step, interaction or call (RT-56)."""

    code = ErrorCode.NOT_FOUND
    http_status = 404
    exit_code = 3
    advice = "Check the id, and that this backend is the one it was created on"

    def __init__(self, kind: str, identity: str) -> None:
        self.kind: str = kind
        self.identity: str = identity
        super().__init__(f"there is no {kind} {identity!r}")


class Forbidden(Rejected):
    """The caller may not do this."""

    code = ErrorCode.FORBIDDEN
    http_status = 403
    exit_code = 8
    advice = "Ask whoever runs this host for the right"

    def __init__(self, operation: str, *, identity: str | None = None) -> None:
        self.operation: str = operation
        # On what: a Session, a Turn; None: the operation as a whole.
        self.identity: str | None = identity
        super().__init__(f"{operation} is not allowed" + ("" if identity is None else f" on {identity!r}"))


class PolicyRefused(Rejected):
    """The application's commit policy refuses this, for a reason of its own. Nothing was stored (BE-18)."""

    code = ErrorCode.FORBIDDEN
    http_status = 403
    exit_code = 8
    advice = "Ask whoever made the rule, or again when what it names has changed"

    def __init__(self, reason: str) -> None:
        self.reason: str = reason
        super().__init__(reason)


class CursorExpired(Rejected):
    """The events after this cursor have been pruned."""

    code = ErrorCode.CURSOR_EXPIRED
    http_status = 410
    exit_code = 9
    advice = "Take a snapshot and continue from its cursor"

    def __init__(self, cursor: int, *, oldest: int) -> None:
        self.cursor: int = cursor
        # The oldest cursor that can still be continued from.
        self.oldest: int = oldest
        super().__init__(f"cursor {cursor} is older than {oldest}, the oldest one kept")


class SessionDropped(Rejected):
    """The Session was dropped by an operator: what it held is gone, and its id is not used again."""

    code = ErrorCode.DROPPED
    http_status = 410
    exit_code = 9
    advice = "Use another session id: a dropped one is never used again, so that no request id of it runs twice"

    def __init__(self, session: str) -> None:
        self.session: str = session
        super().__init__(f"session {session!r} was dropped")


class CheckpointPruned(Rejected):
    """The settled position was dropped by an operator, and what is needed to come back to it."""

    code = ErrorCode.DROPPED
    http_status = 410
    exit_code = 9
    advice = "List the checkpoints of the thread and choose one that is kept"

    def __init__(self, thread_id: str, position: str) -> None:
        self.thread_id: str = thread_id
        self.position: str = position
        super().__init__(f"checkpoint {position!r} of thread {thread_id!r} was dropped")


class EventGap(CursorExpired):
    """Events are missing between the last one that was folded and the next one given (PR-16), or before them."""

    def __init__(self, cursor: int, *, oldest: int, continues: bool = False) -> None:
        """`continues`: it is the beginning of what the event after `oldest` goes on with."""
        missing = f"the beginning of what event {oldest + 1} goes on with is" if continues else None
        Rejected.__init__(self, f"{missing or f'the events {cursor + 1} to {oldest} are'} missing")
        self.cursor: int = cursor
        self.oldest: int = oldest
        self.continues: bool = continues


# ------------------------------------------------------------ Rejected: the state


class Conflict(Rejected):
    """The request contradicts what is stored."""

    code = ErrorCode.CONFLICT
    http_status = 409
    exit_code = 4
    advice = "Read the present state and decide again"


class RequestConflict(Conflict):
    """This request id was already used with other content (AD-11)."""

    advice = "Use a new request id for a new request, or repeat the first one unchanged"

    def __init__(self, request_id: str, field: str | None = None) -> None:
        self.request_id: str = request_id
        # The first argument that differs; None: not known.
        self.field: str | None = field
        super().__init__(f"request {request_id!r} was already admitted with a different {field or 'content'}")


class RevisionConflict(Conflict):
    """The state moved on since the revision the caller saw."""

    def __init__(self, kind: str, identity: str, *, expected: int, actual: int, status: str = "") -> None:
        self.kind: str = kind
        self.identity: str = identity
        self.expected: int = expected
        self.actual: int = actual
        self.status: str = status
        now = f"is {status} at revision {actual}, not paused as seen at" if status else f"is at revision {actual}, not"
        super().__init__(f"{kind} {identity!r} {now} {expected}")


class DefinitionConflict(Conflict):
    """The Session or Thread exists with another definition (AD-16)."""

    advice = "Use another id, or name the definition it was created with"

    def __init__(self, kind: str, identity: str, *, requested: str, existing: str) -> None:
        self.kind: str = kind
        self.identity: str = identity
        self.requested: str = requested
        self.existing: str = existing
        super().__init__(f"{kind} {identity!r} exists with definition {existing!r}, not {requested!r}")


class Unfinished(Conflict):
    """A Session or Thread with unfinished Turns is not closed, restored or forked into (RT-42, CK-05)."""

    advice = "Wait for the Turns or cancel them, then ask again"

    def __init__(self, kind: str, identity: str, *, turns: int) -> None:
        self.kind: str = kind
        self.identity: str = identity
        self.turns: int = turns
        super().__init__(f"{kind} {identity!r} has {turns} unfinished turn{'' if turns == 1 else 's'}")


class NotClosed(Conflict):
    """Only a closed Session is dropped: nobody may be at work in it."""

    advice = "Close the session first; a turn that is not finished keeps it open"

    def __init__(self, session: str) -> None:
        self.session: str = session
        super().__init__(f"session {session!r} is open")


class PositionConflict(Conflict):
    """The Thread stands at another position than the one the caller saw (CK-05)."""

    advice = "List the thread's checkpoints: `current` is where it stands; then decide again"

    def __init__(self, thread_id: str, *, expected: str | None, actual: str | None) -> None:
        self.thread_id: str = thread_id
        # None: before the first settled position.
        self.expected: str | None = expected
        self.actual: str | None = actual
        super().__init__(f"thread {thread_id!r} stands at position {actual}, not {expected}")


class HasHistory(Conflict):
    """A Thread with a history of its own is not forked into (CK-16)."""

    advice = "Fork into a new thread id, or into a thread that has had no turn"

    def __init__(self, thread_id: str) -> None:
        self.thread_id: str = thread_id
        super().__init__(f"thread {thread_id!r} has a history that a fork would overwrite")


class InvalidTransition(Conflict):
    """The Turn is not in a state that allows this."""

    def __init__(self, turn_id: str, status: str, to: str) -> None:
        self.turn_id: str = turn_id
        self.status: str = status
        self.to: str = to
        super().__init__(f"turn {turn_id!r} is {status} and cannot become {to}")


class AlreadyDecided(Conflict):
    """The interaction has an answer already."""

    advice = "Read the interaction: its first answer stands"

    def __init__(self, interaction_id: str) -> None:
        self.interaction_id: str = interaction_id
        super().__init__(f"interaction {interaction_id!r} was already answered or closed")


class InputSettled(Conflict):
    """The input to withdraw is already applied, withdrawn or expired (CT-03)."""

    advice = "Read the turn's history: the input is in it with what became of it"

    def __init__(self, request_id: str, state: str) -> None:
        self.request_id: str = request_id
        self.state: str = state
        super().__init__(f"input {request_id!r} is already {state}")


class InputsChanged(Conflict):
    """An input that a checkpoint was to contain was withdrawn first; nothing was stored (CT-04)."""

    advice = "Read the open inputs again and commit without it"

    def __init__(self, turn_id: str) -> None:
        self.turn_id: str = turn_id
        super().__init__(f"the inputs of turn {turn_id!r} changed before they were applied")


class EntryConflict(Conflict):
    """The workspace entry has another version than the one the caller saw."""

    advice = "Get the entry and decide again"

    def __init__(self, key: str, *, expected: int, actual: int) -> None:
        self.key: str = key
        # 0: there is no such entry.
        self.expected: int = expected
        self.actual: int = actual
        super().__init__(f"workspace entry {key!r} has version {actual}, not {expected}")


class Terminal(Rejected):
    """The Turn has ended; no control changes it any more (CT-15, CT-24)."""

    code = ErrorCode.TERMINAL
    http_status = 409
    exit_code = 5
    advice = "Submit a new Turn"

    def __init__(self, turn_id: str, status: str) -> None:
        self.turn_id: str = turn_id
        self.status: str = status
        super().__init__(f"turn {turn_id!r} is {status}")


class Closed(Rejected):
    """The Session or Thread is closed (AD-15)."""

    code = ErrorCode.CLOSED
    http_status = 409
    exit_code = 5
    advice = "Create another one; what is stored can still be read"

    def __init__(self, kind: str, identity: str) -> None:
        self.kind: str = kind
        self.identity: str = identity
        super().__init__(f"{kind} {identity!r} is closed")


class Fenced(Rejected):
    """Another host owns the Thread now; this one must drop what it holds in memory."""

    code = ErrorCode.FENCED
    http_status = 409
    exit_code = 6
    advice = "Drop the state held here: the owner goes on from the last commit"

    def __init__(self, thread_id: str, *, fence: int, current: int) -> None:
        self.thread_id: str = thread_id
        # The fence the caller holds, and the one that is stored.
        self.fence: int = fence
        self.current: int = current
        super().__init__(f"thread {thread_id!r} is owned under fence {current}, not {fence}")


class Incompatible(Rejected):
    """What is stored needs another definition, kernel or version than this host has; it stays untouched."""

    code = ErrorCode.INCOMPATIBLE
    http_status = 409
    exit_code = 7
    advice = "Run a host with the version named here; nothing was changed"

    def __init__(self, subject: str, *, required: str, present: str) -> None:
        self.subject: str = subject
        self.required: str = required
        self.present: str = present
        super().__init__(f"{subject} needs {required}, and here is {present}")


class FormatError(Rejected):
    """The store cannot be opened by this release; its data is untouched (PT-12, BE-27).

    `location` is a path or a host and database name; it never holds a password.
    """

    code = ErrorCode.INCOMPATIBLE
    http_status = 500
    exit_code = 7
    advice = "Open it with the release that wrote it, or choose another place; nothing was changed"

    def __init__(self, location: str, reason: str) -> None:
        self.location: str = location
        self.reason: str = reason
        super().__init__(f"the store {location!r} cannot be opened: {reason}")


class UnknownFormat(FormatError):
    """The store was written in another storage format."""

    def __init__(self, location: str, *, found: str, supported: str) -> None:
        self.found: str = found
        self.supported: str = supported
        super().__init__(location, f"its format is {found}, and this release reads {supported}")


class NotADatabase(FormatError):
    """The file or schema is something else, not a store of this library."""

    advice = "Choose another place; nothing was changed"

    def __init__(self, location: str) -> None:
        super().__init__(location, "it is not a store of agentscope-durable")


class CorruptRecord(Rejected):
    """Stored bytes do not decode as what their key says; they are kept as they are."""

    code = ErrorCode.CORRUPT
    http_status = 500
    exit_code = 10
    advice = "Run `durable doctor`, then restore a backup or an earlier position of the Thread (docs/checkpoints.md)"

    def __init__(self, key: str, type_name: str, reason: str) -> None:
        self.key: str = key
        self.type_name: str = type_name
        self.reason: str = reason
        super().__init__(f"record {key!r} does not decode as {type_name}: {reason}")


class BodyMissing(CorruptRecord):
    """A large body is not in the object store, although a commit refers to it."""

    advice = "Bring the object back from a backup, or open the records with the object store they were written with"

    def __init__(self, session: str, name: str) -> None:
        self.session: str = session
        self.name: str = name
        self.key: str = name
        self.type_name: str = "object"
        self.reason: str = "it is not there"
        Rejected.__init__(self, f"the body {name!r} of session {session!r} is not in the object store")


class DigestMismatch(CorruptRecord):
    """A stored body has another SHA-256 than the one it is referred to by."""

    def __init__(self, key: str, type_name: str, *, expected: str, actual: str) -> None:
        self.expected: str = expected
        self.actual: str = actual
        super().__init__(key, type_name, f"digest {actual} instead of {expected}")


# ------------------------------------------------------------ Rejected: the program


class Misuse(Rejected):
    """The program uses this library in a way that cannot work."""

    code = ErrorCode.MISUSE
    http_status = 500
    exit_code = 11
    advice = "Correct the program"


class PolicyFailed(Misuse):
    """The application's commit policy has a defect, and refuses with it what it was asked about. Nothing was stored."""

    advice = "Correct the policy: the same command fails in the same way until then"

    def __init__(self, command: str, reason: str) -> None:
        self.command: str = command
        self.reason: str = reason
        super().__init__(f"the commit policy failed over {command}: {reason}")


class WrongLoop(Misuse):
    """The object belongs to another event loop."""

    advice = "Call it on its own loop: asyncio.run_coroutine_threadsafe(coroutine, loop)"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} was opened on another event loop than the one it is used from")


class UsedAfterFork(Misuse):
    """The object was opened before a fork and is used in the child."""

    advice = "Open it in the child process, or start children with 'spawn'"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} was opened in the parent process and is used after a fork")


class NotStarted(Misuse):
    """The object is used before it was opened or started."""

    advice = "Enter its `async with` first"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} has not been opened")


class NoExecutionConfiguration(Misuse):
    """`start()` on a runtime that can only read and admit (RT-30)."""

    advice = "Give DurableRuntime at least one Harness, or do not start it: an API host only reads and admits"

    def __init__(self) -> None:
        super().__init__("this runtime has no harness, so there is nothing it could run")


class NoCheckpointCodec(Misuse):
    """A restore or fork on a runtime that cannot read the definition's native state (CK-03)."""

    advice = "Give DurableRuntime checkpoints={name: codec}, or the Harness itself"

    def __init__(self, definition: str) -> None:
        self.definition: str = definition
        super().__init__(f"no checkpoint codec is registered for definition {definition!r}")


class MissingExtra(Rejected, ImportError):
    """A feature needs an optional dependency; also an ImportError."""

    code = ErrorCode.MISSING_EXTRA
    http_status = 500
    exit_code = 11
    advice = "Install the extra named here"

    def __init__(self, feature: str, extra: str) -> None:
        self.feature: str = feature
        self.extra: str = extra
        super().__init__(f"{feature} needs: pip install 'agentscope-durable[{extra}]'")


class AgentFactoryError(Rejected):
    """The application's agent factory raised, or returned something else than it promised."""

    code = ErrorCode.AGENT_FACTORY
    http_status = 500
    exit_code = 11
    advice = "Correct the factory; the cause is chained to this error"

    def __init__(self, definition: str, reason: str) -> None:
        self.definition: str = definition
        self.reason: str = reason
        super().__init__(f"the agent factory of {definition!r} failed: {reason}")


# ------------------------------------------------------------ Rejected: how a Turn ended


class TurnFailed(Rejected):
    """`result`, `wait` or `call` of a Turn that FAILED (RT-58)."""

    code = ErrorCode.TURN_FAILED
    http_status = 409
    exit_code = 20
    advice = "Read the reason and submit a new Turn; this one stays FAILED"

    def __init__(self, thread_key: ThreadKey, turn_id: str, reason: str) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        # The stored error of the Turn.
        self.reason: str = reason
        super().__init__(f"turn {turn_id!r} failed: {reason}")


class TurnCancelled(Rejected):
    """`result`, `wait` or `call` of a Turn that was CANCELLED (RT-58). Not an asyncio.CancelledError."""

    code = ErrorCode.TURN_CANCELLED
    http_status = 409
    exit_code = 21
    advice = "Submit a new Turn; this one stays CANCELLED"

    def __init__(self, thread_key: ThreadKey, turn_id: str) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        super().__init__(f"turn {turn_id!r} was cancelled")


# ------------------------------------------------------------ Retry


class NotFinished(Retry):
    """`result` of a Turn that has not ended (RT-58)."""

    code = ErrorCode.NOT_FINISHED
    http_status = 409
    exit_code = 22
    advice = "Await turn.wait(), or ask again later"

    def __init__(self, thread_key: ThreadKey, turn_id: str, status: str) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        self.status: str = status
        super().__init__(f"turn {turn_id!r} is {status}")


class WaitTimeout(Retry, TimeoutError):
    """The Turn did not end in the time given; it goes on (AD-19). Also a TimeoutError."""

    code = ErrorCode.TIMEOUT
    http_status = 504
    exit_code = 124
    advice = "The Turn goes on: wait again, or repeat the call with the same request id"

    def __init__(
        self, thread_key: ThreadKey, turn_id: str, *, timeout_ms: int | None = None, waits_for: str | None = None
    ) -> None:
        self.thread_key: ThreadKey = thread_key
        self.turn_id: str = turn_id
        # None: the deadline was the caller's own.
        self.timeout_ms: int | None = timeout_ms
        # Kinds and ids of what holds it, as `waiting_on` has them; None: nothing does, or it is not known.
        self.waits_for: str | None = waits_for
        super().__init__(
            f"turn {turn_id!r} of thread {thread_key.thread_id!r} did not end"
            + (" in time" if timeout_ms is None else f" within {timeout_ms} ms")
            + ("" if waits_for is None else f": it waits for {waits_for}")
        )


class LimitExceeded(Retry):
    """A named bound is reached now."""

    code = ErrorCode.LIMIT_EXCEEDED
    http_status = 429
    exit_code = 75
    advice = "Let some of it finish, then ask again, or raise the bound"

    def __init__(self, limit_name: str, limit: int) -> None:
        self.limit_name: str = limit_name
        self.limit: int = limit
        super().__init__(f"{limit_name} is at its bound of {limit}")


class Unavailable(Retry):
    """Something this needs cannot be reached now; nothing was changed (RC-07)."""

    code = ErrorCode.UNAVAILABLE
    http_status = 503
    exit_code = 75
    advice = "Ask again later, with the same request id"

    def __init__(self, reason: str, *, retry_after_ms: int | None = None) -> None:
        self.reason: str = reason
        # A wait worth trying; None: the caller's own backoff.
        self.retry_after_ms: int | None = retry_after_ms
        super().__init__(reason)


class EntryBusy(Unavailable):
    """Another tool call that is under way has written the workspace entry; it becomes true with that call's result."""

    http_status = 409
    advice = "Write it when that call has ended, or let one call do both"

    def __init__(self, key: str, call_id: str) -> None:
        self.key: str = key
        self.call_id: str = call_id
        super().__init__(f"workspace entry {key!r} is being written by tool call {call_id!r}")


class HostClosed(Unavailable):
    """The runtime, worker or backend is closed or closing; durable work is untouched."""

    advice = "Open a new one and ask again, with the same request id"

    def __init__(self, subject: str) -> None:
        self.subject: str = subject
        super().__init__(f"the {subject} is closed")


class BodySwept(Unavailable):
    """A large body was put so long ago that a sweep removed it before a commit referred to it; nothing was changed."""

    advice = "Send the request again, with the same request id: its body is put anew"

    def __init__(self, session: str, name: str) -> None:
        self.session: str = session
        self.name: str = name
        super().__init__(f"the body {name!r} of session {session!r} was swept before anything referred to it")


class StoreBusy(Unavailable):
    """The store is locked by someone else for longer than the wait allowed."""

    def __init__(self, location: str, *, retry_after_ms: int | None = None) -> None:
        self.location: str = location
        super().__init__(f"the store {location!r} is busy", retry_after_ms=retry_after_ms)


class StoreFull(Unavailable):
    """The disk, tablespace or quota is full."""

    http_status = 507
    advice = "Free some space, then ask again, with the same request id; running Turns go on by themselves"

    def __init__(self, location: str) -> None:
        self.location: str = location
        super().__init__(f"there is no space left for the store {location!r}")


class StoreMoved(Unavailable):
    """The store is not at the place it was opened at, or another one is."""

    advice = "Put the file back, or close every host and open the store anew"

    def __init__(self, location: str) -> None:
        self.location: str = location
        super().__init__(f"the store {location!r} was deleted, moved or replaced while it was open")


class StoreReadOnly(Unavailable):
    """The store may be read but not written."""

    advice = "Make it writable (permission, mount, or the primary instead of a replica), then ask again"

    def __init__(self, location: str) -> None:
        self.location: str = location
        super().__init__(f"the store {location!r} cannot be written")


# ------------------------------------------------------------ Unconfirmed


class Uncertain(Unconfirmed):
    """The answer of a write was lost or unreadable (PT-08, HT-11)."""

    def __init__(self, operation: str, *, request_id: str | None = None, reason: str | None = None) -> None:
        self.operation: str = operation
        # None: the operation had no request id of the caller.
        self.request_id: str | None = request_id
        self.reason: str | None = reason
        super().__init__(
            f"{operation} may have happened or not"
            + ("" if request_id is None else f", request {request_id!r}")
            + ("" if reason is None else f": {reason}")
        )


# ------------------------------------------------------------ the table, read back


class ErrorRow(NamedTuple):
    """One line of the table."""

    name: str
    parent: str
    branch: str
    code: str
    http_status: int
    exit_code: int
    meaning: str
    facts: tuple[str, ...]
    advice: str


_BRANCHES: tuple[type[DurableError], ...] = (Rejected, Retry, Unconfirmed)


def _classes() -> list[type[DurableError]]:
    """The classes of this file in the order they are written, so that none can be forgotten in the table."""
    entries: list[object] = list(globals().values())
    return [
        entry
        for entry in entries
        if isinstance(entry, type) and issubclass(entry, DurableError) and entry is not DurableError
    ]


def branch_of(cls: type[DurableError]) -> type[DurableError]:
    """Rejected, Retry or Unconfirmed: the branch an error class belongs to."""
    return next(branch for branch in _BRANCHES if issubclass(cls, branch))


def error_table() -> list[ErrorRow]:
    """The whole table, one row for each class, branches first where they stand in the file.

    Pure: two calls give equal rows. The documentation is generated from it.
    """
    return [
        ErrorRow(
            name=cls.__name__,
            parent=cls.__bases__[0].__name__,
            branch=branch_of(cls).__name__,
            code=cls.code.value,
            http_status=cls.http_status,
            exit_code=cls.exit_code,
            meaning=(cls.__doc__ or "").splitlines()[0],
            facts=cls.fact_names(),
            advice=cls.advice,
        )
        for cls in _classes()
    ]


# ------------------------------------------------------------ the wire


def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside an exception group, at any depth; any other error is its own leaf."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for part in error.exceptions for leaf in leaves(part)]


def said(error: BaseException) -> str:
    """The text of any error; one whose `__str__` fails has none."""
    try:
        return str(error)
    except Exception as defect:  # noqa: BLE001 - the error matters, not its text
        return f"its text cannot be told: {type(defect).__name__}"


def to_wire(error: DurableError) -> dict[str, object]:
    """An error as a JSON object: `code`, `type`, `message` (without advice) and `facts`; `advice` if it has its own.

    Facts keep their Python names: they are the names of attributes, not of fields of a request.
    """
    document: dict[str, object] = {
        "code": error.code.value,
        "type": type(error).__name__,
        "message": error.what,
        "facts": cast("dict[str, object]", msgspec.to_builtins(error.facts())),
    }
    return document if error.own_advice is None else document | {"advice": error.own_advice}


def from_wire(document: Mapping[str, object]) -> DurableError:
    """The error a peer raised, as the same class with the same facts (HT-27).

    A class this release does not know becomes the most general one with its code; a code it does not know becomes
    `Unconfirmed`, since nothing is known about what happened. Facts of unknown names are left out, missing ones are
    None.

    Raises:
        ValueError: the document is not an error of this library.
    """
    name, code, what = document.get("type"), document.get("code"), document.get("message")
    facts = document.get("facts", {})
    if not (isinstance(name, str) and isinstance(code, str) and isinstance(what, str) and isinstance(facts, Mapping)):
        raise ValueError("not an error document: it needs the strings code, type and message, and the object facts")
    known = _classes()
    cls = next((c for c in known if c.__name__ == name and c.code == code), None)
    if cls is None:
        # Most general first: a branch stands before its classes only if it has a code of its own.
        cls = next((c for c in known if c not in _BRANCHES and c.code == code), Unconfirmed)
    given = dict.fromkeys(cls.fact_names()) | {
        fact: value for fact, value in cast("Mapping[str, object]", facts).items() if fact in cls.fact_names()
    }
    if given.get("thread_key") is not None:
        try:
            given["thread_key"] = msgspec.convert(given["thread_key"], ThreadKey)
        except msgspec.ValidationError as error:
            raise ValueError(f"not an error document: {error}") from None
    advice = document.get("advice")
    return _revive(cls, what, given, advice if isinstance(advice, str) else None)
