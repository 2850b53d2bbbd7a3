"""Where an agent's execution may be halted by whoever hosts it.

Rule: an agent asks its host at four boundaries and goes on unless the host raises. This room knows no host: Durable's
is in its adapter, and an agent that is called directly has none (TF-02).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from agentscope_durable.journal.position import AgentExecutionPosition

__all__ = ["AgentExecutionHost", "Boundary"]


class Boundary(StrEnum):
    """The four places (TF-01)."""

    REASONING = "reasoning"
    """Before the state for the next model request is saved."""
    MODEL = "model"
    """Before a request is sent."""
    ACTING = "acting"
    """The answer is saved; its tool calls have not been looked at."""
    FINALIZATION = "finalization"
    """The final answer is saved; the reply has not ended."""


class AgentExecutionHost(Protocol):
    """Cooperates with an agent's execution."""

    @property
    def position(self) -> AgentExecutionPosition:
        """Where the execution stands, as of the last commit."""
        ...

    def boundary(self, boundary: Boundary) -> None:
        """Pass a boundary.

        Raises:
            BaseException: the execution must not go on from here. It is not an Exception, so that no agent library
                can take it for a failed model or tool.
        """
        ...
