"""A tool call outside the agent: started at most once, and never guessed.

Three facts are kept apart: the execution ended, its result was received, the result was applied
(PR-08). A start is granted under a fence of its own; once granted, nobody starts it again. A host
that finds it running under a dead owner may only query. What nobody can say stays UNKNOWN until
evidence, or a true outcome that arrives late, settles it (UN-12).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import (
    ClaimExecution,
    ExecutionAction,
    ExecutionGrant,
    OutcomeRecorded,
    RecordOutcome,
)
from agentscope_durable.contracts.errors import InvalidRequest, NotFound
from agentscope_durable.contracts.events import ToolChanged
from agentscope_durable.contracts.records import Condition, ExecutionRecord, TurnRecord, TurnState
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, ReplayRule, WaitKind
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.turn import settling as is_settling

RECHECK_MS = 30_000
"""How long before a running execution is looked at again, if its executor did not say when."""

MOVES: dict[ExecutionState, frozenset[ExecutionState]] = {
    ExecutionState.REQUESTED: frozenset(
        {
            ExecutionState.AWAITING_APPROVAL,
            ExecutionState.DENIED,
            ExecutionState.INTENT,
            ExecutionState.RUNNING,
            ExecutionState.COMPLETED,
            ExecutionState.FAILED,
            ExecutionState.CANCELLED,
        }
    ),
    ExecutionState.AWAITING_APPROVAL: frozenset(
        {
            ExecutionState.REQUESTED,
            ExecutionState.DENIED,
            ExecutionState.INTENT,
            ExecutionState.RUNNING,
            ExecutionState.COMPLETED,
            ExecutionState.FAILED,
            ExecutionState.CANCELLED,
        }
    ),
    ExecutionState.INTENT: frozenset(
        {
            ExecutionState.RUNNING,
            ExecutionState.COMPLETED,
            ExecutionState.FAILED,
            ExecutionState.CANCELLED,
            ExecutionState.UNKNOWN,
        }
    ),
    ExecutionState.RUNNING: frozenset(
        {ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED, ExecutionState.UNKNOWN}
    ),
    ExecutionState.UNKNOWN: frozenset(
        {ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED, ExecutionState.RUNNING}
    ),
    ExecutionState.DENIED: frozenset(),
    ExecutionState.COMPLETED: frozenset(),
    ExecutionState.FAILED: frozenset(),
    ExecutionState.CANCELLED: frozenset(),
}
"""What may become of a call (STATES section 4). UNKNOWN goes back to RUNNING only for a local tool whose
stored and present rule both say it may run again, or when a query finds it still going."""


def may_become(record: ExecutionRecord, state: ExecutionState) -> bool:
    return state in MOVES[record.state]


def item_of(turn_id: str, call_id: str) -> str:
    """The item under which an execution stands in the ready index."""
    return f"{turn_id}/{call_id}"


def condition_of(state: TurnState, call_id: str, kinds: Iterable[WaitKind]) -> Condition | None:
    wanted = frozenset(kinds)
    return next((c for c in state.conditions if c.call_id == call_id and c.kind in wanted), None)


def with_condition(state: TurnState, old: Condition | None, new: Condition | None) -> TurnState:
    """The state with one condition replaced, added (old None) or removed (new None)."""
    kept = tuple(
        new if c is old and new is not None else c for c in state.conditions if c is not old or new is not None
    )
    if old is None and new is not None:
        kept = (*kept, new)
    return replace(state, conditions=kept)


EFFECT_KINDS = (WaitKind.TOOL_RUNNING, WaitKind.TOOL_UNKNOWN)
STARTED = frozenset({ExecutionState.INTENT, ExecutionState.RUNNING})
UNDER_WAY = STARTED | {ExecutionState.UNKNOWN}
"""The agent has let it start, and its outcome is not known."""
OUTCOMES = frozenset({ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.CANCELLED})
"""What may become of a call that was let start."""


class Place(Protocol):
    """Which Turn something belongs to."""

    @property
    def thread_id(self) -> str: ...

    @property
    def turn_id(self) -> str: ...


def offer(draft: Draft, place: Place, execution: ExecutionRecord, *, due_ms: int) -> None:
    """Somebody who serves the route has to look at it: to start it, to ask for it or to stop it."""
    draft.ready(
        keys.READY_DISPATCH,
        execution.route,
        item_of(place.turn_id, execution.call_id),
        due_ms=due_ms,
        value=keys.dispatch_value(execution.route, place.thread_id),
    )


# ---- outcomes ----


def settle_execution(
    draft: Draft,
    place: Place,
    state: TurnState,
    execution: ExecutionRecord,
    outcome: ExecutionState,
    body: Body | None,
    *,
    evidence: str = "",
    run_id: str = "",
    step_id: str = "",
) -> TurnState:
    """Store a definite outcome and make it applicable. The result's body stands in the event alone."""
    seq = draft.emit(
        "tool.completed",
        ToolChanged(
            call_id=execution.call_id,
            state=outcome,
            name=execution.name,
            kind=execution.kind,
            execution_id=execution.execution_id if execution.kind is ExecutionKind.EXTERNAL else None,
            result=body,
            received_at_ms=draft.now_ms,
            cancel_requested=execution.cancel_requested,
        ),
        thread_id=place.thread_id,
        turn_id=place.turn_id,
        run_id=run_id,
        step_id=step_id,
    )
    if body is not None:
        draft.refer(body)
    draft.put(
        keys.execution(place.turn_id, execution.call_id),
        replace(
            execution,
            state=outcome,
            result=None,
            seq=seq if body is not None else 0,
            received_ms=draft.now_ms,
            evidence=evidence,
            owner="",
        ),
    )
    item = item_of(place.turn_id, execution.call_id)
    if execution.kind is ExecutionKind.EXTERNAL:
        draft.unready(keys.READY_DISPATCH, item)
        draft.unready(keys.READY_RUNNING, item)
    old = condition_of(state, execution.call_id, EFFECT_KINDS)
    if old is None:
        return state
    return with_condition(state, old, replace(old, kind=WaitKind.TOOL_RUNNING, ready=True))


