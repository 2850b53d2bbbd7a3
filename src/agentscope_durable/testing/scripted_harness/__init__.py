"""A complete `HarnessAdapter` without an agent library: its "model" is a script.

It does everything a real adapter does (a native state in the journal, checkpoints, model requests, tool intents,
approvals, steering, previews, recovery from any commit, settlement) and each round says in data what to do, so a test
reads as a story. Use it to test a host, a store or a transport; it needs no network and no key.

    harness = ScriptedHarness([local("restart", unit="exporter"), final("done: {results}")])

Rule: the state changes in memory first and becomes true with the next commit; whatever was not committed is done
again by the next Run. Effects outside (a model request, a tool) are written to the ledger when they happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentscope_durable.contracts.commands import RunEnd
from agentscope_durable.contracts.errors import CorruptRecord, Incompatible
from agentscope_durable.contracts.journal import CheckpointRow
from agentscope_durable.contracts.status import EventDelivery, RecoveryBoundary
from agentscope_durable.spi.checkpoint import NativeBaseline
from agentscope_durable.spi.harness import HarnessCapabilities, RunContext, SettleContext, Settlement
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness._play import Play
from agentscope_durable.testing.scripted_harness._run import Props
from agentscope_durable.testing.scripted_harness._script import (
    Action,
    Call,
    Emit,
    Fail,
    Gates,
    Round,
    Stall,
    Wait,
    approval,
    external,
    final,
    local,
    manual,
    say,
    think,
    together,
)
from agentscope_durable.testing.scripted_harness._state import (
    PROGRAM,
    STATE_VERSION,
    WRITER,
    Program,
    State,
    owner_of,
    text_of,
    text_of_content,
)

__all__ = [
    "PROGRAM",
    "STATE_VERSION",
    "WRITER",
    "Action",
    "Call",
    "Emit",
    "Fail",
    "Gates",
    "Round",
    "ScriptedHarness",
    "Stall",
    "Wait",
    "approval",
    "external",
    "final",
    "local",
    "manual",
    "owner_of",
    "say",
    "think",
    "together",
]


class ScriptedHarness:
    """See the top of this file.

    Args:
        script: what every Turn does; or scripts by the text of the submitted input, "" for any other.
        ledger: where effects are written: `model <message id> <attempt>`, `tool <turn> <call> <name>`.
        gates: what `Stall`, a round or a tool waits for.
        tools: functions of local tools by name, called with the arguments as keywords.
    """

    def __init__(
        self,
        script: Sequence[Action] | Mapping[str, Sequence[Action]] = (),
        *,
        ledger: EffectLedger | None = None,
        gates: Gates | None = None,
        tools: Mapping[str, Callable[..., Any]] | None = None,
        writer: str = WRITER,
    ) -> None:
        self._scripts = dict(script) if isinstance(script, Mapping) else {"": script}
        self.ledger = ledger or EffectLedger()
        self.gates = gates or Gates()
        self.tools = dict(tools or {})
        self.writer = writer
        self.settled: list[str] = []

    @property
    def state_version(self) -> str:
        return STATE_VERSION

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(recovery=RecoveryBoundary.TOOL_BOUNDARY, delivery=EventDelivery.DELTA)

    @property
    def routes(self) -> frozenset[str]:
        return frozenset(
            call.route
            for script in self._scripts.values()
            for action in script
            if isinstance(action, Round)
            for call in action.calls
            if call.route
        )

    def accepts_writer(self, writer: str) -> bool:
        return writer in ("", self.writer)

    def script_for(self, text: str) -> Sequence[Action]:
        return self._scripts.get(text, self._scripts.get("", ()))

    async def run(self, context: RunContext) -> RunEnd | None:
        state = await State.load(context.start, await context.journal(), context.cache_get())
        props = Props(self.ledger, self.gates, self.tools, self.writer)
        script = self.script_for(text_of_content(context.start.input.content))
        end = await Play(props, script, context, state).play()
        context.cache_put(state, len(state.messages) * 200)
        return end

    async def settle(self, context: SettleContext) -> Settlement:
        start = context.start
        self.settled.append(start.turn_id)
        known = tuple(record.call_id for record in start.executions if record.state.terminal)
        rows = await context.journal()
        if not rows:
            return Settlement(applied=known)
        state = State.fold(rows)
        for record in start.executions:
            if record.state.terminal:
                text = await text_of(record, context.open_body)
                state.say("tool", f"{record.name}: {text}")
        if state.program.turn == start.turn_id:
            state.say("note", "cancelled" if start.cancelled else "failed")
            state.program = Program(commits=state.program.commits, owner=state.program.owner)
        batch = state.batch(start.position)
        return Settlement(journal=batch.encode(), checkpoint=True, base=batch.base, writer=self.writer, applied=known)

    @staticmethod
    def restore(baseline: NativeBaseline, /) -> tuple[CheckpointRow, ...]:
        """Needs no harness: `DurableRuntime(checkpoints={"agent": ScriptedHarness.restore})`."""
        if baseline.binding.state_version != STATE_VERSION:
            raise Incompatible(
                "a checkpoint of a scripted agent", required=baseline.binding.state_version, present=STATE_VERSION
            )
        try:
            state = State.fold(baseline.rows)
        except (ValueError, IndexError, KeyError) as error:  # a MsgspecError is a ValueError
            raise CorruptRecord("native state", "a scripted agent's state", str(error)) from error
        return state.baseline(owner_of(baseline.target))

    def classify(self, error: BaseException) -> bool | None:
        return None
