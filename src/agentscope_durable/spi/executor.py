"""The socket for tools that run outside the agent's loop."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import RunStepRef

REASON_CHARS_MAX = 2048
"""Characters of a reason that are stored."""


class ToolError(Exception):
    """Raised by a tool: it failed, for certain, and its text is the result the agent sees (D18).

    Any other exception may have come after the effect: the outcome is then UNKNOWN, unless the tool is declared safe
    to run again.
    """


class ExecutionRequest(Discreet, frozen=True, kw_only=True):
    """A tool call to perform.

    Attributes:
        execution_id: identity of the execution; the same over redelivery and recovery.
        arguments: exact text the model gave; usually a JSON object.
        origin: Run and Step that made the call.
    """

    session: SessionKey
    thread_id: str
    turn_id: str
    call_id: str
    execution_id: str
    name: str
    route: str
    arguments: Words
    origin: RunStepRef


class Succeeded(Discreet, frozen=True, tag="succeeded"):
    """The tool ended. `value` is JSON; `error` marks a definite error result (D18).

    Attributes:
        content: native content blocks as JSON, where the tool gave those instead of a value.
        metadata: native metadata of the result.
        state: native state of the result; "" follows `error`.
    """

    value: Any
    error: bool = False
    content: list[Any] | None = None
    metadata: dict[str, Any] | None = None
    state: str = ""


class Failed(Discreet, frozen=True, tag="failed"):
    """The executor says for certain that the tool did not do its work."""

    reason: Words


class Cancelled(Discreet, frozen=True, tag="cancelled"):
    """Stopped, confirmed; or never started."""

    reason: Words = ""


class Running(msgspec.Struct, frozen=True, tag="running"):
    """Still going. Ask again after `retry_after` seconds."""

    retry_after: float = 1.0


class Unknown(Discreet, frozen=True, tag="unknown"):
    """May or may not have happened. Settled by evidence, never by a second try."""

    reason: Words


Outcome = Succeeded | Failed | Cancelled | Running | Unknown


class ExecutorCapabilities(msgspec.Struct, frozen=True):
    """What can be asked of an executor besides starting (WK-26)."""

    query: bool = False
    cancel: bool = False
    output: bool = False


class Executor(Protocol):
    """Performs tool calls.

    Promises, checked by the contract suite:

    once       Executing an execution id again does not do the work again, if `query` is declared.
    honest     An outcome that is not known is Unknown, never Failed. An exception means Unknown.
    confirmed  Cancelled is answered only when the work has stopped or never began.
    bounded    `query` and `cancel` answer in bounded time.
    """

    @property
    def capabilities(self) -> ExecutorCapabilities: ...

    async def execute(self, request: ExecutionRequest) -> Outcome: ...

    async def query(self, request: ExecutionRequest) -> Outcome: ...

    async def cancel(self, request: ExecutionRequest) -> Outcome: ...
