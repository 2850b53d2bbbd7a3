"""What every object store checks about a digest."""

from __future__ import annotations

import re

from agentscope_durable.contracts.bodies import object_digest
from agentscope_durable.contracts.errors import DigestMismatch, InvalidRequest

LIST_MAX = 1000
"""Digests of one page at most."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_digest(digest: str) -> None:
    """A digest becomes a file name or part of an object's key, so nothing else passes."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequest("a digest is 64 lower-case hex digits", path="digest")


def check_limit(limit: int) -> None:
    if not 1 <= limit <= LIST_MAX:
        raise InvalidRequest(f"a page has a limit of 1 to {LIST_MAX}, not {limit}", path="limit")


def verify(digest: str, content: bytes) -> bytes:
    """The content, if it is what the digest says."""
    actual = object_digest(content)
    if actual != digest:
        raise DigestMismatch(digest, "object", expected=digest, actual=actual)
    return content
