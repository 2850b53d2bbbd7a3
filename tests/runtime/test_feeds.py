"""One reader for all who watch a Session: what it costs, and what happens where it cannot serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from agentscope_durable.contracts.errors import CursorExpired, Forbidden, NotFound, Unavailable, WaitTimeout
from agentscope_durable.contracts.events import Committed, EventFilter, SnapshotReset, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import GetOutcome, ListEvents, Watermarks
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import Harness
from agentscope_durable.runtime.streams import BACKLOG_MAX
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused, turn_is, until

MANY = 200


class Counted:
    """A backend that counts what it is asked, and may be told to fail."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.fail: Any = lambda question: None
        self.silent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def wakeups(self) -> Any:
        return LocalWakeups() if self.silent else self._backend.wakeups()

    async def query(self, question: Any, **options: Any) -> Any:
        self.asked[type(question).__name__] += 1
        error = self.fail(question)
        if error is not None:
            raise error
        answer = await self._backend.query(question, **options)
        self.answered[type(question).__name__] += 1
        return answer


@pytest.mark.spec("ST-10")
async def test_a_commit_is_read_once_for_all_who_wait_in_its_session(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    api = await hosts.open(backend=counted, poll_interval=60.0)
    brain = await hosts.open([final("ok")], start=False)
    session = await brain.create_session(KEY, "agent")
    busy = await session.create_thread("busy", "agent")
    turns = [await session.submit(f"r{number}", "a") for number in range(MANY)]
    waits = [asyncio.create_task(api.get_session(KEY).get_turn(turn.turn_id).wait(10 * SECONDS)) for turn in turns]
    streams = [api.get_session(KEY).get_turn(turn.turn_id).stream_events() for turn in turns]
    caught_up = [asyncio.create_task(_facts(stream, 2)) for stream in streams]
    await asyncio.gather(*caught_up)
    idle = [asyncio.create_task(anext(stream)) for stream in streams]
    await until(lambda: counted.asked["GetOutcome"] >= MANY)
    await _quiet(counted)
    # One each, and one more of whoever came when there was no other.
    assert counted.asked["GetOutcome"] <= MANY + 1
    before = counted.asked.copy()

    for number in range(10):
        await busy.submit(f"b{number}", "x")
        await _quiet(counted)
    spent = counted.asked - before

    assert set(spent) == {"ListEvents"}
    assert spent["ListEvents"] <= 2 * 10
    await brain.start()
    assert {str(message) for message in await asyncio.gather(*waits)} == {"ok"}
    await asyncio.gather(*idle)
    for stream in streams:
        await stream.aclose()
    assert counted.asked["GetOutcome"] == before["GetOutcome"] + MANY  # each when its own has ended


async def _facts(stream: Any, count: int) -> list[Committed]:
    async with asyncio.timeout(SECONDS):
        return [await anext(stream) for _ in range(count)]


async def _quiet(counted: Counted) -> None:
    """Until nothing is asked any more."""
    while True:
        before = counted.asked.total()
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        if counted.asked.total() == before:
            return


@pytest.mark.spec("ST-10")
async def test_without_hints_one_question_finds_what_moved_in_many_sessions(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    counted.silent = True
    api = await hosts.open(backend=counted, poll_interval=0.05)
    brain = await hosts.open([final()], start=False)
    keys = [SessionKey("app", f"s{number}") for number in range(MANY)]
    streams = []
    for key in keys:
        await brain.create_session(key, "agent")
        stream = api.get_session(key).stream_events()
        await _facts(stream, 2)
        streams.append(stream)
    waiting = [asyncio.create_task(anext(stream)) for stream in streams]
    await until(lambda: counted.asked["Watermarks"] > 0)
    await asyncio.sleep(0)
    reads, asked = counted.asked["ListEvents"], counted.asked["Watermarks"]
    await until(lambda: counted.asked["Watermarks"] >= asked + 3)
    assert counted.asked["ListEvents"] - reads <= MANY  # the last look of each, at most

    turn = await brain.get_session(keys[7]).submit("r1", "a")
    async with asyncio.timeout(SECONDS):
        assert (await waiting[7]).event.turn_id == turn.turn_id
    assert not any(task.done() for task in waiting[:7] + waiting[8:])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_backend_that_tells_no_watermarks_is_looked_at_all_the_same(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    counted.silent = True
    counted.fail = lambda question: Forbidden("watermarks") if isinstance(question, Watermarks) else None
    brain = await hosts.open([final("ok")])
    session = await brain.create_session(KEY, "agent")
    api = await hosts.open(backend=counted)
    turn = await session.submit("r1", "a")

    assert str(await api.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) == "ok"


async def test_waits_have_nothing_decoded_but_ends(hosts: Hosts) -> None:
    asked: list[ListEvents] = []
    counted = Counted(hosts.backend)
    counted.fail = lambda question: asked.append(question) if isinstance(question, ListEvents) else None
    gates = Gates()
    brain = await hosts.open(ScriptedHarness([say("x"), Stall(gate="g"), final("ok")], gates=gates))
    session = await brain.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", "a") for number in range(2)]
    api = await hosts.open(backend=counted)
    waiting = [asyncio.create_task(api.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) for turn in turns]
    await gates.reached("g")
    await until(lambda: len(asked) > 0)
    gates.open("g")

    assert [str(message) for message in await asyncio.gather(*waiting)] == ["ok", "ok"]
    assert {question.types for question in asked if question.limit > 1} == {("turn.status",)}


async def test_who_waits_alone_looks_when_he_comes_and_when_it_has_ended(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    api = await hosts.open(backend=counted, poll_interval=60.0)
    gates = Gates()
    brain = await hosts.open(ScriptedHarness([say("x"), Stall(gate="g"), final("ok")], gates=gates))
    session = await brain.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    waiting = asyncio.create_task(api.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS))
    await gates.reached("g")
    await until(lambda: counted.answered["GetOutcome"] == 1)
    gates.open("g")

    assert str(await waiting) == "ok"
    assert counted.asked == {"GetOutcome": 2}


async def test_of_two_who_wait_the_first_misses_nothing_when_the_second_comes(hosts: Hosts) -> None:
    """Alone he looked for himself. From then on both are told, and what was between is looked for once more."""
    counted = Counted(hosts.backend)
    counted.silent = True
    brain = await hosts.open([final("ok")], start=False)
    session = await brain.create_session(KEY, "agent")
    api = await hosts.open(backend=counted, poll_interval=60.0)
    first, second = [await session.submit(f"r{number}", "a") for number in range(2)]
    one = asyncio.create_task(api.get_session(KEY).get_turn(first.turn_id).wait(SECONDS))
    await until(lambda: counted.answered["GetOutcome"] == 1)
    await _quiet(counted)
    await brain.start()
    await turn_is(second, "COMPLETED")
    # Not a hint has come: whoever waits is told by the one who comes.
    other = asyncio.create_task(api.get_session(KEY).get_turn(second.turn_id).wait(SECONDS))

    assert [str(await one), str(await other)] == ["ok", "ok"]


@pytest.mark.spec("ST-10")
async def test_who_waits_for_an_end_is_not_woken_by_steps_and_who_streams_is(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    api = await hosts.open(backend=counted, poll_interval=60.0)
    gates = Gates()
    script = [Stall(gate="a"), *(say(f"word {number}") for number in range(20)), Stall(gate="b"), final("ok")]
    brain = await hosts.open(ScriptedHarness(script, gates=gates))
    session = await brain.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    waiting = asyncio.create_task(api.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS))
    await gates.reached("a")
    await until(lambda: counted.answered["GetOutcome"] == 1)
    await _quiet(counted)
    before = counted.asked.copy()
    gates.open("a")
    await gates.reached("b")
    await _quiet(counted)
    assert counted.asked == before

    # A stream of the same Session begins in between: it is told every fact, and the wait still ends.
    stream = api.get_session(KEY).get_turn(turn.turn_id).stream_events()
    facts = asyncio.create_task(_until_completed(stream))
    await _quiet(counted)
    gates.open("b")
    assert str(await waiting) == "ok"
    assert (await facts)[-1].event.type == "turn.status"
    await stream.aclose()


async def _until_completed(stream: Any) -> list[Committed]:
    facts: list[Committed] = []
    async with asyncio.timeout(SECONDS):
        while not (facts and facts[-1].event.type == "turn.status" and _ended(facts[-1])):
            facts.append(await anext(stream))
    return facts


def _ended(fact: Committed) -> bool:
    return TurnStatus(fact.event.data["turn"]["status"]).terminal


async def test_who_does_not_read_for_long_reads_on_from_the_store(hosts: Hosts) -> None:
    brain = await hosts.open([final()], start=False)
    session = await brain.create_session(KEY, "agent")
    async with session.stream_events() as slow, session.stream_events() as fast:
        await _facts(slow, 2), await _facts(fast, 2)
        late = [asyncio.create_task(anext(slow)), asyncio.create_task(anext(fast))]
        for number in range(BACKLOG_MAX):
            await session.submit(f"r{number}", "a")
        first, _ = await asyncio.gather(*late)
        quick = await _facts(fast, 2 * BACKLOG_MAX - 1)
        await until(lambda: len(slow._facts) >= BACKLOG_MAX or not slow._joined)
        assert len(slow._facts) <= BACKLOG_MAX
        rest = await _facts(slow, 2 * BACKLOG_MAX - 1)

        assert [fact.event.sequence for fact in (first, *rest)] == list(range(3, 2 * BACKLOG_MAX + 3))
        assert rest == quick
        # It is told again from here on.
        waiting = asyncio.create_task(anext(slow))
        await session.submit("last", "a")
        assert (await waiting).event.sequence == 2 * BACKLOG_MAX + 3


async def test_while_the_store_is_away_waits_and_streams_only_become_late(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    gates = Gates()
    brain = await hosts.open(ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates))
    session = await brain.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    api = await hosts.open(backend=counted)
    seen = api.get_session(KEY).get_turn(turn.turn_id)
    waiting = asyncio.create_task(seen.wait(SECONDS))
    async with api.get_session(KEY).stream_events() as events:
        so_far = await _facts(events, len(await all_events(session)))
        following = asyncio.create_task(anext(events))
        await until(lambda: counted.answered["GetOutcome"] >= 1)
        counted.fail = lambda question: Unavailable("away")
        gates.open("g")
        await turn.wait(SECONDS)
        await until(lambda: counted.asked["GetOutcome"] >= 3)
        assert not waiting.done()
        counted.fail = lambda question: None

        assert str(await waiting) == "ok"
        rest = [await following, *await _facts(events, len(await all_events(session)) - len(so_far) - 1)]
    assert [fact.event for fact in (*so_far, *rest)] == await all_events(session)


async def test_who_has_seen_the_end_waits_for_the_answer_while_the_store_is_away(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    brain = await hosts.open([final("ok")])
    turn = await (await brain.create_session(KEY, "agent")).submit("r1", "a")
    await turn.wait(SECONDS)
    counted.fail = lambda question: Unavailable("away") if isinstance(question, GetOutcome) else None
    api = await hosts.open(backend=counted)
    seen = api.get_session(KEY).get_turn(turn.turn_id)
    await refused(seen.wait(0), Unavailable)
    waiting = asyncio.create_task(seen.wait(SECONDS))

    await until(lambda: counted.asked["GetOutcome"] >= 4)
    assert not waiting.done()
    counted.fail = lambda question: None

    assert str(await waiting) == "ok"


async def test_an_event_that_cannot_be_read_hurts_those_alone_whom_it_concerns(hosts: Hosts) -> None:
    """The whole Session fails at it; a Turn that does not hold it goes on, and so does a wait."""
    counted = Counted(hosts.backend)
    brain = await hosts.open([final("ok")], start=False)
    session = await brain.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    broken = await session.create_thread("broken", "agent")
    api = (await hosts.open(backend=counted)).get_session(KEY)
    async with api.stream_events() as whole, api.get_turn(turn.turn_id).stream_events() as mine:
        await _facts(whole, 5), await _facts(mine, 2)
        late = [asyncio.create_task(anext(whole)), asyncio.create_task(anext(mine))]
        waiting = asyncio.create_task(api.get_turn(turn.turn_id).wait(SECONDS))
        await until(lambda: counted.answered["GetOutcome"] >= 1)
        counted.fail = lambda question: (
            NotFound("object", "x")
            if isinstance(question, ListEvents)
            and question.filter == EventFilter()
            and not question.types
            and question.limit > 1
            else None
        )
        await broken.submit("r2", "b")
        await refused(late[0], NotFound)
        await brain.start()

        assert (await late[1]).event.turn_id == turn.turn_id
        assert str(await waiting) == "ok"


@pytest.mark.spec("ST-07")
async def test_a_feed_that_was_overtaken_by_pruning_lets_each_find_out_for_himself(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    brain = await hosts.open([final("ok")], start=False)
    session = await brain.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    pruned = 0

    def fail(question: Any) -> Exception | None:
        if isinstance(question, ListEvents) and question.limit > 1:
            position = sequence_of(KEY, question.cursor)
            if position < pruned:
                return CursorExpired(position, oldest=pruned)
        return None

    counted.fail = fail
    api = (await hosts.open(backend=counted)).get_session(KEY)
    async with api.main_thread().stream_events() as events:
        await _facts(events, 3)
        waiting = asyncio.create_task(api.get_turn(turn.turn_id).wait(SECONDS))
        await until(lambda: counted.answered["GetOutcome"] >= 1)
        following = asyncio.create_task(anext(events))
        pruned = 6
        await brain.start()
        await turn.wait(SECONDS)
        reset = await following
        async with asyncio.timeout(SECONDS):
            while not isinstance(reset, SnapshotReset):
                reset = await anext(events)

        assert reset.snapshot.filter == EventFilter(thread_id="main")
        assert str(await waiting) == "ok"
        again = await session.submit("r2", "b")
        async with asyncio.timeout(SECONDS):
            seen = [item async for item in _until_turn(events, again.turn_id)]
    assert sequence_of(KEY, reset.snapshot.cursor) < seen[0].event.sequence


async def _until_turn(events: Any, turn_id: str) -> Any:
    async for item in events:
        if item.event.turn_id == turn_id:
            yield item
            return
        yield item


async def test_nothing_is_left_when_the_last_one_leaves(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    feeds = runtime._door.feeds
    turn = await session.submit("r1", "a")
    async with session.stream_events() as events:
        await anext(events)
        await turn.wait(SECONDS)
        assert len(feeds._feeds) == 1
    await refused(session.main_thread().get_turn("nobody's").wait(), NotFound)

    assert not feeds._feeds and not len(feeds._tasks) and feeds._timer is None and feeds._poller is None


@pytest.mark.spec("CT-10", "CT-07", "ST-10")
async def test_a_host_looks_at_a_turn_it_runs_when_something_was_said_of_that_turn(hosts: Hosts) -> None:
    """Other Turns of the Session may be as busy as they like; a control is noticed without a poll."""
    counted = Counted(hosts.backend)
    gates = Gates()
    harnesses = [
        Harness("still", "v1", ScriptedHarness([Stall(gate="g"), final("never")], gates=gates)),
        Harness("busy", "v1", ScriptedHarness([*(say(f"{number}") for number in range(10)), final("ok")])),
    ]
    runtime = await hosts.open(backend=counted, harnesses=harnesses, parallelism=20, poll_interval=600.0)
    session = await runtime.create_session(KEY, "still")
    threads = [await session.create_thread(f"t{number}", "still") for number in range(10)]
    still = [await thread.submit("r-" + thread.thread_id, "a") for thread in threads]
    busy = await session.create_thread("busy", "busy")
    await until(lambda: len(runtime._scheduler.runs) == 10)
    for turn in still:
        await turn_is(turn, "RUNNING")
    await _quiet(counted)
    before = counted.asked.copy()
    for number in range(5):
        assert str(await (await busy.submit(f"b{number}", "x")).wait(SECONDS)) == "ok"

    # Of the busy ones' own: what their callers and their hosts ask.
    spent = counted.asked - before
    assert spent["GetTurn"] + spent["GetOutcome"] < 5 * 12
    for turn in still:
        await turn.cancel("c-" + turn.turn_id)
    for turn in still:
        await turn_is(turn, "CANCELLED")


async def test_a_wait_without_time_asks_once(hosts: Hosts) -> None:
    counted = Counted(hosts.backend)
    brain = await hosts.open([final()], start=False)
    turn = await (await brain.create_session(KEY, "agent")).submit("r1", "a")
    api = await hosts.open(backend=counted)

    await refused(api.get_session(KEY).get_turn(turn.turn_id).wait(0), WaitTimeout)
    assert counted.asked == {"GetOutcome": 1, "GetTurn": 1}  # whether it has ended, and what it waits for
    assert (await turn.status()).status is TurnStatus.QUEUED
