"""The owner's commit: native state, intents, results, messages and position change together (BE-17).

A plain step commit writes one log row, one head row and at most one record. Everything here that
reads or writes more belongs to something rarer: an input, an answer, the end of a Run.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.change import PAGE_MAX, Change, Range, Reads, Unchanged, View
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
    Failure,
    InputRecord,
    InteractionRecord,
    MessageIndex,
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
)
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ModelStatus,
    ReplayRule,
    RunStatus,
    SignalState,
    StepStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.contracts.views import RecoveryPolicy, RunStepRefView
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.control import paused
from agentscope_durable.domain.execution import (
    EFFECT_KINDS,
    STARTED,
    UNDER_WAY,
    condition_of,
    lose_execution,
    lose_local_tools,
    may_become,
    offer,
    settle_execution,
    stop_executions,
    with_condition,
)
from agentscope_durable.domain.finish import end_turn, next_in_queue
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.lease import end_run, owned, release
from agentscope_durable.domain.retry import retry_at_ms
from agentscope_durable.domain.turn import move, settling, unsettled


def reads_commit_step(c: CommitStep) -> Reads:
    """A plain step needs nothing but the head; each rarer part names what it touches."""
    wanted: list[str] = []
    ranges: tuple[Range, ...] = ()
    if c.end is not None or c.inputs:
        wanted.append(keys.turn(c.turn_id))
    for key in (*c.signals, *(wait.key for wait in c.waits)):
        ranges += (_signals(c.turn_id, key),)
    if c.end is not None:
        wanted.append(keys.thread(c.thread_id))
        wanted.append(keys.run(c.turn_id, ids.run_number(c.run_id)))
        if c.end.kind is RunEndKind.COMPLETED:
            ranges += (next_in_queue(c.thread_id),)
    wanted.extend(keys.execution(c.turn_id, tool.call_id) for tool in c.tools)
    wanted.extend(keys.input_(c.turn_id, ordinal) for ordinal in c.inputs)
    wanted.extend(keys.interaction(c.turn_id, interaction) for interaction in c.answers)
    wanted.extend(keys.interaction(c.turn_id, asked.interaction_id) for asked in c.interactions)
    return Reads(keys=tuple(wanted), ranges=ranges) if wanted or ranges else _NO_READS


_NO_READS = Reads()


def _only_begins(c: CommitStep) -> bool:
    """Whether this commit says no more than that something begins (C28).

    A Run that asks the model again, or runs a tool again that is safe to repeat, checkpoints that before it does so. If
    that counted as progress, a Turn whose model or tool kills the process would kill hosts for ever.
    """
    begins = (
        any(fact.status is StepStatus.RUNNING for fact in c.steps)
        or any(fact.status is ModelStatus.STARTED for fact in c.models)
        or any(tool.state is ExecutionState.RUNNING for tool in c.tools)
    )
    more = (
        any(fact.status is StepStatus.COMPLETED for fact in c.steps)
        or any(fact.status is ModelStatus.COMPLETED for fact in c.models)
        or any(tool.state is not ExecutionState.RUNNING for tool in c.tools)
        or c.messages
        or c.interactions
        or c.inputs
        or c.answers
        or c.signals
        or c.waits
        or c.events
        or c.end is not None
    )
    return begins and not more


def _signals(turn_id: str, key: str) -> Range:
    return Range(keys.signals(turn_id, key), limit=PAGE_MAX)


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
    if c.end is not None or c.answers:
        _require_calls(draft, c, active.turn)
    if c.checkpoint and not c.journal:
        raise InvalidRequest("a checkpoint carries native state; without it the former one stands", path="journal")
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
        draft.refer(event.value.digest, event.value.size)

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
    chain, digest = active.chain, active.digest
    if c.journal:
        chain = chained("" if c.base else chain, c.journal)
    if c.checkpoint:
        digest = chain
        checkpoint_at = position
        writer = c.writer
        if c.base:
            base_at = position
        if state.takeovers and not _only_begins(c):
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
        chain=chain,
        digest=digest,
    )
    if c.end is not None:
        return _end(draft, c, c.end, active, state)
    if state.status is not active.turn.status or _shown(active.turn, state):
        state = draft.show(draft.turn(c.thread_id, c.turn_id), active.turn, state)
    draft.set_active(c.thread_id, replace(active, turn=state))
    return draft.change(_receipt(active, state, now_ms))


def _require_calls(draft: Draft, c: CommitStep, state: TurnState) -> None:
    """The calls that an answer or the end of the Run may touch, in one round: the head names them."""
    wanted = (one for one in state.conditions if one.call_id and (c.end is not None or one.id in c.answers))
    draft.require(tuple(keys.execution(c.turn_id, one.call_id) for one in wanted))


def _steps_around(steps: tuple[StepFact, ...]) -> tuple[tuple[StepFact, ...], tuple[StepFact, ...]]:
    """The Steps' facts before and after the rest of the commit: what happens in a Step is told before its end."""
    count = len(steps)
    while count and steps[count - 1].status is not StepStatus.RUNNING:
        count -= 1
    return steps[:count], steps[count:]


