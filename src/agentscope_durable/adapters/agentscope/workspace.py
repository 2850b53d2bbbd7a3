"""The durable workspace of a Thread, as its agent's code uses it: JSON values by namespace and key, with versions.

Rule 1: a write is true in one of the Run's commits, under its fence and at its position; there is no other way (WS-06).
Rule 2: a write becomes true together with what its code comes to. Code that a later Run may go through again (a tool
that is safe to repeat, a middleware, an offloader) has its writes held back until the commit of that: then it was all
done, or nothing of it, and doing it again does it once (WS-07). A tool that is never run again writes at once: whatever
becomes of the tool, what it wrote is there.
Rule 3: one owner, one writer. What is read here is what this code has written, then what its Run has, then what is
committed; so a version that is compared here is the one that is compared in the commit.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from agentscope_durable.adapters.agentscope.context import beside_calls, current_origin
from agentscope_durable.adapters.agentscope.increments import Increment
from agentscope_durable.contracts import durable_json, keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.change import PAGE_MAX
from agentscope_durable.contracts.commands import EntryCommit
from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import (
    EntryBusy,
    EntryConflict,
    InvalidCursor,
    InvalidRequest,
    LimitExceeded,
    Misuse,
    TooLarge,
)
from agentscope_durable.contracts.views import EntryView, Page, WorkspaceView
from agentscope_durable.contracts.workspace import (
    ENTRIES_MAX,
    ENTRY_BYTES_MAX,
    WORKSPACE_BYTES_MAX,
    EntryPath,
    check_namespace,
    check_path,
    path_text,
)
from agentscope_durable.spi.harness import RunContext

__all__ = ["DurableWorkspace", "WorkspaceEntry", "WorkspaceItem"]

RUN: Final = ""
"""The place of code outside any tool call."""
SEARCH_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of values in one page of a search. A page ends early rather than hold more; one item always fits."""


class WorkspaceEntry(Discreet, frozen=True):
    """That there is an entry.

    Attributes:
        namespace, key: where it is.
        version: rises with every change of this entry.
        number: which content it has. A change of any entry takes the next number; a content that a restore brings back
            has its old one again.
        size_bytes: of its value as JSON.
    """

    namespace: tuple[str, ...]
    key: str
    version: int
    number: int
    size_bytes: int


class WorkspaceItem(WorkspaceEntry, frozen=True):
    """An entry with its value. A value is the caller's own: changing it changes nothing that is stored."""

    value: Any


@dataclass(slots=True)
class _Change:
    """A write that is not known to be committed.

    Attributes:
        expected: version of the entry that it replaces; 0: none.
        size_before: bytes of that one.
        version: 0: the entry is removed.
        last: the highest version the entry had on the way here.
    """

    expected: int
    size_before: int
    version: int
    last: int
    number: int = 0
    size: int = 0
    content: Body | None = None

    @property
    def empty(self) -> bool:
        """The entry was made and removed again before anybody else could see it."""
        return not self.expected and not self.version

    @property
    def grows(self) -> tuple[int, int]:
        """Entries and bytes that there are more of by it."""
        return (self.version > 0) - (self.expected > 0), self.size - self.size_before

    def entry(self, path: EntryPath) -> EntryCommit:
        return EntryCommit(
            path=path,
            expected=self.expected,
            version=self.version,
            number=self.number,
            size=self.size,
            content=self.content,
        )


class _Counted:
    """What the workspace holds once all that was handed over is committed."""

    def __init__(self, view: WorkspaceView) -> None:
        self.entries = view.entries
        self.size = view.size_bytes
        self.numbers = view.numbers
        self.floor = view.floor

    def add(self, change: _Change) -> None:
        entries, size = change.grows
        self.entries += entries
        self.size += size
        if not change.version:
            self.floor = max(self.floor, change.expected)


class Commits(Protocol):
    """The Run that makes writes true."""

    async def commit(self, increment: Increment) -> Any: ...


