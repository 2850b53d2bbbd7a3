"""How a lease is renewed in PostgreSQL: in a thread, on a loop and over a connection of its own.

Neither a blocked event loop nor a queue of changes nor a pool that is used up keeps a renewal waiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import HostClosed, Unavailable, Uncertain
from agentscope_durable.spi.environment import Environment, Thread
from agentscope_durable.stores._postgres_connections import CONNECT_SECONDS, Line, Source
from agentscope_durable.stores._postgres_errors import FAULTS, lost, translate

__all__ = ["Renewer"]

STATEMENT_SECONDS: Final = 10.0
JOIN_SECONDS: Final = 5.0
SUBJECT: Final = "record store"


class Renewer:
    """Writes leases from any thread, blocking.

    Args:
        source: where its connection comes from; asked when it is first needed.
        statement: takes owner, lease in milliseconds and value.
    """

    def __init__(self, source: Callable[[], Source], statement: str, environment: Environment) -> None:
        self._source = source
        self._statement = statement
        self._environment = environment
        self._lock = threading.Lock()
        self._closed = False
        self._thread: Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line: Line | None = None

    def renew(self, owner: bytes, lease_ms: int, value: bytes) -> None:
        with self._lock:
            if self._closed:
                raise HostClosed(SUBJECT)
            loop = self._started()
        call = asyncio.run_coroutine_threadsafe(self._renew(owner, lease_ms, value), loop)
        try:
            # The second attempt connects anew.
            call.result(2 * (CONNECT_SECONDS + STATEMENT_SECONDS))
        except concurrent.futures.TimeoutError as error:
            call.cancel()
            raise Unavailable("the lease could not be renewed in time") from error
        except concurrent.futures.CancelledError as error:
            raise HostClosed(SUBJECT) from error

    def close(self) -> None:
        """Blocking; nothing is renewed afterwards."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
            thread = self._thread
        if loop is None or thread is None:
            return
        with contextlib.suppress(*FAULTS):
            asyncio.run_coroutine_threadsafe(self._end(), loop).result(JOIN_SECONDS)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(JOIN_SECONDS)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            started = threading.Event()

            def run() -> None:
                asyncio.set_event_loop(loop)
                loop.call_soon(started.set)
                try:
                    loop.run_forever()
                finally:
                    loop.close()

            self._thread = self._environment.start_thread(run, name="postgres-heartbeat")
            started.wait()
            self._loop = loop
        return self._loop

    async def _renew(self, owner: bytes, lease_ms: int, value: bytes) -> None:
        if self._line is None:
            self._line = Line(self._source())
        line = self._line
        async with line.taken():
            for last in (False, True):
                sent = False
                try:
                    await line.connected()
                    _failpoints.hit("store.renew.before")
                    sent = True
                    await line.fetch(self._statement, [owner, lease_ms, value], timeout=STATEMENT_SECONDS)
                    _failpoints.hit("store.renew.after")
                    return
                except Exception as error:
                    if lost(error) and not last:
                        # Twice is fine: a lease is not counted, it is dated.
                        continue
                    if sent and lost(error):
                        raise Uncertain("the renewal", reason=type(error).__name__) from error
                    raise translate(error, line.location) from error

    async def _end(self) -> Any:
        if self._line is not None:
            await self._line.close()