def lose_execution(
    draft: Draft, place: Place, state: TurnState, execution: ExecutionRecord, *, recheck_ms: int = 0
) -> TurnState:
    """Nobody can say what became of it: UNKNOWN, visibly (SE-02)."""
    draft.emit(
        "tool.unknown",
        ToolChanged(call_id=execution.call_id, state=ExecutionState.UNKNOWN, name=execution.name, kind=execution.kind),
        thread_id=place.thread_id,
        turn_id=place.turn_id,
    )
    draft.put(
        keys.execution(place.turn_id, execution.call_id),
        replace(execution, state=ExecutionState.UNKNOWN, owner="", tries=execution.tries + 1),
    )
    if execution.kind is ExecutionKind.EXTERNAL:
        item = item_of(place.turn_id, execution.call_id)
        draft.unready(keys.READY_RUNNING, item)
        # Where a dispatch row stands, somebody has still to ask or to cancel: it stays.
        if recheck_ms:
            offer(draft, place, execution, due_ms=draft.now_ms + recheck_ms)
    old = condition_of(state, execution.call_id, EFFECT_KINDS)
    if old is None:
        return state
    return with_condition(state, old, replace(old, kind=WaitKind.TOOL_UNKNOWN, ready=False))


def stop_executions(draft: Draft, record: TurnRecord, state: TurnState) -> TurnState:
    """Ask everything under way to stop, by its original id (SE-01, CT-08).

    What was never started is cancelled here and now; what was started keeps its state until its
    end is confirmed.
    """
    open_calls = [c.call_id for c in state.conditions if c.kind in EFFECT_KINDS]
    draft.require(tuple(keys.execution(record.turn_id, call_id) for call_id in open_calls))
    owned = draft.active(record.thread_id, record.turn_id) is not None
    for call_id in open_calls:
        execution = _execution(draft, record.turn_id, call_id)
        if execution.state.terminal:
            continue
        if execution.kind is ExecutionKind.LOCAL:
            if not owned and execution.state is ExecutionState.RUNNING:
                state = end_lost_local(draft, record, state, execution, settling=True)
        elif execution.state is ExecutionState.INTENT:
            state = settle_execution(
                draft, record, state, replace(execution, cancel_requested=True), ExecutionState.CANCELLED, None
            )
        elif not execution.cancel_requested:
            draft.put(keys.execution(record.turn_id, call_id), replace(execution, cancel_requested=True))
            offer(draft, record, execution, due_ms=draft.now_ms)
            draft.emit(
                "tool.cancel_requested",
                ToolChanged(call_id=call_id, state=execution.state, cancel_requested=True),
                thread_id=record.thread_id,
                turn_id=record.turn_id,
            )
    return state


