"""What the host that runs a Thread reads: native state, and what waits to be applied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentscope_durable.backend.queries.calls import made, with_results
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import thread_of, turn_of
from agentscope_durable.backend.queries.rows import payload_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import CorruptRecord, DigestMismatch
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import (
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    SignalRecord,
    TurnRecord,
    decode,
)
from agentscope_durable.contracts.status import InteractionState, SignalState
from agentscope_durable.domain.frame import chained
from agentscope_durable.spi.checkpoint import JournalRow
from agentscope_durable.spi.harness import OpenInput, OpenWorkView
from agentscope_durable.spi.record_store import PAGE_MAX, Column, LogRow, Range, Reads

__all__ = ["load_thread", "open_work"]


async def load_thread(reader: Reader, question: q.LoadThread) -> list[JournalRow]:
    records = await reader.read(question.session, Reads(keys=(keys.thread(question.thread_id),)))
    _ = thread_of(records, question.thread_id)
    if question.first <= 0 or question.last < question.first:
        # Nothing native has been stored yet.
        return []
    rows: list[JournalRow] = []
    digest = ""
    former: LogRow | None = None
    stored = reader.stream(question.session, question.thread_id, question.first, question.last, Column.JOURNAL)
    async for row in stored:
        if former is not None and (former.at, former.journal) == (row.at, row.journal):
            # The same once more says nothing (C82). What says something else changes the digest.
            continue
        former = row
        if row.journal:
            digest = chained(digest, row.journal)
            journal = await reader.bodies.open_column(question.session, row.journal)
            rows.append(JournalRow(at=row.at, journal=journal))
    if question.digest and digest != question.digest:
        raise DigestMismatch(
            f"native state of thread {question.thread_id!r}, positions {question.first} to {question.last}",
            "JournalBatch",
            expected=question.digest,
            actual=digest,
        )
    return rows


async def open_work(reader: Reader, question: q.OpenWork) -> OpenWorkView:
    session, turn_id = question.session, question.turn_id
    prefixes = (
        keys.inputs(turn_id),
        keys.interactions(turn_id),
        keys.executions(turn_id),
        keys.all_signals(turn_id),
    )
    pages = tuple(Range(prefix, limit=PAGE_MAX) for prefix in prefixes)
    # One reading for all: what waits belongs together.
    records = await reader.read(session, Reads(keys=(keys.turn(turn_id),), ranges=pages))
    turn = turn_of(records, question.thread_id, turn_id)
    rows = [
        found if len(found) < PAGE_MAX else await reader.all_under(session, prefix)
        for prefix, found in ((page.prefix, records.ranges[page]) for page in pages)
    ]
    inputs = [decode(InputRecord, data, key=key) for key, data in rows[0]]
    interactions = [decode(InteractionRecord, data, key=key) for key, data in rows[1]]
    executions = [decode(ExecutionRecord, data, key=key) for key, data in rows[2]]
    signals = [decode(SignalRecord, data, key=key) for key, data in rows[3]]
    settled = (InteractionState.APPLIED, InteractionState.CLOSED)
    return OpenWorkView(
        inputs=await _open_inputs(reader, session, turn, inputs),
        interactions=tuple(
            sorted((r for r in interactions if r.state not in settled), key=lambda record: record.opened_ms)
        ),
        executions=tuple(
            await with_results(reader, session, sorted((r for r in executions if not r.applied_ms), key=made))
        ),
        signals=tuple(
            sorted((r for r in signals if r.state is SignalState.ACCEPTED), key=lambda record: record.ordinal)
        ),
    )


async def _open_inputs(
    reader: Reader, session: SessionKey, turn: TurnRecord, inputs: Iterable[InputRecord]
) -> tuple[OpenInput, ...]:
    waiting = [record for record in inputs if record.state is SignalState.ACCEPTED]
    found = await reader.events_at(session, {record.seq for record in waiting})
    opened: list[OpenInput] = []
    for record in waiting:
        content: Any = (await payload_of(found[record.seq]).open(reader.bodies, session)).get("content")
        if not isinstance(content, list):
            raise CorruptRecord(keys.input_(turn.turn_id, record.ordinal), "message.completed", "no content")
        opened.append(OpenInput(record=record, content=content))
    return tuple(opened)
