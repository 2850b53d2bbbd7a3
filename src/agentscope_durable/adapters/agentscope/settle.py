"""How a Turn that was cancelled or has failed leaves the conversation: every call with its one result.

Rule 1: pure. No agent, no model, no tool; the state as it was last committed and what is known of the calls (SE-05).
Rule 2: the whole context is looked at, not its last message (C06): a call without a result, or a result without a call,
makes every later request of the conversation fail.
Rule 3: what was stored stays: a model's answer that had not entered the state yet does so now, since people have seen
it. What was only on its way is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentscope_durable.adapters.agentscope.calls import unfinished_calls
from agentscope_durable.adapters.agentscope.codec import (
    INTERRUPTED_TEXT,
    NOT_RUN_TEXT,
    interrupted_block,
    native_blocks,
    outcome_of,
    result_block,
)
from agentscope_durable.adapters.agentscope.increments import entry
from agentscope_durable.adapters.agentscope.intake import bounded
from agentscope_durable.adapters.agentscope.mirror import Mirror
from agentscope_durable.adapters.agentscope.native import Native, load_native
from agentscope_durable.contracts.identity import MAIN_THREAD_ID
from agentscope_durable.contracts.journal import JournalBatch, JournalEventType
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.journal.position import ExecutionPhase
from agentscope_durable.spi.harness import SettleContext, Settlement

__all__ = ["pair_calls", "settle_turn"]


async def settle_turn(context: SettleContext, *, installed: str, mirror: Mirror | None = None) -> Settlement:
    """The cleaned state of a Turn that ends, and the calls whose confirmed result it contains (SE-04)."""
    start = context.start
    results: dict[str, ToolResult] = {}
    started: set[str] = set()
    for record in start.executions:
        if record.state.terminal:
            stored = None if record.result is None else await context.open_body(record.result)
            results[record.call_id] = outcome_of(record, stored)
        elif record.state not in (ExecutionState.REQUESTED, ExecutionState.AWAITING_APPROVAL):
            started.add(record.call_id)
    applied = tuple(results)
    native = load_native(await context.journal(), installed=installed)
    if native.state is None or native.position.turn_id != start.turn_id:
        # Nothing of this Turn ever entered the state.
        return Settlement(applied=applied)
    if native.answer is not None:
        _apply_answer(native)
    pair_calls(native.state, results, started)
    native.position.phase = ExecutionPhase.ENDED
    native.position.receipts, native.position.carried = {}, []
    rows, base = native.rows()
    told = entry(JournalEventType.RUN_END, turn=start.turn_id, end="cancelled" if start.cancelled else "failed")
    batch = JournalBatch(start.position, (told,), rows, base)
    after = None
    if mirror is not None and start.thread_id == MAIN_THREAD_ID:
        after = mirror.later(start.session, native.state.model_dump_json())
    return Settlement(
        journal=batch.encode(), checkpoint=True, base=base, writer=installed, applied=applied, after=after
    )


def _apply_answer(native: Native) -> None:
    assert native.answer is not None
    _ = native.writer.note_outcome(native.answer_at, native.answer.content)
    blocks = [
        block
        for block in native_blocks(native.answer.content)
        # As AgentScope keeps it: what was said aloud is not part of the conversation's text.
        if not (block.type == "data" and str(block.source.media_type).startswith("audio/"))
    ]
    if blocks:
        native.state.append_context(native.position.agent, blocks)


def pair_calls(state: Any, results: Mapping[str, ToolResult], started: set[str] | frozenset[str] = frozenset()) -> bool:
    """Give each call of the context exactly one result. Returns whether anything was changed.

    Args:
        results: confirmed outcomes by call.
        started: calls without a confirmed outcome that were begun.
    """
    changed = False
    for message in state.context:
        if message.role != "assistant":
            continue
        calls = {block.id: block for block in message.content if block.type == "tool_call"}
        answered = [block.id for block in message.content if block.type == "tool_result"]
        if not calls and not answered:
            continue
        if len(set(answered)) != len(answered) or not calls.keys() >= set(answered):
            _keep_paired(message, calls)
            changed = True
        open_calls = [block for call_id, block in calls.items() if call_id not in answered]
        for block in open_calls:
            known = results.get(block.id)
            block.state = "finished"
            if known is not None:
                message.content.append(bounded(result_block(block.id, block.name, known)))
            else:
                text = INTERRUPTED_TEXT if block.id in started else NOT_RUN_TEXT
                message.content.append(interrupted_block(block.id, block.name, text))
            changed = True
    return changed


def _keep_paired(message: Any, calls: Mapping[str, Any]) -> None:
    """Drop results whose call is not there, and any but the first of a call."""
    seen: set[str] = set()
    kept: list[Any] = []
    for block in message.content:
        if block.type == "tool_result":
            if block.id not in calls or block.id in seen:
                continue
            seen.add(block.id)
        kept.append(block)
    message.content[:] = kept


def needs_pairing(state: Any, name: str) -> bool:
    """A new Turn finds calls of a former one: the agent would refuse its message."""
    return bool(state.get_awaiting_tool_calls(name)) or bool(unfinished_calls(state, name))
