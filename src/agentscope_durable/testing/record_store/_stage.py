"""How a test of the contract gets at a store, and what it writes."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentscope_durable.contracts.records import SessionHead
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.spi.record_store import (
    Change,
    Decide,
    Entry,
    Erase,
    LogRange,
    Prune,
    Reads,
    ReadyRow,
    Records,
    RecordStore,
    StreamRange,
    Unchanged,
)

_commits = itertools.count(1)

HEAD = SessionHead(namespace="test", session_id="s", created_ms=1)
NOTHING = Reads()


class Refusal(Exception):
    """What a decision of these tests raises."""


def commit_id() -> str:
    return f"{next(_commits):032x}"


def events(*texts: str) -> Entry:
    """An entry with one event per text."""
    array = "[" + ",".join(f'"{text}"' for text in texts) + "]"
    return Entry(events=array.encode() if texts else b"", count=len(texts))


def change(
    *,
    head: SessionHead = HEAD,
    entry: Entry | None = None,
    puts: tuple[tuple[str, bytes | None], ...] = (),
    ready: tuple[ReadyRow, ...] = (),
    unready: tuple[tuple[str, str], ...] = (),
    receipt: object = None,
    hints: tuple[str, ...] = (),
    prune: Prune | None = None,
    erase: Erase | None = None,
) -> Change:
    return Change(
        head=head,
        commit_id=commit_id(),
        entry=entry,
        puts=puts,
        ready=ready,
        unready=unready,
        receipt=receipt,
        hints=hints,
        prune=prune,
        erase=erase,
    )


def always(answer: Change | Unchanged) -> Decide:
    return lambda view, now_ms: answer


class StoreStage:
    """How a test gets at the store."""

    pytestmark = pytest.mark.asyncio

    async def open(self, place: Path) -> RecordStore:
        """Open a store at `place`. Called again for the same place, it opens the same records again."""
        raise NotImplementedError

    async def pass_time(self, milliseconds: int) -> None:
        """Let at least this much time pass on the store's clock."""
        await SYSTEM.sleep((milliseconds + 1) / 1000)

    @asynccontextmanager
    async def opened(self, place: Path) -> AsyncGenerator[RecordStore]:
        store = await self.open(place)
        try:
            yield store
        finally:
            await store.close()


async def read(
    store: RecordStore,
    *,
    keys: tuple[str, ...] = (),
    owners: tuple[str, ...] = (),
    log: LogRange | None = None,
    streams: tuple[StreamRange, ...] = (),
) -> Records:
    return await store.read("p", Reads(keys=keys, owners=owners, log=log, streams=streams))


async def four_rows(store: RecordStore) -> None:
    """Events 1-2, 3-4, 5-6 and 7-8, and a row without events between each two."""
    for n in range(1, 5):
        entry = Entry(b'["a","b"]', 2, private=b"p", journal=b"j", stream="main", at=n)
        await store.transact("p", NOTHING, always(change(entry=entry)))
        await store.transact("p", NOTHING, always(change(entry=Entry(private=b"between"))))
