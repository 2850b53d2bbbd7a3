"""The contract of a `RecordStore`: every promise of the port, as tests.

A provider's whole test file is a subclass::

    class TestMyRecordStore(RecordStoreContract):
        async def open(self, place: Path) -> RecordStore:
            return await MyRecordStore.open(place / "store")

The tests are coroutines: run them with pytest-asyncio. `pass_time` is worth overriding where the
store's clock can be moved by hand; without that the suite waits a few milliseconds of real time.
"""

from __future__ import annotations

import pytest

from agentscope_durable.testing.record_store._changes import ChangesContract
from agentscope_durable.testing.record_store._handles import HandlesContract
from agentscope_durable.testing.record_store._log import LogContract
from agentscope_durable.testing.record_store._pages import PagesContract
from agentscope_durable.testing.record_store._stage import (
    HEAD,
    NOTHING,
    Refusal,
    always,
    change,
    commit_id,
    events,
    read,
)
from agentscope_durable.testing.record_store._time import TimeContract

__all__ = ["HEAD", "NOTHING", "RecordStoreContract", "Refusal", "always", "change", "commit_id", "events", "read"]


class RecordStoreContract(ChangesContract, LogContract, TimeContract, PagesContract, HandlesContract):
    """Subclass it, give it `open`, and every promise is checked under the name it has in the port."""

    pytestmark = pytest.mark.asyncio
