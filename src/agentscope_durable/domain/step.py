"""The owner's commit: native state, intents, results, messages and position change together (BE-17).

A plain step commit writes one log row, one head row and at most one record. Everything here that
reads or writes more belongs to something rarer: an input, an answer, the end of a Run.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.change import Change, Range, Reads, Unchanged, View
from agentscope_durable.contracts.commands import CommitStep, RunEnd, RunEndKind, StepReceipt, ToolCommit
from agentscope_durable.contracts.errors import (
    InputsChanged,
    InvalidRequest,
    InvalidTransition,
    LimitExceeded,
    NotFound,
)
from agentscope_durable.contracts.events import (
    Custom,
    InteractionRequested,
    MessageAbandoned,
    MessageCompleted,
    Payload,
    SignalChanged,
    StepEnded,
    StepPhaseChanged,
    StepStarted,
    ToolApplied,
    ToolChanged,
    check_event_type,
)
from agentscope_durable.contracts.records import (
    OPEN_CONDITIONS_MAX,
    Condition,
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    MessageIndex,
    ModelFact,
    OpenModel,
    Recovery,
    Result,
    RunState,
    RunStepRef,
    SignalRecord,
    StepFact,
    ThreadHead,
    TurnRecord,
    TurnState,
    decode,
)
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ModelStatus,
    RunStatus,
    SignalState,
    StepStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.contracts.views import RunStepRefView
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.control import paused
from agentscope_durable.domain.execution import (
    EFFECT_KINDS,
    condition_of,
    item_of,
    lose_execution,
    lose_local_tools,
    may_become,
    settle_execution,
    stop_executions,
    with_condition,
)
from agentscope_durable.domain.finish import end_turn, next_in_queue
from agentscope_durable.domain.lease import end_run, owned, release
from agentscope_durable.domain.retry import retry_at_ms
from agentscope_durable.domain.turn import move, unsettled


def reads_commit_step(c: CommitStep) -> Reads:
    """A plain step needs nothing but the head; each rarer part names what it touches."""
    wanted: list[str] = []
    ranges: tuple[Range, ...] = ()
    if c.end is not None or c.inputs:
        wanted.append(keys.turn(c.turn_id))
    if c.end is not None:
        wanted.append(keys.thread(c.thread_id))
        wanted.append(keys.run(c.turn_id, _run_number(c.run_id)))
        if c.end.kind is RunEndKind.COMPLETED:
            ranges = (next_in_queue(c.thread_id),)
    wanted.extend(keys.execution(c.turn_id, tool.call_id) for tool in c.tools)
    wanted.extend(keys.input_(c.turn_id, ordinal) for ordinal in c.inputs)
    wanted.extend(keys.interaction(c.turn_id, interaction) for interaction in c.answers)
    return Reads(keys=tuple(wanted), ranges=ranges) if wanted else _NO_READS


_NO_READS = Reads()


def _run_number(run_id: str) -> int:
    number = run_id.rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def commit_step(c: CommitStep, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Make one owner commit true.

    Raises:
        Fenced: the sender does not own the Thread any more; nothing was stored.
        RevisionConflict: another commit of this owner stands at that position already.
    """
    draft = begin(view, c.session, seed, now_ms)
    active = owned(draft, c, c.expected_position)
    if not c.run_id:
        raise InvalidRequest("a settlement commits no steps; it ends with settle_turn", path="run_id")
    position = active.position + 1
    draft.native(c.thread_id, position, c.journal)
    state = active.turn
    run = active.run
    step = _Step(draft, c, position)
    begun, ended = _steps_around(c.steps)

    if begun:
        run = step.steps(run, begun)
    if c.models:
        run = step.models(run)
    step.step_id = run.step_id
    if c.messages or c.abandons:
        state = step.messages(state)
    if c.tools:
        state = step.tools(state)
    if c.interactions:
        state = step.interactions(state)
    if c.answers:
        state = step.answers(state)
    if c.inputs:
        state = step.inputs(state)
    if c.waits or c.signals:
        state = step.waits(state)
    for event in c.events:
        check_event_type(event.type)
        step.emit(event.type, Custom(value=event.value))

    if c.reasoning is not None or c.attempt is not None:
        state = replace(
            state,
            reasoning=state.reasoning if c.reasoning is None else c.reasoning,
            attempt=state.attempt if c.attempt is None else c.attempt,
        )
    if run.step_id and run.step_id != state.last_step:
        state = replace(state, last_step=run.step_id)
    if ended:
        run = step.steps(run, ended)
    checkpoint_at, base_at, writer = active.checkpoint_at, active.base_at, active.writer
    if c.checkpoint:
        checkpoint_at = position
        writer = c.writer
        if c.base:
            base_at = position
        if state.takeovers:
            state = replace(state, takeovers=0)
    active = ThreadHead(
        fence=active.fence,
        owner=active.owner,
        position=position,
        base_at=base_at,
        checkpoint_at=checkpoint_at,
        turn_id=active.turn_id,
        turn=active.turn,
        run=run,
        writer=writer,
    )
    if c.end is not None:
        return _end(draft, c, c.end, active, state)
    if state.status is not active.turn.status or _shown(active.turn, state):
        state = draft.show(draft.turn(c.thread_id, c.turn_id), active.turn, state)
    draft.set_active(c.thread_id, replace(active, turn=state))
    return draft.change(_receipt(position, state, now_ms))


