"""Where a Run ends early, and how an await is broken off to get there.

Rule 1: cancel, pause, the shutdown of a host and a lost lease are four things (C30): they are read from the context,
and a `CancelledError` is never read as one of them.
Rule 2: what can take long and has stored nothing yet is awaited through `unless_stopped`, so that all four reach it at
once (C23): an agent being made, a large body being fetched.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from agentscope_durable.contracts.commands import RunEnd, RunEndKind
from agentscope_durable.spi.contained import answer_of, give_up, start_contained
from agentscope_durable.spi.harness import Abandoned, StopCause

__all__ = ["Stoppable", "end_of", "stopped", "unless_stopped"]

T = TypeVar("T")


class Stoppable(Protocol):
    """The part of a `RunContext` that says why a Run should end."""

    @property
    def stop(self) -> StopCause | None: ...

    @property
    def pause_requested(self) -> bool: ...

    async def changed(self) -> None: ...


def stopped(context: Stoppable) -> RunEnd | None:
    """How a Run ends if it has to end here, where everything is stored and nothing is under way; None to go on.

    Raises:
        Abandoned: another host owns the Thread.
    """
    stop = context.stop
    if stop is not None:
        return end_of(stop)
    return RunEnd(kind=RunEndKind.PAUSED) if context.pause_requested else None


def end_of(stop: StopCause) -> RunEnd:
    """How a Run ends for this reason.

    Raises:
        Abandoned: another host owns the Thread.
    """
    match stop.kind:
        case "cancel":
            return RunEnd(kind=RunEndKind.CANCELLED)
        case "drain":
            return RunEnd(kind=RunEndKind.RELEASED)
        case _:
            raise Abandoned


async def unless_stopped(
    context: Stoppable, work: Callable[[], Awaitable[T]], *, name: str, variables: contextvars.Context | None = None
) -> T | RunEnd:
    """What `work` answers, or how the Run ends if it has to end before that.

    The work may break off at each of its awaits, so nothing of it may be used afterwards, and what it commits stands
    whole or not at all. It is cancelled, and left behind if it does not end (`give_up`).

    Args:
        variables: as in `start_contained`.

    Raises:
        Abandoned: another host owns the Thread.
    """
    end = stopped(context)
    if end is not None:
        return end
    task = start_contained(work(), name=name, variables=variables)
    changed: asyncio.Task[None] | None = None
    try:
        while not task.done():
            if changed is None or changed.done():
                end = stopped(context)
                if end is not None:
                    return end
                changed = asyncio.create_task(context.changed(), name=f"changed, {name}")
            await asyncio.wait({task, changed}, return_when=asyncio.FIRST_COMPLETED)
        return answer_of(task)
    finally:
        for waiting in (changed, task):
            if waiting is not None and not waiting.done():
                await give_up(waiting)