class DurableWorkspace:
    """What `binding.workspace()` gives (WS-01). Belongs to one Run: it is used while that goes on.

    Values are JSON. Namespaces are lists of names, relative to this Thread of this Session, which no other one sees
    (WS-04).
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._run: Commits | None = None
        self._over = False
        self._lock = asyncio.Lock()
        self._counted: _Counted | None = None
        # Tool calls under way: whether their writes are held back.
        self._calls: dict[str, bool] = {}
        self._held: dict[str, dict[EntryPath, _Change]] = {RUN: {}}
        # Handed over to a commit that is not known to stand yet, in order.
        self._handed: list[tuple[int, dict[EntryPath, _Change]]] = []
        self._hands = 0

    # ---- what code of the agent uses ----

    async def get(self, namespace: Sequence[str], key: str) -> WorkspaceItem | None:
        """The entry, or None.

        Raises:
            InvalidRequest: a name is none.
        """
        path = check_path((*check_namespace(namespace), key), path="key")
        found = await self._find(path, self._place())
        return None if found is None else await self._item(path, found)

    async def search(self, namespace: Sequence[str] = (), *, cursor: str | None = None, limit: int = 100) -> Page:
        """Entries under a namespace, at any depth, with their values, in order of their paths.

        Returns a page of `WorkspaceItem`, its `cursor` None at the end. A page ends early when its values are large.
        """
        page = await self.entries(namespace, cursor=cursor, limit=limit)
        items: list[WorkspaceItem] = []
        size = 0
        for entry in page:
            size += entry.size_bytes
            if items and size > SEARCH_BYTES_MAX:
                return Page(tuple(items), _cursor(items[-1]))
            item = await self.get(entry.namespace, entry.key)
            if item is not None:
                items.append(item)
        return Page(tuple(items), page.cursor)

    async def entries(self, namespace: Sequence[str] = (), *, cursor: str | None = None, limit: int = 100) -> Page:
        """`search` without the values: a page of `WorkspaceEntry`."""
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PAGE_MAX:
            raise InvalidRequest(f"a limit is a whole number from 1 to {PAGE_MAX}", path="limit")
        under, after = check_namespace(namespace), place_after(cursor)
        if after and after[: len(under)] != under:
            raise InvalidCursor("this is a cursor of another namespace", path="cursor")
        found: list[WorkspaceEntry] = []
        async for entry in self._merged(under, after, limit + 1, self._place()):
            if len(found) == limit:
                return Page(tuple(found), _cursor(found[-1]))
            found.append(entry)
        return Page(tuple(found), None)

    async def put(self, namespace: Sequence[str], key: str, value: Any) -> int:
        """Write a JSON value, whatever was there before. Returns the entry's new version.

        Raises:
            InvalidRequest: a name is none, or the value is not JSON.
            TooLarge, LimitExceeded: a bound of the workspace.
            EntryBusy: another tool call that is under way has written it.
        """
        return await self._write(namespace, key, value, None)

    async def cas(self, namespace: Sequence[str], key: str, value: Any, *, expected_version: int) -> int:
        """Write a JSON value if the entry has the version the caller saw; 0: if there is no entry.

        Returns the entry's new version.

        Raises:
            EntryConflict: it has another version; nothing was written.
        """
        if isinstance(expected_version, bool) or not isinstance(expected_version, int) or expected_version < 0:
            raise InvalidRequest("an expected version is 0 or one that was got", path="expected_version")
        return await self._write(namespace, key, value, expected_version)

    async def delete(self, namespace: Sequence[str], key: str, *, expected_version: int | None = None) -> bool:
        """Remove an entry. Returns whether there was one.

        Args:
            expected_version: only if it has this version; None: in any case.

        Raises:
            EntryConflict: it has another version.
        """
        return await self._write(namespace, key, None, expected_version, remove=True) > 0

    # ---- reading ----

    def _check(self) -> None:
        if self._over:
            raise Misuse("this workspace belongs to a run that is over: take it from the binding of the present one")

    def _place(self) -> str:
        self._check()
        origin = None if beside_calls() else current_origin()
        return RUN if origin is None or origin.call_id not in self._calls else origin.call_id

    def _mine(self, place: str) -> Mapping[EntryPath, _Change]:
        """Writes that are not known to be committed, as the code at a place sees them."""
        seen: dict[EntryPath, _Change] = {}
        for _, changes in self._handed:
            seen.update(changes)
        seen.update(self._held[RUN])
        if place != RUN:
            seen.update(self._held[place])
        return seen

    async def _find(self, path: EntryPath, place: str) -> _Change | EntryView | None:
        change = self._mine(place).get(path)
        if change is not None:
            return change if change.version else None
        return await self._context.workspace_entry(path)

    async def _item(self, path: EntryPath, found: _Change | EntryView) -> WorkspaceItem:
        assert found.content is not None
        value = await self._context.open_body(found.content)
        return WorkspaceItem(path[:-1], path[-1], found.version, found.number, _stored_size(found), value)

    async def _merged(
        self, under: EntryPath, after: EntryPath, limit: int, place: str
    ) -> AsyncIterator[WorkspaceEntry]:
        """Committed entries and those written here, in order of their paths, from after a path on."""
        mine = self._mine(place)
        below = len(under)
        start = _order(after) if after else ""
        waiting = deque(
            sorted(
                (path for path in mine if len(path) > below and path[:below] == under and _order(path) > start),
                key=_order,
            )
        )
        ask = min(limit + len(waiting), PAGE_MAX)
        more = True
        while more:
            page = await self._context.workspace_entries(under, after=after, limit=ask)
            for entry in page:
                while waiting and _order(waiting[0]) < _order(entry.path):
                    path = waiting.popleft()
                    if mine[path].version:
                        yield _written(path, mine[path])
                if waiting and waiting[0] == entry.path:
                    path = waiting.popleft()
                    if mine[path].version:
                        yield _written(path, mine[path])
                else:
                    yield WorkspaceEntry(entry.path[:-1], entry.path[-1], entry.version, entry.number, entry.size_bytes)
            more = len(page) == ask
            if more:
                after = page[-1].path
        for path in waiting:
            if mine[path].version:
                yield _written(path, mine[path])

    # ---- writing ----

    async def _write(
        self, namespace: Sequence[str], key: str, value: Any, expected: int | None, *, remove: bool = False
    ) -> int:
        """The entry's new version; of a removal the one that was removed, 0 if there was none."""
        path = check_path((*check_namespace(namespace), key), path="key")
        size = 0 if remove else _size_of(value)
        place = self._place()
        # What is compared and what is written belong together. At most one commit long.
        async with self._lock:
            self._check()
            for call_id, held in self._held.items():
                if call_id not in (RUN, place) and path in held:
                    raise EntryBusy(path_text(path), call_id)
            found = await self._find(path, place)
            version = 0 if found is None else found.version
            if expected is not None and expected != version:
                raise EntryConflict(path_text(path), expected=expected, actual=version)
            if remove and not version:
                return 0
            change = await self._change(path, place, found, size, remove=remove)
            if not remove:
                change.content = await self._context.body(value)
            self._held[place][path] = change
            if self._calls.get(place, True):
                return version if remove else change.version
            # This call is not run again: whatever becomes of it, this is written.
            await self._commits().commit(Increment(workspace=self.hand_over(place)))
            return version if remove else change.version

    def _commits(self) -> Commits:
        assert self._run is not None, "a tool call begins in a run"
        return self._run

    async def _change(
        self, path: EntryPath, place: str, found: _Change | EntryView | None, size: int, *, remove: bool
    ) -> _Change:
        """
        Raises:
            TooLarge, LimitExceeded: the workspace would be beyond a bound.
        """
        counted = self._counted
        if counted is None:
            counted = self._counted = _Counted(await self._context.workspace())
        # In one place all writes of an entry are one change, of what there was before the first of them.
        held = self._held[place].get(path)
        last = self._last(path, place) or (0 if found is None else found.version) or counted.floor
        if held is not None:
            change = _Change(held.expected, held.size_before, 0 if remove else last + 1, max(last, held.last))
        else:
            version, size_before = (0, 0) if found is None else (found.version, _stored_size(found))
            change = _Change(version, size_before, 0 if remove else last + 1, last)
        if not remove:
            counted.numbers += 1
            change.number, change.size, change.last = counted.numbers, size, change.version
            self._fits(counted, change, held)
        return change

    def _last(self, path: EntryPath, place: str) -> int:
        """The highest version the entry had by writes that are not known to be committed; 0: there are none."""
        change = self._mine(place).get(path)
        return 0 if change is None else change.last

    def _fits(self, counted: _Counted, change: _Change, replaced: _Change | None) -> None:
        entries, size = counted.entries, counted.size
        for held in (*(one for changes in self._held.values() for one in changes.values()), change):
            if held is not replaced:
                more_entries, more_size = held.grows
                entries, size = entries + more_entries, size + more_size
        if entries > ENTRIES_MAX:
            raise LimitExceeded("ENTRIES_MAX", ENTRIES_MAX)
        if size > WORKSPACE_BYTES_MAX:
            raise TooLarge("workspace", size_bytes=size, limit_bytes=WORKSPACE_BYTES_MAX)

    # ---- what the Run does with it ----

    def attach(self, run: Commits) -> None:
        """From now on there is a Run whose commits make writes true."""
        self._run = run

    def begin_call(self, call_id: str, *, held: bool) -> None:
        """A tool call begins; `held`: its writes wait for its result."""
        self._calls[call_id] = held
        self._held[call_id] = {}

    def end_call(self, call_id: str) -> list[EntryCommit]:
        """The call's result is about to be committed, and with it what it has written."""
        entries = self.hand_over(call_id)
        self.drop_call(call_id)
        return entries

    def drop_call(self, call_id: str) -> None:
        """The call came to nothing: what it wrote and still held back is forgotten."""
        _ = self._calls.pop(call_id, None)
        _ = self._held.pop(call_id, None)

    def forget(self) -> None:
        """What code outside tools has held back is not made true: it was gone through only to be replayed."""
        self._held[RUN].clear()

    def hand_over(self, place: str = RUN) -> list[EntryCommit]:
        """Writes for the commit that is about to be accepted, in order: of code outside tools, then of this place."""
        entries: list[EntryCommit] = []
        for origin in dict.fromkeys((RUN, place)):
            held = self._held.get(origin, {})
            changes = {path: change for path, change in held.items() if not change.empty}
            held.clear()
            if not changes:
                continue
            assert self._counted is not None
            for path, change in changes.items():
                self._counted.add(change)
                entries.append(change.entry(path))
            self._hands += 1
            self._handed.append((self._hands, changes))
        return entries

    @property
    def handed(self) -> int:
        """How much was handed over so far; for `landed`."""
        return self._hands

    def landed(self, handed: int) -> None:
        """A commit stands, and everything that was handed over before it was accepted."""
        self._handed = [(number, changes) for number, changes in self._handed if number > handed]

    def close(self) -> None:
        """The Run is over; whoever still holds this is told so."""
        self._over = True


