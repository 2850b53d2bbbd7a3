"""Tells a story once, in a process that may be killed on the way, and judges what is stored in the end."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from agentscope_durable import _failpoints
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import AlreadyDecided, InvalidTransition, NotFound, Terminal
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, TurnStatus, WaitKind
from agentscope_durable.contracts.views import ToolView, TurnView
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.executor import Executor
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.testing import census
from agentscope_durable.testing.kit import effects
from agentscope_durable.testing.kit.story import Story
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import MODEL_REQUEST, Answer, Script, scripted_model

__all__ = ["DEFINITION", "KEY", "World", "noting", "observe", "provider_form", "run", "tell", "verdict"]

KEY = SessionKey("durable-testing", "story")
DEFINITION = "agent"
POLL = 0.05
PEOPLE = frozenset(
    {WaitKind.TOOL_UNKNOWN, WaitKind.SIGNAL, WaitKind.OPERATOR, WaitKind.APPROVAL, WaitKind.EXTERNAL_RESULT}
)
"""What nobody but a person, or another program, ends; an external result only if it is a person's."""


class World:
    """Where a story is told: its agent, and what really happened outside the store.

    Args:
        folder: where that is kept if several processes take part; None: in this object.
    """

    def __init__(self, story: Story, folder: Path | None) -> None:
        self.story = story
        self.ledger = EffectLedger(folder and folder / "ledger")
        self.model = EffectLedger(folder and folder / "model")

    def harness(self, environment: Environment = SYSTEM) -> Harness:
        return Harness(DEFINITION, "v1", self._adapter(environment))

    def executors(self) -> Mapping[str, Executor]:
        return {} if self.story.executors is None else self.story.executors()

    def _adapter(self, environment: Environment) -> HarnessAdapter:
        if self.story.adapter is not None:
            return self.story.adapter(self._make_agent)
        from agentscope_durable.adapters.agentscope import AgentScopeAdapter

        return AgentScopeAdapter.for_react(self._make_agent, environment=environment)

    async def _make_agent(self, binding: Any) -> Any:
        assert self.story.make_agent is not None, "this story has no agent"
        made = self.story.make_agent(binding)
        builder = await made if inspect.isawaitable(made) else made
        if self.story.script is not None:
            model = scripted_model(self._checked(self.story.script), ledger=self.model, chunk_chars=None)
            builder.arguments["model"] = model
        return builder

    def _checked(self, script: Script) -> Script:
        """The script, which first looks at what the model is given, as a provider would (S3)."""

        def checked(messages: list[Any], tools: list[dict[str, Any]] | None, choice: Any, n: int) -> Answer:
            for complaint in census.transcript_valid(provider_form(messages)):
                self.ledger.append("complaint", request=n, what=complaint)
            return script(messages, tools, choice, n)

        return checked


# ------------------------------------------------------------ telling


@asynccontextmanager
async def _host(world: World, store: Path) -> AsyncGenerator[DurableRuntime, None]:
    async with (
        # NORMAL survives every kill of a process, and only the power is safer with FULL.
        LocalBackend.open(store, synchronous="NORMAL") as backend,
        DurableRuntime(
            backend=backend,
            harnesses=[world.harness()],
            executors=world.executors(),
            poll_interval=POLL,
        ) as runtime,
    ):
        yield runtime


async def _tell(world: World, store: Path) -> None:
    """The story in this process, which is host and client."""
    async with asyncio.timeout(world.story.seconds), _host(world, store) as runtime:
        await runtime.create_session(KEY, DEFINITION)
        await runtime.start()
        await tell(world, runtime)


async def tell(world: World, runtime: DurableRuntime) -> None:
    """Everything a client asks for, from the first request to the end, or to where only a person goes on.

    Told again by another process it goes on where the former one was killed: every request has an id.
    """
    session = await runtime.create_session(KEY, DEFINITION)
    turns: list[DurableTurn] = []
    for number, task in enumerate(world.story.tasks, 1):
        turn = await session.submit(f"task-{number}", task)
        world.ledger.append("submitted", request=f"task-{number}", turn=turn.turn_id)
        turns.append(turn)
    async with session.stream_events() as events:
        while not await _settled(world, turns):
            _ = await anext(events)


async def _settled(world: World, turns: Sequence[DurableTurn]) -> bool:
    """Whether the first Turn that has not ended waits for a person; the others wait for it."""
    for turn in turns:
        view = await turn.status()
        if view.status.terminal:
            continue
        return bool(view.waiting_on) and not await _answered(world, turn, view) and await _left_to_people(turn, view)
    return True


async def _answered(world: World, turn: DurableTurn, view: TurnView) -> bool:
    """Answer what asks for approval; False if nothing does."""
    asked = [waiting.id for waiting in view.waiting_on if waiting.kind is WaitKind.APPROVAL]
    if world.story.approve is None:
        return False
    for interaction_id in asked:
        # The Turn may have moved on between the look and the answer; that is no fault of either.
        with suppress(AlreadyDecided, InvalidTransition, NotFound, Terminal):
            _ = await turn.respond(f"answer-{interaction_id}", interaction_id, world.story.approve)
    return bool(asked)


async def _left_to_people(turn: DurableTurn, view: TurnView) -> bool:
    kinds = {waiting.kind for waiting in view.waiting_on}
    if not kinds <= PEOPLE:
        return False
    # What an executor does ends by itself; what is asked of a person does not.
    return WaitKind.EXTERNAL_RESULT not in kinds or all(
        tool.kind is ExecutionKind.MANUAL or tool.state.terminal for tool in await turn.list_tools()
    )


