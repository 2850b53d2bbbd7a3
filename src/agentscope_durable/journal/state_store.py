"""The place where AgentScope 2.0 programs kept an agent's state: one value per user and session.

Rule: it is a copy for the way back (AS-23) and a source for the first time only (AS-21). Once a journal exists nothing
is taken from it, it is never written ahead of a commit, and its failure costs nothing but the copy (AS-31).
"""

from __future__ import annotations

from typing import Final, Protocol

__all__ = ["AGENT_STATE", "AgentStateStore"]

AGENT_STATE: Final = "agent_state"
"""The slot."""


class AgentStateStore(Protocol):
    """Keeps an `AgentState` as JSON by user, session and slot.

    Under Durable the user is the Session's namespace, the session its id, and the slot always `AGENT_STATE`.
    """

    async def get(self, user_id: str, session_id: str, key: str = AGENT_STATE) -> str | None:
        """The value, or None."""
        ...

    async def put(self, user_id: str, session_id: str, key: str, value: str) -> None: ...
