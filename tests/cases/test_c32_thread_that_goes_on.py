"""C32: a thread cannot be stopped, so the code went on after "cancelled"."""

from __future__ import annotations

import threading

import pytest

from agentscope_durable.contracts.status import ExecutionState, TurnStatus
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.testing.scripted_harness import ScriptedHarness, external, final
from tests.runtime.conftest import KEY, Hosts, all_events, turn_is, until


@pytest.mark.case("C32")
@pytest.mark.spec("CT-08")
async def test_a_turn_is_not_cancelled_before_its_thread_has_ended(hosts: Hosts) -> None:
    entered, leave = threading.Event(), threading.Event()

    def deaf() -> str:
        entered.set()
        leave.wait(90)
        return "written all the same"

    harness = ScriptedHarness({"T1": [external("hands", "deaf"), final()], "": [final("next")]})
    runtime = await hosts.open(harness, executors={"hands": FunctionExecutor({"deaf": deaf})})
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "T1")
    behind = await session.submit("r2", "T2")
    await until(entered.is_set)

    await turn.cancel("stop")
    asked = await turn_is(turn, where=lambda view: view.cancel_requested)
    events = [event.type for event in await all_events(turn)]
    assert "tool.cancel_requested" in events
    try:
        for _ in range(10):
            # Every look in between says the same: asked to stop, and not stopped.
            view = await turn.status()
            assert (view.status.terminal, view.cancel_requested) == (False, True)
            # While a host looks whether it can be settled, it waits for that host alone.
            assert view.waiting_on or view.lease is not None, "it says what it waits for"
            assert (await behind.status()).status is TurnStatus.QUEUED
            await runtime.start()
    finally:
        leave.set()
    assert asked.status in (TurnStatus.WAITING, TurnStatus.RUNNING)
    await turn_is(turn, "CANCELLED")
    await turn_is(behind, "COMPLETED")

    (call,) = await turn.list_tools()
    assert (call.state, call.result["value"]) == (ExecutionState.COMPLETED, "written all the same")
    order = [
        (event.type, event.turn_id)
        for event in await all_events(session)
        if event.type in ("tool.completed", "run.started")
    ]
    assert order.index(("tool.completed", turn.turn_id)) < order.index(("run.started", behind.turn_id))
