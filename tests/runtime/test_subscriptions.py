"""Observers that the runtime calls (group ST): serial, at least once, and never in the way of an agent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentscope_durable.contracts.errors import (
    HostClosed,
    InvalidCursor,
    InvalidRequest,
    Misuse,
    NotFound,
    Unavailable,
)
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
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime import door as door_module
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, until

DEFAULTS = EventStreamOptions.defaults()
MESSAGE = EventStreamOptions(deltas=frozenset({EventDeltaType.MESSAGE}))


class Seen:
    """A listener that keeps what it was given. `before` runs first, and may raise or wait."""

    def __init__(self, before: Callable[[SessionStreamEvent], Any] = lambda item: None) -> None:
        self.items: list[SessionStreamEvent] = []
        self._before = before

    async def __call__(self, item: SessionStreamEvent) -> None:
        waiting = self._before(item)
        if waiting is not None:
            await waiting
        self.items.append(item)

    @property
    def sequences(self) -> list[int]:
        return [item.event.sequence for item in self.items if isinstance(item, Committed)]

    async def ended(self, turn: Any) -> None:
        """Until the last event of the Turn has come."""
        await turn.wait(SECONDS)
        [*_, last] = await all_events(turn)
        await until(lambda: last.sequence in self.sequences)


@pytest.mark.spec("ST-08", "ST-18", "ST-32", "RT-20")
async def test_every_handle_can_be_observed_before_anything_is_started(hosts: Hosts) -> None:
    api = await hosts.open(start=False)
    brain = await hosts.open([say("x"), final("ok")], start=False)
    await brain.create_session(KEY, "agent")
    session = api.get_session(KEY)
    other = await brain.get_session(KEY).create_thread("x", "agent")
    turn = await session.submit("r1", "a")
    handles = (session, session.main_thread(), turn)
    seen, by_filter = [Seen() for _ in handles], Seen()
    subscriptions = [
        handle.subscribe_events(DEFAULTS, listener) for handle, listener in zip(handles, seen, strict=True)
    ]
    narrow = EventFilter(thread_id="main", turn_id=turn.turn_id)
    subscriptions.append(session.subscribe_events(narrow, DEFAULTS, by_filter))
    await until(lambda: len(seen[0].items) >= 4)
    await brain.start()
    await (await other.submit("r2", "b")).wait(SECONDS)
    await turn.wait(SECONDS)

    for handle, listener in zip(handles, seen, strict=True):
        everything = await all_events(handle)
        await until(lambda: len(listener.items) >= len(everything))  # noqa: B023 - awaited before the next one
        assert [item.event for item in listener.items] == everything
    await until(lambda: len(by_filter.items) >= len(seen[2].items))
    assert by_filter.items == seen[2].items
    assert [event async for event in _listed(session, narrow)] == [item.event for item in by_filter.items]
    assert [sub.cursor() for sub in subscriptions] == [listener.items[-1].cursor for listener in (*seen, by_filter)]
    assert not any(sub.is_closed() or sub.last_failure() for sub in subscriptions)


async def _listed(session: Any, narrow: EventFilter) -> Any:
    """The two ways to give a filter say the same."""
    page = await session.list_events(narrow, None, 1000)
    assert page == await session.list_events(filter=narrow, limit=1000)
    async with session.stream_events(narrow, DEFAULTS) as events:
        for event in page.events:
            assert (await anext(events)).event == event
            yield event


@pytest.mark.spec("ST-09", "ST-15")
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_slow_observer_is_called_one_after_the_other_and_holds_nobody_up(hosts: Hosts, kind: str) -> None:
    runtime = await hosts.open([say("x"), final("ok")])
    session = await runtime.create_session(KEY, "agent")
    running, most, seen = 0, 0, []
    go_on, go_on_there = asyncio.Event(), threading.Event()

    def begin(item: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(item.event.sequence)

    def end() -> None:
        nonlocal running
        running -= 1

    async def slow(item: Any) -> None:
        begin(item)
        await go_on.wait()
        end()

    def blocking(item: Any) -> None:
        begin(item)
        assert go_on_there.wait(SECONDS)
        end()

    subscription = session.subscribe_events(DEFAULTS, slow if kind == "coroutine" else blocking)
    await until(lambda: running == 1)
    # The agent does all of its work while the observer is at its first event.
    turn = await session.submit("r1", "a")
    assert str(await turn.wait(SECONDS)) == "ok"
    assert seen == [1]
    go_on.set()
    go_on_there.set()
    count = len(await all_events(session))
    await until(lambda: len(seen) == count and running == 0)

    assert seen == list(range(1, count + 1))
    assert most == 1
    await until(lambda: subscription.cursor() == cursor_of(KEY, count))


@pytest.mark.spec("ST-14", "ST-15")
async def test_two_observers_at_once_and_a_third_waits(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    go_on = [threading.Event() for _ in range(3)]
    begun: list[int] = []

    def observer(number: int) -> Callable[[Any], None]:
        def block(item: Any) -> None:
            if item.event.sequence == 1:
                begun.append(number)
                assert go_on[number].wait(SECONDS)

        return block

    before = threading.enumerate()
    subscriptions = [session.subscribe_events(DEFAULTS, observer(number)) for number in range(3)]
    await until(lambda: len(begun) == 2)
    turn = await session.submit("r1", "a")
    assert str(await turn.wait(SECONDS)) == "ok"
    assert len(begun) == 2
    begun_here = {thread.name for thread in threading.enumerate() if thread not in before}
    assert {name for name in begun_here if name.startswith("observer-")} == {"observer-0", "observer-1"}
    # One that waits for its place can be closed, and the place is not lost.
    (third,) = {0, 1, 2} - set(begun)
    await subscriptions[third].close()
    fourth = Seen()
    session.subscribe_events(DEFAULTS, fourth)
    go_on[begun[0]].set()
    await fourth.ended(turn)
    go_on[begun[1]].set()

    assert len(begun) == 2


@pytest.mark.spec("ST-14")
async def test_how_many_observers_are_called_at_once_is_the_applications_choice(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False, observer_parallelism=5)
    session = await runtime.create_session(KEY, "agent")
    barrier = threading.Barrier(5)
    for _ in range(5):
        session.subscribe_events(DEFAULTS, lambda item: barrier.wait(SECONDS) and None)
    await until(lambda: barrier.n_waiting == 0 and not barrier.broken)

    with pytest.raises(Misuse, match="observer_parallelism"):
        DurableRuntime(backend=hosts.backend, observer_parallelism=0)


@pytest.mark.spec("ST-11", "ST-12", "ST-13", "ST-19")
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, SystemExit])
async def test_what_the_callback_did_not_take_is_delivered_again(
    hosts: Hosts, kind: str, error: type[BaseException]
) -> None:
    told: list[BaseException] = []

    def on_error(failure: BaseException) -> None:
        told.append(failure)
        raise ValueError("the report fails, too")

    runtime = await hosts.open([final()], start=False, on_error=on_error)
    session = await runtime.create_session(KEY, "agent")
    seen: list[int] = []
    cursors: list[str | None] = []

    def take(item: Any) -> None:
        seen.append(item.event.sequence)
        cursors.append(subscription.cursor())
        if seen.count(2) in (1, 2) and item.event.sequence == 2:
            raise error("no")

    async def take_it(item: Any) -> None:
        take(item)

    subscription = session.subscribe_events(DEFAULTS, take if kind == "thread" else take_it)
    await until(lambda: subscription.cursor() == cursor_of(KEY, 2))

    assert seen == [1, 2, 2, 2]
    assert cursors == [None, *[cursor_of(KEY, 1)] * 3]
    assert [type(failure) for failure in told] == [error, error]
    assert subscription.last_failure() is told[1]
    assert not subscription.is_closed()


@pytest.mark.spec("ST-11", "ST-13")
async def test_a_store_that_is_away_makes_it_late(hosts: Hosts) -> None:
    backend, away = hosts.backend, True

    class Away:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        async def query(self, question: Any, **options: Any) -> Any:
            if away:
                raise Unavailable("away")
            return await backend.query(question, **options)

    brain = await hosts.open([final()], start=False)
    await brain.create_session(KEY, "agent")
    api = await hosts.open(backend=Away())
    seen = Seen()
    subscription = api.get_session(KEY).subscribe_events(DEFAULTS, seen)
    await until(lambda: len(hosts.errors) >= 2)
    assert isinstance(subscription.last_failure(), Unavailable)
    assert seen.items == []
    away = False
    await until(lambda: len(seen.items) == 2)

    assert seen.sequences == [1, 2]


async def test_a_session_that_does_not_exist_yet_is_observed_once_it_does(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    seen = Seen()
    subscription = runtime.get_session(KEY).subscribe_events(DEFAULTS, seen)
    await until(lambda: len(hosts.errors) >= 1)
    assert isinstance(subscription.last_failure(), NotFound)
    await runtime.create_session(KEY, "agent")
    await until(lambda: len(seen.items) == 2)

    assert seen.sequences == [1, 2]


@pytest.mark.spec("ST-21", "ST-22", "ST-28", "ST-19")
async def test_facts_and_previews_come_to_one_serial_observer(hosts: Hosts) -> None:
    runtime = await hosts.open([say("first words here"), final("the last words")])
    session = await runtime.create_session(KEY, "agent")
    cursors: list[str | None] = []
    seen = Seen(lambda item: cursors.append(subscription.cursor()))
    subscription = session.subscribe_events(MESSAGE, seen)
    turn = await session.submit("r1", "a")
    await seen.ended(turn)
    order: dict[str, list[str]] = {}
    for item in seen.items:
        if isinstance(item, PreviewStarted | EventDelta):
            order.setdefault(item.message_id, []).append(type(item).__name__)
        elif isinstance(item, Committed) and item.event.type == "message.completed":
            order.setdefault(item.event.data["messageId"], []).append("fact")
    previewed = [kinds for kinds in order.values() if len(kinds) > 1]

    assert len(previewed) == 2
    for kinds in previewed:
        assert kinds[0] == "PreviewStarted" and kinds[-1] == "fact"
        assert set(kinds[1:-1]) == {"EventDelta"}
    expected: list[str | None] = []
    at: str | None = None
    for item in seen.items:
        expected.append(at)
        at = item.cursor if isinstance(item, Committed) else at
    assert cursors == expected


@pytest.mark.spec("ST-22", "ST-23")
async def test_a_preview_that_cannot_be_shown_ends_and_its_fact_comes(hosts: Hosts) -> None:
    runtime = await hosts.open([say("first words here"), final("the last words")])
    session = await runtime.create_session(KEY, "agent")

    def refuse(item: SessionStreamEvent) -> None:
        if isinstance(item, EventDelta) and item.text.startswith("words"):
            raise ValueError("cannot be shown")

    seen = Seen(refuse)
    session.subscribe_events(MESSAGE, seen)
    turn = await session.submit("r1", "a")
    await seen.ended(turn)

    assert [item.text for item in seen.items if isinstance(item, EventDelta)] == ["first ", "the ", "last "]
    assert [type(error) for error in hosts.errors] == [ValueError, ValueError]
    assert seen.sequences == [event.sequence for event in await all_events(session)]


@pytest.mark.spec("ST-16", "ST-29")
async def test_closing_one_leaves_the_others_and_the_turn(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    first, second = Seen(), Seen()
    closed = session.subscribe_events(MESSAGE, first)
    session.subscribe_events(MESSAGE, second)
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    await until(lambda: len(first.items) >= 4)
    await closed.close()
    await closed.close()
    count = len(first.items)
    gates.open("g")

    assert str(await turn.wait(SECONDS)) == "ok"
    await second.ended(turn)
    assert closed.is_closed()
    assert len(first.items) == count


@pytest.mark.spec("ST-13", "LF-09")
@pytest.mark.parametrize("place", ["coroutine", "coroutine that waits", "thread", "another thread", "context"])
async def test_it_can_be_closed_from_anywhere(hosts: Hosts, place: str) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    await session.submit("r1", "a")
    seen: list[int] = []

    async def coroutine(item: Any) -> None:
        seen.append(item.event.sequence)
        if item.event.sequence == 2:
            closing = subscription.close()
            if place == "coroutine that waits":
                await closing

    def thread(item: Any) -> None:
        seen.append(item.event.sequence)
        if item.event.sequence == 2:
            subscription.close()

    async def plain(item: Any) -> None:
        seen.append(item.event.sequence)

    listener = {"thread": thread, "coroutine": coroutine, "coroutine that waits": coroutine}.get(place, plain)
    subscription = session.subscribe_events(DEFAULTS, listener)
    if place == "another thread":
        await until(lambda: len(seen) == 4)
        await asyncio.to_thread(subscription.close)
    elif place == "context":
        async with subscription:
            await until(lambda: len(seen) == 4)
    await until(subscription.is_closed)
    await subscription.close()
    for number in range(3):
        await session.submit(f"later {number}", "a")
    await asyncio.sleep(0)

    assert seen == ([1, 2] if listener is not plain else [1, 2, 3, 4])
    # The callback that closed it had returned: what it took is taken.
    assert subscription.cursor() == cursor_of(KEY, len(seen))


@pytest.mark.spec("ST-13", "LF-09")
@pytest.mark.parametrize("how", ["wait_for", "gather", "task", "thread"])
async def test_a_callback_that_waits_for_the_close_in_another_task_does_not_wait_for_itself(
    hosts: Hosts, how: str
) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    loop = asyncio.get_running_loop()
    closed = threading.Event()

    async def closing() -> None:
        await subscription.close()

    async def close(item: Any) -> None:
        match how:
            case "wait_for":
                await asyncio.wait_for(closing(), SECONDS)
            case "gather":
                await asyncio.gather(closing(), closing())
            case _:
                await asyncio.create_task(closing())
        closed.set()

    def close_there(item: Any) -> None:
        asyncio.run_coroutine_threadsafe(closing(), loop).result(SECONDS)
        closed.set()

    async with asyncio.timeout(SECONDS / 2):
        subscription = session.subscribe_events(DEFAULTS, close_there if how == "thread" else close)
        await until(closed.is_set)
        await subscription.close()

    assert subscription.cursor() == cursor_of(KEY, 1)


class Odd(BaseException):
    """Neither an Exception nor one of those that asyncio knows: test tools and other event loops raise such."""


@pytest.mark.spec("ST-11", "ST-13")
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
@pytest.mark.parametrize("error", [Odd, GeneratorExit, SystemExit, asyncio.CancelledError, StopIteration])
async def test_nothing_that_a_callback_raises_ends_its_subscription(
    hosts: Hosts, kind: str, error: type[BaseException]
) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    seen: list[int] = []

    def thread(item: Any) -> None:
        seen.append(item.event.sequence)
        if len(seen) <= 2:
            raise error("no")

    async def coroutine(item: Any) -> None:
        thread(item)

    subscription = session.subscribe_events(DEFAULTS, coroutine if kind == "coroutine" else thread)
    await until(lambda: len(seen) == 4 or subscription.is_closed())

    assert seen == [1, 1, 1, 2]
    assert subscription.last_failure() is not None
    await subscription.close()


@pytest.mark.spec("ST-17")
async def test_a_callback_under_way_finishes_when_the_runtime_closes(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    begun, go_on = asyncio.Event(), asyncio.Event()
    finished: list[int] = []

    async def slow(item: Any) -> None:
        begun.set()
        await go_on.wait()
        finished.append(item.event.sequence)

    subscription = session.subscribe_events(DEFAULTS, slow)
    idle = session.subscribe_events(DEFAULTS, Seen())
    await begun.wait()
    closing = asyncio.create_task(runtime.close())
    await until(subscription.is_closed)
    go_on.set()
    await closing

    assert finished == [1]
    assert subscription.cursor() == cursor_of(KEY, 1)
    assert idle.is_closed()
    assert idle.last_failure() is None
    with pytest.raises(HostClosed):
        session.subscribe_events(DEFAULTS, slow)


@pytest.mark.spec("ST-17")
async def test_a_callback_that_does_not_finish_does_not_keep_the_runtime(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "CLOSE_TIMEOUT", 0.05)
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    begun: list[str] = []
    before = threading.enumerate()

    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before]

    interrupted, let_go = asyncio.Event(), threading.Event()

    async def forever(item: Any) -> None:
        begun.append("coroutine")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
            raise

    def stuck(item: Any) -> None:
        begun.append("thread")
        assert let_go.wait(SECONDS)

    subscriptions = [session.subscribe_events(DEFAULTS, forever), session.subscribe_events(DEFAULTS, stuck)]
    await until(lambda: len(begun) == 2)
    await runtime.close()

    assert interrupted.is_set()
    assert all(subscription.is_closed() for subscription in subscriptions)
    assert [subscription.cursor() for subscription in subscriptions] == [None, None]
    let_go.set()
    await until(lambda: not any(thread.name.startswith("observer-") for thread in threads()))


@pytest.mark.spec("LF-09", "ST-17")
@pytest.mark.parametrize("kind", ["coroutine", "thread"])
async def test_a_callback_may_close_the_runtime(hosts: Hosts, kind: str) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    loop, after = asyncio.get_running_loop(), []

    async def close(item: Any) -> None:
        await runtime.close()
        after.append(item.event.sequence)

    def close_there(item: Any) -> None:
        loop.call_soon_threadsafe(lambda: after.append(asyncio.ensure_future(runtime.close())))

    subscription = session.subscribe_events(DEFAULTS, close if kind == "coroutine" else close_there)
    await until(subscription.is_closed)
    await runtime.close()

    assert after
    assert subscription.cursor() == cursor_of(KEY, len(after))


async def prune(hosts: Hosts, session: Any) -> int:
    """Drop every event there is now; how many of the first are gone."""
    [*_, last] = await all_events(session)
    receipt = await HostOperations(hosts.backend).prune_events(KEY, through=last.cursor)
    assert receipt.dropped > 0
    return sequence_of(KEY, receipt.cursor)


@pytest.mark.spec("ST-07", "ST-34")
@pytest.mark.parametrize("narrow", [None, EventFilter(thread_id="x")], ids=["whole", "thread"])
async def test_a_reset_is_delivered_until_it_is_taken(hosts: Hosts, narrow: EventFilter | None) -> None:
    brain = await hosts.open([final("ok")])
    session = await brain.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    await (await session.submit("r1", "a")).wait(SECONDS)
    await (await other.submit("r2", "b")).wait(SECONDS)
    await prune(hosts, session)
    api = await hosts.open(start=False)
    projection = EventProjection(KEY, narrow)
    given: list[SessionStreamEvent] = []
    cursors: list[str | None] = []
    after = cursor_of(KEY, 2)

    async def apply(item: SessionStreamEvent) -> None:
        given.append(item)
        cursors.append(subscription.cursor())
        if len(given) <= 2:
            raise RuntimeError("not now")
        if isinstance(item, SnapshotReset):
            projection.reset(item.snapshot)
        elif isinstance(item, Committed):
            projection.accept(item.event)

    subscription = api.get_session(KEY).subscribe_events(EventStreamOptions(after=after), apply, filter=narrow)
    await until(lambda: len(given) >= 3)
    turn = await other.submit("r3", "c")
    await turn.wait(SECONDS)
    [*_, last] = await all_events(other)
    await until(lambda: subscription.cursor() == last.cursor)

    assert [type(item) for item in given[:3]] == [SnapshotReset] * 3
    assert cursors[:3] == [after] * 3
    assert cursors[3] == given[2].snapshot.cursor
    assert given[0].snapshot.filter == (narrow or EventFilter())
    assert all(isinstance(item, Committed) for item in given[3:])
    assert projection.projection == (await session.snapshot(narrow)).projection


@pytest.mark.spec("ST-34")
async def test_a_timeline_whose_beginning_is_gone_is_never_shown_as_if_it_were_whole(hosts: Hosts) -> None:
    """A default subscription: no cursor, no options, a projection of the whole Session."""
    brain = await hosts.open([final("ok")])
    session = await brain.create_session(KEY, "agent")
    await (await session.submit("r1", "a")).wait(SECONDS)
    assert await prune(hosts, session) > 5
    await (await session.submit("r2", "kept")).wait(SECONDS)
    api = await hosts.open(start=False)
    projection = EventProjection(KEY)
    kinds: list[type] = []

    async def apply(item: SessionStreamEvent) -> None:
        kinds.append(type(item))
        if isinstance(item, SnapshotReset):
            projection.reset(item.snapshot)
        elif isinstance(item, Committed):
            projection.accept(item.event)

    subscription = api.get_session(KEY).subscribe_events(DEFAULTS, apply)
    turn = await session.submit("r3", "b")
    await turn.wait(SECONDS)
    [*_, last] = await all_events(session)
    await until(lambda: subscription.cursor() == last.cursor)

    assert kinds[0] is SnapshotReset and set(kinds[1:]) == {Committed}
    assert projection.projection == (await session.snapshot()).projection
    assert subscription.last_failure() is None


@pytest.mark.spec("ST-34", "ST-07")
async def test_a_turn_that_was_kept_whole_is_shown_whole_and_another_begins_with_its_snapshot(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    first = await session.submit("r1", "a")
    await first.wait(SECONDS)
    await prune(hosts, session)
    second = await session.submit("r2", "b")
    await second.wait(SECONDS)
    of_first, of_second = Seen(), Seen()
    first.subscribe_events(DEFAULTS, of_first)
    second.subscribe_events(DEFAULTS, of_second)
    await of_second.ended(second)
    await until(lambda: len(of_first.items) > 0)

    assert [item.event for item in of_second.items] == await all_events(second)
    (reset,) = of_first.items
    assert isinstance(reset, SnapshotReset)
    assert reset.snapshot.filter.turn_id == first.turn_id
    assert reset.snapshot.projection == (await first.snapshot()).projection
    assert set(reset.snapshot.projection.turns) == {first.turn_id}


@pytest.mark.spec("ST-19")
async def test_a_consumer_that_died_before_it_saved_its_cursor_gets_the_event_again(hosts: Hosts) -> None:
    """The cursor is saved in the callback, with what was made of the event; the effect needs the event's number."""
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    await session.submit("r1", "a")
    saved: str | None = None
    effects: list[int] = []
    died = asyncio.Event()

    async def dies(item: Any) -> None:
        nonlocal saved
        effects.append(item.event.sequence)
        if item.event.sequence == 3:
            died.set()
            await asyncio.Event().wait()
        saved = item.cursor

    first = session.subscribe_events(DEFAULTS, dies)
    await died.wait()
    first._task.cancel()
    assert saved == cursor_of(KEY, 2)

    async def lives(item: Any) -> None:
        nonlocal saved
        if item.event.sequence not in effects:
            effects.append(item.event.sequence)
        redelivered.append(item.event.sequence)
        saved = item.cursor

    redelivered: list[int] = []
    session.subscribe_events(EventStreamOptions(after=saved), lives)
    await until(lambda: saved == cursor_of(KEY, 4))

    assert redelivered == [3, 4]
    assert effects == [1, 2, 3, 4]


