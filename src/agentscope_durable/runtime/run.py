"""One Run, as its adapter sees it: what it may read, why it should stop, and the one way to make something true.

Rule 1: a commit is never left half done. A cancelled caller leaves its outcome unknown.
Rule 2: an unknown outcome is settled before anything else happens: the commit is sent again, and the position says
whether it stands already, since nobody else can write under this fence.
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
from agentscope_durable.contracts.commands import Claimed, CommitStep, FileFact, RunEnd, RunEndKind, StepReceipt
from agentscope_durable.contracts.errors import (
    DurableError,
    Fenced,
    LimitExceeded,
    Retry,
    RevisionConflict,
    Unconfirmed,
)
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.messages import Input, Message
from agentscope_durable.contracts.questions import (
    GetEntry,
    GetMessage,
    GetTurn,
    GetWorkspace,
    ListEntries,
    LoadThread,
    OpenWork,
)
from agentscope_durable.contracts.records import decode_json
from agentscope_durable.contracts.status import ExecutionState, ModelStatus, StepStatus, TurnStatus
from agentscope_durable.contracts.views import EntryView, TurnView, WorkspaceView
from agentscope_durable.runtime.host import Delivery, Host
from agentscope_durable.runtime.live_states import LiveStates
from agentscope_durable.spi.harness import Abandoned, JournalRow, OpenWorkView, RunStart, StopCause
from agentscope_durable.spi.live import Preview

CANCEL = StopCause("cancel")
DRAIN = StopCause("drain")
FENCED = StopCause("fenced")


class LiveRun:
    """`RunContext` of the runtime.

    Attributes:
        ended: how the Run ended, None while it goes on.
        over: it has ended, or this host has given it up; nothing more may be committed.
        last: it has ended, and the Thread has nothing more to do now.
        fenced: another host owns the Thread.
        commits: commits that stand, the end not counted.
        committing_at: when the last commit was begun, by the environment's clock.
        dropped: the host threw it away at a boundary (`recover_every_step`); the Thread is still this host's.
    """

    def __init__(self, host: Host, states: LiveStates, thread: ThreadKey, claimed: Claimed) -> None:
        self._host = host
        self._states = states
        self.thread = thread
        self._claimed = claimed
        self._start: RunStart | None = None
        self._position = claimed.position
        self.base_at = claimed.base_at
        self.checkpoint_at = claimed.checkpoint_at
        self.digest = claimed.digest
        self._pause = claimed.pause
        self._inputs = claimed.inputs
        self._ready = 0
        self._cancel = claimed.cancel
        self.fenced = False
        self.ended: RunEndKind | None = None
        self.over = False
        self.dropped = False
        self.last = False
        self.commits = 0
        self._droppable = False
        self._open: set[str] = set()
        """Requests and local tools under way, as committed."""
        self.committing_at = host.environment.monotonic()
        self._changed = asyncio.Event()
        self._order = asyncio.Lock()
        self._sending = False
        self._flight: asyncio.Task[StepReceipt] | None = None
        """Finds out what became of a commit whose caller was cancelled."""

    @property
    def ids(self) -> dict[str, str]:
        """For logs."""
        return {
            "session_id": self.thread.session.session_id,
            "thread_id": self.thread.thread_id,
            "turn_id": self._claimed.turn_id,
            "run_id": self._claimed.run_id,
        }

    def begin(self, start: RunStart) -> None:
        self._start = start

    @property
    def start(self) -> RunStart:
        assert self._start is not None, "the run has not begun"
        # A Run that must go on after its answer starts again from what it has committed.
        return replace(self._start, position=self._position, base_at=self.base_at, checkpoint_at=self.checkpoint_at)

    @property
    def position(self) -> int:
        return self._position

    # ---- why it should stop ----

    @property
    def stop(self) -> StopCause | None:
        if self.fenced:
            return FENCED
        if self._cancel:
            return CANCEL
        return DRAIN if self._host.closing else None

    @property
    def pause_requested(self) -> bool:
        return self._pause

    @property
    def pending_inputs(self) -> int:
        return self._inputs

    @property
    def ready_conditions(self) -> int:
        return self._ready

    def tell(self) -> None:
        """Something an adapter looks at may have changed."""
        self._changed.set()

    @property
    def committing(self) -> bool:
        return self._sending or (self._flight is not None and not self._flight.done())

    def observe(self, view: TurnView, *, asked_at: int) -> None:
        """Take in what a query saw that was asked at a position.

        It may be older than the last receipt: then it only makes the Run look again. A Run whose own commit was under
        way meanwhile may have given the Thread back by it, so only a calm one can see that another host owns it.
        """
        if self.over:
            return
        lease = view.lease
        calm = self._position == asked_at and not self.committing
        if calm and (view.status.terminal or lease is None or lease.fence != self._claimed.fence):
            self.fenced = True
        self._cancel = self._cancel or view.cancel_requested
        self._pause = view.status is TurnStatus.PAUSING
        self._inputs = view.pending_inputs
        self.tell()

    async def changed(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    # ---- what it may read ----

    async def journal(self) -> list[JournalRow]:
        return await load_journal(self._host, self.thread, self.base_at, self.checkpoint_at, self.digest)

    async def open_work(self) -> OpenWorkView:
        return await load_open_work(self._host, self.thread, self._claimed.turn_id)

    async def workspace(self) -> WorkspaceView:
        thread = self.thread
        return await self._host.query(GetWorkspace(session=thread.session, thread_id=thread.thread_id))

    async def workspace_entry(self, path: tuple[str, ...]) -> EntryView | None:
        thread = self.thread
        return await self._host.query(GetEntry(session=thread.session, thread_id=thread.thread_id, path=path))

    async def workspace_entries(
        self, namespace: tuple[str, ...], *, after: tuple[str, ...] = (), limit: int = 100
    ) -> tuple[EntryView, ...]:
        thread = self.thread
        return await self._host.query(
            ListEntries(
                session=thread.session, thread_id=thread.thread_id, namespace=namespace, after=after, limit=limit
            )
        )

    async def body(self, value: object) -> Body:
        content = msgspec.json.encode(durable_json.value(value))
        return await self._host.put_body(self.thread.session, content)

    async def open_body(self, body: Body) -> Any:
        return await load_body(self._host, self.thread, body)

    # ---- previews ----

    def wants_previews(self) -> bool:
        try:
            return self._host.live.wanted(self.thread.session)
        except Exception as error:  # noqa: BLE001 - previews never touch the work (ST-26)
            self._host.report(error, "the live transport failed", **self.ids)
            return False

    def preview(self, preview: Preview) -> None:
        if self.over:
            return
        try:
            self._host.live.publish(self.thread.session, preview)
        except Exception as error:  # noqa: BLE001 - previews never touch the work (ST-26)
            self._host.report(error, "the live transport failed", **self.ids)

    # ---- live state ----

    def cache_get(self) -> Any:
        return self._states.take(self.thread, checkpoint_at=self.checkpoint_at, fence=self._claimed.fence)

    def cache_put(self, value: Any, size_bytes: int) -> None:
        if not self.fenced:
            self._states.put(
                self.thread, value, size_bytes, checkpoint_at=self.checkpoint_at, fence=self._claimed.fence
            )

    # ---- the one way to make it true ----

    async def commit(self, step: CommitStep) -> StepReceipt:
        async with self._order:
            await self._settled()
            if self.fenced and not self.over and not self._host.ended:
                # Known before the commit: its effects happened all the same.
                await self._file_facts(step)
            if self.over or self.fenced or self._host.ended:
                raise Abandoned
            delivery = Delivery(self._host)
            self._sending = True
            try:
                receipt = await self._send(step, delivery)
            except asyncio.CancelledError:
                # Cut off is whoever waits for it. What it sent is with the store: what became of it is found out.
                delivery.unsure = True
                self._flight = self._host.tasks.start(self._send(step, delivery), name=f"commit {self._claimed.run_id}")
                raise
            finally:
                self._sending = False
            if self._droppable and not self.over and not self._host.closing:
                self.dropped = self.over = True
                raise Abandoned
            return receipt

    def _note(self, step: CommitStep) -> None:
        """Whether the Run may be thrown away here: something was finished by this commit, and nothing is under way.

        Each Run finishes something before it is dropped, so the Turn gets on.
        """
        finished = any(fact.status is StepStatus.COMPLETED for fact in step.steps)
        for model in step.models:
            if model.status is ModelStatus.STARTED:
                self._open.add(model.model_call_id)
            else:
                self._open.discard(model.model_call_id)
                finished = finished or model.status is ModelStatus.COMPLETED
        for tool in step.tools:
            if tool.state is ExecutionState.RUNNING:
                self._open.add(tool.call_id)
            else:
                self._open.discard(tool.call_id)
                finished = finished or tool.state.terminal
        self._droppable = finished and step.checkpoint and not self._open

    async def end(self, end: RunEnd) -> StepReceipt:
        """End the Run with nothing else to say."""
        claimed = self._claimed
        return await self.commit(
            CommitStep(
                session=self.thread.session,
                thread_id=self.thread.thread_id,
                turn_id=claimed.turn_id,
                run_id=claimed.run_id,
                fence=claimed.fence,
                expected_position=self._position,
                end=end,
            )
        )

    async def landed(self) -> None:
        """Wait until no commit is in flight, whatever became of it."""
        async with self._order:
            await self._settled()

    async def _settled(self) -> None:
        if self._flight is not None and not self._flight.done():
            await asyncio.wait({self._flight})

    async def _send(self, step: CommitStep, delivery: Delivery) -> StepReceipt:
        claimed = self._claimed
        step = replace(
            step,
            session=self.thread.session,
            thread_id=self.thread.thread_id,
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            expected_position=self._position,
        )
        self.committing_at = self._host.environment.monotonic()
        receipt = await self._deliver(step, delivery)
        self._position = receipt.position
        if step.checkpoint:
            self.checkpoint_at = receipt.position
            self.digest = receipt.digest
            if step.base:
                self.base_at = receipt.position
        self._cancel = self._cancel or receipt.cancel
        self._pause = receipt.pause
        self._inputs = receipt.inputs
        self._ready = receipt.ready
        if receipt.ended and step.end is not None:
            self.ended = step.end.kind
            self.over = True
            self.last = receipt.last
        else:
            self.commits += 1
        if self._host.recover_every_step:
            self._note(step)
        self.tell()
        return receipt

    async def _deliver(self, step: CommitStep, delivery: Delivery) -> StepReceipt:
        try:
            return await delivery.send(step, **self.ids)
        except Fenced as error:
            if delivery.unsure and step.end is not None:
                # Given back by this very commit, or taken by another host: either way the Run is over here.
                return await self._receipt(step.expected_position + 1, ended=True)
            await self._fence(step, error)
            raise Abandoned from error
        except RevisionConflict as error:
            if delivery.unsure and error.actual == step.expected_position + 1:
                return await self._receipt(error.actual, ended=False)
            # Something of this owner stands where this was to go: go on from there, never over it.
            self._position = error.actual
            raise
        except LimitExceeded:
            # Refused for what it asks, not for the state of the world: the invocation fails by it.
            raise
        except (Retry, Unconfirmed) as error:
            self._host.report(error, "the store did not take a commit", **self.ids)
            raise Abandoned from error

    async def _receipt(self, position: int, *, ended: bool) -> StepReceipt:
        """The receipt of a commit that stands although its answer was lost."""
        thread = self.thread
        view: TurnView = await self._host.query(
            GetTurn(session=thread.session, thread_id=thread.thread_id, turn_id=self._claimed.turn_id)
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
        claimed = self._claimed
        self._host.report(error, f"turn {claimed.turn_id} continues on another host", **self.ids)
        await self._file_facts(step)

    async def _file_facts(self, step: CommitStep) -> None:
        """Outcomes and usage that a fenced owner may still report about its own Run (D13)."""
        if step.workspace:
            # What a tool wrote did not become true, so what it says of that is none.
            step = replace(step, tools=())
        claimed = self._claimed
        known = FileFact(
            session=self.thread.session,
            thread_id=self.thread.thread_id,
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
        )
        facts = [replace(known, tool=tool) for tool in step.tools if tool.state.terminal]
        facts += [replace(known, model=model) for model in step.models if model.status is not ModelStatus.STARTED]
        for fact in facts:
            try:
                await self._host.execute(fact)
            except DurableError as refused:
                self._host.report(refused, "a late fact was not taken", **self.ids)


# ---- what a Run and a settlement read alike ----


async def load_journal(
    host: Host, thread: ThreadKey, base_at: int, checkpoint_at: int, digest: str
) -> list[JournalRow]:
    """The rows that rebuild a Thread's native state, checked against its digest; [] when it has none."""
    if not base_at:
        return []
    return await host.query(
        LoadThread(session=thread.session, thread_id=thread.thread_id, first=base_at, last=checkpoint_at, digest=digest)
    )


async def load_input(host: Host, thread: ThreadKey, message_id: str, sequence: int = 0) -> Input:
    question = GetMessage(session=thread.session, message_id=message_id, sequence=sequence)
    message: Message = await host.query(question)
    return Input(content=tuple(message.content))


async def load_open_work(host: Host, thread: ThreadKey, turn_id: str) -> OpenWorkView:
    return await host.query(OpenWork(session=thread.session, thread_id=thread.thread_id, turn_id=turn_id))


async def load_body(host: Host, thread: ThreadKey, body: Body) -> Any:
    return decode_json(await host.open_body(thread.session, body), key=body.name or "a value in a record")
