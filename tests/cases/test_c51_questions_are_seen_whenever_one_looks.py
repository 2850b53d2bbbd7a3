"""C51: pending questions were announced before anybody listened, so nobody saw them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.events import Committed
from agentscope_durable.contracts.options import EventStreamOptions
from agentscope_durable.contracts.status import InteractionState
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final, manual, together
from tests.cases.programs import job_of, opening
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, SECONDS, turn_is, until

SCRIPT = [together(approval("pay", amount=1), manual("ask", question="which one?")), final("{results}")]


@pytest.mark.case("C51")
@pytest.mark.spec("ST-33", "ST-06", "IN-01", "DX-08")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_both_questions_are_seen_before_during_and_long_after_a_restart(tmp_path: Path, backend: str) -> None:
    job = job_of(backend, tmp_path)
    async with AsyncExitStack() as first:
        runtime = await _host(first, job)
        session = await runtime.create_session(KEY, "agent")
        turn = await session.submit("r1", "a")
        before = Watching(turn)
        await turn_is(turn, "WAITING")
        await before.sees_both()
        await _looks(turn)
        asked = {question.interaction_id for question in await turn.pending_interactions()}

    async with AsyncExitStack() as second:
        # While it starts: the observer is there before the host runs anything.
        runtime = await _host(second, job, start=False)
        turn = runtime.get_session(KEY).get_turn(turn.turn_id)
        during = Watching(turn)
        starting = asyncio.create_task(runtime.start())
        await during.sees_both()
        await starting
        await _looks(turn)
        # Long after, and more than once.
        for _ in range(3):
            late = Watching(turn)
            await late.sees_both()
            await _looks(turn)
        assert {question.interaction_id for question in await turn.pending_interactions()} == asked
        assert before.asked == during.asked == late.asked == asked

        pay, ask = sorted(await turn.pending_interactions(), key=lambda question: question.kind != "approval")
        await turn.respond("a1", pay.interaction_id, True)
        await turn.respond("a2", ask.interaction_id, "this one")
        assert str(await turn.wait(SECONDS)) == "ok, this one"


async def _host(stack: AsyncExitStack, job: dict[str, Any], *, start: bool = True) -> DurableRuntime:
    backend = await stack.enter_async_context(opening(job))
    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT))
    runtime = DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05, close_timeout=0.5)
    await stack.enter_async_context(runtime)
    if start:
        await runtime.start()
    return runtime


class Watching:
    """An observer that comes now, with no cursor."""

    def __init__(self, turn: DurableTurn) -> None:
        self.asked: set[str] = set()
        turn.subscribe_events(EventStreamOptions.defaults(), self._take)

    async def _take(self, item: Any) -> None:
        if isinstance(item, Committed) and item.event.type == "interaction.requested":
            self.asked.add(item.event.data["interactionId"])

    async def sees_both(self) -> None:
        await until(lambda: len(self.asked) == 2)


async def _looks(turn: DurableTurn) -> None:
    """The snapshot has both, whoever was there or not."""
    interactions = (await turn.snapshot()).projection.interactions
    assert [question.state for question in interactions.values()] == [InteractionState.PENDING] * 2
    assert len(await turn.pending_interactions()) == 2
