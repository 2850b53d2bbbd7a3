"""The stories that are cut at every place: what the model says, what the tools do, and what must come of it.

Each is a small agent over a folder: its ledger counts what really happened, over all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter, RemoteFilesystem, ToolBinding
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import (
    Call,
    Do,
    Text,
    Thinking,
    rounds_so_far,
    scripted_model,
)
from tests.adapters.agentscope.stage import Stage

Point = Callable[[str], None]


class Scenario:
    """One story.

    Attributes:
        never: tools that may have happened once at most.
    """

    text = "go"
    never: tuple[str, ...] = ()

    def __init__(self, folder: Path, point: Point) -> None:
        self.folder = folder
        self.point = point
        self.ledger = EffectLedger(folder / "ledger")

    def adapter(self) -> AgentScopeAdapter:
        return AgentScopeAdapter.for_react(self.build, self.bindings())

    def bindings(self) -> dict[str, ToolBinding]:
        return {}

    def build(self, _binding: Any) -> AgentBuilder:
        raise NotImplementedError

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        raise NotImplementedError

    def model(self, **options: Any) -> Any:
        return scripted_model(self.script, ledger=self.ledger, **options)

    def evidence(self, name: str) -> ToolResult:
        """What a person finds out about a tool whose outcome was lost."""
        raise NotImplementedError

    async def controls(self, stage: Stage, turn_id: str) -> None:
        """What the user does by now."""

    def results(self) -> dict[str, Any]:
        return {}

    def tool(self, name: str, value: str) -> Any:
        async def run(x: int = 0) -> str:
            self.ledger.append(name)
            self.point(f"tool:{name}")
            return value

        run.__name__ = name
        run.__doc__ = name
        return run


class Plain(Scenario):
    """A thought, a text, one local tool that must not run twice, and the answer."""

    never = ("add",)

    def build(self, _binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool, Toolkit

        toolkit = Toolkit(tools=[FunctionTool(self.tool("add", "3"), permission=allow())])
        return AgentBuilder(name="a", system_prompt="sys", model=self.model(), toolkit=toolkit)

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if rounds_so_far(messages) == 0:
            return [
                Thinking("hm", "sig"),
                Text("let me add"),
                Do(lambda: self.point("stream:1")),
                Call("add", {"x": 1}, id="c1"),
            ]
        return [Text("final answer is 3"), Do(lambda: self.point("stream:2")), Text("!")]

    def evidence(self, name: str) -> ToolResult:
        return ToolResult(value="3")


class Outside(Scenario):
    """A concurrent round of an external, an asking and a reading tool; an external that asks; a steer at the end."""

    never = ("risky",)

    def bindings(self) -> dict[str, ToolBinding]:
        schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
        return {
            "ext": ToolBinding("ext", "hands", input_schema=schema, description="ext", permission="allow"),
            "extask": ToolBinding("extask", "hands", input_schema=schema, description="extask"),
        }

    def build(self, _binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool, Toolkit

        toolkit = Toolkit(
            tools=[
                FunctionTool(self.tool("risky", "risked")),
                FunctionTool(self.tool("look", "seen"), permission=allow(), is_read_only=True),
            ]
        )
        return AgentBuilder(name="a", system_prompt="sys", model=self.model(chunk_chars=50), toolkit=toolkit)

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        results = sum(block.type == "tool_result" for message in messages for block in message.content)
        if results == 0:
            return [
                Thinking("t"),
                "round1",
                Call("ext", {"x": 1}, id="e1"),
                Call("risky", {"x": 1}, id="r1"),
                Call("look", {"x": 1}, id="l1"),
            ]
        if results == 3:
            return ["round2", Call("extask", {"x": 2}, id="e2")]
        users = sum(message.role == "user" for message in messages)
        return [f"final after {results}; users={users}", Do(lambda: self.point("stream:3"))]

    def evidence(self, name: str) -> ToolResult:
        return ToolResult(value="risked")

    def results(self) -> dict[str, Any]:
        return {"ext": "R1", "extask": "R2"}

    async def controls(self, stage: Stage, turn_id: str) -> None:
        if self._steered or (await stage.view(turn_id)).status.terminal:
            return
        if any(message.id.endswith(".r3") for message in await stage.messages()):
            await stage.add("steer", turn_id, "steer", "late")
            self._steered = True

    _steered = False


class Structured(Scenario):
    """Tools that change the state only, a tool group, and a structured result with a rule of its own."""

    def build(self, _binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool, TaskCreate, ToolGroup, Toolkit
        from pydantic import BaseModel, field_validator

        class Odd(BaseModel):
            n: int

            @field_validator("n")
            @classmethod
            def odd(cls, n: int) -> int:
                if n % 2 == 0:
                    raise ValueError("must be odd")
                return n

        inside = FunctionTool(self.tool("intool", "x"), permission=allow(), is_read_only=True)
        toolkit = Toolkit(
            tools=[TaskCreate()], tool_groups=[ToolGroup("grp", description="g", tools=[inside], instructions="use it")]
        )
        return AgentBuilder(
            name="a", system_prompt="sys", model=self.model(chunk_chars=50), toolkit=toolkit, structured_schema=Odd
        )

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        results = sum(block.type == "tool_result" for message in messages for block in message.content)
        if results == 0:
            return [
                Call("TaskCreate", {"subject": "s", "description": "d"}, id="t1"),
                Call("reset_tools", {"grp": True}, id="g1"),
            ]
        if results == 2:
            return ["now inside", Call("intool", {}, id="x1")]
        if results == 3:
            return [Call("GenerateStructuredOutput", {"n": 4}, id="s1")]
        return [Call("GenerateStructuredOutput", {"n": 7}, id="s2")]


class OneByOne(Scenario):
    """Two tools that must not run together, in one round, twice: boundaries between them."""

    never = ("first", "second")

    def build(self, _binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool, Toolkit

        toolkit = Toolkit(
            tools=[
                FunctionTool(self.tool(name, f"{name} done"), permission=allow(), is_concurrency_safe=False)
                for name in ("first", "second")
            ]
        )
        return AgentBuilder(name="a", system_prompt="sys", model=self.model(chunk_chars=50), toolkit=toolkit)

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if rounds_so_far(messages) == 0:
            return [Call("first", {}, id="f1"), Call("second", {}, id="s1")]
        return "done"

    def evidence(self, name: str) -> ToolResult:
        return ToolResult(value=f"{name} done")


class Compressing(Scenario):
    """A conversation that is compressed, and its old part put aside, before a round."""

    text = "go " * 400

    def build(self, _binding: Any) -> AgentBuilder:
        from agentscope.agent import ContextConfig
        from agentscope.tool import FunctionTool, Toolkit

        toolkit = Toolkit(tools=[FunctionTool(self.tool("look", "seen " * 500), permission=allow(), is_read_only=True)])
        return AgentBuilder(
            name="a",
            system_prompt="sys",
            model=self.model(chunk_chars=500, context_size=2000),
            toolkit=toolkit,
            offloader=self,
            context_config=ContextConfig(trigger_ratio=0.5, reserve_ratio=0.1),
        )

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if any(tool["function"]["name"] == "generate_structured_output" for tool in tools or ()):
            names = ("task_overview", "current_state", "important_discoveries", "next_steps", "context_to_preserve")
            return Call("generate_structured_output", {name: name for name in names}, id=f"g{n}")
        summarised = any("summary of your previous work" in str(block) for m in messages for block in m.content)
        if not summarised and rounds_so_far(messages) == 0:
            return ["looking", Call("look", {}, id="l1")]
        return "done"

    # ---- as the agent's offloader ----

    async def offload_context(self, session_id: str, msgs: list[Any]) -> str:
        self.ledger.append("offload_context", messages=len(msgs))
        return f"/aside/{session_id}"

    async def offload_tool_result(self, session_id: str, tool_result: Any) -> str:
        self.ledger.append("offload_tool_result")
        return f"/aside/{tool_result.id}"

    async def offload_data_block(self, block: Any) -> Any:
        return block


class Files(Scenario):
    """AgentScope's own file tools on durable files: written, read, edited; one file is too large for a record."""

    path = "/workspace/src/a.txt"
    large = "x" * 70_000

    def build(self, binding: Any) -> AgentBuilder:
        files = RemoteFilesystem(binding.workspace(), ["workspace"])
        model = self.model(chunk_chars=20_000)
        return AgentBuilder(name="a", system_prompt="sys", model=model, workspace=files, state=bypass())

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        path = {"file_path": self.path}
        rounds: list[Any] = [
            Call("Write", {**path, "content": "one\ntwo\n"}, id="w1"),
            [
                Call("Read", path, id="r1"),
                # Made twice it would be another text.
                Call("Edit", {**path, "old_string": "one", "new_string": "one one"}, id="e1"),
                Call("Write", {"file_path": "/workspace/large.txt", "content": self.large}, id="w2"),
            ],
            ["done", Do(lambda: self.point("stream:1"))],
        ]
        return rounds[rounds_so_far(messages)]


