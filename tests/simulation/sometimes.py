"""States that a run of many stories must have reached: what is never met is not tested.

A run over 200 stories or more is red while one of these was not reached. The number beside each story's count says how
often.
"""

from __future__ import annotations

from collections.abc import Mapping

MUST = (
    # hosts
    "a thread was taken over",
    "a thread was taken over while a question was open",
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
    "a transact met: killed",
    "a transact met: dead",
    # controls
    "a cancel was before completion",
    "completion was before the cancel",
    "a cancel came while a question was open",
    "a withdraw was before its input",
    "a withdraw was behind its input",
    "a steer was applied",
    "a inject was applied",
    "an input ended as signal.expired",
    "a run was paused",
    "a queued turn was paused",
    "a turn was paused in its finalization",
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
    "a question was closed with its turn",
    "a model stream was cut",
    "a failure was to be tried again",
    "killed at model.request.before",
    "killed at model.request.after",
    "killed at tool.local.before",
    "killed at tool.local.after",
    "killed at executor.start.before",
    "killed at executor.start.after",
    # threads and observers
    "a thread was restored",
    "a thread was forked",
    "events were pruned beside a run",
    "a preview was shown",
)


def unreached(counts: Mapping[str, int]) -> list[str]:
    return [what for what in MUST if not counts.get(what)]
