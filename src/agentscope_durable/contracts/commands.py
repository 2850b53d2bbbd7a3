"""Everything that can be asked to change. `domain/rules.py` says who may ask and what decides.

A command names its Session; identifiers in it were checked when it was made by a handle, and are
checked again where it enters. Bodies in it are JSON already.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.log import ModelFact, StepFact
from agentscope_durable.contracts.records import Binding, Failure, RunStepRef
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    ReplayRule,
    TurnStatus,
)
from agentscope_durable.contracts.views import DropReceipt, RecoveryPolicy


class Command(Discreet, frozen=True, kw_only=True, rename="camel"):
    session: SessionKey


# ---- resources ----


class CreateSession(Command, frozen=True, tag="create_session"):
    """Make a Session and its main Thread, pinned to `binding`. Repeats are no change (AD-16)."""

    binding: Binding


class CreateThread(Command, frozen=True, tag="create_thread"):
    thread_id: str
    binding: Binding


class CloseSession(Command, frozen=True, tag="close_session"):
    pass


class CloseThread(Command, frozen=True, tag="close_thread"):
    thread_id: str


# ---- admission and controls ----


class Request(Command, frozen=True):
    """A command with a request id: the same id and arguments are the same request, for ever (D16)."""

    thread_id: str
    request_id: str


class SubmitTurn(Request, frozen=True, tag="submit"):
    """`content` is the JSON list of input blocks; `digest` that of the canonical input."""

    content: Body
    digest: str


class AddInput(Request, frozen=True, tag="input"):
    """Steer or inject: input for a Turn that is under way (`kind` is `steer` or `inject`)."""

    turn_id: str
    kind: str
    content: Body
    digest: str


class Withdraw(Request, frozen=True, tag="withdraw"):
    turn_id: str
    target_request_id: str


class Cancel(Request, frozen=True, tag="cancel"):
    turn_id: str


class Pause(Request, frozen=True, tag="pause"):
    turn_id: str


class Resume(Request, frozen=True, tag="resume"):
    turn_id: str
    expected_revision: int


class Respond(Request, frozen=True, tag="respond"):
    """Answer an interaction: JSON true or false to an approval, any JSON to a manual tool.

    `is_bool` and `approved` say what the response is, so that the decision need not read a body.
    `content` is the public form of the answer, a JSON list of content blocks; `result` is the
    answer as a ToolResult, used when a manual tool asked.

    Attributes:
        arguments: with an approval: what the call gets in the place of the model's arguments, as
            JSON text in a JSON string, like the model's; None approves them as they are.
        arguments_digest: of that JSON object; "" without.
    """

    turn_id: str
    interaction_id: str
    response: Body
    digest: str
    content: Body
    result: Body
    is_bool: bool
    approved: bool = False
    arguments: Body | None = None
    arguments_digest: str = ""


class Signal(Request, frozen=True, tag="signal"):
    turn_id: str
    key: str
    payload: Body
    digest: str


# ---- the workspace ----


class EntryCommit(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One entry of the Thread's workspace as a commit leaves it.

    Attributes:
        path: names of its namespace, and its key.
        expected: version it has now; 0: there is none.
        version: its new version, above every earlier one; 0: it is removed.
        number: of its content, unused so far; with `content` None one that is stored already.
        size: bytes of the content's JSON.
        content: its value; None: it has the content of that number again.
        modified_ms: when that content was made; 0: now.
    """

    path: tuple[str, ...]
    expected: int
    version: int = 0
    number: int = 0
    size: int = 0
    content: Body | None = None
    modified_ms: int = 0


# ---- checkpoints ----


class NativeState(Discreet, frozen=True, kw_only=True, rename="camel"):
    """A baseline that a codec has made ready for the Thread that gets it.

    Attributes:
        binding: the definition it was made with.
        head: stream position of the Thread that it follows.
        journal: encoded JournalBatch that alone rebuilds the state; large ones as `@` + reference JSON. b"" only where
            an operator empties a Thread.
        writer: version of the library that wrote the state.
        workspace: changes after which the Thread's workspace has the entries of that position (CK-07).
        floor, numbers: how far the versions and contents of the source's workspace are counted, for a fork: its agent
            remembers them, so the copy counts on above.
    """

    binding: Binding
    head: int
    journal: bytes
    writer: str
    workspace: tuple[EntryCommit, ...] = ()
    floor: int = 0
    numbers: int = 0


class RestoreThread(Request, frozen=True, tag="restore"):
    """Bring an idle Thread back to one of its settled positions (CK-05).

    Attributes:
        at: stream position of the checkpoint.
        expected_at: that of the checkpoint the Thread stands at.
        native: None only asks: the answer is the receipt of the first time, None if it would be done now, or the
            refusal. So nothing is copied in vain, and a repeat needs no copy.
    """

    at: int
    expected_at: int
    native: NativeState | None = None


