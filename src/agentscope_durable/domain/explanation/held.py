"""Rows of a Turn that has ended or is to end, and of one that a person, its queue or a retry holds."""

from __future__ import annotations

from collections.abc import Iterator

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.explanation import Reason
from agentscope_durable.contracts.status import Actor, ReasonKind, TurnStatus
from agentscope_durable.domain.explanation.facts import Facts
from agentscope_durable.domain.explanation.words import count, named
from agentscope_durable.domain.turn import settling, unsettled

__all__ = ["behind", "ended", "ending", "inputs", "operator", "paused", "pausing", "retry"]


def ended(facts: Facts) -> Iterator[Reason]:
    view = facts.view
    if not view.status.terminal:
        return
    text = f"It is {view.status}."
    action = "An observer that still waits has lost its connection: it reads on from its cursor, or from a snapshot."
    if view.error is not None:
        text = f"It is {view.status}: {view.error.kind}: {view.error.message}"
    if view.status is not TurnStatus.COMPLETED:
        action = f"It stays {view.status}. Another try is a new Turn, with a new request id. {action}"
    yield Reason(
        kind=ReasonKind.ENDED,
        text=text,
        next_action=action,
        since_ms=view.updated_at_ms,
        commands=(("history", facts.turn_id),),
    )


def operator(facts: Facts) -> Iterator[Reason]:
    if not facts.state.operator or facts.view.status.terminal:
        return
    yield Reason(
        kind=ReasonKind.OPERATOR,
        text=f"It was parked for a person to look at: {facts.state.operator}",
        next_action="Remove the cause, then release it; or cancel it.",
        actor=Actor.OPERATOR,
        id=facts.turn_id,
        since_ms=facts.state.updated_ms,
        commands=(
            ("runs", facts.turn_id),
            ("doctor", "--session", keys.spell(facts.view.session)),
            ("release", facts.turn_id),
            ("cancel", facts.turn_id),
        ),
    )


def behind(facts: Facts) -> Iterator[Reason]:
    head = facts.head
    if head is None or facts.view.status.terminal:
        return
    ahead = "many Turns" if facts.ahead is None else "one Turn" if facts.ahead == 1 else f"{facts.ahead} Turns"
    text = (
        f"It is queued behind {ahead} of thread {facts.view.thread_id!r}; at the head is {head.turn_id}, {head.status}."
    )
    if head.status in (TurnStatus.WAITING, TurnStatus.PAUSED):
        action = "Resolve or cancel the head, or submit independent work to another Thread."
        actor = Actor.USER
    else:
        action = "Wait for the head, or see what holds it."
        actor = Actor.NOBODY
    yield Reason(
        kind=ReasonKind.QUEUED_BEHIND,
        text=text,
        next_action=action,
        actor=actor,
        id=head.turn_id,
        since_ms=facts.view.created_at_ms,
        commands=(("explain", head.turn_id), ("cancel", head.turn_id)),
    )


def paused(facts: Facts) -> Iterator[Reason]:
    if facts.view.status is not TurnStatus.PAUSED:
        return
    arrived = sum(condition.ready for condition in facts.state.conditions)
    waits = (
        "" if not arrived else f" {count(arrived, 'answer or result has', 'answers or results have')} arrived since."
    )
    yield Reason(
        kind=ReasonKind.PAUSED,
        text=f"It is paused, at revision {facts.view.revision}.{waits}",
        next_action="Resume it with this revision when the user is ready; what arrives meanwhile is kept.",
        actor=Actor.USER,
        id=facts.turn_id,
        since_ms=facts.state.updated_ms,
        commands=(("resume", facts.turn_id, "--revision", str(facts.view.revision)),),
    )


def pausing(facts: Facts) -> Iterator[Reason]:
    if facts.view.status is not TurnStatus.PAUSING:
        return
    yield Reason(
        kind=ReasonKind.PAUSING,
        text="A pause was accepted; the agent stops at its next boundary: after the model's answer, or a tool's end.",
        next_action="Wait until it is PAUSED; only that says that the agent has stopped.",
        id=facts.turn_id,
        since_ms=facts.state.updated_ms,
    )


def ending(facts: Facts) -> Iterator[Reason]:
    state = facts.state
    if not settling(state):
        return
    held = unsettled(state)
    if held:
        calls = named(condition.call_id or condition.id for condition in held)
        until = f"It ends when the outcome of {count(len(held), 'call is', 'calls are')} known: {calls}."
        action = "Query the original execution and verify its outcome; do not repeat the effect."
    elif facts.owner is not None:
        until, action = "Its host is stopping it.", "Wait: it ends at the next boundary."
    else:
        until, action = "Nothing is in its way.", "Wait: a host settles it."
    if state.cancel:
        kind, text = ReasonKind.CANCELLING, f"A cancel was accepted (request {state.cancel!r}). {until}"
    else:
        error = "" if state.failure is None else f" ({state.failure.kind}: {state.failure.message})"
        kind, text = ReasonKind.FAILING, f"It has failed for good{error}. {until}"
    yield Reason(
        kind=kind,
        text=text,
        next_action=action,
        id=facts.turn_id,
        since_ms=state.updated_ms,
        commands=(("tools", facts.turn_id),) if held else (),
    )
    if not held and state.settle_ms > facts.now_ms:
        yield Reason(
            kind=ReasonKind.SETTLEMENT,
            text=f"Settling its effects was tried {count(state.settle_tries, 'time', 'times')} and is tried again.",
            next_action="Wait; if it does not end, look at the hosts' logs.",
            id=facts.turn_id,
            until_ms=state.settle_ms,
        )


def retry(facts: Facts) -> Iterator[Reason]:
    recovery = facts.state.recovery
    if recovery is None or facts.view.status.terminal or facts.owner is not None or settling(facts.state):
        return
    due = recovery.next_retry_at_ms
    if due <= facts.now_ms:
        return
    error = recovery.last_error
    yield Reason(
        kind=ReasonKind.RETRY,
        text=(
            f"{count(recovery.failures, 'invocation has', 'invocations have')} failed, of at most"
            f" {recovery.max_retries + 1}; the last with {error.kind}: {error.message}"
        ),
        next_action="Wait: it is tried again at its time. Another host or a signal does not make it sooner.",
        id=facts.turn_id,
        until_ms=due,
        commands=(("runs", facts.turn_id), ("cancel", facts.turn_id)),
    )


def inputs(facts: Facts) -> Iterator[Reason]:
    if not facts.state.inputs or facts.view.status.terminal:
        return
    yield Reason(
        kind=ReasonKind.INPUTS,
        text=f"{count(facts.state.inputs, 'accepted input waits', 'accepted inputs wait')} for its next boundary.",
        next_action="Wait: they are applied when the agent goes on. Until then each can be withdrawn.",
        id=facts.turn_id,
        commands=(("withdraw", facts.turn_id, "REQUEST-ID"),),
    )
