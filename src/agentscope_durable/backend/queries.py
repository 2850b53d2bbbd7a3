"""What can be asked: every question of `contracts/questions` is answered here, and nothing is changed.

Rule 1: records answer what they hold; events, history, snapshots, Steps and model calls are derived from the log when
somebody asks (D9). Nothing is written twice so that it can be read.
Rule 2: an answer costs what it shows. A page reads its page of records or rows, not the history before it. The one
answer that must read a whole timeline, the snapshot, has a named bound.
Rule 3: what depends on the moment of asking (the lease, `host`, `definition_missing`) is laid on top at the end and is
no part of any projection.
"""

from __future__ import annotations

import base64
import binascii
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.errors import (
    CorruptRecord,
    CursorExpired,
    DigestMismatch,
    InvalidCursor,
    InvalidRequest,
    LimitExceeded,
    NotFound,
)
from agentscope_durable.contracts.events import (
    BODY_FIELDS,
    EventFilter,
    EventPage,
    PublicEvent,
    StoredEvent,
    ToolChanged,
    cursor_of,
    sequence_of,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.projection import SnapshotView
from agentscope_durable.contracts.records import (
    Binding,
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    LateFact,
    MessageIndex,
    ModelFact,
    PrivateFact,
    RunRecord,
    RunStepRef,
    SessionHead,
    SignalRecord,
    StepFact,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnRef,
    TurnState,
    decode,
)
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import (
    Audience,
    ExecutionKind,
    InteractionState,
    SignalState,
    WaitKind,
)
from agentscope_durable.contracts.views import (
    BindingView,
    InteractionView,
    LeaseView,
    ModelCallView,
    Page,
    RunStepRefView,
    RunView,
    SessionView,
    StepView,
    ThreadView,
    ToolView,
    TurnView,
    Waiting,
)
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.projection import EventProjection, concerns, message_of
from agentscope_durable.domain.run_view import (
    Facts,
    model_call_view,
    model_facts,
    run_view,
    step_facts,
    step_view,
)
from agentscope_durable.domain.turn import due_ms
from agentscope_durable.domain.turn_view import NEXT_ACTION, turn_view
from agentscope_durable.spi.harness import JournalRow, OpenInput, OpenWorkView
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    LogRange,
    LogRow,
    OwnerLease,
    Range,
    Reads,
    Records,
    RecordStore,
    SessionScan,
    StreamRange,
)

__all__ = [
    "AUDIENCES",
    "LISTING_MAX",
    "LOG_ROWS",
    "MESSAGE_SCAN_MAX",
    "PAGE_BYTES_MAX",
    "SNAPSHOT_BYTES_MAX",
    "SNAPSHOT_EVENTS_MAX",
    "Queries",
]

LOG_ROWS: Final = 200
"""Log rows of one read: short enough that no reader holds the store up."""
PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bodies in one page of events or messages. A page ends early rather than hold more; one item always fits."""
SNAPSHOT_EVENTS_MAX: Final = 100_000
"""Events one snapshot folds. A longer timeline is read in pages, or narrowed to a Turn, whose fold begins with it."""
SNAPSHOT_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bodies one snapshot holds."""
MESSAGE_SCAN_MAX: Final = 10_000
"""Index entries one question looks through for the messages of a Thread, a Turn or an id."""
LISTING_MAX: Final = 10_000
"""Tool calls, interactions, inputs or signals of one Turn that are listed without pages."""
_NEAR: Final = 64
"""Events between two wanted ones that are rather read over than read around."""
_OWNER_ROUNDS: Final = 3

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

_events = msgspec.json.Decoder(list[StoredEvent])
_facts = msgspec.json.Decoder(list[PrivateFact])
_object = msgspec.json.Decoder(dict[str, Any])
_raw_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_body = msgspec.json.Decoder(Body)
_notice = msgspec.json.Decoder(HostNotice)


class _Found(NamedTuple):
    """An event of the log."""

    sequence: int
    at_ms: int
    event: StoredEvent


AUDIENCES: Final[dict[type[Any], Audience]] = {
    q.ListSessions: Audience.PUBLIC,
    q.GetSession: Audience.PUBLIC,
    q.GetThread: Audience.PUBLIC,
    q.ListThreads: Audience.PUBLIC,
    q.GetTurn: Audience.PUBLIC,
    q.ListTurns: Audience.PUBLIC,
    q.GetHistory: Audience.PUBLIC,
    q.GetMessage: Audience.PUBLIC,
    q.ListEvents: Audience.PUBLIC,
    q.GetSnapshot: Audience.PUBLIC,
    q.ListInteractions: Audience.PUBLIC,
    q.ListRuns: Audience.PUBLIC,
    q.GetRun: Audience.PUBLIC,
    q.ListSteps: Audience.PUBLIC,
    q.ListModelCalls: Audience.PUBLIC,
    q.ListTools: Audience.PUBLIC,
    # Native state and what waits for it: for the host that runs the Thread alone (EV-22).
    q.LoadThread: Audience.HOST,
    q.OpenWork: Audience.HOST,
}
"""Every question there is, and who may ask it."""


