"""What is sound: judged from what was read, without reading.

Rule: a judgement names the record. "Something is wrong in this Session" helps nobody; "position 9 of its thread 'main'
is not what was written" says what to restore, and from where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body, column_reference
from agentscope_durable.contracts.change import LogRow, ReadyRow
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.journal import JournalBatch
from agentscope_durable.contracts.records import (
    CheckpointRecord,
    EntryRecord,
    ExecutionRecord,
    InputRecord,
    InteractionRecord,
    LateFact,
    MessageIndex,
    ObjectRecord,
    PolicyRecord,
    RequestRecord,
    RunRecord,
    SignalRecord,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnRef,
    UsesRecord,
    WorkspaceRecord,
    decode,
)
from agentscope_durable.domain.frame import chained
from agentscope_durable.domain.turn import due_ms

__all__ = ["RECORD_KINDS", "Chain", "mentions", "place", "record_fault", "schedule_fault"]

RECORD_KINDS: Final[dict[str, type[msgspec.Struct]]] = {
    "thread": ThreadRecord,
    "turn": TurnRecord,
    "order": TurnRef,
    "queue": TurnRef,
    "checkpoint": CheckpointRecord,
    "request": RequestRecord,
    "input": InputRecord,
    "signal": SignalRecord,
    "interaction": InteractionRecord,
    "execution": ExecutionRecord,
    "run": RunRecord,
    "message": MessageIndex,
    "late": LateFact,
    "object": ObjectRecord,
    "policy": PolicyRecord,
    "workspace": WorkspaceRecord,
    "entry": EntryRecord,
    "former": EntryRecord,
    "content": Body,
    "uses": UsesRecord,
}
"""What stands under the keys that begin with a word and a slash."""


def record_fault(key: str, data: bytes) -> str | None:
    """Why a record cannot be read; None if it can."""
    kind = RECORD_KINDS.get(key.partition("/")[0])
    if kind is None:
        return "no record of this release has such a key"
    try:
        _ = decode(kind, data, key=key)
    except CorruptRecord as error:
        return f"it does not decode as {error.type_name}: {error.reason}"
    return None


class Chain:
    """The native rows from a base to a checkpoint, as they are read one after the other.

    Positions of a Thread's stream are dense, and each native row is chained to the one before it. So a row that is
    missing, doubled, unreadable or altered is found, and all but the last kind by its own position.

    Args:
        first, last: positions it begins and ends at.
        decode: try whether each native row can be read.
    """

    def __init__(self, first: int, last: int, *, decode: bool = True) -> None:
        self._decode = decode
        self.first = first
        self.last = last
        self.digest = ""
        self.rows = 0
        self._next = first
        self._faults: dict[int, str] = {}

    def add(self, row: LogRow) -> None:
        """The next row in the order of positions."""
        self.rows += 1
        if row.at < self._next:
            if row.journal:
                self._faults[row.at] = "it stands there twice, with different native state or the same"
            # A double that holds nothing native changes nothing.
        else:
            self._miss(row.at)
            self._next = row.at + 1
        if row.journal:
            self.digest = chained(self.digest, row.journal)
            fault = _native_fault(row) if self._decode else None
            if fault is not None:
                self._faults[row.at] = fault

    def _miss(self, until: int) -> None:
        for at in range(self._next, until):
            self._faults[at] = "it is missing"

    def faults(self, digest: str) -> dict[int, str]:
        """What is wrong, by position; empty when the rows add up to `digest`.

        A chain that does not add up although every row can be read is told of position 0: one of them was altered, and
        only a sum of its own says which.
        """
        self._miss(self.last + 1)
        self._next = self.last + 1
        if self._faults or digest in ("", self.digest):
            return dict(sorted(self._faults.items()))
        return {0: f"together they have digest {self.digest} instead of {digest}"}


def _native_fault(row: LogRow) -> str | None:
    try:
        if column_reference(row.journal) is None:
            _ = JournalBatch.decode(row.journal, position=row.at)
    except CorruptRecord as error:
        return f"it does not decode as {error.type_name}: {error.reason}"
    return None


def schedule_fault(
    thread: ThreadRecord, turn: TurnRecord | None, active: ThreadHead | None, ready: Iterable[ReadyRow]
) -> str | None:
    """Why no host would ever find the work of a Thread; None if one would, or there is none (P9).

    Args:
        turn: the Turn at the head of its queue, None when there is no such record.
        active: the head's entry while a host owns the Thread.
        ready: the ready rows of its Session.
    """
    if not thread.current:
        return None
    if turn is None:
        return f"its queue begins with Turn {thread.current!r}, which is not there"
    rows = {row.kind: row for row in ready if row.item == thread.thread_id}
    if active is not None:
        row = rows.get(keys.READY_LEASE)
        if row is None or row.klass != active.owner:
            return f"host {active.owner!r} owns it, and no other host would ever learn that when it is gone"
        return None
    state = turn.state
    if state.status.terminal:
        return f"its queue begins with Turn {thread.current!r}, which is {state.status}"
    if due_ms(state) is None:
        return None
    row = rows.get(keys.READY_TURN)
    if row is None:
        return f"Turn {thread.current!r} could go on, and no host would ever find it"
    if row.klass != thread.binding.ready_class:
        return f"Turn {thread.current!r} is offered to hosts of another definition than the one it is pinned to"
    return None


def mentions(row: LogRow, digest: str) -> bool:
    """Whether a row refers to an object."""
    wanted = digest.encode()
    return any(wanted in bytes(column) for column in (row.events, row.private, row.journal))


def place(first: int, count: int, stream: str, at: int) -> str:
    """A log row as people name it: by its events, and by its Thread's position."""
    named: list[str] = []
    if count:
        named.append(f"event {first}" if count == 1 else f"events {first} to {first + count - 1}")
    if stream:
        named.append(f"position {at} of thread {stream!r}")
    return "the commit of " + (" at ".join(named) if named else f"no event, before event {first}")
