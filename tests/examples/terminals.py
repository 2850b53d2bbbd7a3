"""Terminals for tests: a shell in a pseudo-terminal, what is typed there, and what a person would see on it.

The screen is made from the bytes as a terminal would make it, but it never scrolls: what left the top of the window is
still there to be read. So a line that a program did not take back when it drew it again stands there twice.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import re
import signal
import struct
import termios
from collections.abc import Callable, Mapping
from pathlib import Path

ROWS, COLUMNS = 50, 250
SECONDS_MAX = 90.0
"""A bound on a failure; no wait that succeeds takes it."""
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([ -/]*[@-~])|\x1b[()][A-Z0-9]|\x1b[=>78]")


class Screen:
    """What stands on a terminal after some bytes."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self._row = self._column = 0
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._part = ""

    def feed(self, data: bytes) -> None:
        text = self._part + self._decode(data)
        self._part = ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = SEQUENCE.match(text, at)
                if found is None:
                    if len(text) - at > 32:
                        raise AssertionError(f"an unknown sequence: {text[at : at + 32]!r}")
                    self._part = text[at:]
                    return
                self._obey(found[1] or "", found[2] or "")
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def _obey(self, numbers: str, what: str) -> None:
        n = int(numbers) if numbers.isdigit() else 1
        match what:
            case "A":
                self._row = max(0, self._row - n)
            case "B":
                self._down(n)
            case "K":
                row = self.rows[self._row]
                self.rows[self._row] = "" if numbers == "2" else row[: self._column]
            case "J":
                self.rows[self._row] = self.rows[self._row][: self._column]
                del self.rows[self._row + 1 :]
            case _:
                assert what in ("m", "h", "l", ""), f"a sequence nobody expected here: {numbers}{what}"

    def _put(self, one: str) -> None:
        match one:
            case "\r":
                self._column = 0
            case "\n":
                self._down(1)
            case "\b":
                self._column = max(0, self._column - 1)
            case "\x07":
                pass
            case _:
                if self._column >= COLUMNS:
                    self._down(1)
                    self._column = 0
                row = self.rows[self._row].ljust(self._column)
                self.rows[self._row] = row[: self._column] + one + row[self._column + 1 :]
                self._column += 1

    def _down(self, n: int) -> None:
        self._row += n
        while len(self.rows) <= self._row:
            self.rows.append("")

    def __str__(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows)


def _log_in(slave: int) -> None:
    # Tests that were started with nohup ignore it, and so would everything that a shell of theirs starts.
    _ = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.login_tty(slave)


class Terminal:
    """A shell with a screen, as a person has one."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.screen = Screen()
        self._folder = folder
        self._environment = {**environment, "PS1": f"{name}$ ", "TERM": "xterm", "COLUMNS": str(COLUMNS)}
        self._master = -1
        self._shell: asyncio.subprocess.Process | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Terminal:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._shell = await asyncio.create_subprocess_exec(
            *("bash", "--norc", "--noprofile", "--noediting", "-i"),
            cwd=self._folder,
            env=self._environment,
            preexec_fn=lambda: _log_in(slave),
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        asyncio.get_running_loop().add_reader(self._master, self._read)
        await self.prompt()
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._shell is not None
        asyncio.get_running_loop().remove_reader(self._master)
        # The terminal is closed: its processes are told to hang up.
        os.close(self._master)
        await self._shell.wait()

    def _read(self) -> None:
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the shell has ended
            asyncio.get_running_loop().remove_reader(self._master)
            return
        self.screen.feed(data)
        self._changed.set()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def until(self, what: str, holds: Callable[[str], bool]) -> None:
        """Wait until the screen is so."""
        try:
            async with asyncio.timeout(SECONDS_MAX):
                while not holds(str(self.screen)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"terminal {self.name}: {what}. It shows:\n{self.screen}") from None

    async def prompt(self) -> None:
        """Wait until the shell wants a command."""
        await self.until("no prompt came", lambda text: text.rstrip().rpartition("\n")[2] == f"{self.name}$")
