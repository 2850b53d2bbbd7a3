"""C07: only one way of ending a turn saved its state, and every other lost what the turn had built up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import (
    Action,
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    final,
    local,
    say,
)
from tests.every_store import on_every_store, shelf
from tests.runtime.conftest import KEY, kill, turn_is

STEPS = [say(f"step {number}") for number in (1, 2, 3, 4)]
SAID = ["step 1", "step 2", "step 3", "step 4"]
STALLED: list[Action] = [*STEPS, Stall(gate="stalled"), final()]


def broken() -> None:
    raise ValueError("the tool broke, after its effect or before it")


ENDS: dict[str, tuple[list[Action], str]] = {
    "user cancel": (STALLED, "CANCELLED"),
    "pause": (STALLED, "PAUSED"),
    "host shutdown": (STALLED, ""),
    "lease loss": (STALLED, ""),
    "model error": ([*STEPS, Fail(kind="ValueError")], "FAILED"),
    "tool error": ([*STEPS, local("broken"), final()], "WAITING"),
    "guardrail stop": ([*STEPS, final("no further", finish_reason="guardrail")], "COMPLETED"),
    "timeout": ([*STEPS, Fail(kind="TimeoutError")], "FAILED"),
}


@pytest.mark.case("C07")
@pytest.mark.parametrize("end", ENDS)
@on_every_store
async def test_what_was_said_is_there_however_the_work_ended(backend: str, end: str, tmp_path: Path) -> None:
    script, status = ENDS[end]
    gates = Gates()
    harness = ScriptedHarness(script, gates=gates, tools={"broken": broken})

    async with shelf(backend, tmp_path) as place:
        runtime = DurableRuntime(
            backend=await place.backend(),
            harnesses=[Harness("agent", "v1", harness)],
            poll_interval=0.05,
            recovery_policy=RecoveryPolicy(max_retries=0),
        )
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            turn = await session.submit("r1", "go")
            await runtime.start()
            await _reach(end, gates, runtime, turn)
            if status:
                await turn_is(turn, status)
            if end == "lease loss":
                kill(runtime)

        # Another process knows only what is stored.
        async with DurableRuntime(backend=await place.backend()) as reader:
            history = await reader.get_session(KEY).history()
            said = [message.text for message in history if message.role == "assistant"]
            assert said[:4] == SAID
            assert [message.attempt for message in history if message.role == "assistant"][:4] == [1, 1, 1, 1]


async def _reach(end: str, gates: Gates, runtime: DurableRuntime, turn: Any) -> None:
    """Bring the Turn to its end, or to where the host's end meets it."""
    if end in ("user cancel", "pause", "host shutdown", "lease loss"):
        await gates.reached("stalled")
    act: Callable[[str], Any] | None = {"user cancel": turn.cancel, "pause": turn.pause}.get(end)
    if act is not None:
        await act("stop")
