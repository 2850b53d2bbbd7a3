"""What observers of a pruned Session meet, and how a client with previews never shows a text twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from agentscope_durable.contracts.errors import EventGap
from agentscope_durable.contracts.events import (
    Committed,
    EventDelta,
    EventFilter,
    PreviewStarted,
    SessionStreamEvent,
    SnapshotReset,
)
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.replay import SessionEventClient
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Gates, Round, ScriptedHarness, final, say
from tests.runtime.conftest import KEY, Hosts, all_events, kill, turn_is

SECONDS = 90
LEASE_MS = 30_000


class Observer:
    """A client that holds a projection and shows what is being written: the one way that the docs describe.

    A preview is text of one attempt at one message. More of it is added only where it continues what is there, and the
    fact takes its place.
    """

    def __init__(self, narrow: EventFilter | None = None) -> None:
        self.projection = EventProjection(KEY, narrow)
        self.previews: dict[str, tuple[int, str]] = {}
        self.resets = 0
        self.shown: list[str] = []

    def take(self, item: SessionStreamEvent) -> None:
        match item:
            case SnapshotReset(snapshot=snapshot):
                self.projection.reset(snapshot)
                self.previews.clear()
                self.resets += 1
            case Committed(event=event):
                self.projection.accept(event)
                if event.type in ("message.completed", "message.abandoned"):
                    self.previews.pop(event.data["messageId"], None)
            case PreviewStarted():
                self.previews[item.message_id] = (item.attempt, "")
            case EventDelta():
                attempt, text = self.previews.get(item.message_id, (item.attempt, ""))
                if item.attempt > attempt:
                    attempt, text = item.attempt, ""
                if item.attempt == attempt and item.offset == len(text):
                    self.previews[item.message_id] = (attempt, text + item.text)
        self.shown.append(self.screen())

    def screen(self) -> str:
        texts = [message.text for message in self.projection.projection.history()]
        known = self.projection.projection.messages
        return " | ".join([*texts, *(text for name, (_, text) in self.previews.items() if name not in known)])


async def follow(items: Any, observer: Observer, session: Any) -> None:
    """Until the observer has what a snapshot shows."""
    async with asyncio.timeout(SECONDS), items as events:
        while observer.projection.cursor != (await session.list_events()).high_watermark:
            observer.take(await anext(events))


@pytest.mark.spec("ST-07", "EV-19", "PR-15", "PR-04")
@pytest.mark.parametrize("narrow", ["session", "thread", "turn", "run"])
@pytest.mark.parametrize("saved", [False, True], ids=["from nowhere", "from a saved cursor"])
async def test_a_stream_over_what_was_pruned_begins_with_a_snapshot(hosts: Hosts, narrow: str, saved: bool) -> None:
    runtime = await hosts.open([say("one"), final("two")])
    session = await runtime.create_session(KEY, "agent")
    side = await session.create_thread("side", "agent")
    turn = await side.submit("r1", "a")
    await turn_is(turn, "COMPLETED")
    await turn_is(await session.submit("r2", "b"), "COMPLETED")
    run = (await turn.list_runs()).items[0].run_id
    chosen = {
        "session": EventFilter(),
        "thread": EventFilter("side"),
        "turn": EventFilter("side", turn.turn_id),
        "run": EventFilter("side", turn.turn_id, run),
    }[narrow]
    events = await all_events(session)
    await HostOperations(hosts.backend).prune_events(KEY, through=events[-1].cursor)
    after = await side.submit("r3", "c")
    await turn_is(after, "COMPLETED")

    observer = Observer(chosen)
    cursor = events[1].cursor if saved else None
    if narrow == "session":
        await follow(session.stream_events(filter=chosen, after=cursor), observer, session)
    else:
        async with asyncio.timeout(SECONDS), session.stream_events(filter=chosen, after=cursor) as items:
            observer.take(await anext(items))

    assert observer.resets == 1
    if narrow == "thread":
        assert set(observer.projection.projection.turns) == {turn.turn_id, after.turn_id}
    if narrow in ("session", "turn", "run"):
        assert observer.projection.projection == (await session.snapshot(chosen)).projection


@pytest.mark.spec("ST-07", "ST-34", "PR-16")
async def test_a_reader_that_is_overtaken_by_pruning_gets_one_snapshot_and_goes_on(hosts: Hosts) -> None:
    runtime = await hosts.open([say("one"), final("two")])
    session = await runtime.create_session(KEY, "agent")
    for number in range(40):
        await session.submit(f"r{number}", "a")
    observer = Observer()
    async with asyncio.timeout(SECONDS), session.stream_events() as items:
        for _ in range(10):
            observer.take(await anext(items))
        await turn_is(session.get_turn((await session.list_turns(limit=40)).items[-1].turn_id), "COMPLETED")
        await HostOperations(hosts.backend).prune_events(KEY, older_than=0)
        while observer.projection.cursor != (await session.list_events()).high_watermark:
            observer.take(await anext(items))

    assert observer.resets == 1
    assert observer.projection.snapshot() == await session.snapshot()
    # Who reads pages himself and does not look at numbers is told too.
    await (await session.submit("last", "a")).wait(SECONDS)
    with pytest.raises(EventGap):
        _ = EventProjection(KEY).accept((await session.list_events()).events[0])


@pytest.mark.spec("ST-07", "ST-20")
async def test_a_client_that_polls_gets_the_snapshot_too(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r1", "a")).wait(SECONDS)
    first = (await all_events(session))[0]
    await HostOperations(hosts.backend).prune_events(KEY, older_than=0)

    client = SessionEventClient(hosts.backend, KEY, after=first.cursor)
    observer = Observer()
    for fact in await client.poll():
        observer.take(fact)
        client.acknowledge(fact)

    assert observer.projection.snapshot() == await session.snapshot()


async def test_waiting_for_a_turn_does_not_mind_pruning(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Round(text="half and half", gate="g"), final("done")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    waiting = [asyncio.ensure_future(turn.wait(SECONDS)) for _ in range(3)]
    await gates.reached("g")
    await HostOperations(hosts.backend).prune_events(KEY, older_than=0)
    gates.open("g")

    assert [str(answer) for answer in await asyncio.gather(*waiting)] == ["done"] * 3


@pytest.mark.spec("PR-21", "EV-26")
async def test_a_fork_shows_nothing_of_what_was_said_before_it(hosts: Hosts) -> None:
    runtime = await hosts.open([final("{context}")])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r1", "the secret of the first thread")).wait(SECONDS)
    [position] = (await session.main_thread().checkpoints()).items
    branch = await session.main_thread().fork(position.position, ThreadKey(KEY, "branch"), "fork")
    events = await all_events(session)

    for _ in ("before", "after pruning"):
        shown = await branch.snapshot()
        assert (shown.projection.messages, shown.projection.turns, shown.projection.tools) == ({}, {}, {})
        assert (await branch.history()).items == ()
        assert (await session.snapshot()).projection.history() == list((await session.main_thread().history()).items)
        await HostOperations(hosts.backend).prune_events(KEY, through=events[-1].cursor)
    # Its agent knows all the same.
    assert "the secret" in str(await branch.call("r2", "?", SECONDS))


# ---- no text twice ----


def doubled(screens: Iterable[str], words: tuple[str, ...]) -> list[str]:
    return [screen for screen in screens if any(screen.count(word) > 1 for word in words)]


@pytest.mark.spec("EV-18", "EV-17", "PR-18", "ST-22")
async def test_no_observer_shows_a_text_twice_however_it_comes_and_goes(clock: ManualClock, hosts: Hosts) -> None:
    """Connections that are cut in the middle of a preview, hosts that die there, readers who come late."""
    gates = Gates()
    words = ("alpha", "beta", "gamma", "delta")
    script = [Round(text="alpha beta", gate="one"), Round(text="gamma delta", gate="two", last=True)]
    first = await hosts.open(ScriptedHarness(script, gates=gates))
    session = await first.create_session(KEY, "agent")
    kinds = {EventDeltaType.MESSAGE}
    steady, returning = Observer(), Observer()

    # Half of the first message is seen, then the host dies.
    cut = session.stream_events(deltas=kinds)
    async with asyncio.timeout(SECONDS), cut as items:
        turn = await session.submit("r1", "go")
        await gates.reached("one")
        while "alpha" not in returning.screen():
            returning.take(await anext(items))
    kill(first)
    gates.forget("one")
    for gate in ("one", "two"):
        gates.open(gate)

    second = await hosts.open(ScriptedHarness(script, gates=gates), start=False)
    again = second.get_session(KEY)
    async with asyncio.timeout(SECONDS):
        live = again.stream_events(deltas=kinds)
        back = again.stream_events(deltas=kinds, after=returning.projection.cursor)
        async with live as a, back as b:
            clock.advance(LEASE_MS + 1)
            await second.start()
            for observer, items in ((steady, a), (returning, b)):
                while observer.projection.projection.turns.get(turn.turn_id) is None or (
                    observer.projection.projection.turns[turn.turn_id].status != "COMPLETED"
                ):
                    observer.take(await anext(items))

    for observer in (steady, returning):
        assert doubled(observer.shown, words) == []
        assert observer.screen() == "go | alpha beta | gamma delta"
        assert observer.projection.snapshot() == await again.snapshot()
    attempts = [message.attempt for message in (await again.history()).items if message.role == "assistant"]
    assert attempts == [2, 1], "the first request was made again"
