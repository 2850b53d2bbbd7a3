"""A request is taken once, however many times it is asked, for ever (D16, AD-02, AD-29).

The identity of a request covers its operation, its target and every argument: the record keeps a
digest of each, so a conflict can name the argument that differs.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import Request, SubmitTurn, TurnAdmitted
from agentscope_durable.contracts.errors import Closed, RequestConflict
from agentscope_durable.contracts.events import MessageCompleted, TurnChanged
from agentscope_durable.contracts.records import (
    MessageIndex,
    RequestRecord,
    TurnRecord,
    TurnRef,
    TurnState,
    decode_json,
    encode,
)
from agentscope_durable.contracts.status import ResourceStatus
from agentscope_durable.domain import ids
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.turn_view import turn_view

R = TypeVar("R", bound=msgspec.Struct)


def repeated(draft: Draft, request_id: str, operation: str, arguments: dict[str, str], receipt: type[R]) -> R | None:
    """The receipt of the first acceptance, None if the id is new.

    Raises:
        RequestConflict: the id was used for something else; names the first argument that differs.
    """
    record = draft.get(keys.request(request_id), RequestRecord)
    if record is None:
        return None
    if record.operation != operation:
        raise RequestConflict(request_id, "operation")
    for name, value in arguments.items():
        if record.arguments.get(name) != value:
            raise RequestConflict(request_id, name)
    return decode_json(record.receipt, receipt, key=keys.request(request_id))


def remember(
    draft: Draft,
    request_id: str,
    operation: str,
    arguments: dict[str, str],
    receipt: msgspec.Struct,
    *,
    ordinal: int = 0,
) -> None:
    draft.put(
        keys.request(request_id),
        RequestRecord(operation=operation, arguments=arguments, receipt=msgspec.Raw(encode(receipt)), ordinal=ordinal),
    )


def reads_request(c: Request) -> tuple[str, ...]:
    return (keys.request(c.request_id), keys.thread(c.thread_id))


def reads_submit(c: SubmitTurn) -> Reads:
    return Reads(keys=reads_request(c))


def submit(c: SubmitTurn, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Admit a Turn at the end of its Thread's queue, with its user message, in one commit (AD-12, AD-14)."""
    draft = begin(view, c.session, seed, now_ms)
    arguments = {"thread": c.thread_id, "input": c.digest}
    earlier = repeated(draft, c.request_id, "submit", arguments, TurnAdmitted)
    if earlier is not None:
        return Unchanged(earlier)
    thread = draft.thread(c.thread_id)
    if draft.head.status is ResourceStatus.CLOSED:
        raise Closed("session", c.session.session_id)
    if thread.status is ResourceStatus.CLOSED:
        raise Closed("thread", c.thread_id)

    turn_id = ids.turn_id(seed)
    ordinal = thread.next_ordinal
    seq = say(
        draft,
        MessageCompleted(
            message_id=ids.input_message_id(turn_id),
            role="user",
            content=c.content,
            request_id=c.request_id,
            input_kind="submit",
        ),
        c.thread_id,
        turn_id,
    )
    state = TurnState(updated_ms=now_ms)
    record = TurnRecord(
        turn_id=turn_id,
        thread_id=c.thread_id,
        ordinal=ordinal,
        request_id=c.request_id,
        created_ms=now_ms,
        input_seq=seq,
        state=state,
    )
    draft.put(keys.turn(turn_id), record)
    draft.put(keys.order(c.thread_id, ordinal), TurnRef(turn_id))
    draft.emit(
        "turn.status",
        TurnChanged(turn=turn_view(c.session, record, state)),
        thread_id=c.thread_id,
        turn_id=turn_id,
    )
    thread = replace(thread, next_ordinal=ordinal + 1)
    if thread.current:
        draft.put(keys.queue(c.thread_id, ordinal), TurnRef(turn_id))
    else:
        thread = replace(thread, current=turn_id)
        draft.schedule(thread, turn_id, state)
    draft.put(keys.thread(c.thread_id), thread)
    draft.refer(c.content)
    receipt = TurnAdmitted(thread_id=c.thread_id, turn_id=turn_id, ordinal=ordinal)
    remember(draft, c.request_id, "submit", arguments, receipt)
    return draft.change(receipt)


def say(draft: Draft, message: MessageCompleted, thread_id: str, turn_id: str) -> int:
    """A public message, with its place in history; returns the number of its event."""
    seq = draft.emit("message.completed", message, thread_id=thread_id, turn_id=turn_id)
    draft.put(
        keys.message(seq),
        MessageIndex(message_id=message.message_id, turn_id=turn_id, thread_id=thread_id, seq=seq),
    )
    return seq
