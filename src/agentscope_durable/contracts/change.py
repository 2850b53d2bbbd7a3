"""What a decision sees and what it answers: the words between decisions and stores.

A decision declares what it reads (`Reads`), gets a `View` of it and returns a `Change`. Neither side
knows the other: decisions know no table, stores know no Turn.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.records import SessionHead

HEAD_MAX_BYTES = 8 * 1024 * 1024
"""A head that grows beyond this is a defect of a decision, and is refused."""
HEAD_CLAIM_BYTES = 32 * 1024
"""A Session whose head is larger gets no further active Thread. Those it has may grow: a commit is never refused for
what its neighbours hold."""
PAGE_MAX = 1000
LEASE_KEPT_MS = 3_600_000
"""How long the lease of a host that is not known to be dead is kept after it has expired."""


class Range(msgspec.Struct, frozen=True):
    """Records of one partition whose key starts with `prefix` and is greater than `after`."""

    prefix: str
    after: str = ""
    limit: int = 100


class Column(StrEnum):
    """What a log row holds besides its numbers."""

    EVENTS = "events"
    PRIVATE = "private"
    JOURNAL = "journal"


COLUMNS = (Column.EVENTS, Column.PRIVATE, Column.JOURNAL)
"""All of them, in the order in which a row has them."""


class LogRange(msgspec.Struct, frozen=True):
    """Log rows that hold an event numbered above `after`, oldest first, at most `limit` rows.

    `through` bounds the number of the first event of a row (0: no bound). Rows without events are not in this range,
    nor are those of which pruning left none.

    Attributes:
        columns: what is read of the rows; the others come back as b"". A native block may be much larger than the
            events beside it.
    """

    after: int = 0
    limit: int = 100
    through: int = 0
    columns: tuple[Column, ...] = COLUMNS


class StreamRange(msgspec.Struct, frozen=True):
    """Log rows of one stream with `first <= at <= last` (0: no upper bound), oldest first.

    Attributes:
        columns: as for a `LogRange`.
    """

    stream: str
    first: int = 0
    last: int = 0
    limit: int = PAGE_MAX
    columns: tuple[Column, ...] = COLUMNS


class Reads(msgspec.Struct, frozen=True):
    """What a decision or a query wants to see. The head always comes with it.

    Attributes:
        keys: records by key.
        ranges: pages of records.
        owners: leases of hosts, judged by the store's clock.
        log: a page of the log by event number. A decision asks for one with `View.log`.
        streams: pages of the log by position; for `read` only.
        fresh: do not use a cached head.
    """

    keys: tuple[str, ...] = ()
    ranges: tuple[Range, ...] = ()
    owners: tuple[str, ...] = ()
    log: LogRange | None = None
    streams: tuple[StreamRange, ...] = ()
    fresh: bool = False

    def merged(self, more: Reads) -> Reads:
        return Reads(
            keys=tuple(dict.fromkeys(self.keys + more.keys)),
            ranges=tuple(dict.fromkeys(self.ranges + more.ranges)),
            owners=tuple(dict.fromkeys(self.owners + more.owners)),
            log=more.log or self.log,
            streams=tuple(dict.fromkeys(self.streams + more.streams)),
            fresh=self.fresh or more.fresh,
        )


class Need(Exception):
    """Raised by a decision that must see more before it can decide. Nothing was written.

    The store reads what is asked and decides again, at most `NEED_ROUNDS_MAX` times.
    """

    def __init__(self, reads: Reads) -> None:
        super().__init__("the decision needs more records")
        self.reads = reads


NEED_ROUNDS_MAX = 8
"""The end of a Run asks most often: for the queue, for contents that it replaces, for its successor and for marks of
large bodies, each known only when the one before it was seen."""


class OwnerLease(Discreet, frozen=True):
    """A host's lease as its store sees it now.

    Attributes:
        owner: the host's identity, unique per process.
        alive: False once the lease has expired by the store's clock, or the row is gone.
        remaining_ms: milliseconds until it expires; negative afterwards.
        age_ms: milliseconds since the last renewal.
        value: what the host published with its last renewal.
    """

    owner: str
    alive: bool
    remaining_ms: int
    age_ms: int
    value: bytes = b""


class Entry(Discreet, frozen=True):
    """Immutable facts of one commit: one row of the log, appended, never rewritten.

    Attributes:
        events: the public events, in order; b"" when there are none. The store numbers them first .. first+count-1.
        count: how many there are.
        private: private facts (Steps, model requests); b"" for none. `contracts.log` writes and reads both.
        journal: the native block; b"" for none.
        stream: the Thread whose position this row takes; "" for none.
        at: that position; 0 when `stream` is "".
    """

    events: bytes = b""
    count: int = 0
    private: bytes = b""
    journal: bytes = b""
    stream: str = ""
    at: int = 0


class ReadyRow(msgspec.Struct, frozen=True):
    """Work that a host may pick up at `due_ms`. Written again, it replaces (kind, partition, item)."""

    kind: str
    klass: str
    due_ms: int
    item: str
    value: str = ""


class Prune(Discreet, frozen=True):
    """What is left of the events of rows that were there before (EV-19).

    Attributes:
        through: the last event that can no longer be replayed: the last of a row, and never lower than before.
        rows: (number of a row's first event, its `events` column from now on); b"" leaves none. Rows that are not
            named stay as they are.
    """

    through: int
    rows: tuple[tuple[int, bytes], ...] = ()


class Erase(Discreet, frozen=True):
    """Rows of the partition that go for good, whole, as nothing else lets them go.

    Attributes:
        rows: so many rows of the log, the oldest first, of those that were there before this change; 0 to PAGE_MAX.
        kinds: every ready row of these kinds that was there before.
    """

    rows: int
    kinds: tuple[str, ...] = ()


class Change(Discreet, frozen=True):
    """What to make true, all of it or nothing.

    Attributes:
        head: the new head of the Session.
        commit_id: 32 hex digits; settles "did it commit?" after a lost answer.
        entry: the log row of this commit.
        puts: records to write; None deletes.
        ready: ready rows to write; unready: (kind, item) of ready rows to remove.
        receipt: what `transact` returns.
        hints: keys to tell listeners after the commit; never stored.
        prune: what of the log's events is dropped, None for nothing.
        erase: what goes for good, None for nothing.
    """

    head: SessionHead
    commit_id: str
    entry: Entry | None = None
    puts: tuple[tuple[str, bytes | None], ...] = ()
    ready: tuple[ReadyRow, ...] = ()
    unready: tuple[tuple[str, str], ...] = ()
    receipt: object = None
    hints: tuple[str, ...] = ()
    prune: Prune | None = None
    erase: Erase | None = None


class View(Protocol):
    """What a decision sees. Asking for what was not declared raises `Need`, never answers None."""

    @property
    def head(self) -> SessionHead | None:
        """None when the Session does not exist."""
        ...

    @property
    def next_seq(self) -> int:
        """The number the first event of this change will get (starts at 1)."""
        ...

    @property
    def rev(self) -> int:
        """How many changes there were. Each left one row of the log, and has it still unless it was erased."""
        ...

    @property
    def pruned_through(self) -> int:
        """Events up to this number can no longer be replayed."""
        ...

    def get(self, key: str) -> bytes | None: ...

    def log(self, r: LogRange) -> list[LogRow]: ...

    def page(self, r: Range) -> list[tuple[str, bytes]]: ...

    def owner(self, owner: str) -> OwnerLease: ...


class Unchanged(Discreet, frozen=True):
    """A decision that changes nothing (a repeated request) answers with this."""

    receipt: object


Decide = Callable[[View, int], Change | Unchanged]
"""`decide(view, now_ms)`: pure, fast, may be run again after a lost race."""


class Committed(Discreet, frozen=True):
    """Outcome of `transact`.

    Attributes:
        receipt: the decision's receipt.
        first_seq: number of the first event of the commit; 0 when it had none.
        changed: False for `Unchanged`.
        hints: the change's hints.
    """

    receipt: object
    first_seq: int
    changed: bool
    hints: tuple[str, ...] = ()


class LogRow(Discreet, frozen=True):
    """One log row as read back. Of `events` pruning may have left less, or b""; `count` stays what it was."""

    first: int
    count: int
    rev: int
    at_ms: int
    commit_id: str
    events: bytes
    private: bytes
    journal: bytes
    stream: str
    at: int


class Records(Discreet, frozen=True):
    """One consistent reading of a partition.

    Attributes:
        head: None when the Session does not exist.
        rev: revision of the head (0 when absent).
        next_seq: number of the next event.
        pruned_through: events up to this number have been pruned and cannot be replayed.
        now_ms: the store's clock.
    """

    head: SessionHead | None
    rev: int
    next_seq: int
    pruned_through: int
    now_ms: int
    keys: dict[str, bytes]
    ranges: dict[Range, list[tuple[str, bytes]]]
    owners: dict[str, OwnerLease]
    log: list[LogRow]
    streams: dict[StreamRange, list[LogRow]]


class ReadyScan(msgspec.Struct, frozen=True):
    """Work of one kind and class that is due by the store's clock, oldest first.

    `after` is the last (due_ms, partition, item) seen, to go on from.
    """

    kind: str
    klass: str
    after: tuple[int, str, str] | None = None
    limit: int = 16


class ReadyItem(msgspec.Struct, frozen=True):
    partition: str
    item: str
    value: str
    due_ms: int
    klass: str


class ReadyPage(msgspec.Struct, frozen=True):
    """`next_due_ms` is the due time of the next row of this class that is not due yet, None if none."""

    items: list[ReadyItem]
    now_ms: int
    next_due_ms: int | None


class SessionScan(msgspec.Struct, frozen=True):
    """Names of partitions that start with `prefix`, greater than `after`, in order of name."""

    prefix: str
    after: str = ""
    limit: int = 100


class PartitionSize(msgspec.Struct, frozen=True):
    """What a partition takes in its store (BE-28).

    Attributes:
        commits: rows of its log, one for each commit.
        log_bytes: events, private facts and native blocks in them.
        records, record_bytes: its records, keys and values.
        head_bytes: the hot row that every commit rewrites.
    """

    commits: int
    log_bytes: int
    records: int
    record_bytes: int
    head_bytes: int


class StoreStatistics(msgspec.Struct, frozen=True):
    """How busy a store is, counted since it was opened by this process (BE-28).

    Attributes:
        changes: changes that were committed.
        transactions: transactions they took; changes that wait together share one.
        busy: changes that were given up because the lock of somebody else was not let go in time.
        waited_ms: how long changes took from the call to the outcome, altogether.
        longest_ms: how long the slowest of them took.
        locked_ms: how long transactions waited to be let in by other processes, altogether.
        stored_bytes: what the whole store takes, its log included; 0 where there is none.
    """

    changes: int
    transactions: int
    busy: int
    waited_ms: int
    longest_ms: int
    locked_ms: int
    stored_bytes: int


class Capabilities(msgspec.Struct, frozen=True):
    """What a store declares about itself (BE-05).

    Attributes:
        persistent: a change that returned survives the death of the process.
        shared: several processes may open it at once.
        hosts_shared: several machines may.
    """

    persistent: bool
    shared: bool
    hosts_shared: bool = False
