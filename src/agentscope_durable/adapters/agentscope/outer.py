"""The first middleware: an answer becomes true here, after everything the application's own middlewares made of it.

Rule: whatever AgentScope's loop would do with it next, the outcome is stored first; and a stored outcome is given to
the loop instead of a model, once, so that the loop's own consequences are made again and nothing else (AS-13).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from typing import Any

from agentscope_durable.adapters.agentscope.context import (
    Compression,
    current_origin,
    in_compression,
    in_replay,
)
from agentscope_durable.adapters.agentscope.invocation import Invocation
from agentscope_durable.adapters.agentscope.models import close_stream

__all__ = ["outer_middleware"]


def outer_middleware(invocation: Invocation) -> Any:
    return _outer_class()(invocation)


@cache
def _outer_class() -> Any:
    from agentscope.event import ReplyEndEvent, RequireExternalExecutionEvent, RequireUserConfirmEvent
    from agentscope.message import Msg, ToolCallState
    from agentscope.middleware import MiddlewareBase
    from agentscope.model import ChatResponse
    from agentscope.permission import PermissionBehavior, PermissionDecision

    class DurableOuter(MiddlewareBase):
        """See the top of this file."""

        def __init__(self, invocation: Invocation) -> None:
            self._run = invocation

        async def on_reply(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., AsyncIterator[Any]]
        ) -> AsyncIterator[Any]:
            run = self._run
            with in_replay(lambda: run.replaying):
                async for event in next_handler(**input_kwargs):
                    if isinstance(event, RequireUserConfirmEvent | RequireExternalExecutionEvent):
                        run.seen_waiting()
                    elif isinstance(event, ReplyEndEvent):
                        if str(event.finished_reason) == "completed" and run.stopping is None and await run.steered():
                            # Swallowed: the loop goes on with another round.
                            run.reopen()
                            continue
                        run.reply_end = event
                    elif isinstance(event, Msg):
                        run.final = event
                    else:
                        run.previews.see(event)
                    yield event

        async def on_acting(  # pyright: ignore[reportIncompatibleMethodOverride]
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., AsyncIterator[Any]]
        ) -> AsyncIterator[Any]:
            known = self._run.calls.known.get(input_kwargs["tool_call"].id)
            again = known is not None and known.state.terminal
            with in_replay(lambda: again):
                async for item in next_handler(**input_kwargs):
                    yield item

        async def on_model_call(
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., Any]
        ) -> Any:
            run = self._run
            stored = run.take_answer()
            if stored is not None:

                async def again() -> AsyncIterator[Any]:
                    yield stored

                return again()
            await run.admit(len(input_kwargs["messages"]), len(input_kwargs["tools"] or ()))
            answer = await next_handler(**input_kwargs)
            if isinstance(answer, ChatResponse):
                return await run.answered(answer)

            async def stream() -> AsyncIterator[Any]:
                try:
                    async for chunk in answer:
                        yield await run.answered(chunk) if chunk.is_last else chunk
                finally:
                    await close_stream(answer)

            return stream()

        async def on_check_permission(
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., Any]
        ) -> Any:
            run, block = self._run, input_kwargs["tool_call"]
            run.check_tool()
            if run.calls.edited(block.id) is not None:
                # Nobody but the person who changed it has seen this call: the rules look at it as at a new one (IN-11).
                input_kwargs = {**input_kwargs, "tool_call": block.model_copy(update={"state": ToolCallState.PENDING})}
            decision = await next_handler(**input_kwargs)
            asks = decision.behavior in (PermissionBehavior.ASK, PermissionBehavior.PASSTHROUGH)
            if asks and run.calls.is_approved(block.id):
                # A stored answer is not asked for again, whatever this host's middlewares think of it (C41).
                return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="Approved by a stored answer.")
            return decision

        async def on_compress_context(
            self, agent: Any, input_kwargs: dict[str, Any], next_handler: Callable[..., Any]
        ) -> None:
            run = self._run
            if run.anchor is not None:
                # What it would make of the context is replaced by what the model was given.
                return
            origin = current_origin()
            run.compressions += 1
            place = f"call/{origin.call_id}" if origin is not None else f"round/{run.position.reasoning + 1}"
            with in_compression(Compression(f"{place}/{run.compressions}")):
                await next_handler(**input_kwargs)

    return DurableOuter
