"""Calls of tools and the interactions that come with them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import ref_view, state_of, turn_of
from agentscope_durable.backend.queries.rows import events_of, tool_changed
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import ExecutionRecord, InteractionRecord, TurnRecord, decode
from agentscope_durable.contracts.status import ExecutionKind, InteractionState, WaitKind
from agentscope_durable.contracts.views import InteractionView, ToolView
from agentscope_durable.spi.record_store import Column, Reads

__all__ = ["list_interactions", "list_tools", "made", "with_results"]


async def list_interactions(reader: Reader, question: q.ListInteractions) -> list[InteractionView]:
    session, turn_id = question.session, question.turn_id
    records = await reader.read(session, Reads(keys=(keys.turn(turn_id),)))
    turn = turn_of(records, question.thread_id, turn_id)
    if question.pending_only:
        # Open questions are conditions of the Turn, so nothing that was answered is read.
        wanted = tuple(
            keys.interaction(turn_id, condition.id)
            for condition in state_of(records, turn).conditions
            if condition.kind in (WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT) and not condition.ready
        )
        records = await reader.read(session, Reads(keys=wanted))
        rows = [(key, records.keys[key]) for key in wanted if key in records.keys]
    else:
        rows = await reader.all_under(session, keys.interactions(turn_id))
    # Conditions stand in the order in which they were opened; sorting keeps that of one moment.
    found = [decode(InteractionRecord, data, key=key) for key, data in rows]
    found.sort(key=lambda record: record.opened_ms)
    return [
        await _interaction_view(reader, session, turn_id, record)
        for record in found
        if not question.pending_only or record.state is InteractionState.PENDING
    ]


async def _interaction_view(
    reader: Reader, session: SessionKey, turn_id: str, record: InteractionRecord
) -> InteractionView:
    response = None if record.response is None else await reader.bodies.open_value(session, record.response)
    edited = None if record.edited is None else await reader.bodies.open_value(session, record.edited)
    return InteractionView(
        interaction_id=record.interaction_id,
        turn_id=turn_id,
        call_id=record.call_id,
        kind=record.kind,
        name=record.name,
        arguments=await reader.bodies.open_value(session, record.arguments),
        state=record.state,
        opened_at_ms=record.opened_ms,
        response=response,
        request_id=record.request_id or None,
        reason=record.reason or None,
        edited_arguments=edited,
    )


async def list_tools(reader: Reader, question: q.ListTools) -> list[ToolView]:
    session, turn_id = question.session, question.turn_id
    records = await reader.read(session, Reads(keys=(keys.turn(turn_id),)))
    turn = turn_of(records, question.thread_id, turn_id)
    executions = await _executions(reader, session, turn_id)
    arguments = await _arguments(reader, session, turn, executions)
    executions = await with_results(reader, session, executions)
    return [
        await _tool_view(reader, session, turn, record, arguments.get(record.call_id, record.arguments))
        for record in executions
    ]


async def _tool_view(
    reader: Reader, session: SessionKey, turn: TurnRecord, record: ExecutionRecord, arguments: Body
) -> ToolView:
    result = None if record.result is None else await reader.bodies.open_value(session, record.result)
    return ToolView(
        thread_id=turn.thread_id,
        turn_id=turn.turn_id,
        call_id=record.call_id,
        name=record.name,
        kind=record.kind,
        state=record.state,
        arguments=await reader.bodies.open_value(session, arguments),
        execution_id=record.execution_id if record.kind is ExecutionKind.EXTERNAL else None,
        result=result,
        origin=ref_view(record.origin),
        received_at_ms=record.received_ms or None,
        applied_at=None if record.applied_at is None else ref_view(record.applied_at),
        applied_at_ms=record.applied_ms or None,
        cancel_requested=record.cancel_requested,
    )


async def _executions(reader: Reader, session: SessionKey, turn_id: str) -> list[ExecutionRecord]:
    """The calls of a Turn in the order in which they were made."""
    rows = await reader.all_under(session, keys.executions(turn_id))
    return sorted((decode(ExecutionRecord, data, key=key) for key, data in rows), key=made)


async def with_results(
    reader: Reader, session: SessionKey, executions: Sequence[ExecutionRecord]
) -> list[ExecutionRecord]:
    """The records with the results that their events hold: a body is stored once."""
    found = await reader.events_at(session, {record.seq for record in executions if record.seq})
    return [
        replace(record, result=tool_changed(found[record.seq]).result) if record.seq else record
        for record in executions
    ]


async def _arguments(
    reader: Reader, session: SessionKey, turn: TurnRecord, executions: Sequence[ExecutionRecord]
) -> dict[str, Body]:
    """Arguments that only the `tool.requested` event holds, by call: a body is stored once."""
    wanted = {record.call_id: record.requested_seq for record in executions if record.arguments == Body()}
    noted = await reader.events_at(session, {seq for seq in wanted.values() if seq})
    found = {call_id: tool_changed(noted[seq]).arguments or Body() for call_id, seq in wanted.items() if seq}
    if len(found) == len(wanted):
        return found
    # Where the record does not say: in the Turn's slice of the stream.
    last = turn.last_at if turn.state.status.terminal else 0
    async for row in reader.stream(session, turn.thread_id, turn.first_at, last, Column.EVENTS):
        for one in events_of((row,), after=0, through=row.first + row.count):
            if one.event.type == "tool.requested" and one.event.turn_id == turn.turn_id:
                changed = tool_changed(one)
                if changed.arguments is not None and changed.call_id not in found:
                    found[changed.call_id] = changed.arguments
        if wanted.keys() <= found.keys():
            break
    return found


def made(record: ExecutionRecord) -> tuple[int, int]:
    """When a call was opened, and its place among those of one commit."""
    return record.created_ms, record.requested_seq
