"""The stories' scripts played by a real AgentScope agent through the real adapter, on the simulated loop.

A round of a script becomes an answer of the scripted model, and a call of it a call of one of the tools here. What a
script does besides that (fail, wait for a signal, tell an event of its own) is the scripted harness's and left out.
"""

from __future__ import annotations

import re
from typing import Any

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.testing import scripted_model as m
from agentscope_durable.testing.scripted_harness import Call, Round
from agentscope_durable.testing.simulated_loop import SimulatedEnvironment
from tests.simulation.schedule import ROUTE
from tests.simulation.workspaces import EFFECTS, name_of

LOCAL, SAFE, ASKING, HANDS, PERSON = "local", "safe", "asking", "hands", "person"
RULES = {LOCAL: ReplayRule.NEVER, ASKING: ReplayRule.NEVER, SAFE: ReplayRule.SAFE}
SCHEMA = {"type": "object", "properties": {"effect": {"type": "string"}, "seconds": {"type": "number"}}}


def adapter(world: Any, actor: str, gates: Any) -> AgentScopeAdapter:
    """What one host runs agents with."""
    environment = SimulatedEnvironment(world.loop, f"{world.plan.seed} agents {actor}")

    def describe(binding: Any) -> AgentBuilder:
        from agentscope.tool import Toolkit

        model = m.scripted_model(
            lambda messages, *_: answer(world, gates, messages),
            chunk_chars=None,
            context_size=10_000_000,
            delay=0.01,
            environment=environment,
        )
        return AgentBuilder(
            name="agent", system_prompt="Do it.", model=model, toolkit=Toolkit(tools=tools(world, binding.workspace()))
        )

    return AgentScopeAdapter.for_react(describe, {HANDS: ROUTE}, replay_rules=dict(RULES), environment=environment)


def tools(world: Any, workspace: Any) -> list[Any]:
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, ToolBase

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it may")

    async def work(effect: str, seconds: float = 0.0, how: str = "ok", edited: str = "") -> str:
        """Do it."""
        known = await workspace.get([EFFECTS], name_of(effect))
        await workspace.put([EFFECTS], name_of(effect), 1 if known is None else known.value + 1)
        return await world.effects.work(effect, seconds, how, **({"edited": edited} if edited else {}))

    def local(name: str, permission: Any) -> Any:
        return FunctionTool(work, name=name, permission=permission)

    class Elsewhere(ToolBase):
        is_external_tool = True
        is_concurrency_safe = True
        is_read_only = False
        input_schema = SCHEMA
        description = "Do it elsewhere."

        async def check_permissions(self, tool_input: Any, context: Any) -> Any:
            return allowed

    made = [local(LOCAL, allowed), local(SAFE, allowed), local(ASKING, None)]
    for name in (HANDS, PERSON):
        tool = Elsewhere()
        tool.name = name
        made.append(tool)
    return made


def answer(world: Any, gates: Any, messages: list[Any]) -> list[Any]:
    """What the model says now: its round of the script of the Turn that the last task names."""
    said = [(at, block) for at, message in enumerate(messages) for block in message.content]
    # An input that comes while it works is a hint within its own message.
    texts = [
        (at, text)
        for at, block in said
        for text in ([block.text] if messages[at].role == "user" and block.type == "text" else hinted(block))
    ]
    at, name = [(at, text) for at, text in texts if text in world.plan.scripts][-1]
    # An answer without a call is this agent's last.
    rounds = [one for one in world.plan.scripts[name] if isinstance(one, Round) and (one.calls or one.last)]
    number = min(m.rounds_so_far(messages[at:]), len(rounds) - 1)
    one = rounds[number]
    text = one.text
    if one.last:
        text = text.format(
            inputs=", ".join(text for place, text in texts if place > at),
            results=", ".join(result_of(block) for place, block in said if place > at and block.type == "tool_result"),
            context=", ".join(text for _, text in texts),
        )
    items: list[Any] = [text[: len(text) // 2], text[len(text) // 2 :]] if text else []
    if one.gate:
        items.insert(len(items) // 2, m.Do(lambda: gates.passed(one.gate)))
    return [*items, *(called(call) for call in one.calls)] or ["nothing"]


def hinted(block: Any) -> list[str]:
    if block.type != "hint":
        return []
    hint = block.hint if isinstance(block.hint, str) else "".join(getattr(part, "text", "") for part in block.hint)
    return re.findall(r"(?:steer|inject) r\d+\.*", hint)


def result_of(block: Any) -> str:
    return block.output if isinstance(block.output, str) else "".join(part.text for part in block.output)


def called(call: Call) -> m.Call:
    name = {"external": HANDS, "approval": ASKING, "manual": PERSON}.get(call.kind)
    name = name or (SAFE if call.rule is ReplayRule.SAFE else LOCAL)
    return m.Call(name, call.arguments, id=f"call {call.arguments['effect'].replace('.', '-')[-40:]}")