def _shown(before: TurnState, after: TurnState) -> bool:
    """Cheap test for the few visible fields a commit without an end can change."""
    return before.inputs != after.inputs


def _receipt(active: ThreadHead, state: TurnState, now_ms: int, *, ended: bool = False) -> StepReceipt:
    return StepReceipt(
        position=active.position,
        cancel=state.cancel != "",
        pause=state.pause != "",
        inputs=state.inputs,
        ready=sum(1 for condition in state.conditions if condition.ready),
        now_ms=now_ms,
        ended=ended,
        digest=active.digest,
    )


def _said(execution: ExecutionRecord | None, tool: ToolCommit) -> bool:
    """Nothing new is said of the call: it is in that state, or has its outcome, whatever its Run takes it for."""
    if execution is None:
        return False
    if execution.state.terminal and tool.applied:
        return True
    return tool.state is execution.state and tool.state is not ExecutionState.RUNNING


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
        # Those under way, in the order in which they began. Request 0 speaks of a call and not of a request.
        models = {(model.model_call_id, model.request): model for model in run.models}
        calls = run.calls
        for fact in self.c.models:
            self.draft.fact(fact)
            request = (fact.model_call_id, fact.request)
            if fact.status is not ModelStatus.STARTED:
                models.pop(request, None)
            elif fact.request and request not in models:
                # Usage that is known before the end is reported as STARTED again (MC-10).
                calls += 1
                models[request] = OpenModel(
                    model_call_id=fact.model_call_id,
                    step_id=fact.step_id,
                    message_id=fact.message_id,
                    attempt=fact.attempt,
                    request=fact.request,
                    started_ms=self.draft.now_ms,
                )
        return replace(run, models=tuple(models.values()), calls=calls)

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
        key = keys.execution(self.c.turn_id, tool.call_id)
        execution = self.draft.get(key, ExecutionRecord)
        if not _said(execution, tool):
            self._check_tool(state, execution, tool)
            state = self._become(state, execution, tool)
            execution = self.draft.get(key, ExecutionRecord)
        assert execution is not None
        if tool.applied and execution.applied_ms == 0:
            if not execution.state.terminal:
                raise InvalidRequest(
                    f"tool call {tool.call_id!r} is {execution.state}: there is no result to apply", path="tools"
                )
            state = self._apply(state, execution)
        return state

    def _check_tool(self, state: TurnState, execution: ExecutionRecord | None, tool: ToolCommit) -> None:
        """What a Run may say of a call.

        An external call's outcome is told by its executor, a manual one's by the person who was asked. A local tool is
        started once, and told of by the Run that started it, unless its stored and its present rule say that it may
        simply be run again (D18, RC-15). A call that asks first is not started before there is an answer.

        Raises:
            InvalidRequest: anything else.
        """
        wanted = tool.state
        allowed = wanted not in STARTED or wanted is _STARTS[tool.kind]
        if wanted is ExecutionState.AWAITING_APPROVAL or (wanted in STARTED and tool.kind is ExecutionKind.MANUAL):
            # Otherwise the Turn would wait for somebody who was not asked.
            allowed = allowed and any(asked.call_id == tool.call_id for asked in self.c.interactions)
        elif wanted in STARTED:
            allowed = allowed and not any(
                c.call_id == tool.call_id and c.kind is WaitKind.APPROVAL and not c.ready for c in state.conditions
            )
        if execution is None:
            allowed = allowed and wanted is not ExecutionState.UNKNOWN
        elif execution.state not in UNDER_WAY:
            allowed = allowed and may_become(execution, wanted)
        elif execution.kind is not ExecutionKind.LOCAL:
            allowed = False
        elif wanted is ExecutionState.RUNNING:
            allowed = allowed and execution.rule is tool.rule is ReplayRule.SAFE
        else:
            known = execution.run_id == self.c.run_id or execution.rule is ReplayRule.SAFE
            allowed = may_become(execution, wanted) and (known or wanted is ExecutionState.UNKNOWN)
        if not allowed:
            present = f"{tool.kind} and new" if execution is None else f"{execution.kind} and {execution.state}"
            raise InvalidRequest(
                f"tool call {tool.call_id!r} is {present}: this commit cannot make it {wanted}", path="tools"
            )

    def _become(self, state: TurnState, execution: ExecutionRecord | None, tool: ToolCommit) -> TurnState:
        """The call is opened, started (again), lost, or has its outcome."""
        if execution is None:
            execution = self._open_tool(tool)
            if not tool.state.terminal:
                return self._started(state, execution)
        elif not tool.state.terminal and tool.state is not ExecutionState.UNKNOWN:
            return self._started(state, self._moved(execution, tool))
        if tool.state is ExecutionState.UNKNOWN:
            return lose_execution(self.draft, self.c, state, execution)
        return settle_execution(
            self.draft,
            self.c,
            state,
            execution,
            tool.state,
            tool.result,
            run_id=self.c.run_id,
            step_id=self.step_id,
        )

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
            run_id=self.c.run_id if tool.state is ExecutionState.RUNNING else "",
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

    def _started(self, state: TurnState, execution: ExecutionRecord) -> TurnState:
        """If it was let start, the Turn has an effect under way. For a manual call its question says so."""
        if execution.state not in STARTED or execution.kind is ExecutionKind.MANUAL:
            return state
        if execution.kind is ExecutionKind.EXTERNAL:
            offer(self.draft, self.c, execution, due_ms=self.draft.now_ms)
        old = condition_of(state, execution.call_id, EFFECT_KINDS)
        if old is not None:
            return with_condition(state, old, replace(old, kind=WaitKind.TOOL_RUNNING, ready=False))
        if len(state.conditions) >= OPEN_CONDITIONS_MAX:
            raise LimitExceeded("open tool calls of a turn", OPEN_CONDITIONS_MAX)
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

    def _moved(self, execution: ExecutionRecord, tool: ToolCommit) -> ExecutionRecord:
        """An approved call becomes an intent, or a local tool is started (again)."""
        again = execution.state in UNDER_WAY
        execution = replace(
            execution,
            state=tool.state,
            kind=tool.kind if tool.state in STARTED else execution.kind,
            route=tool.route or execution.route,
            rule=tool.rule,
            attempt=execution.attempt + 1 if again else execution.attempt,
        )
        if tool.state is ExecutionState.RUNNING:
            execution = replace(execution, started_ms=self.draft.now_ms, run_id=self.c.run_id)
        if execution.kind is ExecutionKind.EXTERNAL and tool.arguments is not None:
            execution = replace(execution, arguments=tool.arguments)
            self._refer(tool.arguments)
        self._store_moved(execution)
        return execution

    def _store_moved(self, execution: ExecutionRecord) -> None:
        self.draft.put(keys.execution(self.c.turn_id, execution.call_id), execution)
        self.emit(
            "tool.started" if execution.state is ExecutionState.RUNNING else "tool.requested",
            ToolChanged(
                call_id=execution.call_id,
                state=execution.state,
                name=execution.name,
                kind=execution.kind,
                execution_id=execution.execution_id if execution.kind is ExecutionKind.EXTERNAL else None,
            ),
        )

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
            known = self.draft.get(key, InteractionRecord)
            if known is not None:
                # Asked before: the question stands, and so does its answer (C39).
                if known.state is InteractionState.APPLIED:
                    raise InvalidRequest(f"interaction {asked.interaction_id!r} was answered", path="interactions")
                continue
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
            asked = next((c for c in state.conditions if c.id == interaction_id), None)
            if asked is not None:
                state = with_condition(state, asked, None)
                self._no_longer_asks(asked)
            if interaction.request_id:
                self.emit("signal.applied", SignalChanged(request_id=interaction.request_id, operation="respond"))
        return state

    def _no_longer_asks(self, asked: Condition) -> None:
        """A call whose answer was taken in, and that was neither started nor denied with it, is merely requested."""
        execution = self.draft.get(keys.execution(self.c.turn_id, asked.call_id), ExecutionRecord)
        if execution is not None and execution.state is ExecutionState.AWAITING_APPROVAL:
            self._store_moved(replace(execution, state=ExecutionState.REQUESTED))

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
                ready=self._accepted(wait.key) is not None,
                deadline_ms=wait.deadline_ms,
            )
            # Who waits again for the same key goes on waiting, until the new time.
            state = with_condition(state, _wait_for(state, wait.key), condition)
        return state

    def _accepted(self, key: str) -> tuple[str, SignalRecord] | None:
        """The oldest signal of a key that nobody has consumed."""
        found = self.draft.page(_signals(self.c.turn_id, key), SignalRecord)
        return next(((at, record) for at, record in found if record.state is SignalState.ACCEPTED), None)

    def _consume(self, state: TurnState, key: str) -> TurnState:
        """The oldest accepted signal of a key is used up, and the wait for it ends."""
        old = _wait_for(state, key)
        if old is None:
            raise NotFound("wait condition of this turn", key)
        found = self._accepted(key)
        if found is not None:
            at, record = found
            self.draft.put(at, replace(record, state=SignalState.APPLIED))
            self.emit("signal.applied", SignalChanged(request_id=record.request_id, operation="signal", key=key))
        return with_condition(state, old, None)


