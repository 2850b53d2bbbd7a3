"""What people and scripts are shown.

Rule 1: a document is the view as it encodes itself: camelCase names that do not change.
Rule 2: what models, tools and users said is shown and never obeyed. Control characters and those that reorder text
would move a terminal's cursor or make an approval look like another one; they are shown as escapes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from agentscope_durable.cli.extra import Console, Padding, Table, Text

__all__ = [
    "Show",
    "ago",
    "block",
    "cell",
    "console",
    "document",
    "facts",
    "indented",
    "instant",
    "lasting",
    "note",
    "table",
    "tell",
    "visible",
]

NO_WRAP: Final = 100_000
"""Columns of what is not a terminal: one row stays one line."""

TYPED: Final = frozenset(("TURN", "RUN", "CALL", "POSITION", "SESSION", "THREAD", "CURRENT TURN"))
"""Columns of what is typed into the next command."""
WHOLE_MAX: Final = 32
"""Columns of a terminal that such a cell may take for itself."""

# C0 and C1 but tab and newline; marks, embeddings, overrides and isolates of direction; line and paragraph separators.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")

Show = Callable[[Console, Any], None]


def tell(answer: Any, as_json: bool, show: Show) -> None:
    """Print an answer the way it was asked for."""
    if as_json:
        document(answer)
    else:
        show(console(), answer)


def document(answer: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Something beside the answer, for people."""
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        # The console's own way is to end the process with an error.
        raise BrokenPipeError


def console() -> Console:
    width = None if sys.stdout.isatty() else NO_WRAP
    return _Screen(file=sys.stdout, markup=False, emoji=False, highlight=False, soft_wrap=True, width=width)


# ------------------------------------------------------------ text


def visible(text: str) -> str:
    """The text, with what could act on a terminal shown instead."""
    return _UNSAFE.sub(lambda found: _escaped(ord(found.group())), text)


def _escaped(character: int) -> str:
    return f"\\x{character:02x}" if character < 0x100 else f"\\u{character:04x}"


def cell(value: object) -> Text:
    """A value on one line."""
    if value is None:
        return Text("")
    text = value if isinstance(value, str) else str(value)
    return Text(visible(text).replace("\n", "\\n").replace("\t", "\\t"), overflow="fold")


def block(text: str) -> Text:
    """Text of several lines."""
    return Text(visible(text), overflow="fold")


def indented(text: Text, columns: int) -> Padding:
    return Padding(text, (0, 0, 0, columns), expand=False)


def instant(ms: int | None) -> str:
    """A stored instant, as everyone reads it."""
    if ms is None:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def lasting(ms: int) -> str:
    """A time span in one unit."""
    seconds = abs(ms) / 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def ago(now_ms: int, then_ms: int) -> str:
    return f"{lasting(now_ms - then_ms)} ago" if then_ms <= now_ms else f"in {lasting(then_ms - now_ms)}"


# ------------------------------------------------------------ shapes


def table(
    screen: Console, columns: Sequence[str], rows: Iterable[Sequence[object]], *, more: str | None = None
) -> None:
    """Rows under headings; `more` is the cursor of the next page."""
    cells = [[cell(value) for value in row] for row in rows]
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for number, name in enumerate(columns):
        widest = max((row[number].cell_len for row in cells), default=0)
        # Half an id is no id to copy: in a narrow terminal the other columns fold.
        whole = max(widest, len(name)) if name in TYPED and widest <= WHOLE_MAX else None
        shown.add_column(name, overflow="fold", width=whole)
    for row in cells:
        shown.add_row(*row)
    screen.print(shown)
    if more is not None:
        note(f"more: --cursor {more}")


def facts(screen: Console, pairs: Iterable[tuple[str, object]]) -> None:
    """Names with their values, those that have one."""
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    shown.add_column(style="bold", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "":
            shown.add_row(name, cell(value))
    screen.print(shown)
