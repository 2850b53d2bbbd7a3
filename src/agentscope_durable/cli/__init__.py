"""The command `durable`: look at a store, control its Turns, and find out why one does not advance.

Rule 1: it only prints. What it says is what views say and what `docs/errors.md` says; a script reads the same with
`--json`, under names that do not change.
Rule 2: what only reads leaves no trace in the store, whether hosts are running or not.
Rule 3: an error is one sentence on standard error and an exit code from the table. A traceback would be a defect.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from agentscope_durable.contracts.errors import MissingExtra

__all__ = ["INTERRUPTED", "entry", "main"]

INTERRUPTED: Final = 130
"""Exit code after Ctrl+C, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; by default those of this process.

    Returns:
        The exit code: 0, or the one of `contracts/errors`.

    Raises:
        MissingExtra: the extra `[cli]` is not installed.
    """
    from agentscope_durable.cli.app import run

    return run(sys.argv[1:] if arguments is None else arguments)


def entry() -> None:
    """What the installed script calls."""
    try:
        code = main()
    except MissingExtra as error:
        sys.stderr.write(f"error: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:  # while the rest was being imported
        code = INTERRUPTED
    raise SystemExit(code)
