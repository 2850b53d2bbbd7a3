"""What is known of a Turn at one moment, for its explanation."""

from __future__ import annotations

from typing import NamedTuple

from agentscope_durable.contracts.records import (
    ExecutionRecord,
    InteractionRecord,
    ThreadHead,
    ThreadRecord,
    TurnState,
)
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.views import TurnView
from agentscope_durable.domain.unclaimed import spoken

__all__ = ["Facts", "HostFacts"]


class HostFacts(NamedTuple):
    """A host with a lease.

    Attributes:
        alive: its lease is valid by the store's clock.
        dead: its process is known to be dead, whatever its lease says (D14).
        age_ms: since its last renewal.
        holds: Threads it owns; None when that was not looked up.
    """

    owner: str
    alive: bool
    dead: bool
    age_ms: int
    notice: HostNotice
    holds: int | None = None

    @property
    def there(self) -> bool:
        return self.alive and not self.dead

    @property
    def silent(self) -> bool:
        """Its lease has run out and nobody has seen it die: it is frozen, cut off from the store, or on its way."""
        return not self.alive and not self.dead


class Facts(NamedTuple):
    """What is known of a Turn at one moment.

    Attributes:
        now_ms: the store's time.
        view: the Turn as a query shows it.
        state: what `view` was made of.
        active: the head's entry while a host owns the Thread for this Turn.
        head: the unfinished Turn at the head of the queue, None when that is this one.
        ahead: Turns in the queue before this one, the head included; None when there are too many to count.
        interactions: open questions by their ids. executions: open calls by theirs.
        committed_ms: when the owner committed last; 0 when it has not.
        session_full: the Session has as many owned Threads as it may have.
    """

    now_ms: int
    thread: ThreadRecord
    view: TurnView
    state: TurnState
    active: ThreadHead | None
    hosts: tuple[HostFacts, ...]
    head: TurnView | None = None
    ahead: int | None = 0
    interactions: dict[str, InteractionRecord] = {}
    executions: dict[str, ExecutionRecord] = {}
    committed_ms: int = 0
    session_full: bool = False

    @property
    def turn_id(self) -> str:
        return self.view.turn_id

    @property
    def name(self) -> str:
        return spoken(self.thread.binding)

    @property
    def owner(self) -> HostFacts | None:
        """The host that owns it and is there."""
        if self.active is None:
            return None
        return next((host for host in self.hosts if host.owner == self.active.owner and host.there), None)

    def serves(self, host: HostFacts) -> bool:
        return host.notice.serves(self.thread.binding.ready_class, self.thread.binding.harness)
