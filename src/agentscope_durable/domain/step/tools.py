"""What a Run says of its tool calls, and what it may say."""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import ToolCommit
from agentscope_durable.contracts.errors import InvalidRequest, LimitExceeded
from agentscope_durable.contracts.events import ToolApplied, ToolChanged
from agentscope_durable.contracts.records import OPEN_CONDITIONS_MAX, Condition, ExecutionRecord, TurnState
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, ReplayRule, WaitKind
from agentscope_durable.contracts.views import RunStepRefView
from agentscope_durable.domain import ids
from agentscope_durable.domain.execution import (
    EFFECT_KINDS,
    STARTED,
    UNDER_WAY,
    condition_of,
    lose_execution,
    may_become,
    offer,
    settle_execution,
    with_condition,
)
from agentscope_durable.domain.step.commit import Commit

_STARTS = {
    ExecutionKind.LOCAL: ExecutionState.RUNNING,
    ExecutionKind.EXTERNAL: ExecutionState.INTENT,
    ExecutionKind.MANUAL: ExecutionState.INTENT,
}
"""What a call of each kind becomes when its Run lets it start: only a local tool begins at once."""


def commit_tools(commit: Commit, state: TurnState) -> TurnState:
    for tool in commit.c.tools:
        state = _tool(commit, state, tool)
    return state


def _tool(commit: Commit, state: TurnState, tool: ToolCommit) -> TurnState:
    key = keys.execution(commit.c.turn_id, tool.call_id)
    execution = commit.draft.get(key, ExecutionRecord)
    if not _said(execution, tool):
        _check_tool(commit, state, execution, tool)
        state = _become(commit, state, execution, tool)
        execution = commit.draft.get(key, ExecutionRecord)
    assert execution is not None
    if tool.applied and execution.applied_ms == 0:
        if not execution.state.terminal:
            raise InvalidRequest(
                f"tool call {tool.call_id!r} is {execution.state}: there is no result to apply", path="tools"
            )
        state = _apply(commit, state, execution)
    return state


def _check_tool(commit: Commit, state: TurnState, execution: ExecutionRecord | None, tool: ToolCommit) -> None:
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
        allowed = allowed and any(asked.call_id == tool.call_id for asked in commit.c.interactions)
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
        known = execution.run_id == commit.c.run_id or execution.rule is ReplayRule.SAFE
        allowed = may_become(execution, wanted) and (known or wanted is ExecutionState.UNKNOWN)
    if not allowed:
        present = f"{tool.kind} and new" if execution is None else f"{execution.kind} and {execution.state}"
        raise InvalidRequest(
            f"tool call {tool.call_id!r} is {present}: this commit cannot make it {wanted}", path="tools"
        )


def _become(commit: Commit, state: TurnState, execution: ExecutionRecord | None, tool: ToolCommit) -> TurnState:
    """The call is opened, started (again), lost, or has its outcome."""
    if execution is None:
        execution = _open_tool(commit, tool)
        if not tool.state.terminal:
            return _started(commit, state, execution)
    elif not tool.state.terminal and tool.state is not ExecutionState.UNKNOWN:
        return _started(commit, state, _moved(commit, execution, tool))
    if tool.state is ExecutionState.UNKNOWN:
        return lose_execution(commit.draft, commit.c, state, execution)
    return settle_execution(
        commit.draft,
        commit.c,
        state,
        execution,
        tool.state,
        tool.result,
        run_id=commit.c.run_id,
        step_id=commit.step_id,
    )


def _open_tool(commit: Commit, tool: ToolCommit) -> ExecutionRecord:
    arguments = tool.arguments or Body()
    external = tool.kind is ExecutionKind.EXTERNAL
    execution = ExecutionRecord(
        execution_id=ids.execution_id(commit.c.turn_id, tool.call_id),
        call_id=tool.call_id,
        name=tool.name,
        kind=tool.kind,
        # The agent's own state holds a local call's arguments; a body is stored once.
        arguments=arguments if external else Body(),
        origin=commit.here,
        created_ms=commit.draft.now_ms,
        route=tool.route,
        rule=tool.rule,
        state=tool.state,
        started_ms=commit.draft.now_ms if tool.state is ExecutionState.RUNNING else 0,
        run_id=commit.c.run_id if tool.state is ExecutionState.RUNNING else "",
    )
    commit.refer(arguments)
    seq = commit.emit(
        "tool.requested",
        ToolChanged(
            call_id=tool.call_id,
            state=tool.state,
            name=tool.name,
            kind=tool.kind,
            execution_id=execution.execution_id if external else None,
            arguments=arguments,
            origin=RunStepRefView(run_id=commit.c.run_id, step_id=commit.step_id),
        ),
    )
    execution = replace(execution, requested_seq=seq)
    if not tool.state.terminal:
        commit.draft.put(keys.execution(commit.c.turn_id, tool.call_id), execution)
    return execution


def _started(commit: Commit, state: TurnState, execution: ExecutionRecord) -> TurnState:
    """If it was let start, the Turn has an effect under way. For a manual call its question says so."""
    if execution.state not in STARTED or execution.kind is ExecutionKind.MANUAL:
        return state
    if execution.kind is ExecutionKind.EXTERNAL:
        offer(commit.draft, commit.c, execution, due_ms=commit.draft.now_ms)
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
            since_ms=commit.draft.now_ms,
        ),
    )


def _moved(commit: Commit, execution: ExecutionRecord, tool: ToolCommit) -> ExecutionRecord:
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
        execution = replace(execution, started_ms=commit.draft.now_ms, run_id=commit.c.run_id)
    if execution.kind is ExecutionKind.EXTERNAL and tool.arguments is not None:
        execution = replace(execution, arguments=tool.arguments)
        commit.refer(tool.arguments)
    store_moved(commit, execution)
    return execution


def store_moved(commit: Commit, execution: ExecutionRecord) -> None:
    """The call with its new state, told."""
    commit.draft.put(keys.execution(commit.c.turn_id, execution.call_id), execution)
    commit.emit(
        "tool.started" if execution.state is ExecutionState.RUNNING else "tool.requested",
        ToolChanged(
            call_id=execution.call_id,
            state=execution.state,
            name=execution.name,
            kind=execution.kind,
            execution_id=execution.execution_id if execution.kind is ExecutionKind.EXTERNAL else None,
        ),
    )


def _apply(commit: Commit, state: TurnState, execution: ExecutionRecord) -> TurnState:
    draft = commit.draft
    draft.put(
        keys.execution(commit.c.turn_id, execution.call_id),
        replace(execution, applied_at=commit.here, applied_ms=draft.now_ms),
    )
    commit.emit(
        "tool.applied",
        ToolApplied(
            call_id=execution.call_id,
            applied_at_ms=draft.now_ms,
            applied_at=RunStepRefView(run_id=commit.c.run_id, step_id=commit.step_id),
        ),
    )
    # An answered question is removed by `apply_answers`; one that is still open keeps the Turn.
    return replace(
        state,
        conditions=tuple(c for c in state.conditions if c.call_id != execution.call_id or c.kind is WaitKind.APPROVAL),
    )


def _said(execution: ExecutionRecord | None, tool: ToolCommit) -> bool:
    """Nothing new is said of the call: it is in that state, or has its outcome, whatever its Run takes it for."""
    if execution is None:
        return False
    if execution.state.terminal and tool.applied:
        return True
    return tool.state is execution.state and tool.state is not ExecutionState.RUNNING
