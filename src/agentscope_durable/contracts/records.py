"""What is stored, and under which key. RECORDS: where each fact lives.

Everything here is private to the store. Structs are array-like: their field order is part of
storage format 8, and new fields go at the end with a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar, overload

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ReplayRule,
    ResourceStatus,
    RunStatus,
    SettledBy,
    SignalState,
    StepPhase,
    TurnStatus,
    WaitKind,
)

STORAGE_FORMAT = 8
"""Layout of a Session's records. Any other number is refused untouched (BE-27)."""
STORAGE_REVISION = "8.dev11"
"""Until release 0.1.0 the development revision is part of the format (D7)."""

ACTIVE_THREADS_MAX = 64
"""Threads of one Session that may be owned at once; the head stays small."""
PENDING_INPUTS_MAX = 64
"""Accepted inputs of one Turn that are not applied yet."""
OPEN_CONDITIONS_MAX = 256
"""Outstanding tool calls, approvals and waits of one Turn."""


CLASS_SEPARATOR = "\x1f"
"""Between the parts of a ready class; no id contains it."""


class _Record(Discreet, frozen=True, array_like=True):
    pass


class Binding(_Record, frozen=True):
    """The definition a Thread is pinned to for life (RT-12)."""

    harness: str
    definition_version: str
    state_version: str

    @property
    def ready_class(self) -> str:
        """The class under which this definition's work stands in the ready index (RT-36)."""
        return CLASS_SEPARATOR.join((self.harness, self.definition_version, self.state_version))


class RunStepRef(_Record, frozen=True):
    """The Run and Step something happened in."""

    run_id: str
    step_id: str


class Failure(_Record, frozen=True):
    """What ended an invocation badly.

    Attributes:
        kind: class of the error, as the user knows it (`ValueError`).
        message: its text, bounded, without bodies or secrets.
        retryable: as classified when it happened.
    """

    kind: str
    message: Words
    retryable: bool = False


class Recovery(_Record, frozen=True):
    """Failures of a Turn so far. Policy numbers are those in force at the first one (RC-12).

    Attributes:
        failures: how many invocations failed.
        next_retry_at_ms: when the next may start by the store's clock; 0 when none is due.
    """

    max_retries: int
    initial_backoff_ms: int
    max_backoff_ms: int
    failures: int
    next_retry_at_ms: int
    last_error: Failure


class Condition(_Record, frozen=True):
    """Something of a Turn that is still open: an unanswered question, a tool in flight, a wait.

    Attributes:
        kind: why it holds the Turn.
        id: interaction id, execution id or signal key.
        call_id: tool call it belongs to; "" for a signal.
        since_ms: when it was opened.
        ready: it holds the Turn no longer: an answer or outcome is stored and not applied yet, or a local tool
            was lost that may simply be run again.
        deadline_ms: for a signal: when it stops waiting; 0 never.
    """

    kind: WaitKind
    id: str
    call_id: str
    since_ms: int
    ready: bool = False
    deadline_ms: int = 0


class Result(_Record, frozen=True):
    """How a Turn ended well.

    Attributes:
        message_id: the final public message; "" if the agent gave none.
        message_seq: number of the event that holds it.
        finish_reason: `completed`, `exceed_max_iters`, ...
    """

    message_id: str
    message_seq: int
    finish_reason: str = "completed"


class TurnState(_Record, frozen=True):
    """The part of a Turn that changes. In the head while a host owns it, else in its record.

    Attributes:
        revision: rises with every change a user can see.
        cancel: request id of the accepted cancel, "" for none.
        pause: request id of the accepted pause that is not lifted.
        paused_revision: revision at which the present pause was reached; 0 when not PAUSED.
        failure: a permanent failure that waits for settlement.
        conditions: what is open, in the order it was opened.
        inputs: accepted steer and inject inputs that are not applied.
        input_ordinal: ordinal of the last accepted input.
        runs: invocations so far.
        reasoning: reasoning rounds begun so far (the budget's position, TP-01).
        attempt: model requests made for the present round (EV-17).
        last_step: the latest Step, which the next Run resumes from.
        takeovers: takeovers since the last checkpoint (D13).
        operator: why a person must look, "" when none must.
        settle_ms: when settlement may be tried again; 0 at once.
        settle_tries: settlement attempts so far, for its backoff.
        updated_ms: when something visible changed last.
        steers: how many of `inputs` are steers, which reopen a final answer (D20).
        message_id, message_seq: the newest assistant message and the event that holds it.
        signals: `x.*` signals accepted for this Turn so far.
    """

    status: TurnStatus = TurnStatus.QUEUED
    revision: int = 1
    cancel: str = ""
    pause: str = ""
    paused_revision: int = 0
    failure: Failure | None = None
    recovery: Recovery | None = None
    conditions: tuple[Condition, ...] = ()
    inputs: int = 0
    input_ordinal: int = 0
    runs: int = 0
    reasoning: int = 0
    attempt: int = 0
    last_step: str = ""
    takeovers: int = 0
    operator: Words = ""
    settle_ms: int = 0
    settle_tries: int = 0
    result: Result | None = None
    updated_ms: int = 0
    steers: int = 0
    message_id: str = ""
    message_seq: int = 0
    signals: int = 0


