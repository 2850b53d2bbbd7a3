"""What becomes true at one place of an execution, and how several such increments become one commit.

Rule 1: an increment is complete when it is accepted: rows of the state were computed then, since concurrent tools go on
changing the state. Only its bodies are encoded later, by the one who commits, in order.
Rule 2: increments are merged in the order they were accepted, and nothing of one is lost by another: a base drops the
rows before it and only those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import (
    Abandon,
    CommitStep,
    EntryCommit,
    InteractionCommit,
    MessageOut,
    RunEnd,
    StepReceipt,
    ToolCommit,
)
from agentscope_durable.contracts.durable_json import sanitize_text
from agentscope_durable.contracts.errors import InputsChanged
from agentscope_durable.contracts.journal import CheckpointRow, JournalBatch, JournalEntry, JournalEventType
from agentscope_durable.contracts.log import ModelFact, StepFact
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, InteractionKind, ReplayRule
from agentscope_durable.journal.commit import CommitQueue
from agentscope_durable.journal.scheduling import Channels
from agentscope_durable.spi.harness import Abandoned, RunContext

__all__ = ["Asked", "Halting", "Increment", "Message", "RecordingFailed", "Told", "commit_queue", "entry"]

_encode = msgspec.json.Encoder().encode


class Halting(BaseException):
    """The agent must not go on. Neither a tool nor a model may take it for an error of its own."""


class RecordingFailed(Halting):
    """A commit was refused or failed: no model may be asked again for it (MC-11).

    Attributes:
        error: what the commit raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


@dataclass(slots=True)
class Told:
    """What is said about one tool call. See `contracts.commands.ToolCommit`."""

    call_id: str
    state: ExecutionState
    name: str = ""
    kind: ExecutionKind = ExecutionKind.LOCAL
    arguments: str | None = None
    route: str = ""
    rule: ReplayRule = ReplayRule.NEVER
    result: ToolResult | None = None
    applied: bool = False


@dataclass(slots=True)
class Asked:
    """A question the agent now waits for."""

    interaction_id: str
    call_id: str
    kind: InteractionKind
    name: str
    arguments: str


@dataclass(slots=True)
class Message:
    """A complete public message."""

    message_id: str
    content: list[dict[str, Any]]
    attempt: int
    structured: Any = None


@dataclass(slots=True)
class Increment:
    """What became true at one place. Empty parts say nothing."""

    entries: list[JournalEntry] = field(default_factory=list[JournalEntry])
    rows: tuple[CheckpointRow, ...] = ()
    base: bool = False
    steps: list[StepFact] = field(default_factory=list[StepFact])
    models: list[ModelFact] = field(default_factory=list[ModelFact])
    messages: list[Message] = field(default_factory=list[Message])
    abandons: list[Abandon] = field(default_factory=list[Abandon])
    tools: list[Told] = field(default_factory=list[Told])
    questions: list[Asked] = field(default_factory=list[Asked])
    answers: list[str] = field(default_factory=list[str])
    inputs: list[int] = field(default_factory=list[int])
    workspace: list[EntryCommit] = field(default_factory=list[EntryCommit])
    reasoning: int | None = None
    attempt: int | None = None
    end: RunEnd | None = None

    def merge(self, more: Increment) -> None:
        """Add what was accepted after this one."""
        self.entries += more.entries
        self.rows = more.rows if more.base else self.rows + more.rows
        self.base = self.base or more.base
        self.steps += more.steps
        self.models += more.models
        self.messages += more.messages
        self.abandons += more.abandons
        self.tools += more.tools
        self.questions += more.questions
        self.answers += more.answers
        self.inputs += more.inputs
        self.workspace += more.workspace
        self.reasoning = self.reasoning if more.reasoning is None else more.reasoning
        self.attempt = self.attempt if more.attempt is None else more.attempt
        self.end = more.end or self.end

    @property
    def empty(self) -> bool:
        """It says nothing."""
        return self == Increment()


def entry(type: JournalEventType, /, **payload: Any) -> JournalEntry:
    """A journal fact of ids, names and numbers; bodies stand where they were written."""
    return JournalEntry(type, msgspec.Raw(_encode(payload)))


def commit_queue(
    context: RunContext, channels: Channels, *, writer: str, broken: Callable[[], None]
) -> CommitQueue[Increment, StepReceipt]:
    """The queue through which everything of one Run becomes true; `broken` is told once nothing more can."""

    async def send(parts: list[Increment]) -> StepReceipt:
        whole = parts[0]
        for part in parts[1:]:
            whole.merge(part)
        try:
            return await context.commit(await _command(context, whole, writer))
        except (Abandoned, InputsChanged):
            raise
        except Exception as error:
            raise RecordingFailed(error) from error

    return CommitQueue(
        send,
        channel=channels.commit,
        capacity=channels.scheduling.task_queue_capacity,
        # An input may be withdrawn at this moment: then its commit is refused, and nobody else's with it.
        alone=lambda part: bool(part.inputs),
        refusals=(InputsChanged,),
        broken=broken,
    )


async def _command(context: RunContext, whole: Increment, writer: str) -> CommitStep:
    start = context.start
    journal = b""
    if whole.rows or whole.entries:
        batch = JournalBatch(context.position, tuple(whole.entries), whole.rows, whole.base)
        journal = batch.encode()
    return CommitStep(
        session=start.session,
        thread_id=start.thread_id,
        turn_id=start.turn_id,
        run_id=start.run_id,
        fence=start.fence,
        expected_position=context.position,
        journal=journal,
        checkpoint=bool(whole.rows),
        base=whole.base,
        writer=writer if whole.rows else "",
        reasoning=whole.reasoning,
        attempt=whole.attempt,
        steps=tuple(whole.steps),
        models=tuple(whole.models),
        messages=tuple([await _message(context, message) for message in whole.messages]),
        abandons=tuple(whole.abandons),
        tools=tuple([await _tool(context, told) for told in whole.tools]),
        interactions=tuple([await _question(context, asked) for asked in whole.questions]),
        inputs=tuple(whole.inputs),
        answers=tuple(whole.answers),
        workspace=tuple(whole.workspace),
        end=whole.end,
    )


async def _message(context: RunContext, message: Message) -> MessageOut:
    return MessageOut(
        message_id=message.message_id,
        content=await context.body(message.content),
        attempt=message.attempt,
        structured=None if message.structured is None else await context.body(message.structured),
    )


async def _arguments(context: RunContext, text: str) -> Body:
    # The model's exact text, as a JSON string: no number in it is read (PT-13).
    return await context.body(sanitize_text(text))


async def _tool(context: RunContext, told: Told) -> ToolCommit:
    return ToolCommit(
        call_id=told.call_id,
        state=told.state,
        name=told.name,
        kind=told.kind,
        arguments=None if told.arguments is None else await _arguments(context, told.arguments),
        route=told.route,
        rule=told.rule,
        result=None if told.result is None else await context.body(msgspec.to_builtins(told.result)),
        applied=told.applied,
    )


async def _question(context: RunContext, asked: Asked) -> InteractionCommit:
    return InteractionCommit(
        interaction_id=asked.interaction_id,
        call_id=asked.call_id,
        kind=asked.kind,
        name=asked.name,
        arguments=await _arguments(context, asked.arguments),
    )


def merged(parts: Sequence[Increment]) -> Increment:
    """Several increments as one."""
    whole = Increment()
    for part in parts:
        whole.merge(part)
    return whole
