"""A stage for adapter stories: a host without a scheduler, so that every commit of a Run is at a known place.

It claims, runs, performs external calls, answers questions and settles, each in one visible step, over a real backend.
`on_commit` sees every owner commit before and after it is made; a test may kill, raise, cancel or pause there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import Body, body_of
from agentscope_durable.contracts.errors import Fenced, InputsChanged
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.journal import JournalBatch
from agentscope_durable.contracts.messages import Input, Text, as_input, input_digest_value
from agentscope_durable.contracts.records import Binding, Failure
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import (
    Audience,
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    ReplayRule,
)
from agentscope_durable.contracts.views import RecoveryPolicy, TurnView
from agentscope_durable.domain import ids
from agentscope_durable.journal.checkpoint import fold, to_state_json
from agentscope_durable.spi.harness import Abandoned, HarnessAdapter, RunStart, SettleStart, StopCause
from agentscope_durable.stores.records.memory import MemoryRecordStore

SESSION = SessionKey("app", "conversation")
MAIN = "main"

OnCommit = Callable[[int, str, c.CommitStep], Awaitable[None] | None]
"""`on_commit(number, side, step)` with side `before` or `after`; what it returns is awaited."""


class StageContext:
    """A RunContext over a backend. One per Run."""

    def __init__(self, stage: Stage, claimed: c.Claimed) -> None:
        self._stage = stage
        self.claimed = claimed
        self.position = claimed.position
        self.base_at = claimed.base_at
        self.checkpoint_at = claimed.checkpoint_at
        self.stop: StopCause | None = StopCause("cancel") if claimed.cancel else None
        self.pause_requested = claimed.pause
        self.pending_inputs = 0
        self.ready_conditions = 0
        self.over = False
        self.ended: c.StepReceipt | None = None
        self.commits: list[c.CommitStep] = []
        self.previews: list[Any] = []
        self.watch_previews = True
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()
        self.start: RunStart = None  # type: ignore[assignment]

    async def begin(self) -> None:
        stage, claimed = self._stage, self.claimed
        view = await stage.view(claimed.turn_id)
        message = await stage.ask(q.GetMessage(session=stage.session, message_id=ids.input_message_id(claimed.turn_id)))
        self.pending_inputs = view.pending_inputs
        self.start = RunStart(
            session=stage.session,
            thread_id=stage.thread_id,
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            binding=stage.binding,
            request_id=view.request_id,
            input=Input(content=tuple(message.content)),
            input_message_id=message.id,
            number=claimed.run_number,
            resumed_from=claimed.resumed_from,
            reasoning=claimed.reasoning,
            attempt=claimed.attempt,
            position=claimed.position,
            base_at=claimed.base_at,
            checkpoint_at=claimed.checkpoint_at,
            takeover=claimed.lost_run != "",
        )

    def tell(self) -> None:
        self._changed.set()

    async def changed(self) -> None:
        _ = await self._changed.wait()
        self._changed.clear()

    async def journal(self) -> Any:
        return await self._stage.rows(self.base_at, self.checkpoint_at)

    async def open_work(self) -> Any:
        return await self._stage.work(self.claimed.turn_id)

    async def workspace(self) -> Any:
        return await self._stage.ask(q.GetWorkspace(session=self.start.session, thread_id=self.start.thread_id))

    async def workspace_entry(self, path: tuple[str, ...]) -> Any:
        start = self.start
        return await self._stage.ask(q.GetEntry(session=start.session, thread_id=start.thread_id, path=path))

    async def workspace_entries(
        self, namespace: tuple[str, ...], *, after: tuple[str, ...] = (), limit: int = 100
    ) -> Any:
        start = self.start
        return await self._stage.ask(
            q.ListEntries(
                session=start.session, thread_id=start.thread_id, namespace=namespace, after=after, limit=limit
            )
        )

    async def body(self, value: object) -> Body:
        return await self._stage.body(value)

    async def open_body(self, body: Body) -> Any:
        return await self._stage.open_body(body)

    async def commit(self, step: c.CommitStep) -> c.StepReceipt:
        async with self._lock:
            if self.over:
                raise Abandoned
            stage = self._stage
            step = replace(step, expected_position=self.position)
            stage.commits += 1
            number = stage.commits
            await _told(stage.on_commit(number, "before", step))
            try:
                receipt: c.StepReceipt = await stage.execute(step)
            except Fenced as error:
                self.over = True
                raise Abandoned from error
            self.commits.append(step)
            self.position = receipt.position
            if step.checkpoint:
                self.checkpoint_at = receipt.position
                if step.base:
                    self.base_at = receipt.position
            if receipt.cancel:
                self.stop = self.stop or StopCause("cancel")
            self.pause_requested = receipt.pause
            self.pending_inputs = receipt.inputs
            self.ready_conditions = receipt.ready
            if receipt.ended:
                self.over, self.ended = True, receipt
            await _told(stage.on_commit(number, "after", step))
            self.tell()
            return receipt

    def wants_previews(self) -> bool:
        return self.watch_previews

    def preview(self, preview: Any) -> None:
        self.previews.append(preview)

    def cache_get(self) -> Any:
        kept = self._stage.cache
        self._stage.cache = None
        return kept[1] if kept is not None and kept[0] == self.checkpoint_at else None

    def cache_put(self, value: Any, size_bytes: int) -> None:
        assert size_bytes > 0
        if self._stage.caching:
            self._stage.cache = (self.checkpoint_at, value)


async def _told(waits: Awaitable[None] | None) -> None:
    if waits is not None:
        await waits


class SettleContextOf:
    def __init__(self, stage: Stage, start: SettleStart) -> None:
        self._stage = stage
        self.start = start

    async def input(self) -> Input:
        question = q.GetMessage(session=self._stage.session, message_id=self.start.input_message_id)
        return Input(content=tuple((await self._stage.ask(question)).content))

    async def journal(self) -> Any:
        return await self._stage.rows(self.start.base_at, self.start.checkpoint_at)

    async def open_body(self, body: Body) -> Any:
        return await self._stage.open_body(body)


class Stage:
    """One Thread of one Session, and a host that does one thing at a time.

    Args:
        adapter: makes the adapter of each Run, as a new process would.
        results: what external and manual tools return, by tool name; a callable is called with the arguments' text.
        approve: the answer to each approval, by tool name and call; arguments approve the call with these.
        pick: which of the open questions is answered next.
        on_commit: see the top of this file.
    """

    def __init__(
        self,
        adapter: Callable[[], HarnessAdapter],
        *,
        backend: TransactionalSessionBackend | None = None,
        session: SessionKey = SESSION,
        thread_id: str = MAIN,
        results: Mapping[str, Any] | None = None,
        approve: Callable[[str, str], bool | dict[str, Any] | None] = lambda _name, _call_id: True,
        pick: Callable[[list[Any]], Any] = lambda questions: questions[0],
        on_commit: OnCommit = lambda _number, _side, _step: None,
        caching: bool = False,
    ) -> None:
        self.backend = backend or TransactionalSessionBackend(MemoryRecordStore())
        self.make_adapter = adapter
        self.session = session
        self.thread_id = thread_id
        self.results = dict(results or {})
        self.approve = approve
        self.pick = pick
        self.on_commit = on_commit
        self.caching = caching
        self.cache: tuple[int, Any] | None = None
        self.binding = Binding("assistant", "v1", "agentscope-thread-journal-v2")
        self.commits = 0
        self.owners = 0
        self.contexts: list[StageContext] = []
        self.errors: list[BaseException] = []
        self.on_run: Callable[[StageContext], Awaitable[None]] | None = None
        self.name = "host"

    # ---- plain access ----

    async def execute(self, command: Any) -> Any:
        return await self.backend.execute(command, audience=Audience.OPERATOR)

    async def ask(self, question: Any) -> Any:
        return await self.backend.query(question, audience=Audience.OPERATOR)

    async def body(self, value: object) -> Body:
        return await self.backend.put_body(self.session, msgspec.json.encode(durable_json.value(value)))

    async def open_body(self, body: Body) -> Any:
        return msgspec.json.decode(await self.backend.open_body(self.session, body))

    async def rows(self, first: int, last: int) -> Any:
        if not first:
            return []
        return await self.ask(q.LoadThread(session=self.session, thread_id=self.thread_id, first=first, last=last))

    async def work(self, turn_id: str) -> Any:
        return await self.ask(q.OpenWork(session=self.session, thread_id=self.thread_id, turn_id=turn_id))

    async def view(self, turn_id: str) -> TurnView:
        return await self.ask(q.GetTurn(session=self.session, thread_id=self.thread_id, turn_id=turn_id))

    async def turns(self) -> list[TurnView]:
        return list((await self.ask(q.ListTurns(session=self.session, thread_id=self.thread_id, limit=1000))).items)

    async def events(self) -> list[Any]:
        return list((await self.ask(q.ListEvents(session=self.session, limit=1000))).events)

    async def messages(self) -> list[Any]:
        return list((await self.ask(q.GetHistory(session=self.session, limit=1000))).items)

    async def tools(self, turn_id: str) -> list[Any]:
        return list(await self.ask(q.ListTools(session=self.session, thread_id=self.thread_id, turn_id=turn_id)))

    async def runs(self, turn_id: str) -> list[Any]:
        return list((await self.ask(q.ListRuns(session=self.session, thread_id=self.thread_id, turn_id=turn_id))).items)

    async def model_calls(self, turn_id: str, run_id: str | None = None) -> list[Any]:
        found: list[Any] = []
        for run in await self.runs(turn_id):
            if run_id is None or run.run_id == run_id:
                found += (
                    await self.ask(
                        q.ListModelCalls(
                            session=self.session,
                            thread_id=self.thread_id,
                            turn_id=turn_id,
                            run_id=run.run_id,
                            limit=1000,
                        )
                    )
                ).items
        return found

    async def steps(self, turn_id: str, run_id: str) -> list[Any]:
        return list(
            (
                await self.ask(
                    q.ListSteps(
                        session=self.session, thread_id=self.thread_id, turn_id=turn_id, run_id=run_id, limit=1000
                    )
                )
            ).items
        )

    async def files(self) -> dict[str, Any]:
        """Value and version of each entry of the Thread's workspace."""
        question = q.ListEntries(session=self.session, thread_id=self.thread_id, limit=1000)
        found: dict[str, Any] = {}
        for listed in await self.ask(question):
            entry = await self.ask(q.GetEntry(session=self.session, thread_id=self.thread_id, path=listed.path))
            found["/".join(entry.path)] = [await self.open_body(entry.content), entry.version]
        return found

    async def state(self) -> Any:
        """The native state as it is stored now."""
        from agentscope.state import AgentState

        return AgentState.model_validate_json(to_state_json(fold(await self.batches())))

    async def batches(self) -> list[tuple[int, JournalBatch]]:
        rows = await self.rows(1, 1 << 40)
        return [(row.at, JournalBatch.decode(row.journal, position=row.at)) for row in rows if row.journal]

    # ---- the user ----

    async def open(self) -> None:
        await self.execute(c.CreateSession(session=self.session, binding=self.binding))
        if self.thread_id != MAIN:
            await self.execute(c.CreateThread(session=self.session, thread_id=self.thread_id, binding=self.binding))

    async def submit(self, request_id: str, text: str | Input) -> str:
        document: Any = input_digest_value(as_input(text))
        admitted = await self.execute(
            c.SubmitTurn(
                session=self.session,
                thread_id=self.thread_id,
                request_id=request_id,
                content=await self.body(document["content"]),
                digest=durable_json.digest(document),
            )
        )
        return admitted.turn_id

    async def add(self, kind: str, turn_id: str, request_id: str, text: str) -> None:
        document: Any = input_digest_value(as_input(Input(content=(Text(text),))))
        await self.execute(
            c.AddInput(
                session=self.session,
                thread_id=self.thread_id,
                request_id=request_id,
                turn_id=turn_id,
                kind=kind,
                content=await self.body(document["content"]),
                digest=durable_json.digest(document),
            )
        )
        await self._observe(turn_id)

    async def withdraw(self, turn_id: str, target: str) -> None:
        await self.execute(
            c.Withdraw(
                session=self.session,
                thread_id=self.thread_id,
                request_id=f"withdraw-{target}",
                turn_id=turn_id,
                target_request_id=target,
            )
        )

    async def cancel(self, turn_id: str) -> None:
        await self.execute(
            c.Cancel(session=self.session, thread_id=self.thread_id, request_id="cancel", turn_id=turn_id)
        )
        await self._observe(turn_id)

    async def pause(self, turn_id: str) -> None:
        await self.execute(
            c.Pause(session=self.session, thread_id=self.thread_id, request_id=f"pause{self.commits}", turn_id=turn_id)
        )
        await self._observe(turn_id)

    async def resume(self, turn_id: str) -> None:
        view = await self.view(turn_id)
        await self.execute(
            c.Resume(
                session=self.session,
                thread_id=self.thread_id,
                request_id=f"resume{view.revision}",
                turn_id=turn_id,
                expected_revision=view.revision,
            )
        )

    async def _observe(self, turn_id: str) -> None:
        """What a host would see of a control a moment later."""
        context = self.contexts[-1] if self.contexts else None
        if context is None or context.over or context.claimed.turn_id != turn_id:
            return
        view = await self.view(turn_id)
        if view.cancel_requested and context.stop is None:
            context.stop = StopCause("cancel")
        context.pause_requested = view.status == "PAUSING"
        context.pending_inputs = view.pending_inputs
        context.tell()

    async def answer(self, turn_id: str, interaction: Any, value: Any, arguments: Any = None) -> None:
        body = await self.body(value)
        edited = None if arguments is None else msgspec.json.encode(arguments).decode()
        await self.execute(
            c.Respond(
                session=self.session,
                thread_id=self.thread_id,
                request_id=f"answer-{interaction.interaction_id}",
                turn_id=turn_id,
                interaction_id=interaction.interaction_id,
                response=body,
                digest=durable_json.digest(durable_json.value(value)),
                content=body_of([{"type": "text", "text": str(value)}]),
                result=await self.body(msgspec.to_builtins(ToolResult(value=value))),
                is_bool=isinstance(value, bool),
                approved=value is True,
                arguments=None if edited is None else await self.body(edited),
                arguments_digest=edited or "",
            )
        )

    # ---- the host ----

    async def claim(self) -> c.Claimed:
        self.owners += 1
        owner = f"{self.name}-{self.owners}"
        self.backend.records.renew(owner, 3_600_000, b"")
        # In this stage whoever came before is gone.
        dead = tuple(f"{self.name}-{number}" for number in range(1, self.owners))
        return await self.execute(
            c.Claim(
                session=self.session,
                thread_id=self.thread_id,
                owner=owner,
                served=(self.binding.ready_class,),
                dead=(*dead, *self.former),
            )
        )

    former: tuple[str, ...] = ()

    async def step(self) -> bool:
        """Claim and do what there is to do; False when there was nothing."""
        claimed = await self.claim()
        if claimed.purpose is c.ClaimPurpose.NOTHING:
            return claimed.turn_id != ""
        if claimed.purpose is c.ClaimPurpose.SETTLE:
            return await self._settle(claimed)
        return await self._run(claimed)

    async def _run(self, claimed: c.Claimed) -> bool:
        context = StageContext(self, claimed)
        self.contexts.append(context)
        await context.begin()
        if self.on_run is not None:
            await self.on_run(context)
        adapter = self.make_adapter()
        end: c.RunEnd | None
        try:
            end = await adapter.run(context)  # type: ignore[arg-type]
        except Abandoned:
            context.over = True
            return True
        except Exception as error:
            self.errors.append(error)
            self.cache = None
            if context.over:
                return True
            retry = adapter.classify(error) is True
            failure = Failure(type(error).__name__, str(error)[:500], retryable=retry)
            end = c.RunEnd(
                kind=c.RunEndKind.FAILED, failure=failure, policy=RecoveryPolicy(max_retries=3, initial_backoff_ms=0)
            )
        if context.ended is None:
            assert end is not None, "the adapter said that its last commit ended the run"
            try:
                await context.commit(
                    c.CommitStep(
                        session=self.session,
                        thread_id=self.thread_id,
                        turn_id=claimed.turn_id,
                        run_id=claimed.run_id,
                        fence=claimed.fence,
                        expected_position=context.position,
                        end=end,
                    )
                )
            except Abandoned:
                context.over = True
                return True
        if end is not None and end.kind is c.RunEndKind.CANCELLED:
            after = replace(
                claimed,
                position=context.position,
                base_at=context.base_at,
                checkpoint_at=context.checkpoint_at,
                run_id="",
            )
            return await self._settle(after)
        return True

    async def _settle(self, claimed: c.Claimed) -> bool:
        work = await self.work(claimed.turn_id)
        postpone = c.PostponeSettlement(
            session=self.session,
            thread_id=self.thread_id,
            turn_id=claimed.turn_id,
            run_id="",
            fence=claimed.fence,
        )
        open_states = (ExecutionState.INTENT, ExecutionState.RUNNING, ExecutionState.UNKNOWN)
        for record in work.executions:
            safe = record.kind is ExecutionKind.LOCAL and record.rule is ReplayRule.SAFE
            if record.kind is not ExecutionKind.MANUAL and not safe and record.state in open_states:
                await self.execute(postpone)
                return False
        view = await self.view(claimed.turn_id)
        start = SettleStart(
            session=self.session,
            thread_id=self.thread_id,
            turn_id=claimed.turn_id,
            binding=self.binding,
            cancelled=view.cancel_requested,
            position=claimed.position,
            base_at=claimed.base_at,
            checkpoint_at=claimed.checkpoint_at,
            executions=work.executions,
            input_message_id=ids.input_message_id(claimed.turn_id),
        )
        self.cache = None
        settled = await self.make_adapter().settle(SettleContextOf(self, start))  # type: ignore[arg-type]
        await self.execute(
            c.SettleTurn(
                session=self.session,
                thread_id=self.thread_id,
                turn_id=claimed.turn_id,
                run_id="",
                fence=claimed.fence,
                expected_position=claimed.position,
                journal=settled.journal,
                checkpoint=settled.checkpoint,
                base=settled.base,
                writer=settled.writer,
                applied=settled.applied,
            )
        )
        if settled.after is not None:
            await settled.after()
        return True

    # ---- the world outside ----

    async def serve(self, turn_id: str, *, limit: int = 100) -> bool:
        """Perform one external call or answer one question of the Turn; False when nothing waits."""
        work = await self.work(turn_id)
        for record in work.executions:
            if record.kind is ExecutionKind.EXTERNAL and not record.state.terminal and record.state != "UNKNOWN":
                return await self.perform(turn_id, record.call_id)
        questions = [question for question in work.interactions if question.state == "PENDING"]
        while questions:
            question = self.pick(questions)
            questions.remove(question)
            answer: Any = None
            if question.kind is not InteractionKind.APPROVAL:
                await self.answer(turn_id, question, self._result(question.name, ""))
                return True
            answer = self.approve(question.name, question.call_id)
            if answer is not None:
                edited = answer if isinstance(answer, dict) else None
                await self.answer(turn_id, question, edited is not None or answer, edited)
                return True
        return False

    def _result(self, name: str, arguments: str) -> Any:
        found = self.results.get(name, f"{name} done")
        return found(arguments) if callable(found) else found

    async def perform(self, turn_id: str, call_id: str) -> bool:
        grant = await self.execute(
            c.ClaimExecution(
                session=self.session, thread_id=self.thread_id, turn_id=turn_id, call_id=call_id, owner="hands"
            )
        )
        if grant.action is c.ExecutionAction.NOTHING:
            return False
        arguments = await self.open_body(grant.arguments)
        result = self._result(grant.name, arguments)
        if not isinstance(result, ToolResult):
            result = ToolResult(value=result)
        await self.execute(
            c.RecordOutcome(
                session=self.session,
                thread_id=self.thread_id,
                turn_id=turn_id,
                call_id=call_id,
                execution_id=grant.execution_id,
                state=ExecutionState.COMPLETED,
                result=await self.body(msgspec.to_builtins(result)),
            )
        )
        return True

    async def reconcile(self, turn_id: str, call_id: str, result: ToolResult, state: str = "COMPLETED") -> None:
        await self.execute(
            c.ReconcileTool(
                session=self.session,
                thread_id=self.thread_id,
                turn_id=turn_id,
                call_id=call_id,
                request_id=f"reconcile-{call_id}",
                state=ExecutionState(state),
                result=await self.body(msgspec.to_builtins(result)),
                digest="evidence",
                evidence_ref="test",
            )
        )

    async def play(self, turn_id: str, *, rounds: int = 60) -> TurnView:
        """Run, perform and answer until the Turn has ended or nothing more happens."""
        for _ in range(rounds):
            view = await self.view(turn_id)
            if view.status.terminal:
                return view
            if await self.step():
                continue
            if not await self.serve(turn_id):
                return await self.view(turn_id)
        raise AssertionError(f"turn {turn_id} does not come to an end")


