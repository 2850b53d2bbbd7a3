"""The commands put together, and how one of them ends: an answer, or an error from the table and its exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from agentscope_durable.cli import INTERRUPTED, care, controls, events, policies, positions, retention, sessions, turns
from agentscope_durable.cli.advice import advised, misspelt
from agentscope_durable.cli.extra import UsageError, typer
from agentscope_durable.cli.output import visible
from agentscope_durable.contracts.errors import DurableError, to_wire

__all__ = ["NOT_SHOWN", "app", "run"]

NOT_SHOWN: Final = 74
"""Exit code when standard output cannot be written, a full disk for example: EX_IOERR, as sysexits has it."""

app = typer.Typer(
    name="durable",
    help="Look at a store of agentscope-durable, control its Turns, and find out why one does not advance.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (sessions, events, turns, controls, positions, retention, policies, care):
    part.add(app)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    _speak_utf8()
    as_json = "--json" in arguments
    try:
        code = app(list(arguments) or ["--help"], prog_name="durable", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except DurableError as error:
        return _failed(advised(error, arguments), as_json)
    except UsageError as error:
        return _failed(misspelt(error), as_json)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read this has read enough.
        _say_no_more()
        return 0
    except OSError as error:
        _say_no_more()
        sys.stderr.write(
            f"error: {visible(error.strerror or str(error))}. What was asked may have been done: look again\n"
        )
        return NOT_SHOWN


def _say_no_more() -> None:
    """Nothing can be written to standard output any more, not even at the end of the process."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(error: DurableError, as_json: bool) -> int:
    """Say what is wrong, to which id, and what to do; the code says whose move it is."""
    if as_json:
        told = {**to_wire(error), "advice": error.advice, "exitCode": error.exit_code}
        if error.request is not None:
            told["requestId"] = error.request
        sys.stderr.write(msgspec.json.encode({"error": told}).decode() + "\n")
    else:
        sys.stderr.write(f"error: {visible(str(error))}\n")
    return error.exit_code


def _speak_utf8() -> None:
    """What is stored is Unicode, whatever this terminal's locale says."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")
