"""C13: exceptions that mean something to the agent were taken for failures, and a tool with an effect was run again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentscope_durable.contracts.status import ExecutionState, RunStatus, WaitKind
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import Succeeded, ToolError
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import Call, by_round, scripted_model
from tests.runtime.conftest import KEY, Hosts, turn_is

pytest.importorskip("agentscope")

from agentscope.exception import (
    AgentOrientedException,
    DeveloperOrientedException,
    ToolGroupInactiveError,
    ToolInterruptedError,
    ToolJSONDecodeError,
    ToolNotFoundError,
)
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter

ANSWER = "I have seen what became of it."
POLICY = RecoveryPolicy(max_retries=5, initial_backoff_ms=1)
SAID: dict[str, Callable[[], BaseException]] = {
    "ToolError": lambda: ToolError("the account is closed"),
    "AgentOrientedException": lambda: AgentOrientedException("the account is closed"),
    "ToolNotFoundError": lambda: ToolNotFoundError("the account is closed"),
    "ToolInterruptedError": lambda: ToolInterruptedError("the account is closed"),
    "ToolJSONDecodeError": lambda: ToolJSONDecodeError("the account is closed"),
    "ToolGroupInactiveError": lambda: ToolGroupInactiveError("the account is closed"),
}
"""What a tool says to the agent: a definite failure, and a value."""
ESCAPED: dict[str, Callable[[], BaseException]] = {
    "DeveloperOrientedException": lambda: DeveloperOrientedException("a defect"),
    "OSError": lambda: OSError("connection reset"),
    "ExceptionGroup": lambda: ExceptionGroup("several", [ValueError("one"), OSError("two")]),
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(2),
}
"""What came out of a tool and may have come after its effect: nobody knows."""


def adapter(ledger: EffectLedger, error: Callable[[], BaseException]) -> AgentScopeAdapter:
    def make(_binding: Any) -> AgentBuilder:
        async def pay() -> str:
            """Pay."""
            ledger.append("paid")
            raise error()

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
        return AgentBuilder(
            name="agent",
            system_prompt="Work.",
            model=scripted_model(by_round([Call("pay")], ANSWER)),
            toolkit=Toolkit(tools=[FunctionTool(pay, permission=allowed)]),
        )

    return AgentScopeAdapter.for_react(make)


@pytest.mark.case("C13")
@pytest.mark.spec("RC-15")
@pytest.mark.parametrize("name", SAID)
async def test_what_a_tool_says_to_the_agent_is_a_value(hosts: Hosts, name: str) -> None:
    ledger = EffectLedger()
    runtime = await hosts.open(adapter(ledger, SAID[name]), recovery_policy=POLICY)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay")
    view = await turn_is(turn, "COMPLETED")

    assert ledger.count("paid") == 1
    (call,) = await turn.list_tools()
    assert (call.state, call.result["state"]) == (ExecutionState.COMPLETED, "error")
    assert "the account is closed" in str(call.result)
    assert view.recovery is None
    assert [run.status for run in await turn.list_runs()] == [RunStatus.COMPLETED]
    assert str(await turn.result()) == ANSWER


@pytest.mark.case("C13")
@pytest.mark.spec("RC-15")
@pytest.mark.parametrize("name", ESCAPED)
async def test_what_escapes_from_a_tool_is_unknown_and_is_not_run_again(hosts: Hosts, name: str) -> None:
    ledger = EffectLedger()
    runtime = await hosts.open(adapter(ledger, ESCAPED[name]), recovery_policy=POLICY)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "pay")
    view = await turn_is(turn, "WAITING", where=lambda view: view.waiting_on[0].kind is WaitKind.TOOL_UNKNOWN)
    assert view.recovery is None

    call_id = view.waiting_on[0].call_id
    assert call_id is not None
    await HostOperations(hosts.backend).reconcile_tool(
        turn, call_id, request_id="looked", result=Succeeded(value="paid, says the bank"), evidence_ref="statement 7"
    )
    view = await turn_is(turn, "COMPLETED")
    assert ledger.count("paid") == 1
    assert view.recovery is None
    assert str(await turn.result()) == ANSWER
