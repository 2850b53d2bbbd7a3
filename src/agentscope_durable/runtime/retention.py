"""What is kept, and for how long: the part of `HostOperations` that lets things go.

Rule 1: nothing goes that was not asked for, by name or by age; the default keeps everything.
Rule 2: everything goes in slices, each one short commit of one Session. Stopped anywhere, what was done is done, and a
repeat goes on.
"""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from typing import Final

from agentscope_durable.contracts.checkpoint import stream_position
from agentscope_durable.contracts.commands import (
    Dropped,
    DropSession,
    PositionsPruned,
    PruneCheckpoints,
    Pruned,
    PruneEvents,
)
from agentscope_durable.contracts.errors import CorruptRecord, InvalidRequest, SessionDropped
from agentscope_durable.contracts.events import cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.ids import check_key
from agentscope_durable.contracts.questions import GetDropped, ListClosed, ListThreads
from agentscope_durable.contracts.status import Audience
from agentscope_durable.contracts.views import (
    CheckpointPruneReceipt,
    DropReceipt,
    Page,
    PruneReceipt,
    RetainReport,
    SweepReport,
)
from agentscope_durable.runtime.handles import PAGE_LIMIT
from agentscope_durable.spi.backend import SessionBackend

__all__ = ["REASON_CHARS_MAX", "RETAINED", "Retention", "Timeout", "milliseconds"]

log = logging.getLogger("agentscope_durable.runtime")

Timeout = float | timedelta

REASON_CHARS_MAX: Final = 256
"""Of what is kept for ever."""
SWEEP_LIMIT: Final = 1000
"""Bodies one call of a sweep looks at."""
RETAINED: Final = "retained no longer"
"""The reason of what `retain` drops."""


