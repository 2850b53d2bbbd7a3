"""Rejected for how things stand."""

from __future__ import annotations

from agentscope_durable.contracts.errors.base import ErrorCode, Rejected


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
