"""What `explain` answers: why a Turn is where it is, whose move it is, and what to do next (DX-01).

All of it is *query time*: true when it was asked, and no part of any projection.
"""

from __future__ import annotations

from typing import Final

from agentscope_durable.contracts.discreet import Words
from agentscope_durable.contracts.status import Actor, ReasonKind
from agentscope_durable.contracts.views import BindingView, TurnView, View

__all__ = ["HOSTS_SHOWN_MAX", "Explanation", "HostView", "Reason"]

HOSTS_SHOWN_MAX: Final = 20
"""Hosts an explanation lists."""


class Reason(View, frozen=True):
    """One reason, most pressing first.

    Attributes:
        kind: which row of the table it is; stable.
        text: what is so, in a sentence.
        next_action: what to do about it, in a sentence.
        actor: whose move it is.
        id: what it is about: an interaction, a call, another Turn, a signal's key, a host, a definition.
        since_ms: store time at which it began, None if that is not known.
        until_ms: store time at which it ends by itself, None if it does not.
        commands: what to type, each as the arguments of `durable`; the first is the one to look at first. What only a
            person can fill in is written in capitals.
    """

    kind: ReasonKind
    text: Words
    next_action: Words
    actor: Actor = Actor.NOBODY
    id: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    commands: tuple[tuple[str, ...], ...] = ()


class HostView(View, frozen=True):
    """A host that has a lease on this store.

    Attributes:
        owner: its identity.
        alive: its lease is valid by the store's clock, and its process is not known to be dead.
        dead: its process is known to be dead.
        age_ms: since it last renewed its lease.
        serves: it runs the definition this Turn is pinned to.
        definitions: what it runs, as `name@version`; `name@*` when it makes versions as it meets them.
        routes: executor routes it serves.
        draining: it takes nothing new.
        parallelism: Turns it has in hand at once at most, None if it did not say.
        holds: Threads it owns now, None where that was not looked up.
        asked_again: how often it sent something again that the store had not answered, since it was made.
    """

    owner: str
    alive: bool
    age_ms: int
    dead: bool = False
    serves: bool = False
    definitions: tuple[str, ...] = ()
    routes: tuple[str, ...] = ()
    draining: bool = False
    parallelism: int | None = None
    holds: int | None = None
    asked_again: int = 0


class Explanation(View, frozen=True):
    """Why a Turn is where it is.

    Attributes:
        turn: as it is now.
        now_ms: the store's time when it was asked.
        binding: the definition its Thread is pinned to.
        summary: the first reason, in one sentence.
        reasons: all of them, the most pressing first; never empty.
        hosts: those that have a lease, serving ones first; at most HOSTS_SHOWN_MAX.
    """

    turn: TurnView
    now_ms: int
    binding: BindingView
    summary: Words
    reasons: tuple[Reason, ...]
    hosts: tuple[HostView, ...] = ()
