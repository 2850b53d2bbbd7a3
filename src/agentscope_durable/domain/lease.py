"""Who owns a Thread: one host at a time, under a number that only rises.

A claim takes a Thread nobody owns, or one whose owner is gone by the store's clock. It closes what
the lost owner left open: its Run is LOST, a request without an end is LOST, a started tool that may
not run twice is UNKNOWN. From then on every commit under the old number is refused (RC-02).
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import HEAD_CLAIM_BYTES, Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import (
    Claim,
    Claimed,
    ClaimPurpose,
    CommitStep,
    OwnerCommand,
    SettleTurn,
)
from agentscope_durable.contracts.errors import Fenced, InvalidRequest, NotFound, RevisionConflict
from agentscope_durable.contracts.events import (
    MessageAbandoned,
    RunEnded,
    RunStarted,
    StepEnded,
)
from agentscope_durable.contracts.log import ModelFact, StepFact
from agentscope_durable.contracts.records import (
    ACTIVE_THREADS_MAX,
    CheckpointRecord,
    Failure,
    RunRecord,
    RunState,
    SessionHead,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnState,
    encode,
)
from agentscope_durable.contracts.status import (
    ModelStatus,
    RunStatus,
    SettledBy,
    StepStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.control import paused
from agentscope_durable.domain.execution import EFFECT_KINDS, lose_local_tools
from agentscope_durable.domain.turn import move, purpose, settling
from agentscope_durable.domain.turn_view import error_view

NOTHING = Claimed(purpose=ClaimPurpose.NOTHING)


def reads_claim(c: Claim) -> Reads:
    return Reads(keys=(keys.thread(c.thread_id),), fresh=bool(c.dead))


def claim(c: Claim, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Take the Thread's current Turn to run or to settle it; NOTHING when there is nothing to take."""
    draft = begin(view, c.session, seed, now_ms)
    thread = draft.thread(c.thread_id)
    if not thread.current or thread.binding.ready_class not in c.served:
        return Unchanged(NOTHING)
    active = draft.head.threads.get(c.thread_id)
    if active is not None:
        if active.owner != c.owner:
            if active.owner not in c.dead and view.owner(active.owner).alive:
                return Unchanged(NOTHING)
        elif active.fence != c.dropped:
            return Unchanged(_claimed_again(draft, active, thread) if c.again else NOTHING)
    elif full(draft.head):
        return Unchanged(NOTHING)

    if active is not None:
        _require_lost(draft, active)
    record = draft.turn(c.thread_id, thread.current)
    state = record.state
    writer = (active.writer if active is not None else "") or thread.writer
    if state.runs and writer in c.refused:
        # In flight, and written by a version this host does not read: for another host (D21).
        return Unchanged(NOTHING)
    lost_run = ""
    if active is not None:
        state, lost_run = _close_lost_run(draft, c, record, state, active)
        thread = replace(
            thread,
            fence=active.fence,
            position=active.position + 1,
            base_at=active.base_at,
            checkpoint_at=active.checkpoint_at,
            writer=active.writer or thread.writer,
            chain=active.chain,
            digest=active.digest,
        )
        draft.set_active(c.thread_id, None)
    if state.pause and state.status is not TurnStatus.PAUSED and not settling(state):
        # The pause waited for a boundary; the owner's death is one (STATES: PAUSING, owner lost).
        return _give_back(draft, thread, record, paused(draft, record, state))
    if lost_run and state.takeovers > c.takeovers_max and not settling(state):
        times = f"{state.takeovers} times" if state.takeovers > 1 else "once"
        reason = f"its host was lost {times} without a new checkpoint"
        parked = replace(move(record.turn_id, state, TurnStatus.WAITING), operator=reason)
        return _give_back(draft, thread, record, parked)
    wanted = purpose(state, now_ms)
    if wanted is None:
        return Unchanged(NOTHING) if active is None else _give_back(draft, thread, record, state)

    fence = thread.fence + 1
    position = thread.position if active is not None else thread.position + 1
    draft.native(c.thread_id, position)
    run = RunState()
    if wanted is ClaimPurpose.RUN:
        state, run = _begin_run(draft, c, record, state, fence, position)
    after = draft.show(record, record.state, state)
    draft.put(
        keys.turn(record.turn_id),
        replace(record, state=after, first_at=record.first_at or position),
    )
    draft.set_active(
        c.thread_id,
        ThreadHead(
            fence=fence,
            owner=c.owner,
            position=position,
            base_at=thread.base_at,
            checkpoint_at=thread.checkpoint_at,
            turn_id=record.turn_id,
            turn=after,
            run=run,
            chain=thread.chain,
            digest=thread.digest,
        ),
    )
    draft.put(keys.thread(c.thread_id), replace(thread, fence=fence))
    draft.unready(keys.READY_TURN, c.thread_id)
    draft.ready(keys.READY_LEASE, c.owner, c.thread_id, due_ms=0, value=record.turn_id)
    return draft.change(
        Claimed(
            purpose=wanted,
            turn_id=record.turn_id,
            fence=fence,
            run_id=run.run_id,
            run_number=run.number,
            position=position,
            base_at=thread.base_at,
            checkpoint_at=thread.checkpoint_at,
            reasoning=after.reasoning,
            attempt=after.attempt,
            resumed_from=run.resumed_from,
            lost_run=lost_run,
            cancel=after.cancel != "",
            pause=after.pause != "",
            failure=after.failure,
            now_ms=now_ms,
            writer=thread.writer,
            digest=thread.digest,
            binding=thread.binding,
            request_id=record.request_id,
            inputs=after.inputs,
            input_seq=record.input_seq,
        )
    )


