"""C03: a side effect was reported as failed, the agent worked around it, and it landed an hour and a half later."""

from __future__ import annotations

import msgspec
import pytest

from agentscope_durable.contracts.commands import RecordOutcome
from agentscope_durable.contracts.errors import InvalidTransition
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import Audience, ExecutionState, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import (
    ExecutionRequest,
    ExecutorCapabilities,
    Outcome,
    Succeeded,
    Unknown,
)
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import ScriptedHarness, external, final
from tests.runtime.conftest import KEY, Hosts, all_events, refused, turn_is, until

QUARTER_MS = 15 * 60_000


class Silent:
    """The request was sent, the connection was reset, and for two hours nobody can say what became of it."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.asked = 0
        self.outcome: Outcome = Unknown("no answer yet")

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=True)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        self.started.append(request.execution_id)
        raise ConnectionResetError("after the request was sent")

    async def query(self, request: ExecutionRequest) -> Outcome:
        assert request.execution_id in self.started
        self.asked += 1
        return self.outcome

    cancel = query


@pytest.mark.case("C03")
@pytest.mark.spec("UN-12")
async def test_a_lost_answer_stays_unknown_until_the_true_one_comes(hosts: Hosts, clock: ManualClock) -> None:
    executor = Silent()
    harness = ScriptedHarness([external("hands", "wire"), final("{results}")])
    runtime = await hosts.open(harness, executors={"hands": executor})
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay the supplier")
    await turn_is(turn, "WAITING", where=lambda view: view.waiting_on[0].kind is WaitKind.TOOL_UNKNOWN)

    async def asked_again() -> None:
        """Let time pass until somebody asks: from when the next wait counts, once it is asked, nothing announces."""
        asked = executor.asked

        def passes() -> bool:
            if executor.asked == asked:
                clock.advance(QUARTER_MS)
            return executor.asked > asked

        await until(passes)

    for _ in range(8):
        await asked_again()
        (call,) = await turn.list_tools()
        assert (call.state, (await turn.status()).status) == (ExecutionState.UNKNOWN, TurnStatus.WAITING)
    executor.outcome = Succeeded(value="paid")
    await asked_again()
    await turn_is(turn, "COMPLETED")

    assert str(await turn.result()) == "paid"
    assert len(executor.started) == 1
    told = [event.type for event in await all_events(turn) if event.type.startswith("tool.")]
    assert told == ["tool.requested", "tool.started", "tool.unknown", "tool.completed", "tool.applied"]


@pytest.mark.case("C03")
async def test_an_outcome_after_the_reconciliation_is_kept_and_changes_nothing(hosts: Hosts) -> None:
    executor = Silent()
    harness = ScriptedHarness([external("hands", "wire"), final("{results}")])
    runtime = await hosts.open(harness, executors={"hands": executor})
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay the supplier")
    view = await turn_is(turn, "WAITING", where=lambda view: view.waiting_on[0].kind is WaitKind.TOOL_UNKNOWN)
    call_id = view.waiting_on[0].call_id
    assert call_id is not None
    operations = HostOperations(hosts.backend)
    settled = await operations.reconcile_tool(
        turn, call_id, request_id="look-1", result=Succeeded(value="paid, says the bank"), evidence_ref="statement 7"
    )
    await turn_is(turn, "COMPLETED")
    events = await all_events(turn)

    content = await hosts.backend.put_body(KEY, msgspec.json.encode(ToolResult(value="paid twice?")))
    late = await hosts.backend.execute(
        RecordOutcome(
            session=KEY,
            thread_id="main",
            turn_id=turn.turn_id,
            call_id=call_id,
            execution_id=executor.started[0],
            state=ExecutionState.COMPLETED,
            result=content,
        ),
        audience=Audience.HOST,
    )

    assert not late.settled
    assert await all_events(turn) == events
    assert str(await turn.result()) == "paid, says the bank"
    again = await operations.reconcile_tool(
        turn, call_id, request_id="look-1", result=Succeeded(value="paid, says the bank"), evidence_ref="statement 7"
    )
    assert again == settled
    await refused(
        operations.reconcile_tool(
            turn, call_id, request_id="look-2", result=Succeeded(value="no"), evidence_ref="statement 8"
        ),
        InvalidTransition,
    )
