"""When a Turn may move, and where to; when a host may take it.

Rule 1: every status change in the system goes through `move`.
Rule 2: nothing here reads a clock, a store or a network. Time is an argument, so that a simulated
week replays in a second from one seed.
"""

from __future__ import annotations

from msgspec.structs import replace

from agentscope_durable.contracts.commands import ClaimPurpose
from agentscope_durable.contracts.errors import InvalidTransition
from agentscope_durable.contracts.records import Condition, TurnState
from agentscope_durable.contracts.status import TurnStatus as S
from agentscope_durable.contracts.status import WaitKind

MOVES: dict[S, frozenset[S]] = {
    S.QUEUED: frozenset({S.RUNNING, S.PAUSED, S.CANCELLED}),
    S.RUNNING: frozenset({S.WAITING, S.PAUSING, S.PAUSED, S.COMPLETED, S.CANCELLED}),
    # A Turn fails only after its effects are settled, and waits for that.
    S.WAITING: frozenset({S.RUNNING, S.PAUSED, S.FAILED, S.CANCELLED}),
    S.PAUSING: frozenset({S.PAUSED, S.WAITING, S.COMPLETED, S.CANCELLED}),
    # Only a Turn that never ran is cancelled while it is paused; any other is WAITING until it is settled.
    S.PAUSED: frozenset({S.RUNNING, S.WAITING, S.QUEUED, S.CANCELLED}),
    # Terminal: a user who wants more submits a new Turn.
    S.COMPLETED: frozenset(),
    S.FAILED: frozenset(),
    S.CANCELLED: frozenset(),
}
"""Where a Turn may go from each status (STATES section 1). Staying is not a move."""


def move(turn_id: str, state: TurnState, to: S) -> TurnState:
    """The same Turn in another status.

    Raises:
        InvalidTransition: the table does not allow it.
    """
    if state.status is to:
        return state
    if to not in MOVES[state.status]:
        raise InvalidTransition(turn_id, state.status, to)
    return replace(state, status=to)


_EXTERNAL_EFFECT = frozenset({WaitKind.TOOL_RUNNING, WaitKind.TOOL_UNKNOWN, WaitKind.CHILD})


def unsettled(state: TurnState) -> tuple[Condition, ...]:
    """Effects that were started and whose outcome is not known: they hold settlement (SE-02)."""
    return tuple(c for c in state.conditions if c.kind in _EXTERNAL_EFFECT and not c.ready)


def settling(state: TurnState) -> bool:
    """The Turn will end FAILED or CANCELLED; what remains is to settle its effects."""
    return not state.status.terminal and (state.cancel != "" or state.failure is not None)


def at_rest(turn_id: str, state: TurnState) -> TurnState:
    """The state of a Turn that nobody owns any more, or yet.

    One that is to be settled is WAITING, whatever it was when it was cancelled or failed: nothing runs, and neither a
    pause nor a person holds it any longer (D4). Otherwise its reasons to wait could not be seen (P9).
    """
    if not settling(state) or state.status is S.WAITING:
        return state
    if state.status is S.PAUSED:
        state = replace(state, pause="", paused_revision=0)
    return move(turn_id, state, S.WAITING)


def due_ms(state: TurnState) -> int | None:
    """When a host may take a Turn that nobody owns: 0 now, None not before something happens.

    This is the whole of "why does it not advance" for an unowned Turn (Q-02..04, RC-13, CT-14).
    """
    if state.status.terminal:
        return None
    if settling(state):
        return None if unsettled(state) else state.settle_ms
    if state.operator:
        return None
    if state.status is S.PAUSED:
        return None
    if state.status in (S.QUEUED, S.RUNNING, S.PAUSING):
        return 0
    if state.recovery is not None and state.recovery.next_retry_at_ms:
        return state.recovery.next_retry_at_ms
    if not state.conditions or any(c.ready for c in state.conditions):
        return 0
    deadlines = [c.deadline_ms for c in state.conditions if c.kind is WaitKind.SIGNAL and c.deadline_ms]
    return min(deadlines) if deadlines else None


def could_go_on(state: TurnState, now_ms: int, *, owned: bool) -> bool:
    """Nothing outside holds the Turn: whoever owns it should be getting on, or somebody should take it (C18)."""
    if owned:
        return not state.status.terminal and not unsettled(state)
    due = due_ms(state)
    return due is not None and due <= now_ms


def purpose(state: TurnState, now_ms: int) -> ClaimPurpose | None:
    """What a host that takes this unowned Turn now should do with it; None: nothing yet."""
    due = due_ms(state)
    if due is None or due > now_ms:
        return None
    return ClaimPurpose.SETTLE if settling(state) else ClaimPurpose.RUN


def after_pause(state: TurnState, now_ms: int) -> S:
    """Where `resume` leads: only the pause itself is lifted (CT-14)."""
    if state.runs == 0:
        return S.QUEUED
    waiting = replace(state, status=S.WAITING, pause="")
    due = due_ms(waiting)
    return S.RUNNING if due is not None and due <= now_ms else S.WAITING
