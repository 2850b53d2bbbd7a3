"""How changes that wait together are decided, and what they write in one statement. Nothing here talks to a server.

Rule 1: of one Session the changes are decided one after the other, each on what the former is about to write. Where
that would have to be read from the log or from a page of records, the change waits for the next group.
Rule 2: an answer that writes nothing counts only if it was decided on one moment, and if what the former changes of its
Session are about to write is written. So answers are given when the outcome of the whole Session is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from agentscope_durable.contracts.errors import Misuse
from agentscope_durable.spi.record_store import (
    NEED_ROUNDS_MAX,
    Change,
    Committed,
    Decide,
    Erase,
    LogRange,
    LogRow,
    Need,
    OwnerLease,
    Prune,
    Range,
    Reads,
    ReadyRow,
    Unchanged,
)
from agentscope_durable.stores.records._checks import (
    NO_ENTRY,
    check_commit_id,
    check_entry,
    check_erase,
    check_prune,
    check_reads,
    encode_head,
)
from agentscope_durable.stores.records._postgres_reading import Answer, HeadRow, Question, encoded
from agentscope_durable.stores.records._sums import events_sum, rest_sum, signed

__all__ = ["GROUP_BYTES_MAX", "Group", "Heads", "Member", "Session", "asked"]

HEADS_MAX: Final = 8192
"""Remembered heads at most; some 2 KB each."""
RECORDS_MAX: Final = 8
RECORD_BYTES_MAX: Final = 1024
"""Remembered records of each, and what one may have: those that a Turn needs again, its Thread's and its Run's."""
GROUP_BYTES_MAX: Final = 4 * 1024 * 1024
"""What a group writes at most, unless one change alone is larger."""
FRESH: Final = Reads(fresh=True)


class Sent:
    """A commit whose outcome is not known: its place in the log, and what to answer if it is found there."""

    __slots__ = ("answer", "base", "commit_id", "first", "rev")

    def __init__(self, base: int, first: int, rev: int, commit_id: bytes, answer: Committed) -> None:
        self.base = base
        """The revision it needs: once the Session has another, it cannot happen any more."""
        self.first = first
        self.rev = rev
        self.commit_id = commit_id
        self.answer = answer


class Member:
    """A change that waits."""

    __slots__ = (
        "answer",
        "asked",
        "began",
        "decide",
        "doubts",
        "error",
        "future",
        "partition",
        "races",
        "reads",
        "sent",
    )

    def __init__(self, partition: str, reads: Reads, decide: Decide) -> None:
        self.partition = partition
        self.reads = reads
        self.decide = decide
        self.began = time.monotonic()
        self.future: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()
        self.asked = 0
        self.races = 0
        self.answer: Committed | None = None
        self.error: BaseException | None = None
        self.sent: Sent | None = None
        self.doubts: list[Sent] = []

    def forget(self) -> None:
        """What was decided is void."""
        self.answer = self.error = self.sent = None

    def tell(self) -> None:
        future = self.future
        if future.done():  # The caller was cancelled; what was written stays.
            return
        if self.error is None:
            future.set_result(cast("Committed", self.answer))
        elif isinstance(self.error, StopIteration):
            future.set_exception(RuntimeError("the decision raised StopIteration"))
        else:
            future.set_exception(self.error)


class Heads:
    """Heads as this process knows them, and records it wrote last. Whether they are still true shows when one writes:
    a revision is that of the whole Session.
    """

    def __init__(self) -> None:
        self.known: dict[str, HeadRow] = {}
        self._records: dict[str, Mapping[str, bytes | None]] = {}

    def session(self, partition: str) -> Session | None:
        """The Session as it is known, if it is."""
        head = self.known.get(partition)
        return None if head is None else Session(head, self._records.get(partition, _NONE), fresh=False)

    def learn(self, partition: str, session: Session) -> None:
        """How a Session stands after this."""
        known, head = self.known, session.state
        before = known.get(partition)
        if before is not None and before.rev >= head.rev:
            return
        if before is None and len(known) >= HEADS_MAX:
            known.clear()
            self._records.clear()
        known[partition] = head
        same = before is not None and before.rev == session.base.rev and session.erase is None
        # Not changed in place: who decides at this moment goes on with what was known when he began.
        kept = dict(self._records.get(partition, _NONE)) if same else {}
        for key, value in session.records.items():
            kept.pop(key, None)
            if value is None or len(value) <= RECORD_BYTES_MAX:
                kept[key] = value
        while len(kept) > RECORDS_MAX:
            del kept[next(iter(kept))]
        self._records[partition] = kept

    def forget(self, partition: str) -> None:
        self.known.pop(partition, None)
        self._records.pop(partition, None)

    def seen(self, partition: str, rev: int) -> None:
        """Somebody wrote this Session, if that is another revision than the known one."""
        before = self.known.get(partition)
        if before is not None and before.rev < rev:
            self.forget(partition)


_NONE: Final[Mapping[str, bytes | None]] = {}


class Session:
    """One partition in a group: what it was, and what it is about to be."""

    __slots__ = (
        "base",
        "erase",
        "fresh",
        "logs",
        "members",
        "prune",
        "ready",
        "records",
        "remembered",
        "stale",
        "state",
        "value",
    )

    def __init__(self, base: HeadRow, remembered: Mapping[str, bytes | None], *, fresh: bool) -> None:
        self.base = base
        self.state = base
        self.remembered = remembered
        """Records as they are known to be at that revision."""
        self.fresh = fresh
        """Whether the head was read with the records, rather than remembered."""
        self.stale = False
        """Whether somebody else wrote while it was being decided."""
        self.members: list[Member] = []
        self.value = b""
        self.logs: list[tuple[Any, ...]] = []
        self.records: dict[str, bytes | None] = {}
        self.ready: dict[tuple[str, str], ReadyRow | None] = {}
        self.prune: Prune | None = None
        self.erase: Erase | None = None

    @property
    def writes(self) -> bool:
        return self.state is not self.base

    def knows(self, reads: Reads) -> bool:
        """Whether nothing must be read for this."""
        if reads.fresh or reads.ranges or reads.owners or reads.log is not None:
            return False
        return all(key in self.remembered for key in reads.keys)


class _Later(Exception):
    """The change must wait for the next group."""


class _View:
    """What a decision sees."""

    __slots__ = ("_answer", "_partition", "_reads", "_session", "head", "next_seq", "pruned_through", "rev")

    def __init__(self, partition: str, session: Session, answer: Answer, reads: Reads) -> None:
        self._partition = partition
        self._session = session
        self._answer = answer
        self._reads = reads
        state = session.state
        self.head = state.head
        self.next_seq = state.next_seq
        self.pruned_through = state.pruned
        self.rev = state.rev

    def get(self, key: str) -> bytes | None:
        if key not in self._reads.keys:
            raise Need(Reads(keys=(key,)))
        session = self._session
        if key in session.records:
            return session.records[key]
        if key in session.remembered:
            return session.remembered[key]
        return self._answer.keys.get((self._partition, key))

    def page(self, r: Range) -> list[tuple[str, bytes]]:
        if r not in self._reads.ranges:
            raise Need(Reads(ranges=(r,)))
        if self._session.records:
            raise _Later
        return self._answer.pages.get((self._partition, r), [])

    def log(self, r: LogRange) -> list[LogRow]:
        if r != self._reads.log:
            raise Need(Reads(log=r))
        if self._session.writes:
            raise _Later
        return self._answer.logs.get((self._partition, r), [])

    def owner(self, owner: str) -> OwnerLease:
        if owner not in self._reads.owners:
            raise Need(Reads(owners=(owner,)))
        return self._answer.owner(owner)


class Group:
    """Some changes that are decided and written together."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.later: list[Member] = []
        self._bytes = 0

    # -------------------------------------------------------------------- deciding

    def decide(self, members: Iterable[Member], answer: Answer, now_ms: int) -> list[Member]:
        """Decide those whose Session is known. Gives back who must see more first."""
        more: list[Member] = []
        for member in members:
            session = self.sessions[member.partition]
            if session.stale or self._bytes > GROUP_BYTES_MAX:
                self.later.append(member)
                continue
            try:
                self._decide(member, session, answer, max(now_ms, session.base.at_ms))
            except Need as need:
                member.asked += 1
                if member.asked > NEED_ROUNDS_MAX:
                    member.error = Misuse(f"a decision asked for more records {member.asked} times")
                else:
                    try:
                        member.reads = member.reads.merged(need.reads)
                        check_reads(member.reads)
                    except Exception as error:  # noqa: BLE001 - it is the caller's
                        member.error = error
                    else:
                        more.append(member)
                        continue
            except _Later:
                member.forget()
                self.later.append(member)
                continue
            if member.sent is None and not session.fresh:
                # Refused, or nothing to do, going by a head that is only remembered: look first.
                member.forget()
                member.reads = member.reads.merged(FRESH)
                more.append(member)
                continue
            session.members.append(member)
        return more

    def _decide(self, member: Member, session: Session, answer: Answer, now_ms: int) -> None:
        member.forget()
        try:
            change = member.decide(_View(member.partition, session, answer, member.reads), now_ms)
            if isinstance(change, Unchanged):
                member.answer = Committed(change.receipt, 0, False)
                return
            state = session.state
            # Everything that can be refused is refused before the first of it is put aside.
            value = encode_head(change.head)
            commit_id = check_commit_id(change.commit_id)
            entry = change.entry or NO_ENTRY
            check_entry(entry)
            check_prune(change.prune, after=state.pruned, before=state.next_seq)
            check_erase(change.erase)
            stream = encoded(entry.stream, "stream") if entry.stream else None
            for key, _ in change.puts:
                encoded(key)
            for row in change.ready:
                for text in (row.kind, row.klass, row.item, row.value):
                    encoded(text, "ready row")
        except (Need, _Later):
            raise
        except BaseException as error:  # noqa: BLE001 - the decision's own error is its caller's
            member.error = error
            return
        if session.writes and not (change.prune is None and change.erase is None):
            # They are about rows that are there already.
            raise _Later
        self._take(member, session, change, value, commit_id, stream, now_ms)

    def _take(
        self,
        member: Member,
        session: Session,
        change: Change,
        value: bytes,
        commit_id: bytes,
        stream: bytes | None,
        now_ms: int,
    ) -> None:
        state, entry = session.state, change.entry or NO_ENTRY
        first, rev = state.next_seq, state.rev + 1
        session.logs.append(
            (
                *(first, rev, entry.count, now_ms, commit_id, stream, entry.at if entry.stream else 0),
                *(entry.events or None, entry.private or None, entry.journal or None),
                signed(events_sum(entry.events)) if entry.events else None,
                signed(rest_sum(entry.private, entry.journal)),
            )
        )
        self._bytes += len(value) + len(entry.events) + len(entry.private) + len(entry.journal)
        for key, content in change.puts:
            session.records[key] = content
            self._bytes += len(content or b"")
        for kind, item in change.unready:
            session.ready[kind, item] = None
        for row in change.ready:
            session.ready[row.kind, row.item] = row
        pruned = state.pruned
        if change.prune is not None:
            session.prune = change.prune
            pruned = change.prune.through
        session.erase = change.erase or session.erase
        session.state = HeadRow(state.p, rev, first + entry.count, pruned, now_ms, change.head)
        session.value = value
        member.answer = Committed(change.receipt, first if entry.count else 0, True, change.hints)
        member.sent = Sent(session.base.rev, first, rev, commit_id, member.answer)

    # -------------------------------------------------------------------- writing

    def writers(self) -> list[tuple[str, Session]]:
        return [(name, session) for name, session in self.sessions.items() if session.writes and not session.stale]

    @staticmethod
    def step(session: Session) -> tuple[bool, list[Any]] | None:
        """Arguments of the short statement, where this is all there is to write: one commit, one record or none."""
        base, state = session.base, session.state
        if base.p is None or len(session.logs) != 1 or len(session.records) > 1 or session.ready:
            return None
        if session.prune is not None or session.erase is not None:
            return None
        first, rev, count, at_ms, commit_id, *rest = session.logs[0]
        arguments: list[Any] = [
            *(base.p, base.rev, rev, state.next_seq, state.pruned, at_ms, session.value, first, count, commit_id),
            *rest,
        ]
        for key, value in session.records.items():
            if value is None:
                return None
            arguments += (key.encode(), value)
        return bool(session.records), arguments

    @staticmethod
    def statement(writers: Sequence[tuple[str, Session]]) -> tuple[tuple[str, ...], list[Any]]:
        """Parts and arguments of the statement that writes all of them."""
        heads: list[tuple[Any, ...]] = []
        logs: list[tuple[Any, ...]] = []
        puts: list[tuple[Any, ...]] = []
        deletes: list[tuple[Any, ...]] = []
        ready: list[tuple[Any, ...]] = []
        unready: list[tuple[Any, ...]] = []
        erased: list[tuple[Any, ...]] = []
        kinds: list[tuple[Any, ...]] = []
        prunes: list[tuple[Any, ...]] = []
        for n, (name, session) in enumerate(writers, 1):
            base, state = session.base, session.state
            heads.append(
                (base.p, name.encode(), base.rev, state.rev, state.next_seq, state.pruned, state.at_ms, session.value)
            )
            logs += [(n, *row) for row in session.logs]
            for key, value in session.records.items():
                if value is None:
                    deletes.append((n, key.encode()))
                else:
                    puts.append((n, key.encode(), value))
            for (kind, item), row in session.ready.items():
                if row is None:
                    unready.append((n, kind.encode(), item.encode()))
                else:
                    texts = kind.encode(), item.encode(), row.klass.encode(), row.due_ms, row.value.encode()
                    ready.append((n, *texts))
            if session.erase is not None:
                erased.append((n, session.erase.rows))
                kinds += [(n, kind.encode()) for kind in session.erase.kinds]
            if session.prune is not None:
                for first, events in session.prune.rows:
                    prunes.append((n, first, events or None, signed(events_sum(events)) if events else None))
        if kinds and not ready:
            # Named in the statement as what stays.
            ready.append((0, b"", b"", b"", 0, b""))
        parts: list[str] = ["new"] if any(session.base.p is None for _, session in writers) else []
        arguments: list[Any] = list(map(list, zip(*heads, strict=True)))
        for part, rows in (
            ("logs", logs),
            ("puts", puts),
            ("deletes", deletes),
            ("ready", ready),
            ("unready", unready),
            ("erased", erased),
            ("unready_kinds", kinds),
            ("prunes", prunes),
        ):
            if rows:
                parts.append(part)
                arguments.extend(map(list, zip(*rows, strict=True)))
        return tuple(parts), arguments


def asked(members: Iterable[Member], sessions: Mapping[str, Session]) -> Question:
    """What must be read before these can be decided: nothing of a Session that knows what is wanted.

    Who decides on a reading finds all that he wants in it, or in his Session: so where one must look, all of them do.
    """
    question = Question()
    unknown: set[str] = set()
    for member in members:
        session = sessions.get(member.partition)
        if member.doubts or session is None or not session.knows(member.reads):
            unknown.add(member.partition)
    for member in members:
        if member.partition in unknown:
            question.add(member.partition, member.reads)
            for sent in member.doubts:
                question.commit(member.partition, sent.first, sent.rev, sent.commit_id)
    return question
