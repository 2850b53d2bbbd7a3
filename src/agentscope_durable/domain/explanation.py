"""Why a Turn is where it is: from what is known of it to the rows of a table, the most pressing first (DX-01).

Rule 1: a Turn that has not ended is running, can be claimed, or says what it waits for. So there is always a row, and
each row says whose move it is and what to do.
Rule 2: nothing here looks. Facts are what was read, time is an argument, and an answer is true of the moment of asking.
Rule 3: a row never tells anyone to submit again. What was accepted goes on; a second request would be a second task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.explanation import HOSTS_SHOWN_MAX, Explanation, HostView, Reason
from agentscope_durable.contracts.records import (
    CLASS_SEPARATOR,
    Condition,
    ExecutionRecord,
    InteractionRecord,
    RunState,
    ThreadHead,
    ThreadRecord,
    TurnState,
)
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import Actor, ExecutionKind, ExecutionState, ReasonKind, TurnStatus, WaitKind
from agentscope_durable.contracts.views import BindingView, TurnView
from agentscope_durable.domain.turn import due_ms, settling, unsettled

__all__ = ["ROWS", "Facts", "HostFacts", "explain"]

NAMED_MAX: Final = 5
"""Things a sentence names before it only counts them."""


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
        """The definition's version, as people say it."""
        return f"{self.thread.binding.harness}@{self.thread.binding.definition_version}"

    @property
    def owner(self) -> HostFacts | None:
        """The host that owns it and is there."""
        if self.active is None:
            return None
        return next((host for host in self.hosts if host.owner == self.active.owner and host.there), None)

    def serves(self, host: HostFacts) -> bool:
        return host.notice.serves(self.thread.binding.ready_class, self.thread.binding.harness)


def explain(facts: Facts) -> Explanation:
    """Every row that is true of these facts, in the order of the table."""
    reasons = tuple(reason for row in ROWS for reason in row(facts))
    binding = facts.thread.binding
    return Explanation(
        turn=facts.view,
        now_ms=facts.now_ms,
        binding=BindingView(
            harness=binding.harness,
            definition_version=binding.definition_version,
            state_version=binding.state_version,
        ),
        summary=reasons[0].text,
        reasons=reasons,
        hosts=_hosts(facts),
    )


# ------------------------------------------------------------ it has ended


def _ended(facts: Facts) -> Iterator[Reason]:
    view = facts.view
    if not view.status.terminal:
        return
    text = f"It is {view.status}."
    action = "An observer that still waits has lost its connection: it reads on from its cursor, or from a snapshot."
    if view.error is not None:
        text = f"It is {view.status}: {view.error.kind}: {view.error.message}"
    if view.status is not TurnStatus.COMPLETED:
        action = f"It stays {view.status}. Another try is a new Turn, with a new request id. {action}"
    yield Reason(
        kind=ReasonKind.ENDED,
        text=text,
        next_action=action,
        since_ms=view.updated_at_ms,
        commands=(("history", facts.turn_id),),
    )


# ------------------------------------------------------------ somebody holds it


def _operator(facts: Facts) -> Iterator[Reason]:
    if not facts.state.operator or facts.view.status.terminal:
        return
    yield Reason(
        kind=ReasonKind.OPERATOR,
        text=f"It was parked for a person to look at: {facts.state.operator}",
        next_action="Remove the cause, then release it; or cancel it.",
        actor=Actor.OPERATOR,
        id=facts.turn_id,
        since_ms=facts.state.updated_ms,
        commands=(
            ("runs", facts.turn_id),
            ("doctor", "--session", keys.spell(facts.view.session)),
            ("release", facts.turn_id),
            ("cancel", facts.turn_id),
        ),
    )


def _behind(facts: Facts) -> Iterator[Reason]:
    head = facts.head
    if head is None or facts.view.status.terminal:
        return
    ahead = "many Turns" if facts.ahead is None else "one Turn" if facts.ahead == 1 else f"{facts.ahead} Turns"
    text = (
        f"It is queued behind {ahead} of thread {facts.view.thread_id!r}; at the head is {head.turn_id}, {head.status}."
    )
    if head.status in (TurnStatus.WAITING, TurnStatus.PAUSED):
        action = "Resolve or cancel the head, or submit independent work to another Thread."
        actor = Actor.USER
    else:
        action = "Wait for the head, or see what holds it."
        actor = Actor.NOBODY
    yield Reason(
        kind=ReasonKind.QUEUED_BEHIND,
        text=text,
        next_action=action,
        actor=actor,
        id=head.turn_id,
        since_ms=facts.view.created_at_ms,
        commands=(("explain", head.turn_id), ("cancel", head.turn_id)),
    )


