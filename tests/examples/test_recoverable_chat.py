"""The trials of the recoverable chat are done as its README says, in real terminals, with real processes and kills.

The README is the script: its tables are read and obeyed line by line. So a trial that does not go as it is told fails,
and so does a line that nobody could obey.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.terminals import SECONDS_MAX, Screen, Terminal

pytest.importorskip("agentscope")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]
CHAT = ROOT / "examples" / "integrated" / "recoverable_chat"
README = (CHAT / "README.md").read_text(encoding="utf-8")
TRIALS = 11
SPEED = "0.02"
"""Seconds a word, instead of the default for people."""

ROW = re.compile(r"^\| (?P<where>[ABC]) \| (?P<do>.+?) \| (?P<see>.*?) ?\|$", re.MULTILINE)
DO = re.compile(r"(?P<word>type )?`(?P<text>[^`]+)`|(?P<key>Ctrl\+C)")
SEE = re.compile(r"\b(?P<where>[ABC]): |(?P<how>once |no longer )?`(?P<text>[^`]+)`")


@dataclass(frozen=True)
class Row:
    """A line of a table: where something is done, what, and what is to be seen."""

    where: str
    do: str
    see: str


def trials() -> dict[str, list[Row]]:
    """The tables by the title above each; the first one starts both programs."""
    found: dict[str, list[Row]] = {}
    for part in re.split(r"^### ", README, flags=re.MULTILINE):
        rows = [Row(match["where"], match["do"].replace("\\|", "|"), match["see"]) for match in ROW.finditer(part)]
        found[part.partition("\n")[0] if found else "start"] = rows
    return found


START, *NAMES = trials()


class Desk:
    """Three terminals and a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.terminals: dict[str, Terminal] = {}

    async def do(self, row: Row) -> None:
        terminal = self.terminals[row.where]
        match = DO.fullmatch(row.do)
        assert match, f"nobody can do this: {row.do!r}"
        if match["key"]:
            terminal.type("\x03")
        elif match["word"]:
            await terminal.until("no line can be typed", lambda text: text.rstrip().endswith("\n>"))
            terminal.type(match["text"] + "\r")
        else:
            await terminal.prompt()
            # What was seen before is no answer to this.
            terminal.screen = Screen()
            command = match["text"].replace("/tmp/chat", str(self.folder))
            terminal.type(command + (f" --word {SPEED}" if "brain.py" in command else "") + "\r")
            if row.where == "C":
                await terminal.prompt()
        await self.see(row)

    async def see(self, row: Row) -> None:
        seen = "C" if row.where == "C" and "C: " in row.see else "B"
        for match in SEE.finditer(row.see):
            if match["where"]:
                seen = match["where"]
                continue
            terminal, text = self.terminals[seen], match["text"]
            if match["how"] == "no longer ":
                await terminal.until(f"{text!r} does not go", lambda shown, text=text: text not in shown)
                continue
            await terminal.until(f"{text!r} does not come", lambda shown, text=text: text in shown)
            if match["how"] == "once ":
                assert str(terminal.screen).count(text) == 1, f"{text!r} is there twice:\n{terminal.screen}"


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DURABLE_", "PS1"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore", "LC_ALL": "C.UTF-8"}


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    desk = Desk(tmp_path / "chat")
    async with AsyncExitStack() as stack:
        for name in "ABC":
            desk.terminals[name] = await stack.enter_async_context(Terminal(name, CHAT, environment()))
        yield desk
        # Pages end with their terminals. A brain may run without one.
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((desk.folder / "brain.pid").read_text()), signal.SIGKILL)


async def page(folder: Path, *typed: str) -> list[str]:
    """What the page shows without a terminal: one line for each thing."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("chat.py", str(folder)),
        cwd=CHAT,
        env=environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate("".join(f"{line}\n" for line in typed).encode())
    assert process.returncode == 0
    return output.decode().splitlines()


def facts(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("you", "agent", "tool", "task"))]


@pytest.mark.spec("DX-19", "ST-33", "RT-23")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
async def test_a_trial_goes_as_the_readme_says(desk: Desk, name: str) -> None:
    for row in trials()[START] + trials()[name]:
        await desk.do(row)

    # A page that was never there shows the same, in the same order, and B shows nothing twice.
    told = facts(await page(desk.folder))
    shown = [row.rstrip() for row in desk.terminals["B"].screen.rows]
    assert told == [row for row in shown if row in told]
    # Whatever was killed, nothing was booked twice.
    bookings = desk.folder / "bookings.txt"
    assert not bookings.exists() or len(bookings.read_text().splitlines()) == 1


class Piped:
    """A program of the example with pipes instead of a terminal, and what it has printed."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self.lines: list[str] = []

    async def __aenter__(self) -> Piped:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._command,
            cwd=CHAT,
            env=environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return self

    async def __aexit__(self, *_error: object) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()

    def type(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())

    async def until(self, text: str, *, words: bool = False) -> None:
        """Read until a line contains this; or until the words on their way do, however they were cut into lines."""
        assert self._process.stdout is not None
        async with asyncio.timeout(SECONDS_MAX):
            async for line in self._process.stdout:
                self.lines.append(line.decode().rstrip("\n"))
                if text in (on_their_way(self.lines) if words else self.lines[-1]):
                    return
        raise AssertionError(f"{text!r} did not come: {self.lines}")


def on_their_way(lines: list[str]) -> str:
    return " ".join(line[2:] for line in lines if line.startswith("~ ") and line != "~ (gone)")


@pytest.mark.spec("DX-19")
async def test_without_a_terminal_each_thing_is_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    hold = folder / "hold"
    hold.write_text("bridge")
    async with Piped("chat.py", str(folder)) as shown:
        await shown.until("* nothing is under way")
        async with Piped("brain.py", str(folder), "--word", SPEED) as brain:
            await brain.until("is up")
            shown.type("Plan a day in Cork")
            await shown.until("So first the old town and the", words=True)
        assert on_their_way(shown.lines).endswith("So first the old town and the")
        async with Piped("brain.py", str(folder), "--word", SPEED) as brain:
            await shown.until("~ (gone)")
            hold.unlink()
            await shown.until("agent: The morning")
            await shown.until("? book_train")
            shown.type("y")
            await shown.until("agent: The train is booked. Enjoy Cork!")
            await shown.until("* nothing is under way")
        after = shown.lines[shown.lines.index("~ (gone)") :]
        assert on_their_way(after).startswith("The morning stays dry and the rain comes after lunch.")
        assert facts(shown.lines) == facts(await page(folder))


def test_the_links_of_the_readme_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)

    assert targets and [target for target in targets if not (CHAT / target).exists()] == []


def test_the_readme_has_its_trials() -> None:
    assert len(NAMES) == TRIALS
    assert all(trials().values())
    wanted = ["brain is killed in the middle", "page is closed in the middle", "page is killed right after"]
    wanted += ["Approved after a restart of both", "Paused, killed, resumed", "Steered", "killed while two tools run"]
    assert [one for one in wanted if not any(one in name for name in NAMES)] == []
    assert "kill -9" in README and "Ctrl+C" in README
