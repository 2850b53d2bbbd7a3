"""The native journal: what an agent did, and the increments from which its state is folded.

Rule 1: a commit appends, it never rewrites. One `JournalBatch` is what one commit adds to a Thread: entries (facts, in
order) and checkpoint rows (how the native state changed). Checkpoint rows are positions and bodies, never the
conversation again.
Rule 2: a body is encoded once. Everything that came from the agent travels as `msgspec.Raw`, the JSON that was written
when it happened, and is spliced into and out of rows untouched: no number is rounded, no key is sorted, no text is
escaped twice. A block of a stored outcome is not even stored again: the checkpoint points at it (`FromOutcome`).
Rule 3: the last `Base` and what follows it is enough. No row refers to anything before the base it stands on.

Every struct here is array-like and tagged with one letter: the order of fields and the letters are journal format 2. A
new field goes at the end with a default, a new row gets a new letter.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, Self

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord, InvalidRequest

__all__ = [
    "CACHE_FIELD",
    "CONTEXT_FIELD",
    "ENTRY_TYPE_CHARS_MAX",
    "JOURNAL_FORMAT",
    "OUTCOME_TYPES",
    "STATE_VERSION",
    "Base",
    "Block",
    "CacheEntry",
    "CacheOrder",
    "CheckpointRow",
    "Drop",
    "Field",
    "FromOutcome",
    "JournalBatch",
    "JournalEntry",
    "JournalEventType",
    "MessageMeta",
    "MetaPatch",
    "OutcomeBlocks",
    "Patch",
    "Trim",
    "check_entry_type",
]

STATE_VERSION: Final = "agentscope-thread-journal-v2"
"""What a Thread's pinned definition says its native state is written in (AS-19). No other version is converted."""
JOURNAL_FORMAT: Final = 2
"""The number in a plain journal's `head.json` (TJ-22)."""

CONTEXT_FIELD: Final = "context"
"""The state's list of messages: the one field that has rows of its own instead of a `Field`."""
CACHE_FIELD: Final = ("tool_context", "read_file_cache")
"""The state's list of cached files, up to 25 MB: stored entry by entry instead of in its `Field`."""

ENTRY_TYPE_CHARS_MAX: Final = 128

