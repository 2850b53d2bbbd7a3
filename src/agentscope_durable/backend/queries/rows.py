"""What rows of the log hold: events and private facts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.events import BODY_FIELDS, ToolChanged
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import PrivateFact, StoredEvent, decode_events, decode_facts
from agentscope_durable.spi.record_store import LogRow

__all__ = ["Found", "Payload", "events_of", "last_of", "payload_of", "private_facts", "tool_changed"]

_object = msgspec.json.Decoder(dict[str, Any])


class Found(NamedTuple):
    """An event of the log."""

    sequence: int
    at_ms: int
    event: StoredEvent


def last_of(row: LogRow) -> int:
    """Number of the last event of a row."""
    return row.first + row.count - 1


def private_facts(row: LogRow) -> list[PrivateFact]:
    return decode_facts(row.private, f"{row.stream} at {row.at}")


def events_of(log: Iterable[LogRow], *, after: int, through: int) -> Iterator[Found]:
    """The events of rows with `after < sequence <= through`, in order, without those that were pruned."""
    for row in log:
        for sequence, event in enumerate(decode_events(row.events, row.first), row.first):
            if event is not None and after < sequence <= through:
                # A row that is there twice tells its events once (C82).
                after = sequence
                yield Found(sequence, row.at_ms, event)


def tool_changed(found: Found) -> ToolChanged:
    try:
        return msgspec.json.decode(found.event.payload, type=ToolChanged)
    except UNREADABLE as error:
        raise CorruptRecord(f"event {found.sequence}", found.event.type, str(error)) from error


class Payload:
    """An event's payload, on its way to readers: large bodies may still be elsewhere (D11).

    Attributes:
        size: bytes it will have when all bodies are opened.
    """

    __slots__ = ("_data", "_elsewhere", "size")

    def __init__(self, data: dict[str, Any], elsewhere: dict[str, Body], size: int) -> None:
        self._data = data
        self._elsewhere = elsewhere
        self.size = size

    async def open(self, bodies: Bodies, session: SessionKey) -> dict[str, Any]:
        """The payload as readers see it: bodies in plain."""
        for name, body in self._elsewhere.items():
            self._data[name] = await bodies.open_value(session, body)
        return self._data


def payload_of(found: Found) -> Payload:
    event = found.event
    fields = ("value",) if event.type.startswith("x.") else BODY_FIELDS.get(event.type, ())
    size = len(memoryview(event.payload))
    elsewhere: dict[str, Body] = {}
    try:
        data = _object.decode(event.payload)
        for name in fields:
            stored = data.get(name)
            if stored is None:
                continue
            # As a `Body` is stored, decoded together with everything around it.
            data[name], place, large = stored
            if place:
                elsewhere[name] = Body(name=place, size=large)
                size += large
    except (TypeError, ValueError, *UNREADABLE) as error:
        raise CorruptRecord(f"event {found.sequence}", event.type, str(error)) from error
    return Payload(data, elsewhere, size)
