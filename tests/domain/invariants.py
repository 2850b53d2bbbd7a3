"""What must be true of a Session after every command, whatever the command was.

`World.committed` and `World.unchanged` are called by the stage after each command, so every story in this folder checks
them too; `test_invariants.py` checks them over long random histories. Each assertion names the rule it stands for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.change import ReadyRow
from agentscope_durable.contracts.events import BODY_FIELDS, EventFilter, PublicEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import StoredEvent, decode_events
from agentscope_durable.contracts.projection import tool_key
from agentscope_durable.contracts.records import (
    CheckpointRecord,
    Condition,
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    MessageIndex,
    ObjectRecord,
    ObjectState,
    RunRecord,
    SessionHead,
    SignalRecord,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnRef,
    TurnState,
    decode,
)
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionState,
    ReplayRule,
    RunStatus,
    SignalState,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.domain.execution import item_of
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.domain.turn import due_ms, settling
from agentscope_durable.domain.turn_view import turn_view
from agentscope_durable.stores.records.memory import MemoryRecordStore

S = TypeVar("S", bound=msgspec.Struct)

EFFECTS = (WaitKind.TOOL_RUNNING, WaitKind.TOOL_UNKNOWN)
ASKS = (WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT)
UNDER_WAY = (ExecutionState.INTENT, ExecutionState.RUNNING, ExecutionState.UNKNOWN)


def public_event(session: SessionKey, sequence: int, at_ms: int, event: StoredEvent) -> PublicEvent:
    """A stored event as an observer gets it."""
    data: dict[str, Any] = msgspec.json.decode(event.payload)
    fields = ("value",) if event.type.startswith("x.") else BODY_FIELDS.get(event.type, ())
    for name in fields:
        if name in data:
            inline, digest, _ = data[name]
            # A body that is stored elsewhere is not looked up: no decision reads one.
            data[name] = inline if not digest else [] if name == "content" else digest
    return PublicEvent(
        type=event.type,
        session=session,
        sequence=sequence,
        at_ms=at_ms,
        data=data,
        thread_id=event.thread_id or None,
        turn_id=event.turn_id or None,
        run_id=event.run_id or None,
        step_id=event.step_id or None,
    )


@dataclass
class Dump:
    """Everything a store holds of one Session."""

    head: SessionHead | None
    rev: int
    next_seq: int
    pruned: int
    records: dict[str, bytes]
    ready: dict[tuple[str, str], ReadyRow]

    @classmethod
    def of(cls, store: MemoryRecordStore, session: SessionKey) -> Dump:
        name = keys.partition(session)
        # A test may look behind the socket: `ready` shows what is due, and this needs what is not due yet.
        found = store._sessions.get(name)
        ready = {(kind, item): row for (kind, partition, item), row in store._ready.items() if partition == name}
        if found is None:
            return cls(None, 0, 1, 0, {}, ready)
        return cls(store.head(name, found), found.rev, found.next_seq, found.pruned, dict(found.records), ready)

    @cached_property
    def _keys(self) -> list[str]:
        return sorted(self.records)

    def all(self, prefix: str, kind: type[S]) -> Iterator[S]:
        for key in self._keys[bisect_left(self._keys, prefix) :]:
            if not key.startswith(prefix):
                return
            yield decode(kind, self.records[key], key=key)

    def one(self, key: str, kind: type[S]) -> S:
        return decode(kind, self.records[key], key=key)

    def active(self, thread_id: str) -> ThreadHead | None:
        return None if self.head is None else self.head.threads.get(thread_id)

    def position(self, thread_id: str) -> int:
        """Stream position of the Thread's last owner commit."""
        active, key = self.active(thread_id), keys.thread(thread_id)
        if active is not None:
            return active.position
        return self.one(key, ThreadRecord).position if key in self.records else 0

    def state(self, record: TurnRecord) -> TurnState:
        """The state of a Turn: in the head while a host owns it."""
        active = self.active(record.thread_id)
        return active.turn if active is not None and active.turn_id == record.turn_id else record.state

    @cached_property
    def turns(self) -> dict[str, tuple[TurnRecord, TurnState]]:
        return {record.turn_id: (record, self.state(record)) for record in self.all("turn/", TurnRecord)}


