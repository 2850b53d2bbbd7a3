"""Tools that run elsewhere, and what must be known of those that run here.

Rule 1: an external tool is its schema and nothing more. Whether it may be called is still decided here, by AgentScope's
own permission check (AS-07); what it does happens behind its route.
Rule 2: a binding is frozen and has a digest, so that whoever performs a call can tell that both mean the same tool
(TB-02). Its target is private to the host that performs it and holds references to credentials, never credentials.
Rule 3: AgentScope turns every exception of a local tool into an error result. Whether a tool said that it failed, or
died after its effect, is a difference for recovery (D18), so a local tool stands behind a proxy that notes which.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, ParamSpec, TypeAlias, TypeVar, cast

import msgspec

from agentscope_durable.adapters.agentscope.codec import parse_arguments
from agentscope_durable.adapters.agentscope.increments import Halting
from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.errors import InvalidRequest, said
from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.spi.environment import SYSTEM, Environment, call_in_own_thread
from agentscope_durable.spi.executor import ToolError
from agentscope_durable.spi.harness import Abandoned

__all__ = ["ToolBinding", "ToolOutcome", "bind_toolkit", "in_thread", "replay_rule", "watch_tool"]

P = ParamSpec("P")
R = TypeVar("R")

COMPRESSION_TOOL: Final = "CompressContext"
STRUCTURED_TOOL: Final = "GenerateStructuredOutput"
"""Names AgentScope gives to tools of its own."""
REPLAY_RULE: Final = "durable_replay_rule"
"""A tool with this attribute says itself whether it may be run again."""


class ToolBinding(msgspec.Struct, frozen=True):
    """A tool that is performed behind a route.

    Attributes:
        name: as the model calls it.
        route: executor route that performs it.
        version: of its definition.
        description, input_schema: as the model sees it; None where the agent's toolkit has a tool of this name, whose
            own are used then.
        target: private data for whoever performs it.
        concurrent: calls may be under way together.
        read_only: it has no effect.
        metadata_schema: what the metadata of its results promise.
        permission: `ask` or `allow`, where no native tool decides.
        tool: native tool of this process whose permission check is kept; no part of the binding's identity.
    """

    name: str
    route: str
    version: str = "1"
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    target: dict[str, Any] | None = None
    concurrent: bool = True
    read_only: bool = False
    metadata_schema: dict[str, Any] | None = None
    permission: str = "ask"
    tool: Any = None

    def __post_init__(self) -> None:
        if not self.name or not self.route:
            raise InvalidRequest("a tool binding needs a name and a route", path="name" if not self.name else "route")
        if self.permission not in ("ask", "allow"):
            raise InvalidRequest(f"permission is 'ask' or 'allow', not {self.permission!r}", path="permission")

    @property
    def digest(self) -> str:
        """Identity of everything that both sides must agree on, the private target included (TB-02).

        Raises:
            InvalidRequest: schema or target is not JSON.
        """
        frozen = {
            "name": self.name,
            "route": self.route,
            "version": self.version,
            "description": self.description,
            "inputSchema": self.input_schema,
            "target": self.target,
            "concurrent": self.concurrent,
            "readOnly": self.read_only,
            "metadataSchema": self.metadata_schema,
        }
        return durable_json.digest(durable_json.value(frozen))

    def __repr__(self) -> str:
        # The target is private.
        return f"ToolBinding({self.name!r}, {self.route!r}, version={self.version!r})"


Bindings: TypeAlias = Mapping[str, ToolBinding | str] | Iterable[ToolBinding]
"""Tools that run elsewhere: by name a `ToolBinding` or a route, or a list of bindings."""


def as_bindings(bindings: Bindings) -> dict[str, ToolBinding]:
    """Bindings by tool name, from a map of names to bindings or routes, or from a list of bindings.

    Raises:
        InvalidRequest: a binding stands under another name than its own, or a name twice.
    """
    if isinstance(bindings, Mapping):
        given: list[tuple[str, object]] = list(cast("Mapping[str, object]", bindings).items())
    elif isinstance(bindings, str):
        raise InvalidRequest('bindings are {"tool": "route"} or a list of ToolBinding', path="bindings")
    else:
        given = [(getattr(bound, "name", ""), bound) for bound in bindings]
    named: dict[str, ToolBinding] = {}
    for name, bound in given:
        path = f"bindings.{name}" if name else "bindings"
        if isinstance(bound, str) and name:
            bound = ToolBinding(name, bound)
        if not isinstance(bound, ToolBinding):
            raise InvalidRequest(f"a tool is bound to a route or a ToolBinding, not {type(bound).__name__}", path=path)
        if bound.name != name:
            raise InvalidRequest(f"the binding of {bound.name!r} stands under {name!r}", path=path)
        if name in named:
            raise InvalidRequest("two tool bindings have the same name", path="bindings")
        named[name] = bound
    return named


# ------------------------------------------------------------ the toolkit of an invocation


def bind_toolkit(toolkit: Any, bindings: Mapping[str, ToolBinding]) -> list[str]:
    """Make bound tools external, register those that have a schema only, and put the others behind their proxies.

    Returns names of bindings that could not be bound: no schema, and no tool of that name.
    """
    missing = dict(bindings)
    for group in toolkit.tool_groups:
        for index, tool in enumerate(group.tools):
            bound = bindings.get(tool.name)
            if bound is not None:
                group.tools[index] = _external_class()(bound, tool)
                _ = missing.pop(tool.name, None)
        group.mcps[:] = [WatchedClient(client, bindings) for client in group.mcps]
    basic = next((group for group in toolkit.tool_groups if group.name == "basic"), None)
    for name, bound in list(missing.items()):
        if basic is not None and (bound.tool is not None or bound.input_schema is not None):
            basic.tools.append(_external_class()(bound, bound.tool))
            del missing[name]
    watch_toolkit(toolkit)
    # An MCP server's tools are not known before it is asked.
    return [name for name in missing if not any(group.mcps for group in toolkit.tool_groups)]


def watch_toolkit(toolkit: Any) -> None:
    """Put local tools behind their proxies, also those that were registered since."""
    for group in toolkit.tool_groups:
        for index, tool in enumerate(group.tools):
            watched = watch_tool(tool)
            if watched is not tool:
                group.tools[index] = watched


def watch_tool(tool: Any) -> Any:
    """A local tool behind its proxy; an external one, and AgentScope's own, as they are."""
    if getattr(tool, "is_external_tool", False) or getattr(tool, "watched_tool", None) is not None:
        return tool
    if tool.name in (COMPRESSION_TOOL, STRUCTURED_TOOL):
        # The agent recognises these by identity.
        return tool
    return _watched_class()(tool)


