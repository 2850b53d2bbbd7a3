"""The Steps of a Run: a reasoning round is one, and so is what applies results before the first round (TJ-30, TP-03).

They are told as facts, in the commit of whatever begins, moves or ends them.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.adapters.agentscope.increments import entry
from agentscope_durable.contracts.journal import JournalEntry, JournalEventType
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.status import StepPhase, StepStatus
from agentscope_durable.domain import ids
from agentscope_durable.spi.harness import RunStart

__all__ = ["Steps"]


class Steps:
    """The Steps of one Run, of which one at most is open."""

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._count = 0
        self._step: StepFact | None = None
        self._used = False
        self._opening = StepPhase.ACTING

    @property
    def id(self) -> str:
        """The open Step; "" if there is none."""
        return "" if self._step is None else self._step.step_id

    def open(self, phase: StepPhase) -> list[StepFact]:
        """The fact that begins a Step, when none is open."""
        return [] if self._step is not None else [self._begin(phase)]

    def _begin(self, phase: StepPhase) -> StepFact:
        self._count += 1
        self._used = False
        self._step = StepFact(
            step_id=ids.step_id(self._start.run_id, self._count),
            run_id=self._start.run_id,
            number=self._count,
            phase=phase,
            resumed_from=self._start.resumed_from if self._count == 1 else "",
        )
        return self._step

    def begin_round(self, reasoning: int) -> tuple[list[StepFact], list[JournalEntry]]:
        """A reasoning round is a Step of its own (TJ-30); one that was opened for calls before it is the same."""
        facts: list[StepFact] = []
        entries: list[JournalEntry] = []
        step = self._step
        if step is not None and self._used:
            facts.append(replace(step, status=StepStatus.COMPLETED))
            entries.append(entry(JournalEventType.STEP_END, step=step.step_id))
            step = None
        if step is None:
            step = self._begin(StepPhase.REASONING)
        self._step = replace(step, reasoning=reasoning)
        self._used = True
        facts.append(self._step)
        entries.append(entry(JournalEventType.STEP_START, step=step.step_id, reasoning=reasoning))
        return facts, entries

    def applying(self) -> None:
        """What follows applies results and answers from outside (TP-03)."""
        self._opening = StepPhase.APPLYING_RESULTS

    def reach(self, phase: StepPhase, *, reasoning: int) -> list[StepFact]:
        """Facts by which the present Step reaches a phase; a Step is begun when none is open."""
        step = self._step
        if step is None:
            step = replace(self._begin(self._opening if phase is StepPhase.ACTING else phase), reasoning=reasoning)
        elif step.phase is phase:
            self._used = True
            return []
        else:
            step = replace(step, phase=phase)
        self._step, self._used = step, True
        return [step]
