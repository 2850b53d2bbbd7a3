"""Every request is on record for what it was, and a failure to record asks no model again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

import httpx
import openai
from agentscope.agent import ContextConfig, ModelConfig
from agentscope.credential import CredentialBase
from agentscope.message import DataBlock, TextBlock, URLSource
from agentscope.middleware import MiddlewareBase
from agentscope.model import ChatModelBase, ChatResponse, ChatUsage

from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import LimitExceeded, Unavailable
from agentscope_durable.contracts.messages import Image, Url
from agentscope_durable.contracts.messages import Text as Said
from agentscope_durable.contracts.status import ModelObservation, ModelPurpose, ModelStatus
from agentscope_durable.spi.harness import Abandoned
from agentscope_durable.testing.scripted_model import (
    Call,
    Fail,
    Stall,
    Text,
    Thinking,
    TransientModelError,
    Usage,
    by_request,
    scripted_model,
)
from tests.adapters.agentscope.agents import Agents, tool
from tests.adapters.agentscope.scenarios import Compressing
from tests.adapters.agentscope.stage import of_type, opened


def told(calls: list[Any]) -> list[list[tuple[str, str]]]:
    return [[(request.model, str(request.status)) for request in call.requests] for call in calls]


@pytest.mark.spec("MC-01", "MC-02", "MC-06", "MC-09", "RC-10", "EV-17")
async def test_the_retries_inside_a_model_are_requests_of_one_call(tmp_path: Path) -> None:
    agents = Agents(tmp_path, by_request(Fail(), Fail(), ["done"]), model={"max_retries": 2})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    (call,) = await stage.model_calls(turn)
    assert told([call]) == [[("scripted", "FAILED"), ("scripted", "FAILED"), ("scripted", "COMPLETED")]]
    assert call.observation is ModelObservation.PROVIDER_ATTEMPTS and call.purpose is ModelPurpose.REPLY
    assert [request.number for request in call.requests] == [1, 2, 3]
    assert all(request.elapsed_ms is not None for request in call.requests)
    assert call.step_id == f"{turn}.1.s1" and call.usage.input_tokens == 10
    assert [request.usage for request in call.requests[:2]] == [None, None]
    message = (await stage.messages())[-1]
    assert message.attempt == 3
    abandoned = of_type(await stage.events(), "message.abandoned")
    assert [e.data["attempt"] for e in abandoned] == [1, 2]


@pytest.mark.spec("MC-12", "MC-02")
async def test_the_agents_own_retries_and_its_fallback_are_calls_of_their_own(tmp_path: Path) -> None:
    agents = Agents(tmp_path, by_request(Fail(ValueError("a")), Fail(ValueError("b")), ["from the other"]))
    agents.arguments["model_config"] = lambda: ModelConfig(max_retries=1, fallback_model=agents.model(model="other"))
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    calls = await stage.model_calls(turn)
    assert told(calls) == [[("scripted", "FAILED")], [("scripted", "FAILED")], [("other", "COMPLETED")]]
    assert len({call.model_call_id for call in calls}) == 3
    assert (await stage.messages())[-1].attempt == 3
    assert "ValueError: a" in (calls[0].requests[0].error or "")


@pytest.mark.spec("MC-03", "MC-08")
async def test_a_lost_request_stays_lost_and_a_replay_adds_none(tmp_path: Path) -> None:
    def die(number: int, side: str, _step: Any) -> None:
        if side == "after" and number in (1, 3):
            raise Abandoned

    agents = Agents(tmp_path, ["done"])
    stage = await agents.stage(on_commit=die)
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    calls = await stage.model_calls(turn)
    assert told(calls) == [[("scripted", "LOST")], [("scripted", "COMPLETED")]] and agents.requests == 1
    assert calls[0].usage is None and not calls[0].usage_complete
    assert (await stage.messages())[-1].attempt == 2


@pytest.mark.spec("MC-04")
async def test_usage_that_nobody_reported_is_unknown_and_not_zero(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["done"], model={"usage": None})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    (call,) = await stage.model_calls(turn)
    assert call.usage is None and not call.usage_complete
    assert call.requests[0].usage is None and not call.requests[0].usage_complete


@pytest.mark.spec("MC-05")
async def test_cached_tokens_are_part_of_the_input(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["done"], model={"usage": Usage(10, 5, cache_input_tokens=4)})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"
    (call,) = await stage.model_calls(turn)
    assert call.usage.cache_read_tokens == 4 <= call.usage.input_tokens and call.usage_complete


@pytest.mark.spec("MC-10", "MC-08")
async def test_usage_known_early_is_kept_when_the_end_is_never_seen(tmp_path: Path) -> None:
    reached = asyncio.Event()
    agents = Agents(
        tmp_path, by_request([Usage(7, 0), Text("a" * 20), Stall(reached=reached)], ["done"]), model={"chunk_chars": 8}
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await reached.wait()
    async with asyncio.timeout(90):
        while (calls := await stage.model_calls(turn)) == [] or calls[0].usage is None:
            await asyncio.sleep(0)
    _ = run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert (await stage.play(turn)).status == "COMPLETED"
    first, second = await stage.model_calls(turn)
    assert first.requests[0].status is ModelStatus.LOST and first.usage.input_tokens == 7
    assert not first.usage_complete and second.usage_complete


@pytest.mark.spec("MC-07")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_with_a_call_of_its_own_is_seen_from_outside(tmp_path: Path, stream: bool) -> None:
    class Custom(ChatModelBase):
        def __init__(self) -> None:
            super().__init__(CredentialBase(), "custom", ChatModelBase.Parameters(), stream=stream, max_retries=0)
            self.formatter = scripted_model(["x"]).formatter

        async def _call_api(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

        async def __call__(self, messages: Any, tools: Any = None, tool_choice: Any = None, **kwargs: Any) -> Any:
            for hidden in range(3):
                agents.ledger.append("hidden", n=hidden)
            answer = ChatResponse(content=[TextBlock(text="done")], is_last=True, usage=ChatUsage(1, 2, 0.1))
            if not stream:
                return answer

            async def chunks() -> AsyncIterator[Any]:
                yield ChatResponse(content=[TextBlock(text="do")], is_last=False)
                yield answer

            return chunks()

    agents = Agents(tmp_path, ["never"], model_=None)
    agents.arguments = {"model": Custom}
    agents.arguments = {"model": lambda: Custom()}
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    (call,) = await stage.model_calls(turn)
    assert call.observation is ModelObservation.MODEL_CALL and told([call]) == [[("custom", "COMPLETED")]]
    assert call.usage.output_tokens == 2 and (await stage.messages())[-1].text == "done"


@pytest.mark.spec("MC-11")
@pytest.mark.parametrize("error", [Unavailable("down"), LimitExceeded("x", 1), RuntimeError("broken")])
async def test_a_commit_that_fails_asks_no_model_again(tmp_path: Path, error: Exception) -> None:
    def fail(_number: int, side: str, step: Any) -> None:
        if side == "before" and any(fact.status is ModelStatus.COMPLETED for fact in step.models):
            stage.on_commit = lambda _number, _side, _step: None
            raise error

    agents = Agents(tmp_path, ["done"], model={"max_retries": 3})
    agents.arguments["model_config"] = lambda: ModelConfig(max_retries=3, fallback_model=agents.model(model="other"))
    stage = await agents.stage(on_commit=fail)
    _ = await stage.submit("r1", "go")
    _ = await stage.step()

    assert agents.requests == 1 and stage.errors == [error]


@pytest.mark.spec("MC-12", "AS-14", "AS-15")
async def test_a_compression_is_a_call_beside_the_reply(tmp_path: Path) -> None:
    scenario = Compressing(tmp_path, lambda _name: None)
    stage = await opened(scenario.adapter)
    turn = await stage.submit("r1", scenario.text)

    assert (await stage.play(turn)).status == "COMPLETED" and stage.errors == []
    purposes = [call.purpose for call in await stage.model_calls(turn)]
    assert purposes == [ModelPurpose.REPLY, ModelPurpose.COMPRESSION, ModelPurpose.REPLY]
    assert scenario.ledger.count("offload_context") == 1
    state = await stage.state()
    assert "summary of your previous work" in str(state.summary) and "/aside/" in str(state.summary)


async def test_the_agents_own_compression_tool_keeps_its_receipts_apart(tmp_path: Path) -> None:
    names = ("task_overview", "current_state", "important_discoveries", "next_steps", "context_to_preserve")

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if any(t["function"]["name"] == "generate_structured_output" for t in tools or ()):
            return Call("generate_structured_output", dict.fromkeys(names, "x"), id=f"g{n}")
        if n == 0:
            return ["w " * 1500, Call("CompressContext", id="k1")]
        return "done"

    agents = Agents(
        tmp_path,
        script,
        model={"context_size": 1500, "chunk_chars": 2000},
        context_config=lambda: ContextConfig(
            compression_tool_enabled=True, trigger_ratio=0.8, reserve_ratio=0.05, context_buffer_ratio=0.3
        ),
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go " * 100)
    view = await stage.play(turn)

    assert view.status == "COMPLETED", stage.errors
    shown = {call.call_id: call for call in await stage.tools(turn)}
    assert str(shown["k1"].state) == "COMPLETED" and shown["k1"].applied_at is not None
    assert (await stage.state()).summary


@pytest.mark.spec("TM-08")
async def test_a_policy_decides_before_the_model_is_asked(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Policy:
        async def admit(self, call: Any) -> None:
            asked.append(call)
            if len(asked) > 1:
                raise PermissionError("no more today")

    async def look() -> str:
        return "seen"

    agents = Agents(
        tmp_path,
        [[Call("look", id="c1")], "never"],
        tools=lambda: [tool(look)],
        adapter={"model_call_policy": Policy()},
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    view = await stage.play(turn)

    assert view.status == "FAILED" and view.error.kind == "PermissionError" and agents.requests == 1
    assert [(call.reasoning, call.tools) for call in asked] == [(1, 1), (2, 1)]
    last = (await stage.model_calls(turn))[-1]
    assert last.requests[0].status is ModelStatus.CANCELLED and last.requests[0].elapsed_ms is None


@pytest.mark.spec("MC-09")
async def test_an_observer_is_told_of_each_request(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Observer:
        def started(self, request: Any) -> None:
            seen.append(("started", request.request, request.model))

        def ended(self, request: Any) -> None:
            seen.append(("ended", request.request, str(request.status)))

    agents = Agents(
        tmp_path,
        by_request(Fail(TransientModelError("x")), ["done"]),
        model={"max_retries": 1},
        adapter={"model_request_observer": Observer()},
    )
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert seen == [
        ("started", 1, "scripted"),
        ("ended", 1, "FAILED"),
        ("started", 2, "scripted"),
        ("ended", 2, "COMPLETED"),
    ]


async def test_a_middleware_may_answer_in_the_models_place(tmp_path: Path) -> None:
    class Cache(MiddlewareBase):
        async def on_model_call(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            return ChatResponse(content=[TextBlock(text="remembered")], is_last=True)

    agents = Agents(tmp_path, ["never"], middlewares=lambda: [Cache()])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and agents.requests == 0
    (call,) = await stage.model_calls(turn)
    assert told([call]) == [[("", "CANCELLED")]] and call.usage is None
    assert (await stage.messages())[-1].text == "remembered"


async def test_a_middleware_may_choose_another_model(tmp_path: Path) -> None:
    class Route(MiddlewareBase):
        async def on_model_call(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            return await next_handler(**{**input_kwargs, "current_model": agents.model(model="cheap")})

    agents = Agents(tmp_path, ["done"], middlewares=lambda: [Route()])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"
    assert told(await stage.model_calls(turn)) == [[("cheap", "COMPLETED")]]


async def test_a_model_asked_beside_the_reply_is_on_record(tmp_path: Path) -> None:
    class Reflect(MiddlewareBase):
        async def on_reply(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
            async for event in next_handler(**input_kwargs):
                yield event
            async for _ in await agent.model(messages=agent.state.context):
                pass

    agents = Agents(tmp_path, by_request(["done"], ["a thought"]), middlewares=lambda: [Reflect()])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED", stage.errors
    reply, beside = await stage.model_calls(turn)
    assert (reply.purpose, beside.purpose) == (ModelPurpose.REPLY, ModelPurpose.AUXILIARY)
    assert told([beside]) == [[("scripted", "COMPLETED")]]
    assert [m.text for m in await stage.messages()] == ["go", "done"]


# ------------------------------------------------------------ what is shown of answers


@pytest.mark.spec("EV-09", "EV-11", "AS-30", "MG-02")
async def test_previews_show_what_the_middlewares_made_of_it_and_no_thoughts(tmp_path: Path) -> None:
    class Loud(MiddlewareBase):
        async def on_model_call(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            answer = await next_handler(**input_kwargs)

            async def chunks() -> AsyncIterator[Any]:
                async for chunk in answer:
                    for block in chunk.content:
                        if block.type == "text":
                            block.text = block.text.upper()
                    yield chunk

            return chunks()

    async def act(x: int) -> str:
        return "acted"

    agents = Agents(
        tmp_path,
        [
            [Thinking("SECRET plan", "sig"), Text("let me act"), Call("act", {"x": 1}, id="c1")],
            ["SECRET".lower(), " end"],
        ],
        tools=lambda: [tool(act)],
        middlewares=lambda: [Loud()],
        model={"chunk_chars": 4},
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"

    previews = [p for context in stage.contexts for p in context.previews]
    shown: dict[tuple[str, str], str] = {}
    for preview in previews:
        key = (preview.message_id.removeprefix(turn), preview.call_id or "")
        if type(preview).__name__ == "EventDelta":
            assert preview.offset == len(shown.setdefault(key, ""))
            shown[key] += preview.text
        else:
            assert key not in shown
    assert shown == {(".r1", ""): "LET ME ACT", (".r1", "c1"): '{"x": 1}', (".r2", ""): "SECRET END"}
    assert [m.text for m in await stage.messages()] == ["go", "LET ME ACT", "SECRET END"]
    everything = str(await stage.events()) + str(previews) + str(await stage.messages())
    assert "SECRET plan" not in everything and "sig" not in everything.replace("signal", "")
    assert any(b.type == "thinking" for m in (await stage.state()).context for b in m.content)


@pytest.mark.spec("EV-09")
async def test_nobody_looks_so_nothing_is_shown(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["some longer text"])
    stage = await agents.stage()

    async def blind(context: Any) -> None:
        context.watch_previews = False

    stage.on_run = blind
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert stage.contexts[0].previews == []


@pytest.mark.spec("EV-14", "MG-02")
async def test_a_picture_in_the_answer_is_in_its_event_the_snapshot_and_the_result(tmp_path: Path) -> None:
    class Illustrated(MiddlewareBase):
        async def on_model_call(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            answer = await next_handler(**input_kwargs)

            async def chunks() -> AsyncIterator[Any]:
                async for chunk in answer:
                    if chunk.is_last:
                        picture = URLSource(url="https://example.org/a.png", media_type="image/png")
                        chunk.content = [*chunk.content, DataBlock(source=picture)]
                    yield chunk

            return chunks()

    agents = Agents(tmp_path, ["see"], middlewares=lambda: [Illustrated()])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"

    [*_, told] = of_type(await stage.events(), "message.completed")
    source = {"type": "url", "url": "https://example.org/a.png", "mediaType": "image/png"}
    assert told.data["content"] == [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    snapshot = await stage.ask(q.GetSnapshot(session=stage.session))
    message = snapshot.projection.messages[told.data["messageId"]]
    assert message.content == (Said("see"), Image(Url("https://example.org/a.png", "image/png")))
    result = snapshot.projection.turns[turn].result
    assert result is not None and result.message_id == message.id


@pytest.mark.spec("EV-15")
async def test_each_round_is_a_message_of_its_own(tmp_path: Path) -> None:
    async def act() -> str:
        return "acted"

    agents = Agents(tmp_path, [["first", Call("act", id="c1")], ["second"]], tools=lambda: [tool(act)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"
    assert [(m.id, m.text) for m in (await stage.messages())[1:]] == [(f"{turn}.r1", "first"), (f"{turn}.r2", "second")]


@pytest.mark.spec("RC-09")
@pytest.mark.parametrize(
    ("status", "again"),
    [
        (429, True),
        (500, True),
        (503, True),
        (408, True),
        (409, True),
        (425, True),
        (400, False),
        (401, False),
        (404, False),
    ],
)
async def test_a_providers_status_says_whether_trying_again_may_help(tmp_path: Path, status: int, again: bool) -> None:
    class ProviderError(Exception):
        status_code = status

    agents = Agents(tmp_path, by_request(Fail(ProviderError("x")), ["done"]))
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    view = await stage.play(turn)

    assert view.status == ("COMPLETED" if again else "FAILED")
    assert agents.adapter().classify(ProviderError("x")) is again
    assert view.recovery.failures == 1 and view.runs == (2 if again else 1)


def _network_faults() -> list[Exception]:
    request = httpx.Request("POST", "http://model")
    return [
        ConnectionRefusedError("nobody listens"),
        ConnectionResetError("cut off"),
        TimeoutError("too slow"),
        httpx.ConnectError("no route", request=request),
        httpx.ReadTimeout("too slow", request=request),
        httpx.RemoteProtocolError("cut off", request=request),
        openai.APIConnectionError(request=request),
        openai.APITimeoutError(request=request),
    ]


@pytest.mark.spec("RC-09")
@pytest.mark.parametrize("error", _network_faults(), ids=lambda error: type(error).__name__)
async def test_a_fault_of_the_network_is_tried_again(tmp_path: Path, error: Exception) -> None:
    agents = Agents(tmp_path, by_request(Fail(error), ["done"]))
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    view = await stage.play(turn)

    assert (view.status, view.runs, view.recovery.failures) == ("COMPLETED", 2, 1)
    assert agents.requests == 2


@pytest.mark.spec("TM-01")
async def test_a_slow_store_does_not_delay_a_stream(tmp_path: Path) -> None:
    """Usage that is known early is committed beside the stream, not before its next chunk."""
    reached, gate = asyncio.Event(), asyncio.Event()

    async def slow(_number: int, side: str, step: Any) -> None:
        early = [fact for fact in step.models if fact.status is ModelStatus.STARTED and fact.usage is not None]
        if side == "before" and early:
            _ = await gate.wait()

    parts = [Usage(7, 0), Text("a" * 40), Stall(gate, reached), Text("b"), Usage(7, 9)]
    agents = Agents(tmp_path, [parts], model={"chunk_chars": 8})
    stage = await agents.stage(on_commit=slow)
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    async with asyncio.timeout(90):
        await reached.wait()
        assert not gate.is_set()
        gate.set()
        assert await run

    (call,) = await stage.model_calls(turn)
    assert (await stage.view(turn)).status == "COMPLETED"
    assert call.usage.output_tokens == 9 and call.usage_complete and len(call.requests) == 1
