"""What every exhibit holds, and what each of its Turns comes to when a host of this release takes it on.

A name here is that of a Session, of the text that its Turn was submitted with, and of the script for it. What an old
release recorded must still be understood: a script may be added, and none is ever changed.
"""

from __future__ import annotations

from typing import NamedTuple

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import ReplayRule, TurnStatus
from agentscope_durable.runtime.definitions import Harness
from agentscope_durable.testing.scripted_harness import (
    Action,
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    Wait,
    approval,
    external,
    final,
    local,
    manual,
    say,
    together,
)

AGENT, ELSEWHERE = "museum-agent", "an agent of another host"
HERE = "hands"
LARGE = 70_000
"""Characters of a result that does not stay in the records."""

SAFE = ReplayRule.SAFE
SCRIPTS: dict[str, list[Action]] = {
    "completed": [say("one"), together(local("look", value="seen", rule=SAFE), local("patch")), final("{results}")],
    "large": [local("dump", value="x" * LARGE), final("dumped")],
    "failed": [say("so far"), Fail(kind="ValueError", message="for the museum")],
    "cancelled": [manual("ask"), final("never said")],
    "approval": [say("I ask."), approval("restart", service="exporter"), final("{results}")],
    "answered": [approval("restart"), final("{results}")],
    "manual": [manual("ask"), final("{results}")],
    "unknown": [local("break"), final("{results}")],
    "signal": [Wait(key="x.go"), final("went")],
    "retry": [Fail(kind="OSError", runs=1), final("at last")],
    "paused": [say("one"), Stall(gate="paused"), final("went on")],
    "pausing": [say("one"), Stall(gate="pausing", obedient=False), final("went on")],
    "cancelling": [say("one"), Stall(gate="cancelling", obedient=False), final("never said")],
    "running": [say("one"), Stall(gate="running", obedient=False), final("ran, {inputs}")],
    "queued": [final("after {context}")],
    "in a tool": [local("wait", gate="in a tool"), final("{results}")],
    "external": [external(HERE, "work"), final("{results}")],
    "elsewhere": [final("here")],
    "restored": [final("knows {context}")],
    "again": [final("knows {context}")],
    "forked": [final("knows {context}")],
    "pruned": [final("told")],
    "closed": [final("told")],
    "dropped": [final("told")],
}


def key(name: str) -> SessionKey:
    return SessionKey("museum", name)


def harness(gates: Gates, definition: str = AGENT) -> Harness:
    return Harness(definition, "v1", ScriptedHarness(SCRIPTS, gates=gates, tools={"break": _break}))


def _break() -> str:
    raise OSError("nobody knows what it did")


class Shown(NamedTuple):
    """How a Turn was recorded, what it comes to, and what it says then.

    Attributes:
        session: of the Turn, if it is not called like the Turn.
    """

    recorded: TurnStatus
    reaches: TurnStatus
    answer: str | None = None
    session: str = ""


QUEUED, RUNNING, WAITING = TurnStatus.QUEUED, TurnStatus.RUNNING, TurnStatus.WAITING
PAUSING, PAUSED = TurnStatus.PAUSING, TurnStatus.PAUSED
COMPLETED, FAILED, CANCELLED = TurnStatus.COMPLETED, TurnStatus.FAILED, TurnStatus.CANCELLED

SHOWN: dict[str, Shown] = {
    "completed": Shown(COMPLETED, COMPLETED, "seen, ok"),
    "large": Shown(COMPLETED, COMPLETED, "dumped"),
    "failed": Shown(FAILED, FAILED),
    "cancelled": Shown(CANCELLED, CANCELLED),
    "approval": Shown(WAITING, COMPLETED, "ok"),
    "answered": Shown(PAUSED, COMPLETED, "ok"),
    "manual": Shown(WAITING, COMPLETED, "told by a person"),
    "unknown": Shown(WAITING, COMPLETED, "verified"),
    "signal": Shown(WAITING, COMPLETED, "went"),
    "retry": Shown(WAITING, COMPLETED, "at last"),
    "paused": Shown(PAUSED, COMPLETED, "went on"),
    "pausing": Shown(PAUSING, COMPLETED, "went on"),
    "cancelling": Shown(RUNNING, CANCELLED),
    "running": Shown(RUNNING, COMPLETED, "ran, mind the step"),
    "queued": Shown(QUEUED, COMPLETED, "after running, mind the step, queued", session="running"),
    "in a tool": Shown(RUNNING, COMPLETED, "verified"),
    "external": Shown(WAITING, COMPLETED, "verified"),
    "elsewhere": Shown(QUEUED, COMPLETED, "here"),
    "restored": Shown(COMPLETED, COMPLETED, "knows restored"),
    "forked": Shown(COMPLETED, COMPLETED, "knows restored, forked"),
    "pruned": Shown(COMPLETED, COMPLETED, "told"),
    "closed": Shown(COMPLETED, COMPLETED, "told"),
}
