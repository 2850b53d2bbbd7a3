"""The life of a large body: what its mark says, and who wins when a sweep and a commit meet (D11, OB-08)."""

from __future__ import annotations

from typing import Any

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES, Body, body_of, object_digest
from agentscope_durable.contracts.errors import BodySwept, InvalidRequest, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import ObjectRecord, ObjectState
from agentscope_durable.domain.objects import ORPHAN_AGE_MS, SWEEP_PAGE
from tests.domain.stage import Stage

pytestmark = pytest.mark.spec("OB-08")

CONTENT = b'"large"'


def mark(stage: Stage, content: bytes = CONTENT) -> c.ObjectMarked:
    return stage.do(c.RecordObject(session=stage.session, digest=object_digest(content), size=len(content)))


def state(stage: Stage, name: str) -> ObjectState:
    return stage.get(keys.object_(name), ObjectRecord).state


def names(stage: Stage) -> set[str]:
    return {key.removeprefix(keys.OBJECTS) for key in stage.world.dump.records if key.startswith(keys.OBJECTS)}


def submit(stage: Stage, name: str, request_id: str = "large") -> Any:
    body = Body(name=name, size=len(CONTENT))
    command = c.SubmitTurn(session=stage.session, thread_id="main", request_id=request_id, content=body, digest="d")
    return stage.do(command)


def sweep(stage: Stage, **page: Any) -> c.ObjectsMarked:
    return stage.do(c.SweepObjects(session=stage.session, **page))


def forget(stage: Stage, *gone: str) -> c.Done:
    return stage.do(c.ForgetObjects(session=stage.session, names=gone))


def test_an_object_is_pending_until_something_refers_to_it() -> None:
    stage = Stage()
    marked = mark(stage)
    first = stage.get(keys.object_(marked.name), ObjectRecord)
    assert (first.state, first.size, first.marked_ms) == (ObjectState.PENDING, len(CONTENT), stage.clock())
    assert marked.name.startswith(f"{object_digest(CONTENT)}-") and not marked.referenced
    stage.pass_time(5)
    assert mark(stage) == marked, "the same content is the same object"
    assert stage.get(keys.object_(marked.name), ObjectRecord).marked_ms == stage.clock(), "put again, it is young again"

    submit(stage, marked.name)
    assert state(stage, marked.name) is ObjectState.REFERENCED
    assert mark(stage) == c.ObjectMarked(name=marked.name, referenced=True)
    assert stage.change is None


def test_a_commit_with_small_bodies_alone_asks_for_no_mark() -> None:
    stage = Stage()
    stage.submit()
    assert stage.rounds == 0
    submit(stage, mark(stage).name, "r2")
    assert stage.rounds == 1


def test_what_is_young_or_referred_to_is_left_alone() -> None:
    stage = Stage()
    used = mark(stage, b"used")
    submit(stage, used.name)
    young = mark(stage, b"young")
    stage.pass_time(ORPHAN_AGE_MS)
    assert sweep(stage) == c.ObjectsMarked(names=(), size=0, pending=1, looked_at=2, after=None)
    assert stage.change is None
    stage.pass_time(1)
    assert sweep(stage).names == (young.name,)
    assert names(stage) == {used.name, young.name}
    assert forget(stage, used.name, young.name) == c.Done(changed=True)
    assert names(stage) == {used.name}, "what is referred to is not forgotten, whoever says so"


def test_a_commit_that_comes_before_the_sweep_keeps_its_body() -> None:
    stage = Stage()
    marked = mark(stage)
    stage.pass_time(ORPHAN_AGE_MS + 1)
    submit(stage, marked.name)
    assert sweep(stage).names == ()
    assert state(stage, marked.name) is ObjectState.REFERENCED


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_commit_that_comes_after_the_sweep_is_refused_and_put_anew_it_is_another_object(forgotten: bool) -> None:
    stage = Stage()
    old = mark(stage)
    stage.pass_time(ORPHAN_AGE_MS + 1)
    assert sweep(stage).names == (old.name,)
    if forgotten:
        forget(stage, old.name)
    with stage.refuses(BodySwept) as refused:
        submit(stage, old.name)
    assert refused.value.name == old.name

    new = mark(stage)
    assert new.name != old.name and new.name[:64] == old.name[:64]
    submit(stage, new.name)
    # However late the former sweep ends, and however often it is done.
    assert sweep(stage).names == (() if forgotten else (old.name,))
    forget(stage, old.name)
    assert names(stage) == {new.name}
    assert state(stage, new.name) is ObjectState.REFERENCED


def test_what_was_never_marked_is_not_referred_to() -> None:
    stage = Stage()
    with stage.refuses(BodySwept):
        submit(stage, f"{'0' * 64}-{'0' * 16}")


