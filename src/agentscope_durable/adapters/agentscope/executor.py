"""AgentScope tools performed behind a route: the same tool, on another host.

Rule 1: what the tool gave is handed over as it is: content, metadata, state (TB-10). What cannot be said for certain
(an exception, nothing at all) is Unknown and never Failed (TB-12); a tool's own word that it failed is a result.
Rule 2: refused before the tool was entered is definite: a call of another binding, arguments that do not fit (TB-07,
TB-15). A tool that was taken out of the toolkit is refused too, and no other is called in its place (TB-08).
Rule 3: a function dies with its process and answers no questions, so neither query nor cancel is promised (TB-14).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any, Final

from agentscope_durable.adapters.agentscope.codec import result_of_response
from agentscope_durable.adapters.agentscope.context import in_tool
from agentscope_durable.adapters.agentscope.library import require
from agentscope_durable.adapters.agentscope.tools import (
    Bindings,
    ToolBinding,
    ToolOutcome,
    as_bindings,
    is_definite,
    noting,
    watch_toolkit,
)
from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.spi.executor import (
    ExecutionRequest,
    ExecutorCapabilities,
    Outcome,
    Succeeded,
    Unknown,
)
from agentscope_durable.spi.harness import RunStepOrigin
from agentscope_durable.spi.in_process import InProcessCalls, raised

__all__ = ["AgentScopeToolExecutor"]

STATES_MAX: Final = 256
"""Agent states kept for tools that remember files they have read, one per Thread."""


class AgentScopeToolExecutor:
    """An `Executor` for the tools of a toolkit.

    Args:
        toolkit: where the tools are registered. It stays unchanged while this is in use.
        bindings: the catalogue shared with the adapter (TB-01).
        timeout: seconds after which a call is given up, its outcome unknown; None: no limit.
    """

    def __init__(
        self,
        toolkit: Any,
        bindings: Bindings,
        timeout: float | None = None,
    ) -> None:
        _ = require()
        self._toolkit = toolkit
        self._bindings = as_bindings(bindings)
        self._timeout = timeout
        self._states: OrderedDict[tuple[str, str, str], Any] = OrderedDict()
        self._calls = InProcessCalls(self._perform)
        watch_toolkit(toolkit)

    @staticmethod
    def binding(tool: Any, version: str, route: str, target: dict[str, Any] | None = None) -> ToolBinding:
        """A binding with the schema of a native tool, whose permission check the agent's host keeps (TB-04).

        Args:
            tool: an AgentScope tool.
            version: of its definition.
            route: executor route that performs it.
            target: private data of the host that performs it; references to credentials, never credentials (TB-03).
        """
        return ToolBinding(
            name=str(tool.name),
            route=route,
            version=version,
            description=str(tool.description),
            input_schema=tool.input_schema,
            target=target,
            concurrent=bool(tool.is_concurrency_safe),
            read_only=bool(tool.is_read_only),
            metadata_schema=getattr(tool, "metadata_schema", None),
            tool=tool,
        )

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=False, cancel=False, output=False)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        return await self._calls.execute(request)

    async def query(self, request: ExecutionRequest) -> Outcome:
        return self._calls.query(request)

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        """Say how it stands; a function is not stopped (TB-14)."""
        return self._calls.query(request)

    async def _perform(self, request: ExecutionRequest) -> Outcome:
        refusal = await self._refusal(request)
        if refusal is not None:
            return Succeeded(value=refusal, error=True)
        try:
            async with asyncio.timeout(self._timeout):
                return await self._call(request)
        except TimeoutError:
            return Unknown(f"the tool did not end within {self._timeout} s")

    async def _refusal(self, request: ExecutionRequest) -> str | None:
        """Why the tool is not entered; None when it may be."""
        bound = self._bindings.get(request.name)
        if bound is None or (bound.route and bound.route != request.route):
            return f"there is no tool {request.name!r} bound to route {request.route!r} here"
        tool = await self._toolkit.get_tool(request.name)
        if tool is None:
            return f"the tool {request.name!r} is not registered here any more"
        if getattr(tool, "is_external_tool", False):
            return f"the tool {request.name!r} is registered here by its schema only"
        try:
            arguments = durable_json.loads(request.arguments or "{}", root="object")
        except InvalidRequest as error:
            return f"the arguments of {request.name!r} are not valid: {error.what}"
        return _schema_error(request.name, arguments, bound.input_schema or tool.input_schema)

    async def _call(self, request: ExecutionRequest) -> Outcome:
        from agentscope.message import ToolCallBlock
        from agentscope.tool import ToolResponse

        block = ToolCallBlock(id=request.call_id, name=request.name, input=request.arguments or "{}")
        origin = RunStepOrigin(request.origin, request.turn_id, request.call_id)
        noted, held, chunks = ToolOutcome(), None, 0
        with in_tool(origin), noting(noted):
            async for item in self._toolkit.call_tool(block, self._state(request)):
                if isinstance(item, ToolResponse):
                    held = item
                else:
                    chunks += 1
        if isinstance(noted.raised, asyncio.CancelledError):
            raise noted.raised
        if noted.raised is not None and not is_definite(noted.raised):
            return raised(noted.raised)
        if held is None or not chunks:
            return Unknown("the tool returned nothing")
        result = result_of_response(held)
        if result.state == "interrupted":
            return Unknown("the tool was interrupted")
        return Succeeded(
            value=result.value,
            error=result.state != "success",
            content=result.content,
            metadata=result.metadata,
            state=result.state,
        )

    def _state(self, request: ExecutionRequest) -> Any:
        """What tools of this Thread remember of files they have read."""
        from agentscope.state import AgentState

        key = (request.session.namespace, request.session.session_id, request.thread_id)
        state = self._states.pop(key, None) or AgentState(session_id=request.session.session_id)
        self._states[key] = state
        while len(self._states) > STATES_MAX:
            _ = self._states.popitem(last=False)
        return state


def _schema_error(name: str, arguments: Any, schema: Any) -> str | None:
    import jsonschema

    try:
        jsonschema.validate(arguments, schema)
    except jsonschema.ValidationError as error:
        return f"the arguments of {name!r} are not valid: {error.message} (at {error.json_path})"
    return None
