"""The last middleware: the agent's own code is right behind it.

Rule: what the model is given is saved here, after the application's middlewares have added what they wanted; and a
local tool is entered from here, between the commit of its intent and that of its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

from msgspec.structs import replace

from agentscope_durable import _failpoints
from agentscope_durable.adapters.agentscope.codec import result_of_response, tool_response
from agentscope_durable.adapters.agentscope.context import in_tool
from agentscope_durable.adapters.agentscope.halts import Halt, HaltInTool, OutcomeUnknown
from agentscope_durable.adapters.agentscope.increments import RecordingFailed
from agentscope_durable.adapters.agentscope.invocation import Invocation
from agentscope_durable.adapters.agentscope.tools import ToolOutcome, is_definite, noting, replay_rule, watch_toolkit
from agentscope_durable.contracts.records import RunStepRef
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState, ReplayRule
from agentscope_durable.spi.harness import Abandoned, RunStepOrigin

__all__ = ["inner_middleware"]


def inner_middleware(invocation: Invocation) -> Any:
    return _inner_class()(invocation)


@cache
def _inner_class() -> Any:
    from agentscope.event import ReplyStartEvent
    from agentscope.message import Msg
    from agentscope.middleware import MiddlewareBase
    from agentscope.tool import ToolResponse

    class DurableInner(MiddlewareBase):
        """See the top of this file."""

        def __init__(self, invocation: Invocation) -> None:
            self._run = invocation

        async def on_reply(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., AsyncIterator[Any]]
        ) -> AsyncIterator[Any]:
            run = self._run
            async for event in next_handler(**input_kwargs):
                if isinstance(event, ReplyStartEvent) and run.saved_reply is not None:
                    # Not a new reply: the one under way goes on (AS-29).
                    run.resume_reply()
                    continue
                yield event

        async def on_reasoning(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., AsyncIterator[Any]]
        ) -> AsyncIterator[Any]:
            run = self._run
            watch_toolkit(agent.toolkit)
            if run.anchor is not None:
                await run.begin_replay()
            else:
                run.check_lost()
                await run.begin_round()
            final = False
            async for event in next_handler(**input_kwargs):
                final = final or isinstance(event, Msg)
                yield event
            run.round_over(final=final and run.state.reply_context.structured_schema is None)

        async def on_model_call(
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., Any]
        ) -> Any:
            model = input_kwargs["current_model"]
            models = self._run.models
            observed = models.observed(model, models.begin(getattr(model, "observed_model", model)))
            return await next_handler(**{**input_kwargs, "current_model": observed})

        async def on_acting(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., AsyncIterator[Any]]
        ) -> AsyncIterator[Any]:
            run, block = self._run, input_kwargs["tool_call"]
            known = run.calls.known.get(block.id)
            if known is not None and known.state.terminal and known.result is not None:
                # It ran in a former Run, and this is what came of it.
                yield tool_response(block.id, _replayed(run, known.result))
                return
            run.check_tool()
            tool = await agent.toolkit.get_tool(block.name)
            rule = await replay_rule(tool, block.input, run.rules, agent.toolkit)
            if known is not None and not _may_run(known.state, known.kind, known.rule, rule):
                run.lose_tool(block.id)
                raise OutcomeUnknown(block.id)
            await run.start_tool(block, rule)
            origin = RunStepOrigin(RunStepRef(run.run_id, run.step_id), run.turn_id, block.id)
            outcome, held, chunks = ToolOutcome(), None, 0
            run.tools_running += 1
            try:
                with in_tool(origin), noting(outcome), run.watch_loop(str(block.name)):
                    _failpoints.hit("tool.local.before")
                    async for item in next_handler(**input_kwargs):
                        if isinstance(item, ToolResponse):
                            # Given by AgentScope even when the tool raised, and before it did.
                            held = item
                        else:
                            chunks += 1
                            yield item
                _failpoints.hit("tool.local.after")
            except (Halt, Abandoned, RecordingFailed) as reason:
                raise HaltInTool(reason) from reason
            except Exception as error:
                if isinstance(error, HaltInTool | OutcomeUnknown):
                    raise
                outcome.raised = outcome.raised or error
            finally:
                run.tools_running -= 1
            result = _result(run, outcome, held, chunks, rule)
            if result is None:
                run.lose_tool(block.id)
                raise OutcomeUnknown(block.id)
            await run.end_tool(block.id, result, definite=outcome.definite)
            yield tool_response(block.id, result)

    return DurableInner


def _may_run(state: ExecutionState, kind: ExecutionKind, stored: ReplayRule, present: ReplayRule) -> bool:
    """Whether a call that the store knows may be started now (D18, C11)."""
    if state is ExecutionState.UNKNOWN or kind is not ExecutionKind.LOCAL:
        return False
    if state is ExecutionState.RUNNING:
        return stored is present is ReplayRule.SAFE
    return True


def _replayed(run: Invocation, result: ToolResult) -> ToolResult:
    """A stored outcome for the agent. A call that was stopped, or never began, has failed: given as interrupted,
    AgentScope would take it for the user's interruption of the whole reply."""
    return replace(result, state="error") if result.state == "interrupted" and not run.interrupted else result


def _result(run: Invocation, outcome: ToolOutcome, held: Any, chunks: int, rule: ReplayRule) -> ToolResult | None:
    """What the tool did, as far as anybody can say; None when nobody can."""
    raised = outcome.raised
    if isinstance(raised, asyncio.CancelledError):
        if run.interrupted:
            # Asked to stop, and it has stopped.
            return ToolResult(state="interrupted", reason="The tool was stopped on request.")
        # Something inside the tool was cancelled. To AgentScope that would be the user's interruption of the reply.
        return _lost(rule, "the tool was cut off by a cancellation that nobody asked for")
    if raised is not None and not is_definite(raised):
        return _lost(rule, f"{type(raised).__name__}: {raised}")
    if held is None or (not outcome.entered and not chunks):
        return _lost(rule, "the tool returned nothing")
    result = result_of_response(held)
    if result.state == "interrupted":
        if run.interrupted:
            return result
        return _lost(rule, "the tool was cut off by a cancellation that nobody asked for")
    return result


def _lost(rule: ReplayRule, why: str) -> ToolResult | None:
    return ToolResult(state="error", value=why, reason=why) if rule is ReplayRule.SAFE else None
