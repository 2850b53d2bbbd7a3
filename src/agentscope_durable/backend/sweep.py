"""Removes large bodies that nobody refers to, and on request what no record knows (D11).

Rule 1: mark, remove, forget. Each page is marked in one commit, then removed, then forgotten in another: killed
anywhere, the next sweep goes on with what is marked. Neither hosts nor other sweeps mind one (domain/objects).
Rule 2: what no record knows is judged by a reading of the records that is younger than the listing. A body is marked
before it is put, under a name that was never used: what was listed and has no mark then will never have one.
Rule 3: a call looks at a bounded number of bodies and says where to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.commands import ForgetObjects, ObjectsMarked, SweepObjects
from agentscope_durable.contracts.errors import InvalidCursor, InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import ObjectRecord, decode
from agentscope_durable.contracts.views import SweepReport
from agentscope_durable.domain.objects import SWEEP_PAGE, judged
from agentscope_durable.spi.inspection import InspectedObjects
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.spi.record_store import Range, Reads, RecordStore, SessionScan

__all__ = ["STRANGERS_MAX", "SWEEP_LIMIT_MAX", "Place", "Sweep", "place_of"]

SWEEP_LIMIT_MAX: Final = 10_000
"""Bodies one call looks at, at most."""
STRANGERS_MAX: Final = 100
"""Bodies that no record knows which a report lists; the rest it counts."""
SESSIONS_PAGE: Final = 200
FOLDERS_PAGE: Final = 100

Execute = Callable[[Any], Awaitable[Any]]


class Sweep:
    """One call. A cursor is `s:<name>:<session>` in the Sessions, `f:<name>:<folder>` in what belongs to none."""

    def __init__(
        self,
        records: RecordStore,
        objects: ObjectStore,
        execute: Execute,
        *,
        limit: int,
        strangers: bool,
        dry_run: bool,
    ) -> None:
        if not 1 <= limit <= SWEEP_LIMIT_MAX:
            raise InvalidRequest(f"a sweep looks at 1 to {SWEEP_LIMIT_MAX} bodies, not {limit}", path="limit")
        self._records = records
        self._objects = objects
        self._execute = execute
        self._left = limit
        self._strangers = strangers
        self._dry_run = dry_run
        self._looked_at = self._swept = self._swept_bytes = self._pending = self._more = 0
        self._strange: list[str] = []

    async def run(self, session: SessionKey | None, cursor: str | None) -> SweepReport:
        place = place_of(cursor)
        if session is not None:
            name = keys.partition(session)
            if place.folder is not None or place.partition not in ("", name):
                raise InvalidCursor("this cursor is of another sweep", path="cursor")
            return self._report(await self._session(name, place.after))
        if place.folder is None:
            if place.partition and (stopped := await self._session(place.partition, place.after)):
                return self._report(stopped)
            async for name in self._sessions(place.partition):
                if stopped := await self._session(name, ""):
                    return self._report(stopped)
        return self._report(await self._folders(place.folder or "", place.after) if self._strangers else None)

    def _report(self, cursor: str | None) -> SweepReport:
        return SweepReport(
            looked_at=self._looked_at,
            swept=self._swept,
            swept_bytes=self._swept_bytes,
            pending=self._pending,
            strangers=tuple(self._strange) if self._strangers else None,
            more=self._more,
            cursor=cursor,
            dry_run=self._dry_run,
        )

    async def _sessions(self, after: str) -> AsyncIterator[str]:
        while True:
            names = await self._records.sessions(SessionScan(prefix="", after=after, limit=SESSIONS_PAGE))
            for name in names:
                yield name
            if len(names) < SESSIONS_PAGE:
                return
            after = names[-1]

    async def _session(self, partition: str, after: str) -> str | None:
        """Sweep one Session; where to go on, None when it is done."""
        session = keys.session_of(partition)
        while True:
            if self._left <= 0:
                return f"s:{after}:{keys.spell(session)}"
            limit = min(SWEEP_PAGE, self._left)
            marked = await self._marked(session, after, limit)
            self._looked_at += marked.looked_at
            # A Session without bodies was looked at, too.
            self._left -= max(marked.looked_at, 1)
            self._swept += len(marked.names)
            self._swept_bytes += marked.size
            self._pending += marked.pending
            if marked.names and not self._dry_run:
                await asyncio.gather(*(self._objects.delete(partition, name) for name in marked.names))
                await self._execute(ForgetObjects(session=session, names=marked.names))
            if self._strangers:
                await self._unknown(partition, after, marked.after)
            if marked.after is None:
                return None
            after = marked.after

    async def _marked(self, session: SessionKey, after: str, limit: int) -> ObjectsMarked:
        if not self._dry_run:
            return await self._execute(SweepObjects(session=session, after=after, limit=limit))
        page = Range(keys.OBJECTS, keys.object_(after) if after else "", limit)
        records = await self._records.read(keys.partition(session), Reads(ranges=(page,)))
        found = [(key, decode(ObjectRecord, data, key=key)) for key, data in records.ranges[page]]
        return judged(found, limit, records.now_ms)[0]

    async def _unknown(self, partition: str, after: str, through: str | None) -> None:
        """Bodies of a Session with a name above `after`, up to `through`, that no record knows."""
        while True:
            names = await self._objects.list(partition, after, SWEEP_PAGE)
            near = [name for name in names if through is None or name <= through]
            marks = tuple(map(keys.object_, near))
            known = (await self._records.read(partition, Reads(keys=marks))).keys
            strange = [name for name in near if keys.object_(name) not in known]
            self._found([f"{keys.spell(keys.session_of(partition))}: {name}" for name in strange])
            if not self._dry_run:
                await asyncio.gather(*(self._objects.delete(partition, name) for name in strange))
            if len(names) < SWEEP_PAGE or len(near) < len(names):
                return
            after = names[-1]

    def _found(self, strange: list[str]) -> None:
        room = STRANGERS_MAX - len(self._strange)
        self._strange += strange[:room]
        self._more += len(strange[room:])

    async def _folders(self, folder: str, after: str) -> str | None:
        """Bodies of Sessions that are not in these records: the rest of a folder, then the folders behind it."""
        objects = self._objects
        if not isinstance(objects, InspectedObjects):
            return None
        if folder and (stopped := await self._folder(objects, folder, after)):
            return stopped
        while True:
            folders = await objects.folders(folder, FOLDERS_PAGE)
            for strange in await self._without_session(objects, folders):
                if stopped := await self._folder(objects, strange, ""):
                    return stopped
            if len(folders) < FOLDERS_PAGE:
                return None
            folder = folders[-1]

    async def _folder(self, objects: InspectedObjects, folder: str, after: str) -> str | None:
        while True:
            if self._left <= 0:
                return f"f:{after}:{folder}"
            names = await objects.names_in(folder, after, min(SWEEP_PAGE, self._left))
            # Listed before this is asked: had the Session been made since, its bodies would have been put later still.
            if not names or not await self._without_session(objects, [folder]):
                return None
            self._left -= len(names)
            self._looked_at += len(names)
            self._found([f"{folder}: {name}" for name in names])
            if not self._dry_run:
                await asyncio.gather(*(objects.remove_from(folder, name) for name in names))
            after = names[-1]

    async def _without_session(self, objects: InspectedObjects, folders: list[str]) -> list[str]:
        left = set(folders)
        if left:
            async for name in self._sessions(""):
                left.discard(objects.folder_of(name))
        return sorted(left)


class Place(NamedTuple):
    """Where a sweep goes on."""

    partition: str = ""
    folder: str | None = None
    after: str = ""


def place_of(cursor: str | None) -> Place:
    if cursor is None:
        return Place()
    if not isinstance(cursor, str):
        raise InvalidCursor("this is no cursor of a sweep", path="cursor")
    kind, _, rest = cursor.partition(":")
    after, colon, place = rest.partition(":")
    if kind == "f" and colon:
        return Place(folder=place, after=after)
    namespace, slash, identifier = place.partition("/")
    if kind != "s" or not slash:
        raise InvalidCursor("this is no cursor of a sweep", path="cursor")
    session = SessionKey(keys.unescape(namespace), keys.unescape(identifier))
    return Place(partition=keys.partition(session), after=after)
