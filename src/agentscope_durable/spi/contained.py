"""Awaits an application's code in a task of its own, and gives it up.

Rule 1: nothing such code raises, GeneratorExit and SystemExit among it, ends the task that has to record it.
Rule 2: code that is given up is cancelled and waited for within a bound. What does not end by then is left behind: its
task is held until it ends, and whoever gave it up goes on without it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

__all__ = ["ABANDON_SECONDS", "answer_of", "contained", "give_up", "own_tasks", "start_contained"]

T = TypeVar("T")

ABANDON_SECONDS: Final = 1.0
"""How long code that is given up may take to end before it is left behind."""

log = logging.getLogger("agentscope_durable.spi")

_awaited_by: WeakKeyDictionary[asyncio.Task[Any], asyncio.Task[Any]] = WeakKeyDictionary()
"""Who waits for a contained task."""
_left_behind: set[asyncio.Task[Any]] = set()
"""The loop holds its tasks weakly: these still run and nobody waits for them."""


class Raised(NamedTuple):
    """What contained code raised."""

    error: BaseException


async def contained(work: Awaitable[T], *, name: str) -> T:
    """Await an application's code; what it raises, of any kind, is raised here, and a cancellation reaches it.

    GeneratorExit that such code gets from a task of its own would close whoever awaits the code, up to the first, and
    what is being closed may await nothing any more. SystemExit that ends a task ends the program.
    """
    task = start_contained(work, name=name)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
    return answer_of(task)


def start_contained(
    work: Awaitable[T], *, name: str, variables: contextvars.Context | None = None
) -> asyncio.Task[T | Raised]:
    """A task of its own for an application's code. The caller waits for it, and reads it with `answer_of`.

    Args:
        variables: the context variables it sees and sets; None: a copy of the caller's.
    """
    task = asyncio.create_task(_caught(work), name=name, context=variables)
    caller = asyncio.current_task()
    if caller is not None:
        _awaited_by[task] = caller
    return task


def answer_of(task: asyncio.Task[T | Raised]) -> T:
    """What a contained task that has ended answered; what it raised is raised."""
    outcome = task.result()
    if isinstance(outcome, Raised):
        raise outcome.error
    return outcome


async def give_up(task: asyncio.Task[Any]) -> bool:
    """Cancel a task and wait until it has ended; False when it did not within `ABANDON_SECONDS` and is left behind.

    What it raises is over. A task that waits for a thread ends at once, and the thread goes on to its own end.
    """
    _left_behind.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait({task}, timeout=ABANDON_SECONDS)
    if not task.done():
        log.warning("%s was given up and is still running", task.get_name())
    return task.done()


def own_tasks() -> set[asyncio.Task[Any]]:
    """The task of the caller, and those that wait for it."""
    found: set[asyncio.Task[Any]] = set()
    task = asyncio.current_task()
    while task is not None:
        found.add(task)
        task = _awaited_by.get(task)
    return found


def _forget(task: asyncio.Task[Any]) -> None:
    _left_behind.discard(task)
    if not task.cancelled():
        _ = task.exception()


async def _caught(work: Awaitable[T]) -> T | Raised:
    try:
        return await work
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001 - it is the caller's
        return Raised(error)
