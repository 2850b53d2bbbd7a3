"""Which definitions a runtime knows: those it runs, those it makes when it meets them, and those of other hosts.

Rule 1: a Thread keeps its version for life (RT-12), so what runs it is looked up by the exact version, never by name.
Rule 2: a version that cannot be made here is another host's work. It is asked for again after a while, not at every
look, and its backlog holds up nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import Incompatible, Misuse, NotFound
from agentscope_durable.contracts.ids import check_id
from agentscope_durable.contracts.records import CLASS_SEPARATOR, Binding
from agentscope_durable.runtime.backoff import Backoff
from agentscope_durable.runtime.classify import ends_the_program
from agentscope_durable.runtime.host import Host
from agentscope_durable.spi.contained import contained
from agentscope_durable.spi.harness import HarnessAdapter

RESOLVED_MAX = 256
"""Versions made by resolvers that are kept at hand; the one used longest ago is made again when it is met again."""
DECLINED_SECONDS = 30.0
"""A version that a resolver did not make is asked for again after this."""
RESOLVE_SECONDS = 60.0
"""A resolver that takes longer is given up; it holds a place of a Run meanwhile."""
CLASSES_PAGE = 256
"""Versions with work that are looked at in one scan, for each resolver."""


class Definition(msgspec.Struct, frozen=True):
    """A definition's exact version: what a Thread is pinned to, whichever host runs it (RT-28)."""

    name: str
    definition_version: str
    state_version: str

    @property
    def binding(self) -> Binding:
        return Binding(self.name, self.definition_version, self.state_version)


class Harness(msgspec.Struct, frozen=True):
    """A definition this host can run: a name, the application's version of it, and the adapter that drives it."""

    name: str
    definition_version: str
    adapter: HarnessAdapter

    @property
    def binding(self) -> Binding:
        return Binding(self.name, self.definition_version, self.adapter.state_version)


class HarnessResolver(msgspec.Struct, frozen=True):
    """A definition whose versions are made when they are met (RT-34, RT-37).

    Attributes:
        name: of the definition. Versions registered as `Harness` under the same name are not asked for.
        resolve: the adapter of one exact version, or None to leave its Threads to other hosts. Called before a Turn
            is claimed and never while one is held; what it returns is kept for the Threads of that version.
    """

    name: str
    resolve: Callable[[Definition], HarnessAdapter | None | Awaitable[HarnessAdapter | None]]


DefinitionResolver = Callable[[str], Definition | None | Awaitable[Definition | None]]


class Definitions:
    """Names to what new Sessions are pinned to: the version registered last (RT-37)."""

    def __init__(
        self, harnesses: Sequence[Harness], definitions: Sequence[Definition], resolver: DefinitionResolver | None
    ) -> None:
        self._bindings = {harness.name: harness.binding for harness in harnesses}
        for one in definitions:
            self._bindings[one.name] = one.binding
        self._resolver = resolver

    async def resolve(self, name: str) -> Binding:
        """Raises NotFound when this runtime knows no such definition."""
        name = check_id("definition", name)
        known = self._bindings.get(name)
        if known is not None:
            return known
        if self._resolver is not None:
            found = self._resolver(name)
            definition = await found if inspect.isawaitable(found) else found
            if definition is not None:
                check_definition(definition)
                return definition.binding
        raise NotFound("definition", name).advising(
            "Give DurableRuntime the definition under this name in harnesses= or definitions=, or a definition_resolver"
        )


