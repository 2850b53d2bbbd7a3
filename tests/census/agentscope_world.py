"""The census's story told by a real AgentScope agent with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Whatever an agent needs is imported before the first fork, not in every child.
import agentscope.agent
import agentscope.event
import agentscope.middleware  # noqa: F401
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter, current_origin
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.journal import JournalBatch
from agentscope_durable.contracts.records import ThreadRecord, decode
from agentscope_durable.journal.checkpoint import fold, to_state_json
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.harness import HarnessAdapter
from agentscope_durable.spi.record_store import Reads, StreamRange
from agentscope_durable.testing.census import transcript_valid
from agentscope_durable.testing.kit.play import provider_form
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import (
    MODEL_REQUEST,
    Answer,
    Call,
    Text,
    rounds_so_far,
    scripted_model,
)
from tests.census.job_executor import ENDLESS, SLOW
from tests.census.people import ROUTE, STEER
from tests.census.worlds import KEY, LARGE, THREAD

TASKS: dict[str, list[Answer]] = {
    "investigate": [
        [Text("I look at it."), Call("look"), Call("patch")],
        [Call("page"), Call(SLOW)],
        [Text("I ask."), Call("restart")],
        "done",
    ],
    "wait": [[Call(ENDLESS)], "never said"],
    "report": [[Call("dump")], "reported"],
}


class AgentScopeWorld:
    """An AgentScope agent; every request checks what the model is given as a provider would."""

    def __init__(self, folder: Path, dsn: str = "") -> None:
        self.folder = folder
        self.dsn = dsn
        self.effects = EffectLedger(folder / "effects")
        self.told = EffectLedger(folder / "told")
        self._complaints = EffectLedger(folder / "complaints")
        self._model = EffectLedger(folder / "model.jsonl")

    def adapter(self) -> HarnessAdapter:
        return AgentScopeAdapter.for_react(self._make_agent, dict.fromkeys(("page", SLOW, ENDLESS), ROUTE))

    def _make_agent(self, _binding: Any) -> AgentBuilder:
        allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="ok")

        def effect(name: str, value: str = "ok") -> Any:
            def perform() -> str:
                origin = current_origin()
                assert origin is not None
                self.effects.append("tool", turn=origin.turn_id, call=origin.call_id, tool=name)
                return value

            perform.__name__ = name
            perform.__doc__ = f"Do {name}."
            return perform

        return AgentBuilder(
            name="agent",
            system_prompt="Work.",
            model=scripted_model(self._answer, ledger=self._model),
            toolkit=Toolkit(
                tools=[
                    FunctionTool(effect("look"), is_read_only=True, permission=allowed),
                    FunctionTool(effect("patch"), permission=allowed),
                    FunctionTool(effect("restart")),
                    FunctionTool(effect("dump", "x" * LARGE), permission=allowed),
                    *(FunctionTool(effect(name), permission=allowed) for name in ("page", SLOW, ENDLESS)),
                ]
            ),
        )

    def _answer(self, messages: list[Any], _tools: Any, _choice: Any, n: int) -> Answer:
        for complaint in transcript_valid(provider_form(messages)):
            self._complaints.append("complaint", request=n, what=complaint)
        said = [(place, message.get_text_content()) for place, message in enumerate(messages) if message.role == "user"]
        place, task = next((place, text) for place, text in reversed(said) if text in TASKS)
        answers = TASKS[task]
        answer = answers[min(rounds_so_far(messages[place:]), len(answers) - 1)]
        steered = any(text == STEER for _, text in said)
        return f"done, {STEER}" if answer == "done" and steered else answer

    def done(self) -> list[tuple[str, str]]:
        return [(line["turn"], line["call"]) for line in self.effects.lines() if line["name"] in ("tool", "effect")]

    def asked(self) -> Mapping[str, int] | None:
        return None

    def requests(self) -> int:
        return self._model.count(MODEL_REQUEST)

    async def transcript(self, backend: SessionBackend) -> list[str]:
        """The conversation as the model was given it each time, and as it was stored at each position (C08)."""
        wrong = [f"request {line['request']}: {line['what']}" for line in self._complaints.lines()]
        contexts = await stored_contexts(backend, KEY, THREAD)
        for number, context in enumerate(contexts):
            problems = transcript_valid(provider_form(context))
            if number < len(contexts) - 1:
                # On the way a call may wait for its result; a result never waits for its call.
                problems = [problem for problem in problems if "ends without" not in problem]
            wrong += [f"stored context {number}: {problem}" for problem in problems]
        return wrong


async def stored_contexts(backend: Any, session: SessionKey, thread_id: str) -> list[list[Any]]:
    """The agent's messages at each position at which they were stored, from the last base on."""
    partition, key = keys.partition(session), keys.thread(thread_id)
    records = await backend.records.read(partition, Reads(keys=(key,)))
    thread = decode(ThreadRecord, records.keys[key])
    wanted = StreamRange(thread_id, thread.base_at, thread.checkpoint_at)
    rows = (await backend.records.read(partition, Reads(streams=(wanted,)))).streams[wanted]
    batches: list[tuple[int, JournalBatch]] = []
    found: list[list[Any]] = []
    for row in rows:
        if row.journal:
            body = await backend._bodies.open_column(session, row.journal)
            batches.append((row.at, JournalBatch.decode(body, position=row.at)))
            state = fold(batches)
            if state.base_at is not None:
                found.append(json.loads(to_state_json(state))["context"])
    return found