@pytest.mark.spec("ST-31")
async def test_a_connection_closes_its_subscription_when_it_goes(hosts: Hosts) -> None:
    runtime = await hosts.open([say("x"), final("ok")])
    session = await runtime.create_session(KEY, "agent")
    sent: list[str] = []

    class Socket:
        """A WebSocket of some server: it can be sent to, and waited on until the browser leaves."""

        def __init__(self) -> None:
            self.gone = asyncio.Event()

        async def send_text(self, text: str) -> None:
            sent.append(text)

        async def wait_closed(self) -> None:
            await self.gone.wait()

    async def serve(socket: Socket) -> None:
        async def send(item: SessionStreamEvent) -> None:
            if isinstance(item, Committed):
                await socket.send_text(item.event.type)

        async with session.subscribe_events(DEFAULTS, send):
            await socket.wait_closed()

    socket = Socket()
    serving = asyncio.create_task(serve(socket))
    turn = await session.submit("r1", "a")
    await until(lambda: "turn.status" in sent)
    socket.gone.set()
    await serving
    count = len(sent)

    assert str(await turn.wait(SECONDS)) == "ok"
    await session.submit("r2", "b")
    assert len(sent) == count
    assert not runtime._door._subscriptions


@pytest.mark.spec("DX-08", "ST-29")
async def test_an_observer_that_was_lost_looks_again_and_submits_nothing(hosts: Hosts) -> None:
    gates = Gates()
    brain = await hosts.open(ScriptedHarness([say("x"), Stall(gate="g"), final("ok")], gates=gates))
    session = await brain.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    projection = EventProjection(KEY)
    seen = Seen(lambda item: projection.accept(item.event) and None)
    first = await hosts.open(start=False)
    subscription = first.get_session(KEY).subscribe_events(DEFAULTS, seen)
    await gates.reached("g")
    await until(lambda: len(seen.items) > 4)
    await first.close()
    saved = subscription.cursor()
    gates.open("g")
    await turn.wait(SECONDS)

    # It comes back with its cursor, and the cursor has expired meanwhile.
    await prune(hosts, session)
    second = await hosts.open(start=False)
    async with second.get_session(KEY).stream_events(after=saved) as events:
        reset = await anext(events)
        assert isinstance(reset, SnapshotReset)
        projection.reset(reset.snapshot)
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.result()) == "ok"
    assert projection.projection.turns[turn.turn_id].status is TurnStatus.COMPLETED
    assert len((await session.list_turns()).items) == 1


