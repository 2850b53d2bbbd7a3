"""Records of one reading, by what they are; what is not there is not found (RT-56)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import NotFound, SessionDropped
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import (
    RunRecord,
    RunStepRef,
    SessionHead,
    ThreadHead,
    ThreadRecord,
    TurnRecord,
    TurnState,
    decode,
)
from agentscope_durable.contracts.views import RunStepRefView
from agentscope_durable.spi.record_store import Records

__all__ = ["active_of", "get", "head_of", "ref_view", "run_key", "run_of", "state_of", "thread_of", "turn_of"]

S = TypeVar("S", bound=msgspec.Struct)


def head_of(records: Records, session: SessionKey) -> SessionHead:
    if records.head is None:
        raise NotFound("session", f"{session.namespace}/{session.session_id}")
    if records.head.status.gone:
        raise SessionDropped(keys.spell(session))
    return records.head


def get(records: Records, key: str, kind: type[S]) -> S | None:
    data = records.keys.get(key)
    return None if data is None else decode(kind, data, key=key)


def thread_of(records: Records, thread_id: str) -> ThreadRecord:
    record = get(records, keys.thread(thread_id), ThreadRecord)
    if record is None:
        raise NotFound("thread", thread_id)
    return record


def turn_of(records: Records, thread_id: str, turn_id: str) -> TurnRecord:
    """A Turn that is in this Thread; its state may be the head's (`state_of`)."""
    record = get(records, keys.turn(turn_id), TurnRecord)
    if record is None or record.thread_id != thread_id:
        raise NotFound("turn", turn_id)
    return record


def run_key(turn_id: str, run_id: str) -> str | None:
    """A Run is numbered within its Turn, and its id says both."""
    prefix, _, number = run_id.rpartition(".")
    if prefix != turn_id or not number.isascii() or not number.isdigit() or len(number) > 12:
        return None
    return keys.run(turn_id, int(number))


def run_of(records: Records, turn_id: str, run_id: str) -> RunRecord:
    key = run_key(turn_id, run_id)
    record = None if key is None else get(records, key, RunRecord)
    if record is None or record.run_id != run_id:
        raise NotFound("run", run_id)
    return record


def active_of(records: Records, turn: TurnRecord) -> ThreadHead | None:
    """The Thread's head if a host owns it for this very Turn."""
    active = None if records.head is None else records.head.threads.get(turn.thread_id)
    return active if active is not None and active.turn_id == turn.turn_id else None


def state_of(records: Records, turn: TurnRecord) -> TurnState:
    """The Turn's state: with the head while a host owns the Thread for it, and in its record otherwise."""
    active = active_of(records, turn)
    return turn.state if active is None else active.turn


def ref_view(ref: RunStepRef) -> RunStepRefView:
    return RunStepRefView(run_id=ref.run_id, step_id=ref.step_id)
