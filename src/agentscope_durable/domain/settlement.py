"""How a cancelled or failed Turn ends: effects first, then cleaned state, results and status at once.

Settlement starts no Run, no model and no tool (SE-05). It may end a Turn only when every effect
that was started is known; what was asked to stop is not taken for stopped (SE-08).
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import Done, PostponeSettlement, SettleTurn
from agentscope_durable.contracts.errors import InvalidRequest, InvalidTransition, NotFound
from agentscope_durable.contracts.events import ToolApplied
from agentscope_durable.contracts.records import ExecutionRecord
from agentscope_durable.contracts.status import SettledBy, TurnStatus
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.finish import end_turn, reads_finish
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.lease import check_native, owned, release
from agentscope_durable.domain.retry import SETTLE_BACKOFF_MAX_MS, SETTLE_BACKOFF_MS, backoff_ms
from agentscope_durable.domain.turn import settling, unsettled


def reads_settle(c: SettleTurn) -> Reads:
    return reads_finish(c.thread_id, c.turn_id).merged(
        Reads(keys=tuple(keys.execution(c.turn_id, call_id) for call_id in c.applied))
    )


def settle_turn(c: SettleTurn, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """End the Turn with its cleaned native state (SE-04).

    Raises:
        Fenced: the sender does not own the Thread.
        InvalidTransition: an effect is not known yet, or nothing is there to settle.
    """
    draft = begin(view, c.session, seed, now_ms)
    active = owned(draft, c, c.expected_position)
    record = draft.turn(c.thread_id, c.turn_id)
    state = record.state
    if not settling(state) or unsettled(state):
        raise InvalidTransition(c.turn_id, state.status, "settled")
    check_native(c, active)
    position = active.position + 1
    draft.native(c.thread_id, position, c.journal)
    for call_id in c.applied:
        _apply(draft, c, call_id)
    chain = chained("" if c.base else active.chain, c.journal) if c.journal else active.chain
    active = replace(
        active,
        position=position,
        chain=chain,
        digest=chain if c.checkpoint else active.digest,
        checkpoint_at=position if c.checkpoint else active.checkpoint_at,
        base_at=position if c.checkpoint and c.base else active.base_at,
        writer=c.writer if c.checkpoint else active.writer,
    )
    status = TurnStatus.CANCELLED if state.cancel else TurnStatus.FAILED
    thread = release(draft, active, c.thread_id, settled=SettledBy(status))
    end_turn(draft, thread, replace(record, last_at=position), state, status)
    return draft.change(Done(changed=True))


def _apply(draft: Draft, c: SettleTurn, call_id: str) -> None:
    key = keys.execution(c.turn_id, call_id)
    execution = draft.get(key, ExecutionRecord)
    if execution is None:
        raise NotFound("tool call", call_id)
    if not execution.state.terminal:
        raise InvalidRequest(f"tool call {call_id!r} is {execution.state}: there is no result to apply", path="applied")
    if execution.applied_ms:
        return
    draft.put(key, replace(execution, applied_at=None, applied_ms=draft.now_ms))
    draft.emit(
        "tool.applied",
        ToolApplied(call_id=call_id, applied_at_ms=draft.now_ms),
        thread_id=c.thread_id,
        turn_id=c.turn_id,
    )


def reads_postpone(c: PostponeSettlement) -> Reads:
    return Reads(keys=(keys.thread(c.thread_id), keys.turn(c.turn_id)))


def postpone_settlement(c: PostponeSettlement, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Give the Thread back unsettled. An outcome that arrives wakes it; a failed attempt is repeated later (SE-11)."""
    draft = begin(view, c.session, seed, now_ms)
    active = owned(draft, c)
    record = draft.turn(c.thread_id, c.turn_id)
    state = record.state
    release(draft, active, c.thread_id)
    if c.failure is None:
        state = replace(state, settle_ms=0)
    else:
        tries = state.settle_tries + 1
        wait = backoff_ms(SETTLE_BACKOFF_MS, SETTLE_BACKOFF_MAX_MS, tries)
        state = replace(state, settle_tries=tries, settle_ms=now_ms + wait)
    draft.store_turn(record, state)
    return draft.change(Done(changed=True))
