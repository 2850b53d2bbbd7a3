"""Sessions and Threads are made once and closed once, and never over unfinished work."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.commands import ClaimPurpose
from agentscope_durable.contracts.errors import (
    Closed,
    DefinitionConflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    Unfinished,
)
from agentscope_durable.contracts.records import SessionHead, ThreadRecord
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.domain.resources import THREADS_MAX
from agentscope_durable.domain.rules import RULES
from agentscope_durable.stores.records.memory import MemoryRecordStore
from tests.domain.stage import BINDING, SESSION, Stage, now

NEXT = replace(BINDING, definition_version="v2")
OTHER = replace(BINDING, harness="other")


def create(binding: Any = BINDING) -> c.CreateSession:
    return c.CreateSession(session=SESSION, binding=binding)


def thread(name: str = "research", binding: Any = BINDING) -> c.CreateThread:
    return c.CreateThread(session=SESSION, thread_id=name, binding=binding)


def close(name: str = "") -> c.CloseThread | c.CloseSession:
    return c.CloseThread(session=SESSION, thread_id=name) if name else c.CloseSession(session=SESSION)


@pytest.mark.spec("RT-11", "EV-05")
def test_a_session_and_its_main_thread_appear_in_one_commit() -> None:
    stage = Stage(create=False)
    with stage.refuses(NotFound):
        stage.do(thread())

    assert stage.do(create()) == c.Done(changed=True)

    assert [(e.type, e.thread_id) for e in stage.events()] == [("session.created", None), ("thread.created", "main")]
    change = stage.change
    assert change is not None and [key for key, _ in change.puts] == [keys.thread("main")]
    assert stage.thread().status is ResourceStatus.OPEN


@pytest.mark.spec("AD-16", "RT-12")
def test_a_repeat_changes_nothing_and_keeps_the_version_that_was_pinned() -> None:
    stage = Stage()
    stage.do(thread())

    for repeat in (create(), create(NEXT), thread(), thread(binding=NEXT)):
        assert stage.do(repeat) == c.Done(changed=False)
        assert stage.change is None
    assert stage.thread().binding == stage.thread("research").binding == BINDING
    for other in (create(OTHER), thread(binding=OTHER)):
        with stage.refuses(DefinitionConflict) as refused:
            stage.do(other)
        assert (refused.value.requested, refused.value.existing) == ("other", "assistant")


@pytest.mark.spec("RT-12")
def test_a_thread_runs_its_own_version_for_life_beside_a_newer_one() -> None:
    stage = Stage()
    stage.do(thread("newer", NEXT))
    old, new = stage.submit("r1"), stage.submit("r2", thread="newer")
    stage.alive("a")

    def claim(name: str, *served: str) -> c.Claimed:
        return stage.do(replace(stage.claim_command("a", thread=name), served=served))

    assert claim("main", NEXT.ready_class).purpose is ClaimPurpose.NOTHING
    assert claim("newer", BINDING.ready_class).purpose is ClaimPurpose.NOTHING
    assert claim("main", BINDING.ready_class).turn_id == old
    assert claim("newer", NEXT.ready_class).turn_id == new


@pytest.mark.spec("EV-04", "EV-05")
def test_everything_is_created_once_and_closed_once_in_the_timeline() -> None:
    stage = Stage()
    for command in (thread(), thread(), close("research"), close("research"), close(), close(), close("main")):
        stage.do(command)

    assert [(e.type, e.thread_id) for e in stage.events()] == [
        ("session.created", None),
        ("thread.created", "main"),
        ("thread.created", "research"),
        ("thread.closed", "research"),
        ("thread.closed", "main"),
        ("session.closed", None),
    ]


@pytest.mark.spec("RT-42")
def test_nothing_is_closed_over_unfinished_turns_and_they_go_on() -> None:
    stage = Stage()
    stage.do(thread())
    turn = stage.submit(thread="research")

    for status in ("QUEUED", "RUNNING"):
        assert stage.status(turn) == status
        with stage.refuses(Unfinished) as refused:
            stage.do(close("research"))
        assert (refused.value.kind, refused.value.identity) == ("thread", "research")
        with stage.refuses(Unfinished) as refused:
            stage.do(close())
        assert refused.value.kind == "session"
        if status == "QUEUED":
            owner = stage.claim(thread="research")
    owner.answers()
    assert stage.do(close("research")) == c.Done(changed=True)
    assert stage.do(close()) == c.Done(changed=True)


def test_the_main_thread_closes_with_its_session() -> None:
    stage = Stage()
    with stage.refuses(InvalidRequest) as refused:
        stage.do(close("main"))
    assert refused.value.path == "thread_id"
    stage.do(close())

    with stage.refuses(Closed):
        stage.do(thread("late"))
    assert stage.do(create()) == c.Done(changed=False)
    with stage.refuses(NotFound):
        stage.do(close("nowhere"))


def test_ids_that_look_like_keys_are_ids() -> None:
    stage = Stage()
    for name in ("main/0001", "..", "a%2Fb", "a/b", "thread/main", "\u00e9", "e\u0301"):
        stage.do(thread(name))
        turn = stage.submit(f"r {name}", thread=name)
        assert stage.claim(thread=name).turn == turn
    assert stage.due() is None


def test_a_session_with_many_threads_is_closed_in_one_commit_and_has_a_bound() -> None:
    store = MemoryRecordStore()
    seeds = iter(range(10**6))

    def do(command: Any) -> Any:
        rule = RULES[type(command)]
        decide = partial(rule.decide, command, next(seeds).to_bytes(16, "big"))
        return now(store.transact(keys.partition(SESSION), rule.reads(command), decide)).receipt

    do(create())
    for number in range(THREADS_MAX - 1):
        do(thread(f"t{number}"))
    with pytest.raises(LimitExceeded) as refused:
        do(thread("one more"))
    assert refused.value.limit == THREADS_MAX
    do(close("t7"))

    assert do(close()) == c.Done(changed=True)

    session = store._sessions[keys.partition(SESSION)]
    head: SessionHead | None = store.head("", session)
    assert head is not None and (head.status, head.thread_count) == (ResourceStatus.CLOSED, THREADS_MAX)
    row = session.log[-1]
    assert row.count == THREADS_MAX, "one event for each that was open, and one for the session"
    closed = [
        msgspec.json.decode(data, type=ThreadRecord).status
        for key, data in session.records.items()
        if key.startswith(keys.THREADS)
    ]
    assert set(closed) == {ResourceStatus.CLOSED} and len(closed) == THREADS_MAX
