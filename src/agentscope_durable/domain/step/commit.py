"""What every part of one owner commit needs: where it is, and what it makes true."""

from __future__ import annotations

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import CommitStep, StepReceipt
from agentscope_durable.contracts.events import Payload
from agentscope_durable.contracts.records import RunStepRef, ThreadHead, TurnState
from agentscope_durable.domain.change import Draft


class Commit:
    """One owner commit while its parts are decided. Each part turns one list of the command into facts and events."""

    __slots__ = ("c", "draft", "step_id")

    def __init__(self, draft: Draft, c: CommitStep) -> None:
        self.draft = draft
        self.c = c
        self.step_id = ""
        """The Step the commit is in, "" between two."""

    @property
    def here(self) -> RunStepRef:
        return RunStepRef(run_id=self.c.run_id, step_id=self.step_id)

    def emit(self, event_type: str, payload: Payload, *, step_id: str | None = None) -> int:
        """An event of this Run and, unless another is named, of this Step."""
        return self.draft.emit(
            event_type,
            payload,
            thread_id=self.c.thread_id,
            turn_id=self.c.turn_id,
            run_id=self.c.run_id,
            step_id=self.step_id if step_id is None else step_id,
        )

    def refer(self, body: Body) -> None:
        """The commit holds this body: it is kept as long as the Session."""
        self.draft.refer(body)


def receipt(
    active: ThreadHead, state: TurnState, now_ms: int, *, ended: bool = False, last: bool = False
) -> StepReceipt:
    """What the owner learns of its Turn with each commit."""
    return StepReceipt(
        position=active.position,
        cancel=state.cancel != "",
        pause=state.pause != "",
        inputs=state.inputs,
        ready=sum(1 for condition in state.conditions if condition.ready),
        now_ms=now_ms,
        ended=ended,
        last=last,
        digest=active.digest,
    )
