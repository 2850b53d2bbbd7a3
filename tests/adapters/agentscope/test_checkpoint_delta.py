"""At every hook of a real agent, the rows written so far fold to exactly the state it has."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentscope_durable.adapters.agentscope.checkpoint import (
    REBASE_BYTES_MIN,
    CheckpointWriter,
    Delta,
    block_bodies,
    restore,
    sanitize_blocks,
)
from agentscope_durable.contracts.errors import CorruptRecord, Misuse
from agentscope_durable.contracts.journal import (
    Base,
    Block,
    CacheEntry,
    CacheOrder,
    Drop,
    Field,
    FromOutcome,
    JournalBatch,
    JournalEntry,
    JournalEventType,
    MessageMeta,
    MetaPatch,
    Patch,
    Trim,
)
from agentscope_durable.journal.checkpoint import CheckpointState, base_rows, fold, row_bytes, to_state_json
from agentscope_durable.testing.scripted_model import Answer, Call, Text, Thinking, scripted_model

pytest.importorskip("agentscope")

from agentscope.agent import Agent, ContextConfig, ReActConfig
from agentscope.event import (
    ConfirmResult,
    ExternalExecutionResultEvent,
    ModelCallEndEvent,
    ReplyEndEvent,
    ReplyStartEvent,
    RequireExternalExecutionEvent,
    RequireUserConfirmEvent,
    ToolResultEndEvent,
    ToolResultStartEvent,
    UserConfirmResultEvent,
)
from agentscope.message import (
    Base64Source,
    DataBlock,
    HintBlock,
    Msg,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
    ToolResultBlock,
    ToolResultState,
    Usage,
    UserMsg,
)
from agentscope.middleware import MiddlewareBase
from agentscope.model import ChatResponse
from agentscope.permission import PermissionBehavior, PermissionDecision, PermissionRule
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, ToolBase, ToolChunk, Toolkit, ToolResponse
from pydantic import BaseModel


class Journal:
    """A Thread's journal in memory, encoded as it would be stored."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.bases: list[int] = []
        self.writer = CheckpointWriter()

    @property
    def head(self) -> int:
        return len(self.stored)

    def commit(self, delta: Delta, *entries: JournalEntry) -> int:
        self.stored.append(JournalBatch(self.head, entries, delta.rows, delta.base).encode())
        if delta.base:
            self.bases.append(self.head)
        return self.head

    def checkpoint(self, state: Any) -> Delta:
        delta = self.writer.delta(state)
        self.commit(delta)
        return delta

    def answer(self, blocks: list[Any]) -> int:
        """Store a model's answer before it is applied, as the adapter does."""
        return self.outcome(JournalEventType.MODEL_RESULT, blocks)

    def outcome(self, entry_type: str, blocks: list[Any]) -> int:
        bodies = block_bodies(blocks)
        payload = msgspec.Raw(msgspec.json.encode({"content": bodies, "finished_reason": "completed"}))
        at = self.commit(Delta((), False), JournalEntry(entry_type, payload))
        self.writer.note_outcome(at, bodies)
        return at

    def result(self, call_id: str, name: str, response: ToolResponse) -> int:
        """Store a local tool's result before the agent takes it up."""
        block = ToolResultBlock(
            id=call_id, name=name, output=response.content, state=response.state, metadata=response.metadata
        )
        return self.outcome(JournalEventType.TOOL_RESULT, [block])

    def fold(self, position: int | None = None) -> CheckpointState:
        """The state at a position, read from its last base on and no earlier."""
        position = self.head if position is None else position
        first = max(base for base in self.bases if base <= position)
        numbered = enumerate(self.stored[first - 1 : position], start=first)
        return fold((at, JournalBatch.decode(stored, position=at)) for at, stored in numbered)

    def state(self, position: int | None = None) -> dict[str, Any]:
        return json.loads(to_state_json(self.fold(position)))

    def reopen(self) -> AgentState:
        """As another host would: a state and a writer made of the journal alone."""
        checkpoint = self.fold()
        state = restore(to_state_json(checkpoint))
        self.writer = CheckpointWriter.continuing(state, checkpoint)
        return state


def dump(state: AgentState) -> dict[str, Any]:
    return state.model_dump(mode="json")


