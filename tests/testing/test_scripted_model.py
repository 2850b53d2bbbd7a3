"""A scripted model behaves as a provider does, and its ledger outlives the process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import (
    MODEL_COMPLETED,
    MODEL_REQUEST,
    Call,
    Do,
    Fail,
    ScriptEnded,
    Stall,
    Text,
    Thinking,
    TransientModelError,
    Usage,
    by_request,
    by_round,
    chunks,
    rounds_so_far,
    scripted_model,
)

pytest.importorskip("agentscope")

from agentscope.agent import Agent, ModelConfig
from agentscope.message import HintBlock, Msg, TextBlock, ToolCallBlock, ToolResultBlock, UserMsg
from agentscope.model import ChatModelBase, ChatResponse
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

HI = [UserMsg("user", "hi")]


async def streamed(model: Any, messages: list[Any] = HI) -> list[ChatResponse]:
    return [chunk async for chunk in await model(messages)]


# ------------------------------------------------------------ answers


async def test_an_answer_is_streamed_in_chunks_and_then_given_whole() -> None:
    model = scripted_model(["A text of some length"], chunk_chars=5)

    *parts, last = await streamed(model)

    assert isinstance(model, ChatModelBase)
    assert [part.content[0].text for part in parts] == ["A tex", "t of ", "some ", "lengt", "h"]
    assert not any(part.is_last for part in parts)
    assert last.is_last and last.content[0].text == "A text of some length"
    assert (last.usage.input_tokens, last.usage.output_tokens) == (10, 5)


async def test_what_is_awaited_before_a_word_holds_it_back() -> None:
    seen: list[str] = []

    async def pace(word: str) -> None:
        seen.append(word)

    stream = await scripted_model(["One word, then another"], chunk_chars=None, delay=pace)(HI)
    async for part in stream:
        if not part.is_last:
            assert part.content[0].text == seen[-1]

    assert seen == ["One", " word,", " then", " another"]


async def test_thoughts_and_calls_are_streamed_as_providers_do() -> None:
    model = scripted_model([[Thinking("first this", signature="sig"), Text("So:"), Call("look", {"x": 1}), Call("go")]])

    *parts, last = await streamed(model)

    thought, text, look, go = last.content
    assert (thought.thinking, thought.signature) == ("first this", "sig")
    assert text.text == "So:"
    assert (look.name, look.input, look.state) == ("look", '{"x": 1}', "pending")
    assert (go.name, go.input) == ("go", "{}")
    assert len({block.id for block in last.content}) == 4
    names = [part.content[0].name for part in parts if part.content[0].id == look.id]
    assert names[0] == "look" and not any(names[1:])


async def test_arguments_may_be_whatever_a_model_would_write() -> None:
    (*_, last) = await streamed(scripted_model([Call("tool", '{"cut off', id="mine")]))

    assert (last.content[0].id, last.content[0].input) == ("mine", '{"cut off')


async def test_a_model_that_does_not_stream_answers_at_once() -> None:
    answer = await scripted_model([[Text("a"), Call("tool")]], stream=False)(HI)

    assert answer.is_last and [block.type for block in answer.content] == ["text", "tool_call"]
    assert answer.usage.input_tokens == 10


async def test_a_function_sees_what_the_model_was_given() -> None:
    seen: list[Any] = []

    def script(messages: list[Any], tools: Any, tool_choice: Any, n: int) -> str:
        seen.append((messages[0].get_text_content(), tools, tool_choice, n))
        return f"answer {n}"

    model = scripted_model(script)
    await streamed(model)
    (*_, last) = await streamed(model)

    assert last.content[0].text == "answer 1"
    assert seen == [("hi", None, None, 0), ("hi", None, None, 1)]
    assert model.requests == 2


async def test_answers_in_a_list_end() -> None:
    model = scripted_model(["only one"])
    await streamed(model)

    with pytest.raises(ScriptEnded, match="request 2, and the script has 1 answers"):
        await streamed(model)


# ------------------------------------------------------------ failures and stalls


async def test_a_failure_before_the_stream_is_raised_by_the_call() -> None:
    model = scripted_model([Fail(ConnectionError("down")), "up again"])

    with pytest.raises(ConnectionError, match="down"):
        await model(HI)
    assert (await streamed(model))[-1].content[0].text == "up again"


async def test_a_failure_in_the_middle_is_raised_by_the_stream() -> None:
    stream = await scripted_model([["some text", Fail(ConnectionError("cut"))]], chunk_chars=4)(HI)
    heard: list[str] = []

    with pytest.raises(ConnectionError, match="cut"):
        async for chunk in stream:
            heard.append(chunk.content[0].text)

    assert "".join(heard) == "some text"


async def test_a_transient_failure_is_retried_by_the_model_itself(tmp_path: Path) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    model = scripted_model([Fail(), Fail(), "third time"], ledger=ledger, max_retries=2)

    assert (await streamed(model))[-1].content[0].text == "third time"
    assert (ledger.count(MODEL_REQUEST), ledger.count(MODEL_COMPLETED)) == (3, 1)
    with pytest.raises(TransientModelError):
        await streamed(scripted_model([Fail()]))


async def test_a_stalled_stream_waits_for_its_gate() -> None:
    gate, reached = asyncio.Event(), asyncio.Event()
    model = scripted_model([["before", Stall(gate, reached), " after"]], chunk_chars=100)
    reading = asyncio.ensure_future(streamed(model))

    await reached.wait()
    assert not reading.done()
    gate.set()

    assert (await reading)[-1].content[0].text == "before"
    assert [block.text for block in (await reading)[-1].content] == ["before", " after"]


async def test_a_stall_before_the_stream_holds_the_call() -> None:
    gate, reached = asyncio.Event(), asyncio.Event()
    calling = asyncio.ensure_future(scripted_model([[Stall(gate, reached), "now"]])(HI))

    await reached.wait()
    assert not calling.done()
    gate.set()

    assert [chunk.content[0].text async for chunk in await calling][-1] == "now"


async def test_a_stall_without_a_gate_ends_only_by_a_cancel(tmp_path: Path) -> None:
    ledger, reached = EffectLedger(tmp_path / "ledger"), asyncio.Event()
    reading = asyncio.ensure_future(streamed(scripted_model([["a", Stall(reached=reached)]], ledger=ledger)))
    await reached.wait()

    reading.cancel()
    (*_, last) = await reading

    assert last.finished_reason == "interrupted"
    assert (ledger.count(MODEL_REQUEST), ledger.count(MODEL_COMPLETED)) == (1, 0)


async def test_a_script_can_act_in_the_middle_of_a_stream() -> None:
    done: list[str] = []

    async def later() -> None:
        done.append("async")

    await streamed(scripted_model([["a", Do(lambda: done.append("sync")), "b", Do(later)]]))

    assert done == ["sync", "async"]


# ------------------------------------------------------------ usage


async def usages(*answer: Any, **options: Any) -> list[int | None]:
    model = scripted_model([list(answer)], chunk_chars=4, **options)
    return [None if chunk.usage is None else chunk.usage.input_tokens for chunk in await streamed(model)]


async def test_usage_comes_early_late_or_not_at_all() -> None:
    assert await usages(Usage(7, 1), "abcdefgh") == [7, None, 7], "early: with the first chunk the agent sees"
    assert await usages("abcdefgh", Usage(7, 1)) == [None, None, 7], "late: with the last"
    assert await usages("abcd", Usage(7, 1), "efgh", Usage(9, 1)) == [None, 7, 9], "a running count"
    assert await usages("abcdefgh", usage=None) == [None, None, None]


async def test_usage_reported_before_a_failure_was_seen() -> None:
    stream = await scripted_model([[Usage(7, 1, 3, 2), "text", Fail()]])(HI)
    seen: list[Any] = []

    with pytest.raises(TransientModelError):
        async for chunk in stream:
            seen.append(chunk.usage)

    assert (seen[0].input_tokens, seen[0].output_tokens) == (7, 1)
    assert (seen[0].cache_input_tokens, seen[0].cache_creation_input_tokens) == (3, 2)


# ------------------------------------------------------------ rounds


async def test_a_repeated_request_gets_the_answer_of_its_round_again() -> None:
    calling = [Call("look", id="c1"), Call("look", id="c2")]
    script = by_round([Thinking("hm"), *calling], "Done.", "And again.")
    first = (await streamed(scripted_model(script)))[-1].content
    results = [ToolResultBlock(id=block.id, name="look", output="seen") for block in first[1:]]
    reply = Msg(name="agent", role="assistant", content=[*first, *results])
    done = [HintBlock(hint="now"), TextBlock(text="Done.")]
    final = Msg(name="agent", role="assistant", content=[*first, *results, *done])

    again = (await streamed(scripted_model(script)))[-1].content
    assert [block.id for block in again] == [block.id for block in first] == ["block-0-0", "c1", "c2"]
    for messages, text in (([*HI, reply], "Done."), ([*HI, final, *HI], "And again.")):
        for _ in range(2):
            assert (await streamed(scripted_model(script), messages))[-1].content[0].text == text
    with pytest.raises(ScriptEnded, match="round 5"):
        await streamed(scripted_model(script), [*HI, final, *HI, final])


def test_rounds_are_counted_in_openais_messages_too() -> None:
    asked, called = {"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}

    assert rounds_so_far([asked]) == 0
    assert rounds_so_far([asked, called, {"role": "tool", "content": "seen"}, called]) == 2


async def test_an_agent_runs_on_a_scripted_model(tmp_path: Path) -> None:
    effects = EffectLedger(tmp_path / "effects")

    async def restart(service: str) -> str:
        """Restart a service."""
        effects.append("restart", service=service)
        return "restarted"

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
    agent = Agent(
        name="agent",
        system_prompt="You operate.",
        model=scripted_model(by_round([Call("restart", {"service": "exporter"})], "Done."), ledger=tmp_path / "model"),
        toolkit=Toolkit(tools=[FunctionTool(restart, permission=allowed)]),
    )

    answer = await agent.reply(UserMsg("user", "Restart the exporter"))

    assert answer.get_text_content() == "Done."
    assert [line["service"] for line in effects.lines()] == ["exporter"]
    requests = [line for line in EffectLedger(tmp_path / "model").lines() if line["name"] == MODEL_REQUEST]
    assert [(line["n"], line["model"], line["tools"]) for line in requests] == [
        (0, "scripted", ["restart"]),
        (1, "scripted", ["restart"]),
    ]


async def test_an_agent_falls_back_from_a_model_that_fails() -> None:
    agent = Agent(
        name="agent",
        system_prompt="",
        model=scripted_model([Fail(ConnectionError("down"))], model="first"),
        model_config=ModelConfig(fallback_model=scripted_model(["from the second"], model="second")),
    )

    assert (await agent.reply(UserMsg("user", "hi"))).get_text_content() == "from the second"


# ------------------------------------------------------------ the ledger


def test_a_ledger_counts_effects_by_name(tmp_path: Path) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    assert (ledger.lines(), ledger.count("sent")) == ([], 0)

    ledger.append("sent", to="a", odd="\u2028\n\ud800")
    ledger.append("sent", to="b")
    ledger.append("read")

    assert (ledger.count("sent"), ledger.count("read"), ledger.count("other")) == (2, 1, 0)
    assert [line.get("to") for line in ledger.lines()] == ["a", "b", None]
    assert ledger.lines()[0] == {"name": "sent", "pid": os.getpid(), "to": "a", "odd": "\u2028\n\ud800"}


def test_a_line_that_was_cut_short_did_not_happen(tmp_path: Path) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    ledger.append("sent")
    with ledger.path.open("a") as file:
        file.write('{"name": "se')

    assert ledger.count("sent") == 1


def test_a_ledger_keeps_the_effects_of_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    program = (
        "import os, sys\n"
        "from agentscope_durable.testing.ledger import EffectLedger\n"
        "ledger = EffectLedger(sys.argv[1])\n"
        "for n in range(100): ledger.append('sent', n=n)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    source = str(Path(sys.modules[EffectLedger.__module__].__file__ or "").parents[2])
    environment = {**os.environ, "PYTHONPATH": source}

    workers = [subprocess.Popen([sys.executable, "-c", program, str(path)], env=environment) for _ in range(3)]
    for worker in workers:
        assert worker.wait() == -9

    ledger = EffectLedger(path)
    assert ledger.count("sent") == 300
    for worker in workers:
        assert [line["n"] for line in ledger.lines() if line["pid"] == worker.pid] == list(range(100))


async def test_a_new_process_goes_on_counting(tmp_path: Path) -> None:
    await streamed(scripted_model(["first", "second"], ledger=tmp_path / "ledger"))

    (*_, last) = await streamed(scripted_model(["first", "second"], ledger=tmp_path / "ledger"))

    assert last.content[0].text == "second"
    assert last.content[0].id == "block-1-0"


# ------------------------------------------------------------ imports


def test_importing_the_scripts_does_not_import_agentscope() -> None:
    program = "import sys, agentscope_durable.testing.scripted_model; print('agentscope' in sys.modules)"
    source = str(Path(sys.modules[EffectLedger.__module__].__file__ or "").parents[2])

    environment = {**os.environ, "PYTHONPATH": source}
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)

    assert printed.strip() == "False"


def test_a_text_is_cut_without_losing_anything() -> None:
    assert list(chunks("abcde", 2)) == ["ab", "cd", "e"]
    assert list(chunks("", 2)) == [""]
    assert list(chunks("Word by  word. ", None)) == ["Word", " by", "  word. "]
    assert list(chunks(" ", None)) == [" "]


def test_by_request_and_by_round_differ_in_what_a_repetition_gets() -> None:
    count, conversation = by_request("a", "b"), by_round("a", "b")

    assert [count([], None, None, n) for n in (0, 1)] == ["a", "b"]
    assert [conversation([], None, None, n) for n in (0, 1)] == ["a", "a"]


def test_a_call_in_the_conversation_is_one_round_with_its_text() -> None:
    blocks = [TextBlock(text="So:"), ToolCallBlock(id="c", name="look", input="{}")]

    assert rounds_so_far([Msg(name="agent", role="assistant", content=blocks)]) == 1