def lose_local_tools(draft: Draft, place: Place, state: TurnState, *, settling: bool) -> TurnState:
    """Local tools that were running when their Run ended without them (D18).

    `settling`: no Run follows that could start them again.
    """
    running = [c.call_id for c in state.conditions if c.kind is WaitKind.TOOL_RUNNING]
    draft.require(tuple(keys.execution(place.turn_id, call_id) for call_id in running))
    for call_id in running:
        execution = _execution(draft, place.turn_id, call_id)
        if execution.kind is ExecutionKind.LOCAL and execution.state is ExecutionState.RUNNING:
            state = end_lost_local(draft, place, state, execution, settling=settling)
    return state


def end_lost_local(
    draft: Draft, place: Place, state: TurnState, execution: ExecutionRecord, *, settling: bool
) -> TurnState:
    """With rule `never` the outcome is UNKNOWN. With rule `safe` the next Run may run it again if its
    present rule agrees, and nothing holds that Run back; if none follows, it is over: nobody must know the outcome of
    a mere reading."""
    if execution.rule is ReplayRule.NEVER:
        return lose_execution(draft, place, state, execution)
    if settling:
        return settle_execution(draft, place, state, execution, ExecutionState.CANCELLED, None)
    old = condition_of(state, execution.call_id, EFFECT_KINDS)
    return state if old is None else with_condition(state, old, replace(old, ready=True))


# ---- the dispatcher's commands ----


def reads_execution(c: ClaimExecution | RecordOutcome) -> Reads:
    return Reads(
        keys=(keys.execution(c.turn_id, c.call_id), keys.turn(c.turn_id), keys.thread(c.thread_id)),
    )


def _execution(draft: Draft, turn_id: str, call_id: str) -> ExecutionRecord:
    execution = draft.get(keys.execution(turn_id, call_id), ExecutionRecord)
    if execution is None:
        raise NotFound("tool call", call_id)
    return execution


