"""C08: what a pause withheld was never written after the approval; a result without its call became permanent."""

from __future__ import annotations

from typing import Any

import pytest

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.testing.census import replay_agrees, transcript_valid
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.scripted_model import Call, by_round, scripted_model
from tests.runtime.conftest import KEY, Hosts, all_events, turn_is

pytest.importorskip("agentscope")

from tests.census.agentscope_world import provider_form, stored_contexts


def agent(effects: list[str]) -> Any:
    """Three calls in one answer; the gated one stands in the middle."""
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, Toolkit

    from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")

    def tool(name: str) -> Any:
        def act() -> str:
            effects.append(name)
            return f"{name} done"

        act.__name__, act.__doc__ = name, f"Do {name}."
        return act

    def make(_binding: Any) -> Any:
        calls = [Call("first"), Call("gated"), Call("last")]
        return AgentBuilder(
            name="agent",
            system_prompt="Work.",
            model=scripted_model(by_round(["On it.", *calls], "done")),
            toolkit=Toolkit(
                tools=[
                    FunctionTool(tool("first"), permission=allowed, is_concurrency_safe=False),
                    FunctionTool(tool("gated"), is_concurrency_safe=False),
                    FunctionTool(tool("last"), permission=allowed, is_concurrency_safe=False),
                ]
            ),
        )

    return AgentScopeAdapter.for_react(make)


@pytest.mark.case("C08")
@pytest.mark.parametrize("fault", ["fail", "lose_answer"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
async def test_a_write_that_fails_after_the_answer_never_parts_a_call_from_its_result(
    hosts: Hosts, fault: str, nth: int
) -> None:
    faulty = FaultyRecordStore(hosts.backend.records)
    backend = TransactionalSessionBackend(faulty, wakeups=LocalWakeups())
    effects: list[str] = []
    runtime = await hosts.open(agent(effects), backend=backend)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await turn_is(turn, "WAITING", where=lambda view: any(one.kind == "approval" for one in view.waiting_on))
    (question,) = await turn.pending_interactions()

    await turn.respond("yes", question.interaction_id, True)
    getattr(faulty, fault)("transact", nth=nth, times=2)
    await turn_is(turn, "COMPLETED")

    assert sorted(effects) == ["first", "gated", "last"]
    # Whoever read in between saw each result behind its call...
    told: dict[str, list[str]] = {}
    for event in await all_events(turn):
        if event.type.startswith("tool."):
            told.setdefault(event.data["callId"], []).append(event.type)
    assert all(story[0] == "tool.requested" and story.count("tool.completed") == 1 for story in told.values())
    assert await replay_agrees(backend, KEY) == []
    # ... and so did whoever restored the agent at any position.
    contexts = await stored_contexts(hosts.backend, KEY, "main")
    assert len(contexts) > 5
    for context in contexts:
        dangling = [wrong for wrong in transcript_valid(provider_form(context)) if "ends without" not in wrong]
        assert dangling == []
