"""What really happened outside: one line per effect, written by the thing that had the effect.

A test compares it with what the product says happened. It is a file when several processes take part: a line is one
append of the operating system, so lines of different processes never mix, and a process that is killed leaves a whole
line or none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["EffectLedger"]


class EffectLedger:
    """Effects in the order in which they happened. Tools and models of any number of processes append to one file.

    Args:
        path: the file; it is made by the first line. None keeps the lines in this object.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._kept: list[str] = []

    def append(self, name: str, **facts: object) -> None:
        """Note one effect, with what a test may want to know of it (values JSON can hold)."""
        line = json.dumps({"name": name, "pid": os.getpid(), **facts}) + "\n"
        if self.path is None:
            self._kept.append(line)
            return
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _ = os.write(file, line.encode())
        finally:
            os.close(file)

    def lines(self, name: str | None = None) -> list[dict[str, Any]]:
        """Every effect so far, or every one of this name, oldest first. A line that was cut short did not happen."""
        written = self._kept
        if self.path is not None:
            try:
                written = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            except FileNotFoundError:
                return []
        effects = (json.loads(line) for line in written if line.endswith("\n"))
        return [effect for effect in effects if name is None or effect["name"] == name]

    def count(self, name: str, **facts: object) -> int:
        """How often an effect of this name happened, with these facts if any are given."""
        return sum(facts.items() <= effect.items() for effect in self.lines(name))
