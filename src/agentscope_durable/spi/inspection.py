"""What a store can tell about its own health, beyond its promises. Optional: a store without it is examined without."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec

from agentscope_durable.contracts.change import ReadyRow
from agentscope_durable.contracts.discreet import Discreet, Words

__all__ = ["DamagePage", "DamagedRow", "InspectedObjects", "InspectedRecords", "StoreCondition"]


class StoreCondition(Discreet, frozen=True):
    """How a record store is.

    Attributes:
        facts: how it is set up, for people: versions, format, settings.
        faults: what the technology itself finds damaged.
        risks: what can damage it: a defect of the technology's version, a setting that is not as it should be.
        strays: lock files that no host holds and no lease names.
        drafts: files of makings of the store that were killed, or were too late.
    """

    facts: dict[str, str] = {}
    faults: tuple[Words, ...] = ()
    risks: tuple[Words, ...] = ()
    strays: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()


class DamagedRow(msgspec.Struct, frozen=True):
    """A log row that is not what was written.

    Attributes:
        first, count: the events it holds, or held.
        stream, at: the Thread and the position it took; "" and 0 for none.
        parts: what of it was altered, for people.
    """

    first: int
    count: int
    stream: str
    at: int
    parts: str


class DamagePage(msgspec.Struct, frozen=True):
    """`after` goes on from here; None when that was all."""

    rows: tuple[DamagedRow, ...]
    looked_at: int
    after: tuple[int, int] | None


@runtime_checkable
class InspectedRecords(Protocol):
    """A record store that can be looked into. Nothing here writes; each call is one short reading but `condition`."""

    async def condition(self, *, deep: bool) -> StoreCondition:
        """How it is. It reads the whole store once; `deep` compares its indexes with its tables, too."""
        ...

    async def damaged(self, partition: str, after: tuple[int, int] | None, limit: int) -> DamagePage:
        """The next `limit` log rows of a partition, those that are not what was written named."""
        ...

    async def ready_of(self, partition: str) -> list[ReadyRow]:
        """The ready rows of a partition, due or not."""
        ...


@runtime_checkable
class InspectedObjects(Protocol):
    """An object store whose partitions can be listed."""

    def folder_of(self, partition: str) -> str:
        """The name under which a partition's objects stand."""
        ...

    async def folders(self, after: str = "", limit: int = 1000) -> list[str]:
        """Names of partitions that have objects, in order."""
        ...

    async def names_in(self, folder: str, after: str = "", limit: int = 1000) -> list[str]:
        """What stands in a folder, in order; [] when there is none."""
        ...

    async def remove_from(self, folder: str, name: str) -> None:
        """Remove something that stands in a folder; absent is fine."""
        ...
