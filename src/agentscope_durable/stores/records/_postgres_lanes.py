"""How changes reach a PostgreSQL server: together where they wait together, and each exactly once.

Rule 1: a Session's changes go through one lane, which has one connection and sends one group after the other; an idle
lane sends at once. The caller waits beside it, so that its cancellation reaches nothing that is under way.
Rule 2: a Session that somebody else wrote meanwhile leaves the lane: it is decided again behind its row's lock, which
is a statement of its own, so that what is read afterwards is what the last holder wrote. Remembered heads and
compare-and-set alone would starve the slower of two hosts.
Rule 3: where the connection ended under a statement, the outcome is looked up in the log. A commit that is not there is
decided again with the same commit id, on the same revision: of the two at most one can happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import DurableError, StoreBusy, Uncertain
from agentscope_durable.spi.record_store import StoreStatistics
from agentscope_durable.stores._postgres_connections import Line, Source
from agentscope_durable.stores._postgres_errors import FAULTS, lost, one_of_them, raced, translate
from agentscope_durable.stores.records._postgres_clock import ServerClock
from agentscope_durable.stores.records._postgres_group import Group, Member, Session, asked
from agentscope_durable.stores.records._postgres_reading import Answer, HeadRow
from agentscope_durable.stores.records._postgres_tables import Tables

__all__ = ["Lanes"]

log = logging.getLogger("agentscope_durable.stores")

LANES: Final = 2
"""More would only make groups smaller: the server flushes one after the other."""
GROUP_MAX: Final = 64
"""Changes sent together at most."""
HEADS_MAX: Final = 8192
"""Remembered heads at most; some 2 KB each."""
RACES_MAX: Final = 16
"""Races a change may lose before it is given up."""
SETTLE_SECONDS: Final = 15.0
"""How long an outcome is looked for when the server cannot be reached."""
RECONNECT_SECONDS: Final = 0.1
HOLD_SECONDS: Final = 10.0
"""A host that stands still while it holds a Session loses it to the server after this."""


class Figures:
    """How busy the lanes are (BE-28)."""

    def __init__(self) -> None:
        self.changes = self.transactions = self.busy = 0
        self.waited = self.longest = self.locked = 0.0

    def count(self, member: Member) -> None:
        waited = time.monotonic() - member.began
        self.waited += waited
        self.longest = max(self.longest, waited)
        self.changes += member.answer is not None and member.answer.changed
        self.busy += isinstance(member.error, StoreBusy)

    def told(self, stored_bytes: int) -> StoreStatistics:
        return StoreStatistics(
            changes=self.changes,
            transactions=self.transactions,
            busy=self.busy,
            waited_ms=int(self.waited * 1000),
            longest_ms=int(self.longest * 1000),
            locked_ms=int(self.locked * 1000),
            stored_bytes=stored_bytes,
        )


class _Heads:
    """Heads as this process knows them. Whether one is still true shows when it is written."""

    def __init__(self) -> None:
        self.known: dict[str, HeadRow] = {}

    def learn(self, partition: str, head: HeadRow) -> None:
        known = self.known
        before = known.get(partition)
        if before is not None and before.rev >= head.rev:
            return
        if before is None and len(known) >= HEADS_MAX:
            known.clear()
        known[partition] = head

    def forget(self, partition: str) -> None:
        self.known.pop(partition, None)


class Lanes:
    """Where the store's changes go.

    Args:
        patience: seconds that one statement may take.
    """

    def __init__(self, tables: Tables, source: Source, clock: ServerClock, *, patience: float) -> None:
        self.tables = tables
        self.source = source
        self.clock = clock
        self.patience = patience
        self.heads = _Heads()
        self.figures = Figures()
        self.contended = _Contended(self)
        self._lanes = [_Lane(self) for _ in range(LANES)]

    def put(self, member: Member) -> None:
        self._lanes[hash(member.partition) % LANES].put(member)

    async def close(self) -> None:
        """Finish what is under way, then let the connections go."""
        lanes = (*self._lanes, self.contended)
        while tasks := [lane.task for lane in lanes if lane.task is not None]:
            await asyncio.wait(tasks)
        for lane in lanes:
            await lane.line.close()

    def tell(self, member: Member) -> None:
        self.figures.count(member)
        member.tell()


class _Queue:
    """Members that wait for a connection, and the task that serves them while there are any."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.line = Line(lanes.source)
        self.waiting: deque[Member] = deque()
        self.task: asyncio.Task[None] | None = None

    def put(self, member: Member) -> None:
        self.waiting.append(member)
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name="postgres-lane")

    async def _run(self) -> None:
        try:
            while self.waiting:
                members = self.next()
                try:
                    await self.carry(members)
                except BaseException as error:
                    # Unforeseen, or the loop is being shut down: nobody may wait for ever.
                    self.end(members, Uncertain("the commit", reason=type(error).__name__))
                    if not isinstance(error, Exception):
                        self.end(list(self.waiting), Uncertain("the commit", reason=type(error).__name__))
                        self.waiting.clear()
                        raise
                    log.exception("the store's lane failed in an unforeseen way")
        finally:
            self.task = None

    def next(self) -> list[Member]:
        raise NotImplementedError

    async def carry(self, members: list[Member]) -> None:
        raise NotImplementedError

    def end(self, members: Sequence[Member], error: BaseException) -> None:
        """These end with an error, unless they have ended."""
        for member in members:
            if not member.future.done():
                member.forget()
                member.error = error
                self.lanes.tell(member)

    # -------------------------------------------------------------------- parts of a commit

    async def read(self, group: Group, members: Sequence[Member], known: dict[str, HeadRow]) -> Answer:
        """What these want to see. Their Sessions are then in the group."""
        lanes = self.lanes
        question = asked(members, known)
        answer = Answer()
        if question.partitions:
            parts, arguments = question.statement()
            rows = await self.line.fetch(lanes.tables.reading(parts), arguments, timeout=lanes.patience)
            answer = question.answered(rows)
            lanes.clock.hear(answer.server_ms)
        for member in members:
            name = member.partition
            session = group.sessions.get(name)
            if name in question.partitions:
                head = answer.head(name)
                if session is None:
                    group.sessions[name] = Session(head, fresh=True)
                elif head.rev == session.base.rev:
                    session.fresh = True
                else:
                    session.stale = True
            elif session is None:
                group.sessions[name] = Session(known[name], fresh=False)
        return answer

    async def decide(self, group: Group, members: Sequence[Member], known: dict[str, HeadRow]) -> None:
        """Read and decide until every member has an answer, or must wait."""
        more = list(members)
        while more:
            answer = await self.read(group, more, known)
            more = group.decide(self.admitted(group, more, answer), answer, self.lanes.clock.now())

    def admitted(self, group: Group, members: list[Member], answer: Answer) -> list[Member]:
        """Who is to be decided."""
        del group, answer
        return members

    async def write(self, writers: Sequence[tuple[str, Session]]) -> set[str]:
        """Send one statement; gives back who won."""
        lanes = self.lanes
        short = Group.step(writers[0][1]) if len(writers) == 1 else None
        if short is not None:
            record, arguments = short
            statement = lanes.tables.step(record=record)
        else:
            parts, arguments = Group.statement(writers)
            statement = lanes.tables.group(parts)
        rows = await self.line.fetch(statement, arguments, timeout=lanes.patience)
        won: set[str] = set()
        for n, p, server_ms in rows:
            name, session = writers[n - 1]
            won.add(name)
            session.state = session.state._replace(p=p)
            lanes.clock.hear(server_ms)
        return won

    def settled(self, name: str, session: Session) -> None:
        """The outcome of this Session is known: tell everyone."""
        if session.writes:
            self.lanes.heads.learn(name, session.state)
        elif session.fresh and session.base.p is not None:
            self.lanes.heads.learn(name, session.base)
        for member in session.members:
            self.lanes.tell(member)


