"""What people ask for while an agent works, and what its host may have to do: at a boundary, and for its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.agent import InjectionConfig
from pydantic import BaseModel

from agentscope_durable.contracts.messages import Audio, Base64, Image, Input, Text, Url, Video
from agentscope_durable.contracts.status import ModelStatus
from agentscope_durable.journal.host import Boundary
from agentscope_durable.spi.harness import StopCause
from agentscope_durable.testing.scripted_model import Call, Stall, by_request, rounds_so_far
from agentscope_durable.testing.scripted_model import Text as Said
from tests.adapters.agentscope.agents import Agents, external, tool
from tests.adapters.agentscope.stage import Stage, check_transcript, of_type, texts


async def look() -> str:
    return "seen"


def at(stage: Stage, predicate: Any, action: Any, *, once: bool = True) -> None:
    """Do something right after the first commit that is so."""

    async def on_commit(_number: int, side: str, step: Any) -> None:
        if side == "after" and predicate(step):
            if once:
                stage.on_commit = lambda _number, _side, _step: None
            await action()

    stage.on_commit = on_commit


def answered(step: Any) -> bool:
    return any(fact.status is ModelStatus.COMPLETED for fact in step.models)


def asked(step: Any) -> bool:
    return any(fact.status is ModelStatus.STARTED for fact in step.models)


# ------------------------------------------------------------ inputs


@pytest.mark.spec("AS-06")
@pytest.mark.parametrize("kind", ["steer", "inject"])
async def test_an_input_is_applied_at_the_next_boundary(tmp_path: Path, kind: str) -> None:
    given: list[Any] = []

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        given.append([(m.role, b.type) for m in messages for b in m.content if "note" in str(b)])
        return [Call("look", id="c1")] if n == 0 else "done"

    agents = Agents(tmp_path, script, tools=lambda: [tool(look)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    at(stage, answered, lambda: stage.add(kind, turn, "i1", "a note"))

    assert (await stage.play(turn)).status == "COMPLETED"
    assert given == [[], [("user", "text") if kind == "steer" else ("assistant", "hint")]]
    applied = of_type(await stage.events(), "signal.applied")
    assert [e.data["requestId"] for e in applied] == ["i1"]
    check_transcript(await stage.state())
    if kind == "steer":
        (message,) = [m for m in (await stage.state()).context if "note" in str(m.content)]
        assert message.id == of_type(await stage.events(), "signal.applied")[0].data["messageId"]


async def test_a_steer_reopens_a_final_answer_and_an_inject_does_not(tmp_path: Path) -> None:
    agents = Agents(tmp_path, by_request("one", "two", "three"))
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    at(stage, answered, lambda: stage.add("inject", turn, "i1", "by the way"))
    assert (await stage.play(turn)).status == "COMPLETED" and agents.requests == 1
    assert [e.data["requestId"] for e in of_type(await stage.events(), "signal.expired")] == ["i1"]

    turn = await stage.submit("r2", "go on")
    at(stage, answered, lambda: stage.add("steer", turn, "s1", "rather this"))
    assert (await stage.play(turn)).status == "COMPLETED" and agents.requests == 3
    assert [m.text for m in (await stage.messages())[-3:]] == ["two", "rather this", "three"]


async def test_a_steer_that_comes_with_the_end_goes_on_in_the_same_run(tmp_path: Path) -> None:
    """Accepted between the agent's last look and the commit of the end: the backend refuses the end."""

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        return f"answer {sum(m.role == 'user' for m in messages)}"

    agents = Agents(tmp_path, script)
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    async def just_before(_number: int, side: str, step: Any) -> None:
        if side == "before" and step.end is not None:
            stage.on_commit = lambda _number, _side, _step: None
            await stage.add("steer", turn, "s1", "wait")

    stage.on_commit = just_before
    view = await stage.play(turn)

    assert view.status == "COMPLETED" and view.runs == 1 and agents.requests == 2
    assert [m.text for m in await stage.messages()] == ["go", "answer 1", "wait", "answer 2"]
    assert view.result is not None and view.result.message_id == f"{turn}.r2"
    check_transcript(await stage.state())


async def test_a_steer_of_a_structured_answer_gets_a_round(tmp_path: Path) -> None:
    class Out(BaseModel):
        n: int

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        return [Call("GenerateStructuredOutput", {"n": n}, id=f"s{n}")]

    agents = Agents(tmp_path, script, structured_schema=Out)
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    async def just_before(_number: int, side: str, step: Any) -> None:
        if side == "before" and step.end is not None:
            stage.on_commit = lambda _number, _side, _step: None
            await stage.add("steer", turn, "s1", "another")

    stage.on_commit = just_before
    assert (await stage.play(turn)).status == "COMPLETED" and agents.requests == 2
    assert (await stage.messages())[-1].structured == {"n": 1}