def _steps_around(steps: tuple[StepFact, ...]) -> tuple[tuple[StepFact, ...], tuple[StepFact, ...]]:
    """The Steps' facts before and after everything else of the commit: what happens in a Step is told before its end."""
    count = len(steps)
    while count and steps[count - 1].status is not StepStatus.RUNNING:
        count -= 1
    return steps[:count], steps[count:]


def _shown(before: TurnState, after: TurnState) -> bool:
    """Cheap test for the few visible fields a commit without an end can change."""
    return before.inputs != after.inputs


def _receipt(position: int, state: TurnState, now_ms: int, *, ended: bool = False) -> StepReceipt:
    return StepReceipt(
        position=position,
        cancel=state.cancel != "",
        pause=state.pause != "",
        inputs=state.inputs,
        ready=sum(1 for condition in state.conditions if condition.ready),
        now_ms=now_ms,
        ended=ended,
    )


class _Step:
    """The parts of one owner commit, each turning one list of the command into facts and events."""

    __slots__ = ("c", "draft", "position", "step_id")

    def __init__(self, draft: Draft, c: CommitStep, position: int) -> None:
        self.draft = draft
        self.c = c
        self.position = position
        self.step_id = ""

    def emit(self, event_type: str, payload: Payload, *, step_id: str | None = None) -> int:
        return self.draft.emit(
            event_type,
            payload,
            thread_id=self.c.thread_id,
            turn_id=self.c.turn_id,
            run_id=self.c.run_id,
            step_id=self.step_id if step_id is None else step_id,
        )

    @property
    def here(self) -> RunStepRef:
        return RunStepRef(run_id=self.c.run_id, step_id=self.step_id)

    # ---- Steps and model requests ----

    def steps(self, run: RunState, facts: tuple[StepFact, ...]) -> RunState:
        for fact in facts:
            self.draft.fact(fact)
            run = self._step(run, fact)
        return run

    def _step(self, run: RunState, fact: StepFact) -> RunState:
        if fact.status is not StepStatus.RUNNING:
            self.emit("step.ended", StepEnded(status=fact.status), step_id=fact.step_id)
            return replace(run, step_id="") if run.step_id == fact.step_id else run
        if fact.step_id != run.step_id:
            self.emit(
                "step.started",
                StepStarted(number=fact.number, phase=fact.phase, resumed_from_step_id=fact.resumed_from or None),
                step_id=fact.step_id,
            )
        elif fact.phase is not run.phase:
            self.emit("step.phase", StepPhaseChanged(phase=fact.phase), step_id=fact.step_id)
        return replace(run, step_id=fact.step_id, phase=fact.phase, steps=fact.number)

    def models(self, run: RunState) -> RunState:
        models = list(run.models)
        calls = run.calls
        for fact in self.c.models:
            self.draft.fact(fact)
            if fact.request == 0:
                continue
            if fact.status is ModelStatus.STARTED:
                self._open_model(models, fact)
                calls += 1
            else:
                self._close_model(models, fact)
        return replace(run, models=tuple(models), calls=calls)

    def _open_model(self, models: list[OpenModel], fact: ModelFact) -> None:
        # Usage that is known before the end is reported as STARTED again (MC-10).
        if any(m.model_call_id == fact.model_call_id and m.request == fact.request for m in models):
            return
        models.append(
            OpenModel(
                model_call_id=fact.model_call_id,
                step_id=fact.step_id,
                message_id=fact.message_id,
                attempt=fact.attempt,
                request=fact.request,
                started_ms=self.draft.now_ms,
            )
        )

    def _close_model(self, models: list[OpenModel], fact: ModelFact) -> None:
        models[:] = [m for m in models if m.model_call_id != fact.model_call_id or m.request != fact.request]

    # ---- messages ----

    def messages(self, state: TurnState) -> TurnState:
        for abandon in self.c.abandons:
            self.emit(
                "message.abandoned",
                MessageAbandoned(message_id=abandon.message_id, attempt=abandon.attempt, reason=abandon.reason),
            )
        for message in self.c.messages:
            seq = self.emit(
                "message.completed",
                MessageCompleted(
                    message_id=message.message_id,
                    role="assistant",
                    content=message.content,
                    attempt=message.attempt,
                    revision=message.revision,
                    structured=message.structured,
                    incomplete=message.incomplete,
                ),
            )
            # A new version keeps the place of the first one (PR-11, PR-18).
            self.draft.put(
                keys.message(message.first_seq or seq),
                MessageIndex(
                    message_id=message.message_id,
                    turn_id=self.c.turn_id,
                    thread_id=self.c.thread_id,
                    seq=seq,
                ),
            )
            self._refer(message.content)
            if message.structured is not None:
                self._refer(message.structured)
            state = replace(state, message_id=message.message_id, message_seq=seq)
        return state

    def _refer(self, body: Body) -> None:
        self.draft.refer(body.digest, body.size)

    # ---- tools ----

    def tools(self, state: TurnState) -> TurnState:
        for tool in self.c.tools:
            state = self._tool(state, tool)
        return state

    def _tool(self, state: TurnState, tool: ToolCommit) -> TurnState:
        draft = self.draft
        key = keys.execution(self.c.turn_id, tool.call_id)
        execution = draft.get(key, ExecutionRecord)
        if execution is None:
            execution = self._open_tool(tool)
            state = self._opened(state, execution)
        elif tool.state is not execution.state or tool.state is ExecutionState.RUNNING:
            if not may_become(execution, tool.state) and not self._rerun(execution, tool):
                if not tool.applied:
                    raise InvalidRequest(
                        f"tool call {tool.call_id!r} is {execution.state} and cannot become {tool.state}",
                        path="tools",
                    )
            else:
                state, execution = self._moved(state, execution, tool)
        if tool.state.terminal and execution.received_ms == 0:
            state = settle_execution(
                draft,
                self.c,
                state,
                execution,
                tool.state,
                tool.result,
                run_id=self.c.run_id,
                step_id=self.step_id,
            )
            stored = draft.get(key, ExecutionRecord)
            assert stored is not None
            execution = stored
        elif tool.state is ExecutionState.UNKNOWN and execution.state is not ExecutionState.UNKNOWN:
            state = lose_execution(draft, self.c, state, execution)
        if tool.applied and execution.applied_ms == 0:
            state = self._apply(state, execution)
        return state

    @staticmethod
    def _rerun(execution: ExecutionRecord, tool: ToolCommit) -> bool:
        """A local tool whose stored and present rule both allow it is started again (D18)."""
        return tool.state is ExecutionState.RUNNING and execution.state is ExecutionState.RUNNING

    def _open_tool(self, tool: ToolCommit) -> ExecutionRecord:
        arguments = tool.arguments or Body()
        external = tool.kind is ExecutionKind.EXTERNAL
        execution = ExecutionRecord(
            execution_id=ids.execution_id(self.c.turn_id, tool.call_id),
            call_id=tool.call_id,
            name=tool.name,
            kind=tool.kind,
            # The agent's own state holds a local call's arguments; a body is stored once.
            arguments=arguments if external else Body(),
            origin=self.here,
            created_ms=self.draft.now_ms,
            route=tool.route,
            rule=tool.rule,
            state=tool.state,
            started_ms=self.draft.now_ms if tool.state is ExecutionState.RUNNING else 0,
        )
        self._refer(arguments)
        seq = self.emit(
            "tool.requested",
            ToolChanged(
                call_id=tool.call_id,
                state=tool.state,
                name=tool.name,
                kind=tool.kind,
                execution_id=execution.execution_id if external else None,
                arguments=arguments,
                origin=RunStepRefView(run_id=self.c.run_id, step_id=self.step_id),
            ),
        )
        execution = replace(execution, requested_seq=seq)
        if not tool.state.terminal:
            self.draft.put(keys.execution(self.c.turn_id, tool.call_id), execution)
        return execution

    def _opened(self, state: TurnState, execution: ExecutionRecord) -> TurnState:
        if execution.state not in (ExecutionState.INTENT, ExecutionState.RUNNING):
            return state
        if execution.kind is ExecutionKind.MANUAL:
            # Its interaction is what the Turn waits for.
            return state
        if len(state.conditions) >= OPEN_CONDITIONS_MAX:
            raise LimitExceeded("open tool calls of a turn", OPEN_CONDITIONS_MAX)
        if execution.kind is ExecutionKind.EXTERNAL:
            self.draft.ready(
                keys.READY_DISPATCH,
                execution.route,
                item_of(self.c.turn_id, execution.call_id),
                due_ms=self.draft.now_ms,
                value=keys.dispatch_value(execution.route, self.c.thread_id),
            )
        return with_condition(
            state,
            None,
            Condition(
                kind=WaitKind.TOOL_RUNNING,
                id=execution.execution_id,
                call_id=execution.call_id,
                since_ms=self.draft.now_ms,
            ),
        )

    def _moved(
        self, state: TurnState, execution: ExecutionRecord, tool: ToolCommit
    ) -> tuple[TurnState, ExecutionRecord]:
        """An approved call becomes an intent, or a local tool is started (again)."""
        if tool.state.terminal or tool.state is ExecutionState.UNKNOWN:
            return state, execution
        again = execution.state in (ExecutionState.RUNNING, ExecutionState.UNKNOWN)
        execution = replace(
            execution,
            state=tool.state,
            kind=tool.kind,
            route=tool.route or execution.route,
            rule=tool.rule,
            arguments=(tool.arguments or execution.arguments)
            if tool.kind is ExecutionKind.EXTERNAL
            else execution.arguments,
            started_ms=self.draft.now_ms if tool.state is ExecutionState.RUNNING else execution.started_ms,
            attempt=execution.attempt + 1 if again else execution.attempt,
        )
        self.draft.put(keys.execution(self.c.turn_id, tool.call_id), execution)
        self.emit(
            "tool.started" if tool.state is ExecutionState.RUNNING else "tool.requested",
            ToolChanged(
                call_id=tool.call_id,
                state=tool.state,
                name=execution.name,
                kind=execution.kind,
                execution_id=execution.execution_id if execution.kind is ExecutionKind.EXTERNAL else None,
            ),
        )
        if condition_of(state, tool.call_id, EFFECT_KINDS) is None:
            return self._opened(state, execution), execution
        return state, execution

    def _apply(self, state: TurnState, execution: ExecutionRecord) -> TurnState:
        draft = self.draft
        draft.put(
            keys.execution(self.c.turn_id, execution.call_id),
            replace(execution, applied_at=self.here, applied_ms=draft.now_ms),
        )
        self.emit(
            "tool.applied",
            ToolApplied(
                call_id=execution.call_id,
                applied_at_ms=draft.now_ms,
                applied_at=RunStepRefView(run_id=self.c.run_id, step_id=self.step_id),
            ),
        )
        # An answered question is removed by `answers`; one that is still open keeps the Turn.
        return replace(
            state,
            conditions=tuple(
                c for c in state.conditions if c.call_id != execution.call_id or c.kind is WaitKind.APPROVAL
            ),
        )

    # ---- interactions ----

    def interactions(self, state: TurnState) -> TurnState:
        for asked in self.c.interactions:
            key = keys.interaction(self.c.turn_id, asked.interaction_id)
            self.draft.put(
                key,
                InteractionRecord(
                    interaction_id=asked.interaction_id,
                    call_id=asked.call_id,
                    kind=asked.kind,
                    name=asked.name,
                    arguments=asked.arguments,
                    origin=self.here,
                    opened_ms=self.draft.now_ms,
                ),
            )
            self._refer(asked.arguments)
            self.emit(
                "interaction.requested",
                InteractionRequested(
                    interaction_id=asked.interaction_id,
                    call_id=asked.call_id,
                    kind=asked.kind,
                    name=asked.name,
                    arguments=asked.arguments,
                    opened_at_ms=self.draft.now_ms,
                ),
            )
            if len(state.conditions) >= OPEN_CONDITIONS_MAX:
                raise LimitExceeded("open interactions of a turn", OPEN_CONDITIONS_MAX)
            approval = asked.kind is InteractionKind.APPROVAL
            state = with_condition(
                state,
                None,
                Condition(
                    kind=WaitKind.APPROVAL if approval else WaitKind.EXTERNAL_RESULT,
                    id=asked.interaction_id,
                    call_id=asked.call_id,
                    since_ms=self.draft.now_ms,
                ),
            )
        return state

    def answers(self, state: TurnState) -> TurnState:
        for interaction_id in self.c.answers:
            key = keys.interaction(self.c.turn_id, interaction_id)
            interaction = self.draft.get(key, InteractionRecord)
            if interaction is None:
                raise NotFound("interaction of this turn", interaction_id)
            if interaction.state is InteractionState.APPLIED:
                continue
            if interaction.state is not InteractionState.RESOLVED:
                raise InvalidRequest(
                    f"interaction {interaction_id!r} is {interaction.state} and has no answer to apply", path="answers"
                )
            self.draft.put(key, replace(interaction, state=InteractionState.APPLIED))
            state = replace(state, conditions=tuple(c for c in state.conditions if c.id != interaction_id))
            if interaction.request_id:
                self.emit("signal.applied", SignalChanged(request_id=interaction.request_id, operation="respond"))
        return state

    # ---- inputs and waits ----

    def inputs(self, state: TurnState) -> TurnState:
        """Each input enters one checkpoint: it loses to a withdraw that was committed before (CT-04, CT-21)."""
        for ordinal in self.c.inputs:
            key = keys.input_(self.c.turn_id, ordinal)
            pending = self.draft.get(key, InputRecord)
            if pending is None or pending.state is not SignalState.ACCEPTED:
                raise InputsChanged(self.c.turn_id)
            self.draft.put(key, replace(pending, state=SignalState.APPLIED))
            self.emit(
                "signal.applied",
                SignalChanged(request_id=pending.request_id, operation=pending.kind, message_id=pending.message_id),
            )
            state = replace(state, inputs=state.inputs - 1, steers=state.steers - (pending.kind == "steer"))
        return state

    def waits(self, state: TurnState) -> TurnState:
        for key in self.c.signals:
            state = self._consume(state, key)
        for wait in self.c.waits:
            if not wait.key.startswith("x."):
                raise InvalidRequest(f"a wait key must begin with 'x.', not {wait.key!r}", path="waits")
            if len(state.conditions) >= OPEN_CONDITIONS_MAX:
                raise LimitExceeded("open waits of a turn", OPEN_CONDITIONS_MAX)
            condition = Condition(
                kind=WaitKind.SIGNAL,
                id=wait.key,
                call_id="",
                since_ms=self.draft.now_ms,
                ready=bool(self._signals(wait.key)),
                deadline_ms=wait.deadline_ms,
            )
            state = with_condition(state, None, condition)
        return state

    def _signals(self, key: str) -> list[tuple[str, SignalRecord]]:
        page = Range(keys.signals(self.c.turn_id, key), limit=1000)
        found: list[tuple[str, SignalRecord]] = []
        for at, data in self.draft.view.page(page):
            record = self.draft.get(at, SignalRecord) or decode(SignalRecord, data, key=at)
            if record.state is SignalState.ACCEPTED:
                found.append((at, record))
        return found

    def _consume(self, state: TurnState, key: str) -> TurnState:
        """The oldest accepted signal of a key is used up, and the wait for it ends."""
        old = next((c for c in state.conditions if c.kind is WaitKind.SIGNAL and c.id == key), None)
        if old is None:
            raise NotFound("wait condition of this turn", key)
        for at, record in self._signals(key)[:1]:
            self.draft.put(at, replace(record, state=SignalState.APPLIED))
            self.emit("signal.applied", SignalChanged(request_id=record.request_id, operation="signal", key=key))
        return with_condition(state, old, None)


