"""C28: a recovery that always throws was tried for a day, or for ever when its age was unlimited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.status import ReplayRule, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.testing.scripted_harness import Action, ScriptedHarness, final, local, say
from agentscope_durable.testing.scripted_model import Answer, rounds_so_far, scripted_model
from agentscope_durable.testing.scripted_model import Call as ToolCall
from tests.cases.programs import job_of, opening
from tests.census.forks import ForkServer
from tests.runtime.conftest import KEY, turn_is

SCRIPTS: dict[str, list[Action]] = {
    "model": [say("never heard"), final()],
    "tool": [local("crash", rule=ReplayRule.SAFE), final()],
    "harmless": [final("fine")],
}
TAKEOVERS_MAX = 5


def harness_of(kind: str, crash: Callable[[], object]) -> HarnessAdapter:
    """An agent whose one tool does what it is told to, whenever it is asked to work on `tool`."""
    if kind == "scripted":
        return ScriptedHarness(SCRIPTS, tools={"crash": crash})
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, Toolkit

    from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter

    def read() -> str:
        """Read something: safe to run again."""
        crash()
        return "ok"

    def script(messages: list[Any], _tools: Any, _choice: Any, _n: int) -> Answer:
        works = any(message.get_text_content() == "tool" for message in messages)
        return [ToolCall("read")] if works and rounds_so_far(messages) == 0 else "fine"

    def make(_binding: Any) -> AgentBuilder:
        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
        return AgentBuilder(
            name="agent",
            system_prompt="Work.",
            model=scripted_model(script),
            toolkit=Toolkit(tools=[FunctionTool(read, is_read_only=True, permission=allowed)]),
        )

    return AgentScopeAdapter.for_react(make)


@pytest.mark.case("C28")
@pytest.mark.parametrize("poison", ["model", "tool"])
@pytest.mark.parametrize(
    ("kind", "backend"), [("scripted", "sqlite"), ("agentscope", "sqlite"), ("scripted", "postgres")]
)
async def test_a_turn_that_kills_every_process_is_parked_for_a_person(
    forks: ForkServer, tmp_path: Path, kind: str, backend: str, poison: str
) -> None:
    job = {**job_of(backend, tmp_path), "kind": kind, "poison": poison}
    # The neighbour asks the model too, and before.
    kill_at = "model.request.before:2" if poison == "model" else ""
    deaths, beside = 0, []
    for number in range(TAKEOVERS_MAX + 4):
        ended = forks.run("tests.cases.programs:poison", {**job, "number": number}, failpoint=kill_at)
        assert ended.killed or ended.code == 0, ended.output
        beside.append(json.loads(ended.output.splitlines()[0]))
        if not ended.killed:
            break
        deaths += 1
    assert deaths == TAKEOVERS_MAX + 1
    # Whether the poison was in hand, as all but the last time, or parked: who is beside it is served.
    assert beside == [{"answer": "fine", "in_hand": number < deaths} for number in range(deaths + 1)]

    async with opening(job) as store, DurableRuntime(backend=store) as api:
        session = api.get_session(KEY)
        (view,) = await session.list_turns()
        assert view.status is TurnStatus.WAITING
        assert [one.runs for one in await session.get_thread("neighbour").list_turns()] == [1] * len(beside)
        (waiting,) = view.waiting_on
        assert waiting.kind is WaitKind.OPERATOR
        turn = session.get_turn(view.turn_id)
        await turn.pause("pause")
        await turn.resume("resume", (await turn.status()).revision)
        assert [one.kind for one in (await turn.status()).waiting_on] == [WaitKind.OPERATOR]

        # Somebody has looked, and another program serves it now.
        await HostOperations(store).release(turn, request_id="released")
    mended = harness_of(kind, lambda: "ok")
    async with opening(job) as store:
        runtime = DurableRuntime(backend=store, harnesses=[Harness("agent", "v1", mended)], poll_interval=0.05)
        async with runtime:
            await runtime.start()
            await turn_is(runtime.get_session(KEY).get_turn(view.turn_id), "COMPLETED")
