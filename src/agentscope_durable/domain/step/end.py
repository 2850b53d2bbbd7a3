"""What becomes of a Turn when its Run ends."""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change
from agentscope_durable.contracts.commands import CommitStep, RunEnd, RunEndKind
from agentscope_durable.contracts.errors import InvalidRequest, InvalidTransition
from agentscope_durable.contracts.records import Failure, Recovery, Result, RunState, ThreadHead, TurnRecord, TurnState
from agentscope_durable.contracts.status import RunStatus, SettledBy, TurnStatus
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.domain.change import Draft
from agentscope_durable.domain.control import paused
from agentscope_durable.domain.execution import lose_local_tools, stop_executions
from agentscope_durable.domain.finish import end_turn
from agentscope_durable.domain.lease import end_run, release
from agentscope_durable.domain.retry import retry_at_ms
from agentscope_durable.domain.step.commit import receipt
from agentscope_durable.domain.turn import move, settling, unsettled

_RUN_STATUS = {
    RunEndKind.SUSPENDED: RunStatus.SUSPENDED,
    RunEndKind.PAUSED: RunStatus.PAUSED,
    RunEndKind.COMPLETED: RunStatus.COMPLETED,
    RunEndKind.FAILED: RunStatus.FAILED,
    RunEndKind.CANCELLED: RunStatus.CANCELLED,
    RunEndKind.RELEASED: RunStatus.RELEASED,
}


def end_of_run(draft: Draft, c: CommitStep, end: RunEnd, active: ThreadHead, state: TurnState) -> Change:
    """What becomes of the Turn when its invocation ends (RT-49: not necessarily its own end)."""
    kind = end.kind
    if kind is RunEndKind.COMPLETED:
        if state.steers and not state.cancel and end.finish_reason == "completed":
            # Input that redirects the agent was accepted before the answer became final: one more round (D20).
            after = draft.show(draft.turn(c.thread_id, c.turn_id), active.turn, state)
            draft.set_active(c.thread_id, replace(active, turn=after))
            return draft.change(receipt(active, after, draft.now_ms))
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
    completed = SettledBy.COMPLETED if kind is RunEndKind.COMPLETED else None
    thread = release(draft, active, c.thread_id, settled=completed)
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
        last = not draft.is_ready(keys.READY_TURN, c.thread_id)
        return draft.change(receipt(active, replace(state, inputs=0), draft.now_ms, ended=True, last=last))
    if end.failure is not None:
        state = _failed(draft, end.failure, end.policy, record, state)
    state = lose_local_tools(draft, record, state, settling=settling(state))
    if end.operator and not settling(state):
        # A cancelled Turn ends whether somebody has looked or not.
        state = replace(state, operator=end.operator)
    state = draft.store_turn(record, _after_run(draft, kind, record, state))
    return draft.change(receipt(active, state, draft.now_ms, ended=True))


def _keep_for_settlement(
    draft: Draft, c: CommitStep, record: TurnRecord, active: ThreadHead, state: TurnState
) -> Change:
    """The Run is over, the owner goes on to settle under the same fence."""
    state = lose_local_tools(draft, record, state, settling=True)
    state = draft.show(record, record.state, state)
    draft.put(keys.turn(c.turn_id), replace(record, state=state))
    draft.set_active(c.thread_id, replace(active, turn=state, run=RunState()))
    return draft.change(receipt(active, state, draft.now_ms, ended=True))


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
