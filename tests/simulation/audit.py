"""What must be true of a story, written from the specification: TRUST P1..P9, ARCHITECTURE rules 1..6, STATES.

`applied` sees every transaction at the moment it is applied to the store, with the events it wrote. It knows from
these, and from what really happened outside (`Effects`), what the product may say. It never asks the product's
decisions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import (
    AlreadyDecided,
    Closed,
    CursorExpired,
    Fenced,
    InputSettled,
    RequestConflict,
    RevisionConflict,
    Terminal,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import StoredEvent, decode_events
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    ModelStatus,
    ReplayRule,
    RunStatus,
)
from agentscope_durable.spi.environment import recovers_every_step
from agentscope_durable.spi.record_store import LogRange, Reads

TERMINAL = ("COMPLETED", "FAILED", "CANCELLED")

MOVES: dict[str, tuple[str, ...]] = {
    # STATES section 1, one row per status: where a Turn may be seen next.
    "QUEUED": ("RUNNING", "PAUSED", "CANCELLED"),
    "RUNNING": ("WAITING", "PAUSING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"),
    "WAITING": ("RUNNING", "PAUSED", "COMPLETED", "FAILED", "CANCELLED"),
    "PAUSING": ("PAUSED", "WAITING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED"),
    "PAUSED": ("RUNNING", "WAITING", "QUEUED", "FAILED", "CANCELLED"),
    "COMPLETED": (),
    "FAILED": (),
    "CANCELLED": (),
}


class Violation(AssertionError):
    """The product broke a promise. `rule` names it."""

    def __init__(self, rule: str, what: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {what}".replace("." * 100, ""))


@dataclass
class Event:
    sequence: int
    at: float
    actor: str
    type: str
    thread: str
    turn: str
    run: str
    data: dict[str, Any]
    at_ms: int


@dataclass
class Hold:
    """Who may commit for a Thread."""

    fence: int
    owner: str
    turn: str
    run: str
    over: bool = False


@dataclass
class Asked:
    """One call of a client, as the client saw it."""

    what: str
    request: str
    turn: int
    began: float
    ended: float | None = None
    receipt: Any = None
    error: BaseException | None = None
    target: str = ""
    content: str = ""
    thread: str = ""
    turn_id: str = ""

    @property
    def acknowledged(self) -> bool:
        return self.ended is not None and self.error is None


@dataclass
class TurnSeen:
    session: SessionKey
    thread: str
    ordinal: int
    request: str
    status: str = ""
    revision: int = 0
    statuses: list[str] = field(default_factory=list)


class Audit:
    """See the top of this file."""

    def __init__(self) -> None:
        self.world: Any = None
        self.sometimes: Counter[str] = Counter()
        self._drops = recovers_every_step()
        """Hosts throw their Runs away, and claim again what they own."""
        self.events: dict[str, list[Event]] = defaultdict(list)
        self.asked: list[Asked] = []
        self.hosts: dict[str, str] = {}
        self.turns: dict[str, TurnSeen] = {}
        self.order: dict[str, list[str]] = defaultdict(list)
        self.commands: Counter[str] = Counter()
        self._last: dict[str, int] = defaultdict(int)
        self._holds: dict[str, Hold] = {}
        self._fences: dict[str, int] = defaultdict(int)
        self._leases: dict[str, float] = {}
        self._gone: set[str] = set()
        self._left: set[str] = set()
        self._frozen_at: dict[str, float] = {}
        self._started: dict[tuple[str, int], str] = {}
        self._answered: dict[str, str] = {}
        self._running: dict[str, tuple[str, str]] = {}
        self.rules: dict[str, str] = {}
        self._granted: dict[str, str] = {}
        self._executing: Counter[str] = Counter()
        self.effects_of: dict[str, str] = {}
        self.pending: dict[str, set[str]] = defaultdict(set)
        self._approvals: set[str] = set()
        self.facts: Counter[str] = Counter()
        self.cancels: set[str] = set()
        self.pauses: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.repaired: set[str] = set()
        self._closed: set[str] = set()
        """Sessions and Threads, as in `_holds`."""
        self.applied_inputs: dict[str, list[str]] = defaultdict(list)
        self.accepted_inputs: dict[str, str] = {}
        self.kept_out: dict[str, str] = {}
        self.decided: dict[str, str] = {}
        self.problems: list[Violation] = []
        self.history: list[tuple[float, str, Any, Any]] = []
        self.sent: list[tuple[float, str, Any]] = []
        """Everything that reached the store and may change it, to be sent again elsewhere."""
        self.pruned_through: dict[str, int] = defaultdict(int)
        self.forgotten: set[tuple[SessionKey, str]] = set()
        self.forks: set[tuple[SessionKey, str]] = set()
        self.sessions: dict[str, SessionKey] = {}
        self.dropped: dict[SessionKey, bool] = {}
        """Sessions that are being dropped, and whether that is done."""

    # ------------------------------------------------------------ what the world tells

    def broken(self, rule: str, what: str) -> None:
        """A promise is broken. The story is over, but what raised must not be swallowed by the product."""
        self.problems.append(Violation(rule, f"at {self.world.loop.time():.3f} s: {what}"))

    def owners(self) -> list[str]:
        """Hosts that own a Thread and are there."""
        found = dict.fromkeys(self.hosts.get(hold.owner, "") for hold in self._holds.values() if not hold.over)
        return [actor for actor in found if actor and not self.world.loop.is_dead(actor)]

    def killed(self, actor: str) -> None:
        self._gone.add(actor)
        self.sometimes["a host was killed"] += 1
        if any(self.hosts.get(hold.owner) == actor and not hold.over for hold in self._holds.values()):
            self.sometimes["a host was killed while it owned a thread"] += 1

    def left(self, actor: str) -> None:
        self._left.add(actor)

    def frozen(self, actor: str, seconds: float) -> None:
        self._frozen_at[actor] = self.world.loop.time()
        self.sometimes["a host was frozen"] += 1
        if any(self.hosts.get(hold.owner) == actor and not hold.over for hold in self._holds.values()):
            self.sometimes["a host was frozen while it owned a thread"] += 1

    def jumped(self, seconds: int) -> None:
        self.sent.append((self.world.loop.time(), "jump", seconds * 1000))
        if any(not hold.over for hold in self._holds.values()):
            way = "forward" if seconds > 0 else "back"
            self.sometimes[f"the clock went {way} while a thread was owned"] += 1

    def renewed(self, owner: str, actor: str, lease_ms: int) -> None:
        self.hosts.setdefault(owner, actor)
        self.sent.append((self.world.loop.time(), "renew", (owner, lease_ms)))
        self._leases[owner] = self.world.clock.boot_ms() + lease_ms

    def released(self, owner: str) -> None:
        self.sent.append((self.world.loop.time(), "release", owner))
        self._leases.pop(owner, None)

    def executing(self, execution_id: str) -> None:
        """An executor was really called: P5, a start is granted once."""
        self._executing[execution_id] += 1
        if self._executing[execution_id] > 1:
            self.broken("P5", f"execution {execution_id} was started {self._executing[execution_id]} times")

    # ------------------------------------------------------------ every transaction

    def applied(
        self, slot: str, actor: str, command: Any, seed: bytes, result: Any, error: BaseException | None
    ) -> None:
        self.sent.append((self.world.loop.time(), "do", (command, seed)))
        name = type(command).__name__
        self.history.append((self.world.loop.time(), actor, command, result if error is None else error))
        if error is not None:
            self.commands[f"{name} {type(error).__name__}"] += 1
            self._refused(actor, command, error)
            return
        self.commands[f"{name} {'ok' if result.changed else 'unchanged'}"] += 1
        key = keys.partition(command.session)
        self.sessions[key] = command.session
        if command.session in self.dropped and not isinstance(command, c.DropSession):
            if result.changed and not isinstance(command, c.SweepObjects | c.ForgetObjects):
                self.broken("D16", f"a {name} changed {key}, which is dropped")
            return
        if isinstance(command, c.DropSession):
            self._drop(key, command, result)
            return
        events = self._new_events(key, actor, result)
        match command:
            case c.Claim():
                self._claimed(key, actor, command, result)
            case c.CommitStep():
                self._committed(key, actor, command, result)
            case c.SettleTurn() | c.PostponeSettlement():
                self._owned(key, actor, command, result)
                self._over(key, command)
            case c.ClaimExecution():
                self._execution(command, result)
            case c.RecordOutcome() if result.changed and result.receipt.settled:
                turn = self.turns.get(command.turn_id)
                if turn is not None and command.turn_id in self.cancels:
                    self.sometimes["a tool's outcome came after the cancel"] += 1
            case c.FileFact() if result.changed:
                self.sometimes["a fenced owner filed a fact"] += 1
                if command.tool is not None:
                    self.sometimes["an unknown call was settled by its late outcome"] += 1
            case c.ReconcileTool() if result.changed:
                self.sometimes["an unknown call was settled by evidence"] += 1
            case c.ReleaseTurn() if result.changed:
                self.sometimes["an operator released a turn"] += 1
            case c.Cancel() if result.changed:
                self.cancels.add(command.turn_id)
                turn = self.turns.get(command.turn_id)
                if turn is not None and turn.status == "WAITING" and self.pending[command.turn_id]:
                    self.sometimes["a cancel came while a question was open"] += 1
            case c.RepairThread() if result.changed and command.turn_id in self.turns:
                self.repaired.add(command.turn_id)
                self.sometimes["an operator repaired a thread"] += 1
            case c.Pause() if result.changed:
                self.pauses[command.turn_id] += 1
            case c.Withdraw() if result.changed:
                self.sometimes["a withdraw was before its input"] += 1
            case c.PruneEvents() if result.changed:
                self.pruned_through[key] = max(self.pruned_through[key], result.receipt.through)
                self.sometimes["events were pruned"] += 1
                if any(not hold.over for hold in self._holds.values()):
                    self.sometimes["events were pruned beside a run"] += 1
            case c.PruneCheckpoints() if result.changed:
                self.forgotten.add((command.session, command.thread_id))
                self.sometimes["checkpoints were pruned"] += 1
            case c.RestoreThread() if result.changed and command.native is not None:
                self.sometimes["a thread was restored"] += 1
            case c.ForkThread() if result.changed and command.native is not None:
                self.forks.add((command.session, command.thread_id))
                self.sometimes["a thread was forked"] += 1
                if any(not hold.over for hold in self._holds.values()):
                    self.sometimes["a thread was forked beside a run"] += 1
            case _:
                pass
        for event in events:
            self._event(key, actor, command, event)

    def _drop(self, key: str, command: c.DropSession, result: Any) -> None:
        """Nothing of it may be at work or wait; then it goes, slice by slice."""
        for turn_id, turn in self.turns.items():
            if turn.session == command.session and turn.status not in TERMINAL:
                self.broken("P1", f"{key} is dropped, and turn {turn_id} is {turn.status}")
        if any(place.startswith(f"{key}/") and not hold.over for place, hold in self._holds.items()):
            self.broken("P2", f"{key} is dropped, and a thread of it is owned")
        if result.changed and command.session not in self.dropped:
            self.sometimes["a session was dropped"] += 1
            if any(not hold.over for hold in self._holds.values()):
                self.sometimes["a session was dropped beside a run"] += 1
        self.dropped[command.session] = not result.receipt.more

    def _refused(self, actor: str, command: Any, error: BaseException) -> None:
        match command, error:
            case ((c.CommitStep() | c.SettleTurn() | c.PostponeSettlement()), Fenced()):
                self.sometimes["a stale commit was refused"] += 1
                if actor in self._frozen_at:
                    self.sometimes["a zombie's commit was refused"] += 1
            case c.CommitStep(), RevisionConflict():
                self.sometimes["a commit met another one in its place"] += 1
            case c.Withdraw(), InputSettled():
                self.sometimes["a withdraw was behind its input"] += 1
            case c.Respond(), AlreadyDecided():
                self.sometimes["an answer was behind another one"] += 1
            case c.SubmitTurn(), Closed():
                self.sometimes["what was closed took no turn"] += 1
            case c.Cancel(), Terminal():
                self.sometimes["completion was before the cancel"] += 1
            case _, RequestConflict():
                self.sometimes["a request id was used for something else"] += 1
            case c.Resume(), RevisionConflict():
                self.sometimes["a resume was of another pause"] += 1
            case _:
                pass

    def _new_events(self, key: str, actor: str, result: Any) -> list[Event]:
        """What this transaction appended: P7, numbers without a gap."""
        if not result.changed:
            return []
        world, last = self.world, self._last[key]
        reads = Reads(log=LogRange(after=last, limit=100))
        records = world.loop.drive(world.truth.read(key, reads))
        found: list[Event] = []
        for row in records.log:
            stored: list[StoredEvent | None] = decode_events(row.events, row.first)
            if row.first + row.count - 1 <= last:
                continue
            if row.first != last + 1:
                self.broken("P7", f"events of {key} go from {last} to {row.first}")
            if len(stored) != row.count:
                self.broken("P7", f"a commit of {row.count} events holds {len(stored)}")
            for number, one in enumerate(stored):
                if one is None:
                    self.broken("P7", f"event {row.first + number} is empty at its birth")
                    continue
                data = msgspec.json.decode(one.payload)
                names = (one.type, one.thread_id, one.turn_id, one.run_id)
                event = Event(row.first + number, world.loop.time(), actor, *names, data, row.at_ms)
                found.append(event)
            last = row.first + row.count - 1
        if records.next_seq - 1 != last:
            self.broken("P7", f"{records.next_seq - 1} events of {key} are counted, {last} are there")
        if result.first_seq and found and found[0].sequence != result.first_seq:
            self.broken("P7", f"a commit says its first event is {result.first_seq}, it is {found[0].sequence}")
        self._last[key] = last
        self.events[key] += found
        return found

    # ---- P2: one owner ----

    def _alive(self, owner: str) -> bool:
        """By the rules of the store: its lease runs, and it is not known to be dead."""
        actor = self.hosts.get(owner)
        if self.world.plan.store != "memory" and actor in self._gone | self._left:
            return False
        return self._leases.get(owner, -1) > self.world.clock.boot_ms()

    def _claimed(self, key: str, actor: str, command: c.Claim, result: Any) -> None:
        got: c.Claimed = result.receipt
        place = f"{key}/{command.thread_id}"
        self.hosts.setdefault(command.owner, actor)
        hold = self._holds.get(place)
        if got.purpose is c.ClaimPurpose.NOTHING:
            if result.changed and hold is not None and not hold.over:
                # The claim itself gave back what its owner had left: a pause, or to a person.
                if not self._own_drop(hold, command):
                    self._lost(place, hold, command)
                hold.over = True
            return
        if not result.changed:
            # The receipt of a claim whose answer was lost.
            if not command.again or hold is None or hold.fence != got.fence or hold.owner != command.owner:
                self.broken("P2", f"a claim of {place} by {command.owner} gives fence {got.fence} and changes nothing")
            self.sometimes["the answer of a claim was lost"] += 1
            return
        if got.fence <= self._fences[place]:
            self.broken("P2", f"fence {got.fence} of {place} does not rise above {self._fences[place]}")
        if hold is not None and not hold.over:
            if hold.owner == command.owner:
                if not self._own_drop(hold, command):
                    self.broken("P2", f"{command.owner} claimed {place}, which it owns under fence {hold.fence}")
            else:
                self._lost(place, hold, command)
                if self.pending[got.turn_id]:
                    self.sometimes["a thread was taken over while a question was open"] += 1
                if self.pending[got.turn_id] & self._approvals:
                    self.sometimes["a thread was taken over during an approval"] += 1
        self._fences[place] = got.fence
        self._holds[place] = Hold(got.fence, command.owner, got.turn_id, got.run_id)

    def _own_drop(self, hold: Hold, command: c.Claim) -> bool:
        """The owner itself has thrown its Run away, as it was told to."""
        return self._drops and hold.owner == command.owner and hold.fence == command.dropped

    def _lost(self, place: str, hold: Hold, command: c.Claim) -> None:
        if self._alive(hold.owner):
            left = self._leases[hold.owner] - self.world.clock.boot_ms()
            self.broken("P2", f"{command.owner} took {place} from {hold.owner}, whose lease has {left} ms left")
            return
        self.sometimes["a thread was taken over"] += 1
        old = self.hosts.get(hold.owner)
        if old is not None and self.world.loop.is_frozen(old):
            self.sometimes["a thread was taken over from a frozen host"] += 1

    def _owned(self, key: str, actor: str, command: Any, result: Any) -> Hold | None:
        """An owner's command that was taken: it must be the owner's."""
        place = f"{key}/{command.thread_id}"
        hold = self._holds.get(place)
        if not result.changed:
            return hold
        if hold is None or hold.fence != command.fence:
            now = "nobody" if hold is None else f"fence {hold.fence}"
            self.broken("P2", f"a {type(command).__name__} under fence {command.fence} was taken; {place} is {now}'s")
            return hold
        if hold.over:
            self.broken("P2", f"a {type(command).__name__} was taken after {place} was given back")
        if hold.turn != command.turn_id:
            self.broken("P2", f"a commit for turn {command.turn_id} was taken under a claim of {hold.turn}")
        if self.hosts.get(hold.owner) != actor:
            self.broken("P2", f"{actor} committed for {place}, which is {hold.owner}'s")
        return hold

    def _over(self, key: str, command: Any) -> None:
        hold = self._holds.get(f"{key}/{command.thread_id}")
        if hold is not None and hold.fence == command.fence:
            hold.over = True

    def _committed(self, key: str, actor: str, command: c.CommitStep, result: Any) -> None:
        self._owned(key, actor, command, result)
        receipt: c.StepReceipt = result.receipt
        if not result.changed:
            return
        if receipt.ended and command.end is not None and command.end.kind is not c.RunEndKind.CANCELLED:
            self._over(key, command)
        if command.end is not None and command.end.kind is c.RunEndKind.FAILED:
            self.failures[command.turn_id] += 1
        if command.end is not None and command.end.kind is c.RunEndKind.RELEASED:
            self.sometimes["a host gave a turn back"] += 1
        for fact in command.models:
            if not fact.message_id:
                continue
            if fact.status is ModelStatus.STARTED:
                # P4: a committed answer is not asked for again.
                if fact.message_id in self._answered:
                    self.broken("P4", f"{fact.message_id} was answered and is asked for again by {command.run_id}")
                mark = (fact.message_id, fact.attempt)
                if mark in self._started:
                    self.broken("P4", f"attempt {fact.attempt} of {fact.message_id} was begun twice")
                self._started[mark] = command.run_id
            elif fact.status is ModelStatus.COMPLETED:
                self._answered[fact.message_id] = command.run_id
        for tool in command.tools:
            call = f"{command.turn_id}/{tool.call_id}"
            if tool.name:
                self.rules[call] = tool.rule.value
                if tool.kind is not ExecutionKind.LOCAL:
                    self.rules[call] = tool.kind.value
            if tool.state is ExecutionState.RUNNING:
                before = self._running.get(call)
                if before is not None and tool.rule is ReplayRule.NEVER:
                    self.broken("P5", f"{call} must not run again, and {command.run_id} starts it after {before[0]}")
                if before is not None:
                    self.sometimes["a safe tool was run again"] += 1
                self._running[call] = (command.run_id, tool.rule.value)

    # ---- P5: external starts ----

    def _execution(self, command: c.ClaimExecution, result: Any) -> None:
        grant: c.ExecutionGrant = result.receipt
        if grant.action is not c.ExecutionAction.START:
            if grant.action is c.ExecutionAction.QUERY:
                self.sometimes["an execution was asked for"] += 1
            return
        before = self._granted.get(grant.execution_id)
        if before is not None and not (command.again and before == command.owner):
            self.broken("P5", f"the start of {grant.execution_id} was granted to {before} and then to {command.owner}")
        self._granted[grant.execution_id] = command.owner

    # ---- events ----

    def _event(self, key: str, actor: str, command: Any, event: Event) -> None:
        match event.type:
            case "turn.status":
                self._status(key, command, event)
            case "thread.closed":
                self._closed.add(f"{key}/{event.thread}")
            case "session.closed":
                self._closed.add(key)
            case "interaction.requested":
                self.pending[event.turn].add(event.data["interactionId"])
                if event.data["kind"] == InteractionKind.APPROVAL.value:
                    self._approvals.add(event.data["interactionId"])
            case "interaction.resolved":
                one = event.data["interactionId"]
                self.pending[event.turn].discard(one)
                if one in self.decided:
                    self.broken("P6", f"interaction {one} was decided twice")
                self.decided[one] = event.data["outcome"]
                if event.data["outcome"] == "closed":
                    self.sometimes["a question was closed with its turn"] += 1
            case "signal.accepted":
                request = event.data["requestId"]
                if request in self.accepted_inputs:
                    self.broken("P1", f"request {request} was accepted twice")
                self.accepted_inputs[request] = event.turn
            case "signal.applied":
                request = event.data["requestId"]
                if request in self.kept_out:
                    self.broken("P6", f"{request} was {self.kept_out[request]} and is applied")
                if event.data["operation"] in ("steer", "inject"):
                    if request in self.applied_inputs[event.turn]:
                        self.broken("P6", f"input {request} was applied twice")
                    self.applied_inputs[event.turn].append(request)
                    self.sometimes[f"a {event.data['operation']} was applied"] += 1
            case "signal.withdrawn" | "signal.expired":
                request = event.data["requestId"]
                if request in self.applied_inputs[event.turn]:
                    self.broken("P6", f"{request} was applied and is {event.type}")
                self.kept_out[request] = event.type
                self.sometimes[f"an input ended as {event.type}"] += 1
            case "run.ended" if event.data["status"] == RunStatus.LOST:
                self.sometimes["a run was lost"] += 1
            case "tool.unknown":
                self.sometimes["an outcome was unknown"] += 1
            case "tool.applied" if event.data.get("appliedAt") is None:
                self.sometimes["a settlement applied a result"] += 1
            case _:
                pass

    def _status(self, key: str, command: Any, event: Event) -> None:
        view = event.data["turn"]
        turn_id, status, revision = view["turnId"], view["status"], view["revision"]
        turn = self.turns.get(turn_id)
        if turn is None:
            place = f"{key}/{view['threadId']}"
            session = self.sessions[key]
            turn = self.turns[turn_id] = TurnSeen(session, view["threadId"], view["ordinal"], view["requestId"])
            queue = self.order[place]
            # P3: the order of admission is the order of ordinals.
            if queue and self.turns[queue[-1]].ordinal >= turn.ordinal:
                self.broken("P3", f"turn {turn_id} of {place} has ordinal {turn.ordinal}")
            if any(other.request == turn.request for other in self.turns.values() if other is not turn):
                self.broken("P1", f"request {turn.request} made two turns")
            queue.append(turn_id)
            if status != "QUEUED":
                self.broken("P3", f"turn {turn_id} begins as {status}")
            if {key, place} & self._closed:
                self.broken("P1", f"turn {turn_id} was taken by {place}, which is closed")
        else:
            if status != turn.status and status not in MOVES[turn.status]:
                self.broken("P8", f"turn {turn_id} went from {turn.status} to {status}")
            if turn.status == "PAUSED" and status in ("RUNNING", "QUEUED") and not isinstance(command, c.Resume):
                self.broken("P8", f"turn {turn_id} was PAUSED and is {status}, and nobody resumed it")
            if turn.status in TERMINAL:
                self.broken("P8", f"turn {turn_id} changed after it was {turn.status}")
            if revision <= turn.revision:
                self.broken("P7", f"revision of turn {turn_id} went from {turn.revision} to {revision}")
        if status == "RUNNING":
            for other_id in self.order[f"{key}/{turn.thread}"]:
                if other_id == turn_id:
                    break
                if self.turns[other_id].status not in TERMINAL:
                    self.broken("P3", f"turn {turn_id} runs before {other_id}, which is {self.turns[other_id].status}")
        if status == "CANCELLED" and turn_id not in self.cancels:
            self.broken("P8", f"turn {turn_id} is CANCELLED, and nobody asked for that")
        if status in ("PAUSING", "PAUSED") and not self.pauses[turn_id]:
            self.broken("P8", f"turn {turn_id} is {status}, and nobody asked for that")
        if status == "FAILED" and not self.failures[turn_id] and turn_id not in self.repaired:
            self.broken("P8", f"turn {turn_id} is FAILED, and no invocation failed")
        if status == "CANCELLED" and "RUNNING" in turn.statuses:
            self.sometimes["a cancel was before completion"] += 1
        if status == "COMPLETED" and turn_id in self.cancels:
            self.sometimes["completion was before an accepted cancel"] += 1
        if status == "PAUSED" and turn.status == "PAUSING":
            self.sometimes["a run was paused"] += 1
            if any(e.type == "message.completed" and e.turn == turn_id and _final(e) for e in self.events[key]):
                self.sometimes["a turn was paused in its finalization"] += 1
        if status == "PAUSED" and turn.status == "QUEUED":
            self.sometimes["a queued turn was paused"] += 1
        if any(one["kind"] == "operator" for one in view.get("waitingOn", ())):
            self.sometimes["a turn was parked for an operator"] += 1
        if any(one["kind"] == "retry" for one in view.get("waitingOn", ())):
            self.sometimes["a failure was to be tried again"] += 1
        turn.status, turn.revision = status, revision
        turn.statuses.append(status)


def _final(event: Event) -> bool:
    content = event.data["content"]
    return "ends|" in str(content)


__all__ = ["Asked", "Audit", "CursorExpired", "Event", "TurnSeen", "Violation"]