class Harnesses:
    """The adapter of each definition this host runs, by its exact version."""

    def __init__(
        self, host: Host, harnesses: Sequence[Harness], resolvers: Sequence[HarnessResolver], routes: Collection[str]
    ) -> None:
        self._host = host
        self._routes = routes
        self._registered = {harness.binding.ready_class: harness for harness in harnesses}
        self._served = {
            klass: harness.adapter
            for klass, harness in self._registered.items()
            if not self._missing_routes(harness.adapter)
        }
        self._resolvers = {resolver.name: resolver for resolver in resolvers}
        self._resolved: OrderedDict[str, HarnessAdapter] = OrderedDict()
        self._resolving: dict[str, asyncio.Future[None]] = {}
        self._declined = Backoff(host.environment, DECLINED_SECONDS, most=DECLINED_SECONDS)
        self._named: OrderedDict[str, None] = OrderedDict()
        self.on_declined: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        """Whether there is anything this host could run."""
        return bool(self._served or self._resolvers)

    @property
    def registered(self) -> tuple[Harness, ...]:
        return tuple(self._registered.values())

    @property
    def served(self) -> tuple[str, ...]:
        """Ready classes of what is registered here and whose tools all have an executor here (RC-04)."""
        return tuple(self._served)

    @property
    def names(self) -> tuple[str, ...]:
        """Definitions whose versions are made when they are met."""
        return tuple(self._resolvers)

    @property
    def declined(self) -> tuple[str, ...]:
        """Ready classes that a resolver did not make, as far as they were met of late."""
        return tuple(klass for klass in self._named if self._declined.holds(klass))

    async def classes(self) -> list[str]:
        """Ready classes to look for work in: what is registered, and what resolvers may make of what waits now."""
        found = list(self._served)
        for name in self._resolvers:
            prefix = name + CLASS_SEPARATOR
            waiting = await self._host.backend.ready_classes(keys.READY_TURN, prefix, limit=CLASSES_PAGE)
            found += [klass for klass in waiting if klass not in self._registered and self._askable(klass)]
        return found

    def _askable(self, klass: str) -> bool:
        return klass not in self._resolving and not self._declined.holds(klass)

    async def find(self, binding: Binding) -> HarnessAdapter | None:
        """What runs this version here; None when that is another host's, or is being found out at this moment."""
        klass = binding.ready_class
        known = self._served.get(klass)
        if known is not None:
            return known
        if klass in self._resolved:
            self._resolved.move_to_end(klass)
            return self._resolved[klass]
        resolver = self._resolvers.get(binding.harness)
        if resolver is None or klass in self._registered or not self._askable(klass):
            return None
        asked = self._resolving[klass] = asyncio.get_running_loop().create_future()
        try:
            adapter = await self._ask(resolver, binding)
        finally:
            del self._resolving[klass]
            asked.set_result(None)
        if adapter is None:
            self._declined.missed(klass)
            self._named[klass] = None
            while len(self._named) > RESOLVED_MAX:
                self._named.popitem(last=False)
            self.on_declined()
            return None
        self._resolved[klass] = adapter
        while len(self._resolved) > RESOLVED_MAX:
            self._resolved.popitem(last=False)
        return adapter

    async def made(self, binding: Binding) -> HarnessAdapter | None:
        """As `find`; what is being found out at this moment is waited for."""
        while asked := self._resolving.get(binding.ready_class):
            await asyncio.wait({asked})
        return await self.find(binding)

    async def made_now(self, binding: Binding) -> HarnessAdapter | None:
        """As `made`; a version that was declined of late is asked for again, because somebody waits for the answer."""
        self._declined.done(binding.ready_class)
        return await self.made(binding)

    async def _ask(self, resolver: HarnessResolver, binding: Binding) -> HarnessAdapter | None:
        definition = Definition(binding.harness, binding.definition_version, binding.state_version)
        name = f"definition {binding.harness!r} {binding.definition_version!r}"
        task = asyncio.current_task()
        try:
            found = resolver.resolve(definition)
            async with asyncio.timeout(RESOLVE_SECONDS):
                adapter = await contained(found, name=name) if inspect.isawaitable(found) else found
            if adapter is None:
                return None
            if adapter.state_version != binding.state_version:
                raise Incompatible(name, required=binding.state_version, present=adapter.state_version)
            self._require_routes(name, adapter)
        except BaseException as error:
            # One version that cannot be made must not stop the others, whatever its module or a library raises.
            if ends_the_program(error, task):
                raise
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            self._host.report(error, "a definition is not run here")
            return None
        return adapter

    def tell_missing_routes(self) -> None:
        """Report what is registered here and cannot run for want of an executor."""
        for klass, harness in self._registered.items():
            if klass not in self._served:
                try:
                    self._require_routes(f"definition {harness.name!r}", harness.adapter)
                except Incompatible as error:
                    self._host.report(error, "a definition is not run here")

    def _missing_routes(self, adapter: HarnessAdapter) -> list[str]:
        return sorted(adapter.routes - set(self._routes))

    def _require_routes(self, name: str, adapter: HarnessAdapter) -> None:
        missing = self._missing_routes(adapter)
        if missing:
            raise Incompatible(name, required=f"executors for {', '.join(missing)}", present="none")


def check_definition(one: Definition) -> None:
    if not isinstance(one, Definition):
        raise Misuse(f"Definition(...) was expected, not {type(one).__name__}")
    check_id("definition", one.name)
    check_id("definition_version", one.definition_version)
    check_id("state_version", one.state_version)


def check_harnesses(harnesses: Sequence[Harness | HarnessResolver]) -> tuple[list[Harness], list[HarnessResolver]]:
    """Those that are registered, and those that resolve; each is checked and none is there twice."""
    if isinstance(harnesses, Harness | HarnessResolver):
        raise Misuse("harnesses is a list: harnesses=[Harness(...)]")
    registered: dict[str, Harness] = {}
    resolvers: dict[str, HarnessResolver] = {}
    for one in harnesses:
        if isinstance(one, HarnessResolver):
            check_id("definition", one.name)
            if not callable(one.resolve):
                raise Misuse(f"resolve of HarnessResolver {one.name!r} must be a function of a Definition")
            if one.name in resolvers:
                raise Misuse(f"harness {one.name!r} has two resolvers")
            resolvers[one.name] = one
            continue
        if not isinstance(one, Harness):
            raise Misuse(f"Harness(...) or HarnessResolver(...) was expected, not {type(one).__name__}")
        check_id("definition", one.name)
        check_id("definition_version", one.definition_version)
        check_id("state_version", one.adapter.state_version)
        klass = one.binding.ready_class
        if klass in registered:
            raise Misuse(f"harness {one.name!r} {one.definition_version!r} is registered twice")
        registered[klass] = one
    return list(registered.values()), list(resolvers.values())
