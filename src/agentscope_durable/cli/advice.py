"""What to do next, for somebody who typed a command.

An error's advice speaks to a program: await this, pass None. Where that is nothing one can type, the advice is replaced
here by what can be, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from agentscope_durable.cli.options import STORE_VARIABLE
from agentscope_durable.contracts.errors import (
    CursorExpired,
    DurableError,
    InvalidCursor,
    InvalidRequest,
    NotFinished,
    NotFound,
    WaitTimeout,
)

__all__ = ["advised", "misspelt"]

ANY: Final = ""
"""Every command that has no row of its own."""

ADVICE: Final[dict[tuple[type[DurableError], str], str]] = {
    (CursorExpired, "events"): (
        "Leave out --after to begin with the oldest event kept, or use --follow, which begins with a snapshot"
    ),
    (InvalidCursor, "events"): (
        "Use a cursor that this Session gave, unchanged, or leave out --after to start at the beginning"
    ),
    (InvalidCursor, "prune"): "Use a cursor that `durable events` printed for this Session, unchanged",
    (InvalidCursor, ANY): (
        "Use the cursor that this listing printed, unchanged, or leave out --cursor to start at the beginning"
    ),
    (NotFound, ANY): f"Check the id; if it is of a store in another folder, name that with --store or {STORE_VARIABLE}",
    (NotFinished, "result"): "Wait for it with --wait SECONDS, or ask `durable explain` why it does not advance",
    (WaitTimeout, "result"): "The Turn goes on: wait again, or ask `durable explain` why it does not advance",
}
"""By the error and the command it came from."""


def advised(error: DurableError, arguments: Sequence[str]) -> DurableError:
    """The error, with advice that can be typed. Advice that its place gave it is kept.

    Args:
        arguments: what was typed; the first word is the command.
    """
    if error.own_advice is not None:
        return error
    if isinstance(error, NotFound) and error.kind == "store":
        return error.advising(
            f"Name its folder with --store or {STORE_VARIABLE}; the first host that opens it makes it"
        )
    command = next((word for word in arguments if not word.startswith("-")), ANY)
    advice = ADVICE.get((type(error), command)) or ADVICE.get((type(error), ANY))
    return error if advice is None else error.advising(advice)


def misspelt(error: Exception) -> DurableError:
    """What the parser of arguments refuses, as an error of this library that says where to look."""
    said: Any = getattr(error, "format_message", None)
    reason = (str(error) if said is None else str(said())).strip().rstrip(".")
    # As far as the words were understood: `durable`, or `durable turns`.
    known = getattr(getattr(error, "ctx", None), "command_path", None) or "durable"
    ahead = known == "durable" and hasattr(error, "option_name")
    where = "Options stand behind the name of the command. " if ahead else ""
    return InvalidRequest(reason).advising(f"{where}See `{known} --help`; nothing was stored")
