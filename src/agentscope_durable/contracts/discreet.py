"""What a struct shows of itself in a log, a traceback or an error: ids, kinds and sizes, never what was said (D25).

Rule 1: text that a person, a model, a tool or a stranger's error wrote is `Words`. Every other `str` is an id, a kind
or a sentence of ours, and is shown.
Rule 2: JSON of any shape and bytes are never shown, whatever is in them.
Rule 3: a struct that has a field of these kinds is `Discreet`; one that can change calls `discreet`. A test makes one
of each struct there is, full of secrets, and looks at its repr; it names the field that was forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Annotated, Any, Final, TypeAlias, get_args, get_origin

import msgspec

__all__ = ["Discreet", "Words", "discreet"]

_WORDS: Final = msgspec.Meta(extra={"words": True})

Words: TypeAlias = Annotated[str, _WORDS]
"""Text that was said or written by somebody else."""

_OPEN: Final = frozenset({Any, object, bytes, msgspec.Raw})
"""Types that may hold anything."""


def discreet(value: msgspec.Struct) -> str:
    """The repr of a struct that carries content."""
    shown = (
        f"{name}={_size(getattr(value, name)) if content else repr(getattr(value, name))}"
        for name, content in _fields(type(value))
    )
    return f"{type(value).__name__}({', '.join(shown)})"


class Discreet(msgspec.Struct, frozen=True):
    """Base of structs that carry content."""

    def __repr__(self) -> str:
        return discreet(self)


@cache
def _fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, bool], ...]:
    """The fields of a struct, and whether each may hold content itself."""
    return tuple(
        (field.name, any(part in _OPEN or part is _WORDS for part in _parts(field.type)))
        for field in msgspec.structs.fields(kind)
    )


def _parts(declared: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    if get_origin(declared) is None:
        yield declared
    for part in (*get_args(declared), *getattr(declared, "__metadata__", ())):
        yield from _parts(part)


def _size(value: object) -> str:
    match value:
        case None | bool() | msgspec.Struct():
            return repr(value)
        case str():
            return f"<{len(value)} characters>"
        case bytes() | msgspec.Raw():
            return f"<{len(memoryview(value))} bytes>"
        case Mapping() | Sequence() | Set():
            return f"<{len(value)} items>"
        case _:
            return f"<{type(value).__name__}>"
