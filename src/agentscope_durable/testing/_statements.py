"""Which statements of the specification a test of a contract suite proves.

An attribute and not a mark of pytest: a mark is unknown in the project of whoever uses the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound=Callable[..., object])


def states(*ids: str) -> Callable[[T], T]:
    def note(test: T) -> T:
        test.spec = ids  # type: ignore[attr-defined]
        return test

    return note
