"""Each surprise of AgentScope that could cost a Turn its truth, and what becomes of it here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.agent import InjectionConfig, ReActConfig
from agentscope.exception import DeveloperOrientedException
from agentscope.message import HintBlock
from agentscope.middleware import MiddlewareBase, ReplyBudgetControlMiddleware
from agentscope.permission import PermissionBehavior, PermissionRule
from agentscope.tool import Toolkit

from agentscope_durable.adapters.agentscope import replaying
from agentscope_durable.adapters.agentscope.calls import Calls
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts.errors import Misuse
from agentscope_durable.contracts.journal import JournalBatch
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.journal.checkpoint import base_rows
from agentscope_durable.journal.position import AgentExecutionPosition, ExecutionPhase, PositionWriter
from agentscope_durable.spi.harness import Abandoned
from agentscope_durable.testing.scripted_model import Call, Fail, Stall, Text, Thinking, by_request
from tests.adapters.agentscope.agents import Agents, external, tool
from tests.adapters.agentscope.stage import Stage, check_transcript, of_type, texts

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def states(state: Any) -> dict[str, str]:
    """Result state by call."""
    return {b.id: str(b.state) for m in state.context for b in m.content if b.type == "tool_result"}


@pytest.mark.spec("AS-11", "TB-12")
@pytest.mark.parametrize("concurrent", [True, False])
async def test_1_a_tool_that_raises_past_the_agent_is_not_an_empty_success(tmp_path: Path, concurrent: bool) -> None:
    async def bad() -> str:
        agents.ledger.append("bad")
        raise DeveloperOrientedException("the program is wrong")

    agents = Agents(
        tmp_path, [[Call("bad", id="c1")], "done"], tools=lambda: [tool(bad, is_concurrency_safe=concurrent)]
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    view = await stage.play(turn)

    assert view.status == "WAITING" and [w.kind for w in view.waiting_on] == ["tool_unknown"]
    assert stage.errors == [] and agents.did("bad") == 1
    await stage.reconcile(turn, "c1", ToolResult(value="it had worked"))
    assert (await stage.play(turn)).status == "COMPLETED"
    assert agents.did("bad") == 1 and states(await stage.state()) == {"c1": "success"}


@pytest.mark.parametrize("safe", [True, False])
async def test_2_a_cancellation_inside_a_tool_is_not_the_users(tmp_path: Path, safe: bool) -> None:
    async def cut() -> str:
        agents.ledger.append("cut")
        raise asyncio.CancelledError

    agents = Agents(tmp_path, [[Call("cut", id="c1")], "done"], tools=lambda: [tool(cut, is_read_only=safe)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    view = await stage.play(turn)

    if safe:
        assert view.status == "COMPLETED" and states(await stage.state()) == {"c1": "error"}
    else:
        assert [w.kind for w in view.waiting_on] == ["tool_unknown"]
    assert agents.did("cut") == 1 and stage.errors == []


@pytest.mark.spec("TM-05")
async def test_3_a_commit_that_fails_in_a_concurrent_batch_ends_the_run(tmp_path: Path) -> None:
    async def one() -> str:
        agents.ledger.append("one")
        return "1"

    async def two() -> str:
        agents.ledger.append("two")
        return "2"

    def on_commit(_number: int, side: str, step: Any) -> None:
        if side == "before" and any(told.state is ExecutionState.RUNNING for told in step.tools):
            raise Abandoned

    agents = Agents(
        tmp_path, [[Call("one", id="c1"), Call("two", id="c2")], "done"], tools=lambda: [tool(one), tool(two)]
    )
    stage = await agents.stage(on_commit=on_commit)
    _ = await stage.submit("r1", "go")

    async with asyncio.timeout(90):
        assert await stage.step()

    assert agents.did("one") == agents.did("two") == 0
    assert stage.contexts[0].over and stage.errors == []


@pytest.mark.spec("AS-28")
async def test_4_no_tool_goes_on_writing_after_a_cancel(tmp_path: Path) -> None:
    ended: list[str] = []
    running = asyncio.Event()

    async def slow() -> str:
        agents.ledger.append("slow")
        if agents.did("slow") == 2:
            running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")
        return "never"

    agents = Agents(tmp_path, [[Call("slow", id="c1"), Call("slow", id="c2")], "done"], tools=lambda: [tool(slow)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await running.wait()

    await stage.cancel(turn)
    async with asyncio.timeout(90):
        await run

    assert ended == ["slow", "slow"] and (await stage.view(turn)).status == "CANCELLED"
    state = await stage.state()
    check_transcript(state)
    assert states(state) == {"c1": "interrupted", "c2": "interrupted"}
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if "agent" in task.get_name()]


@pytest.mark.spec("AS-17", "AS-18", "TP-01", "TP-03", "TP-04", "TP-05")
@pytest.mark.parametrize("kind", ["external", "denied", "local"])
async def test_5_rounds_outside_count_towards_max_iters(tmp_path: Path, kind: str) -> None:
    async def local() -> str:
        return "x"

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        if getattr(choice, "mode", None) == "none":
            return "summary"
        name = {"external": "ext", "denied": "asks", "local": "local"}[kind]
        return [f"round {n}", Call(name, id=f"c{n}")]

    agents = Agents(
        tmp_path,
        script,
        tools=lambda: [external("ext"), tool(local), tool(local, ask=True, name="asks")],
        bindings={"ext": "hands"},
        react_config=lambda: ReActConfig(max_iters=3),
    )
    stage = await agents.stage(approve=lambda _name, _call: False)
    turn = await stage.submit("r1", "go")

    view = await stage.play(turn)

    assert view.status == "COMPLETED" and view.result is not None
    assert view.result.finish_reason == "exceed_max_iters"
    assert agents.requests == 4, "three rounds and the summary"
    assert (await stage.messages())[-1].text == "summary"
    second = await stage.submit("r2", "again")
    assert (await stage.play(second)).status == "COMPLETED"
    assert agents.requests == 8, "a new Turn has a new budget"


class TestHazard6:
    """A repeated call id: natively the second call is never run."""

    async def test_calls_of_two_rounds_with_one_id_both_run(self, tmp_path: Path) -> None:
        async def count(x: int) -> str:
            agents.ledger.append("count", x=x)
            return str(x)

        agents = Agents(
            tmp_path,
            [[Call("count", {"x": 1}, id="same")], [Call("count", {"x": 2}, id="same")], "done"],
            tools=lambda: [tool(count)],
        )
        stage = await agents.stage()
        turn = await stage.submit("r1", "go")

        assert (await stage.play(turn)).status == "COMPLETED"
        assert [line["x"] for line in agents.ledger.lines() if line["name"] == "count"] == [1, 2]
        check_transcript(await stage.state())
        assert len({view.call_id for view in await stage.tools(turn)}) == 2

    @pytest.mark.parametrize("stream", [True, False])
    async def test_calls_of_one_answer_with_one_id_both_run(self, tmp_path: Path, stream: bool) -> None:
        async def count(x: int) -> str:
            agents.ledger.append("count", x=x)
            return str(x)

        agents = Agents(
            tmp_path,
            [[Call("count", {"x": 1}, id="same"), Call("count", {"x": 2}, id="same")], "done"],
            tools=lambda: [tool(count)],
            model={"stream": stream, "chunk_chars": 3},
        )
        stage = await agents.stage()
        turn = await stage.submit("r1", "go")

        assert (await stage.play(turn)).status == "COMPLETED"
        assert sorted(line["x"] for line in agents.ledger.lines() if line["name"] == "count") == [1, 2]
        check_transcript(await stage.state())


async def test_7_a_rule_added_after_a_replay_reaches_the_permission_engine(tmp_path: Path) -> None:
    class Trust(MiddlewareBase):
        async def on_acting(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
            rules = agent.state.permission_context.allow_rules
            rule = PermissionRule(
                tool_name="asks", rule_content=None, behavior=PermissionBehavior.ALLOW, source="session"
            )
            rules.setdefault("asks", []).append(rule)
            async for item in next_handler(**input_kwargs):
                yield item

    async def first() -> str:
        return "1"

    async def asks() -> str:
        return "2"

    agents = Agents(
        tmp_path,
        [[Call("first", id="c1")], [Call("asks", id="c2")], "done"],
        tools=lambda: [tool(first), tool(asks, ask=True)],
        middlewares=lambda: [Trust()],
    )

    def die_after_the_answer(_number: int, side: str, step: Any) -> None:
        if side == "after" and step.messages == () and step.models and step.models[0].status == "COMPLETED":
            stage.on_commit = lambda _number, _side, _step: None
            raise Abandoned

    stage = await agents.stage(on_commit=die_after_the_answer)
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    assert (await stage.runs(turn))[-1].number == 2, "the first answer was replayed"
    assert of_type(await stage.events(), "interaction.requested") == []


class TestHazard8:
    """ALLOWED says "approved" or "was running", and natively runs without asking anybody."""

    @staticmethod
    def calls(*allowed: str) -> tuple[Calls, Any]:
        from agentscope.message import ToolCallBlock
        from agentscope.state import AgentState

        state = AgentState()
        blocks = [ToolCallBlock(id=name, name=name, input="{}", state="allowed") for name in allowed]
        state.append_context("a", blocks)
        return Calls("t1", "a", lambda _name: None), state

    def test_a_call_that_was_merely_allowed_is_stored_as_it_was_before(self) -> None:
        from agentscope_durable.contracts.status import ReplayRule

        calls, state = self.calls("started", "waiting")
        started, waiting = state.context[-1].content
        _ = calls.start(started, ReplayRule.NEVER)

        with calls.maskable(state):
            assert (started.state, waiting.state) == ("allowed", "pending")
        assert (started.state, waiting.state) == ("allowed", "allowed")

    def test_an_approved_call_that_was_not_started_is_asked_with_its_stored_answer_again(self) -> None:
        calls, state = self.calls("c1")
        block = state.context[-1].content[0]
        block.state = "asking"
        told = calls.derive(state)
        assert [asked.call_id for asked in told.questions] == ["c1"]
        block.state = "allowed"

        with calls.maskable(state):
            assert block.state == "asking"
        assert calls.derive(state).answers == []

    async def test_a_stored_allowed_call_without_an_intent_is_asked_for(self, tmp_path: Path) -> None:
        async def risky() -> str:
            agents.ledger.append("risky")
            return "r"

        agents = Agents(tmp_path, [[Call("risky", id="c1")], "done"], tools=lambda: [tool(risky, ask=True)])
        stage = await agents.stage(approve=lambda _name, _call: None)
        turn = await stage.submit("r1", "go")
        # As if another program had written the state: approved or running, and nothing of ours knows of it.
        await _written_elsewhere(stage, turn)
        _ = await stage.step()

        assert agents.did("risky") == 0
        assert [w.kind for w in (await stage.view(turn)).waiting_on] == ["approval"]


async def _written_elsewhere(stage: Stage, turn: str) -> None:
    from agentscope.message import ToolCallBlock, UserMsg
    from agentscope.state import AgentState

    state = AgentState()
    state.context.append(UserMsg("user", "go"))
    state.append_context("a", [ToolCallBlock(id="c1", name="risky", input="{}", state="allowed")])
    position = AgentExecutionPosition(turn_id=turn, phase=ExecutionPhase.ACTING, reasoning=1, agent="a")
    rows = (*base_rows(state.model_dump_json().encode()), *PositionWriter().rows(position, base=True))
    claimed = await stage.claim()
    await stage.execute(
        c.CommitStep(
            session=stage.session,
            thread_id=stage.thread_id,
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            expected_position=claimed.position,
            journal=JournalBatch(claimed.position, (), rows, True).encode(),
            checkpoint=True,
            base=True,
            reasoning=1,
            end=c.RunEnd(kind=c.RunEndKind.RELEASED),
        )
    )


@pytest.mark.spec("TF-03", "TF-04")
async def test_9_a_final_answer_is_not_made_again_after_a_pause(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["the answer"])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    async def pause_at_the_answer(_number: int, side: str, step: Any) -> None:
        if side == "after" and step.messages:
            await stage.pause(turn)

    stage.on_commit = pause_at_the_answer  # type: ignore[assignment]
    _ = await stage.step()
    assert (await stage.view(turn)).status == "PAUSED"
    assert (await stage.messages())[-1].text == "the answer", "it was saved before the pause was confirmed"
    stage.on_commit = lambda _number, _side, _step: None
    await stage.resume(turn)

    assert (await stage.play(turn)).status == "COMPLETED"
    assert agents.requests == 1 and texts(await stage.state()) == ["the answer"]


async def test_10_an_external_call_is_sent_while_a_local_one_of_its_round_still_runs(tmp_path: Path) -> None:
    seen: list[str] = []

    async def slow() -> str:
        for _ in range(200):
            await asyncio.sleep(0.01)
            if any(
                told.call_id == "e1" for context in stage.contexts for step in context.commits for told in step.tools
            ):
                seen.append("sent")
                break
        return "slow"

    agents = Agents(
        tmp_path,
        [[Call("slow", id="l1"), Call("ext", id="e1")], "done"],
        tools=lambda: [tool(slow), external("ext")],
        bindings={"ext": "hands"},
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and seen == ["sent"]


async def test_11_an_error_inside_a_batch_is_classified_by_its_cause(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["x"])
    adapter = agents.adapter()

    assert adapter.classify(ExceptionGroup("batch", [ExceptionGroup("inner", [ConnectionError()])])) is True
    assert adapter.classify(ExceptionGroup("batch", [ConnectionError(), DeveloperOrientedException("x")])) is False
    assert adapter.classify(ExceptionGroup("batch", [ConnectionError(), KeyError("x")])) is None
    assert adapter.classify(KeyError("x")) is None


@pytest.mark.spec("AS-28")
async def test_12_half_an_answer_does_not_stay_after_a_cancel(tmp_path: Path) -> None:
    reached = asyncio.Event()
    agents = Agents(tmp_path, [[Text("half of "), Stall(reached=reached), Text("it")], "next turn"])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await reached.wait()

    await stage.cancel(turn)
    async with asyncio.timeout(90):
        await run

    assert (await stage.view(turn)).status == "CANCELLED"
    assert texts(await stage.state()) == []
    abandoned = of_type(await stage.events(), "message.abandoned")
    assert [(e.data["messageId"], e.data["attempt"]) for e in abandoned] == [(f"{turn}.r1", 1)]


async def test_13_the_clock_does_not_change_what_a_recovered_model_is_given(tmp_path: Path) -> None:
    async def look() -> str:
        return "1"

    given: list[list[str]] = []

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        given.append([str(b.hint) for m in messages for b in m.content if b.type == "hint"])
        return [Call("look", id="c1")] if len(given) < 2 else "done"

    def die(_number: int, side: str, step: Any) -> None:
        if side == "after" and step.models and step.models[0].status == "STARTED" and stage.commits == 1:
            raise Abandoned

    agents = Agents(
        tmp_path, script, tools=lambda: [tool(look)], injection_config=lambda: InjectionConfig(time_interval=0)
    )
    stage = await agents.stage(on_commit=die)
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    stored = [b.hint for m in (await stage.state()).context for b in m.content if b.type == "hint"]

    given.clear()
    stage.on_commit = lambda _number, _side, _step: None
    assert (await stage.play(turn)).status == "COMPLETED"
    assert given[0] == stored, "the model was given the saved state and nothing else"


@pytest.mark.spec("AS-03", "AS-04")
async def test_14_a_toolkit_is_not_used_twice(tmp_path: Path) -> None:
    shared = Toolkit()
    agents = Agents(tmp_path, ["one", "two"], toolkit=shared)
    adapter = agents.adapter()
    stage = await agents.stage()
    stage.make_adapter = lambda: adapter
    first = await stage.submit("r1", "go")
    assert (await stage.play(first)).status == "COMPLETED"
    second = await stage.submit("r2", "go")

    view = await stage.play(second)

    assert view.status == "FAILED" and view.error is not None and view.error.kind == "AgentFactoryError"
    assert "same Toolkit twice" in view.error.message and agents.requests == 1


@pytest.mark.spec("AS-03", "AS-04")
async def test_15_two_runs_are_two_agents(tmp_path: Path) -> None:
    seen: list[int] = []

    class See(MiddlewareBase):
        async def on_reply(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
            seen.append(id(agent))
            keep.append(agent)
            async for event in next_handler(**input_kwargs):
                yield event

    keep: list[Any] = []
    agents = Agents(
        tmp_path,
        [[Call("ext", id="e1")], "done"],
        tools=lambda: [external("ext")],
        bindings={"ext": "hands"},
        middlewares=lambda: [See()],
    )
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    assert len(set(seen)) == len(seen) == 2
    assert keep[0].toolkit is not keep[1].toolkit


class TestHazard16:
    async def test_a_mere_thought_is_no_message_and_the_round_goes_on(self, tmp_path: Path) -> None:
        agents = Agents(tmp_path, by_request([Thinking("hm")], "done"))
        stage = await agents.stage()
        turn = await stage.submit("r1", "go")

        assert (await stage.play(turn)).status == "COMPLETED"
        assert [m.text for m in await stage.messages()] == ["go", "done"] and agents.requests == 2

    async def test_thoughts_alone_end_at_the_limit(self, tmp_path: Path) -> None:
        def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
            return [Thinking("hm")]

        agents = Agents(tmp_path, script, react_config=lambda: ReActConfig(max_iters=2))
        stage = await agents.stage()
        turn = await stage.submit("r1", "go")
        view = await stage.play(turn)

        assert view.status == "COMPLETED" and view.result is not None
        assert view.result.finish_reason == "exceed_max_iters"
        last = (await stage.messages())[-1]
        assert last.id == view.result.message_id and "maximum reasoning-acting iterations" in last.text

    async def test_an_empty_answer_ends_the_turn_with_an_empty_message(self, tmp_path: Path) -> None:
        agents = Agents(tmp_path, [[]])
        stage = await agents.stage()
        turn = await stage.submit("r1", "go")
        view = await stage.play(turn)

        assert view.status == "COMPLETED" and view.result is not None
        assert (await stage.messages())[-1].id == view.result.message_id
        assert (await stage.messages())[-1].content == ()


class Inbox(MiddlewareBase):
    """Takes a note out of an inbox of its own into the round: an effect that a replay cannot make again."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.seen: list[bool] = []

    async def on_reasoning(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
        self.seen.append(replaying())
        if self.notes:
            note = self.notes.pop(0)
            agent.state.append_context(agent.name, [HintBlock(hint=note, source="inbox")])
        async for event in next_handler(**input_kwargs):
            yield event


@pytest.mark.parametrize("answered", [True, False])
async def test_17_a_note_taken_in_a_replayed_round_is_there_in_the_next_one(tmp_path: Path, answered: bool) -> None:
    async def look() -> str:
        return "1"

    def die(_number: int, side: str, step: Any) -> None:
        wanted = "COMPLETED" if answered else "STARTED"
        if side == "after" and step.models and step.models[0].status == wanted and not dead:
            dead.append(True)
            inbox.notes.append("a note that came meanwhile")
            inbox.seen.clear()
            raise Abandoned

    dead: list[bool] = []
    inbox = Inbox([])
    agents = Agents(
        tmp_path, [[Call("look", id="c1")], "done"], tools=lambda: [tool(look)], middlewares=lambda: [inbox]
    )
    stage = await agents.stage(on_commit=die)
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    hints = [
        b.hint for m in (await stage.state()).context for b in m.content if b.type == "hint" and b.source == "inbox"
    ]
    assert hints == ["a note that came meanwhile"] and inbox.notes == []
    assert inbox.seen == [True, False], "the replayed round said so"
    check_transcript(await stage.state())


async def test_17_a_token_budget_counts_over_runs(tmp_path: Path) -> None:
    agents = Agents(
        tmp_path,
        [["a", Call("ext", id="e1")], ["b", Call("ext", id="e2")], "done"],
        tools=lambda: [external("ext")],
        bindings={"ext": "hands"},
        middlewares=lambda: [ReplyBudgetControlMiddleware(token_budget=10_000)],
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    counted: list[int] = []
    while not (await stage.view(turn)).status.terminal:
        _ = await stage.step()
        counted += [n for kept in (await stage.state()).middle_context.values() for n in kept.values()]
        _ = await stage.serve(turn)

    assert counted[:2] == [15, 30], "answers of 15 tokens, over several Runs"
    assert (await stage.view(turn)).status == "COMPLETED"


@pytest.mark.spec("AS-28")
async def test_18_a_cancelled_turn_says_nothing_that_nobody_said(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [[Call("ext", id="e1")], "next"], tools=lambda: [external("ext")])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    await stage.cancel(turn)
    assert (await stage.play(turn)).status == "CANCELLED"

    assert [m.text for m in await stage.messages()] == ["go"]
    assert texts(await stage.state()) == []
    following = await stage.submit("r2", "and now?")
    assert (await stage.play(following)).status == "COMPLETED"


def test_19_nothing_of_the_packaged_application_is_used(tmp_path: Path) -> None:
    """Not by an agent that has run to its end either."""
    code = (
        "import sys; from tests.adapters.agentscope.crash import run; "
        "report = run({'folder': sys.argv[1], 'scenario': 'plain'}); "
        "assert report['status'] == 'COMPLETED', report; "
        "assert 'agentscope.agent' in sys.modules; "
        "assert not any(m.split('.')[:2] == ['agentscope', 'app'] for m in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    _ = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, env=environment)


@pytest.mark.spec("EV-17", "RC-10")
@pytest.mark.case("C59")
@pytest.mark.parametrize("chunks", [0, 1, 3, 5])
async def test_20_a_stream_that_dies_is_asked_again_as_another_attempt(tmp_path: Path, chunks: int) -> None:
    """In text, inside tool arguments, after the arguments and before the end marker."""
    calls: list[str] = []

    async def act(x: int) -> str:
        calls.append(str(x))
        return "acted"

    parts: list[Any] = [Text("ab"), Text("cd"), Call("act", '{"x": ', id="c1"), Text("e"), Text("f")]
    whole = [Text("abcd"), Call("act", {"x": 1}, id="c1")]
    broken = [*parts[:chunks], Fail(ConnectionError("cut off"))]
    agents = Agents(tmp_path, by_request(broken, whole, "done"), tools=lambda: [tool(act)], model={"chunk_chars": 2})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    events = await stage.events()
    assert [(e.data["messageId"], e.data["attempt"]) for e in of_type(events, "message.abandoned")] == [
        (f"{turn}.r1", 1)
    ]
    first = next(m for m in await stage.messages() if m.id == f"{turn}.r1")
    assert (first.text, first.attempt) == ("abcd", 2) and calls == ["1"]
    previews = [p for context in stage.contexts for p in context.previews if p.message_id == f"{turn}.r1"]
    assert {p.attempt for p in previews} <= {1, 2}
    assert [e.sequence for e in of_type(events, "message.abandoned")] < [
        e.sequence for e in of_type(events, "message.completed") if e.data["messageId"] == f"{turn}.r1"
    ]


def test_a_binding_of_no_run_says_that_it_has_no_workspace() -> None:
    from agentscope_durable.adapters.agentscope import Binding, RuntimeContext
    from agentscope_durable.contracts.records import Binding as Definition

    context = RuntimeContext(user_id="u", session_id="s", thread_id="main", turn_id="t", run_id="r")
    binding = Binding(Definition("a", "1", "x"), context)
    with pytest.raises(Misuse, match="belongs to no run"):
        binding.workspace()
    assert not [name for name in dir(binding) if "journal" in name.lower()]
