"""Whose invocation it is: identity comes with each Run, and nothing of one Session reaches another."""

from __future__ import annotations

import asyncio
import shutil
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
from agentscope_durable.testing.scripted_model import Call, Stall, by_request, scripted_model
from tests.adapters.agentscope.agents import tool
from tests.adapters.agentscope.stage import opened

SECONDS = 90


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


@pytest.mark.spec("RT-01")
async def test_the_agent_keeps_its_loop_its_permissions_and_its_workspace(tmp_path: Path) -> None:
    """The same agent by itself and through a runtime: everything of its own is called alike, and says the same."""
    from agentscope.agent import Agent
    from agentscope.message import UserMsg
    from agentscope.middleware import MiddlewareBase
    from agentscope.permission import PermissionBehavior, PermissionRule
    from agentscope.state import AgentState
    from agentscope.tool import Toolkit
    from agentscope.workspace import LocalWorkspace

    class Recorder(MiddlewareBase):
        """An application's middleware: it sees each stage, rewrites the prompt and what a tool gives."""

        def __init__(self, seen: list[Any]) -> None:
            self.seen = seen

        async def on_reply(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            self.seen.append("reply")
            async for item in next_handler(**input_kwargs):
                yield item

        async def on_reasoning(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            self.seen.append("reasoning")
            async for item in next_handler(**input_kwargs):
                yield item

        async def on_model_call(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            self.seen.append(("model", [tool["function"]["name"] for tool in input_kwargs["tools"]]))
            return await next_handler(**input_kwargs)

        async def on_check_permission(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            decision = await next_handler(**input_kwargs)
            self.seen.append(("permission", input_kwargs["tool_call"].name, decision.behavior.value))
            return decision

        async def on_acting(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            self.seen.append(("acting", input_kwargs["tool_call"].name, input_kwargs["tool_call"].input))
            async for item in next_handler(**input_kwargs):
                yield item

        async def on_system_prompt(self, agent: Any, current_prompt: str) -> str:
            return f"{current_prompt} Mind the gap."

    def script(messages: Any, tools: Any, choice: Any, n: int) -> Any:
        prompts.append(messages[0].get_text_content())
        return [
            [Call("Write", {"file_path": str(folder / "note"), "content": "kept"}, id="c1")],
            [Call("erase", {"what": "everything"}, id="c2")],
            ["done"],
        ][n]

    def erase(what: str) -> str:
        """Erase something."""
        raise AssertionError("the rules deny it")

    async def parts(seen: list[Any]) -> tuple[dict[str, Any], Any]:
        folder.mkdir()
        workspace = LocalWorkspace(workdir=str(folder))
        await workspace.initialize()
        state = AgentState()
        for name, behavior in (("Write", PermissionBehavior.ALLOW), ("erase", PermissionBehavior.DENY)):
            rule = PermissionRule(tool_name=name, behavior=behavior, rule_content=None, source="test")
            rules = state.permission_context.allow_rules if name == "Write" else state.permission_context.deny_rules
            rules.setdefault(name, []).append(rule)
        arguments = {
            "name": "worker",
            "system_prompt": "Work.",
            "model": scripted_model(script),
            "toolkit": Toolkit(tools=[tool(erase, ask=True)]),
            "middlewares": [Recorder(seen)],
            "state": state,
        }
        return arguments, workspace

    told: dict[str, Any] = {}
    for how in ("by itself", "durable"):
        folder = tmp_path / "workspace"
        seen: list[Any] = []
        prompts: list[str] = []
        if how == "by itself":
            arguments, workspace = await parts(seen)
            arguments["toolkit"].tool_groups[0].tools.extend(await workspace.list_tools())
            agent: Any = Agent(**arguments, offloader=workspace)
            answer = (await agent.reply(UserMsg("user", "go"))).get_text_content()
            context = agent.state.context
        else:

            async def factory(_binding: Any, seen: list[Any] = seen) -> AgentBuilder:
                arguments, workspace = await parts(seen)
                return AgentBuilder(**arguments, workspace=workspace)

            stage = await opened(lambda: AgentScopeAdapter.for_harness(factory))
            turn = await stage.submit("r1", "go")
            view = await stage.play(turn)
            assert (view.status, view.runs) == ("COMPLETED", 1), (view, stage.errors)
            answer = (await stage.messages())[-1].text
            context = (await stage.state()).context
        blocks = [block for message in context for block in message.content]
        results = [(block.name, str(block.state)) for block in blocks if block.type == "tool_result"]
        told[how] = (seen, prompts, answer, results, (folder / "note").read_text())
        shutil.rmtree(folder)

    assert told["durable"] == told["by itself"]
    seen, prompts, answer, results, note = told["durable"]
    assert (answer, note, results) == ("done", "kept", [("Write", "success"), ("erase", "denied")])
    assert len(prompts) == 3 and all("Mind the gap" in prompt for prompt in prompts)
    assert ("permission", "erase", "deny") in seen and not [one for one in seen if one[:2] == ("acting", "erase")]