# ------------------------------------------------------------ what came of it


async def _verdict(world: World, store: Path) -> dict[str, Any]:
    async with LocalBackend.open(store, synchronous="NORMAL") as backend:
        return await verdict(world, backend)


async def verdict(world: World, backend: SessionBackend) -> dict[str, Any]:
    """The standing checks (S1 to S5, P4), and what a telling without a kill is compared with."""
    lines = world.ledger.lines()
    submitted = {line["request"]: line["turn"] for line in lines if line["name"] == "submitted"}
    wrong = [
        *await census.submits_once(backend, KEY, submitted),
        *await census.calls_answered(backend, KEY),
        *await census.replay_agrees(backend, KEY),
        *await census.nothing_stuck(backend, KEY),
        *await census.answers_once(backend, KEY),
        *(f"the model was given {line['what']}" for line in lines if line["name"] == "complaint"),
    ]
    async with DurableRuntime(backend=backend) as runtime:
        session = runtime.get_session(KEY)
        turns = [await _turn(session.get_turn(turn_id)) for turn_id in submitted.values()]
    recorded = sum(turn.pop("requests") for turn in turns)
    if (asked := world.model.count(MODEL_REQUEST)) > recorded:
        wrong.append(f"P4: {asked} requests reached the model and {recorded} are on record")
    happened = [line for line in lines if line["name"] in ("effect", "started")]
    return {"wrong": wrong, "turns": turns, "effects": happened}


async def _turn(turn: DurableTurn) -> dict[str, Any]:
    view = await turn.status()
    requests = 0
    for run in await turn.list_runs():
        requests += sum(len(call.requests) for call in await turn.list_model_calls(run.run_id))
    answer = str(await turn.result()) if view.status is TurnStatus.COMPLETED else None
    waiting = [{"kind": str(one.kind), "call": one.call_id, "next": str(one.next_action)} for one in view.waiting_on]
    return {
        "turn": turn.turn_id,
        "status": str(view.status),
        "error": None if view.error is None else msgspec.to_builtins(view.error),
        "answer": answer,
        "waiting": waiting,
        "tools": [_tool(tool) for tool in await turn.list_tools()],
        "requests": requests,
    }


def _tool(tool: ToolView) -> dict[str, Any]:
    return {
        "call": tool.call_id,
        "name": tool.name,
        "kind": str(tool.kind),
        "state": str(tool.state),
        "unknown": tool.state is ExecutionState.UNKNOWN,
        "result": _lasting(msgspec.to_builtins(tool.result)),
    }


def _lasting(result: Any) -> Any:
    """A result without what differs each time: AgentScope gives every block an id and the time it was made."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        passing = {"id", "created_at", "finished_at"}
        content = [
            {name: value for name, value in block.items() if name not in passing} if isinstance(block, dict) else block
            for block in result["content"]
        ]
        return {**result, "content": content}
    return result


# ------------------------------------------------------------ one process


def run(module: Any, job: Mapping[str, Any]) -> None:
    """What a process is started for: `{"story": name in the module, "folder": ..., "kill": "name:nth" or ""}`.

    If it is not killed it leaves the file `verdict`, with the failpoints it passed.
    """
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    world, store = World(getattr(module, job["story"]), folder), folder / "store"
    effects.record_in(world.ledger)
    passed: list[str] = []
    observe(noting(passed, world.ledger))
    if job["kill"]:
        name, _, nth = job["kill"].partition(":")
        if name in (effects.BEFORE, effects.AFTER):
            effects.arm(name, int(nth))
        else:
            _failpoints.arm(name, nth=int(nth))
    asyncio.run(_tell(world, store))
    _failpoints.disarm()
    observe(None)
    found = asyncio.run(_verdict(world, store))
    _ = (folder / "verdict").write_text(json.dumps({**found, "passed": passed, "pid": os.getpid()}), encoding="utf-8")


def observe(observer: Callable[[str], None] | None) -> None:
    _failpoints.observe(observer)
    effects.observe(observer)


def noting(passed: list[str], ledger: EffectLedger) -> Callable[[str], None]:
    """Notes every failpoint, and of a local tool that it is about to begin."""
    from agentscope_durable.adapters.agentscope import current_origin

    def note(name: str) -> None:
        passed.append(name)
        if name == "tool.local.before" and (origin := current_origin()) is not None:
            ledger.append("started", turn=origin.turn_id, call=origin.call_id)

    return note


# ------------------------------------------------------------ what a provider sees


def provider_form(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages of AgentScope as a provider gets them: one for what was said and called, one for each result."""
    found: list[dict[str, Any]] = []
    for message in messages:
        plain = message if isinstance(message, Mapping) else message.model_dump(mode="json")
        content = plain["content"]
        if plain["role"] != "assistant" or isinstance(content, str):
            found.append({"role": plain["role"], "content": content})
            continue
        current: dict[str, Any] | None = None
        for block in content:
            if block["type"] == "tool_result":
                current = None
                found.append({"role": "tool", "tool_call_id": block["id"]})
            elif block["type"] == "hint":
                current = None
                found.append({"role": "user", "content": block.get("hint")})
            else:
                if current is None:
                    current = {"role": "assistant", "tool_calls": []}
                    found.append(current)
                if block["type"] == "tool_call":
                    current["tool_calls"].append({"id": block["id"]})
    return found
