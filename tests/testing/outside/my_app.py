"""An application of somebody else's: an agent, and fakes of what its tools reach."""

from __future__ import annotations

import asyncio
from typing import Any

from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder
from agentscope_durable.testing.kit import effect

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
notes: dict[str, str] = {}


def look() -> str:
    """See how the service is."""
    return "it is down"


def restart(service: str) -> str:
    """Restart a service."""
    effect("restart", service=service)
    return f"{service} restarted"


def charge(amount: int) -> str:
    """Charge a card."""
    effect("charge", amount=amount)
    return "charged"


def charge_by_key(amount: int) -> str:
    """Charge a card, which the bank does once for a key."""
    effect("charge", key="order-1", amount=amount)
    return "charged"


async def wait_and_charge(hours: int) -> str:
    """Charge a card, some hours from now."""
    await asyncio.sleep(hours * 3600)
    effect("charge")
    return "charged"


def remember(what: str) -> str:
    """Keep a note, in the memory of this process."""
    notes["note"] = what
    return "noted"


def recall() -> str:
    """Read the note."""
    return notes.get("note", "there is no note")


def recall_or_fail() -> str:
    """Read the note; there must be one."""
    return notes["note"]


def make_agent(_binding: Any) -> AgentBuilder:
    """Restarting asks a person first."""
    tools = [
        FunctionTool(look, is_read_only=True, permission=ALLOWED),
        FunctionTool(restart),
        FunctionTool(charge, is_read_only=True, permission=ALLOWED),
        FunctionTool(charge_by_key, is_read_only=True, permission=ALLOWED),
        FunctionTool(wait_and_charge, permission=ALLOWED),
        FunctionTool(remember, permission=ALLOWED),
        FunctionTool(recall, is_read_only=True, permission=ALLOWED),
        FunctionTool(recall_or_fail, permission=ALLOWED),
    ]
    return AgentBuilder(name="operator", system_prompt="Work.", model=None, toolkit=Toolkit(tools=tools))
