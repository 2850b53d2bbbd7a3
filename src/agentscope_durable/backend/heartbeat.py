"""Keeps a host's lease alive from a thread of its own.

A tool that blocks the event loop, or a long queue of commits, must not make a healthy host look
dead (C22, TM-09): the renewal has its own thread and its own connection, and no lock in common
with either.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from agentscope_durable.spi.environment import Environment, Thread
from agentscope_durable.spi.record_store import RecordStore

log = logging.getLogger("agentscope_durable.backend")

RENEWALS_PER_LEASE = 3
JOIN_SECONDS = 5.0


class LeaseHeartbeat:
    """Renews every third of the lease. What the host publishes may change between renewals."""

    def __init__(
        self, records: RecordStore, environment: Environment, owner: str, lease_ms: int, published: bytes
    ) -> None:
        self._records = records
        self._environment = environment
        self._owner = owner
        self._lease_ms = lease_ms
        self._published = published
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._began = False
        self._thread: Thread | None = None
        self._last_renewal = 0.0
        self._failure: BaseException | None = None

    @property
    def last_renewal(self) -> float:
        return self._last_renewal

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def publish(self, published: bytes) -> None:
        """What the next renewal tells about this host."""
        self._published = published

    def start(self) -> None:
        """Renew once in the caller's thread, so that the lease stands when this returns, then go on.

        Nobody may wait for it any more, since a thread cannot be called back: a second `start` waits for the first,
        and one that is overtaken by `stop` begins nothing.
        """
        with self._starting:
            if self._thread is not None or self._stopping.is_set():
                return
            self._began = True
            # Before the lease stands: a host that dies in between must not look alive while it lasts (D14).
            self._records.announce(self._owner)
            self._renew()
            if self._failure is not None:
                raise self._failure
            if not self._stopping.is_set():
                self._thread = self._environment.start_thread(self._run, name=f"durable-heartbeat-{self._owner[-8:]}")

    def _run(self) -> None:
        while not self._stopping.wait(self._lease_ms / 1000 / RENEWALS_PER_LEASE):
            if self._loop is not None and self._loop.is_closed():
                # A loop that is blocked comes back; a closed one never does, and what it owned is for others.
                log.warning("lease of %s is not renewed any more: its event loop was closed", self._owner)
                return
            self._renew()

    def _renew(self) -> None:
        try:
            self._records.renew(self._owner, self._lease_ms, self._published)
        except Exception as error:  # noqa: BLE001 - the next beat tries again; the runtime sees `failure`
            self._failure = error
            log.warning("lease of %s was not renewed: %s", self._owner, type(error).__name__)
        else:
            self._failure = None
            self._last_renewal = self._environment.monotonic()

    async def stop(self, *, release: bool = True) -> None:
        self._stopping.set()
        if not self._began:
            return
        await self._environment.call_in_thread(self._join)
        if release and self._began:
            self._began = False
            await self._records.release(self._owner)

    def _join(self) -> None:
        # A renewal may wait for the lock of another process; it is not waited for as long.
        if self._starting.acquire(timeout=JOIN_SECONDS):
            thread, self._thread = self._thread, None
            self._starting.release()
            if thread is not None:
                thread.join(JOIN_SECONDS)
