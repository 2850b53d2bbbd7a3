"""What is told again and again, each time with one thing that fails: three Turns, their client, and what must hold.

The client is a good one: whatever is answered with `Retry` or `Unconfirmed` it asks again, with the same request id. So
a fault may cost time. Nothing acknowledged may be lost by it, nothing may be done twice, and every Turn ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from agentscope_durable.contracts.errors import Retry, RevisionConflict, Unconfirmed
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    ReplayRule,
    RunStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.contracts.views import TurnView
from agentscope_durable.runtime.definitions import Harness
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.environment import Environment
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, external, final, local, say, together
from tests.census.job_executor import ENDLESS, JobExecutor
from tests.census.people import ROUTE, STEER, TOO_LATE, reconcile, standing

KEY = SessionKey("faults", "session")
AGENT = "agent"
LOOK_SECONDS = 0.25
"""Between two looks of the client."""
ASK_SECONDS = 0.05
TRIES_MAX = 200
LOOKS_MAX = 10_000
"""More, and the story does not end."""

T = TypeVar("T")

SCRIPTS = {
    "work": [
        together(local("look", rule=ReplayRule.SAFE), local("patch")),
        external(ROUTE, "page"),
        approval("restart"),
        final("done, {inputs}"),
    ],
    "wait": [external(ROUTE, ENDLESS), final("never said")],
    "talk": [say("first"), final("second")],
}
"""By request: tools and an approval; a cancel of a tool under way; a pause that is lifted."""
EXPECTED = {"work": TurnStatus.COMPLETED, "wait": TurnStatus.CANCELLED, "talk": TurnStatus.COMPLETED}


class Account:
    """What happened outside of the product: effects, and what the client was told."""

    def __init__(self, effects: Iterable[str] = (), told: Iterable[str] = ()) -> None:
        self.effects = EffectLedger()
        self.told = EffectLedger()
        self.effects._kept.extend(effects)
        self.told._kept.extend(told)

    def copy(self) -> Account:
        """The account as it is now."""
        return Account(self.effects._kept, self.told._kept)

    def done(self) -> list[tuple[str, str]]:
        """(Turn id, call id) of every effect that happened."""
        return [(line["turn"], line["call"]) for line in self.effects.lines() if line["name"] in ("tool", "effect")]

    def acknowledged(self, what: str) -> set[str]:
        return {line["turn"] for line in self.told.lines(what)}


def runtime_of(account: Account, backend: SessionBackend, environment: Environment, **options: Any) -> DurableRuntime:
    """The one host of the story, which is its client as well."""
    return DurableRuntime(
        backend=backend,
        harnesses=[Harness(AGENT, "v1", ScriptedHarness(SCRIPTS, ledger=account.effects))],
        executors={ROUTE: JobExecutor(account.effects)},
        environment=environment,
        **options,
    )


class Client:
    """Tells the story. Told again by another process, it goes on where the former one ended."""

    def __init__(
        self,
        account: Account,
        runtime: DurableRuntime,
        backend: SessionBackend,
        environment: Environment,
        *,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._account = account
        self._runtime = runtime
        self._backend = backend
        self._environment = environment
        self._look_seconds = look_seconds
        self.reconciled = 0
        """Tool calls whose outcome the product could not tell."""

    async def sure(self, act: Callable[[], Awaitable[T]]) -> T:
        """Ask until it is answered: the same question, the same request id."""
        for _ in range(TRIES_MAX):
            try:
                return await act()
            except (Retry, Unconfirmed):
                await self._environment.sleep(ASK_SECONDS)
        raise AssertionError(f"no answer after {TRIES_MAX} tries")

    async def _late(self, what: str, turn: DurableTurn, act: Callable[[], Awaitable[object]]) -> None:
        """An act that may come too late: a Turn may have moved on since it was looked at."""
        with suppress(*TOO_LATE, RevisionConflict):
            await self.sure(act)
            self._account.told.append(what, turn=turn.turn_id)

    async def tell(self) -> None:
        session = await self.sure(lambda: self._runtime.create_session(KEY, AGENT))
        await self.sure(self._runtime.start)
        turns: dict[str, DurableTurn] = {}
        for name in SCRIPTS:
            turns[name] = turn = await self.sure(lambda name=name: session.submit(f"submit-{name}", name))
            self._account.told.append("submitted", request=f"submit-{name}", turn=turn.turn_id)
            if name == "talk":
                await self._late("paused", turn, lambda turn=turn: turn.pause("pause"))
        for _ in range(LOOKS_MAX):
            views = {name: await self.sure(turn.status) for name, turn in turns.items()}
            if all(view.status.terminal for view in views.values()):
                return
            for name, view in views.items():
                await self._act(turns[name], view)
            await self._environment.sleep(self._look_seconds)
        raise AssertionError(f"the story does not end: {views}")

    async def _act(self, turn: DurableTurn, view: TurnView) -> None:
        for waiting in view.waiting_on:
            match waiting.kind:
                case WaitKind.APPROVAL:
                    await self._late("steered", turn, lambda: turn.steer("steer", STEER))
                    await self._late("answered", turn, lambda w=waiting: turn.respond(f"answer-{w.id}", w.id, True))
                case WaitKind.TOOL_UNKNOWN:
                    call_id, done = waiting.call_id or "", self._account.done()
                    await self._late(
                        "reconciled",
                        turn,
                        lambda call_id=call_id, done=done: reconcile(self._backend, turn, call_id, done),
                    )
                    self.reconciled += 1
                case _:
                    pass
        if view.status is TurnStatus.PAUSED:
            await self._late("resumed", turn, lambda: turn.resume("resume", view.revision))
        if view.request_id == "submit-wait" and not view.cancel_requested and not view.status.terminal:
            calls = await self.sure(turn.list_tools)
            if any(call.kind is ExecutionKind.EXTERNAL and call.state is ExecutionState.RUNNING for call in calls):
                await self._late("cancelled", turn, lambda: turn.cancel("cancel"))


async def was_paused(turn: DurableTurn) -> bool:
    """By what is stored: a client may have lost the answer to its resume, and finds the Turn at work."""
    events = (await turn.list_events(limit=1000)).events
    return any(one.type == "turn.status" and one.data["turn"]["status"] == TurnStatus.PAUSED for one in events)


async def judge(account: Account, backend: SessionBackend) -> list[str]:
    """What does not hold, read from the store itself when the host is closed; [] when all does."""
    submitted = {line["request"]: line["turn"] for line in account.told.lines("submitted")}
    asked = Counter(line["message"] for line in account.effects.lines("model"))
    wrong = await standing(backend, KEY, submitted, account.done(), asked)
    async with DurableRuntime(backend=backend) as runtime:
        session = runtime.get_session(KEY)
        for name, expected in EXPECTED.items():
            turn = session.get_turn(submitted[f"submit-{name}"])
            view = await turn.status()
            if view.status is not expected:
                wrong.append(f"{name} is {view.status}: {view}")
                continue
            if turn.turn_id in account.acknowledged("steered") and STEER not in str(await turn.result()):
                wrong.append(f"the steer of {name} is lost: {await turn.result()!r}")
            if name == "work":
                happened = Counter(line["tool"] for line in account.effects.lines() if line.get("turn") == turn.turn_id)
                # What a host had begun that was lost before it was done: the client said so, or the executor.
                lost = any(run.status is RunStatus.LOST for run in (await turn.list_runs()).items)
                stopped = {line["execution"] for line in account.effects.lines("stop")}
                not_done = {
                    call.name
                    for call in await turn.list_tools()
                    if call.state is ExecutionState.CANCELLED and (lost or call.execution_id in stopped)
                }
                wrong += [
                    f"{tool} happened {happened[tool]} times"
                    for tool in ("patch", "page", "restart")
                    if not happened[tool] and tool not in not_done
                ]
            if name == "talk" and not await was_paused(turn):
                wrong.append("the pause that was acknowledged was never seen")
    return wrong
