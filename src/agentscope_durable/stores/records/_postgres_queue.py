"""What every way to a PostgreSQL server has in common: members wait, a task serves them, a group is read and written.

Rule: the caller waits beside the task, so that its cancellation reaches nothing that is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from agentscope_durable.contracts.errors import Uncertain
from agentscope_durable.stores._postgres_connections import Line, Source
from agentscope_durable.stores.records._figures import Figures
from agentscope_durable.stores.records._postgres_clock import ServerClock
from agentscope_durable.stores.records._postgres_group import Group, Heads, Member, Session, asked
from agentscope_durable.stores.records._postgres_reading import Answer
from agentscope_durable.stores.records._postgres_tables import Tables

__all__ = ["Queue", "Shared"]

log = logging.getLogger("agentscope_durable.stores")


class Shared:
    """What the ways of one store have in common.

    Args:
        patience: seconds that one statement may take.
    """

    def __init__(self, tables: Tables, source: Source, clock: ServerClock, *, patience: float) -> None:
        self.tables = tables
        self.source = source
        self.clock = clock
        self.patience = patience
        self.heads = Heads()
        self.figures = Figures()

    def tell(self, member: Member) -> None:
        """This is its outcome."""
        changed = member.answer is not None and member.answer.changed
        self.figures.count(member.began, member.error, changed=changed)
        member.tell()


class Queue:
    """Members that wait for a connection, and the task that serves them while there are any."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.line = Line(shared.source)
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
                self.shared.tell(member)

    # -------------------------------------------------------------------- parts of a commit

    async def read(self, group: Group, members: Sequence[Member], heads: Heads) -> Answer:
        """What these want to see. Their Sessions are then in the group."""
        shared = self.shared
        for member in members:
            if member.partition not in group.sessions:
                known = heads.session(member.partition)
                if known is not None:
                    group.sessions[member.partition] = known
        question = asked(members, group.sessions)
        answer = Answer()
        if question.partitions:
            parts, arguments = question.statement()
            rows = await self.line.fetch(shared.tables.reading(parts), arguments, timeout=shared.patience)
            answer = question.answered(rows)
            shared.clock.hear(answer.server_ms)
        for name in question.partitions:
            head, session = answer.head(name), group.sessions.get(name)
            if session is not None and head.rev == session.base.rev:
                session.fresh = True
            elif session is None or not (session.members or session.writes):
                group.sessions[name] = Session(head, {}, fresh=True)
                shared.clock.witness(head.at_ms)
            else:
                session.stale = True
        return answer

    async def decide(self, group: Group, members: Sequence[Member], heads: Heads) -> None:
        """Read and decide until every member has an answer, or must wait."""
        more = list(members)
        while more:
            answer = await self.read(group, more, heads)
            more = group.decide(self.admitted(group, more, answer), answer, self.shared.clock.now())

    def admitted(self, group: Group, members: list[Member], answer: Answer) -> list[Member]:
        """Who is to be decided."""
        del group, answer
        return members

    async def write(self, writers: Sequence[tuple[str, Session]]) -> set[str]:
        """Send one statement; gives back who won."""
        shared = self.shared
        short = Group.step(writers[0][1]) if len(writers) == 1 else None
        if short is not None:
            record, arguments = short
            statement = shared.tables.step(record=record)
        else:
            parts, arguments = Group.statement(writers)
            statement = shared.tables.group(parts)
        rows = await self.line.fetch(statement, arguments, timeout=shared.patience)
        won: set[str] = set()
        for n, p, server_ms in rows:
            name, session = writers[n - 1]
            won.add(name)
            session.state = session.state._replace(p=p)
            shared.clock.hear(server_ms)
        return won

    def settled(self, name: str, session: Session) -> None:
        """The outcome of this Session is known: tell everyone."""
        if session.writes or (session.fresh and session.base.p is not None):
            self.shared.heads.learn(name, session)
        for member in session.members:
            self.shared.tell(member)
