"""What code that runs inside an agent may ask: where am I, and am I being replayed?

Rule: these are context variables, so they hold for the code that runs now and not for the process. A middleware with
an effect of its own should skip it while `replaying()`: the round was seen before, and only its consequences are made
again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from typing import Any, Final, TypeVar

import msgspec

from agentscope_durable.spi.harness import RunStepOrigin

__all__ = ["ORIGIN_KEY", "Compression", "current_origin", "replaying"]

ORIGIN_KEY: Final = "durable.origin"
"""Under this key the runtime context of a tool holds its origin (AS-27)."""

T = TypeVar("T")


class Compression(msgspec.Struct):
    """A compression of the context under way: its calls are answered from receipts with these keys.

    `key` is stable over Runs; `calls` counts what was asked so far within it.
    """

    key: str
    calls: int = 0

    def next_key(self, kind: str) -> str:
        self.calls += 1
        return f"{self.key}/{kind}/{self.calls}"


_origin: ContextVar[RunStepOrigin | None] = ContextVar("durable_origin", default=None)
_replaying: ContextVar[Callable[[], bool] | None] = ContextVar("durable_replaying", default=None)
_beside: ContextVar[bool] = ContextVar("durable_beside_calls", default=False)
_compression: ContextVar[Compression | None] = ContextVar("durable_compression", default=None)


def current_origin() -> RunStepOrigin | None:
    """The Run, Step and call of the tool that runs now; None outside a tool."""
    return _origin.get()


def replaying() -> bool:
    """Whether the present round was answered before and is only gone through again."""
    asked = _replaying.get()
    return asked is not None and asked()


def current_compression() -> Compression | None:
    return _compression.get()


@contextmanager
def _held(variable: ContextVar[T], value: T) -> Generator[None, None, None]:
    token: Token[Any] = variable.set(value)
    try:
        yield
    finally:
        # The generator around this may be closed in another context: there the variable was never set.
        with suppress(ValueError):
            variable.reset(token)


def in_tool(origin: RunStepOrigin) -> Any:
    return _held(_origin, origin)


def beside_calls() -> bool:
    """Whether what is done now is committed by itself, and not with the result of the tool call it is done in."""
    return _beside.get()


def in_own_commit() -> Any:
    """While it holds, `beside_calls()`."""
    return _held(_beside, True)


def in_replay(replaying: Callable[[], bool]) -> Any:
    """While it holds, `replaying()` asks this: a round is replayed up to some place within it."""
    return _held(_replaying, replaying)


def in_compression(compression: Compression) -> Any:
    return _held(_compression, compression)