def _paused(facts: Facts) -> Iterator[Reason]:
    if facts.view.status is not TurnStatus.PAUSED:
        return
    arrived = sum(condition.ready for condition in facts.state.conditions)
    waits = (
        "" if not arrived else f" {_count(arrived, 'answer or result has', 'answers or results have')} arrived since."
    )
    yield Reason(
        kind=ReasonKind.PAUSED,
        text=f"It is paused, at revision {facts.view.revision}.{waits}",
        next_action="Resume it with this revision when the user is ready; what arrives meanwhile is kept.",
        actor=Actor.USER,
        id=facts.turn_id,
        since_ms=facts.state.updated_ms,
        commands=(("resume", facts.turn_id, "--revision", str(facts.view.revision)),),
    )


def _pausing(facts: Facts) -> Iterator[Reason]:
    if facts.view.status is not TurnStatus.PAUSING:
        return
    yield Reason(
        kind=ReasonKind.PAUSING,
        text="A pause was accepted; the agent stops at its next boundary: after the model's answer, or a tool's end.",
        next_action="Wait until it is PAUSED; only that says that the agent has stopped.",
        id=facts.turn_id,
        since_ms=facts.state.updated_ms,
    )


# ------------------------------------------------------------ it is to end


def _ending(facts: Facts) -> Iterator[Reason]:
    state = facts.state
    if not settling(state):
        return
    held = unsettled(state)
    if held:
        calls = _named(condition.call_id or condition.id for condition in held)
        until = f"It ends when the outcome of {_count(len(held), 'call is', 'calls are')} known: {calls}."
        action = "Query the original execution and verify its outcome; do not repeat the effect."
    elif facts.owner is not None:
        until, action = "Its host is stopping it.", "Wait: it ends at the next boundary."
    else:
        until, action = "Nothing is in its way.", "Wait: a host settles it."
    if state.cancel:
        kind, text = ReasonKind.CANCELLING, f"A cancel was accepted (request {state.cancel!r}). {until}"
    else:
        error = "" if state.failure is None else f" ({state.failure.kind}: {state.failure.message})"
        kind, text = ReasonKind.FAILING, f"It has failed for good{error}. {until}"
    yield Reason(
        kind=kind,
        text=text,
        next_action=action,
        id=facts.turn_id,
        since_ms=state.updated_ms,
        commands=(("tools", facts.turn_id),) if held else (),
    )
    if not held and state.settle_ms > facts.now_ms:
        yield Reason(
            kind=ReasonKind.SETTLEMENT,
            text=f"Settling its effects was tried {_count(state.settle_tries, 'time', 'times')} and is tried again.",
            next_action="Wait; if it does not end, look at the hosts' logs.",
            id=facts.turn_id,
            until_ms=state.settle_ms,
        )


# ------------------------------------------------------------ a host owns it


def _running(facts: Facts) -> Iterator[Reason]:
    owner, active = facts.owner, facts.active
    if owner is None or active is None:
        return
    run = active.run
    what = "It is being settled" if not run.run_id else f"Run {run.number} is under way"
    text = f"{what} on host {owner.owner}, which renewed its lease {_ago(owner.age_ms)}.{_doing(facts, run)}"
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
        since = _for(facts.now_ms - model.started_ms)
        said = f" A model has been asked for {since} (attempt {model.attempt})."
    elif run.step_id:
        said = f" It is in step {run.steps}, {run.phase}."
    if facts.committed_ms:
        said += f" The last commit was {_ago(facts.now_ms - facts.committed_ms)}."
    return said


def _owner_gone(facts: Facts) -> Iterator[Reason]:
    active = facts.active
    if active is None or facts.owner is not None:
        return
    host = next((host for host in facts.hosts if host.owner == active.owner), None)
    if host is None:
        why = "has no lease any more"
    elif host.dead:
        why = f"is dead; it renewed its lease {_ago(host.age_ms)}"
    else:
        why = f"has not renewed its lease for {_for(host.age_ms)}, which is too long"
    yield Reason(
        kind=ReasonKind.OWNER_GONE,
        text=f"Host {active.owner} owns it under fence {active.fence} and {why}.",
        next_action="Wait: another host that has the definition takes over and goes on from the last commit.",
        id=active.owner,
        commands=(("runs", facts.turn_id),),
    )


# ------------------------------------------------------------ it waits for something outside


def _open(facts: Facts) -> Iterator[Reason]:
    state = facts.state
    if state.status.terminal:
        return
    if settling(state):
        held: Iterable[Condition] = unsettled(state)
    else:
        held = (condition for condition in state.conditions if not condition.ready)
    for condition in held:
        tell = _TELL.get(condition.kind)
        # What runs inside the agent's process is a part of its Run, and lost or run again with it.
        of_run = facts.active is not None and condition.kind is WaitKind.TOOL_RUNNING and _is_local(facts, condition)
        if tell is not None and not of_run:
            yield tell(facts, condition)