class Queries:
    """Answers questions about Sessions of one store.

    Args:
        records: where the records are.
        bodies: opens what is too large for a record.
    """

    def __init__(self, records: RecordStore, bodies: Bodies) -> None:
        self._records = records
        self._bodies = bodies
        self._answers: dict[type[Any], Callable[[Any], Awaitable[Any]]] = {
            q.ListSessions: self._list_sessions,
            q.GetSession: self._get_session,
            q.GetThread: self._get_thread,
            q.ListThreads: self._list_threads,
            q.GetTurn: self._get_turn,
            q.ListTurns: self._list_turns,
            q.GetHistory: self._get_history,
            q.GetMessage: self._get_message,
            q.ListEvents: self._list_events,
            q.GetSnapshot: self._get_snapshot,
            q.ListInteractions: self._list_interactions,
            q.ListRuns: self._list_runs,
            q.GetRun: self._get_run,
            q.ListSteps: self._list_steps,
            q.ListModelCalls: self._list_model_calls,
            q.ListTools: self._list_tools,
            q.LoadThread: self._load_thread,
            q.OpenWork: self._open_work,
        }

    @staticmethod
    def audience(question: Any) -> Audience:
        """Who may ask this (D15).

        Raises:
            InvalidRequest: it is no question.
        """
        audience = AUDIENCES.get(type(question))
        if audience is None:
            raise InvalidRequest(f"{type(question).__name__} is not a question")
        return audience

    async def answer(self, question: Any) -> Any:
        """The view a question asks for; nothing is changed, claimed or started (RT-21).

        Raises:
            NotFound: there is no such Session, Thread, Turn, Run or message, or it is not where the question says
                (RT-56, FI-03).
            InvalidRequest: a limit outside 1..1000, or no question at all.
            InvalidCursor: the cursor is of another listing, or of the future.
            CursorExpired: the events after the cursor were pruned.
            LimitExceeded: a named bound of this module.
        """
        find = self._answers.get(type(question))
        if find is None:
            raise InvalidRequest(f"{type(question).__name__} is not a question")
        return await find(question)

    # ---- Sessions ----

    async def _list_sessions(self, question: q.ListSessions) -> Page:
        limit = _limit(question.limit)
        prefix = keys.namespace_prefix(question.namespace)
        after = _position("sessions", question.cursor, prefix)
        scan = SessionScan(prefix=prefix, after=after, limit=_one_more(limit))
        names, cursor = _cut("sessions", await self._records.sessions(scan), limit)
        items: list[SessionView] = []
        for name in names:
            head = (await self._records.read(name, Reads())).head
            if head is not None:
                items.append(_session_view(keys.session_of(name), head))
        return Page(tuple(items), cursor)

    async def _get_session(self, question: q.GetSession) -> SessionView:
        records = await self._read(question.session, Reads())
        return _session_view(question.session, _head(records, question.session))

    # ---- Threads ----

    async def _get_thread(self, question: q.GetThread) -> ThreadView:
        records = await self._read(question.session, Reads(keys=(keys.thread(question.thread_id),)))
        return _thread_view(question.session, _thread(records, question.thread_id))

    async def _list_threads(self, question: q.ListThreads) -> Page:
        limit = _limit(question.limit)
        page = Range(keys.THREADS, _position("threads", question.cursor, keys.THREADS), _one_more(limit))
        records = await self._read(question.session, Reads(ranges=(page,)))
        rows, cursor = _cut_rows("threads", records.ranges[page], limit)
        items = (_thread_view(question.session, decode(ThreadRecord, data, key=key)) for key, data in rows)
        return Page(tuple(items), cursor)

    # ---- Turns ----

    async def _get_turn(self, question: q.GetTurn) -> TurnView:
        wanted = (keys.thread(question.thread_id), keys.turn(question.turn_id))
        records, lease = await self._read_owned(question.session, Reads(keys=wanted), question.thread_id)
        thread = _thread(records, question.thread_id)
        turn = _turn(records, question.thread_id, question.turn_id)
        return await self._turn_view(question.session, records, thread, turn, lease)

    async def _list_turns(self, question: q.ListTurns) -> Page:
        limit = _limit(question.limit)
        prefix = keys.orders(question.thread_id)
        page = Range(prefix, _position("turns", question.cursor, prefix), _one_more(limit))
        thread_key = keys.thread(question.thread_id)
        records = await self._read(question.session, Reads(keys=(thread_key,), ranges=(page,)))
        _ = _thread(records, question.thread_id)
        rows, cursor = _cut_rows("turns", records.ranges[page], limit)
        turn_ids = [decode(TurnRef, data, key=key).turn_id for key, data in rows]
        wanted = (thread_key, *map(keys.turn, turn_ids))
        records, lease = await self._read_owned(question.session, Reads(keys=wanted), question.thread_id)
        thread = _thread(records, question.thread_id)
        items = [
            await self._turn_view(question.session, records, thread, _turn(records, question.thread_id, turn_id), lease)
            for turn_id in turn_ids
        ]
        return Page(tuple(items), cursor)

    async def _turn_view(
        self, session: SessionKey, records: Records, thread: ThreadRecord, turn: TurnRecord, lease: OwnerLease | None
    ) -> TurnView:
        """The Turn as stored, with what only this moment knows."""
        active = _active(records, turn)
        state = turn.state if active is None else active.turn
        view = turn_view(session, turn, state)
        if active is not None and lease is not None:
            view = replace(
                view,
                lease=LeaseView(owner=active.owner, fence=active.fence, age_ms=lease.age_ms, alive=lease.alive),
            )
        due = due_ms(state)
        unclaimed = active is None or lease is None or not lease.alive
        if thread.current == turn.turn_id and unclaimed and due is not None and due <= records.now_ms:
            writer = thread.writer if active is None else active.writer or thread.writer
            waiting = await self._unclaimed(
                thread.binding, writer if state.runs else "", since_ms=max(state.updated_ms, due)
            )
            view = replace(view, waiting_on=(*view.waiting_on, waiting))
        return view

    async def _unclaimed(self, binding: Binding, writer: str, *, since_ms: int) -> Waiting:
        """Why nobody has taken a Turn that could run: no host there is has its definition, none reads the state of
        the `writer` it is in flight with (D21), or none has come to it."""
        alive = [_host_notice(owner) for owner in await self._records.owners() if owner.alive]
        serving = [notice for notice in alive if binding.ready_class in notice.classes]
        name = f"{binding.harness}@{binding.definition_version}"
        if serving and writer and all(writer in notice.refused for notice in serving):
            action = f"Start a host whose agent library is version {writer}, which wrote the state of this Turn."
            return Waiting(
                kind=WaitKind.DEFINITION_MISSING, id=f"{name} ({writer})", since_ms=since_ms, next_action=action
            )
        kind = WaitKind.DEFINITION_MISSING if alive and not serving else WaitKind.HOST
        return Waiting(kind=kind, id=name, since_ms=since_ms, next_action=NEXT_ACTION[kind])

    # ---- events ----

    async def _list_events(self, question: q.ListEvents) -> EventPage:
        session, narrow = question.session, question.filter
        limit = _limit(question.limit)
        position = sequence_of(session, question.cursor)
        last = 0
        wanted = _filter_keys(narrow)
        events: list[PublicEvent] = []
        size = 0
        checked = False
        while True:
            # Only as far as the page can reach: `limit` counts the events looked at (FI-10).
            rows = LogRange(after=position, limit=min(limit, LOG_ROWS), through=last or position + limit)
            records = await self._read(session, Reads(keys=() if checked else wanted, log=rows))
            if not checked:
                _check_filter(records, narrow)
                checked = True
            watermark = records.next_seq - 1
            if position > watermark:
                raise InvalidCursor("this cursor is ahead of the timeline", path="cursor")
            if position < records.pruned_through:
                if question.cursor is not None or last:
                    raise CursorExpired(position, oldest=records.pruned_through)
                # Without a cursor: everything that is kept.
                position = records.pruned_through
                continue
            last = last or position + limit
            full = False
            for found in _found(records.log, after=position, through=last):
                if concerns(narrow, found.event.type, found.event.thread_id, found.event.turn_id, found.event.run_id):
                    size += _weight(found.event)
                    full = bool(events) and size > PAGE_BYTES_MAX
                    if full:
                        break
                    events.append(await self._public(session, found))
                position = found.sequence
            if full or position >= min(last, watermark) or not records.log:
                return EventPage(tuple(events), cursor_of(session, position), cursor_of(session, watermark))

    async def _public(self, session: SessionKey, found: _Found) -> PublicEvent:
        event = found.event
        return PublicEvent(
            type=event.type,
            session=session,
            sequence=found.sequence,
            at_ms=found.at_ms,
            data=await self._payload(session, event),
            thread_id=event.thread_id or None,
            turn_id=event.turn_id or None,
            run_id=event.run_id or None,
            step_id=event.step_id or None,
        )

    async def _payload(self, session: SessionKey, event: StoredEvent) -> dict[str, Any]:
        """The payload as readers see it: bodies in plain."""
        fields = _body_fields(event.type)
        if not fields:
            return _object.decode(event.payload)
        data: dict[str, Any] = dict(_raw_object.decode(event.payload))
        for name, raw in data.items():
            if name in fields:
                data[name] = await self._bodies.open_value(session, _body.decode(raw))
            else:
                data[name] = msgspec.json.decode(raw)
        return data

    # ---- snapshots ----

    async def _get_snapshot(self, question: q.GetSnapshot) -> SnapshotView:
        session, narrow = question.session, question.filter
        records = await self._read(session, Reads(keys=_filter_keys(narrow)))
        _check_filter(records, narrow)
        watermark = records.next_seq - 1
        position = 0
        if narrow.turn_id is not None:
            # A Turn begins with the commit that holds its input.
            position = _turn(records, narrow.thread_id or "", narrow.turn_id).input_seq - 1
        if position < records.pruned_through:
            raise CursorExpired(position, oldest=records.pruned_through)
        if watermark - position > SNAPSHOT_EVENTS_MAX:
            raise LimitExceeded("SNAPSHOT_EVENTS_MAX", SNAPSHOT_EVENTS_MAX)
        fold = EventProjection(session, narrow)
        scope = EventFilter(thread_id=narrow.thread_id, turn_id=narrow.turn_id)
        size = 0
        while position < watermark:
            page = LogRange(after=position, limit=LOG_ROWS, through=watermark)
            log = (await self._read(session, Reads(log=page))).log
            if not log:
                raise CorruptRecord(f"event {position + 1}", "log row", "it is missing")
            # The first row is taken whole: a Turn's events stand before its input as well as after it.
            for found in _found(log, after=fold.sequence, through=watermark):
                event = found.event
                if not EventProjection.folds(event.type) or not concerns(
                    scope, event.type, event.thread_id, event.turn_id, None
                ):
                    # Counted, so that the fold sees no gap; what it says is not looked at.
                    public = PublicEvent(type="", session=session, sequence=found.sequence, at_ms=found.at_ms, data={})
                else:
                    size += _weight(event)
                    if size > SNAPSHOT_BYTES_MAX:
                        raise LimitExceeded("SNAPSHOT_BYTES_MAX", SNAPSHOT_BYTES_MAX)
                    public = await self._public(session, found)
                _ = fold.accept(public)
                position = found.sequence
            await _give_way()
        return SnapshotView(
            session=session, cursor=cursor_of(session, watermark), projection=fold.projection, filter=narrow
        )

    # ---- history ----

    async def _get_history(self, question: q.GetHistory) -> Page:
        session, narrow = question.session, question.filter
        limit = _limit(question.limit)
        after = _position("history", question.cursor, keys.MESSAGES)
        records = await self._read(session, Reads(keys=_filter_keys(narrow)))
        _check_filter(records, narrow)
        if not after and narrow.turn_id is not None:
            after = keys.message(_turn(records, narrow.thread_id or "", narrow.turn_id).input_seq - 1)
        entries: list[tuple[int, MessageIndex]] = []
        more = True
        scanned = 0
        # One more than the page, to know whether there is another.
        while more and len(entries) <= limit and scanned < MESSAGE_SCAN_MAX:
            page = Range(keys.MESSAGES, after, _one_more(limit) if narrow == EventFilter() else PAGE_MAX)
            rows = (await self._read(session, Reads(ranges=(page,)))).ranges[page]
            more = len(rows) == page.limit
            scanned += len(rows)
            for key, data in rows:
                index = decode(MessageIndex, data, key=key)
                if narrow.thread_id not in (None, index.thread_id) or narrow.turn_id not in (None, index.turn_id):
                    continue
                entries.append((_first_of(key), index))
            if rows:
                after = rows[-1][0]
        items, shown = await self._messages(session, entries[:limit], narrow.run_id)
        if shown < len(entries):
            # The page is full, of messages or of bytes.
            after = keys.message(entries[shown - 1][0])
        elif not more:
            return Page(tuple(items))
        return Page(tuple(items), _cursor("history", after))

    async def _messages(
        self, session: SessionKey, entries: Sequence[tuple[int, MessageIndex]], run_id: str | None = None
    ) -> tuple[list[Message], int]:
        """The messages of index entries, and how many entries were looked at before the page was full."""
        found = await self._at(session, {seq for first, index in entries for seq in (first, index.seq)})
        items: list[Message] = []
        size = 0
        for count, (first, index) in enumerate(entries):
            newest = found[index.seq]
            if run_id is not None and newest.event.run_id != run_id:
                continue
            size += _weight(newest.event)
            if items and size > PAGE_BYTES_MAX:
                return items, count
            payload = await self._payload(session, newest.event)
            try:
                message = message_of(
                    payload,
                    sequence=first,
                    created_at_ms=found[first].at_ms,
                    withdrawn=index.flag == "withdrawn",
                    expired=index.flag == "expired",
                )
            except (msgspec.ValidationError, KeyError, ValueError) as error:
                raise CorruptRecord(f"event {newest.sequence}", newest.event.type, str(error)) from error
            items.append(message)
        return items, len(entries)

    async def _get_message(self, question: q.GetMessage) -> Message:
        session, message_id = question.session, question.message_id
        after = keys.MESSAGES
        # Messages of a Turn are named after it; it tells from where on to look.
        turn_id = message_id.rpartition(".")[0]
        turn_key = keys.turn(turn_id)
        records = await self._read(session, Reads(keys=(turn_key,)))
        if turn_key in records.keys:
            turn = decode(TurnRecord, records.keys[turn_key], key=turn_key)
            after = keys.message(turn.input_seq - 1)
            state = _state(records, turn)
            if state.message_id == message_id:
                # The newest answer is what is asked for most.
                guess = keys.message(state.message_seq)
                records = await self._read(session, Reads(keys=(guess,)))
                if guess in records.keys:
                    index = decode(MessageIndex, records.keys[guess], key=guess)
                    return (await self._messages(session, [(state.message_seq, index)]))[0][0]
        scanned = 0
        while True:
            page = Range(keys.MESSAGES, after, PAGE_MAX)
            rows = (await self._read(session, Reads(ranges=(page,)))).ranges[page]
            for key, data in rows:
                index = decode(MessageIndex, data, key=key)
                if index.message_id == message_id:
                    return (await self._messages(session, [(_first_of(key), index)]))[0][0]
            scanned += len(rows)
            if len(rows) < PAGE_MAX:
                raise NotFound("message", message_id)
            if scanned >= MESSAGE_SCAN_MAX:
                raise LimitExceeded("MESSAGE_SCAN_MAX", MESSAGE_SCAN_MAX)
            after = rows[-1][0]

    # ---- interactions and tools ----

    async def _list_interactions(self, question: q.ListInteractions) -> list[InteractionView]:
        session, turn_id = question.session, question.turn_id
        records = await self._read(session, Reads(keys=(keys.turn(turn_id),)))
        turn = _turn(records, question.thread_id, turn_id)
        if question.pending_only:
            # Open questions are conditions of the Turn, so nothing that was answered is read.
            wanted = tuple(
                keys.interaction(turn_id, condition.id)
                for condition in _state(records, turn).conditions
                if condition.kind in (WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT) and not condition.ready
            )
            records = await self._read(session, Reads(keys=wanted))
            rows = [(key, records.keys[key]) for key in wanted if key in records.keys]
        else:
            rows = await self._all(session, keys.interactions(turn_id))
        # Conditions stand in the order in which they were opened; sorting keeps that of one moment.
        found = [decode(InteractionRecord, data, key=key) for key, data in rows]
        found.sort(key=lambda record: record.opened_ms)
        return [
            await self._interaction_view(session, turn_id, record)
            for record in found
            if not question.pending_only or record.state is InteractionState.PENDING
        ]

    async def _interaction_view(self, session: SessionKey, turn_id: str, record: InteractionRecord) -> InteractionView:
        response = None if record.response is None else await self._bodies.open_value(session, record.response)
        return InteractionView(
            interaction_id=record.interaction_id,
            turn_id=turn_id,
            call_id=record.call_id,
            kind=record.kind,
            name=record.name,
            arguments=await self._bodies.open_value(session, record.arguments),
            state=record.state,
            opened_at_ms=record.opened_ms,
            response=response,
            request_id=record.request_id or None,
            reason=record.reason or None,
        )

    async def _list_tools(self, question: q.ListTools) -> list[ToolView]:
        session, turn_id = question.session, question.turn_id
        records = await self._read(session, Reads(keys=(keys.turn(turn_id),)))
        turn = _turn(records, question.thread_id, turn_id)
        executions = await self._executions(session, turn_id)
        arguments = await self._arguments(session, turn, executions)
        executions = await self._with_results(session, executions)
        return [
            await self._tool_view(session, turn, record, arguments.get(record.call_id, record.arguments))
            for record in executions
        ]

    async def _tool_view(
        self, session: SessionKey, turn: TurnRecord, record: ExecutionRecord, arguments: Body
    ) -> ToolView:
        result = None if record.result is None else await self._bodies.open_value(session, record.result)
        return ToolView(
            thread_id=turn.thread_id,
            turn_id=turn.turn_id,
            call_id=record.call_id,
            name=record.name,
            kind=record.kind,
            state=record.state,
            arguments=await self._bodies.open_value(session, arguments),
            execution_id=record.execution_id if record.kind is ExecutionKind.EXTERNAL else None,
            result=result,
            origin=_ref_view(record.origin),
            received_at_ms=record.received_ms or None,
            applied_at=None if record.applied_at is None else _ref_view(record.applied_at),
            applied_at_ms=record.applied_ms or None,
            cancel_requested=record.cancel_requested,
        )

    async def _executions(self, session: SessionKey, turn_id: str) -> list[ExecutionRecord]:
        """The calls of a Turn in the order in which they were made."""
        rows = await self._all(session, keys.executions(turn_id))
        return sorted((decode(ExecutionRecord, data, key=key) for key, data in rows), key=_made)

    async def _with_results(self, session: SessionKey, executions: Sequence[ExecutionRecord]) -> list[ExecutionRecord]:
        """The records with the results that their events hold: a body is stored once."""
        found = await self._at(session, {record.seq for record in executions if record.seq})
        return [
            replace(record, result=_tool_changed(found[record.seq]).result) if record.seq else record
            for record in executions
        ]

    async def _arguments(
        self, session: SessionKey, turn: TurnRecord, executions: Sequence[ExecutionRecord]
    ) -> dict[str, Body]:
        """Arguments that only the `tool.requested` event holds, by call: a body is stored once."""
        wanted = {record.call_id: record.requested_seq for record in executions if record.arguments == Body()}
        noted = await self._at(session, {seq for seq in wanted.values() if seq})
        found = {call_id: _tool_changed(noted[seq]).arguments or Body() for call_id, seq in wanted.items() if seq}
        if len(found) == len(wanted):
            return found
        # Where the record does not say: in the Turn's slice of the stream.
        last = turn.last_at if turn.state.status.terminal else 0
        async for row in self._stream(session, turn.thread_id, turn.first_at, last):
            for one in _found((row,), after=0, through=row.first + row.count):
                if one.event.type == "tool.requested" and one.event.turn_id == turn.turn_id:
                    changed = _tool_changed(one)
                    if changed.arguments is not None and changed.call_id not in found:
                        found[changed.call_id] = changed.arguments
            if wanted.keys() <= found.keys():
                break
        return found

    # ---- Runs, Steps and model calls ----

    async def _list_runs(self, question: q.ListRuns) -> Page:
        limit = _limit(question.limit)
        prefix = keys.runs(question.turn_id)
        page = Range(prefix, _position("runs", question.cursor, prefix), _one_more(limit))
        records = await self._read(question.session, Reads(keys=(keys.turn(question.turn_id),), ranges=(page,)))
        _ = _turn(records, question.thread_id, question.turn_id)
        rows, cursor = _cut_rows("runs", records.ranges[page], limit)
        items = (run_view(question.turn_id, decode(RunRecord, data, key=key)) for key, data in rows)
        return Page(tuple(items), cursor)

    async def _get_run(self, question: q.GetRun) -> RunView:
        _, run = await self._run(question)
        return run_view(question.turn_id, run)

    async def _run(
        self, question: q.GetRun | q.ListSteps | q.ListModelCalls, *more: Range
    ) -> tuple[Records, RunRecord]:
        turn_id, run_id = question.turn_id, question.run_id
        key = _run_key(turn_id, run_id)
        wanted = (keys.turn(turn_id),) if key is None else (keys.turn(turn_id), key)
        records = await self._read(question.session, Reads(keys=wanted, ranges=more))
        _ = _turn(records, question.thread_id, turn_id)
        return records, _run_of(records, turn_id, run_id)

    async def _list_steps(self, question: q.ListSteps) -> Page:
        limit = _limit(question.limit)
        _, run = await self._run(question)
        first, skip = _place("steps", question.cursor, run)
        facts: Facts[StepFact] = Facts(skip)
        async for row in self._stream(question.session, question.thread_id, first, run.last_at):
            for fact in _private(row):
                if isinstance(fact, StepFact) and fact.run_id == run.run_id:
                    step_facts(facts, fact, at=row.at, at_ms=row.at_ms)
            if facts.shows(limit):
                break
        items: tuple[StepView, ...] = tuple(step_view(run, told) for told in facts.first(limit))
        return Page(items, _place_cursor("steps", run, facts.after(limit)))

    async def _list_model_calls(self, question: q.ListModelCalls) -> Page:
        limit = _limit(question.limit)
        lates = Range(keys.lates(question.run_id), limit=PAGE_MAX)
        records, run = await self._run(question, lates)
        late: dict[str, list[ModelFact]] = {}
        for key, data in records.ranges[lates]:
            filed = decode(LateFact, data, key=key)
            if filed.what == "model":
                fact = decode(ModelFact, await self._bodies.open(question.session, filed.body), key=key)
                late.setdefault(fact.model_call_id, []).append(fact)
        first, skip = _place("models", question.cursor, run)
        facts: Facts[ModelFact] = Facts(skip)
        async for row in self._stream(question.session, question.thread_id, first, run.last_at):
            for fact in _private(row):
                if not isinstance(fact, ModelFact) or fact.run_id != run.run_id:
                    continue
                if question.step_id in (None, fact.step_id):
                    model_facts(facts, fact, at=row.at, at_ms=row.at_ms)
            if facts.shows(limit):
                break
        items: tuple[ModelCallView, ...] = tuple(
            model_call_view(run, told, late.get(told[0].fact.model_call_id, ())) for told in facts.first(limit)
        )
        return Page(items, _place_cursor("models", run, facts.after(limit)))

    # ---- what a host reads ----

    async def _load_thread(self, question: q.LoadThread) -> list[JournalRow]:
        records = await self._read(question.session, Reads(keys=(keys.thread(question.thread_id),)))
        _ = _thread(records, question.thread_id)
        if question.first <= 0 or question.last < question.first:
            # Nothing native has been stored yet.
            return []
        rows: list[JournalRow] = []
        digest = ""
        async for row in self._stream(question.session, question.thread_id, question.first, question.last):
            if row.journal:
                digest = chained(digest, row.journal)
                journal = await self._bodies.open_column(question.session, row.journal)
                rows.append(JournalRow(at=row.at, journal=journal))
        if question.digest and digest != question.digest:
            raise DigestMismatch(
                f"native state of thread {question.thread_id!r}, positions {question.first} to {question.last}",
                "JournalBatch",
                expected=question.digest,
                actual=digest,
            )
        return rows

    async def _open_work(self, question: q.OpenWork) -> OpenWorkView:
        session, turn_id = question.session, question.turn_id
        prefixes = (
            keys.inputs(turn_id),
            keys.interactions(turn_id),
            keys.executions(turn_id),
            keys.all_signals(turn_id),
        )
        pages = tuple(Range(prefix, limit=PAGE_MAX) for prefix in prefixes)
        # One reading for all: what waits belongs together.
        records = await self._read(session, Reads(keys=(keys.turn(turn_id),), ranges=pages))
        turn = _turn(records, question.thread_id, turn_id)
        rows = [
            found if len(found) < PAGE_MAX else await self._all(session, prefix)
            for prefix, found in ((page.prefix, records.ranges[page]) for page in pages)
        ]
        inputs = [decode(InputRecord, data, key=key) for key, data in rows[0]]
        interactions = [decode(InteractionRecord, data, key=key) for key, data in rows[1]]
        executions = [decode(ExecutionRecord, data, key=key) for key, data in rows[2]]
        signals = [decode(SignalRecord, data, key=key) for key, data in rows[3]]
        settled = (InteractionState.APPLIED, InteractionState.CLOSED)
        return OpenWorkView(
            inputs=await self._open_inputs(session, turn, inputs),
            interactions=tuple(
                sorted((r for r in interactions if r.state not in settled), key=lambda record: record.opened_ms)
            ),
            executions=tuple(
                await self._with_results(session, sorted((r for r in executions if not r.applied_ms), key=_made))
            ),
            signals=tuple(
                sorted((r for r in signals if r.state is SignalState.ACCEPTED), key=lambda record: record.ordinal)
            ),
        )

    async def _open_inputs(
        self, session: SessionKey, turn: TurnRecord, inputs: Iterable[InputRecord]
    ) -> tuple[OpenInput, ...]:
        waiting = [record for record in inputs if record.state is SignalState.ACCEPTED]
        found = await self._at(session, {record.seq for record in waiting})
        opened: list[OpenInput] = []
        for record in waiting:
            content: Any = (await self._payload(session, found[record.seq].event)).get("content")
            if not isinstance(content, list):
                raise CorruptRecord(keys.input_(turn.turn_id, record.ordinal), "message.completed", "no content")
            opened.append(OpenInput(record=record, content=content))
        return tuple(opened)

    # ---- reading ----

    async def _read(self, session: SessionKey, reads: Reads) -> Records:
        """One consistent reading of an existing Session."""
        records = await self._records.read(keys.partition(session), reads)
        _ = _head(records, session)
        return records

    async def _read_owned(self, session: SessionKey, reads: Reads, thread_id: str) -> tuple[Records, OwnerLease | None]:
        """A reading together with the lease of the Thread's owner, None when nobody owns it."""
        records = await self._read(session, reads)
        for _ in range(_OWNER_ROUNDS):
            active = _head(records, session).threads.get(thread_id)
            if active is None:
                return records, None
            if active.owner in records.owners:
                break
            # Only the head says who it is: read again, so that state and lease are of one moment.
            records = await self._read(session, replace(reads, owners=(active.owner,)))
        active = _head(records, session).threads.get(thread_id)
        return records, None if active is None else records.owners.get(active.owner)

    async def _all(self, session: SessionKey, prefix: str) -> list[tuple[str, bytes]]:
        """Every record under a prefix, page by page."""
        found: list[tuple[str, bytes]] = []
        after = ""
        while True:
            page = Range(prefix, after, PAGE_MAX)
            rows = (await self._read(session, Reads(ranges=(page,)))).ranges[page]
            found.extend(rows)
            if len(rows) < PAGE_MAX:
                return found
            if len(found) >= LISTING_MAX:
                raise LimitExceeded("LISTING_MAX", LISTING_MAX)
            after = rows[-1][0]

    async def _at(self, session: SessionKey, sequences: set[int]) -> dict[int, _Found]:
        """Events by their numbers. Neighbours are read together."""
        wanted = sorted(sequences)
        found: dict[int, _Found] = {}
        start = 0
        while start < len(wanted):
            stop = start + 1
            while stop < len(wanted) and wanted[stop] - wanted[stop - 1] <= _NEAR:
                stop += 1
            position, through = wanted[start] - 1, wanted[stop - 1]
            while position < through:
                page = LogRange(after=position, limit=LOG_ROWS, through=through)
                records = await self._read(session, Reads(log=page))
                for one in _found(records.log, after=position, through=through):
                    position = one.sequence
                    if position in sequences:
                        found[position] = one
                if not records.log or position <= records.pruned_through:
                    break
            start = stop
        missing = sequences - found.keys()
        if missing:
            raise CorruptRecord(f"event {min(missing)}", "log row", "a record refers to it, and it is not there")
        return found

    async def _stream(self, session: SessionKey, stream: str, first: int, last: int) -> AsyncIterator[LogRow]:
        """Rows of a Thread's stream from `first` to `last` (0: the newest), oldest first."""
        while True:
            page = StreamRange(stream=stream, first=first, last=last, limit=LOG_ROWS)
            rows = (await self._read(session, Reads(streams=(page,)))).streams[page]
            for row in rows:
                yield row
            if len(rows) < LOG_ROWS:
                return
            first = rows[-1].at + 1


