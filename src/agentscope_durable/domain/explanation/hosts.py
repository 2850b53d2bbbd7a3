"""Rows about hosts: the one that owns a Turn, the one that is gone, and why none has taken it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

from agentscope_durable.contracts.explanation import HOSTS_SHOWN_MAX, HostView, Reason
from agentscope_durable.contracts.records import CLASS_SEPARATOR, RunState
from agentscope_durable.contracts.status import Actor, ReasonKind
from agentscope_durable.domain.explanation.facts import Facts, HostFacts
from agentscope_durable.domain.explanation.words import ago, lasting, named
from agentscope_durable.domain.turn import due_ms
from agentscope_durable.domain.unclaimed import get_definition, get_writer

__all__ = ["host_views", "owner_gone", "running", "unclaimed"]


def running(facts: Facts) -> Iterator[Reason]:
    owner, active = facts.owner, facts.active
    if owner is None or active is None:
        return
    run = active.run
    what = "It is being settled" if not run.run_id else f"Run {run.number} is under way"
    text = f"{what} on host {owner.owner}, which renewed its lease {ago(owner.age_ms)}.{_doing(facts, run)}"
    yield Reason(
        kind=ReasonKind.RUNNING,
        text=text,
        next_action="Wait. An observer that sees nothing opens its stream again, from its cursor; it submits nothing.",
        id=owner.owner,
        since_ms=run.started_ms or None,
        commands=(("events", facts.turn_id, "--follow"),),
    )


def _doing(facts: Facts, run: RunState) -> str:
    said = ""
    if run.models:
        model = run.models[-1]
        since = lasting(facts.now_ms - model.started_ms)
        said = f" A model has been asked for {since} (attempt {model.attempt})."
    elif run.step_id:
        said = f" It is in step {run.steps}, {run.phase}."
    if facts.committed_ms:
        said += f" The last commit was {ago(facts.now_ms - facts.committed_ms)}."
    return said


def owner_gone(facts: Facts) -> Iterator[Reason]:
    active = facts.active
    if active is None or facts.owner is not None:
        return
    host = next((host for host in facts.hosts if host.owner == active.owner), None)
    if host is None:
        why = "has no lease any more"
    elif host.dead:
        why = f"is dead; it renewed its lease {ago(host.age_ms)}"
    else:
        why = f"has not renewed its lease for {lasting(host.age_ms)}, which is too long"
    yield Reason(
        kind=ReasonKind.OWNER_GONE,
        text=f"Host {active.owner} owns it under fence {active.fence} and {why}.",
        next_action="Wait: another host that has the definition takes over and goes on from the last commit.",
        id=active.owner,
        commands=(("runs", facts.turn_id),),
    )


def unclaimed(facts: Facts) -> Iterator[Reason]:
    due = due_ms(facts.state)
    if facts.owner is not None or facts.head is not None or due is None or due > facts.now_ms:
        return
    since = max(facts.state.updated_ms, due)
    there = [host for host in facts.hosts if host.there]
    serving = [host for host in there if facts.serves(host)]
    silent = [host for host in facts.hosts if host.silent and facts.serves(host)]
    if not serving and silent:
        yield _host_silent(facts, silent, since)
    elif not there:
        yield _no_host(facts, since)
    elif not serving:
        yield _definition_missing(facts, there, since)
    else:
        yield _not_taken(facts, serving, since)


def _host_silent(facts: Facts, silent: list[HostFacts], since: int) -> Reason:
    host = silent[0]
    return Reason(
        kind=ReasonKind.HOST_SILENT,
        text=f"Host {host.owner} has {facts.name} and has not renewed its lease for {lasting(host.age_ms)}.",
        next_action="See whether its process is frozen or cannot reach the storage; or start another host.",
        actor=Actor.OPERATOR,
        id=host.owner,
        since_ms=since,
    )


def _no_host(facts: Facts, since: int) -> Reason:
    return Reason(
        kind=ReasonKind.NO_HOST,
        text="It could run, and no living host is there to take it.",
        next_action=f"Start a runtime on this store that has {facts.name}, and see that it calls start().",
        actor=Actor.OPERATOR,
        id=facts.name,
        since_ms=since,
    )


def _definition_missing(facts: Facts, there: list[HostFacts], since: int) -> Reason:
    binding = facts.thread.binding
    served = named(f"{host.owner}: {', '.join(_beside(facts, host)) or 'no definition'}" for host in there)
    return Reason(
        kind=ReasonKind.DEFINITION_MISSING,
        text=(
            f"It is pinned to {facts.name} (state {binding.state_version}), which no living host has. Living: {served}."
        ),
        next_action=get_definition(binding, (host.notice for host in there)),
        actor=Actor.OPERATOR,
        id=facts.name,
        since_ms=since,
    )


def _not_taken(facts: Facts, serving: list[HostFacts], since: int) -> Reason:
    """There are hosts that have its definition."""
    writer = "" if not facts.state.runs else (facts.active.writer if facts.active else "") or facts.thread.writer
    able = [host for host in serving if not writer or writer not in host.notice.refused]
    free = [host for host in able if not host.notice.draining]
    kind, actor, who = ReasonKind.HOST_SOON, Actor.NOBODY, serving[0].owner
    if not able:
        kind, actor, who = ReasonKind.WRITER_MISSING, Actor.OPERATOR, facts.name
        text = f"Its state was written by {writer}, which no living host with {facts.name} reads."
        action = get_writer(facts.thread.binding, writer)
    elif facts.session_full:
        kind = ReasonKind.HOSTS_FULL
        text = "Its Session has as many Threads under way as it may have."
        action = "Wait until one of them ends or waits for something outside."
    elif not free:
        kind, actor = ReasonKind.HOSTS_DRAINING, Actor.OPERATOR
        text = f"Every living host that has {facts.name} is draining: {named(host.owner for host in able)}."
        action = "Start another host."
    elif all(_full(host) for host in free):
        kind, actor = ReasonKind.HOSTS_FULL, Actor.OPERATOR
        rooms = named(f"{host.owner} {host.holds} of {host.notice.parallelism}" for host in free)
        text = f"Every living host that has {facts.name} is full: {rooms}."
        action = "Wait until a Turn ends or waits for something outside; or start another host, or raise `parallelism`."
    else:
        who = next(host for host in free if not _full(host)).owner
        text = f"Host {who} has {facts.name} and room for it."
        action = "Wait a moment and ask again. If this stays so, look at the log of that host."
    return Reason(kind=kind, text=text, next_action=action, actor=actor, id=who, since_ms=since)


def _full(host: HostFacts) -> bool:
    return host.holds is not None and 0 < host.notice.parallelism <= host.holds


def _beside(facts: Facts, host: HostFacts) -> Iterator[str]:
    """What it has; of the version that is missing, in which state."""
    for klass, name in zip_longest(host.notice.classes, _definitions(host), fillvalue=""):
        yield f"{name} (state {klass.rpartition(CLASS_SEPARATOR)[2]})" if name == facts.name else name


def _definitions(host: HostFacts) -> tuple[str, ...]:
    exact = ("@".join(klass.split(CLASS_SEPARATOR)[:2]) for klass in host.notice.classes)
    return (*exact, *(f"{name}@*" for name in host.notice.names))


def host_views(facts: Facts) -> tuple[HostView, ...]:
    ordered = sorted(facts.hosts, key=lambda host: (not facts.serves(host), not host.there, host.owner))
    return tuple(
        HostView(
            owner=host.owner,
            alive=host.there,
            dead=host.dead,
            age_ms=host.age_ms,
            serves=facts.serves(host),
            definitions=_definitions(host),
            routes=host.notice.routes,
            draining=host.notice.draining,
            parallelism=host.notice.parallelism or None,
            holds=host.holds,
            asked_again=host.notice.asked_again,
        )
        for host in ordered[:HOSTS_SHOWN_MAX]
    )
