"""What a user says of an agent, so that it can be killed and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentscope_durable.spi.executor import Executor
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.testing.scripted_model import Answer, Script, by_round

__all__ = ["Story"]

SECONDS = 120.0
"""How long one process may take. A bound for what hangs, and none on speed."""


class Story:
    """One agent, its tasks, and what its model will say. It stands at the top of a test module.

    Args:
        make_agent: your factory, as `AgentScopeAdapter.for_react` takes it. It is used as it is; only the model is
            replaced, if there are answers.
        task: what is submitted; a list is several Turns, one after the other.
        answers: what the model says, round by round: text, `Call`, or a list of both; or one function (`Script`).
            Without answers the agent keeps its own model, which must then say the same every time.
        adapter: makes the adapter of the factory it is given, for an agent that needs more than `for_react`:
            `lambda factory: AgentScopeAdapter.for_react(factory, {"restart": "hands"})`.
        executors: makes the executors of external tools, by route.
        approve: what a person says to every request for approval; None: nobody answers.
        varies: names of tools whose result is another one in each run (a clock, a random id) and is not compared.
        seconds: how long one process may take.
    """

    def __init__(
        self,
        make_agent: Callable[[Any], Any] | None,
        task: str | list[str],
        *answers: Answer | Script,
        adapter: Callable[[Callable[[Any], Any]], HarnessAdapter] | None = None,
        executors: Callable[[], Mapping[str, Executor]] | None = None,
        approve: bool | None = True,
        varies: Iterable[str] = (),
        seconds: float = SECONDS,
    ) -> None:
        self.make_agent = make_agent
        self.tasks = [task] if isinstance(task, str) else list(task)
        self.script = _script(answers)
        self.adapter = adapter
        self.executors = executors
        self.approve = approve
        self.varies = frozenset(varies)
        self.seconds = seconds
        if not self.tasks:
            raise ValueError("a story needs a task")


def _script(answers: tuple[Answer | Script, ...]) -> Script | None:
    """What the model says; None: the agent keeps its own."""
    if not answers:
        return None
    rounds: list[Answer] = []
    for one in answers:
        if not callable(one):
            rounds.append(one)
        elif len(answers) > 1:
            raise ValueError("a story has answers, round by round, or one function that gives them, and not both")
        else:
            return one
    return by_round(*rounds)
