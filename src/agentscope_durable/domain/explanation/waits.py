"""Rows of what a Turn has open outside: questions, tools, signals, delegated Turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from agentscope_durable.contracts.explanation import Reason
from agentscope_durable.contracts.records import Condition
from agentscope_durable.contracts.status import Actor, ExecutionKind, ExecutionState, ReasonKind, WaitKind
from agentscope_durable.domain.explanation.facts import Facts
from agentscope_durable.domain.turn import settling, unsettled

__all__ = ["open_conditions"]


def open_conditions(facts: Facts) -> Iterator[Reason]:
    state = facts.state
    if state.status.terminal:
        return
    if settling(state):
        held: Iterable[Condition] = unsettled(state)
    else:
        held = (condition for condition in state.conditions if not condition.ready)
    for condition in held:
        tell = _TELL.get(condition.kind)
        # What runs inside the agent's process is a part of its Run, and lost or run again with it.
        of_run = facts.active is not None and condition.kind is WaitKind.TOOL_RUNNING and _is_local(facts, condition)
        if tell is not None and not of_run:
            yield tell(facts, condition)


def _approval(facts: Facts, condition: Condition) -> Reason:
    return Reason(
        kind=ReasonKind.APPROVAL,
        text=f"It waits for approval of {_tool(facts, condition)}.",
        next_action="Read what is to be done, then approve or deny it.",
        actor=Actor.USER,
        id=condition.id,
        since_ms=condition.since_ms,
        commands=(
            ("interactions", facts.turn_id),
            ("respond", facts.turn_id, condition.id, "--approve"),
            ("respond", facts.turn_id, condition.id, "--deny"),
        ),
    )


def _external_result(facts: Facts, condition: Condition) -> Reason:
    return Reason(
        kind=ReasonKind.EXTERNAL_RESULT,
        text=f"It waits for somebody to give the result of {_tool(facts, condition)}.",
        next_action="Do what it asks for and answer with the result as JSON.",
        actor=Actor.USER,
        id=condition.id,
        since_ms=condition.since_ms,
        commands=(("interactions", facts.turn_id), ("respond", facts.turn_id, condition.id, "--result", "JSON")),
    )


def _tool_running(facts: Facts, condition: Condition) -> Reason:
    execution = facts.executions.get(condition.call_id)
    text = f"It waits for the end of {_tool(facts, condition)}."
    action, actor = "Wait: the result comes through its executor, and the Turn goes on by itself.", Actor.NOBODY
    if execution is not None and execution.kind is ExecutionKind.EXTERNAL:
        serving = [host for host in facts.hosts if host.there and execution.route in host.notice.routes]
        if execution.state is ExecutionState.INTENT:
            text = f"It waits for an executor to start {_tool(facts, condition)}, route {execution.route!r}."
        elif execution.owner:
            text = f"{text[:-1]}, execution {execution.execution_id}, on host {execution.owner}."
        else:
            text = f"{text[:-1]}, execution {execution.execution_id}; its executor is asked again from time to time."
        if execution.cancel_requested:
            text = f"{text} It was asked to stop and has not confirmed that."
        if not serving:
            action = f"Start a host with an executor for route {execution.route!r}: no living host has one."
            actor = Actor.OPERATOR
    return Reason(
        kind=ReasonKind.TOOL_RUNNING,
        text=text,
        next_action=action,
        actor=actor,
        id=condition.call_id or condition.id,
        since_ms=condition.since_ms,
        commands=(("tools", facts.turn_id),),
    )


def _tool_unknown(facts: Facts, condition: Condition) -> Reason:
    call_id = condition.call_id or condition.id
    reconcile = ("reconcile", facts.turn_id, call_id, "--evidence", "REFERENCE")
    return Reason(
        kind=ReasonKind.TOOL_UNKNOWN,
        text=f"Nobody can say what became of {_tool(facts, condition)}: it was started, and its end was not seen.",
        next_action="Find out what it did, outside, and settle it with that evidence; do not run it again to go on.",
        actor=Actor.OPERATOR,
        id=call_id,
        since_ms=condition.since_ms,
        commands=(
            ("tools", facts.turn_id),
            (*reconcile, "--succeeded", "JSON"),
            (*reconcile, "--failed", "REASON"),
        ),
    )


def _child(facts: Facts, condition: Condition) -> Reason:
    return Reason(
        kind=ReasonKind.CHILD,
        text=f"It waits for the Turn it has delegated to: {condition.id}.",
        next_action="Wait until that one ends, or see what it waits for.",
        id=condition.id,
        since_ms=condition.since_ms,
        commands=(("explain", condition.id),),
    )


def _signal(facts: Facts, condition: Condition) -> Reason:
    until = condition.deadline_ms or None
    return Reason(
        kind=ReasonKind.SIGNAL,
        text=f"It waits for the signal {condition.id!r}{'' if until is None else ', or for its time to pass'}.",
        next_action="Send the signal." if until is None else "Send the signal, or wait.",
        actor=Actor.USER if until is None else Actor.NOBODY,
        id=condition.id,
        since_ms=condition.since_ms,
        until_ms=until,
        commands=(("signal", facts.turn_id, condition.id),),
    )


_TELL: Final[dict[WaitKind, Callable[[Facts, Condition], Reason]]] = {
    WaitKind.APPROVAL: _approval,
    WaitKind.EXTERNAL_RESULT: _external_result,
    WaitKind.TOOL_RUNNING: _tool_running,
    WaitKind.TOOL_UNKNOWN: _tool_unknown,
    WaitKind.CHILD: _child,
    WaitKind.SIGNAL: _signal,
}


def _is_local(facts: Facts, condition: Condition) -> bool:
    execution = facts.executions.get(condition.call_id)
    return execution is not None and execution.kind is ExecutionKind.LOCAL


def _tool(facts: Facts, condition: Condition) -> str:
    """A call as people say it: the tool's name, and the call's id."""
    question, execution = facts.interactions.get(condition.id), facts.executions.get(condition.call_id)
    name = question.name if question is not None else execution.name if execution is not None else ""
    return f"{name!r} (call {condition.call_id})" if name else f"call {condition.call_id}"
