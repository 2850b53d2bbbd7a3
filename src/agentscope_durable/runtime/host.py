"""What the parts of one running host share: its identity, its backend, and where errors go."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from agentscope_durable.contracts.commands import AnyCommand
from agentscope_durable.contracts.errors import Rejected
from agentscope_durable.contracts.status import Audience
from agentscope_durable.runtime.tasks import Tasks
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.environment import Environment
from agentscope_durable.spi.live import LiveEvents

log = logging.getLogger("agentscope_durable.runtime")

OnError = Callable[[BaseException], None]
"""Told of errors that no caller sees. What it raises is logged and changes nothing (ST-12)."""


class Host:
    """One runtime as the work it does sees it.

    Attributes:
        owner: identity of this host: its name and a nonce of this process, so that a restarted host with the same
            name is another owner (C14).
        draining: claim nothing new.
        closing: bring what runs to a boundary and give it back.
    """

    def __init__(
        self,
        *,
        backend: SessionBackend,
        environment: Environment,
        owner: str,
        poll_interval: float,
        live: LiveEvents,
        on_error: OnError | None,
    ) -> None:
        self.backend = backend
        self.environment = environment
        self.owner = owner
        self.poll_interval = poll_interval
        self.live = live
        self.tasks = Tasks()
        self.draining = False
        self.closing = False
        self._on_error = on_error

    async def execute(self, command: AnyCommand) -> Any:
        return await self.backend.execute(command, audience=Audience.HOST)

    async def query(self, question: Any) -> Any:
        return await self.backend.query(question, audience=Audience.HOST)

    def report(self, error: BaseException, what: str, **ids: str) -> None:
        """Say that something went wrong that nobody is waiting for. Never raises."""
        level = logging.WARNING if isinstance(error, Rejected) else logging.ERROR
        log.log(level, "%s: %s", what, type(error).__name__, extra=ids)
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception as defect:  # noqa: BLE001 - an error in reporting an error must not stop the work
            log.error("on_error raised %s", type(defect).__name__, extra=ids)
