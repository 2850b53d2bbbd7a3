"""Read, decide, write, tell: the only place that opens a Session's transaction.

It knows no rule. It looks the command up in `RULES`, draws the seed that identifies the commit, and
lets the store read and decide atomically. Hints go out after the commit; from there on nothing may
fail the caller, because a lost hint only costs time (BE-12).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from msgspec.structs import astuple, replace

from agentscope_durable.backend.bodies import Bodies
from agentscope_durable.backend.heartbeat import LeaseHeartbeat
from agentscope_durable.backend.policy import ask, check_policy, governed
from agentscope_durable.backend.queries import Queries
from agentscope_durable.backend.sweep import SWEEP_LIMIT_MAX, Sweep
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES, Body
from agentscope_durable.contracts.commands import (
    AnyCommand,
    CommitStep,
    ForkThread,
    ObjectMarked,
    RecordObject,
    RepairThread,
    RestoreThread,
    SettleTurn,
)
from agentscope_durable.contracts.errors import Forbidden, InvalidRequest
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.contracts.views import SweepReport
from agentscope_durable.domain.rules import RULES, Rule
from agentscope_durable.spi.backend import Heartbeat, Wakeups
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.spi.live import LiveEvents
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.spi.policy import CommitPolicy
from agentscope_durable.spi.record_store import (
    PAGE_MAX,
    Capabilities,
    Change,
    OwnerLease,
    Reads,
    ReadyPage,
    ReadyScan,
    RecordStore,
    Unchanged,
    View,
)

log = logging.getLogger("agentscope_durable.backend")

_ADMITS: dict[Audience, frozenset[Audience]] = {
    Audience.PUBLIC: frozenset({Audience.PUBLIC}),
    Audience.HOST: frozenset({Audience.PUBLIC, Audience.HOST}),
    Audience.OPERATOR: frozenset({Audience.PUBLIC, Audience.HOST, Audience.OPERATOR}),
}
"""What each audience may send."""


_WITH_JOURNAL = (CommitStep, SettleTurn)
_WITH_NATIVE = (RestoreThread, ForkThread, RepairThread)


class NoWakeups:
    """Hints go nowhere: every listener lives by polling."""

    def publish(self, keys: tuple[str, ...]) -> None:
        del keys

    @asynccontextmanager
    async def listen(self, keys: frozenset[str] | None = None) -> AsyncGenerator[AsyncIterator[frozenset[str]]]:
        del keys

        async def nothing() -> AsyncIterator[frozenset[str]]:
            for key in ():
                yield frozenset({key})

        yield nothing()


class TransactionalSessionBackend:
    """The full backend over any RecordStore that keeps its promises (BE-05).

    Args:
        records: the store; its `capabilities` must be declared.
        objects: where bodies over 64 KiB go; None keeps them in the records.
        wakeups: transport of change hints; None lives by polling.
        live_events: transport of previews between the runtimes over this store; None: each is on its own.
        policy: authorisation inside the transaction (BE-18).
        environment: time, chance and threads.

    The backend closes the record store it was given only if `owns_store` is set.
    """

    def __init__(
        self,
        records: RecordStore,
        objects: ObjectStore | None = None,
        *,
        wakeups: Wakeups | None = None,
        live_events: LiveEvents | None = None,
        policy: CommitPolicy | None = None,
        environment: Environment = SYSTEM,
        owns_store: bool = False,
    ) -> None:
        declared = getattr(records, "capabilities", None)
        if not isinstance(declared, Capabilities) or not all(isinstance(flag, bool) for flag in astuple(declared)):
            raise InvalidRequest(
                "a record store must declare its persistence and sharing as `capabilities`, each with True or False",
                path="records",
            )
        if objects is not None and not isinstance(getattr(objects, "persistent", None), bool):
            raise InvalidRequest("an object store must declare whether it is `persistent`", path="objects")
        check_policy(policy)
        self._records = records
        self._objects = objects
        self._wakeups: Wakeups = wakeups or NoWakeups()
        self._live_events = live_events
        self._policy = policy
        self._environment = environment
        self._owns_store = owns_store
        self._bodies = Bodies(objects, self._mark)
        self._queries = Queries(records, self._bodies)

    @property
    def capabilities(self) -> Capabilities:
        return self._records.capabilities

    @property
    def records(self) -> RecordStore:
        """The store below, for host tools; applications use commands and queries."""
        return self._records

    @property
    def objects(self) -> ObjectStore | None:
        """Where large bodies are, for host tools; None: every body is in the records."""
        return self._objects

    def with_wakeups(self, wakeups: Wakeups) -> TransactionalSessionBackend:
        """The same store, publishing its hints through another transport (BE-06)."""
        return TransactionalSessionBackend(
            self._records,
            self._objects,
            wakeups=wakeups,
            live_events=self._live_events,
            policy=self._policy,
            environment=self._environment,
            owns_store=self._owns_store,
        )

    async def execute(self, command: AnyCommand, *, audience: Audience = Audience.PUBLIC) -> Any:
        """Carry out a command and return its receipt.

        Raises:
            Rejected: it can never succeed as written; nothing changed.
            Retry: nothing changed; ask again.
            Uncertain: it may have happened; repeat the same request id, or read.
        """
        rule = RULES.get(type(command))
        if rule is None:
            raise InvalidRequest(f"unknown command {type(command).__name__}")
        if rule.audience not in _ADMITS[audience]:
            raise Forbidden(f"command {type(command).__name__} by audience {audience.value}")
        command = await self._externalize(command)
        seed = self._environment.random_bytes(16)  # kept over retries: ids are derived from it
        reads, decide = self._bind(rule, command, seed, audience)
        committed = await self._records.transact(keys.partition(command.session), reads, decide)
        if committed.changed:
            self._tell(committed.hints)
        return committed.receipt

    def _bind(self, rule: Rule, command: AnyCommand, seed: bytes, audience: Audience) -> tuple[Reads, Any]:
        reads = rule.reads(command)
        if self._policy is None or not governed(command):
            return reads, partial(rule.decide, command, seed)
        asked = ask(self._policy, command, audience)

        def decide(view: View, now_ms: int) -> Change | Unchanged:
            change = rule.decide(command, seed, view, now_ms)
            # Only what would change something is judged: a repeat is answered as it was, whatever the rule is now.
            if isinstance(change, Change):
                asked.check(view, now_ms)
            return change

        return reads.merged(asked.reads), decide

    async def _externalize(self, command: AnyCommand) -> AnyCommand:
        """Large native blocks leave the records before the transaction (D11)."""
        if isinstance(command, _WITH_JOURNAL):
            if len(command.journal) > INLINE_MAX_BYTES:
                return replace(command, journal=await self._bodies.put_column(command.session, command.journal))
        elif isinstance(command, _WITH_NATIVE) and command.native is not None:
            # Into the scope of the Session that is written: what a fork came from may be removed (CK-17).
            journal = await self._bodies.put_column(command.session, command.native.journal)
            return replace(command, native=replace(command.native, journal=journal))
        return command

    async def _mark(self, session: SessionKey, digest: str, size: int) -> ObjectMarked:
        command = RecordObject(session=session, digest=digest, size=size)
        return await self.execute(command, audience=Audience.HOST)

    def _tell(self, hints: tuple[str, ...]) -> None:
        try:
            self._wakeups.publish(hints)
        except Exception as error:  # noqa: BLE001 - the commit stands; polling repairs a lost hint
            # Without its text: it is a stranger's, and may hold a secret (D25).
            log.warning("a change hint was lost: %s", type(error).__name__)

    async def query(self, question: Any, *, audience: Audience = Audience.PUBLIC) -> Any:
        """Answer a question; changes nothing and starts nothing (RT-21)."""
        if self._queries.audience(question) not in _ADMITS[audience]:
            raise Forbidden(f"question {type(question).__name__} by audience {audience.value}")
        return await self._queries.answer(question)

    async def put_body(self, session: SessionKey, content: bytes) -> Body:
        return await self._bodies.put(session, content)

    async def open_body(self, session: SessionKey, body: Body) -> bytes:
        return await self._bodies.open(session, body)

    async def sweep_objects(
        self,
        *,
        session: SessionKey | None = None,
        cursor: str | None = None,
        limit: int = SWEEP_LIMIT_MAX,
        strangers: bool = False,
        dry_run: bool = False,
    ) -> SweepReport:
        if self._objects is None:
            raise InvalidRequest("this backend keeps no bodies outside of its records: there is nothing to sweep")

        async def send(command: AnyCommand) -> Any:
            return await self.execute(command, audience=Audience.OPERATOR)

        sweep = Sweep(self._records, self._objects, send, limit=limit, strangers=strangers, dry_run=dry_run)
        return await sweep.run(session, cursor)

    async def ready(self, scan: ReadyScan) -> ReadyPage:
        return await self._records.ready(scan)

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]:
        return await self._records.ready_classes(kind, prefix, after, limit)

    async def owners(self) -> list[OwnerLease]:
        return await self._records.owners()

    async def dead_owners(self) -> list[str]:
        return await self._records.dead_owners()

    async def forget_owner(self, owner: str) -> bool:
        return await self._records.forget(owner, (keys.READY_LEASE, keys.READY_RUNNING))

    def wakeups(self) -> Wakeups:
        return self._wakeups

    def live_events(self) -> LiveEvents | None:
        return self._live_events

    def heartbeat(self, owner: str, lease_ms: int, published: bytes) -> Heartbeat:
        return LeaseHeartbeat(self._records, self._environment, owner, lease_ms, published)

    async def close(self) -> None:
        """Close the record store if this backend opened it, and nothing else (LF-04)."""
        if self._owns_store:
            await self._records.close()
