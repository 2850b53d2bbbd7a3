"""What a scripted agent is told to do: data, so that a test reads as a story."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from agentscope_durable.contracts.errors import Conflict, Incompatible, Unavailable
from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.spi.environment import SYSTEM, Environment


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of a round.

    Attributes:
        kind: `local`, `approval` (a local tool that asks first), `external` or `manual`.
        rule: replay rule of a local tool.
        value: what a local tool returns when the harness has no function of this name.
        gate: a local tool waits for this gate after its effect.
    """

    kind: str
    name: str
    arguments: dict[str, Any] = {}
    route: str = ""
    rule: ReplayRule = ReplayRule.NEVER
    value: Any = "ok"
    gate: str = ""


class Round(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="round"):
    """One request to the model and what it answers.

    `{inputs}` in the text becomes the steered and injected inputs of the Turn, `{results}` its tool results,
    `{context}` all the user has said in this Thread.

    Attributes:
        thinking: native reasoning, which stays private.
        gate: the answer is half streamed when the model waits for this gate.
        last: the Turn ends with this answer.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    gate: str = ""
    last: bool = False
    finish_reason: str = "completed"
    structured: Any = None


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="fail"):
    """Raise an error of this class in the first `runs` Runs of the Turn."""

    kind: str = "OSError"
    message: str = "scripted"
    runs: int = 1_000_000


class Stall(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="stall"):
    """Wait for a gate; a disobedient one does not look at `stop` meanwhile."""

    gate: str
    obedient: bool = True


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="wait"):
    """Park until a signal comes, or until a store time in ms (0: for the signal only)."""

    key: str
    deadline_ms: int = 0


class Emit(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="emit"):
    """Commit an application event `x.*`."""

    type: str
    value: dict[str, Any] = {}


Action = Round | Fail | Stall | Wait | Emit
"""What the agent does next. A script that ends without a last round answers "done"."""


def say(text: str, *, gate: str = "") -> Round:
    return Round(text=text, gate=gate)


def think(text: str) -> Round:
    return Round(thinking=text)


def final(text: str = "done", *, gate: str = "", finish_reason: str = "completed", structured: Any = None) -> Round:
    return Round(text=text, gate=gate, finish_reason=finish_reason, structured=structured, last=True)


def together(*rounds: Round) -> Round:
    """One round with the calls of all of these."""
    return Round(calls=tuple(call for one in rounds for call in one.calls))


def local(
    name: str, *, rule: ReplayRule = ReplayRule.NEVER, value: Any = "ok", gate: str = "", **arguments: Any
) -> Round:
    return Round(calls=(Call(kind="local", name=name, arguments=arguments, rule=rule, value=value, gate=gate),))


def approval(name: str, *, value: Any = "ok", **arguments: Any) -> Round:
    return Round(calls=(Call(kind="approval", name=name, arguments=arguments, value=value),))


def external(route: str, name: str, **arguments: Any) -> Round:
    return Round(calls=(Call(kind="external", route=route, name=name, arguments=arguments),))


def manual(name: str, **arguments: Any) -> Round:
    return Round(calls=(Call(kind="manual", name=name, arguments=arguments),))


class Gates:
    """Doors that a test opens. With a directory they work across processes: an open gate is a file there."""

    def __init__(self, directory: Path | str | None = None, *, environment: Environment = SYSTEM) -> None:
        self._directory = None if directory is None else Path(directory)
        self._environment = environment
        self._events: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    def open(self, name: str) -> None:
        self._event(self._events, name).set()
        if self._directory is not None:
            (self._directory / f"{name}.open").touch()

    def close(self, name: str) -> None:
        self._event(self._events, name).clear()

    async def reached(self, name: str) -> None:
        """Wait until someone has come to the gate."""
        await self._event(self._reached, name).wait()

    def forget(self, name: str) -> None:
        """`reached` waits for the next one who comes."""
        self._event(self._reached, name).clear()

    async def passed(self, name: str) -> None:
        self._event(self._reached, name).set()
        if self._directory is None:
            await self._event(self._events, name).wait()
            return
        (self._directory / f"{name}.reached").touch()
        while not (self._directory / f"{name}.open").exists():
            await self._environment.sleep(0.01)

    @staticmethod
    def _event(events: dict[str, asyncio.Event], name: str) -> asyncio.Event:
        return events.setdefault(name, asyncio.Event())


ERRORS: Final[dict[str, Callable[[str], Exception]]] = {
    "OSError": OSError,
    "TimeoutError": TimeoutError,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
    "Unavailable": Unavailable,
    "Conflict": Conflict,
    "Incompatible": lambda text: Incompatible(text, required="another host", present="this one"),
    "Group": lambda text: ExceptionGroup(text, [OSError(text), TimeoutError(text)]),
    "MixedGroup": lambda text: ExceptionGroup(text, [OSError(text), ValueError(text)]),
}
