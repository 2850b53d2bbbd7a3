"""(c) Does a commit cost more when the conversation is longer?

One Thread whose context already holds 10, 1,000 or 5,000 messages runs a Turn of tool rounds through the
AgentScope adapter on SQLite. Durable time is what the adapter adds: deriving the checkpoint and committing it,
from the hook to the acknowledgement, without the agent's own work. Loading the state at the start of a Run and
checking it whole at its end are printed apart; they may grow, once per Run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from agentscope_durable import DurableRuntime, Harness, LocalBackend, SessionKey
from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.adapters.agentscope.invocation import Invocation
from agentscope_durable.adapters.agentscope.run import Run
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.commands import Claim, Claimed, CommitStep, RunEnd, RunEndKind, SubmitTurn
from agentscope_durable.contracts.journal import JournalBatch
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import Audience
from agentscope_durable.journal.checkpoint import base_rows
from agentscope_durable.spi.record_store import Reads, StreamRange
from agentscope_durable.testing.scripted_model import Call, Text, scripted_model
from benchmarks.measure import median

SIZES = (10, 1000, 5000)
ROUNDS = 30


def history(count: int) -> bytes:
    """An AgentState with `count` messages, as JSON."""
    from agentscope.message import AssistantMsg, UserMsg
    from agentscope.state import AgentState

    state = AgentState(session_id="bench")
    for number in range(count):
        text = f"message {number} " + os.urandom(300).hex()
        made: Any = UserMsg("user", text) if number % 2 == 0 else AssistantMsg("assistant", text)
        state.context.append(made)
    return state.model_dump_json().encode()


async def seed(backend: Any, session: SessionKey, binding: Binding, state: bytes) -> None:
    """Put the state into the Thread as a settled Turn would leave it."""
    records = backend.records
    await asyncio.to_thread(records.renew, "seeder", 60_000, b"")
    await backend.execute(
        SubmitTurn(
            session=session,
            thread_id="main",
            request_id="seed",
            content=body_of([{"type": "text", "text": "seed"}]),
            digest="seed",
        )
    )
    claimed: Claimed = await backend.execute(
        Claim(session=session, thread_id="main", owner="seeder", served=(binding.ready_class,)),
        audience=Audience.HOST,
    )
    batch = JournalBatch(expected_head=claimed.position, checkpoint=base_rows(state), base=True)
    await backend.execute(
        CommitStep(
            session=session,
            thread_id="main",
            turn_id=claimed.turn_id,
            run_id=claimed.run_id,
            fence=claimed.fence,
            expected_position=claimed.position,
            journal=batch.encode(),
            checkpoint=True,
            base=True,
            writer="bench",
            end=RunEnd(kind=RunEndKind.COMPLETED),
        ),
        audience=Audience.HOST,
    )
    await records.release("seeder")


class Stopwatch:
    """Adds up the time spent in the adapter's own commits, and in loading and checking."""

    def __init__(self) -> None:
        self.commits: list[float] = []
        self.pending = 0.0
        self.load = 0.0
        self.full = 0.0

    def __enter__(self) -> Stopwatch:
        self._kept = Invocation.commit, Invocation.checkpoint, Run._load
        commit, checkpoint, load = self._kept
        watch = self

        async def timed_commit(run: Any, increment: Any) -> Any:
            started = time.perf_counter()
            receipt = await commit(run, increment)
            watch.commits.append(time.perf_counter() - started + watch.pending)
            watch.pending = 0.0
            return receipt

        def timed_checkpoint(run: Any, *, full: bool = False) -> Any:
            started = time.perf_counter()
            told = checkpoint(run, full=full)
            taken = time.perf_counter() - started
            if full:
                watch.full += taken
            else:
                watch.pending += taken
            return told

        async def timed_load(run: Any) -> Any:
            started = time.perf_counter()
            native = await load(run)
            watch.load += time.perf_counter() - started
            return native

        Invocation.commit, Invocation.checkpoint, Run._load = timed_commit, timed_checkpoint, timed_load  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Invocation.commit, Invocation.checkpoint, Run._load = self._kept  # type: ignore[method-assign]


async def measure(directory: Path, count: int) -> dict[str, float]:
    def script(messages: Any, tools: Any, choice: Any, number: int) -> list[Any]:
        if number < ROUNDS:
            return [Text("looking"), Call("look", {"at": number})]
        return [Text("done")]

    def make_agent(binding: Any) -> AgentBuilder:
        from agentscope.permission import PermissionBehavior, PermissionDecision
        from agentscope.tool import FunctionTool, Toolkit

        def look(at: int) -> str:
            """Look at something."""
            return f"{at}: " + os.urandom(150).hex()

        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")
        model = scripted_model(script, ledger=str(directory / "ledger"), context_size=100_000_000)
        return AgentBuilder(
            name="assistant",
            system_prompt="You look.",
            model=model,
            toolkit=Toolkit(tools=[FunctionTool(look, permission=allowed)]),
        )

    session = SessionKey("bench", f"growth-{count}")
    adapter = AgentScopeAdapter.for_react(make_agent, accept_untested_agentscope=True)
    binding = Binding("assistant", "v1", adapter.state_version)
    async with (
        LocalBackend.open(directory) as backend,
        DurableRuntime(backend=backend, harnesses=[Harness("assistant", "v1", adapter)]) as runtime,
    ):
        handle = await runtime.create_session(session, "assistant")
        await seed(backend, session, binding, history(count))
        watch = Stopwatch()
        with watch:
            await runtime.start()
            turn = await handle.submit("r1", "look around")
            await turn.wait(timeout=300)
        rows = await backend.records.read(
            keys.partition(session), Reads(streams=(StreamRange("main", first=3, limit=1000),))
        )
        stored = [len(row.journal) + len(row.events) + len(row.private) for row in next(iter(rows.streams.values()))]
        return {
            "durable ms per commit": median(watch.commits) * 1e3,
            "bytes per commit": sum(stored) / len(stored),
            "commits": float(len(watch.commits)),
            "load ms per Run": watch.load * 1e3,
            "full check ms per Run": watch.full * 1e3,
        }


def run() -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    base = 0.0
    for count in SIZES:
        with tempfile.TemporaryDirectory() as place:
            answer = asyncio.run(measure(Path(place), count))
        base = base or answer["durable ms per commit"]
        results[f"c growth, {count} messages"] = {"x of 10 messages": answer["durable ms per commit"] / base} | answer
    return results


if __name__ == "__main__":
    for title, answers in run().items():
        print(title, "  ".join(f"{key}={value:.4g}" for key, value in answers.items()))
