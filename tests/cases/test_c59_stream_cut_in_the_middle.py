"""C59: a retry after half a stream doubled the text, glued two halves of arguments together, and ran the result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.contracts.status import ModelStatus, RunStatus
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import Answer, Call, Fail, Text, rounds_so_far, scripted_model
from tests.cases.test_c31_seen_but_not_stored import Watcher
from tests.runtime.conftest import KEY, Hosts, all_events, turn_is

pytest.importorskip("agentscope")

from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter

CHUNK = 4
SAID = "first I thought of deleting everything"
ARGUMENTS = '{"path": "/var/tmp/old"}'
WHOLE = '{"path": "/"}'
POLICY = RecoveryPolicy(max_retries=3, initial_backoff_ms=1)


def cut(error: Exception) -> dict[str, Answer]:
    """The first answer, cut after each chunk: in its text, in its arguments, and behind them before the end."""
    cuts: dict[str, Answer] = {"before anything": [Fail(error)]}
    for k in range(1, len(SAID) // CHUNK + 2):
        cuts[f"text {k}"] = [Text(SAID[: k * CHUNK]), Fail(error)]
    for k in range(1, len(WHOLE) // CHUNK + 2):
        cuts[f"arguments {k}"] = [Text(SAID), Call("delete", WHOLE[: k * CHUNK]), Fail(error)]
    cuts["before the end"] = [Text(SAID), Call("delete", WHOLE), Fail(error)]
    return cuts


@pytest.mark.case("C59")
@pytest.mark.spec("EV-09")
@pytest.mark.parametrize("place", cut(OSError()))
async def test_the_answer_is_that_of_one_attempt_alone(hosts: Hosts, place: str) -> None:
    ledger, live = EffectLedger(), LocalLiveEvents()
    broken = cut(ConnectionResetError("the stream was cut"))[place]

    def script(messages: list[Any], _tools: Any, _choice: Any, n: int) -> Answer:
        if n == 0:
            return broken
        if rounds_so_far(messages) == 0:
            return [Text("second thoughts"), Call("delete", ARGUMENTS)]
        return "done"

    model = scripted_model(script, chunk_chars=CHUNK)

    def make(_binding: Any) -> AgentBuilder:
        def delete(path: str) -> str:
            """Delete a folder.

            Args:
                path: the folder.
            """
            ledger.append("deleted", path=path)
            return "gone"

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
        return AgentBuilder(
            name="agent",
            system_prompt="Work.",
            model=model,
            toolkit=Toolkit(tools=[FunctionTool(delete, permission=allowed)]),
        )

    runtime = await hosts.open(AgentScopeAdapter.for_react(make), recovery_policy=POLICY, live_events=live)
    session = await runtime.create_session(KEY, "agent")
    watcher = Watcher()
    watching = asyncio.create_task(watcher.watch(session))
    turn = await session.submit("r1", "tidy up")
    await turn_is(turn, "COMPLETED")
    await watcher.ended()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

    assert [line["path"] for line in ledger.lines("deleted")] == ["/var/tmp/old"]
    said = [message for message in await turn.history() if message.role == "assistant"]
    assert [message.text for message in said] == ["second thoughts", "done"]
    assert [message.attempt for message in said] == [2, 1]
    assert watcher.facts == ["tidy up", "second thoughts", "done"]
    assert watcher.typing == {}
    abandoned = [event.data for event in await all_events(turn) if event.type == "message.abandoned"]
    assert [(one["messageId"], one["attempt"]) for one in abandoned] == [(said[0].id, 1)]
    assert watcher.withdrawn == [(said[0].id, 1)]
    runs = list(await turn.list_runs())
    assert [run.status for run in runs] == [RunStatus.FAILED, RunStatus.COMPLETED]
    requests = [one.status for run in runs for call in await turn.list_model_calls(run.run_id) for one in call.requests]
    assert requests == [ModelStatus.FAILED, ModelStatus.COMPLETED, ModelStatus.COMPLETED]
