"""The outcome of a tool call, in the one JSON form that records, events and adapters share."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.durable_json import UNREADABLE


class ToolResult(Discreet, frozen=True, kw_only=True, omit_defaults=True):
    """What the agent sees of a finished call.

    Attributes:
        state: `success`, `error`, `denied` or `interrupted`.
        value: JSON value, when the tool returned one.
        content: native content blocks, when the tool returned those.
        metadata: native metadata.
        reason: why, for a state other than success.
    """

    state: str = "success"
    value: Any = None
    content: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    reason: Words | None = None


NOTICE_VERSION: Final = 1
"""Of what hosts tell each other. A change that an older reader would take for something else gets the next number."""


class HostNotice(msgspec.Struct, frozen=True, array_like=True):
    """What a host publishes with its lease.

    Attributes:
        version: how the rest is written; of another version than NOTICE_VERSION nothing else is read (PT-10).
        classes: ready classes it serves.
        routes: executor routes it serves.
        draining: it claims nothing new.
        refused: writers whose state it cannot continue (D21).
        names: definitions whose versions it makes when it meets them.
        declined: ready classes of these that it did not make.
        parallelism: Turns it has in hand at once at most; 0 when it runs none, or did not say.
        asked_again: how often it sent something again that the store had not answered, since it was made.
    """

    version: int = NOTICE_VERSION
    classes: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    draining: bool = False
    refused: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    declined: tuple[str, ...] = ()
    parallelism: int = 0
    asked_again: int = 0

    def serves(self, klass: str, name: str) -> bool:
        """Whether it runs, or may come to run, this ready class of the definition of that name."""
        return klass in self.classes or (name in self.names and klass not in self.declined)


_notice: Final = msgspec.json.Decoder(HostNotice)


def read_notice(published: bytes) -> HostNotice:
    """What a host published. Nothing, or another version: then it serves nothing as far as anybody here can tell."""
    if not published:
        return HostNotice()
    try:
        notice = _notice.decode(published)
        if notice.version == NOTICE_VERSION:
            return notice
    except UNREADABLE:
        pass
    try:
        found: object = msgspec.json.decode(published)
    except UNREADABLE:
        found = None
    version: object = found[0] if isinstance(found, list) and found else 0
    return HostNotice(version=version if isinstance(version, int) else 0)