# ---- rows ----


def _stored(row: LogRow) -> list[StoredEvent]:
    if not row.events:
        return []
    try:
        return _events.decode(row.events)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"events from {row.first}", "list[StoredEvent]", str(error)) from error


def _private(row: LogRow) -> list[PrivateFact]:
    if not row.private:
        return []
    try:
        return _facts.decode(row.private)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{row.stream} at {row.at}", "list[PrivateFact]", str(error)) from error


def _found(log: Iterable[LogRow], *, after: int, through: int) -> Iterable[_Found]:
    """The events of rows with `after < sequence <= through`, in order."""
    for row in log:
        for sequence, event in enumerate(_stored(row), row.first):
            if after < sequence <= through:
                yield _Found(sequence, row.at_ms, event)


def _tool_changed(found: _Found) -> ToolChanged:
    try:
        return msgspec.json.decode(found.event.payload, type=ToolChanged)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"event {found.sequence}", found.event.type, str(error)) from error


def _body_fields(event_type: str) -> tuple[str, ...]:
    return ("value",) if event_type.startswith("x.") else BODY_FIELDS.get(event_type, ())


def _weight(event: StoredEvent) -> int:
    """Bytes an event will have when its bodies are opened."""
    size = len(memoryview(event.payload))
    fields = _body_fields(event.type)
    if fields:
        for name, raw in _raw_object.decode(event.payload).items():
            if name in fields:
                size += _body.decode(raw).size
    return size


