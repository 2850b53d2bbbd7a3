"""Turns, and what each waits for at the moment of asking."""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.backend.queries.pages import cut_rows, one_more, page_limit, position_of
from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import active_of, get, thread_of, turn_of
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import InvalidRequest, NotFound
from agentscope_durable.contracts.identity import SessionKey, TurnKey
from agentscope_durable.contracts.records import Binding, ThreadRecord, TurnRecord, TurnRef, decode
from agentscope_durable.contracts.results import HostNotice, read_notice
from agentscope_durable.contracts.status import WaitKind
from agentscope_durable.contracts.views import LeaseView, Page, TurnView, Waiting
from agentscope_durable.domain.turn import due_ms
from agentscope_durable.domain.turn_view import NEXT_ACTION, turn_view
from agentscope_durable.domain.unclaimed import get_definition, get_writer, spoken
from agentscope_durable.spi.record_store import OwnerLease, Range, Reads, Records

__all__ = ["find_turn", "get_turn", "host_notice", "list_turns", "turn_view_now"]


async def get_turn(reader: Reader, question: q.GetTurn) -> TurnView:
    wanted = (keys.thread(question.thread_id), keys.turn(question.turn_id))
    records, lease = await reader.read_owned(question.session, Reads(keys=wanted), question.thread_id)
    thread = thread_of(records, question.thread_id)
    turn = turn_of(records, question.thread_id, question.turn_id)
    return await turn_view_now(reader, question.session, records, thread, turn, lease)


async def find_turn(reader: Reader, question: q.FindTurn) -> TurnKey:
    key = keys.turn(question.turn_id)
    names = await reader.records.holders(key)
    if not names:
        raise NotFound("turn", question.turn_id)
    if len(names) > 1:
        raise InvalidRequest(f"turn {question.turn_id!r} is in more than one Session", path="turn_id")
    session = keys.session_of(names[0])
    record = get(await reader.read(session, Reads(keys=(key,))), key, TurnRecord)
    if record is None:
        raise NotFound("turn", question.turn_id)
    return TurnKey(session, record.thread_id, record.turn_id)


async def list_turns(reader: Reader, question: q.ListTurns) -> Page:
    limit = page_limit(question.limit)
    prefix = keys.orders(question.thread_id)
    page = Range(prefix, position_of("turns", question.cursor, prefix, question.session), one_more(limit))
    thread_key = keys.thread(question.thread_id)
    records = await reader.read(question.session, Reads(keys=(thread_key,), ranges=(page,)))
    _ = thread_of(records, question.thread_id)
    rows, cursor = cut_rows("turns", records.ranges[page], limit, question.session)
    turn_ids = [decode(TurnRef, data, key=key).turn_id for key, data in rows]
    wanted = (thread_key, *map(keys.turn, turn_ids))
    records, lease = await reader.read_owned(question.session, Reads(keys=wanted), question.thread_id)
    thread = thread_of(records, question.thread_id)
    items = [
        await turn_view_now(
            reader, question.session, records, thread, turn_of(records, question.thread_id, turn_id), lease
        )
        for turn_id in turn_ids
    ]
    return Page(tuple(items), cursor)


async def turn_view_now(
    reader: Reader,
    session: SessionKey,
    records: Records,
    thread: ThreadRecord,
    turn: TurnRecord,
    lease: OwnerLease | None,
) -> TurnView:
    """The Turn as stored, with what only this moment knows."""
    active = active_of(records, turn)
    state = turn.state if active is None else active.turn
    view = turn_view(session, turn, state)
    alive = False
    if active is not None and lease is not None:
        alive = await reader.alive(lease)
        view = replace(view, lease=LeaseView(owner=active.owner, fence=active.fence, age_ms=lease.age_ms, alive=alive))
    due = due_ms(state)
    unclaimed = not alive
    if thread.current == turn.turn_id and unclaimed and due is not None and due <= records.now_ms:
        writer = thread.writer if active is None else active.writer or thread.writer
        waiting = await _unclaimed(
            reader, thread.binding, writer if state.runs else "", since_ms=max(state.updated_ms, due)
        )
        view = replace(view, waiting_on=(*view.waiting_on, waiting))
    return view


async def _unclaimed(reader: Reader, binding: Binding, writer: str, *, since_ms: int) -> Waiting:
    """Why nobody has taken a Turn that could run: no host there is has its definition, none reads the state of
    the `writer` it is in flight with (D21), or none has come to it."""
    dead = set(await reader.records.dead_owners())
    owners = await reader.records.owners()
    alive = [host_notice(owner) for owner in owners if owner.alive and owner.owner not in dead]
    serving = [notice for notice in alive if notice.serves(binding.ready_class, binding.harness)]
    name = spoken(binding)
    if serving and writer and all(writer in notice.refused for notice in serving):
        kind, name, action = WaitKind.DEFINITION_MISSING, f"{name} ({writer})", get_writer(binding, writer)
    elif alive and not serving:
        kind, action = WaitKind.DEFINITION_MISSING, get_definition(binding, alive)
    else:
        kind, action = WaitKind.HOST, NEXT_ACTION[WaitKind.HOST]
    return Waiting(kind=kind, id=name, since_ms=since_ms, next_action=action)


def host_notice(owner: OwnerLease) -> HostNotice:
    """What a host published with its lease."""
    return read_notice(owner.value)