class ForkThread(Request, frozen=True, tag="fork"):
    """Begin a Thread with the context of another one, at a settled position of that (CK-08, CK-16).

    Session and Thread of the command are the target's, which alone is written.

    Attributes:
        source, at: the Thread and the position that are copied.
        native: as in `RestoreThread`.
    """

    source: ThreadKey
    at: int
    native: NativeState | None = None


class RepairThread(Request, frozen=True, tag="repair"):
    """An operator ends a Turn that cannot go on, and brings its Thread back to a settled position (C82).

    Attributes:
        turn_id: the parked Turn.
        at, expected_at: as in `RestoreThread`; 0 is before the first checkpoint.
        native: as in `RestoreThread`.
    """

    turn_id: str
    at: int
    expected_at: int
    native: NativeState | None = None


# ---- the host that runs a Thread ----


class ClaimPurpose(StrEnum):
    RUN = "run"
    SETTLE = "settle"
    NOTHING = "nothing"
    """The claim itself finished what there was to do (a pause, a parked Turn)."""


class Claim(Command, frozen=True, tag="claim"):
    """Take the Thread's current Turn.

    Attributes:
        owner: the host's identity.
        served: ready classes this host can run.
        dead: owners this host knows to be gone (D14).
        takeovers_max: takeovers without a new checkpoint after which a person must look (D13).
        refused: writers whose state this host cannot continue; a Turn in flight of theirs is left (D21).
        again: the answer of this host's last claim of the Thread was lost, and nothing was done since: if the Thread
            is its own already, it is by that claim, whose receipt is given again.
    """

    thread_id: str
    owner: str
    served: tuple[str, ...]
    dead: tuple[str, ...] = ()
    takeovers_max: int = 5
    refused: tuple[str, ...] = ()
    again: bool = False


class OwnerCommand(Command, frozen=True):
    """A command of the host that owns the Thread: refused under any other fence."""

    thread_id: str
    turn_id: str
    run_id: str
    fence: int


