"""Python functions as an executor: they run in this process.

Rule 1: what is running here is known here only. `query` and `cancel` answer for calls of this object; about any other
they say Unknown, so the capabilities promise neither.
Rule 2: `raise ToolError(...)` and bad arguments are definite: the tool did not do its work, or says itself that it
failed (D18). Any other exception may have come after the effect, so it is Unknown.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.spi.environment import SYSTEM, Environment, call_in_own_thread
from agentscope_durable.spi.executor import (
    Cancelled,
    ExecutionRequest,
    ExecutorCapabilities,
    Outcome,
    Running,
    Succeeded,
    ToolError,
    Unknown,
)

__all__ = ["FunctionExecutor", "ToolError"]

REMEMBERED_MAX = 1024
"""Finished calls whose outcome is kept for a repeated `execute` or `query`."""
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
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._ended: dict[str, Outcome] = {}

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=False, cancel=False, output=False)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        known = await self._known(request.execution_id)
        if known is not None:
            return known
        task = asyncio.create_task(self._perform(request), name=f"tool {request.execution_id}")
        self._running[request.execution_id] = task
        try:
            # Cancelled with its caller: a host that closes stops what runs in it, and its outcome is then unknown.
            outcome = await task
        except asyncio.CancelledError:
            if not task.cancelled() or _cancelling():
                raise
            outcome = Cancelled("stopped on request")
        finally:
            del self._running[request.execution_id]
        self._remember(request.execution_id, outcome)
        return outcome

    async def query(self, request: ExecutionRequest) -> Outcome:
        if request.execution_id in self._running:
            return Running()
        return self._ended.get(request.execution_id) or Unknown("this process knows nothing of the call")

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        """Stop a coroutine that runs here. A function in a thread cannot be stopped: it is still Running."""
        task = self._running.get(request.execution_id)
        if task is None:
            return self._ended.get(request.execution_id) or Unknown("this process knows nothing of the call")
        if inspect.iscoroutinefunction(self._functions.get(request.name)):
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS_MAX)
            if task.cancelled():
                return Cancelled("stopped on request")
            if task.done():
                return task.result()
        return Running()

    async def _known(self, execution_id: str) -> Outcome | None:
        running = self._running.get(execution_id)
        if running is not None:
            await asyncio.wait({running})
            return Cancelled("stopped on request") if running.cancelled() else running.result()
        return self._ended.get(execution_id)

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
            return Succeeded(value=str(error), error=True)
        except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - it may have come after the effect: that is an outcome
            return Unknown(f"the tool raised {type(error).__name__}: {_said(error)}"[:2048])
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

    def _remember(self, execution_id: str, outcome: Outcome) -> None:
        self._ended[execution_id] = outcome
        while len(self._ended) > REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an error without a text is one all the same
        return ""


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
