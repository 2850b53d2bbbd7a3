"""The words of a Thread's workspace: what an entry may be called, and how much of it there may be.

An entry has a namespace (a list of names), a key and one JSON value. Namespace and key together are its path. Names
follow the rule of all ids, so "/" in one is an ordinary character; what means nothing as a name, or means somewhere
else, is refused, because paths come from models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.ids import check_id

__all__ = [
    "ENTRIES_MAX",
    "ENTRY_BYTES_MAX",
    "NAMESPACE_DEPTH_MAX",
    "PATH_CHARS_MAX",
    "WORKSPACE_BYTES_MAX",
    "EntryPath",
    "check_namespace",
    "check_path",
    "path_text",
]

NAMESPACE_DEPTH_MAX: Final = 32
"""Names in a namespace."""
PATH_CHARS_MAX: Final = 1024
"""Characters of all names of a path together."""
ENTRY_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bytes of one entry's value, as JSON."""
ENTRIES_MAX: Final = 2000
"""Entries of one Thread: a restore or a fork writes them in one transaction."""
WORKSPACE_BYTES_MAX: Final = 128 * 1024 * 1024
"""Bytes of the values of one Thread's entries together. Former values, kept for checkpoints, do not count."""

EntryPath = tuple[str, ...]
"""The names of a namespace, and the key as the last one."""

_NOWHERE: Final = frozenset({".", ".."})


def check_namespace(namespace: Iterable[str], *, path: str = "namespace") -> EntryPath:
    """The names of a namespace, outermost first; () for the workspace itself.

    Raises:
        InvalidRequest: not a list of names, too many of them, or one that is not allowed.
    """
    if isinstance(namespace, str) or not isinstance(namespace, Sequence):
        raise InvalidRequest('a namespace is a list of names, like ["workspace"]', path=path)
    names = tuple(namespace)
    if len(names) > NAMESPACE_DEPTH_MAX:
        raise InvalidRequest(f"a namespace has at most {NAMESPACE_DEPTH_MAX} names, not {len(names)}", path=path)
    return _checked(names, path)


def check_path(names: Sequence[str], *, path: str = "path") -> EntryPath:
    """The path of an entry, its key last.

    Raises:
        InvalidRequest: see `check_namespace`.
    """
    if not names:
        raise InvalidRequest("an entry has a key", path=path)
    return (*check_namespace(names[:-1], path=path), *_checked(names[-1:], path, before=sum(map(len, names[:-1]))))


def _checked(names: Sequence[str], path: str, *, before: int = 0) -> EntryPath:
    checked = tuple(check_id(path, name) for name in names)
    if _NOWHERE.intersection(checked):
        raise InvalidRequest('"." and ".." are no names: paths are relative and go down only', path=path)
    if before + sum(map(len, checked)) > PATH_CHARS_MAX:
        raise InvalidRequest(f"a path has at most {PATH_CHARS_MAX} characters", path=path)
    return checked


def path_text(path: EntryPath) -> str:
    """A path for people, in errors."""
    return "/".join(path)
