"""What the cases run in forked children. Each is told what to do by a job, and leaves only what it has committed."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentscope_durable import _failpoints
from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.identity import MAIN_THREAD_ID
from agentscope_durable.contracts.status import WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.executor import Cancelled, Succeeded
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, final, local
from tests.census.job_executor import JobExecutor
from tests.runtime.conftest import KEY, turn_is
from tests.servers.fixtures import shared_postgres
from tests.servers.stores import schema_of

ROUTE = "ops"
LEASE = 1.0
"""Seconds until a killed host on PostgreSQL counts as gone: nothing but its lease tells, as on another machine."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ledger_of(job: Mapping[str, Any]) -> EffectLedger:
    return EffectLedger(Path(job["folder"]) / "effects")


def job_of(backend: str, folder: Path) -> dict[str, Any]:
    """What a program is told of where it works: on `sqlite` in the folder, on `postgres` in a schema of its own."""
    there = {"dsn": shared_postgres().dsn(), "schema": schema_of(folder)} if backend == "postgres" else {}
    return {"folder": str(folder), **there}


def opening(job: Mapping[str, Any]) -> Any:
    """The store of a job, for `async with`."""
    if "dsn" in job:
        return PostgresBackend.open(job["dsn"], schema=job["schema"], initialize_schema=True)
    return LocalBackend.open(Path(job["folder"]) / "store", synchronous=job.get("synchronous", "FULL"))


@asynccontextmanager
async def host(job: Mapping[str, Any], harness: HarnessAdapter, **options: Any) -> AsyncIterator[DurableRuntime]:
    if "dsn" in job:
        options.setdefault("lease", LEASE)
    async with opening(job) as backend:
        runtime = DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05, **options
        )
        async with runtime:
            yield runtime


async def answer_in_order(job: dict[str, Any]) -> None:
    """C39: give the answers of an order from the place `from` on; die once the answer `die_at` is committed."""
    from tests.cases.test_c39_parallel_approvals import SCRIPT, answer, asked, check, tools

    ledger = ledger_of(job)
    async with host(job, ScriptedHarness(SCRIPT, ledger=ledger, tools=tools(ledger))) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        questions = await asked(turn)
        for place in range(job.get("from", 0), len(job["order"])):
            await answer(turn, questions[job["order"][place]])
            if place == job["die_at"]:
                die()
        # The former process may have died in the middle of a tool: then evidence says what became of it.
        while not (await turn_is(turn, where=_stopped)).status.terminal:
            for waiting in (await turn.status()).waiting_on:
                if waiting.kind is WaitKind.TOOL_UNKNOWN and waiting.call_id is not None:
                    happened = ledger.count("tool", turn=turn.turn_id, call=waiting.call_id)
                    result = Succeeded(value="it has happened") if happened else Cancelled("it has not happened")
                    await HostOperations(runtime._host.backend).reconcile_tool(
                        turn, waiting.call_id, request_id=f"e-{waiting.call_id}", result=result, evidence_ref="ledger"
                    )
        await check(turn, ledger)


def _stopped(view: Any) -> bool:
    return view.status.terminal or any(waiting.kind is WaitKind.TOOL_UNKNOWN for waiting in view.waiting_on)


async def ten_calls(job: dict[str, Any]) -> None:
    """C10: ten local calls in one answer; die after the commit of result `die_after` (-1: not at all)."""
    from tests.cases.test_c10_batch_resumes_in_the_middle import SCRIPTS

    done = 0

    def passed(name: str) -> None:
        nonlocal done
        if name in ("tool.local.after", "executor.start.after"):
            done += 1
        armed = job["die_after"] >= 0 and done == job["die_after"]
        if armed and name in ("tool.local.after", "executor.start.after", "model.request.after"):
            _failpoints.arm("store.commit.after")

    _failpoints.observe(passed)
    ledger = ledger_of(job)
    harness = ScriptedHarness(SCRIPTS[job["kind"]], ledger=ledger)
    async with host(job, harness, executors={ROUTE: JobExecutor(ledger)}, executor_parallelism=1) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        await turn_is(turn, "COMPLETED")
        calls = await turn.list_tools()
        print(json.dumps({"done": done, "states": [call.state for call in calls], "answer": str(await turn.result())}))


