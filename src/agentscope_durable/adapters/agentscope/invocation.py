"""One Run as its middlewares see it: what may happen now, and what becomes true with it.

Rule 1: nothing takes effect outside before what it follows from is committed. A request leaves after its reasoning
checkpoint, a local tool starts after its intent; if that commit fails, they do not (TM-05).
Rule 2: an execution is halted by raising, and only where that is safe (`halts`).
Rule 3: after the agent was interrupted its state is what AgentScope makes of an interruption. It is never committed
(AS-28): what may still be said is what became of tools that were under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from agentscope_durable.adapters.agentscope.call_ids import CallIds, unique_calls
from agentscope_durable.adapters.agentscope.calls import Calls
from agentscope_durable.adapters.agentscope.checkpoint import sanitize_blocks
from agentscope_durable.adapters.agentscope.codec import (
    answer_payload,
    chat_response,
    content_of,
    input_blocks,
    native_blocks,
    public_content,
)
from agentscope_durable.adapters.agentscope.halts import Halt, HaltInTool, OutcomeUnknown
from agentscope_durable.adapters.agentscope.increments import (
    Increment,
    Message,
    RecordingFailed,
    commit_queue,
    entry,
)
from agentscope_durable.adapters.agentscope.models import ModelCalls, ModelInterrupted
from agentscope_durable.adapters.agentscope.native import Native
from agentscope_durable.adapters.agentscope.previews import Previews
from agentscope_durable.adapters.agentscope.steps import Steps
from agentscope_durable.adapters.agentscope.workspace import DurableWorkspace
from agentscope_durable.contracts.commands import RunEnd, RunEndKind, StepReceipt
from agentscope_durable.contracts.errors import InputsChanged, Misuse
from agentscope_durable.contracts.journal import JournalEntry, JournalEventType
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState, ModelPurpose, ReplayRule, StepPhase
from agentscope_durable.domain import ids
from agentscope_durable.journal.host import Boundary
from agentscope_durable.journal.models import ModelAdmission, ModelCallPolicy, ModelRequestObserver
from agentscope_durable.journal.position import AgentExecutionPosition, ExecutionPhase, FinalAnswer
from agentscope_durable.journal.scheduling import Channels
from agentscope_durable.spi.environment import Environment
from agentscope_durable.spi.harness import Abandoned, RunContext, StopCause

__all__ = ["Invocation"]

INJECTED_SOURCE: Final = "durable/inject"
"""Source of a hint block that an inject input became."""
BLOCKED_SECONDS_MAX: Final = 1.0
"""A tool that holds the event loop longer than this is named in a warning."""

log = logging.getLogger("agentscope_durable.adapters")


class Invocation:
    """The present Run of a Turn.

    Attributes:
        agent: the agent; set once it is built.
        calls: tool calls of the Turn.
        workspace: what code of the agent reads and writes; its writes become true in this Run's commits.
        models: model calls of the Run.
        previews: what is shown of answers on their way.
        anchor: the state the model was given in the round that is replayed; None otherwise.
        saved_reply: reply context of the reply that goes on; None once it has been given to the agent.
        reply_end: how the native reply ended, if it did.
        final: the reply's last message as middlewares left it.
        stopping: why the Run is being stopped; the state is not to be trusted from then on if `interrupted`.
        tools_running: local tools under way.
        reopened: the reply goes on although it was complete.
        broken: set once nothing more can be committed.
        committed_content: public content of the present round's message; None when it has none.
    """

    def __init__(
        self,
        context: RunContext,
        native: Native,
        *,
        name: str,
        writer: str,
        environment: Environment,
        channels: Channels,
        rules: Mapping[str, ReplayRule],
        calls: Calls,
        workspace: DurableWorkspace,
        policy: ModelCallPolicy | None = None,
        observer: ModelRequestObserver | None = None,
    ) -> None:
        self.context = context
        self.native = native
        self.name = name
        self.rules = rules
        self.calls = calls
        self.workspace = workspace
        workspace.attach(self)
        self.agent: Any = None
        self.models = ModelCalls(self, observer)
        self.previews = Previews(context, self._call_ids)
        self.anchor: Any = None
        self.saved_reply: Any = None
        self.structured_schema: Any = None
        self.models_may_change = False
        self.reply_end: Any = None
        self.final: Any = None
        self.stopping: StopCause | None = None
        self.interrupted = False
        self.tools_running = 0
        self.reopened = False
        self.committed_content: list[dict[str, Any]] | None = None
        self.compressions = 0
        self._policy = policy
        self._environment = environment
        self.broken = asyncio.Event()
        self._queue = commit_queue(context, channels, writer=writer, broken=self.broken.set)
        self._attempt = context.start.attempt
        self._steps = Steps(context.start)
        self._told_start = False
        self._replayed = False

    # ------------------------------------------------------------ what it is

    @property
    def state(self) -> Any:
        return self.native.state

    @property
    def position(self) -> AgentExecutionPosition:
        return self.native.position

    @property
    def run_id(self) -> str:
        return self.context.start.run_id

    @property
    def turn_id(self) -> str:
        return self.context.start.turn_id

    @property
    def message_id(self) -> str:
        """Public message of the present round."""
        return ids.message_id(self.turn_id, self.position.reasoning)

    def monotonic(self) -> float:
        return self._environment.monotonic()

    # ------------------------------------------------------------ boundaries (AgentExecutionHost)

    def boundary(self, boundary: Boundary) -> None:
        """
        Raises:
            Halt: the Run is to stop or to pause.
        """
        stop = self.stopping or self.context.stop
        if stop is not None:
            raise Halt(stop)
        if self.context.pause_requested:
            raise Halt(None)

    def check_tool(self) -> None:
        """
        Raises:
            HaltInTool: no tool may be looked at any more. A pause does not stop here: there is no boundary in a batch.
        """
        stop = self.stopping or self.context.stop
        if stop is not None:
            raise HaltInTool(Halt(stop))
        if self._queue.failure is not None:
            raise HaltInTool(self._queue.failure)

    @property
    def failure(self) -> BaseException | None:
        """Why nothing more can be committed."""
        return self._queue.failure

    def abandon(self) -> None:
        """From now on nothing of this Run becomes true."""
        self._queue.close(Abandoned())

    # ------------------------------------------------------------ committing

    def accept(self, increment: Increment) -> None:
        """Make it true soon."""
        if not increment.empty:
            self._queue.accept(self._begun(increment))

    async def record(self, increment: Increment) -> None:
        """The same, after waiting for room."""
        if not increment.empty:
            await self._queue.record(self._begun(increment))

    async def commit(self, increment: Increment) -> StepReceipt:
        """Make it true now."""
        increment = self._begun(increment)
        handed = self.workspace.handed
        receipt = await self._queue.commit(increment)
        self.workspace.landed(handed)
        return receipt

    def _begun(self, increment: Increment) -> Increment:
        if not self._told_start:
            self._told_start = True
            start = self.context.start
            begun = entry(JournalEventType.RUN_START, run=start.run_id, turn=start.turn_id, number=start.number)
            # What the Thread begins with was there before any Run.
            baseline = bool(increment.entries) and increment.entries[0].type == JournalEventType.MIGRATION_BASELINE
            increment.entries.insert(int(baseline), begun)
        if not self.interrupted:
            increment.workspace += self.workspace.hand_over()
        return increment

    async def flush(self) -> StepReceipt | None:
        return await self._queue.flush()

    async def landed(self) -> None:
        await self._queue.landed()

    def position_rows(self) -> Increment:
        rows, base = self.native.position_rows()
        return Increment(rows=rows, base=base)

    def checkpoint(self, *, full: bool = False) -> Increment:
        """The state as it is now, with everything that its commit must say about calls."""
        if self.interrupted:
            raise HaltInTool(Halt(self.stopping))
        told = self.calls.derive(self.state)
        try:
            with self.calls.maskable(self.state):
                told.rows, told.base = self.native.rows(full=full)
        except ValueError as error:
            raise Misuse(f"the agent's state holds something that JSON cannot carry: {error}") from error
        return told

    # ------------------------------------------------------------ Steps

    @property
    def step_id(self) -> str:
        return self._steps.id

    def open_step(self, phase: StepPhase) -> list[StepFact]:
        """The fact that begins a Step, when none is open."""
        return self._steps.open(phase)

    def applying(self) -> None:
        """What follows applies results and answers from outside (TP-03)."""
        self._steps.applying()

    def _step_phase(self, phase: StepPhase) -> list[StepFact]:
        """Facts by which the present Step reaches a phase; a Step is begun when none is open."""
        return self._steps.reach(phase, reasoning=self.position.reasoning)

    # ------------------------------------------------------------ attempts

    @property
    def attempt(self) -> int:
        return self._attempt

    def next_attempt(self) -> int:
        self._attempt += 1
        self.previews.begin(self.message_id, self._attempt)
        return self._attempt

    # ------------------------------------------------------------ a new Turn

    def begin_turn(self) -> None:
        """Nothing of the Turn is stored."""
        position = self.position
        position.turn_id = self.turn_id
        position.phase = ExecutionPhase.READY
        position.reasoning = position.iteration = 0
        position.final = None
        self._attempt = 0

    # ------------------------------------------------------------ a reasoning round

    async def begin_round(self) -> None:
        """Save what the model will be given, with the inputs that are part of it, and announce the request (S_pre)."""
        self.boundary(Boundary.REASONING)
        position, state = self.position, self.state
        self._take_carried()
        undo = _Undo(state)
        inputs = await self._take_inputs()
        first = position.phase is ExecutionPhase.READY
        position.reasoning += 1
        position.iteration = state.cur_iter
        position.phase = ExecutionPhase.REASONING
        position.receipts = {}
        position.carried = []
        self.compressions = 0
        self._attempt = 0
        told = Increment(inputs=inputs, reasoning=position.reasoning)
        if first:
            start = self.context.start
            told.entries.append(entry(JournalEventType.RUN_INPUT, turn=self.turn_id, message=start.input_message_id))
        told.steps, entries = self._steps.begin_round(self.position.reasoning)
        told.models.append(self.models.announce(self.agent.model, known=not self.models_may_change))
        told.attempt = self._attempt
        told.merge(self.checkpoint())
        told.entries += entries
        told.entries.append(entry(JournalEventType.MODEL_REQUEST, reasoning=position.reasoning, attempt=self._attempt))
        while True:
            try:
                _ = await self.commit(told)
            except InputsChanged:
                # One of them was withdrawn first (CT-04): nothing was stored. Take the others.
                undo.back()
                told.inputs = await self._take_inputs()
                self.native.begin_anew()
                told.rows, told.base = self.native.rows()
            else:
                return

    async def _take_inputs(self) -> list[int]:
        """Accepted inputs enter the state in their order (CT-23)."""
        if not self.context.pending_inputs:
            return []
        work = await self.context.open_work()
        for one in work.inputs:
            blocks = input_blocks(content_of(one.content))
            if one.record.kind == "steer":
                from agentscope.message import UserMsg

                await self.agent.observe(UserMsg("user", blocks, id=one.record.message_id))
            else:
                from agentscope.message import HintBlock

                self.state.append_context(self.name, [HintBlock(hint=blocks, source=INJECTED_SOURCE)])
        return [one.record.ordinal for one in work.inputs]

    async def steered(self) -> bool:
        """Whether an input waits that reopens a final answer (D20)."""
        if not self.context.pending_inputs:
            return False
        work = await self.context.open_work()
        return any(one.record.kind == "steer" for one in work.inputs)

    def reopen(self) -> None:
        """The answer was final and is not any more."""
        self.position.phase = ExecutionPhase.ACTING
        if self.state.reply_context.structured_schema is not None:
            # Otherwise the old output would be returned without another round.
            self.state.reply_context.structured_output = None

    # ------------------------------------------------------------ replay

    @property
    def replaying(self) -> bool:
        """The present round was seen before: it has no new effect until it is asked, or goes on, from here."""
        return self.anchor is not None or self._replayed

    async def begin_replay(self) -> None:
        """Give the agent the state the model was given, whatever the loop has added on its way here."""
        self.boundary(Boundary.REASONING)
        anchor, self.anchor = self.anchor, None
        state = self.state
        # As with the state: what led here was written before, and is written now as it was then.
        self.workspace.forget()
        self._carry(state, anchor)
        for field in type(state).model_fields:
            # The agent's permission engine holds the present object.
            if field != "permission_context":
                setattr(state, field, getattr(anchor, field))
        self._bind_schema()
        if self.position.phase is not ExecutionPhase.REASONING:
            self._replayed = True
            return
        facts, entries = self._steps.begin_round(self.position.reasoning)
        told = Increment(steps=facts, entries=entries)
        told.models.append(self.models.announce(self.agent.model, known=not self.models_may_change))
        told.attempt = self._attempt
        told.entries.append(
            entry(JournalEventType.MODEL_REQUEST, reasoning=self.position.reasoning, attempt=self._attempt)
        )
        _ = await self.commit(told)

    def _carry(self, live: Any, anchor: Any) -> None:
        """Hints that a middleware has taken out of its inbox for this round must not get lost with it."""
        known = {block.id for message in anchor.context for block in message.content}
        native = {self.agent.injection_config.injection_source}
        for message in live.context:
            for block in message.content:
                if block.type != "hint" or block.id in known or block.source in native or _is_native_hint(block):
                    continue
                self.position.carried.append(msgspec.Raw(block.model_dump_json().encode()))

    def _take_carried(self) -> None:
        if self.position.carried:
            self.state.append_context(self.name, sanitize_blocks(native_blocks(self.position.carried)))

    def _bind_schema(self) -> None:
        """A schema comes back from the store without its class, and so without its own validators."""
        reply = self.state.reply_context
        if reply.structured_schema is not None and self.structured_schema is not None:
            reply.structured_schema = self.structured_schema

    def resume_reply(self) -> None:
        """On the agent's way into a new reply: it goes on with the old one instead."""
        if self.saved_reply is not None:
            self.state.reply_context = self.saved_reply
            self.saved_reply = None
            self._bind_schema()

    # ------------------------------------------------------------ the model

    def take_answer(self) -> Any:
        """The stored answer of this round as a native response; None when the model has to be asked."""
        answer, self.native.answer = self.native.answer, None
        if answer is None:
            return None
        _ = self.native.writer.note_outcome(self.native.answer_at, answer.content)
        response = chat_response(answer)
        content = public_content(response.content)
        self.committed_content = content if content or self._is_final(response.content) else None
        return response

    async def admit(self, messages: int, tools: int) -> None:
        """
        Raises:
            Halt: the Run is to stop or to pause.
            Exception: the policy denies the call.
        """
        self.boundary(Boundary.MODEL)
        if self._policy is None:
            return
        start = self.context.start
        await self._policy.admit(
            ModelAdmission(
                turn_id=start.turn_id,
                run_id=start.run_id,
                reasoning=self.position.reasoning,
                purpose=ModelPurpose.REPLY,
                messages=messages,
                tools=tools,
            )
        )

    async def answered(self, response: Any) -> Any:
        """Make the answer true: outcome, end of its request, usage and public message in one commit.

        Raises:
            ModelInterrupted: the answer is none: it was cut off, and not because the Run is to stop.
        """
        if str(response.finished_reason) == "interrupted":
            if self.stopping is not None:
                return response
            raise ModelInterrupted
        response.content = unique_calls(sanitize_blocks(response.content), self._call_ids())
        position = self.position
        payload, bodies = answer_payload(response, reasoning=position.reasoning, attempt=self._attempt)
        final = self._is_final(response.content)
        position.phase = ExecutionPhase.ANSWERED
        told = Increment(models=self.models.answered())
        told.steps = self._step_phase(StepPhase.FINALIZATION if final else StepPhase.ACTING)
        told.entries.append(JournalEntry(JournalEventType.MODEL_RESULT, payload))
        content = public_content(response.content)
        self.committed_content = content if content or final else None
        if self.committed_content is not None:
            told.messages.append(Message(self.message_id, content, max(self._attempt, 1)))
        told.merge(self.position_rows())
        receipt = await self.commit(told)
        self.previews.end()
        _ = self.native.writer.note_outcome(receipt.position, bodies)
        return response

    def _is_final(self, blocks: list[Any]) -> bool:
        """It may end the reply: no call, and no mere thought."""
        kinds = {block.type for block in blocks}
        pending = self.state.reply_context.structured_schema is not None
        return not pending and "tool_call" not in kinds and kinds != {"thinking"}

    def _call_ids(self) -> CallIds:
        """Ids for the calls of the present round's answer."""
        reply_id = self.state.reply_id
        used = set(self.calls.known)
        for message in reversed(self.state.context):
            if message.role == "assistant" and message.id != reply_id:
                break
            used.update(block.id for block in message.content if block.type == "tool_call")
        # A compressed conversation has forgotten calls whose records exist.
        return CallIds(used, reasoning=self.position.reasoning, forgotten=bool(self.state.summary))

    def round_over(self, *, final: bool) -> None:
        """The answer is in the state. What follows is committed with the next thing that happens.

        Raises:
            Halt: the Run is to stop or to pause; the answer is stored, so nothing is asked again (TF-03, TF-04).
        """
        self._replayed = False
        self.boundary(Boundary.FINALIZATION if final else Boundary.ACTING)
        self.position.phase = ExecutionPhase.ACTING

    # ------------------------------------------------------------ tools

    def seen_waiting(self) -> None:
        """The agent said that it waits for something outside: intents and questions become true at once."""
        if self._queue.failure is None and not self.interrupted:
            told = Increment(steps=self._step_phase(StepPhase.ACTING))
            told.merge(self.checkpoint())
            self.accept(told)

    async def start_tool(self, block: Any, rule: ReplayRule) -> None:
        """Commit that a local tool is about to run, with the state it starts from.

        Raises:
            HaltInTool: that did not become true, so it must not run.
        """
        await self._tool_commit(self.calls.start(block, rule))
        self.workspace.begin_call(block.id, held=rule is ReplayRule.SAFE)

    def lose_tool(self, call_id: str) -> None:
        """Say that the outcome of a local tool is not known.

        Raises:
            HaltInTool: it cannot be said any more.
        """
        if self._queue.failure is not None:
            raise HaltInTool(self._queue.failure)
        self.workspace.drop_call(call_id)
        told = self.calls.lose(call_id)
        if told.tools:
            told.steps = self._step_phase(StepPhase.ACTING)
        self.accept(told)

    def check_lost(self) -> None:
        """
        Raises:
            OutcomeUnknown: a lost tool was given a result by somebody who cannot know it.
        """
        lost = self.calls.unknown()
        if lost:
            raise OutcomeUnknown(lost)

    @contextmanager
    def watch_loop(self, tool: str) -> Generator[None, None, None]:
        """Say it when a tool does not give the event loop back: nothing else of this host goes on meanwhile (C22)."""
        began, freed = self.monotonic(), asyncio.Event()
        handle = asyncio.get_running_loop().call_soon(freed.set)
        try:
            yield
        finally:
            handle.cancel()
            blocked = self.monotonic() - began
            if not freed.is_set() and blocked > BLOCKED_SECONDS_MAX:
                log.warning(
                    "tool %s blocked the event loop for %.1f s: give its function to in_thread, or route it elsewhere",
                    tool,
                    blocked,
                    extra={"turn_id": self.turn_id, "run_id": self.run_id},
                )

    async def end_tool(self, call_id: str, result: ToolResult, *, definite: bool) -> None:
        """Commit what a local tool did, and what it made of state and workspace.

        Args:
            definite: the tool came to its own end; otherwise what it wrote and still held back is forgotten.
        """
        if not definite:
            self.workspace.drop_call(call_id)
        if not self.interrupted:
            told = self.calls.finish(call_id, result)
            told.workspace = self.workspace.end_call(call_id)
            await self._tool_commit(told)
            return
        # The state is that of an interrupted agent; what the tool did is a fact all the same.
        state = ExecutionState.CANCELLED if result.state == "interrupted" else None
        told = self.calls.finish(call_id, result, state)
        told.workspace = self.workspace.end_call(call_id)
        try:
            _ = await self.commit(told)
        except (Abandoned, RecordingFailed) as reason:
            raise HaltInTool(reason) from reason

    async def _tool_commit(self, told: Increment) -> None:
        try:
            told.steps = self._step_phase(StepPhase.ACTING)
            told.merge(self.checkpoint())
            _ = await self.commit(told)
        except (Abandoned, RecordingFailed) as reason:
            # As an Exception, or a concurrent batch would drop it and start over (Rule 2).
            raise HaltInTool(reason) from reason

    async def park_lost_tools(self) -> None:
        """Local tools whose outcome is not known wait for evidence as external ones wait for their result."""
        lost = self.calls.lost(self.state)
        told = Increment(steps=self._step_phase(StepPhase.ACTING))
        for block in lost:
            block.state = "submitted"
        told.merge(self.checkpoint())
        _ = await self.commit(told)

    # ------------------------------------------------------------ the end of a drive

    async def park(self, *, end: RunEnd | None) -> StepReceipt:
        """The agent waits for something outside: its state, and what it waits for."""
        told = Increment(end=end)
        told.merge(self.checkpoint(full=True))
        if told.tools or told.questions:
            told.steps = self._step_phase(StepPhase.ACTING)
        if end is not None:
            told.entries.append(entry(JournalEventType.RUN_END, run=self.run_id, end=end.kind))
        return await self.commit(told)

    async def finish(self, final: FinalAnswer, message: Message | None) -> StepReceipt:
        """The reply is complete: its state, its result, and the end of the Turn unless something came in between."""
        self.position.phase = ExecutionPhase.ENDED
        self.position.final = final
        told = Increment(
            end=RunEnd(kind=RunEndKind.COMPLETED, message_id=final.message_id, finish_reason=final.finish_reason)
        )
        told.steps = self._step_phase(StepPhase.FINALIZATION)
        if message is not None:
            told.messages.append(message)
        told.merge(self.checkpoint(full=True))
        told.entries += [
            entry(JournalEventType.RUN_OUTPUT, message=final.message_id, reason=final.finish_reason),
            entry(JournalEventType.RUN_END, run=self.run_id, end=RunEndKind.COMPLETED),
        ]
        return await self.commit(told)


class _Undo:
    """Takes messages and blocks that were added at the end of the context out of it again."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._messages = len(state.context)
        self._tail = state.context[-1] if state.context else None
        self._blocks = 0 if self._tail is None else len(self._tail.content)

    def back(self) -> None:
        del self._state.context[self._messages :]
        if self._tail is not None:
            del self._tail.content[self._blocks :]


def _is_native_hint(block: Any) -> bool:
    """Hints that AgentScope's loop adds again by itself."""
    return isinstance(block.source, str) and block.source.startswith('{"label": "System"')
