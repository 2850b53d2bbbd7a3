"""A model that says what a script tells it to, and counts who asked.

No network, no key, no chance: `scripted_model` streams text, thoughts and tool calls in small chunks, fails before or
within a stream, stalls until a test lets it go on, and reports its usage early, late or not at all.

Rule 1: the count outlives the process. Requests are lines in a file (`EffectLedger`), so a test that kills a host can
say how often the provider was asked altogether, which is the promise that matters.
Rule 2: an answer that follows the conversation is repeated when its request is (`by_round`); one that follows the count
of requests is not (`by_request`). A script says which of the two it means.

::

    model = scripted_model(
        by_round([Call("restart", {"service": "exporter"})], ["Restarted ", "the exporter."]),
        ledger=tmp_path / "provider",
    )
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.testing.ledger import EffectLedger

__all__ = [
    "DEFAULT_USAGE",
    "MODEL_COMPLETED",
    "MODEL_REQUEST",
    "Answer",
    "Call",
    "Do",
    "Fail",
    "Item",
    "Pace",
    "Part",
    "Script",
    "ScriptEnded",
    "Stall",
    "Text",
    "Thinking",
    "TransientModelError",
    "Usage",
    "by_request",
    "by_round",
    "chunks",
    "parts_of",
    "perform",
    "rounds_so_far",
    "scripted_model",
]

MODEL_REQUEST: Final = "model/request"
"""Ledger name of a request that reached the model."""
MODEL_COMPLETED: Final = "model/completed"
"""Ledger name of an answer that was given to its end."""


class TransientModelError(Exception):
    """A failure the provider would get over: a model with `max_retries` asks again by itself."""


class ScriptEnded(Exception):
    """The model was asked more often than its script has answers."""


# ------------------------------------------------------------ what a script says


@dataclass(frozen=True)
class Text:
    """A text block, streamed in chunks. A plain string in a script means this."""

    text: str


@dataclass(frozen=True)
class Thinking:
    """A thought; `signature` is kept with it as providers do."""

    text: str
    signature: str = ""


@dataclass(frozen=True)
class Call:
    """A tool call.

    Attributes:
        arguments: an object, or the exact string the model would write, valid JSON or not.
        id: the provider's id of the call; "" makes one that no other request repeats.
    """

    name: str
    arguments: Mapping[str, object] | str = field(default_factory=dict[str, object])
    id: str = ""

    @property
    def written(self) -> str:
        """The arguments as the model writes them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments)


@dataclass(frozen=True)
class Usage:
    """Tokens. As an item it is reported at that place of the stream, instead of at the end."""

    input_tokens: int
    output_tokens: int
    cache_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


DEFAULT_USAGE: Final = Usage(10, 5)
"""What an answer costs whose script does not say."""


@dataclass(frozen=True)
class Fail:
    """Raise: as the first item before anything streams, later in the middle of the stream.

    Attributes:
        error: what is raised; None is a `TransientModelError`.
        status: what an HTTP server answers instead, when nothing was streamed yet.
    """

    error: Exception | None = None
    status: int = 500


@dataclass(frozen=True)
class Stall:
    """Go no further until `gate` is set; None: never, so only a cancel or a kill ends it.

    Attributes:
        reached: set when the stream has come to this place, for a test to wait for.
    """

    gate: asyncio.Event | None = None
    reached: asyncio.Event | None = None


@dataclass(frozen=True)
class Do:
    """Call something at this place of the stream, and await what it returns if that can be awaited."""

    action: Callable[[], object]


Part: TypeAlias = Text | Thinking | Call | Usage | Fail | Stall | Do
"""One thing of an answer."""
Item: TypeAlias = str | Part
"""A part, or text."""
Answer: TypeAlias = Item | Sequence[Item]
"""One answer: an item, or several in order."""
Script: TypeAlias = Callable[[list[Any], list[dict[str, Any]] | None, Any, int], Answer]
"""`script(messages, tools, tool_choice, n)`: what the model answers.

`messages` and `tools` are what the model was given, `n` is how many requests its ledger held before this one.
"""


Pace: TypeAlias = Callable[[str], Awaitable[object]]
"""Awaited with each piece of an answer, before it comes."""


def parts_of(answer: Answer) -> list[Part]:
    """An answer as its parts, with plain strings as `Text`."""
    items = [answer] if isinstance(answer, str) or not isinstance(answer, Sequence) else answer
    return [Text(item) if isinstance(item, str) else item for item in items]