# ---- records ----


def _head(records: Records, session: SessionKey) -> SessionHead:
    if records.head is None:
        raise NotFound("session", f"{session.namespace}/{session.session_id}")
    return records.head


def _get(records: Records, key: str, kind: type[S]) -> S | None:
    data = records.keys.get(key)
    return None if data is None else decode(kind, data, key=key)


def _thread(records: Records, thread_id: str) -> ThreadRecord:
    record = _get(records, keys.thread(thread_id), ThreadRecord)
    if record is None:
        raise NotFound("thread", thread_id)
    return record


def _turn(records: Records, thread_id: str, turn_id: str) -> TurnRecord:
    """A Turn that is in this Thread; its state may be the head's (`_state`)."""
    record = _get(records, keys.turn(turn_id), TurnRecord)
    if record is None or record.thread_id != thread_id:
        raise NotFound("turn", turn_id)
    return record


def _run_key(turn_id: str, run_id: str) -> str | None:
    """A Run is numbered within its Turn, and its id says both."""
    prefix, _, number = run_id.rpartition(".")
    if prefix != turn_id or not number.isascii() or not number.isdigit() or len(number) > 12:
        return None
    return keys.run(turn_id, int(number))


def _run_of(records: Records, turn_id: str, run_id: str) -> RunRecord:
    key = _run_key(turn_id, run_id)
    record = None if key is None else _get(records, key, RunRecord)
    if record is None or record.run_id != run_id:
        raise NotFound("run", run_id)
    return record


