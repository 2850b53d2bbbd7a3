"""Calls that leave the agent: permission first, intent with the state, each answer to its call, each result once."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("agentscope")

from agentscope.agent import ContextConfig
from agentscope.middleware import MiddlewareBase
from agentscope.permission import PermissionBehavior, PermissionDecision

from agentscope_durable.adapters.agentscope import AgentScopeAdapter, AgentScopeToolExecutor, ToolBinding
from agentscope_durable.contracts.errors import AgentFactoryError, InvalidRequest
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, InteractionKind
from agentscope_durable.spi.harness import Abandoned
from agentscope_durable.testing.scripted_model import Call
from tests.adapters.agentscope.agents import Agents, deny, external, tool
from tests.adapters.agentscope.stage import check_transcript, of_type
from tests.adapters.agentscope.test_local_tools import kinds, outputs

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def in_context(state: Any) -> dict[str, str]:
    """What the model sees each call of the conversation to have been called with."""
    blocks = [block for message in state.context for block in message.content if block.type == "tool_call"]
    return {block.id: block.input for block in blocks}


# ------------------------------------------------------------ bound tools


@pytest.mark.spec("AS-01", "AS-07", "AS-08", "AS-09", "AS-10", "TB-05", "TB-06", "EV-23", "TJ-31")
async def test_a_bound_tool_is_sent_with_its_exact_arguments_and_its_result_comes_back(tmp_path: Path) -> None:
    seen: list[Any] = []

    def perform(arguments: Any) -> Any:
        seen.append(arguments)
        return {"rows": [1, 2]}

    agents = Agents(
        tmp_path,
        [["looking", Call("query", '{"x":  1}', id="c1")], "done"],
        bindings=[ToolBinding("query", "hands", input_schema=SCHEMA, description="Query.", permission="allow")],
    )
    stage = await agents.stage(results={"query": perform})
    assert agents.adapter().routes == {"hands"}
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    assert seen == ['{"x":  1}'] and outputs(await stage.state()) == {"c1": '{"rows":[1,2]}'}
    assert [line["tools"] for line in agents.ledger.lines() if line["name"] == "model/request"][0] == ["query"]
    (shown,) = await stage.tools(turn)
    assert (shown.kind, shown.state) == (ExecutionKind.EXTERNAL, ExecutionState.COMPLETED)
    assert (shown.origin.run_id, shown.applied_at.run_id) == (f"{turn}.1", f"{turn}.2")
    intent = next(s for s in stage.contexts[0].commits if any(t.state is ExecutionState.INTENT for t in s.tools))
    assert intent.checkpoint, "restore point and intent are saved together"


@pytest.mark.spec("AS-07", "TB-09", "IN-11")
@pytest.mark.parametrize("decision", ["ask", "deny"])
async def test_the_native_permission_check_of_a_bound_tool_is_kept(tmp_path: Path, decision: str) -> None:
    async def act(x: int) -> str:
        raise AssertionError("it runs elsewhere")

    def native() -> Any:
        return tool(act, ask=decision == "ask", permission=deny())

    agents = Agents(
        tmp_path, [[Call("act", {"x": 1}, id="c1")], "done"], tools=lambda: [native()], bindings={"act": "hands"}
    )
    stage = await agents.stage(approve=lambda _name, _call: None, results={"act": "acted"})
    turn = await stage.submit("r1", "go")
    view = await stage.play(turn)

    if decision == "deny":
        assert view.status == "COMPLETED"
        (shown,) = await stage.tools(turn)
        assert shown.state == ExecutionState.DENIED and not of_type(await stage.events(), "tool.started")
    else:
        assert kinds(view) == ["approval"]
        assert not [r for r in (await stage.work(turn)).executions if r.state is ExecutionState.INTENT]
        stage.approve = lambda _name, _call: True
        assert (await stage.play(turn)).status == "COMPLETED" and outputs(await stage.state()) == {"c1": "acted"}


@pytest.mark.spec("IN-10")
async def test_a_denied_approval_is_a_result_the_agent_goes_on_with(tmp_path: Path) -> None:
    async def act() -> str:
        agents.ledger.append("act")
        return "acted"

    agents = Agents(tmp_path, [[Call("act", id="c1")], "all right"], tools=lambda: [tool(act, ask=True)])
    stage = await agents.stage(approve=lambda _name, _call: False)
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and agents.did("act") == 0
    assert "denied by user" in outputs(await stage.state())["c1"]
    (shown,) = await stage.tools(turn)
    assert shown.state == ExecutionState.DENIED and (await stage.messages())[-1].text == "all right"


@pytest.mark.case("C39")
@pytest.mark.parametrize("seed", range(6))
async def test_each_answer_reaches_its_own_call_in_any_order_and_over_crashes(tmp_path: Path, seed: int) -> None:
    """Five gated calls of one answer, three of the same tool with equal arguments; one is approved with others."""

    async def risky(x: int) -> str:
        agents.ledger.append("risky", x=x)
        return f"risked {x}"

    async def other(x: int) -> str:
        agents.ledger.append("other", x=x)
        return f"other {x}"

    chance = random.Random(seed)
    kinds_of_answer: list[Any] = [True, False, {"x": 7}, True, False]
    chance.shuffle(kinds_of_answer)
    answers = {f"c{n}": kinds_of_answer[n] for n in range(5)}
    asked: list[str] = []

    def approve(_name: str, call_id: str) -> Any:
        asked.append(call_id)
        return answers[call_id]

    def on_commit(_number: int, side: str, _step: Any) -> None:
        if chance.random() < 0.15:
            raise Abandoned

    given_by_model = {"c0": 1, "c1": 1, "c2": 1, "c3": 3, "c4": 4}
    calls = [Call("risky" if n < 3 else "other", f'{{"x":{given_by_model[f"c{n}"]}}}', id=f"c{n}") for n in range(5)]
    chance.shuffle(calls)
    agents = Agents(
        tmp_path,
        [calls, "done"],
        tools=lambda: [tool(risky, ask=True, is_concurrency_safe=seed % 2 == 0), tool(other, ask=True)],
        adapter={"replay_rules": {"risky": "safe", "other": "safe"}},
    )
    stage = await agents.stage(approve=approve, on_commit=on_commit, pick=chance.choice)
    turn = await stage.submit("r1", "go")
    for _ in range(200):
        view = await stage.view(turn)
        if view.status.terminal:
            break
        if view.waiting_on and str(view.waiting_on[0].kind) == "operator":
            break
        if not await stage.step():
            _ = await stage.serve(turn)

    assert view.status == "COMPLETED", view
    assert len(asked) == len(set(asked)), "what was answered is not asked again"
    shown = {view.call_id: view for view in await stage.tools(turn)}
    assert len(shown) == 5
    questions = of_type(await stage.events(), "interaction.requested")
    assert len({e.data["interactionId"] for e in questions}) == len(questions) == 5
    given = outputs(await stage.state())
    for call_id, answer in answers.items():
        denied = answer is False
        assert (shown[call_id].state == ExecutionState.DENIED) is denied
        assert ("denied by user" in given[call_id]) is denied
        x = answer["x"] if isinstance(answer, dict) else given_by_model[call_id]
        # The model is told of the call that ran, and so is everybody else.
        assert shown[call_id].arguments == in_context(await stage.state())[call_id] == f'{{"x":{x}}}'
        if not denied:
            assert given[call_id] == (f"risked {x}" if call_id in ("c0", "c1", "c2") else f"other {x}")
    check_transcript(await stage.state())


# ------------------------------------------------------------ an approval that changes the call


@pytest.mark.parametrize("bound", [False, True], ids=["local", "external"])
async def test_a_call_runs_with_the_arguments_it_was_approved_with(tmp_path: Path, bound: bool) -> None:
    seen: list[str] = []

    async def act(x: int) -> str:
        seen.append(f"{x}")
        return f"acted {x}"

    def perform(arguments: str) -> str:
        seen.append(str(msgspec.json.decode(arguments)["x"]))
        return f"acted {seen[-1]}"

    agents = Agents(
        tmp_path,
        [[Call("act", '{"x":1}', id="c1")], "done"],
        tools=lambda: [tool(act, ask=True)],
        bindings={"act": "hands"} if bound else (),
    )
    stage = await agents.stage(approve=lambda _name, _call: {"x": 2}, results={"act": perform})
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    assert seen == ["2"] and outputs(await stage.state()) == {"c1": "acted 2"}
    (shown,) = await stage.tools(turn)
    assert shown.arguments == in_context(await stage.state())["c1"] == '{"x":2}'
    (asked,) = of_type(await stage.events(), "interaction.requested")
    (resolved,) = of_type(await stage.events(), "interaction.resolved")
    assert (asked.data["arguments"], resolved.data["editedArguments"]) == ('{"x":1}', '{"x":2}')


@pytest.mark.spec("IN-11")
async def test_a_rule_that_denies_the_changed_call_denies_it(tmp_path: Path) -> None:
    """A person said yes, and not to rules: what was never to run does not run because somebody typed it."""
    from agentscope.tool import FunctionTool

    class Careful(FunctionTool):
        async def check_permissions(self, tool_input: Any, context: Any) -> PermissionDecision:
            behavior = PermissionBehavior.DENY if tool_input["x"] > 9 else PermissionBehavior.ASK
            return PermissionDecision(behavior=behavior, message="never more than nine")

    async def act(x: int) -> str:
        """Act."""
        agents.ledger.append("act", x=x)
        return f"acted {x}"

    agents = Agents(
        tmp_path,
        [[Call("act", {"x": 1}, id="c1"), Call("act", {"x": 2}, id="c2")], "done"],
        tools=lambda: [Careful(act, is_concurrency_safe=False)],
    )
    stage = await agents.stage(approve=lambda _name, call_id: {"x": 10 if call_id == "c1" else 9})
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    shown = {view.call_id: view.state for view in await stage.tools(turn)}
    assert shown == {"c1": ExecutionState.DENIED, "c2": ExecutionState.COMPLETED}
    assert [line["x"] for line in agents.ledger.lines() if line["name"] == "act"] == [9]
    assert len(of_type(await stage.events(), "interaction.requested")) == 2, "a changed call is not asked for again"


async def test_changed_arguments_that_the_tool_does_not_take_are_an_error_result(tmp_path: Path) -> None:
    async def act(x: int) -> str:
        agents.ledger.append("act", x=x)
        return f"acted {x}"

    agents = Agents(tmp_path, [[Call("act", {"x": 1}, id="c1")], "done"], tools=lambda: [tool(act, ask=True)])
    stage = await agents.stage(approve=lambda _name, _call: {"y": "what?"})
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and agents.did("act") == 0
    (shown,) = await stage.tools(turn)
    assert shown.state == ExecutionState.FAILED
    assert "validation failed" in outputs(await stage.state())["c1"]


@pytest.mark.case("C41")
@pytest.mark.parametrize("nth", range(1, 8))
async def test_a_changed_call_stays_changed_over_a_crash_at_any_commit(tmp_path: Path, nth: int) -> None:
    async def act(x: int) -> str:
        agents.ledger.append("act", x=x)
        return f"acted {x}"

    left = [nth]

    def on_commit(_number: int, side: str, _step: Any) -> None:
        # The nth commit after the question is lost, or its answer is.
        if agents.ledger.count("asked") and left[0]:
            left[0] -= 1
            if not left[0]:
                raise Abandoned

    def approve(_name: str, _call: str) -> dict[str, int]:
        agents.ledger.append("asked")
        return {"x": 2}

    agents = Agents(
        tmp_path,
        [[Call("act", {"x": 1}, id="c1")], "done"],
        tools=lambda: [tool(act, ask=True)],
        adapter={"replay_rules": {"act": "safe"}},
    )
    stage = await agents.stage(approve=approve, on_commit=on_commit)
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and not left[0]
    assert {line["x"] for line in agents.ledger.lines() if line["name"] == "act"} == {2}
    assert agents.did("asked") == 1 and outputs(await stage.state()) == {"c1": "acted 2"}


@pytest.mark.case("C41")
async def test_a_host_cannot_take_a_stored_answer_back(tmp_path: Path) -> None:
    class Suspicious(MiddlewareBase):
        async def on_check_permission(self, agent: Any, input_kwargs: Any, next_handler: Any) -> Any:
            _ = await next_handler(**input_kwargs)
            return PermissionDecision(behavior=PermissionBehavior.ASK, message="are you sure?")

    async def act() -> str:
        agents.ledger.append("act")
        return "acted"

    agents = Agents(
        tmp_path,
        [[Call("act", id="c1")], "done"],
        tools=lambda: [tool(act, ask=True)],
        middlewares=lambda: [Suspicious()],
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED" and agents.did("act") == 1
    assert len(of_type(await stage.events(), "interaction.requested")) == 1


# ------------------------------------------------------------ results by people


@pytest.mark.spec("AS-08")
async def test_an_external_tool_without_a_binding_is_answered_by_a_person(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [[Call("form", {"x": 1}, id="c1")], "done"], tools=lambda: [external("form")])
    stage = await agents.stage(results={"form": {"name": "Ada"}})
    turn = await stage.submit("r1", "go")
    _ = await stage.step()

    view = await stage.view(turn)
    assert kinds(view) == ["external_result"]
    (question,) = (await stage.work(turn)).interactions
    assert question.kind is InteractionKind.EXTERNAL_RESULT
    assert (await stage.play(turn)).status == "COMPLETED"
    assert outputs(await stage.state()) == {"c1": '{"name":"Ada"}'}


async def test_a_result_that_came_before_an_answer_is_whole_when_it_is_applied_after_it(tmp_path: Path) -> None:
    """Both are there when the Run begins; the answer is given to the agent first, and its tool runs meanwhile."""

    async def act() -> str:
        return "acted"

    agents = Agents(
        tmp_path,
        [[Call("act", id="c1"), Call("far", id="c2")], "done"],
        tools=lambda: [tool(act, ask=True), external("far")],
        bindings={"far": "hands"},
    )
    stage = await agents.stage(results={"far": "from afar"})
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    assert await stage.perform(turn, "c2")
    (question,) = (await stage.work(turn)).interactions
    await stage.answer(turn, question, True)

    assert (await stage.play(turn)).status == "COMPLETED"
    assert outputs(await stage.state()) == {"c1": "acted", "c2": "from afar"}


async def test_a_manual_tool_that_asks_first_asks_twice(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [[Call("form", id="c1")], "done"], tools=lambda: [external("form", ask=True)])
    stage = await agents.stage(results={"form": "filled in"})
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    asked = of_type(await stage.events(), "interaction.requested")
    assert [e.data["kind"] for e in asked] == ["APPROVAL", "EXTERNAL_RESULT"]
    assert outputs(await stage.state()) == {"c1": "filled in"}


# ------------------------------------------------------------ partial, late, odd


async def test_results_are_applied_as_they_come(tmp_path: Path) -> None:
    agents = Agents(
        tmp_path,
        [[Call("a", id="a"), Call("b", id="b"), Call("c", id="c")], "done"],
        bindings=[ToolBinding(name, "hands", input_schema={"type": "object"}, permission="allow") for name in "abc"],
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    for call_id in ("b", "c", "a"):
        assert await stage.perform(turn, call_id)
        _ = await stage.step()
        applied = {view.call_id for view in await stage.tools(turn) if view.applied_at is not None}
        assert call_id in applied
    view = await stage.view(turn)
    assert view.status == "COMPLETED" and agents.requests == 2
    assert list(outputs(await stage.state())) == ["b", "c", "a"]


@pytest.mark.spec("PT-13")
async def test_a_result_that_breaks_its_promise_is_a_definite_error(tmp_path: Path) -> None:
    promise = {"type": "object", "required": ["id"]}
    agents = Agents(
        tmp_path,
        [[Call("a", id="a"), Call("b", id="b")], "done"],
        bindings=[
            ToolBinding(n, "hands", input_schema={"type": "object"}, permission="allow", metadata_schema=promise)
            for n in "ab"
        ],
    )
    if not hasattr(__import__("agentscope.tool", fromlist=["ToolBase"]).ToolBase, "check_external_result"):
        pytest.skip("this AgentScope has no promised metadata")
    stage = await agents.stage(
        results={
            "a": ToolResult(content=[{"type": "text", "text": "good"}], metadata={"id": 1}),
            "b": ToolResult(content=[{"type": "text", "text": "bad"}], metadata={}),
        }
    )
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    assert await stage.perform(turn, "a") and await stage.perform(turn, "b")

    assert (await stage.play(turn)).status == "COMPLETED"
    given = outputs(await stage.state())
    assert given["a"] == "good" and given["b"].startswith("the tool ran, but its result is not what it promised")


async def test_an_external_result_is_bounded_as_a_local_one_is(tmp_path: Path) -> None:
    aside: list[int] = []

    class Aside:
        async def offload_context(self, session_id: str, msgs: Any) -> str:
            raise AssertionError

        async def offload_tool_result(self, session_id: str, tool_result: Any) -> str:
            aside.append(sum(len(part.text) for part in tool_result.output))
            return "/aside"

        async def offload_data_block(self, block: Any) -> Any:
            return block

    agents = Agents(
        tmp_path,
        [[Call("a", id="a")], "done"],
        bindings=[ToolBinding("a", "hands", input_schema={"type": "object"}, permission="allow")],
        context_config=lambda: ContextConfig(tool_result_limit=100),
        offloader=Aside(),
    )
    stage = await agents.stage(results={"a": "x" * 400_000})
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    text = outputs(await stage.state())["a"]
    assert len(text) < 1000 and "TRUNCATED" in text and "/aside" in text and aside[0] > 399_000


async def test_a_plain_executors_media_become_native_blocks(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "data": "aGk=", "mediaType": "image/png"}}
    agents = Agents(
        tmp_path,
        [[Call("a", id="a")], "done"],
        bindings=[ToolBinding("a", "hands", input_schema={"type": "object"}, permission="allow")],
    )
    stage = await agents.stage(results={"a": ToolResult(content=[image, {"weird": 1}])})
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    (block,) = [b for m in (await stage.state()).context for b in m.content if b.type == "tool_result"]
    assert block.output[0].type == "data" and block.output[0].source.data == "aGk="
    assert block.output[1].text == '{"weird":1}'


# ------------------------------------------------------------ refused before anything runs


@pytest.mark.spec("IN-11")
async def test_arguments_that_do_not_fit_start_nothing(tmp_path: Path) -> None:
    agents = Agents(
        tmp_path,
        [[Call("query", {"x": "no number"}, id="c1"), Call("nothing", id="c2")], "done"],
        bindings=[ToolBinding("query", "hands", input_schema=SCHEMA, permission="allow")],
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    assert (await stage.play(turn)).status == "COMPLETED"
    shown = {view.call_id: view for view in await stage.tools(turn)}
    assert {view.state for view in shown.values()} == {ExecutionState.FAILED}
    assert all(view.applied_at is not None for view in shown.values())
    assert "not valid" in outputs(await stage.state())["c1"] or "validation" in outputs(await stage.state())["c1"]


@pytest.mark.spec("AS-08")
async def test_a_route_for_a_tool_that_is_not_there_is_found_before_a_model_is_asked(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["never"], bindings={"gone": "hands"})
    stage = await agents.stage()
    view = await stage.play(await stage.submit("r1", "go"))

    assert view.status == "FAILED" and agents.requests == 0
    assert isinstance(stage.errors[0], AgentFactoryError) and "'gone'" in str(stage.errors[0])


def test_bindings_are_checked_where_they_are_given(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["x"])
    bound = ToolBinding("a", "hands", input_schema={})
    for wrong in ({"b": bound}, [bound, bound]):
        with pytest.raises(InvalidRequest):
            AgentScopeAdapter.for_react(agents.describe, wrong)
    with pytest.raises(InvalidRequest):
        ToolBinding("a", "")


# ------------------------------------------------------------ bindings and their executor


@pytest.mark.spec("TB-04", "TB-02")
def test_a_binding_is_derived_from_a_tool_and_has_a_digest() -> None:
    async def restart(service: str, force: bool = False) -> str:
        """Restart a service.

        Args:
            service: its name.
        """
        return service

    native = tool(restart, is_read_only=True)
    bound = AgentScopeToolExecutor.binding(native, "v2", "hands", {"credential": "vault:restart"})

    assert bound.input_schema == native.input_schema and bound.description == native.description
    assert (bound.name, bound.version, bound.route, bound.read_only) == ("restart", "v2", "hands", True)
    same = AgentScopeToolExecutor.binding(
        tool(restart, is_read_only=True), "v2", "hands", {"credential": "vault:restart"}
    )
    assert same.digest == bound.digest
    changed = [
        AgentScopeToolExecutor.binding(native, *given)
        for given in (
            ("v3", "hands", {"credential": "vault:restart"}),
            ("v2", "other", None),
            ("v2", "hands", {"credential": "x"}),
        )
    ]
    digests = [bound.digest, *(binding.digest for binding in changed)]
    assert len(set(digests)) == len(digests)
    assert all(a is not b for a, b in itertools.combinations(digests, 2))
    assert "vault" not in repr(bound)


class Middle(MiddlewareBase):
    async def on_reply(self, agent: Any, input_kwargs: Any, next_handler: Any) -> AsyncIterator[Any]:
        async for event in next_handler(**input_kwargs):
            yield event