class Probe(MiddlewareBase):
    """Commits at every hook and compares there; the outcome of each model call is stored before it is applied."""

    def __init__(self, journal: Journal, seed: int, *, steer: float = 0.0) -> None:
        self.journal, self.steer = journal, steer
        self.random = random.Random(seed)
        self.seen: dict[int, str] = {}
        self.hooks: list[str] = []

    def check(self, agent: Agent, hook: str) -> None:
        self.journal.checkpoint(agent.state)
        expected = dump(agent.state)
        assert self.journal.state() == expected, hook
        self.seen[self.journal.head] = json.dumps(expected, sort_keys=True)
        self.hooks.append(hook)

    async def on_reply(self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Any) -> AsyncIterator[Any]:
        async for event in next_handler(**input_kwargs):
            if "Delta" not in type(event).__name__:
                self.check(agent, type(event).__name__)
            yield event

    async def on_reasoning(self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Any) -> AsyncIterator[Any]:
        if self.random.random() < self.steer:
            agent.state.context.append(UserMsg("user", f"steer {self.random.random()}"))
        self.check(agent, "before reasoning")
        async for event in next_handler(**input_kwargs):
            yield event
        self.check(agent, "after reasoning")

    async def on_acting(self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Any) -> AsyncIterator[Any]:
        self.check(agent, "before acting")
        async for item in next_handler(**input_kwargs):
            self.check(agent, "while acting")
            if isinstance(item, ToolResponse):
                called = input_kwargs["tool_call"]
                self.journal.result(called.id, called.name, item)
            yield item

    async def on_model_call(self, agent: Agent, input_kwargs: dict[str, Any], next_handler: Any) -> Any:
        answer = await next_handler(**input_kwargs)
        if isinstance(answer, ChatResponse):
            self.journal.answer(answer.content)
            return answer

        async def stored() -> AsyncIterator[Any]:
            async for chunk in answer:
                if chunk.is_last:
                    self.journal.answer(chunk.content)
                yield chunk

        return stored()


class External(ToolBase):
    """A tool that someone else runs."""

    name = "external"
    description = "Runs elsewhere."
    input_schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    is_concurrency_safe = True
    is_read_only = False
    is_external_tool = True
    is_mcp = False
    mcp_name = None

    async def check_permissions(self, tool_input: Any, context: Any) -> PermissionDecision:
        return ALLOW


ALLOW = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
SUMMARY = {
    "task_overview": "T",
    "current_state": "C",
    "important_discoveries": "D",
    "next_steps": "N",
    "context_to_preserve": "P",
}


async def picture(x: int = 0) -> ToolChunk:
    """Show a picture."""
    image = DataBlock(source=Base64Source(data="aGk=" * 20, media_type="image/png"))
    return ToolChunk(content=[image, TextBlock(text="i" * 50)])


async def risky(x: int = 0) -> str:
    """Needs an approval."""
    return "r" * 100


class Ticket(BaseModel):
    title: str
    urgent: bool


def agent_for(journal: Journal, probe: MiddlewareBase, script: Callable[..., Answer], state: Any = None) -> Agent:
    return Agent(
        name="agent",
        system_prompt="You work.",
        model=scripted_model(script, context_size=6000, chunk_chars=100),
        toolkit=Toolkit(tools=[FunctionTool(picture, permission=ALLOW), FunctionTool(risky), External()]),
        middlewares=[probe],
        state=state,
        context_config=ContextConfig(trigger_ratio=0.8, reserve_ratio=0.3, max_image_num=2),
        react_config=ReActConfig(max_iters=6),
    )


def wanted(tools: list[dict[str, Any]] | None, name: str) -> bool:
    return any(tool["function"]["name"] == name for tool in tools or [])


async def converse(journal: Journal, probe: Probe, turns: int, *, seed: int, reopen: bool = False) -> None:
    """A long conversation: pictures, approvals, partial external results, compression, and what the probe adds."""
    chance = random.Random(seed)

    def script(messages: list[Any], tools: list[dict[str, Any]] | None, choice: Any, n: int) -> Answer:
        if wanted(tools, "generate_structured_output"):
            return Call("generate_structured_output", SUMMARY)
        if getattr(choice, "mode", None) == "none" or chance.random() < 0.15:
            return Text("final " * 20)
        called = [Call(chance.choice(["picture", "risky", "external"]), {"x": k}) for k in range(chance.randint(1, 3))]
        thought = [Thinking("hm " * 10, signature="s")] if chance.random() < 0.3 else []
        return [*thought, Text("w" * 40), *called]

    agent = agent_for(journal, probe, script)
    event: Any = UserMsg("user", "hi")
    for _ in range(turns):
        async for _event in agent.reply_stream(event):
            pass
        if reopen and chance.random() < 0.3:
            agent = agent_for(journal, probe, script, journal.reopen())
        waiting = agent.state.get_awaiting_tool_calls("agent")
        asking = [call for call in waiting if call.state == "asking"]
        submitted = [call for call in waiting if call.state == "submitted"]
        reply_id = agent.state.reply_id
        if asking:
            answers = [ConfirmResult(confirmed=chance.random() < 0.7, tool_call=call) for call in asking]
            event = UserConfirmResultEvent(reply_id=reply_id, confirm_results=answers)
        elif submitted:
            some = submitted[: chance.randint(1, len(submitted))]
            event = ExternalExecutionResultEvent(reply_id=reply_id, execution_results=[result_of(c.id) for c in some])
        else:
            event = UserMsg("user", "next " * 30)


