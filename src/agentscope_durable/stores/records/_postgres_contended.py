"""Sessions that somebody else writes as well, and commits whose outcome is not known.

Rule 1: such a Session is decided behind its row's lock, which is a statement of its own, so that what is read
afterwards is what the last holder wrote.
Rule 2: where the connection ended under a commit, the log is asked for it. One that is not there is decided again with
the same commit id, on a revision at which the former can no longer happen once this one has: one of them at most.
Rule 3: what can be neither found nor done again is `Uncertain`, after a bounded while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import StoreBusy, Uncertain
from agentscope_durable.stores._postgres_errors import FAULTS, lost, raced, refused, translate
from agentscope_durable.stores.records._postgres_group import Group, Heads, Member, Session
from agentscope_durable.stores.records._postgres_queue import Queue
from agentscope_durable.stores.records._postgres_reading import Answer

__all__ = ["Contended"]

MEMBERS_MAX: Final = 64
"""Changes of a Session decided behind one lock at most."""
RACES_MAX: Final = 16
"""Races a change may lose before it is given up."""
SETTLE_SECONDS: Final = 15.0
"""How long an outcome is looked for when the server cannot be reached."""
RECONNECT_SECONDS: Final = 0.1
HOLD_SECONDS: Final = 10.0
"""A host that stands still while it holds a Session loses it to the server after this."""


class Contended(Queue):
    """Sessions that somebody else writes as well, and outcomes to be looked up: one Session after the other."""

    def next(self) -> list[Member]:
        partition = self.waiting[0].partition
        members = [member for member in self.waiting if member.partition == partition][:MEMBERS_MAX]
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
            self.shared.figures.locked += time.monotonic() - began

    async def _attempt(self, members: list[Member], began: float) -> list[Member]:
        """One transaction; gives back who must try again."""
        shared = self.shared
        partition, location = members[0].partition, shared.source.location
        shared.heads.forget(partition)
        try:
            await self.line.connected()
        except Exception as error:  # noqa: BLE001 - told to the members
            return await self._unreachable(members, error, began)
        group = Group()
        sent = False
        try:
            await self.line.run(_begin(shared.patience), timeout=shared.patience)
            await self.line.fetch(shared.tables.lock, [partition.encode()], timeout=shared.patience * 2)
            await self.decide(group, members, Heads())
            session = group.sessions[partition]
            writers = [] if session.stale else group.writers()
            won = await self.write(writers) if writers else set[str]()
            if writers and partition not in won:
                session.stale = True
            if session.stale or not writers:
                await self.line.run("rollback", timeout=shared.patience)
            else:
                _failpoints.hit("store.commit.before")
                sent = True
                await self.line.run("commit", timeout=shared.patience)
                _failpoints.hit("store.commit.after")
                shared.figures.transactions += 1
        except Exception as error:  # noqa: BLE001 - told to the members
            return await self._failed(members, error, began, sent=sent)
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
                self.shared.tell(member)
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

    async def _failed(self, members: list[Member], error: Exception, began: float, *, sent: bool) -> list[Member]:
        """What becomes of an attempt that failed; gives back who must try again."""
        shared = self.shared
        left = [member for member in members if not member.future.done()]
        unknown = sent and not refused(error)
        if unknown:
            for member in left:
                if member.sent is not None:
                    member.doubts.append(member.sent)
        for member in left:
            member.forget()
        if lost(error):
            await self.line.drop()
            return await self._unreachable(left, error, began)
        with contextlib.suppress(*FAULTS):
            await self.line.run("rollback", timeout=shared.patience)
        if unknown:
            return await self._unreachable(left, error, began)
        if raced(error):
            for member in left:
                member.races += 1
            spent = [member for member in left if member.races > RACES_MAX]
            self._give_up(spent, StoreBusy(shared.source.location))
            return [member for member in left if member.races <= RACES_MAX]
        self._give_up(left, translate(error, shared.source.location))
        return []

    async def _unreachable(self, members: list[Member], error: Exception, began: float) -> list[Member]:
        """Those whose outcome is open go on looking for a while; the others know that nothing happened."""
        shared = self.shared
        again: list[Member] = []
        for member in members:
            if member.doubts:
                again.append(member)
                continue
            member.races += 1
            # A connection that was idle may have ended long ago: that is worth a second one.
            if lost(error) and member.races <= 2:
                again.append(member)
            else:
                self._give_up([member], translate(error, shared.source.location))
        if time.monotonic() - began >= SETTLE_SECONDS:
            self._give_up(again, translate(error, shared.source.location))
            return []
        if again:
            await asyncio.sleep(RECONNECT_SECONDS)
        return again

    def _give_up(self, members: Sequence[Member], error: BaseException) -> None:
        for member in members:
            if member.doubts:
                uncertain = Uncertain("the commit", reason="its answer was lost, and the server cannot be asked")
                uncertain.__cause__ = error
                self.end([member], uncertain)
            else:
                self.end([member], error)


def _begin(patience: float) -> str:
    """A transaction that waits for nobody for ever, and lets nobody wait for it for ever."""
    return (
        "begin isolation level read committed; "
        f"set local idle_in_transaction_session_timeout = {int(HOLD_SECONDS * 1000)}; "
        f"set local lock_timeout = {max(1, int(patience * 1000))}"
    )
