"""Entries of a workspace change with the owner's commit, and every settled position can be told from what is kept."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import msgspec
import pytest

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.backend.queries import Queries
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import EntryConflict, Fenced, InvalidRequest, LimitExceeded, TooLarge
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import CheckpointRecord, EntryRecord, WorkspaceRecord
from agentscope_durable.contracts.views import EntryView
from agentscope_durable.contracts.workspace import ENTRIES_MAX, ENTRY_BYTES_MAX, EntryPath, check_path
from agentscope_durable.domain.workspace import entries_to_restore
from tests.domain.stage import BINDING, MAIN, Owner, Stage, now

A: EntryPath = ("workspace", "a.txt")
B: EntryPath = ("workspace", "src", "b/c.py")
BASE = b'[0,[],[["b"]],true]'


def put(path: EntryPath, expected: int, number: int, value: Any = "v", *, version: int = 0) -> c.EntryCommit:
    content = body_of(value)
    return c.EntryCommit(
        path=path,
        expected=expected,
        version=version or expected + 1,
        number=number,
        size=len(bytes(content.inline)),
        content=content,
    )


def gone(path: EntryPath, expected: int) -> c.EntryCommit:
    return c.EntryCommit(path=path, expected=expected)


def ask(stage: Stage, question: Any) -> Any:
    async def nobody(*_: Any) -> None:
        raise AssertionError("nothing is put")

    return now(Queries(stage.store, Bodies(None, nobody)).answer(question))


def value_of(stage: Stage, path: EntryPath, thread: str = MAIN) -> Any:
    view = ask(stage, q.GetEntry(session=stage.session, thread_id=thread, path=path))
    return None if view is None else msgspec.json.decode(bytes(view.content.inline))


def values_at(stage: Stage, at: int, thread: str = MAIN) -> dict[EntryPath, Any]:
    found: tuple[EntryView, ...] = ask(stage, q.EntriesAt(session=stage.session, thread_id=thread, at=at))
    return {
        entry.path: msgspec.json.decode(
            bytes(ask(stage, q.GetContent(session=stage.session, thread_id=thread, number=entry.number)).inline)
        )
        for entry in found
    }


def kept(stage: Stage, prefix: str) -> list[str]:
    return sorted(key for key in stage.world.dump.records if key.startswith(prefix))


@pytest.mark.spec("WS-01")
def test_an_entry_is_put_read_listed_compared_and_deleted() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(workspace=(put(A, 0, 1, {"text": "one"}), put(B, 0, 2, [1, 2])))

    view = ask(stage, q.GetEntry(session=stage.session, thread_id=MAIN, path=A))
    assert (view.version, view.number, view.modified_at_ms) == (1, 1, stage.clock())
    assert value_of(stage, A) == {"text": "one"}
    listed = ask(stage, q.ListEntries(session=stage.session, thread_id=MAIN, namespace=("workspace", "src")))
    assert [(entry.path, entry.content) for entry in listed] == [(B, None)]

    with stage.refuses(EntryConflict) as caught:
        owner.step(workspace=(put(A, 2, 3, "late"),))
    assert (caught.value.key, caught.value.expected, caught.value.actual) == ("workspace/a.txt", 2, 1)
    owner.step(workspace=(put(A, 1, 3, "two"), gone(B, 1)))
    assert (value_of(stage, A), value_of(stage, B)) == ("two", None)
    record = stage.get(keys.workspace(MAIN), WorkspaceRecord)
    assert (record.entries, record.size, record.numbers) == (1, 5, 3)


@pytest.mark.spec("WS-01")
def test_a_listing_is_paged_in_order_and_stays_in_its_namespace() -> None:
    stage = Stage()
    owner = stage.running()
    paths = [("w", f"{n:03d}") for n in range(25)]
    owner.step(workspace=tuple(put(path, 0, n + 1) for n, path in enumerate(paths)))
    owner.step(workspace=(put(("w2", "x"), 0, 30), put(("x%2Fy", "z"), 0, 31), put(("x", "y/z"), 0, 32)))

    found: list[EntryPath] = []
    after: EntryPath = ()
    while True:
        page = ask(stage, q.ListEntries(session=stage.session, thread_id=MAIN, namespace=("w",), after=after, limit=10))
        found += [entry.path for entry in page]
        if len(page) < 10:
            break
        after = page[-1].path
    assert found == paths
    everything = [entry.path for entry in ask(stage, q.ListEntries(session=stage.session, thread_id=MAIN))]
    assert set(everything) == {*paths, ("w2", "x"), ("x%2Fy", "z"), ("x", "y/z")}


@pytest.mark.spec("WS-04")
def test_sessions_and_threads_do_not_see_each_others_entries() -> None:
    stage = Stage()
    other = Stage(session=SessionKey("app", "another"), beside=stage)
    for one, value in ((stage, "here"), (other, "there")):
        one.running().step(workspace=(put(A, 0, 1, value),))
    stage.do(c.CreateThread(session=stage.session, thread_id="research", binding=stage.binding))
    stage.running("b", request_id="r2", thread="research").step(workspace=(put(A, 0, 1, "beside"),))

    assert (value_of(stage, A), value_of(other, A), value_of(stage, A, "research")) == ("here", "there", "beside")


@pytest.mark.spec("WS-06")
def test_a_former_owner_writes_nothing() -> None:
    stage = Stage()
    former = stage.running("a")
    former.step(workspace=(put(A, 0, 1, "mine"),))
    stage.dies("a")
    present = stage.claim("b", dead=("a",))

    with stage.refuses(Fenced):
        former.step(workspace=(put(A, 1, 2, "stale"),))
    with stage.refuses(Fenced):
        former.step(workspace=(gone(A, 1),))
    assert value_of(stage, A) == "mine"
    present.step(workspace=(put(A, 1, 2, "ours"),))
    assert value_of(stage, A) == "ours"


@pytest.mark.spec("WS-07")
def test_a_write_that_is_sent_again_is_not_made_again() -> None:
    stage = Stage()
    owner = stage.running()
    command = owner.step_command(workspace=(put(A, 0, 1, "once"),))
    stage.do(command)

    # The position says that it stands; nothing else can be at that place (BE-17).
    with pytest.raises(Exception, match="position|revision"):
        stage.do(command)
    assert stage.get(keys.entry(MAIN, A), EntryRecord).version == 1


def test_a_version_only_rises_and_the_store_says_where_a_new_entry_begins() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(workspace=(put(A, 0, 1), put(A, 1, 2), put(A, 2, 3)))
    with stage.refuses(InvalidRequest):
        owner.step(workspace=(put(A, 3, 4, version=3),))

    owner.step(workspace=(gone(A, 3),))
    assert ask(stage, q.GetWorkspace(session=stage.session, thread_id=MAIN)).floor == 3


def test_a_number_belongs_to_one_content() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(workspace=(put(A, 0, 5, "five"),))

    for entry in (put(B, 0, 5, "other"), put(B, 0, 0, "none")):
        with stage.refuses(InvalidRequest):
            owner.step(workspace=(entry,))
    with stage.refuses(InvalidRequest):
        owner.step(workspace=(c.EntryCommit(path=B, expected=0, version=1, number=5, size=6),))
    # Calls that run together may end in another order than they wrote.
    owner.step(workspace=(put(B, 0, 4, "four"),))
    assert value_of(stage, B) == "four"


@pytest.mark.parametrize(
    "path",
    [(), ("",), ("..", "a"), ("a", ".."), (".",), ("a\x00b",), ("a\nb",), ("x" * 257,), ("n",) * 34, ("y" * 250,) * 5],
)
def test_a_path_that_is_none_is_refused(path: EntryPath) -> None:
    with pytest.raises(InvalidRequest):
        check_path(path)
    stage = Stage()
    owner = stage.running()
    with pytest.raises(InvalidRequest):
        owner.step(workspace=(put(path, 0, 1),))


def test_a_workspace_beyond_a_bound_is_refused() -> None:
    stage = Stage()
    owner = stage.running()
    with stage.refuses(TooLarge):
        owner.step(workspace=(msgspec.structs.replace(put(A, 0, 1), size=ENTRY_BYTES_MAX + 1),))
    full = tuple(put((f"{n}",), 0, n + 1) for n in range(ENTRIES_MAX))
    owner.step(workspace=full)
    with stage.refuses(LimitExceeded):
        owner.step(workspace=(put(A, 0, ENTRIES_MAX + 1),))
    owner.step(workspace=(gone(("0",), 1), put(A, 0, ENTRIES_MAX + 1, version=2)))
    huge = tuple(
        msgspec.structs.replace(put(("big", str(n)), 0, ENTRIES_MAX + 2 + n, version=2), size=ENTRY_BYTES_MAX)
        for n in range(17)
    )
    for n in range(1, 20):
        owner.step(workspace=(gone((str(n),), 1),))
    with stage.refuses(TooLarge):
        owner.step(workspace=huge)


@pytest.mark.spec("BE-22")
def test_a_step_without_files_writes_and_reads_nothing_of_the_workspace() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(workspace=(put(A, 0, 1),))
    owner.starts_local("c1")

    assert stage.change is not None
    assert [key for key, _ in stage.change.puts] == [keys.execution(owner.turn, "c1")]


def test_what_a_turn_wrote_over_itself_is_not_kept() -> None:
    stage = Stage()
    owner = stage.running()
    for number in range(1, 6):
        owner.step(workspace=(put(A, number - 1, number, f"v{number}"),))

    assert kept(stage, "content/") == [keys.content(MAIN, 5)] and kept(stage, "former/") == []


@pytest.mark.spec("CK-07")
def test_every_settled_position_can_be_told() -> None:
    stage = Stage()
    first = stage.running(request_id="r1")
    first.step(workspace=(put(A, 0, 1, "a1"), put(B, 0, 2, "b1")))
    first.answers()
    settled_1 = first.position
    second = stage.running(request_id="r2")
    second.step(workspace=(put(A, 1, 3, "passing"), gone(B, 1)))
    second.step(workspace=(put(A, 2, 4, "a2"), put(("new",), 0, 5, "n2", version=2)))
    second.answers(message="m2")
    settled_2 = second.position
    third = stage.running(request_id="r3")
    third.step(workspace=(gone(A, 3), put(B, 0, 6, "b3", version=4)))

    assert values_at(stage, settled_1) == {A: "a1", B: "b1"}
    assert values_at(stage, settled_2) == {A: "a2", ("new",): "n2"}
    assert values_at(stage, 0) == {}
    # Two contents of each entry that changed after a Turn ended, and none of what was only passed through.
    assert kept(stage, "content/") == [keys.content(MAIN, number) for number in (1, 2, 4, 5, 6)]


class Told:
    """What a workspace should hold, kept beside it.

    Attributes:
        entries: version and value of each entry.
        settled: the values as of each settled position.
    """

    def __init__(self) -> None:
        self.entries: dict[EntryPath, tuple[int, Any]] = {}
        self.settled: dict[int, dict[EntryPath, Any]] = {0: {}}

    def settle(self, at: int) -> None:
        self.settled[at] = {path: value for path, (_, value) in self.entries.items()}


def counted(stage: Stage, thread: str = MAIN) -> Any:
    return ask(stage, q.GetWorkspace(session=stage.session, thread_id=thread))


def play(chance: random.Random, owner: Owner, told: Told) -> None:
    """Some random changes in some commits."""
    for _ in range(chance.randint(0, 3)):
        changes: list[c.EntryCommit] = []
        view = counted(owner.stage)
        number = view.numbers
        for path in chance.sample([A, B, ("c",), ("d", "e")], chance.randint(0, 3)):
            version, _ = told.entries.get(path, (0, None))
            if version and chance.random() < 0.3:
                changes.append(gone(path, version))
                del told.entries[path]
            else:
                number += 1
                told.entries[path] = (max(version, view.floor) + 1, f"{path}@{number}")
                changes.append(put(path, version, number, told.entries[path][1], version=told.entries[path][0]))
        owner.step(workspace=tuple(changes))


def restored(stage: Stage, at: int, told: Told, request_id: str) -> int:
    """Bring everything back to a settled position, as a host does; the new one."""
    record = stage.get(keys.checkpoint(MAIN, at), CheckpointRecord)
    head = stage.thread().position
    ask_at = partial(q.EntriesAt, session=stage.session, thread_id=MAIN)
    changes = entries_to_restore(
        ask(stage, ask_at(at=head)), ask(stage, ask_at(at=record.through)), counted(stage).floor
    )
    native = c.NativeState(binding=BINDING, head=head, journal=BASE, writer="2.0.8", workspace=changes)
    stage.do(
        c.RestoreThread(
            session=stage.session,
            thread_id=MAIN,
            request_id=request_id,
            at=at,
            expected_at=stage.thread().settled_at,
            native=native,
        )
    )
    told.entries = {
        entry.path: (entry.version, told.settled[record.through][entry.path])
        for entry in ask(stage, ask_at(at=stage.thread().position))
    }
    return stage.thread().position


@pytest.mark.spec("CK-07")
@pytest.mark.parametrize("seed", range(30))
def test_any_history_can_be_told_and_brought_back_at_each_of_its_settled_positions(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage()
    told = Told()
    checkpoints: list[int] = []
    for turn in range(8):
        owner = stage.running("a", request_id=f"r{turn}")
        play(chance, owner, told)
        if chance.random() < 0.4:
            # The host dies in the Turn; what it committed stays.
            stage.dies("a")
            owner = stage.claim("b", dead=("a",))
            play(chance, owner, told)
        checkpoints.append(owner.checkpoint().position)
        play(chance, owner, told)
        owner.answers(message=f"m{turn}")
        told.settle(owner.position)
        if chance.random() < 0.5:
            at = chance.choice(checkpoints)
            wanted = told.settled[stage.get(keys.checkpoint(MAIN, at), CheckpointRecord).through]
            checkpoints.append(restored(stage, at, told, f"restore-{turn}"))
            assert {path: value for path, (_, value) in told.entries.items()} == wanted
            told.settle(checkpoints[-1])
        for position, values in told.settled.items():
            assert values_at(stage, position) == values, f"seed {seed}, position {position} after turn {turn}"


@pytest.mark.spec("CK-07", "CK-14")
def test_a_restore_that_saw_other_entries_is_refused_whole() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(workspace=(put(A, 0, 1),))
    at = owner.checkpoint().position
    owner.answers()
    head = stage.thread().position
    native = c.NativeState(
        binding=BINDING, head=head, journal=BASE, writer="2.0.8", workspace=(c.EntryCommit(path=A, expected=5),)
    )
    with stage.refuses(EntryConflict):
        stage.do(
            c.RestoreThread(session=stage.session, thread_id=MAIN, request_id="x", at=at, expected_at=at, native=native)
        )
    assert value_of(stage, A) == "v"


@pytest.mark.spec("CK-17", "WS-01")
def test_what_is_taken_over_counts_on_above_what_its_agent_may_remember() -> None:
    stage = Stage()
    owner = stage.running()
    at = owner.checkpoint().position
    owner.answers()
    head = stage.thread().position
    native = c.NativeState(binding=BINDING, head=head, journal=BASE, writer="2.0.8", floor=7, numbers=12)
    stage.do(
        c.RestoreThread(session=stage.session, thread_id=MAIN, request_id="x", at=at, expected_at=at, native=native)
    )
    assert (counted(stage).entries, counted(stage).floor, counted(stage).numbers) == (0, 7, 12)


@pytest.mark.spec("CK-07")
@pytest.mark.parametrize("seed", range(10))
def test_the_changes_of_a_restore_bring_a_workspace_back(seed: int) -> None:
    """The decision alone: present entries, what they were, and what must change."""
    chance = random.Random(seed)

    def entries(names: str) -> dict[EntryPath, EntryView]:
        return {
            (name,): EntryView((name,), chance.randint(1, 9), chance.randint(1, 9), size_bytes=1, modified_at_ms=5)
            for name in names
            if chance.random() < 0.7
        }

    present, wanted = entries("abcdef"), entries("abcdef")
    changes = {change.path: change for change in entries_to_restore(present.values(), wanted.values(), floor=20)}

    for path in {*present, *wanted}:
        now_, then, change = present.get(path), wanted.get(path), changes.get(path)
        if then is None:
            assert change is not None and (change.version, change.expected) == (0, now_.version if now_ else 0)
        elif now_ is not None and now_.number == then.number:
            assert change is None
        else:
            assert change is not None and change.number == then.number and change.content is None
            assert change.version > max(20, now_.version if now_ else 0) and change.modified_ms == 5
