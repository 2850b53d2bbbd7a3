"""A Thread's context at its settled positions: listed, brought back, and begun again in another Thread."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentscope_durable.assembly import MemoryBackend
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.checkpoint import position_of, stream_position
from agentscope_durable.contracts.errors import (
    Closed,
    Conflict,
    CorruptRecord,
    DefinitionConflict,
    HasHistory,
    HostClosed,
    Incompatible,
    InvalidCursor,
    InvalidRequest,
    Misuse,
    NoCheckpointCodec,
    NotFound,
    PositionConflict,
    RequestConflict,
    Unavailable,
    Uncertain,
    Unfinished,
)
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.status import SettledBy, TurnStatus
from agentscope_durable.runtime.runtime import Definition, DurableRuntime, Harness, HarnessResolver
from agentscope_durable.spi.checkpoint import NativeBaseline
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.scripted_harness import STATE_VERSION, Gates, ScriptedHarness, Stall, final, say
from tests.runtime.conftest import KEY, Hosts, all_events, refused, turn_is, until

SCRIPT = (say("hm"), final("I know: {context}"))
BRANCH = ThreadKey(KEY, "branch")
TOLD = {"restore": "thread.restored", "fork": "thread.forked"}


async def conversation(runtime: DurableRuntime, *said: str, key: SessionKey = KEY) -> Any:
    """A Session whose main Thread was told these things, one in each Turn."""
    session = await runtime.create_session(key, "agent")
    for text in said:
        await session.call(f"say-{text}", text)
    return session


async def knows(thread: Any, request_id: str, text: str) -> str:
    """What the agent knows of when it is told one thing more."""
    return str(await thread.call(request_id, text)).removeprefix("I know: ")


async def positions(thread: Any) -> list[str]:
    return [checkpoint.position for checkpoint in await thread.checkpoints()]


@pytest.mark.spec("RT-18")
def test_the_operations_of_a_thread_have_the_names_of_the_specification() -> None:
    from agentscope_durable import DurableThread

    for name in ("submit", "get_turn", "list_turns", "history", "view", "close", "checkpoints", "restore", "fork"):
        assert callable(getattr(DurableThread, name))


# ---- listing ----


@pytest.mark.spec("CK-01", "CK-12", "CK-15", "RT-18")
async def test_settled_positions_are_listed_in_order_page_by_page(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a", "b", "c", "d")
    thread = session.main_thread()
    turns = (await thread.list_turns()).items
    everything = await thread.checkpoints()

    assert [checkpoint.turn_id for checkpoint in everything] == [turn.turn_id for turn in turns]
    assert {checkpoint.settled for checkpoint in everything} == {SettledBy.COMPLETED}
    assert all(isinstance(checkpoint.position, str) for checkpoint in everything)
    assert everything.cursor is None
    assert everything.current == everything.items[-1].position
    one = everything.items[0]
    assert (one.binding.harness, one.binding.definition_version, one.binding.state_version, one.writer) == (
        "agent",
        "v1",
        STATE_VERSION,
        "scripted 1",
    )

    found: list[Any] = []
    after = None
    for size in (1, 2, 1):
        page = await thread.checkpoints(after, limit=size)
        assert (len(page), page.current) == (size, everything.current)
        found += page.items
        after = page.items[-1].position
        assert page.cursor == (after if len(found) < 4 else None)
    assert tuple(found) == everything.items
    assert (await thread.checkpoints(after)).items == ()
    # One that a store has given that was put back from an older copy since.
    ahead = position_of(thread.key, stream_position(thread.key, after) + 1)
    error = await refused(thread.checkpoints(ahead), InvalidCursor)
    assert (error.path, error.reason) == ("after", "this position is ahead of the thread")


async def test_a_thread_without_a_turn_has_no_position(hosts: Hosts) -> None:
    session = await conversation(await hosts.open(SCRIPT))
    page = await session.main_thread().checkpoints()

    assert (page.items, page.cursor, page.current) == ((), None, None)
    await refused(session.get_thread("nobody").checkpoints(), NotFound)
    await refused(session.main_thread().checkpoints("page 2"), InvalidRequest)


# ---- restore ----


@pytest.mark.spec("CK-01", "CK-11", "EV-26")
@pytest.mark.case("C69")
async def test_a_thread_goes_on_from_a_former_position_and_every_other_stays(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a", "b", "c")
    thread = session.main_thread()
    history = [message.text for message in await thread.history()]
    page = await thread.checkpoints()
    restored = await thread.restore(page.items[0].position, page.current, "restore-1")

    assert (restored.settled, restored.source.position) == (SettledBy.RESTORED, page.items[0].position)
    assert (await thread.checkpoints()).current == restored.position
    assert await knows(thread, "r4", "d") == "a, d"
    # What was said stays said; one event tells what happened.
    assert [message.text for message in await thread.history()][: len(history)] == history
    told = [event for event in await all_events(session) if event.type.startswith("thread.re")]
    assert [event.data for event in told] == [{"position": restored.position, "restoredFrom": page.items[0].position}]
    # Back to what was there before the restore.
    again = await thread.restore(page.current, (await thread.checkpoints()).current, "restore-2")
    assert await knows(thread, "r5", "e") == "a, b, c, e"
    assert (await thread.checkpoints()).items[: len(page)] == page.items
    assert again.source.position == page.current


@pytest.mark.spec("CK-05", "CK-06")
async def test_a_restore_that_may_not_be_is_refused_and_changes_nothing(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness({"": SCRIPT, "wait": [Stall(gate="g"), final()]}, gates=gates))
    session = await conversation(runtime, "a", "b")
    thread = session.main_thread()
    first, second = await positions(thread)
    other = await session.create_thread("other", "agent")
    before = await all_events(session)

    assert (await refused(thread.restore(first, first, "r"), PositionConflict)).actual == second
    await refused(thread.restore(first[:-1] + "99", second, "r"), NotFound)
    await refused(thread.restore("there", second, "r"), InvalidRequest)
    await refused(other.restore(first, first, "r"), InvalidRequest)
    await refused(thread.restore(first, second, ""), InvalidRequest)
    assert await all_events(session) == before

    turn = await session.submit("busy", "wait")
    await gates.reached("g")
    await refused(thread.restore(first, second, "r"), Unfinished)
    gates.open("g")
    await turn.wait()
    await session.close()
    await refused(thread.restore(first, (await thread.checkpoints()).current, "r"), Closed)


@pytest.mark.spec("AD-17", "AD-28")
async def test_a_repeated_restore_or_fork_is_the_first_one(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a", "b")
    thread = session.main_thread()
    first, second = await positions(thread)
    restored = await thread.restore(first, second, "restore")
    await thread.fork(first, BRANCH, "fork")
    await knows(thread, "r3", "c")
    before = await all_events(session)

    assert await thread.restore(first, second, "restore") == restored
    assert (await thread.fork(first, BRANCH, "fork")).key == BRANCH
    assert (await refused(thread.restore(second, second, "restore"), RequestConflict)).field == "position"
    assert (await refused(thread.fork(second, BRANCH, "fork"), RequestConflict)).field == "position"
    assert (await refused(thread.fork(first, ThreadKey(KEY, "b2"), "fork"), RequestConflict)).field == "thread"
    await refused(session.get_thread("b2").view(), NotFound)
    assert await all_events(session) == before


@pytest.mark.spec("AD-17", "BE-29")
@pytest.mark.parametrize("what", ["restore", "fork"])
async def test_a_lost_answer_is_settled_by_the_same_request(what: str) -> None:
    store = FaultyRecordStore(MemoryRecordStore())
    backend = TransactionalSessionBackend(store)
    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        for text in ("a", "b"):
            await session.call(text, text)
        assert await runtime.drain()
        thread = session.main_thread()
        first, second = await positions(thread)

        async def ask() -> Any:
            if what == "restore":
                return (await thread.restore(first, second, "once")).position
            return (await thread.fork(first, BRANCH, "once")).key

        # It is asked whether it may be done, and then done: nothing came of the first, the second was not heard of.
        for nth, lost in ((1, False), (2, True)):
            if lost:
                store.lose_answer(nth=nth)
            else:
                store.fail(nth=nth)
            await refused(ask(), Uncertain if lost else Unavailable)
        answer = await ask()
        assert await ask() == answer
        assert len([event for event in await all_events(session) if event.type == TOLD[what]]) == 1


@pytest.mark.spec("CK-14")
async def test_of_a_restore_and_a_submit_at_once_neither_overwrites_the_other(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    won = {"restore": 0, "submit": 0}
    for number in range(10):
        session = await conversation(runtime, "a", "b", key=SessionKey("app", f"race-{number}"))
        thread = session.main_thread()
        first, second = await positions(thread)

        async def late(submit: Any = session.submit, turns: int = number) -> Any:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await submit("r3", "c")

        restored, turn = await asyncio.gather(thread.restore(first, second, "restore"), late(), return_exceptions=True)
        known = str(await turn.wait()).removeprefix("I know: ")
        if isinstance(restored, Conflict):
            won["submit"] += 1
            assert known == "a, b, c"
        else:
            won["restore"] += 1
            assert (restored.settled, known) == (SettledBy.RESTORED, "a, c")
    assert sum(won.values()) == 10


@pytest.mark.spec("CK-14")
async def test_of_two_restores_at_once_one_wins(hosts: Hosts) -> None:
    session = await conversation(await hosts.open(SCRIPT), "a", "b", "c")
    thread = session.main_thread()
    first, second, third = await positions(thread)
    answers = await asyncio.gather(
        thread.restore(first, third, "one"), thread.restore(second, third, "two"), return_exceptions=True
    )

    assert sorted(isinstance(answer, PositionConflict) for answer in answers) == [False, True]
    assert len([event for event in await all_events(session) if event.type == "thread.restored"]) == 1


# ---- fork ----


@pytest.mark.spec("CK-01", "CK-08", "CK-11", "CK-16", "EV-26")
async def test_a_fork_begins_a_thread_with_what_the_other_one_knew(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a", "b")
    elsewhere = await runtime.create_session(SessionKey("app", "elsewhere"), "agent")
    thread = session.main_thread()
    first, _ = await positions(thread)
    seen = [event.type for event in await all_events(elsewhere)]
    branch = await thread.fork(first, ThreadKey(elsewhere.key, "branch"), "fork")

    # Nothing that was said there is part of this timeline.
    told = (await all_events(elsewhere))[len(seen) :]
    assert [(event.type, event.thread_id) for event in told] == [
        ("thread.created", "branch"),
        ("thread.forked", "branch"),
    ]
    assert told[1].data["source"] == {
        "session": {"namespace": "app", "sessionId": KEY.session_id},
        "threadId": "main",
        "position": first,
    }
    assert ((await branch.history()).items, (await branch.list_turns()).items) == ((), ())
    assert (await branch.view()).binding == (await thread.view()).binding
    # Both go on, and neither knows of the other.
    assert await knows(branch, "r3", "there") == "a, there"
    assert await knows(thread, "r4", "here") == "a, b, here"
    [copied, settled] = await branch.checkpoints()
    assert (copied.settled, copied.turn_id, settled.settled) == (SettledBy.FORKED, None, SettledBy.COMPLETED)
    restored = await branch.restore(copied.position, settled.position, "restore")
    assert restored.source.thread_id == "branch"
    assert await knows(branch, "r5", "anew") == "a, anew"


@pytest.mark.spec("CK-08", "CK-09", "CK-10", "CK-16")
async def test_a_fork_that_may_not_be_is_refused_and_changes_nothing(hosts: Hosts) -> None:
    harnesses = [Harness("agent", version, ScriptedHarness(SCRIPT)) for version in ("v2", "v1")]
    harnesses.append(Harness("another", "v1", ScriptedHarness(SCRIPT)))
    runtime = await hosts.open(harnesses=harnesses)
    session = await conversation(runtime, "a")
    thread = session.main_thread()
    [position] = await positions(thread)
    await session.create_thread("another", "another")
    used = await session.create_thread("used", "agent")
    await used.call("r2", "b")
    api = await hosts.open(definitions=[Definition("agent", "v2", STATE_VERSION)], start=False)
    await api.get_session(KEY).create_thread("v2", "agent")
    before = await all_events(session)

    refusals: list[tuple[ThreadKey, type[Exception]]] = [
        (thread.key, InvalidRequest),
        (ThreadKey(KEY, "used"), HasHistory),
        (ThreadKey(KEY, "another"), DefinitionConflict),
        (ThreadKey(KEY, "v2"), DefinitionConflict),
        (ThreadKey(SessionKey("app", "nowhere"), "x"), NotFound),
        (ThreadKey(SessionKey("other", KEY.session_id), "x"), InvalidRequest),
    ]
    for target, error in refusals:
        await refused(thread.fork(position, target, "fork"), error)
    await refused(thread.fork(position, "branch", "fork"), InvalidRequest)  # type: ignore[arg-type]
    await refused(used.fork(position, BRANCH, "fork"), InvalidRequest)
    assert await all_events(session) == before


async def test_a_closed_thread_can_still_be_forked(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a")
    [position] = await positions(session.main_thread())
    await session.close()
    target = ThreadKey((await runtime.create_session(SessionKey("app", "other"), "agent")).key, "main")
    await refused(session.main_thread().fork(position, BRANCH, "fork"), Closed)

    branch = await session.main_thread().fork(position, target, "fork")
    assert await knows(branch, "r2", "b") == "a, b"


# ---- three commands ----


@pytest.mark.case("C83")
async def test_resume_restore_and_fork_cannot_be_taken_for_each_other(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness({"": SCRIPT, "wait": [Stall(gate="g"), *SCRIPT]}, gates=gates))
    session = await conversation(runtime, "a", "b")
    thread = session.main_thread()
    first, second = await positions(thread)
    turn = await session.submit("r3", "wait")
    await gates.reached("g")
    await turn.pause("pause")
    paused = await turn_is(turn, TurnStatus.PAUSED)

    # An interrupted Turn and an older position: each command says what it is for, and takes no other's arguments.
    await refused(thread.restore(first, second, "restore"), Unfinished)
    with pytest.raises(TypeError):
        await turn.resume("resume", paused.revision, first)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        await thread.restore(first, "restore")  # type: ignore[call-arg]
    await refused(turn.resume("resume", first), InvalidRequest)  # type: ignore[arg-type]
    await refused(thread.restore(first, "restore", second), InvalidRequest)
    await refused(thread.fork(first, thread.key, "fork"), InvalidRequest)

    branch = await thread.fork(first, BRANCH, "fork")
    assert (await turn.status()).status is TurnStatus.PAUSED, "a fork changes nothing of its source"
    gates.open("g")
    await turn.resume("resume", paused.revision)
    assert str(await turn.wait()) == "I know: a, b, wait"
    assert await knows(branch, "r4", "branch") == "a, branch"


# ---- codecs ----


@pytest.mark.spec("CK-02", "CK-03")
async def test_an_api_host_restores_and_forks_with_a_registered_codec_alone(hosts: Hosts) -> None:
    host = await hosts.open(SCRIPT)
    session = await conversation(host, "a", "b")
    first, second = await positions(session.main_thread())
    api = await hosts.open(checkpoints={"agent": ScriptedHarness.restore}, start=False)
    bare = await hosts.open(start=False)

    for one in (bare, await hosts.open(checkpoints={"another": ScriptedHarness.restore}, start=False)):
        thread = one.get_session(KEY).main_thread()
        missing = await refused(thread.restore(first, second, "restore"), NoCheckpointCodec)
        assert missing.definition == "agent"
        await refused(thread.fork(first, BRANCH, "fork"), NoCheckpointCodec)
    thread = api.get_session(KEY).main_thread()
    branch = await thread.fork(first, BRANCH, "fork")
    restored = await thread.restore(first, second, "restore")
    # What was done is told by any host.
    assert await bare.get_session(KEY).main_thread().restore(first, second, "restore") == restored
    assert (await bare.get_session(KEY).main_thread().fork(first, BRANCH, "fork")).key == BRANCH
    assert await knows(session.main_thread(), "r3", "c") == "a, c"
    assert await knows(host.get_session(KEY).get_thread(branch.thread_id), "r4", "d") == "a, d"


async def test_a_version_that_a_resolver_makes_needs_no_codec(hosts: Hosts) -> None:
    session = await conversation(await hosts.open(SCRIPT), "a", "b")
    first, second = await positions(session.main_thread())
    asked: list[Definition] = []

    def make(definition: Definition) -> Any:
        asked.append(definition)
        return ScriptedHarness(SCRIPT) if definition.name == "agent" else None

    runtime = await hosts.open(harnesses=[HarnessResolver("agent", make)], start=False)
    restored = await runtime.get_session(KEY).main_thread().restore(first, second, "restore")
    assert (restored.settled, [one.definition_version for one in asked]) == (SettledBy.RESTORED, ["v1"])


@pytest.mark.spec("CK-03", "RT-34")
async def test_a_version_that_was_declined_a_moment_ago_is_asked_for_again(hosts: Hosts) -> None:
    """A host that looks for work asks after half a minute; who restores or forks waits for an answer now."""
    session = await conversation(await hosts.open(SCRIPT), "a", "b")
    first, second = await positions(session.main_thread())
    made: list[Any] = [None, ScriptedHarness(SCRIPT)]
    runtime = await hosts.open(harnesses=[HarnessResolver("agent", lambda _: made[0])], start=False)
    thread = runtime.get_session(KEY).main_thread()

    for _ in range(2):
        await refused(thread.restore(first, second, "restore"), NoCheckpointCodec)
    made.pop(0)
    assert (await thread.restore(first, second, "restore")).settled is SettledBy.RESTORED


async def test_two_who_need_a_version_that_is_being_made_both_get_it(hosts: Hosts) -> None:
    session = await conversation(await hosts.open(SCRIPT), "a", "b")
    first, second = await positions(session.main_thread())
    asked: list[Definition] = []
    go = asyncio.Event()

    async def make(definition: Definition) -> Any:
        asked.append(definition)
        await go.wait()
        return ScriptedHarness(SCRIPT)

    runtime = await hosts.open(harnesses=[HarnessResolver("agent", make)], start=False)
    thread = runtime.get_session(KEY).main_thread()
    both = asyncio.gather(thread.restore(first, second, "restore"), thread.fork(first, BRANCH, "fork"))
    await until(lambda: bool(asked))
    go.set()
    restored, branch = await both

    assert (restored.settled, branch.key, len(asked)) == (SettledBy.RESTORED, BRANCH, 1)


async def test_another_version_of_the_definition_reads_the_same_state(hosts: Hosts) -> None:
    session = await conversation(await hosts.open(SCRIPT), "a", "b")
    first, second = await positions(session.main_thread())
    later = await hosts.open(SCRIPT, version="v2", start=False)

    restored = await later.get_session(KEY).main_thread().restore(first, second, "restore")
    assert restored.binding.definition_version == "v1"


@pytest.mark.spec("CK-04", "CK-10", "CK-13")
@pytest.mark.parametrize("error", [CorruptRecord("a", "b", "c"), Incompatible("x", required="y", present="z")])
async def test_what_a_codec_refuses_is_not_installed(hosts: Hosts, error: Exception) -> None:
    session = await conversation(await hosts.open(SCRIPT), "a", "b")
    first, second = await positions(session.main_thread())
    seen: list[NativeBaseline] = []

    def codec(baseline: NativeBaseline) -> Any:
        seen.append(baseline)
        raise error

    api = await hosts.open(checkpoints={"agent": codec}, start=False)
    thread = api.get_session(KEY).main_thread()
    before = await all_events(session)
    assert await refused(thread.restore(first, second, "restore"), type(error)) is error
    assert await refused(thread.fork(first, BRANCH, "fork"), type(error)) is error
    assert (await all_events(session), await positions(thread)) == (before, [first, second])
    assert [(one.source, one.target) for one in seen] == [(thread.key, thread.key), (thread.key, BRANCH)]


async def test_a_codec_that_returns_half_a_state_is_a_defect_and_told_so(hosts: Hosts) -> None:
    session = await conversation(await hosts.open(SCRIPT), "a", "b")
    first, second = await positions(session.main_thread())
    api = await hosts.open(checkpoints={"agent": lambda baseline: ()}, start=False)

    await refused(api.get_session(KEY).main_thread().restore(first, second, "restore"), Misuse)
    for wrong in ({"agent": "codec"}, {"": ScriptedHarness.restore}):
        with pytest.raises((Misuse, InvalidRequest)):
            DurableRuntime(backend=hosts.backend, checkpoints=wrong)  # type: ignore[arg-type]


async def test_a_closed_runtime_restores_nothing(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a")
    [position] = await positions(session.main_thread())
    await runtime.close()

    await refused(session.main_thread().restore(position, position, "r"), HostClosed)
    await refused(session.main_thread().fork(position, BRANCH, "r"), HostClosed)


# ---- whatever was done before ----


class Branches:
    """A Session whose Threads are told things, restored and forked; what each agent should know at each position."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.known: dict[str, tuple[str, ...]] = {}
        self.threads: dict[str, list[str]] = {"main": []}
        self.requests = 0

    def request(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    async def told(self, thread_id: str) -> None:
        thread = self.session.get_thread(thread_id)
        request_id = self.request()
        before = self.known[self.threads[thread_id][-1]] if self.threads[thread_id] else ()
        known = await knows(thread, request_id, request_id)
        assert known == ", ".join((*before, request_id))
        await self._stands(thread_id, (*before, request_id))

    async def restored(self, thread_id: str, number: int) -> None:
        listed = self.threads[thread_id]
        position = listed[number % len(listed)]
        thread = self.session.get_thread(thread_id)
        await thread.restore(position, (await thread.checkpoints()).current, self.request())
        await self._stands(thread_id, self.known[position])

    async def forked(self, thread_id: str, number: int) -> None:
        listed = self.threads[thread_id]
        position = listed[number % len(listed)]
        target = f"branch-{self.requests}"
        await self.session.get_thread(thread_id).fork(position, ThreadKey(self.session.key, target), self.request())
        self.threads[target] = []
        await self._stands(target, self.known[position])

    async def _stands(self, thread_id: str, known: tuple[str, ...]) -> None:
        page = await self.session.get_thread(thread_id).checkpoints(limit=1000)
        listed = [checkpoint.position for checkpoint in page]
        assert listed[:-1] == self.threads[thread_id]
        assert listed[-1] == page.current
        self.threads[thread_id] = listed
        self.known[page.current] = known


@pytest.mark.spec("CK-15")
@pytest.mark.case("C69")
@given(st.lists(st.tuples(st.sampled_from("ttrf"), st.integers(0, 20), st.integers(0, 20)), min_size=3, max_size=12))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_from_any_position_of_any_history_the_agent_knows_what_it_knew(steps: list[tuple[str, int, int]]) -> None:
    async def story() -> None:
        backend = MemoryBackend()
        harness = Harness("agent", "v1", ScriptedHarness([final("I know: {context}")]))
        async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
            branches = Branches(await runtime.create_session(KEY, "agent"))
            await runtime.start()
            await branches.told("main")
            for what, thread, number in steps:
                thread_id = list(branches.threads)[thread % len(branches.threads)]
                match what:
                    case "t":
                        await branches.told(thread_id)
                    case "r":
                        await branches.restored(thread_id, number)
                    case _:
                        await branches.forked(thread_id, number)
            # At the end from every position there ever was, in all Threads.
            for thread_id, listed in list(branches.threads.items()):
                for number in range(len(listed)):
                    await branches.restored(thread_id, number)
                    await branches.told(thread_id)
        await backend.close()

    asyncio.run(story())
