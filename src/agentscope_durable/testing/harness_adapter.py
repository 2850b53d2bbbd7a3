"""The contract of a `HarnessAdapter`: subclass it, give the fixtures, and every promise is tested by name.

    class TestMyAdapter(HarnessAdapterContract):
        def make_adapter(self) -> HarnessAdapter: ...
        def open_host(self, adapter): return DurableRuntime(backend=..., harnesses=[Harness("subject", "1", adapter)])
        ...

The adapter must drive an agent that, given `text`, makes at least two model requests with one local tool call between
them (rule `never`), and answers. What happens outside is counted by `effects`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.commands import CommitStep, ReconcileTool, RunEnd, StepReceipt
from agentscope_durable.contracts.errors import CorruptRecord, Incompatible
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, SessionKey, ThreadKey
from agentscope_durable.contracts.journal import Base, Block, CheckpointRow, JournalBatch
from agentscope_durable.contracts.questions import LoadCheckpoint, LoadThread
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import Audience, ExecutionState, ModelStatus, TurnStatus, WaitKind
from agentscope_durable.contracts.views import TurnView
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.checkpoint import JournalRow, NativeBaseline, StoredCheckpoint
from agentscope_durable.spi.harness import (
    Abandoned,
    HarnessAdapter,
    HarnessCapabilities,
    RunContext,
    SettleContext,
    Settlement,
)

__all__ = ["CutAdapter", "HarnessAdapterContract"]

SECONDS = 90.0
"""A wait that takes this long has failed."""
COMMITS_MAX = 100
"""Commits of one Turn the contract cuts at, one after the other."""


class _CutContext:
    """A RunContext whose adapter is told to leave right after one commit."""

    def __init__(self, context: RunContext, cut: CutAdapter) -> None:
        self._context = context
        self._cut = cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def commit(self, step: CommitStep) -> StepReceipt:
        receipt = await self._context.commit(step)
        self._cut.committed(step)
        return receipt


class CutAdapter:
    """Drives another adapter and abandons the Run right after its `at`-th commit, once, as a lost host would.

    Every Run gets an adapter of its own, so nothing survives in memory.

    Attributes:
        commits: commits seen.
        open_requests: model requests begun and not ended when it was cut.
        happened: it was cut.
    """

    def __init__(self, make: Callable[[], HarnessAdapter], at: int) -> None:
        self._make = make
        self._first = make()
        self._at = at
        self._requests: set[tuple[str, int]] = set()
        self.commits = 0
        self.open_requests = 0
        self.happened = False

    def committed(self, step: CommitStep) -> None:
        self.commits += 1
        for fact in step.models:
            request = (fact.model_call_id, fact.request)
            if fact.status is ModelStatus.STARTED:
                self._requests.add(request)
            else:
                self._requests.discard(request)
        if self.commits == self._at and step.end is None:
            self.happened = True
            self.open_requests = len(self._requests)
            raise Abandoned

    @property
    def state_version(self) -> str:
        return self._first.state_version

    @property
    def capabilities(self) -> HarnessCapabilities:
        return self._first.capabilities

    @property
    def routes(self) -> frozenset[str]:
        return self._first.routes

    def accepts_writer(self, writer: str) -> bool:
        return self._first.accepts_writer(writer)

    async def run(self, context: RunContext) -> RunEnd | None:
        return await self._make().run(cast("RunContext", _CutContext(context, self)))

    async def settle(self, context: SettleContext) -> Settlement:
        return await self._make().settle(context)

    def restore(self, baseline: NativeBaseline, /) -> Sequence[CheckpointRow]:
        return self._first.restore(baseline)

    def classify(self, error: BaseException) -> bool | None:
        return self._first.classify(error)


class HarnessAdapterContract:
    """See the top of this file. `definition` is the name under which `open_host` registers the adapter."""

    definition = "subject"
    text = "do it"

    # ---- what a subclass gives ----

    def make_adapter(self) -> HarnessAdapter:
        """A new adapter, as a new process would make it; all of them share the ledger behind `effects`."""
        raise NotImplementedError

    def open_host(self, adapter: HarnessAdapter) -> AbstractAsyncContextManager[Any]:
        """A runtime with this adapter on `backend`."""
        raise NotImplementedError

    def effects(self, kind: str) -> int:
        """How many requests (`model`) or local tool calls (`tool`) really happened so far."""
        raise NotImplementedError

    def owner_in(self, rows: Sequence[CheckpointRow]) -> str:
        """What the native state of these rows, which are a whole one, says of whose it is."""
        raise NotImplementedError

    def owner_named(self, thread: ThreadKey) -> str:
        """What a native state says when it is this Thread's."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> SessionBackend:
        raise NotImplementedError

    # ---- the promises ----

    async def _end(self, backend: SessionBackend, adapter: HarnessAdapter, name: str) -> tuple[TurnStatus, str]:
        """Run one Turn to its end, settling an UNKNOWN tool by evidence; status and final text."""
        key = SessionKey("contract", name)
        async with self.open_host(adapter) as runtime:
            session = await runtime.create_session(key, self.definition)
            await runtime.start()
            turn = await session.submit("r1", self.text)
            view = await self._ended(backend, key, turn)
            return view.status, str(await turn.result())

    async def _ended(self, backend: SessionBackend, key: SessionKey, turn: Any) -> TurnView:
        """The Turn at its end, an UNKNOWN tool on the way settled by evidence."""
        async with asyncio.timeout(SECONDS), turn.stream_events() as events:
            view: TurnView = await turn.status()
            async for _ in events:
                view = await turn.status()
                if view.status.terminal:
                    break
                for reason in view.waiting_on:
                    if reason.kind is WaitKind.TOOL_UNKNOWN and reason.call_id is not None:
                        await self._reconcile(backend, key, turn.turn_id, reason.call_id)
        return view

    async def _reconcile(self, backend: SessionBackend, key: SessionKey, turn_id: str, call_id: str) -> None:
        await backend.execute(
            ReconcileTool(
                session=key,
                thread_id="main",
                turn_id=turn_id,
                call_id=call_id,
                request_id=f"evidence-{call_id}",
                state=ExecutionState.COMPLETED,
                result=body_of(ToolResult(value="by evidence")),
                digest="evidence",
                evidence_ref="the contract",
            ),
            audience=Audience.OPERATOR,
        )

    async def test_resumable_after_any_commit(self, backend: SessionBackend) -> None:
        """Resumable: killed at any commit, a new Run from the stored state reaches an end."""
        whole = CutAdapter(self.make_adapter, 0)
        status, _ = await self._end(backend, whole, "whole")
        assert status is TurnStatus.COMPLETED
        assert 1 < whole.commits <= COMMITS_MAX
        for at in range(1, whole.commits + 1):
            cut = CutAdapter(self.make_adapter, at)
            status, text = await self._end(backend, cut, f"cut-{at}")
            assert status is TurnStatus.COMPLETED, f"after commit {at}"
            assert text

    async def test_once_however_it_is_cut(self, backend: SessionBackend) -> None:
        """Once: a stored answer is not asked for again, and a tool with rule `never` is not started twice."""
        whole = CutAdapter(self.make_adapter, 0)
        await self._end(backend, whole, "whole")
        models, tools = self.effects("model"), self.effects("tool")
        for at in range(1, whole.commits + 1):
            before_models, before_tools = self.effects("model"), self.effects("tool")
            cut = CutAdapter(self.make_adapter, at)
            await self._end(backend, cut, f"cut-{at}")
            asked = self.effects("model") - before_models
            # A request that was only announced was not made yet, and is made once.
            assert asked <= models, f"{asked} requests instead of {models} after commit {at}"
            assert self.effects("tool") - before_tools <= tools, f"a tool ran twice after commit {at}"

    async def test_settled_leaves_a_context_for_the_next_turn(self, backend: SessionBackend) -> None:
        """Settled: cancelled after any commit, the next Turn works; settling starts neither model nor tool."""
        whole = CutAdapter(self.make_adapter, 0)
        await self._end(backend, whole, "whole")
        for at in range(1, whole.commits):
            key = SessionKey("contract", f"settle-{at}")
            adapter = _CancelledAt(self.make_adapter, at, lambda: (self.effects("model"), self.effects("tool")))
            async with self.open_host(adapter) as runtime:
                session = await runtime.create_session(key, self.definition)
                await runtime.start()
                turn = await session.submit("r1", self.text)
                adapter.cancel.set_result(turn.cancel)
                view = await self._ended(backend, key, turn)
                # An answer that was under way may still win; anything else ends settled.
                assert view.status in (TurnStatus.CANCELLED, TurnStatus.COMPLETED), f"cancelled after commit {at}"
                cancelled = view.status is TurnStatus.CANCELLED
                assert bool(adapter.settlements) is cancelled, f"cancelled after commit {at}"
                if not cancelled:
                    assert at >= whole.commits - 2, f"a cancel after commit {at} was not heard"
                assert all(before == after for before, after in adapter.settlements), "settling had effects"
                following = await session.submit("r2", self.text)
                assert await following.wait(SECONDS), f"the turn after one cancelled after commit {at}"

    async def test_obedient_and_hides_no_abandonment(self, backend: SessionBackend) -> None:
        """Obedient: leaving a Run is never taken for a failed model or tool."""
        whole = CutAdapter(self.make_adapter, 0)
        await self._end(backend, whole, "whole")
        for at in range(1, whole.commits):
            key = SessionKey("contract", f"obedient-{at}")
            cut = CutAdapter(self.make_adapter, at)
            await self._end(backend, cut, key.session_id)
            async with self.open_host(self.make_adapter()) as runtime:
                session = runtime.get_session(key)
                (turn,) = (await session.list_turns()).items
                assert turn.recovery is None, f"a failure was recorded after commit {at}"

    # ---- restorable ----

    async def _settled(self, backend: SessionBackend) -> tuple[Any, list[NativeBaseline]]:
        """A Thread after two Turns, with a host that runs it, and its settled baselines."""
        key = ThreadKey(SessionKey("contract", "restorable"), MAIN_THREAD_ID)
        async with self.open_host(self.make_adapter()) as runtime:
            session = await runtime.create_session(key.session, self.definition)
            await runtime.start()
            for request_id in ("r1", "r2"):
                assert await session.call(request_id, self.text, SECONDS)
            thread = session.main_thread()
            positions = [checkpoint.position for checkpoint in await thread.checkpoints()]
        return key, [await self._baseline(backend, key, position) for position in positions]

    @staticmethod
    async def _baseline(backend: SessionBackend, thread: ThreadKey, position: str) -> NativeBaseline:
        at = stream_position(thread, position)
        stored: StoredCheckpoint = await backend.query(
            LoadCheckpoint(session=thread.session, thread_id=thread.thread_id, at=at), audience=Audience.HOST
        )
        rows = await backend.query(
            LoadThread(
                session=thread.session,
                thread_id=thread.thread_id,
                first=stored.base_at,
                last=at,
                digest=stored.digest,
            ),
            audience=Audience.HOST,
        )
        return NativeBaseline(
            source=thread, target=thread, binding=stored.binding, writer=stored.writer, rows=tuple(rows)
        )

    async def test_restorable_a_baseline_is_whole_and_nothing_is_run_for_it(self, backend: SessionBackend) -> None:
        """Restorable: the rows begin with a base, rebuild the same state, and cost no model and no tool."""
        _, baselines = await self._settled(backend)
        effects = self.effects("model"), self.effects("tool")
        adapter = self.make_adapter()
        assert len(baselines) == 2
        made = [tuple(adapter.restore(baseline)) for baseline in baselines]
        for baseline, rows in zip(baselines, made, strict=True):
            assert isinstance(rows[0], Base)
            assert tuple(self.make_adapter().restore(baseline)) == rows, "the same baseline gives the same rows"
            alone = replace(baseline, rows=(JournalRow(7, JournalBatch(6, (), rows, base=True).encode()),))
            assert tuple(adapter.restore(alone)) == rows, "the rows alone are the state"
        assert made[0] != made[1]
        assert (self.effects("model"), self.effects("tool")) == effects

    async def test_restorable_and_the_next_turn_can_use_it(self, backend: SessionBackend) -> None:
        """Restorable: a Thread that was restored, and one that was forked, run their next Turn."""
        key, _ = await self._settled(backend)
        async with self.open_host(self.make_adapter()) as runtime:
            await runtime.start()
            session = runtime.get_session(key.session)
            thread = session.main_thread()
            page = await thread.checkpoints()
            branch = await thread.fork(page.items[0].position, ThreadKey(key.session, "branch"), "fork")
            await thread.restore(page.items[0].position, page.current, "restore")
            for request_id, one in (("r3", thread), ("r4", branch)):
                assert await one.call(request_id, self.text, SECONDS)
                assert (await (await one.submit(request_id, self.text)).status()).status is TurnStatus.COMPLETED

    async def test_rebound_to_the_thread_that_gets_it(self, backend: SessionBackend) -> None:
        """Rebound: for another Thread the state names that one; for its own it is left as it was."""
        key, baselines = await self._settled(backend)
        adapter = self.make_adapter()
        other = ThreadKey(SessionKey("contract", "another session"), "branch")
        same, forked = adapter.restore(baselines[0]), adapter.restore(replace(baselines[0], target=other))
        assert self.owner_in(same) == self.owner_named(key)
        assert self.owner_in(forked) == self.owner_named(other) != self.owner_named(key)
        back = NativeBaseline(
            source=other,
            target=key,
            binding=baselines[0].binding,
            writer=baselines[0].writer,
            rows=(JournalRow(1, JournalBatch(0, (), tuple(forked), base=True).encode()),),
        )
        assert tuple(adapter.restore(back)) == tuple(same), "nothing else was changed"

    async def test_checked_what_cannot_be_continued_is_refused(self, backend: SessionBackend) -> None:
        """Checked: damaged rows and another state version are said to be that, and nothing else is raised."""
        _, baselines = await self._settled(backend)
        adapter, good = self.make_adapter(), baselines[0]
        first, *others = good.rows
        damaged = {
            "no rows": (),
            "without their base": tuple(others),
            "no batch": (JournalRow(first.at, b"{}"), *others),
            "an empty base": (JournalRow(first.at, JournalBatch(first.at - 1, (), (Base(),), base=True).encode()),),
            "a hole": (
                JournalRow(
                    first.at,
                    JournalBatch(first.at - 1, (), (Base(), Block(3, 0, msgspec.Raw(b"{}"))), base=True).encode(),
                ),
            ),
        }
        for what, rows in damaged.items():
            with pytest.raises(CorruptRecord):
                pytest.fail(f"{what}: {adapter.restore(replace(good, rows=rows))}")
        with pytest.raises(Incompatible):
            adapter.restore(replace(good, binding=replace(good.binding, state_version="another")))


