"""Runs a document: `python runner.py NAME < SOURCE`, in the folder where it is to run.

The source is what `test_examples.runnable` makes of a document: its python blocks, each line where it stands in the
document, and a call of `save` or `console` where another block begins.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

NOTICE = re.compile(r"^\S*sh: line \d+: +\d+ Killed\b.*\n", re.MULTILINE)
"""How a shell that is not interactive says what an interactive one says in a word."""


def save(name: str, content: str) -> None:
    """A block that is a file."""
    Path(name).write_text(content, encoding="utf-8")


def console(line: int, text: str) -> None:
    """A block of commands with what they print. `...` in an expected line stands for anything."""
    places = (Path(__file__).with_name("bin"), Path(sys.executable).parent, os.environ["PATH"])
    environment = {**os.environ, "PATH": ":".join(map(str, places))}
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        printed = NOTICE.sub("", done.stdout)
        if done.returncode in (-9, 137):
            printed += "Killed\n"
        pattern = re.escape(wanted.rstrip("\n")).replace(r"\.\.\.", ".*")
        if not re.fullmatch(pattern, printed.rstrip("\n")):
            raise AssertionError(f"line {line}: $ {command}\nshould print:\n{wanted}\nand printed:\n{printed}")


def main() -> None:
    name, text = sys.argv[1], sys.stdin.read()
    sys.path[0] = ""  # modules come from the folder of the document, and not from beside this file
    code = compile(text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    scope = {"__name__": "__main__", "save": save, "console": console}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, scope))
    else:
        exec(code, scope)


main()
