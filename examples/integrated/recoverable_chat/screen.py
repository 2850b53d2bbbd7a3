"""Where the page is shown and lines are typed: a terminal, or plain lines.

In a terminal what is on its way stands below the facts and is redrawn in place, and the last line is what is typed.
Without one (a pipe, a test) each thing is a line and nothing is taken back; words on their way begin with "~".
"""

from __future__ import annotations

import asyncio
import codecs
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

STYLES = {"you": "bold green", "you, steering": "bold green", "agent": "cyan", "tool": "blue", "task": "bold red"}
ROWS_KEPT = 8
"""Rows of the terminal that words on their way leave to everything else."""


@dataclass
class Now:
    """What is on its way at this moment.

    Attributes:
        words: of answers that are not complete, by message and attempt.
        tools: what runs.
        questions: what waits for a "y" or an "n".
        sending: what was typed and is not acknowledged.
    """

    words: dict[tuple[str, int], str] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    sending: list[str] = field(default_factory=list)
    status: str = ""


class Screen(Protocol):
    def say(self, who: str, text: str) -> None:
        """Something that stays."""
        ...

    def show(self, now: Now) -> None:
        """What is on its way; it takes the place of what was shown before."""
        ...


class Lines:
    """Plain lines."""

    def __init__(self) -> None:
        self._now = Now()

    def say(self, who: str, text: str) -> None:
        print(f"{who}: {text}", flush=True)

    def show(self, now: Now) -> None:
        before, self._now = self._now, now
        for key, text in now.words.items():
            if new := text[len(before.words.get(key, "")) :]:
                print(f"~ {new.strip()}", flush=True)
        if before.words.keys() - now.words.keys():
            print("~ (gone)", flush=True)
        for mark, old, new in (
            ("⋯", before.tools, now.tools),
            ("?", before.questions, now.questions),
            ("↑", before.sending, now.sending),
        ):
            for one in new:
                if one not in old:
                    print(mark, one, flush=True)
        if now.status != before.status:
            print("*", now.status, flush=True)


class Terminal:
    """Facts above, and below them what is on its way with the line that is typed."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._now = Now()
        self._typed = ""

    def say(self, who: str, text: str) -> None:
        self._live.console.print(Text.assemble((f"{who}: ", STYLES.get(who, "yellow")), text))

    def show(self, now: Now) -> None:
        self._now = now
        self._draw()

    def key(self, key: str) -> str | None:
        """Take one key; the whole line at its end."""
        done = None
        if key in "\r\n":
            done, self._typed = self._typed, ""
        elif key in "\x7f\x08":
            self._typed = self._typed[:-1]
        elif key == "\x15":
            self._typed = ""
        elif key.isprintable():
            self._typed += key
        self._draw()
        return done

    def _draw(self) -> None:
        console, now = self._live.console, self._now
        rows = [
            row for text in now.words.values() for row in Text(text, style="dim italic").wrap(console, console.width)
        ]
        self._live.update(
            Group(
                *rows[-max(1, console.height - ROWS_KEPT) :],
                *(Text(f"⋯ {tool}", style="blue", no_wrap=True) for tool in now.tools),
                *(Text(f"? {question}", style="bold magenta") for question in now.questions),
                *(Text(f"↑ {one}", style="dim green", no_wrap=True) for one in now.sending),
                Text(now.status, style="dim", no_wrap=True),
                Text(f"> {self._typed}"),
            ),
            refresh=True,
        )


@contextmanager
def screen(lines: asyncio.Queue[str | None]) -> Iterator[Screen]:
    """The screen; what is typed goes to `lines`, None at its end."""
    loop = asyncio.get_running_loop()

    def give(line: str | None) -> None:
        loop.call_soon_threadsafe(lines.put_nowait, line)

    if not (sys.stdin.isatty() and sys.stdout.isatty()):

        def read() -> None:
            for line in sys.stdin:
                give(line.rstrip("\n"))
            give(None)

        _start(read)
        yield Lines()
        return

    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setcbreak(0)  # keys come one by one and are not echoed; Ctrl-C stays a signal
    try:
        with Live(console=Console(), auto_refresh=False, transient=True) as live:
            live.console.show_cursor()  # at the end of what is typed; and it is not gone if this process is killed
            terminal = Terminal(live)

            def press(keys: str) -> None:
                for key in re.sub(r"\x1b\[[0-9;]*[ -/]*[@-~]", "", keys):  # arrows and the like
                    if key == "\x04":
                        lines.put_nowait(None)
                    elif (line := terminal.key(key)) is not None:
                        lines.put_nowait(line)

            def read() -> None:
                decode = codecs.getincrementaldecoder("utf-8")("replace").decode
                while keys := os.read(0, 1024):
                    loop.call_soon_threadsafe(press, decode(keys))

            _start(read)
            yield terminal
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _start(read: Callable[[], None]) -> None:
    # A daemon: nobody waits for a thread that waits for a key.
    threading.Thread(target=read, name="keys", daemon=True).start()
