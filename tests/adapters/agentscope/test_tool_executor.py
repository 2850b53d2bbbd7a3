"""AgentScope tools behind a route: handed over as they are, and never guessed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.message import Base64Source, DataBlock, TextBlock
from agentscope.tool import ToolChunk, Toolkit

from agentscope_durable.adapters.agentscope import (
    AgentBuilder,
    AgentScopeAdapter,
    AgentScopeToolExecutor,
    ToolError,
    current_origin,
)
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import RunStepRef
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.executor import ExecutionRequest, Succeeded, Unknown
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import Call, by_round, scripted_model
from tests.adapters.agentscope.agents import external, tool
from tests.adapters.agentscope.stage import Stage


def request(name: str, arguments: str = "{}", *, call: str = "c1", route: str = "hands") -> ExecutionRequest:
    return ExecutionRequest(
        session=SessionKey("app", "s"),
        thread_id="main",
        turn_id="t1",
        call_id=call,
        execution_id=f"x-{call}",
        name=name,
        route=route,
        arguments=arguments,
        origin=RunStepRef("t1.1", "t1.1.s1"),
    )


def executor(*tools: Any, timeout: float | None = None) -> AgentScopeToolExecutor:
    bindings = [AgentScopeToolExecutor.binding(native, "v1", "hands", None) for native in tools]
    return AgentScopeToolExecutor(Toolkit(tools=list(tools)), bindings, timeout)


@pytest.mark.spec("TB-07", "TB-10", "TB-11", "AS-27")
async def test_a_result_is_handed_over_as_it_is() -> None:
    seen: list[Any] = []

    async def picture(x: int) -> ToolChunk:
        seen.append((x, current_origin()))
        image = DataBlock(source=Base64Source(data="aGk=", media_type="image/png"))
        return ToolChunk(content=[TextBlock(text="see"), image], metadata={"k": 1}, state="error")

    outcome = await executor(tool(picture)).execute(request("picture", '{"x": 3}'))

    assert isinstance(outcome, Succeeded) and outcome.error and outcome.state == "error"
    assert outcome.content is not None and [part["type"] for part in outcome.content] == ["text", "data"]
    assert outcome.metadata == {"k": 1}
    ((x, origin),) = seen
    assert x == 3 and (origin.call_id, origin.run.step_id) == ("c1", "t1.1.s1")


@pytest.mark.spec("TB-12")
@pytest.mark.parametrize("what", ["raises", "nothing", "cut", "leaves", "closes"])
async def test_what_nobody_can_say_is_unknown(what: str) -> None:
    async def odd() -> AsyncIterator[Any]:
        if what == "raises":
            raise OSError("gone")
        if what == "cut":
            raise asyncio.CancelledError
        if what == "leaves":
            raise SystemExit(2)
        if what == "closes":
            raise GeneratorExit
        for chunk in ():
            yield chunk

    subject = executor(tool(odd))
    assert isinstance(await subject.execute(request("odd")), Unknown)


@pytest.mark.spec("TB-12")
async def test_a_tools_own_word_is_a_definite_error() -> None:
    async def act() -> str:
        raise ToolError("no such host")

    outcome = await executor(tool(act)).execute(request("act"))
    assert isinstance(outcome, Succeeded) and outcome.error
    assert outcome.content is not None and outcome.content[0]["text"] == "no such host"


@pytest.mark.spec("TB-07", "TB-08", "TB-12", "TB-15")
async def test_refused_before_it_is_entered() -> None:
    entered: list[int] = []

    async def act(x: int) -> str:
        entered.append(x)
        return "ok"

    native = tool(act)
    toolkit = Toolkit(tools=[native, external("schema_only")])
    bindings = [AgentScopeToolExecutor.binding(t, "v1", "hands", None) for t in (native, external("schema_only"))]
    subject = AgentScopeToolExecutor(toolkit, bindings)
    wrong = [
        request("act", '{"x": "no"}', call="1"),
        request("act", '{"x": 1, "x": 2}', call="2"),
        request("act", "not json", call="3"),
        request("other", call="4"),
        request("act", '{"x": 1}', call="5", route="elsewhere"),
        request("schema_only", call="6"),
    ]
    for asked in wrong:
        outcome = await subject.execute(asked)
        assert isinstance(outcome, Succeeded) and outcome.error, asked
    await toolkit.remove_tool("act")
    outcome = await subject.execute(request("act", '{"x": 1}', call="7"))
    assert isinstance(outcome, Succeeded) and "not registered here any more" in outcome.value
    assert entered == []


@pytest.mark.spec("TB-13")
async def test_the_plain_toolkit_still_turns_an_exception_into_an_error_result() -> None:
    from agentscope.message import ToolCallBlock
    from agentscope.state import AgentState

    async def bad() -> str:
        raise OSError("gone")

    plain = [
        item
        async for item in Toolkit(tools=[tool(bad)]).call_tool(
            ToolCallBlock(id="c", name="bad", input="{}"), AgentState()
        )
    ]
    assert str(plain[-1].state) == "error"
    assert isinstance(await executor(tool(bad)).execute(request("bad")), Unknown)


@pytest.mark.spec("TB-14")
async def test_a_function_answers_no_questions_and_is_entered_once() -> None:
    calls: list[int] = []

    async def act() -> str:
        calls.append(1)
        await asyncio.sleep(0)
        return "ok"

    subject = executor(tool(act))
    assert (subject.capabilities.query, subject.capabilities.cancel, subject.capabilities.output) == (
        False,
        False,
        False,
    )
    assert isinstance(await subject.query(request("act")), Unknown)
    one, two = await asyncio.gather(subject.execute(request("act")), subject.execute(request("act")))
    assert one == two == await subject.execute(request("act")) == await subject.query(request("act"))
    assert calls == [1]


async def test_a_call_beyond_its_time_is_unknown() -> None:
    async def slow() -> str:
        await asyncio.Event().wait()
        return "never"

    outcome = await executor(tool(slow), timeout=0.05).execute(request("slow"))
    assert isinstance(outcome, Unknown) and "0.05" in outcome.reason


@pytest.mark.spec("TB-01", "TB-05", "TB-06", "TB-10")
async def test_one_catalogue_for_the_agent_and_for_whoever_performs(tmp_path: Path) -> None:
    async def picture(x: int) -> ToolChunk:
        """Draw."""
        ledger.append("picture", origin=str(current_origin()))
        image = DataBlock(source=Base64Source(data="aGk=", media_type="image/png"))
        return ToolChunk(content=[TextBlock(text=f"see {x}"), image], metadata={"k": 1}, state="error")

    ledger = EffectLedger(tmp_path / "ledger")
    native = tool(picture)
    catalogue = [AgentScopeToolExecutor.binding(native, "v1", "hands", {"credential": "vault:draw"})]

    def make_agent(_binding: Any) -> AgentBuilder:
        model = scripted_model(by_round([Call("picture", {"x": 3}, id="c1")], ["done"]), ledger=ledger)
        return AgentBuilder(name="a", system_prompt="sys", model=model)

    backend = TransactionalSessionBackend(MemoryRecordStore(), wakeups=LocalWakeups())
    async with DurableRuntime(
        backend=backend,
        harnesses=[Harness("a", "v1", AgentScopeAdapter.for_react(make_agent, catalogue))],
        executors={"hands": AgentScopeToolExecutor(Toolkit(tools=[native]), catalogue)},
        poll_interval=0.02,
    ) as runtime:
        session = await runtime.create_session(SessionKey("app", "s"), "a")
        await runtime.start()
        turn = await session.submit("r1", "go")
        assert await turn.wait(timeout=90)
        stage = Stage(lambda: None, backend=backend, session=SessionKey("app", "s"))  # type: ignore[arg-type, return-value]
        (block,) = [b for m in (await stage.state()).context for b in m.content if b.type == "tool_result"]
        events = str(await stage.events())
    assert block.state == "error" and block.metadata == {"k": 1}
    assert [part.type for part in block.output] == ["text", "data"] and block.output[0].text == "see 3"
    assert ledger.count("picture") == 1 and "vault" not in events
    await backend.close()
