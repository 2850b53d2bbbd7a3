"""The native state of a scripted agent: messages and where it stands, and which of it is stored already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.journal import (
    Base,
    Block,
    CheckpointRow,
    Field,
    JournalBatch,
    JournalEntry,
    MessageMeta,
)
from agentscope_durable.contracts.messages import Content, Text
from agentscope_durable.contracts.records import ExecutionRecord
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.spi.harness import JournalRow, RunStart

STATE_VERSION: Final = "scripted-1"
WRITER: Final = "scripted 1"
PROGRAM: Final = "program"
BASE_EVERY: Final = 50
"""Commits after which the whole state is written again."""


class OpenCall(msgspec.Struct):
    """A call of the present round, as the agent knows it: new, asked, running, sent or done.

    Attributes:
        edited: arguments it was approved with, if they are not the model's.
    """

    id: str
    at: int
    state: str = "new"
    edited: dict[str, Any] | None = None


class Program(msgspec.Struct):
    """Where the agent stands. `phase` is `next`, `asked` (the model), `acting`, `waiting` (for a signal) or
    `answered` (the last answer is stored, the Turn has not ended). `owner` is the Thread whose state it is."""

    turn: str = ""
    at: int = 0
    phase: str = "next"
    round: int = 0
    attempt: int = 0
    calls: list[OpenCall] = []
    inputs: list[str] = []
    results: list[str] = []
    commits: int = 0
    owner: str = ""


class Message(msgspec.Struct, frozen=True):
    role: str
    text: str


class Mark(NamedTuple):
    """What of a state is said, and what is stored."""

    messages: int
    stored: int
    has_base: bool


def owner_of(thread: ThreadKey) -> str:
    """What the state of a scripted agent calls its Thread."""
    return f"{thread.session.namespace}/{thread.session.session_id}/{thread.thread_id}"


class State:
    """The native state: messages and program, and which of it is stored already."""

    def __init__(self) -> None:
        self.program = Program()
        self.messages: list[Message] = []
        self._stored = 0
        self._has_base = False

    @staticmethod
    async def load(start: RunStart, rows: list[JournalRow], cached: object) -> State:
        state = cached if isinstance(cached, State) else State.fold(rows)
        if state.program.turn != start.turn_id:
            owner = state.program.owner or owner_of(ThreadKey(start.session, start.thread_id))
            state.program = Program(turn=start.turn_id, commits=state.program.commits, owner=owner)
            state.say("user", text_of_content(start.input.content))
        return state

    @staticmethod
    def fold(rows: Sequence[JournalRow]) -> State:
        state = State()
        for row in rows:
            for part in JournalBatch.decode(row.journal, position=row.at).checkpoint:
                match part:
                    case Base():
                        state.messages.clear()
                        state._has_base = True
                    case Field(name=name, json=json) if name == PROGRAM:
                        state.program = msgspec.json.decode(json, type=Program)
                    case MessageMeta(meta=meta):
                        state.messages.append(Message(msgspec.json.decode(meta)["role"], ""))
                    case Block(i=i, json=json):
                        state.messages[i] = replace(state.messages[i], text=msgspec.json.decode(json)["text"])
                    case _:
                        raise ValueError(f"unexpected checkpoint row {type(part).__name__}")
        state._stored = len(state.messages)
        return state

    def say(self, role: str, text: str) -> None:
        self.messages.append(Message(role, text))

    def mark(self) -> Mark:
        """Where it stands before a commit that may be refused."""
        return Mark(len(self.messages), self._stored, self._has_base)

    def back_to(self, mark: Mark) -> None:
        """The commit was refused: take back what was said for it, and count nothing of it as stored."""
        del self.messages[mark.messages :]
        self._stored, self._has_base = mark.stored, mark.has_base

    def baseline(self, owner: str) -> tuple[CheckpointRow, ...]:
        """All of it, as the state of a Thread that no Turn has begun on."""
        if not self._has_base or not self.program.owner:
            raise CorruptRecord("native state", "a scripted agent's state", "there is none")
        self.program = Program(owner=owner)
        self._has_base = False
        return self.batch(0).checkpoint

    def batch(self, position: int, entries: Sequence[tuple[str, object]] = ()) -> JournalBatch:
        """What the next commit adds. The state counts as stored with it."""
        self.program.commits += 1
        base = not self._has_base or self.program.commits % BASE_EVERY == 0
        rows: list[CheckpointRow] = [Base()] if base else []
        for i in range(0 if base else self._stored, len(self.messages)):
            message = self.messages[i]
            rows.append(MessageMeta(i, _raw({"role": message.role}), 0))
            rows.append(Block(i, 0, _raw({"type": "text", "text": message.text})))
        rows.append(Field(PROGRAM, None, _raw(self.program)))
        self._stored = len(self.messages)
        self._has_base = True
        return JournalBatch(
            expected_head=position,
            entries=tuple(JournalEntry(kind, _raw(payload)) for kind, payload in entries),
            checkpoint=tuple(rows),
            base=base,
        )


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def text_of_content(content: Sequence[Content]) -> str:
    return "".join(part.text for part in content if isinstance(part, Text))


async def text_of(record: ExecutionRecord, open_body: Callable[[Body], Any]) -> str:
    if record.result is None:
        return record.state.value.lower()
    result = msgspec.convert(await open_body(record.result), ToolResult)
    if result.value is not None:
        return result.value if isinstance(result.value, str) else msgspec.json.encode(result.value).decode()
    return result.reason or result.state
