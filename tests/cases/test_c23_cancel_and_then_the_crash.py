"""C23: a cancel that has reached what is slow still holds when its host is killed, at whichever of its commits.

The agent gets to a step of its beginning and stays there; its Turn is cancelled; its host dies before or after the n-th
commit. The next host ends the Turn as CANCELLED without asking the model for it, and runs the one behind it.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.testing.census import nothing_stuck
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say
from agentscope_durable.testing.scripted_model import scripted_model
from tests.cases.programs import job_of
from tests.census.forks import ForkServer
from tests.runtime.conftest import KEY

pytestmark = [pytest.mark.case("C23"), pytest.mark.matrix]

ALL = os.environ.get("DURABLE_MATRIX") == "all"
SAMPLE = 3
PROGRAM = "tests.cases.programs:cancel_what_is_slow"
BEGINNINGS = [("factory", 0), ("factory", 1), ("factory", 2), ("input", 0), ("scripted", 0), ("scripted", 2)]
"""What is slow, and how many of its steps are quick."""
ON_POSTGRES = [("factory", 1)]
"""What the next host has to do about it does not depend on what was slow; the lease and the commits are the store's."""


def harness_of(job: Mapping[str, Any], ledger: EffectLedger, reached: asyncio.Event) -> HarnessAdapter:
    async def stay() -> None:
        reached.set()
        await asyncio.Event().wait()

    if job["kind"] == "scripted":
        gates = Gates()
        # Set when the agent stands at the gate that nobody opens.
        gates._reached["never"] = reached
        rounds = [say("hm")] * job["at"]
        return ScriptedHarness(
            {"go": [*rounds, Stall(gate="never"), final()], "": [final()]}, ledger=ledger, gates=gates
        )
    if job["kind"] == "input":
        get = FileObjectStore.get

        async def slowly(self: FileObjectStore, partition: str, digest: str) -> bytes:
            # Observers and the settlement read it as well.
            task = asyncio.current_task()
            if not reached.is_set() and task is not None and task.get_name().startswith("begin "):
                await stay()
            return await get(self, partition, digest)

        FileObjectStore.get = slowly  # type: ignore[method-assign]

    def answer(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        said = [block.text for message in messages if message.role == "user" for block in message.content]
        ledger.append("asked", about=said[-1][:10])
        return "done"

    async def factory(binding: Any) -> AgentBuilder:
        slow = job["kind"] == "factory" and binding.context.turn_id == first_of(ledger, binding.context.turn_id)
        for step in range(3):
            if slow and step == job["at"]:
                await stay()
            await asyncio.sleep(0)
        return AgentBuilder(name="a", system_prompt="", model=scripted_model(answer))

    return AgentScopeAdapter.for_react(factory)


def first_of(ledger: EffectLedger, turn_id: str) -> str:
    """The Turn for which an agent was made first, in whichever process."""
    if not ledger.count("first"):
        ledger.append("first", turn=turn_id)
    return next(line["turn"] for line in ledger.lines() if line["name"] == "first")


async def check(backend: SessionBackend, turn: DurableTurn, ledger: EffectLedger) -> None:
    assert not [line for line in ledger.lines() if line["name"] == "asked" and line["about"] != "and now?"]
    assert [run.status for run in await turn.list_runs()][-1] in ("CANCELLED", "LOST", "RELEASED")
    assert await nothing_stuck(backend, KEY) == []


@pytest.mark.parametrize(
    ("kind", "at", "backend"),
    [(*one, "sqlite") for one in BEGINNINGS] + [(*one, "postgres") for one in ON_POSTGRES],
)
def test_the_next_host_ends_what_was_cancelled(
    tmp_path: Path, forks: ForkServer, kind: str, at: int, backend: str
) -> None:
    def job(folder: Path) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        long = "x" * (2 * INLINE_MAX_BYTES)
        return {**job_of(backend, folder), "kind": kind, "at": at, "input": long if kind == "input" else "go"}

    def dies_at(place: int, side: str) -> bool:
        """Whether it came that far; then the next host has seen it through."""
        one = job(tmp_path / f"{place}-{side}")
        ended = forks.run(PROGRAM, one, failpoint=f"store.commit.{side}:{place}")
        if not ended.killed:
            assert ended.code == 0, ended.output
            return False
        again = forks.run(PROGRAM, one)
        assert again.code == 0, f"killed {side} commit {place}:\n{again.output}"
        return True

    commits = _commits(forks, job(tmp_path / "whole"))
    places = [(place, side) for place in range(1, commits + 1) for side in ("before", "after")]
    chosen = places if ALL else random.Random(f"{kind} {at}").sample(places, SAMPLE)
    # One that is chosen near the end may not be reached: how often a host commits is not always the same.
    assert sum(dies_at(place, side) for place, side in chosen) >= len(chosen) - 2


def _commits(forks: ForkServer, job: dict[str, Any]) -> int:
    """How many commits it makes when nothing happens to it."""
    ended = forks.run("tests.cases.programs:counted", {**job, "program": "cancel_what_is_slow"})
    assert ended.code == 0, ended.output
    return int(ended.output.split()[-1])