def in_thread(function: Callable[P, R], *, environment: Environment = SYSTEM) -> Callable[P, Any]:
    """A blocking function as a coroutine function that runs in a thread: `FunctionTool(in_thread(restart))`.

    A synchronous tool runs on the event loop, and while it does nothing else of this host does. A thread cannot be
    stopped: cancelling the call waits for its end, so that its outcome is known (C32).
    """

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        blocking = functools.partial(function, *args, **kwargs)
        return await call_in_own_thread(environment, blocking, name=f"tool {function.__name__}", to_its_end=True)

    return call


# ------------------------------------------------------------ what a tool did


class ToolOutcome:
    """What became of one tool call, noted by the tool's proxy.

    Attributes:
        entered: the tool itself was called.
        returned: it came to its end.
        raised: what it raised instead.
    """

    def __init__(self) -> None:
        self.entered = False
        self.returned = False
        self.raised: BaseException | None = None

    @property
    def definite(self) -> bool:
        """What is reported of it is what happened: it returned, or says itself that it failed (D18)."""
        if self.raised is None:
            return self.returned
        return is_definite(self.raised)


def is_definite(error: BaseException) -> bool:
    """An exception that is a tool's own word to the agent."""
    from agentscope.exception import AgentOrientedException

    return isinstance(error, ToolError | AgentOrientedException)