def full(head: SessionHead) -> bool:
    """Whether a further Thread must wait for one of the active ones. A single one never waits."""
    active = len(head.threads)
    return active >= ACTIVE_THREADS_MAX or (active > 0 and len(encode(head)) > HEAD_CLAIM_BYTES)


def _claimed_again(draft: Draft, active: ThreadHead, thread: ThreadRecord) -> Claimed:
    """What the owner's claim had answered, which it never heard."""
    run, turn = active.run, active.turn
    record = draft.turn(thread.thread_id, active.turn_id)
    return Claimed(
        purpose=ClaimPurpose.RUN if run.run_id else ClaimPurpose.SETTLE,
        turn_id=active.turn_id,
        fence=active.fence,
        run_id=run.run_id,
        run_number=run.number,
        position=active.position,
        base_at=active.base_at,
        checkpoint_at=active.checkpoint_at,
        reasoning=turn.reasoning,
        attempt=turn.attempt,
        resumed_from=run.resumed_from,
        cancel=turn.cancel != "",
        pause=turn.pause != "",
        failure=turn.failure,
        now_ms=draft.now_ms,
        writer=active.writer or thread.writer,
        digest=active.digest,
        binding=thread.binding,
        request_id=record.request_id,
        inputs=turn.inputs,
        input_seq=record.input_seq,
    )


def _begin_run(
    draft: Draft, c: Claim, record: TurnRecord, state: TurnState, fence: int, position: int
) -> tuple[TurnState, RunState]:
    number = state.runs + 1
    run_id = ids.run_id(record.turn_id, number)
    draft.put(
        keys.run(record.turn_id, number),
        RunRecord(
            run_id=run_id,
            number=number,
            owner=c.owner,
            fence=fence,
            status=RunStatus.RUNNING,
            started_ms=draft.now_ms,
            first_at=position,
            resumed_from=state.last_step,
        ),
    )
    draft.emit(
        "run.started",
        RunStarted(number=number, owner=c.owner, fence=fence, resumed_from_step_id=state.last_step or None),
        thread_id=c.thread_id,
        turn_id=record.turn_id,
        run_id=run_id,
    )
    recovery = state.recovery
    if recovery is not None and recovery.next_retry_at_ms:
        recovery = replace(recovery, next_retry_at_ms=0)
    conditions = tuple(
        replace(condition, ready=True)
        if condition.kind is WaitKind.SIGNAL and 0 < condition.deadline_ms <= draft.now_ms
        else condition
        for condition in state.conditions
    )
    state = replace(
        move(record.turn_id, state, TurnStatus.RUNNING), runs=number, recovery=recovery, conditions=conditions
    )
    run = RunState(
        run_id=run_id,
        number=number,
        started_ms=draft.now_ms,
        first_at=position,
        resumed_from=state.last_step,
    )
    return state, run


def _require_lost(draft: Draft, active: ThreadHead) -> None:
    """What a takeover looks at, in one round: the head names it all."""
    turn_id = active.turn_id
    wanted = [keys.turn(turn_id)]
    if active.run.run_id:
        wanted.append(keys.run(turn_id, active.run.number))
        wanted.extend(keys.execution(turn_id, c.call_id) for c in active.turn.conditions if c.kind in EFFECT_KINDS)
    draft.require(tuple(wanted))


def _close_lost_run(
    draft: Draft, c: Claim, record: TurnRecord, state: TurnState, active: ThreadHead
) -> tuple[TurnState, str]:
    """End what the lost owner left open. This commit takes the stream position after its last one."""
    position = active.position + 1
    draft.native(c.thread_id, position)
    draft.unready(keys.READY_LEASE, c.thread_id)
    run = active.run
    if not run.run_id:
        return state, ""
    end_run(draft, record, run, RunStatus.LOST, position)
    state = lose_local_tools(draft, record, state, settling=settling(state))
    return replace(state, takeovers=state.takeovers + 1), run.run_id


