"""Failures, retries and lost hosts (group RC)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentscope_durable.backend.transaction import NoWakeups
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.change import LEASE_KEPT_MS
from agentscope_durable.contracts.commands import (
    Claim,
    ClaimExecution,
    CommitStep,
    ReconcileTool,
    ReleaseTurn,
    RunEnd,
    RunEndKind,
)
from agentscope_durable.contracts.errors import Fenced, Misuse, TurnFailed, Unavailable, Uncertain
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import OPEN_CONDITIONS_MAX
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import (
    Audience,
    ExecutionState,
    ModelStatus,
    ReplayRule,
    RunStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.contracts.views import RecoveryPolicy, ToolView
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.host import RETRY_SECONDS_MAX
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.environment import SystemEnvironment
from agentscope_durable.spi.executor import Succeeded
from agentscope_durable.spi.harness import RunContext
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
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
    together,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, kill, refused, turn_is, until

LEASE_MS = 30_000


async def submit(runtime, text: str = "a"):
    session = await runtime.create_session(KEY, "agent")
    return await session.submit("r1", text)


async def lost_at_its_gate(
    hosts: Hosts, clock: ManualClock, script: Sequence[Any], ledger: EffectLedger
) -> DurableTurn:
    """A Turn whose host is killed at the gate "g", as the next host sees it."""
    gates = Gates()
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    turn = await submit(first)
    await gates.reached("g")
    kill(first)
    clock.advance(LEASE_MS + 1)
    gates.open("g")
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    return second.get_session(KEY).get_turn(turn.turn_id)


@pytest.mark.spec("RC-01", "RT-02", "RT-09", "RC-02")
async def test_another_host_goes_on_after_the_lease(hosts: Hosts, clock: ManualClock) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [local("t", value="1"), say("half", gate="g"), final("{results}")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    turn = await submit(first)
    await gates.reached("g")
    kill(first)
    gates.open("g")
    clock.advance(LEASE_MS + 1)
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "1"
    runs = (await again.list_runs()).items
    assert [run.status for run in runs] == [RunStatus.LOST, RunStatus.COMPLETED]
    assert [run.owner for run in runs] == [first.owner, second.owner]
    assert runs[0].fence < runs[1].fence
    assert ledger.count("tool") == 1
    assert len(await second.get_session(KEY).list_turns()) == 1
    assert (await again.status()).recovery is None


@pytest.mark.spec("RC-02", "SE-02")
@pytest.mark.parametrize("known", [True, False], ids=["known", "not known"])
async def test_what_a_tool_did_under_a_lost_fence_is_filed_and_settles_the_call(
    hosts: Hosts, clock: ManualClock, known: bool
) -> None:
    """The former owner may say it whether it learns of the other host before its commit or by it (D13)."""
    started, go = asyncio.Event(), asyncio.Event()

    async def act() -> str:
        started.set()
        await go.wait()
        return "done by the first"

    script = [local("t"), final("{results}")]
    silent = hosts.backend.with_wakeups(NoWakeups())
    options: dict[str, Any] = {} if known else {"backend": silent, "poll_interval": 3600.0}
    first = await hosts.open(ScriptedHarness(script, tools={"t": act}), start=False, **options)
    turn = await submit(first)
    await first.start()  # Its first look finds the Turn: one that hears of nothing takes no other.
    await started.wait()
    first._heartbeat._stopping.set()
    clock.advance(LEASE_MS + 1)
    second = await hosts.open(ScriptedHarness(script))
    again = second.get_session(KEY).get_turn(turn.turn_id)
    view = await turn_is(again, TurnStatus.WAITING)
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]
    (run,) = first._runner._runs
    if known:
        await until(lambda: run.fenced)
    assert run.fenced is known
    before = len(await all_events(again))
    go.set()

    assert str(await again.wait(SECONDS)) == "done by the first"
    assert [event.type for event in (await all_events(again))[before:]][0] == "tool.completed"
    assert [one.status for one in await again.list_runs()][0] is RunStatus.LOST
    assert run.ended is None
    assert not hosts.errors or {type(error) for error in hosts.errors} == {Fenced}


@pytest.mark.spec("RC-02", "RC-18")
async def test_a_stale_owner_commits_nothing(hosts: Hosts, clock: ManualClock) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [Stall(gate="g", obedient=False), say("by whom"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    turn = await submit(first)
    await gates.reached("g")
    heartbeat = first._heartbeat
    heartbeat._stopping.set()
    clock.advance(LEASE_MS + 1)
    other = Gates()
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=other))
    await other.reached("g")
    gates.open("g")
    await until(lambda: len(first._scheduler.runs) == 0)
    other.open("g")
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    lost, won = (await again.list_runs()).items
    assert (lost.status, won.status) == (RunStatus.LOST, RunStatus.COMPLETED)
    assert {
        event.run_id for event in await all_events(again) if event.type == "message.completed" and event.run_id
    } == {won.run_id}


class _WakesFirst:
    """A backend over which another host renews its lease just before each claim is decided."""

    def __init__(self, backend: Any, owner: str) -> None:
        self._backend = backend
        self._owner = owner
        self.claims = asyncio.Event()

    async def execute(self, command: Any, **options: Any) -> Any:
        if not isinstance(command, Claim | ClaimExecution):
            return await self._backend.execute(command, **options)
        await asyncio.to_thread(self._backend.records.renew, self._owner, LEASE_MS, b"")
        answer = await self._backend.execute(command, **options)
        self.claims.set()
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.spec("RC-01", "RC-02")
async def test_a_host_that_renews_before_it_is_taken_over_keeps_its_thread(hosts: Hosts, clock: ManualClock) -> None:
    """Found by the simulator: whoever had seen an expired lease took the Thread although it was renewed meanwhile."""
    gates = Gates()
    script = [local("t", gate="g"), final("{results}")]
    first = await hosts.open(ScriptedHarness(script, gates=gates))
    turn = await submit(first)
    await gates.reached("g")
    clock.advance(LEASE_MS + 1)
    late = _WakesFirst(hosts.backend, first.owner)
    await hosts.open(ScriptedHarness(script, gates=gates), backend=late)
    await asyncio.wait_for(late.claims.wait(), SECONDS)
    gates.open("g")

    assert str(await turn.wait(SECONDS)) == "ok"
    assert [run.owner for run in await turn.list_runs()] == [first.owner]


@pytest.mark.spec("RC-03", "BE-03", "BE-13", "LF-10", "RT-22")
async def test_without_any_hint_work_is_found(hosts: Hosts) -> None:
    silent = hosts.backend.with_wakeups(NoWakeups())
    runtime = await hosts.open([approval("t"), final("ok")], backend=silent)
    turn = await submit(runtime)
    await turn_is(turn, TurnStatus.WAITING)
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)

    assert str(await turn.wait(SECONDS)) == "ok"


@pytest.mark.spec("RC-05", "LF-02", "LF-08", "RC-18")
async def test_nothing_is_lost_while_every_host_is_stopped(hosts: Hosts) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [local("t"), Stall(gate="g"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    turn = await submit(first)
    await gates.reached("g")
    await first.close()
    api = await hosts.open()
    view = await api.get_session(KEY).get_turn(turn.turn_id).status()
    assert view.lease is None
    assert view.recovery is None
    gates.open("g")
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert [run.status for run in await again.list_runs()] == [RunStatus.RELEASED, RunStatus.COMPLETED]
    assert ledger.count("tool") == 1


@pytest.mark.spec("RC-06", "RC-07", "RC-12", "RC-14", "RC-16", "RC-20")
@pytest.mark.parametrize("kind", ["OSError", "TimeoutError", "Unavailable", "Conflict", "Group"])
async def test_a_fault_of_the_world_is_tried_again(hosts: Hosts, clock: ManualClock, kind: str) -> None:
    runtime = await hosts.open([Fail(kind=kind, message="the network", runs=1), final("ok")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.RETRY]
    assert view.recovery.failures == 1
    assert view.recovery.next_retry_at_ms == clock() + 1000
    assert view.recovery.policy == RecoveryPolicy(3, 1000, 30_000)
    assert view.recovery.last_error.retryable
    clock.advance(1000)

    assert str(await turn.wait(SECONDS)) == "ok"
    assert [run.status for run in await turn.list_runs()] == [RunStatus.FAILED, RunStatus.COMPLETED]
    (event,) = [e for e in await all_events(turn) if e.type == "turn.recovery"][:1]
    assert event.data["recovery"]["failures"] == 1


@pytest.mark.spec("RC-08", "RC-17")
@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError", "MixedGroup"])
async def test_a_fault_of_the_program_is_not(hosts: Hosts, kind: str) -> None:
    runtime = await hosts.open([Fail(kind=kind, message="a defect"), final("ok")])
    turn = await submit(runtime)
    error = await refused(turn.wait(SECONDS), TurnFailed)

    assert "a defect" in error.reason
    assert len(await turn.list_runs()) == 1


@pytest.mark.spec("RC-11", "RC-17", "RC-20")
async def test_by_default_three_retries_with_doubling_waits(hosts: Hosts, clock: ManualClock) -> None:
    runtime = await hosts.open([Fail()])
    turn = await submit(runtime)
    waits = []
    for failures in (1, 2, 3):
        view = await turn_is(
            turn, TurnStatus.WAITING, where=lambda view, n=failures: view.recovery and view.recovery.failures == n
        )
        waits.append(view.recovery.next_retry_at_ms - clock())
        clock.advance(waits[-1])
    await refused(turn.wait(SECONDS), TurnFailed)

    assert waits == [1000, 2000, 4000]
    assert len(await turn.list_runs()) == 4


@pytest.mark.spec("RC-11")
async def test_the_wait_is_capped(hosts: Hosts, clock: ManualClock) -> None:
    runtime = await hosts.open([Fail()], recovery_policy=RecoveryPolicy(9, 1000, 3000))
    turn = await submit(runtime)
    for failures, wait in enumerate((1000, 2000, 3000, 3000), start=1):
        view = await turn_is(
            turn, TurnStatus.WAITING, where=lambda view, n=failures: view.recovery and view.recovery.failures == n
        )
        assert view.recovery.next_retry_at_ms - clock() == wait
        clock.advance(wait)


@pytest.mark.spec("RC-12", "RC-13")
async def test_the_first_policy_stays_in_force(hosts: Hosts, clock: ManualClock) -> None:
    script = [Fail(runs=2), final("ok")]
    first = await hosts.open(script, recovery_policy=RecoveryPolicy(5, 1000, 30_000))
    turn = await submit(first)
    before = await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    second = await hosts.open(script, recovery_policy=RecoveryPolicy(0, 1, 1))
    again = second.get_session(KEY).get_turn(turn.turn_id)
    await again.steer("s1", "hurry")
    await again.signal("x1", "x.hurry", None)
    view = await again.status()
    assert view.recovery == before.recovery
    clock.advance(1000)
    view = await turn_is(again, TurnStatus.WAITING, where=lambda view: view.recovery.failures == 2)
    assert view.recovery.policy == RecoveryPolicy(5, 1000, 30_000)
    assert view.recovery.next_retry_at_ms == clock() + 2000
    clock.advance(2000)

    assert str(await again.wait(SECONDS)) == "ok"


@pytest.mark.spec("RC-14")
async def test_a_healthy_turn_has_no_recovery(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    turn = await submit(runtime)
    await turn.wait(SECONDS)

    assert (await turn.status()).recovery is None


@pytest.mark.spec("RC-15")
async def test_the_hook_classifies_what_the_adapter_leaves_open(hosts: Hosts, clock: ManualClock) -> None:
    asked: list[str] = []

    def hook(error: BaseException) -> bool | None:
        asked.append(type(error).__name__)
        return True if isinstance(error, ValueError) else None

    runtime = await hosts.open([Fail(kind="ValueError", runs=1), final("ok")], retryable_failure=hook)
    turn = await submit(runtime)
    await turn_is(turn, TurnStatus.WAITING)
    clock.advance(1000)

    assert str(await turn.wait(SECONDS)) == "ok"
    assert asked == ["ValueError"]


@pytest.mark.spec("RC-15", "RC-23")
async def test_the_hook_never_repeats_an_unknown_operation(hosts: Hosts) -> None:
    def broken() -> str:
        raise OSError("after the effect")

    ledger = EffectLedger()
    harness = ScriptedHarness([local("t"), final("{results}")], ledger=ledger, tools={"t": broken})
    runtime = await hosts.open(harness, retryable_failure=lambda error: True)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]
    other = await session.create_thread("x", "agent")
    await turn_is(await other.submit("r2", "a"), TurnStatus.WAITING)
    assert ledger.count("tool", turn=turn.turn_id) == 1
    await reconcile(hosts, turn, view.waiting_on[0].call_id)

    assert str(await turn.wait(SECONDS)) == "seen with my own eyes"
    assert ledger.count("tool", turn=turn.turn_id) == 1


async def reconcile(hosts: Hosts, turn, call_id: str) -> None:
    await hosts.backend.execute(
        ReconcileTool(
            session=KEY,
            thread_id="main",
            turn_id=turn.turn_id,
            call_id=call_id,
            request_id=f"e-{call_id}",
            state=ExecutionState.COMPLETED,
            result=body_of(ToolResult(value="seen with my own eyes")),
            digest="d",
            evidence_ref="ticket 1",
        ),
        audience=Audience.OPERATOR,
    )


@pytest.mark.spec("RC-18")
async def test_an_incompatible_host_consumes_no_budget(hosts: Hosts) -> None:
    ledger = EffectLedger()
    first = await hosts.open(ScriptedHarness([Fail(kind="Incompatible")], ledger=ledger))
    turn = await submit(first)
    await until(lambda: _runs(turn, 1))
    await first.close()
    second = await hosts.open(ScriptedHarness([final("ok")], ledger=ledger))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert (await again.status()).recovery is None


async def _runs(turn, count: int) -> bool:
    return len([run for run in await turn.list_runs() if run.ended_at_ms]) >= count


@pytest.mark.spec("RC-19")
async def test_a_failure_record_that_cannot_be_committed_is_not_claimed(hosts: Hosts, clock: ManualClock) -> None:
    backend = hosts.backend

    class Flaky:
        """Away for the owner from the moment at which it says that its Run has failed."""

        def __init__(self):
            self.refused = []

        def __getattr__(self, name):
            return getattr(backend, name)

        async def execute(self, command, **options):
            if isinstance(command, CommitStep) and (self.refused or ends_in_failure(command)):
                self.refused.append(command)
                raise Unavailable("the store is away")
            return await backend.execute(command, **options)

    class Patience(SystemEnvironment):
        """Its time can be let pass: a host asks again for minutes before it says that it cannot."""

        passed = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.passed

    flaky, gates, patience = Flaky(), Gates(), Patience()
    begun = [say("kept"), Stall(gate="g")]
    failing = ScriptedHarness([*begun, Fail()], gates=gates)
    first = await hosts.open(failing, backend=flaky, environment=patience)
    turn = await submit(first)
    await gates.reached("g")
    before, runs = await turn.status(), await turn.list_runs()
    gates.open("g")
    await until(lambda: len(flaky.refused) > 1)
    assert not any(isinstance(error, Unavailable) for error in hosts.errors), "it asks again first"
    patience.passed = RETRY_SECONDS_MAX + 1
    await until(lambda: any(isinstance(error, Unavailable) for error in hosts.errors))

    view = await hosts.backend.query(_question(turn))
    assert (view.status, view.recovery, view.revision) == (TurnStatus.RUNNING, None, before.revision)
    assert await turn.list_runs() == runs
    kill(first)
    clock.advance(LEASE_MS + 1)
    second = await hosts.open(ScriptedHarness([*begun, final("ok")], gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert [message.text for message in await again.history()] == ["a", "kept", "ok"]


def ends_in_failure(command: CommitStep) -> bool:
    return command.end is not None and command.end.kind is RunEndKind.FAILED


def _question(turn):
    from agentscope_durable.contracts.questions import GetTurn

    return GetTurn(session=KEY, thread_id="main", turn_id=turn.turn_id)


@pytest.mark.spec("RC-24")
async def test_a_retry_that_came_due_while_all_were_down_runs_once(hosts: Hosts, clock: ManualClock) -> None:
    script = [Fail(runs=1), final("ok")]
    first = await hosts.open(script)
    turn = await submit(first)
    await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    clock.advance(3_600_000)
    second = await hosts.open(script)
    again = second.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert len(await again.list_runs()) == 2


@pytest.mark.spec("RC-23", "RT-47", "MC-08")
@pytest.mark.parametrize("rule", list(ReplayRule))
async def test_a_local_tool_lost_with_its_host(hosts: Hosts, clock: ManualClock, rule: ReplayRule) -> None:
    ledger = EffectLedger()
    script = [local("t", rule=rule, gate="g", value="result"), final("{results}")]
    again = await lost_at_its_gate(hosts, clock, script, ledger)
    if rule is ReplayRule.NEVER:
        view = await turn_is(again, TurnStatus.WAITING)
        assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]
        await reconcile(hosts, again, view.waiting_on[0].call_id)
        assert str(await again.wait(SECONDS)) == "seen with my own eyes"
        assert ledger.count("tool") == 1
    else:
        assert str(await again.wait(SECONDS)) == "result"
        assert ledger.count("tool") == 2


@pytest.mark.spec("MC-08", "EV-16")
async def test_a_request_lost_with_its_host_is_lost_and_made_again(hosts: Hosts, clock: ManualClock) -> None:
    again = await lost_at_its_gate(hosts, clock, [final("the whole answer", gate="g")], EffectLedger())
    message = await again.wait(SECONDS)
    lost, won = (await again.list_runs()).items

    assert (message.text, message.attempt) == ("the whole answer", 2)
    assert [call.status for call in await again.list_model_calls(lost.run_id)] == [ModelStatus.LOST]
    assert [call.status for call in await again.list_model_calls(won.run_id)] == [ModelStatus.COMPLETED]
    abandoned = [e.data for e in await all_events(again) if e.type == "message.abandoned"]
    assert [(data["messageId"], data["attempt"]) for data in abandoned] == [(message.id, 1)]


@pytest.mark.case("C28")
async def test_a_turn_that_kills_its_hosts_is_parked_for_a_person(hosts: Hosts, clock: ManualClock) -> None:
    script = [Stall(gate="g")]
    turn = None
    for _ in range(4):
        gates = Gates()
        host = await hosts.open(ScriptedHarness(script, gates=gates), takeovers_max=2)
        if turn is None:
            turn = await submit(host)
        # The last host only parks it.
        reached = asyncio.ensure_future(gates.reached("g"))
        parked = asyncio.ensure_future(turn_is(host.get_session(KEY).get_turn(turn.turn_id), TurnStatus.WAITING))
        await asyncio.wait({reached, parked}, return_when=asyncio.FIRST_COMPLETED)
        if parked.done():
            break
        parked.cancel()
        kill(host)
        clock.advance(LEASE_MS + 1)
    view = parked.result()

    assert [reason.kind for reason in view.waiting_on] == [WaitKind.OPERATOR]
    gates.open("g")
    await hosts.backend.execute(
        ReleaseTurn(session=KEY, thread_id="main", turn_id=turn.turn_id, request_id="release"),
        audience=Audience.OPERATOR,
    )
    assert str(await host.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) == "done"


@pytest.mark.case("C17")
async def test_one_bad_item_does_not_stop_the_others(hosts: Hosts) -> None:
    """Of 20 Turns one is of an unregistered definition and one cannot be read: 18 run."""
    from agentscope_durable.contracts.errors import CorruptRecord
    from agentscope_durable.contracts.questions import GetMessage
    from agentscope_durable.runtime.runtime import Definition
    from agentscope_durable.testing.scripted_harness import STATE_VERSION

    api = await hosts.open(definitions=[Definition("agent", "v1", STATE_VERSION), Definition("other", "v1", "s")])
    turns = []
    for number in range(20):
        session = await api.create_session(SessionKey("app", f"{number}"), "other" if number == 3 else "agent")
        turns.append(await session.submit("r1", "a"))
    bad = turns[7].turn_id
    backend = hosts.backend

    class Damaged:
        def __getattr__(self, name):
            return getattr(backend, name)

        async def query(self, question, **options):
            if isinstance(question, GetMessage) and question.message_id.startswith(bad):
                raise CorruptRecord("message", "MessageCompleted", "damaged")
            return await backend.query(question, **options)

    await hosts.open([final("ok")], backend=Damaged())
    for number, turn in enumerate(turns):
        if number not in (3, 7):
            assert str(await turn.wait(SECONDS)) == "ok"
    view = await turn_is(turns[7], TurnStatus.WAITING)
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.OPERATOR]
    assert "CorruptRecord" in view.waiting_on[0].next_action
    assert view.lease is None
    view = await turns[3].status()
    assert view.status is TurnStatus.QUEUED
    assert view.recovery is None
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.DEFINITION_MISSING]


@pytest.mark.spec("BE-29", "BE-12")
@pytest.mark.parametrize("nth", range(1, 9))
async def test_an_owners_lost_answer_is_settled_by_its_position(hosts: Hosts, nth: int) -> None:
    """Every commit of a Run loses its answer once, before or after it stood; nothing happens twice."""
    backend = hosts.backend
    count = 0

    class Loses:
        def __getattr__(self, name):
            return getattr(backend, name)

        async def execute(self, command, **options):
            nonlocal count
            if type(command).__name__ not in ("CommitStep", "SettleTurn"):
                return await backend.execute(command, **options)
            count += 1
            if count == nth:
                await backend.execute(command, **options)
                raise Uncertain(type(command).__name__)
            if count == nth + 2:
                raise Uncertain(type(command).__name__)
            return await backend.execute(command, **options)

    harness = ScriptedHarness([say("one"), local("t", value="2"), final("{results}")])
    runtime = await hosts.open(harness, backend=Loses())
    turn = await submit(runtime)

    assert str(await turn.wait(SECONDS)) == "2"
    assert [message.text for message in await turn.history()] == ["a", "one", "2"]
    assert harness.ledger.count("tool") == 1
    effects = [str(line) for line in harness.ledger.lines()]
    assert len(effects) == len(set(effects))


async def test_hints_of_one_store_reach_every_host(hosts: Hosts) -> None:
    wakeups = LocalWakeups()
    shared = hosts.backend.with_wakeups(wakeups)
    brain = await hosts.open([final("ok")], backend=shared, poll_interval=60.0)
    api = await hosts.open(start=False, backend=shared, poll_interval=60.0)
    session = await brain.create_session(KEY, "agent")
    turn = await api.get_session(session.key).submit("r1", "a")

    assert str(await turn.wait(SECONDS)) == "ok"


@pytest.mark.spec("AS-19", "RC-18")
async def test_a_turn_in_flight_waits_for_a_host_that_reads_its_state(hosts: Hosts) -> None:
    script = [approval("t"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, writer="scripted 1"))
    turn = await submit(first)
    await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    # A short lease renews often, so the other hosts and people soon hear what this one cannot read.
    other = await hosts.open(ScriptedHarness(script, writer="scripted 2"), lease=0.3)
    again = other.get_session(KEY).get_turn(turn.turn_id)
    (question,) = await again.pending_interactions()
    await again.respond("a1", question.interaction_id, True)
    await until(lambda: any(type(error).__name__ == "Incompatible" for error in hosts.errors))

    async def names_the_version() -> bool:
        waiting = (await again.status()).waiting_on
        return any("scripted 1" in reason.next_action for reason in waiting)

    await until(names_the_version)
    assert len((await again.list_runs()).items) == 2
    await other.close()
    assert "scripted 1" in str(next(error for error in hosts.errors if type(error).__name__ == "Incompatible"))
    third = await hosts.open(ScriptedHarness(script, writer="scripted 1"))
    again = third.get_session(KEY).get_turn(turn.turn_id)

    assert str(await again.wait(SECONDS)) == "ok"
    assert (await again.status()).recovery is None


async def test_losing_a_race_makes_no_host_slow(hosts: Hosts) -> None:
    """A host that was second many times still takes over at its next look."""
    from agentscope_durable.runtime.backoff import Backoff
    from agentscope_durable.spi.environment import SYSTEM

    backoff = Backoff(SYSTEM, 0.0)
    for _ in range(50):
        backoff.missed("thread", again=False)

    assert not backoff.holds("thread")


class _GivesUp(BaseException):
    """Not an Exception, as those by which some libraries leave."""


@pytest.mark.spec("RC-06", "RC-08", "RC-17")
@pytest.mark.parametrize(
    "error", [SystemExit(2), GeneratorExit(), _GivesUp("x"), BaseExceptionGroup("several", [_GivesUp("x")])], ids=repr
)
@pytest.mark.parametrize("place", ["run", "task", "classify"])
async def test_what_is_no_exception_fails_the_turn_and_ends_no_host(
    hosts: Hosts, error: BaseException, place: str
) -> None:
    if place == "task" and isinstance(error, SystemExit):
        pytest.skip("SystemExit that ends a task ends the program")

    async def raises() -> None:
        raise error

    class Raises(ScriptedHarness):
        async def run(self, context: RunContext) -> RunEnd | None:
            if context.start.request_id == "r1":
                if place == "task":
                    await asyncio.create_task(raises())
                raise error
            return await super().run(context)

        def classify(self, failure: BaseException) -> bool | None:
            if place == "classify":
                raise error
            return super().classify(failure)

    runtime = await hosts.open(Raises([final("ok")]))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    with pytest.raises(TurnFailed):
        await turn.wait(SECONDS)

    assert len(await turn.list_runs()) == 1
    assert str(await session.call("r2", "b", SECONDS)) == "ok"
    assert {type(defect) for defect in hosts.errors} <= {type(error)}, "nothing else broke on the way"


@pytest.mark.spec("RC-06")
async def test_a_bound_that_a_turn_goes_beyond_is_named_in_its_error(hosts: Hosts) -> None:
    calls = [external("hands", "work") for _ in range(OPEN_CONDITIONS_MAX + 1)]
    policy = RecoveryPolicy(max_retries=1, initial_backoff_ms=1)
    executors = {"hands": FunctionExecutor({})}
    runtime = await hosts.open([together(*calls), final("ok")], executors=executors, recovery_policy=policy)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")

    with pytest.raises(TurnFailed, match=f"LimitExceeded: open tool calls .* {OPEN_CONDITIONS_MAX}"):
        await turn.wait(SECONDS)


@pytest.mark.spec("RC-01")
async def test_the_lease_of_a_dead_host_is_removed_when_its_work_was_taken_over(
    hosts: Hosts, clock: ManualClock
) -> None:
    gates = Gates()
    harness = ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates)
    first = await hosts.open(harness)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    kill(first)
    if isinstance(hosts.backend.records, SqliteRecordStore):
        hosts.backend.records._locks.close()
    clock.advance(LEASE_KEPT_MS + LEASE_MS)
    # A host that does not run the definition leaves the lease: by it the Turn is found.
    other = await hosts.open([final("ok")], name="another", lease=10 * LEASE_KEPT_MS)
    # It has looked once it has run something of its own: what the dead have left is looked at first.
    own = await other.create_session(SessionKey("app", "other"), "another")
    await own.call("r1", "a", timeout=SECONDS)
    assert first.owner in {lease.owner for lease in await hosts.backend.owners()}

    second = await hosts.open(harness, lease=10 * LEASE_KEPT_MS)
    gates.open("g")
    assert str(await second.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) == "ok"

    async def removed() -> bool:
        return first.owner not in {lease.owner for lease in await hosts.backend.owners()}

    await until(removed)
    assert {lease.owner for lease in await hosts.backend.owners()} == {other.owner, second.owner}


@pytest.mark.spec("RC-15")
@pytest.mark.parametrize("kind", ["text", "coroutine"])
async def test_a_classification_that_is_no_answer_is_not_stored_and_the_default_stands(hosts: Hosts, kind: str) -> None:
    async def later(error: BaseException) -> bool:
        return True

    hook = later if kind == "coroutine" else lambda error: "yes"
    runtime = await hosts.open([Fail(kind="ValueError"), final("ok")], retryable_failure=hook)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    with pytest.raises(TurnFailed):
        await turn.wait(SECONDS)

    assert len(await turn.list_runs()) == 1
    assert [type(error) for error in hosts.errors] == [Misuse]


@pytest.mark.spec("PR-09")
async def test_a_true_output_is_shown_after_recovery_and_unknown_stays_until_it_is_verified(
    hosts: Hosts, clock: ManualClock
) -> None:
    """One call has ended before its host is lost, the other is under way: what is shown of each outlives the hosts."""
    gates = Gates()
    script = [local("look", value="seen"), local("pay", gate="paying"), final("{results}")]

    async def shown() -> dict[str, tuple[ExecutionState, object]]:
        tools = await turn.list_tools()
        folded = (await turn.snapshot()).projection.tools.values()
        assert {tool.call_id: tool for tool in tools} == {tool.call_id: tool for tool in folded}
        return {tool.name: (tool.state, (tool.result or {}).get("value")) for tool in tools}

    first = await hosts.open(ScriptedHarness(script, gates=gates))
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("paying")
    assert await shown() == {"look": (ExecutionState.COMPLETED, "seen"), "pay": (ExecutionState.RUNNING, None)}
    kill(first)
    clock.advance(LEASE_MS + 1)
    for _ in range(3):
        # However many hosts come and go, nobody guesses.
        host = await hosts.open(ScriptedHarness(script, gates=Gates()))
        turn = host.get_session(KEY).get_turn(turn.turn_id)
        view = await turn_is(turn, TurnStatus.WAITING)
        assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]
        assert await shown() == {"look": (ExecutionState.COMPLETED, "seen"), "pay": (ExecutionState.UNKNOWN, None)}
        await host.close()

    call_id = next(tool.call_id for tool in await _any(hosts, turn) if tool.state is ExecutionState.UNKNOWN)
    host = await hosts.open(ScriptedHarness(script, gates=Gates()))
    turn = host.get_session(KEY).get_turn(turn.turn_id)
    await HostOperations(hosts.backend).reconcile_tool(
        turn, call_id, request_id="e1", result=Succeeded(value="paid, says the bank"), evidence_ref="statement 7"
    )
    assert str(await turn.wait(SECONDS)) == "seen, paid, says the bank"
    assert (await shown())["pay"] == (ExecutionState.COMPLETED, "paid, says the bank")


async def _any(hosts: Hosts, turn: DurableTurn) -> list[ToolView]:
    """The calls of a Turn as a host sees them that runs nothing."""
    return await (await hosts.open()).get_session(KEY).get_turn(turn.turn_id).list_tools()
