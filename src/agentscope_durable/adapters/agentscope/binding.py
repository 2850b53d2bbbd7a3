"""What an application's agent factory is given, what it must return, and how an agent is made of that.

Rule 1: one invocation, one agent (AS-03). The factory describes an agent; the adapter adds state and middlewares and
builds it. A built agent, or the same description twice, would carry one conversation's memory into another.
Rule 2: the factory sees which Thread it works for and nothing of how that is stored (AS-05).
Rule 3: everything wrong with a factory is found before a model is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from agentscope_durable.adapters.agentscope.context import ORIGIN_KEY, current_origin
from agentscope_durable.adapters.agentscope.workspace import DurableWorkspace
from agentscope_durable.contracts import records
from agentscope_durable.contracts.discreet import discreet
from agentscope_durable.contracts.errors import AgentFactoryError, DurableError, Misuse
from agentscope_durable.journal.host import AgentExecutionHost

__all__ = ["AgentBuilder", "AgentFactory", "Binding", "RuntimeContext"]

AGENT_ARGUMENTS: Final = frozenset(
    {
        "name",
        "system_prompt",
        "model",
        "toolkit",
        "middlewares",
        "state",
        "offloader",
        "model_config",
        "context_config",
        "react_config",
        "injection_config",
    }
)
"""Keyword arguments of `agentscope.agent.Agent`."""


class RuntimeContext:
    """Where an invocation runs.

    Attributes:
        user_id: the namespace of the Session.
        session_id, thread_id: the conversation and the Thread.
        turn_id, run_id: the task, and its present invocation.
        execution_host: halts the invocation at its boundaries; None until the agent is built (AS-06).
    """

    def __init__(self, *, user_id: str, session_id: str, thread_id: str, turn_id: str, run_id: str) -> None:
        self.user_id = user_id
        self.session_id = session_id
        self.thread_id = thread_id
        self.turn_id = turn_id
        self.run_id = run_id
        self.execution_host: AgentExecutionHost | None = None

    def get(self, key: str) -> Any:
        """A value of the code that asks: `durable.origin` is the call a tool runs for (AS-27). None: there is none."""
        return current_origin() if key == ORIGIN_KEY else None


class Binding:
    """What an agent factory is called with (AS-05).

    Attributes:
        definition: what the Thread is pinned to.
        context: where the invocation runs.
    """

    def __init__(
        self, definition: records.Binding, context: RuntimeContext, workspace: DurableWorkspace | None = None
    ) -> None:
        self.definition = definition
        self.context = context
        self._workspace = workspace

    def workspace(self) -> DurableWorkspace:
        """The Thread's durable workspace: a store of versioned JSON values, and through `RemoteFilesystem` of files.

        Raises:
            Misuse: this binding was made by hand, for no run.
        """
        if self._workspace is None:
            raise Misuse("this binding belongs to no run, so it has no workspace")
        return self._workspace


class AgentBuilder:
    """An agent that is not built yet: the keyword arguments of `agentscope.agent.Agent`.

    `state` is the state a new Thread begins with (its permission rules, say); later Runs continue the stored one.
    Further arguments:

    Args:
        structured_schema: model class that the reply's structured output must conform to.
        workspace: an AgentScope workspace, or a `RemoteFilesystem`: the offloader, and the source of further tools and
            skills.
    """

    def __init__(self, *, structured_schema: Any = None, workspace: Any = None, **arguments: Any) -> None:
        self.structured_schema = structured_schema
        self.workspace = workspace
        self.arguments = arguments

    def __repr__(self) -> str:
        return f"AgentBuilder({', '.join(sorted(self.arguments))})"


AgentFactory = Callable[[Binding], AgentBuilder | Awaitable[AgentBuilder]]


class Factory:
    """An application's factory, with what is known of what it returned before."""

    def __init__(self, factory: AgentFactory, *, harness: bool) -> None:
        self._factory = factory
        self._harness = harness
        # By identity, for as long as the application itself keeps them: only those can be returned again.
        self._seen: WeakValueDictionary[int, Any] = WeakValueDictionary()

    async def describe(self, binding: Binding, *, agent_name: str) -> AgentBuilder:
        """One agent description, checked.

        Args:
            agent_name: name the Thread's state was written under; "" for a new Thread.

        Raises:
            AgentFactoryError: the factory raised, or broke its promise.
        """
        definition = binding.definition.harness
        try:
            described = self._factory(binding)
            if inspect.isawaitable(described):
                described = await described
        except DurableError:
            raise
        except Exception as error:
            raise AgentFactoryError(definition, f"{type(error).__name__}: {error}") from error
        self._check(definition, described, agent_name)
        return described

    def _check(self, definition: str, described: object, agent_name: str) -> None:
        from agentscope.agent import Agent

        if isinstance(described, Agent):
            raise AgentFactoryError(
                definition,
                "it returned a built Agent; return AgentBuilder(name=..., system_prompt=..., model=..., ...)",
            )
        if not isinstance(described, AgentBuilder):
            raise AgentFactoryError(definition, f"it returned a {type(described).__name__} instead of an AgentBuilder")
        arguments = described.arguments
        unknown = arguments.keys() - AGENT_ARGUMENTS
        if unknown:
            raise AgentFactoryError(definition, f"AgentBuilder has no argument {sorted(unknown)[0]!r}")
        for name in ("name", "system_prompt", "model"):
            if arguments.get(name) is None:
                raise AgentFactoryError(definition, f"AgentBuilder needs {name}=")
        self._check_types(definition, arguments)
        for what, part in (
            ("AgentBuilder", described),
            ("Toolkit", arguments.get("toolkit")),
            ("AgentState", arguments.get("state")),
        ):
            if part is not None:
                self._first_time(definition, what, part)
        if agent_name and arguments["name"] != agent_name:
            raise AgentFactoryError(
                definition,
                f"it named the agent {arguments['name']!r}, and this Thread's state belongs to {agent_name!r}: "
                "a renamed agent would not see its own calls",
            )
        if self._harness and described.workspace is None:
            raise AgentFactoryError(definition, "for_harness needs AgentBuilder(workspace=...)")

    @staticmethod
    def _check_types(definition: str, arguments: dict[str, Any]) -> None:
        from agentscope.model import ChatModelBase
        from agentscope.tool import Toolkit

        for name, kind in (("model", ChatModelBase), ("toolkit", Toolkit)):
            given = arguments.get(name)
            if given is not None and not isinstance(given, kind):
                raise AgentFactoryError(definition, f"{name}= takes a {kind.__name__}, not a {type(given).__name__}")

    def _first_time(self, definition: str, what: str, part: Any) -> None:
        if self._seen.get(id(part)) is part:
            raise AgentFactoryError(
                definition, f"it returned the same {what} twice; make a new one for each call of the factory"
            )
        self._seen[id(part)] = part


class Built(msgspec.Struct):
    """An agent and what its description said beyond it."""

    agent: Any
    structured_schema: Any

    def __repr__(self) -> str:
        return discreet(self)