class _CancelledAt(CutAdapter):
    """Cancels its first Turn right after one commit and lets the adapter go on; it should end the Run soon.

    Attributes:
        cancel: given by the test once the Turn exists; Runs wait for it.
        settlements: effects before and after each settlement.
    """

    def __init__(self, make: Callable[[], HarnessAdapter], at: int, effects: Callable[[], tuple[int, int]]) -> None:
        super().__init__(make, 0)
        self._cancel_at = at
        self._effects = effects
        self.cancel: asyncio.Future[Callable[[str], Awaitable[Any]]] = asyncio.get_running_loop().create_future()
        self.settlements: list[tuple[tuple[int, int], tuple[int, int]]] = []

    async def run(self, context: RunContext) -> RunEnd | None:
        await self.cancel
        return await self._make().run(cast("RunContext", _CancellingContext(context, self)))

    async def settle(self, context: SettleContext) -> Settlement:
        before = self._effects()
        settlement = await super().settle(context)
        self.settlements.append((before, self._effects()))
        return settlement

    async def after_commit(self) -> None:
        self.commits += 1
        if self.commits == self._cancel_at:
            await self.cancel.result()("cancel")


class _CancellingContext(_CutContext):
    _cut: _CancelledAt

    async def commit(self, step: CommitStep) -> StepReceipt:
        receipt = await self._context.commit(step)
        await self._cut.after_commit()
        return receipt
