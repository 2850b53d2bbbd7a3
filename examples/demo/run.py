"""A Turn that survives `kill -9`, told in the terminal.

    python examples/demo/run.py                          the story: two kills, at two chosen places
    python examples/demo/run.py --kills random --seed 7  kills at any failpoint; the seed says which

This process never runs the agent. It submits, steers, answers, kills and watches; the agent runs in processes of its
own, one after the other, and all they share is a folder. The exit code is 0 if every row of the proof holds.

With DURABLE_MODEL_BASE_URL, DURABLE_MODEL_API_KEY and DURABLE_MODEL in the environment the agent uses that
OpenAI-compatible endpoint instead of the scripted model.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import incident
from crew import Brain, Crew
from proof import REQUEST, Proof, prove, said
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from agentscope_durable import (
    Committed,
    Conflict,
    Definition,
    DurableRuntime,
    DurableSession,
    DurableTurn,
    LocalBackend,
    PublicEvent,
    Terminal,
    TurnView,
    Waiting,
    WaitKind,
)
from agentscope_durable.adapters.agentscope import STATE_VERSION
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import Cancelled, Succeeded

SECONDS_MAX = 60.0
POLL = 0.05
KILL_AFTER_CHARS = 80
"""The first kill falls when this much of one answer was shown."""
KILLS_MAX = 3
SIDES = ("before", "after")
PASSES = {
    "store.commit": 24,
    "store.renew": 1,
    "store.release": 1,
    "model.request": 4,
    "tool.local": 2,
    "executor.start": 1,
    "executor.query": 1,
}
"""How often a process passes each failpoint here: a random kill falls at one of them, before or after."""
PLACES = [f"{name}.{side}:{nth + 1}" for name, passes in PASSES.items() for nth in range(passes) for side in SIDES]

TOLD = {
    "turn.status": ("turn", "bold"),
    "run.started": ("run begins", "cyan"),
    "run.ended": ("run ends", "cyan"),
    "message.completed": ("answer stored", "green"),
    "message.abandoned": ("words withdrawn", "yellow"),
    "tool.requested": ("tool asked for", "blue"),
    "tool.started": ("tool starts", "blue"),
    "tool.completed": ("tool has result", "blue"),
    "tool.unknown": ("tool unknown", "bold yellow"),
    "tool.applied": ("result applied", "blue"),
    "interaction.requested": ("question", "magenta"),
    "signal.applied": ("input applied", "magenta"),
}
"""Facts that the narrator tells: what they are called here, and their colour."""


class Narrator:
    """Lines with the time they were told, and the model's words while they come."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console = console
        self._quiet = quiet
        self._started = time.monotonic()
        self._typing = False

    def say(self, what: str, text: str, style: str = "") -> None:
        if self._quiet:
            return
        self._line()
        seconds = time.monotonic() - self._started
        line = f"[dim]{seconds:6.2f}[/dim]  [{style or 'default'}]{what:<15}[/] {escape(text)}"
        self._console.print(line, highlight=False, no_wrap=True, overflow="ellipsis")

    def type(self, text: str, *, first: bool) -> None:
        """A piece of an answer that is not a fact yet."""
        if self._quiet:
            return
        if first or not self._typing:
            self._line()
            self._console.print(f"{'':6}  [dim]{'model types':<15}[/] ", end="", highlight=False)
        self._typing = True
        self._console.print(escape(text), end="", style="dim italic", highlight=False)

    def show(self, thing: Any) -> None:
        if not self._quiet:
            self._line()
            self._console.print(thing)

    def _line(self) -> None:
        if self._typing:
            self._console.print()
        self._typing = False


def _shown(told: Mapping[str, Any]) -> int:
    """Characters of this answer that were shown so far."""
    return told["offset"] + len(told["text"])


