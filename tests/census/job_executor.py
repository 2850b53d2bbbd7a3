"""An executor whose work goes on by itself: outside this process, and outside the product.

What it did and was told is in a ledger file, so a new process can be asked about work that a dead one started.
"""

from __future__ import annotations

from agentscope_durable.spi.executor import (
    Cancelled,
    ExecutionRequest,
    ExecutorCapabilities,
    Outcome,
    Running,
    Succeeded,
)
from agentscope_durable.testing.ledger import Ledger

RETRY_AFTER = 0.01
ENDLESS = "wait"
"""A tool of this name goes on until it is cancelled."""
SLOW = "job"
"""A tool of this name has its effect at once and its result when it is asked again."""


class JobExecutor:
    """Starts each execution once, answers for every one it was told of, and stops what is to be stopped.

    Ledger lines: `effect <turn> <call> <tool>` for each effect, `stop <execution>` for what will never have one.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=True, cancel=True)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        if f"stop {request.execution_id}" in self._ledger.lines:
            return Cancelled("it was stopped before it began")
        self._ledger.write(_effect(request))
        return Running(RETRY_AFTER) if request.name in (ENDLESS, SLOW) else self._result(request)

    async def query(self, request: ExecutionRequest) -> Outcome:
        lines = self._ledger.lines
        if f"stop {request.execution_id}" in lines:
            return Cancelled("stopped")
        if _effect(request) not in lines:
            # It never came here. From now on it never will.
            self._ledger.write(f"stop {request.execution_id}")
            return Cancelled("it never began")
        return Running(RETRY_AFTER) if request.name == ENDLESS else self._result(request)

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        if request.name == ENDLESS or _effect(request) not in self._ledger.lines:
            self._ledger.write(f"stop {request.execution_id}")
            return Cancelled("stopped")
        return self._result(request)

    @staticmethod
    def _result(request: ExecutionRequest) -> Outcome:
        return Succeeded(value=f"{request.name} done")


def _effect(request: ExecutionRequest) -> str:
    return f"effect {request.turn_id} {request.call_id} {request.name}"