# ------------------------------------------------------------ parts


def _size_of(value: Any) -> int:
    """
    Raises:
        InvalidRequest: it is not JSON.
        TooLarge: it is more than an entry holds.
    """
    size = len(msgspec.json.encode(durable_json.value(value)))
    if size > ENTRY_BYTES_MAX:
        raise TooLarge("workspace entry", size_bytes=size, limit_bytes=ENTRY_BYTES_MAX)
    return size


def _stored_size(found: _Change | EntryView) -> int:
    return found.size if isinstance(found, _Change) else found.size_bytes


def _written(path: EntryPath, change: _Change) -> WorkspaceEntry:
    return WorkspaceEntry(path[:-1], path[-1], change.version, change.number, change.size)


def _order(path: EntryPath) -> str:
    """What the store orders entries by."""
    return keys.entry("", path)


def _cursor(entry: WorkspaceEntry) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((*entry.namespace, entry.key))).decode()


def place_after(cursor: str | None) -> EntryPath:
    if cursor is None:
        return ()
    try:
        return check_path(msgspec.json.decode(base64.b64decode(cursor, b"-_", validate=True), type=tuple[str, ...]))
    except (TypeError, ValueError, InvalidRequest, *UNREADABLE):
        raise InvalidCursor("this is not a cursor of a workspace", path="cursor") from None