class _Lane(_Queue):
    """Groups of changes whose Sessions, so one hopes, nobody else writes."""

    def next(self) -> list[Member]:
        members: list[Member] = []
        seen: set[str] = set()
        kept: list[Member] = []
        waiting = self.waiting
        while waiting and len(members) < GROUP_MAX:
            member = waiting.popleft()
            if member.partition in seen and (member.reads.ranges or member.reads.log is not None):
                # It would have to wait for what the former writes.
                kept.append(member)
                continue
            seen.add(member.partition)
            members.append(member)
        waiting.extendleft(reversed(kept))
        return members

    async def carry(self, members: list[Member]) -> None:
        location = self.lanes.source.location
        group = Group()
        for attempt in (1, 2):
            group = Group()
            try:
                await self.line.connected()
                await self.decide(group, members, self.lanes.heads.known)
                break
            except Exception as error:  # noqa: BLE001 - told to the members below
                for member in members:
                    member.forget()
                if isinstance(error, DurableError) and not lost(error) and len(members) == 1:
                    self.end(members, error)
                    return
                if one_of_them(error) or isinstance(error, DurableError):
                    if len(members) > 1:
                        for member in members:
                            await self.carry([member])
                        return
                elif lost(error) and attempt == 1:
                    # A connection that was idle may have ended long ago. Nothing was sent but a question.
                    continue
                self.end(members, translate(error, location))
                return
        self.waiting.extendleft(reversed(group.later))
        writers = group.writers()
        stale: list[Session] = []
        for name, session in group.sessions.items():
            if session.stale:
                self.lanes.heads.forget(name)
                stale.append(session)
            elif not session.writes:
                self.settled(name, session)
        if writers:
            await self._send(writers, stale)
        for session in stale:
            self.leave(session)

    async def _send(self, writers: list[tuple[str, Session]], left: list[Session]) -> None:
        lanes = self.lanes
        sent = False
        try:
            _failpoints.hit("store.commit.before")
            sent = True
            won = await self.write(writers)
            _failpoints.hit("store.commit.after")
        except BaseException as error:
            for name, _ in writers:
                lanes.heads.forget(name)
            refused = not lost(error) and _by_the_server(error)
            if sent and not refused:
                log.warning("the outcome of a commit is not known and is looked up: %s", type(error).__name__)
                for _, session in writers:
                    for member in session.members:
                        if member.sent is not None:
                            member.doubts.append(member.sent)
                    left.append(session)
                if not isinstance(error, Exception):
                    raise
            elif raced(error):
                left += [session for _, session in writers]
            elif len(writers) > 1 and one_of_them(error):
                for one in writers:
                    await self._send([one], left)
            else:
                for _, session in writers:
                    self.end(session.members, translate(error, lanes.source.location))
            return
        lanes.figures.transactions += 1
        for name, session in writers:
            if name in won:
                self.settled(name, session)
            else:
                lanes.heads.forget(name)
                left.append(session)

    def leave(self, session: Session) -> None:
        """Its race is lost: it goes on behind the row's lock."""
        for member in session.members:
            member.races += 1
            member.forget()
            self.lanes.contended.put(member)


