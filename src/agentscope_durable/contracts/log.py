"""What a row of the log says: public events and private facts, and the short form in which they are stored.

Rule 1: a row says an id once. Nearly all of its bytes that are nobody's content are ids of one Turn, and each of them
is the one above it with a little more at its end. So an event leaves out where it happened if that is where the event
before it did, and an id that begins with another one is written as what comes after that.
Rule 2: the short form holds any id. What an id has in common with another one is looked at and never assumed: ids that
an adapter of one's own made up are written as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.status import ModelObservation, ModelPurpose, ModelStatus, StepPhase, StepStatus

__all__ = [
    "ModelFact",
    "PrivateFact",
    "StepFact",
    "StoredEvent",
    "Usage",
    "decode_events",
    "decode_facts",
    "encode_events",
    "encode_facts",
]

_WHOLE = "="
"""Begins an id that is written as it is. One that begins with "." comes after another one; "" is no id."""

_encoder = msgspec.json.Encoder()


def _short(value: str, base: str) -> str:
    if not value:
        return ""
    after = len(base)
    return value[after:] if base and value.startswith(base) and value[after : after + 1] == "." else _WHOLE + value


def _long(short: str, base: str) -> str:
    if short[:1] == ".":
        return base + short
    if short and short[0] != _WHOLE:
        raise msgspec.ValidationError(f"an id begins with {short[0]!r}")
    return short[1:]


# ---- public events: the `events` column ----


class StoredEvent(Discreet, frozen=True):
    """An event inside the `events` column; its number and time are those of the row."""

    type: str
    thread_id: str
    turn_id: str
    run_id: str
    step_id: str
    payload: msgspec.Raw


class _There(NamedTuple):
    """An event where the one before it was; the first of a row: of the Session."""

    type: str
    payload: msgspec.Raw


class _Elsewhere(msgspec.Struct, array_like=True):
    """An event with its place. The Run is short after the Turn, the Step after the Run."""

    type: str
    payload: msgspec.Raw
    thread_id: str | None = None
    turn_id: str = ""
    run_id: str = ""
    step_id: str = ""


_NOWHERE = ("", "", "", "")
_events = msgspec.json.Decoder(list[_Elsewhere | None])


def encode_events(events: Sequence[StoredEvent | None]) -> bytes:
    """The `events` column of a log row; b"" if it holds none.

    Args:
        events: in order, None where one was pruned.
    """
    told: list[_There | _Elsewhere | None] = []
    empty, place = True, _NOWHERE
    for event in events:
        if event is None:
            told.append(None)
            continue
        empty = False
        here = (event.thread_id, event.turn_id, event.run_id, event.step_id)
        if here == place:
            told.append(_There(event.type, event.payload))
            continue
        place = here
        thread, turn, run, step = here
        told.append(_Elsewhere(event.type, event.payload, thread, turn, _short(run, turn), _short(step, run)))
    return b"" if empty else _encoder.encode(told)


def decode_events(column: bytes, first: int) -> list[StoredEvent | None]:
    """The events of a log row in order, None where one was pruned. `first` is the number of its first event.

    Raises:
        CorruptRecord: the bytes are no events; they are left as they are.
    """
    if not column:
        return []
    try:
        return list(_placed(_events.decode(column)))
    except UNREADABLE as error:
        raise CorruptRecord(f"events from {first}", "list[StoredEvent]", str(error)) from error


def _placed(told: Iterable[_Elsewhere | None]) -> Iterator[StoredEvent | None]:
    thread, turn, run, step = _NOWHERE
    for event in told:
        if event is None:
            yield None
            continue
        if event.thread_id is not None:
            thread, turn = event.thread_id, event.turn_id
            run = _long(event.run_id, turn)
            step = _long(event.step_id, run)
        yield StoredEvent(event.type, thread, turn, run, step, event.payload)


# ---- private facts: the `private` column ----


class StepFact(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A Step began, reached a phase or ended."""

    step_id: str
    run_id: str
    number: int
    phase: StepPhase
    status: StepStatus = StepStatus.RUNNING
    resumed_from: str = ""
    reasoning: int = 0


class Usage(Discreet, frozen=True, array_like=True):
    """Tokens of one request. A count that is not known stays None, never zero (MC-04)."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None


class ModelFact(Discreet, frozen=True, array_like=True, tag="m"):
    """A model call or one request inside it changed.

    Attributes:
        request: number of the request inside the call, from 1; 0 speaks of the call itself.
        elapsed_ms: by the host's monotonic clock; None while it runs or is lost.
        complete: the usage is all there is to know.
    """

    model_call_id: str
    run_id: str
    step_id: str
    request: int
    status: ModelStatus
    model: str = ""
    purpose: ModelPurpose = ModelPurpose.REPLY
    observation: ModelObservation = ModelObservation.MODEL_CALL
    message_id: str = ""
    attempt: int = 0
    usage: Usage | None = None
    complete: bool = False
    elapsed_ms: int | None = None
    error: Words = ""


PrivateFact = StepFact | ModelFact


class _Facts(msgspec.Struct, array_like=True):
    """Facts whose ids are short after `base`."""

    base: str
    facts: list[PrivateFact]


_facts = msgspec.json.Decoder(_Facts)


def encode_facts(facts: Sequence[PrivateFact]) -> bytes:
    """The `private` column of a log row; b"" if it holds none."""
    if not facts:
        return b""
    # Of a Run of a Turn that is the Turn: all ids of a row begin with it.
    base = facts[0].run_id.rpartition(".")[0]
    return _encoder.encode(_Facts(base, list(_named(facts, base, _short))))


def _named(facts: Iterable[PrivateFact], base: str, form: Callable[[str, str], str]) -> Iterator[PrivateFact]:
    """The facts with their ids in another form."""
    for fact in facts:
        run, step = form(fact.run_id, base), form(fact.step_id, base)
        if isinstance(fact, StepFact):
            yield replace(fact, run_id=run, step_id=step, resumed_from=form(fact.resumed_from, base))
        else:
            call, message = form(fact.model_call_id, base), form(fact.message_id, base)
            yield replace(fact, run_id=run, step_id=step, model_call_id=call, message_id=message)


def decode_facts(column: bytes, place: str) -> list[PrivateFact]:
    """The facts of a log row, in order. `place` says which row, for the error.

    Raises:
        CorruptRecord: the bytes are no facts; they are left as they are.
    """
    if not column:
        return []
    try:
        told = _facts.decode(column)
        return list(_named(told.facts, told.base, _long))
    except UNREADABLE as error:
        raise CorruptRecord(place, "list[PrivateFact]", str(error)) from error
