"""Python functions as an executor: they run in this process.

Rule: `raise ToolError(...)` and bad arguments are definite: the tool did not do its work, or says itself that it failed
(D18). Any other exception may have come after the effect, so it is Unknown. What else there is to know of calls that
run in this process stands in `spi/in_process`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.errors import InvalidRequest, said
from agentscope_durable.spi.environment import SYSTEM, Environment, call_in_own_thread
from agentscope_durable.spi.executor import (
    ExecutionRequest,
    ExecutorCapabilities,
    Outcome,
    Succeeded,
    ToolError,
)
from agentscope_durable.spi.in_process import InProcessCalls

__all__ = ["FunctionExecutor", "ToolError"]

CANCEL_SECONDS_MAX = 5.0
"""How long `cancel` waits for a coroutine to stop before it says that it is still running."""


class _Refused(Exception):
    """The call could not begin: nothing was done."""


class FunctionExecutor:
    """Runs tool calls with plain functions.

    Args:
        functions: by tool name. Called with the arguments as keywords. A coroutine function runs on the event loop, any
            other in a thread. What it returns must be JSON.
        environment: where threads come from.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], *, environment: Environment = SYSTEM) -> None:
        self._functions = dict(functions)
        self._environment = environment
        self._calls = InProcessCalls(self._perform)

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=False, cancel=False, output=False)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        return await self._calls.execute(request)

    async def query(self, request: ExecutionRequest) -> Outcome:
        return self._calls.query(request)

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        """Stop a coroutine that runs here. A function in a thread cannot be stopped: it is still Running."""
        if inspect.iscoroutinefunction(self._functions.get(request.name)):
            return await self._calls.stop(request, seconds=CANCEL_SECONDS_MAX)
        return self._calls.query(request)

    async def _perform(self, request: ExecutionRequest) -> Outcome:
        try:
            function, arguments = self._bind(request)
        except _Refused as refused:
            return Succeeded(value=str(refused), error=True)
        try:
            if inspect.iscoroutinefunction(function):
                value = await function(**arguments)
            else:
                value = await call_in_own_thread(self._environment, partial(function, **arguments), name="tool")
        except ToolError as error:
            return Succeeded(value=said(error), error=True)
        return Succeeded(value=value)

    def _bind(self, request: ExecutionRequest) -> tuple[Callable[..., Any], dict[str, Any]]:
        function = self._functions.get(request.name)
        if function is None:
            raise _Refused(f"there is no tool named {request.name!r}")
        try:
            arguments = durable_json.loads(request.arguments or "{}", root="object")
            assert isinstance(arguments, dict)
            inspect.signature(function).bind(**arguments)
        except (InvalidRequest, TypeError) as error:
            raise _Refused(f"the arguments of {request.name!r} are not valid: {error}") from error
        return function, arguments
