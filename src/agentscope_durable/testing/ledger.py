"""What really happened outside: one line per effect, written by the thing that had the effect.

A test compares it with what the product says happened. It is a file when several processes take part: a line is one
append of the operating system, so lines of different processes never mix and survive `kill -9`.
"""

from __future__ import annotations

import os
from pathlib import Path


class Ledger:
    """Lines in the order they were written.

    Args:
        path: a file shared between processes; None keeps the lines in this object.
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        if self._path is None:
            self._lines.append(line)
            return
        handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, line.encode() + b"\n")
        finally:
            os.close(handle)

    @property
    def lines(self) -> list[str]:
        if self._path is None:
            return list(self._lines)
        return self._path.read_text().splitlines() if self._path.exists() else []

    def count(self, start: str) -> int:
        """Lines that begin with `start`."""
        return sum(line.startswith(start) for line in self.lines)


__all__ = ["Ledger"]