async def block_the_loop(job: dict[str, Any]) -> None:
    """C22: a tool that holds the event loop for longer than the lease."""
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING)

    hosts: list[DurableRuntime] = []

    async def hold() -> str:
        # It can tell that it was late for a look that it had set itself: the tool finds it between two of them.
        scheduler, asleep = hosts[0]._scheduler, asyncio.Event()
        sleep = scheduler._sleep

        async def noted(wait: float) -> None:
            if wait > 0 and not scheduler._bell._rung:
                asleep.set()
            await sleep(wait)

        scheduler._sleep = noted
        await asleep.wait()
        (Path(job["folder"]) / "held").touch()
        time.sleep(job["seconds"])
        return "held"

    harness = ScriptedHarness([local("hold"), final("{results}")], ledger=ledger_of(job), tools={"hold": hold})
    async with host(job, harness, lease=job["lease"], host_name="blocked") as runtime:
        hosts.append(runtime)
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        await turn_is(turn, "COMPLETED")
        print(json.dumps({"runs": [run.owner for run in await turn.list_runs()]}))


async def work_to_a_gate(job: dict[str, Any]) -> None:
    """Run until a tool has had its effect and waits for its gate; then, with luck, on."""
    gates = Gates(job["folder"])
    harness = ScriptedHarness([local("pay", gate="gate"), final("{results}")], ledger=ledger_of(job), gates=gates)
    async with host(job, harness, lease=job["lease"], host_name="first") as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        (Path(job["folder"]) / "pid").write_text(str(os.getpid()))
        turn = await session.submit("r1", "go")
        await turn.wait(90)


class _Held:
    """An adapter that runs the main Thread only when it is let: its Turn is this host's meanwhile."""

    def __init__(self, adapter: HarnessAdapter) -> None:
        self._adapter = adapter
        self.in_hand, self.let = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    async def run(self, context: Any) -> Any:
        if context.start.thread_id == MAIN_THREAD_ID:
            self.in_hand.set()
            await self.let.wait()
        return await self._adapter.run(context)


async def poison(job: dict[str, Any]) -> None:
    """C28: whoever runs this Turn is killed where the job says; its neighbour's are run while it is in hand."""
    from tests.cases.test_c28_poison import harness_of

    held: Any = _Held(harness_of(job["kind"], die))
    async with host(job, held) as runtime:
        session = await runtime.create_session(KEY, "agent")
        neighbour = await session.create_thread("neighbour", "agent")
        await runtime.start()
        turn = await session.submit("r1", job["poison"])
        parked = asyncio.create_task(turn_is(turn, "WAITING"))
        in_hand = asyncio.create_task(held.in_hand.wait())
        await asyncio.wait({parked, in_hand}, return_when=asyncio.FIRST_COMPLETED)
        answer = await neighbour.call(f"n{job['number']}", "harmless", timeout=90)
        print(json.dumps({"answer": str(answer), "in_hand": held.in_hand.is_set()}), flush=True)
        held.let.set()
        await parked
        in_hand.cancel()


async def cancel_what_is_slow(job: dict[str, Any]) -> None:
    """C23: cancel a Turn whose agent is slow to begin, once it has got to the step `at`; then run another one."""
    from tests.cases.test_c23_cancel_and_then_the_crash import check, harness_of

    ledger, reached = ledger_of(job), asyncio.Event()
    async with host(job, harness_of(job, ledger, reached)) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", job["input"])

        async def cancel() -> None:
            await reached.wait()
            await turn.cancel("c1")

        cancelling = asyncio.create_task(cancel())
        try:
            await turn_is(turn, "CANCELLED")
        finally:
            cancelling.cancel()
        following = await session.submit("r2", "and now?")
        await turn_is(following, "COMPLETED")
        await check(runtime._host.backend, turn, ledger)


async def counted(job: dict[str, Any]) -> None:
    """Do another program to its end, and print how many commits it made."""
    commits = 0

    def passed(name: str) -> None:
        nonlocal commits
        commits += name == "store.commit.after"

    _failpoints.observe(passed)
    await globals()[job["program"]](job)
    print(commits)
