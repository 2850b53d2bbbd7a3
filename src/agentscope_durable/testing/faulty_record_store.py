"""A record store that fails when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentscope_durable.contracts.errors import Unavailable, Uncertain
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Capabilities,
    Committed,
    Decide,
    OwnerLease,
    PartitionSize,
    Reads,
    ReadyPage,
    ReadyScan,
    Records,
    RecordStore,
    SessionScan,
    StoreStatistics,
)

EVERY = "every"
"""Instead of the name of a method: all of them together, or all that write."""
WRITES = frozenset({"transact", "announce", "renew", "release", "forget"})
"""What changes something, so that its outcome may be unknown."""


@dataclass
class _Plan:
    """Which calls of one method fail: those numbered `first` to `last`, counted from when it was armed."""

    first: int
    last: int
    error: Callable[[], Exception]
    applied: bool
    calls: int = field(default=0)


class FaultyRecordStore:
    """Wraps a store; until something is armed it behaves as the store does.

    `fail` lets a call fail with nothing done; `lose_answer` lets the work be done and reports `Uncertain`
    (C58). `calls` counts the calls by method. With `EVERY` for a method the calls of all methods are counted together,
    or those of all `WRITES`.
    """

    def __init__(self, inner: RecordStore) -> None:
        self.inner = inner
        self.calls: dict[str, int] = {}
        self._plans: dict[str, list[_Plan]] = {}

    def fail(
        self,
        method: str = "transact",
        *,
        nth: int = 1,
        times: int = 1,
        error: Callable[[], Exception] = lambda: Unavailable("a test made the store fail"),
    ) -> None:
        """The `nth` call of a method from now on, and `times` - 1 more after it, raise and do nothing."""
        self._plans.setdefault(method, []).append(_Plan(nth, nth + times - 1, error, applied=False))

    def lose_answer(
        self,
        method: str = "transact",
        *,
        nth: int = 1,
        times: int = 1,
        error: Callable[[], Exception] = lambda: Uncertain("the commit", reason="a test lost the answer"),
    ) -> None:
        """As `fail`, but the work is done before the error is raised."""
        self._plans.setdefault(method, []).append(_Plan(nth, nth + times - 1, error, applied=True))

    def left(self) -> int:
        """How many of the failures that were ordered have not begun."""
        return sum(plan.calls < plan.first for plans in self._plans.values() for plan in plans)

    def heal(self) -> None:
        """Nothing fails any more."""
        self._plans.clear()

    def _due(self, method: str) -> _Plan | None:
        self.calls[method] = self.calls.get(method, 0) + 1
        due: _Plan | None = None
        for plan in [*self._plans.get(method, []), *self._plans.get(EVERY, [])]:
            if plan.applied and method not in WRITES:
                continue
            plan.calls += 1
            if due is None and plan.first <= plan.calls <= plan.last:
                due = plan
        return due

    def _before(self, method: str) -> _Plan | None:
        plan = self._due(method)
        if plan is not None and not plan.applied:
            raise plan.error()
        return plan

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        plan = self._before("transact")
        answer = await self.inner.transact(partition, reads, decide)
        if plan is not None:
            raise plan.error()
        return answer

    async def read(self, partition: str, reads: Reads) -> Records:
        plan = self._before("read")
        answer = await self.inner.read(partition, reads)
        if plan is not None:
            raise plan.error()
        return answer

    async def watermarks(self, partitions: Sequence[str]) -> list[int]:
        plan = self._before("watermarks")
        answer = await self.inner.watermarks(partitions)
        if plan is not None:
            raise plan.error()
        return answer

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        plan = self._before("ready")
        answer = await self.inner.ready(scan)
        if plan is not None:
            raise plan.error()
        return answer

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        plan = self._before("ready_classes")
        answer = await self.inner.ready_classes(kind, prefix, after, limit)
        if plan is not None:
            raise plan.error()
        return answer

    async def sessions(self, scan: SessionScan) -> list[str]:
        plan = self._before("sessions")
        answer = await self.inner.sessions(scan)
        if plan is not None:
            raise plan.error()
        return answer

    async def holders(self, key: str, limit: int = 2) -> list[str]:
        plan = self._before("holders")
        answer = await self.inner.holders(key, limit)
        if plan is not None:
            raise plan.error()
        return answer

    async def owners(self, after: str = "", limit: int = PAGE_MAX) -> list[OwnerLease]:
        plan = self._before("owners")
        answer = await self.inner.owners(after, limit)
        if plan is not None:
            raise plan.error()
        return answer

    def announce(self, owner: str) -> None:
        plan = self._before("announce")
        self.inner.announce(owner)
        if plan is not None:
            raise plan.error()

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        plan = self._before("renew")
        self.inner.renew(owner, lease_ms, value)
        if plan is not None:
            raise plan.error()

    async def release(self, owner: str) -> None:
        plan = self._before("release")
        await self.inner.release(owner)
        if plan is not None:
            raise plan.error()

    async def dead_owners(self, among: tuple[str, ...] | None = None) -> list[str]:
        plan = self._before("dead_owners")
        answer = await self.inner.dead_owners(among)
        if plan is not None:
            raise plan.error()
        return answer

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        plan = self._before("forget")
        answer = await self.inner.forget(owner, kinds)
        if plan is not None:
            raise plan.error()
        return answer

    async def measure(self, partition: str) -> PartitionSize:
        plan = self._before("measure")
        answer = await self.inner.measure(partition)
        if plan is not None:
            raise plan.error()
        return answer

    async def statistics(self) -> StoreStatistics:
        plan = self._before("statistics")
        answer = await self.inner.statistics()
        if plan is not None:
            raise plan.error()
        return answer

    async def close(self) -> None:
        await self.inner.close()
