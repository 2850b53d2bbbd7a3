"""What a Run asks and waits for, and the answers, inputs and signals that it takes in."""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import PAGE_MAX, Range
from agentscope_durable.contracts.errors import InputsChanged, InvalidRequest, LimitExceeded, NotFound
from agentscope_durable.contracts.events import InteractionRequested, SignalChanged
from agentscope_durable.contracts.records import (
    OPEN_CONDITIONS_MAX,
    Condition,
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    SignalRecord,
    TurnState,
)
from agentscope_durable.contracts.status import ExecutionState, InteractionKind, InteractionState, SignalState, WaitKind
from agentscope_durable.domain.execution import with_condition
from agentscope_durable.domain.step.commit import Commit
from agentscope_durable.domain.step.tools import store_moved


def ask(commit: Commit, state: TurnState) -> TurnState:
    """Open the questions that were not asked before; the Turn waits for their answers."""
    for asked in commit.c.interactions:
        key = keys.interaction(commit.c.turn_id, asked.interaction_id)
        known = commit.draft.get(key, InteractionRecord)
        if known is not None:
            # Asked before: the question stands, and so does its answer (C39).
            if known.state is InteractionState.APPLIED:
                raise InvalidRequest(f"interaction {asked.interaction_id!r} was answered", path="interactions")
            continue
        commit.draft.put(
            key,
            InteractionRecord(
                interaction_id=asked.interaction_id,
                call_id=asked.call_id,
                kind=asked.kind,
                name=asked.name,
                arguments=asked.arguments,
                origin=commit.here,
                opened_ms=commit.draft.now_ms,
            ),
        )
        commit.refer(asked.arguments)
        commit.emit(
            "interaction.requested",
            InteractionRequested(
                interaction_id=asked.interaction_id,
                call_id=asked.call_id,
                kind=asked.kind,
                name=asked.name,
                arguments=asked.arguments,
                opened_at_ms=commit.draft.now_ms,
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
                since_ms=commit.draft.now_ms,
            ),
        )
    return state


def apply_answers(commit: Commit, state: TurnState) -> TurnState:
    """The agent has taken these answers in."""
    for interaction_id in commit.c.answers:
        key = keys.interaction(commit.c.turn_id, interaction_id)
        interaction = commit.draft.get(key, InteractionRecord)
        if interaction is None:
            raise NotFound("interaction of this turn", interaction_id)
        if interaction.state is InteractionState.APPLIED:
            continue
        if interaction.state is not InteractionState.RESOLVED:
            raise InvalidRequest(
                f"interaction {interaction_id!r} is {interaction.state} and has no answer to apply", path="answers"
            )
        commit.draft.put(key, replace(interaction, state=InteractionState.APPLIED))
        asked = next((c for c in state.conditions if c.id == interaction_id), None)
        if asked is not None:
            state = with_condition(state, asked, None)
            _no_longer_asks(commit, asked)
        if interaction.request_id:
            commit.emit("signal.applied", SignalChanged(request_id=interaction.request_id, operation="respond"))
    return state


def _no_longer_asks(commit: Commit, asked: Condition) -> None:
    """A call whose answer was taken in, and that was neither started nor denied with it, is merely requested."""
    execution = commit.draft.get(keys.execution(commit.c.turn_id, asked.call_id), ExecutionRecord)
    if execution is not None and execution.state is ExecutionState.AWAITING_APPROVAL:
        store_moved(commit, replace(execution, state=ExecutionState.REQUESTED))


def apply_inputs(commit: Commit, state: TurnState) -> TurnState:
    """Each input enters one checkpoint: it loses to a withdraw that was committed before (CT-04, CT-21)."""
    for ordinal in commit.c.inputs:
        key = keys.input_(commit.c.turn_id, ordinal)
        pending = commit.draft.get(key, InputRecord)
        if pending is None or pending.state is not SignalState.ACCEPTED:
            raise InputsChanged(commit.c.turn_id)
        commit.draft.put(key, replace(pending, state=SignalState.APPLIED))
        commit.emit(
            "signal.applied",
            SignalChanged(request_id=pending.request_id, operation=pending.kind, message_id=pending.message_id),
        )
        state = replace(state, inputs=state.inputs - 1, steers=state.steers - (pending.kind == "steer"))
    return state


def wait(commit: Commit, state: TurnState) -> TurnState:
    """Signals are consumed, then new waits begin."""
    for key in commit.c.signals:
        state = _consume(commit, state, key)
    for wait in commit.c.waits:
        if not wait.key.startswith("x."):
            raise InvalidRequest(f"a wait key must begin with 'x.', not {wait.key!r}", path="waits")
        if len(state.conditions) >= OPEN_CONDITIONS_MAX:
            raise LimitExceeded("open waits of a turn", OPEN_CONDITIONS_MAX)
        condition = Condition(
            kind=WaitKind.SIGNAL,
            id=wait.key,
            call_id="",
            since_ms=commit.draft.now_ms,
            ready=_accepted(commit, wait.key) is not None,
            deadline_ms=wait.deadline_ms,
        )
        # Who waits again for the same key goes on waiting, until the new time.
        state = with_condition(state, _wait_for(state, wait.key), condition)
    return state


def _accepted(commit: Commit, key: str) -> tuple[str, SignalRecord] | None:
    """The oldest signal of a key that nobody has consumed."""
    found = commit.draft.page(signals_of(commit.c.turn_id, key), SignalRecord)
    return next(((at, record) for at, record in found if record.state is SignalState.ACCEPTED), None)


def _consume(commit: Commit, state: TurnState, key: str) -> TurnState:
    """The oldest accepted signal of a key is used up, and the wait for it ends."""
    old = _wait_for(state, key)
    if old is None:
        raise NotFound("wait condition of this turn", key)
    found = _accepted(commit, key)
    if found is not None:
        at, record = found
        commit.draft.put(at, replace(record, state=SignalState.APPLIED))
        commit.emit("signal.applied", SignalChanged(request_id=record.request_id, operation="signal", key=key))
    return with_condition(state, old, None)


def _wait_for(state: TurnState, key: str) -> Condition | None:
    return next((c for c in state.conditions if c.kind is WaitKind.SIGNAL and c.id == key), None)


def signals_of(turn_id: str, key: str) -> Range:
    """The signals of one key, oldest first."""
    return Range(keys.signals(turn_id, key), limit=PAGE_MAX)
