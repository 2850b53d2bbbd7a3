"""Outcomes from outside on their way into the agent's context.

Rule 1: AgentScope bounds the results of its own tools and not those of external ones; here they are bounded alike.
Rule 2: a result that breaks what its tool promised has happened all the same. The agent gets a definite error that says
so (PT-13); refused, it would keep the Turn waiting for ever.
"""

from __future__ import annotations

from typing import Any, Final

from agentscope_durable.adapters.agentscope.codec import result_block
from agentscope_durable.contracts.results import ToolResult

__all__ = ["RESULT_CHARS_MAX", "bounded", "take_in"]

RESULT_CHARS_MAX: Final = 200_000
"""Characters of a result where no agent is there to count tokens."""

_REMINDER: Final = (
    "\n<<<TRUNCATED>>>\n<system-reminder>The remaining content has been omitted for limited context.{where}"
    "</system-reminder>"
)


async def take_in(agent: Any, call_id: str, name: str, result: ToolResult) -> Any:
    """A result block as it may be given to the agent."""
    block = result_block(call_id, name, result)
    tool = await agent.toolkit.get_tool(name)
    check = getattr(tool, "check_external_result", None)
    if check is not None:
        try:
            await check(block)
        except Exception as error:  # noqa: BLE001 - a foreign check may raise anything
            text = f"the tool ran, but its result is not what it promised: {getattr(error, 'message', None) or error}"
            block = result_block(call_id, name, ToolResult(state="error", value=text, reason=text))
    return await _bounded_by_tokens(agent, block)


async def _bounded_by_tokens(agent: Any, block: Any) -> Any:
    from agentscope.message import AssistantMsg

    limit = agent.context_config.tool_result_limit
    output = block.output
    tokens = await agent.model.count_tokens([AssistantMsg(agent.name, content=output)], None)
    if tokens <= limit:
        return block
    size = sum(len(part.text) for part in output if part.type == "text")
    kept, rest = _split(output, max(0, size * limit // tokens))
    where = ""
    if agent.offloader is not None and rest:
        path = await agent.offloader.offload_tool_result(
            agent.state.session_id, block.model_copy(update={"output": rest})
        )
        where = f" You can refer to the file in '{path}' for the truncated content if needed."
    return block.model_copy(update={"output": _reminded(kept, where)})


def bounded(block: Any, chars_max: int = RESULT_CHARS_MAX) -> Any:
    """The same by characters."""
    if isinstance(block.output, str) or sum(len(p.text) for p in block.output if p.type == "text") <= chars_max:
        return block
    kept, _ = _split(block.output, chars_max)
    return block.model_copy(update={"output": _reminded(kept, "")})


def _split(output: list[Any], chars: int) -> tuple[list[Any], list[Any]]:
    """The first `chars` characters of text, with the media before them; and what is left."""
    kept: list[Any] = []
    rest: list[Any] = []
    for part in output:
        if rest or chars < 0:
            rest.append(part)
        elif part.type != "text":
            kept.append(part)
        elif len(part.text) <= chars:
            kept.append(part)
            chars -= len(part.text)
        else:
            kept.append(part.model_copy(update={"text": part.text[:chars]}))
            rest.append(part.model_copy(update={"text": part.text[chars:]}))
            chars = -1
    return kept, rest


def _reminded(kept: list[Any], where: str) -> list[Any]:
    from agentscope.message import TextBlock

    reminder = _REMINDER.format(where=where)
    if kept and kept[-1].type == "text":
        return [*kept[:-1], kept[-1].model_copy(update={"text": kept[-1].text + reminder})]
    return [*kept, TextBlock(text=reminder)]