# ---- the end of a Run ----


def _end(draft: Draft, c: CommitStep, end: RunEnd, active: ThreadHead, state: TurnState) -> Change:
    """What becomes of the Turn when its invocation ends (RT-49: not necessarily its own end)."""
    kind = end.kind
    if kind is RunEndKind.COMPLETED:
        if state.steers and not state.cancel and end.finish_reason == "completed":
            # Input that redirects the agent was accepted before the answer became final: one more round (D20).
            after = draft.show(draft.turn(c.thread_id, c.turn_id), active.turn, state)
            draft.set_active(c.thread_id, replace(active, turn=after))
            return draft.change(_receipt(active.position, after, draft.now_ms))
        if state.pause and not state.cancel:
            # The pause was accepted first: the answer is stored, the Turn stops before its end (TF-03).
            kind = RunEndKind.PAUSED
        elif unsettled(state):
            # Nobody may call a Turn done over a tool that is still under way (SE-12).
            raise InvalidTransition(c.turn_id, "waiting for a tool", TurnStatus.COMPLETED)
    record = draft.turn(c.thread_id, c.turn_id)
    if kind is RunEndKind.CANCELLED and not state.cancel:
        raise InvalidRequest("a run ends cancelled only after a cancel was accepted", path="end")
    end_run(draft, record, active.run, _RUN_STATUS[kind], active.position, failure=end.failure)
    record = replace(record, last_at=active.position)

    if kind is RunEndKind.CANCELLED:
        return _keep_for_settlement(draft, c, record, active, state)
    thread = release(draft, active, c.thread_id, settled=kind is RunEndKind.COMPLETED)
    if kind is RunEndKind.COMPLETED:
        state = replace(
            state,
            result=Result(
                message_id=end.message_id,
                message_seq=state.message_seq if state.message_id == end.message_id else 0,
                finish_reason=end.finish_reason,
            ),
        )
        end_turn(draft, thread, record, state, TurnStatus.COMPLETED)
        return draft.change(_receipt(active.position, replace(state, inputs=0), draft.now_ms, ended=True))
    state = _after_run(draft, c, end, kind, record, state)
    draft.store_turn(record, state)
    return draft.change(_receipt(active.position, state, draft.now_ms, ended=True))