class Retention:
    """Drops what nobody needs any more. A part of `HostOperations`, and as privileged."""

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = backend

    async def prune_events(
        self, session: SessionKey, *, through: str | None = None, older_than: Timeout | None = None
    ) -> PruneReceipt:
        """Drop events that nobody is to replay any more, the oldest first (EV-19).

        Snapshots, history, results, tool calls, questions, Steps, model calls and checkpoints stay as they are. What
        ends is the replay: a cursor before what was dropped raises `CursorExpired`, and a stream that continues from
        one begins with a `SnapshotReset`.

        Works in batches, each a short commit. Stopped, cancelled or killed at any point, it has dropped what it had
        dropped by then; called again, it goes on. Whole commits are dropped, so it may end a little before `through`.

        Args:
            session: whose events.
            through: cursor of the last event to drop.
            older_than: drop only what was committed at least this long ago by the store's clock; seconds or a
                timedelta. At least one of the two is needed, and both may be given.

        Raises:
            InvalidCursor: of another Session, or ahead of the timeline.
            InvalidRequest: no bound was given, or the age is not 0 or more.
        """
        if through is None and older_than is None:
            raise InvalidRequest("say through which cursor, or how old: otherwise every event would go", path="through")
        command = PruneEvents(
            session=session,
            through=None if through is None else sequence_of(session, through),
            older_than_ms=0 if older_than is None else milliseconds(older_than, "older_than"),
        )
        dropped = 0
        while True:
            pruned: Pruned = await self._backend.execute(command, audience=Audience.OPERATOR)
            dropped += pruned.dropped
            if not pruned.more:
                break
        log.info(
            "events of session %s through %d are pruned, %d were dropped",
            session.session_id,
            pruned.through,
            dropped,
            extra=_of(session),
        )
        return PruneReceipt(cursor=cursor_of(session, pruned.through), dropped=dropped)

    async def prune_checkpoints(
        self, thread: ThreadKey, *, through: str | None = None, older_than: Timeout | None = None
    ) -> CheckpointPruneReceipt:
        """Drop settled positions nobody is to come back to, the oldest first, and what only they need.

        The position the Thread stands on stays. Of its workspace, former versions go that no position which stays can
        tell. Asking for a dropped one raises `CheckpointPruned`; a restore or a fork of one under way ends with that,
        or has all of it.

        Works in batches, as `prune_events` does.

        Args:
            thread: whose positions.
            through: the last position to drop.
            older_than: drop only what was settled at least this long ago by the store's clock; seconds or a timedelta.
                At least one of the two is needed, and both may be given.

        Raises:
            InvalidRequest: no bound was given, a position of another Thread, or the age is not 0 or more.
        """
        check_key(thread)
        if through is None and older_than is None:
            raise InvalidRequest("say through which position, or how old: otherwise all would go", path="through")
        command = PruneCheckpoints(
            session=thread.session,
            thread_id=thread.thread_id,
            through=None if through is None else stream_position(thread, through, path="through"),
            older_than_ms=0 if older_than is None else milliseconds(older_than, "older_than"),
        )
        positions = versions = 0
        while True:
            pruned: PositionsPruned = await self._backend.execute(command, audience=Audience.OPERATOR)
            positions, versions = positions + pruned.positions, versions + pruned.versions
            if not pruned.more:
                break
        log.info(
            "%d positions of thread %s are dropped, with %d versions of its workspace",
            positions,
            thread.thread_id,
            versions,
            extra={**_of(thread.session), "thread_id": thread.thread_id},
        )
        return CheckpointPruneReceipt(
            session=thread.session, thread_id=thread.thread_id, positions=positions, versions=versions
        )

    async def sweep_objects(
        self,
        session: SessionKey | None = None,
        *,
        cursor: str | None = None,
        limit: int = SWEEP_LIMIT,
        strangers: bool = False,
        dry_run: bool = False,
    ) -> SweepReport:
        """Remove large bodies that nobody refers to from the object store (OB-08).

        A body goes when no commit has referred to it for a day by the store's clock after it was put: its commit was
        lost, or the request that brought it was never sent. Bodies of dropped Sessions go at once.

        Hosts may be running, and other sweeps. Stopped, cancelled or killed at any point, it has removed what it had
        removed by then; the next one goes on with the rest.

        Args:
            session: only this one.
            cursor: of the former report; go on until that is None.
            limit: bodies to look at, 1 to 10,000; a Session without any counts as one.
            strangers: remove bodies that no record of this store knows, too. In an object store that other records use
                under the same prefix, THEIR BODIES ARE SUCH: look at what `dry_run` tells before.
            dry_run: say what would go, and change nothing.

        Raises:
            Unavailable: the object store cannot be reached, or does not let this in.
        """
        if session is not None:
            check_key(session)
        report = await self._backend.sweep_objects(
            session=session, cursor=cursor, limit=limit, strangers=strangers, dry_run=dry_run
        )
        if not dry_run and (report.swept or report.strangers):
            log.info(
                "%d bodies that nobody refers to are removed, %d bytes, and %d that no record knows",
                report.swept,
                report.swept_bytes,
                len(report.strangers or ()) + report.more,
            )
        return report

    async def drop_session(self, session: SessionKey, *, reason: str = "", dry_run: bool = False) -> DropReceipt:
        """Drop a closed Session: timeline, history, Turns, checkpoints, workspaces, all of it. There is no way back.

        From the first commit on nobody can read or write it, and a follower ends with `SessionDropped`. Then it goes in
        slices, each a short commit. Stopped, cancelled or killed at any point, it stays a Session that is being
        dropped; called again, this goes on. Its bodies in the object store are marked for the sweep.

        Its name stays taken for ever, with a record of what was dropped, when and why: that is the receipt, which a
        repeat returns. Were the name free again, a request id of it could run a second time (D16).

        Args:
            session: closed (`DurableSession.close`), so that nothing of it is at work or waits.
            reason: why, for the record: at most REASON_CHARS_MAX characters, and nothing private.
            dry_run: say what would go, and change nothing.

        Raises:
            NotFound: there is no such Session.
            NotClosed: it is open.
        """
        check_key(session)
        if len(reason) > REASON_CHARS_MAX:
            raise InvalidRequest(f"a reason has at most {REASON_CHARS_MAX} characters", path="reason")
        if dry_run:
            return await self._backend.query(GetDropped(session=session), audience=Audience.OPERATOR)
        command = DropSession(session=session, reason=reason)
        while True:
            dropped: Dropped = await self._backend.execute(command, audience=Audience.OPERATOR)
            if not dropped.more:
                break
        receipt = dropped.receipt
        log.info(
            "session %s is dropped: %d commits and %d records are gone",
            session.session_id,
            receipt.commits,
            receipt.records,
            extra=_of(session),
        )
        return receipt

    async def retain(
        self,
        *,
        closed_older_than: Timeout | None = None,
        events_older_than: Timeout | None = None,
        checkpoints_older_than: Timeout | None = None,
        cursor: str | None = None,
        limit: int = PAGE_LIMIT,
        dry_run: bool = False,
    ) -> RetainReport:
        """One round over the Sessions of all namespaces: drop what has been closed for long, prune what is old.

        Looks at `limit` Sessions; go on with the report's cursor until it is None. Nothing is dropped for its age that
        was not asked for, and nothing that is open. A drop that was begun is finished, whichever age is given.

        Args:
            closed_older_than: drop Sessions that were closed at least this long ago; seconds or a timedelta.
            events_older_than: prune events of the others that are so old, as `prune_events` does.
            checkpoints_older_than: prune settled positions of the others' Threads, as `prune_checkpoints` does.
            cursor: of the former round.
            limit: Sessions looked at, 1 to 1000.
            dry_run: say which Sessions would be dropped, and change nothing.

        Raises:
            InvalidRequest: none of the three was given, or an age is not 0 or more.
        """
        ages = {
            "closed_older_than": closed_older_than,
            "events_older_than": events_older_than,
            "checkpoints_older_than": checkpoints_older_than,
        }
        if all(age is None for age in ages.values()):
            raise InvalidRequest(
                "say what is too old: closed sessions, events or checkpoints", path="closed_older_than"
            )
        for name, age in ages.items():
            if age is not None:
                _ = milliseconds(age, name)
        never = closed_older_than is None
        question = ListClosed(
            older_than_ms=0 if closed_older_than is None else milliseconds(closed_older_than),
            cursor=cursor,
            limit=limit,
        )
        page: Page = await self._backend.query(question, audience=Audience.OPERATOR)
        dropped: list[SessionKey] = []
        damaged: list[SessionKey] = []
        events = positions = 0
        for one in page:
            try:
                # What is being dropped was asked for, whatever this round is about, and only goes on.
                if one.status.gone or (one.aged and not never):
                    if not dry_run:
                        _ = await self.drop_session(one.session, reason=RETAINED)
                    dropped.append(one.session)
                    continue
                if dry_run:
                    continue
                if events_older_than is not None:
                    events += (await self.prune_events(one.session, older_than=events_older_than)).dropped
                if checkpoints_older_than is not None:
                    positions += await self._prune_threads(one.session, checkpoints_older_than)
            except SessionDropped:
                # Somebody else drops it meanwhile.
                continue
            except CorruptRecord as error:
                # One that is damaged keeps no other from being let go, today and every day.
                log.warning("session %s is passed over: %s", one.session.session_id, error, extra=_of(one.session))
                damaged.append(one.session)
        return RetainReport(
            looked=len(page),
            dropped=tuple(dropped),
            events=events,
            positions=positions,
            damaged=tuple(damaged),
            cursor=page.cursor,
        )

    async def _prune_threads(self, session: SessionKey, older_than: Timeout) -> int:
        positions, cursor = 0, None
        while True:
            page: Page = await self._backend.query(
                ListThreads(session=session, cursor=cursor), audience=Audience.OPERATOR
            )
            for thread in page:
                key = ThreadKey(session, thread.thread_id)
                positions += (await self.prune_checkpoints(key, older_than=older_than)).positions
            cursor = page.cursor
            if cursor is None:
                return positions


def _of(session: SessionKey) -> dict[str, str]:
    """The identity of a Session in a line of the log (D25)."""
    return {"namespace": session.namespace, "session_id": session.session_id}


def milliseconds(time: Timeout, path: str = "after") -> int:
    seconds = time.total_seconds() if isinstance(time, timedelta) else time
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise InvalidRequest("a time is a number of seconds from 0 on, or a timedelta", path=path)
    return int(seconds * 1000)
