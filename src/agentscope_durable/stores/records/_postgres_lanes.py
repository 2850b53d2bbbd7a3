"""How changes reach a PostgreSQL server: together where they wait together, and each exactly once.

Rule 1: a Session's changes go through one lane, which has one connection and sends one group after the other; an idle
lane sends at once.
Rule 2: a Session that somebody else wrote meanwhile leaves its lane (`_postgres_contended`). Remembered heads and
compare-and-set alone would starve the slower of two hosts. So does a commit whose connection ended under it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import Rejected
from agentscope_durable.stores._postgres_connections import Source
from agentscope_durable.stores._postgres_errors import lost, one_of_them, raced, refused, translate
from agentscope_durable.stores.records._postgres_clock import ServerClock
from agentscope_durable.stores.records._postgres_contended import Contended
from agentscope_durable.stores.records._postgres_group import Group, Member, Session
from agentscope_durable.stores.records._postgres_queue import Queue, Shared
from agentscope_durable.stores.records._postgres_tables import Tables

__all__ = ["Lanes"]

log = logging.getLogger("agentscope_durable.stores")

LANES: Final = 2
"""More would only make groups smaller: the server flushes one after the other."""
GROUP_MAX: Final = 64
"""Changes sent together at most."""


class Lanes:
    """Where the store's changes go.

    Args:
        patience: seconds that one statement may take.
    """

    def __init__(self, tables: Tables, source: Source, clock: ServerClock, *, patience: float) -> None:
        shared = Shared(tables, source, clock, patience=patience)
        self.figures = shared.figures
        self.seen = shared.heads.seen
        self._contended = Contended(shared)
        self._lanes = [_Lane(shared, self._contended) for _ in range(LANES)]

    def put(self, member: Member) -> None:
        self._lanes[hash(member.partition) % LANES].put(member)

    async def close(self) -> None:
        """Finish what is under way, then let the connections go."""
        lanes = (*self._lanes, self._contended)
        while tasks := [lane.task for lane in lanes if lane.task is not None]:
            await asyncio.wait(tasks)
        for lane in lanes:
            await lane.line.close()


class _Lane(Queue):
    """Groups of changes whose Sessions, so one hopes, nobody else writes."""

    def __init__(self, shared: Shared, contended: Contended) -> None:
        super().__init__(shared)
        self._contended = contended

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
        location = self.shared.source.location
        group = Group()
        for attempt in (1, 2):
            group = Group()
            try:
                await self.line.connected()
                await self.decide(group, members, self.shared.heads)
                break
            except Exception as error:  # noqa: BLE001 - told to the members below
                for member in members:
                    member.forget()
                if len(members) > 1 and (isinstance(error, Rejected) or one_of_them(error)):
                    for member in members:
                        await self.carry([member])
                    return
                if lost(error) and attempt == 1:
                    # A connection that was idle may have ended long ago. Nothing was sent but a question.
                    continue
                self.end(members, translate(error, location))
                return
        self.waiting.extendleft(reversed(group.later))
        writers = group.writers()
        stale: list[Session] = []
        for name, session in group.sessions.items():
            if session.stale:
                self.shared.heads.forget(name)
                stale.append(session)
            elif not session.writes:
                self.settled(name, session)
        if writers:
            await self._send(writers, stale)
        for session in stale:
            self.leave(session)

    async def _send(self, writers: list[tuple[str, Session]], left: list[Session]) -> None:
        shared = self.shared
        sent = False
        try:
            _failpoints.hit("store.commit.before")
            sent = True
            won = await self.write(writers)
            _failpoints.hit("store.commit.after")
        except BaseException as error:
            for name, _ in writers:
                shared.heads.forget(name)
            if sent and not refused(error):
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
                    self.end(session.members, translate(error, shared.source.location))
            return
        shared.figures.transactions += 1
        for name, session in writers:
            if name in won:
                self.settled(name, session)
            else:
                shared.heads.forget(name)
                left.append(session)

    def leave(self, session: Session) -> None:
        """Its race is lost: it goes on behind the row's lock."""
        for member in session.members:
            member.races += 1
            member.forget()
            self._contended.put(member)