class World:
    """Follows one Session from its first command on."""

    def __init__(self, store: MemoryRecordStore, session: SessionKey) -> None:
        self._store = store
        self._session = session
        self.fold = EventProjection(session)
        self.events: list[PublicEvent] = []
        self.dump = Dump.of(store, session)

    # ---- what is called after each command ----

    def unchanged(self) -> None:
        """A refused or repeated command has left everything as it was."""
        now = Dump.of(self._store, self._session)
        assert now == self.dump, "a command that was refused or repeated has changed something"

    def committed(self) -> None:
        before, now = self.dump, Dump.of(self._store, self._session)
        self.dump = now
        assert now.rev == before.rev + 1, "one commit, one revision"
        told = self._new_events(before, now)
        assert now.head is not None
        if now.head.status.gone:
            # Nobody reads it any more: it may go in any order.
            return
        self._stream(before, now)
        for turn_id, (record, state) in now.turns.items():
            self._revision(turn_id, before, state, told)
            self._view(record, state)
            self._turn(now, record, state)
        for thread in now.all(keys.THREADS, ThreadRecord):
            self._thread(before, now, thread)
            self._checkpoints(before, now, thread)
        self._interactions(now)
        self._bodies(now)
        if now.pruned != before.pruned:
            self._left(now)

    def _new_events(self, before: Dump, now: Dump) -> Counter[str]:
        """Events are dense (EV-06), and fold. Returns how often each Turn's status was told."""
        row = self._store._sessions[keys.partition(self._session)].log[-1]
        events = decode_events(row.events, row.first)
        assert row.first == before.next_seq
        assert row.count == len(events) == now.next_seq - before.next_seq
        told: Counter[str] = Counter()
        for offset, event in enumerate(events):
            assert event is not None
            earlier = before.turns.get(event.turn_id)
            assert earlier is None or not earlier[1].status.terminal, f"{event.type} about a Turn that has ended"
            public = public_event(self._session, row.first + offset, row.at_ms, event)
            assert self.fold.accept(public)
            self.events.append(public)
            if event.type == "turn.status":
                told[event.turn_id] += 1
        return told

    def _left(self, now: Dump) -> None:
        """What pruning has left folds to what everything did, whatever it is narrowed to (EV-19, PR-04)."""
        left = [
            public_event(self._session, sequence, row.at_ms, event)
            for row in self._store._sessions[keys.partition(self._session)].log
            for sequence, event in enumerate(decode_events(row.events, row.first), row.first)
            if event is not None
        ]
        filters = [EventFilter(), *(EventFilter(thread.thread_id) for thread in now.all(keys.THREADS, ThreadRecord))]
        for record, _ in now.turns.values():
            filters.append(EventFilter(record.thread_id, record.turn_id))
            for run in now.all(keys.runs(record.turn_id), RunRecord):
                filters.append(EventFilter(record.thread_id, record.turn_id, run.run_id))
        for narrow in filters:
            fold, whole = EventProjection(self._session, narrow), EventProjection(self._session, narrow)
            for event in left:
                fold.pass_over(event.sequence - 1)
                assert fold.accept(event)
            for event in self.events:
                assert whole.accept(event)
            assert fold.projection == whole.projection, f"pruning changed what is shown under {narrow}"

    def _stream(self, before: Dump, now: Dump) -> None:
        """A commit of an owner takes the next position of its Thread, and no other commit takes one."""
        row = self._store._sessions[keys.partition(self._session)].log[-1]
        for thread in now.all(keys.THREADS, ThreadRecord):
            wanted = before.position(thread.thread_id) + (row.stream == thread.thread_id)
            assert now.position(thread.thread_id) == wanted
            assert row.stream != thread.thread_id or row.at == wanted

    @staticmethod
    def _revision(turn_id: str, before: Dump, state: TurnState, told: Counter[str]) -> None:
        """The revision rises exactly when observers are told (PR-22)."""
        earlier = before.turns.get(turn_id)
        was = 0 if earlier is None else earlier[1].revision
        assert state.revision - was == told[turn_id], f"revision {was} -> {state.revision}, told {told[turn_id]} times"

    def _view(self, record: TurnRecord, state: TurnState) -> None:
        """What an observer folded is what a query would answer (PR-22)."""
        assert self.fold.projection.turns[record.turn_id] == turn_view(self._session, record, state)

    # ---- Threads ----

    def _thread(self, before: Dump, now: Dump, thread: ThreadRecord) -> None:
        name = thread.thread_id
        active = now.active(name)
        self._fence(before, thread, active)
        self._queue(now, thread)
        waiting, lease = now.ready.get((keys.READY_TURN, name)), now.ready.get((keys.READY_LEASE, name))
        if active is not None:
            assert active.turn_id == thread.current, "a host owns the Thread's current Turn"
            assert waiting is None, "an owned Thread is not offered to anyone"
            assert lease == ReadyRow(keys.READY_LEASE, active.owner, 0, name, active.turn_id)
            return
        assert lease is None, "nobody owns it, so there is no lease row"
        due = due_ms(now.one(keys.turn(thread.current), TurnRecord).state) if thread.current else None
        if due is None:
            assert waiting is None, "a Turn that cannot be taken is offered"
        else:
            wanted = ReadyRow(keys.READY_TURN, thread.binding.ready_class, due, name, thread.current)
            assert waiting == wanted, "a Turn stands in the ready index as `due_ms` says"

    def _checkpoints(self, before: Dump, now: Dump, thread: ThreadRecord) -> None:
        """A settled position stays what it was, and its rows prove it for ever (C69, BE-20)."""
        prefix = keys.checkpoints(thread.thread_id)
        for key in [key for key in before.records if key.startswith(prefix)]:
            gone = int(key.removeprefix(prefix)) <= thread.pruned_at and key not in now.records
            assert gone or now.records.get(key) == before.records[key], "a settled position was changed"
        if thread.settled_at and now.active(thread.thread_id) is None:
            assert keys.checkpoint(thread.thread_id, thread.settled_at) in now.records, "where it stands is kept"
        for key in [key for key in now.records if key.startswith(prefix) and key not in before.records]:
            record = now.one(key, CheckpointRecord)
            at = int(key.removeprefix(prefix))
            digest = ""
            for row in self._store._sessions[keys.partition(self._session)].log:
                if row.stream == thread.thread_id and record.base_at <= row.at <= at and row.journal:
                    digest = chained(digest, row.journal)
            assert digest == record.digest, "a settled position cannot be proven"
            assert at == thread.settled_at, "a new settled position is where its Thread stands"
        if now.active(thread.thread_id) is None and not thread.current:
            assert thread.settled_at == thread.checkpoint_at, "an idle Thread stands at a settled position"

    @staticmethod
    def _fence(before: Dump, thread: ThreadRecord, active: ThreadHead | None) -> None:
        key = keys.thread(thread.thread_id)
        if key not in before.records:
            return
        earlier, owned = before.one(key, ThreadRecord), before.active(thread.thread_id)
        was = max(earlier.fence, 0 if owned is None else owned.fence)
        fence = thread.fence if active is None else active.fence
        assert fence >= was, "a fence never goes down"
        if active is not None and (owned is None or owned.owner != active.owner):
            assert fence == was + 1, "every claim has a fence of its own"

    @staticmethod
    def _queue(now: Dump, thread: ThreadRecord) -> None:
        """The oldest unfinished Turn is the current one, the others stand in the queue in order (Q-01)."""
        unfinished = sorted(
            (record.ordinal, record.turn_id)
            for record, state in now.turns.values()
            if record.thread_id == thread.thread_id and not state.status.terminal
        )
        queued = [ref.turn_id for ref in now.all(keys.queues(thread.thread_id), TurnRef)]
        assert [thread.current, *queued] == [turn_id for _, turn_id in unfinished] or (
            not unfinished and not thread.current and not queued
        ), "queue and current Turn are the unfinished Turns in order"

    # ---- Turns ----

    def _turn(self, now: Dump, record: TurnRecord, state: TurnState) -> None:
        active = now.active(record.thread_id)
        owner = active if active is not None and active.turn_id == record.turn_id else None
        inputs = list(now.all(keys.inputs(record.turn_id), InputRecord))
        for one in inputs:
            flag = one.state.value.lower() if one.state in (SignalState.WITHDRAWN, SignalState.EXPIRED) else ""
            assert now.one(keys.message(one.seq), MessageIndex).flag == flag, "history says what became of an input"
        inputs = [one for one in inputs if one.state is SignalState.ACCEPTED]
        assert state.inputs == len(inputs)
        assert state.steers == sum(one.kind == "steer" for one in inputs)
        self._runs(now, record, owner)
        self._executions(now, record, state, owner)
        if state.status.terminal:
            self._ended(now, record, state)
            return
        if owner is not None:
            running = state.status in (TurnStatus.RUNNING, TurnStatus.PAUSING)
            assert running or (settling(state) and not owner.run.run_id), f"{state.status} and owned"
        if state.status is TurnStatus.PAUSED:
            assert state.pause and state.paused_revision and not settling(state)
        self._reason(now, record, state, owner)

    @staticmethod
    def _ended(now: Dump, record: TurnRecord, state: TurnState) -> None:
        assert record.ended_seq >= record.input_seq, "an ended Turn says where its part of the timeline ends"
        assert not state.conditions, "an ended Turn waits for nothing"
        assert not state.inputs and not state.operator and not state.cancel and not state.pause
        signals = now.all(keys.all_signals(record.turn_id), SignalRecord)
        assert all(signal.state is not SignalState.ACCEPTED for signal in signals)
        for asked in now.all(keys.interactions(record.turn_id), InteractionRecord):
            assert asked.state is not InteractionState.PENDING, "an ended Turn asks nothing"
        if state.recovery is not None:
            assert not state.recovery.next_retry_at_ms, "an ended Turn is not tried again"

    @staticmethod
    def _reason(now: Dump, record: TurnRecord, state: TurnState, owner: ThreadHead | None) -> None:
        """Running, claimable, or waiting for a visible reason (P9, S5)."""
        behind = now.one(keys.thread(record.thread_id), ThreadRecord).current != record.turn_id
        if owner is not None or behind or state.status is TurnStatus.PAUSED or due_ms(state) is not None:
            return
        view = turn_view(SessionKey("", ""), record, state)
        assert view.waiting_on, f"a {state.status} Turn does not advance, and says no reason"

    @staticmethod
    def _runs(now: Dump, record: TurnRecord, owner: ThreadHead | None) -> None:
        """At most one Run is under way, and it is the owner's (Q-09)."""
        running = [
            run.run_id for run in now.all(keys.runs(record.turn_id), RunRecord) if run.status is RunStatus.RUNNING
        ]
        assert running == ([owner.run.run_id] if owner is not None and owner.run.run_id else [])

    # ---- tool calls and questions ----

    def _executions(self, now: Dump, record: TurnRecord, state: TurnState, owner: ThreadHead | None) -> None:
        for run in now.all(keys.runs(record.turn_id), RunRecord):
            assert (run.status is RunStatus.RUNNING) is not bool(run.ended_ms), "a Run has an end when it has ended"
        for execution in now.all(keys.executions(record.turn_id), ExecutionRecord):
            found = [c for c in state.conditions if c.call_id == execution.call_id and c.kind in EFFECTS]
            assert len(found) <= 1, "one condition for one call"
            self._effect(execution, found[0] if found else None, state, owner)
            self._dispatch(now, record, execution)
            self._tool(record, execution)

    def _tool(self, record: TurnRecord, execution: ExecutionRecord) -> None:
        """What an observer folded of a call is what is stored of it (PR-05, PR-08)."""
        shown = self.fold.projection.tools[tool_key(record.thread_id, record.turn_id, execution.call_id)]
        assert (shown.state, shown.kind) == (execution.state, execution.kind)
        assert (shown.received_at_ms or 0, shown.applied_at_ms or 0) == (execution.received_ms, execution.applied_ms)
        assert shown.cancel_requested is execution.cancel_requested
        assert (shown.execution_id is not None) is (execution.kind is ExecutionKind.EXTERNAL)

    @staticmethod
    def _effect(
        execution: ExecutionRecord, condition: Condition | None, state: TurnState, owner: ThreadHead | None
    ) -> None:
        under_way = execution.state in UNDER_WAY and execution.kind is not ExecutionKind.MANUAL
        if state.status.terminal:
            assert not under_way, f"an ended Turn has a call that is {execution.state}"
            assert execution.state is not ExecutionState.AWAITING_APPROVAL, "an ended Turn has a call that waits"
            return
        if under_way:
            assert condition is not None, f"a call is {execution.state}, and nothing in its Turn says so"
            unknown = execution.state is ExecutionState.UNKNOWN
            assert condition.kind is (WaitKind.TOOL_UNKNOWN if unknown else WaitKind.TOOL_RUNNING)
        if execution.state is ExecutionState.AWAITING_APPROVAL:
            asked = [c for c in state.conditions if c.call_id == execution.call_id and c.kind is WaitKind.APPROVAL]
            assert asked, "a call waits for approval, and nobody is asked"
        if condition is None:
            return
        lost = (
            execution.kind is ExecutionKind.LOCAL
            and execution.state is ExecutionState.RUNNING
            and execution.rule is ReplayRule.SAFE
        )
        assert condition.ready is execution.state.terminal or (lost and condition.ready)
        if owner is None and execution.kind is ExecutionKind.LOCAL and execution.state is ExecutionState.RUNNING:
            assert condition.ready, "a Turn waits for a local tool that nobody runs"

    @staticmethod
    def _dispatch(now: Dump, record: TurnRecord, execution: ExecutionRecord) -> None:
        """An external execution that is under way will be looked at by someone."""
        item = item_of(record.turn_id, execution.call_id)
        waiting, running = now.ready.get((keys.READY_DISPATCH, item)), now.ready.get((keys.READY_RUNNING, item))
        if execution.kind is not ExecutionKind.EXTERNAL or execution.state not in UNDER_WAY:
            assert waiting is None and running is None, f"a call that is {execution.state} is offered to dispatchers"
            return
        value = keys.dispatch_value(execution.route, record.thread_id)
        assert waiting is None or (waiting.klass, waiting.value) == (execution.route, value)
        assert running is None or (running.klass, running.value) == (execution.owner, value)
        if execution.state is ExecutionState.INTENT:
            assert waiting is not None
        elif execution.state is ExecutionState.RUNNING:
            assert waiting is not None or running is not None, "a running execution that nobody will look at again"

    @staticmethod
    def _bodies(now: Dump) -> None:
        """What a record that may go refers to is counted, and no body that is referred to can be swept (D11)."""
        if now.head is None or now.head.status.gone:
            return
        counted = Counter(body.name for body in now.all("content/", Body) if body.is_reference)
        for key, mark in ((key, now.one(key, ObjectRecord)) for key in now.records if key.startswith(keys.OBJECTS)):
            uses = counted.pop(key.removeprefix(keys.OBJECTS), 0)
            assert mark.uses == uses, "as many as refer to a body are counted"
            assert (mark.state is ObjectState.REFERENCED) == (mark.kept or uses > 0), "its mark says who needs it"
        assert not counted, "a record refers to a body that has no mark"

    def _interactions(self, now: Dump) -> None:
        for turn_id, (_, state) in now.turns.items():
            records = {one.interaction_id: one for one in now.all(keys.interactions(turn_id), InteractionRecord)}
            asks = {c.id: c.ready for c in state.conditions if c.kind in ASKS}
            assert len(asks) == sum(c.kind in ASKS for c in state.conditions), "a question is asked once"
            for identity, ready in asks.items():
                wanted = InteractionState.RESOLVED if ready else InteractionState.PENDING
                assert records[identity].state is wanted
            for identity, one in records.items():
                pending = one.state is InteractionState.PENDING
                assert not pending or identity in asks, "a question that its Turn does not wait for"
                folded = self.fold.projection.interactions[identity]
                shown = InteractionState.RESOLVED if one.state is InteractionState.APPLIED else one.state
                assert folded.state is shown, "folded questions and stored ones agree (PR-22)"
                edited = None if one.edited is None else msgspec.json.decode(one.edited.inline)
                assert folded.edited_arguments == edited
