"""Tool calls that run in this process: each is performed once, and what came of it is remembered for a while.

Rule 1: what is running here is known here only. About any other call the answer is Unknown, so an executor built on
this promises neither `query` nor `cancel`.
Rule 2: whatever a tool raises may have come after its effect: Unknown. So is a call that ended as cancelled, unless it
was asked to stop and has stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from agentscope_durable.contracts.errors import said
from agentscope_durable.spi.executor import REASON_CHARS_MAX, Cancelled, ExecutionRequest, Outcome, Running, Unknown

__all__ = ["REMEMBERED_MAX", "InProcessCalls", "raised"]

REMEMBERED_MAX: Final = 1024
"""Finished calls whose outcome is kept for a repeated `execute` or `query`."""


def raised(error: BaseException) -> Unknown:
    """The outcome of a tool that raised what is not its own word to the agent."""
    return Unknown(f"the tool raised {type(error).__name__}: {said(error)}"[:REASON_CHARS_MAX])


class InProcessCalls:
    """Calls by execution id.

    Args:
        perform: does the work of one call.
    """

    def __init__(self, perform: Callable[[ExecutionRequest], Awaitable[Outcome]]) -> None:
        self._perform = perform
        self._running: dict[str, asyncio.Task[Outcome]] = {}
        self._stopped: set[str] = set()
        self._ended: dict[str, Outcome] = {}

    def __len__(self) -> int:
        """Calls of which something is known here."""
        return len(self._running) + len(self._ended)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        """Perform the call, or wait for the one under way, or say what came of it.

        Cancelled with its caller: a host that closes stops what runs in it.
        """
        execution_id = request.execution_id
        if execution_id in self._ended:
            return self._ended[execution_id]
        task = self._running.get(execution_id)
        if task is not None:
            await asyncio.wait({task})
            return self._outcome(execution_id, task)
        task = asyncio.create_task(self._work(request), name=f"tool {execution_id}")
        self._running[execution_id] = task
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
                task.cancel()
        outcome = self._outcome(execution_id, task)
        del self._running[execution_id]
        self._stopped.discard(execution_id)
        self._remember(execution_id, outcome)
        if cancelled is not None:
            raise cancelled
        return outcome

    def query(self, request: ExecutionRequest) -> Outcome:
        """How it stands, as far as this process knows."""
        if request.execution_id in self._running:
            return Running()
        return self._ended.get(request.execution_id) or Unknown("this process knows nothing of the call")

    async def stop(self, request: ExecutionRequest, *, seconds: float) -> Outcome:
        """Cancel the call if it is under way, and say how it stands after `seconds` at the latest."""
        execution_id = request.execution_id
        task = self._running.get(execution_id)
        if task is None:
            return self.query(request)
        self._stopped.add(execution_id)
        task.cancel()
        await asyncio.wait({task}, timeout=seconds)
        return self._outcome(execution_id, task) if task.done() else Running()

    async def _work(self, request: ExecutionRequest) -> Outcome:
        try:
            return await self._perform(request)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - it may have come after the effect: that is an outcome
            return raised(error)

    def _outcome(self, execution_id: str, task: asyncio.Task[Outcome]) -> Outcome:
        """What came of a call that has ended."""
        if execution_id in self._ended:
            return self._ended[execution_id]
        if not task.cancelled():
            return task.result()
        if execution_id in self._stopped:
            return Cancelled("stopped on request")
        return Unknown("the call was given up")

    def _remember(self, execution_id: str, outcome: Outcome) -> None:
        self._ended[execution_id] = outcome
        while len(self._ended) > REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]
