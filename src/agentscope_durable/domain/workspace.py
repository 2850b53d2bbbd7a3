"""The files of a Thread: entries that change with the owner's commit, and come back with a checkpoint.

Rule 1: an entry changes in an owner's commit and nowhere else, so it is fenced as everything is (WS-06), and what made
it and what came of that are one truth (WS-07).
Rule 2: a version is compared and never comes back: a new entry begins above every version that was removed, which its
owner knows when it writes. A number says which content it is and stays with that content.
Rule 3: a content is stored once and never changed. What an earlier Turn left is kept when it is replaced, under the
position of the commit that did so: from the present entries and what was replaced since, every settled position can be
told (CK-07). What the same Turn wrote and wrote over was never settled, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES, Body
from agentscope_durable.contracts.change import Reads
from agentscope_durable.contracts.commands import EntryCommit
from agentscope_durable.contracts.errors import EntryConflict, InvalidRequest, LimitExceeded, TooLarge
from agentscope_durable.contracts.records import EntryRecord, UsesRecord, WorkspaceRecord
from agentscope_durable.contracts.views import EntryView
from agentscope_durable.contracts.workspace import (
    ENTRIES_MAX,
    ENTRY_BYTES_MAX,
    WORKSPACE_BYTES_MAX,
    check_path,
    path_text,
)
from agentscope_durable.domain.change import Draft


def reads_entries(thread_id: str, entries: Iterable[EntryCommit]) -> Reads:
    wanted = [keys.workspace(thread_id)]
    for entry in entries:
        wanted.append(keys.entry(thread_id, check_path(entry.path, path="workspace")))
        if entry.content is not None:
            wanted.append(keys.content(thread_id, entry.number))
        elif entry.version:
            wanted.append(keys.uses(thread_id, entry.number))
    return Reads(keys=tuple(dict.fromkeys(wanted)))


def commit_entries(draft: Draft, thread_id: str, at: int, entries: Iterable[EntryCommit], *, turn_id: str = "") -> None:
    """Make changes of entries true, each on top of the one before it.

    Args:
        at: stream position of this commit.
        turn_id: the Turn that makes them; "" for a restore or a fork, which alone may name a content that is stored.

    Raises:
        EntryConflict: an entry has another version than expected.
        InvalidRequest: a version that was used before, a number of another content.
        TooLarge, LimitExceeded: a bound of the workspace.
    """
    # Each restore is an author of its own: what it put there is settled, as what an earlier Turn left.
    author = turn_id or f"@{at}"
    key = keys.workspace(thread_id)
    counted = draft.get(key, WorkspaceRecord) or WorkspaceRecord()
    entries = tuple(entries)
    there = [draft.get(keys.entry(thread_id, entry.path), EntryRecord) for entry in entries]
    draft.require(large_contents(thread_id, (before for before in there if before and before.author == author)))
    for entry in entries:
        if turn_id and entry.version and entry.content is None:
            raise InvalidRequest("an entry is put with its content", path="workspace")
        counted = _commit_entry(draft, thread_id, author, at, entry, counted)
    if counted.entries > ENTRIES_MAX:
        raise LimitExceeded("ENTRIES_MAX", ENTRIES_MAX)
    if counted.size > WORKSPACE_BYTES_MAX:
        raise TooLarge("workspace", size_bytes=counted.size, limit_bytes=WORKSPACE_BYTES_MAX)
    draft.put(key, counted)


def _commit_entry(
    draft: Draft, thread_id: str, author: str, at: int, entry: EntryCommit, counted: WorkspaceRecord
) -> WorkspaceRecord:
    key = keys.entry(thread_id, entry.path)
    before = draft.get(key, EntryRecord)
    present = 0 if before is None else before.version
    if entry.expected != present:
        raise EntryConflict(path_text(entry.path), expected=entry.expected, actual=present)
    if before is not None:
        if before.author != author:
            draft.put(keys.former(thread_id, at, entry.path), before)
        elif before.number != entry.number:
            drop_content(draft, thread_id, before)
    counted = replace(
        counted,
        entries=counted.entries - (before is not None) + (entry.version > 0),
        size=counted.size - (0 if before is None else before.size) + (entry.size if entry.version else 0),
    )
    if not entry.version:
        draft.delete(key)
        return replace(counted, floor=max(counted.floor, present))
    if entry.version <= present:
        raise InvalidRequest(f"version {entry.version} of {path_text(entry.path)!r} was used before", path="workspace")
    if entry.size > ENTRY_BYTES_MAX:
        raise TooLarge("workspace entry", size_bytes=entry.size, limit_bytes=ENTRY_BYTES_MAX)
    _store(draft, thread_id, entry, counted)
    draft.put(
        key,
        EntryRecord(
            version=entry.version,
            number=entry.number,
            size=entry.size,
            modified_ms=entry.modified_ms or draft.now_ms,
            at=at,
            author=author,
        ),
    )
    return replace(counted, numbers=max(counted.numbers, entry.number))


def large_contents(thread_id: str, records: Iterable[EntryRecord]) -> tuple[str, ...]:
    """What `drop_content` reads: the records that refer to a body in the object store."""
    large = (record.number for record in records if record.size > INLINE_MAX_BYTES)
    return tuple(dict.fromkeys(keys.content(thread_id, number) for number in large))


def drop_content(draft: Draft, thread_id: str, record: EntryRecord) -> None:
    """A content goes, and with it its claim on a body in the object store."""
    for key in large_contents(thread_id, (record,)):
        content = draft.get(key, Body)
        if content is not None:
            draft.release(content)
    draft.delete(keys.content(thread_id, record.number))


def _store(draft: Draft, thread_id: str, entry: EntryCommit, counted: WorkspaceRecord) -> None:
    """The entry's content under its number, if it is a new one."""
    key = keys.content(thread_id, entry.number)
    if entry.content is None:
        if not 1 <= entry.number <= counted.numbers:
            raise InvalidRequest(f"there is no content number {entry.number}", path="workspace")
        # What it comes back from refers to it, too: neither may take it away from the other.
        uses = keys.uses(thread_id, entry.number)
        more = (draft.get(uses, UsesRecord) or UsesRecord(0)).more + 1
        draft.put(uses, UsesRecord(more))
        return
    if entry.number < 1 or draft.has(key):
        raise InvalidRequest(f"content number {entry.number} is another content's", path="workspace")
    draft.put(key, entry.content)
    draft.refer(entry.content, removable=True)