class Story:
    """One Turn, from the alarm to the answer, with everything that is done to it on the way."""

    def __init__(self, narrator: Narrator, crew: Crew, folder: Path, *, seed: int | None) -> None:
        self._narrator = narrator
        self._crew = crew
        self._folder = folder
        self._seed = seed
        self._scripted = not os.environ.get("DURABLE_MODEL_BASE_URL")
        self._ledger = incident.ledger_in(folder)
        self._kills: list[str] = []
        self._brain: Brain | None = None

    # ---- the whole ----

    async def play(self) -> Proof:
        async with LocalBackend.open(self._folder / "store") as backend:
            definition = Definition(incident.DEFINITION, incident.VERSION, STATE_VERSION)
            # An API host: it admits, reads and steers, and runs nothing.
            async with DurableRuntime(backend=backend, definitions=[definition], poll_interval=POLL) as runtime:
                session = await runtime.create_session(incident.KEY, incident.DEFINITION)
                turn = await session.submit(REQUEST, incident.QUESTION)
                self._narrator.say("you", incident.QUESTION, "bold green")
                self._narrator.say("store", f"Turn {turn.turn_id} is admitted; nobody runs it yet", "dim")
                others = [asyncio.create_task(self._watch(session)), asyncio.create_task(self._people(backend, turn))]
                try:
                    async with asyncio.timeout(SECONDS_MAX):
                        await (self._told(turn) if self._seed is None else self._random(turn))
                        await asyncio.sleep(2 * POLL)  # Let the narrator tell the last facts.
                finally:
                    for task in others:
                        task.cancel()
                    await asyncio.gather(*others, return_exceptions=True)
                return await prove(backend, session, turn, self._ledger, kills=self._kills, scripted=self._scripted)

    # ---- the kills ----

    async def _told(self, turn: DurableTurn) -> None:
        """Two kills, where it hurts most."""
        brain = await self._hire()
        if await self._until(brain, lambda told: told["kind"] == "delta" and _shown(told) >= KILL_AFTER_CHARS):
            await self._kill(brain, "in the middle of the model's answer")
            brain = await self._hire(hold=True)
            if await self._until(brain, lambda told: told["kind"] == "held"):
                between = [
                    t for t in await turn.list_tools() if t.received_at_ms is not None and t.applied_at_ms is None
                ]
                assert between, "no tool has a result that is not applied"
                await self._kill(brain, "between a tool's result and its application")
                brain = await self._hire()
        await self._until(brain, lambda told: False)

    async def _random(self, turn: DurableTurn) -> None:
        chance = random.Random(self._seed)
        for _ in range(chance.randint(1, KILLS_MAX)):
            place = chance.choice(PLACES)
            brain = await self._hire(failpoint=place)
            await self._until(brain, lambda told: False)
            if brain.killed_by:
                self._kills.append(place)
                self._narrator.say("✗ kill -9", f"process {brain.pid}, at {place}", "bold red")
            if (await turn.status()).status.terminal:
                return
        await self._until(await self._hire(), lambda told: False)

    async def _hire(self, *, hold: bool = False, failpoint: str = "") -> Brain:
        slow = self._seed is None
        brain = await self._crew.hire(
            {
                "folder": str(self._folder),
                "hold": hold,
                "failpoint": failpoint,
                "delay": 0.04 if slow else 0.0,
                "pause": 1.0 if slow else 0.01,
                "poll": POLL,
            }
        )
        self._narrator.say("process", f"{brain.pid} starts", "cyan")
        self._brain = brain
        return brain

    async def _kill(self, brain: Brain, where: str) -> None:
        brain.kill()
        await brain.ended.wait()
        self._kills.append(where)
        self._narrator.say("✗ kill -9", f"process {brain.pid}, {where}", "bold red")

    async def _until(self, brain: Brain, found: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Hear the brain until it tells what is looked for. False: it has ended before."""
        async for told in brain.words():
            self._hear(told)
            if found(told):
                return True
        return False

    def _hear(self, told: Mapping[str, Any]) -> None:
        if told["kind"] == "delta":
            self._narrator.type(told["text"], first=told["offset"] == 0)

    # ---- the people ----

    async def _people(self, backend: LocalBackend, turn: DurableTurn) -> None:
        """Whoever is on call: steers once, answers what is asked, settles by evidence what nobody can know."""
        while True:
            view = await turn.status()
            if view.status.terminal and self._brain is not None:
                # Its work is done: it closes politely, and what waits for its words goes on.
                await self._brain.stop()
            for waiting in view.waiting_on:
                with suppress(Conflict, Terminal):
                    await self._act(backend, turn, view, waiting)
            await asyncio.sleep(POLL)

    async def _act(self, backend: LocalBackend, turn: DurableTurn, view: TurnView, waiting: Waiting) -> None:
        if waiting.kind in (WaitKind.TOOL_RUNNING, WaitKind.APPROVAL) and not await self._steered(turn):
            await turn.steer("steer-1", incident.STEER)
            self._narrator.say("you", incident.STEER, "bold green")
        if waiting.kind is WaitKind.APPROVAL:
            if self._seed is None:
                await asyncio.sleep(0.6)  # Time to read the question.
            await turn.respond(f"answer-{waiting.id}", waiting.id, True)
            self._narrator.say("you", "approved", "bold green")
        if waiting.kind is WaitKind.TOOL_UNKNOWN and waiting.call_id is not None:
            await self._settle(backend, turn, waiting.call_id)

    async def _steered(self, turn: DurableTurn) -> bool:
        return "steer-1" in (await turn.snapshot()).projection.signals

    async def _settle(self, backend: LocalBackend, turn: DurableTurn, call_id: str) -> None:
        """A process died while a tool ran that must not run twice: look outside, and say what is there."""
        name = next(tool.name for tool in await turn.list_tools() if tool.call_id == call_id)
        seen = [line for line in self._ledger.lines() if line["name"] == incident.EFFECT and line["tool"] == name]
        result = Succeeded(value="it was done, the ledger says") if seen else Cancelled("it was not done")
        await HostOperations(backend).reconcile_tool(
            turn, call_id, request_id=f"evidence-{call_id}", result=result, evidence_ref="ledger.jsonl"
        )
        self._narrator.say("operator", f"{name}: {'done' if seen else 'not done'}, the ledger says", "bold yellow")

    # ---- what everyone can see ----

    async def _watch(self, session: DurableSession) -> None:
        async with session.stream_events() as events:
            async for event in events:
                if isinstance(event, Committed):
                    self._tell(event.event)

    def _tell(self, event: PublicEvent) -> None:
        if event.type in TOLD and event.data.get("role") != "user":
            what, style = TOLD[event.type]
            self._narrator.say(what, said(event), style)


# ------------------------------------------------------------ the command


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A Turn that survives kill -9.")
    parser.add_argument("--kills", choices=("story", "random"), default="story", help="where to kill; default: story")
    parser.add_argument("--seed", type=int, default=None, help="of the random kills; default: a new one")
    parser.add_argument("--runs", type=int, default=1, help="random kills: so many seeds, from --seed on")
    parser.add_argument("--directory", type=Path, default=Path(".demo"), help="emptied first; default: .demo")
    parser.add_argument("--quiet", action="store_true", help="only the proof")
    return parser.parse_args(given)


def fresh(folder: Path) -> Path:
    """The folder, empty. Only what this program wrote is removed."""
    if folder.exists() and any(folder.iterdir()) and not (folder / ".demo").exists():
        raise SystemExit(f"{folder} is not empty and not this program's; name another --directory")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / ".demo").touch()
    return folder


async def main(options: argparse.Namespace) -> int:
    console = Console()
    logging.getLogger().setLevel(logging.CRITICAL)
    chosen = options.kills == "random"
    first = options.seed if options.seed is not None else random.SystemRandom().randrange(1, 10_000)
    failed = 0
    async with Crew(nursery=chosen) as crew:
        for seed in range(first, first + options.runs) if chosen else (None,):
            title = "A Turn that survives kill -9" + ("" if seed is None else f" (random kills, seed {seed})")
            narrator = Narrator(console, quiet=options.quiet)
            narrator.show(Panel.fit(title, style="bold"))
            story = Story(narrator, crew, fresh(options.directory), seed=seed)
            proof = await story.play()
            if not options.quiet:
                console.print(proof.timeline_table())
            console.print(proof.table())
            for broken in proof.broken:
                console.print(f"[bold red]BROKEN[/] {escape(broken)}", highlight=False)
            if proof.broken and seed is not None:
                console.print(f"Again: python examples/demo/run.py --kills random --seed {seed}", highlight=False)
            failed += bool(proof.broken)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(arguments(sys.argv[1:]))))
