"""What is judged when a story has ended: what clients were told, what the store says, and what really happened.

Each function is one promise. It compares independent accounts of the story: the clients' (`Asked`), the world's
(`Effects`), the events as they were written (`Audit`), and what the product answers now.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import (
    Closed,
    Conflict,
    DurableError,
    Fenced,
    HasHistory,
    Incompatible,
    NotFound,
    Rejected,
    RequestConflict,
    Retry,
    SessionDropped,
    Terminal,
    Unconfirmed,
)
from agentscope_durable.contracts.events import EventFilter, cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience, ExecutionKind, ExecutionState
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.spi.record_store import PAGE_MAX, LogRange, Range, Reads
from tests.simulation.audit import TERMINAL, Asked, Violation
from tests.simulation.schedule import REAL, place
from tests.simulation.workspaces import Workspaces

EFFECTS_OF_CUT = ("ConnectionError", "OSError", "TimeoutError", "ValueError", "RuntimeError")
"""What scripts and cut streams raise; nothing else may be reported that is no DurableError."""

KILLED = "Killed"
"""What a process is killed by here. Code that catches everything reports it, and nobody is left to hear that."""

EXPECTED = (
    *(Retry, Unconfirmed, Fenced, Conflict, Terminal, Closed, NotFound, HasHistory, Incompatible),
    SessionDropped,
)
"""Refusals and outages that can happen to anybody. Any other error is a defect of whoever raised it."""


NOT_STARTED = (ExecutionState.DENIED, ExecutionState.INTENT, ExecutionState.AWAITING_APPROVAL)
NOT_KNOWN = (ExecutionState.UNKNOWN, ExecutionState.RUNNING)


CONTROLS = ("steer", "inject", "cancel", "pause", "resume", "signal")
ENDS = ("signal.applied", "signal.expired", "signal.withdrawn")


def value_of(tool: Any) -> Any:
    """What a call has given, as any harness or AgentScope stores it."""
    result = tool.result or {}
    if "content" in result:
        return "".join(block.get("text", "") for block in result["content"])
    return result.get("value")


class Verdict:
    """Reads everything once, through the product's own queries on the bare store."""

    def __init__(self, story: Any, session: SessionKey) -> None:
        self.story = story
        self.session = session
        self.audit = story.audit
        self.world = story.world
        self._backend = TransactionalSessionBackend(
            story.world.truth, story.world.objects, environment=story.world.environment
        )
        # What was copied is judged after what it is a copy of.
        names = [view.thread_id for view in self.all(q.ListThreads)]
        self.threads = sorted(names, key=lambda name: (self.session, name) in self.audit.forks)
        self.turns: dict[str, Any] = {}
        self.queues: dict[str, list[str]] = {}
        for thread in self.threads:
            views = self.all(q.ListTurns, thread_id=thread)
            self.queues[thread] = [view.turn_id for view in views]
            self.turns.update({view.turn_id: view for view in views})
        self._copies: dict[tuple[str, str], list[str] | None] = {}
        self.snapshot = self.ask(q.GetSnapshot(session=self.session, filter=EventFilter()))

    def ask(self, question: Any) -> Any:
        return self.world.loop.drive(self._backend.query(question, audience=Audience.OPERATOR))

    def all(self, kind: Any, name: str = "cursor", **fields: Any) -> list[Any]:
        items: list[Any] = []
        cursor = None
        while True:
            page = self.ask(kind(session=self.session, limit=7, **{name: cursor}, **fields))
            items += page.items
            cursor = page.cursor
            if cursor is None:
                return items

    def open_body(self, body: Any) -> bytes:
        return self.world.loop.drive(self._backend.open_body(self.session, body))

    def tools(self, turn_id: str) -> list[Any]:
        view = self.turns[turn_id]
        return self.ask(q.ListTools(session=self.session, thread_id=view.thread_id, turn_id=turn_id))

    def broken(self, rule: str, what: str) -> None:
        self.audit.broken(rule, what)

    def _mine(self, asked: Asked) -> bool:
        return place(asked.thread)[0] == self.session

    # ---- P1 ----

    def submits(self) -> None:
        """An acknowledged submit is never lost or doubled; a repeat is the same Turn; other content is a conflict."""
        by_request: dict[str, list[Asked]] = defaultdict(list)
        for asked in self.audit.asked:
            if asked.what == "submit" and self._mine(asked):
                by_request[asked.request].append(asked)
        for request, tries in by_request.items():
            told = {one.turn_id for one in tries if one.acknowledged}
            if len(told) > 1:
                self.broken("P1", f"submit {request} was acknowledged as turns {told}")
            contents = {one.content for one in tries if one.acknowledged}
            if len(contents) > 1:
                self.broken("P1", f"submit {request} was acknowledged with contents {contents}")
            for turn_id in told - self.turns.keys():
                self.broken("P1", f"submit {request} was acknowledged as turn {turn_id}, which is not there")
            for one in tries:
                if isinstance(one.error, RequestConflict) and len({o.content for o in tries}) == 1:
                    self.broken("P1", f"submit {request} conflicts, and had one content only")
        made = Counter(view.request_id for view in self.turns.values())
        for view in self.turns.values():
            tries = [one for one in by_request[view.request_id] if place(one.thread)[1] == view.thread_id]
            if not tries:
                self.broken("P1", f"turn {view.turn_id} was made by request {view.request_id}, which nobody sent")
                continue
            if made[view.request_id] > 1:
                self.broken("P1", f"request {view.request_id} made {made[view.request_id]} turns")
            message = self.ask(q.GetMessage(session=self.session, message_id=f"{view.turn_id}.input"))
            text = "".join(block.text for block in message.content)
            acknowledged = [one.content for one in tries if one.acknowledged]
            if text not in [one.content for one in tries] or (acknowledged and text != acknowledged[0]):
                self.broken("P1", f"turn {view.turn_id} has the input {text!r}, acknowledged was {acknowledged}")

    def order(self) -> None:
        """P3: what was acknowledged before something else was asked comes first."""
        done = [one for one in self.audit.asked if one.what == "submit" and one.acknowledged and self._mine(one)]
        for first in done:
            for second in done:
                if first.thread == second.thread and first.turn_id != second.turn_id:
                    earlier, later = self.turns[first.turn_id], self.turns[second.turn_id]
                    sent = min(one.began for one in self.audit.asked if one.request == second.request)
                    if first.ended is not None and first.ended < sent and earlier.ordinal > later.ordinal:
                        self.broken("P3", f"{first.request} was acknowledged before {second.request} was sent")
        for thread, queue in self.queues.items():
            ordinals = [self.turns[one].ordinal for one in queue]
            if ordinals != list(range(1, len(queue) + 1)):
                self.broken("P3", f"ordinals of {thread} are {ordinals}")

    # ---- P4 ----

    def models(self) -> None:
        """Every request was committed before it was made, and made once."""
        if self.story.plan.agent == REAL:
            return  # Its model does not know which of the Turn's messages it is asked for; the audit sees the commits.
        asked = Counter((message, attempt) for _, _, message, attempt in self.world.effects.models)
        for mark, count in asked.items():
            if count > 1:
                self.broken("P4", f"attempt {mark[1]} of {mark[0]} was sent {count} times")
            if mark not in self.audit._started:
                self.broken("P4", f"attempt {mark[1]} of {mark[0]} was sent and never committed")

    # ---- P5 ----

    def effects(self) -> None:
        """A tool that must not run again began at most once, and its outcome was never guessed."""
        effects, known = self.world.effects, self.story.known_effects
        for turn_id, view in self.turns.items():
            for tool in self.tools(turn_id):
                arguments = msgspec.json.decode(tool.arguments)
                effect = arguments["effect"]
                known[effect] = tool
                rule = self.audit.rules.get(f"{turn_id}/{tool.call_id}")
                begun = effects.begun[effect]
                if rule != "safe" and begun > 1:
                    self.broken("P5", f"{effect} ({rule}) of turn {turn_id} was done {begun} times")
                if tool.state in NOT_STARTED and begun and tool.kind is not ExecutionKind.MANUAL:
                    self.broken("P5", f"{effect} is {tool.state} and was done")
                if view.status.terminal and tool.state in NOT_KNOWN and rule != "safe":
                    self.broken("P5", f"turn {turn_id} has ended and {effect} is {tool.state}")
                self._result(effect, tool)

    def _result(self, effect: str, tool: Any) -> None:
        if tool.result is None or tool.kind is ExecutionKind.MANUAL:
            return
        ended = self.world.effects.ended.get(effect, [])
        value, reason = value_of(tool), tool.result.get("reason")
        if tool.state is ExecutionState.COMPLETED and self._good(tool):
            if value not in ended:
                self.broken("P5", f"{effect} has the result {value!r}; really it was {ended}")
        elif isinstance(reason, str) and reason.endswith(" failed") and reason not in ended:
            self.broken("P5", f"{effect} failed by {reason!r}; really it was {ended}")

    @staticmethod
    def _good(tool: Any) -> bool:
        return tool.result is not None and tool.result.get("state", "success") == "success"

    # ---- P6 ----

    def answers(self) -> None:
        """An answer is applied once, to its call; of two answers one is refused."""
        accepted: dict[str, list[Asked]] = defaultdict(list)
        for one in self.audit.asked:
            if one.what in ("respond", "refuse", "edit", "end") and one.acknowledged and one.content and one.target:
                accepted[one.target].append(one)
        interactions = self.snapshot.projection.interactions
        for interaction_id, answers in accepted.items():
            if interaction_id not in interactions:
                continue
            if len({one.request for one in answers}) > 1:
                self.broken("P6", f"interaction {interaction_id} took answers {[one.request for one in answers]}")
            view, answer = interactions[interaction_id], answers[0]
            if view.request_id != answer.request:
                self.broken("P6", f"interaction {interaction_id} says it was answered by {view.request_id}")
            tool = next((t for t in self.tools(view.turn_id) if t.call_id == view.call_id), None)
            if tool is None:
                self.broken("P6", f"interaction {interaction_id} is about a call that is not there")
            elif answer.content == "no" and tool.state in (ExecutionState.COMPLETED, ExecutionState.RUNNING):
                self.broken("P6", f"{view.call_id} of {view.turn_id} was refused and is {tool.state}")
            elif answer.content in ("yes", "edited") and tool.state is ExecutionState.DENIED:
                self.broken("P6", f"{view.call_id} of {view.turn_id} was approved and is DENIED")
            elif answer.content in ("yes", "edited") and tool.state is ExecutionState.COMPLETED and self._good(tool):
                if answer.content == "edited":
                    self.audit.sometimes["a call did what a person had made of it"] += 1
                if str(value_of(tool)).endswith("!") is not (answer.content == "edited"):
                    self.broken("P6", f"{view.call_id} was answered {answer.content!r} and did {value_of(tool)!r}")
            elif (
                tool.kind is ExecutionKind.MANUAL
                and tool.state is ExecutionState.COMPLETED
                and value_of(tool) != answer.content
            ):
                self.broken("P6", f"{view.call_id} was answered {answer.content!r} and has {tool.result}")
        for interaction_id, view in interactions.items():
            if view.state.value == "PENDING" and self.turns[view.turn_id].status.terminal:
                self.broken("P6", f"interaction {interaction_id} is open and its turn has ended")

    def inputs(self) -> None:
        """Every accepted input has one end; one that was withdrawn or expired is not in the answer."""
        audit = self.audit
        ended = {request for requests in audit.applied_inputs.values() for request in requests} | set(audit.kept_out)
        for one in audit.asked:
            if one.what in ("steer", "inject") and one.acknowledged and one.request not in ended:
                self.broken("P6", f"{one.what} {one.request} was accepted and has no end")
            end = audit.kept_out.get(one.target)
            if one.what == "withdraw" and one.acknowledged and end != "signal.withdrawn":
                self.broken("P6", f"the withdraw of {one.target} was accepted; its end is {end}")
            if one.what == "steer" and one.acknowledged and audit.kept_out.get(one.request) == "signal.expired":
                # It came before the answer was final, so the answer was not.
                turn = self.turns.get(one.turn_id)
                if turn is not None and turn.status.value == "COMPLETED" and one.turn_id not in audit.cancels:
                    self.broken("P6", f"turn {one.turn_id} is COMPLETED, and steer {one.request} was not heard")
        admitted = list(audit.accepted_inputs)
        for turn_id, requests in audit.applied_inputs.items():
            if sorted(requests, key=admitted.index) != requests:
                self.broken("P6", f"turn {turn_id} was told {requests}, admitted were {admitted}")

    def controls(self) -> None:
        """Who was told that a control is accepted finds that in the timeline, and in the end what became of it."""
        told: dict[str, list[Any]] = defaultdict(list)
        for event in self._own_events():
            if event.type.startswith("signal."):
                told[event.data["requestId"]].append(event)
        for one in self.audit.asked:
            if one.what not in CONTROLS or not one.acknowledged or self.turns.get(one.turn_id) is None:
                continue
            events = told[one.request]
            if not any(event.at <= one.ended for event in events):
                self.broken("P6", f"{one.what} {one.request} was acknowledged and no event says so")
            kinds = [event.type for event in events]
            if [kind in ENDS for kind in kinds] not in ([True], [False, True]):
                self.broken("P6", f"{one.what} {one.request} was acknowledged; its events are {kinds}")
            if any(event.turn != one.turn_id for event in events):
                self.broken("P6", f"{one.what} {one.request} of {one.turn_id} is told of {[e.turn for e in events]}")

    # ---- what the agent knew: the native state is neither lost nor doubled ----

    def contexts(self) -> None:
        """The last answer of a Turn says what the agent had been told: exactly what was committed before it."""
        said = {}
        for turn_id, view in self.turns.items():
            if view.status.value == "COMPLETED":
                said[turn_id] = self._said(view)
        for thread in self.threads:
            page = self.all(q.ListCheckpoints, "after", thread_id=thread)
            self._contexts(thread, page, said)

    def _said(self, view: Any) -> tuple[list[str], list[str], list[str]]:
        message = self.ask(q.GetMessage(session=self.session, message_id=view.result.message_id))
        text = "".join(block.text for block in message.content)
        head, inputs, results, context = text.split("|")
        name = head.removesuffix(" ends")
        own = "".join(
            block.text
            for block in self.ask(q.GetMessage(session=self.session, message_id=f"{view.turn_id}.input")).content
        )
        if name != own:
            self.broken("P1", f"turn {view.turn_id} answers for {name}, its input was {own}")
        lists = [[one for one in part.split(", ") if one] for part in (inputs, results, context)]
        applied = self.audit.applied_inputs[view.turn_id]
        if len(lists[0]) != len(applied) or any(
            text not in self._contents(request) for text, request in zip(lists[0], applied, strict=True)
        ):
            self.broken("P6", f"turn {view.turn_id} was told {lists[0]}, applied were {applied}")
        for tool in self.tools(view.turn_id):
            value = None if tool.result is None else value_of(tool) or tool.result.get("reason")
            if tool.applied_at_ms is None:
                self.broken("P6", f"turn {view.turn_id} is COMPLETED and {tool.call_id} is not applied")
            elif isinstance(value, str) and lists[1].count(value) != 1 and tool.state.value == "COMPLETED":
                self.broken("P6", f"turn {view.turn_id} knows {lists[1]}, not {value!r} once")
        return lists[0], lists[1], lists[2]

    def _contents(self, request: str) -> list[str]:
        """What may have been said by an input: what was acknowledged, or else what was sent."""
        tries = [one for one in self.audit.asked if one.request == request and one.what in ("steer", "inject")]
        return [one.content for one in tries if one.acknowledged] or [one.content for one in tries]

    def _contexts(self, thread: str, checkpoints: list[Any], said: dict[str, Any]) -> None:
        """Each completed Turn continues what the settled position before it knew."""
        known: dict[str, list[str] | None] = {}
        # What was pruned says nothing any more.
        before: list[str] | None = None if (self.session, thread) in self.audit.forgotten else []
        loose: set[str] = set()
        for one in checkpoints:
            if one.source is not None:
                mine = self._copies.get((one.source.thread_id, one.source.position), None)
                known[one.position] = before = mine
                loose = set()
            elif one.turn_id in said:
                context = said[one.turn_id][2]
                own = [self._input_of(one.turn_id), *said[one.turn_id][0]]
                if before is not None:
                    middle = context[len(before) : len(context) - len(own)]
                    if context[: len(before)] != before or context[len(context) - len(own) :] != own:
                        self.broken("P4", f"turn {one.turn_id} knew {context}; before it was {before}, own {own}")
                    elif set(middle) - loose or len(set(context)) != len(context):
                        self.broken("P4", f"turn {one.turn_id} knew {context}, of which {middle} is a stranger")
                known[one.position] = before = context
                loose = set()
            else:
                # It failed or was cancelled: its words may have been stored, or not.
                known[one.position] = None
                loose |= {self._input_of(one.turn_id)} | {
                    asked.content for asked in self.audit.asked if asked.turn_id == one.turn_id
                }
            self._copies[thread, one.position] = known[one.position]

    def _input_of(self, turn_id: str) -> str:
        message = self.ask(q.GetMessage(session=self.session, message_id=f"{turn_id}.input"))
        return "".join(block.text for block in message.content)

    # ---- P7 ----

    def timeline(self) -> None:
        """Events are gap-free, the same for everyone, and add up to the snapshot."""
        written = self._own_events()
        pruned = self.audit.pruned_through[self.partition]
        events = self._list(pruned)
        numbers = [event.sequence for event in events]
        if numbers != list(range(pruned + 1, len(written) + 1)):
            self.broken("P7", f"listed are {numbers[:3]}..{numbers[-3:]}, written {len(written)}, pruned {pruned}")
        for event in events:
            was = written[event.sequence - 1]
            if (event.type, event.thread_id or "", event.turn_id or "") != (was.type, was.thread, was.turn):
                self.broken("P7", f"event {event.sequence} was {was.type} and is {event.type}")
        if not pruned:
            fold = EventProjection(self.session)
            for event in events:
                fold.accept(event)
            self._same(fold.projection, "the replay")
        for watcher in self.story.watchers:
            if watcher.session != self.session or watcher.only not in ("", *self.threads):
                continue
            shown = self.ask(q.GetSnapshot(session=self.session, filter=watcher.narrow)) if watcher.only else None
            if (watcher.seen or watcher.resets) and not watcher.gone:
                self._same(watcher.fold.projection, watcher.name, shown)

    @property
    def partition(self) -> str:
        return keys.partition(self.session)

    def _own_events(self) -> list[Any]:
        return self.audit.events[self.partition]

    def _list(self, pruned: int) -> list[Any]:
        events: list[Any] = []
        cursor = cursor_of(self.session, pruned) if pruned else None
        while True:
            page = self.ask(q.ListEvents(session=self.session, filter=EventFilter(), cursor=cursor, limit=11))
            events += page.events
            cursor = page.cursor
            if cursor == page.high_watermark:
                return events
            if sequence_of(self.session, cursor) > 100_000:
                raise Violation("P7", "the listing has no end")

    def _same(self, projection: Any, who: str, snapshot: Any = None) -> None:
        ours, theirs = msgspec.to_builtins((snapshot or self.snapshot).projection), msgspec.to_builtins(projection)
        for part in ours.keys() | theirs.keys():
            one, other = ours.get(part, {}), theirs.get(part, {})
            if one == other:
                continue
            if not isinstance(one, dict) or not isinstance(other, dict):
                self.broken("P7", f"{part} is {one} in the snapshot and {other} in {who}")
                continue
            for key in one.keys() | other.keys():
                if one.get(key) != other.get(key):
                    self.broken("P7", f"{part} {key} is {one.get(key)} in the snapshot, {other.get(key)} in {who}")

    def views(self) -> None:
        """What a query says of a Turn is what the snapshot says."""
        shown = self.snapshot.projection.turns
        if shown.keys() != self.turns.keys():
            self.broken("P7", f"the snapshot has turns {sorted(shown)}, the listing {sorted(self.turns)}")
        for turn_id, view in self.turns.items():
            plain = replace(view, lease=None, waiting_on=shown[turn_id].waiting_on)
            if plain != shown[turn_id]:
                self.broken("P7", f"turn {turn_id} is {plain} in the listing and {shown[turn_id]} in the snapshot")
            if not view.status.terminal:
                self.broken("P9", f"turn {turn_id} is {view.status} at the end")

    def history(self) -> None:
        """Page by page it is what the snapshot has, in the order in which it was said, and says what was not heard."""
        told = self.all(q.GetHistory)
        events = self._own_events()
        order = list(dict.fromkeys(one.data["messageId"] for one in events if one.type == "message.completed"))
        if [message.id for message in told] != order:
            self.broken("P7", f"the history is {[message.id for message in told]}, said were {order}")
        shown = self.snapshot.projection.history()
        if odd := [one.id for one, other in zip(told, shown, strict=False) if one != other]:
            self.broken("P7", f"messages {odd} are others in the history than in the snapshot")
        for message in told:
            end = self.audit.kept_out.get(message.request_id or "")
            if (message.withdrawn, message.expired) != (end == "signal.withdrawn", end == "signal.expired"):
                self.broken("P6", f"message {message.id} was {end}, and says {message}")

    def narrow(self) -> None:
        """The snapshot of a Thread or a Turn has what the whole one has of it, and nothing of another."""
        for thread, queue in self.queues.items():
            self._part(EventFilter(thread_id=thread), set(queue))
        for turn_id, view in [*self.turns.items()][-1:]:
            self._part(EventFilter(thread_id=view.thread_id, turn_id=turn_id), {turn_id})

    def _part(self, of: EventFilter, turns: set[str]) -> None:
        whole = self.snapshot.projection
        part = self.ask(q.GetSnapshot(session=self.session, filter=of)).projection
        turn_of: dict[str, str] = {}
        for event in self._own_events():
            if event.type == "message.completed" or event.type.startswith("signal."):
                turn_of |= {event.data[name]: event.turn for name in ("messageId", "requestId") if event.data.get(name)}
        wanted = {
            "turns": {key: view for key, view in whole.turns.items() if key in turns},
            "tools": {key: view for key, view in whole.tools.items() if view.turn_id in turns},
            "interactions": {key: view for key, view in whole.interactions.items() if view.turn_id in turns},
            "messages": {key: view for key, view in whole.messages.items() if turn_of.get(key) in turns},
            "signals": {key: view for key, view in whole.signals.items() if turn_of.get(key) in turns},
        }
        for name, views in wanted.items():
            found = getattr(part, name)
            if found != views:
                odd = [key for key in found.keys() | views.keys() if found.get(key) != views.get(key)]
                self.broken("P7", f"the snapshot of {of} has other {name}: {odd}")

    # ---- P8 ----

    def failures(self) -> None:
        """Only failed invocations count: no kill, takeover, pause or shutdown does."""
        for turn_id, view in self.turns.items():
            counted = 0 if view.recovery is None else view.recovery.failures
            if counted != self.audit.failures[turn_id]:
                self.broken("P8", f"turn {turn_id} counts {counted} failures, it had {self.audit.failures[turn_id]}")
            if view.status.value == "FAILED" and view.recovery is not None and turn_id not in self.audit.repaired:
                policy, error = view.recovery.policy, view.recovery.last_error
                if error.retryable and counted <= policy.max_retries:
                    self.broken("P8", f"turn {turn_id} failed after {counted} failures that may be tried again")
            if counted > 4:
                self.broken("P8", f"turn {turn_id} failed {counted} times, 4 are allowed")

    def backoff(self) -> None:
        """No invocation begins before the time that the last failure named, by the store's clock."""
        due: dict[str, int] = {}
        for event in self._own_events():
            if event.type == "turn.recovery":
                due[event.turn] = event.data["recovery"].get("nextRetryAtMs") or 0
            elif event.type == "run.started" and event.at_ms < due.get(event.turn, 0):
                self.broken("P8", f"a run of {event.turn} began {due[event.turn] - event.at_ms} ms before it was due")


