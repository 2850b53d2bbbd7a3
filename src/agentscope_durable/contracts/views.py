"""What a query answers: plain frozen values, camelCase on the wire.

A view is read once and never changes. Fields marked *query time* are computed when the question
is asked and are no part of the projection: two observers may see different values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ModelObservation,
    ModelPurpose,
    ModelStatus,
    ResourceStatus,
    RunStatus,
    SettledBy,
    SignalState,
    StepPhase,
    StepStatus,
    TurnStatus,
    WaitKind,
)


class View(Discreet, frozen=True, rename="camel", omit_defaults=True):
    """Base of all views."""


class BindingView(View, frozen=True):
    """The definition a Thread is pinned to (RT-12)."""

    harness: str
    definition_version: str
    state_version: str


class RunStepRefView(View, frozen=True):
    run_id: str
    step_id: str


class ErrorView(View, frozen=True):
    """An error as stored: class and bounded text, never a body."""

    kind: str
    message: Words
    retryable: bool = False


class RecoveryPolicy(View, frozen=True):
    """How often and how late a failed invocation is tried again (RC-11).

    Attributes:
        max_retries: additional invocations after the first.
        initial_backoff_ms: wait before the first retry; doubles each time.
        max_backoff_ms: cap of the wait.
    """

    max_retries: int = 3
    initial_backoff_ms: int = 1000
    max_backoff_ms: int = 30_000


class RecoveryView(View, frozen=True):
    """Failures of a Turn so far (RC-12, RC-14).

    Attributes:
        policy: the policy in force at the first failure; a new host does not change it.
        failures: invocations that failed.
        next_retry_at_ms: store time of the next invocation, None when none is due.
    """

    policy: RecoveryPolicy
    failures: int
    next_retry_at_ms: int | None
    last_error: ErrorView


class Waiting(View, frozen=True):
    """One reason why a Turn does not advance, and what would make it (D4).

    Attributes:
        kind: see WaitKind.
        id: interaction, execution, signal key, definition or child it is about.
        since_ms: store time at which it began.
        next_action: what to do, in one sentence.
        call_id: the tool call, None if it is not about one.
        until_ms: store time at which it ends by itself, None if it does not.
    """

    kind: WaitKind
    id: str
    since_ms: int
    next_action: Words
    call_id: str | None = None
    until_ms: int | None = None


class LeaseView(View, frozen=True):
    """*Query time.* Who owns a running Turn.

    Attributes:
        owner: identity of the host.
        age_ms: since its last renewal.
        alive: the lease is valid by the store's clock, and the owner is not known to be dead (D14).
    """

    owner: str
    fence: int
    age_ms: int
    alive: bool


class ResultView(View, frozen=True):
    """How a Turn ended well: its final message, and why the agent stopped."""

    message_id: str | None
    finish_reason: str = "completed"


class TurnView(View, frozen=True):
    """A Turn.

    Attributes:
        ordinal: place in the Thread's queue, from 1.
        revision: rises with every visible change; `resume` wants the one read while PAUSED.
        cancel_requested: a cancel was accepted and the Turn is being settled.
        waiting_on: why it does not advance; empty while it runs or has ended.
        recovery: None as long as no invocation failed.
        lease: *query time*; None when no host owns it.
    """

    session: SessionKey
    thread_id: str
    turn_id: str
    request_id: str
    ordinal: int
    status: TurnStatus
    revision: int
    created_at_ms: int
    updated_at_ms: int
    cancel_requested: bool = False
    waiting_on: tuple[Waiting, ...] = ()
    recovery: RecoveryView | None = None
    result: ResultView | None = None
    error: ErrorView | None = None
    runs: int = 0
    pending_inputs: int = 0
    parent: RunStepRefView | None = None
    lease: LeaseView | None = None

    @property
    def thread_key(self) -> ThreadKey:
        return ThreadKey(self.session, self.thread_id)


class SessionView(View, frozen=True):
    """A Session. `closed_at_ms` is None while it is open."""

    session: SessionKey
    status: ResourceStatus
    created_at_ms: int
    closed_at_ms: int | None = None


class ThreadView(View, frozen=True):
    """A Thread. `current_turn_id` is the unfinished Turn at the head of its queue."""

    session: SessionKey
    thread_id: str
    binding: BindingView
    status: ResourceStatus
    created_at_ms: int
    current_turn_id: str | None = None


class CheckpointSourceView(View, frozen=True):
    """The position that a restored or forked one is a copy of."""

    session: SessionKey
    thread_id: str
    position: str


class CheckpointView(View, frozen=True):
    """A settled position of a Thread: its agent's whole context can be taken up from here again (CK-15).

    Attributes:
        position: opaque; belongs to this Thread (CK-12).
        created_at_ms: store time of the commit.
        settled: how the Turn ended that left it, or that it was restored or forked.
        binding: the definition the context was made with, and may be continued with.
        writer: version of the agent library that wrote it.
        turn_id: the Turn that ended here; None for a copy.
        source: what it is a copy of; None for a Turn's own.
    """

    session: SessionKey
    thread_id: str
    position: str
    created_at_ms: int
    settled: SettledBy
    binding: BindingView
    writer: str
    turn_id: str | None = None
    source: CheckpointSourceView | None = None


class RunView(View, frozen=True):
    """One invocation of the agent (RT-08). Its end says nothing about the Turn's (RT-49)."""

    run_id: str
    turn_id: str
    number: int
    status: RunStatus
    owner: str
    fence: int
    started_at_ms: int
    ended_at_ms: int | None = None
    resumed_from_step_id: str | None = None
    error: ErrorView | None = None


