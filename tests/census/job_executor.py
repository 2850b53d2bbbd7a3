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
from agentscope_durable.testing.ledger import EffectLedger

RETRY_AFTER = 0.01
ENDLESS = "wait"
"""A tool of this name goes on until it is cancelled."""
SLOW = "job"
"""A tool of this name has its effect at once and its result when it is asked again."""


class JobExecutor:
    """Starts each execution once, answers for every one it was told of, and stops what is to be stopped.

    It notes an `effect` for each effect, and a `stop` for each execution that will never have one.
    """

    def __init__(self, ledger: EffectLedger) -> None:
        self._ledger = ledger

    @property
    def capabilities(self) -> ExecutorCapabilities:
        return ExecutorCapabilities(query=True, cancel=True)

    async def execute(self, request: ExecutionRequest) -> Outcome:
        if self._stopped(request):
            return Cancelled("it was stopped before it began")
        self._ledger.append("effect", turn=request.turn_id, call=request.call_id, tool=request.name)
        return Running(RETRY_AFTER) if request.name in (ENDLESS, SLOW) else self._result(request)

    async def query(self, request: ExecutionRequest) -> Outcome:
        if self._stopped(request):
            return Cancelled("stopped")
        if not self._happened(request):
            # It never came here. From now on it never will.
            self._ledger.append("stop", execution=request.execution_id)
            return Cancelled("it never began")
        return Running(RETRY_AFTER) if request.name == ENDLESS else self._result(request)

    async def cancel(self, request: ExecutionRequest) -> Outcome:
        if request.name == ENDLESS or not self._happened(request):
            self._ledger.append("stop", execution=request.execution_id)
            return Cancelled("stopped")
        return self._result(request)

    def _stopped(self, request: ExecutionRequest) -> bool:
        return self._ledger.count("stop", execution=request.execution_id) > 0

    def _happened(self, request: ExecutionRequest) -> bool:
        return self._ledger.count("effect", turn=request.turn_id, call=request.call_id) > 0

    @staticmethod
    def _result(request: ExecutionRequest) -> Outcome:
        return Succeeded(value=f"{request.name} done")
