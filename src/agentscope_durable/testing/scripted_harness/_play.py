"""A scripted agent at work: it does one action after the other, and each ends with a commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import msgspec
from msgspec.structs import replace

from agentscope_durable import _failpoints
from agentscope_durable.contracts.commands import CustomEvent, MessageOut, RunEnd, RunEndKind, WaitCondition
from agentscope_durable.contracts.errors import Conflict
from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.messages import Text
from agentscope_durable.contracts.status import ModelStatus, StepPhase, StepStatus
from agentscope_durable.domain import ids
from agentscope_durable.spi.harness import RunContext
from agentscope_durable.testing.scripted_harness._run import Props
from agentscope_durable.testing.scripted_harness._script import ERRORS, Action, Emit, Fail, Round, Stall, Wait, final
from agentscope_durable.testing.scripted_harness._state import OpenCall, State
from agentscope_durable.testing.scripted_harness._tools import WithTools


class Play(WithTools):
    """One Run, from where its state stands to the end."""

    def __init__(self, props: Props, script: Sequence[Action], context: RunContext, state: State) -> None:
        super().__init__(props, context, state)
        self._script = script

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
                    raise ERRORS[kind](message)
            case Stall(gate=gate, obedient=obedient):
                self._props.ledger.append("stall", turn=self._start.turn_id, gate=gate)
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
        self._props.ledger.append("model", message=message_id, attempt=program.attempt)
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
                OpenCall(id=f"c{program.round}.{number}", at=number) for number in range(len(action.calls))
            ]
            await self._commit(steps=(phase,), models=(answered,), messages=messages)
            return await self._tools(action, step=phase)
        self._advance()
        await self._commit(steps=(replace(step, status=StepStatus.COMPLETED),), models=(answered,), messages=messages)
        return None

    async def _ask(self, step: StepFact, asked: ModelFact) -> None:
        """The commit before a request: accepted inputs enter the state, in their order (CT-23)."""
        program, mark = self._program, self._state.mark()
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
                self._state.back_to(mark)
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
