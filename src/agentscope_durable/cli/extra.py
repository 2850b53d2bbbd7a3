"""What the command needs besides the library: the extra `[cli]`.

Every module of this room takes typer and rich from here, so that whoever has not installed them is told which extra it
is.
"""

from __future__ import annotations

from agentscope_durable.contracts.errors import MissingExtra

try:
    import typer as typer
    from rich.console import Console as Console
    from rich.console import Group as Group
    from rich.live import Live as Live
    from rich.padding import Padding as Padding
    from rich.table import Table as Table
    from rich.text import Text as Text
except ImportError as error:
    raise MissingExtra("the command `durable`", "cli") from error

__all__ = ["Console", "Group", "Live", "Padding", "Table", "Text", "UsageError", "typer"]

UsageError: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
"""What a wrong option or argument raises. Typer exports its children only, and has moved it about."""
