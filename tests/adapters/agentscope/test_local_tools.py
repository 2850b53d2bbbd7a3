"""Local tools: started once, never guessed, and whatever they returned is what the agent is told."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.exception import AgentOrientedException, ToolInterruptedError
from agentscope.message import Base64Source, DataBlock, TextBlock
from agentscope.middleware import MiddlewareBase
from agentscope.tool import ToolChunk

from agentscope_durable.adapters.agentscope import ToolError, current_origin, in_thread
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.spi.harness import Abandoned, StopCause
from agentscope_durable.testing.scripted_model import Call
from tests.adapters.agentscope.agents import Agents, tool
from tests.adapters.agentscope.stage import check_transcript, of_type


def outputs(state: Any) -> dict[str, str]:
    """The text of each result by call."""
    return {
        b.id: b.output if isinstance(b.output, str) else "".join(getattr(p, "text", "") for p in b.output)
        for m in state.context
        for b in m.content
        if b.type == "tool_result"
    }


def kinds(view: Any) -> list[str]:
    return [str(w.kind) for w in view.waiting_on]


# ------------------------------------------------------------ what a tool says


@pytest.mark.spec("AS-16")
@pytest.mark.case("C13")
@pytest.mark.parametrize(
    "error", [ToolError("no such host"), AgentOrientedException("not now"), ToolInterruptedError("stop")]
)
async def test_a_tools_own_word_that_it_failed_is_its_result(tmp_path: Path, error: Exception) -> None:
    async def act() -> str:
        agents.ledger.append("act")
        raise error

    agents = Agents(tmp_path, [[Call("act", id="c1")], "done"], tools=lambda: [tool(act)])
    stage = await agents.stage()
    view = await stage.play(turn := await stage.submit("r1", "go"))

    assert view.status == "COMPLETED" and view.recovery is None and agents.did("act") == 1
    assert (
        "no such host" in outputs(await stage.state())["c1"]
        or "not now" in outputs(await stage.state())["c1"]
        or ("stop" in outputs(await stage.state())["c1"])
    )
    (shown,) = await stage.tools(turn)
    assert shown.state == ExecutionState.COMPLETED and shown.result["state"] == "error"


@pytest.mark.case("C13")
@pytest.mark.parametrize("safe", [True, False])
async def test_any_other_exception_is_unknown_unless_the_tool_may_run_again(tmp_path: Path, safe: bool) -> None:
    async def act() -> str:
        agents.ledger.append("act")
        raise ValueError("after the effect, or before it?")

    agents = Agents(
        tmp_path,
        [[Call("act", id="c1")], "done"],
        tools=lambda: [tool(act)],
        adapter={"replay_rules": {"act": "safe" if safe else "never"}},
    )
    stage = await agents.stage()
    view = await stage.play(await stage.submit("r1", "go"))

    assert agents.did("act") == 1 and stage.errors == []
    if safe:
        assert view.status == "COMPLETED" and "after the effect" in outputs(await stage.state())["c1"]
    else:
        assert kinds(view) == ["tool_unknown"]


async def test_one_lost_tool_of_a_batch_does_not_cost_the_others_their_results(tmp_path: Path) -> None:
    async def good() -> str:
        agents.ledger.append("good")
        return "fine"

    async def bad() -> str:
        agents.ledger.append("bad")
        raise RuntimeError("lost")

    agents = Agents(
        tmp_path,
        [[Call("bad", id="b"), Call("good", id="g")], "done"],
        tools=lambda: [tool(good), tool(bad)],
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert kinds(await stage.play(turn)) == ["tool_unknown"]
    await stage.reconcile(turn, "b", ToolResult(value="it had worked"))

    assert (await stage.play(turn)).status == "COMPLETED"
    assert outputs(await stage.state()) == {"g": "fine", "b": "it had worked"}
    assert (agents.did("good"), agents.did("bad")) == (1, 1)


async def test_a_middleware_cannot_make_up_what_a_lost_tool_did(tmp_path: Path) -> None:
    class Soothe(MiddlewareBase):
        async def on_acting(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
            from agentscope.tool import ToolResponse

            try:
                async for item in next_handler(**input_kwargs):
                    yield item
            except Exception:
                yield ToolResponse(id=input_kwargs["tool_call"].id, content=[TextBlock(text="all is well")])

    async def bad() -> str:
        agents.ledger.append("bad")
        raise RuntimeError("lost")

    agents = Agents(
        tmp_path, [[Call("bad", id="b")], "done"], tools=lambda: [tool(bad)], middlewares=lambda: [Soothe()]
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert kinds(await stage.play(turn)) == ["tool_unknown"]
    await stage.reconcile(turn, "b", ToolResult(value="evidence"))

    assert (await stage.play(turn)).status == "COMPLETED"
    assert outputs(await stage.state()) == {"b": "evidence"} and agents.did("bad") == 1


async def test_a_tool_that_returns_something_else_is_a_definite_error(tmp_path: Path) -> None:
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import ToolBase

    class Odd(ToolBase):
        name = "odd"
        description = "odd"
        input_schema = {"type": "object", "properties": {}}
        is_concurrency_safe = True
        is_read_only = False

        async def check_permissions(self, *args: Any, **kwargs: Any) -> Any:
            return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="x")

        async def call(self, **kwargs: Any) -> Any:
            agents.ledger.append("odd")
            return 7

    agents = Agents(tmp_path, [[Call("odd", id="c1")], "done"], tools=lambda: [Odd()])
    stage = await agents.stage()

    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert outputs(await stage.state())["c1"] == "the tool ran, but returned a int instead of a ToolChunk"
    assert agents.did("odd") == 1


# ------------------------------------------------------------ lost and run again


@pytest.mark.spec("AS-11")
@pytest.mark.case("C11")
@pytest.mark.parametrize(
    ("stored", "present", "again"), [("safe", "safe", True), ("safe", "never", False), ("never", "safe", False)]
)
async def test_a_lost_tool_runs_again_only_if_both_rules_say_so(
    tmp_path: Path, stored: str, present: str, again: bool
) -> None:
    async def act() -> str:
        agents.ledger.append("act")
        if agents.did("act") == 1:
            raise Abandoned
        return "acted"

    rule = stored
    agents = Agents(tmp_path, [[Call("act", id="c1")], "done"], tools=lambda: [tool(act)])
    stage = await agents.stage()
    stage.make_adapter = lambda: type(agents.adapter()).for_react(agents.describe, replay_rules={"act": rule})
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    rule = present

    view = await stage.play(turn)

    if again:
        assert view.status == "COMPLETED" and agents.did("act") == 2
    else:
        assert kinds(view) == ["tool_unknown"] and agents.did("act") == 1
        await stage.reconcile(turn, "c1", ToolResult(value="it had acted"))
        assert (await stage.play(turn)).status == "COMPLETED" and agents.did("act") == 1
        assert outputs(await stage.state())["c1"] == "it had acted"


@pytest.mark.case("C10")
@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("done", [0, 1, 5, 9, 10])
async def test_of_ten_calls_only_the_unfinished_are_considered_again(
    tmp_path: Path, done: int, concurrent: bool
) -> None:
    async def work(x: int) -> str:
        agents.ledger.append("work", x=x)
        if x >= done and len(died) == 0 and not recovering:
            await asyncio.Event().wait()
        return f"r{x}"

    died: list[int] = []
    recovering: list[bool] = []

    def on_commit(_number: int, side: str, step: Any) -> None:
        died.extend(
            1 for told in step.tools if told.state is ExecutionState.COMPLETED and side == "after" and not told.applied
        )
        if len(died) >= done and side == "after" and not recovering and started():
            recovering.append(True)
            raise Abandoned

    def started() -> bool:
        return agents.did("work") > 0 or done == 0

    agents = Agents(
        tmp_path,
        [[Call("work", {"x": n}, id=f"c{n}") for n in range(10)], "done"],
        tools=lambda: [tool(work, is_read_only=True, is_concurrency_safe=concurrent)],
    )
    stage = await agents.stage(on_commit=on_commit)
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    finished = {view.call_id for view in await stage.tools(turn) if view.state == ExecutionState.COMPLETED}

    assert (await stage.play(turn)).status == "COMPLETED"
    runs = [line["x"] for line in agents.ledger.lines() if line["name"] == "work"]
    assert all(runs.count(int(call_id[1:])) == 1 for call_id in finished), "what had finished is replayed"
    assert outputs(await stage.state()) == {f"c{n}": f"r{n}" for n in range(10)}
    check_transcript(await stage.state())


# ------------------------------------------------------------ what has happened is never refused


@pytest.mark.spec("PT-13")
@pytest.mark.case("C63", "C64", "C65")
async def test_odd_values_come_through_as_they_are(tmp_path: Path) -> None:
    odd = {
        "big": 2**63,
        "huge": 10**40,
        "nan": math.nan,
        "infinite": -math.inf,
        "zero": -0.0,
        "text": "nul \x00 emoji \U0001f600 \uffff",
    }

    async def give(what: str) -> Any:
        agents.ledger.append("give")
        return odd[what]

    agents = Agents(
        tmp_path,
        [[Call("give", {"what": name}, id=name) for name in odd], "done"],
        tools=lambda: [tool(give)],
    )
    stage = await agents.stage()

    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert agents.did("give") == len(odd)
    given = outputs(await stage.state())
    assert given["big"] == str(2**63) and given["huge"] == str(10**40)
    assert (given["nan"], given["infinite"], given["zero"]) == ("NaN", "-Infinity", "-0.0")
    assert given["text"] == odd["text"]


@pytest.mark.spec("PT-13")
@pytest.mark.case("C63")
async def test_a_lone_surrogate_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    async def give() -> str:
        agents.ledger.append("give")
        return "half \ud83d of it"

    agents = Agents(tmp_path, [["say \ud800", Call("give", id="c1")], "done \udfff"], tools=lambda: [tool(give)])
    stage = await agents.stage()

    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert agents.did("give") == 1 and outputs(await stage.state())["c1"] == "half \ufffd of it"
    assert [m.text for m in await stage.messages()][1:] == ["say \ufffd", "done \ufffd"]


@pytest.mark.spec("PT-13")
async def test_metadata_that_json_cannot_carry_is_a_definite_error_with_its_path(tmp_path: Path) -> None:
    async def give() -> ToolChunk:
        agents.ledger.append("give")
        return ToolChunk(content=[TextBlock(text="ok")], metadata={"rows": [{"id": 2**60}]})

    agents = Agents(tmp_path, [[Call("give", id="c1")], "done"], tools=lambda: [tool(give)])
    stage = await agents.stage()

    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert agents.did("give") == 1
    assert "$.rows[0].id" in outputs(await stage.state())["c1"]


@pytest.mark.spec("PT-13")
@pytest.mark.case("C65")
async def test_arguments_stay_the_models_exact_text(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def take(id: int, again: int = 0) -> str:
        seen.append(id)
        return str(id)

    written = '{"id": 1234567890123456789, "again": 1, "again": 2}'
    agents = Agents(tmp_path, [[Call("take", written, id="c1")], "done"], tools=lambda: [tool(take)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and seen == [1234567890123456789]
    (requested,) = of_type(await stage.events(), "tool.requested")
    assert requested.data["arguments"] == written
    (call,) = [b for m in (await stage.state()).context for b in m.content if b.type == "tool_call"]
    assert call.input == written


@pytest.mark.spec("TB-10", "TB-11")
async def test_images_metadata_and_state_survive_a_replay(tmp_path: Path) -> None:
    async def picture() -> ToolChunk:
        agents.ledger.append("picture")
        image = DataBlock(source=Base64Source(data="aGk=", media_type="image/png"), name="p.png")
        return ToolChunk(content=[TextBlock(text="see"), image], metadata={"k": [1]}, state="error")

    def die(_number: int, side: str, step: Any) -> None:
        if side == "after" and any(told.state is ExecutionState.COMPLETED for told in step.tools):
            stage.on_commit = lambda _number, _side, _step: None
            raise Abandoned

    agents = Agents(tmp_path, [[Call("picture", id="c1")], "done"], tools=lambda: [tool(picture)])
    stage = await agents.stage(on_commit=die)

    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert agents.did("picture") == 1
    (block,) = [b for m in (await stage.state()).context for b in m.content if b.type == "tool_result"]
    assert block.state == "error" and block.metadata == {"k": [1]}
    assert [p.type for p in block.output] == ["text", "data"] and block.output[1].source.data == "aGk="


# ------------------------------------------------------------ time and threads


@pytest.mark.case("C32")
async def test_a_thread_cannot_be_stopped_so_a_cancel_waits_for_its_end(tmp_path: Path) -> None:
    entered, gate = threading.Event(), threading.Event()

    def block() -> str:
        agents.ledger.append("block")
        entered.set()
        assert gate.wait(90)
        return "late, but known"

    agents = Agents(tmp_path, [[Call("block", id="c1")], "next"], tools=lambda: [tool(in_thread(block), name="block")])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    assert await asyncio.to_thread(entered.wait, 20)

    await stage.cancel(turn)
    _ = await asyncio.wait({run}, timeout=0.3)
    assert not run.done()
    view = await stage.view(turn)
    assert view.status == "RUNNING" and view.cancel_requested
    gate.set()
    async with asyncio.timeout(90):
        await run

    assert (await stage.view(turn)).status == "CANCELLED"
    (shown,) = await stage.tools(turn)
    assert shown.state == ExecutionState.COMPLETED and agents.requests == 1
    assert outputs(await stage.state()) == {"c1": "late, but known"}


async def test_in_thread_leaves_the_loop_free(tmp_path: Path) -> None:
    ticks: list[int] = []

    def block() -> str:
        time.sleep(0.3)
        return "ok"

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0.02)

    agents = Agents(tmp_path, [[Call("block", id="c1")], "done"], tools=lambda: [tool(in_thread(block), name="block")])
    stage = await agents.stage()
    ticking = asyncio.create_task(tick())
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    _ = ticking.cancel()
    assert len(ticks) > 8


@pytest.mark.case("C22")
async def test_a_tool_that_holds_the_loop_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentscope_durable.adapters.agentscope import invocation

    monkeypatch.setattr(invocation, "BLOCKED_SECONDS_MAX", 0.05)

    def block() -> str:
        time.sleep(0.1)
        return "ok"

    async def polite() -> str:
        await asyncio.sleep(0.1)
        return "ok"

    agents = Agents(
        tmp_path,
        [[Call("block", id="c1")], [Call("polite", id="c2")], "done"],
        tools=lambda: [tool(block), tool(polite)],
    )
    stage = await agents.stage()
    with caplog.at_level(logging.WARNING, logger="agentscope_durable"):
        assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    named = [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]
    assert len(named) == 1 and "tool block " in named[0]


@pytest.mark.spec("AS-27")
async def test_a_tool_can_ask_for_its_origin(tmp_path: Path) -> None:
    origins: list[Any] = []

    async def ask() -> str:
        origins.append(current_origin())
        await asyncio.sleep(0)
        origins.append(current_origin())
        return "ok"

    agents = Agents(tmp_path, [[Call("ask", id="c1"), Call("ask", id="c2")], "done"], tools=lambda: [tool(ask)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"

    assert sorted(o.call_id for o in origins) == ["c1", "c1", "c2", "c2"]
    assert {(o.turn_id, o.run.run_id, o.run.step_id) for o in origins} == {(turn, f"{turn}.1", f"{turn}.1.s1")}
    assert current_origin() is None


@pytest.mark.spec("AS-28")
async def test_a_host_that_goes_while_a_tool_runs_changes_nothing_stored(tmp_path: Path) -> None:
    running = asyncio.Event()

    async def slow() -> str:
        agents.ledger.append("slow")
        running.set()
        if agents.did("slow") == 1:
            await asyncio.Event().wait()
        return "ok"

    agents = Agents(tmp_path, [[Call("slow", id="c1")], "done"], tools=lambda: [tool(slow, is_read_only=True)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await running.wait()
    before = (await stage.state()).model_dump_json()
    stage.contexts[-1].stop = StopCause("drain")
    stage.contexts[-1].tell()
    await asyncio.sleep(0.05)

    _ = run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert (await stage.state()).model_dump_json() == before
    assert (await stage.play(turn)).status == "COMPLETED" and agents.did("slow") == 2


async def test_what_a_middleware_keeps_must_be_json(tmp_path: Path) -> None:
    class Keep(MiddlewareBase):
        async def on_reasoning(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
            agent.state.middle_context["kept"] = object()
            async for event in next_handler(**input_kwargs):
                yield event

    agents = Agents(tmp_path, ["never"], middlewares=lambda: [Keep()])
    stage = await agents.stage()
    view = await stage.play(await stage.submit("r1", "go"))
    assert view.status == "FAILED" and view.error is not None and view.error.kind == "Misuse" and agents.requests == 0
    assert "JSON cannot carry" in view.error.message


async def test_tools_of_an_mcp_server_are_local_tools_too(tmp_path: Path) -> None:
    class Server:
        name = "server"
        is_stateful = False
        is_connected = True
        asked = 0

        async def list_tools(self) -> list[Any]:
            Server.asked += 1
            return [tool(bad, name="mcp__server__bad"), tool(bad, name="mcp__server__sent")]

    async def bad() -> str:
        agents.ledger.append("bad")
        raise ConnectionError("the answer was lost")

    from agentscope.tool import Toolkit

    agents = Agents(
        tmp_path,
        [[Call("mcp__server__sent", id="c1")], [Call("mcp__server__bad", id="c2")], "done"],
        toolkit=lambda: Toolkit(mcps=[Server()]),  # type: ignore[list-item]
        bindings={"mcp__server__sent": "hands"},
    )
    stage = await agents.stage(results={"mcp__server__sent": "sent"})
    turn = await stage.submit("r1", "go")

    assert kinds(await stage.play(turn)) == ["tool_unknown"] and agents.did("bad") == 1
    await stage.reconcile(turn, "c2", ToolResult(value="it had worked"))
    assert (await stage.play(turn)).status == "COMPLETED" and agents.did("bad") == 1
    assert outputs(await stage.state()) == {"c1": "sent", "c2": "it had worked"}


# ------------------------------------------------------------ the next Turn


@pytest.mark.spec("AS-16", "PR-05")
@pytest.mark.parametrize("again", [True, False], ids=["with a call of the same id", "without a call"])
async def test_the_calls_of_a_turn_are_not_told_again_by_the_next_one(tmp_path: Path, again: bool) -> None:
    async def act() -> str:
        agents.ledger.append("act")
        return "done"

    second = [[Call("act", id="c1")], "and again"] if again else ["nothing to do"]
    agents = Agents(tmp_path, [[Call("act", id="c1")], "done", *second], tools=lambda: [tool(act)])
    stage = await agents.stage()
    first = await stage.submit("r1", "go")
    await stage.play(first)
    before = await stage.tools(first)

    view = await stage.play(following := await stage.submit("r2", "and now?"))

    assert view.status == "COMPLETED" and stage.errors == []
    told = [(one.call_id, one.state) for one in await stage.tools(following)]
    assert told == ([("c1", ExecutionState.COMPLETED)] if again else [])
    assert agents.did("act") == 1 + again
    assert await stage.tools(first) == before
    requested = [event for event in await stage.events() if event.type == "tool.requested"]
    assert [event.turn_id for event in requested] == [first, *([following] if again else [])]
