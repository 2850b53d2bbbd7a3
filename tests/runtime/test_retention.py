"""What others meet when a Session or a position is dropped under them: all of it, or that it was dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import CheckpointPruned, NotFound, SessionDropped
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.options import EventStreamOptions
from agentscope_durable.contracts.questions import Question
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, say
from tests.runtime.conftest import KEY, Hosts, all_events, refused, until

SCRIPT = (say("hm"), final("I know: {context}"))
LATER = SessionKey("app", "later")


async def conversation(runtime: DurableRuntime, *said: str) -> Any:
    session = await runtime.create_session(KEY, "agent")
    for text in said:
        await session.call(text, text)
    return session


async def test_a_follower_ends_with_what_happened(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a")
    seen: list[str] = []

    async def follow() -> None:
        async with session.stream_events() as events:
            async for event in events:
                seen.append(event.event.type)

    following = asyncio.ensure_future(follow())
    while "turn.status" not in seen:
        await asyncio.sleep(0)
    await session.close()
    while "session.closed" not in seen:
        await asyncio.sleep(0)
    await HostOperations(hosts.backend).drop_session(KEY)

    async with asyncio.timeout(90):
        error = await refused(following, SessionDropped)
    assert error.session == "app/c1"
    assert seen[-1] == "session.closed", "that it was dropped is no event of a timeline that is there no more"


@pytest.mark.parametrize("asks", [False, True], ids=["waiting", "in a callback that asks"])
async def test_a_subscription_ends_and_asks_no_more(hosts: Hosts, asks: bool) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a")
    seen: list[str] = []
    dropped = asyncio.Event()

    async def told(item: Any) -> None:
        seen.append(item.event.type)
        if asks and item.event.type == "session.closed":
            await dropped.wait()
            await session.history()

    subscription = session.subscribe_events(EventStreamOptions(), told)
    await until(lambda: "turn.status" in seen)
    await session.close()
    await until(lambda: "session.closed" in seen)
    await HostOperations(hosts.backend).drop_session(KEY)
    dropped.set()

    await until(subscription.is_closed)
    assert isinstance(subscription.last_failure(), SessionDropped)
    assert [type(error) for error in hosts.errors] == [SessionDropped], "told once"


@pytest.mark.spec("AD-29")
async def test_whoever_holds_a_handle_is_told(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a")
    turn = session.get_turn((await session.list_turns()).items[0].turn_id)
    await session.close()
    await HostOperations(hosts.backend).drop_session(KEY)

    for ask in (
        session.view,
        session.history,
        session.snapshot,
        session.close,
        turn.status,
        turn.result,
        lambda: session.submit("a", "a"),
        lambda: turn.cancel("cancel"),
        lambda: runtime.create_session(KEY, "agent"),
        lambda: turn.wait(5),
    ):
        await refused(ask(), SessionDropped)
    assert len(await runtime.list_sessions("app")) == 0
    assert str(await (await runtime.create_session(LATER, "agent")).call("a", "b")) == "I know: b"


@pytest.mark.spec("CK-17")
async def test_a_fork_goes_on_when_its_source_is_dropped_and_a_repeat_of_it_is_answered(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a", "b")
    await runtime.create_session(LATER, "agent")
    thread, target = session.main_thread(), ThreadKey(LATER, "branch")
    [first, _] = await thread.checkpoints()
    branch = await thread.fork(first.position, target, "fork")
    await session.close()
    await HostOperations(hosts.backend).drop_session(KEY)

    assert str(await branch.call("c", "c")) == "I know: a, c"
    assert (await thread.fork(first.position, target, "fork")).key == target
    await refused(thread.fork(first.position, ThreadKey(LATER, "another"), "fork-2"), SessionDropped)


class Between:
    """A backend that does something once, after so many questions."""

    def __init__(self, inner: TransactionalSessionBackend, after: int, act: Any) -> None:
        self.inner = inner
        self.left = after
        self.act = act

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def query(self, question: Question, **options: Any) -> Any:
        answer = await self.inner.query(question, **options)
        self.left -= 1
        if self.left == 0:
            await self.act()
        return answer


@pytest.mark.case("C69")
@pytest.mark.parametrize("what", ["session", "position"])
async def test_dropped_under_a_fork_it_is_whole_or_not_there(hosts: Hosts, what: str) -> None:
    """Whatever the fork has read of its source by then."""
    runtime = await hosts.open(SCRIPT)
    outcomes: list[str] = []
    for after in range(1, 12):
        source = await runtime.create_session(SessionKey("app", f"source-{after}"), "agent")
        await source.call("a", "a")
        await source.call("b", "b")
        target = await runtime.create_session(SessionKey("app", f"target-{after}"), "agent")
        [first, _] = await source.main_thread().checkpoints()
        operations = HostOperations(hosts.backend)

        async def drop(source: Any = source, first: Any = first, operations: Any = operations) -> None:
            if what == "session":
                await source.close()
                await operations.drop_session(source.key)
            else:
                await operations.prune_checkpoints(source.main_thread().key, through=first.position)

        between = Between(hosts.backend, after, drop)
        api = await hosts.open(backend=between, checkpoints={"agent": ScriptedHarness.restore})
        thread = api.get_session(source.key).main_thread()
        branch = ThreadKey(target.key, "branch")
        try:
            await thread.fork(first.position, branch, "fork")
        except (SessionDropped, CheckpointPruned):
            outcomes.append("told")
            await refused(target.get_thread("branch").view(), NotFound)
        else:
            outcomes.append("whole")
            assert str(await target.get_thread("branch").call("c", "c")) == "I know: a, c"
    assert outcomes == sorted(outcomes), "first it is told so, and from some point on nothing can be taken away"
    assert {"told", "whole"} == set(outcomes)


async def test_a_closed_session_says_when_and_its_snapshot_says_the_same(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    session = await conversation(runtime, "a")
    assert (await session.view()).closed_at_ms is None
    await session.close()
    view = await session.view()
    assert view.closed_at_ms is not None and view.closed_at_ms >= view.created_at_ms
    assert (await session.snapshot()).projection.session == view
    assert (await all_events(session))[-1].data == {"closedAtMs": view.closed_at_ms}
