"""C69, C70: deleting old data emptied what later data build on, or left a thread half there when it was interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import CursorExpired, SessionDropped
from agentscope_durable.contracts.events import cursor_of, sequence_of
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.domain import dropping, pruning
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import Emit, ScriptedHarness, approval, final, local, say
from tests.backend.world import World, everything, native
from tests.cases.programs import job_of, opening
from tests.census.forks import ForkServer
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, Hosts, all_events, turn_is

LARGE = "x" * 100_000
SCRIPT = [
    say("I begin"),
    Emit(type="x.app.progress", value={"percent": 1}),
    local("look", value=LARGE),
    approval("pay", amount=1),
    say("almost"),
    final("{results}"),
]


def begun(backend: str, folder: Path) -> dict[str, Any]:
    """A job with batches so small that there is much to interrupt; a process on PostgreSQL takes longer to begin."""
    return {**job_of(backend, folder), "synchronous": "NORMAL", "batch": 8 if backend == "sqlite" else 24}


async def prune(job: Mapping[str, Any]) -> None:
    """Prune everything, a few commits at a time. Where it is killed is the failpoint's affair."""
    pruning.PRUNE_ROWS = job["batch"]
    async with opening(job) as opened:
        await HostOperations(opened).prune_events(KEY, through=job["through"])


async def live(job: Mapping[str, Any]) -> None:
    """Two Turns that have ended, and one that waits for an answer."""
    harness = ScriptedHarness(SCRIPT, tools={"pay": lambda amount: "paid"})
    async with (
        opening(job) as opened,
        DurableRuntime(backend=opened, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05) as runtime,
    ):
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        for number in range(3):
            turn = await session.submit(f"r{number}", "go")
            await turn_is(turn, "WAITING")
            if number < 2:
                (question,) = await turn.pending_interactions()
                await turn.respond(f"yes{number}", question.interaction_id, True)
                await turn_is(turn, "COMPLETED")


@pytest.mark.parametrize("backend", PERSISTENT)
@pytest.mark.case("C69", "C70", "C12")
@pytest.mark.spec("EV-19", "PR-04", "PR-14")
async def test_pruning_that_is_killed_anywhere_leaves_everything_or_the_replay_alone(
    backend: str, tmp_path: Path, forks: ForkServer
) -> None:
    job = begun(backend, tmp_path)
    await live(job)
    async with opening(job) as opened:
        before = await everything(World(KEY, backend=opened))
        async with DurableRuntime(backend=opened) as runtime:
            events = await all_events(runtime.get_session(KEY))
    job["through"] = events[-1].cursor

    killed = 0
    oldest = 0
    sides = ("before", "after")
    while True:
        # At first nothing is done, then one batch, then two: every kill finds the work of those before it.
        failpoint = f"store.commit.{sides[killed % 2]}:{1 + killed // 8}"
        ended = forks.run("tests.cases.test_c70_half_deleted:prune", job, failpoint=failpoint)
        async with opening(job) as opened:
            assert await everything(World(KEY, backend=opened)) == before
            async with DurableRuntime(backend=opened) as runtime:
                oldest = await replayable(runtime.get_session(KEY), events, oldest)
        if not ended.killed:
            assert ended.code == 0, ended.output
            break
        killed += 1

    assert killed >= 6
    assert oldest == len(events)


async def replayable(session: Any, events: list[Any], former: int) -> int:
    """What is left can be replayed, what is gone says so, and nothing comes back. Returns the oldest cursor."""
    kept = await all_events(session)
    oldest = len(events) - len(kept)
    assert oldest >= former
    assert kept == events[oldest:]
    if oldest:
        with pytest.raises(CursorExpired) as caught:
            await session.list_events(cursor_of(KEY, oldest - 1) if oldest > 1 else events[0].cursor)
        assert caught.value.oldest == oldest
    assert (await session.list_events(cursor_of(KEY, oldest), 1)).events == tuple(kept[:1])
    assert sequence_of(KEY, (await session.snapshot()).cursor) == len(events)
    return oldest


async def drop(job: Mapping[str, Any]) -> None:
    """Drop a Session, a few records at a time. Where it is killed is the failpoint's affair."""
    dropping.DROP_RECORDS, dropping.DROP_ROWS = job["batch"], job["batch"]
    async with opening(job) as opened:
        await HostOperations(opened).drop_session(KEY, reason=job["reason"])


