"""What the host that runs a Thread says: it takes it, commits for it, and settles it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands.base import Command
from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.log import ModelFact, StepFact
from agentscope_durable.contracts.records import Binding, Failure
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, InteractionKind, ReplayRule
from agentscope_durable.contracts.views import RecoveryPolicy


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
        dropped: fence of a Run that this host itself has dropped: as long as the Thread stands under it, it is taken
            over as from a host that was lost. 0: none.
    """

    thread_id: str
    owner: str
    served: tuple[str, ...]
    dead: tuple[str, ...] = ()
    takeovers_max: int = 5
    refused: tuple[str, ...] = ()
    again: bool = False
    dropped: int = 0


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
        input_seq: number of the event that told what the Turn was submitted with.
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
    input_seq: int = 0


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


class StepReceipt(msgspec.Struct, frozen=True, rename="camel"):
    """What an owner learns with every commit.

    Attributes:
        position: stream position of this commit.
        first_seq: number of its first public event, 0 without.
        cancel, pause: a control waits for the next boundary.
        inputs: accepted inputs that are not applied yet.
        ready: conditions whose answer or outcome can be applied.
        ended: this commit ended the Run.
        digest: of the native blocks up to the last checkpoint.
        last: the Run has ended, and nothing can be taken of the Thread now.
    """

    position: int
    cancel: bool
    pause: bool
    inputs: int
    ready: int
    now_ms: int
    ended: bool = False
    digest: str = ""
    last: bool = False


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
