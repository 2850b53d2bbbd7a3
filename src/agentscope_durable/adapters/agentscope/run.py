"""A Run from what is stored to its next boundary: load, build the agent, drive it, say how it ended.

Rule 1: recovery starts from the state and goes through AgentScope's own loop. Nothing of the loop is written again
here; where it would start a new reply, ask a model again or forget a round, the middlewares put it right.
Rule 2: why a Run stops is data (C30). A `CancelledError` is what this file sends, or what its caller sends, and never
read as a reason.
Rule 3: what comes before a drive may take as long as the application's factory, a state store or a large body likes. It
is broken off at once when the Run has to stop (C23).
Rule 4: a drive that was interrupted leaves an agent that nobody uses again. The next Run builds another one from the
last commit.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from agentscope_durable.adapters.agentscope.agent_workspace import agent_workspace
from agentscope_durable.adapters.agentscope.binding import Binding, Factory, RuntimeContext
from agentscope_durable.adapters.agentscope.calls import Calls, unfinished_calls
from agentscope_durable.adapters.agentscope.codec import public_content, user_message
from agentscope_durable.adapters.agentscope.directory import (
    WorkspaceGone,
    check_directory,
    directory_of,
    is_there,
)
from agentscope_durable.adapters.agentscope.halts import Halt, HaltInTool, OutcomeUnknown
from agentscope_durable.adapters.agentscope.increments import Increment, Message, RecordingFailed, entry
from agentscope_durable.adapters.agentscope.inner import inner_middleware
from agentscope_durable.adapters.agentscope.intake import take_in
from agentscope_durable.adapters.agentscope.invocation import Invocation
from agentscope_durable.adapters.agentscope.mirror import Mirror
from agentscope_durable.adapters.agentscope.native import Native, load_native, native_session_id, new_native
from agentscope_durable.adapters.agentscope.outer import outer_middleware
from agentscope_durable.adapters.agentscope.receipts import receipted_offloader
from agentscope_durable.adapters.agentscope.settle import needs_pairing, pair_calls
from agentscope_durable.adapters.agentscope.tools import ToolBinding, bind_toolkit
from agentscope_durable.adapters.agentscope.workspace import DurableWorkspace
from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import RunEnd, RunEndKind
from agentscope_durable.contracts.errors import AgentFactoryError, Misuse, Unavailable, leaves
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, ThreadKey
from agentscope_durable.contracts.journal import JournalEventType
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, InteractionState, ReplayRule
from agentscope_durable.journal.models import ModelCallPolicy, ModelRequestObserver
from agentscope_durable.journal.position import ExecutionPhase, FinalAnswer
from agentscope_durable.journal.scheduling import Channels
from agentscope_durable.spi.boundary import end_of, stopped, unless_stopped
from agentscope_durable.spi.contained import give_up
from agentscope_durable.spi.environment import Environment
from agentscope_durable.spi.harness import Abandoned, RunContext, StopCause

__all__ = ["ReplyInterrupted", "Run", "Setup"]

T = TypeVar("T")

DRAIN_SECONDS: Final = 2.0
"""How long a request to a model may go on when the host closes, before it is given up and asked again elsewhere."""


class ReplyInterrupted(Unavailable):
    """AgentScope ended the reply as interrupted by the user, and no user did."""

    def __init__(self) -> None:
        super().__init__("the reply was interrupted by a cancellation that nobody asked for")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all Runs of an adapter share."""

    factory: Factory
    bindings: Mapping[str, ToolBinding]
    rules: Mapping[str, ReplayRule]
    version: str
    channels: Channels
    environment: Environment
    policy: ModelCallPolicy | None
    observer: ModelRequestObserver | None
    mirror: Mirror | None


@dataclass(frozen=True)
class _Drive:
    """One call of the agent's `reply_stream`."""

    inputs: Any
    schema: Any = None


