"""A commit policy under a host: what a refused Turn, claim or step comes to, and that nothing is tried for ever."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.errors import PolicyFailed, PolicyRefused
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.policy import PolicyRequest, PolicyView
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, local, say
from tests.every_store import STORES, shelf
from tests.runtime.conftest import KEY, Hosts, refused, turn_is, until

SECONDS = 90


class ByRecord:
    """Refuses the commands, Threads and tools that a record names."""

    def reads(self, request: PolicyRequest) -> tuple[str, ...]:
        return ("denied", "quota")

    def check(self, request: PolicyRequest, view: PolicyView) -> None:
        denied = view.records["denied"] or {}
        if denied.get("defect"):
            raise KeyError("denied")
        if request.thread_id in denied.get("threads", ()):
            raise PolicyRefused(f"thread {request.thread_id} is denied")
        for tool in request.tools:
            if tool in denied.get("tools", ()):
                raise PolicyRefused(f"tool {tool} is denied")
        quota, new = view.records["quota"], request.thread_id not in view.running
        if request.command == "claim" and new and quota is not None and len(view.running) >= quota:
            raise PolicyRefused(f"{quota} turns are running")


@pytest.fixture(params=STORES)
async def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Hosts]:
    async with shelf(request.param, tmp_path) as place, AsyncExitStack() as stack:
        yield Hosts(await place.backend(policy=ByRecord()), stack)


async def deny(hosts: Hosts, request_id: str, **what: Any) -> None:
    await HostOperations(hosts.backend).put_policy(KEY, "denied", what or None, request_id=request_id)


@pytest.mark.spec("BE-18")
async def test_a_thread_is_denied_to_its_users_and_its_hosts(hosts: Hosts) -> None:
    runtime = await hosts.open([final("done")], start=False)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("before", "go")
    await deny(hosts, "p1", threads=["main"])

    error = await refused(session.submit("after", "go"), PolicyRefused)
    assert error.reason == "thread main is denied"
    await runtime.start()
    await until(lambda: any(isinstance(error, PolicyRefused) for error in hosts.errors))
    view = await turn.status()
    assert (view.status, [waiting.kind for waiting in view.waiting_on]) == ("QUEUED", ["host"])

    await deny(hosts, "p2")
    assert str(await turn.wait(SECONDS)) == "done"


async def test_a_quota_of_running_turns_is_kept_by_hosts_that_know_nothing_of_it(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([say("at work"), Stall(gate="work"), final("done")], gates=gates)
    runtime = await hosts.open(harness, parallelism=8)
    session = await runtime.create_session(KEY, "agent")
    await HostOperations(hosts.backend).put_policy(KEY, "quota", 2, request_id="p1")
    turns = [await (await session.create_thread(f"t{n}", "agent")).submit(f"r{n}", "go") for n in range(5)]

    async def statuses() -> list[str]:
        return [str((await turn.status()).status) for turn in turns]

    async def two_run() -> bool:
        return (await statuses()).count("RUNNING") == 2

    await until(two_run)
    await until(lambda: len(hosts.errors) >= 3)
    assert (await statuses()).count("QUEUED") == 3
    gates.open("work")
    for turn in turns:
        assert str(await turn.wait(SECONDS)) == "done"
    assert {type(error) for error in hosts.errors} == {PolicyRefused}


async def test_a_refused_tool_is_not_started_and_ends_the_turn_with_the_reason(hosts: Hosts) -> None:
    started: list[str] = []
    harness = ScriptedHarness([local("pay"), final("done")], tools={"pay": lambda: started.append("pay")})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    await deny(hosts, "p1", tools=["pay"])

    turn = await session.submit("r1", "go")
    view = await turn_is(turn, "FAILED")
    assert view.error.kind == "PolicyRefused" and "tool pay is denied" in view.error.message
    assert view.runs == 1 and started == []
    await deny(hosts, "p2")
    assert str(await (await session.submit("r2", "go")).wait(SECONDS)) == "done"


async def test_a_policy_with_a_defect_stops_what_it_is_asked_about_and_no_more(hosts: Hosts) -> None:
    runtime = await hosts.open([final("done")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("before", "go")
    await turn.wait(SECONDS)
    await deny(hosts, "p1", defect=True)

    for number in range(3):
        error = await refused(session.submit(f"after-{number}", "go"), PolicyFailed)
        assert error.reason == "KeyError in check()"
    assert str(await turn.result()) == "done"
    await deny(hosts, "p2")
    assert str(await session.call("now", "go")) == "done"
