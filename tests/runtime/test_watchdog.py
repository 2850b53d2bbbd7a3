"""The watchdog: what does not get on although nothing holds it (C18)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import Forbidden, InvalidCursor, InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import ListStalled
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.contracts.views import RecoveryPolicy, StallView, WatchView
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    approval,
    external,
    final,
    local,
    say,
    together,
)
from tests.runtime.conftest import KEY, Hosts, kill, refused, turn_is

LONG_MS = 60_000
NOTHING = WatchView(owned=0, unclaimed=0, age_max_ms=0, complete=True)


async def listed(operations: HostOperations, after: float = 30.0, limit: int = 1) -> list[StallView]:
    """The stalled Threads, page by page."""
    found: list[StallView] = []
    cursor: str | None = None
    while True:
        page = await operations.stalled(after, cursor=cursor, limit=limit)
        assert page.looked <= limit
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.case("C18")
async def test_a_host_that_does_not_get_on_is_seen_until_it_does(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    harness = ScriptedHarness([say("one"), Stall(gate="held"), say("two"), Stall(gate="again"), final()], gates=gates)
    runtime = await hosts.open(harness, lease=3600)
    operations = HostOperations(hosts.backend)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await gates.reached("held")
    assert await listed(operations) == []

    clock.advance(LONG_MS)
    (stall,) = await listed(operations)
    lease = (await turn.status()).lease
    assert lease is not None
    assert stall == StallView(
        session=KEY,
        thread_id="main",
        turn_id=turn.turn_id,
        status=TurnStatus.RUNNING,
        age_ms=LONG_MS,
        owner=runtime.owner,
        fence=lease.fence,
        alive=True,
    )
    assert await operations.watchdog() == WatchView(owned=1, unclaimed=0, age_max_ms=LONG_MS, complete=True)
    assert await operations.watchdog(after=61) == WatchView(owned=0, unclaimed=0, age_max_ms=LONG_MS, complete=True)
    assert await operations.watchdog(timedelta(seconds=60)) == await operations.watchdog()

    gates.open("held")
    await gates.reached("again")
    assert await listed(operations) == []
    assert await operations.watchdog() == NOTHING
    gates.open("again")
    await turn_is(turn, "COMPLETED")
    clock.advance(LONG_MS)
    assert await operations.watchdog() == NOTHING


async def test_a_request_to_a_model_that_takes_long_says_that_it_is_one(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([final("slow answer", gate="model")], gates=gates), lease=3600)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("model")
    clock.advance(LONG_MS)
    (stall,) = await listed(HostOperations(hosts.backend))
    assert (stall.turn_id, stall.requesting, stall.owner) == (turn.turn_id, True, runtime.owner)
    gates.open("model")
    await turn_is(turn, "COMPLETED")


async def test_work_that_nobody_takes_is_seen_and_is_no_hosts_fault(hosts: Hosts, clock: ManualClock) -> None:
    api = await hosts.open([final()], start=False)
    operations = HostOperations(hosts.backend)
    session = await api.create_session(KEY, "agent")
    first = await session.submit("r1", "go")
    await session.submit("r2", "behind the first, and so not to be taken")
    other = await (await session.create_thread("other", "agent")).submit("r3", "go")
    clock.advance(LONG_MS)

    assert {(stall.turn_id, stall.owner, stall.age_ms) for stall in await listed(operations)} == {
        (first.turn_id, None, LONG_MS),
        (other.turn_id, None, LONG_MS),
    }
    assert await operations.watchdog() == WatchView(owned=0, unclaimed=2, age_max_ms=LONG_MS, complete=True)


async def test_what_a_dead_host_owned_counts_as_unclaimed(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    first = await hosts.open(ScriptedHarness([Stall(gate="held"), final()], gates=gates), lease=30)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("held")
    kill(first)
    clock.advance(LONG_MS)
    operations = HostOperations(hosts.backend)
    (stall,) = await listed(operations)
    assert (stall.turn_id, stall.owner, stall.alive) == (turn.turn_id, first.owner, False)
    assert await operations.watchdog() == WatchView(owned=0, unclaimed=1, age_max_ms=LONG_MS, complete=True)


WAITS: dict[str, tuple[list[Any], WaitKind | None]] = {
    "an approval": ([approval("t"), final()], WaitKind.APPROVAL),
    "an outcome nobody knows": ([external("hands", "lost"), final()], WaitKind.TOOL_UNKNOWN),
    "an executor": ([external("hands", "endless"), final()], WaitKind.TOOL_RUNNING),
    "a retry": ([Fail(kind="OSError")], WaitKind.RETRY),
}


@pytest.mark.case("C18")
@pytest.mark.parametrize("why", WAITS)
async def test_a_turn_that_waits_for_a_stated_reason_is_not_stalled(hosts: Hosts, clock: ManualClock, why: str) -> None:
    async def endless() -> None:
        await Gates().passed("never")

    def lost() -> None:
        raise ConnectionError("gone")

    script, kind = WAITS[why]
    runtime = await hosts.open(
        script,
        executors={"hands": FunctionExecutor({"endless": endless, "lost": lost})},
        recovery_policy=RecoveryPolicy(initial_backoff_ms=LONG_MS * 100, max_backoff_ms=LONG_MS * 100),
        lease=3600,
    )
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "go")
    await turn_is(turn, where=lambda view: any(waiting.kind is kind for waiting in view.waiting_on))
    clock.advance(LONG_MS)
    assert await HostOperations(hosts.backend).watchdog() == NOTHING


@pytest.mark.case("C18")
async def test_a_paused_turn_and_a_tool_that_runs_are_not_stalled(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    script = {"pause": [Stall(gate="pause"), final()], "tool": [local("t", gate="tool"), final()]}
    runtime = await hosts.open(ScriptedHarness(script, gates=gates), lease=3600)
    session = await runtime.create_session(KEY, "agent")
    paused = await session.submit("r1", "pause")
    working = await (await session.create_thread("other", "agent")).submit("r2", "tool")
    await gates.reached("pause")
    await paused.pause("p1")
    await turn_is(paused, "PAUSED")
    await gates.reached("tool")
    clock.advance(LONG_MS)
    assert await HostOperations(hosts.backend).watchdog() == NOTHING
    gates.open("tool")
    await turn_is(working, "COMPLETED")


async def test_an_answer_that_nobody_takes_up_makes_a_turn_stalled_from_then_on(
    hosts: Hosts, clock: ManualClock
) -> None:
    runtime = await hosts.open([together(approval("t"), approval("t")), final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "go")
    await turn_is(turn, "WAITING")
    await runtime.close()
    clock.advance(LONG_MS)
    operations = HostOperations(hosts.backend)
    assert await operations.watchdog() == NOTHING

    api = await hosts.open()
    turn = api.get_session(KEY).get_turn(turn.turn_id)
    question, _ = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)
    clock.advance(1000)
    assert [stall.age_ms for stall in await listed(operations, 1)] == [1000]


async def test_the_figures_say_when_they_are_of_a_part(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentscope_durable.runtime.operations.WATCHED_MAX", 4)
    monkeypatch.setattr("agentscope_durable.runtime.operations.WATCH_PAGE", 2)
    api = await hosts.open([final()], start=False)
    operations = HostOperations(hosts.backend)
    for number in range(4):
        session = await api.create_session(SessionKey("app", f"s{number}"), "agent")
        await session.submit("r1", "go")
    assert (await operations.watchdog(0)).complete
    session = await api.create_session(SessionKey("app", "one more"), "agent")
    await session.submit("r1", "go")
    watched = await operations.watchdog(0)
    assert (watched.unclaimed, watched.complete) == (4, False)
    assert len(await listed(operations, 0, limit=3)) == 5


async def test_only_an_operator_looks_across_sessions(hosts: Hosts) -> None:
    operations = HostOperations(hosts.backend)
    await refused(hosts.backend.query(ListStalled(after_ms=0)), Forbidden)
    for wrong in (-1, float("nan"), float("inf"), "1", True, None):
        error = await refused(operations.stalled(wrong), InvalidRequest)
        assert error.path == "after"
    for limit in (0, 1001, True):
        await refused(operations.stalled(limit=limit), InvalidRequest)
    for cursor in ("", "x", "WyJ0dXJucyIsIngiXQ"):
        await refused(operations.stalled(cursor=cursor), InvalidCursor)


@pytest.mark.parametrize("sessions", [5, 200])
async def test_idle_sessions_cost_nothing(sessions: int, clock: ManualClock) -> None:
    store = FaultyRecordStore(MemoryRecordStore(clock))
    backend = TransactionalSessionBackend(store, wakeups=LocalWakeups())
    async with AsyncExitStack() as stack:
        hosts = Hosts(backend, stack)
        runtime = await hosts.open([final()])
        for number in range(sessions):
            session = await runtime.create_session(SessionKey("app", f"idle{number}"), "agent")
            if number % 20 == 0:
                await session.call("r1", "go", timeout=90)
        await runtime.close()
        api = await hosts.open([final()], start=False)
        for number in range(3):
            session = await api.create_session(SessionKey("app", f"ready{number}"), "agent")
            await session.submit("r1", "go")
        clock.advance(LONG_MS)
        store.calls.clear()
        assert (await HostOperations(backend).watchdog()).unclaimed == 3
        assert store.calls == {"ready_classes": 3, "ready": 1, "read": 3}