class Run:
    """One Run of a Turn. Used once."""

    def __init__(self, setup: Setup, context: RunContext) -> None:
        self._setup = setup
        self._context = context
        self._run: Invocation = None  # type: ignore[assignment]
        self._agent: Any = None
        self._schema: Any = None
        self._workspace: DurableWorkspace | None = None
        self._first = True
        # What a factory sets is seen by the agent it describes, though each is awaited in a task of its own.
        self._variables = contextvars.copy_context()

    async def run(self) -> RunEnd | None:
        """See `HarnessAdapter.run`."""
        try:
            return await self._go()
        except RecordingFailed as failed:
            raise failed.error from failed
        finally:
            if self._workspace is not None:
                self._workspace.close()

    async def _go(self) -> RunEnd | None:
        try:
            broken_off = await self._unless_stopped(self._prepare, "make an agent")
        except WorkspaceGone as gone:
            return RunEnd(kind=RunEndKind.SUSPENDED, operator=str(gone))
        if broken_off is not None:
            return broken_off
        while True:
            end = stopped(self._context)
            if end is not None:
                return end
            if self._ended_before():
                if await self._finish(self._run.position.final, None):
                    return None
                self._reopen()
            drive = await self._unless_stopped(self._next_drive, "take in what has come")
            self._first = False
            if drive is None:
                return RunEnd(kind=RunEndKind.SUSPENDED)
            if isinstance(drive, RunEnd):
                return drive
            end, over = await self._drive(drive)
            if over:
                return end

    async def _unless_stopped(self, work: Callable[[], Awaitable[T]], what: str) -> T | RunEnd:
        name = f"{what} {self._context.start.run_id}"
        return await unless_stopped(self._context, work, name=name, variables=self._variables)

    # ------------------------------------------------------------ load

    async def _prepare(self) -> None:
        await self._build(await self._load())

    async def _load(self) -> Native:
        kept = self._context.cache_get()
        if isinstance(kept, Native):
            return kept
        return load_native(await self._context.journal(), installed=self._setup.version)

    async def _build(self, native: Native) -> None:
        """Make this Run's agent (AS-03)."""
        from agentscope.agent import Agent
        from agentscope.middleware import MiddlewareBase
        from agentscope.tool import Toolkit

        start, setup = self._context.start, self._setup
        runtime = RuntimeContext(
            user_id=start.session.namespace,
            session_id=start.session.session_id,
            thread_id=start.thread_id,
            turn_id=start.turn_id,
            run_id=start.run_id,
        )
        noted = native.position.directory
        there = await is_there(noted, setup.environment)
        workspace = self._workspace = DurableWorkspace(self._context)
        described = await setup.factory.describe(
            Binding(start.binding, runtime, workspace), agent_name="" if native.state is None else native.position.agent
        )
        directory = directory_of(described.workspace)
        await check_directory(noted, there, directory, setup.environment)
        arguments = dict(described.arguments)
        home = agent_workspace(described.workspace)
        template = arguments.pop("state", None)
        imported = False
        if native.state is None:
            native, imported = await self._first_state(native, template)
        name = str(arguments["name"])
        native.position.agent = name
        native.position.directory = directory or noted
        toolkit = arguments.pop("toolkit", None) or Toolkit()
        await _equip(toolkit, home)
        missing = bind_toolkit(toolkit, setup.bindings)
        if missing:
            raise AgentFactoryError(
                start.binding.harness, f"tool {missing[0]!r} is bound to a route, and there is no tool of that name"
            )
        calls = Calls(start.turn_id, name, self._route_of)
        invocation = Invocation(
            self._context,
            native,
            name=name,
            writer=setup.version,
            environment=setup.environment,
            channels=setup.channels,
            rules=setup.rules,
            calls=calls,
            workspace=workspace,
            policy=setup.policy,
            observer=setup.observer,
        )
        middlewares = list(arguments.pop("middlewares", None) or ())
        invocation.models_may_change = any(
            type(middleware).on_model_call is not MiddlewareBase.on_model_call for middleware in middlewares
        )
        offloader = agent_workspace(arguments.pop("offloader", None)) or home
        if offloader is not None:
            offloader = receipted_offloader(offloader, invocation)
        arguments["model"] = invocation.models.observed(arguments["model"])
        self._run, self._schema = invocation, described.structured_schema
        invocation.structured_schema = self._schema
        try:
            agent = Agent(
                **arguments,
                toolkit=toolkit,
                offloader=offloader,
                middlewares=[outer_middleware(invocation), *middlewares, inner_middleware(invocation)],
                state=native.state,
            )
        except Exception as error:
            raise AgentFactoryError(start.binding.harness, f"{type(error).__name__}: {error}") from error
        self._agent = invocation.agent = agent
        runtime.execution_host = invocation
        if imported:
            await self._commit_baseline()
        await self._take_up()

    def _route_of(self, name: str) -> str | None:
        bound = self._setup.bindings.get(name)
        return None if bound is None else bound.route

    async def _first_state(self, native: Native, template: Any) -> tuple[Native, bool]:
        """The state of a Thread that has none: what a program without a journal left behind, or a new one (AS-21)."""
        start, mirror = self._context.start, self._setup.mirror
        # A named Thread never had another place (AS-22).
        if start.thread_id == MAIN_THREAD_ID and mirror is not None:
            state = await mirror.first_state(start.session, installed=self._setup.version)
            if state is not None:
                # A reply that was under way there goes on with nobody: its calls are closed, as they were never made.
                return Native(state=state, mirrored=not pair_calls(state, {})), True
        return new_native(native_session_id(ThreadKey(start.session, start.thread_id)), template), False

    async def _commit_baseline(self) -> None:
        told = Increment(entries=[entry(JournalEventType.MIGRATION_BASELINE, messages=len(self._run.state.context))])
        told.merge(self._run.position_rows())
        _ = await self._run.commit(told)

    async def _take_up(self) -> None:
        """Learn what is stored of the Turn beside the state, and prepare to go on where it stands."""
        run, native, start = self._run, self._run.native, self._context.start
        if native.position.turn_id != start.turn_id:
            run.begin_turn()
            if not native.mirrored:
                # What the Turn before it settled, before anything of this one is in it.
                await self._mirror()
            native.mirrored = False
            if needs_pairing(run.state, run.name):
                _ = pair_calls(run.state, {})
            run.calls.begin(run.state)
            return
        if native.position.phase in (ExecutionPhase.REASONING, ExecutionPhase.ANSWERED):
            run.anchor = native.take_anchor()
        run.calls.adopt(run.state)
        await self._learn()
        for block in unfinished_calls(run.state, run.name):
            if str(block.state) != "allowed":
                continue
            known = run.calls.known.get(block.id)
            if known is None or not run.calls.was_started(block.id):
                # Approved or running, says the state, and no record of ours says that it was started: ask again.
                block.state = "asking" if known is not None and known.interaction_id else "pending"
            elif known.state is ExecutionState.UNKNOWN or (
                known.state is ExecutionState.RUNNING and known.kind is not ExecutionKind.LOCAL
            ):
                block.state = "submitted"

    async def _learn(self) -> None:
        """Take in outcomes and answers that are stored and not applied."""
        work = await self._context.open_work()
        executions: list[tuple[Any, Any]] = []
        for record in work.executions:
            known = self._run.calls.known.get(record.call_id)
            wanted = record.result is not None and (known is None or known.result is None)
            executions.append(
                (record, await self._context.open_body(record.result) if wanted and record.result else None)
            )
        interactions: list[tuple[Any, Any, str | None]] = []
        for question in work.interactions:
            answered = question.state is InteractionState.RESOLVED
            response = await self._opened(question.response) if answered else None
            interactions.append((question, response, await self._opened(question.edited) if answered else None))
        self._run.calls.learn(executions, interactions)

    async def _opened(self, body: Body | None) -> Any:
        return None if body is None else await self._context.open_body(body)

    # ------------------------------------------------------------ what to drive next

    def _ended_before(self) -> bool:
        """The reply is complete, only the Turn has not ended: a pause or an input came in between."""
        position = self._run.position
        return self._first and position.phase is ExecutionPhase.ENDED and position.final is not None

    def _reopen(self) -> None:
        self._run.reopen()

    async def _next_drive(self) -> _Drive | None:
        """How the agent goes on; None when everything it waits for is outside."""
        run, state = self._run, self._run.state
        if run.position.phase is ExecutionPhase.READY and self._first:
            start = self._context.start
            return _Drive(user_message(start.input, start.input_message_id), self._schema)
        if run.anchor is not None:
            run.saved_reply = state.reply_context
            return _Drive(None)
        if not self._first:
            await self._learn()
        awaiting = list(state.get_awaiting_tool_calls(run.name))
        answers, results = run.calls.deliverable(awaiting)
        if answers:
            return self._answer(awaiting, answers)
        if results:
            return await self._deliver(awaiting, results)
        unfinished = unfinished_calls(state, run.name)
        if awaiting:
            if self._first and any(str(block.state) == "allowed" for block in unfinished):
                # A nudge: local tools go on while others still wait.
                return self._nudge(awaiting)
            return None
        if not self._first and not run.reopened:
            return None
        run.reopened = False
        self._count_round(closed=set())
        run.applying()
        run.saved_reply = state.reply_context
        return _Drive(None)

    def _answer(self, awaiting: Iterable[Any], answers: Mapping[str, bool]) -> _Drive:
        from agentscope.event import ConfirmResult, UserConfirmResultEvent

        run = self._run
        self._count_round(closed={call_id for call_id, yes in answers.items() if not yes})
        run.applying()

        def answered(block: Any) -> Any:
            # AgentScope takes name and input of the call from here.
            edited = run.calls.edited(block.id)
            return block if edited is None else block.model_copy(update={"input": edited})

        return _Drive(
            UserConfirmResultEvent(
                reply_id=run.state.reply_id,
                confirm_results=[
                    ConfirmResult(confirmed=answers[block.id], tool_call=answered(block))
                    for block in awaiting
                    if block.id in answers
                ],
            )
        )

    async def _deliver(self, awaiting: Iterable[Any], results: Mapping[str, ToolResult]) -> _Drive:
        from agentscope.event import ExternalExecutionResultEvent

        blocks = [
            await take_in(self._agent, block.id, block.name, results[block.id])
            for block in awaiting
            if block.id in results
        ]
        self._count_round(closed=set(results))
        self._run.applying()
        return _Drive(ExternalExecutionResultEvent(reply_id=self._run.state.reply_id, execution_results=blocks))

    def _nudge(self, awaiting: Iterable[Any]) -> _Drive:
        from agentscope.event import ExternalExecutionResultEvent, UserConfirmResultEvent

        self._run.applying()
        reply_id = self._run.state.reply_id
        if any(str(block.state) == "submitted" for block in awaiting):
            return _Drive(ExternalExecutionResultEvent(reply_id=reply_id, execution_results=[]))
        return _Drive(UserConfirmResultEvent(reply_id=reply_id, confirm_results=[]))

    def _count_round(self, *, closed: set[str]) -> None:
        """AgentScope counts a round when its own loop closes it, and so never one that ends outside the loop."""
        run, state = self._run, self._run.state
        if run.position.phase is not ExecutionPhase.ACTING or state.cur_iter != run.position.iteration:
            return
        unfinished = {block.id for block in unfinished_calls(state, run.name)}
        if unfinished <= closed:
            state.cur_iter += 1

    # ------------------------------------------------------------ drive

    async def _drive(self, drive: _Drive) -> tuple[RunEnd | None, bool]:
        """One drive. Returns the end and whether the Run is over; (None, True) when a commit contained the end."""
        run = self._run
        run.reply_end = run.final = None
        task = asyncio.create_task(self._consume(drive), name=f"agent {run.run_id}", context=self._variables)
        try:
            await self._watch(task)
        except asyncio.CancelledError:
            run.abandon()
            run.interrupted = True
            _ = await give_up(task)
            raise
        stop = run.stopping
        if run.failure is not None:
            _ = task.cancelled() or task.exception()
            raise run.failure
        try:
            task.result()
        except BaseException as error:  # noqa: BLE001 - what it means is looked up, and nothing of it is lost
            return await self._raised(error, stop)
        if stop is not None:
            return await self._stopped_by(stop), True
        if run.reply_end is None:
            return await self._park()
        if str(run.reply_end.finished_reason) == "interrupted":
            raise ReplyInterrupted
        final, message = self._final(str(run.reply_end.finished_reason), run.final)
        if await self._finish(final, message):
            return None, True
        # An input that reopens the answer came in between.
        run.reopened = True
        self._reopen()
        return None, False

    async def _consume(self, drive: _Drive) -> None:
        stream = self._agent.reply_stream(drive.inputs, structured_schema=drive.schema, yield_final_msg=True)
        async for _ in stream:
            pass

    async def _watch(self, task: asyncio.Task[None]) -> None:
        """Wait for the drive; interrupt it when the Run has to stop, or when nothing more can be committed."""
        run = self._run
        changed: asyncio.Task[None] | None = None
        broken = asyncio.create_task(run.broken.wait(), name=f"broken {run.run_id}")
        try:
            while not task.done():
                if changed is None or changed.done():
                    changed = asyncio.create_task(self._context.changed(), name=f"changed {run.run_id}")
                waited: set[asyncio.Task[Any]] = {task, changed}
                if not broken.done():
                    waited.add(broken)
                _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if task.done():
                    return
                if broken.done() and not run.interrupted:
                    # A tool that still runs would keep its whole batch, and nothing it does can be told any more.
                    run.interrupted = True
                    _ = task.cancel()
                stop = self._context.stop
                if stop is not None and stop != run.stopping:
                    run.stopping = stop
                    await self._interrupt(task, stop)
        finally:
            for waiting in (changed, broken):
                if waiting is not None and not waiting.done():
                    _ = waiting.cancel()
                    _ = await asyncio.wait({waiting})

    async def _interrupt(self, task: asyncio.Task[None], stop: StopCause) -> None:
        run = self._run
        if stop.kind == "drain":
            # The answer may be there in a moment; a tool cannot be taken back at all.
            _ = await asyncio.wait({task}, timeout=DRAIN_SECONDS)
            if task.done() or run.tools_running:
                return
        elif stop.kind == "fenced":
            run.abandon()
        run.interrupted = True
        _ = task.cancel()

    async def _raised(self, error: BaseException, stop: StopCause | None) -> tuple[RunEnd | None, bool]:
        """What an exception of the drive means."""
        causes = [cause.reason if isinstance(cause, HaltInTool) else cause for cause in leaves(error)]
        for cause in causes:
            if isinstance(cause, Abandoned | RecordingFailed):
                raise cause from error
        if stop is not None:
            return await self._stopped_by(stop), True
        lost = [cause for cause in causes if isinstance(cause, OutcomeUnknown)]
        halts = [cause for cause in causes if isinstance(cause, Halt)]
        if len(lost) + len(halts) < len(causes):
            # Whatever else happened, a failed request or tool is on record before the Run fails.
            _ = await self._run.flush()
            if isinstance(error, asyncio.CancelledError):
                raise ReplyInterrupted from error
            raise error
        if halts:
            _ = await self._run.flush()
            cause = halts[0].cause
            return (RunEnd(kind=RunEndKind.PAUSED) if cause is None else end_of(cause)), True
        open_ids = {block.id for block in unfinished_calls(self._run.state, self._run.name)}
        if all(one.call_id in open_ids for one in lost):
            await self._run.park_lost_tools()
            return None, False
        # A middleware has made up a result for it: this state is not to be trusted.
        _ = await self._run.flush()
        return RunEnd(kind=RunEndKind.SUSPENDED), True

    async def _stopped_by(self, stop: StopCause) -> RunEnd:
        end = end_of(stop)
        _ = await self._run.flush()
        return end

    # ------------------------------------------------------------ how a drive ends

    async def _park(self) -> tuple[RunEnd | None, bool]:
        run = self._run
        if run.final is None:
            raise Misuse("the agent's reply ended without an end and without a message")
        more = self._context.ready_conditions > 0
        end = None if more else RunEnd(kind=RunEndKind.SUSPENDED)
        receipt = await run.park(end=end)
        if receipt.ended:
            self._keep()
            return None, True
        return None, False

    def _final(self, reason: str, message: Any) -> tuple[FinalAnswer, Message | None]:
        """The Turn's result: the answer as it was committed, or what the reply ended with instead."""
        run = self._run
        if message is None:
            # A middleware kept it back.
            return FinalAnswer("" if run.committed_content is None else run.message_id, reason), None
        content = public_content(message.content)
        structured = getattr(message, "structured_output", None)
        if structured is None and run.committed_content == content:
            return FinalAnswer(run.message_id, reason), None
        message_id = f"{run.message_id}.final"
        if structured is not None:
            carried, refused = durable_json.tool_value(structured)
            if refused is not None:
                text = msgspec.json.encode(structured).decode()
                content = [*content, {"type": "text", "text": durable_json.sanitize_text(text)}]
            structured = carried
        return FinalAnswer(message_id, reason), Message(message_id, content, max(run.attempt, 1), structured)

    async def _finish(self, final: FinalAnswer | None, message: Message | None) -> bool:
        """Commit the end of the reply. False: the Turn goes on."""
        assert final is not None
        receipt = await self._run.finish(final, message)
        if not receipt.ended:
            return False
        self._keep()
        await self._mirror()
        return True

    def _keep(self) -> None:
        """What is stored now is what the live state is: the next Run on this host need not load it."""
        native = self._run.native
        native.answer = native.loaded = None
        self._context.cache_put(native, native.live_bytes)

    async def _mirror(self) -> None:
        """Copy the settled state to where a program without a journal looks for it (AS-23)."""
        start, mirror, native = self._context.start, self._setup.mirror, self._run.native
        if mirror is not None and start.thread_id == MAIN_THREAD_ID and native.based:
            native.mirrored = await mirror.copy(start.session, native.state.model_dump_json())


async def _equip(toolkit: Any, workspace: Any) -> None:
    """Tools and skills of a workspace, beside the agent's own."""
    if workspace is None:
        return
    basic = toolkit.tool_groups[0]
    own = {tool.name for tool in basic.tools}
    basic.tools.extend(tool for tool in await workspace.list_tools() if tool.name not in own)
    basic.skills_or_loaders.extend(await workspace.list_skills())
