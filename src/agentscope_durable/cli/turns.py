"""Commands that read Turns: where each is, what it did, and why it does not advance."""

from __future__ import annotations

import os
import shlex
from typing import Annotated, Any

import msgspec

from agentscope_durable.cli.extra import Console, typer
from agentscope_durable.cli.options import (
    DEFAULT_STORE,
    LIMIT,
    STORE_VARIABLE,
    Cursor,
    Json,
    Limit,
    Run,
    Session,
    Store,
    Thread,
    Turn,
)
from agentscope_durable.cli.output import ago, block, cell, facts, indented, instant, lasting, table, tell, visible
from agentscope_durable.cli.sessions import definition
from agentscope_durable.cli.store import Opened, looked, spell, without_password
from agentscope_durable.contracts.explanation import Explanation, HostView, Reason
from agentscope_durable.contracts.identity import MAIN_THREAD_ID
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.questions import ListInteractions
from agentscope_durable.contracts.status import Actor
from agentscope_durable.contracts.views import (
    InteractionView,
    ModelCallView,
    Page,
    RunView,
    StepView,
    ToolView,
    TurnView,
    UsageView,
)

__all__ = ["add"]

MOVES = {Actor.NOBODY: "goes on by itself", Actor.USER: "the user's move", Actor.OPERATOR: "the operator's move"}


def turns(
    session: Session,
    store: Store = DEFAULT_STORE,
    thread: Thread = MAIN_THREAD_ID,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
    as_json: Json = False,
) -> None:
    """Turns of a Thread, in the order of their admission."""

    def show(screen: Console, page: Page) -> None:
        def row(view: TurnView) -> tuple[object, ...]:
            reasons = ", ".join(waiting.kind for waiting in view.waiting_on)
            return view.ordinal, view.turn_id, view.status, reasons, view.request_id, instant(view.updated_at_ms)

        heads = ("#", "TURN", "STATUS", "WAITS FOR", "REQUEST", "CHANGED")
        table(screen, heads, map(row, page), more=page.cursor)

    tell(
        looked(store, lambda there: there.session(session).get_thread(thread).list_turns(cursor, limit)), as_json, show
    )


