"""Sees what others say of a Run, and a lost lease, while its agent is busy.

A receipt tells the same at the next commit: while commits follow each other nothing is asked, and a watch is a timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.questions import GetTurn
from agentscope_durable.runtime.host import Host
from agentscope_durable.runtime.run import LiveRun
from agentscope_durable.runtime.tasks import stop
from agentscope_durable.spi.environment import Timer

__all__ = ["FENCED_SECONDS", "WATCH_SPACING", "Watch"]

log = logging.getLogger("agentscope_durable.runtime")

WATCH_SPACING: Final = 0.05
"""Seconds from a hint to a look at the Turn: a commit of the Run's own may tell sooner."""
FENCED_SECONDS: Final = 5.0
"""How long an adapter may take to end a Run that another host has taken over."""


class Watch:
    """Over one Run.

    Args:
        give_up: called when the Thread is another host's, and the adapter has not ended the Run for long.
    """

    def __init__(self, host: Host, run: LiveRun, turn_id: str, give_up: Callable[[], object]) -> None:
        self._host = host
        self._run = run
        self._turn_id = turn_id
        self._give_up = give_up
        self._looked_at = host.environment.monotonic()
        self._heard_at: float | None = None
        self._timer: Timer | None = None
        self._look: asyncio.Task[None] | None = None

    def ring(self) -> None:
        """Something was said of the Turn, or may have been."""
        if self._heard_at is None:
            self._heard_at = self._host.environment.monotonic()
            if self._look is None:
                self._sleep(WATCH_SPACING)

    async def end(self) -> None:
        if self._look is not None:
            await stop(self._look)
        # Last, as a look sets it when it is done.
        if self._timer is not None:
            self._timer.cancel()

    # ---- from timer to timer ----

    def _sleep(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._host.environment.after(seconds, self._woken)

    @property
    def _due(self) -> float:
        """When a look is due. A commit that is begun meanwhile puts it off."""
        return max(self._run.committing_at, self._looked_at) + self._host.poll_interval

    def _rest(self) -> None:
        self._sleep(max(0.0, self._due - self._host.environment.monotonic()))

    def _woken(self) -> None:
        run, heard_at, now = self._run, self._heard_at, self._host.environment.monotonic()
        if run.over:
            return
        told = heard_at is not None and run.committing_at > heard_at
        if heard_at is not None and not told and run.committing and now - heard_at < self._host.poll_interval:
            # What it will answer, or the commit after it, may tell.
            self._sleep(WATCH_SPACING)
            return
        self._heard_at = None
        if told or (heard_at is None and now < self._due):
            self._rest()
        else:
            self._look = asyncio.create_task(self._ask(), name=f"watch {self._turn_id}")

    async def _ask(self) -> None:
        host, run = self._host, self._run
        self._looked_at, asked_at = host.environment.monotonic(), run.position
        thread = run.thread
        question = GetTurn(session=thread.session, thread_id=thread.thread_id, turn_id=self._turn_id)
        try:
            run.observe(await host.query(question), asked_at=asked_at)
        except DurableError as error:
            host.report(error, "a turn under way cannot be looked at", **run.ids)
        if run.fenced:
            log.warning("turn %s continues on another host", self._turn_id, extra=run.ids)
            await host.environment.sleep(FENCED_SECONDS)
            self._give_up()
            return
        self._look = None
        if self._heard_at is None:
            self._rest()
        else:
            self._sleep(WATCH_SPACING)
