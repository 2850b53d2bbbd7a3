"""Why a Turn is where it is: from what is known of it to the rows of a table, the most pressing first (DX-01).

Rule 1: a Turn that has not ended is running, can be claimed, or says what it waits for. So there is always a row, and
each row says whose move it is and what to do.
Rule 2: nothing here looks. Facts are what was read, time is an argument, and an answer is true of the moment of asking.
Rule 3: a row never tells anyone to submit again. What was accepted goes on; a second request would be a second task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from agentscope_durable.contracts.explanation import Explanation, Reason
from agentscope_durable.contracts.views import BindingView
from agentscope_durable.domain.explanation.facts import Facts, HostFacts
from agentscope_durable.domain.explanation.held import (
    behind,
    ended,
    ending,
    inputs,
    operator,
    paused,
    pausing,
    retry,
)
from agentscope_durable.domain.explanation.hosts import host_views, owner_gone, running, unclaimed
from agentscope_durable.domain.explanation.waits import open_conditions

__all__ = ["ROWS", "Facts", "HostFacts", "explain"]

Row = Callable[[Facts], Iterable[Reason]]

ROWS: Final[tuple[Row, ...]] = (
    ended,
    operator,
    behind,
    paused,
    pausing,
    ending,
    running,
    owner_gone,
    open_conditions,
    retry,
    unclaimed,
    inputs,
)
"""The table: each row says whether it is true of the facts, in this order."""


def explain(facts: Facts) -> Explanation:
    """Every row that is true of these facts, in the order of the table."""
    reasons = tuple(reason for row in ROWS for reason in row(facts))
    binding = facts.thread.binding
    return Explanation(
        turn=facts.view,
        now_ms=facts.now_ms,
        binding=BindingView(
            harness=binding.harness,
            definition_version=binding.definition_version,
            state_version=binding.state_version,
        ),
        summary=reasons[0].text,
        reasons=reasons,
        hosts=host_views(facts),
    )