class Notes(Scenario):
    """Middlewares that add a line to an entry wherever the agent passes, and a safe tool that does so too."""

    def build(self, binding: Any) -> AgentBuilder:
        from agentscope.middleware import MiddlewareBase
        from agentscope.tool import FunctionTool, Toolkit

        workspace = binding.workspace()

        async def add(place: str) -> str:
            item = await workspace.get(["notes"], place)
            lines: list[str] = [] if item is None else item.value
            await workspace.put(["notes"], place, [*lines, f"line {len(lines) + 1}"])
            self.point(f"wrote:{place}")
            return str(len(lines))

        class Notebook(MiddlewareBase):
            async def on_reply(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:  # type: ignore[override]
                async for event in next_handler(**input_kwargs):
                    yield event
                await add("after the reply")

            async def on_reasoning(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:  # type: ignore[override]
                await add("before a round")
                async for event in next_handler(**input_kwargs):
                    yield event
                await add("after a round")

            async def on_acting(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:  # type: ignore[override]
                async for item in next_handler(**input_kwargs):
                    yield item
                await add("after a tool")

        async def note() -> str:
            """note"""
            return await add("in a tool")

        toolkit = Toolkit(tools=[FunctionTool(note, permission=allow(), is_concurrency_safe=False)])
        return AgentBuilder(
            name="a", system_prompt="sys", model=self.model(chunk_chars=50), toolkit=toolkit, middlewares=[Notebook()]
        )

    def adapter(self) -> AgentScopeAdapter:
        return AgentScopeAdapter.for_react(self.build, replay_rules={"note": "safe"})

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        return [Call("note", {}, id=f"n{rounds_so_far(messages)}")] if rounds_so_far(messages) < 2 else "done"


class Aside(Compressing):
    """What a compressed conversation puts aside becomes a durable file."""

    def build(self, binding: Any) -> AgentBuilder:
        described = super().build(binding)
        described.arguments["offloader"] = None
        described.workspace = RemoteFilesystem(binding.workspace(), ["workspace"])
        return described


class Slot:
    """A state store of a program without a journal: a file for each session."""

    def __init__(self, folder: Path, point: Point = lambda _place: None) -> None:
        self._folder = folder
        self._point = point

    async def get(self, user_id: str, session_id: str, key: str = "agent_state") -> str | None:
        path = self._folder / f"{user_id}.{session_id}.{key}.json"
        return path.read_text() if path.exists() else None

    async def put(self, user_id: str, session_id: str, key: str, value: str) -> None:
        self._point("slot:before")
        _ = (self._folder / f"{user_id}.{session_id}.{key}.json").write_text(value)
        self._point("slot:after")


class Mirrored(Plain):
    """An agent whose settled states are copied to a state store."""

    def adapter(self) -> AgentScopeAdapter:
        return AgentScopeAdapter.for_react(self.build, state_store=Slot(self.folder, self.point))


class Careless(Scenario):
    """A tool that must not run twice writes a note before its effect."""

    never = ("effect",)

    def build(self, binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool, Toolkit

        workspace = binding.workspace()

        async def act() -> str:
            """act"""
            await workspace.put(["notes"], "act", "about to")
            self.point("noted")
            self.ledger.append("effect")
            self.point("effect")
            await workspace.put(["notes"], "act", "done")
            return "acted"

        toolkit = Toolkit(tools=[FunctionTool(act, permission=allow())])
        return AgentBuilder(name="a", system_prompt="sys", model=self.model(chunk_chars=50), toolkit=toolkit)

    def script(self, messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        return "done" if rounds_so_far(messages) else Call("act", {}, id="a1")

    def evidence(self, name: str) -> ToolResult:
        return ToolResult(value="acted, as somebody saw")


def bypass() -> Any:
    """A state in which nothing asks."""
    from agentscope.permission import PermissionContext, PermissionMode
    from agentscope.state import AgentState

    return AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))


def allow() -> Any:
    from agentscope.permission import PermissionBehavior, PermissionDecision

    return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")


SCENARIOS: dict[str, type[Scenario]] = {
    "plain": Plain,
    "outside": Outside,
    "structured": Structured,
    "one_by_one": OneByOne,
    "compressing": Compressing,
    "files": Files,
    "notes": Notes,
    "aside": Aside,
}

ALONE: dict[str, type[Scenario]] = {"mirrored": Mirrored, "careless": Careless}
"""Stories of single tests, which are not cut at every place."""