@pytest.mark.parametrize("backend", PERSISTENT)
@pytest.mark.case("C70", "C12")
async def test_a_drop_that_is_killed_anywhere_leaves_a_session_that_says_so_and_is_gone_on_with(
    backend: str, tmp_path: Path, forks: ForkServer
) -> None:
    job = begun(backend, tmp_path)
    async with (
        opening(job) as opened,
        DurableRuntime(
            backend=opened, harnesses=[Harness("agent", "v1", ScriptedHarness([say("so"), final()]))]
        ) as runtime,
    ):
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        for number in range(6):
            await session.call(f"r{number}", "go", timeout=90)
        await session.close()
        expected = await HostOperations(opened).drop_session(KEY, dry_run=True)

    killed, statuses = 0, []
    sides = ("before", "after")
    while True:
        failpoint = f"store.commit.{sides[killed % 2]}:{1 + killed // 8}"
        trial = {**job, "reason": f"try {killed}"}
        ended = forks.run("tests.cases.test_c70_half_deleted:drop", trial, failpoint=failpoint)
        async with opening(job) as opened:
            operations = HostOperations(opened)
            (view,) = await operations.list_sessions()
            statuses.append(view.status)
            if view.status.gone:
                async with DurableRuntime(backend=opened) as runtime:
                    session = runtime.get_session(KEY)
                    for attempt in (session.view(), session.snapshot(), session.submit("r0", "go")):
                        with pytest.raises(SessionDropped):
                            await attempt
            assert (await operations.doctor(deep=True)).sound
        if not ended.killed:
            assert ended.code == 0, ended.output
            break
        killed += 1

    assert killed > 6
    assert list(dict.fromkeys(statuses)) == ["CLOSED", "DROPPING", "DROPPED"]
    async with opening(job) as opened:
        receipt = await HostOperations(opened).drop_session(KEY)
        assert receipt.reason == "try 1", "of the first that was committed"
        assert (receipt.events, receipt.commits) == (expected.events, expected.commits)
        assert receipt.records == expected.records, "each was counted once"
        assert (await opened.records.measure(keys.partition(KEY))).commits == 1


@pytest.mark.parametrize("backend", PERSISTENT)
@pytest.mark.case("C69")
async def test_a_thread_whose_events_are_gone_goes_on_from_its_checkpoint(backend: str, tmp_path: Path) -> None:
    job = begun(backend, tmp_path)
    await live(job)
    async with opening(job) as opened:
        await HostOperations(opened).prune_events(KEY, older_than=0)

    harness = ScriptedHarness(SCRIPT, tools={"pay": lambda amount: "paid"})
    async with (
        opening(job) as opened,
        DurableRuntime(backend=opened, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05) as runtime,
    ):
        session = runtime.get_session(KEY)
        await runtime.start()
        (*_, view) = (await session.list_turns()).items
        turn = session.get_turn(view.turn_id)
        (question,) = await turn.pending_interactions()
        await turn.respond("at last", question.interaction_id, True)
        await turn_is(turn, "COMPLETED")

        assert str(await turn.result()).endswith("paid")
        assert [tool.state for tool in await turn.list_tools()] == ["COMPLETED", "COMPLETED"]
        assert harness.ledger.count("tool") == 1, "the first call was not made again"


@pytest.mark.case("C69")
async def test_every_position_is_restored_and_forked_after_pruning_as_before(hosts: Hosts) -> None:
    runtime = await hosts.open([say("so"), final("{context}")])
    session = await runtime.create_session(KEY, "agent")
    main = session.main_thread()
    for number in range(4):
        turn = await main.submit(f"r{number}", f"word {number}")
        await turn_is(turn, "COMPLETED")
    positions = [view.position for view in (await main.checkpoints()).items]
    early = await forked(session, main, positions, "copy-a")

    world = World(KEY, backend=hosts.backend)
    before = await everything(world)
    await HostOperations(hosts.backend).prune_events(KEY, older_than=0)
    assert await everything(world) == before, "of the positions and of the forks nothing is gone"

    assert [view.position for view in (await main.checkpoints()).items] == positions
    late = await forked(session, main, positions, "copy-b")
    assert await natives(world, late) == await natives(world, early)
    for number, thread in enumerate(late):
        turn = await thread.submit(f"late-{number}", "and now?")
        await turn_is(turn, "COMPLETED")
        assert [f"word {n}" in str(await turn.result()) for n in range(4)] == [n <= number for n in range(4)]
    again = await main.restore(positions[0], positions[-1], "back")
    assert again.source is not None
    turn = await main.submit("r9", "and now?")
    await turn_is(turn, "COMPLETED")
    assert "word 0" in str(await turn.result()) and "word 1" not in str(await turn.result())


async def forked(session: Any, thread: Any, positions: list[str], name: str) -> list[Any]:
    return [
        await thread.fork(position, ThreadKey(KEY, f"{name}-{number}"), f"{name}-{number}")
        for number, position in enumerate(positions)
    ]


async def natives(world: World, threads: list[Any]) -> list[Any]:
    """The native rows of each Thread, to the byte."""
    found = []
    for thread in threads:
        answers: dict[str, Any] = {}
        await native(world, thread.thread_id, answers)
        rows = [row for answer in answers.values() for row in answer]
        # A copy says whose it is.
        found.append([(row.at, row.journal.replace(b"copy-a", b"copy-b")) for row in rows])
    return found
