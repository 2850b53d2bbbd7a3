"""Runs, their Steps and their model calls, from the private facts of a Thread's stream."""

from __future__ import annotations

from agentscope_durable.backend.queries.pages import cursor_after, cut_rows, one_more, page_limit, position_of, uncursor
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import run_key, run_of, turn_of
from agentscope_durable.backend.queries.rows import private_facts
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import InvalidCursor, NotFound
from agentscope_durable.contracts.log import ModelFact, StepFact
from agentscope_durable.contracts.records import LateFact, RunRecord, decode
from agentscope_durable.contracts.views import ModelCallView, Page, RunView, StepView
from agentscope_durable.domain.run_view import Facts, model_call_view, model_facts, run_view, step_facts, step_view
from agentscope_durable.spi.record_store import PAGE_MAX, Column, Range, Reads, Records

__all__ = ["get_run", "list_model_calls", "list_runs", "list_steps"]


async def list_runs(reader: Reader, question: q.ListRuns) -> Page:
    limit = page_limit(question.limit)
    prefix = keys.runs(question.turn_id)
    page = Range(prefix, position_of("runs", question.cursor, prefix, question.session), one_more(limit))
    records = await reader.read(question.session, Reads(keys=(keys.turn(question.turn_id),), ranges=(page,)))
    _ = turn_of(records, question.thread_id, question.turn_id)
    rows, cursor = cut_rows("runs", records.ranges[page], limit, question.session)
    items = (run_view(question.turn_id, decode(RunRecord, data, key=key)) for key, data in rows)
    return Page(tuple(items), cursor)


async def get_run(reader: Reader, question: q.GetRun) -> RunView:
    _, run = await _run(reader, question)
    return run_view(question.turn_id, run)


async def _run(
    reader: Reader, question: q.GetRun | q.ListSteps | q.ListModelCalls, *more: Range
) -> tuple[Records, RunRecord]:
    turn_id, run_id = question.turn_id, question.run_id
    key = run_key(turn_id, run_id)
    wanted = (keys.turn(turn_id),) if key is None else (keys.turn(turn_id), key)
    records = await reader.read(question.session, Reads(keys=wanted, ranges=more))
    _ = turn_of(records, question.thread_id, turn_id)
    return records, run_of(records, turn_id, run_id)


async def list_steps(reader: Reader, question: q.ListSteps) -> Page:
    limit = page_limit(question.limit)
    _, run = await _run(reader, question)
    first, skip = _place("steps", question.cursor, run)
    facts: Facts[StepFact] = Facts(skip)
    async for row in reader.stream(question.session, question.thread_id, first, run.last_at, Column.PRIVATE):
        for fact in private_facts(row):
            if isinstance(fact, StepFact) and fact.run_id == run.run_id:
                step_facts(facts, fact, at=row.at, at_ms=row.at_ms)
        if facts.shows(limit):
            break
    items: tuple[StepView, ...] = tuple(step_view(run, told) for told in facts.first(limit))
    return Page(items, _place_cursor("steps", run, facts.after(limit)))


async def list_model_calls(reader: Reader, question: q.ListModelCalls) -> Page:
    limit = page_limit(question.limit)
    lates = Range(keys.lates(question.run_id), limit=PAGE_MAX)
    records, run = await _run(reader, question, lates)
    late: dict[str, list[ModelFact]] = {}
    for key, data in records.ranges[lates]:
        filed = decode(LateFact, data, key=key)
        if filed.what == "model":
            fact = decode(ModelFact, await reader.bodies.open(question.session, filed.body), key=key)
            late.setdefault(fact.model_call_id, []).append(fact)
    first, skip = _place("models", question.cursor, run)
    facts: Facts[ModelFact] = Facts(skip)
    known = question.step_id is None or question.cursor is not None
    async for row in reader.stream(question.session, question.thread_id, first, run.last_at, Column.PRIVATE):
        for fact in private_facts(row):
            if isinstance(fact, StepFact):
                known = known or fact.step_id == question.step_id
            if not isinstance(fact, ModelFact) or fact.run_id != run.run_id:
                continue
            if question.step_id in (None, fact.step_id):
                model_facts(facts, fact, at=row.at, at_ms=row.at_ms)
        if facts.shows(limit):
            break
    if not known and question.step_id is not None and not facts.first(1):
        raise NotFound("step", question.step_id)
    items: tuple[ModelCallView, ...] = tuple(
        model_call_view(run, told, late.get(told[0].fact.model_call_id, ())) for told in facts.first(limit)
    )
    return Page(items, _place_cursor("models", run, facts.after(limit)))


def _place(listing: str, cursor: str | None, run: RunRecord) -> tuple[int, tuple[str, ...]]:
    """Where in a Run's slice of the stream a listing goes on, and whom it passes over there."""
    if cursor is None:
        return run.first_at, ()
    run_id, first, skip = uncursor(listing, cursor, tuple[str, int, tuple[str, ...]])
    if run_id != run.run_id or first < run.first_at:
        raise InvalidCursor(f"this is not a cursor of the {listing} of this run", path="cursor")
    return first, skip


def _place_cursor(listing: str, run: RunRecord, place: tuple[int, tuple[str, ...]] | None) -> str | None:
    return None if place is None else cursor_after(listing, (run.run_id, *place))
