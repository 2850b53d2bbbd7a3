"""Questions a Turn asks of people: answered once, to the call that asked (P6)."""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.change import Change, Reads, Unchanged, View
from agentscope_durable.contracts.commands import Respond
from agentscope_durable.contracts.errors import AlreadyDecided, InvalidRequest, NotFound
from agentscope_durable.contracts.events import InteractionResolved, MessageCompleted
from agentscope_durable.contracts.records import ExecutionRecord, InteractionRecord
from agentscope_durable.contracts.status import ExecutionState, InteractionKind, InteractionState
from agentscope_durable.domain import ids
from agentscope_durable.domain.admission import reads_request, say
from agentscope_durable.domain.change import Draft, begin
from agentscope_durable.domain.control import accept, admitted
from agentscope_durable.domain.execution import settle_execution


def reads_respond(c: Respond) -> Reads:
    return Reads(
        keys=(*reads_request(c), keys.turn(c.turn_id), keys.interaction(c.turn_id, c.interaction_id)),
    )


def respond(c: Respond, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Store an answer; the Turn goes on when it may (IN-02, IN-03, CT-13).

    Raises:
        AlreadyDecided: answered by another request, or closed with its Turn.
        InvalidRequest: an approval takes true or false; only a true one changes the arguments of its call.
        NotFound: no such question of this Turn; results of automatic tools come from their executor (IN-04).
    """
    draft = begin(view, c.session, seed, now_ms)
    arguments = {
        "turn": c.turn_id,
        "interaction": c.interaction_id,
        "response": c.digest,
        "arguments": c.arguments_digest,
    }
    if (earlier := admitted(draft, c, "respond", arguments)) is not None:
        return Unchanged(earlier)
    record = draft.turn(c.thread_id, c.turn_id)
    key = keys.interaction(c.turn_id, c.interaction_id)
    interaction = draft.get(key, InteractionRecord)
    if interaction is None:
        raise NotFound("interaction of this turn", c.interaction_id)
    if interaction.state is not InteractionState.PENDING:
        raise AlreadyDecided(c.interaction_id)
    if interaction.kind is InteractionKind.APPROVAL and not c.is_bool:
        raise InvalidRequest("an approval is answered with true or false", path="response")
    if c.arguments is not None and (interaction.kind is not InteractionKind.APPROVAL or not c.approved):
        raise InvalidRequest("only an approval that is true can change the arguments of its call", path="arguments")

    draft.put(
        key,
        replace(
            interaction,
            state=InteractionState.RESOLVED,
            response=c.response,
            request_id=c.request_id,
            edited=c.arguments,
        ),
    )
    draft.refer(c.response)
    draft.refer(c.content)
    say(
        draft,
        MessageCompleted(
            message_id=ids.answer_message_id(c.interaction_id),
            role="user",
            content=c.content,
            request_id=c.request_id,
            input_kind="respond",
            interaction_id=c.interaction_id,
        ),
        c.thread_id,
        c.turn_id,
    )
    draft.emit(
        "interaction.resolved",
        InteractionResolved(
            interaction_id=c.interaction_id,
            call_id=interaction.call_id,
            outcome="answered",
            request_id=c.request_id,
            response=c.response,
            edited_arguments=c.arguments,
        ),
        thread_id=c.thread_id,
        turn_id=c.turn_id,
    )
    state = replace(
        record.state,
        conditions=tuple(
            replace(condition, ready=True) if condition.id == c.interaction_id else condition
            for condition in record.state.conditions
        ),
    )
    if c.arguments is not None:
        _edit(draft, c.turn_id, interaction.call_id, c.arguments)
    if interaction.kind is InteractionKind.EXTERNAL_RESULT:
        execution = draft.get(keys.execution(c.turn_id, interaction.call_id), ExecutionRecord)
        if execution is not None and not execution.state.terminal:
            state = settle_execution(draft, record, state, execution, ExecutionState.COMPLETED, c.result)
    return accept(draft, c, "respond", arguments, record, state)


def _edit(draft: Draft, turn_id: str, call_id: str, arguments: Body) -> None:
    """The call has the arguments it was approved with, before anything starts it."""
    key = keys.execution(turn_id, call_id)
    execution = draft.get(key, ExecutionRecord)
    if execution is not None:
        draft.put(key, replace(execution, arguments=arguments))
    draft.refer(arguments)