class StepView(View, frozen=True):
    """One reasoning round, or one continuation that applies results (RT-46..48)."""

    step_id: str
    run_id: str
    number: int
    phase: StepPhase
    status: StepStatus
    started_at_ms: int
    ended_at_ms: int | None = None
    resumed_from_step_id: str | None = None
    reasoning: int | None = None


class UsageView(View, frozen=True):
    """Token counts; None is not known. The cache counts are parts of `input_tokens` (MC-05)."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None


class ModelRequestView(View, frozen=True):
    """One request to a provider inside a model call."""

    number: int
    status: ModelStatus
    model: str
    started_at_ms: int
    elapsed_ms: int | None = None
    usage: UsageView | None = None
    usage_complete: bool = False
    error: Words | None = None


class ModelCallView(View, frozen=True):
    """A model call and each request it made (MC-02). `retries` counts requests beyond the first."""

    model_call_id: str
    run_id: str
    step_id: str
    status: ModelStatus
    purpose: ModelPurpose
    observation: ModelObservation
    requests: tuple[ModelRequestView, ...]
    started_at_ms: int
    message_id: str | None = None
    elapsed_ms: int | None = None
    usage: UsageView | None = None
    usage_complete: bool = False

    @property
    def retries(self) -> int:
        return max(0, len(self.requests) - 1)


class InteractionView(View, frozen=True):
    """A question a Turn waits for (IN-01).

    Attributes:
        name: the tool that asks.
        arguments: the exact text the model gave; usually a JSON object.
        response: what was answered, None while pending.
        edited_arguments: the text of the JSON object that the answer put in the place of `arguments`; None if it
            changed nothing.
    """

    interaction_id: str
    turn_id: str
    call_id: str
    kind: InteractionKind
    name: str
    arguments: Any
    state: InteractionState
    opened_at_ms: int
    response: Any = None
    request_id: str | None = None
    reason: str | None = None
    edited_arguments: Any = None


class ToolView(View, frozen=True):
    """A tool call, local or external, as one entry (PR-05, PR-07, PR-08).

    Attributes:
        arguments: the exact text the model gave, or that of the approval that changed it; usually a JSON object.
        execution_id: only for an external execution.
        result: what the agent sees: `state`, and `value` or `content`; None before there is one.
        received_at_ms: when the result was stored; None before.
        applied_at: the Run and Step whose checkpoint took the result in.
        applied_at_ms: when; set with `applied_at` None when settlement applied it (SE-10).
        origin: the Run and Step that made the call.
    """

    thread_id: str
    turn_id: str
    call_id: str
    name: str
    kind: ExecutionKind
    state: ExecutionState
    arguments: Any = None
    execution_id: str | None = None
    result: Any = None
    origin: RunStepRefView | None = None
    received_at_ms: int | None = None
    applied_at: RunStepRefView | None = None
    applied_at_ms: int | None = None
    cancel_requested: bool = False
    child: str | None = None


class StallView(View, frozen=True):
    """*Query time.* A Thread whose Turn could go on and does not: nothing it waits for is outside (C18).

    Attributes:
        age_ms: since the last commit of its owner; if nobody owns it, since it could be taken.
        owner: the host that owns it, None when nobody does.
        fence: number under which the owner does.
        alive: whether the owner's lease is still valid by the store's clock.
        requesting: a request to a model is under way, which may take its time.
    """

    session: SessionKey
    thread_id: str
    turn_id: str
    status: TurnStatus
    age_ms: int
    owner: str | None = None
    fence: int = 0
    alive: bool = False
    requesting: bool = False


class StallPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of `ListStalled`.

    Attributes:
        items: those that are stalled, among the Threads this page has looked at.
        cursor: pass it to go on; None when all were looked at.
        looked: Threads this page has looked at.
        age_max_ms: the longest age among those that could go on, stalled or not; 0 when there is none.
    """

    items: tuple[StallView, ...]
    cursor: str | None
    looked: int
    age_max_ms: int