class MessageOut(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An assistant message that is complete. Its id is stable over Runs (EV-16).

    Attributes:
        first_seq: with `revision` above 1: number of the event that completed it first; the new
            version takes its place in history.
    """

    message_id: str
    content: Body
    attempt: int = 1
    revision: int = 1
    structured: Body | None = None
    incomplete: bool = False
    first_seq: int = 0


class Abandon(msgspec.Struct, frozen=True, rename="camel"):
    """A request ended without an answer; its previews are void."""

    message_id: str
    attempt: int
    reason: str


class ToolCommit(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What this commit says about one tool call.

    `state` REQUESTED or AWAITING_APPROVAL or INTENT opens it; LOCAL calls go to RUNNING at their
    intent. A terminal `state` or UNKNOWN carries the outcome.

    Attributes:
        result: outcome as the agent sees it, for a terminal state.
        applied: the checkpoint of this commit contains the result (or the denial).
    """

    call_id: str
    state: ExecutionState
    name: str = ""
    kind: ExecutionKind = ExecutionKind.LOCAL
    arguments: Body | None = None
    route: str = ""
    rule: ReplayRule = ReplayRule.NEVER
    result: Body | None = None
    applied: bool = False


class InteractionCommit(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An approval or a manual result the agent now waits for."""

    interaction_id: str
    call_id: str
    kind: InteractionKind
    name: str
    arguments: Body


class WaitCondition(msgspec.Struct, frozen=True, rename="camel"):
    """Wait for an `x.*` signal, or until a store time in ms (0: for the signal only) (CT-19)."""

    key: str
    deadline_ms: int = 0


class CustomEvent(msgspec.Struct, frozen=True, rename="camel"):
    type: str
    value: Body


class RunEndKind(StrEnum):
    SUSPENDED = "suspended"
    """Parked: something outside must happen first."""
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Stopped because of an accepted cancel; settlement follows under the same fence."""
    RELEASED = "released"
    """The host gives the Thread back unfinished: shutdown, or another host must serve it."""


class RunEnd(Discreet, frozen=True, kw_only=True, rename="camel"):
    """How the invocation ended.

    Attributes:
        message_id: for COMPLETED: the final message, committed here or before.
        failure, policy: for FAILED.
        operator: for SUSPENDED: why a person must look before the Turn runs again (D13, C61).
    """

    kind: RunEndKind
    message_id: str = ""
    finish_reason: str = "completed"
    failure: Failure | None = None
    policy: RecoveryPolicy = RecoveryPolicy()
    operator: Words = ""


class CommitStep(OwnerCommand, frozen=True, tag="commit_step"):
    """One owner commit: everything that became true since the last one, at once (BE-17).

    Attributes:
        expected_position: stream position this commit follows.
        journal: encoded JournalBatch, `b""` for none; large ones as `@` + reference JSON.
        checkpoint: the batch carries native state.
        base: the batch alone is enough to rebuild the state.
        writer: library version that wrote the state, when `checkpoint`.
        reasoning: reasoning rounds begun so far, None for no change.
        attempt: model requests made for this round, None for no change.
        steps, models: private facts about Steps and model requests.
        inputs: ordinals of accepted inputs that this checkpoint contains.
        answers: interactions whose answer this checkpoint contains.
        signals: wait keys consumed by this checkpoint.
        waits: wait conditions opened by this commit.
        workspace: entries of the Thread's workspace that change with it, in order.
    """

    expected_position: int
    journal: bytes = b""
    checkpoint: bool = False
    base: bool = False
    writer: str = ""
    reasoning: int | None = None
    attempt: int | None = None
    steps: tuple[StepFact, ...] = ()
    models: tuple[ModelFact, ...] = ()
    messages: tuple[MessageOut, ...] = ()
    abandons: tuple[Abandon, ...] = ()
    tools: tuple[ToolCommit, ...] = ()
    interactions: tuple[InteractionCommit, ...] = ()
    inputs: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    signals: tuple[str, ...] = ()
    waits: tuple[WaitCondition, ...] = ()
    events: tuple[CustomEvent, ...] = ()
    workspace: tuple[EntryCommit, ...] = ()
    end: RunEnd | None = None


class SettleTurn(OwnerCommand, frozen=True, tag="settle_turn"):
    """End a cancelled or failed Turn: cleaned native state, confirmed results and the terminal
    status in one commit (SE-04), outside any Run (SE-05). `run_id` is "".

    Attributes:
        journal, checkpoint, base, writer: as in CommitStep.
        applied: calls whose confirmed result the cleaned state contains.
    """

    expected_position: int
    journal: bytes = b""
    checkpoint: bool = False
    base: bool = False
    writer: str = ""
    applied: tuple[str, ...] = ()


class PostponeSettlement(OwnerCommand, frozen=True, tag="postpone_settlement"):
    """Effects are not settled yet: give the Thread back and look again later (SE-02, SE-11)."""

    failure: Failure | None = None


class FileFact(Command, frozen=True, tag="file_fact"):
    """A fenced owner reports what it still knows about its own lost Run (D13).

    Attributes:
        tool: outcome of a local tool started by that Run; accepted while it is UNKNOWN.
        model: usage of a request that is LOST; it stays LOST.
    """

    thread_id: str
    turn_id: str
    run_id: str
    tool: ToolCommit | None = None
    model: ModelFact | None = None


# ---- executions ----


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


# ---- operators ----


class ReconcileTool(ExecutionCommand, frozen=True, tag="reconcile_tool"):
    """Settle an UNKNOWN call by evidence (D19, UN-03 UN-10 UN-11 UN-13)."""

    request_id: str
    state: ExecutionState
    result: Body
    digest: str
    evidence_ref: str


class ReleaseTurn(Command, frozen=True, tag="release_turn"):
    """Let a Turn that was parked for an operator run again."""

    thread_id: str
    turn_id: str
    request_id: str


class PutPolicy(Command, frozen=True, tag="put_policy"):
    """Write one policy record; None removes it. CommitPolicy reads these (BE-18).

    Attributes:
        digest: of the value.
    """

    key: str
    request_id: str
    value: Body | None = None
    digest: str = ""


class PruneEvents(Command, frozen=True, tag="prune_events"):
    """Drop the next batch of events that nobody is to replay any more. What they add up to stays (EV-19).

    Attributes:
        through: number of the last event to drop; None: as far as `older_than_ms` allows.
        older_than_ms: drop only what was committed at least this long ago by the store's clock.
    """

    through: int | None = None
    older_than_ms: int = 0


class DropSession(Command, frozen=True, tag="drop_session"):
    """Begin to drop a closed Session, or go on: the next slice of what it holds.

    Attributes:
        reason: in the operator's words; that of the first command is kept.
    """

    reason: Words = ""


class PruneCheckpoints(Command, frozen=True, tag="prune_checkpoints"):
    """Drop the next batch of a Thread's settled positions, and what only they need.

    Attributes:
        through: stream position of the last one to drop; None: as far as `older_than_ms` allows.
        older_than_ms: drop only what was settled at least this long ago by the store's clock.
    """

    thread_id: str
    through: int | None = None
    older_than_ms: int = 0


class RecordObject(Command, frozen=True, tag="record_object"):
    """Mark a body that is about to be put as pending (D11)."""

    digest: str
    size: int


class SweepObjects(Command, frozen=True, tag="sweep_objects"):
    """Mark the next page of bodies that nobody refers to as about to be removed.

    Attributes:
        after: name of the last object of the page before.
        limit: objects looked at.
    """

    after: str = ""
    limit: int = 100


class ForgetObjects(Command, frozen=True, tag="forget_objects"):
    """These were marked and are removed now."""

    names: tuple[str, ...]


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


# ---- receipts of host commands; public ones are views ----


class TurnAdmitted(msgspec.Struct, frozen=True, rename="camel"):
    thread_id: str
    turn_id: str
    ordinal: int


class Claimed(msgspec.Struct, frozen=True, rename="camel"):
    """What a claim obtained.

    Attributes:
        purpose: run the agent, settle the Turn, or nothing is left to do.
        position, base_at, checkpoint_at: where the native state stands (ThreadHead).
        expected: number of the new Run, its id, and the Step it resumes from.
        lost_run: id of the Run of the former owner, "" if this is no takeover.
        digest: of the native blocks from `base_at` to `checkpoint_at`.
        writer: version of the library that wrote the native state, "" before the first checkpoint.
        binding: what the Thread is pinned to.
        request_id: of the Turn.
        inputs: accepted inputs that are not applied yet.
    """

    purpose: ClaimPurpose
    turn_id: str = ""
    fence: int = 0
    run_id: str = ""
    run_number: int = 0
    position: int = 0
    base_at: int = 0
    checkpoint_at: int = 0
    reasoning: int = 0
    attempt: int = 0
    resumed_from: str = ""
    lost_run: str = ""
    cancel: bool = False
    pause: bool = False
    failure: Failure | None = None
    now_ms: int = 0
    digest: str = ""
    writer: str = ""
    binding: Binding = Binding("", "", "")
    request_id: str = ""
    inputs: int = 0


class StepReceipt(msgspec.Struct, frozen=True, rename="camel"):
    """What an owner learns with every commit.

    Attributes:
        position: stream position of this commit.
        first_seq: number of its first public event, 0 without.
        cancel, pause: a control waits for the next boundary.
        inputs: accepted inputs that are not applied yet.
        ready: conditions whose answer or outcome can be applied.
        digest: of the native blocks up to the last checkpoint.
    """

    position: int
    cancel: bool
    pause: bool
    inputs: int
    ready: int
    now_ms: int
    ended: bool = False
    digest: str = ""


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


class ReconcileReceipt(msgspec.Struct, frozen=True, rename="camel"):
    request_id: str
    turn_id: str
    call_id: str
    state: ExecutionState
    evidence_ref: str
    accepted_at_ms: int


class Pruned(msgspec.Struct, frozen=True, rename="camel"):
    """One batch is dropped.

    Attributes:
        through: events up to this number can no longer be replayed.
        dropped: events of this batch that are gone; the others are still a part of what is shown.
        more: there may be more to drop.
    """

    through: int
    dropped: int
    more: bool


class Dropped(msgspec.Struct, frozen=True, rename="camel"):
    """A slice is dropped.

    Attributes:
        more: there is more to drop.
    """

    receipt: DropReceipt
    more: bool


class PolicyReceipt(msgspec.Struct, frozen=True, rename="camel"):
    """A policy record was written, or removed. Kept with the request for ever: who put it there, and when."""

    request_id: str
    key: str
    removed: bool
    accepted_at_ms: int


class PositionsPruned(msgspec.Struct, frozen=True, rename="camel"):
    """One batch of settled positions is dropped.

    Attributes:
        through: stream position up to which there are none any more.
        positions: settled positions of this batch.
        versions: former versions of workspace entries that went with them.
        more: there may be more to drop.
    """

    through: int
    positions: int
    versions: int
    more: bool


class ObjectMarked(msgspec.Struct, frozen=True, rename="camel"):
    """Under which name a body is to be put, and whether a commit refers to it already."""

    name: str
    referenced: bool


class ObjectsMarked(msgspec.Struct, frozen=True, rename="camel"):
    """What of a page is to be removed.

    Attributes:
        names, size: objects to remove, those that a former sweep has marked too, and bytes of them.
        pending: further objects nobody refers to, which are too young to be removed.
        looked_at: objects of the page.
        after: name of the last one; None when this was the last page.
    """

    names: tuple[str, ...]
    size: int
    pending: int
    looked_at: int
    after: str | None


class RepairReceipt(msgspec.Struct, frozen=True, rename="camel"):
    """How the parked Turn ended, and where its Thread stands now; `position` None: it begins anew."""

    request_id: str
    turn_id: str
    status: TurnStatus
    position: str | None
    accepted_at_ms: int


class Done(msgspec.Struct, frozen=True, rename="camel"):
    """Accepted. `changed` is False when it was so already."""

    changed: bool
