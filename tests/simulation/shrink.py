"""Cuts a failing schedule down: what is left out is not needed for the failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from tests.simulation.schedule import Schedule
from tests.simulation.story import Outcome, play

TRIES_MAX = 400
"""Stories played to cut one down."""


def shrink(outcome: Outcome, *, tries: int = TRIES_MAX, play: Callable[[Schedule], Outcome] = play) -> Outcome:
    """The smallest story found that breaks the same promise."""
    assert outcome.violation is not None
    rule = outcome.violation.rule
    best = outcome
    while True:
        for smaller in _smaller(best.plan):
            if tries <= 0:
                return best
            tries -= 1
            tried = play(smaller)
            if tried.violation is not None and tried.violation.rule == rule:
                best = tried
                break
        else:
            return best


def _smaller(plan: Schedule) -> Iterator[Schedule]:
    for name in ("faults", "wishes", "observers"):
        items = getattr(plan, name)
        size = len(items)
        while size:
            for start in range(0, len(items), size):
                yield replace(plan, **{name: (*items[:start], *items[start + size :])})
            size //= 2
    if plan.hints_lost:
        yield replace(plan, hints_lost=0.0)
    for text, script in plan.scripts.items():
        for index in range(len(script) - 1):
            yield replace(plan, scripts={**plan.scripts, text: (*script[:index], *script[index + 1 :])})
    if plan.hosts > 1:
        yield replace(plan, hosts=plan.hosts - 1)
