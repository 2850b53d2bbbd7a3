"""One sequence of commands against several stores: every answer and everything that is stored must be the same.

The store in memory is the oracle. A store whose clock can be set runs under the same one; one with a clock of its own
is given the time of each decision, and its leases are renewed and released as that time says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import DurableError, Fenced
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.spi.environment import SystemEnvironment
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Committed,
    Decide,
    LogRange,
    Range,
    Reads,
    ReadyScan,
    StreamRange,
)
from agentscope_durable.testing.manual_clock import ManualClock

KINDS = (keys.READY_TURN, keys.READY_DISPATCH, keys.READY_LEASE, keys.READY_RUNNING)
FOR_EVER_MS = 10**9
COMMANDS: tuple[type[Any], ...] = get_args(c.AnyCommand)
"""Every kind there is: one that is added and never generated fails the run."""

FENCED = tuple(kind for kind in COMMANDS if issubclass(kind, c.OwnerCommand))


class Seeds(SystemEnvironment):
    """Gives the seed of the command that is carried out."""

    def __init__(self) -> None:
        self.next = b""

    def random_bytes(self, count: int) -> bytes:
        assert len(self.next) == count
        return self.next


class GivenTime:
    """A store whose decisions are told the time by the test. Rows are dated by its own clock."""

    def __init__(self, store: Any, clock: Callable[[], int]) -> None:
        self._store = store
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        return await self._store.transact(partition, reads, lambda view, now_ms: decide(view, self._clock()))


@dataclass
class Stored:
    """Everything a store holds of one Session, as its own socket tells it."""

    rev: int
    next_seq: int
    pruned: int
    head: Any
    records: dict[str, bytes]
    log: list[Any]
    streams: dict[str, list[Any]]
    ready: list[Any]

    def differs(self, other: Stored) -> str:
        for name in self.__dataclass_fields__:
            one, two = getattr(self, name), getattr(other, name)
            if one == two:
                continue
            if isinstance(one, dict) and isinstance(two, dict):
                odd = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
                return f"{name} {odd[0]!r}: {one.get(odd[0])!r} and {two.get(odd[0])!r}"
            if isinstance(one, list):
                odd = [pair for pair in zip([*one, None], [*two, None], strict=False) if pair[0] != pair[1]]
                return f"{name}: {odd[:1]}"
            return f"{name}: {one!r} and {two!r}"
        return ""


async def stored(store: Any, session: SessionKey, *, dated: bool) -> Stored:
    """Read page by page through the socket.

    Args:
        dated: its clock is the test's, so that its instants can be compared.
    """
    partition = keys.partition(session)
    records: dict[str, bytes] = {}
    after = ""
    while True:
        page = Range("", after, PAGE_MAX)
        found = await store.read(partition, Reads(ranges=(page,)))
        records.update(found.ranges[page])
        if len(found.ranges[page]) < PAGE_MAX:
            break
        after = found.ranges[page][-1][0]
    log: list[Any] = []
    last = 0
    while True:
        found = await store.read(partition, Reads(log=LogRange(after=last, limit=PAGE_MAX)))
        log += found.log
        if len(found.log) < PAGE_MAX:
            break
        last = found.log[-1].first + found.log[-1].count - 1
    threads = [key.removeprefix(keys.thread("")) for key in records if key.startswith(keys.thread(""))]
    ranges = {thread: StreamRange(thread) for thread in threads}
    found = await store.read(partition, Reads(streams=tuple(ranges.values())))
    streams = {thread: found.streams[one] for thread, one in ranges.items()}
    ready: list[Any] = []
    for kind in KINDS:
        for klass in await store.ready_classes(kind, ""):
            page = await store.ready(ReadyScan(kind, klass, None, PAGE_MAX))
            ready.append((kind, klass, [item for item in page.items if item.partition == partition]))
            if dated:
                ready.append(page.next_due_ms)
    return Stored(
        rev=found.rev,
        next_seq=found.next_seq,
        pruned=found.pruned_through,
        head=found.head,
        records=dict(sorted(records.items())),
        log=[_plain(row, dated) for row in log],
        streams={thread: [_plain(row, dated) for row in rows] for thread, rows in sorted(streams.items())},
        ready=ready,
    )


def _plain(row: Any, dated: bool) -> Any:
    return row if dated else msgspec.structs.replace(row, at_ms=0)


@dataclass
class Side:
    """One store under test.

    Attributes:
        dated: it runs under the clock of the test.
    """

    name: str
    store: Any
    dated: bool
    seeds: Seeds = field(default_factory=Seeds)

    def backend(self, clock: ManualClock) -> TransactionalSessionBackend:
        store = self.store if self.dated else GivenTime(self.store, clock)
        return TransactionalSessionBackend(store, environment=self.seeds)


class Differs(AssertionError):
    """Two stores have answered or kept something else."""


class Differential:
    """Carries out acts on every side.

    Args:
        sides: the oracle first.
    """

    def __init__(self, clock: ManualClock, sides: Sequence[Side]) -> None:
        self.clock = clock
        self.sides = sides
        self.dated = all(side.dated for side in sides)
        self.seen: Counter[tuple[type[Any], str]] = Counter()
        self._backends = [side.backend(clock) for side in sides]
        self._leases: dict[str, int] = {}

    async def renew(self, owner: str, lease_ms: int) -> None:
        self._leases[owner] = self.clock.boot_ms() + lease_ms
        for side in self.sides:
            # On a store with a clock of its own a lease lasts until this one says that it is over.
            side.store.renew(owner, lease_ms if self.dated else FOR_EVER_MS, b"")

    async def release(self, owner: str) -> None:
        self._leases.pop(owner, None)
        for side in self.sides:
            await side.store.release(owner)

    async def advance(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)
        if not self.dated:
            for owner in [one for one, until in self._leases.items() if until <= self.clock.boot_ms()]:
                await self.release(owner)

    async def jump(self, milliseconds: int) -> None:
        self.clock.jump(milliseconds)

    async def do(self, command: Any, seed: bytes) -> None:
        """One command on every side; answers and dumps must be the same.

        Raises:
            Differs: they are not.
        """
        if not self.dated and isinstance(command, c.PruneEvents):
            command = msgspec.structs.replace(command, older_than_ms=0)
        answers: list[tuple[str, Any]] = []
        for side, backend in zip(self.sides, self._backends, strict=True):
            side.seeds.next = seed
            try:
                receipt = await backend.execute(command, audience=Audience.OPERATOR)
            except DurableError as error:
                answers.append((type(error).__name__, str(error)))
                outcome = "fenced" if isinstance(error, Fenced) else "refused"
            else:
                answers.append(("", receipt))
                outcome = "succeeded"
            if side is self.sides[0]:
                self.seen[type(command), outcome] += 1
        for side, answer in zip(self.sides[1:], answers[1:], strict=True):
            if answer != answers[0]:
                raise Differs(f"{command}\n{self.sides[0].name} answers {answers[0]}\n{side.name} answers {answer}")
        if len(self.sides) == 1:
            return
        dumps = [await stored(side.store, command.session, dated=self.dated) for side in self.sides]
        for side, dump in zip(self.sides[1:], dumps[1:], strict=True):
            if odd := dumps[0].differs(dump):
                raise Differs(f"after {command}\n{self.sides[0].name} and {side.name} keep different {odd}")


def missing(seen: Counter[tuple[type[Any], str]], kinds: Iterable[type[Any]] = COMMANDS) -> list[tuple[str, str]]:
    """Kinds of commands that have not yet succeeded, been refused, and been fenced where there is a fence."""
    return [
        (kind.__name__, outcome)
        for kind in kinds
        for outcome in ("succeeded", "refused", *(("fenced",) if kind in FENCED else ()))
        if not seen[kind, outcome]
    ]