def by_request(*answers: Answer) -> Script:
    """The first answer for the first request, the second for the second: a repeated request gets the next one."""

    def script(_messages: list[Any], _tools: list[dict[str, Any]] | None, _choice: Any, n: int) -> Answer:
        if n >= len(answers):
            raise ScriptEnded(f"request {n + 1}, and the script has {len(answers)} answers")
        return answers[n]

    return script


def by_round(*answers: Answer) -> Script:
    """The answer that the conversation is waiting for: a request repeated after a crash gets the same one.

    Rounds are counted in the messages (`rounds_so_far`), so a compressed conversation counts from its summary on.
    """

    def script(messages: list[Any], _tools: list[dict[str, Any]] | None, _choice: Any, _n: int) -> Answer:
        number = rounds_so_far(messages)
        if number >= len(answers):
            raise ScriptEnded(f"round {number + 1}, and the script has {len(answers)} answers")
        return answers[number]

    return script


def rounds_so_far(messages: Sequence[Any]) -> int:
    """How many answers of a model are in the conversation, given as AgentScope messages or in OpenAI's form.

    Answers of one reply share a message; tool results and hints stand between them.
    """
    rounds = 0
    for message in messages:
        if isinstance(message, Mapping):
            rounds += message.get("role") == "assistant"
        elif message.role == "assistant":
            answering = False
            for block in message.content:
                of_model = block.type not in ("tool_result", "hint")
                rounds += of_model and not answering
                answering = of_model
    return rounds


def chunks(text: str, size: int | None) -> Iterator[str]:
    """The text in pieces of at most `size` characters, None: word by word; an empty text is one empty piece."""
    if size is None:
        yield from re.findall(r"\s*\S+(?:\s+$)?", text) or [text]
        return
    for start in range(0, max(len(text), 1), size):
        yield text[start : start + size]


# ------------------------------------------------------------ the model


def scripted_model(
    script: Script | Sequence[Answer],
    *,
    ledger: EffectLedger | str | os.PathLike[str] | None = None,
    model: str = "scripted",
    stream: bool = True,
    context_size: int = 100_000,
    max_retries: int = 0,
    chunk_chars: int | None = 8,
    delay: float | Pace = 0.0,
    usage: Usage | None = DEFAULT_USAGE,
    environment: Environment = SYSTEM,
) -> Any:
    """Make a model for an AgentScope agent: a subclass of `agentscope.model.ChatModelBase`.

    Args:
        script: what it answers: a function, or answers in the order of requests (`by_request`).
        ledger: where requests are counted, an `EffectLedger` or its path; None: in this object only.
        model: its name, as events and records show it.
        stream: whether answers come in chunks; otherwise each comes whole, after its stalls.
        context_size: tokens it claims to hold; small makes the agent compress.
        max_retries: how often it asks again by itself after a `TransientModelError`.
        chunk_chars: characters of a chunk; None: a chunk is a word.
        delay: seconds before each chunk, or what is awaited with each chunk before it comes.
        usage: reported at the end of an answer that has no `Usage` item; None: not at all.
        environment: where the delay comes from.

    Raises:
        ImportError: AgentScope is not installed.
    """
    told = script if callable(script) else by_request(*script)
    kept = ledger if ledger is None or isinstance(ledger, EffectLedger) else EffectLedger(ledger)
    made = _model_class()(model=model, stream=stream, context_size=context_size, max_retries=max_retries)
    made.tell(_Telling(told, kept, chunk_chars, delay, usage, environment))
    return made


@dataclass
class _Telling:
    """What a scripted model needs besides what every model has."""

    script: Script
    ledger: EffectLedger | None
    chunk_chars: int | None
    delay: float | Pace
    usage: Usage | None
    environment: Environment
    requests: int = 0

    def ask(
        self, messages: list[Any], tools: list[dict[str, Any]] | None, choice: Any, *, model: str
    ) -> tuple[int, list[Part]]:
        """Count the request, then see what the script answers to it."""
        n = self.requests if self.ledger is None else self.ledger.count(MODEL_REQUEST)
        self.requests += 1
        if self.ledger is not None:
            names = [tool["function"]["name"] for tool in tools or ()]
            mode = getattr(choice, "mode", None)
            self.ledger.append(MODEL_REQUEST, n=n, model=model, messages=len(messages), tools=names, tool_choice=mode)
        parts = parts_of(self.script(messages, tools, choice, n))
        if self.usage is not None and not any(isinstance(part, Usage) for part in parts):
            parts.append(self.usage)
        return n, parts

    async def pace(self, piece: str) -> None:
        """The time a piece of an answer takes to come."""
        if callable(self.delay):
            _ = await self.delay(piece)
        else:
            await self.environment.sleep(self.delay)

    def completed(self, n: int) -> None:
        if self.ledger is not None:
            self.ledger.append(MODEL_COMPLETED, n=n)


