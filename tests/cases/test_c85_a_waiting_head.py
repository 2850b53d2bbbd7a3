"""C85: a Turn that waited held its host's place, or let its Thread go on without it; nobody had said which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, approval, external, final
from tests.runtime.conftest import KEY, SECONDS, Hosts, turn_is

ROUTE = "ops"


@pytest.mark.case("C85")
@pytest.mark.spec("Q-02", "Q-06")
@pytest.mark.parametrize("waits_for", ["a person", "a tool"])
async def test_a_waiting_head_holds_its_thread_and_not_the_one_place_of_its_host(hosts: Hosts, waits_for: str) -> None:
    ended = asyncio.Event()

    async def page() -> str:
        await ended.wait()
        return "paged"

    first = approval("deploy") if waits_for == "a person" else external(ROUTE, "page")
    harness = ScriptedHarness({"ask": [first, final("asked")], "": [final("done")]})
    runtime = await hosts.open(harness, parallelism=1, executors={ROUTE: FunctionExecutor({"page": page})})
    session = await runtime.create_session(KEY, "agent")
    head = await session.submit("r1", "ask")
    following = await session.submit("r2", "next in line")
    kind = WaitKind.APPROVAL if waits_for == "a person" else WaitKind.TOOL_RUNNING
    await turn_is(head, TurnStatus.WAITING, where=lambda view: [one.kind for one in view.waiting_on] == [kind])

    # The host's one place is free: other Threads, of this Session and of others, go on.
    beside = await session.create_thread("beside", "agent")
    assert str(await beside.call("r3", "go", SECONDS)) == "done"
    other = await runtime.create_session(SessionKey("app", "other"), "agent")
    assert str(await other.call("r4", "go", SECONDS)) == "done"
    # The Thread is the head's, as long as it has not ended.
    view = await following.status()
    assert view.status is TurnStatus.QUEUED and view.runs == 0
    assert (await head.status()).status is TurnStatus.WAITING

    if waits_for == "a person":
        (question,) = await head.pending_interactions()
        await head.respond("a1", question.interaction_id, True)
    ended.set()
    assert str(await following.wait(SECONDS)) == "done"
    assert str(await head.result()) == "asked"


@pytest.mark.case("C85")
@pytest.mark.spec("Q-02")
async def test_with_one_place_nothing_runs_beside_what_runs(hosts: Hosts, tmp_path: Path) -> None:
    """What the story above would look like if a waiting Turn held its place."""
    gates = Gates()
    harness = ScriptedHarness({"busy": [Stall(gate="g"), final("busy")], "": [final("done")]}, gates=gates)
    runtime = await hosts.open(harness, parallelism=1)
    session = await runtime.create_session(KEY, "agent")
    busy = await session.submit("r1", "busy")
    await gates.reached("g")
    beside = await (await session.create_thread("beside", "agent")).submit("r2", "go")
    for _ in range(3):
        await runtime._scheduler._scan()
    assert (await beside.status()).status is TurnStatus.QUEUED
    gates.open("g")
    assert str(await busy.wait(SECONDS)) == "busy"
    assert str(await beside.wait(SECONDS)) == "done"
