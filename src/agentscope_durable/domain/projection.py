"""The one fold: public events in, projection out.

Rule 1: the server's snapshot and an observer's own state are made by this class from the same events, so they agree
(PR-03, PR-15). There is no second way to make a projection.
Rule 2: an event is folded once. One that was delivered twice changes nothing; one that is missing is an error in a
whole-session fold (PR-16), because what comes after it cannot be trusted. Under a filter gaps are normal (PR-17).
Rule 3: types nobody here knows, and an application's own `x.*` events, are counted and leave no trace, so that an older
observer can follow a newer server.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.errors import CorruptRecord, EventGap, InvalidRequest
from agentscope_durable.contracts.events import Committed, EventFilter, PublicEvent, cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import MessageId
from agentscope_durable.contracts.messages import Content, InputKind, Message, Role, Text
from agentscope_durable.contracts.projection import Projection, SnapshotView, tool_key
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ResourceStatus,
    SignalState,
)
from agentscope_durable.contracts.views import (
    BindingView,
    InteractionView,
    RecoveryView,
    RunStepRefView,
    SessionView,
    SignalView,
    ThreadView,
    ToolView,
    TurnView,
)

__all__ = ["EventProjection", "matches"]

T = TypeVar("T")

TURN_STATE: Final = frozenset({"turn.status", "turn.recovery"})
"""Events about a Turn as a whole. They belong to no Run, and a filter by Run keeps them (FI-09)."""

PROVISIONAL: Final = 0
"""`revision` of a message that was put together from stored `message.delta` events and is not completed yet."""


_TOOL_VALUES: Final = (
    ("name", "name"),
    ("executionId", "execution_id"),
    ("arguments", "arguments"),
    ("result", "result"),
    ("receivedAtMs", "received_at_ms"),
    ("cancelRequested", "cancel_requested"),
)
"""Wire name and field of what a tool event may say as it is."""

_SIGNALS: Final = {
    "signal.accepted": SignalState.ACCEPTED,
    "signal.applied": SignalState.APPLIED,
    "signal.withdrawn": SignalState.WITHDRAWN,
    "signal.expired": SignalState.EXPIRED,
}


def matches(filter: EventFilter, event: PublicEvent) -> bool:
    """Whether an event is in a narrowed timeline (FI-01, FI-07, FI-09).

    A filter by Thread keeps the Thread's own events and those of its Turns. One by Turn keeps the Turn's events, which
    never are resource events. One by Run keeps the Run's events and the changes of its Turn as a whole.
    """
    return concerns(filter, event.type, event.thread_id, event.turn_id, event.run_id)


def concerns(
    filter: EventFilter, event_type: str, thread_id: str | None, turn_id: str | None, run_id: str | None
) -> bool:
    """`matches` for an event in its stored form."""
    if filter.thread_id is not None and thread_id != filter.thread_id:
        return False
    if filter.turn_id is not None and turn_id != filter.turn_id:
        return False
    return filter.run_id is None or run_id == filter.run_id or event_type in TURN_STATE


def message_of(
    data: Mapping[str, Any], *, sequence: int, created_at_ms: int, withdrawn: bool = False, expired: bool = False
) -> Message:
    """The public message of a `message.completed` payload with its bodies in plain.

    Args:
        sequence, created_at_ms: of the event that completed the message first.
    """
    return Message(
        id=MessageId(data["messageId"]),
        role=Role(data["role"]),
        content=msgspec.convert(data["content"], tuple[Content, ...]),
        sequence=sequence,
        attempt=data.get("attempt", 1),
        revision=data.get("revision", 1),
        request_id=data.get("requestId"),
        input_kind=None if data.get("inputKind") is None else InputKind(data["inputKind"]),
        interaction_id=data.get("interactionId"),
        created_at_ms=created_at_ms,
        incomplete=data.get("incomplete", False),
        withdrawn=withdrawn,
        expired=expired,
        structured=data.get("structured"),
    )


def _given(identity: str | None) -> str:
    if identity is None:
        raise ValueError("the event does not say which thread or turn it is about")
    return identity


def _fragment(data: Mapping[str, Any]) -> str:
    """The text of a stored preview, under the names it has had."""
    return next((data[name] for name in ("delta", "text", "fragment") if isinstance(data.get(name), str)), "")


def _new_tool(thread_id: str, turn_id: str, call_id: str) -> ToolView:
    return ToolView(
        thread_id=thread_id,
        turn_id=turn_id,
        call_id=call_id,
        name="",
        kind=ExecutionKind.LOCAL,
        state=ExecutionState.REQUESTED,
    )


class EventProjection:
    """Folds committed events into a projection.

    Not safe for use by several threads at once. Pure: it reads no clock and waits for nothing.

    Args:
        session: whose events; one of another Session is refused.
        filter: what to keep; None for the whole Session.

    A fold under a filter may be given every event or only the matching ones. One by Run that is given every event of
    the Session also learns that a message or a tool call has moved on to a later Run and drops it (FI-09). What
    comes to its Run from an earlier one it may not know: then it says so, as of any other gap, and a snapshot has it.
    """

    def __init__(self, session: SessionKey, filter: EventFilter | None = None) -> None:
        if not isinstance(session, SessionKey):
            raise InvalidRequest("a projection is of a SessionKey(namespace, session_id)", path="session")
        if filter is not None and not isinstance(filter, EventFilter):
            raise InvalidRequest("a filter is an EventFilter", path="filter")
        self._key = session
        self._filter = filter or EventFilter()
        self._whole = self._filter == EventFilter()
        # The Run is looked at when the projection is read: until then the whole Turn is folded.
        self._scope = EventFilter(thread_id=self._filter.thread_id, turn_id=self._filter.turn_id)
        self._run = self._filter.run_id
        self._sequence = 0
        self._made: Projection | None = None
        self._session: SessionView | None = None
        self._threads: dict[str, ThreadView] = {}
        self._turns: dict[str, TurnView] = {}
        self._messages: dict[str, Message] = {}
        self._tools: dict[str, ToolView] = {}
        self._interactions: dict[str, InteractionView] = {}
        self._signals: dict[str, SignalView] = {}
        # Thread -> (ordinal, unfinished Turn), in the order of admission.
        self._queues: dict[str, list[tuple[int, str]]] = {}
        # Only under a filter by Run: which Run an entry is with now, by "kind" and key.
        self._runs: dict[tuple[str, str], str] = {}

    @property
    def session(self) -> SessionKey:
        return self._key

    @property
    def filter(self) -> EventFilter:
        return self._filter

    @property
    def sequence(self) -> int:
        """Number of the last event taken; 0 before the first."""
        return self._sequence

    @property
    def cursor(self) -> str:
        """Where to go on."""
        return cursor_of(self._key, self._sequence)

    @classmethod
    def folds(cls, event_type: str) -> bool:
        """Whether events of this type change a projection; others only count."""
        return event_type in cls._folds

    @property
    def projection(self) -> Projection:
        """The state at `cursor`: a value of its own, which later events do not change.

        Costs a copy of the maps the first time after an event, nothing after that.
        """
        if self._made is None:
            self._made = Projection(
                session=self._session,
                threads=dict(self._threads),
                turns=dict(self._turns),
                messages=self._kept("message", self._messages),
                tools=self._kept("tool", self._tools),
                interactions=self._kept("interaction", self._interactions),
                signals=self._kept("signal", self._signals),
            )
        return self._made

    def snapshot(self) -> SnapshotView:
        """The state with its cursor, as `reset` takes it."""
        return SnapshotView(session=self._key, cursor=self.cursor, projection=self.projection, filter=self._filter)

    def accept(self, event: PublicEvent | Committed) -> bool:
        """Take one committed event.

        Returns:
            False if it had been taken before (delivery is at least once), and nothing changed.

        Raises:
            EventGap: events before it are missing in a whole-session fold (PR-16), or, in one by Run, those of
                something that this event continues; take a snapshot and `reset`.
            InvalidRequest: it is of another Session.
            CorruptRecord: a reserved type with a payload that is not its own. The event was not taken.
        """
        if isinstance(event, Committed):
            event = event.event
        if event.session != self._key:
            raise InvalidRequest("the event belongs to another session", path="event.session")
        if event.sequence <= self._sequence:
            return False
        if self._whole and event.sequence != self._sequence + 1:
            raise EventGap(self._sequence, oldest=event.sequence - 1)
        fold = self._folds.get(event.type)
        if fold is not None and concerns(self._scope, event.type, event.thread_id, event.turn_id, None):
            try:
                fold(self, event)
            except (KeyError, TypeError, ValueError) as error:  # a ValidationError is a ValueError
                raise CorruptRecord(f"event {event.sequence}", event.type, str(error)) from error
            self._made = None
        self._sequence = event.sequence
        return True

    def pass_over(self, sequence: int) -> None:
        """Go on after `sequence`: the caller knows that no event up to it changes anything that is not folded yet."""
        self._sequence = max(self._sequence, sequence)

    def reset(self, snapshot: SnapshotView) -> None:
        """Replace everything by a snapshot and go on from its cursor (PR-15, ST-07).

        Raises:
            InvalidRequest: it is of another Session, or was narrowed to something else.
        """
        if snapshot.session != self._key:
            raise InvalidRequest("the snapshot belongs to another session", path="snapshot.session")
        if snapshot.filter != self._filter:
            raise InvalidRequest("the snapshot has another filter", path="snapshot.filter")
        self._sequence = sequence_of(self._key, snapshot.cursor)
        given = self._made = snapshot.projection
        self._session = given.session
        self._threads = dict(given.threads)
        self._turns = dict(given.turns)
        self._messages = dict(given.messages)
        self._tools = dict(given.tools)
        self._interactions = dict(given.interactions)
        self._signals = dict(given.signals)
        self._queues = {}
        for turn in sorted(self._turns.values(), key=lambda turn: turn.ordinal):
            if not turn.status.terminal:
                self._queues.setdefault(turn.thread_id, []).append((turn.ordinal, turn.turn_id))
        self._runs = {}
        if self._run is not None:
            kinds: tuple[tuple[str, Mapping[str, object]], ...] = (
                ("message", self._messages),
                ("tool", self._tools),
                ("interaction", self._interactions),
                ("signal", self._signals),
            )
            self._runs = {(kind, key): self._run for kind, entries in kinds for key in entries}

    # ---- by Run ----

    def _kept(self, kind: str, entries: dict[str, T]) -> dict[str, T]:
        if self._run is None:
            return dict(entries)
        return {key: entry for key, entry in entries.items() if self._runs.get((kind, key)) == self._run}

    def _unknown(self, event: PublicEvent, known: object) -> bool:
        """Whether the event goes on with something whose beginning was with another Run and is not here.

        Nothing can be made of it then: it stays with the other Run, or comes to this one, which is a gap.
        """
        if self._run is None or known is not None:
            return False
        if event.run_id == self._run:
            raise EventGap(self._sequence, oldest=event.sequence - 1, continues=True)
        return True

    def _touch(self, kind: str, key: str, event: PublicEvent) -> None:
        """The entry is now with the Run of this event; an event outside any Run moves nothing."""
        if self._run is not None and event.run_id is not None:
            self._runs[kind, key] = event.run_id

    # ---- resources ----

    def _session_created(self, event: PublicEvent) -> None:
        self._session = SessionView(
            session=self._key, status=ResourceStatus.OPEN, created_at_ms=event.data["createdAtMs"]
        )

    def _session_closed(self, event: PublicEvent) -> None:
        if self._session is not None:
            closed_at_ms = event.data.get("closedAtMs") or None
            self._session = replace(self._session, status=ResourceStatus.CLOSED, closed_at_ms=closed_at_ms)

    def _thread_created(self, event: PublicEvent) -> None:
        thread_id = _given(event.thread_id)
        self._threads[thread_id] = ThreadView(
            session=self._key,
            thread_id=thread_id,
            binding=msgspec.convert(event.data["binding"], BindingView),
            status=ResourceStatus.OPEN,
            created_at_ms=event.data["createdAtMs"],
            current_turn_id=self._current(thread_id),
        )

    def _thread_closed(self, event: PublicEvent) -> None:
        thread = self._threads.get(_given(event.thread_id))
        if thread is not None:
            self._threads[thread.thread_id] = replace(thread, status=ResourceStatus.CLOSED)

    # ---- Turns ----

    def _turn_status(self, event: PublicEvent) -> None:
        turn = msgspec.convert(event.data["turn"], TurnView)
        self._turns[turn.turn_id] = turn
        queue, place = self._queues.setdefault(turn.thread_id, []), (turn.ordinal, turn.turn_id)
        index = bisect_left(queue, place)
        if queue[index : index + 1] == [place]:
            if turn.status.terminal:
                del queue[index]
        elif not turn.status.terminal:
            queue.insert(index, place)
        thread = self._threads.get(turn.thread_id)
        if thread is not None:
            current = self._current(turn.thread_id)
            if current != thread.current_turn_id:
                self._threads[turn.thread_id] = replace(thread, current_turn_id=current)

    def _turn_recovery(self, event: PublicEvent) -> None:
        recovery = msgspec.convert(event.data["recovery"], RecoveryView)
        turn = self._turns.get(_given(event.turn_id))
        if turn is not None:
            self._turns[turn.turn_id] = replace(turn, recovery=recovery)

    def _current(self, thread_id: str) -> str | None:
        """The oldest unfinished Turn."""
        queue = self._queues.get(thread_id)
        return queue[0][1] if queue else None

    # ---- messages ----

    def _message_completed(self, event: PublicEvent) -> None:
        data = event.data
        message_id: str = data["messageId"]
        attempt: int = data.get("attempt", 1)
        revision: int = data.get("revision", 1)
        earlier = self._messages.get(message_id)
        if revision > 1 and self._unknown(event, earlier):
            return
        if (
            earlier is not None
            and earlier.revision != PROVISIONAL
            and (attempt, revision) < (earlier.attempt, earlier.revision)
        ):
            return
        self._messages[message_id] = message_of(
            data,
            sequence=event.sequence if earlier is None else earlier.sequence,
            created_at_ms=event.at_ms if earlier is None else earlier.created_at_ms,
            withdrawn=earlier is not None and earlier.withdrawn,
            expired=earlier is not None and earlier.expired,
        )
        self._touch("message", message_id, event)

    def _message_abandoned(self, event: PublicEvent) -> None:
        message = self._messages.get(event.data["messageId"])
        if message is not None and message.revision == PROVISIONAL and message.attempt == event.data["attempt"]:
            del self._messages[message.id]

    def _message_delta(self, event: PublicEvent) -> None:
        """Text of a stored preview (EV-12). Read where an old store has it; nothing writes it any more."""
        data = event.data
        message_id: str = data["messageId"]
        attempt: int = data.get("attempt", 1)
        earlier = self._messages.get(message_id)
        if earlier is not None and (earlier.revision != PROVISIONAL or attempt < earlier.attempt):
            return
        text = _fragment(data)
        if earlier is not None and earlier.attempt == attempt:
            text = earlier.text + text
        self._messages[message_id] = Message(
            id=MessageId(message_id),
            role=Role(data.get("role", Role.ASSISTANT)),
            content=(Text(text),),
            sequence=event.sequence if earlier is None else earlier.sequence,
            attempt=attempt,
            revision=PROVISIONAL,
            created_at_ms=event.at_ms if earlier is None else earlier.created_at_ms,
            incomplete=True,
        )
        self._touch("message", message_id, event)

    # ---- signals ----

    def _signal(self, event: PublicEvent) -> None:
        data = event.data
        state = _SIGNALS[event.type]
        request_id: str = data["requestId"]
        self._signals[request_id] = SignalView(request_id=request_id, operation=data["operation"], state=state)
        self._touch("signal", request_id, event)
        message = self._messages.get(data.get("messageId", ""))
        if message is not None:
            if state is SignalState.WITHDRAWN:
                self._messages[message.id] = replace(message, withdrawn=True)
            elif state is SignalState.EXPIRED:
                self._messages[message.id] = replace(message, expired=True)

    # ---- interactions ----

    def _interaction_requested(self, event: PublicEvent) -> None:
        data = event.data
        interaction_id: str = data["interactionId"]
        self._interactions[interaction_id] = InteractionView(
            interaction_id=interaction_id,
            turn_id=_given(event.turn_id),
            call_id=data["callId"],
            kind=InteractionKind(data["kind"]),
            name=data["name"],
            arguments=data["arguments"],
            state=InteractionState.PENDING,
            opened_at_ms=data["openedAtMs"],
        )
        self._touch("interaction", interaction_id, event)

    def _interaction_resolved(self, event: PublicEvent) -> None:
        data = event.data
        interaction = self._interactions.get(data["interactionId"])
        if self._unknown(event, interaction) or interaction is None:
            return
        answered = data["outcome"] == "answered"
        self._interactions[interaction.interaction_id] = replace(
            interaction,
            state=InteractionState.RESOLVED if answered else InteractionState.CLOSED,
            response=data.get("response"),
            request_id=data.get("requestId"),
            reason=data.get("reason"),
            edited_arguments=data.get("editedArguments"),
        )
        self._touch("interaction", interaction.interaction_id, event)
        tool = tool_key(_given(event.thread_id), interaction.turn_id, interaction.call_id)
        if "editedArguments" in data and tool in self._tools:
            self._tools[tool] = replace(self._tools[tool], arguments=data["editedArguments"])

    # ---- tools ----

    def _tool(self, event: PublicEvent) -> None:
        data = event.data
        thread_id, turn_id, call_id = _given(event.thread_id), _given(event.turn_id), data["callId"]
        key = tool_key(thread_id, turn_id, call_id)
        known = self._tools.get(key)
        if event.type != "tool.requested" and self._unknown(event, known):
            return
        # Only what the event says changes: a later one of a call carries only what is new.
        changes: dict[str, Any] = {"state": ExecutionState(data["state"])}
        for wire, name in _TOOL_VALUES:
            if wire in data:
                changes[name] = data[wire]
        if "kind" in data:
            changes["kind"] = ExecutionKind(data["kind"])
        if "origin" in data:
            changes["origin"] = msgspec.convert(data["origin"], RunStepRefView)
        self._tools[key] = replace(known or _new_tool(thread_id, turn_id, call_id), **changes)
        self._touch("tool", key, event)

    def _tool_applied(self, event: PublicEvent) -> None:
        data = event.data
        key = tool_key(_given(event.thread_id), _given(event.turn_id), data["callId"])
        tool = self._tools.get(key)
        if not self._unknown(event, tool) and tool is not None:
            applied_at = data.get("appliedAt")
            self._tools[key] = replace(
                tool,
                applied_at_ms=data["appliedAtMs"],
                applied_at=None if applied_at is None else msgspec.convert(applied_at, RunStepRefView),
            )
            self._touch("tool", key, event)

    def _tool_arguments(self, event: PublicEvent) -> None:
        """A stored fragment of arguments (PR-06). The name may come later; final arguments end the assembling."""
        data = event.data
        thread_id, turn_id, call_id = _given(event.thread_id), _given(event.turn_id), data["callId"]
        key = tool_key(thread_id, turn_id, call_id)
        tool = self._tools.get(key) or _new_tool(thread_id, turn_id, call_id)
        if tool.state is not ExecutionState.REQUESTED or tool.origin is not None:
            return
        arguments = f"{tool.arguments or ''}{_fragment(data)}"
        self._tools[key] = replace(tool, name=data.get("name") or tool.name, arguments=arguments)
        self._touch("tool", key, event)

    _folds: ClassVar[dict[str, Callable[[EventProjection, PublicEvent], None]]] = {
        "session.created": _session_created,
        "session.closed": _session_closed,
        "thread.created": _thread_created,
        "thread.closed": _thread_closed,
        "turn.status": _turn_status,
        "turn.recovery": _turn_recovery,
        "message.completed": _message_completed,
        "message.abandoned": _message_abandoned,
        "message.delta": _message_delta,
        **dict.fromkeys(_SIGNALS, _signal),
        "interaction.requested": _interaction_requested,
        "interaction.resolved": _interaction_resolved,
        "tool.requested": _tool,
        "tool.started": _tool,
        "tool.completed": _tool,
        "tool.unknown": _tool,
        "tool.cancel_requested": _tool,
        "tool.applied": _tool_applied,
        "tool.call.arguments": _tool_arguments,
    }