class OpenModel(_Record, frozen=True):
    """A model call under way in the present Run."""

    model_call_id: str
    step_id: str
    message_id: str
    attempt: int
    request: int
    started_ms: int


class RunState(_Record, frozen=True):
    """The present Run of an owned Thread; `run_id` is "" while it is only being settled."""

    run_id: str = ""
    number: int = 0
    started_ms: int = 0
    first_at: int = 0
    steps: int = 0
    step_id: str = ""
    phase: StepPhase = StepPhase.REASONING
    calls: int = 0
    models: tuple[OpenModel, ...] = ()
    resumed_from: str = ""


class ThreadHead(_Record, frozen=True):
    """The hot part of a Thread that a host owns.

    Attributes:
        fence: rises with every claim; a commit with another number is refused.
        position: stream position of the last owner commit.
        base_at: position from which the native checkpoint can be rebuilt.
        checkpoint_at: position of the last commit that carried native state.
        writer: version of the library that wrote native state under this fence.
        chain: digest over the native blocks from `base_at` to now.
        digest: the same as it was at `checkpoint_at` (BE-20).
    """

    fence: int
    owner: str
    position: int
    base_at: int
    checkpoint_at: int
    turn_id: str
    turn: TurnState
    run: RunState
    writer: str = ""
    chain: str = ""
    digest: str = ""


class SessionHead(_Record, frozen=True):
    """The one hot row of a Session; the only row every commit rewrites. It stays small.

    Attributes:
        threads: those a host owns.
        thread_count: Threads there are, closed ones too.
        closed_ms: when it was closed; 0 while it is open.
    """

    namespace: str
    session_id: str
    created_ms: int
    status: ResourceStatus = ResourceStatus.OPEN
    threads: dict[str, ThreadHead] = {}
    thread_count: int = 0
    closed_ms: int = 0


class DropRecord(_Record, frozen=True):
    """What is told of a Session that is dropped. It says how far that has come, and stays when all else is gone.

    Attributes:
        reason: in the operator's words.
        events, commits: how many there were.
        erased: rows of the log that are gone, those that the slices themselves left, too.
        after: records up to this key are gone; of bodies in the object store a mark stays until they are.
        listed: every record has been seen.
        records, record_bytes: how many records are gone, and bytes of their keys and values.
        objects, object_bytes: bodies in the object store that were marked to be removed.
        dropped_ms: when nothing was left; 0 before.
    """

    begun_ms: int
    reason: Words
    events: int
    commits: int
    erased: int = 0
    after: str = ""
    listed: bool = False
    records: int = 0
    record_bytes: int = 0
    objects: int = 0
    object_bytes: int = 0
    dropped_ms: int = 0


class ThreadRecord(_Record, frozen=True):
    """A Thread at rest. While a host owns it the head's copy of fence and positions rules.

    Attributes:
        next_ordinal: the place the next admitted Turn will get.
        current: the unfinished Turn at the head of the queue, "" when idle.
        writer: version of the library that wrote the checkpoint; "" before the first.
        settled_at: position of the last settled checkpoint.
        created_seq, closed_seq: numbers of the events that opened and closed it; 0 while it is open. With its Turns'
            they say which part of the timeline is about it.
        pruned_at: no settled position up to this one can be come back to any more.
    """

    thread_id: str
    binding: Binding
    created_ms: int
    status: ResourceStatus = ResourceStatus.OPEN
    next_ordinal: int = 1
    current: str = ""
    fence: int = 0
    position: int = 0
    base_at: int = 0
    checkpoint_at: int = 0
    writer: str = ""
    settled_at: int = 0
    chain: str = ""
    digest: str = ""
    created_seq: int = 0
    closed_seq: int = 0
    pruned_at: int = 0


class CheckpointSource(_Record, frozen=True):
    """The settled position that another one is a copy of. It is in the same namespace."""

    session_id: str
    thread_id: str
    at: int