def _active(records: Records, turn: TurnRecord) -> ThreadHead | None:
    """The Thread's head if a host owns it for this very Turn."""
    active = None if records.head is None else records.head.threads.get(turn.thread_id)
    return active if active is not None and active.turn_id == turn.turn_id else None


def _state(records: Records, turn: TurnRecord) -> TurnState:
    active = _active(records, turn)
    return turn.state if active is None else active.turn


def _filter_keys(narrow: EventFilter) -> tuple[str, ...]:
    """What must be read to know that a filter names things that are inside each other (FI-03)."""
    wanted: list[str] = []
    if narrow.thread_id is not None:
        wanted.append(keys.thread(narrow.thread_id))
    if narrow.turn_id is not None:
        wanted.append(keys.turn(narrow.turn_id))
        if narrow.run_id is not None:
            key = _run_key(narrow.turn_id, narrow.run_id)
            if key is not None:
                wanted.append(key)
    return tuple(wanted)


def _check_filter(records: Records, narrow: EventFilter) -> None:
    if narrow.thread_id is not None:
        _ = _thread(records, narrow.thread_id)
        if narrow.turn_id is not None:
            _ = _turn(records, narrow.thread_id, narrow.turn_id)
            if narrow.run_id is not None:
                _ = _run_of(records, narrow.turn_id, narrow.run_id)


