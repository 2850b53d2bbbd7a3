"""How a cancelled or failed Turn ends: its effects first (group SE)."""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.status import ExecutionState, RunStatus, TurnStatus, WaitKind
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import ExecutorCapabilities, Running, Succeeded, Unknown
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Fail,
    Gates,
    ScriptedHarness,
    approval,
    external,
    final,
    local,
    say,
    together,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, kill, refused, turn_is, until
from tests.runtime.test_recovery import LEASE_MS, reconcile


class Remote:
    """An executor whose work goes on elsewhere; the test says how it ends."""

    capabilities = ExecutorCapabilities(query=True, cancel=True)

    def __init__(self) -> None:
        self.started: list[str] = []
        self.queried: list[str] = []
        self.cancelled: list[str] = []
        self.outcome: object = Running(retry_after=0.05)

    async def execute(self, request):
        self.started.append(request.execution_id)
        return self.outcome

    async def query(self, request):
        self.queried.append(request.execution_id)
        return self.outcome

    async def cancel(self, request):
        self.cancelled.append(request.execution_id)
        return self.outcome


@pytest.mark.spec("SE-01", "SE-02", "SE-05", "SE-03", "SE-10")
async def test_a_failed_turn_ends_when_its_executions_have(hosts: Hosts) -> None:
    remote = Remote()
    # A failure for good while an execution is out: the agent fails in the Run that takes in the approval.
    script = [together(external("hands", "work"), approval("t")), Fail(kind="ValueError"), final()]

    class FailsOnResume(ScriptedHarness):
        async def run(self, context):
            if context.start.number == 2:
                raise ValueError("a defect")
            return await super().run(context)

    harness = FailsOnResume(script)
    runtime = await hosts.open(harness, executors={"hands": remote})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn_is(turn, TurnStatus.WAITING)
    await until(lambda: bool(remote.started))
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)
    view = await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.error is not None)
    await until(lambda: bool(remote.cancelled))
    assert view.status is TurnStatus.WAITING
    assert harness.settled == []
    runs = len(await turn.list_runs())
    remote.outcome = Succeeded(value="it had worked")
    await turn_is(turn, TurnStatus.FAILED)
    tools = {tool.name: tool for tool in await turn.list_tools()}

    assert set(remote.started) == set(remote.cancelled) == {tools["work"].execution_id}
    assert len(remote.started) == 1
    assert tools["work"].state is ExecutionState.COMPLETED
    assert (tools["work"].applied_at, tools["work"].applied_at_ms is not None) == (None, True)
    assert harness.settled == [turn.turn_id]
    assert len(await turn.list_runs()) == runs


@pytest.mark.spec("SE-02", "UN-12")
async def test_unknown_holds_the_end_until_it_is_reconciled(hosts: Hosts) -> None:
    class Lost(Remote):
        capabilities = ExecutorCapabilities()

    remote = Lost()
    remote.outcome = Unknown("the line broke")
    runtime = await hosts.open([external("hands", "work"), final()], executors={"hands": remote})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn_is(
        turn, TurnStatus.WAITING, where=lambda view: any(r.kind is WaitKind.TOOL_UNKNOWN for r in view.waiting_on)
    )
    await turn.cancel("c1")
    view = await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.cancel_requested)
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_UNKNOWN]
    (tool,) = await turn.list_tools()
    await reconcile(hosts, turn, tool.call_id)
    await turn_is(turn, TurnStatus.CANCELLED)

    assert len(remote.started) == 1


async def test_a_reconciliation_takes_an_outcome_and_says_which(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")

    operations = HostOperations(hosts.backend)
    for given in ("done", None, True):
        wrong = operations.reconcile_tool(turn, "c1", request_id="r2", result=given, evidence_ref="log")  # type: ignore[arg-type]
        error = await refused(wrong, InvalidRequest)
        assert "Succeeded(value)" in str(error)


@pytest.mark.spec("SE-03", "SE-05", "SE-04")
@pytest.mark.parametrize("path", ["cancel", "fail"])
async def test_settle_is_the_one_way_to_the_end(hosts: Hosts, path: str) -> None:
    gates = Gates()
    script = [say("kept"), local("t", gate="g")] + ([Fail(kind="ValueError")] if path == "fail" else [final()])
    harness = ScriptedHarness(script, gates=gates)
    runtime = await hosts.open(harness)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    if path == "cancel":
        await turn.cancel("c1")
    gates.open("g")
    await turn_is(turn, TurnStatus.CANCELLED, TurnStatus.FAILED)
    (run,) = (await turn.list_runs()).items

    assert harness.settled == [turn.turn_id]
    assert run.status is (RunStatus.CANCELLED if path == "cancel" else RunStatus.FAILED)
    ends = [event.type for event in await all_events(turn)]
    assert ends[-1] == "turn.status"
    assert [message.text for message in await turn.history()] == ["a", "kept"]


@pytest.mark.spec("SE-07", "SE-12", "RT-49")
async def test_a_run_that_ends_well_with_work_outside_does_not_end_the_turn(hosts: Hosts) -> None:
    release = asyncio.Event()

    async def work() -> str:
        await release.wait()
        return "worked"

    runtime = await hosts.open(
        [external("hands", "work"), final("{results}")], executors={"hands": FunctionExecutor({"work": work})}
    )
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_RUNNING]
    release.set()

    assert str(await turn.wait(SECONDS)) == "worked"