class _Contended(_Queue):
    """Sessions that somebody else writes as well, and outcomes to be looked up: one Session after the other."""

    def next(self) -> list[Member]:
        partition = self.waiting[0].partition
        members = [member for member in self.waiting if member.partition == partition][:GROUP_MAX]
        taken = set(map(id, members))
        self.waiting = deque(member for member in self.waiting if id(member) not in taken)
        return members

    async def carry(self, members: list[Member]) -> None:
        began = time.monotonic()
        left = members
        try:
            while left:
                left = await self._attempt(left, began)
        finally:
            self.lanes.figures.locked += time.monotonic() - began

    async def _attempt(self, members: list[Member], began: float) -> list[Member]:
        """One transaction; gives back who must try again."""
        lanes = self.lanes
        partition, location = members[0].partition, lanes.source.location
        lanes.heads.forget(partition)
        try:
            await self.line.connected()
        except Exception as error:  # noqa: BLE001 - told to the members
            return await self._unreachable(members, error, began)
        group = Group()
        sent = False
        try:
            patience_ms = max(1, int(lanes.patience * 1000))
            await self.line.run(
                f"begin; set local idle_in_transaction_session_timeout = {int(HOLD_SECONDS * 1000)}; "
                f"set local lock_timeout = {patience_ms}",
                timeout=lanes.patience,
            )
            await self.line.fetch(lanes.tables.lock, [partition.encode()], timeout=lanes.patience * 2)
            await self.decide(group, members, {})
            session = group.sessions[partition]
            writers = [] if session.stale else group.writers()
            won = await self.write(writers) if writers else set[str]()
            if writers and partition not in won:
                session.stale = True
            if session.stale or not writers:
                await self.line.run("rollback", timeout=lanes.patience)
            else:
                _failpoints.hit("store.commit.before")
                sent = True
                await self.line.run("commit", timeout=lanes.patience)
                _failpoints.hit("store.commit.after")
                lanes.figures.transactions += 1
        except Exception as error:  # noqa: BLE001 - told to the members
            return await self._failed(members, group, error, began, sent=sent)
        again = list(group.later)
        if session.stale:
            for member in session.members:
                member.forget()
                member.races += 1
                if member.races > RACES_MAX:
                    self._give_up([member], StoreBusy(location))
                else:
                    again.append(member)
            return again
        self.settled(partition, session)
        return again

    def admitted(self, group: Group, members: list[Member], answer: Answer) -> list[Member]:
        admitted: list[Member] = []
        for member in members:
            session = group.sessions[member.partition]
            found = erased = None
            for sent in member.doubts:
                place = (member.partition, sent.first, sent.rev, sent.commit_id)
                there, oldest = answer.commits.get(place, (False, None))
                if there:
                    found = sent
                elif session.base.rev >= sent.rev and (oldest is None or oldest > sent.rev):
                    erased = sent
            if found is not None:
                member.forget()
                member.answer = found.answer
                self.lanes.tell(member)
                continue
            if erased is not None:
                self.end(
                    [member], Uncertain("the commit", reason="its answer was lost, and that part of the log is gone")
                )
                continue
            if session.base.rev > max((sent.base for sent in member.doubts), default=-1):
                member.doubts.clear()
            admitted.append(member)
        return admitted

    def settled(self, name: str, session: Session) -> None:
        if not session.writes:
            for member in session.members:
                if member.doubts:
                    # The Session is as it was, so what was sent may still arrive.
                    member.forget()
                    member.error = Uncertain("the commit", reason="its answer was lost")
        super().settled(name, session)

    async def _failed(
        self, members: list[Member], group: Group, error: Exception, began: float, *, sent: bool
    ) -> list[Member]:
        lanes = self.lanes
        left = [member for member in members if not member.future.done()]
        if sent and not (not lost(error) and _by_the_server(error)):
            for member in left:
                if member.sent is not None:
                    member.doubts.append(member.sent)
        del group
        for member in left:
            member.forget()
        if lost(error):
            await self.line.drop()
            return await self._unreachable(left, error, began)
        with contextlib.suppress(*FAULTS):
            await self.line.run("rollback", timeout=lanes.patience)
        if sent and not _by_the_server(error):
            return await self._unreachable(left, error, began)
        if raced(error):
            for member in left:
                member.races += 1
            spent = [member for member in left if member.races > RACES_MAX]
            self._give_up(spent, StoreBusy(lanes.source.location))
            return [member for member in left if member.races <= RACES_MAX]
        self._give_up(left, translate(error, lanes.source.location))
        return []

    async def _unreachable(self, members: list[Member], error: Exception, began: float) -> list[Member]:
        """Those whose outcome is open go on looking for a while; the others know that nothing happened."""
        lanes = self.lanes
        open_ = [member for member in members if member.doubts]
        clear = [member for member in members if not member.doubts]
        for member in list(clear):
            member.races += 1
            if lost(error) and member.races <= 2:
                open_.append(member)
                clear.remove(member)
        self._give_up(clear, translate(error, lanes.source.location))
        if time.monotonic() - began >= SETTLE_SECONDS:
            self._give_up(open_, translate(error, lanes.source.location))
            return []
        if open_:
            await asyncio.sleep(RECONNECT_SECONDS)
        return open_

    def _give_up(self, members: Sequence[Member], error: BaseException) -> None:
        for member in members:
            if member.doubts:
                uncertain = Uncertain("the commit", reason="its answer was lost, and the server cannot be asked")
                uncertain.__cause__ = error
                self.end([member], uncertain)
            else:
                self.end([member], error)


def _by_the_server(error: BaseException) -> bool:
    """Whether the server, or the driver before it sent anything, refused the statement."""
    return bool(getattr(error, "sqlstate", None)) or isinstance(error, DurableError)