async def opened(adapter: Callable[[], HarnessAdapter], **options: Any) -> Stage:
    stage = Stage(adapter, **options)
    await stage.open()
    return stage


# ------------------------------------------------------------ what is expected of any transcript


def check_transcript(state: Any) -> None:
    """S3: each call is followed by exactly one result, in the same message, and no result is without its call."""
    for message in state.context:
        open_calls: set[str] = set()
        for block in message.content:
            if block.type == "tool_call":
                assert block.id not in open_calls, f"call {block.id} is open twice"
                open_calls.add(block.id)
            elif block.type == "tool_result":
                assert block.id in open_calls, f"result {block.id} has no call"
                open_calls.discard(block.id)
        assert not open_calls, f"calls without a result: {open_calls}"


def shape(state: Any) -> list[Any]:
    """A state without what differs between two equal conversations: ids of blocks, and times."""
    return [
        (
            message.role,
            [
                (
                    block.type,
                    getattr(block, "id", "") if block.type in ("tool_call", "tool_result") else "",
                    str(getattr(block, "state", "")),
                    getattr(block, "text", None) or getattr(block, "thinking", None) or getattr(block, "input", None),
                    _output(block),
                )
                for block in message.content
                if block.type != "hint" or not str(block.source).startswith('{"label": "System", "sublabel": "Runtime')
            ],
            None if message.usage is None else message.usage.model_dump(),
        )
        for message in state.context
    ]


def _output(block: Any) -> Any:
    output = getattr(block, "output", None)
    if isinstance(output, list):
        return [getattr(part, "text", part.type) for part in output]
    return output


def texts(state: Any, role: str = "assistant") -> list[str]:
    return [
        block.text
        for message in state.context
        if message.role == role
        for block in message.content
        if block.type == "text"
    ]


def of_type(events: Sequence[Any], kind: str) -> list[Any]:
    return [event for event in events if event.type == kind]


__all__ = [
    "MAIN",
    "SESSION",
    "InputsChanged",
    "Stage",
    "StageContext",
    "check_transcript",
    "of_type",
    "opened",
    "shape",
    "texts",
]