def count_on(draft: Draft, thread_id: str, *, floor: int, numbers: int) -> None:
    """New entries begin above this version, new contents above this number: both were seen by who remembers them."""
    key = keys.workspace(thread_id)
    counted = draft.get(key, WorkspaceRecord) or WorkspaceRecord()
    on = replace(counted, floor=max(counted.floor, floor), numbers=max(counted.numbers, numbers))
    if on != counted:
        draft.put(key, on)


# ---- what a restore changes ----


def entries_to_restore(
    present: Iterable[EntryView], wanted: Iterable[EntryView], floor: int
) -> tuple[EntryCommit, ...]:
    """The changes after which a workspace has the entries it once had. Contents are there already, under their numbers.

    Args:
        present: entries now.
        wanted: entries at the position to come back to.
        floor: of the workspace now.
    """
    there = {entry.path: entry for entry in present}
    back = {entry.path: entry for entry in wanted}
    changes = [EntryCommit(path=path, expected=entry.version) for path, entry in there.items() if path not in back]
    for path, entry in back.items():
        now = there.get(path)
        if now is None or now.number != entry.number:
            version = 0 if now is None else now.version
            changes.append(
                EntryCommit(
                    path=path,
                    expected=version,
                    version=max(version, floor) + 1,
                    number=entry.number,
                    size=entry.size_bytes,
                    modified_ms=entry.modified_at_ms,
                )
            )
    return tuple(changes)