def end_run(
    draft: Draft,
    record: TurnRecord,
    run: RunState,
    status: RunStatus,
    position: int,
    *,
    failure: Failure | None = None,
) -> None:
    """Close the Run's record, its open Step and its open model requests."""
    lost = status is RunStatus.LOST
    for model in run.models:
        ended = ModelStatus.LOST if lost else ModelStatus.CANCELLED
        draft.fact(
            ModelFact(
                model_call_id=model.model_call_id,
                run_id=run.run_id,
                step_id=model.step_id,
                request=model.request,
                status=ended,
                message_id=model.message_id,
                attempt=model.attempt,
            )
        )
        if model.message_id:
            draft.emit(
                "message.abandoned",
                MessageAbandoned(
                    message_id=model.message_id,
                    attempt=model.attempt,
                    reason="the request was lost" if lost else "the run ended",
                ),
                thread_id=record.thread_id,
                turn_id=record.turn_id,
                run_id=run.run_id,
                step_id=model.step_id,
            )
    if run.step_id:
        step_status = StepStatus.INTERRUPTED if status in _INTERRUPTED else StepStatus.COMPLETED
        draft.fact(
            StepFact(step_id=run.step_id, run_id=run.run_id, number=run.steps, phase=run.phase, status=step_status)
        )
        draft.emit(
            "step.ended",
            StepEnded(status=step_status),
            thread_id=record.thread_id,
            turn_id=record.turn_id,
            run_id=run.run_id,
            step_id=run.step_id,
        )
    key = keys.run(record.turn_id, run.number)
    stored = draft.get(key, RunRecord)
    if stored is None:
        raise NotFound("run", run.run_id)
    draft.put(
        key,
        replace(stored, status=status, ended_ms=draft.now_ms, last_at=position, failure=failure),
    )
    draft.emit(
        "run.ended",
        RunEnded(status=status, error=None if failure is None else error_view(failure)),
        thread_id=record.thread_id,
        turn_id=record.turn_id,
        run_id=run.run_id,
    )


_INTERRUPTED = frozenset({RunStatus.LOST, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.RELEASED})


def _give_back(draft: Draft, thread: ThreadRecord, record: TurnRecord, state: TurnState) -> Change:
    """Nobody owns the lost Thread now: its Turn's state decides when somebody may."""
    draft.put(keys.thread(thread.thread_id), thread)
    draft.store_turn(record, state)
    return draft.change(Claimed(purpose=ClaimPurpose.NOTHING, turn_id=record.turn_id, now_ms=draft.now_ms))


# ---- what every owner command checks ----


def owned(draft: Draft, c: OwnerCommand, expected_position: int | None = None) -> ThreadHead:
    """The Thread, if the sender owns it under its fence.

    Raises:
        Fenced: another host took the Thread, or it was given back.
        RevisionConflict: a commit of this owner is already at that position.
    """
    active = draft.head.threads.get(c.thread_id)
    if active is None or active.fence != c.fence or active.turn_id != c.turn_id or active.run.run_id != c.run_id:
        raise Fenced(c.thread_id, fence=c.fence, current=active.fence if active is not None else 0)
    if expected_position is not None and active.position != expected_position:
        raise RevisionConflict("thread", c.thread_id, expected=expected_position, actual=active.position)
    return active


def check_native(c: CommitStep | SettleTurn, active: ThreadHead) -> None:
    """Whether the native state of a checkpoint can be read again.

    Raises:
        InvalidRequest: there is none in it, which would discard the former one (BE-22), or nothing it stands on.
    """
    if c.checkpoint and not c.journal:
        raise InvalidRequest("a checkpoint carries native state; without it the former one stands", path="journal")
    if c.checkpoint and not c.base and not active.base_at:
        raise InvalidRequest("the first checkpoint of a thread is a base: the whole state", path="base")


def release(draft: Draft, active: ThreadHead, thread_id: str, *, settled: SettledBy | None = None) -> ThreadRecord:
    """Move the Thread out of the head; the caller stores its Turn and schedules it.

    `settled`: the Turn ends with this commit, so its last checkpoint is a position to come back to (CK-06). A Turn that
    has changed nothing of the native state leaves no new one.
    """
    thread = draft.thread(thread_id)
    if settled is not None and active.checkpoint_at > thread.settled_at:
        draft.put(
            keys.checkpoint(thread_id, active.checkpoint_at),
            CheckpointRecord(
                base_at=active.base_at,
                through=active.position,
                digest=active.digest,
                writer=active.writer or thread.writer,
                created_ms=draft.now_ms,
                settled=settled,
                turn_id=active.turn_id,
            ),
        )
    thread = replace(
        thread,
        fence=active.fence,
        position=active.position,
        base_at=active.base_at,
        checkpoint_at=active.checkpoint_at,
        writer=active.writer or thread.writer,
        chain=active.chain,
        digest=active.digest,
        settled_at=thread.settled_at if settled is None else active.checkpoint_at,
    )
    draft.set_active(thread_id, None)
    draft.unready(keys.READY_LEASE, thread_id)
    draft.put(keys.thread(thread_id), thread)
    return thread