def result_of(call_id: str, text: str = "R") -> ToolResultBlock:
    output = [TextBlock(text=text)]
    return ToolResultBlock(id=call_id, name="external", output=output, state=ToolResultState.SUCCESS)


async def test_every_hook_of_a_long_conversation_is_restorable(tmp_path: Path) -> None:
    journal = Journal()
    probe = Probe(journal, seed=3, steer=0.3)

    await converse(journal, probe, 60, seed=3)

    assert {
        RequireExternalExecutionEvent.__name__,
        RequireUserConfirmEvent.__name__,
        ReplyStartEvent.__name__,
        ReplyEndEvent.__name__,
        ModelCallEndEvent.__name__,
        ToolResultStartEvent.__name__,
        ToolResultEndEvent.__name__,
    } <= set(probe.hooks)
    assert len(journal.bases) > 3, "the conversation was never compressed"
    for position, expected in probe.seen.items():
        assert journal.state(position) == json.loads(expected), position
        assert dump(restore(to_state_json(journal.fold(position)))) == json.loads(expected), position
    naive = sum(map(len, probe.seen.values()))
    written = sum(map(len, journal.stored))
    assert written < naive / 20, (written, naive)


async def test_an_agent_that_moves_between_hosts_leaves_the_same_journal() -> None:
    journal = Journal()
    probe = Probe(journal, seed=5, steer=0.2)

    await converse(journal, probe, 40, seed=5, reopen=True)

    for position, expected in probe.seen.items():
        assert journal.state(position) == json.loads(expected), position
    assert sum(map(len, journal.stored)) < sum(map(len, probe.seen.values())) / 20


async def test_structured_output_is_followed_without_writing_its_schema_again() -> None:
    journal = Journal()
    probe = Probe(journal, seed=1)
    answers: list[Answer] = [
        Text("Let me think."),
        Call("picture", {"x": 1}),
        Call("GenerateStructuredOutput", {"title": "Down", "urgent": True}),
    ]

    def script(messages: list[Any], tools: list[dict[str, Any]] | None, choice: Any, n: int) -> Answer:
        name = next(t["function"]["name"] for t in tools or [] if "tructured" in t["function"]["name"])
        answer = answers[min(n, 2)]
        return Call(name, answer.arguments) if isinstance(answer, Call) and "tructured" in answer.name else answer

    agent = agent_for(journal, probe, script)
    async for _ in agent.reply_stream(UserMsg("user", "File it"), structured_schema=Ticket):
        pass
    assert agent.state.reply_context.structured_output == {"title": "Down", "urgent": True}

    schema = b'"urgent":{"title":"Urgent"'
    mentions = [stored.count(schema) for stored in journal.stored]
    assert sum(mentions) == 1, mentions
    assert journal.state()["reply_context"]["structured_schema"] == Ticket.model_json_schema()


# ------------------------------------------------------------ what is written


def call(call_id: str, state: str = "pending", arguments: str = '{"x": 1}') -> ToolCallBlock:
    return ToolCallBlock(id=call_id, name="tool", input=arguments, state=state)


def image(data: str = "aGk=") -> DataBlock:
    return DataBlock(source=Base64Source(data=data, media_type="image/png"))


def assistant(*blocks: Any, message_id: str = "reply") -> Msg:
    return Msg(name="agent", role="assistant", content=list(blocks), id=message_id)


def state_with(*messages: Msg) -> AgentState:
    return AgentState(session_id="s", context=list(messages))


def opened(*messages: Msg) -> tuple[Journal, AgentState]:
    journal, state = Journal(), state_with(*messages)
    assert journal.checkpoint(state).base
    return journal, state


def same(journal: Journal, state: AgentState) -> None:
    assert journal.state() == dump(state)


def test_the_first_delta_is_a_base_with_everything() -> None:
    journal, state = opened(UserMsg("user", "hi"), assistant(TextBlock(text="yes")))

    same(journal, state)
    assert journal.checkpoint(state) == ((), False)


def test_a_calls_way_is_written_without_its_arguments() -> None:
    arguments = json.dumps({"body": "x" * 10_000})
    journal, state = opened(UserMsg("user", "hi"), assistant(call("c", arguments=arguments)))
    block = state.context[1].content[0]
    rule = PermissionRule(tool_name="tool", rule_content=None, behavior=PermissionBehavior.ALLOW, source="user")

    for status, rules in (("asking", [rule]), ("allowed", [rule]), ("submitted", []), ("finished", [])):
        block.state, block.suggested_rules = status, rules
        (row,) = journal.checkpoint(state).rows
        assert isinstance(row, Patch) and row_bytes(row) < 300
        same(journal, state)


def test_arguments_that_a_person_edited_are_written() -> None:
    journal, state = opened(assistant(call("c", "asking")))
    state.context[0].content[0].input = '{"x": 2}'
    state.context[0].content[0].state = "allowed"

    (row,) = journal.checkpoint(state).rows

    assert isinstance(row, Patch) and row.fields.keys() == {"input", "state"}
    same(journal, state)