def _wait_for(state: TurnState, key: str) -> Condition | None:
    return next((c for c in state.conditions if c.kind is WaitKind.SIGNAL and c.id == key), None)


# ---- the end of a Run ----


def _end(draft: Draft, c: CommitStep, end: RunEnd, active: ThreadHead, state: TurnState) -> Change:
    """What becomes of the Turn when its invocation ends (RT-49: not necessarily its own end)."""
    kind = end.kind
    if kind is RunEndKind.COMPLETED:
        if state.steers and not state.cancel and end.finish_reason == "completed":
            # Input that redirects the agent was accepted before the answer became final: one more round (D20).
            after = draft.show(draft.turn(c.thread_id, c.turn_id), active.turn, state)
            draft.set_active(c.thread_id, replace(active, turn=after))
            return draft.change(_receipt(active, after, draft.now_ms))
        if state.pause and not state.cancel:
            # The pause was accepted first: the answer is stored, the Turn stops before its end (TF-03).
            kind = RunEndKind.PAUSED
        elif unsettled(state):
            # Nobody may call a Turn done over a tool that is still under way (SE-12).
            raise InvalidTransition(c.turn_id, "waiting for a tool", TurnStatus.COMPLETED)
    if kind is RunEndKind.CANCELLED and not state.cancel:
        raise InvalidRequest("a run ends cancelled only after a cancel was accepted", path="end")
    if (kind is RunEndKind.FAILED) is not (end.failure is not None):
        raise InvalidRequest("a failure belongs to a run that failed, and to no other", path="end.failure")
    if end.operator and end.kind is not RunEndKind.SUSPENDED:
        raise InvalidRequest("only a run that is suspended leaves its turn to a person", path="end.operator")
    record = draft.turn(c.thread_id, c.turn_id)
    end_run(draft, record, active.run, _RUN_STATUS[kind], active.position, failure=end.failure)
    record = replace(record, last_at=active.position)

    if kind is RunEndKind.CANCELLED:
        return _keep_for_settlement(draft, c, record, active, state)
    thread = release(draft, active, c.thread_id, settled=kind is RunEndKind.COMPLETED)
    if kind is RunEndKind.COMPLETED:
        state = lose_local_tools(draft, record, state, settling=True)
        state = replace(
            state,
            result=Result(
                message_id=end.message_id,
                message_seq=state.message_seq if state.message_id == end.message_id else 0,
                finish_reason=end.finish_reason,
            ),
        )
        end_turn(draft, thread, record, state, TurnStatus.COMPLETED)
        return draft.change(_receipt(active, replace(state, inputs=0), draft.now_ms, ended=True))
    if end.failure is not None:
        state = _failed(draft, end.failure, end.policy, record, state)
    state = lose_local_tools(draft, record, state, settling=settling(state))
    if end.operator and not settling(state):
        # A cancelled Turn ends whether somebody has looked or not.
        state = replace(state, operator=end.operator)
    state = draft.store_turn(record, _after_run(draft, kind, record, state))
    return draft.change(_receipt(active, state, draft.now_ms, ended=True))


