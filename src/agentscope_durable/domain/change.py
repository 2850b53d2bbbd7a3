"""A draft collects what one decision makes true and turns it into one `Change`.

It is the only mutable thing in `domain`, and it lives for one decision. It numbers nothing, reads
no clock and touches no store: numbers come from the view, time and seed are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body, column_reference
from agentscope_durable.contracts.change import Change, Entry, Need, Range, Reads, ReadyRow, View
from agentscope_durable.contracts.errors import BodySwept, NotFound, SessionDropped
from agentscope_durable.contracts.events import Payload, TurnChanged, TurnRecovery
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import PrivateFact, StoredEvent, encode_events, encode_facts
from agentscope_durable.contracts.records import (
    CLASS_SEPARATOR,
    ObjectRecord,
    ObjectState,
    SessionHead,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnState,
    decode,
    encode,
)
from agentscope_durable.domain.ids import commit_id
from agentscope_durable.domain.turn import at_rest, due_ms
from agentscope_durable.domain.turn_view import recovery_view, turn_view

S = TypeVar("S", bound=msgspec.Struct)

_json = msgspec.json.Encoder()

HINTS_KEPT = 4096
"""Hint keys of Sessions and definitions that are not computed again."""


@lru_cache(HINTS_KEPT)
def session_hint(partition: str) -> str:
    """Hint key of a Session, of fixed size whatever the ids are (C76)."""
    return "s:" + blake2b(partition.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


@lru_cache(HINTS_KEPT)
def ends_hint(partition: str) -> str:
    """Hint key of a Session for those who only wait for the ends of its Turns: not of the steps in between."""
    return "e:" + blake2b(partition.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


def turn_hint(partition: str, turn_id: str) -> str:
    """Hint key of one Turn for the host that runs it: what others said of it, and not of the others of its Session."""
    return "t:" + blake2b(f"{partition}\x00{turn_id}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


@lru_cache(HINTS_KEPT)
def ready_hint(kind: str, klass: str) -> str:
    """Hint key of a kind and class of ready work.

    One for all versions of a definition: a host that resolves them does not know them before.
    """
    klass = klass.partition(CLASS_SEPARATOR)[0]
    return "r:" + blake2b(f"{kind}\x00{klass}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()


class _Use:
    """What a commit changes about who refers to a body.

    Attributes:
        new: it refers to it.
        kept: from something that stays.
        more: records that may go and refer to it now, less those that did.
    """

    __slots__ = ("kept", "more", "new")

    def __init__(self) -> None:
        self.new = self.kept = False
        self.more = 0


class Draft:
    """The change under construction. `head` and records are replaced, never changed in place."""

    __slots__ = (
        "_at",
        "_bodies",
        "_events",
        "_facts",
        "_hints",
        "_journal",
        "_own",
        "_puts",
        "_ready",
        "_stream",
        "head",
        "now_ms",
        "seed",
        "session",
        "view",
    )

    def __init__(self, view: View, session: SessionKey, seed: bytes, now_ms: int, head: SessionHead) -> None:
        self.view = view
        self.session = session
        self.seed = seed
        self.now_ms = now_ms
        self.head = head
        self._events: list[StoredEvent] = []
        self._facts: list[PrivateFact] = []
        self._puts: dict[str, bytes | None] = {}
        self._ready: dict[tuple[str, str], ReadyRow | None] = {}
        self._hints: dict[str, None] = {}
        self._bodies: dict[str, _Use] = {}
        self._journal = b""
        self._own = ""
        self._stream = ""
        self._at = 0

    # ---- reading ----

    def get(self, key: str, kind: type[S]) -> S | None:
        """A record, as this draft has already changed it."""
        data = self._puts[key] if key in self._puts else self.view.get(key)
        return None if data is None else decode(kind, data, key=key)

    def has(self, key: str) -> bool:
        """Whether there is a record, as this draft has already changed it."""
        return (self._puts[key] if key in self._puts else self.view.get(key)) is not None

    def page(self, r: Range, kind: type[S]) -> Iterator[tuple[str, S]]:
        """Records of a range, each as this draft has already changed it."""
        for key, stored in self.view.page(r):
            data = self._puts.get(key, stored)
            if data is not None:
                yield key, decode(kind, data, key=key)

    def require(self, wanted: tuple[str, ...], ranges: tuple[Range, ...] = ()) -> None:
        """Ask for everything a rare path will look at in one round, if it was not declared (D10)."""
        try:
            for key in wanted:
                if key not in self._puts:
                    self.view.get(key)
            for page in ranges:
                self.view.page(page)
        except Need as need:
            raise Need(need.reads.merged(Reads(keys=wanted, ranges=ranges))) from None

    def thread(self, thread_id: str) -> ThreadRecord:
        record = self.get(keys.thread(thread_id), ThreadRecord)
        if record is None:
            raise NotFound("thread", thread_id)
        return record

    def active(self, thread_id: str, turn_id: str) -> ThreadHead | None:
        """The Thread's head if a host owns it for this very Turn."""
        active = self.head.threads.get(thread_id)
        return active if active is not None and active.turn_id == turn_id else None

    def turn(self, thread_id: str, turn_id: str) -> TurnRecord:
        """The Turn, with its state from the head while a host owns it."""
        record = self.get(keys.turn(turn_id), TurnRecord)
        if record is None or record.thread_id != thread_id:
            raise NotFound("turn", turn_id)
        active = self.active(thread_id, turn_id)
        if active is not None:
            return replace(record, state=active.turn)
        return record

    # ---- writing ----

    def put(self, key: str, record: msgspec.Struct) -> None:
        self._puts[key] = encode(record)

    def delete(self, key: str) -> None:
        self._puts[key] = None

    def emit(
        self,
        event_type: str,
        payload: Payload,
        *,
        thread_id: str = "",
        turn_id: str = "",
        run_id: str = "",
        step_id: str = "",
    ) -> int:
        """Add a public event and return the number it will have."""
        raw = msgspec.Raw(_json.encode(payload))
        self._events.append(StoredEvent(event_type, thread_id, turn_id, run_id, step_id, raw))
        return self.last_seq

    @property
    def last_seq(self) -> int:
        """Number of the newest event, of this change or of those before it."""
        return self.view.next_seq + len(self._events) - 1

    def fact(self, fact: PrivateFact) -> None:
        self._facts.append(fact)

    def native(self, stream: str, at: int, journal: bytes = b"") -> None:
        """This commit takes position `at` of a Thread's stream and carries a native block."""
        self._stream, self._at, self._journal = stream, at, journal
        reference = column_reference(journal)
        if reference is not None:
            self.refer(reference)

    def ready(self, kind: str, klass: str, item: str, *, due_ms: int, value: str = "") -> None:
        self._ready[kind, item] = ReadyRow(kind=kind, klass=klass, due_ms=due_ms, item=item, value=value)
        if due_ms <= self.now_ms:
            self._hints[ready_hint(kind, klass)] = None

    def unready(self, kind: str, item: str) -> None:
        self._ready[kind, item] = None

    def is_ready(self, kind: str, item: str) -> bool:
        """Whether this change puts a ready row there."""
        return self._ready.get((kind, item)) is not None

    def refer(self, body: Body, *, removable: bool = False) -> None:
        """This commit refers to a body, which may be an object (D11).

        Args:
            removable: the record that refers to it may go, and then `release` is called.
        """
        if body.is_reference:
            use = self._bodies.setdefault(body.name, _Use())
            use.kept = use.kept or not removable
            use.more += removable
            use.new = True

    def release(self, body: Body) -> None:
        """A record goes that referred to a body."""
        if body.is_reference:
            self._bodies.setdefault(body.name, _Use()).more -= 1

    def of_its_owner(self, turn_id: str) -> None:
        """This change is the owner's own: it learns from the receipt what a hint would make it ask for."""
        self._own = turn_id

    def set_active(self, thread_id: str, active: ThreadHead | None) -> None:
        threads = dict(self.head.threads)
        if active is None:
            threads.pop(thread_id, None)
        else:
            threads[thread_id] = active
        self.head = replace(self.head, threads=threads)

    def show(self, record: TurnRecord, before: TurnState, after: TurnState) -> TurnState:
        """The state to store: with a higher revision and a `turn.status` event if anything visible changed.

        Every visible change of a Turn goes through here, so folded events and a query agree (PR-22).
        """
        if not _visibly_differs(before, after):
            return after
        after = replace(after, revision=before.revision + 1, updated_ms=self.now_ms)
        if after.status.terminal:
            self._hints[ends_hint(keys.partition(self.session))] = None
        if after.recovery != before.recovery and after.recovery is not None:
            self.emit(
                "turn.recovery",
                TurnRecovery(recovery=recovery_view(after.recovery)),
                thread_id=record.thread_id,
                turn_id=record.turn_id,
            )
        self.emit(
            "turn.status",
            TurnChanged(turn=turn_view(self.session, record, after)),
            thread_id=record.thread_id,
            turn_id=record.turn_id,
        )
        return after

    def schedule(self, thread: ThreadRecord, turn_id: str, state: TurnState) -> None:
        """Put the ready row of a Thread nobody owns where its Turn's state says."""
        due = due_ms(state)
        if due is None:
            self.unready(keys.READY_TURN, thread.thread_id)
        else:
            self.ready(keys.READY_TURN, thread.binding.ready_class, thread.thread_id, due_ms=due, value=turn_id)

    def store_turn(self, record: TurnRecord, after: TurnState) -> TurnState:
        """Write a changed state where it belongs, wake or park the Thread accordingly.

        While a host owns the Turn the state lives in the head and no ready row exists.
        """
        active = self.active(record.thread_id, record.turn_id)
        if active is not None:
            after = self.show(record, record.state, after)
            self.set_active(record.thread_id, replace(active, turn=after))
            return after
        after = self.show(record, record.state, at_rest(record.turn_id, after))
        self.put(keys.turn(record.turn_id), replace(record, state=after))
        thread = self.thread(record.thread_id)
        if thread.current == record.turn_id:
            self.schedule(thread, record.turn_id, after)
        return after

    def change(self, receipt: object) -> Change:
        """Everything collected, as one change.

        Raises:
            BodySwept: it would refer to a body that a sweep removes.
        """
        if self._bodies:
            self._mark_bodies()
        partition = keys.partition(self.session)
        self._hints[session_hint(partition)] = None
        for turn_id in {event.turn_id for event in self._events if event.turn_id and event.turn_id != self._own}:
            self._hints[turn_hint(partition, turn_id)] = None
        entry = None
        if self._events or self._facts or self._stream:
            entry = Entry(
                events=encode_events(self._events),
                count=len(self._events),
                private=encode_facts(self._facts),
                journal=self._journal,
                stream=self._stream,
                at=self._at,
            )
        return Change(
            head=self.head,
            commit_id=commit_id(self.seed),
            entry=entry,
            puts=tuple(self._puts.items()),
            ready=tuple(row for row in self._ready.values() if row is not None),
            unready=tuple(key for key, row in self._ready.items() if row is None),
            receipt=receipt,
            hints=tuple(self._hints),
        )

    def _mark_bodies(self) -> None:
        """Write down who refers to large bodies now. Only a commit that changes that reads their marks."""
        self.require(tuple(keys.object_(name) for name in self._bodies))
        for name, use in self._bodies.items():
            key = keys.object_(name)
            known = self.get(key, ObjectRecord)
            if known is None or known.state is ObjectState.SWEEPING:
                if use.new:
                    raise BodySwept(keys.spell(self.session), name)
                continue
            kept, uses = known.kept or use.kept, max(0, known.uses + use.more)
            state = ObjectState.REFERENCED if kept or uses else ObjectState.PENDING
            marked_ms = known.marked_ms if state is known.state else self.now_ms
            after = replace(known, state=state, marked_ms=marked_ms, kept=kept, uses=uses)
            if after != known:
                self.put(key, after)


def _visibly_differs(a: TurnState, b: TurnState) -> bool:
    if a is b:
        return False
    if (
        a.status is not b.status
        or a.inputs != b.inputs
        or a.runs != b.runs
        or a.operator != b.operator
        or (a.cancel != "") != (b.cancel != "")
        or a.settle_ms != b.settle_ms
    ):
        return True
    if a.recovery is not b.recovery and a.recovery != b.recovery:
        return True
    if a.failure is not b.failure and a.failure != b.failure:
        return True
    if a.result is not b.result and a.result != b.result:
        return True
    # While it runs, open conditions are not shown (waiting_on is empty).
    return a.conditions is not b.conditions and b.status.held and a.conditions != b.conditions


def begin(view: View, session: SessionKey, seed: bytes, now_ms: int) -> Draft:
    """Start a change of an existing Session.

    Raises:
        NotFound: there is none.
        SessionDropped: there is none any more.
    """
    head = view.head
    if head is None:
        raise NotFound("session", f"{session.namespace}/{session.session_id}")
    if head.status.gone:
        raise SessionDropped(keys.spell(session))
    return Draft(view, session, seed, now_ms, head)


__all__ = ["Draft", "begin", "ends_hint", "ready_hint", "session_hint", "turn_hint"]
