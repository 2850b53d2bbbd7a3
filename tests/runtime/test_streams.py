"""A timeline as it happens: facts in order, previews between them (group ST)."""

from __future__ import annotations

import asyncio
from typing import assert_never

import pytest

from agentscope_durable.assembly import LiveEvents
from agentscope_durable.contracts.errors import HostClosed, InvalidCursor, InvalidRequest
from agentscope_durable.contracts.events import (
    Committed,
    EventDelta,
    EventFilter,
    PreviewStarted,
    SessionStreamEvent,
    SnapshotReset,
    cursor_of,
    sequence_of,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.options import EventDeltaType, EventStreamOptions
from agentscope_durable.contracts.questions import ListEvents
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime.live import PREVIEWS_MAX
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused, until

MESSAGE = {EventDeltaType.MESSAGE}


def _ends_a_turn(item: Committed) -> bool:
    return item.event.type == "turn.status" and TurnStatus(item.event.data["turn"]["status"]).terminal


async def until_ended(stream) -> list[SessionStreamEvent]:
    """Everything up to the end of the Turn."""
    seen: list[SessionStreamEvent] = []
    async with asyncio.timeout(SECONDS):
        async for item in stream:
            seen.append(item)
            if isinstance(item, Committed) and _ends_a_turn(item):
                return seen
    return seen


@pytest.mark.spec("ST-01", "ST-02")
def test_there_are_four_things_a_stream_yields_and_one_has_a_cursor() -> None:
    def kind(item: SessionStreamEvent) -> str:
        match item:
            case Committed():
                return "fact"
            case PreviewStarted() | EventDelta():
                return "preview"
            case SnapshotReset():
                return "reset"
            case _:
                assert_never(item)

    assert hasattr(Committed, "cursor")
    assert not any(hasattr(other, "cursor") for other in (PreviewStarted, EventDelta, SnapshotReset))
    assert kind(PreviewStarted("message", "main", "t", "m", 1)) == "preview"


@pytest.mark.spec("ST-03")
async def test_previews_are_asked_for(hosts: Hosts) -> None:
    runtime = await hosts.open([final("one two")])
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events() as plain, session.stream_events(deltas=MESSAGE) as live:
        await session.submit("r1", "a")
        facts, both = await until_ended(plain), await until_ended(live)

    assert all(isinstance(item, Committed) for item in facts)
    assert [item for item in both if isinstance(item, Committed)] == facts
    assert "".join(item.text for item in both if isinstance(item, EventDelta)) == "one two"


@pytest.mark.spec("ST-21", "ST-27", "ST-28", "ST-22", "EV-08")
async def test_previews_of_a_very_fast_agent_come_before_their_fact(hosts: Hosts) -> None:
    runtime = await hosts.open([say("first words here"), final("the last words")])
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events(deltas=MESSAGE) as events:
        await session.submit("r1", "a")
        seen = await until_ended(events)
    order: list[tuple[str, str]] = []
    for item in seen:
        if isinstance(item, PreviewStarted | EventDelta):
            order.append((type(item).__name__, item.message_id))
        elif isinstance(item, Committed) and item.event.type == "message.completed":
            order.append(("fact", item.event.data["messageId"]))
    messages = list(dict.fromkeys(name for _, name in order if ".r" in name))

    assert len(messages) == 2
    for message in messages:
        kinds = [kind for kind, name in order if name == message]
        assert kinds == ["PreviewStarted", *["EventDelta"] * 3, "fact"]
    offsets = [item.offset for item in seen if isinstance(item, EventDelta)]
    assert offsets == [0, 6, 12, 0, 4, 9]


@pytest.mark.spec("ST-05", "ST-06")
async def test_a_stream_replays_and_goes_on_without_gap_or_repeat(hosts: Hosts) -> None:
    runtime = await hosts.open([say("x"), final()])
    session = await runtime.create_session(KEY, "agent")
    turns = []
    async with session.stream_events() as events:
        for number in range(5):
            turns.append(await session.submit(f"r{number}", "a"))
        seen = [await anext(events) for _ in range(20)]
        for turn in turns:
            await turn.wait(SECONDS)
    everything = await all_events(session)
    async with session.stream_events(EventStreamOptions(after=seen[7].cursor)) as events:
        again = [(await anext(events)).event.sequence for _ in range(len(everything) - 8)]

    assert [item.event.sequence for item in seen] == list(range(1, 21))
    assert again == list(range(9, len(everything) + 1))


@pytest.mark.spec("ST-04", "ST-29", "AD-20")
async def test_closing_a_stream_changes_nothing_else(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    events = session.stream_events(deltas=MESSAGE)
    turn = await session.submit("r1", "a")
    await anext(events)
    waiting = asyncio.create_task(anext(events))
    await gates.reached("g")
    assert await waiting
    waiting = asyncio.create_task(until_ended(events))
    await asyncio.sleep(0)
    await events.aclose()
    await events.aclose()
    await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(events)
    gates.open("g")

    assert str(await turn.wait(SECONDS)) == "ok"


@pytest.mark.spec("ST-04")
async def test_for_each_gives_one_after_the_other_and_keeps_its_place(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn.wait(SECONDS)
    seen: list[int] = []
    stream = session.stream_events()

    async def sink(item: SessionStreamEvent) -> None:
        assert isinstance(item, Committed)
        if len(seen) == 3:
            raise RuntimeError("the consumer failed")
        seen.append(item.event.sequence)

    with pytest.raises(RuntimeError):
        await stream.for_each(sink)
    assert seen == [1, 2, 3]
    assert stream.cursor == cursor_of(KEY, 3)

    def until_last(item: SessionStreamEvent) -> None:
        seen.append(item.event.sequence)
        if item.event.type == "turn.status" and item.event.data["turn"]["status"] == "COMPLETED":
            closing.append(asyncio.ensure_future(rest.aclose()))

    closing: list[asyncio.Future] = []
    rest = session.stream_events(after=stream.cursor)
    await rest.for_each(until_last)
    assert seen == list(range(1, len(await all_events(session)) + 1))


@pytest.mark.spec("ST-07", "ST-34")
@pytest.mark.parametrize("narrow", [False, True])
async def test_an_expired_cursor_yields_a_snapshot_and_goes_on(hosts: Hosts, narrow: bool) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    await (await session.submit("r1", "a")).wait(SECONDS)
    await (await other.submit("r2", "b")).wait(SECONDS)
    [*_, last] = await all_events(session)
    await HostOperations(hosts.backend).prune_events(KEY, through=last.cursor)
    api = await hosts.open(start=False)
    filter = EventFilter(thread_id="x") if narrow else None
    async with api.get_session(KEY).stream_events(filter=filter) as events:
        reset = await anext(events)
        assert isinstance(reset, SnapshotReset)
        assert reset.snapshot.filter == (filter or EventFilter())
        await (await other.submit("r3", "c")).wait(SECONDS)
        following = await anext(events)

    assert isinstance(following, Committed)
    assert following.event.sequence > sequence_of(KEY, reset.snapshot.cursor)
    assert events.cursor == following.cursor
    if narrow:
        assert set(reset.snapshot.projection.threads) == {"x"}


@pytest.mark.spec("ST-07", "ST-21", "ST-23")
async def test_no_preview_comes_after_a_snapshot_that_holds_its_message(hosts: Hosts) -> None:
    runtime = await hosts.open([say("first words"), final("the last words")])
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events(deltas=MESSAGE) as events:
        # Its previews wait while nobody reads; their facts are pruned before anybody does.
        await (await session.submit("r1", "a")).wait(SECONDS)
        [*_, last] = await all_events(session)
        await HostOperations(hosts.backend).prune_events(KEY, through=last.cursor)
        reset = await anext(events)
        assert isinstance(reset, SnapshotReset)
        await session.submit("r2", "b")
        seen = await until_ended(events)
    previews = [item for item in seen if isinstance(item, PreviewStarted | EventDelta)]

    assert len(reset.snapshot.projection.messages) == 3
    assert not {preview.message_id for preview in previews} & set(reset.snapshot.projection.messages)
    # Those of what follows are there.
    assert "".join(item.text for item in previews if isinstance(item, EventDelta)) == "first wordsthe last words"


@pytest.mark.spec("ST-08", "ST-18")
async def test_a_stream_needs_no_started_runtime(hosts: Hosts) -> None:
    api = await hosts.open(start=False, definitions=())
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    async with api.get_session(KEY).stream_events() as events:
        assert (await anext(events)).event.type == "session.created"
        assert (await anext(events)).event.type == "thread.created"
        await session.submit("r1", "a")
        assert (await anext(events)).event.type == "message.completed"


@pytest.mark.spec("ST-10")
async def test_hints_coalesce_and_polling_makes_up_for_lost_ones(hosts: Hosts) -> None:
    backend = hosts.backend
    reads = 0

    class Counting:
        def __getattr__(self, name):
            return getattr(backend, name)

        async def query(self, question, **options):
            nonlocal reads
            reads += isinstance(question, ListEvents)
            return await backend.query(question, **options)

    runtime = await hosts.open([final()], start=False)
    await runtime.create_session(KEY, "agent")
    api = await hosts.open(backend=Counting(), poll_interval=60.0)
    async with api.get_session(KEY).stream_events() as events:
        await anext(events)
        await anext(events)
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        for _ in range(1000):
            backend.wakeups().publish(("*",))
        await until(lambda: reads >= 2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert reads < 10
        waiting.cancel()
        await refused(waiting, asyncio.CancelledError)


@pytest.mark.spec("ST-23", "ST-26")
async def test_a_broken_live_transport_changes_no_result(hosts: Hosts) -> None:
    class Broken:
        def wanted(self, session):
            return True

        def publish(self, session, preview):
            raise OSError("gone")

        def attach(self, session, listener):
            pass

        def detach(self, session, listener):
            pass

    runtime = await hosts.open([say("one"), final("two words")], live_events=Broken())
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events(deltas=MESSAGE) as events:
        turn = await session.submit("r1", "a")
        seen = await until_ended(events)

    assert str(await turn.wait(SECONDS)) == "two words"
    assert all(isinstance(item, Committed) for item in seen)


@pytest.mark.spec("ST-24", "ST-25")
@pytest.mark.parametrize("shared", [True, False])
async def test_previews_cross_where_the_transport_is_shared(hosts: Hosts, shared: bool) -> None:
    live = LiveEvents.local()
    brain = await hosts.open([final("some words")], live_events=live)
    api = await hosts.open(live_events=live if shared else LiveEvents.local())
    await brain.create_session(KEY, "agent")
    session = api.get_session(KEY)
    async with session.stream_events(deltas=MESSAGE) as events:
        await session.submit("r1", "a")
        seen = await until_ended(events)

    assert any(isinstance(item, EventDelta) for item in seen) is shared


@pytest.mark.spec("ST-30")
async def test_streams_keep_to_their_handle(hosts: Hosts) -> None:
    runtime = await hosts.open([final("some words")])
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    first = await session.submit("r1", "a")
    await first.wait(SECONDS)
    second = await other.submit("r2", "b")
    async with second.stream_events(deltas=MESSAGE) as of_turn, other.stream_events() as of_thread:
        turn_seen, thread_seen = await until_ended(of_turn), await until_ended(of_thread)
    facts = [item.event for item in turn_seen if isinstance(item, Committed)]

    assert facts == await all_events(second)
    assert [item.event for item in thread_seen] == await all_events(other)
    assert {getattr(item, "turn_id", second.turn_id) for item in turn_seen} == {second.turn_id}


@pytest.mark.spec("ST-33", "PR-03")
async def test_a_snapshot_and_what_follows_it_are_the_whole(hosts: Hosts) -> None:
    runtime = await hosts.open([say("x"), final("{context}")])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r1", "a")).wait(SECONDS)
    snapshot = await session.snapshot()
    projection = EventProjection(KEY)
    projection.reset(snapshot)
    turn = await session.submit("r2", "b")
    async with session.stream_events(after=snapshot.cursor) as events:
        for item in await until_ended(events):
            assert isinstance(item, Committed)
            projection.accept(item.event)
    await turn.wait(SECONDS)

    assert projection.projection == (await session.snapshot()).projection


async def test_a_reader_that_stays_away_gets_joined_previews_and_every_fact(hosts: Hosts) -> None:
    text = " ".join(f"word{number}" for number in range(3 * PREVIEWS_MAX))
    runtime = await hosts.open([final(text)])
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events(deltas=MESSAGE) as events:
        turn = await session.submit("r1", "a")
        await turn.wait(SECONDS)
        seen = await until_ended(events)
    deltas = [item for item in seen if isinstance(item, EventDelta)]

    assert len(deltas) < PREVIEWS_MAX
    assert "".join(delta.text for delta in deltas) == text


async def test_someone_who_comes_in_the_middle_sees_the_fact_alone(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([final("one two three four", gate="g")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events(deltas=MESSAGE) as early:
        await session.submit("r1", "a")
        await gates.reached("g")
        async with session.stream_events(deltas=MESSAGE) as late:
            gates.open("g")
            seen = await until_ended(late)
        whole = await until_ended(early)

    assert not any(isinstance(item, EventDelta | PreviewStarted) for item in seen)
    assert sum(isinstance(item, EventDelta) for item in whole) == 4


async def test_the_end_of_the_runtime_is_not_the_end_of_the_timeline(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    async with session.stream_events() as events:
        await anext(events)
        await anext(events)
        waiting = asyncio.create_task(anext(events))
        await asyncio.sleep(0)
        await runtime.close()
        await refused(waiting, HostClosed)


@pytest.mark.case("C54")
async def test_what_is_no_place_in_this_timeline_is_refused_through_every_handle(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    [*_, last] = await all_events(session)
    elsewhere = cursor_of(SessionKey("app", "other"), 1)
    mark = last.cursor.rsplit("-", 1)[0]
    malformed = ["", "nonsense", "e1-0-0", f"{mark}-", f"{mark}-x", f"{mark}--1", f"{mark}-1.0", f"{mark}-{10**30}", 7]
    for handle in (session, session.main_thread(), turn):
        for cursor in [*malformed, elsewhere, cursor_of(KEY, last.sequence + 1)]:
            await refused(handle.list_events(cursor), InvalidCursor)
        for cursor in [*malformed, elsewhere]:
            with pytest.raises(InvalidCursor):
                handle.stream_events(after=cursor)
        async with handle.stream_events(after=cursor_of(KEY, last.sequence + 1)) as events:
            await refused(anext(events), InvalidCursor)
        for limit in (0, -1, 1001, 10**30, True, 1.5, "5", None):
            await refused(handle.list_events(None, limit), InvalidRequest)
        assert (await handle.list_events(last.cursor)).events == ()
        assert (await handle.list_events(cursor_of(KEY, 0), 1000)).events == tuple(await all_events(handle))


async def test_a_foreign_cursor_is_refused(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    with pytest.raises(InvalidCursor):
        session.stream_events(after=cursor_of(SessionKey("app", "other"), 1))
    with pytest.raises(InvalidRequest):
        session.stream_events(EventStreamOptions(), deltas=MESSAGE)
    with pytest.raises(InvalidRequest):
        session.stream_events(deltas={"nonsense"})  # type: ignore[arg-type]
