"""What all commands have in common."""

from __future__ import annotations

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.identity import SessionKey


class Command(Discreet, frozen=True, kw_only=True, rename="camel"):
    session: SessionKey


class Request(Command, frozen=True):
    """A command with a request id: the same id and arguments are the same request, for ever (D16)."""

    thread_id: str
    request_id: str


class Done(msgspec.Struct, frozen=True, rename="camel"):
    """Accepted. `changed` is False when it was so already."""

    changed: bool