@pytest.mark.spec("SE-11")
async def test_a_settlement_survives_its_host(hosts: Hosts, clock: ManualClock) -> None:
    ledger, gates = EffectLedger(), Gates()
    script = [local("t", gate="g"), final()]
    reached = asyncio.Event()

    class Stuck(ScriptedHarness):
        async def settle(self, context):
            reached.set()
            await asyncio.Event().wait()
            return await super().settle(context)

    first = await hosts.open(Stuck(script, ledger=ledger, gates=gates))
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    await turn.cancel("c1")
    gates.open("g")
    await reached.wait()
    kill(first)
    clock.advance(LEASE_MS + 1)
    second = await hosts.open(ScriptedHarness(script, ledger=ledger, gates=gates))
    again = second.get_session(KEY).get_turn(turn.turn_id)
    await turn_is(again, TurnStatus.CANCELLED)

    assert len(await again.list_runs()) == 1
    assert ledger.count("tool") == 1


@pytest.mark.spec("SE-11")
@pytest.mark.parametrize("error", [OSError("not now"), GeneratorExit()], ids=repr)
async def test_a_settlement_that_fails_is_tried_again_later(
    hosts: Hosts, clock: ManualClock, error: BaseException
) -> None:
    gates = Gates()
    tries = []

    class Clumsy(ScriptedHarness):
        async def settle(self, context):
            tries.append(1)
            if len(tries) < 3:
                raise error
            return await super().settle(context)

    runtime = await hosts.open(Clumsy([local("t", gate="g"), final()], gates=gates))
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    await turn.cancel("c1")
    gates.open("g")
    view = await turn_is(turn, TurnStatus.WAITING)
    assert [(reason.kind, reason.until_ms) for reason in view.waiting_on] == [(WaitKind.RETRY, clock() + 1000)]
    clock.advance(1000)
    view = await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.waiting_on[0].until_ms == clock() + 2000)
    clock.advance(2000)
    await turn_is(turn, TurnStatus.CANCELLED)

    assert len(tries) == 3


@pytest.mark.case("C32")
async def test_a_tool_in_a_thread_holds_the_cancel_until_it_ends(hosts: Hosts) -> None:
    import threading

    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait(90)
        return "late"

    runtime = await hosts.open(
        ScriptedHarness({"a": [external("hands", "work"), final()], "": [final("next")]}),
        executors={"hands": FunctionExecutor({"work": work})},
    )
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    following = await session.submit("r2", "b")
    await asyncio.to_thread(begun.wait, 30)
    await turn.cancel("c1")
    await turn_is(turn, where=lambda view: view.cancel_requested)
    assert not (await turn.status()).status.terminal
    assert (await following.status()).status is TurnStatus.QUEUED
    go.set()
    await turn_is(turn, TurnStatus.CANCELLED)
    (tool,) = await turn.list_tools()

    assert (tool.state, tool.result["value"]) == (ExecutionState.COMPLETED, "late")
    assert str(await following.wait(SECONDS)) == "next"


@pytest.mark.case("C07")
@pytest.mark.parametrize("end", ["cancel", "pause", "close", "lost", "model", "tool"])
async def test_finished_steps_are_kept_however_it_ends(hosts: Hosts, clock: ManualClock, end: str) -> None:
    gates = Gates()
    script = [say("1"), say("2"), say("3"), say("4"), local("t", gate="g")]
    script += [Fail(kind="ValueError")] if end in ("model", "tool") else [final()]
    runtime = await hosts.open(ScriptedHarness(script, gates=gates), close_timeout=0.2)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    if end == "cancel":
        await turn.cancel("c1")
    elif end == "pause":
        await turn.pause("p1")
    elif end == "close":
        await runtime.close()
    elif end == "lost":
        kill(runtime)
        clock.advance(LEASE_MS + 1)
    gates.open("g")
    bare = await hosts.open()
    again = bare.get_session(KEY).get_turn(turn.turn_id)
    if end not in ("close", "lost"):
        await turn_is(again, TurnStatus.CANCELLED, TurnStatus.PAUSED, TurnStatus.FAILED)

    assert [message.text for message in await again.history()] == ["a", "1", "2", "3", "4"]