def _as_exception(error: BaseException) -> Exception | None:
    """What AgentScope is told of an error that is no Exception: of these it drops some, and others end the host.

    None: it may go its way.
    """
    if isinstance(error, Exception | asyncio.CancelledError | KeyboardInterrupt | Halting | Abandoned):
        return None
    return RuntimeError(f"the tool raised {type(error).__name__}: {said(error)}")


_outcome: ContextVar[ToolOutcome | None] = ContextVar("durable_tool_outcome", default=None)


@contextlib.contextmanager
def noting(outcome: ToolOutcome) -> Any:
    token = _outcome.set(outcome)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            _outcome.reset(token)


async def replay_rule(tool: Any, arguments: str, declared: Mapping[str, ReplayRule], toolkit: Any) -> ReplayRule:
    """Whether this call may be run again when its outcome was lost (D18)."""
    if tool is None:
        # Nothing will run: the toolkit answers that there is no such tool.
        return ReplayRule.SAFE
    name = str(tool.name)
    if name in declared:
        return declared[name]
    own = getattr(tool, REPLAY_RULE, None)
    if isinstance(own, ReplayRule):
        return own
    if tool.is_read_only or _changes_state_only(tool, toolkit):
        return ReplayRule.SAFE
    try:
        read_only = await tool.check_read_only(parse_arguments(arguments))
    except Exception:  # noqa: BLE001 - a foreign check that fails says nothing
        read_only = False
    return ReplayRule.SAFE if read_only else ReplayRule.NEVER


def _changes_state_only(tool: Any, toolkit: Any) -> bool:
    """AgentScope's own tools whose only effect is in the state, which is rolled back with them."""
    inner = getattr(tool, "watched_tool", tool)
    if inner in (toolkit.builtin_meta_tool.tool, toolkit.builtin_skill_viewer.tool):
        return True
    if not type(inner).__module__.startswith("agentscope."):
        return False
    return tool.name in (COMPRESSION_TOOL, STRUCTURED_TOOL) or (
        tool.is_state_injected and str(tool.name).startswith("Task")
    )


# ------------------------------------------------------------ proxies

_SEEN: Final = (
    "name",
    "description",
    "input_schema",
    "is_concurrency_safe",
    "is_read_only",
    "is_state_injected",
    "metadata_schema",
    "is_mcp",
    "mcp_name",
)


@cache
def _external_class() -> Any:
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import ToolBase

    class ExternalTool(ToolBase):
        """The schema of a tool that runs elsewhere, with the native tool's permission check where there is one."""

        is_external_tool = True
        is_state_injected = False

        def __init__(self, binding: ToolBinding, native: Any) -> None:
            super().__init__()
            self.binding = binding
            self._native = native
            self.name = binding.name
            self.description = binding.description or (native.description if native is not None else "")
            schema: dict[str, Any] = binding.input_schema or ({} if native is None else native.input_schema)
            # AgentScope refuses a schema that does not spell these out.
            self.input_schema = {"type": "object", "properties": {}, **schema}
            self.is_concurrency_safe = binding.concurrent if native is None else native.is_concurrency_safe
            self.is_read_only = binding.read_only if native is None else native.is_read_only
            self.is_mcp = native is not None and native.is_mcp
            self.mcp_name = None if native is None else native.mcp_name
            self.metadata_schema = binding.metadata_schema

        async def check_permissions(self, tool_input: Any, context: Any) -> Any:
            if self._native is not None:
                return await self._native.check_permissions(tool_input, context)
            if self.binding.permission == "allow":
                return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="Allowed by its binding.")
            return PermissionDecision(
                behavior=PermissionBehavior.ASK, message="External tools must be explicitly allowed by the user."
            )

        async def check_read_only(self, tool_input: Any) -> bool:
            if self._native is not None:
                return await self._native.check_read_only(tool_input)
            return self.is_read_only

        async def match_rule(self, rule_content: Any, tool_input: Any) -> bool:
            if self._native is not None:
                return await self._native.match_rule(rule_content, tool_input)
            return await super().match_rule(rule_content, tool_input)

        async def generate_suggestions(self, tool_input: Any) -> Any:
            if self._native is not None:
                return await self._native.generate_suggestions(tool_input)
            return await super().generate_suggestions(tool_input)

    return ExternalTool