class CheckpointRecord(_Record, frozen=True):
    """A settled position of a Thread, which is in its key, and what proves and restores the state there (BE-20).

    Harness and versions are the Thread's: it is pinned to them for life.

    Attributes:
        base_at: the rows from here to the position rebuild the state.
        digest: over those rows.
        writer: version of the library that wrote the state.
        through: position of the last commit of what left it: private resources of the Thread are as of then.
        turn_id: the Turn that ended here, "" for a copy.
        source: what a restored or forked position is a copy of.
    """

    base_at: int
    through: int
    digest: str
    writer: str
    created_ms: int
    settled: SettledBy
    turn_id: str = ""
    source: CheckpointSource | None = None


class TurnRecord(_Record, frozen=True):
    """A Turn: the part that never changes, and its state when no host owns it.

    Attributes:
        input_seq: number of the event that holds the submitted message.
        first_at, last_at: stream positions of its owner commits, 0 before the first.
        ended_seq: number of the event that told of its end, after which no event is about it; 0 while it goes on.
    """

    turn_id: str
    thread_id: str
    ordinal: int
    request_id: str
    created_ms: int
    input_seq: int
    state: TurnState
    first_at: int = 0
    last_at: int = 0
    ended_seq: int = 0


class TurnRef(_Record, frozen=True):
    """A record that only names a Turn: an entry of a Thread's order or queue."""

    turn_id: str


class RequestRecord(_Record, frozen=True):
    """An accepted request, kept for ever (AD-29).

    Attributes:
        arguments: digest of each argument by name, so that a conflict can name the field.
        receipt: the encoded receipt of the first acceptance.
        ordinal: for an input: its place among the inputs of its Turn.
    """

    operation: str
    arguments: dict[str, str]
    receipt: msgspec.Raw
    ordinal: int = 0


class InputRecord(_Record, frozen=True):
    """A steer or inject input."""

    request_id: str
    kind: str
    ordinal: int
    message_id: str
    seq: int
    accepted_ms: int
    state: SignalState = SignalState.ACCEPTED


class SignalRecord(_Record, frozen=True):
    """An `x.*` signal kept until a wait condition consumes it."""

    request_id: str
    key: str
    payload: Body
    ordinal: int
    accepted_ms: int
    state: SignalState = SignalState.ACCEPTED


class InteractionRecord(_Record, frozen=True):
    """A question the agent waits for: an approval, or the result of a manual tool.

    Attributes:
        arguments: as the model gave them.
        edited: arguments that the answer put in their place; None if it changed none.
    """

    interaction_id: str
    call_id: str
    kind: InteractionKind
    name: str
    arguments: Body
    origin: RunStepRef
    opened_ms: int
    state: InteractionState = InteractionState.PENDING
    response: Body | None = None
    request_id: str = ""
    reason: str = ""
    edited: Body | None = None


class ExecutionRecord(_Record, frozen=True):
    """A tool call: what was intended, what became of it, where the result was applied.

    Attributes:
        route: executor route for EXTERNAL, "" otherwise.
        arguments: of an EXTERNAL call, and of one that was approved with other arguments than the model's; else
            they stand in the event `requested_seq` alone.
        rule: replay rule declared when the call was committed.
        origin: Run and Step that made the intent.
        owner: host that started it; "" before the start.
        result: outcome as the agent will see it; None until known.
        received_ms: when the result was stored; 0 before.
        applied_at: where the result entered the checkpoint; None if it has not, or if a settlement
            outside any Run did it (then `applied_ms` is set).
        evidence: reference given at reconciliation.
        tries: queries so far while the outcome is not known.
        late: result of an outcome that arrived after the call was settled; kept, never applied (UN-12).
        attempt: starts so far; above 1 only for a local tool that may be run again.
        seq: number of the event that holds the result; the record's `result` is None in the store
            then, and readers fill it in from there (a body is stored once).
        requested_seq: number of the `tool.requested` event that holds the arguments, and the order of
            calls that were opened by one commit; 0 when it was not noted.
        run_id: Run that started a LOCAL call last; only that one can know what became of it.
        late_state: state of the outcome in `late`.
    """

    execution_id: str
    call_id: str
    name: str
    kind: ExecutionKind
    arguments: Body
    origin: RunStepRef
    created_ms: int
    route: str = ""
    rule: ReplayRule = ReplayRule.NEVER
    state: ExecutionState = ExecutionState.INTENT
    owner: str = ""
    fence: int = 0
    started_ms: int = 0
    result: Body | None = None
    received_ms: int = 0
    applied_at: RunStepRef | None = None
    applied_ms: int = 0
    cancel_requested: bool = False
    evidence: str = ""
    tries: int = 0
    late: Body | None = None
    attempt: int = 1
    seq: int = 0
    requested_seq: int = 0
    run_id: str = ""
    late_state: ExecutionState | None = None


