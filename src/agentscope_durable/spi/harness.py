"""The socket for an agent library: how a Turn is run, and how it is settled.

The runtime owns leases, queues and retries; an adapter owns the conversation with one agent
library. Between them stands `RunContext`: what the adapter may read, and `commit`, the only way
anything becomes true.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import CommitStep, RunEnd, StepReceipt
from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.journal import CheckpointRow
from agentscope_durable.contracts.messages import Input
from agentscope_durable.contracts.records import (
    Binding,
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    RunStepRef,
    SignalRecord,
)
from agentscope_durable.contracts.status import EventDelivery, RecoveryBoundary
from agentscope_durable.contracts.views import EntryView, WorkspaceView
from agentscope_durable.spi.checkpoint import JournalRow, NativeBaseline
from agentscope_durable.spi.live import Preview


class Abandoned(BaseException):
    """This Run must end now and commit nothing more: lease lost, or the host gives it up.

    Not an `Exception`, so that an agent library cannot take it for a failed model or tool.
    """


class StopCause(msgspec.Struct, frozen=True):
    """Why a Run is being stopped (C30): carried as data, never inferred from `CancelledError`.

    `kind` is `cancel` (a user's), `drain` (the host goes), or `fenced` (another host owns the Thread).
    """

    kind: str


class OpenInput(Discreet, frozen=True):
    """An accepted steer or inject input with its content (JSON list of blocks)."""

    record: InputRecord
    content: list[Any]


class OpenWorkView(msgspec.Struct, frozen=True):
    """What waits to enter the agent's state, read at one instant, in order of admission.

    Attributes:
        inputs: accepted, not applied (CT-23).
        interactions: RESOLVED and not applied, and those still PENDING.
        executions: every tool call of the Turn that is not applied yet.
        signals: accepted `x.*` signals by wait key.
    """

    inputs: tuple[OpenInput, ...]
    interactions: tuple[InteractionRecord, ...]
    executions: tuple[ExecutionRecord, ...]
    signals: tuple[SignalRecord, ...]


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a Run begins with.

    Attributes:
        input: what the user submitted; its message id is stable and may be used as native id.
        number: number of this Run within the Turn, from 1.
        resumed_from: Step the former Run had reached, "" for the first Run.
        reasoning, attempt: position of the Turn (TP-01, EV-17).
        position: stream position the next commit must follow.
        base_at, checkpoint_at: rows from `base_at` to `checkpoint_at` rebuild the native state; 0: none yet.
        takeover: the former owner was lost; local tools that were started may have any outcome.
    """

    session: SessionKey
    thread_id: str
    turn_id: str
    run_id: str
    fence: int
    binding: Binding
    request_id: str
    input: Input
    input_message_id: str
    number: int
    resumed_from: str
    reasoning: int
    attempt: int
    position: int
    base_at: int
    checkpoint_at: int
    takeover: bool


class RunContext(Protocol):
    """A Run, as its adapter sees it."""

    @property
    def start(self) -> RunStart: ...

    @property
    def position(self) -> int:
        """Stream position of the last commit of this Run."""
        ...

    @property
    def stop(self) -> StopCause | None:
        """Why the Run should end at the next boundary; None to go on."""
        ...

    @property
    def pause_requested(self) -> bool: ...

    @property
    def pending_inputs(self) -> int:
        """Accepted inputs not applied yet, as far as this host knows."""
        ...

    @property
    def ready_conditions(self) -> int: ...

    async def journal(self) -> list[JournalRow]:
        """Rows that rebuild the native state, oldest first; [] for a fresh Thread."""
        ...

    async def open_work(self) -> OpenWorkView: ...

    async def workspace(self) -> WorkspaceView:
        """What the Thread's workspace holds, counted."""
        ...

    async def workspace_entry(self, path: tuple[str, ...]) -> EntryView | None:
        """An entry with its content, as committed; None: there is none."""
        ...

    async def workspace_entries(
        self, namespace: tuple[str, ...], *, after: tuple[str, ...] = (), limit: int = 100
    ) -> tuple[EntryView, ...]:
        """Entries under a namespace that come after a path, in order of their paths, without their contents."""
        ...

    async def body(self, value: object) -> Body:
        """Encode a JSON value for a commit; large ones are stored as objects first."""
        ...

    async def open_body(self, body: Body) -> Any: ...

    async def commit(self, step: CommitStep) -> StepReceipt:
        """Make it true, with one call in flight at a time per Run.

        `expected_position`, identity and fence are filled in by the context.

        Raises:
            Abandoned: fenced, stopped for good, or the outcome of the commit cannot be known here.
        """
        ...

    async def changed(self) -> None:
        """Wait until `stop`, `pause_requested`, `pending_inputs` or `ready_conditions` may have changed."""
        ...

    def wants_previews(self) -> bool: ...

    def preview(self, preview: Preview) -> None:
        """Show a preview to whoever watches. Never blocks, never raises."""
        ...

    def cache_get(self) -> Any:
        """Live state kept from a former Run on this host for this Thread at exactly this position, or None."""
        ...

    def cache_put(self, value: Any, size_bytes: int) -> None:
        """Keep live state for the next Run of this Thread, within the host's bound."""
        ...


class SettleStart(msgspec.Struct, frozen=True, kw_only=True):
    """A Turn that was cancelled or has failed, whose effects are all known (SE-04).

    Attributes:
        executions: every tool call of the Turn that the checkpoint does not contain yet.
    """

    session: SessionKey
    thread_id: str
    turn_id: str
    binding: Binding
    cancelled: bool
    position: int
    base_at: int
    checkpoint_at: int
    executions: tuple[ExecutionRecord, ...]
    input_message_id: str


class SettleContext(Protocol):
    @property
    def start(self) -> SettleStart: ...

    async def input(self) -> Input:
        """What the user submitted; without content if it cannot be read any more.

        Not read for whoever does not ask: a large one would have to come from its store before the Turn can end.
        """
        ...

    async def journal(self) -> list[JournalRow]: ...

    async def open_body(self, body: Body) -> Any: ...


class AfterSettlement(Protocol):
    async def __call__(self) -> object: ...


class Settlement(Discreet, frozen=True, kw_only=True):
    """Cleaned native state, and the calls whose confirmed result it contains.

    `journal` is an encoded JournalBatch; b"" if there is no native state to clean.

    Attributes:
        after: what the adapter does once the settlement stands. What it raises is reported and changes nothing.
    """

    journal: bytes = b""
    checkpoint: bool = False
    base: bool = False
    writer: str = ""
    applied: tuple[str, ...] = ()
    after: AfterSettlement | None = None


class HarnessCapabilities(msgspec.Struct, frozen=True):
    recovery: RecoveryBoundary = RecoveryBoundary.TOOL_BOUNDARY
    delivery: EventDelivery = EventDelivery.DELTA


class HarnessAdapter(Protocol):
    """Drives one agent library.

    Promises, checked by the contract suite:

    resumable   Killed at any commit, a new Run from the stored state reaches the same end.
    once        A committed model answer is not asked for again; a tool with rule `never` is not started twice.
    settled     `settle` leaves a context the next Turn can use, and starts neither model nor tool.
    obedient    Returns soon after `stop` is set; raises nothing that hides `Abandoned`.
    restorable  `restore` keeps the promises of a `CheckpointCodec`, and the next Turn can use what it made.
    """

    @property
    def state_version(self) -> str:
        """Format of the native state, part of what a Thread is pinned to."""
        ...

    @property
    def capabilities(self) -> HarnessCapabilities: ...

    @property
    def routes(self) -> frozenset[str]:
        """Executor routes its external tools need (RC-04)."""
        ...

    def accepts_writer(self, writer: str) -> bool:
        """Whether state written by this version of the library can be continued here (D21)."""
        ...

    async def run(self, context: RunContext) -> RunEnd | None:
        """Run or continue the Turn until it ends, parks or must stop.

        Returns the end for the runtime to commit, or None if the last commit contained it.
        An exception is a failed invocation; `classify` says of what kind.
        """
        ...

    async def settle(self, context: SettleContext) -> Settlement: ...

    def restore(self, baseline: NativeBaseline, /) -> Sequence[CheckpointRow]:
        """A settled baseline, ready for the Thread that gets it: a `CheckpointCodec`."""
        ...

    def classify(self, error: BaseException) -> bool | None:
        """True if trying again may help, False if not, None to leave it to the runtime (RC-06)."""
        ...


class RunStepOrigin(msgspec.Struct, frozen=True):
    """Where a tool call came from, as tools may read it."""

    run: RunStepRef
    turn_id: str
    call_id: str
