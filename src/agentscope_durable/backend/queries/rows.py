"""What rows of the log hold: events and private facts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.events import BODY_FIELDS, StoredEvent, ToolChanged
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import PrivateFact
from agentscope_durable.spi.record_store import LogRow

__all__ = ["Found", "events_of", "open_payload", "private_facts", "stored_events", "tool_changed", "weight"]

_events = msgspec.json.Decoder(list[StoredEvent])
_facts = msgspec.json.Decoder(list[PrivateFact])
_object = msgspec.json.Decoder(dict[str, Any])
_raw_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_body = msgspec.json.Decoder(Body)


class Found(NamedTuple):
    """An event of the log."""

    sequence: int
    at_ms: int
    event: StoredEvent


def stored_events(row: LogRow) -> list[StoredEvent]:
    if not row.events:
        return []
    try:
        return _events.decode(row.events)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"events from {row.first}", "list[StoredEvent]", str(error)) from error


def private_facts(row: LogRow) -> list[PrivateFact]:
    if not row.private:
        return []
    try:
        return _facts.decode(row.private)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"{row.stream} at {row.at}", "list[PrivateFact]", str(error)) from error


def events_of(log: Iterable[LogRow], *, after: int, through: int) -> Iterable[Found]:
    """The events of rows with `after < sequence <= through`, in order."""
    for row in log:
        for sequence, event in enumerate(stored_events(row), row.first):
            if after < sequence <= through:
                yield Found(sequence, row.at_ms, event)


def tool_changed(found: Found) -> ToolChanged:
    try:
        return msgspec.json.decode(found.event.payload, type=ToolChanged)
    except msgspec.DecodeError as error:
        raise CorruptRecord(f"event {found.sequence}", found.event.type, str(error)) from error


def _body_fields(event_type: str) -> tuple[str, ...]:
    return ("value",) if event_type.startswith("x.") else BODY_FIELDS.get(event_type, ())


def weight(event: StoredEvent) -> int:
    """Bytes an event will have when its bodies are opened."""
    size = len(memoryview(event.payload))
    fields = _body_fields(event.type)
    if fields:
        for name, raw in _raw_object.decode(event.payload).items():
            if name in fields:
                size += _body.decode(raw).size
    return size


async def open_payload(bodies: Bodies, session: SessionKey, event: StoredEvent) -> dict[str, Any]:
    """The payload as readers see it: bodies in plain."""
    fields = _body_fields(event.type)
    if not fields:
        return _object.decode(event.payload)
    data: dict[str, Any] = dict(_raw_object.decode(event.payload))
    for name, raw in data.items():
        if name in fields:
            data[name] = await bodies.open_value(session, _body.decode(raw))
        else:
            data[name] = msgspec.json.decode(raw)
    return data
