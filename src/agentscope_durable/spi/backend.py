"""The one door: everything that changes goes through `execute`, everything that is read through `query`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from agentscope_durable.contracts.bodies import Body
from agentscope_durable.contracts.commands import AnyCommand
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.contracts.views import SweepReport
from agentscope_durable.spi.live import LiveEvents
from agentscope_durable.spi.record_store import PAGE_MAX, Capabilities, OwnerLease, ReadyPage, ReadyScan


class Heartbeat(Protocol):
    """Keeps a host's lease alive from a thread of its own, so a blocked event loop cannot lose it (C22)."""

    def start(self) -> None: ...

    def publish(self, published: bytes) -> None:
        """What the next renewals tell about this host."""
        ...

    @property
    def last_renewal(self) -> float:
        """`Environment.monotonic()` of the last renewal that succeeded."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why the last renewal failed; None if it did not."""
        ...

    async def stop(self, *, release: bool = True) -> None:
        """Stop renewing, and release the lease: a polite close (D14).

        A host that could not give back all it owns does not release: an expired lease is how others find the rest.
        """
        ...


class Wakeups(Protocol):
    """Change hints. A hint may be lost, doubled or late; nothing depends on it (BE-03).

    Keys are of fixed size: `s:<hash>` a Session changed, `t:<hash>` something was said of a Turn, `r:<hash>` work of a
    ready class appeared, `*` anything.

    Promises, each checked by name in `testing.WakeupsContract`:

    heard      A listener hears its keys that are published while it listens, and `*`, on its own event loop.
    keyed      It hears no others, unless it listens to all.
    merged     What it has not looked at is kept once, within a bound; beyond that it hears `*`.
    harmless   `publish` never blocks: not over a listener that does not look, nor over one whose loop has ended.
    left       Who has left is not told.
    """

    def publish(self, keys: tuple[str, ...]) -> None:
        """Tell listeners, from any thread. Never blocks; what it raises does not reach the writer (BE-12)."""
        ...

    def listen(self, keys: frozenset[str] | None = None) -> AbstractAsyncContextManager[AsyncIterator[frozenset[str]]]:
        """Keys published since the last look, merged; None listens to all."""
        ...


class SessionBackend(Protocol):
    """Commits state, commands, checkpoints and results atomically and answers queries (BE-01).

    Promises, checked by the contract suite:

    atomic      A command changes everything it says, or nothing.
    once        A request id is one request for ever (D16).
    fenced      A command of a former owner is refused.
    hinted      Hints follow commits; failing to publish one does not fail the command.
    read-only   `query` changes nothing.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def execute(self, command: AnyCommand, *, audience: Audience = Audience.PUBLIC) -> Any:
        """Carry out a command and return its receipt.

        A cancelled await leaves an unknown outcome: repeat the same request id.
        """
        ...

    async def query(self, question: Any, *, audience: Audience = Audience.PUBLIC) -> Any: ...

    async def put_body(self, session: SessionKey, content: bytes) -> Body:
        """A body to put into a command: inline when small, stored as an object when large."""
        ...

    async def open_body(self, session: SessionKey, body: Body) -> bytes:
        """The JSON bytes of a body, digest verified."""
        ...

    async def sweep_objects(
        self, *, session: SessionKey | None, cursor: str | None, limit: int, strangers: bool, dry_run: bool
    ) -> SweepReport:
        """Remove bodies nobody refers to. For operators only, whatever the transport."""
        ...

    async def ready(self, scan: ReadyScan) -> ReadyPage: ...

    async def ready_classes(self, kind: str, prefix: str, after: str = "", limit: int = PAGE_MAX) -> list[str]: ...

    async def owners(self) -> list[OwnerLease]: ...

    async def dead_owners(self) -> list[str]: ...

    async def forget_owner(self, owner: str) -> bool:
        """Remove what is stored about a host that is gone for good and left nothing; True when nothing is."""
        ...

    def wakeups(self) -> Wakeups: ...

    def live_events(self) -> LiveEvents | None:
        """Where previews travel between the runtimes over this store; None: each runtime is on its own."""
        ...

    def heartbeat(self, owner: str, lease_ms: int, published: bytes) -> Heartbeat: ...

    async def close(self) -> None: ...