def test_usage_that_grows_is_a_patch_of_its_message() -> None:
    journal, state = opened(UserMsg("user", "hi"), assistant(TextBlock(text="a")))
    state.context[1].append_usage(Usage(input_tokens=10, output_tokens=2))
    first = journal.checkpoint(state)
    state.context[1].append_usage(Usage(input_tokens=10, output_tokens=2))
    second = journal.checkpoint(state)

    for delta in (first, second):
        (row,) = delta.rows
        assert isinstance(row, MetaPatch) and row.fields.keys() == {"usage"}
    same(journal, state)


def test_an_answer_is_not_written_a_second_time() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    blocks = [ThinkingBlock(thinking="t" * 500, signature="s"), TextBlock(text="x" * 2000), call("c", "pending")]
    journal.answer(blocks)
    state.context.append(assistant(*blocks))
    state.context[1].content[2].state = "allowed"

    delta = journal.checkpoint(state)

    kinds = [type(row) for row in delta.rows]
    assert kinds == [MessageMeta, FromOutcome, FromOutcome, FromOutcome]
    assert delta.rows[3].patch == {"state": msgspec.Raw(b'"allowed"')}
    assert sum(map(row_bytes, delta.rows)) < 500
    same(journal, state)


def test_a_local_tools_result_is_not_written_a_second_time() -> None:
    journal, state = opened(UserMsg("user", "hi"), assistant(call("c", "allowed"), call("d", "allowed")))
    outputs = {name: [TextBlock(text=name * 5000), image()] for name in "dc"}
    for name, output in outputs.items():
        journal.result(name, "tool", ToolResponse(content=output, state=ToolResultState.SUCCESS))
    for name, output in outputs.items():
        result = ToolResultBlock(id=name, name="tool", output=output, state=ToolResultState.SUCCESS)
        state.context[1].content.append(result)

    delta = journal.checkpoint(state)

    assert [type(row) for row in delta.rows] == [FromOutcome, FromOutcome]
    assert sum(map(row_bytes, delta.rows)) < 200
    same(journal, state)


def test_an_answer_replayed_after_a_restart_is_still_pointed_at() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    blocks = [TextBlock(text="x" * 2000)]
    at = journal.answer(blocks)
    state = journal.reopen()
    assert journal.writer.note_outcome(at, block_bodies(blocks))
    state.context.append(assistant(TextBlock.model_validate(blocks[0].model_dump(mode="json"))))

    delta = journal.checkpoint(state)

    assert [type(row) for row in delta.rows] == [MessageMeta, FromOutcome]
    same(journal, state)


def test_an_answer_before_the_base_is_written_in_full() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    blocks = [TextBlock(text="x" * 2000)]
    at = journal.answer(blocks)
    journal.commit(journal.writer.base(state))
    assert not journal.writer.note_outcome(at, block_bodies(blocks))
    state.context.append(assistant(*blocks))

    delta = journal.checkpoint(state)

    assert [type(row) for row in delta.rows] == [MessageMeta, Block]
    same(journal, state)


def test_an_answer_that_begins_an_epoch_with_its_message_is_written_in_full() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    blocks = [TextBlock(text="x" * 2000)]
    journal.answer(blocks)
    state.context = [assistant(*blocks)]

    delta = journal.checkpoint(state)

    assert delta.base and not any(isinstance(row, FromOutcome) for row in delta.rows)
    same(journal, state)


def test_an_answer_that_a_middleware_changed_is_written_as_it_entered_the_state() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    blocks: list[Any] = [ThinkingBlock(thinking="t" * 300, signature="s"), TextBlock(text="x" * 2000), call("c")]
    journal.answer(blocks)
    entered = copy.deepcopy(blocks)
    del entered[0].signature
    entered[1].text = "y" * 2000
    entered[2].name = "other"
    state.context.append(assistant(*entered))

    journal.checkpoint(state)

    same(journal, state)


def test_compression_begins_a_new_epoch() -> None:
    long = assistant(*(TextBlock(text=f"{n}") for n in range(10)))
    journal, state = opened(UserMsg("user", "hi"), long)
    boundary = copy.deepcopy(long)
    boundary.content = long.content[7:]
    state.summary, state.context = "It was long.", [boundary]

    delta = journal.checkpoint(state)

    assert delta.base and isinstance(delta.rows[0], Base)
    same(journal, state)


def test_the_end_of_a_reply_that_was_the_whole_context_is_a_new_epoch() -> None:
    long = assistant(*(TextBlock(text=f"{n}" * 100) for n in range(10)))
    journal, state = opened(long)
    boundary = copy.deepcopy(long)
    boundary.content = long.content[7:]
    state.context = [boundary]

    assert journal.checkpoint(state).base
    same(journal, state)


def test_a_context_that_was_emptied_is_a_new_epoch() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    state.context = []

    assert journal.checkpoint(state).base
    same(journal, state)


