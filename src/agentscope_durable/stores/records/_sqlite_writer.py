"""How a group of changes is decided, written and committed.

Rule 1: decided first, one after the other, each on what the former wrote; then written with a few long
statements; then one commit.
Rule 2: heads are cached as immutable objects and small records as they are stored, and the caches hold only as long as
nobody else wrote (`pragma data_version`), because the file is shared.
Rule 3: a fault never becomes a guess. Before the commit nothing was written, and the group's members
are tried one by one. At the commit the log is asked for the commit id; if that does not settle it,
the answer is `Uncertain`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple, cast

import apsw

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import Misuse, Unavailable, Uncertain
from agentscope_durable.contracts.keys import HOST_PARTITION
from agentscope_durable.contracts.records import SessionHead, decode
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
from agentscope_durable.stores.records._clock import RisingClock
from agentscope_durable.stores.records._figures import Figures
from agentscope_durable.stores.records._sqlite_file import SqliteFile
from agentscope_durable.stores.records._sqlite_rows import (
    CHUNKS,
    COMMITTED,
    HEAD,
    HEAD_UPSERT,
    HOST_P,
    LAST_MS,
    LAST_P,
    LOG_ERASE,
    LOG_INSERT,
    PRUNE,
    READY_DELETE,
    READY_ERASE,
    READY_UPSERT,
    REC,
    REC_DELETE,
    REC_UPSERT,
    Execute,
    log_page,
    owner_lease,
    records_page,
)
from agentscope_durable.stores.records._sums import events_sum, rest_sum
from agentscope_durable.stores.records._waiters import Waiter

log = logging.getLogger("agentscope_durable.stores")

HEADS_MAX = 8192
"""Cached heads at most; some 2 KB each."""
RECORDS_MAX = 8192
RECORD_MAX_BYTES = 2048
"""Cached records at most, and the longest of them: a Turn's own, which its claim and its end look at again."""


class HeadRow(NamedTuple):
    """A head as stored or about to be. Never changed, only replaced."""

    p: int
    rev: int
    next_seq: int
    pruned: int
    head: SessionHead | None


class Member(Waiter):
    """A change that waits in the writer's queue."""

    __slots__ = ("began", "decide", "partition", "reads", "written")

    def __init__(self, partition: str, reads: Reads, decide: Decide) -> None:
        super().__init__()
        self.began = time.monotonic()
        self.partition = partition
        self.reads = reads
        self.decide = decide
        # p, first, rev, commit id of the log row this member's decision produced.
        self.written: tuple[int, int, int, bytes] | None = None


class _View:
    """What a decision sees, read from the writer's transaction when it asks."""

    __slots__ = ("_p", "_reads", "_writer", "head", "next_seq", "pruned_through", "rev")

    def __init__(self, writer: Writer, state: HeadRow, reads: Reads) -> None:
        self._writer = writer
        self._p = state.p
        self._reads = reads
        self.head = state.head
        self.next_seq = state.next_seq
        self.rev = state.rev
        self.pruned_through = state.pruned

    def get(self, key: str) -> bytes | None:
        if key not in self._reads.keys:
            raise Need(Reads(keys=(key,)))
        return self._writer.get(self._p, key)

    def page(self, r: Range) -> list[tuple[str, bytes]]:
        if r not in self._reads.ranges:
            raise Need(Reads(ranges=(r,)))
        return self._writer.page(self._p, r)

    def log(self, r: LogRange) -> list[LogRow]:
        if r != self._reads.log:
            raise Need(Reads(log=r))
        return self._writer.log(self._p, r)

    def owner(self, owner: str) -> OwnerLease:
        if owner not in self._reads.owners:
            raise Need(Reads(owners=(owner,)))
        return self._writer.owner(owner)


