"""One Run of a scripted agent: where it stands, what it waits for, and how it commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agentscope_durable.contracts.commands import CommitStep, RunEnd, StepReceipt
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.status import StepPhase
from agentscope_durable.domain import ids
from agentscope_durable.spi.boundary import stopped
from agentscope_durable.spi.harness import RunContext
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness._script import Gates
from agentscope_durable.testing.scripted_harness._state import Program, State


class Props(NamedTuple):
    """What a Run meets outside itself: see `ScriptedHarness`."""

    ledger: EffectLedger
    gates: Gates
    tools: Mapping[str, Callable[..., Any]]
    writer: str


class OneRun:
    """One Run: where it stands, and how it commits."""

    _now_ms = 0

    def __init__(self, props: Props, context: RunContext, state: State) -> None:
        self._props = props
        self._context = context
        self._start = context.start
        self._state = state
        self._steps = 0
        self._models = 0

    @property
    def _program(self) -> Program:
        return self._state.program

    def _boundary(self) -> RunEnd | None:
        """What to do about a control, where the state is stored and nothing is under way."""
        return stopped(self._context)

    def _advance(self) -> None:
        self._program.at += 1
        self._program.phase = "next"
        self._program.calls = []

    async def _wait_for(self, gate: str, *, obedient: bool = True) -> bool:
        """True when the gate opened, False when the Run must stop first."""
        opened = asyncio.ensure_future(self._props.gates.passed(gate))
        try:
            while not opened.done():
                if obedient and (self._context.stop is not None or self._context.pause_requested):
                    return False
                changed = asyncio.ensure_future(self._context.changed())
                try:
                    await asyncio.wait({opened, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
            # What a gate raises is raised in who waits there: a model whose stream is cut, a tool that fails.
            opened.result()
            return True
        finally:
            opened.cancel()

    def _step(self, phase: StepPhase) -> StepFact:
        self._steps += 1
        start = self._start
        return StepFact(
            step_id=ids.step_id(start.run_id, self._steps),
            run_id=start.run_id,
            number=self._steps,
            phase=phase,
            resumed_from=start.resumed_from if self._steps == 1 else "",
            reasoning=self._program.round,
        )

    async def _commit(self, **fields: Any) -> StepReceipt:
        start, context = self._start, self._context
        batch = self._state.batch(context.position)
        receipt = await context.commit(
            CommitStep(
                session=start.session,
                thread_id=start.thread_id,
                turn_id=start.turn_id,
                run_id=start.run_id,
                fence=start.fence,
                expected_position=context.position,
                journal=batch.encode(),
                checkpoint=True,
                base=batch.base,
                writer=self._props.writer,
                **fields,
            )
        )
        self._now_ms = receipt.now_ms
        return receipt
