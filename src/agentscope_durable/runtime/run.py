"""One Run, as its adapter sees it: what it may read, why it should stop, and the one way to make something true.

Rule 1: a commit in flight is never cut off. A cancelled caller leaves it running, and the next commit waits for it.
Rule 2: an unknown outcome is settled before anything else happens: the position says whether the commit stands, since
nobody else can write under this fence.
Rule 3: once another fence is seen, nothing more is committed. What this host still knows of its own Run is filed as
facts (D13), and the Run is over.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import Claimed, CommitStep, FileFact, StepReceipt
from agentscope_durable.contracts.errors import (
    DurableError,
    Fenced,
    HostClosed,
    LimitExceeded,
    Retry,
    RevisionConflict,
    Unconfirmed,
)
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.questions import GetTurn, LoadThread, OpenWork
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import ModelStatus, TurnStatus
from agentscope_durable.contracts.views import TurnView
from agentscope_durable.runtime.host import Host, log
from agentscope_durable.runtime.live_states import LiveStates
from agentscope_durable.spi.harness import Abandoned, JournalRow, OpenWorkView, RunStart, StopCause
from agentscope_durable.spi.live import Preview

COMMIT_SECONDS_MAX = 300.0
"""How long one commit is tried while the store is away. Meanwhile the Run stands still and keeps what it knows."""
COMMIT_BACKOFF = 0.05
COMMIT_BACKOFF_MAX = 5.0
"""Seconds between two tries of a commit: doubling from the first to the second."""

CANCEL = StopCause("cancel")
DRAIN = StopCause("drain")
FENCED = StopCause("fenced")


class LiveRun:
    """`RunContext` of the runtime.

    Attributes:
        over: the Run has ended; nothing more may be committed.
        ended: the receipt said that a commit ended the Run.
        committing_at: when the last commit was begun, by the environment's clock.
    """

    def __init__(
        self, host: Host, states: LiveStates, session: SessionKey, thread_id: str, binding: Binding, claimed: Claimed
    ) -> None:
        self._host = host
        self._states = states
        self._session = session
        self._key = ThreadKey(session, thread_id)
        self.binding = binding
        self.claimed = claimed
        self._start: RunStart | None = None
        self.position = claimed.position
        self.base_at = claimed.base_at
        self.checkpoint_at = claimed.checkpoint_at
        self.pause_requested = claimed.pause
        self.pending_inputs = 0
        self.ready_conditions = 0
        self.cancelled = claimed.cancel
        self.fenced = False
        self.over = False
        self.ended = False
        self.committing_at = host.environment.monotonic()
        self._changed = asyncio.Event()
        self._order = asyncio.Lock()
        self._flight: asyncio.Task[StepReceipt] | None = None

    # ---- what it is ----

    @property
    def ids(self) -> dict[str, str]:
        """For logs."""
        return {
            "session_id": self._session.session_id,
            "thread_id": self._key.thread_id,
            "turn_id": self.claimed.turn_id,
            "run_id": self.claimed.run_id,
        }

    def begin(self, start: RunStart) -> None:
        self._start = start

    @property
    def start(self) -> RunStart:
        assert self._start is not None, "the run has not begun"
        # A Run that must go on after its answer starts again from what it has committed.
        return replace(self._start, position=self.position, base_at=self.base_at, checkpoint_at=self.checkpoint_at)

    # ---- why it should stop ----

    @property
    def stop(self) -> StopCause | None:
        if self.fenced:
            return FENCED
        if self.cancelled:
            return CANCEL
        return DRAIN if self._host.closing else None

    def tell(self) -> None:
        """Something an adapter may look at has changed."""
        self._changed.set()

    def observe(self, view: TurnView) -> None:
        """Take in what a query saw. It may be older than the last receipt: it can only make a Run look again."""
        if self.over:
            return
        lease = view.lease
        if view.status.terminal or lease is None or lease.fence != self.claimed.fence:
            self.fenced = True
        self.cancelled = self.cancelled or view.cancel_requested
        self.pause_requested = view.status is TurnStatus.PAUSING
        self.pending_inputs = view.pending_inputs
        self.tell()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    # ---- what it may read ----

    async def journal(self) -> list[JournalRow]:
        return await load_journal(self._host, self._key, self.base_at, self.checkpoint_at)

    async def open_work(self) -> OpenWorkView:
        return await self._host.query(
            OpenWork(session=self._session, thread_id=self._key.thread_id, turn_id=self.claimed.turn_id)
        )

    async def body(self, value: object) -> Body:
        return await self._host.backend.put_body(self._session, msgspec.json.encode(durable_json.value(value)))

    async def open_body(self, body: Body) -> Any:
        return msgspec.json.decode(await self._host.backend.open_body(self._session, body))

    # ---- previews ----

    def wants_previews(self) -> bool:
        try:
            return self._host.live.wanted(self._session)
        except Exception as error:  # noqa: BLE001 - previews never touch the work (ST-26)
            self._host.report(error, "the live transport failed", **self.ids)
            return False

    def preview(self, preview: Preview) -> None:
        if self.over:
            return
        try:
            self._host.live.publish(self._session, preview)
        except Exception as error:  # noqa: BLE001 - previews never touch the work (ST-26)
            self._host.report(error, "the live transport failed", **self.ids)

    # ---- live state ----

    def cache_get(self) -> Any:
        return self._states.take(self._key, checkpoint_at=self.checkpoint_at, fence=self.claimed.fence)

    def cache_put(self, value: Any, size_bytes: int) -> None:
        if not self.fenced:
            self._states.put(
                self._key, value, size_bytes, checkpoint_at=self.checkpoint_at, fence=self.claimed.fence
            )

    # ---- the one way to make it true ----

    async def commit(self, step: CommitStep) -> StepReceipt:
        async with self._order:
            await self.landed()
            if self.over or self.fenced:
                raise Abandoned
            task = self._flight = self._host.tasks.start(self._send(step), name=f"commit {self.claimed.run_id}")
            return await asyncio.shield(task)

    async def landed(self) -> None:
        """Wait until no commit is in flight, whatever became of it."""
        if self._flight is not None and not self._flight.done():
            await asyncio.wait({self._flight})

    async def _send(self, step: CommitStep) -> StepReceipt:
        journal = await self._column(step.journal)
        step = replace(
            step,
            session=self._session,
            thread_id=self._key.thread_id,
            turn_id=self.claimed.turn_id,
            run_id=self.claimed.run_id,
            fence=self.claimed.fence,
            expected_position=self.position,
            journal=journal,
        )
        self.committing_at = self._host.environment.monotonic()
        receipt = await self._settled(step)
        self.position = receipt.position
        if step.checkpoint:
            self.checkpoint_at = receipt.position
            if step.base:
                self.base_at = receipt.position
        self.cancelled = self.cancelled or receipt.cancel
        self.pause_requested = receipt.pause
        self.pending_inputs = receipt.inputs
        self.ready_conditions = receipt.ready
        self.ended = receipt.ended
        self.over = self.over or receipt.ended
        self.tell()
        return receipt

    async def _column(self, journal: bytes) -> bytes:
        if not journal:
            return journal
        body = await self._host.backend.put_body(self._session, journal)
        return b"@" + msgspec.json.encode(body) if body.is_reference else journal

    async def _settled(self, step: CommitStep) -> StepReceipt:
        """Send it until it is known to stand, or known never to stand."""
        environment = self._host.environment
        deadline = environment.monotonic() + COMMIT_SECONDS_MAX
        wait, unsure = COMMIT_BACKOFF, False
        while True:
            try:
                return await self._host.execute(step)
            except Fenced as error:
                if unsure and step.end is not None:
                    # Given back by this very commit, or taken by another host: either way the Run is over here.
                    return await self._receipt(step.expected_position + 1, ended=True)
                await self._fence(step, error)
            except RevisionConflict as error:
                if unsure and error.actual == step.expected_position + 1:
                    return await self._receipt(error.actual, ended=False)
                raise
            except (LimitExceeded, HostClosed):
                raise
            except (Retry, Unconfirmed) as error:
                unsure = unsure or isinstance(error, Unconfirmed)
                if environment.monotonic() > deadline:
                    self._host.report(error, "the store did not take a commit", **self.ids)
                    raise Abandoned from error
                log.warning("a commit is tried again: %s", type(error).__name__, extra=self.ids)
            await environment.sleep(wait)
            wait = min(2 * wait, COMMIT_BACKOFF_MAX)

    async def _receipt(self, position: int, *, ended: bool) -> StepReceipt:
        """The receipt of a commit that stands although its answer was lost."""
        view: TurnView = await self._host.query(
            GetTurn(session=self._session, thread_id=self._key.thread_id, turn_id=self.claimed.turn_id)
        )
        return StepReceipt(
            position=position,
            cancel=view.cancel_requested,
            pause=view.status is TurnStatus.PAUSING,
            inputs=view.pending_inputs,
            ready=0,
            now_ms=view.updated_at_ms,
            ended=ended,
        )

    async def _fence(self, step: CommitStep, error: Fenced) -> None:
        """Another host owns the Thread. File what only this one knows, then leave (D13)."""
        self.fenced = True
        self.tell()
        self._host.report(error, f"turn {self.claimed.turn_id} continues on another host", **self.ids)
        known = FileFact(
            session=self._session,
            thread_id=self._key.thread_id,
            turn_id=self.claimed.turn_id,
            run_id=self.claimed.run_id,
        )
        facts = [replace(known, tool=tool) for tool in step.tools if tool.state.terminal]
        facts += [replace(known, model=model) for model in step.models if model.status is not ModelStatus.STARTED]
        for fact in facts:
            try:
                await self._host.execute(fact)
            except DurableError as refused:
                self._host.report(refused, "a late fact was not taken", **self.ids)
        raise Abandoned from error


async def load_journal(host: Host, thread: ThreadKey, base_at: int, checkpoint_at: int) -> list[JournalRow]:
    """The rows that rebuild a Thread's native state; [] when it has none."""
    if not base_at:
        return []
    return await host.query(
        LoadThread(session=thread.session, thread_id=thread.thread_id, first=base_at, last=checkpoint_at)
    )