class Writer:
    """Groups of changes, each decided, written and committed in one transaction. One thread's own.

    What a group is about to write is kept aside until the end (`_logs`, `_dirty`, `_recs`, `_ready`), and
    a decision looks there first. Where that would be laborious (a page of records or of the log, pruning), it
    is simply written early, within the same transaction.
    """

    def __init__(self, connection: apsw.Connection, file: SqliteFile, clock: RisingClock) -> None:
        self.connection = connection
        self.run = cast("Execute", connection.cursor().execute)
        self._file = file
        self._clock = clock
        self.figures = Figures()
        self._heads: dict[str, HeadRow] = {}
        self._known: dict[tuple[int, str], bytes | None] = {}
        self._data_version = -1
        self._next_p = 1
        self._logs: list[tuple[object, ...]] = []
        self._dirty: dict[str, tuple[object, ...]] = {}
        self._recs: dict[tuple[int, str], bytes | None] = {}
        self._touched: set[int] = set()
        self._ready: dict[tuple[str, int, str], ReadyRow | None] = {}
        self._wrote = False

    # ------------------------------------------------------------ a group

    def commit(self, members: Sequence[Member]) -> None:
        """Give every member its answer or its error."""
        asked = time.monotonic()
        try:
            self.run("begin immediate")
        except apsw.Error as error:
            self._fail(members, error)
            return
        finally:
            self.figures.locked += time.monotonic() - asked
        try:
            self._file.check_place(self.connection)
        except Unavailable as error:
            self._abandon()
            self._fail(members, error)
            return
        try:
            self._catch_up()
            now_ms = self._clock.now()
            for member in members:
                self._decide(member, now_ms)
            self._flush()
            if not self._wrote:
                self.run("rollback")
                return
        except Exception as error:  # noqa: BLE001 - told to the members below
            self._one_by_one(members, error)
            return
        sent = False
        try:
            _failpoints.hit("store.commit.before")
            sent = True
            self.run("commit")
            self._wrote = False
            self.figures.transactions += 1
            _failpoints.hit("store.commit.after")
        except Exception as error:  # noqa: BLE001 - told to the members below
            if not sent or _refused(error):
                self._one_by_one(members, error)
            else:
                self._settle(members, error)

    def _one_by_one(self, members: Sequence[Member], error: Exception) -> None:
        """Nothing of the group is written: find out whose fault it is."""
        self._abandon()
        if len(members) == 1:
            self._fail(members, error)
            return
        log.warning("a group of %d changes failed and is tried one by one: %r", len(members), error)
        for member in members:
            self.commit([member])

    def _settle(self, members: Sequence[Member], error: Exception) -> None:
        """Whether the group is committed is not known: look for it."""
        self._abandon()
        log.warning("the outcome of a commit is not known and is looked up: %r", error)
        writers = [member for member in members if member.written is not None]
        try:
            # The last one: what was written before it in this group, it may have erased.
            found = bool(self.run(COMMITTED, writers[-1].written).fetchall())
        except apsw.Error:
            found = False
        if found:
            return
        for member in members:
            if member.written is not None:
                member.error = Uncertain("the commit", reason=str(error))
                member.error.__cause__ = error
            else:
                # It wrote nothing, but it may have decided on what is now uncertain.
                self.commit([member])

    def _fail(self, members: Sequence[Member], error: Exception) -> None:
        for member in members:
            member.error = self._file.translate(error)

    def _abandon(self) -> None:
        """Drop every cached head and everything that was about to be written."""
        self._data_version = -1
        self._heads.clear()
        self._known.clear()
        self._clear_pending()
        self._wrote = False
        try:
            if self.connection.in_transaction:
                self.run("rollback")
        except apsw.Error as error:
            log.warning("a rollback failed: %r", error)

    def _catch_up(self) -> None:
        """Did anyone else write since the last transaction?"""
        [(data_version,)] = self.run("pragma data_version").fetchall()
        if data_version == self._data_version:
            return
        self._heads.clear()
        self._known.clear()
        self._data_version = data_version
        [(last_p,)] = self.run(LAST_P).fetchall()
        self._next_p = last_p + 1
        for (at_ms,) in self.run(LAST_MS).fetchall():
            self._clock.witness(at_ms)

    # ------------------------------------------------------------ one member

    def _decide(self, member: Member, now_ms: int) -> None:
        member.answer, member.error, member.written = None, None, None
        try:
            state = self._head(member.partition)
            change = self._ask(member, state, now_ms)
            if isinstance(change, Unchanged):
                member.answer = Committed(change.receipt, 0, False)
                return
            # Everything that can be refused is refused before the first of it is put aside.
            value = encode_head(change.head)
            commit_id = check_commit_id(change.commit_id)
            check_entry(change.entry or NO_ENTRY)
            check_prune(change.prune, after=state.pruned, before=state.next_seq)
            check_erase(change.erase)
        except apsw.Error:
            raise
        except BaseException as error:  # noqa: BLE001 - the decision's own error is its caller's
            member.error = error
            return
        member.answer = self._take(member, state, change, value, commit_id, now_ms)

    def _ask(self, member: Member, state: HeadRow, now_ms: int) -> Change | Unchanged:
        reads = member.reads
        for _ in range(NEED_ROUNDS_MAX + 1):
            try:
                return member.decide(_View(self, state, reads), now_ms)
            except Need as need:
                reads = reads.merged(need.reads)
                check_reads(reads)
        raise Misuse(f"a decision asked for more records {NEED_ROUNDS_MAX + 1} times")

    def _take(
        self, member: Member, state: HeadRow, change: Change, value: bytes, commit_id: bytes, now_ms: int
    ) -> Committed:
        entry = change.entry or NO_ENTRY
        p, first, rev, pruned = state.p, state.next_seq, state.rev + 1, state.pruned
        stream, at = (entry.stream, entry.at) if entry.stream else (None, 0)
        if state.rev == 0 and p == self._next_p:
            self._next_p += 1
        self._wrote = True
        if change.erase is not None:
            self._erase(p, change.erase)
        self._logs.append(
            (
                *(p, first, rev, entry.count, now_ms, commit_id, stream, at),
                *(entry.events or None, entry.private or None, entry.journal or None),
                *(events_sum(entry.events) if entry.events else None, rest_sum(entry.private, entry.journal)),
            )
        )
        if change.puts:
            self._touched.add(p)
            for key, content in change.puts:
                self._recs[p, key] = content
                self._know(p, key, content)
        for kind, item in change.unready:
            self._ready[kind, p, item] = None
        for row in change.ready:
            self._ready[row.kind, p, row.item] = row
        next_seq = first + entry.count
        if change.prune is not None:
            pruned = change.prune.through
            self._prune(p, change.prune)
        self._heads[member.partition] = HeadRow(p, rev, next_seq, pruned, change.head)
        self._dirty[member.partition] = (p, member.partition, rev, next_seq, pruned, value)
        member.written = (p, first, rev, commit_id)
        return Committed(change.receipt, first if entry.count else 0, True, change.hints)

    def _head(self, partition: str) -> HeadRow:
        state = self._heads.get(partition)
        if state is not None:
            return state
        rows = self.run(HEAD, (partition,)).fetchall()
        if rows:
            p, rev, next_seq, pruned, value = rows[0]
            state = HeadRow(p, rev, next_seq, pruned, decode(SessionHead, value, key=partition))
        else:
            # Not cached: another new Session may take this number first.
            return HeadRow(HOST_P if partition == HOST_PARTITION else self._next_p, 0, 1, 0, None)
        if len(self._heads) >= HEADS_MAX:
            self._flush()
            self._heads.clear()
        self._heads[partition] = state
        return state

    def get(self, p: int, key: str) -> bytes | None:
        if p in self._touched and (p, key) in self._recs:
            return self._recs[p, key]
        if (p, key) in self._known:
            return self._known[p, key]
        rows = self.run(REC, (p, key)).fetchall()
        value = cast("bytes", rows[0][0]) if rows else None
        self._know(p, key, value)
        return value

    def _know(self, p: int, key: str, value: bytes | None) -> None:
        # What is nobody's Session is also written without a decision.
        if p == HOST_P or (value is not None and len(value) > RECORD_MAX_BYTES):
            self._known.pop((p, key), None)
            return
        if len(self._known) >= RECORDS_MAX:
            self._known.clear()
        self._known[p, key] = value

    def page(self, p: int, r: Range) -> list[tuple[str, bytes]]:
        if p in self._touched:
            self._flush()
        return records_page(self.run, p, r)

    def owner(self, owner: str) -> OwnerLease:
        return owner_lease(self.run, owner, self._clock)

    def log(self, p: int, r: LogRange) -> list[LogRow]:
        self._flush()
        return log_page(self.run, p, r)

    def _prune(self, p: int, prune: Prune) -> None:
        self._flush()
        for first, events in prune.rows:
            self.run(PRUNE, (events or None, events_sum(events) if events else None, p, first))

    def _erase(self, p: int, erase: Erase) -> None:
        # Before anything of this change is put aside: what it writes stays.
        self._flush()
        self.run(LOG_ERASE, (p, erase.rows))
        for kind in erase.kinds:
            self.run(READY_ERASE, (kind, p))

    # ------------------------------------------------------------ writing

    def _flush(self) -> None:
        """Write what was put aside."""
        if self._logs:
            self._many(LOG_INSERT, self._logs)
        if self._dirty:
            self._many(HEAD_UPSERT, list(self._dirty.values()))
        if self._recs:
            self._many(REC_UPSERT, [(p, key, value) for (p, key), value in self._recs.items() if value is not None])
            for (p, key), value in self._recs.items():
                if value is None:
                    self.run(REC_DELETE, (p, key))
        if self._ready:
            rows = [
                (kind, p, item, row.klass, row.due_ms, row.value)
                for (kind, p, item), row in self._ready.items()
                if row is not None
            ]
            self._many(READY_UPSERT, rows)
            self._many(READY_DELETE, [key for key, row in self._ready.items() if row is None])
        self._clear_pending()

    def _many(self, statements: dict[int, str], rows: Sequence[tuple[object, ...]]) -> None:
        run, done = self.run, 0
        for size in CHUNKS:
            statement = statements[size]
            while len(rows) - done >= size:
                run(statement, rows[done] if size == 1 else tuple(chain.from_iterable(rows[done : done + size])))
                done += size

    def _clear_pending(self) -> None:
        self._logs.clear()
        self._dirty.clear()
        self._recs.clear()
        self._touched.clear()
        self._ready.clear()

    def transaction(self, name: str, work: Callable[[Execute], object]) -> None:
        """A small write of its own, between its failpoints."""
        transaction(self.connection, self.run, self._file, name, work)


def transaction(
    connection: apsw.Connection, run: Execute, file: SqliteFile, name: str, work: Callable[[Execute], object]
) -> None:
    """One small write, between the failpoints `name`."""
    sent = False
    try:
        run("begin immediate")
        file.check_place(connection)
        work(run)
        _failpoints.hit(f"{name}.before")
        sent = True
        run("commit")
        _failpoints.hit(f"{name}.after")
    except Exception as error:
        if connection.in_transaction:
            run("rollback")
        if sent and not _refused(error):
            raise Uncertain(name, reason=str(error)) from error
        raise file.translate(error) from error


def _refused(error: Exception) -> bool:
    """Whether a commit that failed like this is certain not to have happened.

    A full disk is met before the commit mark is complete, a lock or a write protection before anything. After any
    other fault (the flush failed, say) the mark may be on the disk, and a recovery may find it there.
    """
    return isinstance(error, apsw.FullError | apsw.BusyError | apsw.ReadOnlyError)
