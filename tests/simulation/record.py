"""What was sent to the store in a simulated story, as acts that can be played against another one."""

from __future__ import annotations

from typing import Any

from tests.domain.test_invariants import Act, Advance, Do, Gone, Jump, Renew
from tests.simulation.schedule import Schedule
from tests.simulation.story import Story


def recorded(plan: Schedule) -> list[Act]:
    """Every command that reached the store, with its seed and its time; renewals and clock jumps between them."""
    story = Story(plan)
    outcome = story.play()
    assert not outcome.failed, outcome.violation
    acts: list[Act] = []
    at_ms = 0
    for when, what, value in story.audit.sent:
        now_ms = int(when * 1000)
        if now_ms > at_ms:
            acts.append(Advance(now_ms - at_ms))
            at_ms = now_ms
        acts.append(_act(what, value))
    return acts


def _act(what: str, value: Any) -> Act:
    match what:
        case "renew":
            return Renew(*value)
        case "release":
            return Gone(value)
        case "jump":
            return Jump(value)
        case _:
            command, seed = value
            return Do(command, seed)
