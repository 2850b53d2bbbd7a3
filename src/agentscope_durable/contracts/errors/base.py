"""What every error has, and the three branches."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Self


class ErrorCode(StrEnum):
    """The word an error has on the wire, in the CLI's JSON and in stored failures. Never renamed (HT-27)."""

    INVALID_REQUEST = "INVALID_REQUEST"
    TOO_LARGE = "TOO_LARGE"
    NOT_FOUND = "NOT_FOUND"
    CONFLICT = "CONFLICT"
    TERMINAL = "TERMINAL"
    CLOSED = "CLOSED"
    FENCED = "FENCED"
    INCOMPATIBLE = "INCOMPATIBLE"
    CORRUPT = "CORRUPT"
    FORBIDDEN = "FORBIDDEN"
    CURSOR_EXPIRED = "CURSOR_EXPIRED"
    DROPPED = "DROPPED"
    MISUSE = "MISUSE"
    MISSING_EXTRA = "MISSING_EXTRA"
    AGENT_FACTORY = "AGENT_FACTORY"
    TURN_FAILED = "TURN_FAILED"
    TURN_CANCELLED = "TURN_CANCELLED"
    NOT_FINISHED = "NOT_FINISHED"
    TIMEOUT = "TIMEOUT"
    LIMIT_EXCEEDED = "LIMIT_EXCEEDED"
    UNAVAILABLE = "UNAVAILABLE"
    UNCERTAIN = "UNCERTAIN"


def revive(cls: type[DurableError], what: str, facts: Mapping[str, object], advice: str | None = None) -> DurableError:
    """Make an error again from its parts, without asking its constructor to write the sentence anew."""
    error = cls.__new__(cls)
    for name, fact in facts.items():
        setattr(error, name, fact)
    DurableError.__init__(error, what)
    return error if advice is None else error.advising(advice)


class DurableError(Exception):
    """Anything this library raises on purpose."""

    code: ClassVar[ErrorCode]
    http_status: ClassVar[int]
    exit_code: ClassVar[int]
    advice: str
    """What to do next: one sentence. The documentation has that of the class; `advising` gives an instance its own."""

    what: str
    """What happened, and to which id: the message without the advice."""

    request: str | None = None
    """The request id it was asked with, noted by an edge that drew one for its user. It is told beside the facts and is
    none of them: who chose the id knows it."""

    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"{what}. {self.advice}")

    @property
    def own_advice(self) -> str | None:
        """The advice this instance was given; None: that of its class."""
        return vars(self).get("advice")

    def advising(self, advice: str) -> Self:
        """The same error with advice for the place it is raised at, where that of its class does not fit."""
        self.advice = advice
        # Not by `args`: an ImportError says what it was made with.
        super().__init__(f"{self.what}. {advice}")
        return self

    @classmethod
    def fact_names(cls) -> tuple[str, ...]:
        """The attributes an instance carries: its constructor's parameters, then those of its parents (Rule 2)."""
        names: dict[str, None] = {}
        for ancestor in cls.__mro__:
            if ancestor is DurableError:
                break
            if "__init__" in vars(ancestor):
                code = ancestor.__init__.__code__
                names |= dict.fromkeys(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
        return tuple(names)

    def facts(self) -> dict[str, object]:
        """The facts of this instance by name. A fact an older peer did not send is None."""
        return {name: getattr(self, name, None) for name in self.fact_names()}

    def __reduce__(self) -> tuple[object, ...]:
        return revive, (type(self), self.what, self.facts(), self.own_advice)


class Rejected(DurableError):
    """Asked like this it can never succeed; nothing was changed."""

    code = ErrorCode.INVALID_REQUEST
    http_status = 400
    exit_code = 2
    advice = "Change the request before asking again"


class Retry(DurableError):
    """Nothing was changed; the same request may succeed later."""

    code = ErrorCode.UNAVAILABLE
    http_status = 503
    exit_code = 75
    advice = "Ask again later, with the same request id"


class Unconfirmed(DurableError):
    """It may have happened, or not."""

    code = ErrorCode.UNCERTAIN
    http_status = 502
    exit_code = 76
    advice = "Query the outcome, or repeat the request with the SAME request id; a new id could do it twice"
