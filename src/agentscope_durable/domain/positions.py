"""Which settled positions of a Thread are kept, and what its workspace keeps for them.

Rule 1: the position a Thread stands on stays, whatever is asked. So does everything that a position which stays needs:
its rows of the log are never touched here, and of the workspace's former versions only those go that no position which
stays can tell from.
Rule 2: the oldest go first, so one number says which are gone. Asking for one of them says that it was dropped, and
never gives half of it (C69).
Rule 3: a content goes with the last one that refers to it. A restore makes a second one refer to it, and counts.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Range, Reads, Unchanged, View
from agentscope_durable.contracts.checkpoint import position_of
from agentscope_durable.contracts.commands import PositionsPruned, PruneCheckpoints
from agentscope_durable.contracts.errors import CheckpointPruned
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.records import CheckpointRecord, EntryRecord, ThreadRecord, UsesRecord, ordinal_of
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.workspace import drop_content, large_contents

__all__ = ["POSITIONS_BATCH", "check_kept", "prune_checkpoints", "reads_prune_checkpoints"]

POSITIONS_BATCH: Final = 100
"""Settled positions, and former versions of entries, that one batch drops."""


def _checkpoints(thread_id: str) -> Range:
    # One more: the first that stays says which former versions are needed.
    return Range(keys.checkpoints(thread_id), limit=POSITIONS_BATCH + 1)


def _formers(thread_id: str) -> Range:
    return Range(keys.formers(thread_id), limit=POSITIONS_BATCH)


def reads_prune_checkpoints(c: PruneCheckpoints) -> Reads:
    return Reads(keys=(keys.thread(c.thread_id),), ranges=(_checkpoints(c.thread_id), _formers(c.thread_id)))


def prune_checkpoints(c: PruneCheckpoints, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Drop the next batch of settled positions that may go."""
    draft = begin(view, c.session, seed, now_ms)
    thread = draft.thread(c.thread_id)
    there = [
        (ordinal_of(key, keys.checkpoints(c.thread_id)), record)
        for key, record in draft.page(_checkpoints(c.thread_id), CheckpointRecord)
    ]

    def goes(one: tuple[int, CheckpointRecord]) -> bool:
        at, record = one
        wanted = c.through is None or at <= c.through
        return at < thread.settled_at and wanted and record.created_ms <= now_ms - c.older_than_ms

    gone = list(takewhile(goes, there[:POSITIONS_BATCH]))
    through = max(thread.pruned_at, gone[-1][0] if gone else 0)
    for at, _ in gone:
        draft.delete(keys.checkpoint(c.thread_id, at))
    # Nothing is known of the next one when all that was read goes: then only what those needed.
    needed_from = there[len(gone)][1].through if len(gone) < len(there) else through
    versions, more = _drop_formers(draft, c.thread_id, needed_from if through else 0)
    receipt = PositionsPruned(
        through=through,
        positions=len(gone),
        versions=versions,
        more=len(gone) == POSITIONS_BATCH or more,
    )
    if not gone and not versions:
        return Unchanged(receipt)
    draft.put(keys.thread(c.thread_id), replace(thread, pruned_at=through))
    return replace(draft.change(receipt), hints=())


def _drop_formers(draft: Draft, thread_id: str, through: int) -> tuple[int, bool]:
    """Drop what was replaced up to that position: what stood there before is told by no position that stays."""
    page = _formers(thread_id)
    found = [(key, record) for key, record in draft.page(page, EntryRecord) if keys.former_at(key) <= through]
    counts = dict.fromkeys(keys.uses(thread_id, record.number) for _, record in found)
    draft.require((*counts, *large_contents(thread_id, (record for _, record in found))))
    for key, record in found:
        draft.delete(key)
        uses = keys.uses(thread_id, record.number)
        counted = draft.get(uses, UsesRecord)
        if counted is None:
            drop_content(draft, thread_id, record)
        elif counted.more > 1:
            draft.put(uses, UsesRecord(counted.more - 1))
        else:
            draft.delete(uses)
    return len(found), len(found) == page.limit


def check_kept(session: SessionKey, thread: ThreadRecord, at: int) -> None:
    """
    Raises:
        CheckpointPruned: there is nothing of this position any more, if it ever was one.
    """
    if 0 < at <= thread.pruned_at:
        raise CheckpointPruned(thread.thread_id, position_of(ThreadKey(session, thread.thread_id), at))
