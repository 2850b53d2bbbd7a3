"""AgentScope agents under Durable.

Rule: public AgentScope only. Middlewares, the agent's state and its events carry all of it; the one exception are the
four protected override points of a model class, on a proxy, by which single requests are seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, Unpack

from agentscope_durable.adapters.agentscope.baseline import AgentScopeCheckpoints
from agentscope_durable.adapters.agentscope.binding import AgentFactory, Factory
from agentscope_durable.adapters.agentscope.classify import classify_error
from agentscope_durable.adapters.agentscope.library import may_continue, require, warn_if_untested
from agentscope_durable.adapters.agentscope.mirror import Mirror, settled_state
from agentscope_durable.adapters.agentscope.run import Run, Setup
from agentscope_durable.adapters.agentscope.settle import settle_turn
from agentscope_durable.adapters.agentscope.tools import Bindings, ToolBinding, as_bindings
from agentscope_durable.contracts.commands import RunEnd
from agentscope_durable.contracts.errors import InvalidRequest, Misuse
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.journal import STATE_VERSION, CheckpointRow
from agentscope_durable.contracts.status import EventDelivery, RecoveryBoundary, ReplayRule
from agentscope_durable.journal.models import ModelCallPolicy, ModelRequestObserver
from agentscope_durable.journal.scheduling import Channels, JournalScheduling
from agentscope_durable.journal.state_store import AgentStateStore
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.checkpoint import NativeBaseline
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.harness import HarnessCapabilities, RunContext, SettleContext, Settlement

__all__ = ["AdapterOptions", "AgentScopeAdapter"]


class AdapterOptions(TypedDict, total=False):
    """What `for_react` and `for_harness` take by keyword.

    Attributes:
        replay_rules: by tool name `safe` or `never`: whether a local tool whose outcome was lost may be run again
            (D18). A tool that is read-only is safe without being named here.
        accept_untested_agentscope: continue Turns in flight on releases this one was not tested with (D21).
        state_store: where programs of AgentScope 2.0 keep the agent's state: a main Thread begins with it, and each
            settled state is copied there (D21).
        model_call_policy: decides about each model call before it is made.
        model_request_observer: told of each request.
        scheduling: bounds of commits under way; from the environment when not given.
        environment: clock and threads.
    """

    replay_rules: Mapping[str, ReplayRule | str] | None
    accept_untested_agentscope: bool
    state_store: AgentStateStore | None
    model_call_policy: ModelCallPolicy | None
    model_request_observer: ModelRequestObserver | None
    scheduling: JournalScheduling | None
    environment: Environment


class AgentScopeAdapter:
    """Drives AgentScope agents: a `HarnessAdapter`. Made by `for_react` or `for_harness`."""

    def __init__(
        self,
        factory: AgentFactory,
        bindings: Bindings = (),
        *,
        harness: bool = False,
        **options: Unpack[AdapterOptions],
    ) -> None:
        for name in options.keys() - AdapterOptions.__annotations__.keys():
            raise TypeError(f"AgentScopeAdapter has no option {name!r}")
        if not callable(factory):
            raise InvalidRequest(
                f"give a factory, `def make_agent(binding): return AgentBuilder(...)`, not {type(factory).__name__}",
                path="factory",
            )
        self._version = require()
        self._accept_untested = options.get("accept_untested_agentscope", False)
        self._bindings = as_bindings(bindings)
        rules, store = options.get("replay_rules") or {}, options.get("state_store")
        self._setup = Setup(
            factory=Factory(factory, harness=harness),
            bindings=self._bindings,
            rules={name: _replay_rule(name, rule) for name, rule in rules.items()},
            version=self._version,
            channels=Channels(options.get("scheduling")),
            environment=options.get("environment", SYSTEM),
            policy=options.get("model_call_policy"),
            observer=options.get("model_request_observer"),
            mirror=None if store is None else Mirror(store),
        )
        if not self._accept_untested:
            warn_if_untested(self._version)

    @classmethod
    def for_react(
        cls, factory: AgentFactory, bindings: Bindings = (), **options: Unpack[AdapterOptions]
    ) -> AgentScopeAdapter:
        """An adapter of the agents that a factory describes (AS-01).

        Args:
            factory: called once for every Run with a `Binding`; returns, or is awaited for, a new `AgentBuilder`.
            bindings: tools that run elsewhere: by name a `ToolBinding` or a route, or a list of bindings.
            options: see `AdapterOptions`.

        Raises:
            MissingExtra: AgentScope is not installed.
            InvalidRequest: the factory, a binding or a rule is not one.
        """
        return cls(factory, bindings, **options)

    @classmethod
    def for_harness(
        cls, factory: AgentFactory, bindings: Bindings = (), **options: Unpack[AdapterOptions]
    ) -> AgentScopeAdapter:
        """The same for agents with a workspace: the factory returns `AgentBuilder(..., workspace=...)` (AS-02)."""
        return cls(factory, bindings, harness=True, **options)

    # ---- HarnessAdapter ----

    @property
    def state_version(self) -> str:
        return STATE_VERSION

    @property
    def writer(self) -> str:
        """The release of AgentScope that writes native state here."""
        return self._version

    @property
    def capabilities(self) -> HarnessCapabilities:
        return HarnessCapabilities(recovery=RecoveryBoundary.TOOL_BOUNDARY, delivery=EventDelivery.DELTA)

    @property
    def routes(self) -> frozenset[str]:
        return frozenset(bound.route for bound in self._bindings.values())

    @property
    def bindings(self) -> Mapping[str, ToolBinding]:
        """The catalogue that whoever performs these tools needs as well (TB-01)."""
        return dict(self._bindings)

    def accepts_writer(self, writer: str) -> bool:
        return may_continue(writer, installed=self._version, accept_untested=self._accept_untested)

    async def run(self, context: RunContext) -> RunEnd | None:
        return await Run(self._setup, context).run()

    async def settle(self, context: SettleContext) -> Settlement:
        return await settle_turn(context, installed=self._version, mirror=self._setup.mirror)

    async def copy_state(self, backend: SessionBackend, session: SessionKey) -> bool:
        """Let the state store have the main Thread's last settled state, whatever kept a former copy from it (AS-31).

        For the way back to AgentScope 2.0: a copy that failed is made up for by the next Turn, and there may be none.
        Builds no agent. Returns whether the copy stands there now; False also when nothing is settled yet.

        Raises:
            Misuse: this adapter has no state store.
            NotFound: there is no such Session.
        """
        mirror = self._setup.mirror
        if mirror is None:
            raise Misuse("this adapter has no state store: give for_react(..., state_store=...)")
        state = await settled_state(backend, session, installed=self._version)
        return state is not None and await mirror.copy(session, state)

    @staticmethod
    def restore(baseline: NativeBaseline, /) -> tuple[CheckpointRow, ...]:
        return AgentScopeCheckpoints.restore(baseline)

    def classify(self, error: BaseException) -> bool | None:
        return classify_error(error)


def _replay_rule(name: str, rule: ReplayRule | str) -> ReplayRule:
    try:
        return ReplayRule(rule)
    except ValueError:
        raise InvalidRequest(f"a replay rule is 'safe' or 'never', not {rule!r}", path=f"replay_rules.{name}") from None
