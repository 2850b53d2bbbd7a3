"""Change hints between hosts by PostgreSQL's LISTEN and NOTIFY.

Rule 1: a hint is sent after the commit, in a transaction of its own. Within the commit it would make all commits of the
database queue for one lock.
Rule 2: what is published while a hint is on its way goes together with the next one, within a bound; beyond that it is
"anything". Nothing waits for this connection, and nothing depends on it: after it was lost, "anything" is heard.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, Final, Self

from agentscope_durable.contracts.errors import HostClosed, InvalidRequest, MissingExtra, Unavailable
from agentscope_durable.runtime.hints import ANYTHING, LocalWakeups, Ringable
from agentscope_durable.runtime.tasks import stop
from agentscope_durable.spi.environment import SYSTEM, Environment

try:
    import asyncpg
except ImportError as error:
    raise MissingExtra("hints through PostgreSQL", "postgres") from error

__all__ = ["PostgresWakeups"]

log = logging.getLogger("agentscope_durable.transports")

PAYLOAD_BYTES_MAX: Final = 7900
"""PostgreSQL takes less than 8,000 bytes."""
PAYLOADS_MAX: Final = 4
"""Notifications sent at once; what would need more is "anything"."""
PENDING_MAX: Final = 1024
CONNECT_SECONDS: Final = 10
SEND_SECONDS: Final = 5.0
QUIET_SECONDS: Final = 30.0
"""A connection that has been quiet for so long is asked whether it is still there."""
PAUSE_SECONDS: Final = (0.1, 0.5, 2.0, 5.0)
"""Before it connects again, the last one over and over."""
CHANNEL_BYTES_MAX: Final = 63
_FAULTS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


class PostgresWakeups:
    """`Wakeups` for all processes that connect to one database. Open it with `open`, close it after the backends.

    Listeners of this process are told at once; those of others when the notification arrives.
    """

    def __init__(self, dsn: str, channel: str, environment: Environment) -> None:
        """Internal: use `open`."""
        self._dsn = dsn
        self._channel = channel
        self._environment = environment
        self._local = LocalWakeups()
        self._me = environment.random_bytes(8).hex()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._lost = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, dsn: str, *, channel: str = "agentscope_durable", environment: Environment = SYSTEM) -> Self:
        """Connect and listen.

        Args:
            dsn: the database, reached directly: a pooler in transaction mode passes no notifications on.
            channel: the name that hosts of one store have in common.
            environment: pauses and chance.

        Raises:
            InvalidRequest: there is a pooler between, or the channel is no name, or the DSN is none.
            Unavailable: the server cannot be reached now.
        """
        if not 0 < len(channel.encode()) <= CHANNEL_BYTES_MAX or "\x00" in channel:
            raise InvalidRequest(f"a channel's name has 1 to {CHANNEL_BYTES_MAX} bytes", path="channel")
        if not isinstance(dsn, str) or not dsn.startswith(("postgresql://", "postgres://")):
            raise InvalidRequest("a DSN begins with postgresql://", path="dsn")
        there = cls(dsn, channel, environment)
        try:
            connection = await there._connect()
        except ValueError as error:
            raise InvalidRequest(
                f"this is no address of a PostgreSQL server: {type(error).__name__}", path="dsn"
            ) from None
        except _FAULTS as error:
            raise Unavailable(f"hints through PostgreSQL cannot be had: {type(error).__name__}") from error
        there._task = asyncio.create_task(there._serve(connection), name="postgres-hints")
        return there

    def publish(self, keys: tuple[str, ...]) -> None:
        self._local.publish(keys)
        with self._lock:
            if self._closed:
                return
            waiting = bool(self._pending)
            self._pending.update(dict.fromkeys(keys))
            if len(self._pending) > PENDING_MAX:
                self._pending = {ANYTHING: None}
        if not waiting:
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:
                # The loop this was opened on has ended: others live by polling.
                return

    def listen(self, keys: frozenset[str] | None = None) -> AbstractAsyncContextManager[AsyncIterator[frozenset[str]]]:
        return self._local.listen(keys)

    def ring(self, keys: frozenset[str], bell: Ringable) -> AbstractContextManager[None]:
        return self._local.ring(keys, bell)

    async def close(self) -> None:
        """Stop listening. What was published and is not on its way is dropped."""
        with self._lock:
            self._closed = True
        task, self._task = self._task, None
        if task is not None:
            await stop(task)

    async def __aenter__(self) -> Self:
        if self._closed:
            raise HostClosed("hints through PostgreSQL")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ the connection

    async def _connect(self) -> Any:
        connection = await asyncpg.connect(self._dsn, timeout=CONNECT_SECONDS, statement_cache_size=0)
        try:
            if await connection.fetchval("select pg_backend_pid()") != connection.get_server_pid():
                raise InvalidRequest(
                    "a pooler stands before this server, and passes no notifications on: name the server itself",
                    path="dsn",
                )
            self._lost.clear()
            connection.add_termination_listener(self._ended)
            await connection.add_listener(self._channel, self._hear)
        except BaseException:
            connection.terminate()
            raise
        return connection

    def _ended(self, connection: Any) -> None:
        del connection
        self._lost.set()
        self._wake.set()

    def _hear(self, connection: Any, pid: int, channel: str, payload: object) -> None:
        del connection, pid, channel
        sender, _, keys = str(payload).partition("|")
        if sender != self._me:
            self._local.publish(tuple(keys.split(",")) if keys else (ANYTHING,))

    async def _serve(self, connection: Any) -> None:
        attempts = 0
        try:
            while True:
                try:
                    if connection is None:
                        connection = await self._connect()
                        # What was said meanwhile was not heard.
                        self._local.publish((ANYTHING,))
                        self.publish((ANYTHING,))
                    attempts = 0
                    await self._send_until_lost(connection)
                except (*_FAULTS, InvalidRequest) as error:
                    log.debug("hints through PostgreSQL are interrupted: %s", type(error).__name__)
                if connection is not None:
                    connection.terminate()
                    connection = None
                await self._environment.sleep(PAUSE_SECONDS[min(attempts, len(PAUSE_SECONDS) - 1)])
                attempts += 1
        finally:
            if connection is not None:
                connection.terminate()

    async def _send_until_lost(self, connection: Any) -> None:
        while not self._lost.is_set():
            try:
                async with asyncio.timeout(QUIET_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                await connection.execute("select 1", timeout=SEND_SECONDS)
                continue
            self._wake.clear()
            with self._lock:
                pending, self._pending = list(self._pending), {}
            for payload in self._payloads(pending):
                await connection.execute("select pg_notify($1, $2)", self._channel, payload, timeout=SEND_SECONDS)

    def _payloads(self, keys: list[str]) -> Iterator[str]:
        """What tells of these keys: a few notifications of bounded size."""
        if not keys:
            return
        payloads: list[list[str]] = [[]]
        size = 0
        for key in keys:
            length = len(key.encode()) + 1
            if length > PAYLOAD_BYTES_MAX // 2 or ANYTHING in key or "," in key:
                payloads = [[ANYTHING]]
                break
            if size + length > PAYLOAD_BYTES_MAX - len(self._me) - 1:
                payloads.append([])
                size = 0
            payloads[-1].append(key)
            size += length
        if len(payloads) > PAYLOADS_MAX:
            payloads = [[ANYTHING]]
        for some in payloads:
            yield f"{self._me}|{','.join(some)}"
