"""The scripted provider answers a real SDK over a real connection."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.openai_server import OpenAIServer
from agentscope_durable.testing.scripted_model import (
    MODEL_COMPLETED,
    MODEL_REQUEST,
    Call,
    Fail,
    Stall,
    Text,
    Thinking,
    Usage,
    by_round,
)

pytest.importorskip("agentscope")

import openai
from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

ASKED = [{"role": "user", "content": "hi"}]


def client(server: OpenAIServer) -> Any:
    return openai.AsyncOpenAI(api_key="none", base_url=server.base_url, max_retries=0)


def chat_model(server: OpenAIServer, **options: Any) -> OpenAIChatModel:
    credential = OpenAICredential(api_key="none", base_url=server.base_url)
    return OpenAIChatModel(credential, "scripted", max_retries=0, client_kwargs={"max_retries": 0}, **options)


async def completion(server: OpenAIServer, **options: Any) -> Any:
    async with client(server) as sdk:
        return await sdk.chat.completions.create(model="scripted", messages=ASKED, **options)


async def streamed(server: OpenAIServer, **options: Any) -> list[Any]:
    async with client(server) as sdk:
        stream = await sdk.chat.completions.create(model="scripted", messages=ASKED, stream=True, **options)
        return [chunk async for chunk in stream]


def text_of(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_an_agent_runs_against_the_endpoint(tmp_path: Path) -> None:
    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
    called: list[str] = []

    async def restart(service: str) -> str:
        """Restart a service."""
        called.append(service)
        return "restarted"

    script = by_round([Thinking("hm"), Text("On it."), Call("restart", {"service": "exporter"})], "Done.")
    async with OpenAIServer(script, ledger=tmp_path / "ledger") as server:
        agent = Agent(
            name="agent",
            system_prompt="You operate.",
            model=chat_model(server),
            toolkit=Toolkit(tools=[FunctionTool(restart, permission=allowed)]),
        )
        answer = await agent.reply(UserMsg("user", "Restart the exporter"))

    assert answer.get_text_content() == "Done."
    assert called == ["exporter"]
    types = [block.type for block in agent.state.context[1].content if block.type != "hint"]
    assert types == ["thinking", "text", "tool_call", "tool_result", "text"]
    assert agent.state.context[1].usage.input_tokens == 20
    ledger = EffectLedger(tmp_path / "ledger")
    assert (ledger.count(MODEL_REQUEST), ledger.count(MODEL_COMPLETED)) == (2, 2)
    first, second = server.requests
    assert first["tools"][0]["function"]["name"] == "restart"
    assert [message["role"] for message in second["messages"]][-2:] == ["assistant", "tool"]


async def test_a_stream_has_the_shape_of_openais() -> None:
    answer = [Text("Hello there"), Call("look", {"x": 1}, id="a"), Call("go", id="b")]
    async with OpenAIServer([answer], chunk_chars=4) as server:
        chunks = await streamed(server, stream_options={"include_usage": True})

    assert text_of(chunks) == "Hello there"
    pieces = [piece for chunk in chunks if chunk.choices for piece in chunk.choices[0].delta.tool_calls or []]
    assert [(p.index, p.id, p.function.name) for p in pieces if p.id] == [(0, "a", "look"), (1, "b", "go")]
    assert "".join(p.function.arguments for p in pieces if p.index == 0) == '{"x": 1}'
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert (chunks[-1].choices, chunks[-1].usage.prompt_tokens, chunks[-1].usage.total_tokens) == ([], 10, 15)


async def test_usage_is_streamed_where_it_stands_and_only_when_asked_for() -> None:
    early = [Usage(7, 1, cache_input_tokens=3), "text"]
    async with OpenAIServer([early, early], usage=None) as server:
        first, *_ = await streamed(server, stream_options={"include_usage": True})
        silent = await streamed(server)

    assert (first.usage.prompt_tokens, first.usage.prompt_tokens_details.cached_tokens) == (7, 3)
    assert all(chunk.usage is None for chunk in silent)


async def test_an_answer_can_come_whole() -> None:
    async with OpenAIServer([[Thinking("hm"), "A", "B", Call("look", "{not json", id="a")]]) as server:
        answer = await completion(server)

    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content, choice.message.reasoning_content) == ("AB", "hm")
    assert choice.message.tool_calls[0].function.arguments == "{not json"
    assert answer.usage.completion_tokens == 5


async def test_a_failure_before_the_stream_is_an_error_status(tmp_path: Path) -> None:
    ledger = EffectLedger(tmp_path / "ledger")
    answers = [Fail(status=429), Fail(ValueError("bad prompt"), status=400), "ok"]
    async with OpenAIServer(answers, ledger=ledger) as server:
        with pytest.raises(openai.RateLimitError):
            await streamed(server)
        with pytest.raises(openai.BadRequestError, match="bad prompt"):
            await completion(server)
        assert text_of(await streamed(server)) == "ok"

    assert (ledger.count(MODEL_REQUEST), ledger.count(MODEL_COMPLETED)) == (3, 1)


async def test_a_failure_within_the_stream_cuts_the_connection() -> None:
    async with OpenAIServer([["some text", Fail()]], chunk_chars=100) as server:
        stream = await chat_model(server)([UserMsg("user", "hi")])
        heard: list[str] = []
        with pytest.raises(Exception) as cut:
            async for chunk in stream:
                heard.append(chunk.content[0].text)

    assert heard == ["some text"]
    assert "peer closed" in str(cut.value) or isinstance(cut.value, openai.APIConnectionError)


async def test_a_stalled_stream_waits_for_its_gate() -> None:
    gate, reached = asyncio.Event(), asyncio.Event()
    async with OpenAIServer([["before ", Stall(gate, reached), "after"]]) as server:
        reading = asyncio.ensure_future(streamed(server))
        await reached.wait()
        assert not reading.done()
        gate.set()
        assert text_of(await reading) == "before after"


async def test_leaving_the_server_cuts_a_stalled_stream() -> None:
    reached = asyncio.Event()
    async with OpenAIServer([["before", Stall(reached=reached)]]) as server:
        reading = asyncio.ensure_future(streamed(server))
        await reached.wait()

    with pytest.raises(Exception):
        await reading


async def test_a_caller_that_leaves_a_stream_leaves_the_server_working() -> None:
    reached = asyncio.Event()
    async with OpenAIServer([["before", Stall(reached=reached)], "next"]) as server:
        reading = asyncio.ensure_future(streamed(server))
        await reached.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

        assert text_of(await streamed(server)) == "next"


async def test_several_requests_are_answered_at_once() -> None:
    gate, reached = asyncio.Event(), asyncio.Event()
    async with OpenAIServer([[Stall(gate, reached), "first"], "second"]) as server:
        waiting = asyncio.ensure_future(streamed(server))
        await reached.wait()
        assert text_of(await streamed(server)) == "second"
        gate.set()
        assert text_of(await waiting) == "first"


async def test_a_script_that_ends_says_so() -> None:
    async with OpenAIServer([]) as server:
        with pytest.raises(openai.BadRequestError, match="script has 0 answers"):
            await completion(server)


async def test_the_models_are_listed() -> None:
    async with OpenAIServer([]) as server, client(server) as sdk:
        assert [model.id async for model in sdk.models.list()] == ["scripted"]


async def send(server: OpenAIServer, request: bytes) -> tuple[bytes, dict[str, Any]]:
    port = int(server.base_url.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.split(b"\r\n")[0], json.loads(body)


async def test_what_is_no_request_is_refused() -> None:
    async with OpenAIServer(["unused"]) as server:
        for request, status in (
            (b"GET /nothing HTTP/1.1\r\n\r\n", b"404 Not Found"),
            (b"nonsense\r\n\r\n", b"400 Bad Request"),
            (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", b"400 Bad Request"),
            (b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", b"413 "),
            (b"POST /v1/chat/completions HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", b"400 Bad Request"),
        ):
            first, body = await send(server, request)
            assert first.startswith(b"HTTP/1.1 " + status), first
            assert body["error"]["message"]
        assert server.requests == []


async def test_the_server_listens_on_this_machine_alone() -> None:
    async with OpenAIServer([]) as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        port = int(server.base_url.split(":")[2].split("/")[0])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
