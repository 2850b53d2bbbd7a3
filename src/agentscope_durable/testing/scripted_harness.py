"""A complete `HarnessAdapter` without an agent library: its "model" is a script.

It does everything a real adapter does (a native state in the journal, checkpoints, model requests, tool intents,
approvals, steering, previews, recovery from any commit, settlement) and each round says in data what to do, so a test
reads as a story. Use it to test a host, a store or a transport; it needs no network and no key.

    harness = ScriptedHarness([local("restart", unit="exporter"), final("done: {results}")])

Rule: the state changes in memory first and becomes true with the next commit; whatever was not committed is done
again by the next Run. Effects outside (a model request, a tool) are written to the ledger when they happen.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, assert_never

import msgspec
from msgspec.structs import replace

from agentscope_durable import _failpoints
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import (
    CommitStep,
    CustomEvent,
    InteractionCommit,
    MessageOut,
    RunEnd,
    RunEndKind,
    StepReceipt,
    ToolCommit,
    WaitCondition,
)
from agentscope_durable.contracts.errors import Conflict, CorruptRecord, Incompatible, Unavailable
from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.journal import (
    Base,
    Block,
    CheckpointRow,
    Field,
    JournalBatch,
    JournalEntry,
    MessageMeta,
)
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.messages import Content, Text
from agentscope_durable.contracts.records import ExecutionRecord
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import (
    EventDelivery,
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ModelStatus,
    RecoveryBoundary,
    ReplayRule,
    StepPhase,
    StepStatus,
)
from agentscope_durable.domain import ids
from agentscope_durable.spi.boundary import stopped
from agentscope_durable.spi.checkpoint import NativeBaseline
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.executor import ToolError
from agentscope_durable.spi.harness import (
    HarnessCapabilities,
    JournalRow,
    OpenWorkView,
    RunContext,
    RunStart,
    SettleContext,
    Settlement,
)
from agentscope_durable.testing.ledger import EffectLedger

__all__ = [
    "STATE_VERSION",
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
    "say",
    "think",
    "together",
]

STATE_VERSION: Final = "scripted-1"
WRITER: Final = "scripted 1"
PROGRAM: Final = "program"
BASE_EVERY: Final = 50
"""Commits after which the whole state is written again."""


# ------------------------------------------------------------ the script: data


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of a round.

    Attributes:
        kind: `local`, `approval` (a local tool that asks first), `external` or `manual`.
        rule: replay rule of a local tool.
        value: what a local tool returns when the harness has no function of this name.
        gate: a local tool waits for this gate after its effect.
    """

    kind: str
    name: str
    arguments: dict[str, Any] = {}
    route: str = ""
    rule: ReplayRule = ReplayRule.NEVER
    value: Any = "ok"
    gate: str = ""