class WatchView(View, frozen=True):
    """*Query time.* The watchdog's figures, for an exporter of metrics.

    Attributes:
        owned: stalled Threads that a host owns.
        unclaimed: stalled Threads that nobody owns, or only a host that is gone.
        age_max_ms: the longest time for which a Turn that could go on has not; 0 when there is none.
        complete: False if there were more Threads than are looked at; the figures are then of a part.
    """

    owned: int
    unclaimed: int
    age_max_ms: int
    complete: bool


class SessionSizeView(View, frozen=True):
    """*Query time.* What a Session takes (BE-28).

    Attributes:
        events: public events so far, those that were pruned included.
        pruned: events up to this number are not kept any more.
        commits: rows of its log, one for each commit.
        log_bytes: events, private facts and native blocks in them.
        records, record_bytes: its records: Threads, Turns, requests, messages, calls, ...
        head_bytes: the hot row, which every commit rewrites.
        objects, object_bytes: bodies over 64 KiB, which stand in the object store.
    """

    session: SessionKey
    events: int
    pruned: int
    commits: int
    log_bytes: int
    records: int
    record_bytes: int
    head_bytes: int
    objects: int
    object_bytes: int


class SweepReport(View, frozen=True):
    """What one call of a sweep has done, or with `dry_run` would have done.

    Attributes:
        looked_at: bodies in the object store that were looked at.
        swept, swept_bytes: those that nobody refers to and that are gone now.
        pending: those nobody refers to yet, which are too young to be removed.
        strangers: those that no record knows, by Session or folder and name; at most STRANGERS_MAX of them are listed.
            None: they were not looked for.
        more: strangers that are not listed.
        cursor: where to go on; None when this was all.
        dry_run: nothing was changed.
    """

    looked_at: int
    swept: int
    swept_bytes: int
    pending: int
    strangers: tuple[str, ...] | None
    more: int
    cursor: str | None
    dry_run: bool


class StoreView(View, frozen=True):
    """*Query time.* How busy the record store of this process is, counted since it was opened (BE-28).

    Attributes:
        changes: changes that were committed.
        transactions: transactions they took; changes that wait together share one.
        busy: changes that were given up because somebody else's lock was not let go in time.
        waited_ms: how long changes took from the call to the outcome, altogether.
        longest_ms: how long the slowest of them took.
        locked_ms: how long transactions waited to be let in by other processes, altogether.
        stored_bytes: what the store takes on its disk; 0 where there is none.
    """

    changes: int
    transactions: int
    busy: int
    waited_ms: int
    longest_ms: int
    locked_ms: int
    stored_bytes: int


class CommandReceipt(View, frozen=True):
    """A control was admitted. What it did is told by events and the Turn's status (AD-10).

    Attributes:
        operation: steer, inject, withdraw, cancel, pause, resume, respond or signal.
        accepted_at_ms: store time.
        revision: revision of the Turn after admission.
    """

    request_id: str
    operation: str
    thread_id: str
    turn_id: str
    accepted_at_ms: int
    revision: int


class PruneReceipt(View, frozen=True):
    """Events of a Session were dropped.

    Attributes:
        cursor: the oldest one that can still be continued from.
        dropped: how many events are gone. What a snapshot still needs of the others stays stored.
    """

    cursor: str
    dropped: int


