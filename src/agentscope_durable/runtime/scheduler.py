"""Finds Turns to run and Threads whose owner is gone, again and again.

Rule 1: the scan is the truth and repeats for ever; a hint only makes it sooner (RC-03, LF-10). Recovery is the same
scan, so nothing depends on what happened at a start.
Rule 2: one item's failure is that item's. It waits, the others go on (C17).
Rule 3: the work of a scan grows with the places that are free, not with what waits or how many Sessions there are.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.domain.change import ready_hint
from agentscope_durable.runtime.backoff import Backoff
from agentscope_durable.runtime.hints import ringing
from agentscope_durable.runtime.host import Host, log
from agentscope_durable.runtime.runner import Runner, Took
from agentscope_durable.runtime.tasks import Bell, Tasks
from agentscope_durable.spi.record_store import ReadyItem, ReadyScan

BATCH = 16
"""Ready rows read at once."""
PAGES_MAX = 64
"""Pages of one class looked at in one scan, when what stands first cannot be taken."""
EMPTY_OWNER_SECONDS = 30.0
"""A dead host that left nothing is looked at again after this."""
FORGET_MAX = 64
"""Dead hosts whose leases are removed in one scan at most."""
AUDIT_MAX = 1000
"""Owned Threads looked at in one audit."""
AUDIT_SECONDS = 15.0
"""How often a host compares what the store says it owns with what it has in hand, and looks who owns with no lease."""
LOOP_BLOCKED_SECONDS = 1.0
"""The event loop came this much late: something in it blocks, and a warning says so (C22)."""


class _Work(NamedTuple):
    item: ReadyItem
    dead: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.item.partition, self.item.item, self.item.value


class Scheduler:
    """Claims ready Turns while there is room, and takes over from the dead."""

    def __init__(self, host: Host, runner: Runner, *, parallelism: int) -> None:
        self._host = host
        self._runner = runner
        self._parallelism = parallelism
        self._harnesses = runner.harnesses
        self._turn = 0
        self._bell = Bell()
        self._runs = Tasks()
        self._taking: set[tuple[str, str]] = set()
        self._passed_over = False
        """Something was left because it, or every place, was taken: to be looked at when a place is free again."""
        self._backoff = Backoff(host.environment, host.poll_interval)
        self._empty = Backoff(host.environment, EMPTY_OWNER_SECONDS, most=EMPTY_OWNER_SECONDS)
        self._audited_at = host.environment.monotonic()
        self._ownerless_due = True
        self._looked_for_lost_at = -math.inf

    @property
    def runs(self) -> Tasks:
        """One task for each Turn this host has in hand."""
        return self._runs

    def wake(self) -> None:
        self._bell.ring()

    async def run(self) -> None:
        """Scan until the host drains. What runs then goes on."""
        host = self._host
        wanted = frozenset(
            ready_hint(keys.READY_TURN, klass) for klass in (*self._harnesses.served, *self._harnesses.names)
        )
        async with ringing(host.backend.wakeups(), wanted, self._bell):
            while not host.draining:
                wait = host.poll_interval
                try:
                    wait = min(wait, await self._scan())
                except Exception as error:  # noqa: BLE001 - the next scan is the repair
                    host.report(error, "looking for work failed")
                await self._sleep(wait)

    async def _sleep(self, wait: float) -> None:
        expected = self._host.environment.monotonic() + wait
        await self._bell.wait(self._host.environment, wait)
        # A bell ends the wait sooner and never later, so whoever rang it has nothing to do with it.
        late = self._host.environment.monotonic() - expected
        if late > LOOP_BLOCKED_SECONDS:
            log.warning("the event loop was blocked for %.1f s: call blocking code in a thread", late)

    async def _scan(self) -> float:
        """Take what there is room for; seconds until something is due."""
        now = self._host.environment.monotonic()
        if now - self._audited_at > AUDIT_SECONDS:
            self._audited_at = now
            self._ownerless_due = True
            await self.audit()
        self._passed_over = not self._room
        if self._passed_over:
            return self._host.poll_interval
        # Hints tell of ready work and of no death, so that is looked for as often as there are no hints.
        rest = self._looked_for_lost_at + self._host.poll_interval - now
        if rest <= 0:
            self._looked_for_lost_at, rest = now, self._host.poll_interval
            async for work in self._lost():
                self._start(work)
                if not self._room:
                    # There may be more: the next place that is free is for them.
                    self._looked_for_lost_at = -math.inf
                    self._passed_over = True
                    return self._host.poll_interval
        due: list[float] = [rest]
        # Each class in turn, beginning with another one each time: a long queue of one never holds up the rest.
        classes = await self._harnesses.classes()
        self._turn += 1
        first = self._turn % max(1, len(classes))
        found = [await self._ready(klass, due) for klass in (*classes[first:], *classes[:first])]
        for work in chain.from_iterable(zip_longest(*found)):
            if work is None:
                continue
            if self._room:
                self._start(work)
            else:
                self._passed_over = True
        return min(due)

    @property
    def _room(self) -> int:
        return max(0, self._parallelism - len(self._taking))

    def _free(self, work: _Work) -> bool:
        item = work.item
        if (item.partition, item.item) in self._taking:
            self._passed_over = True
            return False
        return not self._backoff.holds(work.key)

    async def _ready(self, klass: str, due: list[float]) -> list[_Work]:
        """What of a class can be taken now, as much as there is room for."""
        found: list[_Work] = []
        after: tuple[int, str, str] | None = None
        for _ in range(PAGES_MAX):
            page = await self._host.backend.ready(ReadyScan(keys.READY_TURN, klass, after, BATCH))
            found += [work for item in page.items if self._free(work := _Work(item, ()))]
            if page.next_due_ms is not None:
                due.append(max(0.0, (page.next_due_ms - page.now_ms) / 1000))
            if len(found) >= self._room:
                self._passed_over = True
                break
            if len(page.items) < BATCH:
                break
            last = page.items[-1]
            after = (last.due_ms, last.partition, last.item)
        return found[: self._room]

    async def _lost(self) -> AsyncIterator[_Work]:
        """Threads whose owner is gone: its lease has expired, or its process is known to have ended (D14)."""
        left = FORGET_MAX
        holding = await holders(self._host, keys.READY_LEASE) if self._ownerless_due else []
        self._ownerless_due = False
        async for owner, dead in dead_owners(self._host, self._empty, holding):
            empty = True
            after: tuple[int, str, str] | None = None
            for _ in range(PAGES_MAX):
                page = await self._host.backend.ready(ReadyScan(keys.READY_LEASE, owner, after, BATCH))
                for item in page.items:
                    empty = False
                    if self._free(work := _Work(item, dead)):
                        yield work
                if len(page.items) < BATCH:
                    break
                last = page.items[-1]
                after = (last.due_ms, last.partition, last.item)
            if empty:
                left = await forget(self._host, self._empty, owner, left)

    async def audit(self) -> bool:
        """Give back what this host owns by the store and does not have in hand; False if something may be left.

        An answer that was lost for good, or a give-back that failed, would else keep a Thread for as long as this host
        lives: nobody takes from the living.
        """
        clean = True
        page = await self._host.backend.ready(ReadyScan(keys.READY_LEASE, self._host.owner, None, AUDIT_MAX))
        for item in page.items:
            if (item.partition, item.item) in self._taking:
                clean = False
                continue
            try:
                await self._runner.disown(keys.session_of(item.partition), item.item, item.value)
            except Exception as error:  # noqa: BLE001 - the next audit tries again
                clean = False
                self._host.report(error, f"thread {item.item!r} cannot be given back", thread_id=item.item)
        return clean and len(page.items) < AUDIT_MAX

    def _start(self, work: _Work) -> None:
        if self._host.draining:
            # It came to be so while the store was asked. What were claimed now, nobody would wait for.
            return
        self._taking.add((work.item.partition, work.item.item))
        self._runs.start(self._take(work), name=f"turn {work.item.value}")

    async def _take(self, work: _Work) -> None:
        session = keys.session_of(work.item.partition)
        took = Took.NO_PROGRESS
        try:
            took = await self._runner.take(session, work.item.item, dead=work.dead)
        except Exception as error:  # noqa: BLE001 - one Turn's failure must not stop the others
            self._host.report(
                error,
                f"thread {work.item.item!r} cannot be taken",
                session_id=session.session_id,
                thread_id=work.item.item,
            )
        finally:
            if took in (Took.WORK, Took.LAST):
                self._backoff.done(work.key)
            else:
                # Who only lost a race must not be late when the winner is lost.
                self._backoff.missed(work.key, again=took is Took.NO_PROGRESS)
            self._taking.discard((work.item.partition, work.item.item))
            if self._passed_over or took is not Took.LAST:
                self._bell.ring()


async def holders(host: Host, kind: str) -> list[str]:
    """Hosts that own something, whether they have a lease or not.

    Each has one before it owns anything. Who has none any more, because somebody removed it, or because it was renewed
    in another store, would be found by nobody who only looks through leases.
    """
    return await host.backend.ready_classes(kind, "")


async def dead_owners(
    host: Host, empty: Backoff, holding: Sequence[str] = ()
) -> AsyncIterator[tuple[str, tuple[str, ...]]]:
    """Hosts that are gone and may have left something, each with what a claim is to say of it.

    Args:
        holding: who owned something a moment ago. Those of them without a lease are gone, too.

    A claim names only those that are known to have ended (D14). Who has let its lease expire may renew it before the
    claim is decided, and then keeps what it owns: that is judged there, and not by what was seen here.
    """
    owners = await host.backend.owners()
    known = await host.backend.dead_owners()
    leases = {owner.owner for owner in owners}
    without = [owner for owner in holding if owner not in leases]
    dead = dict.fromkeys([*known, *(owner.owner for owner in owners if not owner.alive), *without])
    for owner in owners:
        if owner.owner not in dead:
            # It was frozen and has come back: what it takes from now on must be found as soon as it dies.
            empty.done(owner.owner)
    for owner in dead:
        if owner != host.owner and not empty.holds(owner):
            yield owner, (owner,) if owner in known else ()


async def forget(host: Host, empty: Backoff, owner: str, left: int) -> int:
    """Remove the lease of a dead host that left nothing, or put it aside for a while; how many more there may be.

    Every host does this for every other; it may be repeated, and the store decides. Else the leases of all hosts that
    were ever killed would be looked at in every scan.
    """
    if left > 0:
        try:
            if await host.backend.forget_owner(owner):
                empty.done(owner)
                log.info("host %s is gone and has left nothing", owner, extra={"owner": owner})
                return left - 1
        except DurableError as error:
            host.report(error, "the lease of a dead host cannot be removed", owner=owner)
    empty.missed(owner)
    return left - 1
