"""The way every handle takes to the backend.

Rule: what is wrong with *how* a runtime is used is said before anything is sent: another event loop, another process,
a closed runtime. So none of these can leave an unknown outcome behind.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import AnyCommand
from agentscope_durable.contracts.errors import HostClosed, Misuse, UsedAfterFork, WrongLoop
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import Binding
from agentscope_durable.runtime.admitted import Admitted
from agentscope_durable.runtime.checkpoint import Baselines
from agentscope_durable.runtime.feeds import Feeds
from agentscope_durable.runtime.observers import Observers
from agentscope_durable.runtime.tasks import Tasks
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.environment import Environment
from agentscope_durable.spi.live import LiveEvents

SUBJECT = "runtime"


CLOSE_TIMEOUT = 2.0
"""Seconds for callbacks under way to finish when the runtime closes, and for those that were then cancelled."""


class Abortable(Protocol):
    """An open stream: it ends with the runtime."""

    def abort(self) -> None: ...


class Closable(Protocol):
    """A subscription: it is closed with the runtime."""

    def close(self) -> object: ...


class Report(Protocol):
    def __call__(self, error: BaseException, what: str, **ids: str) -> None:
        """Tell of an error that nobody is waiting for. Never raises."""
        ...


class Definitions(Protocol):
    """Finds the definition that a new Session or Thread is pinned to."""

    async def resolve(self, name: str) -> Binding: ...


class Door:
    """Attributes:
    admitted: inputs that the host of this runtime need not read back.
    baselines: copies settled positions.
    definitions: for new Sessions and Threads.
    live: where previews come from.
    feeds: what is read for all who watch the same Session.
    observers: where callbacks of subscriptions are called.
    callbacks: the tasks of subscriptions.
    """

    def __init__(
        self,
        *,
        backend: SessionBackend,
        environment: Environment,
        poll_interval: float,
        live: LiveEvents,
        definitions: Definitions,
        report: Report,
        observer_parallelism: int,
        baselines: Baselines,
    ) -> None:
        self._backend = backend
        self.environment = environment
        self.poll_interval = poll_interval
        self.live = live
        self.definitions = definitions
        self.feeds = Feeds(self.query, backend.wakeups(), environment, poll_interval)
        self.report = report
        self.observers = Observers(environment, observer_parallelism)
        self.callbacks = Tasks()
        self.baselines = baselines
        self.admitted = Admitted()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = os.getpid()
        self._streams: set[Abortable] = set()
        self._subscriptions: set[Closable] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """The runtime may be used here and now; the first use binds it to its event loop.

        Raises:
            HostClosed, WrongLoop, UsedAfterFork: it may not.
        """
        if os.getpid() != self._process:
            raise UsedAfterFork(SUBJECT)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise Misuse(f"the {SUBJECT} is used outside an asyncio event loop") from None
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise WrongLoop(SUBJECT)
        if self._closed:
            raise HostClosed(SUBJECT)

    async def execute(self, command: AnyCommand) -> Any:
        self.check()
        return await self._backend.execute(command)

    async def query(self, question: Any) -> Any:
        self.check()
        return await self._backend.query(question)

    async def body(self, session: SessionKey, value: object) -> Body:
        """A JSON value as a body of this Session."""
        self.check()
        return await self._backend.put_body(session, msgspec.json.encode(value))

    def opened(self, stream: Abortable) -> None:
        self._streams.add(stream)

    def ended(self, stream: Abortable) -> None:
        self._streams.discard(stream)

    def subscribed(self, subscription: Closable, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do the work of a subscription, and close it with the runtime."""
        self._subscriptions.add(subscription)
        task = self.callbacks.start(work, name="subscription")
        task.add_done_callback(lambda _: self._subscriptions.discard(subscription))
        return task

    async def close(self) -> None:
        """From now on nothing passes. Subscriptions and streams end; what is stored goes on.

        A callback under way may finish, within a bound; then a coroutine is cancelled, and a thread is left alone.
        """
        self._closed = True
        for subscription in list(self._subscriptions):
            _ = subscription.close()
        for stream in list(self._streams):
            stream.abort()
        self.feeds.close()
        self.observers.close()
        if not await self.callbacks.wait(CLOSE_TIMEOUT):
            self.callbacks.cancel()
            await self.callbacks.wait(CLOSE_TIMEOUT)
        await self.feeds.wait(CLOSE_TIMEOUT)