class DropReceipt(View, frozen=True):
    """A Session is dropped. This much is kept of it, under its name, and says what is gone.

    Attributes:
        reason: in the operator's words.
        begun_at_ms: when nobody could read it any more.
        dropped_at_ms: when nothing was left; None before.
        events, commits: how many there were.
        records, record_bytes: keyed records, and bytes of them.
        objects, object_bytes: large bodies, marked for the sweep of the object store.
    """

    session: SessionKey
    reason: Words
    begun_at_ms: int
    dropped_at_ms: int | None
    events: int
    commits: int
    records: int
    record_bytes: int
    objects: int
    object_bytes: int


class PolicyRecordView(View, frozen=True):
    """A policy record of a Session, and the request that put it there."""

    key: str
    value: Any
    request_id: str
    put_at_ms: int


class AgedSession(View, frozen=True):
    """A Session, and whether it has been closed for as long as was asked. One that is being dropped has."""

    session: SessionKey
    status: ResourceStatus
    aged: bool


class CheckpointPruneReceipt(View, frozen=True):
    """Settled positions of a Thread were dropped.

    Attributes:
        positions: how many.
        versions: former versions of its workspace's entries that only they needed.
    """

    session: SessionKey
    thread_id: str
    positions: int
    versions: int


class RetainReport(View, frozen=True):
    """What one round of `retain` did, or would do.

    Attributes:
        looked: Sessions it looked at.
        dropped: Sessions that were dropped, or would be.
        events: events that were dropped of the others.
        positions: settled positions that were dropped of the others.
        damaged: Sessions that were passed over, because something of them cannot be read: `doctor` says what.
        cursor: pass it to go on; None when every Session was looked at.
    """

    looked: int
    dropped: tuple[SessionKey, ...]
    events: int
    positions: int
    damaged: tuple[SessionKey, ...] = ()
    cursor: str | None = None


class VacuumReceipt(View, frozen=True):
    """A store's file was rewritten without the room that was no longer used."""

    before_bytes: int
    after_bytes: int


class SignalView(View, frozen=True):
    """An accepted input or signal and what became of it."""

    request_id: str
    operation: str
    state: SignalState


class CapabilitiesView(View, frozen=True):
    """What this assembly can promise (RT-33..35)."""

    persistent: bool
    shared: bool
    hosts_shared: bool
    harnesses: tuple[HarnessCapabilitiesView, ...] = ()
    executors: tuple[ExecutorCapabilitiesView, ...] = ()
    resolved_harnesses: tuple[str, ...] = ()


class HarnessCapabilitiesView(View, frozen=True):
    harness: str
    definition_version: str
    state_version: str
    recovery: str
    delivery: str


class ExecutorCapabilitiesView(View, frozen=True):
    route: str
    query: bool
    cancel: bool
    output: bool


class Page(Discreet, frozen=True, rename="camel"):
    """One page of a listing.

    Attributes:
        items: at most `limit` of them.
        cursor: pass it to get the next page; None when this was the last one.
    """

    items: tuple[Any, ...]
    cursor: str | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class OutcomeView(View, frozen=True):
    """How a Turn has ended, or that it has not.

    Attributes:
        error: of one that FAILED.
        message: the final one of one that COMPLETED; None if the agent gave none.
    """

    status: TurnStatus
    error: ErrorView | None = None
    message: Message | None = None


class CheckpointPage(Page, frozen=True):
    """Settled positions of a Thread, oldest first. `cursor` is the last one's position.

    Attributes:
        current: where the Thread stands, whether or not it is on this page: the `expected_position` of a restore. None
            before the first settled position.
    """

    current: str | None = None


class WorkspaceView(View, frozen=True):
    """What a Thread's workspace holds, counted. See `contracts.records.WorkspaceRecord`."""

    entries: int = 0
    size_bytes: int = 0
    numbers: int = 0
    floor: int = 0


class EntryView(View, frozen=True):
    """An entry of a Thread's workspace.

    Attributes:
        path: names of its namespace, and its key.
        version: rises with every change of this entry.
        number: says which content it has: within a workspace the same number is the same content.
        content: its value; None in a listing.
    """

    path: tuple[str, ...]
    version: int
    number: int
    size_bytes: int
    modified_at_ms: int
    content: Body | None = None
