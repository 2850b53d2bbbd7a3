"""What is known of one Turn at one moment, for `domain/explanation` to make rows of.

It reads the Turn, the head of its queue, what it has open and the hosts: a handful of records, whose number has nothing
to do with how many Turns there are or were.
"""

from __future__ import annotations

from typing import Final

from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.backend.queries.records import active_of, get, head_of, state_of, thread_of, turn_of
from agentscope_durable.backend.queries.turns import host_notice, turn_view_now
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.explanation import HOSTS_SHOWN_MAX, Explanation
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import (
    Binding,
    ExecutionRecord,
    InteractionRecord,
    ThreadHead,
    TurnRecord,
    TurnState,
)
from agentscope_durable.contracts.status import WaitKind
from agentscope_durable.contracts.views import TurnView
from agentscope_durable.domain.explanation import Facts, HostFacts, explain
from agentscope_durable.domain.lease import full
from agentscope_durable.spi.record_store import OwnerLease, Range, Reads, ReadyScan, StreamRange

__all__ = ["QUEUE_SHOWN_MAX", "explain_turn"]

QUEUE_SHOWN_MAX: Final = 100
"""Turns ahead in a queue that are counted; more are "many"."""
_ASKS: Final = (WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT)


async def explain_turn(reader: Reader, question: q.ExplainTurn) -> Explanation:
    session, thread_id, turn_id = question.session, question.thread_id, question.turn_id
    wanted = Reads(keys=(keys.thread(thread_id), keys.turn(turn_id)))
    records, lease = await reader.read_owned(session, wanted, thread_id)
    thread, turn = thread_of(records, thread_id), turn_of(records, thread_id, turn_id)
    state, active = state_of(records, turn), active_of(records, turn)
    interactions, executions = await _open(reader, session, turn_id, state)
    head, ahead = None, None
    if not state.status.terminal and thread.current not in ("", turn_id):
        head, ahead = await _queue(reader, session, turn, thread.current)
    return explain(
        Facts(
            now_ms=records.now_ms,
            thread=thread,
            view=await turn_view_now(reader, session, records, thread, turn, lease),
            state=state,
            active=active,
            hosts=await _hosts(reader, thread.binding, active, lease),
            head=head,
            ahead=ahead,
            interactions=interactions,
            executions=executions,
            committed_ms=await _committed_ms(reader, session, thread_id, active),
            session_full=active is None and full(head_of(records, session)),
        )
    )


async def _open(
    reader: Reader, session: SessionKey, turn_id: str, state: TurnState
) -> tuple[dict[str, InteractionRecord], dict[str, ExecutionRecord]]:
    """The records of what the Turn has open, as its conditions name it."""
    asked = {c.id: keys.interaction(turn_id, c.id) for c in state.conditions if c.kind in _ASKS}
    calls = {c.call_id: keys.execution(turn_id, c.call_id) for c in state.conditions if c.call_id}
    if not asked and not calls:
        return {}, {}
    records = await reader.read(session, Reads(keys=(*asked.values(), *calls.values())))
    questions = {name: get(records, key, InteractionRecord) for name, key in asked.items()}
    executions = {name: get(records, key, ExecutionRecord) for name, key in calls.items()}
    return (
        {name: record for name, record in questions.items() if record is not None},
        {name: record for name, record in executions.items() if record is not None},
    )


async def _queue(reader: Reader, session: SessionKey, turn: TurnRecord, head_id: str) -> tuple[TurnView, int | None]:
    """The Turn at the head of the queue, and how many are ahead of this one, the head included."""
    thread_id = turn.thread_id
    page = Range(keys.queues(thread_id), limit=QUEUE_SHOWN_MAX)
    wanted = Reads(keys=(keys.thread(thread_id), keys.turn(head_id)), ranges=(page,))
    records, lease = await reader.read_owned(session, wanted, thread_id)
    head = turn_of(records, thread_id, head_id)
    view = await turn_view_now(reader, session, records, thread_of(records, thread_id), head, lease)
    place, waiting = keys.queue(thread_id, turn.ordinal), records.ranges[page]
    if any(key == place for key, _ in waiting):
        return view, 1 + sum(key < place for key, _ in waiting)
    return view, None if len(waiting) == QUEUE_SHOWN_MAX else 1


async def _committed_ms(reader: Reader, session: SessionKey, thread_id: str, active: ThreadHead | None) -> int:
    """When the owner committed last."""
    if active is None or not active.position:
        return 0
    last = StreamRange(thread_id, first=active.position, last=active.position, limit=1)
    rows = (await reader.read(session, Reads(streams=(last,)))).streams[last]
    return max((row.at_ms for row in rows), default=0)


async def _hosts(
    reader: Reader, binding: Binding, active: ThreadHead | None, lease: OwnerLease | None
) -> tuple[HostFacts, ...]:
    """Hosts with a lease; of those that have the definition, and the owner, how many Threads they hold."""
    leases = {found.owner: found for found in await reader.records.owners()}
    if active is not None and lease is not None:
        leases.setdefault(active.owner, lease)
    dead = set(await reader.records.dead_owners())
    hosts = [
        HostFacts(found.owner, found.alive, found.owner in dead, found.age_ms, host_notice(found))
        for found in leases.values()
        # An owner whose row is gone is known to be gone by that.
        if found.value or found.alive or found.age_ms
    ]
    looked_at = [host for host in hosts if host.there and host.notice.serves(binding.ready_class, binding.harness)]
    holds = {host.owner: await _holds(reader, host) for host in looked_at[:HOSTS_SHOWN_MAX]}
    return tuple(host._replace(holds=holds.get(host.owner)) for host in hosts)


async def _holds(reader: Reader, host: HostFacts) -> int:
    """Threads it owns, counted as far as it matters."""
    enough = max(1, host.notice.parallelism)
    return len((await reader.records.ready(ReadyScan(keys.READY_LEASE, host.owner, limit=enough))).items)