def test_a_context_cut_at_its_end_is_trimmed() -> None:
    journal, state = opened(*(UserMsg("user", f"{n}") for n in range(5)))
    del state.context[3:]
    state.context.append(UserMsg("user", "instead"))

    delta = journal.checkpoint(state)

    assert [type(row) for row in delta.rows] == [Trim, MessageMeta, Block]
    same(journal, state)


def test_images_taken_out_of_old_messages_are_followed() -> None:
    hint = HintBlock(hint=[TextBlock(text="see"), image()])
    result = ToolResultBlock(id="c", name="tool", output=[TextBlock(text="t"), image()], state=ToolResultState.SUCCESS)
    old = [UserMsg("user", [TextBlock(text="look"), image()]), assistant(image(), hint, result)]
    journal, state = opened(*old, *(UserMsg("user", f"{n}") for n in range(20)))
    gone = TextBlock(text="removed")

    state.context[0].content[1] = gone
    state.context[1].content[0] = HintBlock(hint="removed")
    state.context[1].content[1].hint[1] = gone
    delta = journal.checkpoint(state)
    state.context[1].content[2].output[1] = gone
    last = journal.checkpoint(state)

    assert [type(row) for row in delta.rows] == [Block, Block, Block]
    assert [type(row) for row in last.rows] == [Block]
    same(journal, state)
    assert journal.checkpoint(state).rows == ()


def test_a_steer_within_a_reply_makes_a_second_message_with_the_same_id() -> None:
    journal, state = opened(UserMsg("user", "hi"), assistant(TextBlock(text="a")))
    state.context += [UserMsg("user", "wait"), assistant(TextBlock(text="b"))]
    journal.checkpoint(state)
    state.context[-1].content.append(call("c"))

    assert [type(row) for row in journal.checkpoint(state).rows] == [Block]
    same(journal, state)


def test_a_call_that_is_closed_after_a_message_came_in_between_is_followed() -> None:
    journal, state = opened(UserMsg("user", "hi"), assistant(call("c", "submitted")))
    state.context.append(UserMsg("other", "observed meanwhile"))
    journal.checkpoint(state)
    state.context[1].content[0].state = "finished"
    state.context[1].content.append(result_of("c"))

    assert [type(row) for row in journal.checkpoint(state).rows] == [Patch, Block]
    same(journal, state)


def test_only_the_member_of_a_field_that_changed_is_written() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    state.middle_context = {"memory": "m" * 5000, "budget": {"reply": 0}}
    journal.checkpoint(state)
    state.cur_iter += 1
    state.middle_context["budget"]["reply"] = 7
    rule = PermissionRule(tool_name="tool", rule_content=None, behavior=PermissionBehavior.ALLOW, source="user")
    state.permission_context.allow_rules["tool"] = [rule]

    changed = journal.checkpoint(state)

    assert {(row.name, row.key) for row in changed.rows if isinstance(row, Field)} == {
        ("reply_context", "cur_iter"),
        ("middle_context", "budget"),
        ("permission_context", "allow_rules"),
    }
    assert sum(map(row_bytes, changed.rows)) < 300
    same(journal, state)

    del state.middle_context["memory"]
    assert journal.checkpoint(state).rows == (Drop("middle_context", "memory"),)
    same(journal, state)


async def test_files_in_the_read_cache_are_written_once() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    tools = state.tool_context

    async def read(path: str, size: int) -> None:
        await tools.cache_file(path, ["x" * size], mtime=1.0)

    await read("/a", 20_000)
    await read("/b", 20_000)
    first = journal.checkpoint(state)
    assert [type(row) for row in first.rows] == [CacheEntry, CacheEntry, CacheOrder]

    await tools.get_cache("/a", mtime=1.0)
    moved = journal.checkpoint(state)
    assert moved.rows == (CacheOrder((1, 0)),)
    same(journal, state)

    await read("/a", 20_000)
    await tools.clean_file_cache({"/a"})
    journal.checkpoint(state)
    same(journal, state)
    assert journal.checkpoint(state).rows == ()


async def test_equal_files_in_the_read_cache_are_two_entries() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    await state.tool_context.cache_file("/a", ["x"], mtime=1.0)
    entry = state.tool_context.read_file_cache[0]
    state.tool_context.read_file_cache = [entry, entry, copy.deepcopy(entry)]
    journal.checkpoint(state)
    same(journal, state)

    state = journal.reopen()
    state.tool_context.read_file_cache = copy.deepcopy(state.tool_context.read_file_cache)[:2]
    journal.checkpoint(state)
    same(journal, state)