_RUN_STATUS = {
    RunEndKind.SUSPENDED: RunStatus.SUSPENDED,
    RunEndKind.PAUSED: RunStatus.PAUSED,
    RunEndKind.COMPLETED: RunStatus.COMPLETED,
    RunEndKind.FAILED: RunStatus.FAILED,
    RunEndKind.CANCELLED: RunStatus.CANCELLED,
    RunEndKind.RELEASED: RunStatus.RELEASED,
}


def _keep_for_settlement(
    draft: Draft, c: CommitStep, record: TurnRecord, active: ThreadHead, state: TurnState
) -> Change:
    """The Run is over, the owner goes on to settle under the same fence."""
    state = lose_local_tools(draft, record, state, settling=True)
    state = draft.show(record, record.state, state)
    draft.put(keys.turn(c.turn_id), replace(record, state=state))
    draft.set_active(c.thread_id, replace(active, turn=state, run=RunState()))
    return draft.change(_receipt(active.position, state, draft.now_ms, ended=True))


def _after_run(
    draft: Draft, c: CommitStep, end: RunEnd, kind: RunEndKind, record: TurnRecord, state: TurnState
) -> TurnState:
    if kind is RunEndKind.FAILED:
        assert end.failure is not None
        state = lose_local_tools(draft, record, state, settling=False)
        state = _failed(draft, end, record, state)
        if state.failure is not None:
            return move(c.turn_id, state, TurnStatus.WAITING)
    if kind is RunEndKind.RELEASED:
        state = lose_local_tools(draft, record, state, settling=state.cancel != "")
    if state.cancel:
        return state
    if state.pause:
        draft.emit(
            "signal.applied",
            SignalChanged(request_id=state.pause, operation="pause"),
            thread_id=c.thread_id,
            turn_id=c.turn_id,
        )
        return paused(c.turn_id, state)
    if kind is RunEndKind.RELEASED:
        return state
    if kind is RunEndKind.PAUSED:
        # The pause was lifted while the Run was ending: it goes on.
        return state
    return move(c.turn_id, state, TurnStatus.WAITING)


def _failed(draft: Draft, end: RunEnd, record: TurnRecord, state: TurnState) -> TurnState:
    """Count a failed invocation; the policy of the first one stays in force (RC-12, RC-13)."""
    failure = end.failure
    assert failure is not None
    former = state.recovery
    failures = 1 if former is None else former.failures + 1
    recovery = Recovery(
        max_retries=end.policy.max_retries if former is None else former.max_retries,
        initial_backoff_ms=end.policy.initial_backoff_ms if former is None else former.initial_backoff_ms,
        max_backoff_ms=end.policy.max_backoff_ms if former is None else former.max_backoff_ms,
        failures=failures,
        next_retry_at_ms=0,
        last_error=failure,
    )
    if failure.retryable and failures <= recovery.max_retries:
        return replace(state, recovery=replace(recovery, next_retry_at_ms=retry_at_ms(recovery, draft.now_ms)))
    state = replace(state, recovery=recovery, failure=failure, settle_ms=0)
    return stop_executions(draft, record, state)
