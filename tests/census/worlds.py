"""What the census runs: the same story told by two agents, and what is known of it outside the product.

A world is a folder: the store (or its schema in PostgreSQL), a ledger of effects, a ledger of what the client was told.
It can be opened again by any process, and every client action in it carries its request id, so that a new process just
tells the story again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import ExecutionKind, ReplayRule, TurnStatus, WaitKind
from agentscope_durable.contracts.views import TurnView
from agentscope_durable.runtime.handles import DurableSession, DurableTurn
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.executor import Executor
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import (
    ScriptedHarness,
    approval,
    external,
    final,
    local,
    say,
    together,
)
from tests.census.job_executor import ENDLESS, SLOW, JobExecutor
from tests.census.people import ROUTE, STEER, TOO_LATE, reconcile, standing
from tests.servers.stores import schema_of

KEY = SessionKey("census", "session")
THREAD = "main"
SECONDS_MAX = 90.0
LEASE: Final = 1.0
"""Seconds until a killed host on PostgreSQL counts as gone: nothing but its lease tells, as on another machine."""
LARGE = 70_000
"""Characters of a result that does not stay in the records."""


class World(Protocol):
    """One agent, its folder, and its store: there, or in a PostgreSQL database if there is an address of one."""

    folder: Path
    dsn: str
    effects: EffectLedger
    told: EffectLedger

    def adapter(self) -> HarnessAdapter: ...

    def done(self) -> list[tuple[str, str]]:
        """(Turn id, call id) of every effect that happened."""
        ...

    def asked(self) -> Mapping[str, int] | None:
        """Message id to requests that reached the model; None when the ledger cannot tell."""
        ...

    def requests(self) -> int:
        """Requests that reached the model."""
        ...

    async def transcript(self, backend: SessionBackend) -> list[str]:
        """What is wrong with the agent's own conversation."""
        ...


class ScriptedWorld:
    """`ScriptedHarness`."""

    def __init__(self, folder: Path, dsn: str = "") -> None:
        self.folder = folder
        self.dsn = dsn
        self.effects = EffectLedger(folder / "effects")
        self.told = EffectLedger(folder / "told")

    def adapter(self) -> HarnessAdapter:
        return ScriptedHarness(
            {
                "investigate": [
                    together(local("look", rule=ReplayRule.SAFE), local("patch")),
                    together(external(ROUTE, "page"), external(ROUTE, SLOW)),
                    say("What I found so far."),
                    approval("restart"),
                    final("done, {inputs}"),
                ],
                "wait": [external(ROUTE, ENDLESS), final("never said")],
                "report": [local("dump", value="x" * LARGE), final("after {context}")],
            },
            ledger=self.effects,
        )

    def done(self) -> list[tuple[str, str]]:
        return [(line["turn"], line["call"]) for line in self.effects.lines() if line["name"] in ("tool", "effect")]

    def asked(self) -> Mapping[str, int]:
        return Counter(line["message"] for line in self.effects.lines("model"))

    def requests(self) -> int:
        return self.effects.count("model")

    async def transcript(self, backend: SessionBackend) -> list[str]:
        del backend
        return []


# ------------------------------------------------------------ telling the story


def opening(world: World) -> Any:
    """The world's store, for `async with`."""
    if world.dsn:
        return PostgresBackend.open(world.dsn, schema=schema_of(world.folder), initialize_schema=True)
    return LocalBackend.open(world.folder)


@asynccontextmanager
async def host(world: World, **options: Any) -> AsyncIterator[tuple[DurableRuntime, SessionBackend]]:
    executors: dict[str, Executor] = {ROUTE: JobExecutor(world.effects)}
    if world.dsn:
        options.setdefault("lease", LEASE)
    async with opening(world) as backend:
        runtime = DurableRuntime(
            backend=backend,
            harnesses=[Harness("census", "v1", world.adapter())],
            executors=executors,
            poll_interval=0.05,
            **options,
        )
        async with runtime:
            yield runtime, backend


async def tell(world: World) -> None:
    """The whole story. Told again by another process, it goes on where the former one was killed."""
    async with asyncio.timeout(SECONDS_MAX), host(world) as (runtime, backend):
        session = await runtime.create_session(KEY, "census")
        await runtime.start()
        turns = {name: await _submit(world, session, name) for name in ("investigate", "wait", "report")}
        async with session.stream_events() as events:
            while True:
                views = {name: await turn.status() for name, turn in turns.items()}
                if all(view.status.terminal for view in views.values()):
                    break
                for name, view in views.items():
                    await _act(world, backend, turns[name], view)
                await anext(events)


async def _submit(world: World, session: DurableSession, name: str) -> DurableTurn:
    turn = await session.submit(f"submit-{name}", name)
    world.told.append("submitted", request=f"submit-{name}", turn=turn.turn_id)
    return turn


async def _act(world: World, backend: SessionBackend, turn: DurableTurn, view: TurnView) -> None:
    """What people do when they see the Turn like this. Each act has its own request id, so repeating it is nothing."""
    for waiting in view.waiting_on:
        match waiting.kind:
            case WaitKind.APPROVAL:
                # Before the answer: so every telling steers the same Turn at the same place.
                await _ignoring_late(turn.steer("steer", STEER))
                await _ignoring_late(turn.respond(f"answer-{waiting.id}", waiting.id, True))
            case WaitKind.TOOL_UNKNOWN:
                await _ignoring_late(reconcile(backend, turn, waiting.call_id or "", world.done()))
            case _:
                pass
    if view.request_id == "submit-wait" and not view.cancel_requested:
        calls = await turn.list_tools()
        if any(call.kind is ExecutionKind.EXTERNAL and call.state.value == "RUNNING" for call in calls):
            await _ignoring_late(turn.cancel("cancel"))


async def _ignoring_late(act: Any) -> None:
    with suppress(*TOO_LATE):
        await act


# ------------------------------------------------------------ judging it


async def judge(world: World) -> list[str]:
    """S1 to S5 and P4, read by a process that ran nothing of it; [] when all hold."""
    async with opening(world) as backend:
        acknowledged = {line["request"]: line["turn"] for line in world.told.lines()}
        wrong = [
            *await standing(backend, KEY, acknowledged, world.done(), world.asked()),
            *await world.transcript(backend),
        ]
        async with DurableRuntime(backend=backend) as runtime:
            session = runtime.get_session(KEY)
            recorded = 0
            for name, turn_id in acknowledged.items():
                turn = session.get_turn(turn_id)
                view = await turn.status()
                for run in await turn.list_runs():
                    recorded += sum(len(call.requests) for call in await turn.list_model_calls(run.run_id))
                expected = {TurnStatus.COMPLETED}
                if name == "submit-wait":
                    # Killed before the endless tool began, it never begins, and the Turn may end before the cancel.
                    began = turn_id in [turn for turn, _ in world.done()]
                    expected = {TurnStatus.CANCELLED} if began else {TurnStatus.CANCELLED, TurnStatus.COMPLETED}
                if view.status not in expected:
                    wrong.append(f"{name} is {view.status}: {view}")
                elif name == "submit-investigate":
                    answer = str(await turn.result())
                    if STEER not in answer:
                        wrong.append(f"the steer is lost: {answer!r}")
            if world.requests() > recorded:
                wrong.append(f"P4: {world.requests()} requests reached the model and {recorded} are on record")
        return wrong
