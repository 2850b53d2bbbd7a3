"""Which store a command speaks to, and how it finds what its arguments name."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple, TypeVar

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.cli.options import OBJECTS_VARIABLE
from agentscope_durable.contracts.errors import InvalidRequest, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import check_id, check_key
from agentscope_durable.contracts.keys import spell
from agentscope_durable.runtime.handles import DurableSession, DurableTurn
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.object_store import ObjectStore

__all__ = ["Opened", "changed", "draw_request_id", "looked", "opened", "parse_session", "spell", "without_password"]

POLL_INTERVAL: Final = 0.25
"""Seconds between two looks while something is waited for or followed."""

T = TypeVar("T")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_POSTGRES: Final = ("postgresql", "postgres")


class Opened(NamedTuple):
    """A store while one command uses it."""

    backend: LocalBackend | PostgresBackend
    runtime: DurableRuntime
    operations: HostOperations

    def session(self, name: str) -> DurableSession:
        return self.runtime.get_session(parse_session(name))

    async def turn(self, turn_id: str) -> DurableTurn:
        """The Turn, in whatever Session it is."""
        key = await self.operations.find_turn(turn_id)
        return self.runtime.get_session(key.session).get_thread(key.thread_id).get_turn(key.turn_id)

    async def run(self, name: str) -> tuple[DurableTurn, str]:
        """A Run by its id, which begins with its Turn's; or the newest Run of a Turn."""
        turn_id, dot, _ = check_id("run_id", name).rpartition(".")
        if dot:
            return await self.turn(turn_id), name
        turn = await self.turn(name)
        runs = (await turn.status()).runs
        if not runs:
            raise NotFound("run of turn", name)
        return turn, f"{name}.{runs}"

    async def target(self, name: str) -> DurableSession | DurableTurn:
        return self.session(name) if "/" in name else await self.turn(name)


@asynccontextmanager
async def opened(store: str, *, write: bool) -> AsyncGenerator[Opened]:
    """The store for one command; it is never made, and only written by what controls something."""
    scheme = store.partition("://")[0].lower() if _URL.match(store) else ""
    if scheme and scheme not in _POSTGRES:
        raise InvalidRequest(f"a store is a folder or a postgresql:// URL, and not a {scheme} URL", path="--store")
    objects = _objects()
    if scheme:
        opening = PostgresBackend.open(store, read_only=not write, object_store=objects)
    else:
        opening = LocalBackend.open(store, create=False, read_only=not write, object_store=objects)
    async with (
        opening as backend,
        DurableRuntime(backend=backend, poll_interval=POLL_INTERVAL) as runtime,
    ):
        yield Opened(backend, runtime, HostOperations(backend))


def _objects() -> ObjectStore | None:
    """Where the store's large bodies are, if not beside its records."""
    url = os.environ.get(OBJECTS_VARIABLE)
    if not url:
        return None
    from agentscope_durable.stores.objects.cloud import object_store_at

    return object_store_at(url)


def looked(store: str, work: Callable[[Opened], Awaitable[T]]) -> T:
    """What a reading command found."""
    return asyncio.run(_with(store, work, write=False))


def changed(store: str, work: Callable[[Opened], Awaitable[T]]) -> T:
    """What a command that changes something was answered."""
    return asyncio.run(_with(store, work, write=True))


async def _with(store: str, work: Callable[[Opened], Awaitable[T]], *, write: bool) -> T:
    async with opened(store, write=write) as there:
        return await work(there)


def without_password(store: str) -> str:
    """The store as it may be printed."""
    return re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1@", store)


def draw_request_id() -> str:
    return f"cli-{SYSTEM.random_bytes(10).hex()}"


# ------------------------------------------------------------ how a Session is written


def parse_session(text: str) -> SessionKey:
    """`namespace/id`, as `keys.spell` writes it, divided at the first slash. `%2F` is a slash and `%25` a percent sign;
    nothing else is escaped.

    Raises:
        InvalidRequest: no slash, or an id that is not allowed.
    """
    namespace, slash, session_id = text.partition("/")
    if not slash:
        raise InvalidRequest("a Session is written namespace/id", path="SESSION")
    key = SessionKey(_unescape(namespace), _unescape(session_id))
    check_key(key)
    return key


def _unescape(name: str) -> str:
    return name.replace("%2F", "/").replace("%2f", "/").replace("%25", "%")
