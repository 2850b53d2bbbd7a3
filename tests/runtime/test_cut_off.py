"""A commit whose caller was cancelled: what it sent is with the store, and what became of it is found out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.contracts.commands import CommitStep, RunEnd, RunEndKind
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.status import StepPhase, StepStatus
from agentscope_durable.domain import ids
from agentscope_durable.spi.harness import RunContext
from agentscope_durable.testing.scripted_harness import ScriptedHarness
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events


class Held:
    """A backend that takes its time over the first commit of a Run."""

    def __init__(self, backend: Any, *, stands: bool) -> None:
        self._backend = backend
        self._stands = stands
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def execute(self, command: Any, **options: Any) -> Any:
        if not isinstance(command, CommitStep) or self.held.is_set():
            return await self._backend.execute(command, **options)
        receipt = await self._backend.execute(command, **options) if self._stands else None
        self.held.set()
        await self.go_on.wait()
        return receipt


class Impatient(ScriptedHarness):
    """Is cut off while its first commit is on its way, and goes on with the next one."""

    def __init__(self, backend: Held) -> None:
        super().__init__([])
        self._held = backend

    async def run(self, context: RunContext) -> RunEnd | None:
        start = context.start

        async def commit(status: StepStatus) -> None:
            fact = StepFact(ids.step_id(start.run_id, 1), start.run_id, 1, StepPhase.ACTING, status)
            await context.commit(
                CommitStep(
                    session=start.session,
                    thread_id=start.thread_id,
                    turn_id=start.turn_id,
                    run_id=start.run_id,
                    fence=start.fence,
                    expected_position=context.position,
                    steps=(fact,),
                )
            )

        sending = asyncio.create_task(commit(StepStatus.RUNNING))
        await self._held.held.wait()
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        await commit(StepStatus.COMPLETED)
        assert context.position == start.position + 2
        return RunEnd(kind=RunEndKind.COMPLETED)


@pytest.mark.spec("BE-17")
@pytest.mark.parametrize("stands", [True, False])
async def test_a_commit_whose_caller_is_cut_off_is_made_once_and_before_the_next(hosts: Hosts, stands: bool) -> None:
    backend = Held(hosts.backend, stands=stands)
    runtime = await hosts.open(Impatient(backend), backend=backend)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "go")

    await turn.wait(SECONDS)

    steps = [event.type for event in await all_events(turn) if event.type.startswith("step.")]
    assert steps == ["step.started", "step.ended"]
    assert len(await turn.list_runs()) == 1
