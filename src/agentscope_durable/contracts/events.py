"""Public events: what happened, numbered, replayable, and the same for every observer.

An event type has one payload struct, listed in `PAYLOADS`. Reserved families take nothing else
(EV-13); an application's own events are named `x.<namespace>.<name>` and carry any JSON object.

Bodies inside payloads (`content`, `arguments`, `result`, ...) are `Body` in the store and plain
JSON for a reader.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.errors import InvalidCursor, InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    RunStatus,
    StepPhase,
    StepStatus,
)
from agentscope_durable.contracts.views import (
    BindingView,
    CheckpointSourceView,
    ErrorView,
    RecoveryView,
    RunStepRefView,
    TurnView,
)


class Payload(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Base of all payloads."""


class SessionCreated(Payload, frozen=True):
    created_at_ms: int


class SessionClosed(Payload, frozen=True):
    closed_at_ms: int = 0


class SessionDropped(Payload, frozen=True):
    """The last event there is: whoever follows looks for it and learns that the Session is gone."""

    dropped_at_ms: int


class ThreadCreated(Payload, frozen=True):
    binding: BindingView
    created_at_ms: int


class ThreadClosed(Payload, frozen=True):
    pass


class ThreadRestored(Payload, frozen=True):
    """The Thread's context is what it was at a former position (CK-11).

    Attributes:
        position: where the Thread stands now; None when an operator emptied it.
        restored_from: the position it is a copy of; None when it was emptied.
    """

    position: str | None = None
    restored_from: str | None = None


class ThreadForked(Payload, frozen=True):
    """The Thread's context is a copy of another Thread's. What was said there is no part of this timeline (EV-26)."""

    position: str
    source: CheckpointSourceView


class TurnChanged(Payload, frozen=True):
    """`turn.status`: the Turn's view after the change, without query-time fields (PR-22)."""

    turn: TurnView


class TurnRecovery(Payload, frozen=True):
    recovery: RecoveryView


class RunStarted(Payload, frozen=True):
    number: int
    owner: str
    fence: int
    resumed_from_step_id: str | None = None


class RunEnded(Payload, frozen=True):
    status: RunStatus
    error: ErrorView | None = None


class StepStarted(Payload, frozen=True):
    number: int
    phase: StepPhase
    resumed_from_step_id: str | None = None


class StepPhaseChanged(Payload, frozen=True):
    phase: StepPhase


class StepEnded(Payload, frozen=True):
    status: StepStatus


class MessageCompleted(Payload, frozen=True):
    """The authoritative fact of a message (EV-08). User messages are messages too.

    Attributes:
        content: list of content blocks.
        structured: the structured output that belongs to the message, if any.
    """

    message_id: str
    role: str
    content: Body
    attempt: int = 1
    revision: int = 1
    request_id: str | None = None
    input_kind: str | None = None
    interaction_id: str | None = None
    structured: Body | None = None
    incomplete: bool = False


class MessageAbandoned(Payload, frozen=True):
    """Previews of this attempt are void: the request that fed them ended without an answer (D22)."""

    message_id: str
    attempt: int
    reason: str


class SignalChanged(Payload, frozen=True):
    """`signal.accepted`, `signal.applied`, `signal.withdrawn`, `signal.expired`."""

    request_id: str
    operation: str
    message_id: str | None = None
    key: str | None = None
    reason: str | None = None


class InteractionRequested(Payload, frozen=True):
    interaction_id: str
    call_id: str
    kind: InteractionKind
    name: str
    arguments: Body
    opened_at_ms: int


class InteractionResolved(Payload, frozen=True):
    """`outcome`: `answered`, or `closed` with a reason.

    Attributes:
        edited_arguments: what the approved call gets in the place of the model's arguments; None if those stand.
    """

    interaction_id: str
    call_id: str
    outcome: str
    request_id: str | None = None
    response: Body | None = None
    reason: str | None = None
    edited_arguments: Body | None = None


class ToolChanged(Payload, frozen=True):
    """`tool.requested`, `tool.started`, `tool.completed`, `tool.unknown`, `tool.cancel_requested`.

    The first one of a call carries everything; later ones only what changed.
    """

    call_id: str
    state: ExecutionState
    name: str | None = None
    kind: ExecutionKind | None = None
    execution_id: str | None = None
    arguments: Body | None = None
    origin: RunStepRefView | None = None
    result: Body | None = None
    received_at_ms: int | None = None
    cancel_requested: bool = False


class ToolApplied(Payload, frozen=True):
    """The result is in the checkpoint of this commit. `applied_at` is None when settlement applied it."""

    call_id: str
    applied_at_ms: int
    applied_at: RunStepRefView | None = None


class Custom(Payload, frozen=True):
    """An application event."""

    value: Body


PAYLOADS: dict[str, type[Payload]] = {
    "session.created": SessionCreated,
    "session.closed": SessionClosed,
    "session.dropped": SessionDropped,
    "thread.created": ThreadCreated,
    "thread.closed": ThreadClosed,
    "thread.restored": ThreadRestored,
    "thread.forked": ThreadForked,
    "turn.status": TurnChanged,
    "turn.recovery": TurnRecovery,
    "run.started": RunStarted,
    "run.ended": RunEnded,
    "step.started": StepStarted,
    "step.phase": StepPhaseChanged,
    "step.ended": StepEnded,
    "message.completed": MessageCompleted,
    "message.abandoned": MessageAbandoned,
    "signal.accepted": SignalChanged,
    "signal.applied": SignalChanged,
    "signal.withdrawn": SignalChanged,
    "signal.expired": SignalChanged,
    "interaction.requested": InteractionRequested,
    "interaction.resolved": InteractionResolved,
    "tool.requested": ToolChanged,
    "tool.started": ToolChanged,
    "tool.completed": ToolChanged,
    "tool.unknown": ToolChanged,
    "tool.cancel_requested": ToolChanged,
    "tool.applied": ToolApplied,
}
"""Every reserved event type and its payload."""

