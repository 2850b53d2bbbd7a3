"""The name of a settled position: where a Thread's context can be taken up again.

It is an opaque text for whoever holds it (CK-12), and it says which Thread it is of: a position of one Thread that is
given to another is refused, instead of restoring whatever happens to stand there.
"""

from __future__ import annotations

import hashlib

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.identity import ThreadKey

__all__ = ["position_of", "stream_position"]

_DIGITS_MAX = 18


def _mark(thread: ThreadKey) -> str:
    key = thread.session
    name = f"{key.namespace}\x00{key.session_id}\x00{thread.thread_id}".encode()
    return hashlib.sha256(name).hexdigest()[:12]


def position_of(thread: ThreadKey, at: int) -> str:
    """The settled position of a Thread that stands at `at` of its stream."""
    return f"p1-{_mark(thread)}-{at}"


def stream_position(thread: ThreadKey, position: object, *, path: str = "position") -> int:
    """Where in its Thread's stream a position stands. Whether something is settled there is for the store to say.

    Raises:
        InvalidRequest: it is not a position, or one of another Thread.
    """
    parts = position.split("-") if isinstance(position, str) else []
    digits = parts[2] if len(parts) == 3 else ""
    if (
        not digits.isascii()
        or not digits.isdigit()
        or len(digits) > _DIGITS_MAX
        or parts[0] != "p1"
        or int(digits) == 0
    ):
        raise InvalidRequest("this is not a position of a checkpoint", path=path)
    if parts[1] != _mark(thread):
        raise InvalidRequest(f"this position belongs to another thread than {thread.thread_id!r}", path=path)
    return int(digits)
