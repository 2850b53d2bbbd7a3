"""Whose invocation it is: identity comes with each Run, and nothing of one Session reaches another."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable import DurableRuntime, Harness, SessionKey
from agentscope_durable.adapters.agentscope import STATE_VERSION, AgentBuilder, AgentScopeAdapter
from agentscope_durable.adapters.agentscope.binding import Binding, RuntimeContext
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import records
from agentscope_durable.contracts.errors import Misuse
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.scripted_model import Stall, by_request, scripted_model

SECONDS = 60


def backend() -> TransactionalSessionBackend:
    return TransactionalSessionBackend(MemoryRecordStore(), wakeups=LocalWakeups())


@pytest.mark.spec("RT-26", "AS-05")
async def test_two_users_at_once_are_never_mixed(tmp_path: Path) -> None:
    seen: list[tuple[str, str, str]] = []
    together = asyncio.Event()

    def make_agent(binding: Binding) -> AgentBuilder:
        seen.append((binding.context.user_id, binding.context.session_id, binding.context.thread_id))
        if len(seen) == 2:
            together.set()
        reply = [Stall(together), f"hello {binding.context.user_id}"]
        return AgentBuilder(
            name="assistant",
            system_prompt=f"You speak with {binding.context.user_id}.",
            model=scripted_model(by_request(reply), ledger=tmp_path / binding.context.user_id),
        )

    adapter = AgentScopeAdapter.for_react(make_agent)
    async with DurableRuntime(backend=backend(), harnesses=[Harness("assistant", "v1", adapter)]) as runtime:
        await runtime.start()
        keys = [SessionKey("ada", "same-id"), SessionKey("bob", "same-id")]
        sessions = [await runtime.create_session(key, "assistant") for key in keys]
        answers = await asyncio.gather(*(session.call("r1", "who am I", timeout=SECONDS) for session in sessions))

    assert sorted(seen) == [("ada", "same-id", "main"), ("bob", "same-id", "main")]
    assert [answer.text for answer in answers] == ["hello ada", "hello bob"]


@pytest.mark.spec("AS-05")
def test_a_binding_shows_definition_identity_and_workspace_and_no_storage() -> None:
    context = RuntimeContext(user_id="app", session_id="s", thread_id="main", turn_id="t", run_id="t.1")
    binding = Binding(records.Binding("assistant", "v1", STATE_VERSION), context)

    public = {name for name in dir(binding) if not name.startswith("_")}

    assert public == {"context", "definition", "workspace"}
    with pytest.raises(Misuse, match="belongs to no run"):
        binding.workspace()


@pytest.mark.spec("RT-41")
async def test_sessions_share_no_state_unless_the_application_shares_it(tmp_path: Path) -> None:
    """What the factory makes is each Run's own; the second Session's model sees nothing of the first."""
    prompts: list[list[str]] = []

    def script(messages: Any, tools: Any, choice: Any, number: int) -> list[Any]:
        prompts.append([message.get_text_content() or "" for message in messages])
        return ["noted"]

    def make_agent(binding: Binding) -> AgentBuilder:
        model = scripted_model(script, ledger=tmp_path / "ledger")
        return AgentBuilder(name="assistant", system_prompt="Be brief.", model=model)

    adapter = AgentScopeAdapter.for_react(make_agent)
    async with DurableRuntime(backend=backend(), harnesses=[Harness("assistant", "v1", adapter)]) as runtime:
        await runtime.start()
        for name in ("first", "second"):
            session = await runtime.create_session(SessionKey("app", name), "assistant")
            await session.call("r1", f"the secret of {name}", timeout=SECONDS)

    assert "the secret of first" in "".join(prompts[0])
    assert "the secret of first" not in "".join(prompts[1])


@pytest.mark.spec("RT-03")
async def test_the_same_agent_still_answers_without_any_of_this(tmp_path: Path) -> None:
    from agentscope.agent import Agent
    from agentscope.message import UserMsg

    model = scripted_model(by_request(["hello yourself"]), ledger=tmp_path / "ledger")
    described = AgentBuilder(name="assistant", system_prompt="Be brief.", model=model)

    agent: Any = Agent(**described.arguments)
    answer = await agent.reply(UserMsg("user", "hello"))

    assert answer.get_text_content() == "hello yourself"