LEGACY_TYPES = frozenset({"message.delta", "tool.call.arguments"})
"""Read if found in a store, never written (EV-12)."""

BODY_FIELDS: dict[str, tuple[str, ...]] = {
    "message.completed": ("content", "structured"),
    "interaction.requested": ("arguments",),
    "interaction.resolved": ("response", "editedArguments"),
    "tool.requested": ("arguments", "result"),
    "tool.started": ("arguments", "result"),
    "tool.completed": ("arguments", "result"),
    "tool.unknown": ("arguments", "result"),
    "tool.cancel_requested": ("arguments", "result"),
}
"""Wire names of the fields that are stored as `Body`."""

_CUSTOM = re.compile(r"x\.[A-Za-z0-9_-]+\.[A-Za-z0-9_.-]+")


def check_event_type(event_type: str) -> None:
    """An application's event is called `x.<namespace>.<name>` (EV-13).

    Raises:
        InvalidRequest: any other name; the reserved families are written by the runtime alone.
    """
    if len(event_type) > 128 or not _CUSTOM.fullmatch(event_type):
        raise InvalidRequest(
            f"an application event must be named x.<namespace>.<name>, not {event_type[:128]!r}", path="type"
        )


class PublicEvent(Discreet, frozen=True, rename="camel", omit_defaults=True):
    """A committed public event (EV-01).

    Attributes:
        sequence: dense number within the Session, from 1.
        at_ms: store time of the commit.
        data: the payload as JSON, camelCase, bodies in plain.
    """

    type: str
    session: SessionKey
    sequence: int
    at_ms: int
    data: dict[str, Any]
    thread_id: str | None = None
    turn_id: str | None = None
    run_id: str | None = None
    step_id: str | None = None

    @property
    def cursor(self) -> str:
        """Where to go on after this event."""
        return cursor_of(self.session, self.sequence)


class EventPage(msgspec.Struct, frozen=True, rename="camel"):
    """Events in order.

    Attributes:
        events: matching events; may be empty while `cursor` still moved (FI-10).
        cursor: go on from here.
        high_watermark: cursor of the newest event when the page was read; equal to `cursor`
            when the reader has caught up (FI-11).
    """

    events: tuple[PublicEvent, ...]
    cursor: str
    high_watermark: str


@lru_cache(maxsize=1024)
def session_mark(session: SessionKey) -> str:
    """What a cursor carries of its Session, so that no other one takes it."""
    import hashlib

    name = f"{session.namespace}\x00{session.session_id}".encode()
    return hashlib.sha256(name).hexdigest()[:12]


_OTHER_CURSOR = re.compile(r"e(?!1$)[0-9]{1,9}", re.ASCII)


def cursor_of(session: SessionKey, sequence: int) -> str:
    """An opaque position in a Session's timeline; 0 is before the first event."""
    return f"e1-{session_mark(session)}-{sequence}"


def sequence_of(session: SessionKey, cursor: str | None) -> int:
    """The number of the event a cursor stands after; None stands before the first.

    Raises:
        InvalidCursor: malformed, or of another Session.
    """
    if cursor is None:
        return 0
    parts = cursor.split("-") if isinstance(cursor, str) else []
    if len(parts) == 3 and _OTHER_CURSOR.fullmatch(parts[0]):
        raise InvalidCursor(f"an event cursor of version {parts[0][1:]}; this release reads version 1", path="cursor")
    if len(parts) != 3 or parts[0] != "e1" or not parts[2].isascii() or not parts[2].isdigit() or len(parts[2]) > 18:
        raise InvalidCursor("this is not an event cursor", path="cursor")
    if parts[1] != session_mark(session):
        raise InvalidCursor("this cursor belongs to another session", path="cursor")
    return int(parts[2])


class EventFilter(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Narrows a timeline without renumbering it (FI-01, FI-02)."""

    thread_id: str | None = None
    turn_id: str | None = None
    run_id: str | None = None

    def __post_init__(self) -> None:
        for name, given in (("threadId", self.thread_id), ("turnId", self.turn_id), ("runId", self.run_id)):
            if given is not None and not isinstance(given, str):
                raise InvalidRequest(f"an id must be a str, not {type(given).__name__}", path=f"filter.{name}")
        if self.turn_id is not None and self.thread_id is None:
            raise InvalidRequest("a filter by turn needs the thread too", path="filter.threadId")
        if self.run_id is not None and self.turn_id is None:
            raise InvalidRequest("a filter by run needs the turn too", path="filter.turnId")


# ---- the stream ----


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A durable fact, the only element with a cursor (ST-02)."""

    event: PublicEvent

    @property
    def cursor(self) -> str:
        return self.event.cursor


class PreviewStarted(msgspec.Struct, frozen=True, tag="preview_started"):
    """A message, or the arguments of a tool call, begins to arrive. Not a fact."""

    kind: str
    thread_id: str
    turn_id: str
    message_id: str
    attempt: int
    call_id: str | None = None
    name: str | None = None


class EventDelta(Discreet, frozen=True, tag="delta"):
    """More text of a preview.

    Attributes:
        offset: characters of this preview that came before; a gap ends the preview (D22).
    """

    kind: str
    thread_id: str
    turn_id: str
    message_id: str
    attempt: int
    offset: int
    text: Words
    call_id: str | None = None


class SnapshotReset(Discreet, frozen=True, tag="reset"):
    """The cursor has expired: replace the local state by this snapshot and go on from it."""

    snapshot: Any


SessionStreamEvent = Committed | PreviewStarted | EventDelta | SnapshotReset