def _made(record: ExecutionRecord) -> tuple[int, int]:
    """When a call was opened, and its place among those of one commit."""
    return record.created_ms, record.requested_seq


def _first_of(key: str) -> int:
    """The first sequence of a message, from the key of its index entry."""
    return int(key.removeprefix(keys.MESSAGES))


# ---- views ----


def _session_view(session: SessionKey, head: SessionHead) -> SessionView:
    return SessionView(session=session, status=head.status, created_at_ms=head.created_ms)


def _thread_view(session: SessionKey, record: ThreadRecord) -> ThreadView:
    return ThreadView(
        session=session,
        thread_id=record.thread_id,
        binding=BindingView(
            harness=record.binding.harness,
            definition_version=record.binding.definition_version,
            state_version=record.binding.state_version,
        ),
        status=record.status,
        created_at_ms=record.created_ms,
        current_turn_id=record.current or None,
    )


def _ref_view(ref: RunStepRef) -> RunStepRefView:
    return RunStepRefView(run_id=ref.run_id, step_id=ref.step_id)


def _host_notice(owner: OwnerLease) -> HostNotice:
    """What a host published; a host that published nothing readable serves nothing as far as we can tell."""
    try:
        return _notice.decode(owner.value)
    except msgspec.DecodeError:
        return HostNotice()


