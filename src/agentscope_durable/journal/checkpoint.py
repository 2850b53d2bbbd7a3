"""The native state, folded from the increments its commits left behind.

Rule 1: pure, and no agent. Restore, fork and the doctor run where AgentScope is not even installed (CK-02), so nothing
here knows a message from a block beyond its place and its bytes.
Rule 2: bodies are moved, never parsed. A fold costs what its rows cost, and what comes out is what the agent wrote.
Rule 3: a row that refers to something missing stops the fold, naming the position and the row. A state with a hole
would run on with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, assert_never

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.journal import (
    CACHE_FIELD,
    CONTEXT_FIELD,
    OUTCOME_TYPES,
    Base,
    Block,
    CacheEntry,
    CacheOrder,
    CheckpointRow,
    Drop,
    Field,
    FromOutcome,
    JournalBatch,
    MessageMeta,
    MetaPatch,
    OutcomeBlocks,
    Patch,
    Trim,
)

__all__ = [
    "CheckpointMessage",
    "CheckpointState",
    "base_rows",
    "fold",
    "message_json",
    "row_bytes",
    "to_state_json",
    "whole_rows",
]

_CACHE_OWNER, _CACHE_MEMBER = CACHE_FIELD
_CONTENT: Final = "content"
# What a row costs besides its bodies: brackets, letter, positions. An estimate, for weighing rows against a new base.
_ROW_BYTES: Final = 12

_encode: Final = msgspec.json.Encoder().encode
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects: Final = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_bodies: Final = msgspec.json.Decoder(list[msgspec.Raw])
_outcome: Final = msgspec.json.Decoder(OutcomeBlocks)


class CheckpointMessage(Discreet, frozen=True, gc=False):
    """One message of a folded state: its object without `content`, and its blocks."""

    meta: msgspec.Raw
    blocks: tuple[msgspec.Raw, ...]


class CheckpointState(Discreet, frozen=True):
    """The native state at a stream position, as bodies that were not parsed.

    Attributes:
        position: the last folded position.
        base_at: where the epoch began; None when no batch carried state, so there is nothing to restore.
        fields: each field outside the messages; an object whose members changed is given by member.
        cache: the read-file cache in order, by the numbers of its entries; None when the state has no such cache.
        messages: the context.
        stored_bytes: what its rows take since the base; against the state's own size it says when a new base pays.
    """

    position: int
    base_at: int | None
    fields: Mapping[str, msgspec.Raw | Mapping[str, msgspec.Raw]]
    cache: Mapping[int, msgspec.Raw] | None
    messages: tuple[CheckpointMessage, ...]
    stored_bytes: int


# ------------------------------------------------------------ folding


class _Fault(Exception):
    """What a row refers to and is not there; `fold` knows the position and the row."""


class _Message:
    __slots__ = ("blocks", "meta")

    def __init__(self, meta: msgspec.Raw) -> None:
        self.meta = meta
        self.blocks: list[msgspec.Raw] = []


class _Epoch:
    """The state while rows are applied to it. One per `Base`."""

    __slots__ = ("base_at", "cache", "fields", "messages", "order", "outcomes", "stored_bytes")

    def __init__(self, base_at: int) -> None:
        self.base_at = base_at
        self.fields: dict[str, msgspec.Raw | dict[str, msgspec.Raw]] = {}
        self.cache: dict[int, msgspec.Raw] = {}
        self.order: tuple[int, ...] | None = None
        self.messages: list[_Message] = []
        # Payloads of this epoch's outcomes by position; they become blocks when a row first asks for one.
        self.outcomes: dict[int, list[msgspec.Raw] | tuple[msgspec.Raw, ...]] = {}
        self.stored_bytes = 0

    def apply(self, row: CheckpointRow) -> None:
        match row:
            case Block(i, j, json):
                self._put(i, j, json)
            case FromOutcome(i, j, at, k, patch):
                block = self._outcome_block(at, k)
                self._put(i, j, block if patch is None else _patched(block, patch))
            case Patch(i, j, fields):
                blocks = self._message(i).blocks
                if not 0 <= j < len(blocks):
                    raise _Fault(f"message {i} has no block {j}")
                blocks[j] = _patched(blocks[j], fields)
            case MessageMeta(i, meta, count):
                self._put_message(i, meta, count)
            case MetaPatch(i, fields):
                message = self._message(i)
                message.meta = _patched(message.meta, fields)
            case Field(name, key, json):
                if key is None:
                    self.fields[name] = json
                else:
                    self._members(name)[key] = json
            case Drop(name, key):
                if self._members(name).pop(key, None) is None:
                    raise _Fault(f"field {name!r} has no member to drop")
            case CacheEntry(number, json):
                self.cache[number] = json
            case CacheOrder(numbers):
                if not self.cache.keys() >= set(numbers):
                    raise _Fault("the order names a cache entry that was not stored")
                self.order = numbers
                self.cache = {number: self.cache[number] for number in numbers}
            case Trim(n):
                if not 0 <= n <= len(self.messages):
                    raise _Fault(f"there are {len(self.messages)} messages, not {n}")
                del self.messages[n:]
            case Base():
                raise _Fault("a base stands first in its batch")
            case _:
                assert_never(row)

    def _message(self, i: int) -> _Message:
        if not 0 <= i < len(self.messages):
            raise _Fault(f"there is no message {i}")
        return self.messages[i]

    def _put_message(self, i: int, meta: msgspec.Raw, count: int) -> None:
        if i == len(self.messages) and count == 0:
            self.messages.append(_Message(meta))
            return
        message = self._message(i)
        if not 0 <= count <= len(message.blocks):
            raise _Fault(f"message {i} has {len(message.blocks)} blocks, not {count}")
        message.meta = meta
        del message.blocks[count:]

    def _put(self, i: int, j: int, block: msgspec.Raw) -> None:
        blocks = self._message(i).blocks
        if j == len(blocks):
            blocks.append(block)
        elif 0 <= j < len(blocks):
            blocks[j] = block
        else:
            raise _Fault(f"message {i} has {len(blocks)} blocks, so {j} is not its next")

    def _outcome_block(self, at: int, k: int) -> msgspec.Raw:
        found = self.outcomes.get(at)
        if found is None:
            raise _Fault(f"no outcome is stored at position {at} of this epoch")
        if isinstance(found, list):
            found = self.outcomes[at] = tuple(block for payload in found for block in _outcome.decode(payload).content)
        if not 0 <= k < len(found):
            raise _Fault(f"the outcomes at position {at} have {len(found)} blocks, so there is no block {k}")
        return found[k]

    def _members(self, name: str) -> dict[str, msgspec.Raw]:
        field = self.fields.get(name)
        if field is None:
            raise _Fault(f"there is no field {name!r}")
        if isinstance(field, msgspec.Raw):
            field = self.fields[name] = _object.decode(field)
        return field


def _patched(body: msgspec.Raw, fields: Mapping[str, msgspec.Raw]) -> msgspec.Raw:
    return msgspec.Raw(_encode({**_object.decode(body), **fields}))


def fold(batches: Iterable[tuple[int, JournalBatch]]) -> CheckpointState:
    """The native state after the last of `batches`.

    Batches come in order with the stream positions they were stored at, and may begin at the last base; what stands
    before a base does not matter. With no base among them the result has `base_at` None.

    Raises:
        CorruptRecord: a row refers to something missing, or the order of the batches is broken.
    """
    epoch: _Epoch | None = None
    last = 0
    for position, batch in batches:
        if not last <= batch.expected_head < position:
            raise _corrupt(position, f"the batch was to follow position {batch.expected_head}, not {last}")
        last = position
        rows = batch.checkpoint
        begins = bool(rows) and isinstance(rows[0], Base)
        if begins != batch.base:
            raise _corrupt(position, "the batch says it is a base and its rows do not, or the other way round")
        if begins:
            epoch = _Epoch(position)
        if epoch is None:
            if rows:
                raise _corrupt(position, "no base comes before its rows")
            continue
        payloads = [entry.payload for entry in batch.entries if entry.type in OUTCOME_TYPES]
        if payloads:
            epoch.outcomes[position] = payloads
        for number, row in enumerate(rows):
            try:
                if number or not begins:
                    epoch.apply(row)
            except (_Fault, *UNREADABLE) as fault:
                raise _corrupt(position, f"row {number} ({type(row).__name__}): {fault}") from fault
            epoch.stored_bytes += row_bytes(row)
    if epoch is None:
        return CheckpointState(last, None, {}, None, (), 0)
    return CheckpointState(
        position=last,
        base_at=epoch.base_at,
        fields=epoch.fields,
        cache=None if epoch.order is None else epoch.cache,
        messages=tuple(CheckpointMessage(message.meta, tuple(message.blocks)) for message in epoch.messages),
        stored_bytes=epoch.stored_bytes,
    )


def _corrupt(position: int, reason: str) -> CorruptRecord:
    return CorruptRecord(f"journal position {position}", "checkpoint", reason)


def row_bytes(row: CheckpointRow) -> int:
    """About how many bytes a row takes where it is stored."""
    match row:
        case Block(json=body) | Field(json=body) | CacheEntry(json=body) | MessageMeta(meta=body):
            return _ROW_BYTES + len(memoryview(body))
        case FromOutcome(patch=fields) | Patch(fields=fields) | MetaPatch(fields=fields):
            return _ROW_BYTES + sum(len(name) + len(memoryview(body)) for name, body in (fields or {}).items())
        case CacheOrder(numbers):
            return _ROW_BYTES + 4 * len(numbers)
        case Base() | Drop() | Trim():
            return _ROW_BYTES
        case _:
            assert_never(row)


# ------------------------------------------------------------ the state's JSON


def to_state_json(checkpoint: CheckpointState) -> bytes:
    """The folded state as the JSON of AgentScope's `AgentState`.

    Raises:
        CorruptRecord: no batch carried state, so there is nothing to restore.
    """
    if checkpoint.base_at is None:
        raise _corrupt(checkpoint.position, "no native state was stored up to here")
    parts: list[bytes] = []
    for name, field in checkpoint.fields.items():
        body = bytes(field) if isinstance(field, msgspec.Raw) else _encode(field)
        if name == _CACHE_OWNER and checkpoint.cache is not None:
            body = _with_member(body, _CACHE_MEMBER, checkpoint.cache.values())
        parts.append(_encode(name) + b":" + body)
    parts.append(_encode(CONTEXT_FIELD) + b":[" + b",".join(map(message_json, checkpoint.messages)) + b"]")
    return b"{" + b",".join(parts) + b"}"


def message_json(message: CheckpointMessage) -> bytes:
    """One message as JSON."""
    return _with_member(bytes(message.meta), _CONTENT, message.blocks)


def _with_member(body: bytes, name: str, bodies: Iterable[msgspec.Raw]) -> bytes:
    """The object `body` with one more member, a list of bodies that are spliced in as they are."""
    opened = body.rstrip()[:-1].rstrip()
    comma = b"" if opened.endswith(b"{") else b","
    return b"".join((opened, comma, _encode(name), b":[", b",".join(bodies), b"]}"))


def whole_rows(checkpoint: CheckpointState) -> Iterator[CheckpointRow]:
    """A folded state as the rows of a new epoch, which a restore or a fork writes: its bodies as they are, moved.

    Raises:
        CorruptRecord: no batch carried state, so there is nothing to restore.
    """
    if checkpoint.base_at is None:
        raise _corrupt(checkpoint.position, "no native state was stored up to here")
    yield Base()
    for name, field in checkpoint.fields.items():
        yield Field(name, None, field if isinstance(field, msgspec.Raw) else msgspec.Raw(_encode(field)))
    if checkpoint.cache is not None:
        for number, json in enumerate(checkpoint.cache.values()):
            yield CacheEntry(number, json)
        yield CacheOrder(tuple(range(len(checkpoint.cache))))
    for i, message in enumerate(checkpoint.messages):
        yield MessageMeta(i, message.meta, 0)
        for j, json in enumerate(message.blocks):
            yield Block(i, j, json)


def base_rows(state_json: bytes) -> tuple[CheckpointRow, ...]:
    """A whole state as the rows of a new epoch: what an import writes into its target.

    The inverse of folding: `to_state_json` of these rows is the same JSON value.

    Raises:
        CorruptRecord: it is not the JSON of a state.
    """
    try:
        return tuple(_base_rows(_object.decode(state_json)))
    except UNREADABLE as error:
        raise CorruptRecord("native state", "AgentState", str(error)) from error


def _base_rows(state: dict[str, msgspec.Raw]) -> Iterator[CheckpointRow]:
    yield Base()
    context = state.pop(CONTEXT_FIELD, None)
    cache: msgspec.Raw | None = None
    if _CACHE_OWNER in state:
        owner = _object.decode(state[_CACHE_OWNER])
        cache = owner.pop(_CACHE_MEMBER, None)
        if cache is not None:
            state[_CACHE_OWNER] = msgspec.Raw(_encode(owner))
    for name, json in state.items():
        yield Field(name, None, json)
    if cache is not None:
        entries = _bodies.decode(cache)
        for number, json in enumerate(entries):
            yield CacheEntry(number, json)
        yield CacheOrder(tuple(range(len(entries))))
    for i, message in enumerate([] if context is None else _objects.decode(context)):
        blocks = _bodies.decode(message.pop(_CONTENT, msgspec.Raw(b"[]")))
        yield MessageMeta(i, msgspec.Raw(_encode(message)), 0)
        for j, json in enumerate(blocks):
            yield Block(i, j, json)
