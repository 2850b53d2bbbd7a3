"""A model provider on this machine: a real endpoint with a scripted model behind it.

Answers `POST /v1/chat/completions`, streamed or whole, and `GET /v1/models`, in OpenAI's protocol, so that a test or an
example drives the SDK, the connection and AgentScope's own parsing, with no network and no key.

Rule 1: it says what its script says, as `scripted_model` does, with the same parts: `Fail` is an error status before
the first chunk and a cut connection after it; `Stall` holds the stream open; `Usage` comes where it stands.
Rule 2: it listens on 127.0.0.1 alone, on a port the system chooses, and belongs to the loop it was opened on. Other
processes may use it; it answers them while that loop runs.

::

    async with OpenAIServer(by_round("Hello!")) as server:
        model = OpenAIChatModel(OpenAICredential(api_key="none", base_url=server.base_url), model="scripted")
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, Self

from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import (
    DEFAULT_USAGE,
    MODEL_COMPLETED,
    MODEL_REQUEST,
    Answer,
    Call,
    Do,
    Fail,
    Part,
    Script,
    Stall,
    Text,
    Thinking,
    Usage,
    by_request,
    chunks,
    parts_of,
    perform,
)

__all__ = ["OpenAIServer"]

_HEAD_BYTES_MAX: Final = 64 * 1024
_BODY_BYTES_MAX: Final = 64 * 1024 * 1024
_CREATED: Final = 1_700_000_000


class _Refused(Exception):
    """The request gets an error status instead of an answer."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class OpenAIServer:
    """A scripted provider that speaks OpenAI's chat completions.

    Args:
        script: what it answers: `script(messages, tools, tool_choice, n)` with the request's own JSON, or answers in
            the order of requests.
        ledger: where requests are counted; None: in this object only.
        chunk_chars: characters of a streamed piece.
        usage: reported at the end of an answer that has no `Usage`; None: not at all. A stream reports usage only when
            its request asks for it, as OpenAI's does.
    """

    def __init__(
        self,
        script: Script | Sequence[Answer],
        *,
        ledger: EffectLedger | str | os.PathLike[str] | None = None,
        chunk_chars: int = 8,
        usage: Usage | None = DEFAULT_USAGE,
    ) -> None:
        self._script = script if callable(script) else by_request(*script)
        self._ledger = ledger if ledger is None or isinstance(ledger, EffectLedger) else EffectLedger(ledger)
        self._chunk_chars = chunk_chars
        self._usage = usage
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.requests: list[dict[str, Any]] = []
        """The JSON of each request so far, oldest first."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_HEAD_BYTES_MAX)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        """Stop listening and cut what is still open, a stalled stream included."""
        assert self._server is not None, "leaving a server that was never entered"
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()

    @property
    def base_url(self) -> str:
        """What an SDK takes as `base_url`. Ends with `/v1`."""
        assert self._server is not None, "the server listens inside `async with` only"
        port: int = self._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/v1"

    # -------------------------------------------------------- connections

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            await self._serve(reader, _Wire(writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            # The caller has gone, or is to think that the provider has.
            writer.transport.abort()
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, wire: _Wire) -> None:
        """One request for each connection, so that a cut stream is just a closed one."""
        try:
            method, path, body = await _request(reader)
            if (method, path) == ("GET", "/v1/models"):
                await wire.whole({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
            elif (method, path) == ("POST", "/v1/chat/completions"):
                await self._complete(body, wire)
            else:
                raise _Refused(404, f"there is no {method} {path}")
        except _Refused as refused:
            await wire.refuse(refused.status, str(refused))

    async def _complete(self, body: bytes, wire: _Wire) -> None:
        try:
            request: dict[str, Any] = json.loads(body)
            messages, tools, choice = request["messages"], request.get("tools"), request.get("tool_choice")
        except (ValueError, KeyError, TypeError) as error:
            raise _Refused(400, "the body is not a chat completion request") from error
        n = len(self.requests) if self._ledger is None else self._ledger.count(MODEL_REQUEST)
        self.requests.append(request)
        if self._ledger is not None:
            self._ledger.append(MODEL_REQUEST, n=n, model=request.get("model"), messages=len(messages))
        try:
            parts = parts_of(self._script(messages, tools, choice, n))
        except Exception as error:
            # A script that fails is a provider that fails, and says why.
            raise _Refused(400, repr(error)) from error
        if self._usage is not None and not any(isinstance(part, Usage) for part in parts):
            parts.append(self._usage)
        answer = _Answer(n, str(request.get("model", "scripted")), self._chunk_chars)
        if request.get("stream"):
            options = request.get("stream_options") or {}
            await self._stream(answer, parts, wire, report=bool(options.get("include_usage")))
        else:
            for part in parts:
                await _act(part, wire)
            await wire.whole(answer.whole(parts))
        if self._ledger is not None:
            self._ledger.append(MODEL_COMPLETED, n=n)

    async def _stream(self, answer: _Answer, parts: list[Part], wire: _Wire, *, report: bool) -> None:
        # As with OpenAI, usage at the end comes after the chunk that finishes the answer.
        last = parts[-1] if parts and isinstance(parts[-1], Usage) else None
        for k, part in enumerate(parts if last is None else parts[:-1]):
            if isinstance(part, Usage):
                if report:
                    await wire.event(answer.usage_chunk(part))
                continue
            await _act(part, wire)
            for delta in answer.deltas(k, part):
                await wire.event(answer.chunk(delta))
        await wire.event(answer.chunk({}, finish_reason=answer.finish_reason(parts)))
        if last is not None and report:
            await wire.event(answer.usage_chunk(last))
        await wire.end()


async def _act(part: Part, wire: _Wire) -> None:
    """Do what a part without content says; a failure is a status, or the end of a connection that has begun."""
    if isinstance(part, Fail):
        if wire.begun:
            raise ConnectionAbortedError("scripted failure")
        raise _Refused(part.status, "scripted failure" if part.error is None else str(part.error))
    if isinstance(part, Stall | Do):
        await perform(part)


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Method, path and body of an HTTP/1.1 request."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        method, target, _version = first.split(" ")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise _Refused(400, "this is not an HTTP/1.1 request") from error
    if length > _BODY_BYTES_MAX:
        raise _Refused(413, f"the body has more than {_BODY_BYTES_MAX} bytes")
    return method, target.partition("?")[0], await reader.readexactly(length)


# ------------------------------------------------------------ what is sent


class _Wire:
    """The answering half of a connection."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.begun = False

    async def whole(self, answer: object, *, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self._head(status, "application/json", f"Content-Length: {len(body)}")
        self._writer.write(body)
        await self._writer.drain()

    async def refuse(self, status: int, message: str) -> None:
        await self.whole({"error": {"message": message, "type": "scripted", "code": status}}, status=status)

    async def event(self, chunk: object) -> None:
        """One server-sent event. Chunked, so that a connection that is cut short is seen to be."""
        if not self.begun:
            self._head(200, "text/event-stream", "Transfer-Encoding: chunked")
        self._chunk(f"data: {json.dumps(chunk)}\n\n".encode())
        await self._writer.drain()

    async def end(self) -> None:
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")
        await self._writer.drain()

    def _chunk(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _head(self, status: int, content_type: str, length: str) -> None:
        self.begun = True
        lines = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            f"Content-Type: {content_type}",
            length,
            "Connection: close",
        )
        self._writer.write("\r\n".join((*lines, "", "")).encode())


class _Answer:
    """One answer in OpenAI's words."""

    def __init__(self, n: int, model: str, chunk_chars: int) -> None:
        self._n = n
        self._common = {"id": f"chatcmpl-{n}", "created": _CREATED, "model": model}
        self._chunk_chars = chunk_chars
        self._calls = 0

    def deltas(self, k: int, part: Part) -> list[dict[str, Any]]:
        match part:
            case Text(text):
                return [{"content": piece} for piece in chunks(text, self._chunk_chars)]
            case Thinking(text):
                return [{"reasoning_content": piece} for piece in chunks(text, self._chunk_chars)]
            case Call(name=name):
                index, self._calls = self._calls, self._calls + 1
                function = {"name": name, "arguments": ""}
                opening = {"id": self._call_id(k, part), "type": "function", "function": function}
                pieces = [{"function": {"arguments": piece}} for piece in chunks(part.written, self._chunk_chars)]
                return [{"tool_calls": [{"index": index, **piece}]} for piece in (opening, *pieces)]
            case _:
                return []

    def chunk(self, delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish_reason}
        return {**self._common, "object": "chat.completion.chunk", "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._common, "object": "chat.completion.chunk", "choices": [], "usage": _tokens(usage)}

    def whole(self, parts: Sequence[Part]) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(part.text for part in parts if isinstance(part, Text)) or None,
            "reasoning_content": "".join(part.text for part in parts if isinstance(part, Thinking)) or None,
        }
        calls = [(k, part) for k, part in enumerate(parts) if isinstance(part, Call)]
        if calls:
            message["tool_calls"] = [
                {
                    "id": self._call_id(k, part),
                    "type": "function",
                    "function": {"name": part.name, "arguments": part.written},
                }
                for k, part in calls
            ]
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason(parts)}
        usage = next((_tokens(part) for part in reversed(parts) if isinstance(part, Usage)), None)
        return {**self._common, "object": "chat.completion", "choices": [choice], "usage": usage}

    def finish_reason(self, parts: Sequence[Part]) -> str:
        return "tool_calls" if any(isinstance(part, Call) for part in parts) else "stop"

    def _call_id(self, k: int, call: Call) -> str:
        return call.id or f"call-{self._n}-{k}"


def _tokens(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cache_input_tokens},
    }