async def perform(part: Fail | Stall | Do) -> None:
    """Do what a part without content says: raise, wait, or call."""
    match part:
        case Fail(error):
            raise TransientModelError("scripted failure") if error is None else error
        case Stall(gate, reached):
            if reached is not None:
                reached.set()
            _ = await (asyncio.Event() if gate is None else gate).wait()
        case Do(action):
            done = action()
            if inspect.isawaitable(done):
                _ = await done


@cache
def _model_class() -> Any:
    """The class, made when a model is first asked for: importing this file does not import AgentScope."""
    from agentscope.credential import CredentialBase
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import TextBlock, ThinkingBlock, ToolCallBlock
    from agentscope.model import ChatModelBase, ChatResponse, ChatUsage

    def tokens(usage: Usage) -> ChatUsage:
        return ChatUsage(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            time=0.0,
            cache_input_tokens=usage.cache_input_tokens,
            cache_creation_input_tokens=usage.cache_creation_input_tokens,
        )

    def block(part: Text | Thinking | Call, piece: str, identity: str, *, first: bool) -> Any:
        match part:
            case Text():
                return TextBlock(text=piece, id=identity)
            case Thinking(signature=signature):
                extra: dict[str, Any] = {"signature": signature} if signature else {}
                return ThinkingBlock(thinking=piece, id=identity, **extra)
            case Call(name=name):
                return ToolCallBlock(id=identity, name=name if first else "", input=piece)

    class ScriptedModel(ChatModelBase):
        """A model that says what a script tells it to."""

        _telling: _Telling

        def __init__(self, *, model: str, stream: bool, context_size: int, max_retries: int) -> None:
            super().__init__(
                credential=CredentialBase(),
                model=model,
                parameters=ChatModelBase.Parameters(),
                stream=stream,
                max_retries=max_retries,
                retry_delay=0.0,
                context_size=context_size,
            )
            self.formatter = OpenAIChatFormatter()

        def tell(self, telling: _Telling) -> None:
            self._telling = telling

        @property
        def requests(self) -> int:
            """How often this object was asked; its ledger knows of the others."""
            return self._telling.requests

        @classmethod
        def _get_retryable_exceptions(cls) -> tuple[type[Exception], ...]:
            return (TransientModelError,)

        async def _call_api(
            self,
            model_name: str,
            messages: list[Any],
            tools: list[dict[str, Any]] | None = None,
            tool_choice: Any = None,
            **_kwargs: Any,
        ) -> Any:
            n, parts = self._telling.ask(messages, tools, tool_choice, model=model_name)
            for part in tuple(parts):
                # What stands before the first chunk happens before there is a stream.
                if not isinstance(part, Fail | Stall | Do):
                    break
                del parts[0]
                await perform(part)
            return self._streamed(n, parts) if self.stream else await self._whole(n, parts)

        async def _streamed(self, n: int, parts: list[Part]) -> AsyncIterator[Any]:
            telling = self._telling
            reported: Usage | None = None
            for k, part in enumerate(parts):
                if isinstance(part, Fail | Stall | Do):
                    await perform(part)
                    continue
                if isinstance(part, Usage):
                    reported = part
                    continue
                for number, piece in enumerate(chunks(_written(part), telling.chunk_chars)):
                    await telling.pace(piece)
                    yield ChatResponse(
                        content=[block(part, piece, _block_id(part, n, k), first=number == 0)],
                        is_last=False,
                        id=f"response-{n}",
                        # With content, since a chunk of usage alone is not shown to the agent.
                        usage=None if reported is None else tokens(reported),
                    )
                    reported = None
            if reported is not None:
                yield ChatResponse(content=[], is_last=False, id=f"response-{n}", usage=tokens(reported))
            telling.completed(n)

        async def _whole(self, n: int, parts: list[Part]) -> Any:
            content: list[Any] = []
            usage: ChatUsage | None = None
            for k, part in enumerate(parts):
                if isinstance(part, Fail | Stall | Do):
                    await perform(part)
                elif isinstance(part, Usage):
                    usage = tokens(part)
                else:
                    content.append(block(part, _written(part), _block_id(part, n, k), first=True))
            self._telling.completed(n)
            return ChatResponse(content=content, is_last=True, id=f"response-{n}", usage=usage)

    return ScriptedModel


def _written(part: Text | Thinking | Call) -> str:
    return part.written if isinstance(part, Call) else part.text


def _block_id(part: Text | Thinking | Call, n: int, k: int) -> str:
    if isinstance(part, Call):
        return part.id or f"call-{n}-{k}"
    return f"block-{n}-{k}"