def turn(turn: Turn, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """One Turn: its status, and what it waits for."""

    async def read(there: Opened) -> TurnView:
        return await (await there.turn(turn)).status()

    tell(looked(store, read), as_json, show_turn)


def show_turn(screen: Console, view: TurnView) -> None:
    lease = view.lease
    owner = None
    if lease is not None:
        # Not that it is gone: a host that was only frozen comes back, unless another one has taken over.
        alive = "alive" if lease.alive else "NOT ALIVE"
        owner = f"{lease.owner}, {alive}, fence {lease.fence}, lease renewed {lasting(lease.age_ms)} ago"
    recovery = view.recovery
    failures = None
    if recovery is not None:
        due = "" if recovery.next_retry_at_ms is None else f"; next try {instant(recovery.next_retry_at_ms)}"
        failures = f"{recovery.failures} of at most {recovery.policy.max_retries + 1}{due}"
    pairs = (
        ("turn", view.turn_id),
        ("session", spell(view.session)),
        ("thread", f"{view.thread_id}, Turn {view.ordinal}"),
        ("request", view.request_id),
        ("status", f"{view.status}{' (cancel requested)' if view.cancel_requested else ''}"),
        ("revision", view.revision),
        ("created", instant(view.created_at_ms)),
        ("changed", instant(view.updated_at_ms)),
        ("runs", view.runs or None),
        ("inputs", f"{view.pending_inputs} not applied yet" if view.pending_inputs else None),
        ("owner", owner),
        ("failures", failures),
        ("error", None if view.error is None else f"{view.error.kind}: {view.error.message}"),
        ("result", None if view.result is None else f"{view.result.finish_reason}, message {view.result.message_id}"),
    )
    facts(screen, pairs)
    for waiting in view.waiting_on:
        call = "" if waiting.call_id is None else f", call {waiting.call_id}"
        screen.print(cell(f"waits for {waiting.kind} {waiting.id}{call}, since {instant(waiting.since_ms)}"))
        screen.print(indented(cell(waiting.next_action), 2))


def result(
    turn: Turn,
    store: Store = DEFAULT_STORE,
    wait: Annotated[float | None, typer.Option("--wait", metavar="SECONDS", help="Wait so long for its end.")] = None,
    as_json: Json = False,
) -> None:
    """The final message of a Turn. The exit code tells how it ended: 0, 20 failed, 21 cancelled, 22 not yet; with
    --wait 124 instead, which says what the Turn waits for."""

    async def read(there: Opened) -> Message | None:
        handle = await there.turn(turn)
        return await (handle.result() if wait is None else handle.wait(wait))

    tell(looked(store, read), as_json, lambda screen, found: screen.print(block("" if found is None else found.text)))


# ------------------------------------------------------------ why it does not advance


def explain(turn: Turn, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Why a Turn does not advance. Whose move it is, and what to type next."""

    async def read(there: Opened) -> Explanation:
        return await (await there.turn(turn)).explain()

    tell(looked(store, read), as_json, lambda screen, found: show_explanation(screen, found, store))


def show_explanation(screen: Console, explanation: Explanation, store: str) -> None:
    view, now_ms = explanation.turn, explanation.now_ms
    head = f"{view.turn_id} of {spell(view.session)}, thread {view.thread_id}: {view.status}"
    screen.print(cell(head), style="bold")
    pinned = f"{definition(explanation.binding)}, state {explanation.binding.state_version}"
    screen.print(cell(f"request {view.request_id}; {pinned}; revision {view.revision}; Runs: {view.runs}"))
    for number, reason in enumerate(explanation.reasons, 1):
        screen.print()
        screen.print(cell(f"{number}. {reason.text}"), style="bold")
        for line in _when(reason, now_ms):
            screen.print(indented(cell(line), 3))
        screen.print(indented(cell(f"{reason.next_action} ({MOVES[reason.actor]})"), 3))
        for command in reason.commands:
            screen.print(indented(cell(typed(command, store)), 5), style="cyan")
    if explanation.hosts:
        screen.print()
        screen.print("Hosts", style="bold")
        heads = ("HOST", "LEASE", "DEFINITIONS", "ROUTES", "THREADS")
        table(screen, heads, (_host_row(host) for host in explanation.hosts))


def _when(reason: Reason, now_ms: int) -> list[str]:
    said: list[str] = []
    if reason.since_ms is not None:
        said.append(f"since {instant(reason.since_ms)}, {ago(now_ms, reason.since_ms)}")
    if reason.until_ms is not None:
        said.append(f"until {instant(reason.until_ms)}, {ago(now_ms, reason.until_ms)}")
    return said


def _host_row(host: HostView) -> tuple[object, ...]:
    state = "dead" if host.dead else "alive" if host.alive else "expired"
    draining = ", draining" if host.draining else ""
    threads = None if host.holds is None else f"{host.holds} of {host.parallelism or '?'}"
    again = f", asked the store again {host.asked_again} times" if host.asked_again else ""
    served = ", ".join(host.definitions)
    return (
        host.owner,
        f"{state}, renewed {lasting(host.age_ms)} ago{draining}{again}",
        f"{served} (this one)" if host.serves else served,
        ", ".join(host.routes),
        threads,
    )


def typed(command: tuple[str, ...], store: str) -> str:
    """A command as it is typed here; what stands in capitals is the reader's to fill in."""
    given = () if store == os.environ.get(STORE_VARIABLE, DEFAULT_STORE) else ("--store", without_password(store))
    return visible(shlex.join(("durable", *command, *given)))


# ------------------------------------------------------------ what it did


def runs(
    turn: Turn, store: Store = DEFAULT_STORE, cursor: Cursor = None, limit: Limit = LIMIT, as_json: Json = False
) -> None:
    """Runs of a Turn: the actual invocations of the agent."""

    async def read(there: Opened) -> Page:
        return await (await there.turn(turn)).list_runs(cursor, limit)

    def show(screen: Console, page: Page) -> None:
        def row(view: RunView) -> tuple[object, ...]:
            error = None if view.error is None else f"{view.error.kind}: {view.error.message}"
            return view.run_id, view.status, view.owner, instant(view.started_at_ms), instant(view.ended_at_ms), error

        heads = ("RUN", "STATUS", "HOST", "STARTED", "ENDED", "ERROR")
        table(screen, heads, map(row, page), more=page.cursor)

    tell(looked(store, read), as_json, show)


def steps(
    run: Run, store: Store = DEFAULT_STORE, cursor: Cursor = None, limit: Limit = LIMIT, as_json: Json = False
) -> None:
    """Steps of a Run. Rounds of reasoning, and continuations that apply results."""

    async def read(there: Opened) -> Page:
        handle, run_id = await there.run(run)
        return await handle.list_steps(run_id, cursor, limit)

    def show(screen: Console, page: Page) -> None:
        def row(view: StepView) -> tuple[object, ...]:
            return view.step_id, view.phase, view.status, instant(view.started_at_ms), instant(view.ended_at_ms)

        table(screen, ("STEP", "PHASE", "STATUS", "STARTED", "ENDED"), map(row, page), more=page.cursor)

    tell(looked(store, read), as_json, show)


def models(
    run: Run,
    store: Store = DEFAULT_STORE,
    step: Annotated[str | None, typer.Option("--step", metavar="STEP", help="Only this Step.")] = None,
    cursor: Cursor = None,
    limit: Limit = LIMIT,
    as_json: Json = False,
) -> None:
    """Model calls of a Run: requests, tokens, times."""

    async def read(there: Opened) -> Page:
        handle, run_id = await there.run(run)
        return await handle.list_model_calls(run_id, step, cursor, limit)

    def show(screen: Console, page: Page) -> None:
        def row(view: ModelCallView) -> tuple[object, ...]:
            elapsed = None if view.elapsed_ms is None else lasting(view.elapsed_ms)
            names = ", ".join(dict.fromkeys(request.model for request in view.requests if request.model))
            return view.model_call_id, view.status, view.purpose, names, len(view.requests), _usage(view.usage), elapsed

        heads = ("CALL", "STATUS", "PURPOSE", "MODEL", "REQUESTS", "TOKENS IN/OUT", "TIME")
        table(screen, heads, map(row, page), more=page.cursor)

    tell(looked(store, read), as_json, show)


def _usage(usage: UsageView | None) -> str | None:
    if usage is None:
        return None
    told = ("?" if count is None else str(count) for count in (usage.input_tokens, usage.output_tokens))
    return "/".join(told)


def tools(turn: Turn, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Tool calls of a Turn. What was asked, whether it ended, and whether the agent has the result."""

    async def read(there: Opened) -> Page:
        return Page(tuple(await (await there.turn(turn)).list_tools()))

    def show(screen: Console, found: Page) -> None:
        def row(view: ToolView) -> tuple[object, ...]:
            applied = (
                "yes" if view.applied_at_ms is not None else "received" if view.received_at_ms is not None else None
            )
            return view.call_id, view.name, view.kind, view.state, view.execution_id, applied, view.arguments

        table(screen, ("CALL", "TOOL", "KIND", "STATE", "EXECUTION", "APPLIED", "ARGUMENTS"), map(row, found))

    tell(looked(store, read), as_json, show)


def interactions(
    turn: Turn,
    store: Store = DEFAULT_STORE,
    every: Annotated[bool, typer.Option("--all", help="Answered and closed ones too.")] = False,
    as_json: Json = False,
) -> None:
    """Questions of a Turn. Approvals, and results that somebody has to give."""

    async def read(there: Opened) -> Page:
        handle = await there.turn(turn)
        key = handle.thread_key
        question = ListInteractions(
            session=key.session, thread_id=key.thread_id, turn_id=handle.turn_id, pending_only=not every
        )
        return Page(tuple(await there.backend.query(question)))

    def show(screen: Console, found: Page) -> None:
        view: InteractionView
        for view in found:
            pairs = (
                ("interaction", view.interaction_id),
                ("kind", view.kind),
                ("state", view.state),
                ("tool", view.name),
                ("arguments", view.arguments),
                ("call", view.call_id),
                ("asked", instant(view.opened_at_ms)),
                ("answer", None if view.response is None else msgspec.json.encode(view.response).decode()),
                ("changed to", view.edited_arguments),
                ("reason", view.reason),
            )
            facts(screen, pairs)
            screen.print()

    tell(looked(store, read), as_json, show)


def add(app: Any) -> None:
    for command in (turns, turn, explain, result, runs, steps, models, tools, interactions):
        app.command()(command)
