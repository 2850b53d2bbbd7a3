"""What things are called.

Rule: an id is a string of 1 to 256 characters without control characters and without lone surrogates. Everything else
is accepted and kept exactly as it was given: "/", "..", "CON", a trailing dot, emoji, and the two ways to write "é" as
two different ids.

It is tempting to normalise or to forbid what some disk or URL dislikes. Then two ids of the application could become
one Session here, or a database user could not name a conversation as their own system does. So each place that cannot
carry an id (a file name, an object key, a URL path) encodes it there, and the id itself stays what it is.
"""

from __future__ import annotations

import re
from typing import Final, NewType

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, SessionKey, ThreadKey

__all__ = [
    "ID_CHARS_MAX",
    "MAIN_THREAD_ID",
    "CallId",
    "CommitId",
    "ExecutionId",
    "InteractionId",
    "MessageId",
    "RequestId",
    "RunId",
    "SessionKey",
    "StepId",
    "ThreadKey",
    "TurnId",
    "check_id",
    "check_key",
]

ID_CHARS_MAX: Final = 256
"""Code points, not bytes: at most 1024 bytes of UTF-8."""

TurnId = NewType("TurnId", str)
RunId = NewType("RunId", str)
StepId = NewType("StepId", str)
CallId = NewType("CallId", str)
"""A tool call, as the model or the agent names it; unique within its Turn."""
ExecutionId = NewType("ExecutionId", str)
InteractionId = NewType("InteractionId", str)
MessageId = NewType("MessageId", str)
RequestId = NewType("RequestId", str)
"""Chosen by the caller; a repeat with the same content is the same request, for ever."""
CommitId = NewType("CommitId", str)

# Category Cc is exactly these two ranges, in every version of Unicode; surrogates are category Cs.
_REFUSED = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_id(kind: str, value: object) -> str:
    """The one rule for an id at admission; returns the id unchanged (C87).

    Args:
        kind: what it names, for the error: "session_id", "request_id".
        value: what the caller gave.

    Raises:
        InvalidRequest: not a str, empty, longer than 256 characters, or with a control character or a lone surrogate.
            Its `path` is the kind. The message does not repeat the value, which may be long or a secret given by
            mistake.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"an id must be a str, not {type(value).__name__}", path=kind)
    if not value:
        raise InvalidRequest("an id must not be empty", path=kind)
    if len(value) > ID_CHARS_MAX:
        raise InvalidRequest(f"an id has at most {ID_CHARS_MAX} characters, not {len(value)}", path=kind)
    found = _REFUSED.search(value)
    if found is not None:
        character = ord(found.group())
        name = "a lone surrogate" if character >= 0xD800 else "the control character"
        raise InvalidRequest(f"an id must not contain {name} U+{character:04X} (character {found.start()})", path=kind)
    # A member of a StrEnum becomes its text.
    return str.__str__(value)


def check_key(key: SessionKey | ThreadKey) -> None:
    """Every id of a key passes `check_id`.

    Raises:
        InvalidRequest: one of them is not allowed, or this is no key.
    """
    if not isinstance(key, SessionKey | ThreadKey):
        raise InvalidRequest(f"a key is a SessionKey(namespace, session_id), not {type(key).__name__}", path="key")
    if isinstance(key, ThreadKey):
        _ = check_id("thread_id", key.thread_id)
        key = key.session
    _ = check_id("namespace", key.namespace)
    _ = check_id("session_id", key.session_id)
