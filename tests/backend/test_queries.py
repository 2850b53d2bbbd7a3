"""Every question, asked of Sessions that were made through commands over the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agentscope_durable.backend.bodies import COLUMN_REFERENCE
from agentscope_durable.backend.queries import ANSWERS, Queries, messages, pages, reading, snapshots
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import (
    CorruptRecord,
    CursorExpired,
    InvalidCursor,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    SnapshotTooLarge,
)
from agentscope_durable.contracts.events import (
    EventFilter,
    EventPage,
    PublicEvent,
    cursor_of,
    sequence_of,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.projection import Projection, SnapshotView, tool_key
from agentscope_durable.contracts.records import ExecutionRecord, Failure, decode, encode
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import (
    Audience,
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ModelObservation,
    ModelPurpose,
    ModelStatus,
    ResourceStatus,
    RunStatus,
    StepPhase,
    StepStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.contracts.views import (
    InteractionView,
    ModelCallView,
    OutcomeView,
    Page,
    RunStepRefView,
    StepView,
    ToolView,
    TurnView,
    UsageView,
)
from agentscope_durable.domain import ids
from agentscope_durable.domain.projection import EventProjection, matches
from agentscope_durable.spi.harness import JournalRow, OpenWorkView
from agentscope_durable.spi.record_store import Change, Reads, Records, Unchanged, View
from tests.backend.world import BINDING, HOST, LARGE, SESSION, Chance, World, stored_event

pytestmark = pytest.mark.backend("memory")


@pytest.fixture
async def world() -> World:
    return await World().open()


# ---- not found ----

UNKNOWN: list[Any] = [
    q.GetSession(session=SESSION),
    q.GetThread(session=SESSION, thread_id="main"),
    q.ListThreads(session=SESSION),
    q.GetTurn(session=SESSION, thread_id="main", turn_id="t"),
    q.GetOutcome(session=SESSION, thread_id="main", turn_id="t"),
    q.ListTurns(session=SESSION, thread_id="main"),
    q.ExplainTurn(session=SESSION, thread_id="main", turn_id="t"),
    q.GetHistory(session=SESSION),
    q.GetMessage(session=SESSION, message_id="m"),
    q.ListEvents(session=SESSION),
    q.GetSnapshot(session=SESSION),
    q.ListInteractions(session=SESSION, thread_id="main", turn_id="t"),
    q.ListRuns(session=SESSION, thread_id="main", turn_id="t"),
    q.GetRun(session=SESSION, thread_id="main", turn_id="t", run_id="t.1"),
    q.ListSteps(session=SESSION, thread_id="main", turn_id="t", run_id="t.1"),
    q.ListModelCalls(session=SESSION, thread_id="main", turn_id="t", run_id="t.1"),
    q.ListTools(session=SESSION, thread_id="main", turn_id="t"),
    q.MeasureSession(session=SESSION),
    q.LoadThread(session=SESSION, thread_id="main", first=1, last=1),
    q.OpenWork(session=SESSION, thread_id="main", turn_id="t"),
    q.ListCheckpoints(session=SESSION, thread_id="main"),
    q.LoadCheckpoint(session=SESSION, thread_id="main", at=0),
    q.GetWorkspace(session=SESSION, thread_id="main"),
    q.GetEntry(session=SESSION, thread_id="main", path=("notes", "a")),
    q.ListEntries(session=SESSION, thread_id="main"),
    q.GetContent(session=SESSION, thread_id="main", number=1),
    q.EntriesAt(session=SESSION, thread_id="main", at=1),
    q.GetDropped(session=SESSION),
    q.ListPolicies(session=SESSION),
]


@pytest.mark.spec("RT-56")
@pytest.mark.parametrize("question", UNKNOWN, ids=lambda question: type(question).__name__)
async def test_an_unknown_session_is_not_found_by_any_question(question: Any) -> None:
    with pytest.raises(NotFound, match="session"):
        await World().ask(question)


def test_every_question_there_is_can_be_asked() -> None:
    # These are of no Session.
    operators = {q.ListAllSessions, q.ListClosed, q.FindTurn, q.ListStalled, q.MeasureStore, q.Examine}
    asked = {type(question) for question in UNKNOWN} | {q.ListSessions, q.Watermarks} | operators
    declared = {
        kind
        for kind in vars(q).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == q.__name__
    } - {q.Question}

    assert asked == declared == set(ANSWERS)


async def test_what_is_no_question_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="not a question"):
        await world.ask("what time is it?")
    with pytest.raises(InvalidRequest, match="not a question"):
        Queries.audience(c.CloseSession(session=SESSION))


@pytest.mark.spec("EV-22")
def test_native_state_is_for_hosts_alone() -> None:
    assert {kind for kind, answer in ANSWERS.items() if answer.audience is Audience.HOST} == {
        q.LoadThread,
        q.LoadCheckpoint,
        q.OpenWork,
        q.GetWorkspace,
        q.GetEntry,
        q.ListEntries,
        q.GetContent,
        q.EntriesAt,
    }


@pytest.mark.spec("RT-56", "FI-03")
async def test_things_that_are_not_inside_each_other_are_not_found() -> None:
    world = await World().open("research")
    turn = await world.answer_turn("one")
    other = await world.answer_turn("two", "research")

    for question in (
        q.GetThread(session=SESSION, thread_id="nowhere"),
        q.ListTurns(session=SESSION, thread_id="nowhere"),
        q.LoadThread(session=SESSION, thread_id="nowhere", first=1, last=1),
        q.GetWorkspace(session=SESSION, thread_id="nowhere"),
        q.GetEntry(session=SESSION, thread_id="nowhere", path=("a",)),
        q.ListEntries(session=SESSION, thread_id="nowhere"),
        q.EntriesAt(session=SESSION, thread_id="nowhere", at=1),
        q.GetContent(session=SESSION, thread_id="main", number=1),
        q.GetTurn(session=SESSION, thread_id="main", turn_id=other),
        q.GetOutcome(session=SESSION, thread_id="main", turn_id=other),
        q.ListTools(session=SESSION, thread_id="main", turn_id=other),
        q.ListInteractions(session=SESSION, thread_id="main", turn_id=other),
        q.OpenWork(session=SESSION, thread_id="main", turn_id=other),
        q.ListRuns(session=SESSION, thread_id="main", turn_id=other),
        q.GetRun(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{other}.1"),
        q.GetRun(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.2"),
        q.ListSteps(session=SESSION, thread_id="main", turn_id=turn, run_id="no number"),
        q.ListModelCalls(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.9"),
        q.ListModelCalls(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.1", step_id="nowhere"),
    ):
        with pytest.raises(NotFound):
            await world.ask(question)


@pytest.mark.spec("FI-01", "FI-03")
async def test_a_filter_over_things_that_are_not_inside_each_other_is_refused_alike_everywhere() -> None:
    world = await World().open("research")
    turn = await world.answer_turn("one")
    other = await world.answer_turn("two", "research")

    for narrow in (
        EventFilter(thread_id="nowhere"),
        EventFilter(thread_id="research", turn_id=turn),
        EventFilter(thread_id="main", turn_id=turn, run_id=f"{other}.1"),
        EventFilter(thread_id="main", turn_id=turn, run_id="anything"),
    ):
        for kind in (q.ListEvents, q.GetSnapshot, q.GetHistory):
            with pytest.raises(NotFound):
                await world.ask(kind(session=SESSION, filter=narrow))


# ---- Sessions and Threads ----


@pytest.mark.spec("RT-16")
async def test_sessions_of_one_namespace_are_paged(world: World) -> None:
    names = [f"s{number}" for number in range(1, 6)]
    for namespace, name in [("app", name) for name in names] + [("app2", "s1"), ("ap", "p")]:
        await world.do(c.CreateSession(session=SessionKey(namespace, name), binding=BINDING))

    for limit in (1, 2, 5, 100):
        found = await world.pages(q.ListSessions(namespace="app", limit=limit))
        assert [view.session for view in found] == [SessionKey("app", name) for name in names]
    assert (await world.pages(q.ListSessions(namespace="nobody"))) == []


async def test_a_listing_that_fits_its_page_exactly_has_no_cursor(world: World) -> None:
    page = await world.ask(q.ListSessions(namespace="app", limit=1))

    assert (len(page), page.cursor) == (1, None)


@pytest.mark.spec("RT-17", "RT-43")
async def test_sessions_and_threads_show_what_they_are(world: World) -> None:
    session = await world.ask(q.GetSession(session=SESSION))
    thread = await world.ask(q.GetThread(session=SESSION, thread_id="main"))

    assert (session.session, session.status) == (SESSION, ResourceStatus.OPEN)
    assert (thread.binding.harness, thread.binding.definition_version) == ("assistant", "v1")
    assert thread.current_turn_id is None
    turn = await world.submit()
    assert (await world.ask(q.GetThread(session=SESSION, thread_id="main"))).current_turn_id == turn


@pytest.mark.spec("RT-17")
async def test_threads_are_paged() -> None:
    world = await World().open("a", "b/c", "d")

    found = await world.pages(q.ListThreads(session=SESSION, limit=2))

    assert sorted(view.thread_id for view in found) == ["a", "b/c", "d", "main"]


# ---- Turns ----


@pytest.mark.spec("Q-10")
async def test_the_turns_of_a_thread_are_listed_in_the_order_of_admission(world: World) -> None:
    turns = [await world.submit(str(number)) for number in range(5)]

    found = await world.pages(q.ListTurns(session=SESSION, thread_id="main", limit=2))

    assert [(view.turn_id, view.ordinal) for view in found] == list(zip(turns, range(1, 6), strict=True))


async def test_a_turn_under_way_shows_the_state_its_owner_last_committed(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await world.do(c.Pause(session=SESSION, thread_id="main", turn_id=turn, request_id="p"))

    view = await world.turn(turn)
    [listed] = await world.pages(q.ListTurns(session=SESSION, thread_id="main"))

    assert (view.status, view.runs) == (TurnStatus.PAUSING, 1)
    assert listed == view


async def test_the_owner_of_a_running_turn_and_the_age_of_its_lease_are_shown(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    world.clock.advance(4000)

    lease = (await world.turn(turn)).lease

    assert lease is not None
    assert (lease.owner, lease.fence, lease.age_ms, lease.alive) == (HOST, 1, 4000, True)


async def test_a_turn_whose_owner_is_gone_waits_for_a_host(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    world.clock.advance(31_000)

    view = await world.turn(turn)

    assert (view.status, view.lease and view.lease.alive) == (TurnStatus.RUNNING, False)
    assert [waiting.kind for waiting in view.waiting_on] == [WaitKind.HOST]


async def test_a_turn_nobody_has_claimed_says_whether_its_definition_or_a_host_is_missing(world: World) -> None:
    first = await world.submit()
    second = await world.submit()

    async def kinds(turn: str) -> list[tuple[WaitKind, str]]:
        return [(waiting.kind, waiting.id) for waiting in (await world.turn(turn)).waiting_on]

    assert await kinds(first) == [(WaitKind.HOST, "assistant@v1")], "no host at all"
    world.alive("host-9", msgspec.json.encode(HostNotice(classes=("another",))))
    assert await kinds(first) == [(WaitKind.DEFINITION_MISSING, "assistant@v1")]
    world.alive("host-8", b"published by something newer")
    assert await kinds(first) == [(WaitKind.DEFINITION_MISSING, "assistant@v1")]
    world.alive(HOST)
    assert await kinds(first) == [(WaitKind.HOST, "assistant@v1")], "a host could, and has not yet"
    assert await kinds(second) == [], "it stands behind another one"
    await world.claim()
    assert await kinds(first) == []


async def test_a_turn_that_waits_for_an_answer_does_not_wait_for_a_host(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await ask_approval(world)
    await world.commit(end=c.RunEnd(kind=c.RunEndKind.SUSPENDED))

    assert [waiting.kind for waiting in (await world.turn(turn)).waiting_on] == [WaitKind.APPROVAL]


@pytest.mark.spec("RT-21")
async def test_asking_changes_nothing(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await world.say("hello")
    before = await world.store.read(keys.partition(SESSION), Reads())

    for question in UNKNOWN:
        changes = {"turn_id": turn} if hasattr(question, "turn_id") else {}
        if hasattr(question, "run_id"):
            changes["run_id"] = f"{turn}.1"
        if isinstance(question, q.GetMessage):
            changes["message_id"] = f"{turn}.r1"
        if isinstance(question, q.GetContent | q.GetDropped):
            # There is none, and it is open, which is asked about elsewhere.
            continue
        await world.ask(replace(question, **changes))

    assert await world.store.read(keys.partition(SESSION), Reads()) == before


# ---- events ----


@pytest.mark.spec("EV-01", "EV-03", "EV-06")
async def test_events_are_numbered_without_a_gap_and_read_the_same_however_they_are_paged(world: World) -> None:
    for number in range(3):
        await world.answer_turn(str(number))
    whole = await world.events()

    assert [event.sequence for event in whole] == list(range(1, len(whole) + 1))
    assert [event.type for event in whole[:4]] == [
        "session.created",
        "thread.created",
        "message.completed",
        "turn.status",
    ]
    for limit in (1, 2, 7):
        assert await world.events(limit=limit) == whole


async def test_an_event_says_when_and_where_it_happened(world: World) -> None:
    world.clock.advance(1000)
    turn = await world.submit("hello")

    event = next(event for event in await world.events() if event.type == "message.completed")

    assert event.at_ms == world.clock.wall_ms()
    assert (event.session, event.thread_id, event.turn_id, event.run_id) == (SESSION, "main", turn, None)
    assert event.data["content"] == [{"type": "text", "text": "hello"}]


@pytest.mark.spec("FI-10", "FI-11", "FI-12")
async def test_the_limit_counts_the_events_looked_at(world: World) -> None:
    await World().open()
    await world.do(c.CreateThread(session=SESSION, thread_id="research", binding=BINDING))
    for number in range(8):
        await world.answer_turn(str(number))
    mine = await world.submit("mine", "research")
    narrow = EventFilter(thread_id="research", turn_id=mine)

    page: EventPage = await world.ask(q.ListEvents(session=SESSION, filter=narrow, limit=50))

    assert page.events == ()
    assert sequence_of(SESSION, page.cursor) == 50
    assert page.cursor != page.high_watermark
    found = await world.events(narrow, limit=7)
    whole = await world.events()
    assert found == [event for event in whole if matches(narrow, event)]
    assert [event.sequence for event in found] == [len(whole) - 1, len(whole)]


async def test_a_turn_can_be_read_from_its_own_beginning(world: World) -> None:
    for number in range(8):
        await world.answer_turn(str(number))
    mine = await world.submit("mine")
    narrow = EventFilter(thread_id="main", turn_id=mine)

    page: EventPage = await world.ask(q.ListEvents(session=SESSION, filter=narrow, limit=3, seek=True))
    again: EventPage = await world.ask(
        q.ListEvents(session=SESSION, filter=narrow, cursor=page.events[0].cursor, limit=3, seek=True)
    )

    assert list(page.events) == await world.events(narrow)
    assert page.cursor == page.high_watermark
    assert again.events == page.events[1:]
    with pytest.raises(NotFound):
        await world.ask(
            q.ListEvents(session=SESSION, filter=EventFilter(thread_id="main", turn_id="nobody's"), seek=True)
        )


async def test_events_of_some_types_can_be_read_alone(world: World) -> None:
    await world.answer_turn("one")
    whole = await world.events()

    page: EventPage = await world.ask(q.ListEvents(session=SESSION, types=("turn.status", "x.app.none"), limit=1000))

    assert list(page.events) == [event for event in whole if event.type == "turn.status"]
    assert page.cursor == whole[-1].cursor


async def test_watermarks_tell_which_sessions_have_moved(world: World) -> None:
    whole = await world.events()
    nobody = SessionKey("app", "nobody's")

    assert await world.ask(q.Watermarks(sessions=(nobody, SESSION))) == (0, len(whole))
    with pytest.raises(InvalidRequest, match="1000 sessions"):
        await world.ask(q.Watermarks(sessions=(SESSION,) * 1001))


async def test_a_reader_that_has_caught_up_gets_an_empty_page(world: World) -> None:
    [*_, last] = await world.events()

    page: EventPage = await world.ask(q.ListEvents(session=SESSION, cursor=last.cursor))

    assert (page.events, page.cursor, page.high_watermark) == ((), last.cursor, last.cursor)


@pytest.mark.parametrize(
    "cursor",
    ["", "nonsense", "e1-000000000000-1", cursor_of(SessionKey("app", "s2"), 1), cursor_of(SESSION, 3)],
    ids=["empty", "malformed", "foreign mark", "of another session", "of the future"],
)
async def test_a_cursor_that_this_session_did_not_give_is_refused(world: World, cursor: str) -> None:
    assert len(await world.events()) == 2

    with pytest.raises(InvalidCursor):
        await world.ask(q.ListEvents(session=SESSION, cursor=cursor))


@pytest.mark.parametrize("limit", [0, -1, 1001, True, 2.0, "5", None])
async def test_a_limit_is_a_whole_number_from_1_to_1000(world: World, limit: Any) -> None:
    for kind in (q.ListEvents, q.GetHistory, q.ListThreads):
        with pytest.raises(InvalidRequest, match="limit"):
            await world.ask(kind(session=SESSION, limit=limit))


@pytest.mark.spec("EV-06")
@pytest.mark.parametrize("of", ["middle", "end", "all"])
async def test_a_hole_in_the_log_is_said_and_neither_passed_over_nor_waited_for(world: World, of: str) -> None:
    await world.answer_turn("one")
    whole = await world.events()
    log = world.store._sessions[keys.partition(SESSION)].log
    gone = {"middle": slice(1, 2), "end": slice(-1, None), "all": slice(None)}[of]
    missing = log[gone][0].first
    del log[gone]

    with pytest.raises(CorruptRecord, match=f"event {missing}'"):
        await world.events()
    with pytest.raises(CorruptRecord, match=f"event {missing}'"):
        await world.ask(q.ListEvents(session=SESSION, cursor=cursor_of(SESSION, missing - 1), limit=1))
    if of != "all":
        before: EventPage = await world.ask(q.ListEvents(session=SESSION, limit=missing - 1))
        assert before.events == tuple(whole[: missing - 1])


@pytest.mark.spec("EV-19")
async def test_a_cursor_below_what_was_pruned_has_expired_and_no_cursor_reads_what_is_kept(world: World) -> None:
    await world.answer_turn("one")
    whole = await world.events()
    await world.prune(4)

    kept = await world.events()

    with pytest.raises(CursorExpired) as caught:
        await world.ask(q.ListEvents(session=SESSION, cursor=cursor_of(SESSION, 3)))
    assert caught.value.oldest == 4
    assert kept == whole[4:]
    assert (await world.ask(q.ListEvents(session=SESSION, cursor=cursor_of(SESSION, 4)))).events == tuple(kept)


async def test_a_large_body_comes_back_in_plain(world: World) -> None:
    await world.submit(LARGE)

    event = next(event for event in await world.events() if event.type == "message.completed")

    assert event.data["content"] == [{"type": "text", "text": LARGE}]
    assert (await world.snapshot()).projection.history()[0].text == LARGE
    assert (await world.history())[0].text == LARGE


async def test_a_page_of_large_bodies_ends_early_and_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        await world.submit(f"{number}{LARGE}")
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 150_000)

    page: EventPage = await world.ask(q.ListEvents(session=SESSION))
    messages: Page = await world.ask(q.GetHistory(session=SESSION))

    assert 0 < len(page.events) < len(await world.events())
    assert len(messages) == 1
    assert [message.text[0] for message in await world.history()] == ["0", "1", "2", "3"]
    monkeypatch.setattr(pages, "PAGE_BYTES_MAX", 1)
    assert len(await world.history()) == 4, "one item always fits"


@pytest.mark.spec("EV-13")
async def test_an_applications_own_event_is_shown_as_it_was_written(world: World) -> None:
    await world.submit()
    await world.claim()
    value = {"step": 1, "nested": [None, "[]"]}
    await world.commit(events=(c.CustomEvent(type="x.app.note", value=body_of(value)),))

    [event] = [event for event in await world.events() if event.type == "x.app.note"]

    assert event.data == {"value": value}


@pytest.mark.spec("EV-12", "PR-06")
async def test_events_of_an_older_release_are_read_and_folded(world: World) -> None:
    turn = await world.submit()
    run = f"{turn}.1"
    await world.write(
        count=1, events=stored_event("message.delta", {"messageId": f"{turn}.r1", "delta": "Hel"}, turn, run)
    )
    await world.write(count=1, events=stored_event("tool.call.arguments", {"callId": "c1", "delta": "{"}, turn, run))

    events = await world.events()
    projection = (await world.snapshot()).projection

    assert [event.data for event in events[-2:]] == [
        {"messageId": f"{turn}.r1", "delta": "Hel"},
        {"callId": "c1", "delta": "{"},
    ]
    assert projection.messages[f"{turn}.r1"].text == "Hel"
    assert projection.tools[tool_key("main", turn, "c1")].arguments == "{"
    assert projection == world.fold(events)


# ---- snapshots ----


@pytest.mark.spec("ST-33", "PR-15")
async def test_a_snapshot_and_the_events_after_its_cursor_give_the_next_snapshot(world: World) -> None:
    await world.answer_turn("one")
    snapshot = await world.snapshot()
    await world.answer_turn("two")

    projection = EventProjection(SESSION)
    projection.reset(snapshot)
    page: EventPage = await world.ask(q.ListEvents(session=SESSION, cursor=snapshot.cursor))
    for event in page.events:
        _ = projection.accept(event)

    assert projection.snapshot() == await world.snapshot()


async def test_a_snapshot_may_be_taken_before_anything_happened_after_its_turn_began(world: World) -> None:
    turn = await world.submit()
    narrow = EventFilter(thread_id="main", turn_id=turn)

    snapshot = await world.snapshot(narrow)

    assert set(snapshot.projection.turns) == {turn}
    assert set(snapshot.projection.messages) == {f"{turn}.input"}
    assert snapshot.filter == narrow


async def test_a_snapshot_has_a_named_bound_and_a_turn_does_not_pay_for_what_was_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        await world.answer_turn(str(number))
    turn = await world.answer_turn("last")
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVENTS_MAX", 12)

    with pytest.raises(SnapshotTooLarge, match="SNAPSHOT_EVENTS_MAX"):
        await world.snapshot()
    assert set((await world.snapshot(EventFilter(thread_id="main", turn_id=turn))).projection.turns) == {turn}
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVENTS_MAX", 1000)
    monkeypatch.setattr(snapshots, "SNAPSHOT_SCAN_MAX", 20)
    with pytest.raises(SnapshotTooLarge, match="SNAPSHOT_SCAN_MAX"):
        await world.snapshot()
    assert set((await world.snapshot(EventFilter(thread_id="main", turn_id=turn))).projection.turns) == {turn}
    monkeypatch.setattr(snapshots, "SNAPSHOT_SCAN_MAX", 1000)
    monkeypatch.setattr(snapshots, "SNAPSHOT_BYTES_MAX", 100)
    with pytest.raises(SnapshotTooLarge, match="SNAPSHOT_BYTES_MAX"):
        await world.snapshot()


@pytest.mark.spec("PR-02")
async def test_a_snapshot_is_of_one_moment_however_long_it_takes(world: World) -> None:
    for number in range(5):
        await world.answer_turn(str(number))
    whole = await world.events()
    original = world.store.read

    async def read(partition: str, reads: Reads) -> Records:
        if reads.log is not None:
            # Somebody writes between any two reads of the log.
            await world.submit("meanwhile")
        return await original(partition, reads)

    world.store.read = read  # type: ignore[method-assign]
    snapshot = await world.snapshot()

    assert snapshot.cursor == cursor_of(SESSION, len(whole))
    assert snapshot.projection == world.fold(whole)


@pytest.mark.spec("PR-01")
async def test_a_snapshot_is_json_and_holds_nothing_native(world: World) -> None:
    await world.submit()
    await world.claim()
    await world.commit(journal=b'["SECRET-NATIVE"]', checkpoint=True, base=True)
    await world.say("hello")

    stored = msgspec.json.encode(await world.snapshot())

    assert msgspec.json.decode(stored, type=SnapshotView) == await world.snapshot()
    assert b"SECRET-NATIVE" not in stored


# ---- history ----


@pytest.mark.spec("PR-10", "PR-11", "PR-13")
async def test_history_is_paged_in_the_order_of_first_sequence(world: World) -> None:
    for number in range(3):
        await world.answer_turn(str(number))

    texts = ["0", "answer to 0", "1", "answer to 1", "2", "answer to 2"]
    for limit in (1, 2, 4, 6, 1000):
        assert [message.text for message in await world.history(limit=limit)] == texts
    exact: Page = await world.ask(q.GetHistory(session=SESSION, limit=6))
    assert exact.cursor is None


@pytest.mark.spec("PR-11", "PR-18", "EV-17")
async def test_a_message_that_is_completed_again_keeps_its_place_in_history(world: World) -> None:
    await world.submit("question")
    await world.claim()
    message_id = await world.say("draft")
    first = (await world.history())[1]
    await world.say("next round", reasoning=2)
    world.clock.advance(5000)
    await world.say("final", revision=2, first_seq=first.sequence)

    history = await world.history()

    assert [message.text for message in history] == ["question", "final", "next round"]
    assert (history[1].id, history[1].revision, history[1].created_at_ms) == (message_id, 2, first.created_at_ms)
    assert history == (await world.snapshot()).projection.history()
    assert await world.ask(q.GetMessage(session=SESSION, message_id=message_id)) == history[1]


async def test_an_input_that_was_taken_back_or_came_too_late_says_so_in_history(world: World) -> None:
    turn = await world.submit("question")
    await world.claim()
    for request, kind in (("s1", "steer"), ("s2", "inject")):
        await world.do(
            c.AddInput(
                session=SESSION,
                thread_id="main",
                turn_id=turn,
                request_id=request,
                kind=kind,
                content=await world.text(request),
                digest=request,
            )
        )
    await world.do(c.Withdraw(session=SESSION, thread_id="main", turn_id=turn, request_id="w", target_request_id="s1"))
    await world.finish()

    history = await world.history()

    assert [(message.text, message.withdrawn, message.expired) for message in history] == [
        ("question", False, False),
        ("s1", True, False),
        ("s2", False, True),
    ]
    assert history == (await world.snapshot()).projection.history()


@pytest.mark.spec("RT-57", "FI-01")
async def test_history_is_narrowed_to_a_thread_a_turn_or_a_run() -> None:
    world = await World().open("research")
    await world.answer_turn("before")
    other = await world.answer_turn("elsewhere", "research")
    turn = await world.answer_turn("here")
    await world.answer_turn("after")

    async def texts(narrow: EventFilter) -> list[str]:
        return [message.text for message in await world.history(narrow, limit=1)]

    assert await texts(EventFilter(thread_id="research")) == ["elsewhere", "answer to elsewhere"]
    assert await texts(EventFilter(thread_id="main", turn_id=turn)) == ["here", "answer to here"]
    assert await texts(EventFilter(thread_id="research", turn_id=other, run_id=f"{other}.1")) == ["answer to elsewhere"]


async def test_a_message_is_found_by_its_id_wherever_it_came_from(world: World) -> None:
    turn = await world.submit("question")
    await world.claim()
    interaction = await ask_approval(world)
    await world.do(
        c.Respond(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            request_id="a",
            interaction_id=interaction,
            response=body_of(True),
            result=body_of({"value": True}),
            digest="d",
            content=await world.text("yes"),
            is_bool=True,
            approved=True,
        )
    )
    await world.do(
        c.AddInput(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            request_id="s",
            kind="steer",
            content=await world.text("and more"),
            digest="d",
        )
    )
    await world.say("one round", reasoning=1)
    await world.say("the answer", reasoning=2)

    for message in await world.history():
        assert await world.ask(q.GetMessage(session=SESSION, message_id=message.id)) == message
    for unknown in (f"{turn}.r3", "nothing", ""):
        with pytest.raises(NotFound):
            await world.ask(q.GetMessage(session=SESSION, message_id=unknown))


@pytest.mark.spec("RT-58")
async def test_the_outcome_of_a_turn_is_its_status_and_the_answer_it_named(world: World) -> None:
    """The answer need not be what the agent said last, and may have been said again since."""

    async def outcome(turn: str) -> OutcomeView:
        return await world.ask(q.GetOutcome(session=SESSION, thread_id="main", turn_id=turn))

    turn = await world.submit("question")
    assert await outcome(turn) == OutcomeView(status=TurnStatus.QUEUED)
    await world.claim()
    answer = await world.say("a draft", reasoning=1)
    [_, draft] = await world.history()
    await world.say("the answer", reasoning=1, revision=2, first_seq=draft.sequence)
    await world.say("an afterthought", reasoning=2)
    assert await outcome(turn) == OutcomeView(status=TurnStatus.RUNNING)
    await world.finish(message_id=answer)
    told = await outcome(turn)
    assert told.status is TurnStatus.COMPLETED
    assert told.message is not None
    assert told.message.text == "the answer"
    assert told.message == await world.ask(q.GetMessage(session=SESSION, message_id=answer))

    silent = await world.submit("say nothing")
    await world.claim()
    await world.finish()
    assert await outcome(silent) == OutcomeView(status=TurnStatus.COMPLETED)

    failed = await world.submit("fail")
    await world.claim()
    await world.commit(end=c.RunEnd(kind=c.RunEndKind.FAILED, failure=Failure("ValueError", "no", False)))
    claimed = await world.claim()
    settle = c.SettleTurn(
        session=SESSION,
        thread_id="main",
        turn_id=failed,
        run_id="",
        fence=claimed.fence,
        expected_position=claimed.position,
    )
    await world.do(settle)
    assert await outcome(failed) == OutcomeView(status=TurnStatus.FAILED, error=(await world.turn(failed)).error)


async def test_looking_for_one_message_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MESSAGE_SCAN_MAX", 20)
    for number in range(100):
        await world.submit(str(number))

    with pytest.raises(LimitExceeded, match="MESSAGE_SCAN_MAX"):
        await world.ask(q.GetMessage(session=SESSION, message_id="nothing"))


# ---- interactions and tools ----


async def ask_approval(world: World, call: str = "c1", arguments: object = None) -> str:
    turn = world.runs["main"].turn_id
    interaction = ids.interaction_id(turn, call)
    body = await world.body(arguments or {"path": "/"})
    await world.commit(
        tools=(c.ToolCommit(call_id=call, state=ExecutionState.AWAITING_APPROVAL, name="rm", arguments=body),),
        interactions=(
            c.InteractionCommit(
                interaction_id=interaction, call_id=call, kind=InteractionKind.APPROVAL, name="rm", arguments=body
            ),
        ),
    )
    return interaction


@pytest.mark.spec("IN-01")
async def test_pending_interactions_are_listed_with_their_arguments(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    first = await ask_approval(world, "c1", {"path": LARGE})
    world.clock.advance(1)
    second = await ask_approval(world, "c2", ["exact text"])

    async def listed(*, pending_only: bool) -> list[InteractionView]:
        return await world.ask(
            q.ListInteractions(session=SESSION, thread_id="main", turn_id=turn, pending_only=pending_only)
        )

    pending = await listed(pending_only=True)
    assert [(view.interaction_id, view.arguments) for view in pending] == [
        (first, {"path": LARGE}),
        (second, ["exact text"]),
    ]
    await world.do(
        c.Respond(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            request_id="a",
            interaction_id=first,
            response=body_of(False),
            result=body_of({"value": False}),
            digest="d",
            content=await world.text("no"),
            is_bool=True,
        )
    )
    assert [view.interaction_id for view in await listed(pending_only=True)] == [second]
    every = await listed(pending_only=False)
    assert [(view.state, view.response, view.request_id) for view in every] == [
        (InteractionState.RESOLVED, False, "a"),
        (InteractionState.PENDING, None, None),
    ]


async def external_tool(world: World, call: str = "c1", arguments: object = None) -> str:
    turn = world.runs["main"].turn_id
    await world.commit(
        tools=(
            c.ToolCommit(
                call_id=call,
                state=ExecutionState.INTENT,
                name="search",
                kind=ExecutionKind.EXTERNAL,
                arguments=await world.body(arguments or {"q": call}),
                route="hands",
            ),
        )
    )
    return ids.execution_id(turn, call)


async def tools_of(world: World, turn: str) -> list[ToolView]:
    return await world.ask(q.ListTools(session=SESSION, thread_id="main", turn_id=turn))


@pytest.mark.spec("PR-07", "PR-08", "PR-09")
async def test_an_external_call_is_shown_from_its_intent_to_its_application(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    execution = await external_tool(world)
    states: list[ToolView] = await tools_of(world, turn)
    command = {"session": SESSION, "thread_id": "main", "turn_id": turn, "call_id": "c1"}
    await world.do(c.ClaimExecution(**command, owner=HOST))
    states += await tools_of(world, turn)
    await world.do(
        c.RecordOutcome(
            **command,
            execution_id=execution,
            state=ExecutionState.COMPLETED,
            result=await world.body({"state": "success", "value": LARGE}),
        )
    )
    states += await tools_of(world, turn)
    await world.commit(tools=(c.ToolCommit(call_id="c1", state=ExecutionState.COMPLETED, applied=True),))
    states += await tools_of(world, turn)

    assert [(view.state, view.received_at_ms is not None, view.applied_at_ms is not None) for view in states] == [
        (ExecutionState.INTENT, False, False),
        (ExecutionState.RUNNING, False, False),
        (ExecutionState.COMPLETED, True, False),
        (ExecutionState.COMPLETED, True, True),
    ]
    final = states[-1]
    assert (final.execution_id, final.arguments) == (execution, {"q": "c1"})
    assert final.result == {"state": "success", "value": LARGE}
    assert final.origin == RunStepRefView(f"{turn}.1", "")
    assert final.applied_at == RunStepRefView(f"{turn}.1", "")
    assert (await world.snapshot()).projection.tools[tool_key("main", turn, "c1")] == final


@pytest.mark.spec("PR-07")
async def test_a_local_call_shows_its_arguments_and_no_execution_id(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    for call in ("c2", "c1"):
        world.clock.advance(1)
        await world.commit(
            tools=(
                c.ToolCommit(
                    call_id=call, state=ExecutionState.RUNNING, name="ls", arguments=await world.body({"call": call})
                ),
            )
        )
        await world.commit(
            tools=(
                c.ToolCommit(
                    call_id=call, state=ExecutionState.COMPLETED, result=body_of({"value": call}), applied=True
                ),
            )
        )

    found = await tools_of(world, turn)

    assert [(view.call_id, view.execution_id, view.arguments) for view in found] == [
        ("c2", None, {"call": "c2"}),
        ("c1", None, {"call": "c1"}),
    ]
    assert [view.result for view in found] == [{"value": "c2"}, {"value": "c1"}]
    projection = (await world.snapshot()).projection
    assert {tool_key("main", turn, view.call_id): view for view in found} == projection.tools


async def test_calls_of_one_commit_are_listed_in_the_order_of_their_events(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await world.commit(
        tools=tuple(
            c.ToolCommit(call_id=call, state=ExecutionState.RUNNING, name="ls", arguments=body_of({"call": call}))
            for call in ("z", "a")
        )
    )
    requested = {
        event.data["callId"]: event.sequence for event in await world.events() if event.type == "tool.requested"
    }

    def note(view: View, now_ms: int) -> Change | Unchanged:
        assert view.head is not None
        found = {call: view.get(keys.execution(turn, call)) or b"" for call in requested}
        puts = tuple(
            (keys.execution(turn, call), encode(replace(decode(ExecutionRecord, data), requested_seq=requested[call])))
            for call, data in found.items()
        )
        return Change(head=view.head, commit_id=f"{now_ms:032x}", puts=puts)

    await world.store.transact(keys.partition(SESSION), Reads(), note)

    found = await tools_of(world, turn)
    work: OpenWorkView = await world.ask(q.OpenWork(session=SESSION, thread_id="main", turn_id=turn))

    assert [(view.call_id, view.arguments) for view in found] == [("z", {"call": "z"}), ("a", {"call": "a"})]
    assert [record.call_id for record in work.executions] == ["z", "a"]


# ---- Runs, Steps and model calls ----


async def step(world: World, number: int, *, phase: StepPhase = StepPhase.REASONING, **more: Any) -> str:
    run = world.runs["main"].run_id
    fact = StepFact(ids.step_id(run, number), run, number, phase, **more)
    await world.commit(steps=(fact,))
    return fact.step_id


def model(world: World, number: int, status: ModelStatus, step_id: str = "", **more: Any) -> ModelFact:
    run = world.runs["main"].run_id
    more.setdefault("request", 1)
    return ModelFact(ids.model_call_id(run, number), run, step_id, status=status, **more)


async def take_over(world: World, turn: str) -> None:
    """Another host finds the owner dead."""
    world.clock.advance(40_000)
    claimed = await world.claim(owner="host-2")
    assert claimed.turn_id == turn


async def calls(world: World, turn: str, run: int = 1, limit: int = 100, step_id: str | None = None) -> list[Any]:
    return await world.pages(
        q.ListModelCalls(
            session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.{run}", step_id=step_id, limit=limit
        )
    )


@pytest.mark.spec("RT-08", "RT-09", "RT-44")
async def test_each_invocation_is_a_run_of_its_own(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await step(world, 1)
    await take_over(world, turn)
    await world.finish()

    runs = await world.pages(q.ListRuns(session=SESSION, thread_id="main", turn_id=turn, limit=1))

    assert [(run.run_id, run.number, run.status, run.owner) for run in runs] == [
        (f"{turn}.1", 1, RunStatus.LOST, HOST),
        (f"{turn}.2", 2, RunStatus.COMPLETED, "host-2"),
    ]
    assert runs[1].resumed_from_step_id == f"{turn}.1.s1"
    assert runs[0].ended_at_ms == runs[1].started_at_ms
    for run in runs:
        question = q.GetRun(session=SESSION, thread_id="main", turn_id=turn, run_id=run.run_id)
        assert await world.ask(question) == run


async def test_a_run_that_failed_keeps_its_error(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await world.commit(end=c.RunEnd(kind=c.RunEndKind.FAILED, failure=Failure("ValueError", "no", True)))

    [run] = await world.pages(q.ListRuns(session=SESSION, thread_id="main", turn_id=turn))

    assert run.status is RunStatus.FAILED
    assert run.error is not None
    assert (run.error.kind, run.error.message) == ("ValueError", "no")


@pytest.mark.spec("RT-46", "RT-47", "RT-48")
async def test_steps_are_told_by_the_facts_of_their_run(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    started = world.clock.wall_ms()
    await step(world, 1, reasoning=1)
    world.clock.advance(10)
    await step(world, 1, phase=StepPhase.ACTING, reasoning=1)
    world.clock.advance(10)
    await step(world, 1, phase=StepPhase.ACTING, status=StepStatus.COMPLETED)
    await step(world, 2, reasoning=2)
    await take_over(world, turn)
    await step(world, 1, phase=StepPhase.FINALIZATION, resumed_from=f"{turn}.1.s2")

    first = await steps(world, turn, 1)
    second = await steps(world, turn, 2)

    assert first[0] == StepView(
        step_id=f"{turn}.1.s1",
        run_id=f"{turn}.1",
        number=1,
        phase=StepPhase.ACTING,
        status=StepStatus.COMPLETED,
        started_at_ms=started,
        ended_at_ms=started + 20,
        reasoning=1,
    )
    assert (first[1].status, first[1].reasoning) == (StepStatus.INTERRUPTED, 2)
    assert [(view.phase, view.status, view.resumed_from_step_id) for view in second] == [
        (StepPhase.FINALIZATION, StepStatus.RUNNING, f"{turn}.1.s2")
    ]


async def steps(world: World, turn: str, run: int = 1, limit: int = 100) -> list[StepView]:
    return await world.pages(
        q.ListSteps(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.{run}", limit=limit)
    )


async def test_steps_are_paged_and_a_page_reads_no_further_than_it_shows(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    for number in range(1, 13):
        await step(world, number)
        await step(world, number, status=StepStatus.COMPLETED)

    whole = await steps(world, turn)

    assert [view.number for view in whole] == list(range(1, 13))
    for limit in (1, 5, 12):
        assert await steps(world, turn, limit=limit) == whole
    queries_rows = world.store.rows
    page = await world.ask(q.ListSteps(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.1", limit=1))
    assert page.cursor is not None
    assert world.store.rows - queries_rows <= reading.LOG_ROWS


async def test_a_step_that_ends_and_begins_in_one_commit_is_on_one_page(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    run = world.runs["main"].run_id
    await step(world, 1)
    for number in range(1, 5):
        await world.commit(
            steps=(
                StepFact(ids.step_id(run, number), run, number, StepPhase.ACTING, StepStatus.COMPLETED),
                StepFact(ids.step_id(run, number + 1), run, number + 1, StepPhase.REASONING),
            )
        )

    whole = await steps(world, turn)

    assert [view.number for view in whole] == [1, 2, 3, 4, 5]
    for limit in (1, 2, 3):
        assert await steps(world, turn, limit=limit) == whole


@pytest.mark.spec("MC-01", "MC-02", "MC-04", "MC-05", "MC-09")
async def test_a_call_holds_each_of_its_requests_and_the_usage_that_is_known(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    first = await step(world, 1)
    usage = Usage(input_tokens=10, output_tokens=5, cache_read_tokens=4)
    common = {"model": "m", "observation": ModelObservation.PROVIDER_ATTEMPTS, "message_id": "msg"}
    await world.commit(models=(model(world, 1, ModelStatus.STARTED, first, **common),))
    await world.commit(
        models=(
            model(world, 1, ModelStatus.FAILED, first, **common, error="429", elapsed_ms=7),
            model(world, 1, ModelStatus.STARTED, first, **common, request=2),
        )
    )
    await world.commit(
        models=(
            model(
                world, 1, ModelStatus.COMPLETED, first, **common, request=2, usage=usage, complete=True, elapsed_ms=30
            ),
        )
    )
    second = await step(world, 2)
    await world.commit(
        models=(
            model(world, 2, ModelStatus.STARTED, second, model="small", purpose=ModelPurpose.COMPRESSION),
            model(world, 2, ModelStatus.COMPLETED, second, model="small", purpose=ModelPurpose.COMPRESSION),
        )
    )

    [reply, compression] = await calls(world, turn)

    assert (reply.status, reply.observation, reply.retries) == (
        ModelStatus.COMPLETED,
        ModelObservation.PROVIDER_ATTEMPTS,
        1,
    )
    assert [(r.number, r.status, r.elapsed_ms, r.error) for r in reply.requests] == [
        (1, ModelStatus.FAILED, 7, "429"),
        (2, ModelStatus.COMPLETED, 30, None),
    ]
    assert reply.usage == UsageView(input_tokens=10, output_tokens=5, cache_read_tokens=4)
    assert not reply.usage_complete, "what the failed request used is not known"
    assert (reply.elapsed_ms, reply.message_id, reply.step_id) == (37, "msg", first)
    assert (compression.purpose, compression.usage, compression.usage_complete) == (
        ModelPurpose.COMPRESSION,
        None,
        False,
    )
    assert await calls(world, turn, step_id=second) == [compression]
    assert await calls(world, turn, limit=1) == [reply, compression]


@pytest.mark.spec("MC-07")
async def test_a_call_that_shows_only_itself_keeps_its_own_end_and_usage(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await world.commit(
        models=(
            model(world, 1, ModelStatus.STARTED, request=0),
            model(world, 1, ModelStatus.STARTED),
            model(world, 1, ModelStatus.COMPLETED),
            model(
                world,
                1,
                ModelStatus.COMPLETED,
                request=0,
                usage=Usage(input_tokens=3),
                complete=True,
                elapsed_ms=44,
            ),
        )
    )

    [call] = await calls(world, turn)

    assert (call.observation, call.status, len(call.requests)) == (
        ModelObservation.MODEL_CALL,
        ModelStatus.COMPLETED,
        1,
    )
    assert (call.usage, call.usage_complete, call.elapsed_ms) == (UsageView(input_tokens=3), True, 44)


@pytest.mark.spec("MC-08", "MC-10")
async def test_a_lost_request_keeps_what_was_known_and_what_is_reported_late(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    known = {"model": "m", "purpose": ModelPurpose.AUXILIARY}
    await world.commit(
        models=(
            model(world, 1, ModelStatus.STARTED, **known),
            model(world, 1, ModelStatus.STARTED, **known, usage=Usage(input_tokens=8)),
            model(world, 2, ModelStatus.STARTED),
        )
    )
    late = model(world, 2, ModelStatus.COMPLETED, usage=Usage(1, 2), complete=True)
    await take_over(world, turn)

    [early, silent] = await calls(world, turn)
    assert (early.status, early.purpose, early.requests[0].model) == (ModelStatus.LOST, ModelPurpose.AUXILIARY, "m")
    assert (early.usage, early.usage_complete) == (UsageView(input_tokens=8), False)
    assert (silent.status, silent.usage, silent.elapsed_ms) == (ModelStatus.LOST, None, None)

    await world.do(c.FileFact(session=SESSION, thread_id="main", turn_id=turn, run_id=f"{turn}.1", model=late))

    [_, reported] = await calls(world, turn)
    assert (reported.status, reported.usage, reported.usage_complete) == (
        ModelStatus.LOST,
        UsageView(input_tokens=1, output_tokens=2),
        True,
    )


async def test_calls_that_overlap_are_paged_once_each(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    await world.commit(models=(model(world, 1, ModelStatus.STARTED), model(world, 2, ModelStatus.STARTED)))
    await world.commit(models=(model(world, 3, ModelStatus.STARTED), model(world, 2, ModelStatus.COMPLETED)))
    await world.commit(models=(model(world, 3, ModelStatus.COMPLETED), model(world, 4, ModelStatus.STARTED)))
    await world.commit(models=(model(world, 1, ModelStatus.COMPLETED), model(world, 4, ModelStatus.FAILED)))
    await world.commit(models=(model(world, 4, ModelStatus.STARTED, request=2), model(world, 5, ModelStatus.STARTED)))

    whole: list[ModelCallView] = await calls(world, turn)

    assert [call.model_call_id.rpartition(".")[2] for call in whole] == ["m1", "m2", "m3", "m4", "m5"]
    for limit in (1, 2, 3, 4):
        assert await calls(world, turn, limit=limit) == whole


async def test_a_cursor_of_one_listing_is_none_of_another(world: World) -> None:
    turn = await world.submit()
    await world.submit()
    await world.claim()
    await step(world, 1)
    await step(world, 1, status=StepStatus.COMPLETED)
    await step(world, 2)
    where = {"session": SESSION, "thread_id": "main", "turn_id": turn}
    turns = (await world.ask(q.ListTurns(session=SESSION, thread_id="main", limit=1))).cursor
    of_steps = (await world.ask(q.ListSteps(**where, run_id=f"{turn}.1", limit=1))).cursor
    await take_over(world, turn)
    assert turns is not None
    assert of_steps is not None

    for question in (
        q.ListTurns(session=SESSION, thread_id="main", cursor=of_steps),
        q.ListRuns(**where, cursor=turns),
        q.ListSteps(**where, run_id=f"{turn}.1", cursor=turns),
        q.ListSteps(**where, run_id=f"{turn}.2", cursor=of_steps),
        q.ListModelCalls(**where, run_id=f"{turn}.1", cursor=of_steps),
        q.GetHistory(session=SESSION, cursor=turns),
        q.ListThreads(session=SESSION, cursor="é"),
        q.ListThreads(session=SESSION, cursor=turns[:-3]),
        q.ListThreads(session=SESSION, cursor=""),
        q.ListEvents(session=SESSION, cursor=turns),
    ):
        with pytest.raises(InvalidCursor):
            await world.ask(question)


async def test_a_cursor_of_a_listing_is_refused_by_the_same_listing_of_another_session(world: World) -> None:
    other = SessionKey("app", "s2")
    await world.do(c.CreateSession(session=other, binding=BINDING))
    asked: list[Any] = []
    for session in (SESSION, other):
        await world.do(c.CreateThread(session=session, thread_id="side", binding=BINDING))
        for number in range(2):
            content = await world.body([{"type": "text", "text": "Hi"}])
            await world.do(
                c.SubmitTurn(
                    session=session, thread_id="main", request_id=f"r{number}", content=content, digest="d" * 64
                )
            )
        asked = [q.ListTurns(session=session, thread_id="main", limit=1), q.ListThreads(session=session, limit=1)]
        asked.append(q.GetHistory(session=session, limit=1))
        if session == SESSION:
            cursors = [(await world.ask(question)).cursor for question in asked]

    for question, cursor in zip(asked, cursors, strict=True):
        assert cursor is not None
        assert len(await world.ask(replace(question, session=SESSION, cursor=cursor))) == 1
        with pytest.raises(InvalidCursor, match="belongs to another session"):
            await world.ask(replace(question, cursor=cursor))


# ---- what a host reads ----


async def test_the_native_rows_of_a_thread_are_loaded_in_order_and_in_plain(world: World) -> None:
    await world.submit()
    await world.claim()
    large = msgspec.json.encode(["b", LARGE])
    await world.commit(journal=b'["a"]', checkpoint=True, base=True)
    first = world.runs["main"].position
    await world.say("in between")
    await world.commit(journal=large, checkpoint=True)
    last = world.runs["main"].position

    rows = await world.ask(q.LoadThread(session=SESSION, thread_id="main", first=first, last=last))
    fresh = await world.ask(q.LoadThread(session=SESSION, thread_id="main", first=0, last=0))

    assert rows == [JournalRow(first, b'["a"]'), JournalRow(last, large)]
    assert fresh == []
    stored = (await world.store.read(keys.partition(SESSION), Reads())).head
    assert stored is not None
    assert not any(row.journal.startswith(COLUMN_REFERENCE) for row in rows)


async def test_more_rows_than_one_read_are_loaded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LOG_ROWS", 3)
    await world.submit()
    await world.claim()
    first = world.runs["main"].position + 1
    for number in range(10):
        await world.commit(journal=f"[{number}]".encode())

    rows = await world.ask(
        q.LoadThread(session=SESSION, thread_id="main", first=first, last=world.runs["main"].position)
    )

    assert [row.journal for row in rows] == [f"[{number}]".encode() for number in range(10)]
    assert await world.events(limit=2) == await world.events()
    assert (await world.snapshot()).projection == world.fold(await world.events())


@pytest.mark.spec("CT-23")
async def test_open_work_holds_what_the_owner_can_apply_now(world: World) -> None:
    turn = await world.submit()
    await world.claim()
    for request in ("s1", "s2", "s3"):
        await world.do(
            c.AddInput(
                session=SESSION,
                thread_id="main",
                turn_id=turn,
                request_id=request,
                kind="steer",
                content=await world.text(LARGE if request == "s3" else request),
                digest=request,
            )
        )
    await world.commit(inputs=(1,))
    for request in ("g1", "g2"):
        await world.do(
            c.Signal(
                session=SESSION,
                thread_id="main",
                turn_id=turn,
                request_id=request,
                key="x.app.go",
                payload=body_of(request),
                digest=request,
            )
        )
    pending = await ask_approval(world, "c1")
    execution = await external_tool(world, "c2")
    await world.do(
        c.RecordOutcome(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            call_id="c2",
            execution_id=execution,
            state=ExecutionState.COMPLETED,
            result=body_of({"value": 1}),
        )
    )
    await external_tool(world, "c3")
    await world.commit(
        tools=(
            c.ToolCommit(call_id="c4", state=ExecutionState.RUNNING, name="ls", arguments=body_of({})),
            c.ToolCommit(call_id="c4", state=ExecutionState.COMPLETED, result=body_of({"value": 2}), applied=True),
        )
    )

    work: OpenWorkView = await world.ask(q.OpenWork(session=SESSION, thread_id="main", turn_id=turn))

    assert [(one.record.request_id, one.content[0]["text"]) for one in work.inputs] == [("s2", "s2"), ("s3", LARGE)]
    assert [record.interaction_id for record in work.interactions] == [pending]
    assert {record.call_id: _value(record) for record in work.executions} == {
        "c1": None,
        "c2": {"value": 1},
        "c3": None,
    }
    assert [(record.key, record.request_id) for record in work.signals] == [("x.app.go", "g1"), ("x.app.go", "g2")]


def _value(record: ExecutionRecord) -> Any:
    return None if record.result is None else msgspec.json.decode(record.result.inline)


# ---- cost ----


async def rows_read(world: World, question: Any) -> int:
    before = world.store.rows
    await world.ask(question)
    return world.store.rows - before


@pytest.mark.spec("RT-25")
async def test_the_cost_of_an_answer_does_not_grow_with_what_happened_before() -> None:
    costs: list[list[int]] = []
    for turns in (5, 60):
        world = await World().open()
        for number in range(turns):
            await world.answer_turn(str(number))
        turn = await world.submit("last")
        await world.claim()
        await step(world, 1)
        message_id = await world.say("the last answer")
        last = (await world.events())[-1].sequence
        where = {"session": SESSION, "thread_id": "main", "turn_id": turn}
        questions = [
            q.GetSession(session=SESSION),
            q.GetThread(session=SESSION, thread_id="main"),
            q.GetTurn(**where),
            q.GetOutcome(**where),
            q.ExplainTurn(**where),
            q.ListTurns(session=SESSION, thread_id="main", limit=3),
            q.ListEvents(session=SESSION, limit=5),
            q.ListEvents(session=SESSION, cursor=cursor_of(SESSION, last - 3)),
            q.GetHistory(session=SESSION, limit=3),
            q.GetHistory(session=SESSION, filter=EventFilter(thread_id="main", turn_id=turn)),
            q.GetMessage(session=SESSION, message_id=message_id),
            q.GetSnapshot(session=SESSION, filter=EventFilter(thread_id="main", turn_id=turn)),
            q.ListInteractions(**where),
            q.ListRuns(**where),
            q.ListSteps(**where, run_id=f"{turn}.1"),
            q.ListModelCalls(**where, run_id=f"{turn}.1"),
            q.ListTools(**where),
            q.OpenWork(**where),
        ]
        costs.append([await rows_read(world, question) for question in questions])

    assert costs[0] == costs[1]


# ---- random histories ----


def _stored_only(view: TurnView) -> TurnView:
    """Without what only the moment of asking knows."""
    kinds = (WaitKind.HOST, WaitKind.DEFINITION_MISSING)
    return replace(view, lease=None, waiting_on=tuple(one for one in view.waiting_on if one.kind not in kinds))


@pytest.mark.spec("PR-02", "PR-03", "PR-15", "PR-17", "PR-22", "FI-01", "FI-04", "ST-30", "RT-57")
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), acts=st.integers(0, 120))
def test_folded_events_and_every_answer_agree_after_any_history(seed: int, acts: int) -> None:
    asyncio.run(_agree(seed, acts))


async def _agree(seed: int, acts: int) -> None:
    world = await Chance(seed).live(acts)
    events = await world.events(limit=7)
    snapshot = await world.snapshot()
    projection = snapshot.projection
    assert projection == world.fold(events)
    assert snapshot.cursor == events[-1].cursor

    assert projection.session == await world.ask(q.GetSession(session=SESSION))
    threads = await world.pages(q.ListThreads(session=SESSION, limit=1))
    assert projection.threads == {view.thread_id: view for view in threads}
    assert projection.history() == await world.history(limit=3)
    for thread in projection.threads:
        await _agree_on_a_thread(world, projection, thread)
        narrow = EventFilter(thread_id=thread)
        await _agree_under_a_filter(world, events, narrow)
    for turn in projection.turns.values():
        narrow = EventFilter(thread_id=turn.thread_id, turn_id=turn.turn_id)
        await _agree_under_a_filter(world, events, narrow)
        for run in await world.pages(
            q.ListRuns(session=SESSION, thread_id=turn.thread_id, turn_id=turn.turn_id, limit=2)
        ):
            await _agree_under_a_filter(world, events, replace(narrow, run_id=run.run_id))


async def _agree_on_a_thread(world: World, projection: Projection, thread: str) -> None:
    turns = await world.pages(q.ListTurns(session=SESSION, thread_id=thread, limit=2))
    assert {view.turn_id: _stored_only(view) for view in turns} == {
        turn_id: view for turn_id, view in projection.turns.items() if view.thread_id == thread
    }
    for turn in turns:
        where = {"session": SESSION, "thread_id": thread, "turn_id": turn.turn_id}
        pending = await world.ask(q.ListInteractions(**where))
        folded = {
            key: view
            for key, view in projection.interactions.items()
            if view.turn_id == turn.turn_id and view.state is InteractionState.PENDING
        }
        assert {view.interaction_id: view for view in pending} == folded
        tools = await world.ask(q.ListTools(**where))
        assert {tool_key(thread, turn.turn_id, view.call_id): _as_told(view) for view in tools} == {
            key: _as_told(view) for key, view in projection.tools.items() if view.turn_id == turn.turn_id
        }


def _as_told(view: ToolView) -> ToolView:
    # A call that was never started is cancelled without asking anybody to stop.
    return replace(view, cancel_requested=False)


async def _agree_under_a_filter(world: World, events: Sequence[PublicEvent], narrow: EventFilter) -> None:
    matching = [event for event in events if matches(narrow, event)]
    assert await world.events(narrow, limit=11) == matching
    snapshot = await world.snapshot(narrow)
    assert snapshot.projection == world.fold(events, narrow)
    assert snapshot.cursor == cursor_of(SESSION, len(events))
    if narrow.run_id is None:
        assert snapshot.projection == world.fold(matching, narrow)
    history = await world.history(narrow, limit=2)
    assert history == snapshot.projection.history()


def test_a_stored_record_is_what_a_query_decodes() -> None:
    # The World writes through commands alone; this is the one place that looks at the bytes.
    assert encode(BINDING) == b'["assistant","v1","agentscope-thread-journal-v2"]'