def test_a_sweep_that_was_cut_short_is_taken_up_by_the_next() -> None:
    stage = Stage()
    marked = mark(stage)
    stage.pass_time(ORPHAN_AGE_MS + 1)
    first = sweep(stage)
    assert first.names == (marked.name,) and first.size == len(CONTENT)
    again = sweep(stage)
    assert again == first
    assert stage.change is None, "it was marked before"
    assert forget(stage, marked.name).changed
    assert not forget(stage, marked.name).changed
    assert sweep(stage) == c.ObjectsMarked(names=(), size=0, pending=0, looked_at=0, after=None)


def test_objects_are_looked_at_in_pages_of_bounded_size() -> None:
    stage = Stage()
    marked = {mark(stage, str(n).encode()).name for n in range(7)}
    stage.pass_time(ORPHAN_AGE_MS + 1)
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = sweep(stage, after=after, limit=3)
        assert page.looked_at <= 3
        found += page.names
        after = page.after
    assert found == sorted(marked)
    for limit in (0, SWEEP_PAGE + 1):
        with pytest.raises(InvalidRequest):
            sweep(stage, limit=limit)


def test_a_session_that_is_not_there_has_nothing_to_sweep() -> None:
    stage = Stage(create=False, session=SessionKey("app", "nobody's"))
    for command in (c.SweepObjects(session=stage.session), c.ForgetObjects(session=stage.session, names=("a",))):
        with stage.refuses(NotFound):
            stage.do(command)


# ---- what may go ----


class Files:
    """A Turn that writes files over with contents in the object store."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.owner = self.stage.running()
        self.versions: dict[str, int] = {}
        self.numbers = 0

    def put(self, path: str, name: str | None) -> None:
        """Write a file, or remove it: one commit."""
        before = self.versions.get(path, 0)
        if name is None:
            entry = c.EntryCommit(path=(path,), expected=before)
            del self.versions[path]
        else:
            self.numbers += 1
            self.versions[path] = version = self.numbers
            content = Body(name=name, size=LARGE)
            entry = c.EntryCommit(
                path=(path,), expected=before, version=version, number=self.numbers, size=LARGE, content=content
            )
        self.owner.step(workspace=(entry,))

    def known(self, name: str) -> tuple[ObjectState, int, bool]:
        found = self.stage.get(keys.object_(name), ObjectRecord)
        return found.state, found.uses, found.kept


LARGE = INLINE_MAX_BYTES + 1
"""What the commit says of its size; the bytes themselves no decision ever sees."""


def test_a_body_goes_with_the_last_file_that_refers_to_it_and_a_day_later() -> None:
    files = Files()
    stage, name = files.stage, mark(files.stage).name
    for path in ("a", "b"):
        files.put(path, name)
    assert files.known(name) == (ObjectState.REFERENCED, 2, False)
    files.put("a", None)
    stage.pass_time(ORPHAN_AGE_MS + 1)
    assert sweep(stage).names == ()
    files.put("b", mark(stage, b"other").name)
    assert files.known(name) == (ObjectState.PENDING, 0, False)
    assert sweep(stage).names == (), "who has read the record before is given a day to read the body"
    stage.pass_time(ORPHAN_AGE_MS + 1)
    assert sweep(stage).names == (name,)


def test_the_same_body_again_changes_nothing() -> None:
    files = Files()
    name = mark(files.stage).name
    for _ in range(3):
        files.put("a", name)
        assert files.known(name) == (ObjectState.REFERENCED, 1, False)


def test_what_something_that_stays_refers_to_stays() -> None:
    files = Files()
    name = mark(files.stage).name
    files.put("a", name)
    submit(files.stage, name)
    files.put("a", None)
    files.stage.pass_time(ORPHAN_AGE_MS + 1)
    assert sweep(files.stage).names == ()
    assert files.known(name) == (ObjectState.REFERENCED, 0, True)


def test_a_body_that_comes_back_before_it_is_swept_is_used_again() -> None:
    files = Files()
    name = mark(files.stage).name
    files.put("a", name)
    files.put("a", None)
    assert mark(files.stage).name == name
    files.put("b", name)
    files.stage.pass_time(ORPHAN_AGE_MS + 1)
    assert sweep(files.stage).names == ()


def test_a_file_that_is_small_costs_no_look_at_its_content() -> None:
    stage = Stage()
    owner = stage.running()
    for number in (1, 2):
        entry = c.EntryCommit(
            path=("a",), expected=number - 1, version=number, number=number, size=3, content=body_of("x")
        )
        owner.step(workspace=(entry,))
        assert stage.rounds == 0
