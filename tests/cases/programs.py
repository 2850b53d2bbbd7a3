"""What the cases run in forked children. Each is told what to do by a job, and leaves only what it has committed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import Ledger
from agentscope_durable.testing.scripted_harness import ScriptedHarness
from tests.runtime.conftest import KEY, turn_is


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ledger_of(job: Mapping[str, Any]) -> Ledger:
    return Ledger(Path(job["folder"]) / "effects")


@asynccontextmanager
async def host(job: Mapping[str, Any], harness: ScriptedHarness, **options: Any) -> AsyncIterator[DurableRuntime]:
    async with LocalBackend.open(Path(job["folder"]) / "store") as backend:
        runtime = DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05, **options
        )
        async with runtime:
            yield runtime


async def answer_in_order(job: dict[str, Any]) -> None:
    """C39: give five answers in an order; die once the answer `die_at` is committed."""
    from tests.cases.test_c39_parallel_approvals import DENIED, SCRIPT, check

    ledger = ledger_of(job)
    async with host(job, ScriptedHarness(SCRIPT, ledger=ledger)) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        await turn_is(turn, where=lambda view: view.status.terminal or len(view.waiting_on) > 0)
        projection = (await turn.snapshot()).projection
        questions = {question.call_id: question for question in projection.interactions.values()}
        for place, index in enumerate(job["order"]):
            await turn.respond(f"a{index}", questions[f"c1.{index}"].interaction_id, index not in DENIED)
            if place == job["die_at"]:
                die()
        await turn_is(turn, "COMPLETED")
        await check(turn, ledger)