_STARTS = {
    ExecutionKind.LOCAL: ExecutionState.RUNNING,
    ExecutionKind.EXTERNAL: ExecutionState.INTENT,
    ExecutionKind.MANUAL: ExecutionState.INTENT,
}
"""What a call of each kind becomes when its Run lets it start: only a local tool begins at once."""

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
    return draft.change(_receipt(active, state, draft.now_ms, ended=True))


def _after_run(draft: Draft, kind: RunEndKind, record: TurnRecord, state: TurnState) -> TurnState:
    """Where the Turn stands when its Run is over and it has not ended."""
    if settling(state):
        return state
    if state.pause:
        return paused(draft, record, state)
    if kind in (RunEndKind.RELEASED, RunEndKind.PAUSED):
        # Another host goes on. So it does when a Run stopped for a pause that nobody wants any more.
        return state
    return move(record.turn_id, state, TurnStatus.WAITING)


def _failed(draft: Draft, failure: Failure, policy: RecoveryPolicy, record: TurnRecord, state: TurnState) -> TurnState:
    """Count a failed invocation; the policy of the first one stays in force (RC-12, RC-13)."""
    former = state.recovery
    failures = 1 if former is None else former.failures + 1
    recovery = Recovery(
        max_retries=policy.max_retries if former is None else former.max_retries,
        initial_backoff_ms=policy.initial_backoff_ms if former is None else former.initial_backoff_ms,
        max_backoff_ms=policy.max_backoff_ms if former is None else former.max_backoff_ms,
        failures=failures,
        next_retry_at_ms=0,
        last_error=failure,
    )
    if state.cancel:
        # It is not tried again, whatever the failure: it ends CANCELLED.
        return replace(state, recovery=recovery)
    if failure.retryable and failures <= recovery.max_retries:
        return replace(state, recovery=replace(recovery, next_retry_at_ms=retry_at_ms(recovery, draft.now_ms)))
    state = replace(state, recovery=recovery, failure=failure, settle_ms=0)
    return stop_executions(draft, record, state)
