"""`DurableRuntime`: what an application opens. It admits and reads; once started it also runs Turns.

Rule 1: nothing runs before `start()`, and a runtime that never starts is a complete API host (RT-04, RT-28).
Rule 2: ending a host ends nothing else. Turns are given back at a boundary, and whoever runs next goes on (LF-02).
Rule 3: everything it started ends with `close()`: tasks, heartbeat, streams.
"""

from __future__ import annotations

import asyncio
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, overload

import msgspec

from agentscope_durable.contracts.commands import CreateSession
from agentscope_durable.contracts.errors import Misuse, NoExecutionConfiguration, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.ids import check_id, check_key
from agentscope_durable.contracts.questions import ListSessions
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.views import (
    CapabilitiesView,
    ExecutorCapabilitiesView,
    HarnessCapabilitiesView,
    Page,
    RecoveryPolicy,
)
from agentscope_durable.runtime.checkpoint import Baselines, Codecs, check_codecs
from agentscope_durable.runtime.classify import RetryableFailure
from agentscope_durable.runtime.definitions import (
    Definition,
    DefinitionResolver,
    Definitions,
    Harness,
    Harnesses,
    HarnessResolver,
    check_definition,
    check_harnesses,
)
from agentscope_durable.runtime.door import Door
from agentscope_durable.runtime.handles import PAGE_LIMIT, DurableSession
from agentscope_durable.runtime.host import Host, OnError, log
from agentscope_durable.runtime.live import LocalLiveEvents
from agentscope_durable.runtime.observers import OBSERVER_PARALLELISM
from agentscope_durable.runtime.tasks import Tasks
from agentscope_durable.spi.backend import Heartbeat, SessionBackend
from agentscope_durable.spi.checkpoint import CheckpointCodec
from agentscope_durable.spi.environment import SYSTEM, Environment, recovers_every_step
from agentscope_durable.spi.executor import Executor
from agentscope_durable.spi.harness import HarnessCapabilities
from agentscope_durable.spi.live import LiveEvents

if TYPE_CHECKING:
    from agentscope_durable.runtime.dispatch import Dispatcher
    from agentscope_durable.runtime.runner import Runner
    from agentscope_durable.runtime.scheduler import Scheduler

CLOSE_TIMEOUT = 5.0
"""Seconds a Run has to come to a boundary when its host closes (D23)."""
CANCEL_TIMEOUT = 2.0
"""Seconds for what was cancelled after that to give its Thread back."""
DRAIN_TIMEOUT = 30.0
EXECUTOR_PARALLELISM = 64


