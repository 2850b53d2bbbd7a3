"""The closed sets of words that say where a thing is in its life.

Every set here is used in code, in stored records, in events and in the command line with the
same spelling. What may follow what is a table in `domain`, never here.
"""

from enum import StrEnum


class TurnStatus(StrEnum):
    """Where a Turn is. The last three are terminal (STATES section 1, D4)."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL

    @property
    def held(self) -> bool:
        """It may have a reason to wait; a running Turn advances, an ended one has nothing to wait for."""
        return self in HELD


HELD = frozenset({TurnStatus.QUEUED, TurnStatus.WAITING, TurnStatus.PAUSED})
TERMINAL = frozenset({TurnStatus.COMPLETED, TurnStatus.FAILED, TurnStatus.CANCELLED})


class SettledBy(StrEnum):
    """What made a position of a Thread a settled one: how its Turn ended, or that it was put there."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    RESTORED = "RESTORED"
    FORKED = "FORKED"


class ResourceStatus(StrEnum):
    """Whether a Session or a Thread accepts new work, and whether there is anything left of it.

    A Session is dropped by an operator, after it was closed: from DROPPING on nobody reads or writes it any more, and
    DROPPED says that what it held is gone. Its name stays taken, because its request ids never lapse (D16).
    """

    OPEN = "OPEN"
    CLOSED = "CLOSED"
    DROPPING = "DROPPING"
    DROPPED = "DROPPED"

    @property
    def gone(self) -> bool:
        return self in (ResourceStatus.DROPPING, ResourceStatus.DROPPED)


class RunStatus(StrEnum):
    """How one actual invocation of the agent went. A finished Run does not mean a finished Turn (RT-49)."""

    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    SUSPENDED = "SUSPENDED"
    PAUSED = "PAUSED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    RELEASED = "RELEASED"
    LOST = "LOST"


class StepPhase(StrEnum):
    """The boundary a Step has reached (RT-48)."""

    REASONING = "REASONING"
    MODEL = "MODEL"
    ACTING = "ACTING"
    APPLYING_RESULTS = "APPLYING_RESULTS"
    FINALIZATION = "FINALIZATION"


class StepStatus(StrEnum):
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    INTERRUPTED = "INTERRUPTED"


class ModelStatus(StrEnum):
    """State of a model call and of each request inside it. LOST: no end was ever seen (MC-08)."""

    STARTED = "STARTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"


class ModelObservation(StrEnum):
    """How closely requests could be observed (MC-06, MC-07)."""

    PROVIDER_ATTEMPTS = "PROVIDER_ATTEMPTS"
    MODEL_CALL = "MODEL_CALL"


class ModelPurpose(StrEnum):
    """Why a model was called: the reply itself, or something beside it (MC-12)."""

    REPLY = "REPLY"
    COMPRESSION = "COMPRESSION"
    STRUCTURED = "STRUCTURED"
    AUXILIARY = "AUXILIARY"


class ExecutionKind(StrEnum):
    """Who performs a tool call."""

    LOCAL = "LOCAL"
    """Inside the agent's process, by the agent's own loop."""
    EXTERNAL = "EXTERNAL"
    """By an executor registered on a runtime, found by its route."""
    MANUAL = "MANUAL"
    """By a person or a system that answers through `respond`."""


class ExecutionState(StrEnum):
    """A tool call as the Turn sees it (STATES section 4)."""

    REQUESTED = "REQUESTED"
    AWAITING_APPROVAL = "AWAITING_APPROVAL"
    DENIED = "DENIED"
    INTENT = "INTENT"
    """Committed, not started by anyone yet."""
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    """Started once; nobody can say what became of it until evidence settles it."""

    @property
    def terminal(self) -> bool:
        return self in EXECUTION_TERMINAL


EXECUTION_TERMINAL = frozenset(
    {ExecutionState.DENIED, ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED}
)


class ReplayRule(StrEnum):
    """Whether a local tool whose outcome was lost may be run again (D18)."""

    NEVER = "never"
    SAFE = "safe"


class InteractionKind(StrEnum):
    APPROVAL = "APPROVAL"
    EXTERNAL_RESULT = "EXTERNAL_RESULT"


class InteractionState(StrEnum):
    PENDING = "PENDING"
    RESOLVED = "RESOLVED"
    APPLIED = "APPLIED"
    CLOSED = "CLOSED"


class SignalState(StrEnum):
    """Life of an accepted control or input (STATES section 2)."""

    ACCEPTED = "ACCEPTED"
    APPLIED = "APPLIED"
    WITHDRAWN = "WITHDRAWN"
    EXPIRED = "EXPIRED"


class WaitKind(StrEnum):
    """Why a Turn that is not terminal does not advance (D4)."""

    APPROVAL = "approval"
    EXTERNAL_RESULT = "external_result"
    TOOL_RUNNING = "tool_running"
    TOOL_UNKNOWN = "tool_unknown"
    CHILD = "child"
    SIGNAL = "signal"
    RETRY = "retry"
    DEFINITION_MISSING = "definition_missing"
    HOST = "host"
    OPERATOR = "operator"


class ReasonKind(StrEnum):
    """Why a Turn is where it is, as `explain` tells it: `WaitKind`, and what only the moment of asking knows."""

    ENDED = "ended"
    RUNNING = "running"
    OWNER_GONE = "owner_gone"
    """A host owns it that has died, or has not renewed its lease in time."""
    QUEUED_BEHIND = "queued_behind"
    OPERATOR = "operator"
    PAUSED = "paused"
    PAUSING = "pausing"
    CANCELLING = "cancelling"
    FAILING = "failing"
    """It has failed for good and ends as soon as its effects are known."""
    SETTLEMENT = "settlement"
    """Its effects are looked at again at a time that is not here yet."""
    APPROVAL = "approval"
    EXTERNAL_RESULT = "external_result"
    TOOL_RUNNING = "tool_running"
    TOOL_UNKNOWN = "tool_unknown"
    CHILD = "child"
    SIGNAL = "signal"
    RETRY = "retry"
    NO_HOST = "no_host"
    HOST_SILENT = "host_silent"
    """A host that could take it is there and does not reach the storage."""
    DEFINITION_MISSING = "definition_missing"
    WRITER_MISSING = "writer_missing"
    """No host reads the native state it is in flight with (D21)."""
    HOSTS_DRAINING = "hosts_draining"
    HOSTS_FULL = "hosts_full"
    HOST_SOON = "host_soon"
    """A host that can take it has room: it does at its next look."""
    INPUTS = "inputs"
    """Accepted inputs wait for its next boundary."""


class Severity(StrEnum):
    """How bad a finding of `doctor` is."""

    DAMAGE = "damage"
    """Stored data is not what was written, or is gone."""
    TROUBLE = "trouble"
    """Nothing is damaged, and somebody has to do something."""
    NOTE = "note"
    """It does no harm."""


class Actor(StrEnum):
    """Whose move it is."""

    NOBODY = "nobody"
    """It goes on by itself."""
    USER = "user"
    """Whoever submitted it, or was asked by it."""
    OPERATOR = "operator"
    """Whoever runs the hosts."""


class RecoveryBoundary(StrEnum):
    TOOL_BOUNDARY = "TOOL_BOUNDARY"


class EventDelivery(StrEnum):
    FACTS = "FACTS"
    DELTA = "DELTA"


class Audience(StrEnum):
    """Who may send a command or ask a question (D15)."""

    PUBLIC = "PUBLIC"
    HOST = "HOST"
    OPERATOR = "OPERATOR"