async def test_a_host_that_loads_continues_with_small_deltas() -> None:
    messages = [UserMsg("user", f"{n}" * 100) for n in range(50)]
    journal, state = opened(*messages, assistant(call("c", "submitted"), image()))
    state.summary = "S" * 1000
    state.reply_context.structured_schema = Ticket
    await state.tool_context.cache_file("/a", ["x" * 1000], mtime=1.0)
    journal.checkpoint(state)

    state = journal.reopen()
    assert journal.checkpoint(state).rows == ()

    state.context[-1].content.append(result_of("c"))
    state.context[-1].content[0].state = "finished"
    await state.tool_context.get_cache("/a", mtime=1.0)
    delta = journal.checkpoint(state)
    assert [type(row) for row in delta.rows] == [Patch, Block]
    await state.tool_context.cache_file("/b", ["y"], mtime=1.0)
    journal.checkpoint(state)
    same(journal, state)


async def test_a_state_exchanged_for_an_equal_one_costs_no_bytes() -> None:
    journal, state = opened(*(UserMsg("user", f"{n}") for n in range(20)), assistant(call("c"), image()))
    await state.tool_context.cache_file("/a", ["x" * 1000], mtime=1.0)
    journal.checkpoint(state)

    anchor = AgentState.model_validate_json(state.model_dump_json())

    assert journal.checkpoint(anchor).rows == ()
    anchor.context[-1].content[0].state = "allowed"
    assert [type(row) for row in journal.checkpoint(anchor).rows] == [Patch]
    same(journal, anchor)


def test_a_state_taken_back_to_the_last_anchor_is_followed() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    anchor = AgentState.model_validate_json(state.model_dump_json())
    state.context.append(assistant(TextBlock(text="a"), call("c")))
    state.cur_iter = 1
    journal.checkpoint(state)

    delta = journal.checkpoint(anchor)

    assert [type(row) for row in delta.rows] == [Trim, Field]
    same(journal, anchor)


# ------------------------------------------------------------ the whole state


async def test_a_middleware_that_edits_old_messages_is_noticed_at_the_end_of_the_run() -> None:
    journal, state = opened(*(UserMsg("user", f"{n}") for n in range(20)))
    await state.tool_context.cache_file("/a", ["x"], mtime=1.0)
    state.summary = [TextBlock(text="S")]
    journal.checkpoint(state)
    state.context[2].content[0].text = "changed"
    state.context[3].metadata["k"] = 1
    state.context[4].content.append(TextBlock(text="more"))
    state.tool_context.read_file_cache[0].lines.append("y")
    state.summary[0].text = "T"
    assert journal.checkpoint(state).rows == ()

    delta = journal.writer.full_check(state)
    journal.commit(delta)

    assert [type(row) for row in delta.rows] == [Block, MetaPatch, Block, Field, CacheEntry, CacheOrder]
    same(journal, state)
    assert journal.writer.full_check(state) == ((), False)