def _approval(facts: Facts, condition: Condition) -> Reason:
    return Reason(
        kind=ReasonKind.APPROVAL,
        text=f"It waits for approval of {_tool(facts, condition)}.",
        next_action="Read what is to be done, then approve or deny it.",
        actor=Actor.USER,
        id=condition.id,
        since_ms=condition.since_ms,
        commands=(
            ("interactions", facts.turn_id),
            ("respond", facts.turn_id, condition.id, "--approve"),
            ("respond", facts.turn_id, condition.id, "--deny"),
        ),
    )


def _external_result(facts: Facts, condition: Condition) -> Reason:
    return Reason(
        kind=ReasonKind.EXTERNAL_RESULT,
        text=f"It waits for somebody to give the result of {_tool(facts, condition)}.",
        next_action="Do what it asks for and answer with the result as JSON.",
        actor=Actor.USER,
        id=condition.id,
        since_ms=condition.since_ms,
        commands=(("interactions", facts.turn_id), ("respond", facts.turn_id, condition.id, "--result", "JSON")),
    )


def _tool_running(facts: Facts, condition: Condition) -> Reason:
    execution = facts.executions.get(condition.call_id)
    text = f"It waits for the end of {_tool(facts, condition)}."
    action, actor = "Wait: the result comes through its executor, and the Turn goes on by itself.", Actor.NOBODY
    if execution is not None and execution.kind is ExecutionKind.EXTERNAL:
        serving = [host for host in facts.hosts if host.there and execution.route in host.notice.routes]
        if execution.state is ExecutionState.INTENT:
            text = f"It waits for an executor to start {_tool(facts, condition)}, route {execution.route!r}."
        elif execution.owner:
            text = f"{text[:-1]}, execution {execution.execution_id}, on host {execution.owner}."
        else:
            text = f"{text[:-1]}, execution {execution.execution_id}; its executor is asked again from time to time."
        if execution.cancel_requested:
            text = f"{text} It was asked to stop and has not confirmed that."
        if not serving:
            action = f"Start a host with an executor for route {execution.route!r}: no living host has one."
            actor = Actor.OPERATOR
    return Reason(
        kind=ReasonKind.TOOL_RUNNING,
        text=text,
        next_action=action,
        actor=actor,
        id=condition.call_id or condition.id,
        since_ms=condition.since_ms,
        commands=(("tools", facts.turn_id),),
    )


def _tool_unknown(facts: Facts, condition: Condition) -> Reason:
    call_id = condition.call_id or condition.id
    reconcile = ("reconcile", facts.turn_id, call_id, "--evidence", "REFERENCE")
    return Reason(
        kind=ReasonKind.TOOL_UNKNOWN,
        text=f"Nobody can say what became of {_tool(facts, condition)}: it was started, and its end was not seen.",
        next_action="Find out what it did, outside, and settle it with that evidence; do not run it again to go on.",
        actor=Actor.OPERATOR,
        id=call_id,
        since_ms=condition.since_ms,
        commands=(
            ("tools", facts.turn_id),
            (*reconcile, "--succeeded", "JSON"),
            (*reconcile, "--failed", "REASON"),
        ),
    )


def _child(facts: Facts, condition: Condition) -> Reason:
    return Reason(
        kind=ReasonKind.CHILD,
        text=f"It waits for the Turn it has delegated to: {condition.id}.",
        next_action="Wait until that one ends, or see what it waits for.",
        id=condition.id,
        since_ms=condition.since_ms,
        commands=(("explain", condition.id),),
    )


def _signal(facts: Facts, condition: Condition) -> Reason:
    until = condition.deadline_ms or None
    return Reason(
        kind=ReasonKind.SIGNAL,
        text=f"It waits for the signal {condition.id!r}{'' if until is None else ', or for its time to pass'}.",
        next_action="Send the signal." if until is None else "Send the signal, or wait.",
        actor=Actor.USER if until is None else Actor.NOBODY,
        id=condition.id,
        since_ms=condition.since_ms,
        until_ms=until,
        commands=(("signal", facts.turn_id, condition.id),),
    )


_TELL: Final[dict[WaitKind, Callable[[Facts, Condition], Reason]]] = {
    WaitKind.APPROVAL: _approval,
    WaitKind.EXTERNAL_RESULT: _external_result,
    WaitKind.TOOL_RUNNING: _tool_running,
    WaitKind.TOOL_UNKNOWN: _tool_unknown,
    WaitKind.CHILD: _child,
    WaitKind.SIGNAL: _signal,
}