async def test_any_function_of_one_event_is_a_listener(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    main = threading.get_ident()
    where: dict[str, set[int]] = {}

    def note(name: str) -> None:
        where.setdefault(name, set()).add(threading.get_ident())

    async def later(name: str) -> None:
        note(name)

    class Callable_:
        async def __call__(self, item: Any) -> None:
            note("object")

    def returns_a_coroutine(item: Any) -> Any:
        note("function")
        return later("what it returned")

    for listener in (Callable_(), returns_a_coroutine, lambda item: note("lambda")):
        session.subscribe_events(DEFAULTS, listener)
    await until(lambda: len(where) == 4)

    assert where["object"] == where["what it returned"] == {main}
    assert main not in where["function"] | where["lambda"]


async def test_what_cannot_be_is_refused_at_once(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    seen = Seen()
    for cursor in ("", "nonsense", "e1-0-0", "e1-000000000000--1", cursor_of(SessionKey("app", "other"), 1)):
        with pytest.raises(InvalidCursor):
            session.subscribe_events(EventStreamOptions(after=cursor), seen)
    for wrong in (
        lambda: session.subscribe_events(DEFAULTS, None),
        lambda: session.subscribe_events(seen, DEFAULTS),
        lambda: session.subscribe_events(DEFAULTS, seen, filter="main"),
        lambda: session.subscribe_events(DEFAULTS, seen, after=cursor_of(KEY, 1)),
        lambda: session.main_thread().subscribe_events(EventFilter(thread_id="x"), DEFAULTS, seen),
        lambda: session.stream_events("e1-0-0"),
    ):
        with pytest.raises(InvalidRequest):
            wrong()
    assert not runtime._door._subscriptions

    # One of the future can be seen in the store alone.
    subscription = session.subscribe_events(EventStreamOptions(after=cursor_of(KEY, 99)), seen)
    await until(lambda: subscription.last_failure() is not None)
    assert isinstance(subscription.last_failure(), InvalidCursor)
    assert seen.items == []


async def test_a_subscription_ends_with_the_backend(hosts: Hosts) -> None:
    backend, closed = hosts.backend, False

    class Closing:
        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        async def query(self, question: Any, **options: Any) -> Any:
            if closed:
                raise HostClosed("record store")
            return await backend.query(question, **options)

    brain = await hosts.open([final()], start=False)
    session = await brain.create_session(KEY, "agent")
    api = await hosts.open(backend=Closing())
    seen = Seen()
    subscription = api.get_session(KEY).subscribe_events(DEFAULTS, seen)
    await until(lambda: len(seen.items) == 2)
    closed = True
    await session.submit("r1", "a")
    await until(subscription.is_closed)

    assert isinstance(subscription.last_failure(), HostClosed)
