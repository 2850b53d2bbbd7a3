"""Small agents for stories: what the model says, and tools that count what they did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import Answer, Script, by_round, scripted_model
from tests.adapters.agentscope.stage import Stage, opened


def allow() -> Any:
    from agentscope.permission import PermissionBehavior, PermissionDecision

    return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")


def deny() -> Any:
    from agentscope.permission import PermissionBehavior, PermissionDecision

    return PermissionDecision(behavior=PermissionBehavior.DENY, message="never")


def tool(function: Callable[..., Any], *, ask: bool = False, permission: Any = None, **options: Any) -> Any:
    """A local tool that is allowed unless it asks."""
    from agentscope.tool import FunctionTool

    function.__doc__ = function.__doc__ or function.__name__
    decision = None if ask else permission or allow()
    return FunctionTool(function, permission=decision, **options)


def external(name: str, **options: Any) -> Any:
    """A native external tool: without a binding a person gives its result."""
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import ToolBase

    class External(ToolBase):
        is_external_tool = True
        is_concurrency_safe = True
        is_read_only = False
        input_schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        description = name

        async def check_permissions(self, tool_input: Any, context: Any) -> Any:
            behavior = PermissionBehavior.ASK if options.get("ask") else PermissionBehavior.ALLOW
            return PermissionDecision(behavior=behavior, message="x")

    made = External()
    made.name = name
    made.metadata_schema = options.get("metadata_schema")
    return made


class Agents:
    """Describes one agent, again for each Run.

    Args:
        script: what the model answers: a script, or answers by round of the conversation.
        tools: makes the tools; called for each Run.
        arguments: further arguments of AgentBuilder; a callable is called for each Run.
    """

    def __init__(
        self,
        folder: Path,
        script: Script | Sequence[Answer],
        *,
        tools: Callable[[], list[Any]] = list,
        model: Mapping[str, Any] | None = None,
        bindings: Any = (),
        adapter: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.ledger = EffectLedger(folder / "ledger")
        self.script = script if callable(script) else by_round(*script)
        self.tools = tools
        self.model_options = dict(model or {})
        self.bindings = bindings
        self.adapter_options = dict(adapter or {})
        self.arguments = arguments
        self.built = 0

    def describe(self, _binding: Any) -> AgentBuilder:
        from agentscope.tool import Toolkit

        self.built += 1
        arguments = {
            name: value() if callable(value) and not isinstance(value, type) else value
            for name, value in self.arguments.items()
        }
        arguments.setdefault("toolkit", Toolkit(tools=self.tools()))
        arguments.setdefault("model", self.model())
        return AgentBuilder(name="a", system_prompt="sys", **arguments)

    def model(self, **options: Any) -> Any:
        return scripted_model(self.script, ledger=self.ledger, **{**self.model_options, **options})

    def adapter(self) -> AgentScopeAdapter:
        return AgentScopeAdapter.for_react(self.describe, self.bindings, **self.adapter_options)

    async def stage(self, **options: Any) -> Stage:
        return await opened(self.adapter, **options)

    @property
    def requests(self) -> int:
        return self.ledger.count("model/request")

    def did(self, name: str) -> int:
        return self.ledger.count(name)
