"""The storage socket: one Session's records change together, or not at all.

Four generic tables stand behind it on every store (`head`, `log`, `rec`, `ready`), so a new
noun never needs a migration. A provider knows nothing about Turns; it keeps the promises below,
and `agentscope_durable.testing.record_store` checks each of them by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentscope_durable.contracts.change import (
    COLUMNS,
    HEAD_MAX_BYTES,
    LEASE_KEPT_MS,
    NEED_ROUNDS_MAX,
    PAGE_MAX,
    Capabilities,
    Change,
    Column,
    Committed,
    Decide,
    Entry,
    Erase,
    LogRange,
    LogRow,
    Need,
    OwnerLease,
    PartitionSize,
    Prune,
    Range,
    Reads,
    ReadyItem,
    ReadyPage,
    ReadyRow,
    ReadyScan,
    Records,
    SessionScan,
    StoreStatistics,
    StreamRange,
    Unchanged,
    View,
)

__all__ = [
    "COLUMNS",
    "Capabilities",
    "Change",
    "Column",
    "Committed",
    "Decide",
    "Entry",
    "Erase",
    "HEAD_MAX_BYTES",
    "LEASE_KEPT_MS",
    "LogRange",
    "LogRow",
    "NEED_ROUNDS_MAX",
    "Need",
    "OwnerLease",
    "PAGE_MAX",
    "PartitionSize",
    "Prune",
    "Range",
    "Reads",
    "ReadyItem",
    "ReadyPage",
    "ReadyRow",
    "ReadyScan",
    "RecordStore",
    "Records",
    "SessionScan",
    "StoreStatistics",
    "StreamRange",
    "Unchanged",
    "View",
]


class RecordStore(Protocol):
    """Keeps the records of Sessions.

    Promises, each checked by name in the contract suite:

    atomic      All writes of a change are visible, or none is; an error raised by the decision writes nothing.
    isolated    Two changes of one partition never interleave; each decides on what the former wrote.
    durable     A change that returned survives `kill -9`, if `capabilities.persistent`.
    honest      A fault after the write may have happened raises `Uncertain`, never a Retry.
    numbered    Events of a partition are numbered 1, 2, 3, ... in commit order, without a gap.
    timed       `now_ms` and leases follow the store's clock, which never runs back.
    repeatable  `decide` may be run again; only its last answer is written.
    fair        A change of one partition does not fail because of another partition's change.
    bounded     A page never holds more than its limit.
    measured    What a partition takes, and how long changes waited, can be asked for.
    pruned      What a change drops of the events is gone with it; numbers, private facts and native blocks stay.
    erased      What a change erases is gone with it, rows of the log whole; numbers and revisions go on, and the
                partition is listed as before.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        """Read, decide, write: one transaction of one Session.

        A cancelled caller does not undo a write under way; its outcome is then unknown to the caller.
        """
        ...

    async def read(self, partition: str, reads: Reads) -> Records: ...

    async def watermarks(self, partitions: Sequence[str]) -> list[int]:
        """The number of the last event of each of these, in their order; 0 where there is none.

        One cheap reading however many there are: it is asked again and again for all that somebody watches.
        """
        ...

    async def ready(self, scan: ReadyScan) -> ReadyPage: ...

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        """Classes that begin with the prefix and have ready rows of the kind, due or not, in order; each once.

        What it reads grows with the classes it returns, not with their rows.
        """
        ...

    async def sessions(self, scan: SessionScan) -> list[str]: ...

    async def holders(self, key: str, limit: int = 2) -> list[str]:
        """Names of partitions that hold a record under this key, at most `limit` of them, in order.

        The key begins with `keys.FOUND`. The cost does not grow with the number of partitions or records.
        """
        ...

    async def owners(self, after: str = "", limit: int = PAGE_MAX) -> list[OwnerLease]: ...

    def announce(self, owner: str) -> None:
        """A host of this name begins: called before its first `renew`, and blocking like it. Twice is fine.

        A store that can tell when a process is gone holds on to it from here on, until `release`, so that
        `dead_owners` names the host as soon as it is dead (D14). Others do nothing. It writes no lease.
        """
        ...

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        """Write the owner's lease, from the store's clock. Blocking; called from the heartbeat's own
        thread on a connection of its own, so that neither the event loop nor a long queue of changes
        can make a healthy host look dead."""
        ...

    async def release(self, owner: str) -> None:
        """Remove the owner's lease; it counts as expired at once."""
        ...

    async def dead_owners(self, among: tuple[str, ...] | None = None) -> list[str]:
        """Owners known to be gone before their lease expires (D14); [] where that cannot be known.

        Args:
            among: these alone are looked at, whether they have a lease or not, and nothing is read for it.
        """
        ...

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        """Remove the lease of an owner that is gone for good and left nothing; True if nothing of it is stored now.

        It left nothing when no ready row of these kinds has its name as class, judged in the same transaction. It is
        gone for good when it is known to be dead, or its lease expired `LEASE_KEPT_MS` ago: a host that was only
        frozen comes back under its lease, and what it then takes must be found under its name.
        """
        ...

    async def measure(self, partition: str) -> PartitionSize:
        """What a partition takes. It looks at each of its rows, so it is for people and not for each commit."""
        ...

    async def statistics(self) -> StoreStatistics: ...

    async def close(self) -> None:
        """Close what this store opened itself. Later use raises. Safe to call twice."""
        ...
