"""The life of a large body in the object store: marked, put, referred to; or never referred to, and swept (D11, OB-08).

Rule 1: the mark stands before the object does, and the object before the commit that refers to it. A crash in between
leaves an object that has a mark, never a reference to nothing.
Rule 2: a commit that refers to a body finds its mark, which is not one of a removal. So of a sweep and a commit that
meet, whichever commits first wins: the body stays, or the commit is refused and its body put anew.
Rule 3: what is being removed stays so until it is removed. Its name is never used again: a content that comes back has
another one. So it does not matter how late a removal arrives, nor how often.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import object_name
from agentscope_durable.contracts.change import Change, Range, Reads, Unchanged, View
from agentscope_durable.contracts.commands import (
    Done,
    ForgetObjects,
    ObjectMarked,
    ObjectsMarked,
    RecordObject,
    SweepObjects,
)
from agentscope_durable.contracts.errors import InvalidRequest, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import ObjectRecord, ObjectState
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import Draft, begin

__all__ = [
    "GENERATIONS_MAX",
    "ORPHAN_AGE_MS",
    "SWEEP_PAGE",
    "forget_objects",
    "is_orphan",
    "judged",
    "reads_forget",
    "reads_record_object",
    "reads_sweep",
    "record_object",
    "sweep_objects",
]

ORPHAN_AGE_MS: Final = 24 * 3_600_000
"""A body that no commit has referred to for so long is referred to by none (D11)."""
SWEEP_PAGE: Final = 100
"""Objects one commit of a sweep looks at."""
GENERATIONS_MAX: Final = 16
"""Objects of one content that are looked at for one to use. Several there are only while sweeps are cut short."""


def is_orphan(record: ObjectRecord, now_ms: int) -> bool:
    """Whether nobody refers to it, and nobody is about to."""
    if record.state is ObjectState.SWEEPING:
        return True
    return record.state is ObjectState.PENDING and now_ms - record.marked_ms > ORPHAN_AGE_MS


def _generations(digest: str) -> Range:
    return Range(keys.objects_of(digest), limit=GENERATIONS_MAX)


def reads_record_object(c: RecordObject) -> Reads:
    return Reads(ranges=(_generations(c.digest),))


def record_object(c: RecordObject, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Mark a body as pending before it is put, so that a sweep can tell an orphan."""
    draft = begin(view, c.session, seed, now_ms)
    name = object_name(c.digest, ids.object_tag(seed))
    for key, known in draft.page(_generations(c.digest), ObjectRecord):
        if known.state is ObjectState.SWEEPING:
            continue
        name = key.removeprefix(keys.OBJECTS)
        if known.state is ObjectState.REFERENCED:
            return Unchanged(ObjectMarked(name=name, referenced=True))
        break
    draft.put(keys.object_(name), ObjectRecord(state=ObjectState.PENDING, size=c.size, marked_ms=now_ms))
    return draft.change(ObjectMarked(name=name, referenced=False))


def _of_any_session(view: View, session: SessionKey, seed: bytes, now_ms: int) -> Draft:
    """Also of a Session that is dropped: its marks are all that is left of its bodies."""
    if view.head is None:
        raise NotFound("session", keys.spell(session))
    return Draft(view, session, seed, now_ms, view.head)


def _page(c: SweepObjects) -> Range:
    if not 1 <= c.limit <= SWEEP_PAGE:
        raise InvalidRequest(f"a page has 1 to {SWEEP_PAGE} objects, not {c.limit}", path="limit")
    return Range(keys.OBJECTS, keys.object_(c.after) if c.after else "", c.limit)


def reads_sweep(c: SweepObjects) -> Reads:
    return Reads(ranges=(_page(c),))


def sweep_objects(c: SweepObjects, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Mark first, remove then: from this commit on nobody can refer to what it names."""
    draft = _of_any_session(view, c.session, seed, now_ms)
    receipt, fresh = judged(list(draft.page(_page(c), ObjectRecord)), c.limit, now_ms)
    if not fresh:
        return Unchanged(receipt)
    for key, record in fresh.items():
        draft.put(key, ObjectRecord(state=ObjectState.SWEEPING, size=record.size, marked_ms=now_ms))
    # Nobody waits for it.
    return replace(draft.change(receipt), hints=())


def judged(
    found: list[tuple[str, ObjectRecord]], limit: int, now_ms: int
) -> tuple[ObjectsMarked, dict[str, ObjectRecord]]:
    """What of a page goes, and which of that is not marked for it yet."""
    orphans = {key: record for key, record in found if is_orphan(record, now_ms)}
    fresh = {key: record for key, record in orphans.items() if record.state is not ObjectState.SWEEPING}
    pending = sum(record.state is ObjectState.PENDING for _, record in found)
    receipt = ObjectsMarked(
        names=tuple(key.removeprefix(keys.OBJECTS) for key in orphans),
        size=sum(record.size for record in orphans.values()),
        pending=pending - len(fresh),
        looked_at=len(found),
        after=None if len(found) < limit else found[-1][0].removeprefix(keys.OBJECTS),
    )
    return receipt, fresh


def reads_forget(c: ForgetObjects) -> Reads:
    return Reads(keys=tuple(map(keys.object_, c.names)))


def forget_objects(c: ForgetObjects, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """They are gone, and so are their marks. What is not being removed is left alone."""
    draft = _of_any_session(view, c.session, seed, now_ms)
    gone = False
    for name in c.names:
        known = draft.get(keys.object_(name), ObjectRecord)
        if known is not None and known.state is ObjectState.SWEEPING:
            gone = True
            draft.delete(keys.object_(name))
    if not gone:
        return Unchanged(Done(changed=False))
    return replace(draft.change(Done(changed=True)), hints=())
