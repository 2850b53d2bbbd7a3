"""What happened, computed from what is stored and from the ledger outside it; and whether every promise was kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from incident import EFFECT, QUESTION, ROUTE
from rich.table import Table
from rich.text import Text

from agentscope_durable import (
    DurableSession,
    DurableTurn,
    LocalBackend,
    ModelCallView,
    ModelStatus,
    PublicEvent,
    RunStatus,
    RunView,
    TurnStatus,
)
from agentscope_durable.testing.census import calls_answered, events_of, nothing_stuck, replay_agrees, submits_once
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import MODEL_REQUEST

REQUEST = "alert-1"
CHARS_MAX = 100
QUIET = frozenset({"step.started", "step.phase", "step.ended", "session.created", "thread.created"})
"""Events the timeline leaves out: they are there for machines."""


@dataclass
class Proof:
    """Rows of the table, and what does not hold."""

    rows: list[tuple[str, str, bool]] = field(default_factory=list)
    timeline: list[PublicEvent] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        return [f"{promise}: {fact}" for promise, fact, holds in self.rows if not holds]

    def row(self, promise: str, fact: str, *, holds: bool = True) -> None:
        self.rows.append((promise, fact, holds))

    def table(self) -> Table:
        table = Table(title="Proof: from the store, and from the ledger outside it", title_justify="left")
        table.add_column("Promise", style="bold", no_wrap=True)
        table.add_column("What is on record", overflow="fold")
        table.add_column("", no_wrap=True)
        for promise, fact, holds in self.rows:
            table.add_row(promise, Text(fact), Text("✓", "green") if holds else Text("✗ BROKEN", "bold red"))
        return table

    def timeline_table(self) -> Table:
        title = "Timeline: the Session's committed events"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), expand=True)
        for name, width in (("#", 3), ("s", 5), ("event", 21), ("run", 3)):
            table.add_column(name, style="dim", no_wrap=True, width=width)
        table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
        start = self.timeline[0].at_ms if self.timeline else 0
        for event in self.timeline:
            if event.type not in QUIET:
                run = (event.run_id or "").rpartition(".")[2]
                seconds = f"{(event.at_ms - start) / 1000:.2f}"
                table.add_row(str(event.sequence), seconds, event.type, run, Text(said(event)))
        return table


def said(event: PublicEvent) -> str:
    """The event in a few words."""
    data = event.data
    match event.type.partition("."):
        case ("turn", _, "status"):
            turn = data["turn"]
            waits = ", ".join(waiting["kind"] for waiting in turn.get("waitingOn", ()))
            text = turn["status"] + (f" on {waits}" if waits else "")
            if "error" in turn:
                text += f": {turn['error']['kind']}: {turn['error']['message']}"
        case ("message", _, "completed"):
            text = " ".join(str(part.get("text", "")) for part in data["content"])
            text = f"{data['role']}: {text}"
        case ("run", _, "started"):
            process = data["owner"].split("-")[1]
            text = f"run {data['number']} in process {process}, fence {data['fence']}"
        case ("run", _, "ended"):
            text = data["status"]
        case ("message", _, "abandoned"):
            text = f"attempt {data['attempt']}: {data['reason']}"
        case ("tool", _, _):
            text = f"{data.get('name') or data['callId']} {data.get('state') or ''}"
        case ("interaction", _, _):
            text = data.get("name") or data.get("outcome") or ""
        case ("signal", _, _):
            text = f"{data['operation']} {data['requestId']}"
        case _:
            text = ""
    return text if len(text) <= CHARS_MAX else f"{text[: CHARS_MAX - 1]}…"


async def prove(
    backend: LocalBackend,
    session: DurableSession,
    turn: DurableTurn,
    ledger: EffectLedger,
    *,
    kills: list[str],
    scripted: bool,
) -> Proof:
    """Ask the store and the ledger. `kills` says in words where processes died."""
    proof = Proof(timeline=await events_of(backend, session.key))
    view = await turn.status()
    runs: list[RunView] = list(await turn.list_runs())
    tools = await turn.list_tools()
    lines = ledger.lines()

    again = await session.submit(REQUEST, QUESTION)
    turns = list(await session.list_turns())
    wrong = await submits_once(backend, session.key, {REQUEST: turn.turn_id})
    once = [one.turn_id for one in turns] == [turn.turn_id] == [again.turn_id] and not wrong
    proof.row("One task, one Turn", f"{turn.turn_id}; submitted again, it is the same one", holds=once)
    proof.row("Processes killed", f"{len(kills)} with SIGKILL: {'; '.join(kills)}" if kills else "none was")
    story = "  ".join(f"{run.number} {run.status}" for run in runs)
    lost = sum(run.status is RunStatus.LOST for run in runs)
    proof.row("Its Runs", f"{story}  ({lost} LOST)", holds=lost <= len(kills))

    for name in sorted({line["tool"] for line in lines if line["name"] == EFFECT} | {tool.name for tool in tools}):
        calls = [tool for tool in tools if tool.name == name]
        effects = [line for line in lines if line["name"] == EFFECT and line["tool"] == name]
        states = ", ".join(f"{tool.state}{' and applied' if tool.applied_at_ms is not None else ''}" for tool in calls)
        if name == "read_metrics":
            proof.row(f"Tool {name}", f"local, read-only: may be read again; {len(calls)} call, {states}")
            continue
        proof.row(
            f"Tool {name}",
            f"{len(effects)} effect in the ledger, {len(calls)} call in the store: {states}",
            holds=len(effects) <= len(calls) and all(tool.state.terminal for tool in calls),
        )

    requests: Counter[ModelStatus] = Counter()
    stories: dict[str, list[ModelStatus]] = {}
    replayed = stored = 0
    for run in runs:
        calls: list[ModelCallView] = list(await turn.list_model_calls(run.run_id))
        for call in calls:
            statuses = [request.status for request in call.requests]
            requests.update(statuses)
            stories.setdefault(call.message_id or call.model_call_id, []).extend(statuses)
        stored += sum(call.status is ModelStatus.COMPLETED for call in calls)
        if run.status is RunStatus.LOST:
            replayed = stored
    made = sum(line["name"] == MODEL_REQUEST for line in lines)
    repeated = sum(ModelStatus.COMPLETED in statuses[:-1] for statuses in stories.values())
    ended = {status: count for status, count in requests.items() if count}
    proof.row(
        "Model requests",
        f"{made} reached the model; on record: "
        + ", ".join(f"{count} {status}" for status, count in sorted(ended.items())),
        # A process may die between the record of a request and the request.
        holds=ModelStatus.STARTED not in ended and ended.get(ModelStatus.COMPLETED, 0) <= made <= sum(ended.values()),
    )
    proof.row(
        "Answers asked for again",
        f"{repeated} of {requests[ModelStatus.COMPLETED]} stored ones; after a kill {replayed} came from the store",
        holds=repeated == 0,
    )

    applied = [e for e in proof.timeline if e.type == "signal.applied" and e.data["operation"] == "steer"]
    proof.row("The steer", f"entered the work {len(applied)} time", holds=len(applied) == 1)
    asked = [e for e in proof.timeline if e.type == "interaction.requested"]
    answered = [e for e in proof.timeline if e.type == "interaction.resolved"]
    both = f"asked {len(asked)} time, answered {len(answered)} time"
    proof.row("The approval", both, holds=len(asked) == len(answered))

    answer = str(await turn.result() if view.status is TurnStatus.COMPLETED else view.error)
    heard = answer != "None" and (not scripted or "database was not touched" in answer)
    proof.row("The answer", f"{view.status}: {answer}", holds=view.status is TurnStatus.COMPLETED and heard)

    for promise, problems in (
        ("Each call, one result", await calls_answered(backend, session.key)),
        ("Events replayed", await replay_agrees(backend, session.key)),
        ("Nothing left behind", await nothing_stuck(backend, session.key, routes=[ROUTE])),
    ):
        proof.row(promise, "; ".join(problems) or _GOOD[promise], holds=not problems)
    return proof


_GOOD = {
    "Each call, one result": "each was told in order: requested, completed, applied",
    "Events replayed": "from the first one on they give the snapshot, without a gap",
    "Nothing left behind": "no lease of a dead process, no work without an owner",
}
