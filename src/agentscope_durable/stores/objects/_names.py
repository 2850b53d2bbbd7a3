"""What every object store checks about names and pages, and how it tells that something is not there."""

from __future__ import annotations

import hashlib
import re

from agentscope_durable.contracts.bodies import object_digest
from agentscope_durable.contracts.errors import DigestMismatch, InvalidRequest, NotFound

LIST_MAX = 1000
"""Names of one page at most."""

_NAME = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{16})?")
_DIGEST_CHARS = 64


def check_name(name: str) -> None:
    """A name becomes a file's or part of an object's key, so nothing else passes."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "an object's name is a digest of 64 lower-case hex digits, and perhaps its tag", path="name"
        )


def check_limit(limit: int) -> None:
    if not 1 <= limit <= LIST_MAX:
        raise InvalidRequest(f"a page has a limit of 1 to {LIST_MAX}, not {limit}", path="limit")


def verify(name: str, content: bytes) -> bytes:
    """The content, if it is what the digest in the name says."""
    expected, actual = name[:_DIGEST_CHARS], object_digest(content)
    if actual != expected:
        raise DigestMismatch(name, "object", expected=expected, actual=actual)
    return content


def not_found(name: str, location: str) -> NotFound:
    """There is no such object in the store that was asked; whoever opened the wrong one sees it here."""
    return NotFound("object", name).advising(
        f"It was looked for in {location}: open the records together with the object store they were written with, or "
        "bring the object back there from a backup"
    )


def folder_name(partition: str) -> str:
    """The folder of a Session: no id becomes part of a path, and no two ids meet where a store folds names."""
    return hashlib.sha256(partition.encode()).hexdigest()