class DurableRuntime:
    """Durable Sessions over a backend, and a host that runs them once it is started.

        async with DurableRuntime(backend=backend, harnesses=[Harness("assistant", "v1", adapter)]) as runtime:
            session = await runtime.create_session(SessionKey("application", "conversation-1"), "assistant")
            await runtime.start()
            turn = await session.submit("request-1", "Describe this workspace")

    It belongs to the event loop and process of its first use. Leaving the context closes it; the backend stays open.

    Args:
        backend: where everything is stored.
        harnesses: definitions this host can run. Several versions of one name may be registered; the last is the one
            that new Sessions get. A HarnessResolver makes the versions of its name when it meets them.
        executors: executors of external tools, by route.
        definitions: further definitions for new Sessions, which other hosts run.
        definition_resolver: asked for a definition of any other name.
        checkpoints: codecs by name of a definition, for `restore` and `fork` on a host that does not run it; a
            harness that is registered here needs none (CK-03).
        recovery_policy: how failed invocations are tried again, for Turns that have not failed before.
        retryable_failure: the application's classification of what an adapter leaves open (RC-15).
        poll_interval: seconds between two looks for work, events or controls when no hint comes.
        lease: seconds after which a host that stopped renewing counts as gone.
        parallelism: Turns in hand at once.
        executor_parallelism: tool executions in hand at once.
        observer_parallelism: callbacks of subscriptions that run at once, over all of them (ST-14).
        on_error: told of errors that no caller sees.
        live_events: where previews travel; by default where the backend says, else within this runtime.
        close_timeout: seconds a Run has to come to a boundary when the runtime closes.
        takeovers_max: takeovers of one Turn without a new checkpoint after which a person must look (D13).
        host_name: for people; the identity adds a nonce of this process.
        recover_every_step: for tests: drop each Run after each Step and take it over, so that what is not stored is
            missed at once. By default as the variable DURABLE_RECOVER_EVERY_STEP says (1 or 0).
    """

    def __init__(
        self,
        *,
        backend: SessionBackend,
        harnesses: Sequence[Harness | HarnessResolver] = (),
        executors: Mapping[str, Executor] | None = None,
        definitions: Sequence[Definition] = (),
        definition_resolver: DefinitionResolver | None = None,
        checkpoints: Mapping[str, CheckpointCodec] | None = None,
        recovery_policy: RecoveryPolicy | None = None,
        retryable_failure: RetryableFailure | None = None,
        poll_interval: float = 0.5,
        lease: float = 30.0,
        parallelism: int = 4,
        executor_parallelism: int = EXECUTOR_PARALLELISM,
        observer_parallelism: int = OBSERVER_PARALLELISM,
        on_error: OnError | None = None,
        live_events: LiveEvents | None = None,
        close_timeout: float = CLOSE_TIMEOUT,
        takeovers_max: int = 5,
        host_name: str | None = None,
        recover_every_step: bool | None = None,
        environment: Environment = SYSTEM,
    ) -> None:
        if backend is None:  # pyright: ignore[reportUnnecessaryComparison] - callers without a type checker
            raise Misuse("a runtime needs a backend")
        if not hasattr(backend, "execute"):
            raise Misuse("the backend is not open: `async with LocalBackend.open(...) as backend`, or await it")
        _check_number("poll_interval", poll_interval)
        _check_number("lease", lease)
        _check_number("parallelism", parallelism, whole=True)
        _check_number("executor_parallelism", executor_parallelism, whole=True)
        _check_number("observer_parallelism", observer_parallelism, whole=True)
        _check_number("close_timeout", close_timeout, zero=True)
        _check_number("takeovers_max", takeovers_max, whole=True, zero=True)
        registered, resolvers = check_harnesses(harnesses)
        for one in definitions:
            check_definition(one)
        _check_routes(executors or {})
        check_codecs(checkpoints or {})
        self._backend = backend
        self._executors = dict(executors or {})
        self._environment = environment
        self._close_timeout = close_timeout
        self._lease_ms = max(1, int(lease * 1000))
        live = live_events or backend.live_events() or LocalLiveEvents()
        self._definitions = Definitions(registered, definitions, definition_resolver)
        self._host = Host(
            backend=backend,
            environment=environment,
            owner=_identity(host_name, environment),
            poll_interval=poll_interval,
            live=live,
            on_error=on_error,
            recover_every_step=recovers_every_step() if recover_every_step is None else recover_every_step,
        )
        self._harnesses = Harnesses(self._host, registered, resolvers, tuple(self._executors))
        codecs = Codecs(checkpoints or {}, registered, self._harnesses.made_now)
        self._door = Door(
            backend=backend,
            environment=environment,
            poll_interval=poll_interval,
            live=live,
            definitions=self._definitions,
            baselines=Baselines(backend, environment, codecs),
            report=self._host.report,
            observer_parallelism=observer_parallelism,
        )
        policy = _check_policy(recovery_policy)
        self._runner: Runner | None = None
        if self._harnesses:
            # What runs agents is loaded where agents run; a host that only admits and reads starts faster without it.
            from agentscope_durable.runtime.runner import Runner

            self._runner = Runner(
                self._host,
                self._harnesses,
                policy=policy,
                retryable_failure=retryable_failure,
                takeovers_max=takeovers_max,
                admitted=self._door.admitted,
            )
        self._parallelism = parallelism
        self._executor_parallelism = executor_parallelism
        self._scheduler: Scheduler | None = None
        self._dispatcher: Dispatcher | None = None
        self._heartbeat: Heartbeat | None = None
        self._started = False
        self._loops = Tasks()
        self._starting: asyncio.Lock | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def owner(self) -> str:
        """Identity of this host, as leases and Runs name it."""
        return self._host.owner

    # ---- life ----

    async def __aenter__(self) -> Self:
        self._door.check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin to look for work, to run it and to recover what others have left (LF-10). A second call does nothing.

        Raises:
            NoExecutionConfiguration: there is nothing this runtime could run (RT-30).
        """
        self._door.check()
        if not self._harnesses.registered and not self._harnesses.names and not self._executors:
            raise NoExecutionConfiguration
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._started or self._host.draining:
                return
            if self._heartbeat is None:
                self._harnesses.tell_missing_routes()
                heartbeat = self._heartbeat = self._backend.heartbeat(self.owner, self._lease_ms, self._notice())
                self._host.on_asked_again = lambda: heartbeat.publish(self._notice())
                if self._runner is not None:
                    self._runner.on_refused = self._harnesses.on_declined = lambda: heartbeat.publish(self._notice())
            # The lease stands before the first claim. The first renewal blocks, so not on the loop; from here on it
            # is ours to stop, even if nobody waits for it any more.
            await self._environment.call_in_thread(self._heartbeat.start)
            if self._host.draining:
                return
            self._started = True
            if self._runner is not None:
                from agentscope_durable.runtime.scheduler import Scheduler

                self._scheduler = Scheduler(self._host, self._runner, parallelism=self._parallelism)
                self._loops.start(self._scheduler.run(), name="scheduler")
            if self._executors:
                from agentscope_durable.runtime.dispatch import Dispatcher

                self._dispatcher = Dispatcher(self._host, self._executors, parallelism=self._executor_parallelism)
                self._loops.start(self._dispatcher.run(), name="dispatcher")
            log.info("host %s started", self.owner, extra={"owner": self.owner})

    def _notice(self) -> bytes:
        """What this host tells the others with each renewal of its lease."""
        return msgspec.json.encode(
            HostNotice(
                classes=self._harnesses.served,
                routes=tuple(self._executors),
                draining=self._host.draining,
                refused=() if self._runner is None else self._runner.refused,
                names=self._harnesses.names,
                declined=self._harnesses.declined,
                parallelism=0 if self._runner is None else self._parallelism,
                asked_again=self._host.asked_again,
            )
        )

    async def drain(self, timeout: float | None = DRAIN_TIMEOUT) -> bool:
        """Take no new work, and wait until what runs here has ended; admitting and reading go on (D20).

        The lease is kept until the last owned Thread is committed (C21).

        Returns:
            True when nothing is in hand any more. False when the time was up: the host has then stopped its Runs at
            a boundary and given them back, so that another one goes on (LF-01).
        """
        self._door.check()
        self._host.draining = True
        if self._heartbeat is not None:
            self._heartbeat.publish(self._notice())
        if self._scheduler is None:
            return True
        self._scheduler.wake()
        if await self._scheduler.runs.wait(timeout):
            return True
        await self._stop()
        return False

    async def close(self) -> None:
        """End this host; durable work and the backend stay as they are (LF-02).

        No new claims, up to `close_timeout` for Runs to reach a boundary, then everything is given back and the lease
        released. It runs out by itself if the answer to a claim was lost: that may still be carried out. Open streams
        end. Safe to call twice, and from a callback or a tool (LF-09).
        """
        if self._closing is None:
            if self._door.closed:
                return
            self._door.check()
            self._closing = asyncio.create_task(self._close(), name="close runtime")
        if self._runs_caller():
            # What waits for this task to end cannot be waited for by it.
            return
        await asyncio.shield(self._closing)

    def _runs_caller(self) -> bool:
        groups = [self._host.tasks, self._loops, self._door.callbacks]
        if self._scheduler is not None:
            groups.append(self._scheduler.runs)
        if self._dispatcher is not None:
            groups.append(self._dispatcher.work)
        return any(group.owns_caller() for group in groups)

    async def _close(self) -> None:
        try:
            await self._stop()
            for group in (self._host.tasks, self._loops):
                group.cancel()
                await group.wait(CANCEL_TIMEOUT)
            clean = await self._nothing_owned()
            self._host.ended = True
            if self._heartbeat is not None:
                await self._heartbeat.stop(release=clean and not self._host.unheard)
        except Exception as error:  # noqa: BLE001 - what could not be released expires by itself
            self._host.report(error, "closing the host was not complete", owner=self.owner)
        finally:
            await self._door.close()
            log.info("host %s closed", self.owner, extra={"owner": self.owner})

    async def _nothing_owned(self) -> bool:
        """Whether the store agrees that this host has given everything back. If not, its lease must expire instead."""
        try:
            async with asyncio.timeout(CANCEL_TIMEOUT):
                runs = self._scheduler is None or await self._scheduler.audit()
                calls = self._dispatcher is None or await self._dispatcher.audit(ending=True)
                return runs and calls
        except Exception as error:  # noqa: BLE001 - TimeoutError among them
            self._host.report(error, "what this host owns could not be given back", owner=self.owner)
            return False

    async def _stop(self) -> None:
        """Bring what is in hand to a boundary and give it back, within named bounds."""
        self._host.draining = self._host.closing = True
        if self._runner is not None:
            self._runner.tell()
        groups: list[Tasks] = []
        if self._scheduler is not None:
            self._scheduler.wake()
            groups.append(self._scheduler.runs)
        if self._dispatcher is not None:
            self._dispatcher.wake()
            groups.append(self._dispatcher.work)
        await asyncio.gather(*(group.wait(self._close_timeout) for group in groups))
        for group in groups:
            group.cancel()
        await asyncio.gather(*(group.wait(CANCEL_TIMEOUT) for group in groups))
        left = sum(len(group) for group in groups)
        if left:
            log.warning("%d tasks did not stop; what they hold ends with this host's lease", left)
        # Commits in flight, and what is still being given back.
        await self._host.tasks.wait(CANCEL_TIMEOUT)

    # ---- Sessions ----

    async def create_session(self, key: SessionKey, definition: str) -> DurableSession:
        """A Session with its main Thread, pinned to the present version of `definition`. A repeat changes nothing.

        Raises:
            DefinitionConflict: it exists with another definition (AD-16).
            NotFound: no definition of this name is known to this runtime.
        """
        check_key(key)
        self._door.check()
        binding = await self._definitions.resolve(definition)
        await self._door.execute(CreateSession(session=key, binding=binding))
        return DurableSession(self._door, key)

    def get_session(self, key: SessionKey) -> DurableSession:
        """A handle, without any I/O; whether there is such a Session is seen at its first operation (RT-56)."""
        return DurableSession(self._door, key)

    async def list_sessions(self, namespace: str, cursor: str | None = None, limit: int = PAGE_LIMIT) -> Page:
        """Sessions of one namespace (RT-16)."""
        return await self._door.query(
            ListSessions(namespace=check_id("namespace", namespace), cursor=cursor, limit=limit)
        )

    # ---- what it can promise ----

    @overload
    async def capabilities(self) -> CapabilitiesView: ...
    @overload
    async def capabilities(self, definition: str | Definition) -> HarnessCapabilitiesView: ...
    async def capabilities(
        self, definition: str | Definition | None = None
    ) -> CapabilitiesView | HarnessCapabilitiesView:
        """What this assembly guarantees, or what one definition does; starts and claims nothing (RT-33, RT-35).

        Args:
            definition: a name stands for the version registered last; an exact version may be one that a resolver
                makes.

        Raises:
            NotFound: this runtime has no harness for the definition.
        """
        self._door.check()
        if definition is not None:
            return await self._harness_capabilities(definition)
        store = self._backend.capabilities
        return CapabilitiesView(
            persistent=store.persistent,
            shared=store.shared,
            hosts_shared=store.hosts_shared,
            harnesses=tuple(
                _harness_view(harness.binding, harness.adapter.capabilities) for harness in self._harnesses.registered
            ),
            executors=tuple(_executor_view(route, executor) for route, executor in self._executors.items()),
            resolved_harnesses=self._harnesses.names,
        )

    async def _harness_capabilities(self, definition: str | Definition) -> HarnessCapabilitiesView:
        if isinstance(definition, Definition):
            check_definition(definition)
            binding = definition.binding
            found = [harness.adapter for harness in self._harnesses.registered if harness.binding == binding]
            adapter = found[-1] if found else await self._harnesses.made(binding)
            if adapter is None:
                raise NotFound("harness", f"{definition.name} {definition.definition_version}")
            return _harness_view(binding, adapter.capabilities)
        named = [harness for harness in self._harnesses.registered if harness.name == definition]
        if named:
            return _harness_view(named[-1].binding, named[-1].adapter.capabilities)
        if definition in self._harnesses.names:
            raise Misuse(f"{definition!r} is resolved by version: ask with Definition({definition!r}, version, state)")
        raise NotFound("harness", definition)

    async def execution_capabilities(self) -> CapabilitiesView:
        """As `capabilities()`: what the backend guarantees, the harnesses recover, and the executors answer (RT-33)."""
        return await self.capabilities()


def _check_number(name: str, number: float, *, whole: bool = False, zero: bool = False) -> None:
    known = isinstance(number, int if whole else int | float) and not isinstance(number, bool)
    if not known or not (number >= 0 if zero else number > 0) or number == math.inf:
        wanted = ("a whole number" if whole else "a number of seconds") + (" from 0 on" if zero else " above 0")
        raise Misuse(f"{name} must be {wanted}, not {number!r}")


def _check_policy(policy: RecoveryPolicy | None) -> RecoveryPolicy:
    try:
        # It is stored with a Turn's first failure, and must be readable for ever.
        return msgspec.convert(msgspec.to_builtins(policy or RecoveryPolicy()), RecoveryPolicy)
    except (msgspec.ValidationError, TypeError) as error:
        raise Misuse(f"recovery_policy must be a RecoveryPolicy: {error}") from error


def _check_routes(executors: Mapping[str, Executor]) -> None:
    for route in executors:
        check_id("route", route)


def _identity(host_name: str | None, environment: Environment) -> str:
    """A name for people and a nonce of this process (C14). It may become a file name, so it is kept plain."""
    name = re.sub(r"[^a-z0-9_-]", "-", (host_name or platform.node() or "host").lower())[:48]
    return f"{name}-{os.getpid()}-{environment.random_bytes(8).hex()}"


def _harness_view(binding: Binding, capabilities: HarnessCapabilities) -> HarnessCapabilitiesView:
    return HarnessCapabilitiesView(
        harness=binding.harness,
        definition_version=binding.definition_version,
        state_version=binding.state_version,
        recovery=capabilities.recovery,
        delivery=capabilities.delivery,
    )


def _executor_view(route: str, executor: Executor) -> ExecutorCapabilitiesView:
    capabilities = executor.capabilities
    return ExecutorCapabilitiesView(
        route=route, query=capabilities.query, cancel=capabilities.cancel, output=capabilities.output
    )


__all__ = ["Definition", "DurableRuntime", "Harness", "HarnessResolver"]