class RunRecord(_Record, frozen=True):
    """One invocation. Its Steps and model requests are the stream slice first_at .. last_at."""

    run_id: str
    number: int
    owner: str
    fence: int
    status: RunStatus
    started_ms: int
    first_at: int
    ended_ms: int = 0
    last_at: int = 0
    resumed_from: str = ""
    failure: Failure | None = None


class MessageIndex(_Record, frozen=True):
    """Where a public message is in the log. Its key holds the first sequence, which orders history.

    Attributes:
        seq: number of the newest event that carries it.
    """

    message_id: str
    turn_id: str
    thread_id: str
    seq: int
    flag: str = ""


class ObjectState(StrEnum):
    """How it stands with an object (D11).

    PENDING     about to be put, or put; nothing refers to it yet, or any more.
    REFERENCED  something refers to it.
    SWEEPING    it is being removed. There is no way back from here: no commit may refer to it any more.
    """

    PENDING = "pending"
    REFERENCED = "referenced"
    SWEEPING = "sweeping"


class ObjectRecord(_Record, frozen=True):
    """A large body that stands in the object store, under the name in the key.

    Attributes:
        marked_ms: when it came to this state; a body that is put again while it is pending is marked anew.
        kept: something refers to it that stays as long as the Session does.
        uses: contents of workspaces that refer to it and may go.
    """

    state: ObjectState
    size: int
    marked_ms: int
    kept: bool = False
    uses: int = 0


class LateFact(_Record, frozen=True):
    """What a fenced owner could still report about its own Run (D13)."""

    run_id: str
    id: str
    what: str
    body: Body
    filed_ms: int


class WorkspaceRecord(_Record, frozen=True):
    """What a Thread's workspace holds, counted.

    Attributes:
        entries, size: entries, and bytes of their values.
        numbers: contents numbered so far.
        floor: highest version of an entry that is gone; its owner lets a new entry begin above it.
    """

    entries: int = 0
    size: int = 0
    numbers: int = 0
    floor: int = 0


class PolicyRecord(_Record, frozen=True):
    """What a commit policy reads, and the request that put it there. The value is never a reference."""

    value: Body
    request_id: str
    put_ms: int


class UsesRecord(_Record, frozen=True):
    """A content that several refer to, because a restore brought it back: how many more than one."""

    more: int


class EntryRecord(_Record, frozen=True):
    """An entry as one commit left it. Its value stands by itself under the number.

    Attributes:
        version: rises with every change of this entry.
        number: the content, counted over the workspace; never used again for another one.
        size: bytes of the content's JSON.
        modified_ms: when that content was made.
        at: stream position of the commit that put it here.
        author: the Turn of that commit, or the restore. Only what an earlier one left behind can be restored.
    """

    version: int
    number: int
    size: int
    modified_ms: int
    at: int
    author: str


S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_encoder = msgspec.json.Encoder()
_decoders: dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]] = {}


def encode(record: msgspec.Struct) -> bytes:
    return _encoder.encode(record)


def decode(kind: type[S], data: bytes, *, key: str = "") -> S:
    """Decode a stored record.

    Raises:
        CorruptRecord: the bytes are not a `kind`; they are left as they are (C61).
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(data)  # type: ignore[return-value]
    except (TypeError, *UNREADABLE) as error:  # TypeError: not even bytes stand there
        raise CorruptRecord(key, kind.__name__, str(error)) from error


@overload
def decode_json(data: Any, *, key: str) -> Any: ...
@overload
def decode_json(data: Any, kind: type[T], *, key: str) -> T: ...
def decode_json(data: Any, kind: Any = Any, *, key: str) -> Any:
    """The JSON that stands within a record, or in an object.

    A record is decoded without looking into it (`msgspec.Raw`), so what is broken there is seen only here.

    Raises:
        CorruptRecord: it is none, or not of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (TypeError, *UNREADABLE) as error:
        raise CorruptRecord(key, getattr(kind, "__name__", "JSON"), str(error)) from error


def ordinal_of(key: str, prefix: str) -> int:
    """The number at the end of a stored key.

    Raises:
        CorruptRecord: the key ends in something else, so it is not what was written.
    """
    digits = key.removeprefix(prefix)
    if not (digits.isascii() and digits.isdecimal()):
        raise CorruptRecord(key, "key", "it does not end in a number")
    return int(digits)
