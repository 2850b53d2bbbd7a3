"""Pruning takes the replay away and nothing else: on both stores, after any history, wherever it stops."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import (
    CursorExpired,
    EventGap,
    Forbidden,
    InvalidCursor,
    InvalidRequest,
    NotFound,
    StoreBusy,
    Uncertain,
)
from agentscope_durable.contracts.events import EventFilter, EventPage, PublicEvent, cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import ModelFact, StepFact, StoredEvent, Usage, encode_events
from agentscope_durable.contracts.projection import Projection, SnapshotView
from agentscope_durable.contracts.status import (
    Audience,
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    ModelStatus,
    StepPhase,
    StepStatus,
)
from agentscope_durable.domain import ids, pruning
from agentscope_durable.domain.projection import EventProjection, matches
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.record_store import PAGE_MAX, Column, LogRange, Reads, Records
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from tests.backend.world import BINDING, LARGE, SESSION, Chance, World, everything
from tests.every_store import PERSISTENT, STORES, shelf

WHOLE = EventFilter()


@asynccontextmanager
async def a_world(backend: str, place: Path) -> AsyncGenerator[World]:
    clock = ManualClock()
    async with shelf(backend, place, clock) as there:
        yield World(store=FaultyRecordStore(await there.records()), clock=clock)


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def world(backend: str, tmp_path: Path) -> AsyncGenerator[World]:
    async with a_world(backend, tmp_path) as world:
        yield await world.open()


def operations(world: World) -> HostOperations:
    return HostOperations(world.backend)


async def rich(world: World) -> str:
    """A Session in which everything has happened that leaves something to be shown."""
    await world.answer_turn("first")
    await world.do(c.CreateThread(session=SESSION, thread_id="research", binding=BINDING))
    await world.answer_turn(LARGE, "research")
    turn = await world.submit("the long one")
    claimed = await world.claim()
    step = ids.step_id(claimed.run_id, 1)
    model = {"model_call_id": f"{claimed.run_id}.c1", "run_id": claimed.run_id, "step_id": step, "request": 1}
    await world.commit(
        steps=(StepFact(step, claimed.run_id, 1, StepPhase.REASONING),),
        models=(ModelFact(**model, status=ModelStatus.STARTED, model="m", attempt=1),),
        reasoning=1,
        journal=b'["native 1"]',
        checkpoint=True,
        base=True,
    )
    arguments = body_of("{}")
    asked = ids.interaction_id(turn, "c2")
    await world.commit(
        models=(ModelFact(**model, status=ModelStatus.COMPLETED, usage=Usage(3, 4), complete=True, elapsed_ms=7),),
        messages=(c.MessageOut(message_id=ids.message_id(turn, 1), content=await world.text("I look")),),
        tools=(
            c.ToolCommit(call_id="c1", state=ExecutionState.RUNNING, name="look", arguments=await world.body(LARGE)),
            c.ToolCommit(call_id="c2", state=ExecutionState.AWAITING_APPROVAL, name="rm", arguments=arguments),
            c.ToolCommit(
                call_id="c3",
                state=ExecutionState.INTENT,
                name="far",
                kind=ExecutionKind.EXTERNAL,
                route="hands",
                arguments=arguments,
            ),
        ),
        interactions=(
            c.InteractionCommit(
                interaction_id=asked, call_id="c2", kind=InteractionKind.APPROVAL, name="rm", arguments=arguments
            ),
        ),
        events=tuple(c.CustomEvent(type="x.app.progress", value=body_of(n)) for n in range(5)),
        journal=b'["native 2"]',
        checkpoint=True,
    )
    await world.commit(
        tools=(c.ToolCommit(call_id="c1", state=ExecutionState.COMPLETED, result=await world.body(LARGE)),),
    )
    await world.commit(tools=(c.ToolCommit(call_id="c1", state=ExecutionState.COMPLETED, applied=True),))
    await world.do(c.ClaimExecution(session=SESSION, thread_id="main", turn_id=turn, call_id="c3", owner="hands"))
    await world.do(
        c.AddInput(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            request_id=world.request(),
            kind="steer",
            content=await world.text("faster"),
            digest="d",
        )
    )
    await world.commit(
        steps=(StepFact(step, claimed.run_id, 1, StepPhase.REASONING, status=StepStatus.COMPLETED),),
        messages=(
            c.MessageOut(
                message_id=ids.message_id(turn, 1),
                content=await world.text("I look again"),
                revision=2,
                first_seq=(await world.ask(q.GetMessage(session=SESSION, message_id=ids.message_id(turn, 1)))).sequence,
            ),
        ),
        journal=b'["native 3"]',
        checkpoint=True,
    )
    await world.submit("one more, in the queue")
    return turn


# ---- what stays ----


@pytest.mark.spec("EV-19", "PR-04", "PR-14")
@pytest.mark.case("C69")
async def test_every_answer_but_the_replay_is_as_it_was(world: World) -> None:
    await rich(world)
    before, whole = await everything(world), await world.events()

    receipt = await operations(world).prune_events(SESSION, through=whole[-1].cursor)

    assert receipt.cursor == whole[-1].cursor
    assert receipt.dropped > len(whole) / 3
    assert await world.events() == []
    assert await everything(world) == before


@pytest.mark.spec("EV-19", "PR-04")
async def test_a_session_goes_on_as_if_nothing_had_been_pruned(world: World) -> None:
    turn = await rich(world)
    snapshot = await world.snapshot()
    await world.prune((await world.events())[-1].sequence)

    asked = (await world.ask(q.ListInteractions(session=SESSION, thread_id="main", turn_id=turn)))[0]
    await world.do(
        c.Respond(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            request_id=world.request(),
            interaction_id=asked.interaction_id,
            response=body_of(False),
            result=body_of({"state": "denied"}),
            digest="d",
            content=await world.text("no"),
            is_bool=True,
            approved=False,
        )
    )
    await world.do(
        c.RecordOutcome(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            call_id="c3",
            execution_id=ids.execution_id(turn, "c3"),
            state=ExecutionState.COMPLETED,
            result=await world.body({"value": 1}),
        )
    )
    await world.commit(answers=(asked.interaction_id,))
    await world.commit(
        tools=tuple(c.ToolCommit(call_id=call, state=state, applied=True) for call, state in APPLIED), inputs=(1,)
    )
    await world.finish(message_id=await world.say("done", reasoning=2))

    # An observer that has the old snapshot and the new events has what a new snapshot shows.
    observer = EventProjection(SESSION)
    observer.reset(snapshot)
    for event in await world.events():
        assert observer.accept(event)
    assert observer.snapshot() == await world.snapshot()
    assert observer.projection.turns[turn].status == "COMPLETED"
    assert [view.state for view in await world.ask(q.ListTools(session=SESSION, thread_id="main", turn_id=turn))] == [
        "COMPLETED",
        "DENIED",
        "COMPLETED",
    ]


APPLIED = (("c2", ExecutionState.DENIED), ("c3", ExecutionState.COMPLETED))


@pytest.mark.spec("EV-12", "EV-19")
async def test_stored_previews_of_an_older_release_are_still_what_is_shown(world: World) -> None:
    turn = await world.submit("old")
    for number, text in enumerate(("half ", "a ", "sentence")):
        delta = {"messageId": "old.1", "delta": text}
        fragment = {"callId": "c9", "fragment": str(number)} | ({"name": "look"} if number else {})
        for kind, payload in (("message.delta", delta), ("tool.call.arguments", fragment)):
            raw = msgspec.Raw(msgspec.json.encode(payload))
            await world.write(events=encode_events([StoredEvent(kind, "main", turn, "", "", raw)]), count=1)
    before = await world.snapshot()
    assert before.projection.messages["old.1"].text == "half a sentence"

    await world.prune((await world.events())[-1].sequence)

    assert await world.snapshot() == before


# ---- what goes ----


@pytest.mark.spec("EV-19", "FI-11")
async def test_cursors_of_what_was_pruned_have_expired_and_say_what_to_do(world: World) -> None:
    await rich(world)
    whole = await world.events()
    last = whole[len(whole) // 2]

    receipt = await operations(world).prune_events(SESSION, through=last.cursor)

    oldest = sequence_of(SESSION, receipt.cursor)
    assert last.sequence - 8 < oldest <= last.sequence, "whole commits go, so it may be a few less"
    for sequence in range(1, oldest):
        with pytest.raises(CursorExpired, match="Take a snapshot and continue from its cursor") as caught:
            await world.ask(q.ListEvents(session=SESSION, cursor=cursor_of(SESSION, sequence)))
        assert (caught.value.cursor, caught.value.oldest) == (sequence, oldest)
    page: EventPage = await world.ask(q.ListEvents(session=SESSION, cursor=receipt.cursor, limit=1000))
    assert list(page.events) == whole[oldest:]
    assert await world.events() == whole[oldest:], "without a cursor: what is kept"
    with pytest.raises(EventGap):
        _ = EventProjection(SESSION).accept(page.events[0])


@pytest.mark.spec("EV-19")
async def test_what_no_projection_shows_is_gone_from_the_store(world: World) -> None:
    await rich(world)
    await world.prune((await world.events())[-1].sequence)

    left = b"".join([row.events for row in await rows(world)])

    for gone in (b"x.app.progress", b"step.started", b"run.started", b"QUEUED"):
        assert (gone in left) is (gone == b"QUEUED"), gone
    assert left.count(b'"turn.status"') == 4, "one for each Turn"


async def rows(world: World) -> list[Any]:
    page = LogRange(limit=PAGE_MAX, columns=(Column.EVENTS,))
    return (await world.store.read(keys.partition(world.session), Reads(log=page))).log


# ---- how it is asked for ----


@pytest.mark.spec("EV-19")
async def test_only_what_is_old_enough_is_pruned(world: World) -> None:
    await world.answer_turn("old")
    old = (await world.events())[-1]
    world.clock.advance(10_000)
    await world.answer_turn("new")

    assert (await operations(world).prune_events(SESSION, older_than=3600)).dropped == 0
    receipt = await operations(world).prune_events(SESSION, older_than=timedelta(seconds=10))
    assert (receipt.cursor, receipt.dropped > 0) == (old.cursor, True)
    assert (await operations(world).prune_events(SESSION, older_than=10)).dropped == 0
    # Both bounds: the nearer one holds.
    last = (await world.events())[-1]
    assert (await operations(world).prune_events(SESSION, through=last.cursor, older_than=10)).cursor == old.cursor
    world.clock.advance(20_000)
    assert (await operations(world).prune_events(SESSION, through=last.cursor, older_than=10)).cursor == last.cursor


async def test_a_request_that_makes_no_sense_changes_nothing(world: World) -> None:
    await world.answer_turn("one")
    whole = await world.events()
    prune = operations(world).prune_events

    with pytest.raises(InvalidRequest, match="through which cursor, or how old"):
        await prune(SESSION)
    for age in (-1, float("nan"), float("inf"), "a week", True):
        with pytest.raises(InvalidRequest, match="older_than"):
            await prune(SESSION, older_than=age)  # type: ignore[arg-type]
    with pytest.raises(InvalidCursor, match="another session"):
        await prune(SESSION, through=cursor_of(SessionKey("app", "other"), 1))
    with pytest.raises(InvalidCursor, match="ahead"):
        await prune(SESSION, through=cursor_of(SESSION, len(whole) + 1))
    with pytest.raises(NotFound):
        await prune(SessionKey("app", "nobody"), older_than=0)
    for audience in (Audience.PUBLIC, Audience.HOST):
        with pytest.raises(Forbidden):
            await world.backend.execute(c.PruneEvents(session=SESSION, through=1), audience=audience)

    assert await world.events() == whole


async def test_pruning_again_is_no_change(world: World) -> None:
    await world.answer_turn("one")
    last = (await world.events())[-1].cursor
    first = await operations(world).prune_events(SESSION, through=last)
    before = await world.store.read(keys.partition(SESSION), Reads())

    again = await operations(world).prune_events(SESSION, through=last)
    earlier = await operations(world).prune_events(SESSION, through=cursor_of(SESSION, 1))

    assert (again.cursor, again.dropped, earlier.cursor) == (first.cursor, 0, first.cursor)
    assert (await world.store.read(keys.partition(SESSION), Reads())).rev == before.rev


# ---- in batches, and interrupted ----


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "PRUNE_ROWS", 3)


@pytest.mark.case("C70")
@pytest.mark.spec("EV-19")
@pytest.mark.usefixtures("small_batches")
async def test_after_every_batch_the_session_is_whole(world: World) -> None:
    await rich(world)
    before, whole = await everything(world), await world.events()
    oldest = 0
    batches = 0

    while (pruned := await world.do(c.PruneEvents(session=SESSION))).more:
        batches += 1
        assert pruned.through > oldest
        oldest = pruned.through
        assert await everything(world) == before
        assert await world.events() == whole[oldest:]

    assert batches > 3


@pytest.mark.case("C70")
@pytest.mark.usefixtures("small_batches")
async def test_a_failure_in_the_middle_keeps_what_was_done_and_a_repeat_goes_on(world: World) -> None:
    await rich(world)
    before, whole = await everything(world), await world.events()
    world.store.fail(nth=3, error=lambda: StoreBusy("a test"))

    with pytest.raises(StoreBusy):
        await operations(world).prune_events(SESSION, through=whole[-1].cursor)
    kept = await world.events()
    assert 0 < len(kept) < len(whole)
    assert await everything(world) == before

    receipt = await operations(world).prune_events(SESSION, through=whole[-1].cursor)
    assert receipt.cursor == whole[-1].cursor
    assert await everything(world) == before


@pytest.mark.case("C58")
@pytest.mark.usefixtures("small_batches")
async def test_a_batch_whose_answer_was_lost_is_not_done_twice(world: World) -> None:
    await rich(world)
    before, whole = await everything(world), await world.events()
    world.store.lose_answer(nth=2)

    with pytest.raises(Uncertain):
        await operations(world).prune_events(SESSION, through=whole[-1].cursor)
    done = (await world.store.read(keys.partition(SESSION), Reads())).pruned_through
    assert await world.events() == whole[done:]

    await operations(world).prune_events(SESSION, through=whole[-1].cursor)
    assert await everything(world) == before


@pytest.mark.usefixtures("small_batches")
async def test_several_prune_at_once_while_the_session_goes_on(world: World) -> None:
    await rich(world)
    expected = await world.snapshot()
    last = (await world.events())[-1].cursor

    receipts = await asyncio.gather(
        *(operations(world).prune_events(SESSION, through=last) for _ in range(3)),
        *(world.submit(f"meanwhile {n}") for n in range(5)),
    )

    assert {receipt.cursor for receipt in receipts[:3]} == {last}
    events = await world.events()
    observer = EventProjection(SESSION)
    observer.reset(expected)
    for event in events:
        assert observer.accept(event)
    assert observer.snapshot() == await world.snapshot()


@pytest.mark.usefixtures("small_batches")
async def test_pruning_can_be_cancelled(world: World) -> None:
    await rich(world)
    before, whole = await everything(world), await world.events()
    task = asyncio.ensure_future(operations(world).prune_events(SESSION, through=whole[-1].cursor))
    while (await world.store.read(keys.partition(SESSION), Reads())).pruned_through == 0:
        await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert await everything(world) == before


# ---- read while it is pruned ----


async def test_a_snapshot_that_is_overtaken_by_pruning_is_taken_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentscope_durable.backend.queries.reading.LOG_ROWS", 5)
    monkeypatch.setattr("agentscope_durable.backend.queries.snapshots.LOG_ROWS", 5)
    await rich(world)
    turn = await world.submit("meanwhile")
    original = world.store.read
    pruned: list[int] = []

    async def read(partition: str, reads: Reads) -> Records:
        records = await original(partition, reads)
        if reads.log is not None and reads.log.after > 10 and len(pruned) < 3:
            # The state moves on past the moment of the snapshot, and all of that is pruned.
            await world.do(
                c.Cancel(session=SESSION, thread_id="main", turn_id=turn, request_id=world.request())
            ) if not pruned else await world.submit("more")
            await world.prune((await original(partition, Reads())).next_seq - 1)
            pruned.append(1)
        return records

    world.store.read = read
    snapshot = await world.snapshot()
    world.store.read = original

    assert len(pruned) == 3
    assert snapshot == await world.snapshot()
    assert snapshot.projection.turns[turn].status == "CANCELLED"


async def test_a_page_that_is_overtaken_by_pruning_ends_early(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentscope_durable.backend.queries.reading.LOG_ROWS", 3)
    await rich(world)
    whole = await world.events()
    original = world.store.read

    async def read(partition: str, reads: Reads) -> Records:
        records = await original(partition, reads)
        if reads.log is not None and reads.log.after == 0:
            await world.prune(whole[-1].sequence)
        return records

    world.store.read = read
    page: EventPage = await world.ask(q.ListEvents(session=SESSION, limit=1000))
    world.store.read = original

    assert 0 < len(page.events) < len(whole)
    assert list(page.events) == whole[: len(page.events)]
    with pytest.raises(CursorExpired):
        await world.ask(q.ListEvents(session=SESSION, cursor=page.cursor))


# ---- after any history ----


class Pruner(Chance):
    """Somebody who also prunes anything at any time, and keeps what was shown before."""

    def __init__(self, seed: int, world: World) -> None:
        super().__init__(seed, world)
        self.events: list[PublicEvent] = []
        self.shown: list[SnapshotView] = []

    async def follow(self) -> None:
        """Read what is new before it can be pruned, as an observer that keeps up."""
        cursor = self.events[-1].cursor if self.events else None
        while True:
            page = await self.world.ask(q.ListEvents(session=SESSION, cursor=cursor, limit=1000))
            self.events.extend(page.events)
            if page.cursor == page.high_watermark:
                return
            cursor = page.cursor

    async def look(self) -> None:
        narrow = self.random.choice([WHOLE, EventFilter(self.random.choice(self.threads)), await self.some_filter()])
        self.shown.append(await self.world.snapshot(narrow))

    async def some_filter(self) -> EventFilter:
        if not self.turns:
            return WHOLE
        thread, turn = self.random.choice(self.turns)
        narrow = EventFilter(thread, turn)
        runs = await self.world.pages(q.ListRuns(session=SESSION, thread_id=thread, turn_id=turn))
        run = self.random.choice([None, *(view.run_id for view in runs)])
        return replace(narrow, run_id=run)

    async def prune(self) -> None:
        await self.follow()
        await self.world.do(c.PruneEvents(session=SESSION, through=self.random.randint(0, len(self.events))))

    ACTS = (*Chance.ACTS, *Chance.ACTS, look, look, look, prune, prune)


@pytest.mark.spec("PR-03", "PR-15", "PR-17", "EV-19", "PR-04", "PR-14", "FI-01", "FI-05", "FI-06", "FI-07", "FI-08")
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), acts=st.integers(0, 150))
def test_replay_from_any_cursor_gives_the_snapshot_at_any_cursor_in_memory(seed: int, acts: int) -> None:
    asyncio.run(_replay("memory", seed, acts))


@pytest.mark.parametrize("backend", PERSISTENT)
@pytest.mark.spec("PR-03", "PR-15", "PR-17", "EV-19", "PR-04", "PR-14", "FI-01", "FI-05", "FI-06", "FI-07", "FI-08")
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), acts=st.integers(50, 150))
def test_replay_from_any_cursor_gives_the_snapshot_at_any_cursor_on_a_disk(backend: str, seed: int, acts: int) -> None:
    asyncio.run(_replay(backend, seed, acts))


async def _replay(backend: str, seed: int, acts: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        async with a_world(backend, Path(place)) as world:
            pruning_rows, pruning.PRUNE_ROWS = pruning.PRUNE_ROWS, 4
            try:
                player = Pruner(seed, world)
                await player.live(acts)
                await player.follow()
            finally:
                pruning.PRUNE_ROWS = pruning_rows
            await _check(world, player)


async def _check(world: World, player: Pruner) -> None:
    events = player.events
    filters = {shown.filter for shown in player.shown} | {WHOLE, await player.some_filter()}
    now = {narrow: await world.snapshot(narrow) for narrow in filters}
    for narrow, snapshot in now.items():
        assert snapshot.cursor == cursor_of(SESSION, len(events))
        assert snapshot.projection == _folded(events, narrow)
        assert await world.history(narrow, limit=3) == snapshot.projection.history()
    for shown in player.shown:
        # At the cursor of each snapshot, the fold of what had happened by then ...
        at = sequence_of(SESSION, shown.cursor)
        assert shown.projection == _folded(events[:at], shown.filter)
        # ... and from each, the fold of what happened since, gives the present.
        observer = EventProjection(SESSION, shown.filter)
        observer.reset(shown)
        for event in events[at:]:
            assert observer.accept(event)
        assert observer.snapshot() == now[shown.filter]
        # Those that match are enough, unless something has moved on to a later Run, which only the Turn's events tell.
        scope = replace(shown.filter, run_id=None)
        observer.reset(shown)
        for event in events[at:]:
            if matches(scope, event):
                assert observer.accept(event)
        assert observer.projection == now[shown.filter].projection


def _folded(events: Sequence[PublicEvent], narrow: EventFilter) -> Projection:
    fold = EventProjection(SESSION, narrow)
    for event in events:
        assert fold.accept(event)
    return fold.projection
