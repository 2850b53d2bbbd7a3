"""What the parts of one running host share: its identity, its backend, and where errors go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import AnyCommand, Claim, ClaimExecution
from agentscope_durable.contracts.errors import DurableError, HostClosed, LimitExceeded, Retry, Unconfirmed
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.runtime.tasks import Tasks
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.environment import Environment
from agentscope_durable.spi.live import LiveEvents

log = logging.getLogger("agentscope_durable.runtime")

T = TypeVar("T")

RETRY_SECONDS_MAX = 300.0
"""How long a question or an owner's command is tried again while the store is away. The work stands still meanwhile."""
RETRY_WAIT = 0.05
RETRY_WAIT_MAX = 5.0
"""Seconds between two tries: doubling from the first to the second."""

CLAIMS = (Claim, ClaimExecution)
LASTING = (LimitExceeded, HostClosed)
"""Errors of the Retry branch that asking again at once does not cure."""

OnError = Callable[[BaseException], None]
"""Told of errors that no caller sees. What it raises is logged and changes nothing (ST-12)."""


class Host:
    """One runtime as the work it does sees it.

    Attributes:
        owner: identity of this host: its name and a nonce of this process, so that a restarted host with the same
            name is another owner (C14).
        draining: claim nothing new.
        closing: bring what runs to a boundary and give it back.
        ended: it is closed; nothing is tried again.
        unheard: a claim had no answer. It may be carried out even after this host has ended, and what it takes is then
            found under this host's lease alone: that must run out by itself.
        asked_again: how often a command of an owner, or a question or body of the work in hand, was sent again because
            the store had not answered it.
        on_asked_again: told of each.
        recover_every_step: drop a Run wherever a Step or a part of it is stored and nothing is under way, and take it
            over: every Step then begins from what is stored.
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
        recover_every_step: bool = False,
    ) -> None:
        self.backend = backend
        self.environment = environment
        self.owner = owner
        self.poll_interval = poll_interval
        self.live = live
        self.tasks = Tasks()
        self.draining = False
        self.closing = False
        self.ended = False
        self.unheard = False
        self.asked_again = 0
        self.on_asked_again: Callable[[], None] | None = None
        self.recover_every_step = recover_every_step
        self._on_error = on_error

    async def execute(self, command: AnyCommand) -> Any:
        return await self.backend.execute(command, audience=Audience.HOST)

    async def query(self, question: Any) -> Any:
        return await self._answer(lambda: self.backend.query(question, audience=Audience.HOST))

    async def put_body(self, session: SessionKey, content: bytes) -> Body:
        """A large body is marked and stored before the commit that refers to it, and either may meet a lock (C73)."""
        return await self._answer(lambda: self.backend.put_body(session, content))

    async def open_body(self, session: SessionKey, body: Body) -> bytes:
        return await self._answer(lambda: self.backend.open_body(session, body))

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until the store answers what may be asked again: there is nothing better to do while it is away."""
        wait, deadline = RETRY_WAIT, self.environment.monotonic() + RETRY_SECONDS_MAX
        while True:
            try:
                return await ask()
            except (Retry, Unconfirmed) as error:
                if isinstance(error, LASTING) or self.ended or self.environment.monotonic() > deadline:
                    raise
            self.count_again()
            await self.environment.sleep(wait)
            wait = min(2 * wait, RETRY_WAIT_MAX)

    def count_again(self) -> None:
        self.asked_again += 1
        if self.on_asked_again is not None:
            self.on_asked_again()

    def report(self, error: BaseException, what: str, **ids: str) -> None:
        """Say that something went wrong that nobody is waiting for. Never raises."""
        # Our own errors hold no secrets; the text of a stranger's may.
        text = f"{type(error).__name__}: {error.what}" if isinstance(error, DurableError) else type(error).__name__
        log.warning("%s: %s", what, text, extra=ids)
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception as defect:  # noqa: BLE001 - an error in reporting an error must not stop the work
            log.error("on_error raised %s", type(defect).__name__, extra=ids)


class Delivery:
    """Sends one owner's command until its outcome is known.

    `unsure` is True once an answer was lost: a refusal then may mean that the command stands already.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.unsure = False

    async def send(self, command: AnyCommand, **ids: str) -> Any:
        """The receipt.

        Raises:
            Rejected: refused; look at `unsure`.
            Retry, Unconfirmed: the store stayed away for `RETRY_SECONDS_MAX`, or it is closed.
        """
        environment = self._host.environment
        wait, deadline = RETRY_WAIT, environment.monotonic() + RETRY_SECONDS_MAX
        claims = isinstance(command, CLAIMS)
        while True:
            try:
                return await self._host.execute(command)
            except asyncio.CancelledError:
                self._host.unheard = self._host.unheard or claims
                raise
            except (Retry, Unconfirmed) as error:
                if isinstance(error, Unconfirmed):
                    self.unsure = True
                    self._host.unheard = self._host.unheard or claims
                if isinstance(error, LASTING) or self._host.ended or environment.monotonic() > deadline:
                    raise
                log.warning("%s is tried again: %s", type(command).__name__, error.what, extra=ids)
                self._host.count_again()
            if self.unsure and isinstance(command, CLAIMS):
                command = replace(command, again=True)
            await environment.sleep(wait)
            wait = min(2 * wait, RETRY_WAIT_MAX)
