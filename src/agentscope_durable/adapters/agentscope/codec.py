"""AgentScope's objects as JSON of this library, and back.

Rule 1: what has happened is never refused (PT-13). Text of a model or a tool is carried with lone surrogates replaced;
a tool value that JSON cannot carry becomes a definite error that names the path.
Rule 2: native reasoning never becomes public (EV-11): a public message is made of texts and media and nothing else.
Rule 3: a stored answer is the native blocks themselves, encoded once, by the function that checkpoints use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from agentscope_durable.adapters.agentscope.checkpoint import block_bodies, sanitize_blocks
from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.durable_json import UNREADABLE, sanitize_text
from agentscope_durable.contracts.errors import CorruptRecord
from agentscope_durable.contracts.log import Usage
from agentscope_durable.contracts.messages import Audio, Base64, Content, Image, Input, Text, Url, Video
from agentscope_durable.contracts.records import ExecutionRecord
from agentscope_durable.contracts.results import ToolResult
from agentscope_durable.contracts.status import ExecutionState

__all__ = [
    "StoredAnswer",
    "answer_payload",
    "chat_response",
    "input_blocks",
    "interrupted_block",
    "native_blocks",
    "parse_arguments",
    "public_content",
    "read_answer",
    "result_block",
    "result_of_block",
    "result_of_response",
    "structured_response",
    "tool_response",
    "usage_of",
    "user_message",
]

INTERRUPTED_TEXT: Final = (
    "<system-reminder>The tool call was interrupted; it is not known to have done its work.</system-reminder>"
)
NOT_RUN_TEXT: Final = "<system-reminder>The tool call was not run.</system-reminder>"

_encode: Final = msgspec.json.Encoder().encode
_MEDIA: Final[tuple[tuple[str, type[Image] | type[Audio] | type[Video]], ...]] = (
    ("image/", Image),
    ("audio/", Audio),
    ("video/", Video),
)


# ------------------------------------------------------------ a model's answer


STRANGE = (*UNREADABLE, KeyError, TypeError, ValueError)
"""How native classes say that what is stored is none of theirs; a `ValidationError` of pydantic is a `ValueError`."""


class StoredAnswer(Discreet, frozen=True):
    """The payload of a `model/result` entry that holds an answer.

    Attributes:
        content: native blocks in the model's order.
        reasoning: the round it answers.
        usage, metadata: native, as JSON objects.
    """

    content: tuple[msgspec.Raw, ...]
    id: str
    created_at: str
    finished_reason: str
    reasoning: int
    attempt: int
    usage: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


_USAGE_FIELDS: Final = ("input_tokens", "output_tokens", "time", "cache_creation_input_tokens", "cache_input_tokens")


def _carried(value: object) -> Any:
    """A foreign JSON value as far as JSON can carry it; None when it cannot."""
    carried, _refused = durable_json.tool_value(value)
    return carried


def answer_payload(response: Any, *, reasoning: int, attempt: int) -> tuple[msgspec.Raw, tuple[msgspec.Raw, ...]]:
    """An `is_last` response as the payload of its journal entry, and its blocks in the form that rows refer to."""
    bodies = block_bodies(response.content)
    usage = None
    if response.usage is not None:
        usage = {name: getattr(response.usage, name, None) for name in _USAGE_FIELDS}
        usage["metadata"] = _carried(response.usage.metadata)
    stored = StoredAnswer(
        content=bodies,
        id=str(response.id),
        created_at=str(response.created_at),
        finished_reason=str(response.finished_reason),
        reasoning=reasoning,
        attempt=attempt,
        usage=usage,
        metadata=_carried(dict(response.metadata or {})) or None,
    )
    return msgspec.Raw(_encode(stored)), bodies


def read_answer(payload: msgspec.Raw, *, position: int) -> StoredAnswer:
    """
    Raises:
        CorruptRecord: the payload is not a stored answer.
    """
    try:
        return msgspec.json.decode(payload, type=StoredAnswer)
    except UNREADABLE as error:
        raise CorruptRecord(f"journal position {position}", "StoredAnswer", str(error)) from error


def chat_response(stored: StoredAnswer) -> Any:
    """A stored answer as the native response that ends a stream.

    Raises:
        CorruptRecord: the installed AgentScope has no such response.
    """
    from agentscope.model import ChatResponse, ChatUsage, FinishedReason

    content = native_blocks(stored.content)
    try:
        return ChatResponse(
            content=content,
            is_last=True,
            id=stored.id,
            created_at=stored.created_at,
            usage=None if stored.usage is None else ChatUsage(**stored.usage),
            finished_reason=FinishedReason(stored.finished_reason),
            metadata=stored.metadata or {},
        )
    except STRANGE as error:
        raise CorruptRecord("stored answer", "ChatResponse", type(error).__name__) from error


def native_blocks(bodies: Iterable[msgspec.Raw]) -> list[Any]:
    """Stored blocks as native ones.

    Raises:
        CorruptRecord: the installed AgentScope cannot read one; names its type and the first place.
    """
    from agentscope.message import DataBlock, HintBlock, TextBlock, ThinkingBlock, ToolCallBlock, ToolResultBlock
    from pydantic import ValidationError

    classes: dict[str, Any] = {
        "text": TextBlock,
        "thinking": ThinkingBlock,
        "tool_call": ToolCallBlock,
        "tool_result": ToolResultBlock,
        "data": DataBlock,
        "hint": HintBlock,
    }
    blocks: list[Any] = []
    for body in bodies:
        try:
            kind = str(msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("type", msgspec.Raw(b'""')), "utf-8")
        except UNREADABLE as error:
            raise CorruptRecord("native block", "block", str(error)) from error
        found = classes.get(kind.strip('"'))
        if found is None:
            raise CorruptRecord("native block", kind, "this release of AgentScope has no such block")
        try:
            blocks.append(found.model_validate_json(bytes(body)))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the block"
            raise CorruptRecord("native block", found.__name__, f"{place}: {first['type']}") from error
    return blocks


def structured_payload(response: Any) -> msgspec.Raw:
    """A StructuredResponse as a receipt."""
    usage = None
    if response.usage is not None:
        usage = {name: getattr(response.usage, name, None) for name in _USAGE_FIELDS}
    return msgspec.Raw(
        _encode(
            {
                "content": response.content,
                "id": response.id,
                "created_at": response.created_at,
                "usage": usage,
                "metadata": _carried(dict(response.metadata or {})) or {},
            }
        )
    )


def structured_response(receipt: msgspec.Raw) -> Any:
    """
    Raises:
        CorruptRecord: the receipt is none of a StructuredResponse.
    """
    from agentscope.model import ChatUsage, StructuredResponse

    try:
        stored = msgspec.json.decode(receipt, type=dict[str, Any])
        usage = stored["usage"]
        return StructuredResponse(
            content=stored["content"],
            id=stored["id"],
            created_at=stored["created_at"],
            usage=None if usage is None else ChatUsage(**usage),
            metadata=stored["metadata"],
        )
    except STRANGE as error:
        raise CorruptRecord("receipt", "StructuredResponse", type(error).__name__) from error


def usage_of(usage: Any) -> Usage | None:
    """Native usage as it is recorded; None when the provider reported none (MC-04)."""
    if usage is None:
        return None
    return Usage(
        input_tokens=_count(usage, "input_tokens"),
        output_tokens=_count(usage, "output_tokens"),
        cache_read_tokens=_count(usage, "cache_input_tokens"),
        cache_write_tokens=_count(usage, "cache_creation_input_tokens"),
    )


def _count(usage: Any, name: str) -> int | None:
    count = getattr(usage, name, None)
    return count if isinstance(count, int) and not isinstance(count, bool) else None


# ------------------------------------------------------------ messages


def public_content(blocks: Iterable[Any]) -> list[dict[str, Any]]:
    """The public form of native blocks: texts and media (MG-02), without native reasoning, calls and hints."""
    content: list[dict[str, Any]] = []
    for block in blocks:
        part: Content | None = None
        if block.type == "text":
            part = Text(sanitize_text(block.text)) if block.text else None
        elif block.type == "data":
            part = _public_media(block)
        if part is not None:
            content.append(msgspec.to_builtins(part))
    return content


def _public_media(block: Any) -> Content:
    source, media_type = block.source, str(block.source.media_type)
    place = Url(str(source.url), media_type) if source.type == "url" else Base64(source.data, media_type)
    for prefix, kind in _MEDIA:
        if media_type.startswith(prefix):
            return kind(place)
    name = f" {block.name}" if block.name else ""
    where = f" at {place.url}" if isinstance(place, Url) else ""
    return Text(f"[{media_type}{name}{where}]")


def input_blocks(content: Sequence[Content]) -> list[Any]:
    """Public content as native blocks (MG-02)."""
    from agentscope.message import Base64Source, DataBlock, TextBlock, URLSource

    blocks: list[Any] = []
    for part in content:
        if isinstance(part, Text):
            blocks.append(TextBlock(text=part.text))
            continue
        place = part.source
        if isinstance(place, Url):
            source: Any = URLSource.model_validate({"url": place.url, "media_type": place.media_type})
        else:
            source = Base64Source(data=place.data, media_type=place.media_type)
        blocks.append(DataBlock(source=source))
    return blocks


def user_message(given: Input, message_id: str) -> Any:
    """What the user submitted as a native message, under its stable id."""
    from agentscope.message import UserMsg

    return UserMsg("user", input_blocks(given.content), id=message_id)


def content_of(document: list[Any]) -> list[Content]:
    """Stored content blocks of an added input."""
    return msgspec.convert(document, list[Content])


# ------------------------------------------------------------ tool calls and their results


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments of a call, as far as they are a JSON object; {} otherwise. For looking only, never for running."""
    try:
        parsed = msgspec.json.decode(text.encode("utf-8", "replace")) if text else {}
    except UNREADABLE:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def result_of_response(response: Any) -> ToolResult:
    """A tool's native response as the outcome that is stored; content and metadata are kept natively (TB-10).

    Never raises: a value that JSON cannot carry makes it a definite error that names the path.
    """
    return _result(str(response.state), sanitize_blocks(response.content), response.metadata)


