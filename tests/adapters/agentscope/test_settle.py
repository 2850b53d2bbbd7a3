"""A Turn that ends badly leaves a conversation that the next one can use, at whatever place it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import AssistantMsg, TextBlock, ToolCallBlock, ToolResultBlock, UserMsg
from agentscope.state import AgentState

from agentscope_durable.adapters.agentscope.settle import pair_calls
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.spi.harness import Abandoned
from agentscope_durable.testing.scripted_model import Call, rounds_so_far
from tests.adapters.agentscope.agents import Agents, external, tool
from tests.adapters.agentscope.stage import Stage, check_transcript, texts
from tests.adapters.agentscope.test_local_tools import outputs


async def provider_form(state: Any) -> None:
    """As a provider sees it: each call answered right after, in order of its kind."""
    open_calls: list[str] = []
    for message in await OpenAIChatFormatter().format(state.context):
        if message["role"] == "tool":
            open_calls.remove(message["tool_call_id"])
            continue
        assert not open_calls, "something stands between a call and its result"
        open_calls = [call["id"] for call in message.get("tool_calls") or ()]
    assert not open_calls


def three_calls(tmp_path: Path) -> Agents:
    """Of one answer: a finished, a running and a waiting tool at one time or another, and one outside."""

    async def work(x: int) -> str:
        agents.ledger.append("work", x=x)
        return f"worked {x}"

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if messages[-1].role == "user" and "again" in str(messages[-1].content):
            return "here we are again"
        if rounds_so_far(messages) == 0:
            return ["off we go", *(Call("work", {"x": n}, id=f"c{n}") for n in range(3)), Call("ext", id="e1")]
        return "done"

    agents = Agents(
        tmp_path,
        script,
        tools=lambda: [tool(work, is_concurrency_safe=False), external("ext")],
        bindings={"ext": "hands"},
    )
    return agents


async def commits_of_an_uncut_turn(tmp_path: Path) -> int:
    stage = await three_calls(tmp_path).stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    return stage.commits


@pytest.mark.spec("AS-25", "SE-06", "Q-12")
@pytest.mark.case("C04", "C06")
@pytest.mark.parametrize("how", ["cancel", "fail"])
async def test_stopped_after_any_commit_the_next_turn_works(tmp_path: Path, how: str) -> None:
    whole = await commits_of_an_uncut_turn(_made(tmp_path / "whole"))
    for number in range(1, whole - 1):
        agents = three_calls(_made(tmp_path / str(number)))
        stage = await agents.stage()
        turn = await stage.submit("r1", "go")
        await _stop_after(stage, turn, number, how)
        view = await stage.view(turn)
        assert view.status == ("CANCELLED" if how == "cancel" else "FAILED"), (number, view)

        state = await stage.state()
        check_transcript(state)
        await provider_form(state)
        given = outputs(state)
        for shown in await stage.tools(turn):
            if shown.state == ExecutionState.COMPLETED:
                assert given[shown.call_id].startswith(("worked", "ext done")), f"{number}: a known result was lost"
        following = await stage.submit("r2", "again")
        assert (await stage.play(following)).status == "COMPLETED", (number, stage.errors)
        assert texts(await stage.state())[-1] == "here we are again"
        check_transcript(await stage.state())


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def _stop_after(stage: Stage, turn: str, number: int, how: str) -> None:
    async def stop(commits: int, side: str, step: Any) -> None:
        # A Run whose end is committed cannot fail any more; then the next one does.
        over = how == "fail" and step.end is not None
        if side == "after" and commits >= number and not over:
            stage.on_commit = lambda _number, _side, _step: None
            if how == "cancel":
                await stage.cancel(turn)
            else:
                raise ValueError("a defect")

    stage.on_commit = stop
    for _ in range(40):
        if (await stage.view(turn)).status.terminal:
            return
        if await stage.step() or await stage.serve(turn):
            continue
        for record in (await stage.work(turn)).executions:
            if record.state is ExecutionState.UNKNOWN:
                await stage.reconcile(turn, record.call_id, ToolResult(value="worked, by evidence"))
            elif not record.state.terminal:
                # It was asked to stop, and says that it has.
                from agentscope_durable.contracts import commands as c

                await stage.execute(
                    c.RecordOutcome(
                        session=stage.session,
                        thread_id=stage.thread_id,
                        turn_id=turn,
                        call_id=record.call_id,
                        execution_id=record.execution_id,
                        state=ExecutionState.CANCELLED,
                    )
                )


async def test_an_answer_that_people_have_seen_stays(tmp_path: Path) -> None:
    def die(_number: int, side: str, step: Any) -> None:
        if side == "after" and step.messages:
            stage.on_commit = lambda _number, _side, _step: None
            raise Abandoned

    agents = three_calls(tmp_path)
    stage = await agents.stage(on_commit=die)
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    await stage.cancel(turn)
    assert (await stage.play(turn)).status == "CANCELLED"

    state = await stage.state()
    assert texts(state) == ["off we go"] and agents.did("work") == 0
    assert set(outputs(state)) == {"c0", "c1", "c2", "e1"}
    assert {b.state for m in state.context for b in m.content if b.type == "tool_result"} == {"interrupted"}


async def test_a_turn_of_which_nothing_was_stored_leaves_nothing(tmp_path: Path) -> None:
    agents = three_calls(tmp_path)

    def die(_number: int, side: str, _step: Any) -> None:
        if side == "before":
            stage.on_commit = lambda _number, _side, _step: None
            raise Abandoned

    stage = await agents.stage(on_commit=die)
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    await stage.cancel(turn)
    assert (await stage.play(turn)).status == "CANCELLED"
    following = await stage.submit("r2", "again")
    assert (await stage.play(following)).status == "COMPLETED"


# ------------------------------------------------------------ the function itself


def call(call_id: str, state: str = "finished") -> ToolCallBlock:
    return ToolCallBlock(id=call_id, name="t", input="{}", state=state)


def result(call_id: str) -> ToolResultBlock:
    return ToolResultBlock(id=call_id, name="t", output="x", state="success")


@pytest.mark.case("C06")
def test_the_whole_context_is_paired_not_its_last_message() -> None:
    state = AgentState()
    state.context = [
        UserMsg("user", "hi"),
        AssistantMsg("a", [call("c1", "allowed"), call("c2"), result("c2")]),
        AssistantMsg("a", [TextBlock(text="interrupted, how can I help?")]),
        UserMsg("user", "and?"),
        AssistantMsg("a", [result("gone"), TextBlock(text="x"), call("c3"), result("c3"), result("c3")]),
    ]

    assert pair_calls(state, {"c1": ToolResult(value="known")})
    check_transcript(state)
    assert outputs(state) == {"c1": "known", "c2": "x", "c3": "x"}
    assert all(b.state == "finished" for m in state.context for b in m.content if b.type == "tool_call")
    assert not pair_calls(state, {})


def test_a_call_that_was_begun_is_told_apart_from_one_that_was_not() -> None:
    state = AgentState()
    state.context = [AssistantMsg("a", [call("begun", "submitted"), call("waiting", "pending")])]

    assert pair_calls(state, {}, {"begun"})
    given = outputs(state)
    assert "was interrupted" in given["begun"] and "was not run" in given["waiting"]
