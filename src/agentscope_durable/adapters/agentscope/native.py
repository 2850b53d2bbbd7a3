"""The live native state of a Thread, with what is known of how it is stored.

Rule 1: a live state and its writers belong together. Whoever loses sight of a commit drops all of them; they are loaded
again from the store.
Rule 2: what the installed AgentScope cannot read is not damaged: another host may read it. The Turn waits for that host
and nothing is written (C61). Rows that do not fold are damaged, and a person has to look.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from agentscope_durable.adapters.agentscope.checkpoint import CheckpointWriter, restore
from agentscope_durable.adapters.agentscope.codec import StoredAnswer, read_answer
from agentscope_durable.contracts.errors import CorruptRecord, Incompatible
from agentscope_durable.contracts.identity import MAIN_THREAD_ID, ThreadKey
from agentscope_durable.contracts.journal import CheckpointRow, JournalBatch, JournalEventType
from agentscope_durable.journal.checkpoint import CheckpointState, fold, row_bytes, to_state_json
from agentscope_durable.journal.position import (
    POSITION_FIELD,
    AgentExecutionPosition,
    ExecutionPhase,
    PositionWriter,
    read_position,
)
from agentscope_durable.spi.harness import JournalRow

__all__ = ["Native", "load_native", "native_session_id", "new_native", "readable", "restored"]

LIVE_BYTES_RATIO: Final = 6
"""About how much larger a live state is than its JSON."""


@dataclass
class Native:
    """A Thread's live state.

    Attributes:
        state: the native state; None until there is one.
        loaded: the checkpoint and its JSON as they were loaded, for a second copy; None when it is not needed.
        position: where execution stands.
        writer, position_writer: what of both is stored.
        based: the store holds a base, so rows may follow.
        answer, answer_at: the stored answer that is not in the state yet, and where it stands.
        stored_bytes: about how much JSON the state is.
        mirrored: the copy in the state store is of this very state.
        unbegun: a new Thread's state as its first Turn found it, until something of it is stored.
    """

    state: Any = None
    loaded: tuple[CheckpointState, bytes] | None = None
    position: AgentExecutionPosition = field(default_factory=AgentExecutionPosition)
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)
    position_writer: PositionWriter = field(default_factory=PositionWriter)
    based: bool = False
    answer: StoredAnswer | None = None
    answer_at: int = 0
    stored_bytes: int = 0
    unbegun: Any = None
    mirrored: bool = False

    @property
    def live_bytes(self) -> int:
        return LIVE_BYTES_RATIO * self.stored_bytes

    def rows(self, *, full: bool = False) -> tuple[tuple[CheckpointRow, ...], bool]:
        """What of state and position is not stored yet, counted as stored from now on; and whether it is a base."""
        delta = self.writer.full_check(self.state) if full and self.based else self.writer.delta(self.state)
        self.unbegun = None
        rows = (*delta.rows, *self.position_writer.rows(self.position, base=delta.base))
        self.based = True
        size = sum(map(row_bytes, rows))
        self.stored_bytes = size if delta.base else self.stored_bytes + size
        return rows, delta.base

    def position_rows(self) -> tuple[tuple[CheckpointRow, ...], bool]:
        """The same without the state, where it has a base already."""
        if not self.based and self.unbegun is not None:
            # The Turn may have entered the live state by now, and would enter it again if that were stored before its
            # first round is (a receipt of a compression is).
            rows = (*CheckpointWriter().delta(self.unbegun).rows, *self.position_writer.rows(self.position, base=True))
            self.based, self.unbegun = True, None
            return rows, True
        if not self.based:
            return self.rows()
        return self.position_writer.rows(self.position, base=False), False

    def take_anchor(self) -> Any:
        """A second copy of the stored state, which the agent will go on with: the next rows are taken from it."""
        assert self.loaded is not None
        (checkpoint, state_json), self.loaded = self.loaded, None
        anchor = restore(state_json)
        self.writer = CheckpointWriter.continuing(anchor, checkpoint)
        return anchor

    def begin_anew(self) -> None:
        """Forget what is stored: the next rows are a base."""
        self.writer, self.position_writer, self.based = CheckpointWriter(), PositionWriter(), False


def native_session_id(thread: ThreadKey) -> str:
    """What a Thread's native state calls its session. A named Thread is a conversation of its own (AS-22)."""
    session_id = thread.session.session_id
    return session_id if thread.thread_id == MAIN_THREAD_ID else f"{session_id}--{thread.thread_id}"


def new_native(session_id: str, template: Any) -> Native:
    """The state a Thread begins with.

    Args:
        template: the application's own first state, or None.
    """
    from agentscope.state import AgentState

    if template is None:
        state = AgentState(session_id=session_id)
    else:
        state = template.model_copy(deep=True, update={"session_id": session_id})
    return Native(state=state, unbegun=state.model_copy(deep=True))


def load_native(rows: Sequence[JournalRow], *, installed: str) -> Native:
    """The state that a Thread's rows fold to; without a state when they hold none.

    Raises:
        CorruptRecord: the rows do not hold a state; nobody can read them.
        Incompatible: the installed AgentScope cannot read the state; names the place. Nothing was changed.
    """
    batches = [(row.at, JournalBatch.decode(row.journal, position=row.at)) for row in rows if row.journal]
    checkpoint = fold(batches)
    if checkpoint.base_at is None:
        return Native()
    fields = dict(checkpoint.fields)
    stored_position = fields.pop(POSITION_FIELD, None)
    position = read_position(stored_position)
    without = msgspec.structs.replace(checkpoint, fields=fields)
    state_json = to_state_json(without)
    state = restored(state_json, installed=installed)
    native = Native(
        state=state,
        position=position,
        writer=CheckpointWriter.continuing(state, without),
        position_writer=PositionWriter(None if stored_position is None else position.members()),
        based=True,
        stored_bytes=len(state_json),
    )
    if position.phase in (ExecutionPhase.REASONING, ExecutionPhase.ANSWERED):
        native.loaded = without, state_json
    if position.phase is ExecutionPhase.ANSWERED:
        native.answer, native.answer_at = _answer(batches, position.reasoning)
    return native


def restored(state_json: bytes, *, installed: str) -> Any:
    """The live state of a JSON state.

    Raises:
        Incompatible: see `load_native`.
    """
    with readable(installed):
        return restore(state_json)


@contextmanager
def readable(installed: str) -> Generator[None]:
    """What the installed AgentScope cannot read another one may (Rule 2): it is Incompatible, and names the place."""
    try:
        yield
    except CorruptRecord as error:
        raise Incompatible(
            f"the {error.key} ({error.reason})",
            required=f"an AgentScope that reads it as {error.type_name}",
            present=f"AgentScope {installed}",
        ) from error


def _answer(batches: Sequence[tuple[int, JournalBatch]], reasoning: int) -> tuple[StoredAnswer, int]:
    for at, batch in reversed(batches):
        for entry in reversed(batch.entries):
            if entry.type == JournalEventType.MODEL_RESULT:
                answer = read_answer(entry.payload, position=at)
                if answer.reasoning == reasoning:
                    return answer, at
    raise CorruptRecord("journal", "StoredAnswer", f"the answer of round {reasoning} is said to be stored, and is not")