def result_of_block(block: Any) -> ToolResult:
    """The result that stands in the context."""
    output: list[Any] | str = block.output
    if isinstance(output, str):
        return ToolResult(state=str(block.state), value=sanitize_text(output))
    return _result(str(block.state), sanitize_blocks(output), block.metadata)


def _result(state: str, blocks: list[Any], metadata: object) -> ToolResult:
    content, refused = durable_json.tool_value([block.model_dump(mode="json") for block in blocks])
    kept: Any = None
    if refused is None:
        kept, refused = durable_json.tool_value(metadata or {})
    if refused is not None:
        return ToolResult(state="error", value=refused, reason=refused)
    return ToolResult(state=state, content=content if isinstance(content, list) else [], metadata=kept or None)


def result_content(result: ToolResult) -> list[Any]:
    """An outcome as native blocks, whoever produced it."""
    from agentscope.message import TextBlock

    blocks: list[Any] = []
    for part in result.content or ():
        blocks.append(_content_block(part))
    if result.value is not None:
        text = result.value if isinstance(result.value, str) else _encode(result.value).decode()
        blocks.append(TextBlock(text=sanitize_text(text)))
    if not blocks and result.reason:
        blocks.append(TextBlock(text=sanitize_text(result.reason)))
    return blocks


def _content_block(part: Any) -> Any:
    from agentscope.message import DataBlock, TextBlock
    from pydantic import ValidationError

    kind = part.get("type") if isinstance(part, Mapping) else None
    try:
        if kind == "text":
            return sanitize_blocks([TextBlock.model_validate(part)])[0]
        if kind == "data":
            return sanitize_blocks([DataBlock.model_validate(part)])[0]
        if kind in ("image", "audio", "video"):
            # The public form: an executor that knows nothing of AgentScope.
            return input_blocks([msgspec.convert(part, Content)])[0]
    except (ValidationError, msgspec.ValidationError):
        pass
    return TextBlock(text=sanitize_text(part if isinstance(part, str) else _encode(part).decode()))


