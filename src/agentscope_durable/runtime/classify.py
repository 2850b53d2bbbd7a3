"""Whether trying again may help: the default answer (RC-06..RC-08).

Rule: a fault of the world (I/O, time-outs, something unavailable, a lost race) may pass; a fault of the program stays.
This only decides about a new invocation. It can never permit repeating an operation whose outcome is UNKNOWN (RC-15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agentscope_durable.contracts.errors import (
    Conflict,
    CorruptRecord,
    DurableError,
    Incompatible,
    Retry,
    Unconfirmed,
    leaves,
    said,
)
from agentscope_durable.contracts.records import Failure

RetryableFailure = Callable[[BaseException], bool | None]
"""The application's own answer to "may it help to try again?"; None leaves it to the defaults (RC-15)."""

FAILURE_CHARS_MAX = 2048
"""Characters of an error's text that are stored."""


def ends_the_program(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """Whether `error`, met in `task`, is nobody's failure: whatever else is raised is, SystemExit too.

    A coroutine that is thrown away meets GeneratorExit while its task does not run; then it may await nothing. When the
    task runs, an agent, a tool or an executor has raised it like anything else.
    """
    if isinstance(error, GeneratorExit):
        try:
            return asyncio.current_task() is not task
        except RuntimeError:
            # No loop runs.
            return True
    return isinstance(error, KeyboardInterrupt)


def retryable(error: BaseException) -> bool:
    """One error. Of a group, all must be."""
    if isinstance(error, BaseExceptionGroup):
        return all(retryable(leaf) for leaf in leaves(error))
    if isinstance(error, DurableError):
        return isinstance(error, Retry | Unconfirmed | Conflict)
    # Nobody here cancelled the invocation, so something inside gave up on an await: a time-out of its own.
    return isinstance(error, OSError | TimeoutError | asyncio.CancelledError)


def incompatible(error: BaseException) -> bool:
    """This host cannot serve the Turn and another one may: no failure of the Turn (RC-18)."""
    return any(isinstance(leaf, Incompatible) for leaf in leaves(error))


def corrupt(error: BaseException) -> bool:
    """What is stored cannot be read: a person must look, and nothing is changed until then (C61)."""
    return any(isinstance(leaf, CorruptRecord) for leaf in leaves(error))


def failure_of(error: BaseException, *, retry: bool) -> Failure:
    """What is stored about an error: class and bounded text, without a traceback."""
    parts = leaves(error)
    first = parts[0] if parts else error
    text = said(first)
    if len(parts) > 1:
        text = f"{text} (and {len(parts) - 1} more)"
    if len(text) > FAILURE_CHARS_MAX:
        text = f"{text[: FAILURE_CHARS_MAX - 1]}…"
    text = text.encode("utf-8", "replace").decode("utf-8")
    return Failure(kind=type(first).__name__, message=text, retryable=retry)
