"""The tools of a scripted agent: asked for, started, lost, answered and taken in."""

from __future__ import annotations

import inspect

import msgspec
from msgspec.structs import replace

from agentscope_durable import _failpoints
from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import InteractionCommit, RunEnd, RunEndKind, ToolCommit
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.records import ExecutionRecord
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ReplayRule,
    StepPhase,
    StepStatus,
)
from agentscope_durable.domain import ids
from agentscope_durable.spi.executor import ToolError
from agentscope_durable.spi.harness import OpenWorkView
from agentscope_durable.testing.scripted_harness._run import OneRun
from agentscope_durable.testing.scripted_harness._script import Call, Round
from agentscope_durable.testing.scripted_harness._state import OpenCall, text_of


class WithTools(OneRun):
    """A Run that calls tools."""

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

    async def _resume_local(self, call: OpenCall, wanted: Call) -> None:
        """A former Run had started it. It may be run again only if the stored and the present rule say so (D18)."""
        work = await self._context.open_work()
        record = next((one for one in work.executions if one.call_id == call.id), None)
        if record is None or record.rule is wanted.rule is ReplayRule.SAFE:
            await self._run_local(call, wanted)
        elif record.state.terminal:
            await self._apply(call, record)
        elif record.state is not ExecutionState.UNKNOWN:
            await self._commit(tools=(ToolCommit(call_id=call.id, state=ExecutionState.UNKNOWN),))

    async def _run_local(self, call: OpenCall, wanted: Call, answers: tuple[str, ...] = ()) -> None:
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
        await self._settle(call, wanted, ExecutionState.COMPLETED, result)

    async def _call(self, call: OpenCall, wanted: Call) -> ToolResult | None:
        """The tool itself. None: nobody can say what it did."""
        function = self._props.tools.get(wanted.name)
        _failpoints.hit("tool.local.before")
        self._props.ledger.append("tool", turn=self._start.turn_id, call=call.id, tool=wanted.name)
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

    def _hear(self, name: str, text: str) -> None:
        self._state.say("tool", f"{name}: {text}")
        self._program.results.append(text)

    async def _apply(self, call: OpenCall, record: ExecutionRecord, answers: tuple[str, ...] = ()) -> None:
        self._hear(record.name, await text_of(record, self._context.open_body))
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

    async def _deny(self, call: OpenCall, wanted: Call, interaction_id: str) -> None:
        result = ToolResult(state="denied", reason="denied by the user")
        await self._settle(call, wanted, ExecutionState.DENIED, result, (interaction_id,))

    async def _settle(
        self, call: OpenCall, wanted: Call, state: ExecutionState, result: ToolResult, answers: tuple[str, ...] = ()
    ) -> None:
        """The agent takes in what it knows itself, in the commit that says it."""
        call.state = "done"
        text = str(result.value) if result.state == "success" else (result.reason or result.state)
        self._hear(wanted.name, text)
        body = await self._context.body(msgspec.to_builtins(result))
        tool = ToolCommit(call_id=call.id, state=state, result=body, applied=True)
        await self._commit(tools=(tool,), answers=answers)
