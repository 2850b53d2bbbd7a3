"""One timeline, and what a Thread, a Turn or a Run shows of it: the same through every handle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.contracts.errors import InvalidRequest, NotFound, Unfinished
from agentscope_durable.contracts.events import Committed, EventFilter, PublicEvent
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.scripted_harness import approval, final, local, say
from tests.runtime.conftest import KEY, Hosts, all_events, turn_is


async def two_threads(hosts: Hosts) -> tuple[Any, Any, Any, Any]:
    """A Session in which two Threads have each run a Turn, and the main Thread a second one."""
    runtime = await hosts.open([say("one"), local("look"), final("{results}")])
    session = await runtime.create_session(KEY, "agent")
    side = await session.create_thread("side", "agent")
    first, other, second = (
        await session.submit("r1", "a"),
        await side.submit("r2", "b"),
        await session.submit("r3", "c"),
    )
    for turn in (first, other, second):
        await turn_is(turn, "COMPLETED")
    return session, side, first, other


async def streamed(stream: Any, count: int) -> list[PublicEvent]:
    found: list[PublicEvent] = []
    async with stream as items:
        async for item in items:
            assert isinstance(item, Committed)
            found.append(item.event)
            if len(found) == count:
                return found
    raise AssertionError("the stream has ended")


@pytest.mark.spec("FI-01", "FI-04", "FI-12")
async def test_a_handle_shows_what_the_session_shows_under_its_filter(hosts: Hosts) -> None:
    session, side, first, other = await two_threads(hosts)
    whole = await all_events(session)

    for handle, narrow in (
        (side, EventFilter("side")),
        (session.main_thread(), EventFilter("main")),
        (first, EventFilter("main", first.turn_id)),
        (other, EventFilter("side", other.turn_id)),
        (side.get_turn(other.turn_id), EventFilter("side", other.turn_id)),
    ):
        expected = [
            event for event in whole if event.thread_id == narrow.thread_id and narrow.turn_id in (None, event.turn_id)
        ]
        assert expected, "there is something to be seen"
        assert await all_events(handle) == expected, "the numbers are those of the whole"
        assert list((await session.list_events(None, 1000, narrow)).events) == expected
        assert await streamed(handle.stream_events(), len(expected)) == expected
        assert await streamed(session.stream_events(filter=narrow), len(expected)) == expected
        snapshot = await handle.snapshot()
        assert snapshot == await session.snapshot(narrow)
        assert snapshot.projection.history() == list((await handle.history()).items)
        fold = EventProjection(KEY, narrow)
        assert all(fold.accept(event) for event in expected)
        assert fold.projection == snapshot.projection


@pytest.mark.spec("FI-05", "FI-06", "FI-07", "FI-08")
async def test_a_narrowed_snapshot_holds_nothing_of_others(hosts: Hosts) -> None:
    session, side, first, other = await two_threads(hosts)

    thread = (await side.snapshot()).projection
    assert (set(thread.threads), set(thread.turns), thread.session) == ({"side"}, {other.turn_id}, None)
    turn = (await first.snapshot()).projection
    assert (set(turn.threads), set(turn.turns), turn.session) == (set(), {first.turn_id}, None)
    run = (await first.list_runs()).items[0].run_id
    narrow = EventFilter("main", first.turn_id, run)
    of_run = (await session.snapshot(narrow)).projection
    assert (set(of_run.threads), set(of_run.turns), of_run.session) == (set(), {first.turn_id}, None)
    assert {message.role for message in of_run.messages.values()} == {"assistant"}, "the input came before the Run"
    types = {event.type for event in await all_events(first)} | {
        event.type for event in (await session.list_events(None, 1000, narrow)).events
    }
    assert not any(kind.startswith(("session.", "thread.")) for kind in types)
    assert (await session.snapshot()).projection.session == await session.view()


@pytest.mark.spec("FI-02", "FI-03", "FI-04")
async def test_what_is_not_inside_each_other_is_refused_by_every_handle(hosts: Hosts) -> None:
    session, side, first, other = await two_threads(hosts)
    run = (await first.list_runs()).items[0].run_id

    for incomplete in ({"turn_id": first.turn_id}, {"run_id": run}, {"thread_id": "main", "run_id": run}):
        with pytest.raises(InvalidRequest, match="needs the"):
            EventFilter(**incomplete)
    for no_id in ({"thread_id": 5}, {"thread_id": "main", "turn_id": first}):
        with pytest.raises(InvalidRequest, match="must be a str"):
            EventFilter(**no_id)
    for wrong in (
        EventFilter("nobody"),
        EventFilter("side", first.turn_id),
        EventFilter("main", "nobody"),
        EventFilter("side", other.turn_id, run),
        EventFilter("main", first.turn_id, f"{first.turn_id}.99"),
    ):
        for refused in (session.list_events(None, 10, wrong), session.snapshot(wrong)):
            with pytest.raises(NotFound):
                await refused
        with pytest.raises(NotFound):
            await streamed(session.stream_events(filter=wrong), 1)
    for refused in (side.get_turn(first.turn_id).snapshot(), side.get_turn(first.turn_id).list_events()):
        with pytest.raises(NotFound):
            await refused
    for handle in (side, first):
        with pytest.raises(InvalidRequest, match="outside this handle's view"):
            await handle.list_events(None, 10, EventFilter("other"))


@pytest.mark.spec("FI-10", "FI-11")
async def test_an_empty_page_moves_on_and_the_watermark_says_when_all_is_read(hosts: Hosts) -> None:
    session, side, _, _ = await two_threads(hosts)
    whole = await all_events(session)
    expected = [event for event in whole if event.thread_id == "side"]

    found: list[PublicEvent] = []
    cursor, empty = None, 0
    while True:
        page = await side.list_events(cursor, 2)
        assert page.cursor != cursor, "every page moves on"
        assert page.high_watermark == whole[-1].cursor
        found += page.events
        empty += not page.events
        cursor = page.cursor
        if cursor == page.high_watermark:
            break

    assert (found, empty > 0) == (expected, True)


@pytest.mark.spec("FI-09")
async def test_a_runs_snapshot_forgets_what_a_later_run_has_taken_over(hosts: Hosts) -> None:
    runtime = await hosts.open([say("one"), approval("pay"), final("{results}")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await turn_is(turn, "WAITING", where=lambda view: bool(view.waiting_on))
    (question,) = await turn.pending_interactions()
    await turn.respond("yes", question.interaction_id, True)
    await turn_is(turn, "COMPLETED")

    first, second = [run.run_id for run in (await turn.list_runs()).items]
    before, after = [
        (await session.snapshot(EventFilter("main", turn.turn_id, run))).projection for run in (first, second)
    ]
    (call,) = (await turn.snapshot()).projection.tools
    assert (set(before.tools), set(after.tools)) == (set(), {call}), "the call was applied by the second Run"
    assert before.turns == after.turns == (await turn.snapshot()).projection.turns
    assert [message.text for message in before.history()] == ["one"]


# ---- what the resources tell ----


@pytest.mark.spec("EV-04", "EV-05", "PR-02")
async def test_resources_tell_of_each_change_once(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    for _ in range(2):
        session = await runtime.create_session(KEY, "agent")
        side = await session.create_thread("side", "agent")
    assert [(event.type, event.thread_id) for event in await all_events(session)] == [
        ("session.created", None),
        ("thread.created", "main"),
        ("thread.created", "side"),
    ]

    turn = await session.submit("r1", "go")
    await turn_is(turn, "COMPLETED")
    for _ in range(2):
        await side.close()
        await session.close()
    told = [
        (event.type, event.thread_id)
        for event in await all_events(session)
        if event.type.startswith(("session.", "thread."))
    ]
    assert told[3:] == [("thread.closed", "side"), ("thread.closed", "main"), ("session.closed", None)]
    snapshot = await session.snapshot()
    assert snapshot.projection.session == await session.view()
    assert snapshot.projection.threads == {view.thread_id: view for view in (await session.list_threads()).items}
    assert [view.status for view in snapshot.projection.threads.values()] == ["CLOSED", "CLOSED"]
    # A Thread's own timeline begins and ends with these, also when everything has been pruned.
    before = await side.snapshot()
    await HostOperations(hosts.backend).prune_events(KEY, older_than=0)
    assert await side.snapshot() == before
    assert before.projection.threads["side"].status == "CLOSED"


@pytest.mark.spec("EV-05")
async def test_a_close_that_is_refused_tells_of_nothing(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    await session.submit("r1", "go")
    before = await all_events(session)

    with pytest.raises(Unfinished):
        await session.close()

    assert await all_events(session) == before


@pytest.mark.spec("EV-06", "EV-01")
async def test_a_thousand_commits_at_once_leave_no_gap(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    threads = [await session.create_thread(f"t{number}", "agent") for number in range(20)]

    turns = await asyncio.gather(*(threads[n % 20].submit(f"r{n}", "go") for n in range(1000)))

    events = await all_events(session)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    admitted = [event.turn_id for event in events if event.type == "message.completed"]
    assert sorted(admitted) == sorted(turn.turn_id for turn in turns)
    assert await all_events(session) == events, "the same events with the same numbers, every time"