async def test_an_input_withdrawn_at_the_last_moment_is_not_applied(tmp_path: Path) -> None:
    given: list[str] = []

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        given.append(" ".join(texts_of(messages)))
        return [Call("look", id="c1")] if n == 0 else "done"

    agents = Agents(tmp_path, script, tools=lambda: [tool(look)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    async def both() -> None:
        await stage.add("steer", turn, "s1", "first note")
        await stage.add("steer", turn, "s2", "second note")

    at(stage, answered, both)
    before = stage.on_commit

    async def withdraw(number: int, side: str, step: Any) -> None:
        if side == "before" and step.inputs:
            stage.on_commit = lambda _number, _side, _step: None
            await stage.withdraw(turn, "s1")
        elif (waits := before(number, side, step)) is not None:
            await waits
            stage.on_commit = withdraw

    stage.on_commit = withdraw
    assert (await stage.play(turn)).status == "COMPLETED"
    assert "first note" not in given[-1] and "second note" in given[-1]
    state = await stage.state()
    assert "first note" not in str(state.context) and "second note" in str(state.context)
    check_transcript(state)


def texts_of(messages: list[Any]) -> list[str]:
    return [b.text for m in messages for b in m.content if b.type == "text"]


@pytest.mark.spec("MG-02")
async def test_every_kind_of_content_becomes_a_native_block(tmp_path: Path) -> None:
    given: list[Any] = []

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        given.extend(b for m in messages if m.role == "user" for b in m.content)
        return "done"

    class Anything:
        supported_input_media_types = ("*/*",)

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    agents = Agents(tmp_path, script)
    agents.arguments["model"] = lambda: _with_formatter(agents.model(), Anything())
    stage = await agents.stage()
    content = (
        Text("see"),
        Image(Url("https://example.org/a.png", "image/png")),
        Audio(Base64("aGk=", "audio/wav")),
        Video(Url("https://example.org/b.mp4", "video/mp4")),
    )
    turn = await stage.submit("r1", Input(content=content))

    assert (await stage.play(turn)).status == "COMPLETED", stage.errors
    assert [b.type for b in given] == ["text", "data", "data", "data"]
    assert str(given[1].source.url) == "https://example.org/a.png" and given[2].source.data == "aGk="
    assert [b.source.media_type for b in given[1:]] == ["image/png", "audio/wav", "video/mp4"]
    (message,) = [m for m in (await stage.state()).context if m.role == "user"]
    assert message.id == f"{turn}.input"


def _with_formatter(model: Any, formatter: Any) -> Any:
    model.formatter = formatter
    return model


# ------------------------------------------------------------ pause


@pytest.mark.spec("TF-01", "TF-03", "TF-04")
async def test_a_pause_at_every_boundary_costs_no_request_and_no_effect(tmp_path: Path) -> None:
    async def act() -> str:
        agents.ledger.append("act")
        return "acted"

    agents = Agents(tmp_path, [["one", Call("act", id="c1")], "two"], tools=lambda: [tool(act)])
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    seen: set[Any] = set()

    async def pause_again(_number: int, side: str, step: Any) -> None:
        reached = (str([fact.status for fact in step.models]), str([told.state for told in step.tools]), step.reasoning)
        if side == "after" and step.end is None and reached not in seen:
            seen.add(reached)
            await stage.pause(turn)

    stage.on_commit = pause_again
    for runs in range(1, 20):
        _ = await stage.step()
        view = await stage.view(turn)
        if view.status.terminal:
            break
        assert view.status == "PAUSED", (runs, view.status)
        await stage.resume(turn)

    assert view.status == "COMPLETED" and view.runs > 2
    assert agents.did("act") == 1 and texts(await stage.state()) == ["one", "two"]
    # A pause that is accepted with the announcement of a request stops it: it was never sent.
    assert agents.requests == 2
    check_transcript(await stage.state())


@pytest.mark.spec("TF-01", "AS-06")
async def test_the_host_sees_four_kinds_of_boundaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentscope_durable.adapters.agentscope.invocation import Invocation

    seen: list[Boundary] = []
    real = Invocation.boundary

    def spy(self: Invocation, boundary: Boundary) -> None:
        seen.append(boundary)
        real(self, boundary)

    monkeypatch.setattr(Invocation, "boundary", spy)
    hosts: list[Any] = []

    async def ask() -> str:
        hosts.append(contexts[-1].execution_host.position.reasoning)
        return "x"

    contexts: list[Any] = []
    agents = Agents(tmp_path, [[Call("ask", id="c1")], "done"], tools=lambda: [tool(ask)])
    describe = agents.describe

    def remember(binding: Any) -> Any:
        contexts.append(binding.context)
        return describe(binding)

    agents.describe = remember  # type: ignore[method-assign]
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    assert set(seen) == set(Boundary)
    assert hosts == [1]


# ------------------------------------------------------------ stop


@pytest.mark.spec("AS-28")
async def test_a_cancel_and_the_end_of_a_host_are_two_things(tmp_path: Path) -> None:
    reached = asyncio.Event()
    agents = Agents(tmp_path, by_request([Said("half"), Stall(reached=reached)], "done"))
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await reached.wait()
    context = stage.contexts[-1]
    context.stop = StopCause("drain")
    context.tell()
    async with asyncio.timeout(90):
        assert await run

    view = await stage.view(turn)
    assert not view.status.terminal and view.recovery is None
    assert [str(r.status) for r in await stage.runs(turn)] == ["RELEASED"]
    assert (await stage.play(turn)).status == "COMPLETED"
    assert texts(await stage.state()) == ["done"]


async def test_a_drain_lets_an_answer_that_is_nearly_there_come(tmp_path: Path) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    agents = Agents(tmp_path, [[Said("the "), Stall(gate, reached), Said("end"), Call("look", id="c1")], "done"])
    agents.tools = lambda: [tool(look)]
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await reached.wait()
    stage.contexts[-1].stop = StopCause("drain")
    stage.contexts[-1].tell()
    await asyncio.sleep(0.05)
    gate.set()
    async with asyncio.timeout(90):
        assert await run
    assert agents.requests == 1 and (await stage.messages())[-1].text == "the end"

    assert (await stage.play(turn)).status == "COMPLETED" and agents.requests == 2


async def test_a_host_that_was_fenced_says_nothing_more(tmp_path: Path) -> None:
    reached = asyncio.Event()
    agents = Agents(tmp_path, by_request([Said("half"), Stall(reached=reached)], "done"))
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    run = asyncio.create_task(stage.step())
    await reached.wait()
    context = stage.contexts[-1]
    context.stop = StopCause("fenced")
    context.tell()
    async with asyncio.timeout(90):
        assert await run
    assert len(context.commits) == 1 and context.over

    assert (await stage.play(turn)).status == "COMPLETED"


@pytest.mark.spec("AS-29", "TJ-31")
async def test_a_resumed_reply_keeps_its_identity(tmp_path: Path) -> None:
    agents = Agents(
        tmp_path,
        [["a", Call("ext", id="e1")], ["b", Call("ext", id="e2")], "done"],
        tools=lambda: [external("ext")],
        bindings={"ext": "hands"},
        injection_config=lambda: InjectionConfig(inject_runtime_state=False),
    )
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"

    state = await stage.state()
    assert len({m.id for m in state.context if m.role == "assistant"}) == 1 and rounds_so_far(state.context) == 3
    runs = await stage.runs(turn)
    assert len(runs) == 3
    steps = [await stage.steps(turn, run.run_id) for run in runs]
    assert [s[0].resumed_from_step_id for s in steps] == [None, f"{turn}.1.s1", f"{turn}.2.s1"]
    assert [[step.reasoning for step in of_run] for of_run in steps] == [[1], [2], [3]]


async def test_live_state_is_used_again_on_the_same_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentscope_durable.adapters.agentscope import run as run_module

    loads: list[int] = []
    real = run_module.load_native

    def count(rows: Any, **options: Any) -> Any:
        loads.append(len(rows))
        return real(rows, **options)

    monkeypatch.setattr(run_module, "load_native", count)

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        return "done" if n % 3 == 2 else [f"round {n}", Call("ext", id=f"e{n}")]

    agents = Agents(tmp_path, script, tools=lambda: [external("ext")], bindings={"ext": "hands"})
    stage = await agents.stage(caching=True)
    for number in range(3):
        turn = await stage.submit(f"r{number}", "go")
        assert (await stage.play(turn)).status == "COMPLETED"
    assert loads == [0]
    check_transcript(await stage.state())
    assert len((await stage.state()).context) == 6
