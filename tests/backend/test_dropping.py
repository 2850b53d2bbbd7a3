"""A closed Session is dropped: all of it goes, in slices that may stop anywhere, and its name stays taken."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import (
    Forbidden,
    InvalidRequest,
    NotClosed,
    NotFound,
    SessionDropped,
    StoreBusy,
    Uncertain,
    Unfinished,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience, ExecutionKind, ExecutionState
from agentscope_durable.contracts.views import DropReceipt
from agentscope_durable.domain import dropping
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.retention import REASON_CHARS_MAX
from agentscope_durable.spi.record_store import PAGE_MAX, Change, PartitionSize, Range, Reads, ReadyScan
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from tests.backend.world import BINDING, HOST, LARGE, SESSION, World, everything
from tests.every_store import STORES, shelf

OTHER = SessionKey("app", "s2")
DAY = 24 * 3600
ALL = Range("", limit=PAGE_MAX)


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def world(backend: str, tmp_path: Path) -> AsyncGenerator[World]:
    clock = ManualClock()
    async with shelf(backend, tmp_path, clock) as place:
        yield await World(store=FaultyRecordStore(await place.records()), clock=clock).open()


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropping, "DROP_RECORDS", 7)
    monkeypatch.setattr(dropping, "DROP_ROWS", 5)


def operations(world: World) -> HostOperations:
    return HostOperations(world.backend)


async def close(world: World) -> None:
    await world.do(c.CloseSession(session=world.session))


async def lived(world: World, turns: int = 5) -> list[str]:
    """A closed Session with Turns, Threads, calls, questions, a large body and a policy record. Returns its Turns."""
    found = [await world.answer_turn(f"task {number}") for number in range(turns)]
    await world.do(c.CreateThread(session=world.session, thread_id="research", binding=BINDING))
    found.append(await world.answer_turn(LARGE, "research"))
    turn = await world.submit("with a tool")
    found.append(turn)
    await world.claim()
    call = c.ToolCommit(
        call_id="c1", name="look", kind=ExecutionKind.LOCAL, arguments=body_of("{}"), state=ExecutionState.COMPLETED
    )
    await world.commit(tools=(call,), journal=b'["native"]', checkpoint=True, base=True)
    await world.finish(message_id=await world.say("so it is"))
    await operations(world).put_policy(world.session, "tenant", {"turns": 3}, request_id="quota")
    await close(world)
    return found


async def left(world: World, session: SessionKey | None = None) -> tuple[PartitionSize, list[str]]:
    """What a partition takes, and the keys of its records."""
    partition = keys.partition(session or world.session)
    records = await world.store.read(partition, Reads(ranges=(ALL,)))
    return await world.store.measure(partition), [key for key, _ in records.ranges[ALL]]


async def beside(world: World) -> World:
    """Another Session in the same store, that must stay as it is."""
    other = World(OTHER, store=world.store, clock=world.clock, backend=world.backend)
    await other.open()
    await other.answer_turn("next door")
    return other


# ---- what goes and what stays ----


async def test_everything_of_it_goes_but_its_name_and_what_is_told_of_it(world: World) -> None:
    other = await beside(world)
    untouched = await everything(other)
    turns = await lived(world)
    size, _ = await left(world)
    events = len(await world.events())

    receipt = await operations(world).drop_session(SESSION, reason="asked by the user, ticket 7")

    after, names = await left(world)
    marks = [name for name in names if name.startswith(keys.OBJECTS)]
    assert sorted(names) == [keys.DROPPED, *marks], "of a large body its mark stays until the sweep has removed it"
    assert after.commits == 1 and after.log_bytes == 0
    assert after.head_bytes + after.record_bytes < 1000
    assert receipt.events == events
    assert receipt.commits == size.commits
    assert receipt.records == size.records - len(marks)
    assert receipt.objects == len(marks) == 2 and receipt.object_bytes > 2 * len(LARGE)
    assert receipt.reason == "asked by the user, ticket 7"
    assert receipt.dropped_at_ms is not None and receipt.begun_at_ms <= receipt.dropped_at_ms
    for turn in turns:
        assert await world.store.holders(keys.turn(turn)) == []
    for kind in (keys.READY_TURN, keys.READY_LEASE, keys.READY_DISPATCH, keys.READY_RUNNING):
        for klass in (BINDING.ready_class, HOST):
            assert [i for i in (await world.store.ready(ReadyScan(kind, klass))).items if "s1" in i.partition] == []
    assert await everything(other) == untouched


@pytest.mark.usefixtures("small_slices")
async def test_a_slice_is_bounded_and_one_commit(world: World) -> None:
    await lived(world)
    size, _ = await left(world)
    command = c.DropSession(session=SESSION)
    slices = 0
    while True:
        before, _ = await left(world)
        dropped: c.Dropped = await world.do(command)
        after, _ = await left(world)
        slices += 1
        assert before.records - after.records <= dropping.DROP_RECORDS
        assert before.commits - after.commits <= dropping.DROP_ROWS - 1, "and it leaves a row of its own"
        if not dropped.more:
            break

    assert slices >= size.records // dropping.DROP_RECORDS
    assert slices <= 3 + max(size.records // dropping.DROP_RECORDS, size.commits // (dropping.DROP_ROWS - 1))


@pytest.mark.spec("AD-29", "AD-02")
async def test_its_name_and_its_request_ids_are_never_used_again(world: World) -> None:
    await world.answer_turn("first")
    await close(world)
    await operations(world).drop_session(SESSION)

    content = await World(OTHER, backend=world.backend).text("first")
    for attempt in (
        c.CreateSession(session=SESSION, binding=BINDING),
        c.CreateThread(session=SESSION, thread_id="t", binding=BINDING),
        c.SubmitTurn(session=SESSION, thread_id="main", request_id="r1", content=content, digest="first"),
        c.CloseSession(session=SESSION),
        c.PutPolicy(session=SESSION, key="k", request_id="p", value=body_of({})),
        c.PruneEvents(session=SESSION),
        c.RecordObject(session=SESSION, digest="0" * 64, size=1),
        c.Claim(session=SESSION, thread_id="main", owner=HOST, served=(BINDING.ready_class,)),
    ):
        with pytest.raises(SessionDropped) as refused:
            await world.do(attempt)
        assert refused.value.session == "app/s1"
    with pytest.raises(SessionDropped):
        await world.backend.put_body(SESSION, b"x" * 100_000)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("slices", [1, 3, 100])
async def test_from_the_first_commit_on_nobody_finds_anything_in_it(world: World, slices: int) -> None:
    """Neither half of it nor all of it: that it is dropped, whatever is asked."""
    turn, *_ = await lived(world)
    for _ in range(slices):
        await world.do(c.DropSession(session=SESSION))

    where = {"session": SESSION, "thread_id": "main", "turn_id": turn}
    for question in (
        q.GetSession(session=SESSION),
        q.ListThreads(session=SESSION),
        q.GetThread(session=SESSION, thread_id="main"),
        q.GetTurn(**where),
        q.ListTurns(session=SESSION, thread_id="main"),
        q.GetHistory(session=SESSION),
        q.GetSnapshot(session=SESSION),
        q.ListEvents(session=SESSION),
        q.ListTools(**where),
        q.ListRuns(**where),
        q.ListCheckpoints(session=SESSION, thread_id="main"),
        q.LoadThread(session=SESSION, thread_id="main", first=1, last=1),
        q.ExplainTurn(**where),
        q.MeasureSession(session=SESSION),
    ):
        with pytest.raises(SessionDropped):
            await world.ask(question)
    with pytest.raises((SessionDropped, NotFound)):
        await world.ask(q.FindTurn(turn_id=turn))
    assert (await world.ask(q.ListSessions(namespace="app"))).items == ()
    [(key, status)] = [(view.session, view.status) for view in await world.ask(q.ListAllSessions())]
    assert (key, status) == (SESSION, "DROPPED" if slices == 100 else "DROPPING")
    sound = await operations(world).doctor(deep=True)
    assert sound.sound, sound.findings


# ---- when it is refused ----


async def test_only_a_closed_session_is_dropped_and_a_refusal_changes_nothing(world: World) -> None:
    await world.submit("waiting")
    before = await everything(world)
    for dry_run in (True, False):
        with pytest.raises(NotClosed) as refused:
            await operations(world).drop_session(SESSION, dry_run=dry_run)
        assert "close" in str(refused.value).lower()
        with pytest.raises(NotFound):
            await operations(world).drop_session(SessionKey("app", "nobody's"), dry_run=dry_run)
    with pytest.raises(Unfinished):
        await close(world)
    with pytest.raises(InvalidRequest):
        await operations(world).drop_session(SESSION, reason="x" * (REASON_CHARS_MAX + 1))
    for audience in (Audience.PUBLIC, Audience.HOST):
        with pytest.raises(Forbidden):
            await world.backend.execute(c.DropSession(session=SESSION), audience=audience)
    assert await everything(world) == before


async def test_a_tool_whose_outcome_nobody_knows_keeps_it_open_and_so_undropped(world: World) -> None:
    await world.submit("risky")
    await world.claim()
    call = {"call_id": "c1", "name": "pay", "kind": ExecutionKind.LOCAL, "arguments": body_of("{}")}
    for state in (ExecutionState.RUNNING, ExecutionState.UNKNOWN):
        await world.commit(tools=(c.ToolCommit(**call, state=state),))
    for attempt in (close(world), operations(world).drop_session(SESSION)):
        with pytest.raises((Unfinished, NotClosed)):
            await attempt


# ---- again, at once, and interrupted ----


async def test_a_dry_run_says_what_would_go_and_changes_nothing(world: World) -> None:
    await lived(world)
    before = await everything(world)

    told = await operations(world).drop_session(SESSION, dry_run=True)

    assert await everything(world) == before
    done = await operations(world).drop_session(SESSION)
    assert told.dropped_at_ms is None
    assert (told.events, told.commits, told.records) == (done.events, done.commits, done.records)
    assert (told.objects, told.object_bytes) == (done.objects, done.object_bytes)
    assert await operations(world).drop_session(SESSION, dry_run=True) == done


async def test_a_repeat_returns_the_first_receipt(world: World) -> None:
    await lived(world)
    receipt = await operations(world).drop_session(SESSION, reason="first")
    before, _ = await left(world)
    world.clock.advance(1000)

    assert await operations(world).drop_session(SESSION, reason="second") == receipt
    assert await left(world) == (before, (await left(world))[1])


@pytest.mark.usefixtures("small_slices")
async def test_several_that_drop_it_at_once_drop_it_once(world: World) -> None:
    await lived(world)
    receipts = await asyncio.gather(*(operations(world).drop_session(SESSION) for _ in range(4)))
    assert len(set(receipts)) == 1
    size, _ = await left(world)
    assert size.commits == 1


@pytest.mark.case("C58", "C70")
@pytest.mark.usefixtures("small_slices")
async def test_a_slice_that_fails_or_whose_answer_is_lost_is_gone_on_from(world: World) -> None:
    await lived(world)
    expected = await operations(world).drop_session(SESSION, dry_run=True)
    drop: Callable[[], Awaitable[DropReceipt]] = lambda: operations(world).drop_session(SESSION)  # noqa: E731
    for nth in (1, 2, 3):
        world.store.lose_answer(nth=nth)
        with pytest.raises(Uncertain):
            await drop()
        world.store.heal()
        world.store.fail(nth=2, error=lambda: StoreBusy("durable.db"))
        with pytest.raises(StoreBusy):
            await drop()
        world.store.heal()

    receipt = await drop()
    assert (receipt.events, receipt.records, receipt.objects) == (expected.events, expected.records, expected.objects)
    size, names = await left(world)
    assert size.commits == 1 and len(names) == 3


@pytest.mark.usefixtures("small_slices")
async def test_it_can_be_cancelled_and_gone_on_with(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await lived(world)
    slices = itertools.count(1)
    transact = world.store.transact

    async def cancelled_in_the_third(*asked: Any) -> Any:
        if next(slices) == 3:
            task.cancel()
        return await transact(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "transact", cancelled_in_the_third)
        task = asyncio.ensure_future(operations(world).drop_session(SESSION))
        with pytest.raises(asyncio.CancelledError):
            await task

    [finding] = (await operations(world).doctor()).findings or [None]
    assert finding is None or "being dropped" in finding.problem
    assert (await operations(world).drop_session(SESSION)).dropped_at_ms is not None


async def test_that_it_was_dropped_is_said_once_in_the_log_by_its_ids(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await lived(world)
    with caplog.at_level(logging.INFO, "agentscope_durable"):
        await operations(world).drop_session(SESSION, reason="a private word")
    [line] = [record for record in caplog.records if "is dropped" in record.getMessage()]
    assert (line.__dict__["namespace"], line.__dict__["session_id"]) == ("app", "s1")
    assert "a private word" not in caplog.text


# ---- by age ----


async def test_retain_drops_what_was_closed_long_ago_and_nothing_else(world: World) -> None:
    operate = operations(world)
    await lived(world)
    world.clock.advance(10 * DAY * 1000)
    young = World(OTHER, store=world.store, clock=world.clock, backend=world.backend)
    await young.open()
    await close(young)
    open_ = World(SessionKey("app", "s3"), store=world.store, clock=world.clock, backend=world.backend)
    await open_.open()
    world.clock.advance(25 * DAY * 1000)

    told = await operate.retain(closed_older_than=30 * DAY, dry_run=True)
    assert (told.dropped, told.looked, told.cursor) == ((SESSION,), 3, None)
    assert (await world.ask(q.GetSession(session=SESSION))).status == "CLOSED"

    report = await operate.retain(closed_older_than=30 * DAY)
    assert report.dropped == (SESSION,)
    assert (await operate.drop_session(SESSION)).reason == "retained no longer"
    assert [view.session for view in await world.ask(q.ListSessions(namespace="app"))] == [OTHER, open_.session]
    assert (await operate.retain(closed_older_than=30 * DAY)).dropped == ()

    world.clock.advance(5 * DAY * 1000)
    assert (await operate.retain(closed_older_than=30 * DAY)).dropped == (OTHER,)
    assert (await operate.retain(closed_older_than=0)).dropped == ()
    assert (await open_.ask(q.GetSession(session=open_.session))).status == "OPEN", "never what is open"


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("rule", ["closed_older_than", "events_older_than", "checkpoints_older_than"])
async def test_retain_goes_page_by_page_and_finishes_what_was_begun(world: World, rule: str) -> None:
    operate = operations(world)
    await close(world)
    names = [SessionKey("app", f"t{number:02}") for number in range(7)]
    for name in names:
        one = World(name, store=world.store, clock=world.clock, backend=world.backend)
        await one.open()
        await close(one)
    await world.do(c.DropSession(session=names[3]))
    assert (await operate.retain(**{rule: 365 * DAY}, dry_run=True)).dropped == (names[3],)

    dropped: list[SessionKey] = []
    cursor, rounds = None, 0
    while True:
        report = await operate.retain(**{rule: 365 * DAY}, cursor=cursor, limit=3)
        assert report.looked <= 3
        dropped += report.dropped
        cursor, rounds = report.cursor, rounds + 1
        if cursor is None:
            break
    assert dropped == [names[3]], "the others were closed a moment ago"
    assert rounds == 3
    assert (await operate.drop_session(names[3])).dropped_at_ms is not None


async def test_retain_prunes_events_of_the_others_by_age(world: World) -> None:
    await world.answer_turn("old")
    world.clock.advance(2 * DAY * 1000)
    await world.answer_turn("new")
    before = await everything(world)

    report = await operations(world).retain(events_older_than=DAY)

    assert report.events > 0 and report.dropped == ()
    assert await everything(world) == before
    with pytest.raises(InvalidRequest):
        await operations(world).retain()
    for name in ("closed_older_than", "events_older_than", "checkpoints_older_than"):
        with pytest.raises(InvalidRequest) as refused:
            await operations(world).retain(**{name: -1})
        assert refused.value.path == name


async def test_a_damaged_session_is_passed_over_and_keeps_no_other_from_going(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    digest = "0" * 64
    names = [SessionKey("app", f"t{number}") for number in range(3)]
    for name in names:
        one = World(name, store=world.store, clock=world.clock, backend=world.backend)
        await one.open()
        if name is names[1]:
            head = (await world.store.read(keys.partition(name), Reads())).head
            broken = Change(head=head, commit_id="f" * 32, puts=((keys.object_(digest), b"broken"),))
            await world.store.transact(keys.partition(name), Reads(), lambda view, now_ms, broken=broken: broken)
        await close(one)

    report = await operations(world).retain(closed_older_than=0)

    assert (report.dropped, report.damaged) == ((names[0], names[2]), (names[1],))
    assert "t1" in caplog.text