class Round(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="round"):
    """One request to the model and what it answers.

    `{inputs}` in the text becomes the steered and injected inputs of the Turn, `{results}` its tool results,
    `{context}` all the user has said in this Thread.

    Attributes:
        thinking: native reasoning, which stays private.
        gate: the answer is half streamed when the model waits for this gate.
        last: the Turn ends with this answer.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    gate: str = ""
    last: bool = False
    finish_reason: str = "completed"
    structured: Any = None


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="fail"):
    """Raise an error of this class in the first `runs` Runs of the Turn."""

    kind: str = "OSError"
    message: str = "scripted"
    runs: int = 1_000_000


class Stall(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="stall"):
    """Wait for a gate; a disobedient one does not look at `stop` meanwhile."""

    gate: str
    obedient: bool = True


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="wait"):
    """Park until a signal comes, or until a store time in ms (0: for the signal only)."""

    key: str
    deadline_ms: int = 0


class Emit(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="emit"):
    """Commit an application event `x.*`."""

    type: str
    value: dict[str, Any] = {}


Action = Round | Fail | Stall | Wait | Emit
"""What the agent does next. A script that ends without a last round answers "done"."""


def say(text: str, *, gate: str = "") -> Round:
    return Round(text=text, gate=gate)


def think(text: str) -> Round:
    return Round(thinking=text)


def final(text: str = "done", *, gate: str = "", finish_reason: str = "completed", structured: Any = None) -> Round:
    return Round(text=text, gate=gate, finish_reason=finish_reason, structured=structured, last=True)


def together(*rounds: Round) -> Round:
    """One round with the calls of all of these."""
    return Round(calls=tuple(call for one in rounds for call in one.calls))


def local(
    name: str, *, rule: ReplayRule = ReplayRule.NEVER, value: Any = "ok", gate: str = "", **arguments: Any
) -> Round:
    return Round(calls=(Call(kind="local", name=name, arguments=arguments, rule=rule, value=value, gate=gate),))


def approval(name: str, *, value: Any = "ok", **arguments: Any) -> Round:
    return Round(calls=(Call(kind="approval", name=name, arguments=arguments, value=value),))


def external(route: str, name: str, **arguments: Any) -> Round:
    return Round(calls=(Call(kind="external", route=route, name=name, arguments=arguments),))


def manual(name: str, **arguments: Any) -> Round:
    return Round(calls=(Call(kind="manual", name=name, arguments=arguments),))


# ------------------------------------------------------------ the native state


class _OpenCall(msgspec.Struct):
    """A call of the present round, as the agent knows it: new, asked, running, sent or done.

    Attributes:
        edited: arguments it was approved with, if they are not the model's.
    """

    id: str
    at: int
    state: str = "new"
    edited: dict[str, Any] | None = None


class _Program(msgspec.Struct):
    """Where the agent stands. `phase` is `next`, `asked` (the model), `acting`, `waiting` (for a signal) or
    `answered` (the last answer is stored, the Turn has not ended). `owner` is the Thread whose state it is."""

    turn: str = ""
    at: int = 0
    phase: str = "next"
    round: int = 0
    attempt: int = 0
    calls: list[_OpenCall] = []
    inputs: list[str] = []
    results: list[str] = []
    commits: int = 0
    owner: str = ""


class _Message(msgspec.Struct, frozen=True):
    role: str
    text: str


class Gates:
    """Doors that a test opens. With a directory they work across processes: an open gate is a file there."""

    def __init__(self, directory: Path | str | None = None, *, environment: Environment = SYSTEM) -> None:
        self._directory = None if directory is None else Path(directory)
        self._environment = environment
        self._events: dict[str, asyncio.Event] = {}
        self._reached: dict[str, asyncio.Event] = {}

    def open(self, name: str) -> None:
        self._event(self._events, name).set()
        if self._directory is not None:
            (self._directory / f"{name}.open").touch()

    def close(self, name: str) -> None:
        self._event(self._events, name).clear()

    async def reached(self, name: str) -> None:
        """Wait until someone has come to the gate."""
        await self._event(self._reached, name).wait()

    def forget(self, name: str) -> None:
        """`reached` waits for the next one who comes."""
        self._event(self._reached, name).clear()

    async def passed(self, name: str) -> None:
        self._event(self._reached, name).set()
        if self._directory is None:
            await self._event(self._events, name).wait()
            return
        (self._directory / f"{name}.reached").touch()
        while not (self._directory / f"{name}.open").exists():
            await self._environment.sleep(0.01)

    @staticmethod
    def _event(events: dict[str, asyncio.Event], name: str) -> asyncio.Event:
        return events.setdefault(name, asyncio.Event())


_ERRORS: Final[dict[str, Callable[[str], Exception]]] = {
    "OSError": OSError,
    "TimeoutError": TimeoutError,
    "ValueError": ValueError,
    "RuntimeError": RuntimeError,
    "Unavailable": Unavailable,
    "Conflict": Conflict,
    "Incompatible": lambda text: Incompatible(text, required="another host", present="this one"),
    "Group": lambda text: ExceptionGroup(text, [OSError(text), TimeoutError(text)]),
    "MixedGroup": lambda text: ExceptionGroup(text, [OSError(text), ValueError(text)]),
}


# ------------------------------------------------------------ the adapter


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
        state = await _State.load(context.start, await context.journal(), context.cache_get())
        end = await _Play(self, context, state).play()
        context.cache_put(state, len(state.messages) * 200)
        return end

    async def settle(self, context: SettleContext) -> Settlement:
        start = context.start
        self.settled.append(start.turn_id)
        known = tuple(record.call_id for record in start.executions if record.state.terminal)
        rows = await context.journal()
        if not rows:
            return Settlement(applied=known)
        state = _State.fold(rows)
        for record in start.executions:
            if record.state.terminal:
                text = await _text_of(record, context.open_body)
                state.say("tool", f"{record.name}: {text}")
        if state.program.turn == start.turn_id:
            state.say("note", "cancelled" if start.cancelled else "failed")
            state.program = _Program(commits=state.program.commits, owner=state.program.owner)
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
            state = _State.fold(baseline.rows)
        except (ValueError, IndexError, KeyError) as error:  # a MsgspecError is a ValueError
            raise CorruptRecord("native state", "a scripted agent's state", str(error)) from error
        return state.baseline(owner_of(baseline.target))

    def classify(self, error: BaseException) -> bool | None:
        return None


def owner_of(thread: ThreadKey) -> str:
    """What the state of a scripted agent calls its Thread."""
    return f"{thread.session.namespace}/{thread.session.session_id}/{thread.thread_id}"


class _State:
    """The native state: messages and program, and which of it is stored already."""

    def __init__(self) -> None:
        self.program = _Program()
        self.messages: list[_Message] = []
        self._stored = 0
        self._has_base = False

    @staticmethod
    async def load(start: RunStart, rows: list[JournalRow], cached: object) -> _State:
        state = cached if isinstance(cached, _State) else _State.fold(rows)
        if state.program.turn != start.turn_id:
            owner = state.program.owner or owner_of(ThreadKey(start.session, start.thread_id))
            state.program = _Program(turn=start.turn_id, commits=state.program.commits, owner=owner)
            state.say("user", _text(start.input.content))
        return state

    @staticmethod
    def fold(rows: Sequence[JournalRow]) -> _State:
        state = _State()
        for row in rows:
            for part in JournalBatch.decode(row.journal, position=row.at).checkpoint:
                match part:
                    case Base():
                        state.messages.clear()
                        state._has_base = True
                    case Field(name=name, json=json) if name == PROGRAM:
                        state.program = msgspec.json.decode(json, type=_Program)
                    case MessageMeta(meta=meta):
                        state.messages.append(_Message(msgspec.json.decode(meta)["role"], ""))
                    case Block(i=i, json=json):
                        state.messages[i] = replace(state.messages[i], text=msgspec.json.decode(json)["text"])
                    case _:
                        raise ValueError(f"unexpected checkpoint row {type(part).__name__}")
        state._stored = len(state.messages)
        return state

    def say(self, role: str, text: str) -> None:
        self.messages.append(_Message(role, text))

    def forget_from(self, count: int) -> None:
        """Take back messages that no commit holds."""
        del self.messages[count:]
        self._stored = min(self._stored, count)

    def baseline(self, owner: str) -> tuple[CheckpointRow, ...]:
        """All of it, as the state of a Thread that no Turn has begun on."""
        if not self._has_base or not self.program.owner:
            raise CorruptRecord("native state", "a scripted agent's state", "there is none")
        self.program = _Program(owner=owner)
        self._has_base = False
        return self.batch(0).checkpoint

    def batch(self, position: int, entries: Sequence[tuple[str, object]] = ()) -> JournalBatch:
        """What the next commit adds. The state counts as stored with it."""
        self.program.commits += 1
        base = not self._has_base or self.program.commits % BASE_EVERY == 0
        rows: list[CheckpointRow] = [Base()] if base else []
        for i in range(0 if base else self._stored, len(self.messages)):
            message = self.messages[i]
            rows.append(MessageMeta(i, _raw({"role": message.role}), 0))
            rows.append(Block(i, 0, _raw({"type": "text", "text": message.text})))
        rows.append(Field(PROGRAM, None, _raw(self.program)))
        self._stored = len(self.messages)
        self._has_base = True
        return JournalBatch(
            expected_head=position,
            entries=tuple(JournalEntry(kind, _raw(payload)) for kind, payload in entries),
            checkpoint=tuple(rows),
            base=base,
        )


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _text(content: Sequence[Content]) -> str:
    return "".join(part.text for part in content if isinstance(part, Text))


async def _text_of(record: ExecutionRecord, open_body: Callable[[Body], Any]) -> str:
    if record.result is None:
        return record.state.value.lower()
    result = msgspec.convert(await open_body(record.result), ToolResult)
    if result.value is not None:
        return result.value if isinstance(result.value, str) else msgspec.json.encode(result.value).decode()
    return result.reason or result.state


class _Play:
    """One Run."""

    def __init__(self, harness: ScriptedHarness, context: RunContext, state: _State) -> None:
        self._harness = harness
        self._context = context
        self._start = context.start
        self._state = state
        self._script = harness.script_for(_text(self._start.input.content))
        self._steps = 0
        self._models = 0

    @property
    def _program(self) -> _Program:
        return self._state.program

    async def play(self) -> RunEnd | None:
        while True:
            end = self._boundary()
            if end is not None:
                return end
            done = await self._act(self._next())
            if done is not None:
                return done if done.kind is not RunEndKind.COMPLETED else None

    def _next(self) -> Action:
        return self._script[self._program.at] if self._program.at < len(self._script) else final()

    def _boundary(self) -> RunEnd | None:
        """What to do about a control, where the state is stored and nothing is under way."""
        return stopped(self._context)

    async def _act(self, action: Action) -> RunEnd | None:
        """Do one action; what ends the Run, or None to go on."""
        program = self._program
        match action:
            case Round():
                if program.phase == "acting":
                    return await self._tools(action)
                if program.phase == "answered" and not self._context.pending_inputs:
                    return await self._end(action)
                return await self._think(action)
            case Fail(kind=kind, message=message, runs=runs):
                if self._start.number <= runs:
                    raise _ERRORS[kind](message)
            case Stall(gate=gate, obedient=obedient):
                self._harness.ledger.append("stall", turn=self._start.turn_id, gate=gate)
                if not await self._wait_for(gate, obedient=obedient):
                    return None
            case Emit(type=event_type, value=value):
                self._advance()
                await self._commit(events=(CustomEvent(event_type, await self._context.body(value)),))
                return None
            case Wait():
                return await self._signal(action)
            case _:
                assert_never(action)
        self._advance()
        await self._commit()
        return None

    def _advance(self) -> None:
        self._program.at += 1
        self._program.phase = "next"
        self._program.calls = []

    async def _wait_for(self, gate: str, *, obedient: bool = True) -> bool:
        """True when the gate opened, False when the Run must stop first."""
        opened = asyncio.ensure_future(self._harness.gates.passed(gate))
        try:
            while not opened.done():
                if obedient and (self._context.stop is not None or self._context.pause_requested):
                    return False
                changed = asyncio.ensure_future(self._context.changed())
                try:
                    await asyncio.wait({opened, changed}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
            # What a gate raises is raised in who waits there: a model whose stream is cut, a tool that fails.
            opened.result()
            return True
        finally:
            opened.cancel()

    # ---- the model ----

    async def _think(self, action: Round) -> RunEnd | None:
        program, start, context = self._program, self._start, self._context
        if program.phase == "asked":
            program.attempt += 1
        else:
            program.round += 1
            program.attempt = 1
            program.phase = "asked"
        step = self._step(StepPhase.REASONING)
        message_id = ids.message_id(start.turn_id, program.round)
        self._models += 1
        call_id = ids.model_call_id(start.run_id, self._models)
        asked = ModelFact(
            model_call_id=call_id,
            run_id=start.run_id,
            step_id=step.step_id,
            request=1,
            status=ModelStatus.STARTED,
            model="scripted",
            message_id=message_id,
            attempt=program.attempt,
        )
        await self._ask(step, asked)

        text = self._fill(action.text)
        _failpoints.hit("model.request.before")
        self._harness.ledger.append("model", message=message_id, attempt=program.attempt)
        if not await self._stream(message_id, text, action.gate):
            return self._boundary()
        _failpoints.hit("model.request.after")

        if action.thinking:
            self._state.say("thinking", action.thinking)
        if text:
            self._state.say("assistant", text)
        answered = replace(
            asked, status=ModelStatus.COMPLETED, usage=Usage(10, 5, None, None), complete=True, elapsed_ms=1
        )
        messages: tuple[MessageOut, ...] = ()
        if text or action.last:
            content = [Text(text)] if text else []
            structured = None if action.structured is None else await context.body(action.structured)
            messages = (
                MessageOut(
                    message_id=message_id,
                    content=await context.body(msgspec.to_builtins(content)),
                    attempt=program.attempt,
                    structured=structured,
                ),
            )
        if action.last:
            return await self._finish(action, step, answered, messages)
        phase = replace(step, phase=StepPhase.ACTING if action.calls else StepPhase.FINALIZATION)
        if action.calls:
            program.phase = "acting"
            program.calls = [
                _OpenCall(id=f"c{program.round}.{number}", at=number) for number in range(len(action.calls))
            ]
            await self._commit(steps=(phase,), models=(answered,), messages=messages)
            return await self._tools(action, step=phase)
        self._advance()
        await self._commit(steps=(replace(step, status=StepStatus.COMPLETED),), models=(answered,), messages=messages)
        return None

    async def _ask(self, step: StepFact, asked: ModelFact) -> None:
        """The commit before a request: accepted inputs enter the state, in their order (CT-23)."""
        program, count = self._program, len(self._state.messages)
        inputs = list(program.inputs)
        while True:
            applied = await self._take_inputs()
            try:
                await self._commit(
                    steps=(step,),
                    models=(asked,),
                    inputs=applied,
                    reasoning=program.round,
                    attempt=program.attempt,
                )
            except Conflict:
                # One of them was withdrawn first (CT-04): none was applied, look again.
                if not applied:
                    raise
                self._state.forget_from(count)
                program.inputs = list(inputs)
            else:
                return

    async def _end(self, action: Round) -> RunEnd | None:
        """The answer is stored already, the end is not: a pause came in between."""
        step = self._step(StepPhase.FINALIZATION)
        receipt = await self._commit(
            steps=(step, replace(step, status=StepStatus.COMPLETED)),
            end=RunEnd(
                kind=RunEndKind.COMPLETED,
                message_id=ids.message_id(self._start.turn_id, self._program.round),
                finish_reason=action.finish_reason,
            ),
        )
        return RunEnd(kind=RunEndKind.COMPLETED) if receipt.ended else None

    async def _finish(
        self, action: Round, step: StepFact, answered: ModelFact, messages: tuple[MessageOut, ...]
    ) -> RunEnd | None:
        # The place in the script stays: if an input came in the meantime, the model is asked once more (D20).
        self._program.phase = "answered"
        last = replace(step, phase=StepPhase.FINALIZATION)
        receipt = await self._commit(
            steps=(last, replace(last, status=StepStatus.COMPLETED)),
            models=(answered,),
            messages=messages,
            end=RunEnd(
                kind=RunEndKind.COMPLETED,
                message_id=messages[-1].message_id,
                finish_reason=action.finish_reason,
            ),
        )
        return RunEnd(kind=RunEndKind.COMPLETED) if receipt.ended else None

    async def _take_inputs(self) -> tuple[int, ...]:
        if not self._context.pending_inputs:
            return ()
        work = await self._context.open_work()
        for one in work.inputs:
            text = "".join(str(block.get("text", "")) for block in one.content)
            self._state.say("user", text)
            self._program.inputs.append(text)
        return tuple(one.record.ordinal for one in work.inputs)

    async def _stream(self, message_id: str, text: str, gate: str) -> bool:
        """Show the text word by word; False when the request was given up in the middle."""
        start, attempt = self._start, self._program.attempt
        words = [f"{word} " for word in text.split(" ")]
        words[-1] = words[-1][:-1]
        shown = 0
        for number, word in enumerate(words):
            if gate and number == len(words) // 2 and not await self._wait_for(gate):
                return False
            # Counted although nobody looks: whoever comes later must see that the beginning is missing.
            offset, shown = shown, shown + len(word)
            if not text or not self._context.wants_previews():
                continue
            if not offset:
                self._context.preview(PreviewStarted("message", start.thread_id, start.turn_id, message_id, attempt))
            self._context.preview(
                EventDelta("message", start.thread_id, start.turn_id, message_id, attempt, offset, word)
            )
        return True

    def _fill(self, text: str) -> str:
        said = ", ".join(message.text for message in self._state.messages if message.role == "user")
        return (
            text.replace("{inputs}", ", ".join(self._program.inputs))
            .replace("{results}", ", ".join(self._program.results))
            .replace("{context}", said)
        )

    # ---- tools ----

    async def _tools(self, action: Round, *, step: StepFact | None = None) -> RunEnd | None:
        """Open what is new, run what is local, take in what has come; park while something is missing."""
        program, context = self._program, self._context
        recovering = step is None
        if step is None:
            step = self._step(StepPhase.APPLYING_RESULTS)
        await self._open_calls(action, (step,) if recovering else ())
        for call in program.calls:
            wanted = action.calls[call.at]
            if wanted.kind != "local" or call.state == "done":
                continue
            end = self._boundary()
            if end is not None:
                return end
            if call.state == "running":
                await self._resume_local(call, wanted)
            else:
                await self._run_local(call, wanted)
        while any(call.state != "done" for call in program.calls):
            end = self._boundary()
            if end is not None:
                return end
            work = await context.open_work()
            if not await self._take_in(action, work):
                return RunEnd(kind=RunEndKind.SUSPENDED)
        self._advance()
        await self._commit(steps=(replace(step, status=StepStatus.COMPLETED),))
        return None

    async def _open_calls(self, action: Round, steps: tuple[StepFact, ...]) -> None:
        """Ask and send what happens elsewhere, all in one commit. Local calls are opened when they start."""
        tools: list[ToolCommit] = []
        questions: list[InteractionCommit] = []
        for call in self._program.calls:
            wanted = action.calls[call.at]
            if call.state != "new" or wanted.kind == "local":
                continue
            arguments = await self._arguments(wanted)
            kind, state, call.state = {
                "approval": (ExecutionKind.LOCAL, ExecutionState.AWAITING_APPROVAL, "asked"),
                "external": (ExecutionKind.EXTERNAL, ExecutionState.INTENT, "sent"),
                "manual": (ExecutionKind.MANUAL, ExecutionState.INTENT, "asked"),
            }[wanted.kind]
            tools.append(
                ToolCommit(
                    call_id=call.id, state=state, name=wanted.name, kind=kind, arguments=arguments, route=wanted.route
                )
            )
            if call.state == "asked":
                approval = wanted.kind == "approval"
                questions.append(
                    InteractionCommit(
                        interaction_id=ids.interaction_id(self._start.turn_id, call.id),
                        call_id=call.id,
                        kind=InteractionKind.APPROVAL if approval else InteractionKind.EXTERNAL_RESULT,
                        name=wanted.name,
                        arguments=arguments,
                    )
                )
        if tools or steps:
            await self._commit(steps=steps, tools=tuple(tools), interactions=tuple(questions))

    async def _arguments(self, wanted: Call) -> Body:
        # The model's exact text: a JSON string that holds JSON.
        return await self._context.body(msgspec.json.encode(wanted.arguments).decode())

    async def _resume_local(self, call: _OpenCall, wanted: Call) -> None:
        """A former Run had started it. It may be run again only if the stored and the present rule say so (D18)."""
        work = await self._context.open_work()
        record = next((one for one in work.executions if one.call_id == call.id), None)
        if record is None or record.rule is wanted.rule is ReplayRule.SAFE:
            await self._run_local(call, wanted)
        elif record.state.terminal:
            await self._apply(call, record)
        elif record.state is not ExecutionState.UNKNOWN:
            await self._commit(tools=(ToolCommit(call_id=call.id, state=ExecutionState.UNKNOWN),))

    async def _run_local(self, call: _OpenCall, wanted: Call, answers: tuple[str, ...] = ()) -> None:
        """Commit the intent, run the tool, commit the outcome."""
        call.state = "running"
        await self._commit(
            tools=(
                ToolCommit(
                    call_id=call.id,
                    state=ExecutionState.RUNNING,
                    name=wanted.name,
                    arguments=await self._arguments(wanted),
                    rule=wanted.rule,
                ),
            ),
            answers=answers,
        )
        result = await self._call(call, wanted)
        if result is None:
            await self._commit(tools=(ToolCommit(call_id=call.id, state=ExecutionState.UNKNOWN),))
            return
        call.state = "done"
        self._note(wanted.name, result)
        await self._commit(
            tools=(
                ToolCommit(
                    call_id=call.id,
                    state=ExecutionState.COMPLETED,
                    result=await self._context.body(msgspec.to_builtins(result)),
                    applied=True,
                ),
            )
        )

    async def _call(self, call: _OpenCall, wanted: Call) -> ToolResult | None:
        """The tool itself. None: nobody can say what it did."""
        function = self._harness.tools.get(wanted.name)
        _failpoints.hit("tool.local.before")
        self._harness.ledger.append("tool", turn=self._start.turn_id, call=call.id, tool=wanted.name)
        try:
            value = wanted.value if function is None else function(**wanted.arguments)
            if inspect.isawaitable(value):
                value = await value
            if wanted.gate:
                await self._wait_for(wanted.gate, obedient=False)
        except ToolError as error:
            return ToolResult(state="error", reason=str(error))
        except Exception as error:  # noqa: BLE001 - what a tool raises is an outcome, not a failure of the Run
            if wanted.rule is ReplayRule.NEVER:
                return None
            return ToolResult(state="error", reason=f"{type(error).__name__}: {error}")
        _failpoints.hit("tool.local.after")
        return ToolResult(value=value)

    def _note(self, name: str, result: ToolResult) -> None:
        text = str(result.value) if result.state == "success" else (result.reason or result.state)
        self._state.say("tool", f"{name}: {text}")
        self._program.results.append(text)

    async def _apply(self, call: _OpenCall, record: ExecutionRecord, answers: tuple[str, ...] = ()) -> None:
        text = await _text_of(record, self._context.open_body)
        self._state.say("tool", f"{record.name}: {text}")
        self._program.results.append(text)
        call.state = "done"
        await self._commit(tools=(ToolCommit(call_id=call.id, state=record.state, applied=True),), answers=answers)

    async def _take_in(self, action: Round, work: OpenWorkView) -> bool:
        """Apply one answer or outcome; False when there is none yet."""
        records = {record.call_id: record for record in work.executions}
        answered = {one.call_id: one for one in work.interactions if one.state is InteractionState.RESOLVED}
        for call in self._program.calls:
            wanted = action.calls[call.at]
            record, answer = records.get(call.id), answered.get(call.id)
            if call.state == "done":
                continue
            if call.state == "asked" and wanted.kind == "approval":
                if answer is None or answer.response is None:
                    continue
                if await self._context.open_body(answer.response):
                    if answer.edited is not None:
                        # As text, like the model's own.
                        call.edited = msgspec.json.decode(await self._context.open_body(answer.edited))
                        wanted = replace(wanted, arguments=call.edited)
                    await self._run_local(call, wanted, (answer.interaction_id,))
                else:
                    await self._deny(call, wanted, answer.interaction_id)
                return True
            if record is not None and record.state.terminal:
                await self._apply(call, record, (answer.interaction_id,) if answer is not None else ())
                return True
        return False

    async def _deny(self, call: _OpenCall, wanted: Call, interaction_id: str) -> None:
        result = ToolResult(state="denied", reason="denied by the user")
        call.state = "done"
        self._note(wanted.name, result)
        await self._commit(
            tools=(
                ToolCommit(
                    call_id=call.id,
                    state=ExecutionState.DENIED,
                    result=await self._context.body(msgspec.to_builtins(result)),
                    applied=True,
                ),
            ),
            answers=(interaction_id,),
        )

    # ---- signals ----

    async def _signal(self, action: Wait) -> RunEnd | None:
        program = self._program
        if program.phase != "waiting":
            program.phase = "waiting"
            await self._commit(waits=(WaitCondition(action.key, action.deadline_ms),))
        elif not self._now_ms:
            # The receipt tells the store's time, which alone judges a deadline.
            await self._commit(steps=(self._step(StepPhase.APPLYING_RESULTS),))
        work = await self._context.open_work()
        found = next((one for one in work.signals if one.key == action.key), None)
        if found is None and not (action.deadline_ms and self._now_ms >= action.deadline_ms):
            return RunEnd(kind=RunEndKind.SUSPENDED)
        program.results.append("timed out" if found is None else str(await self._context.open_body(found.payload)))
        self._advance()
        await self._commit(signals=(action.key,))
        return None

    # ---- commits ----

    _now_ms = 0

    def _step(self, phase: StepPhase) -> StepFact:
        self._steps += 1
        start = self._start
        return StepFact(
            step_id=ids.step_id(start.run_id, self._steps),
            run_id=start.run_id,
            number=self._steps,
            phase=phase,
            resumed_from=start.resumed_from if self._steps == 1 else "",
            reasoning=self._program.round,
        )

    async def _commit(self, **fields: Any) -> StepReceipt:
        start, context = self._start, self._context
        batch = self._state.batch(context.position)
        receipt = await context.commit(
            CommitStep(
                session=start.session,
                thread_id=start.thread_id,
                turn_id=start.turn_id,
                run_id=start.run_id,
                fence=start.fence,
                expected_position=context.position,
                journal=batch.encode(),
                checkpoint=True,
                base=batch.base,
                writer=self._harness.writer,
                **fields,
            )
        )
        self._now_ms = receipt.now_ms
        return receipt
