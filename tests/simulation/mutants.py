"""Known bugs, planted at run time: a simulator that does not find them finds nothing.

Each is a mistake that somebody has made in such a system. They change the product from outside and are undone at the
end; nothing in the product knows of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from agentscope_durable.backend.queries import examination
from agentscope_durable.backend.queries.examination import log
from agentscope_durable.backend.queries.examination.report import ASK, Report
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.errors import RevisionConflict
from agentscope_durable.contracts.status import Severity
from agentscope_durable.domain.rules import RULES
from agentscope_durable.domain.step import tools
from agentscope_durable.runtime import dispatch, scheduler
from agentscope_durable.runtime.host import Delivery, Host
from agentscope_durable.runtime.run import LiveRun
from agentscope_durable.runtime.scheduler import Scheduler
from agentscope_durable.spi.record_store import Reads
from agentscope_durable.stores.records import _sqlite_writer, memory
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.scripted_harness._tools import WithTools


@contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def fence() -> Iterator[None]:
    """The fence is not looked at: whoever once owned a Thread may commit for it."""
    before = dict(RULES)

    def blind(decide: Any) -> Any:
        def decided(command: Any, seed: bytes, view: Any, now_ms: int) -> Any:
            active = None if view.head is None else view.head.threads.get(command.thread_id)
            if active is not None and active.turn_id == command.turn_id and active.fence != command.fence:
                command = replace(command, fence=active.fence, run_id=active.run.run_id)
                if isinstance(command, c.CommitStep):
                    command = replace(command, expected_position=active.position)
            return decide(command, seed, view, now_ms)

        return decided

    for kind in (c.CommitStep, c.SettleTurn, c.PostponeSettlement):
        RULES[kind] = RULES[kind]._replace(decide=blind(RULES[kind].decide))
    try:
        yield
    finally:
        RULES.update(before)


@contextmanager
def double_apply() -> Iterator[None]:
    """A commit whose answer was lost is sent again at the place after it."""
    before = LiveRun._deliver

    async def deliver(self: Any, step: Any) -> Any:
        delivery = Delivery(self._host)
        try:
            return await delivery.send(step)
        except RevisionConflict as error:
            if not delivery.unsure:
                raise
            return await before(self, replace(step, expected_position=error.actual))

    with _instead(LiveRun, "_deliver", deliver):
        yield


@contextmanager
def lost_scan() -> Iterator[None]:
    """Nobody looks for Threads whose owner is gone."""

    async def nothing(self: Any) -> AsyncIterator[Any]:
        for one in ():
            yield one

    with _instead(Scheduler, "_lost", nothing):
        yield


@contextmanager
def early_never_rerun() -> Iterator[None]:
    """A tool that must not run again does, when its Run was lost."""

    async def again(self: Any, call: Any, wanted: Any) -> None:
        await self._run_local(call, wanted)

    with _instead(WithTools, "_resume_local", again), _instead(tools, "_check_tool", lambda *_: None):
        yield


@contextmanager
def gap_in_sequence() -> Iterator[None]:
    """A commit of several events takes one number too many."""
    before = MemoryRecordStore._write

    def write(self: Any, partition: Any, session: Any, change: Any, now_ms: Any) -> Any:
        committed = before(self, partition, session, change, now_ms)
        if change.entry is not None and change.entry.count >= 4:
            session.next_seq += 1
        return committed

    with _instead(MemoryRecordStore, "_write", write):
        yield


@contextmanager
def stolen_lease() -> Iterator[None]:
    """Who was seen with an expired lease is said to be dead, whether or not it has renewed since."""
    before = scheduler.dead_owners

    async def dead(host: Any, empty: Any) -> AsyncIterator[Any]:
        async for owner, _ in before(host, empty):
            yield owner, (owner,)

    with _instead(scheduler, "dead_owners", dead), _instead(dispatch, "dead_owners", dead):
        yield


MUTANTS: dict[str, Callable[[], Any]] = {
    "fence": fence,
    "double_apply": double_apply,
    "lost_scan": lost_scan,
    "early_never_rerun": early_never_rerun,
    "gap_in_sequence": gap_in_sequence,
}
"""Each is found within some tens of seeds."""


@contextmanager
def forgotten_result() -> Iterator[None]:
    """An outcome that was read is read again without its body, and taken for an empty one."""
    # Not before it is wanted: AgentScope takes seconds to import.
    from agentscope_durable.adapters.agentscope.calls import Calls

    before = Calls.learn

    def learn(self: Any, executions: Any, interactions: Any) -> None:
        executions = list(executions)
        for record, _ in executions:
            if record.call_id in self.known:
                self.known[record.call_id].result = None
        before(self, executions, interactions)

    with _instead(Calls, "learn", learn):
        yield


@contextmanager
def away_is_damage() -> Iterator[None]:
    """Doctor calls a store that is away damage."""

    def fault(self: Any, check: str, subject: str, error: Any, session: Any = None) -> None:
        self.find(check, Severity.DAMAGE, subject, error.what, ASK, session=session)

    with _instead(Report, "fault", fault):
        yield


@contextmanager
def dropped_is_damage() -> Iterator[None]:
    """Doctor calls a Session damage that is dropped while it looks at it."""

    class Never(Exception): ...

    with _instead(examination, "SessionDropped", Never):
        yield


@contextmanager
def pruned_is_damage() -> Iterator[None]:
    """Doctor calls events damage that are pruned while it looks at them: it knows what was pruned when it began."""
    before = log.examine_log

    class Remembers:
        def __init__(self, reader: Any) -> None:
            self._reader = reader
            self._began: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(self._reader, name)

        async def read(self, session: Any, reads: Reads) -> Any:
            if reads != Reads():
                return await self._reader.read(session, reads)
            self._began = self._began or await self._reader.read(session, reads)
            return self._began

    async def examine(reader: Any, session: Any, report: Any) -> None:
        await before(Remembers(reader), session, report)

    with _instead(examination, "examine_log", examine):
        yield


@contextmanager
def few_rounds() -> Iterator[None]:
    """A decision may ask for more records three times, and the end of a Run with all it can hold asks four times."""
    with _instead(memory, "NEED_ROUNDS_MAX", 3), _instead(_sqlite_writer, "NEED_ROUNDS_MAX", 3):
        yield


@contextmanager
def released_lease() -> Iterator[None]:
    """A host that closes gives its lease back although a claim of its may still be carried out, and nobody looks who
    owns something without one."""

    async def nobody(host: Any, kind: str) -> list[str]:
        return []

    Host.unheard = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]
    try:
        with _instead(scheduler, "holders", nobody), _instead(dispatch, "holders", nobody):
            yield
    finally:
        del Host.unheard


FORMER: dict[str, Callable[[], Any]] = {
    "stolen_lease": stolen_lease,
    "away_is_damage": away_is_damage,
    "dropped_is_damage": dropped_is_damage,
    "released_lease": released_lease,
    "pruned_is_damage": pruned_is_damage,
    "few_rounds": few_rounds,
    "forgotten_result": forgotten_result,
}
"""Bugs that the simulator found, by the name of the kept story that shows them."""