def _retry(facts: Facts) -> Iterator[Reason]:
    recovery = facts.state.recovery
    if recovery is None or facts.view.status.terminal or facts.owner is not None or settling(facts.state):
        return
    due = recovery.next_retry_at_ms
    if due <= facts.now_ms:
        return
    error = recovery.last_error
    yield Reason(
        kind=ReasonKind.RETRY,
        text=(
            f"{_count(recovery.failures, 'invocation has', 'invocations have')} failed, of at most"
            f" {recovery.max_retries + 1}; the last with {error.kind}: {error.message}"
        ),
        next_action="Wait: it is tried again at its time. Another host or a signal does not make it sooner.",
        id=facts.turn_id,
        until_ms=due,
        commands=(("runs", facts.turn_id), ("cancel", facts.turn_id)),
    )


# ------------------------------------------------------------ nobody has taken it


def _unclaimed(facts: Facts) -> Iterator[Reason]:
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
        text=f"Host {host.owner} has {facts.name} and has not renewed its lease for {_for(host.age_ms)}.",
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
    served = _named(f"{host.owner}: {', '.join(_definitions(host)) or 'no definition'}" for host in there)
    return Reason(
        kind=ReasonKind.DEFINITION_MISSING,
        text=(
            f"It is pinned to {facts.name} (state {binding.state_version}), which no living host has. Living: {served}."
        ),
        next_action=f"Start a host that has {facts.name} registered; the Turn waits as long as it takes.",
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
        action = f"Start a host whose agent library is version {writer}."
    elif facts.session_full:
        kind = ReasonKind.HOSTS_FULL
        text = "Its Session has as many Threads under way as it may have."
        action = "Wait until one of them ends or waits for something outside."
    elif not free:
        kind, actor = ReasonKind.HOSTS_DRAINING, Actor.OPERATOR
        text = f"Every living host that has {facts.name} is draining: {_named(host.owner for host in able)}."
        action = "Start another host."
    elif all(_full(host) for host in free):
        kind, actor = ReasonKind.HOSTS_FULL, Actor.OPERATOR
        rooms = _named(f"{host.owner} {host.holds} of {host.notice.parallelism}" for host in free)
        text = f"Every living host that has {facts.name} is full: {rooms}."
        action = "Wait until a Turn ends or waits for something outside; or start another host, or raise `parallelism`."
    else:
        who = next(host for host in free if not _full(host)).owner
        text = f"Host {who} has {facts.name} and room for it."
        action = "Wait a moment and ask again. If this stays so, look at the log of that host."
    return Reason(kind=kind, text=text, next_action=action, actor=actor, id=who, since_ms=since)


def _full(host: HostFacts) -> bool:
    return host.holds is not None and 0 < host.notice.parallelism <= host.holds


# ------------------------------------------------------------ beside all that


def _inputs(facts: Facts) -> Iterator[Reason]:
    if not facts.state.inputs or facts.view.status.terminal:
        return
    yield Reason(
        kind=ReasonKind.INPUTS,
        text=f"{_count(facts.state.inputs, 'accepted input waits', 'accepted inputs wait')} for its next boundary.",
        next_action="Wait: they are applied when the agent goes on. Until then each can be withdrawn.",
        id=facts.turn_id,
        commands=(("withdraw", facts.turn_id, "REQUEST-ID"),),
    )


Row = Callable[[Facts], Iterable[Reason]]

ROWS: Final[tuple[Row, ...]] = (
    _ended,
    _operator,
    _behind,
    _paused,
    _pausing,
    _ending,
    _running,
    _owner_gone,
    _open,
    _retry,
    _unclaimed,
    _inputs,
)
"""The table: each row says whether it is true of the facts, in this order."""


# ------------------------------------------------------------ words


def _is_local(facts: Facts, condition: Condition) -> bool:
    execution = facts.executions.get(condition.call_id)
    return execution is not None and execution.kind is ExecutionKind.LOCAL


def _tool(facts: Facts, condition: Condition) -> str:
    """A call as people say it: the tool's name, and the call's id."""
    question, execution = facts.interactions.get(condition.id), facts.executions.get(condition.call_id)
    name = question.name if question is not None else execution.name if execution is not None else ""
    return f"{name!r} (call {condition.call_id})" if name else f"call {condition.call_id}"


def _definitions(host: HostFacts) -> tuple[str, ...]:
    exact = ("@".join(klass.split(CLASS_SEPARATOR)[:2]) for klass in host.notice.classes)
    return (*exact, *(f"{name}@*" for name in host.notice.names))


def _hosts(facts: Facts) -> tuple[HostView, ...]:
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
        )
        for host in ordered[:HOSTS_SHOWN_MAX]
    )


def _named(names: Iterable[str]) -> str:
    given = list(names)
    more = len(given) - NAMED_MAX
    return "; ".join(given[:NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _for(milliseconds: int) -> str:
    seconds = max(0, milliseconds) // 1000
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _ago(milliseconds: int) -> str:
    return f"{_for(milliseconds)} ago"
