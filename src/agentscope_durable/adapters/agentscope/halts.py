"""Why an execution is halted, as it is raised through AgentScope's loop.

Rule: it is raised only where that is safe. Where AgentScope would take an Exception for a failed model, it is a
BaseException; in a batch of concurrent tools AgentScope drops a BaseException and tries for ever, so there it is an
Exception.
"""

from __future__ import annotations

from agentscope_durable.adapters.agentscope.increments import Halting
from agentscope_durable.spi.harness import StopCause

__all__ = ["Halt", "HaltInTool", "OutcomeUnknown"]


class Halt(Halting):
    """The execution must not go on: a pause (`cause` None), or the Run must stop."""

    def __init__(self, cause: StopCause | None) -> None:
        super().__init__("pause" if cause is None else cause.kind)
        self.cause = cause


class HaltInTool(Exception):
    """The same within a tool call, with what really halts it."""

    def __init__(self, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.reason = reason


class OutcomeUnknown(Exception):
    """A local tool was started and nobody can say what it did: the Turn waits for evidence."""

    def __init__(self, call_id: str) -> None:
        super().__init__(f"the outcome of tool call {call_id!r} is not known")
        self.call_id = call_id
