"""Reading a PostgreSQL store where nothing may be written: on a hot standby, or by a role that may only select.

Rule: a standby shows what it has received of the primary, whole and in order, and perhaps a little late. So a host may
look dead here that is not; nothing follows from it, for whoever only reads takes nothing over.
"""

from __future__ import annotations

from typing import ClassVar

from agentscope_durable.contracts.errors import StoreReadOnly
from agentscope_durable.spi.record_store import Committed, Decide, Reads
from agentscope_durable.stores.records.postgres import PostgresRecordStore

__all__ = ["PostgresReadOnlyStore"]


class PostgresReadOnlyStore(PostgresRecordStore):
    """A `RecordStore` that can only be read. Open it with `open`; whatever would write raises `StoreReadOnly`."""

    writes: ClassVar[bool] = False

    async def transact(self, partition: str, reads: Reads, decide: Decide) -> Committed:
        raise StoreReadOnly(self.location)

    def renew(self, owner: str, lease_ms: int, value: bytes) -> None:
        raise StoreReadOnly(self.location)

    def announce(self, owner: str) -> None:
        raise StoreReadOnly(self.location)

    async def release(self, owner: str) -> None:
        raise StoreReadOnly(self.location)

    async def forget(self, owner: str, kinds: tuple[str, ...]) -> bool:
        raise StoreReadOnly(self.location)
