"""States that a run of many stories must have reached: what is never met is not tested.

A run over 200 stories is red while one of these was not reached. The report says how often each was, and in how many
stories.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation.schedule import POINTS

ENOUGH = 200

MUST = (
    # hosts
    "a thread was taken over",
    "a thread was taken over while a question was open",
    "a thread was taken over during an approval",
    "a thread was taken over from a frozen host",
    "a host was killed while it owned a thread",
    "a host was frozen while it owned a thread",
    "a host gave a turn back",
    "a stale commit was refused",
    "a zombie's commit was refused",
    "a run was lost",
    "the clock went forward while a thread was owned",
    "the clock went back while a thread was owned",
    # the store
    "a commit met another one in its place",
    "the answer of a claim was lost",
    "a client was told Uncertain",
    "a transact met: fail",
    "a transact met: lost",
    "a transact met: ghost",
    "a transact met: dead",
    "a transact met: killed",
    # controls
    "a cancel was before completion",
    "completion was before the cancel",
    "completion was before an accepted cancel",
    "a withdraw was before its input",
    "a withdraw was behind its input",
    "a steer was applied",
    "a inject was applied",
    "an input ended as signal.expired",
    "a run was paused",
    "a queued turn was paused",
    "a turn was paused in its finalization",
    "a cancel came while a question was open",
    "a question was closed with its turn",
    "an answer was behind another one",
    "a call did what a person had made of it",
    "what was closed took no turn",
    "a resume was of another pause",
    "a request id was used for something else",
    # tools and models
    "an outcome was unknown",
    "an unknown call was settled by evidence",
    "an unknown call was settled by its late outcome",
    "a safe tool was run again",
    "an execution was asked for",
    "a tool's outcome came after the cancel",
    "a settlement applied a result",
    "a model stream was cut",
    "a failure was to be tried again",
    *(f"killed at {point}" for point in POINTS),
    # threads and observers
    "a thread was restored",
    "a thread was forked",
    "a thread was forked beside a run",
    "entries of a workspace were there after a restore",
    "entries of a workspace were there in a fork",
    "events were pruned beside a run",
    "a preview was shown",
    "an observer was given a snapshot",
    # operators
    "a turn was parked for an operator",
    "an operator released a turn",
    "an operator repaired a thread",
    "a session was dropped",
    "a session was dropped beside a run",
    "a body was swept",
    "checkpoints were pruned",
    "a fenced owner filed a fact",
)


SCRIPTED_ONLY = frozenset({"completion was before an accepted cancel"})
"""AgentScope's agent hears of a cancel with the commit before its last one, and stops there."""


def unreached(counts: Mapping[str, int], stories: int, *, scripted: bool = True) -> list[str]:
    """What a run of so many stories should have met and has not."""
    wanted = [what for what in MUST if scripted or what not in SCRIPTED_ONLY]
    return [what for what in wanted if not counts.get(what)] if stories >= ENOUGH else []