_CUSTOM_TYPE: Final = re.compile(r"x\.[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


class JournalEventType(StrEnum):
    """What a journal entry reports. Native facts: none of them declares a Turn's outcome (TJ-32)."""

    RUN_START = "run/start"
    RUN_INPUT = "run/input"
    RUN_OUTPUT = "run/output"
    RUN_END = "run/end"
    STEP_START = "step/start"
    STEP_END = "step/end"
    MODEL_REQUEST = "model/request"
    MODEL_RESULT = "model/result"
    TOOL_INTENT = "tool/intent"
    TOOL_RESULT = "tool/result"
    INTERACTION_REQUESTED = "interaction/requested"
    INTERACTION_RESOLVED = "interaction/resolved"
    CHECKPOINT = "checkpoint"
    STATE_INITIALIZED = "state/initialized"
    MIGRATION_BASELINE = "migration/baseline"


_NATIVE_TYPES: Final = frozenset(JournalEventType)


def check_entry_type(entry_type: str) -> str:
    """Return the type when an entry may have it: a native one, or an application's own that begins with `x.`.

    Raises:
        InvalidRequest: it is neither, so no reader could know what to do with it.
    """
    if entry_type in _NATIVE_TYPES:
        return entry_type
    if len(entry_type) <= ENTRY_TYPE_CHARS_MAX and _CUSTOM_TYPE.fullmatch(entry_type):
        return entry_type
    raise InvalidRequest("a journal entry is of a native type, or of an own one like x.team/word", path="$.type")


# ------------------------------------------------------------ entries


class JournalEntry(Discreet, frozen=True, array_like=True, gc=False):
    """One fact of the native journal.

    Attributes:
        type: a `JournalEventType` or an application's own `x.*` (`check_entry_type`).
        payload: the fact, one JSON value.
    """

    type: str
    payload: msgspec.Raw


class OutcomeBlocks(Discreet, frozen=True):
    """The part of a `model/result` or `tool/result` payload that checkpoint rows may point at.

    The payload is an object. A model's finished answer has its native blocks under `content`, in the model's order; a
    tool's result has its one native block there. What failed without a block has no `content`.
    """

    content: tuple[msgspec.Raw, ...] = ()


OUTCOME_TYPES: Final = (JournalEventType.MODEL_RESULT, JournalEventType.TOOL_RESULT)
"""Entries with `OutcomeBlocks`. Those of one batch are counted on: the second continues where the first ended."""


# ------------------------------------------------------------ checkpoint rows


class Base(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="b"):
    """A new epoch: forget everything before. Stands first in its batch, and the whole state follows."""


class Field(Discreet, frozen=True, array_like=True, gc=False, tag="f"):
    """A field of the state outside its messages.

    Attributes:
        name: the field of the state.
        key: the member that changed, when the field is an object; None when the whole field is given.
        json: its new value.
    """

    name: str
    key: str | None
    json: msgspec.Raw


class Drop(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="d"):
    """A member that is gone from a field which is an object."""

    name: str
    key: str


class CacheEntry(Discreet, frozen=True, array_like=True, gc=False, tag="c"):
    """A new entry of the read-file cache, under a number that no present entry has. A `CacheOrder` follows it."""

    number: int
    json: msgspec.Raw


class CacheOrder(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="o"):
    """The read-file cache as it is now: the numbers of its entries, least recently used first. Others are gone."""

    numbers: tuple[int, ...]


class MessageMeta(Discreet, frozen=True, array_like=True, gc=False, tag="m"):
    """A message: a new one when `i` is the number of messages, else message `i` as it is now.

    Attributes:
        meta: the message's object without its `content`.
        count: how many of its present blocks stay, counted from the first.
    """

    i: int
    meta: msgspec.Raw
    count: int


class MetaPatch(Discreet, frozen=True, array_like=True, gc=False, tag="u"):
    """Fields of a message that changed, say its usage."""

    i: int
    fields: dict[str, msgspec.Raw]


class Block(Discreet, frozen=True, array_like=True, gc=False, tag="k"):
    """Block `j` of message `i`: a new one when `j` is the number of its blocks, else in place of the old one."""

    i: int
    j: int
    json: msgspec.Raw


class FromOutcome(Discreet, frozen=True, array_like=True, gc=False, tag="r"):
    """Block `j` of message `i` is block `k` of the outcomes stored at stream position `at` (`OUTCOME_TYPES`).

    Attributes:
        patch: top-level fields in which it differs from the outcome by now; None when it does not.
    """

    i: int
    j: int
    at: int
    k: int
    patch: dict[str, msgspec.Raw] | None = None


class Patch(Discreet, frozen=True, array_like=True, gc=False, tag="p"):
    """Top-level fields of a block that changed: a call goes from pending to finished without its arguments again."""

    i: int
    j: int
    fields: dict[str, msgspec.Raw]


class Trim(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="t"):
    """Only the first `n` messages stay."""

    n: int


CheckpointRow = (
    Base | Field | Drop | CacheEntry | CacheOrder | MessageMeta | MetaPatch | Block | FromOutcome | Patch | Trim
)
"""How the native state changed, in order: later rows of a batch stand on earlier ones."""


# ------------------------------------------------------------ the batch


class JournalBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one commit adds to a Thread's native journal: the `journal` column of one log row.

    Attributes:
        expected_head: stream position the Thread must be at; a commit on any other is refused.
        entries: the facts, in the order they happened.
        checkpoint: the change of the native state; empty when it did not change.
        base: the checkpoint begins a new epoch, so a reader may start here.
    """

    expected_head: int
    entries: tuple[JournalEntry, ...] = ()
    checkpoint: tuple[CheckpointRow, ...] = ()
    base: bool = False

    def encode(self) -> bytes:
        """The bytes that are stored."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, stored: bytes | memoryview, *, position: int) -> Self:
        """Read a stored batch.

        Bodies are not parsed; they refer to `stored`, which lives as long as they do.

        Args:
            position: stream position it was stored at, named by the error.

        Raises:
            CorruptRecord: the bytes are not a batch.
        """
        try:
            return msgspec.json.decode(stored, type=cls)
        except UNREADABLE as error:
            raise CorruptRecord(f"journal position {position}", "JournalBatch", str(error)) from error


_encoder: Final = msgspec.json.Encoder()
