"""How far a Run has come: its Steps, its model requests and the messages it has written."""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.commands import CommitStep
from agentscope_durable.contracts.events import (
    MessageAbandoned,
    MessageCompleted,
    StepEnded,
    StepPhaseChanged,
    StepStarted,
)
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.records import MessageIndex, OpenModel, RunState, TurnState
from agentscope_durable.contracts.status import ExecutionState, ModelStatus, StepStatus
from agentscope_durable.domain.step.commit import Commit


def advance_steps(commit: Commit, run: RunState, facts: tuple[StepFact, ...]) -> RunState:
    """Steps that begin, go into another phase or end."""
    for fact in facts:
        commit.draft.fact(fact)
        run = _step(commit, run, fact)
    return run


def _step(commit: Commit, run: RunState, fact: StepFact) -> RunState:
    if fact.status is not StepStatus.RUNNING:
        commit.emit("step.ended", StepEnded(status=fact.status), step_id=fact.step_id)
        return replace(run, step_id="") if run.step_id == fact.step_id else run
    if fact.step_id != run.step_id:
        commit.emit(
            "step.started",
            StepStarted(number=fact.number, phase=fact.phase, resumed_from_step_id=fact.resumed_from or None),
            step_id=fact.step_id,
        )
    elif fact.phase is not run.phase:
        commit.emit("step.phase", StepPhaseChanged(phase=fact.phase), step_id=fact.step_id)
    return replace(run, step_id=fact.step_id, phase=fact.phase, steps=fact.number)


def note_models(commit: Commit, run: RunState) -> RunState:
    """Which requests to the model are under way, and how many there were."""
    # Those under way, in the order in which they began. Request 0 speaks of a call and not of a request.
    models = {(model.model_call_id, model.request): model for model in run.models}
    calls = run.calls
    for fact in commit.c.models:
        commit.draft.fact(fact)
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
                started_ms=commit.draft.now_ms,
            )
    return replace(run, models=tuple(models.values()), calls=calls)


def write_messages(commit: Commit, state: TurnState) -> TurnState:
    """Messages and their later versions; an attempt that was given up is told too."""
    for abandon in commit.c.abandons:
        commit.emit(
            "message.abandoned",
            MessageAbandoned(message_id=abandon.message_id, attempt=abandon.attempt, reason=abandon.reason),
        )
    for message in commit.c.messages:
        seq = commit.emit(
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
        commit.draft.put(
            keys.message(message.first_seq or seq),
            MessageIndex(
                message_id=message.message_id,
                turn_id=commit.c.turn_id,
                thread_id=commit.c.thread_id,
                seq=seq,
            ),
        )
        commit.refer(message.content)
        if message.structured is not None:
            commit.refer(message.structured)
        state = replace(state, message_id=message.message_id, message_seq=seq)
    return state


def steps_around(steps: tuple[StepFact, ...]) -> tuple[tuple[StepFact, ...], tuple[StepFact, ...]]:
    """The Steps' facts before and after the rest of the commit: what happens in a Step is told before its end."""
    count = len(steps)
    while count and steps[count - 1].status is not StepStatus.RUNNING:
        count -= 1
    return steps[:count], steps[count:]


def only_begins(c: CommitStep) -> bool:
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