def _state_of(result: ToolResult) -> Any:
    from agentscope.message import ToolResultState

    try:
        state = ToolResultState(result.state)
    except ValueError:
        return ToolResultState.ERROR
    return ToolResultState.ERROR if state is ToolResultState.RUNNING else state


def tool_response(call_id: str, result: ToolResult) -> Any:
    """An outcome as the native response of a local tool."""
    from agentscope.tool import ToolResponse

    return ToolResponse(
        id=call_id,
        content=result_content(result),
        state=_state_of(result),
        metadata=result.metadata or {},
    )


def result_block(call_id: str, name: str, result: ToolResult) -> Any:
    """An outcome as the native result block of a call."""
    from agentscope.message import ToolResultBlock

    return ToolResultBlock(
        id=call_id,
        name=name,
        output=result_content(result),
        state=_state_of(result),
        metadata=result.metadata or {},
    )


def interrupted_block(call_id: str, name: str, text: str = NOT_RUN_TEXT) -> Any:
    from agentscope.message import ToolResultBlock, ToolResultState

    return ToolResultBlock(id=call_id, name=name, output=text, state=ToolResultState.INTERRUPTED)


def outcome_of(record: ExecutionRecord, stored: Any) -> ToolResult:
    """What the agent sees of a settled call.

    Args:
        record: the settled call.
        stored: the opened body of its result, or None when it has none.
    """
    if stored is not None:
        try:
            return msgspec.convert(stored, ToolResult)
        except msgspec.ValidationError:
            # Written by someone who does not know ToolResult: the value is the result.
            return ToolResult(state="success" if record.state is ExecutionState.COMPLETED else "error", value=stored)
    match record.state:
        case ExecutionState.COMPLETED:
            return ToolResult(value="")
        case ExecutionState.CANCELLED:
            return ToolResult(state="interrupted", reason=INTERRUPTED_TEXT)
        case ExecutionState.DENIED:
            return ToolResult(state="denied", reason="The call was denied.")
        case _:
            return ToolResult(state="error", reason="The tool failed.")