@cache
def _watched_class() -> Any:
    from agentscope.message import TextBlock, ToolResultState
    from agentscope.tool import ToolBase, ToolChunk

    class WatchedTool(ToolBase):
        """A local tool, unchanged, whose end is noted."""

        def __init__(self, tool: Any) -> None:
            super().__init__()
            self.watched_tool = tool

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["watched_tool"], name)

        async def check_permissions(self, tool_input: Any, context: Any) -> Any:
            return await self.watched_tool.check_permissions(tool_input, context)

        async def check_read_only(self, tool_input: Any) -> bool:
            return await self.watched_tool.check_read_only(tool_input)

        async def match_rule(self, rule_content: Any, tool_input: Any) -> bool:
            return await self.watched_tool.match_rule(rule_content, tool_input)

        async def generate_suggestions(self, tool_input: Any) -> Any:
            return await self.watched_tool.generate_suggestions(tool_input)

        async def call(self, **kwargs: Any) -> Any:
            outcome = _outcome.get() or ToolOutcome()
            outcome.entered = True
            try:
                result = await self.watched_tool(**kwargs)
            except BaseException as error:
                outcome.raised = error
                told = _as_exception(error)
                if told is None:
                    raise
                raise told from error
            if isinstance(result, ToolChunk):
                outcome.returned = True
                return result
            if inspect.isasyncgen(result) or inspect.isgenerator(result):
                return self._stream(result, outcome)
            # The tool ran; that its result cannot be read is what the agent must know of it (PT-13).
            outcome.returned = True
            text = f"the tool ran, but returned a {type(result).__name__} instead of a ToolChunk"
            return ToolChunk(content=[TextBlock(text=text)], state=ToolResultState.ERROR)

        async def _stream(self, result: Any, outcome: ToolOutcome) -> AsyncIterator[Any]:
            try:
                while True:
                    try:
                        chunk = next(result) if inspect.isgenerator(result) else await anext(result)
                    except (StopIteration, StopAsyncIteration):
                        break
                    except BaseException as error:
                        outcome.raised = error
                        told = _as_exception(error)
                        if told is None:
                            raise
                        raise told from error
                    yield chunk
                outcome.returned = True
            except BaseException as error:
                outcome.raised = outcome.raised or error
                raise
            finally:
                if inspect.isasyncgen(result):
                    await result.aclose()

    for name in _SEEN:
        # Asked each time: some tools compute their schema from what is registered at the moment.
        setattr(WatchedTool, name, property(lambda self, name=name: getattr(self.watched_tool, name, None)))
    return WatchedTool


class WatchedClient:
    """An MCP client whose tools stand behind their proxies, or are external where they are bound."""

    def __init__(self, client: Any, bindings: Mapping[str, ToolBinding]) -> None:
        self.watched_client = client
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["watched_client"], name)

    async def list_tools(self, *args: Any, **kwargs: Any) -> list[Any]:
        found: list[Any] = []
        for tool in await self.watched_client.list_tools(*args, **kwargs):
            bound = self._bindings.get(tool.name)
            found.append(watch_tool(tool) if bound is None else _external_class()(bound, tool))
        return found
