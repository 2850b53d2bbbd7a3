"""What a Session takes, and how busy the store is (BE-28).

Rule: nothing is counted on the way of a commit for this. Who asks pays for the looking.
"""

from __future__ import annotations

import msgspec

from agentscope_durable.backend.queries.reading import Reader
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.records import ObjectRecord, decode
from agentscope_durable.contracts.views import SessionSizeView, StoreView
from agentscope_durable.spi.record_store import PAGE_MAX, Range, Reads

__all__ = ["measure_session", "measure_store"]


async def measure_session(reader: Reader, question: q.MeasureSession) -> SessionSizeView:
    session = question.session
    records = await reader.read(session, Reads())
    size = await reader.records.measure(keys.partition(session))
    objects = object_bytes = 0
    after = ""
    while True:
        page = Range(keys.OBJECTS, after, PAGE_MAX)
        rows = (await reader.read(session, Reads(ranges=(page,)))).ranges[page]
        objects += len(rows)
        object_bytes += sum(decode(ObjectRecord, data, key=key).size for key, data in rows)
        if len(rows) < PAGE_MAX:
            break
        after = rows[-1][0]
    return SessionSizeView(
        session=session,
        events=records.next_seq - 1,
        pruned=records.pruned_through,
        commits=size.commits,
        log_bytes=size.log_bytes,
        records=size.records,
        record_bytes=size.record_bytes,
        head_bytes=size.head_bytes,
        objects=objects,
        object_bytes=object_bytes,
    )


async def measure_store(reader: Reader, _: q.MeasureStore) -> StoreView:
    return StoreView(**msgspec.structs.asdict(await reader.records.statistics()))
