"""Starting, draining and closing a host (group LF)."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.commands import Claim
from agentscope_durable.contracts.errors import (
    HostClosed,
    InvalidRequest,
    Misuse,
    Unavailable,
    Uncertain,
    UsedAfterFork,
)
from agentscope_durable.contracts.events import Committed, SessionStreamEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.options import EventDeltaType, EventStreamOptions
from agentscope_durable.contracts.status import RunStatus, TurnStatus
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import Definition, DurableRuntime, Harness
from agentscope_durable.spi.executor import ToolError
from agentscope_durable.spi.record_store import ReadyPage, ReadyScan
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.testing.ledger import EffectLedger
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
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, kill, refused, turn_is, until
from tests.runtime.test_recovery import LEASE_MS


@pytest.mark.spec("LF-01", "RC-18")
async def test_drain_waits_for_what_runs_and_claims_nothing_new(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    draining = asyncio.create_task(runtime.drain(SECONDS))
    await asyncio.sleep(0)
    following = await session.submit("r2", "b")
    gates.open("g")

    assert await draining is True
    assert (await turn.status()).status is TurnStatus.COMPLETED
    assert (await following.status()).status is TurnStatus.QUEUED
    assert await runtime.drain() is True


@pytest.mark.spec("LF-01", "LF-08", "RC-18")
async def test_a_drain_that_takes_too_long_stops_the_host_and_another_goes_on(hosts: Hosts) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [say("1"), Stall(gate="g"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    session = await first.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")

    assert await first.drain(0.01) is False
    gates.open("g")
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)
    assert str(await again.wait(SECONDS)) == "ok"
    assert [run.status for run in await again.list_runs()] == [RunStatus.RELEASED, RunStatus.COMPLETED]
    assert (await again.status()).recovery is None


@pytest.mark.spec("LF-02", "LF-05", "LF-09")
async def test_closing_leaves_the_backend_and_may_be_repeated(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await runtime.close()
    await runtime.close()
    for use in (session.view(), turn.status(), turn.cancel("c1"), session.submit("r2", "b"), runtime.start()):
        await refused(use, HostClosed)
    other = await hosts.open()

    assert (await other.get_session(KEY).get_turn(turn.turn_id).status()).status is TurnStatus.QUEUED


@pytest.mark.spec("LF-03")
@pytest.mark.backend("sqlite")
async def test_backend_runtime_and_subscription_are_closed_the_last_one_first(tmp_path: Path) -> None:
    """As three `async with` in that order do it, with work in hand."""
    seen: list[SessionStreamEvent] = []
    gates = Gates()
    harness = Harness("agent", "v1", ScriptedHarness([Stall(gate="held"), final()], gates=gates))
    async with LocalBackend.open(tmp_path) as backend:
        async with DurableRuntime(backend=backend, harnesses=[harness], close_timeout=1) as runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            async with session.subscribe_events(EventStreamOptions(), seen.append):
                turn = await session.submit("r1", "a")
                await gates.reached("held")
                await until(lambda: len(seen) >= 3)
            told = len(seen)
            # The subscription has ended, the runtime goes on.
            await turn.steer("s1", "more")
            assert len(seen) == told
            assert (await turn.status()).status is TurnStatus.RUNNING
        # The runtime has ended and given back what it had in hand; the backend goes on.
        await refused(turn.status(), HostClosed)
        assert await backend.owners() == []
        async with DurableRuntime(backend=backend) as api:
            view = await api.get_session(KEY).get_turn(turn.turn_id).status()
            assert (view.status, view.lease, view.pending_inputs) == (TurnStatus.RUNNING, None, 1)
    await refused(backend.owners(), HostClosed)


@pytest.mark.spec("LF-03")
@pytest.mark.backend("sqlite")
async def test_a_runtime_whose_backend_was_closed_first_ends_all_the_same(tmp_path: Path) -> None:
    backend = await LocalBackend.open(tmp_path)
    gates = Gates()
    harness = Harness("agent", "v1", ScriptedHarness([Stall(gate="held"), final()], gates=gates))
    runtime = DurableRuntime(backend=backend, harnesses=[harness], close_timeout=0.2)
    session = await runtime.create_session(KEY, "agent")
    await runtime.start()
    turn = await session.submit("r1", "a")
    await gates.reached("held")
    await backend.close()
    async with asyncio.timeout(SECONDS):
        await runtime.close()

    # What it could not give back is found by its lease, or at once because its process is gone or has let go of it.
    gates.open("held")
    async with LocalBackend.open(tmp_path) as again, DurableRuntime(backend=again, harnesses=[harness]) as second:
        await second.start()
        assert str(await second.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) == "done"


@pytest.mark.spec("LF-09")
@pytest.mark.parametrize("place", ["tool", "executor", "sink", "on_error", "twice"])
async def test_closing_from_a_callback_does_not_wait_for_itself(hosts: Hosts, place: str) -> None:
    async def close() -> str:
        await runtime.close()
        return "closing"

    closing: list[asyncio.Future] = []
    script = [local("t"), external("hands", "work"), Stall(gate="never opened"), final("ok")]
    if place == "on_error":
        script = [Fail(kind="Incompatible")]
    tools = {"t": close} if place == "tool" else {}
    work = {"work": close if place == "executor" else (lambda: "worked")}
    runtime = await hosts.open(
        ScriptedHarness(script, tools=tools),
        executors={"hands": FunctionExecutor(work)},
        on_error=lambda error: closing.append(asyncio.ensure_future(runtime.close())),
    )
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")

    async def sink(item) -> None:
        if item.event.type == "run.started":
            await runtime.close()

    if place == "sink":
        await refused(session.stream_events().for_each(sink), HostClosed)
    elif place == "twice":
        await asyncio.gather(runtime.close(), runtime.close())
    async with asyncio.timeout(SECONDS):
        await until(lambda: runtime._closing is not None)
        await runtime._closing
    again = (await hosts.open()).get_session(KEY).get_turn(turn.turn_id)

    assert not (await again.status()).status.terminal
    assert (await again.status()).lease is None
    await asyncio.gather(*closing)


@pytest.mark.spec("LF-08")
async def test_closing_gives_the_turn_back_where_it_is(hosts: Hosts) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [local("t", gate="g"), final("{results}")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates), close_timeout=SECONDS)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    closing = asyncio.create_task(first.close())
    await until(lambda: first._host.closing)
    gates.open("g")
    await closing
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert ledger.count("tool") == 1
    assert [run.status for run in await again.list_runs()] == [RunStatus.RELEASED, RunStatus.COMPLETED]
    assert (await again.status()).recovery is None


@pytest.mark.spec("LF-10", "RT-30")
async def test_start_may_be_repeated_and_raced(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")], start=False)
    await asyncio.gather(*(runtime.start() for _ in range(5)))
    session = await runtime.create_session(KEY, "agent")

    assert str(await session.call("r1", "a", SECONDS)) == "ok"
    assert len(await hosts.backend.owners()) == 1
    await runtime.close()
    assert await hosts.backend.owners() == []


@pytest.mark.case("C14")
async def test_hosts_of_one_name_are_two_owners_and_a_draining_one_claims_nothing(hosts: Hosts) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [Stall(gate="g"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates), host_name="web-1")
    session = await first.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    draining = asyncio.create_task(first.drain(SECONDS))
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates), host_name="web-1")
    following = await session.submit("r2", "b")
    gates.open("g")
    await draining
    await first.close()

    assert first.owner != second.owner
    assert first.owner.startswith("web-1-")
    again = second.get_session(KEY).get_turn(following.turn_id)
    assert str(await again.wait(SECONDS)) == "ok"
    assert {run.owner for run in await again.list_runs()} == {second.owner}
    assert {run.owner for run in await second.get_session(KEY).get_turn(turn.turn_id).list_runs()} == {first.owner}


@pytest.mark.case("C21")
async def test_a_draining_host_renews_until_its_last_turn_is_committed(hosts: Hosts) -> None:
    gates = Gates()
    script = [local("t", gate="g"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, gates=gates), lease=0.3)
    session = await first.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    draining = asyncio.create_task(first.drain(SECONDS))
    second = await hosts.open(ScriptedHarness(script, gates=Gates()), lease=0.3)
    renewed = first._heartbeat.last_renewal
    # Three leases' worth of renewals.
    for _ in range(9):
        await until(lambda before=renewed: first._heartbeat.last_renewal > before)
        renewed = first._heartbeat.last_renewal
    gates.open("g")

    assert await draining is True
    again = second.get_session(KEY).get_turn(turn.turn_id)
    assert [run.status for run in await again.list_runs()] == [RunStatus.COMPLETED]


@pytest.mark.case("C22")
async def test_a_blocked_loop_keeps_its_lease(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "agentscope_durable.runtime")
    ledger = EffectLedger()

    def block() -> str:
        # The tool sleeps on the event loop, for longer than its host's lease.
        time.sleep(2.5)
        return "blocked"

    script = [local("t"), final("{results}")]
    # It sleeps between two looks for long enough that the tool finds it asleep: that is when it can tell.
    harness = ScriptedHarness(script, ledger=ledger, tools={"t": block})
    first = await hosts.open(harness, lease=1.0, poll_interval=0.3)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")

    assert str(await turn.wait(SECONDS)) == "blocked"
    assert [run.status for run in await turn.list_runs()] == [RunStatus.COMPLETED]
    assert ledger.count("tool") == 1

    async def alive() -> bool:
        (lease,) = await hosts.backend.owners()
        return lease.alive

    await until(alive)
    await until(lambda: "event loop was blocked" in caplog.text)


@pytest.mark.case("C30")
@pytest.mark.parametrize("how", ["close", "cancelled", "lost", "drain"])
async def test_only_a_stored_cancel_cancels_a_turn(hosts: Hosts, clock: ManualClock, how: str) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [say("1"), Stall(gate="g", obedient=False), final("ok")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates), close_timeout=0.05)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    if how == "close":
        await first.close()
    elif how == "drain":
        await first.drain(0.01)
    elif how == "cancelled":
        # As when the event loop ends: every task is cancelled, and nobody said why.
        first._host.draining = True
        for task in list(first._scheduler.runs._tasks):
            task.cancel()
        await first._scheduler.runs.wait()
    else:
        kill(first)
        clock.advance(LEASE_MS + 1)
    gates.open("g")
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert (await again.status()).recovery is None
    assert RunStatus.CANCELLED not in {run.status for run in await again.list_runs()}
    assert "turn.recovery" not in {event.type for event in await all_events(again)}


async def test_use_after_a_fork_is_refused(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    runtime._door._process = os.getpid() - 1

    await refused(session.view(), UsedAfterFork)
    runtime._door._process = os.getpid()


@pytest.mark.spec("LF-02")
async def test_after_closing_no_task_is_left(hosts: Hosts) -> None:
    before = asyncio.all_tasks()
    gates = Gates()
    harness = Harness("agent", "v1", ScriptedHarness([Stall(gate="g"), final()], gates=gates))
    async with DurableRuntime(
        backend=hosts.backend,
        harnesses=[harness],
        executors={"hands": FunctionExecutor({})},
        poll_interval=0.05,
    ) as runtime:
        await runtime.start()
        session = await runtime.create_session(KEY, "agent")
        await session.submit("r1", "a")
        await gates.reached("g")

    # The backend is still open: what its store has under way is the store's.
    assert {task for task in asyncio.all_tasks() if task.get_name() != "postgres-readings"} == before


async def test_one_line_for_each_claim_park_and_settlement_and_no_secret(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "agentscope_durable")
    gates = Gates()
    script = [say("my secret answer"), local("t", gate="g", value="my secret result"), final("my secret end")]
    runtime = await hosts.open(ScriptedHarness(script, gates=gates))
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "my secret question")
    await gates.reached("g")
    await turn.cancel("c1")
    gates.open("g")
    await turn_is(turn, TurnStatus.CANCELLED)
    await runtime.close()
    lines = [record.getMessage() for record in caplog.records if record.name == "agentscope_durable.runtime"]

    about = [line for line in lines if turn.turn_id in line]
    assert [line.split(turn.turn_id)[1] for line in about] == [
        " claimed under fence 1",
        ": run 1 cancelled",
        " settled",
    ]
    assert "secret" not in caplog.text
    assert all("secret" not in str(vars(record)) for record in caplog.records)


async def test_nothing_an_application_reads_shows_a_secret_in_its_repr(hosts: Hosts) -> None:
    """A view in a log line or a traceback tells ids, kinds and sizes."""

    def fails() -> str:
        raise ToolError("my secret refusal")

    script = [
        say("my secret answer"),
        local("t", told="my secret argument"),
        local("u"),
        approval("a", told="my secret"),
    ]
    harness = ScriptedHarness([*script, final("my secret end")], tools={"t": lambda told: told, "u": fails})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    read: list[object] = []
    async with session.stream_events(deltas={EventDeltaType.MESSAGE}) as events:
        turn = await session.submit("r1", "my secret question")
        await turn_is(turn, TurnStatus.WAITING)
        (question,) = await turn.pending_interactions()
        await turn.respond("r2", question.interaction_id, True)
        read += [question, await turn.wait(SECONDS)]
        async for event in events:
            read.append(event)
            if isinstance(event, Committed) and event.event.type == "turn.status":
                view = event.event.data["turn"]
                if view["status"] == "COMPLETED":
                    break
    failing = await hosts.open([Fail(kind="ValueError", message="my secret fault")], name="fails")
    failed = await (await failing.create_session(SessionKey("app", "other"), "fails")).submit(
        "r1", "my secret question"
    )
    await turn_is(failed, TurnStatus.FAILED)
    for one in (turn, failed):
        read += [await one.status(), await one.snapshot(), await one.list_tools(), await one.history()]
        read += [*(await one.list_runs()).items, *await all_events(one)]
    read += [await session.history(), await session.snapshot()]

    assert (await turn.result()).text == "my secret end", "it is there for who asks"
    for value in read:
        assert "secret" not in repr(value), value


@pytest.mark.case("C18")
async def test_a_thread_that_is_owned_and_not_in_hand_is_found_and_given_back(hosts: Hosts) -> None:
    """Whatever made the host forget it: what the store says it owns is compared with what it does."""
    from agentscope_durable.contracts.commands import Claim
    from agentscope_durable.contracts.status import Audience

    runtime = await hosts.open([final("ok")], poll_interval=60.0)
    session = await runtime.create_session(KEY, "agent")
    other = await hosts.open()
    runtime._host.draining = True
    turn = await other.get_session(KEY).submit("r1", "a")
    # A claim of this host that nobody here knows about.
    await hosts.backend.execute(
        Claim(session=KEY, thread_id="main", owner=runtime.owner, served=runtime._harnesses.served),
        audience=Audience.HOST,
    )
    assert (await turn.status()).lease.owner == runtime.owner

    assert await runtime._scheduler.audit() is True
    assert (await turn.status()).lease is None
    assert await runtime._scheduler.audit() is True
    await hosts.open([final("ok")])
    assert str(await turn.wait(SECONDS)) == "ok"
    assert session.key == KEY


async def test_a_host_that_cannot_give_back_lets_its_lease_expire(hosts: Hosts, clock: ManualClock) -> None:
    """Released, its lease would be gone, and nobody would look for what it still owns."""
    gates = Gates()
    script = [Stall(gate="g", obedient=False), final("ok")]
    backend = hosts.backend

    class Away:
        away = False

        def __getattr__(self, name):
            return getattr(backend, name)

        async def execute(self, command, **options):
            if self.away:
                raise Unavailable("away")
            return await backend.execute(command, **options)

    store = Away()
    first = await hosts.open(ScriptedHarness(script, gates=gates), backend=store, close_timeout=0.05)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    store.away = True
    await first.close()
    gates.open("g")
    clock.advance(LEASE_MS + 1)
    second = await hosts.open(ScriptedHarness(script, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert [run.status for run in await again.list_runs()] == [RunStatus.LOST, RunStatus.COMPLETED]


@pytest.mark.spec("LF-02", "LF-10")
@pytest.mark.parametrize("turns", range(12))
async def test_a_start_that_was_cancelled_leaves_nothing_when_the_host_is_closed(hosts: Hosts, turns: int) -> None:
    runtime = await hosts.open([final("ok")], start=False, lease=0.1)
    starting = asyncio.create_task(runtime.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await runtime.close()

    beating = f"durable-heartbeat-{runtime.owner[-8:]}"
    await until(lambda: beating not in {thread.name for thread in threading.enumerate()})
    assert runtime.owner not in {lease.owner for lease in await hosts.backend.owners()}


@pytest.mark.spec("LF-10")
async def test_a_start_that_was_cancelled_can_be_repeated(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")], start=False)
    starting = asyncio.create_task(runtime.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.gather(runtime.start(), runtime.start())
    session = await runtime.create_session(KEY, "agent")

    assert str(await session.call("r1", "a", SECONDS)) == "ok"
    names = [thread.name for thread in threading.enumerate()]
    assert names.count(f"durable-heartbeat-{runtime.owner[-8:]}") == 1
    assert len(runtime._loops) == 1


@pytest.mark.spec("RT-13")
@pytest.mark.parametrize(
    "options",
    [
        {"poll_interval": math.nan},
        {"poll_interval": 0},
        {"lease": "30"},
        {"lease": math.inf},
        {"parallelism": 1.5},
        {"executor_parallelism": 0},
        {"close_timeout": -1},
        {"takeovers_max": -1},
        {"harnesses": ["agent"]},
        {"definitions": ["agent"]},
        {"recovery_policy": 3},
        {"recovery_policy": RecoveryPolicy(max_retries="3")},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
async def test_an_option_that_cannot_work_is_refused_with_its_name(hosts: Hosts, options: dict) -> None:
    with pytest.raises(Misuse, match=r"must be|was expected"):
        DurableRuntime(backend=hosts.backend, **options)
    with pytest.raises(InvalidRequest, match="route"):
        DurableRuntime(backend=hosts.backend, executors={"a\nb": FunctionExecutor({})})


@pytest.mark.parametrize("timeout", [math.nan, -math.inf, True, "1"])
async def test_a_timeout_that_is_none_is_refused_instead_of_waiting_for_ever(hosts: Hosts, timeout) -> None:
    runtime = await hosts.open([final("ok")], start=False)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    async with asyncio.timeout(SECONDS):
        with pytest.raises(InvalidRequest, match="timeout"):
            await turn.wait(timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**400])
async def test_a_timeout_may_be_any_number(hosts: Hosts, timeout: float) -> None:
    turn = await (await (await hosts.open([final("ok")])).create_session(KEY, "agent")).submit("r1", "a")
    assert str(await turn.wait(timeout)) == "ok"


@pytest.mark.spec("RT-25", "LF-09")
async def test_tools_that_block_their_threads_hold_up_neither_large_inputs_nor_the_close(
    hosts: Hosts, tmp_path: Path
) -> None:
    gate, inside = threading.Event(), []

    def blocks() -> str:
        inside.append(1)
        assert gate.wait(90)
        return "ok"

    backend = TransactionalSessionBackend(
        hosts.backend.records, FileObjectStore(tmp_path / "objects"), wakeups=LocalWakeups()
    )
    runtime = await hosts.open(
        [external("hands", "blocks"), final("ok")],
        backend=backend,
        executors={"hands": FunctionExecutor({"blocks": blocks})},
    )
    session = await runtime.create_session(KEY, "agent")
    for number in range(40):
        await (await session.create_thread(f"t{number}", "agent")).submit(f"r{number}", "a")
    await until(lambda: len(inside) == 40)

    async with asyncio.timeout(SECONDS):
        await session.submit("large", "x" * 200_000)
        await runtime.close()
    gate.set()


@pytest.mark.spec("RT-37")
@pytest.mark.parametrize("found", ["agent", Definition("agent", "", "s"), Definition("agent", "v1", 5)], ids=repr)
async def test_a_resolver_that_answers_something_else_is_told_and_nothing_is_stored(hosts: Hosts, found) -> None:
    runtime = await hosts.open(definition_resolver=lambda name: found)
    with pytest.raises((Misuse, InvalidRequest)):
        await runtime.create_session(KEY, "agent")

    assert (await runtime.list_sessions(KEY.namespace)).items == ()


class _SlowToLook:
    """A backend whose answer about ready work comes when a test lets it."""

    def __init__(self, backend: TransactionalSessionBackend) -> None:
        self._backend = backend
        self.asked, self.gate = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        page = await self._backend.ready(scan)
        if page.items:
            self.asked.set()
            await self.gate.wait()
        return page


@pytest.mark.spec("LF-01", "LF-02")
@pytest.mark.parametrize("how", ["close", "drain"])
async def test_a_host_that_ends_claims_nothing_of_what_it_was_just_looking_for(hosts: Hosts, how: str) -> None:
    slow = _SlowToLook(hosts.backend)
    runtime = await hosts.open([Stall(gate="never opened"), final()], start=False, backend=slow)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await runtime.start()
    await slow.asked.wait()
    ending = asyncio.create_task(runtime.close() if how == "close" else runtime.drain(SECONDS))
    await until(lambda: runtime._host.draining)
    await asyncio.sleep(0)
    slow.gate.set()
    async with asyncio.timeout(SECONDS):
        await ending
    # Whoever looked has seen what there was, and has ended.
    await until(lambda: len(runtime._loops) == 0)
    view = await (await hosts.open()).get_session(KEY).get_turn(turn.turn_id).status()

    assert (view.status, view.lease, view.runs) == (TurnStatus.QUEUED, None, 0)


class Late:
    """A backend whose first claim is answered by nobody, and is carried out when it is told to."""

    def __init__(self, backend: TransactionalSessionBackend) -> None:
        self._backend = backend
        self.late: tuple[Any, dict[str, Any]] | None = None
        self.asked = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def execute(self, command: Any, **options: Any) -> Any:
        if not isinstance(command, Claim):
            return await self._backend.execute(command, **options)
        self.late = self.late or (command, options)
        self.asked.set()
        raise Uncertain("the claim", reason="a test lost the answer")

    async def arrive(self) -> Any:
        assert self.late is not None
        command, options = self.late
        return await self._backend.execute(command, **options)


@pytest.mark.spec("LF-02", "LF-10")
async def test_a_claim_that_is_carried_out_when_its_host_has_closed_is_taken_over(
    hosts: Hosts, clock: ManualClock
) -> None:
    """Found by the simulator: the lease had been given back, so nobody found what the dead host owned."""
    backend = Late(hosts.backend)
    first = await hosts.open([final("done")], backend=backend)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    async with asyncio.timeout(SECONDS):
        await backend.asked.wait()
    await first.close()
    assert (await backend.arrive()).turn_id == turn.turn_id

    second = await hosts.open([final("done")])
    clock.advance(LEASE_MS + 1)

    again = second.get_session(KEY).get_turn(turn.turn_id)
    assert str(await again.wait(timeout=SECONDS)) == "done"