def claim_execution(c: ClaimExecution, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Grant the one start of an execution, or say what else may be done with it."""
    draft = begin(view, c.session, seed, now_ms)
    record = draft.turn(c.thread_id, c.turn_id)
    execution = _execution(draft, c.turn_id, c.call_id)
    item = item_of(c.turn_id, c.call_id)
    if execution.kind is not ExecutionKind.EXTERNAL or execution.state not in UNDER_WAY:
        return Unchanged(ExecutionGrant(ExecutionAction.NOTHING))
    # A start that was granted to this host and never heard of is still the one start.
    unheard = c.again and execution.owner == c.owner and execution.tries == 0
    if execution.state is ExecutionState.INTENT or unheard:
        if is_settling(record.state) or execution.cancel_requested:
            state = settle_execution(draft, record, record.state, execution, ExecutionState.CANCELLED, None)
            draft.store_turn(record, state)
            return draft.change(ExecutionGrant(ExecutionAction.NOTHING))
        if unheard:
            return Unchanged(_grant(ExecutionAction.START, execution))
        started = replace(
            execution,
            state=ExecutionState.RUNNING,
            owner=c.owner,
            fence=execution.fence + 1,
            started_ms=now_ms,
        )
        draft.emit(
            "tool.started",
            ToolChanged(call_id=c.call_id, state=ExecutionState.RUNNING, execution_id=execution.execution_id),
            thread_id=c.thread_id,
            turn_id=c.turn_id,
        )
        action = ExecutionAction.START
    else:
        foreign = execution.owner not in ("", c.owner)
        if foreign and execution.owner not in c.dead and view.owner(execution.owner).alive:
            # Whoever started it is alive and answers for it.
            return Unchanged(ExecutionGrant(ExecutionAction.NOTHING))
        action = ExecutionAction.CANCEL if execution.cancel_requested else ExecutionAction.QUERY
        started = replace(execution, owner=c.owner, fence=execution.fence + 1, tries=execution.tries + 1)
    draft.put(keys.execution(c.turn_id, c.call_id), started)
    draft.unready(keys.READY_DISPATCH, item)
    draft.ready(keys.READY_RUNNING, c.owner, item, due_ms=0, value=keys.dispatch_value(execution.route, c.thread_id))
    return draft.change(_grant(action, started))


def _grant(action: ExecutionAction, execution: ExecutionRecord) -> ExecutionGrant:
    return ExecutionGrant(
        action=action,
        execution_id=execution.execution_id,
        name=execution.name,
        route=execution.route,
        arguments=execution.arguments,
        origin=execution.origin,
        tries=execution.tries,
    )


def record_outcome(c: RecordOutcome, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Store what became of an execution and wake its Turn. A second truth changes nothing (LG-11, UN-12)."""
    draft = begin(view, c.session, seed, now_ms)
    record = draft.turn(c.thread_id, c.turn_id)
    execution = _execution(draft, c.turn_id, c.call_id)
    if execution.execution_id != c.execution_id:
        raise InvalidRequest("the execution id is not that of this call", path="execution_id")
    if execution.kind is not ExecutionKind.EXTERNAL:
        raise InvalidRequest(f"the outcome of a call that is {execution.kind} comes from nowhere else", path="call_id")
    if c.state not in OUTCOMES | {ExecutionState.UNKNOWN, ExecutionState.RUNNING}:
        raise InvalidRequest(f"{c.state} is not an outcome of an execution", path="state")
    if execution.state.terminal:
        return _late(draft, c, execution)
    if c.state is execution.state:
        return _again(draft, c, execution)
    if c.state is ExecutionState.RUNNING:
        draft.store_turn(record, _found_running(draft, record, execution))
        return _again(draft, c, replace(execution, state=ExecutionState.RUNNING))
    if c.state is ExecutionState.UNKNOWN:
        state = lose_execution(draft, record, record.state, execution, recheck_ms=c.retry_after_ms)
    else:
        state = settle_execution(draft, record, record.state, execution, c.state, c.result)
    draft.store_turn(record, state)
    return draft.change(OutcomeRecorded(c.state, settled=c.state.terminal))


def _late(draft: Draft, c: RecordOutcome, execution: ExecutionRecord) -> Change | Unchanged:
    """A call that has its outcome is told of another one: the first stands, and what contradicts it is kept."""
    told = OutcomeRecorded(execution.state, settled=False)
    same = execution.state is c.state and not execution.evidence
    if c.state not in OUTCOMES or same or execution.late_state is not None:
        return Unchanged(told)
    draft.put(keys.execution(c.turn_id, c.call_id), replace(execution, late=c.result, late_state=c.state))
    if c.result is not None:
        draft.refer(c.result)
    return draft.change(told)


def _found_running(draft: Draft, record: TurnRecord, execution: ExecutionRecord) -> TurnState:
    """A query found it going on: that much is known again, and nobody may start it."""
    draft.emit(
        "tool.started",
        ToolChanged(call_id=execution.call_id, state=ExecutionState.RUNNING, execution_id=execution.execution_id),
        thread_id=record.thread_id,
        turn_id=record.turn_id,
    )
    old = condition_of(record.state, execution.call_id, EFFECT_KINDS)
    return record.state if old is None else with_condition(record.state, old, replace(old, kind=WaitKind.TOOL_RUNNING))


def _again(draft: Draft, c: RecordOutcome, execution: ExecutionRecord) -> Change:
    """Not settled: look again after a while, from any host that serves the route."""
    draft.unready(keys.READY_RUNNING, item_of(c.turn_id, c.call_id))
    # What is known to be running is looked at again, also if no time was given; what is UNKNOWN may be a person's.
    wait_ms = c.retry_after_ms or (RECHECK_MS if execution.state is ExecutionState.RUNNING else 0)
    if wait_ms:
        offer(draft, c, execution, due_ms=draft.now_ms + wait_ms)
    draft.put(keys.execution(c.turn_id, c.call_id), replace(execution, owner="", tries=execution.tries + 1))
    return draft.change(OutcomeRecorded(execution.state, settled=False))