# ---- pages ----


def _limit(limit: int) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"a limit is a whole number from 1 to {PAGE_MAX}", path="limit")
    return limit


def _one_more(limit: int) -> int:
    """How many to read to know whether there is another page. A page of PAGE_MAX may be followed by an empty one."""
    return min(limit + 1, PAGE_MAX)


def _cut(listing: str, names: Sequence[str], limit: int) -> tuple[Sequence[str], str | None]:
    """The names of a page, and the cursor after them if there are more."""
    more = len(names) > limit or len(names) == PAGE_MAX
    names = names[:limit]
    return names, _cursor(listing, names[-1]) if more else None


def _cut_rows(
    listing: str, rows: Sequence[tuple[str, bytes]], limit: int
) -> tuple[Sequence[tuple[str, bytes]], str | None]:
    _, cursor = _cut(listing, [key for key, _ in rows], limit)
    return rows[:limit], cursor


def _cursor(listing: str, value: object) -> str:
    """An opaque cursor of a listing: text that survives a URL."""
    return base64.urlsafe_b64encode(msgspec.json.encode([listing, value])).decode().rstrip("=")


def _uncursor(listing: str, cursor: str, kind: type[T]) -> T:
    try:
        encoded = cursor.encode("ascii")
        document = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        name, value = msgspec.json.decode(document, type=tuple[str, msgspec.Raw])
        if name == listing:
            return msgspec.json.decode(value, type=kind)
    except (AttributeError, UnicodeError, binascii.Error, msgspec.MsgspecError):
        pass
    raise InvalidCursor(f"this is not a cursor of {listing}", path="cursor")


def _position(listing: str, cursor: str | None, prefix: str) -> str:
    """The key a listing goes on after; "" at its start."""
    if cursor is None:
        return ""
    key = _uncursor(listing, cursor, str)
    if not key.startswith(prefix):
        raise InvalidCursor(f"this is not a cursor of these {listing}", path="cursor")
    return key


def _place(listing: str, cursor: str | None, run: RunRecord) -> tuple[int, tuple[str, ...]]:
    """Where in a Run's slice of the stream a listing goes on, and whom it passes over there."""
    if cursor is None:
        return run.first_at, ()
    run_id, first, skip = _uncursor(listing, cursor, tuple[str, int, tuple[str, ...]])
    if run_id != run.run_id or first < run.first_at:
        raise InvalidCursor(f"this is not a cursor of the {listing} of this run", path="cursor")
    return first, skip


def _place_cursor(listing: str, run: RunRecord, place: tuple[int, tuple[str, ...]] | None) -> str | None:
    return None if place is None else _cursor(listing, (run.run_id, *place))


@types.coroutine
def _give_way() -> Generator[None, None, None]:
    """Let other tasks run once: a store in memory answers without ever waiting."""
    yield