def promises(verdict: Verdict) -> Iterator[Any]:
    yield verdict.submits
    yield verdict.order
    yield verdict.models
    yield verdict.effects
    yield verdict.answers
    yield verdict.inputs
    yield verdict.controls
    yield verdict.contexts
    yield Workspaces(verdict).check
    yield verdict.timeline
    yield verdict.views
    yield verdict.history
    yield verdict.narrow
    yield verdict.failures
    yield verdict.backoff


class Whole:
    """What is judged of all Sessions together."""

    def __init__(self, story: Any) -> None:
        self.story = story
        self.audit = story.audit
        self.world = story.world
        self._backend = TransactionalSessionBackend(
            story.world.truth, story.world.objects, environment=story.world.environment
        )

    def ask(self, question: Any) -> Any:
        return self.world.loop.drive(self._backend.query(question, audience=Audience.OPERATOR))

    def broken(self, rule: str, what: str) -> None:
        self.audit.broken(rule, what)

    # ---- P5 ----

    def strangers(self) -> None:
        """Nothing was done that is on no record; what was dropped has none any more."""
        if self.audit.dropped:
            return
        for effect in self.world.effects.begun:
            if effect not in self.story.known_effects:
                self.broken("P5", f"{effect} was done and no call of it is on record")

    # ---- what was dropped is gone ----

    def dropped(self) -> None:
        for session, done in self.audit.dropped.items():
            try:
                self.ask(q.GetSnapshot(session=session, filter=EventFilter()))
            except SessionDropped:
                pass
            else:
                self.broken("D16", f"{session} was dropped and still answers")
            if not done:
                continue
            # Its name, what was dropped, and the marks of bodies that the sweep has not found yet.
            everything = Range("", "", PAGE_MAX)
            found = self.world.loop.drive(
                self.world.truth.read(keys.partition(session), Reads(ranges=(everything,), log=LogRange(limit=10)))
            )
            kept = [key for key, _ in found.ranges[everything] if not key.startswith(keys.OBJECTS)]
            if kept != [keys.DROPPED] or len(found.log) > 1:
                self.broken("D16", f"of {session}, which was dropped, {kept} and {len(found.log)} commits are left")

    # ---- every body is where it is said to be ----

    def soundness(self) -> None:
        """Doctor, which reads everything, finds no damage."""
        found = self.ask(q.Examine(deep=True))
        damage = [finding for finding in found.findings if finding.severity.value == "damage"]
        if damage:
            self.broken("D11", f"doctor finds {damage}")

    # ---- nobody may be told what is no answer ----

    def errors(self) -> None:
        for asked in self.audit.asked:
            error = asked.error
            if asked.ended is None or error is None or isinstance(error, EXPECTED):
                continue
            if asked.what not in ("restore", "fork", "prune", "forget", "close_thread", "repair") or not isinstance(
                error, Rejected
            ):
                self.broken("error", f"{asked.what} {asked.request} was told {type(error).__name__}: {error}")
        for at, actor, error in self.world.errors:
            if isinstance(error, DurableError):
                if not isinstance(error, EXPECTED):
                    self.broken("error", f"{actor} reported {type(error).__name__}: {error} at {at:.3f}")
            elif type(error).__name__ not in (*EFFECTS_OF_CUT, KILLED):
                self.broken("error", f"{actor} reported {type(error).__name__}: {error} at {at:.3f}")
        for context in self.world.loop.errors:
            error = context.get("exception")
            if error is None or type(error).__name__ == KILLED:
                continue
            self.broken("error", f"{context.get('message')}: {type(error).__name__}: {error}")


def check(story: Any) -> None:
    audit = story.audit
    for session in list(audit.sessions.values()):
        if session in audit.dropped or keys.partition(session) not in audit.events:
            continue
        verdict = Verdict(story, session)
        for promise in promises(verdict):
            promise()
            if audit.problems:
                return
    whole = Whole(story)
    for promise in (whole.strangers, whole.dropped, whole.soundness, whole.errors):
        promise()
        if audit.problems:
            return


__all__ = ["TERMINAL", "Verdict", "check"]