def test_rows_that_outgrew_the_state_make_room_for_a_new_epoch() -> None:
    journal, state = opened(UserMsg("user", "hi"))
    for n in range(10, REBASE_BYTES_MIN // 10_000 + 12):
        state.middle_context["scratch"] = f"{n}" * 5_000
        assert not journal.checkpoint(state).base

    state = journal.reopen()
    delta = journal.writer.full_check(state)
    journal.commit(delta)

    assert delta.base
    same(journal, state)
    assert not journal.writer.full_check(state).base


def test_a_writer_is_refused_for_another_state() -> None:
    journal, _ = opened(UserMsg("user", "hi"))

    for other in (state_with(), state_with(UserMsg("user", "hi"), UserMsg("user", "hi"))):
        with pytest.raises(Misuse):
            CheckpointWriter.continuing(other, journal.fold())
    with pytest.raises(Misuse):
        CheckpointWriter.continuing(state_with(), fold([]))


def test_a_state_that_cannot_be_read_names_the_place_and_no_value() -> None:
    stored = json.loads(state_with(UserMsg("user", "hi")).model_dump_json())
    stored["context"][0]["content"][0]["text"] = {"secret": 1}

    with pytest.raises(CorruptRecord) as refused:
        restore(json.dumps(stored).encode())

    assert refused.value.reason.startswith("context.0.content.0")
    assert "secret" not in str(refused.value)


async def test_a_folded_state_forks_into_another_thread() -> None:
    journal, state = opened(UserMsg("user", "hi"), assistant(call("c", "finished")))
    await state.tool_context.cache_file("/a", ["x"], mtime=1.0)
    journal.checkpoint(state)
    source = journal.state() | {"session_id": "fork"}

    target = Journal()
    target.commit(Delta(base_rows(json.dumps(source).encode()), True))

    forked = target.reopen()
    assert dump(forked) == dump(state) | {"session_id": "fork"}
    forked.context.append(UserMsg("user", "go on"))
    target.checkpoint(forked)
    same(target, forked)


# ------------------------------------------------------------ text


def test_lone_surrogates_leave_the_blocks_before_they_enter_the_state() -> None:
    clean = TextBlock(text="\U0001f600 é")
    blocks = [
        clean,
        TextBlock(text="a\ud800b"),
        ThinkingBlock(thinking="\udfff", signature="\ud83d\ude00"),
        call("c\ud800", arguments='{"x": "\ud800", "y": "\\ud800"}'),
        ToolResultBlock(
            id="c",
            name="tool",
            output=[TextBlock(text="\ud800"), image()],
            state=ToolResultState.ERROR,
            metadata={"k\ud800": ["\udc00", 1, {"z": "\ud800"}], "n": None},
        ),
        HintBlock(hint="\ud800"),
    ]

    cleaned = sanitize_blocks(blocks)

    assert cleaned[0] is clean
    assert cleaned[1].text == "a\ufffdb"
    assert (cleaned[2].thinking, cleaned[2].signature) == ("\ufffd", "\U0001f600")
    assert (cleaned[3].id, cleaned[3].input) == ("c\ufffd", '{"x": "\ufffd", "y": "\\ud800"}')
    assert cleaned[4].output[0].text == "\ufffd" and cleaned[4].output[1] is blocks[4].output[1]
    assert cleaned[4].metadata == {"k\ufffd": ["\ufffd", 1, {"z": "\ufffd"}], "n": None}
    assert cleaned[4].state == "error"
    assert [type(block) for block in cleaned] == [type(block) for block in blocks]
    journal, state = opened(assistant(*cleaned))
    same(journal, state)


@given(st.lists(st.text(alphabet=st.characters(codec=None), max_size=20), max_size=4))
def test_any_text_can_be_stored_once_it_is_sanitized(texts: list[str]) -> None:
    blocks = sanitize_blocks([TextBlock(text=text) for text in texts])

    for text, block in zip(texts, blocks, strict=True):
        assert json.loads(block.model_dump_json())["text"] == block.text
        if text.encode("utf-8", "ignore").decode() == text:
            assert block.text == text


def test_numbers_beyond_64_bits_survive() -> None:
    big = 10**40
    result = ToolResultBlock(
        id="c", name="t", output="o", state=ToolResultState.RUNNING, metadata={"n": [big, 2**53 + 1]}
    )
    journal, state = opened(assistant(result))
    state.middle_context["n"] = big
    state.context[0].content[0].state = ToolResultState.SUCCESS
    journal.checkpoint(state)

    again = journal.reopen()

    assert again.middle_context == {"n": big}
    assert again.context[0].content[0].metadata == {"n": [big, 2**53 + 1]}


# ------------------------------------------------------------ chance

NATIVE = (
    "user",
    "assistant",
    "block",
    "answer",
    "advance",
    "result",
    "usage",
    "evict",
    "compress",
    "fields",
    "file",
    "use",
)
FOREIGN = ("edit", "swap", "insert", "remove", "shuffle", "meta", "drop field", "edit file")
HOSTS = ("reopen", "anchor", "cut", "rebase")


class Mutator:
    """Everything that AgentScope, middlewares and hosts do to a state, one step at a time."""

    def __init__(self, journal: Journal, state: AgentState, chance: random.Random) -> None:
        self.journal, self.state, self.chance = journal, state, chance
        self.number = 0

    def fresh(self) -> str:
        self.number += 1
        return f"{self.number}"

    def block(self) -> Any:
        name = self.fresh()
        return self.chance.choice(
            [
                lambda: TextBlock(text=name * self.chance.randint(0, 40)),
                lambda: ThinkingBlock(thinking=name, signature="s"),
                lambda: call(name, self.chance.choice(["pending", "finished"]), name * self.chance.randint(1, 40)),
                lambda: ToolResultBlock(id=name, name="t", output=[TextBlock(text=name), image()], state="success"),
                lambda: HintBlock(hint=[image(name)]),
                lambda: image(name),
            ]
        )()

    def step(self, operation: str) -> None:
        state, chance = self.state, self.chance
        context = state.context
        message = context[-1] if context else None
        some = chance.choice(context) if context else None
        match operation:
            case "user":
                context.append(UserMsg("user", self.fresh()))
            case "assistant":
                state.append_context("agent", [self.block()])
            case "block" if message is not None and message.role == "assistant":
                message.content.extend(self.block() for _ in range(chance.randint(1, 3)))
            case "answer":
                blocks = [TextBlock(text=self.fresh() * 50), call(self.fresh(), arguments="a" * 200)]
                self.journal.answer(blocks)
                if chance.random() < 0.2:
                    return
                state.append_context("agent", blocks)
                if chance.random() < 0.5:
                    blocks[1].state = "allowed"
            case "advance" if message is not None:
                # Finished is the end: no call comes back from there.
                for block in [b for b in message.get_content_blocks("tool_call") if b.state != "finished"]:
                    block.state = chance.choice(["pending", "asking", "allowed", "submitted", "finished"])
                    if chance.random() < 0.2:
                        block.input = self.fresh()
            case "result" if message is not None and message.role == "assistant":
                message.content.append(result_of(self.fresh()))
            case "usage" if message is not None:
                message.append_usage(Usage(input_tokens=1, output_tokens=2))
            case "evict":
                self.evict()
            case "compress" if context:
                keep = copy.deepcopy(context[chance.randrange(len(context)) :])
                first = copy.copy(keep[0])
                first.content = first.content[chance.randint(0, len(first.content)) :]
                state.summary, state.context = self.fresh(), [first, *keep[1:]]
            case "fields":
                state.cur_iter += 1
                state.middle_context[chance.choice("ab")] = self.fresh()
                state.tool_context.activated_groups.append(self.fresh())
            case "file":
                asyncio.run(state.tool_context.cache_file(chance.choice("abc"), [self.fresh()], mtime=1.0))
            case "use":
                asyncio.run(state.tool_context.get_cache(chance.choice("abc"), mtime=chance.choice([1.0, 2.0])))
            case "edit" if some is not None and some.content:
                block = chance.choice(some.content)
                if block.type == "text":
                    block.text = self.fresh()
                elif block.type == "tool_call":
                    block.input = self.fresh()
            case "swap" if context:
                i = chance.randrange(len(context))
                context[i] = copy.deepcopy(context[i]) if chance.random() < 0.5 else UserMsg("user", self.fresh())
            case "insert" if some is not None:
                some.content.insert(chance.randint(0, len(some.content)), TextBlock(text=self.fresh()))
            case "remove" if some is not None and some.content:
                some.content.pop(chance.randrange(len(some.content)))
            case "shuffle":
                chance.shuffle(context)
            case "meta" if some is not None:
                some.metadata[self.fresh()] = 1
            case "drop field":
                state.middle_context.pop(chance.choice("ab"), None)
            case "edit file" if state.tool_context.read_file_cache:
                chance.choice(state.tool_context.read_file_cache).lines.append(self.fresh())
            case "reopen":
                self.state = self.journal.reopen()
            case "anchor":
                self.state = AgentState.model_validate_json(state.model_dump_json())
            case "cut":
                del context[chance.randint(0, len(context)) :]
            case "rebase":
                self.journal.commit(self.journal.writer.base(state))
            case _:
                pass

    def evict(self) -> None:
        containers: list[list[Any]] = [message.content for message in self.state.context]
        for message in self.state.context:
            containers += [b.output for b in message.content if b.type == "tool_result" and isinstance(b.output, list)]
            containers += [b.hint for b in message.content if b.type == "hint" and isinstance(b.hint, list)]
        places = [(held, i) for held in containers for i, block in enumerate(held) if block.type == "data"]
        if places:
            held, i = self.chance.choice(places)
            held[i] = TextBlock(text="removed " + self.fresh())


@settings(max_examples=150)
@given(st.lists(st.sampled_from((*NATIVE, *HOSTS)), min_size=15, max_size=60), st.integers(0, 2**32))
def test_whatever_agentscope_and_hosts_do_is_followed_by_each_delta(operations: list[str], seed: int) -> None:
    journal = Journal()
    mutator = Mutator(journal, state_with(), random.Random(seed))
    journal.checkpoint(mutator.state)
    for operation in operations:
        mutator.step(operation)
        journal.checkpoint(mutator.state)
        same(journal, mutator.state)


@settings(max_examples=150)
@given(st.lists(st.sampled_from((*NATIVE, *FOREIGN, *HOSTS)), min_size=15, max_size=60), st.integers(0, 2**32))
def test_whatever_a_middleware_does_is_stored_by_the_full_check(operations: list[str], seed: int) -> None:
    journal = Journal()
    mutator = Mutator(journal, state_with(), random.Random(seed))
    journal.checkpoint(mutator.state)
    for operation in operations:
        if operation in HOSTS:
            # A host changes at a commit that was compared as a whole.
            journal.commit(journal.writer.full_check(mutator.state))
        mutator.step(operation)
        delta = journal.writer.full_check(mutator.state) if mutator.chance.random() < 0.5 else None
        if delta is None:
            journal.checkpoint(mutator.state)
        else:
            journal.commit(delta)
            same(journal, mutator.state)
    journal.commit(journal.writer.full_check(mutator.state))
    same(journal, mutator.state)


# ------------------------------------------------------------ growth


def test_a_commit_writes_the_same_after_ten_and_after_a_thousand_messages() -> None:
    def written(count: int) -> list[int]:
        journal, state = opened(*(UserMsg("user", f"{n:4}" * 50) for n in range(count)))
        sizes: list[int] = []
        for n in range(3):
            state.context.append(assistant(call(f"c{n}"), message_id=f"m{n}"))
            state.context[-1].content[0].state = "allowed"
            sizes.append(sum(map(row_bytes, journal.checkpoint(state).rows)))
            state.context[-1].content[0].state = "finished"
            state.context[-1].content.append(result_of(f"c{n}", "r" * 500))
            sizes.append(sum(map(row_bytes, journal.checkpoint(state).rows)))
        return sizes

    assert written(10) == written(1000)
