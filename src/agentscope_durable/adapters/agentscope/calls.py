"""What the store knows of the Turn's tool calls, and what each commit of the state has to add to it.

Rule 1: intents are derived from the state, never from events. In a concurrent batch events lag behind the state, and
the agent never announces a call a second time, so a missed announcement would be a call that nobody ever starts.
Rule 2: a call stands as ALLOWED in a stored state only together with its started intent. ALLOWED means "approved" or
"was running", and AgentScope runs it without asking anybody; so a call that was merely approved is stored as it was
before, and its stored answer is given to the agent again.
Rule 3: a result counts as applied in the commit whose state contains it, or no longer needs to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentscope_durable.adapters.agentscope.codec import outcome_of, result_of_block
from agentscope_durable.adapters.agentscope.increments import Asked, Increment, Told, entry
from agentscope_durable.contracts.journal import JournalEventType
from agentscope_durable.contracts.records import ExecutionRecord, InteractionRecord
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ReplayRule,
)
from agentscope_durable.domain import ids

__all__ = ["Calls", "KnownCall", "unfinished_calls"]

_RESULT_STATES = {
    "success": ExecutionState.COMPLETED,
    # A tool that says it failed has completed: its result is that error (D18).
    "error": ExecutionState.COMPLETED,
    "denied": ExecutionState.DENIED,
    "interrupted": ExecutionState.CANCELLED,
}


_NOT_STARTED = frozenset({ExecutionState.REQUESTED, ExecutionState.AWAITING_APPROVAL, ExecutionState.INTENT})


def state_of(result: ToolResult) -> ExecutionState:
    """What became of a call whose result this is."""
    return _RESULT_STATES.get(result.state, ExecutionState.FAILED)


@dataclass(slots=True)
class KnownCall:
    """A call as the store has it, or will once what was accepted is committed.

    Attributes:
        interaction_id: the question about it; "" if there was none.
        approved: the stored answer to that question; None while there is none, or when it is not about approval.
        edited: arguments that this answer put in the place of the model's; None if those stand.
        answered: the answer is part of the stored state.
        result: its outcome, for a terminal state.
        applied: its result is part of the stored state.
    """

    state: ExecutionState
    kind: ExecutionKind = ExecutionKind.LOCAL
    rule: ReplayRule = ReplayRule.NEVER
    interaction_id: str = ""
    approved: bool | None = None
    edited: str | None = None
    answered: bool = False
    result: ToolResult | None = None
    applied: bool = False


def tail_of(state: Any, name: str) -> Any:
    """The agent's message at the end of the context, or the last before users' messages; None without one."""
    for message in reversed(state.context):
        if message.role == "assistant" and message.name == name:
            return message
        if message.role != "user":
            return None
    return None


def unfinished_calls(state: Any, name: str) -> list[Any]:
    """Calls of the present reply without a result, whatever their state."""
    return list(state.get_unfinished_tool_calls(name))


class Calls:
    """The calls of one Turn.

    Args:
        route_of: the executor route of an external tool by name; None: its result comes from a person.
    """

    def __init__(self, turn_id: str, name: str, route_of: Callable[[str], str | None]) -> None:
        self._turn_id = turn_id
        self._name = name
        self._route_of = route_of
        self.known: dict[str, KnownCall] = {}
        # Those whose result is not part of the stored state; the others are remembered, and not looked at.
        self._open: dict[str, KnownCall] = {}
        # The last reply of the Turn before, until this one has its own.
        self._former = ""
        # Blocks of the tail message up to here need no second look.
        self._message: Any = None
        self._looked = 0

    def _know(self, call_id: str, call: KnownCall) -> KnownCall:
        self.known[call_id] = call
        if not call.applied:
            self._open[call_id] = call
        return call

    def _applied(self, call_id: str, call: KnownCall) -> None:
        call.applied = True
        _ = self._open.pop(call_id, None)

    # ---- from the store ----

    def begin(self, state: Any) -> None:
        """A Turn of which nothing is stored: every call of this state is of a Turn before, which has told of it."""
        tail = tail_of(state, self._name)
        self._former = "" if tail is None else tail.id

    def adopt(self, state: Any) -> None:
        """A state that was loaded: results that it contains were applied in the commit that stored it."""
        tail = tail_of(state, self._name)
        if tail is not None:
            for block in tail.content:
                if block.type == "tool_result":
                    _ = self.known.setdefault(block.id, KnownCall(ExecutionState.COMPLETED, applied=True))

    def learn(
        self,
        executions: Iterable[tuple[ExecutionRecord, Any]],
        interactions: Iterable[tuple[InteractionRecord, Any, str | None]],
    ) -> None:
        """Take in what the store says now.

        Args:
            executions: records not applied yet, each with the opened body of its result, or None.
            interactions: questions pending or answered, each with the opened response and the opened arguments that
                it changed, or None.
        """
        for record, stored in executions:
            call = self.known.get(record.call_id) or self._know(record.call_id, KnownCall(record.state))
            call.state, call.kind, call.rule = record.state, record.kind, record.rule
            # What was learned stays: its body is not opened again while it waits to be applied.
            if record.state.terminal and call.result is None:
                call.result = outcome_of(record, stored)
        for question, response, edited in interactions:
            call = self.known.get(question.call_id) or self._know(
                question.call_id, KnownCall(ExecutionState.AWAITING_APPROVAL)
            )
            call.interaction_id = question.interaction_id
            if question.state is InteractionState.RESOLVED and question.kind is InteractionKind.APPROVAL:
                call.approved, call.edited = response is True, edited

    def deliverable(self, awaiting: Iterable[Any]) -> tuple[dict[str, bool], dict[str, ToolResult]]:
        """Answers and results that the agent waits for and the store has, by call."""
        answers: dict[str, bool] = {}
        results: dict[str, ToolResult] = {}
        for block in awaiting:
            call = self.known.get(block.id)
            if call is None:
                continue
            if str(block.state) == "asking":
                if call.approved is not None:
                    answers[block.id] = call.approved
            elif call.state.terminal and call.result is not None:
                results[block.id] = call.result
        return answers, results

    def was_started(self, call_id: str) -> bool:
        """A record says that the call was started, whatever became of it."""
        call = self.known.get(call_id)
        return call is not None and call.state not in _NOT_STARTED

    def is_approved(self, call_id: str) -> bool:
        """A person said yes, whatever a host's middleware thinks of it now (C41)."""
        call = self.known.get(call_id)
        return call is not None and call.approved is True

    def edited(self, call_id: str) -> str | None:
        """Arguments that a person put in the place of the model's; None if those stand."""
        call = self.known.get(call_id)
        return None if call is None else call.edited

    # ---- into a commit ----

    @contextmanager
    def maskable(self, state: Any) -> Generator[None, None, None]:
        """While the state is written: calls that are allowed and not started stand as before (Rule 2).

        Nothing may be awaited inside.
        """
        masked: list[tuple[Any, Any]] = []
        for block in unfinished_calls(state, self._name):
            if str(block.state) != "allowed":
                continue
            call = self.known.get(block.id)
            if call is None or call.state in _NOT_STARTED:
                masked.append((block, block.state))
                asked = call is not None and call.interaction_id != "" and not call.answered
                block.state = "asking" if asked else "pending"
        try:
            yield
        finally:
            for block, was in masked:
                block.state = was

    def derive(self, state: Any) -> Increment:
        """What the commit of this state must say about calls beyond what is known (Rule 1)."""
        told = Increment()
        tail = tail_of(state, self._name)
        if tail is not None and tail.id != self._former:
            self._new_in(tail, told)
        open_ids = {block.id for block in unfinished_calls(state, self._name)}
        for call_id, call in list(self._open.items()):
            if call.state.terminal and call_id not in open_ids:
                self._applied(call_id, call)
                told.tools.append(Told(call_id, call.state, applied=True))
                self._answer(call, told)
        return told

    def _answer(self, call: KnownCall, told: Increment) -> None:
        """The state contains the answer to the question about this call."""
        if call.interaction_id and not call.answered:
            call.answered = True
            told.answers.append(call.interaction_id)
            told.entries.append(entry(JournalEventType.INTERACTION_RESOLVED, interaction=call.interaction_id))

    def _new_in(self, tail: Any, told: Increment) -> None:
        if tail is not self._message or self._looked > len(tail.content):
            self._message, self._looked = tail, 0
        results = {block.id: block for block in tail.content[self._looked :] if block.type == "tool_result"}
        settled = True
        for index in range(self._looked, len(tail.content)):
            block = tail.content[index]
            if block.type == "tool_call":
                settled = self._look(block, results.get(block.id), told) and settled
            if settled:
                self._looked = index + 1

    def _look(self, block: Any, result: Any, told: Increment) -> bool:
        """One call of the present reply. True when it needs no further look."""
        call = self.known.get(block.id)
        if result is not None:
            if call is None:
                self._refused(block, result, told)
            elif call.state is ExecutionState.AWAITING_APPROVAL:
                # Denied by a person, or refused after the approval; either way it never ran.
                call.result = result_of_block(result)
                call.state = state_of(call.result)
                if call.state not in (ExecutionState.DENIED, ExecutionState.CANCELLED):
                    call.state = ExecutionState.FAILED
                self._applied(block.id, call)
                told.tools.append(Told(block.id, call.state, result=call.result, applied=True))
                told.entries.append(entry(JournalEventType.TOOL_RESULT, call=block.id, state=call.state))
                self._answer(call, told)
            return True
        match str(block.state):
            case "asking":
                if call is None:
                    self._ask(block, told)
            case "submitted":
                if call is None or call.state is ExecutionState.AWAITING_APPROVAL:
                    self._submit(block, call, told)
            case _:
                pass
        return False

    def _refused(self, block: Any, result: Any, told: Increment) -> None:
        """It ended before anything was asked or started: refused arguments, an unknown tool, a deny rule (IN-11)."""
        outcome = result_of_block(result)
        state = ExecutionState.DENIED if outcome.state == "denied" else ExecutionState.FAILED
        _ = self._know(block.id, KnownCall(state, result=outcome, applied=True))
        told.tools.append(Told(block.id, state, name=block.name, arguments=block.input, result=outcome, applied=True))
        told.entries.append(entry(JournalEventType.TOOL_RESULT, call=block.id, state=state))

    def _ask(self, block: Any, told: Increment) -> None:
        interaction_id = ids.interaction_id(self._turn_id, block.id)
        _ = self._know(block.id, KnownCall(ExecutionState.AWAITING_APPROVAL, interaction_id=interaction_id))
        told.tools.append(Told(block.id, ExecutionState.AWAITING_APPROVAL, name=block.name, arguments=block.input))
        told.questions.append(Asked(interaction_id, block.id, InteractionKind.APPROVAL, block.name, block.input))
        told.entries.append(entry(JournalEventType.INTERACTION_REQUESTED, interaction=interaction_id, call=block.id))

    def _submit(self, block: Any, call: KnownCall | None, told: Increment) -> None:
        """An external tool passed its permission check: its intent is what starts it (AS-09)."""
        route = self._route_of(block.name)
        kind = ExecutionKind.MANUAL if route is None else ExecutionKind.EXTERNAL
        call = call or self._know(block.id, KnownCall(ExecutionState.INTENT))
        call.state, call.kind = ExecutionState.INTENT, kind
        told.tools.append(
            Told(block.id, ExecutionState.INTENT, name=block.name, kind=kind, arguments=block.input, route=route or "")
        )
        self._answer(call, told)
        if kind is ExecutionKind.MANUAL:
            # Its own question: an approval may have come before under the call's first one.
            question = ids.interaction_id(self._turn_id, f"{block.id}/result" if call.interaction_id else block.id)
            told.questions.append(Asked(question, block.id, InteractionKind.EXTERNAL_RESULT, block.name, block.input))
            call.interaction_id, call.answered, call.approved = question, False, None
            told.entries.append(entry(JournalEventType.INTERACTION_REQUESTED, interaction=question, call=block.id))
        told.entries.append(entry(JournalEventType.TOOL_INTENT, call=block.id, name=block.name, kind=kind))

    # ---- local tools ----

    def start(self, block: Any, rule: ReplayRule) -> Increment:
        """A local tool is about to run: the intent that must be committed first."""
        call = self.known.get(block.id) or self._know(block.id, KnownCall(ExecutionState.RUNNING))
        call.state, call.kind, call.rule = ExecutionState.RUNNING, ExecutionKind.LOCAL, rule
        told = Increment()
        told.tools.append(Told(block.id, ExecutionState.RUNNING, name=block.name, arguments=block.input, rule=rule))
        told.entries.append(
            entry(JournalEventType.TOOL_INTENT, call=block.id, name=block.name, kind=ExecutionKind.LOCAL, rule=rule)
        )
        self._answer(call, told)
        return told

    def finish(self, call_id: str, result: ToolResult, state: ExecutionState | None = None) -> Increment:
        """A local tool has ended with a definite outcome."""
        call = self.known[call_id]
        call.state, call.result = state or state_of(result), result
        told = Increment()
        told.tools.append(Told(call_id, call.state, result=result))
        told.entries.append(entry(JournalEventType.TOOL_RESULT, call=call_id, state=call.state))
        return told

    def lose(self, call_id: str) -> Increment:
        """Nobody can say what a local tool did."""
        call = self.known[call_id]
        told = Increment()
        if call.state is not ExecutionState.UNKNOWN:
            call.state = ExecutionState.UNKNOWN
            told.tools.append(Told(call_id, ExecutionState.UNKNOWN))
        return told

    # ---- what stands open ----

    def lost(self, state: Any) -> list[Any]:
        """Local calls of this state that were started, and whose outcome nobody knows."""
        return [
            block
            for block in unfinished_calls(state, self._name)
            if (call := self.known.get(block.id)) is not None
            and call.kind is ExecutionKind.LOCAL
            and call.state is ExecutionState.UNKNOWN
        ]

    def unknown(self) -> str:
        """One local call whose outcome nobody knows, whatever the state says of it; "" for none."""
        for call_id, call in self._open.items():
            if call.kind is ExecutionKind.LOCAL and call.state is ExecutionState.UNKNOWN:
                return call_id
        return ""
