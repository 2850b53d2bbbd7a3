"""Long random histories of hosts, hands, clients and operators who know little of each other; after every command the
invariants of `invariants.py` must hold.

A history is data: what each player did, in order. When one breaks an invariant it is cut down to the commands that are
needed, and printed. `SEED=7 pytest tests/domain/test_invariants.py` plays one history, `HISTORIES=2000` more of them.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body, body_of
from agentscope_durable.contracts.errors import DurableError, Fenced
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.records import (
    Binding,
    ExecutionRecord,
    Failure,
    InputRecord,
    InteractionRecord,
    RunRecord,
    ThreadRecord,
    TurnRecord,
    TurnState,
)
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    ModelStatus,
    ReplayRule,
    ResourceStatus,
    RunStatus,
    SignalState,
    StepPhase,
    StepStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.domain import positions, pruning
from agentscope_durable.domain.execution import item_of
from agentscope_durable.domain.objects import ORPHAN_AGE_MS
from agentscope_durable.domain.rules import RULES
from tests.domain.invariants import ASKS
from tests.domain.stage import BINDING, FOR_GOOD, SESSION, TRY_AGAIN, Stage, external, gated, local, question, text

HISTORIES = int(os.environ.get("HISTORIES", "300"))
LENGTH = 120
ROUNDS_TO_THE_END = 40
FIRST_SEED = int(os.environ.get("SEED", "0"))

HOSTS = ("a", "b", "c")
HANDS = ("hand-1", "hand-2")
THREADS = ("main", "research")
CALLS = tuple(f"c{n}" for n in range(1, 6))
KEYS = ("x.go", "x.stop")
NEXT = Binding("assistant", "v2", "state-1")
OTHER = Binding("other", "v1", "state-1")


# ---- a history is a list of these ----


class Advance(msgspec.Struct, frozen=True):
    milliseconds: int


class Jump(msgspec.Struct, frozen=True):
    milliseconds: int


class Renew(msgspec.Struct, frozen=True):
    owner: str
    lease_ms: int


class Gone(msgspec.Struct, frozen=True):
    owner: str


class Do(msgspec.Struct, frozen=True):
    """`lost`: the sender never hears the answer."""

    command: Any
    seed: bytes
    lost: bool = False


Act = Advance | Jump | Renew | Gone | Do

OWNER_COMMANDS = (c.CommitStep, c.SettleTurn, c.PostponeSettlement)
ONCE = (c.Request, c.ReconcileTool, c.ReleaseTurn)
"""Commands with a request id: a repeat is the same request, for ever."""


class History:
    """Plays acts one after another, on a stage that checks what must hold after each."""

    def __init__(self) -> None:
        self.stage = Stage(create=False)
        self.seen: Counter[tuple[type[Any], str]] = Counter()
        self.receipts: dict[bytes, bytes] = {}
        self.started: set[str] = set()

    def play(self, act: Act) -> Any:
        """The receipt of a command, None if it was refused."""
        match act:
            case Advance(milliseconds=milliseconds):
                self.stage.clock.advance(milliseconds)
            case Jump(milliseconds=milliseconds):
                self.stage.clock.jump(milliseconds)
            case Renew(owner=owner, lease_ms=lease_ms):
                self.stage.alive(owner, lease_ms=lease_ms)
            case Gone(owner=owner):
                self.stage.dies(owner)
            case Do(command=command, seed=seed, lost=lost):
                return self._do(command, seed, lost=lost)
        return None

    def _do(self, command: Any, seed: bytes, *, lost: bool) -> Any:
        kind = type(command)
        stale = isinstance(command, OWNER_COMMANDS) and not self._owns(command)
        encoded = msgspec.json.encode(command)
        try:
            receipt = self.stage.do(command, seed=seed)
        except DurableError as error:
            fenced = isinstance(error, Fenced)
            self.seen[kind, "fenced" if fenced else "refused"] += 1
            exists = self.stage.world.dump.head is not None and command.session == SESSION
            assert fenced is stale or not exists, f"stale: {stale}, and it was answered {error!r}"
            assert encoded not in self.receipts, f"a request that was accepted before is now refused: {error!r}"
            return None
        assert not stale, "a stale owner's command was carried out"
        changed = self.stage.change is not None
        self.seen[kind, "succeeded" if changed else "repeated"] += 1
        if isinstance(command, ONCE):
            told = msgspec.json.encode(receipt)
            assert self.receipts.setdefault(encoded, told) == told, "a repeat has another receipt"
            assert changed is (encoded not in self._known), "a repeat changed something"
            self._known.add(encoded)
        if isinstance(receipt, c.ExecutionGrant) and receipt.action is c.ExecutionAction.START and not lost:
            assert receipt.execution_id not in self.started, "an execution was started twice"
            self.started.add(receipt.execution_id)
        return None if lost else receipt

    @property
    def _known(self) -> set[bytes]:
        return self.__dict__.setdefault("known", set())

    def _owns(self, command: c.OwnerCommand) -> bool:
        active = self.stage.world.dump.active(command.thread_id)
        return active is not None and (active.fence, active.turn_id, active.run.run_id) == (
            command.fence,
            command.turn_id,
            command.run_id,
        )


def _of(record: TurnRecord) -> dict[str, Any]:
    return {"session": SESSION, "thread_id": record.thread_id, "turn_id": record.turn_id}


def _answer(value: Any) -> dict[str, Any]:
    return {
        "response": body_of(value),
        "digest": str(value),
        "content": text(str(value)),
        "result": body_of({"value": value}),
        "is_bool": isinstance(value, bool),
        "approved": value is True,
    }


# ---- the players ----


class Broken(Exception):
    """The last act broke an invariant."""


class Stuck(Exception):
    """A Turn that nobody can bring to its end."""


class Players:
    """Choose what happens next, from what is stored and from what they remember, often wrongly."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.history = History()
        self.acts: list[Act] = []
        self.claims: list[tuple[str, str, c.Claimed]] = []
        self.positions: dict[tuple[str, int], int] = {}
        self.sent: list[Any] = []
        self.unheard: list[c.ClaimExecution] = []
        self.requests = 0

    @property
    def dump(self) -> Any:
        return self.history.stage.world.dump

    def play(self, length: int) -> None:
        self._act(self._command(c.CreateSession, binding=BINDING))
        for thread in THREADS[1:]:
            self._act(self._command(c.CreateThread, thread_id=thread, binding=BINDING))
        moves: list[tuple[int, Callable[[], Act | None]]] = [
            (6, self._submit),
            (6, self._add_input),
            (3, self._withdraw),
            (4, self._cancel),
            (5, self._pause),
            (6, self._resume),
            (6, self._respond),
            (4, self._signal),
            (22, self._claim),
            (40, self._step),
            (8, self._settle),
            (4, self._postpone),
            (4, self._file_fact),
            (10, self._claim_execution),
            (12, self._record_outcome),
            (3, self._reconcile),
            (3, self._release),
            (4, self._restore),
            (3, self._fork),
            (3, self._repair),
            (4, self._again),
            (2, self._conflict),
            (2, self._rare),
            (12, self._time),
        ]
        weights, players = [weight for weight, _ in moves], [player for _, player in moves]
        for _ in range(length):
            act = self.random.choices(players, weights)[0]()
            if act is not None:
                self._act(act)

    def _act(self, act: Act) -> Any:
        self.acts.append(act)
        try:
            receipt = self.history.play(act)
        except Exception as error:
            raise Broken from error
        if not isinstance(act, Do):
            return None
        command = act.command
        if isinstance(command, ONCE):
            self.sent.append(command)
        if isinstance(receipt, c.Claimed) and receipt.purpose is not c.ClaimPurpose.NOTHING:
            self.claims.append((command.thread_id, command.owner, receipt))
            self.positions[command.thread_id, receipt.fence] = receipt.position
        if isinstance(receipt, c.StepReceipt):
            self.positions[command.thread_id, command.fence] = receipt.position
        return receipt

    # ---- choosing ----

    def _seed(self) -> bytes:
        return self.random.randbytes(16)

    def _command(self, kind: type[Any], /, **fields: Any) -> Do:
        # These are refused only where there is no Session.
        rare = kind in (c.PutPolicy, c.RecordObject, c.SweepObjects, c.ForgetObjects, c.FileFact)
        missing = self._chance(0.2 if rare else 0.01) and kind is not c.CreateSession
        session = SessionKey("app", "nobody's") if missing else SESSION
        return Do(kind(session=session, **fields), self._seed())

    def _chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def _some(self, of: Any) -> Any:
        choices = list(of)
        return self.random.choice(choices) if choices else None

    def _subset(self, of: Any, probability: float = 0.5) -> list[Any]:
        return [one for one in of if self._chance(probability)]

    def _request_id(self) -> str:
        self.requests += 1
        return f"r{self.requests}"

    def _turns(self) -> list[tuple[TurnRecord, TurnState]]:
        return list(self.dump.turns.values())

    def _turn(self) -> tuple[TurnRecord, TurnState] | None:
        """Any Turn, mostly one that goes on."""
        turns = self._turns()
        live = [one for one in turns if not one[1].status.terminal]
        return self._some(live if live and self._chance(0.9) else turns)

    def _request(self, kind: type[Any], /, **fields: Any) -> Do | None:
        found = self._turn()
        if found is None:
            return None
        thread = found[0].thread_id if self._chance(0.98) else self._some(THREADS)
        return self._command(kind, thread_id=thread, turn_id=found[0].turn_id, request_id=self._request_id(), **fields)

    # ---- clients ----

    def _submit(self) -> Act:
        return self._command(
            c.SubmitTurn,
            thread_id=self._some(THREADS) if self._chance(0.97) else "nobody",
            request_id=self._request_id(),
            content=text("hi"),
            digest="hi",
        )

    def _add_input(self) -> Act | None:
        kind = "shout" if self._chance(0.02) else self._some(("steer", "inject"))
        return self._request(c.AddInput, kind=kind, content=text("more"), digest="more")

    def _withdraw(self) -> Act | None:
        inputs = [one for one in self.sent if isinstance(one, c.AddInput)]
        target = self._some(inputs)
        if target is None:
            return None
        return self._command(
            c.Withdraw,
            thread_id=target.thread_id,
            turn_id=target.turn_id,
            request_id=self._request_id(),
            target_request_id=target.request_id,
        )

    def _cancel(self) -> Act | None:
        return self._request(c.Cancel)

    def _pause(self) -> Act | None:
        return self._request(c.Pause)

    def _resume(self) -> Act | None:
        paused = [one for one in self._turns() if one[1].paused_revision]
        found = self._some(paused) or self._turn()
        if found is None:
            return None
        revision = found[1].revision - self._some((0, 0, 0, 0, 1, 2))
        return self._command(
            c.Resume,
            thread_id=found[0].thread_id,
            turn_id=found[0].turn_id,
            request_id=self._request_id(),
            expected_revision=revision,
        )

    def _respond(self) -> Act | None:
        found = self._turn()
        asked = [
            (record, one)
            for record, _ in self._turns()
            for one in self.dump.all(keys.interactions(record.turn_id), InteractionRecord)
            if one.state is InteractionState.PENDING or self._chance(0.2)
        ]
        if asked:
            record, one = self._some(asked)
            thread_id, turn_id, interaction_id = record.thread_id, record.turn_id, one.interaction_id
        elif found is not None:
            thread_id, turn_id, interaction_id = found[0].thread_id, found[0].turn_id, "i-c1"
        else:
            return None
        answer = self._some((True, True, False, "signed"))
        # Now and then with other arguments, also where that is refused.
        edited = {"arguments": body_of('{"x":2}'), "arguments_digest": "2"} if self._chance(0.3) else {}
        return self._command(
            c.Respond,
            thread_id=thread_id,
            turn_id=turn_id,
            request_id=self._request_id(),
            interaction_id=interaction_id,
            **_answer(answer),
            **edited,
        )

    def _signal(self) -> Act | None:
        key = self._some((*KEYS, *KEYS, "pause"))
        return self._request(c.Signal, key=key, payload=body_of({}), digest="{}")

    def _again(self) -> Act | None:
        """A request whose answer was lost, or that is delivered twice."""
        command = self._some(self.sent)
        return None if command is None else Do(command, self._seed())

    def _conflict(self) -> Act | None:
        """A request id that was used for something else."""
        command = self._some(self.sent)
        found = self._request(self._some((c.Cancel, c.Pause)))
        if command is None or found is None:
            return None
        return Do(replace(found.command, request_id=command.request_id), self._seed())

    def _rare(self) -> Act:
        threads = (*THREADS, "other")
        choice = self.random.randrange(10)
        if choice == 0:
            return self._command(c.CreateSession, binding=self._some((BINDING, NEXT, OTHER)))
        if choice == 1:
            return self._command(
                c.CreateThread, thread_id=self._some(threads), binding=self._some((BINDING, NEXT, OTHER))
            )
        if choice == 2:
            return self._command(c.CloseThread, thread_id=self._some((*threads, "nobody")))
        if choice == 3 and self._chance(0.3):
            return self._command(c.CloseSession)
        if choice == 4:
            return self._command(c.PutPolicy, key="limit", request_id=self._some(("p1", "p2", "p3")), value=None)
        if choice == 5:
            return self._object()
        if choice == 6:
            through = self.random.randrange(self.dump.next_seq + 1)
            return self._command(c.PruneEvents, through=through, older_than_ms=self._some((0, 0, 5_000)))
        if choice == 7:
            through = self.random.randrange(self.dump.next_seq + 1)
            thread_id = self._some((*THREADS, "nobody"))
            return self._command(c.PruneCheckpoints, thread_id=thread_id, through=through)
        if choice == 8 and (self.dump.head is None or self.dump.head.status is ResourceStatus.OPEN):
            return self._command(c.DropSession, reason="too early")
        return self._submit()

    def _object(self) -> Act:
        """Some of the life of a body: the whole of it would be seen too seldom."""

        def known() -> list[str]:
            return [key.removeprefix(keys.OBJECTS) for key in self.dump.records if key.startswith(keys.OBJECTS)]

        life: list[Callable[[], Act]] = [
            lambda: self._command(c.RecordObject, digest=self._some(("0" * 64, "1" * 64)), size=1),
            lambda: self._command(
                c.SubmitTurn,
                thread_id=self._some(THREADS),
                request_id=self._request_id(),
                content=Body(name=self._some(known()) or "no", size=1),
                digest="d",
            ),
            lambda: Advance(ORPHAN_AGE_MS + 1),
            lambda: self._command(c.SweepObjects),
            lambda: self._command(c.ForgetObjects, names=tuple(self._subset(known(), 0.8))),
        ]
        for step in self._subset(life, 0.8):
            self._act(step())
        return self._command(c.SweepObjects)

    # ---- hosts ----

    def _claim(self) -> Act:
        owner = self._some(HOSTS)
        if self._chance(0.8):
            self._act(Renew(owner, self._some((1_000, 30_000))))
        return self._command(
            c.Claim,
            thread_id=self._some(THREADS) if self._chance(0.98) else "nobody",
            owner=owner,
            served=self._some(((BINDING.ready_class,),) * 9 + ((NEXT.ready_class,),)),
            dead=self._some(((),) * 6 + (tuple(host for host in HOSTS if host != owner),)),
            takeovers_max=self._some((1, 5)),
            refused=("w",) if self._chance(0.02) else (),
            again=self._chance(0.02),
        )

    def _owner(self, *, settling: bool) -> dict[str, Any] | None:
        """Who a host thinks it is: mostly the present owner, sometimes one of the past."""
        threads = {} if self.dump.head is None else self.dump.head.threads
        present = [(name, one) for name, one in threads.items() if (one.run.run_id == "") is settling]
        if present and self._chance(0.93):
            name, one = self._some(present)
            fields = {"thread_id": name, "turn_id": one.turn_id, "run_id": one.run.run_id, "fence": one.fence}
        else:
            found = self._some(self.claims)
            if found is None:
                return None
            name, _, claimed = found
            run_id = "" if settling else claimed.run_id
            fields = {"thread_id": name, "turn_id": claimed.turn_id, "run_id": run_id, "fence": claimed.fence}
        return fields

    def _position(self, owner: dict[str, Any]) -> int:
        active = self.dump.active(owner["thread_id"])
        if self._chance(0.02) or active is None:
            return self.positions.get((owner["thread_id"], owner["fence"]), 0) - self._some((0, 1))
        return active.position

    def _step(self) -> Act | None:
        owner = self._owner(settling=self._chance(0.02))
        if owner is None:
            return None
        fields: dict[str, Any] = {"expected_position": self._position(owner), **owner}
        active = self.dump.active(owner["thread_id"])
        if active is not None and active.turn_id == owner["turn_id"]:
            fields |= self._content(active.turn, owner["turn_id"], owner["run_id"])
        return self._command(c.CommitStep, **fields)

    def _content(self, state: TurnState, turn_id: str, run_id: str) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._chance(0.3):
            fields |= {"checkpoint": True, "base": self._chance(0.3), "journal": b"[]", "writer": "w"}
        if self._chance(0.3):
            number = self._some((1, 2, 3))
            status = self._some((StepStatus.RUNNING, StepStatus.RUNNING, StepStatus.COMPLETED))
            fields["steps"] = (
                StepFact(f"{run_id}.s{number}", run_id, number, self._some(StepPhase), status, reasoning=number),
            )
        if self._chance(0.3):
            fields["models"] = (self._model(run_id),)
            fields |= {"reasoning": state.reasoning + 1, "attempt": 1}
        if self._chance(0.2):
            fields["messages"] = (c.MessageOut(message_id=f"{turn_id}.r{state.reasoning}", content=text("so")),)
        if self._chance(0.05):
            fields["abandons"] = (c.Abandon(f"{turn_id}.r1", 1, "given up"),)
        if self._chance(0.05):
            fields["events"] = (c.CustomEvent(self._some(("x.app.note", "bad name")), body_of({})),)
        self._work(fields, state, turn_id)
        if self._chance(0.3):
            fields["end"] = self._end(state)
        return fields

    def _model(self, run_id: str) -> ModelFact:
        usage = self._some((None, Usage(1, 2)))
        return ModelFact(
            f"{run_id}.m1", run_id, f"{run_id}.s1", self._some((0, 1, 2)), self._some(ModelStatus), "m", usage=usage
        )

    def _work(self, fields: dict[str, Any], state: TurnState, turn_id: str) -> None:
        """Tool calls, questions, inputs and waits."""
        tools: list[c.ToolCommit] = []
        questions: list[c.InteractionCommit] = []
        answers: list[str] = []
        known = {one.call_id: one for one in self.dump.all(keys.executions(turn_id), ExecutionRecord)}
        for call in self._subset(CALLS, 0.2):
            execution = known.get(call)
            if execution is None:
                kind = self.random.randrange(4)
                if kind == 0:
                    tools.append(external(call))
                elif kind == 1:
                    tools.append(local(call, self._some(ReplayRule)))
                elif kind == 2:
                    tools.append(gated(call))
                    questions.append(question(f"i-{turn_id}-{call}", call))
                else:
                    tools.append(replace(external(call), kind=ExecutionKind.MANUAL, route=""))
                    questions.append(question(f"i-{turn_id}-{call}", call, InteractionKind.EXTERNAL_RESULT))
            else:
                tools.append(self._move(execution))
        for one in self.dump.all(keys.interactions(turn_id), InteractionRecord):
            if one.state is InteractionState.RESOLVED and self._chance(0.5):
                answers.append(one.interaction_id)
                execution = known[one.call_id]
                if execution.state is ExecutionState.AWAITING_APPROVAL and one.call_id not in {
                    t.call_id for t in tools
                }:
                    then = self._some((local(one.call_id), external(one.call_id), self._denied(one.call_id)))
                    tools.append(then)
            elif self._chance(0.02):
                answers.append(one.interaction_id)
            elif self._chance(0.02):
                questions.append(question(one.interaction_id, one.call_id, one.kind))
        accepted = [
            one.ordinal
            for one in self.dump.all(keys.inputs(turn_id), InputRecord)
            if one.state is SignalState.ACCEPTED or self._chance(0.01)
        ]
        waits = [one.id for one in state.conditions if one.kind is WaitKind.SIGNAL]
        now_ms = self.history.stage.clock()
        fields |= {
            "tools": tuple(tools),
            "interactions": tuple(questions),
            "answers": tuple(answers),
            "inputs": tuple(accepted) if self._chance(0.4) else (),
            "waits": tuple(c.WaitCondition(key, self._some((0, now_ms + 5_000))) for key in self._subset(KEYS, 0.07)),
            "signals": tuple(key for key in KEYS if (key in waits and self._chance(0.5)) or self._chance(0.01)),
        }

    def _denied(self, call: str) -> c.ToolCommit:
        return c.ToolCommit(call_id=call, state=ExecutionState.DENIED, result=body_of({}), applied=True)

    def _move(self, execution: ExecutionRecord) -> c.ToolCommit:
        """What an owner says of a call that is known, mostly what makes sense."""
        call, state = execution.call_id, execution.state
        if self._chance(0.08):
            return c.ToolCommit(
                call_id=call,
                state=self._some(ExecutionState),
                kind=self._some(ExecutionKind),
                rule=self._some(ReplayRule),
                applied=self._chance(0.3),
            )
        if state.terminal:
            return c.ToolCommit(call_id=call, state=state, applied=True)
        if execution.kind is ExecutionKind.LOCAL and state is ExecutionState.RUNNING:
            if self._chance(0.3):
                return local(call, self._some(ReplayRule))
            outcome = self._some((ExecutionState.COMPLETED, ExecutionState.COMPLETED, ExecutionState.UNKNOWN))
            return c.ToolCommit(call_id=call, state=outcome, result=body_of({}), applied=self._chance(0.5))
        if execution.kind is ExecutionKind.LOCAL and state is ExecutionState.UNKNOWN and self._chance(0.5):
            return local(call, ReplayRule.SAFE)
        return c.ToolCommit(call_id=call, state=state, kind=execution.kind)

    def _end(self, state: TurnState) -> c.RunEnd:
        likely = c.RunEndKind.PAUSED if state.pause else c.RunEndKind.CANCELLED if state.cancel else None
        kind = likely if likely is not None and self._chance(0.5) else self._some(c.RunEndKind)
        failure = self._some((TRY_AGAIN, TRY_AGAIN, FOR_GOOD)) if kind is c.RunEndKind.FAILED else None
        return c.RunEnd(
            kind=kind,
            message_id="m",
            finish_reason=self._some(("completed", "completed", "exceed_max_iters")),
            failure=failure if self._chance(0.98) else None,
            operator="look" if self._chance(0.05) else "",
            policy=self._some((RecoveryPolicy(), RecoveryPolicy(max_retries=1, initial_backoff_ms=50_000))),
        )

    def _settle(self) -> Act | None:
        owner = self._owner(settling=True)
        if owner is None:
            return None
        known = self.dump.all(keys.executions(owner["turn_id"]), ExecutionRecord)
        applied = tuple(one.call_id for one in known if one.state.terminal or self._chance(0.02))
        return self._command(
            c.SettleTurn,
            expected_position=self._position(owner),
            applied=applied,
            journal=b"[]" if self._chance(0.98) else b"",
            checkpoint=True,
            base=self._chance(0.9),
            writer="w",
            **owner,
        )

    def _postpone(self) -> Act | None:
        owner = self._owner(settling=True)
        if owner is None:
            return None
        return self._command(c.PostponeSettlement, failure=self._some((None, Failure("OSError", "no"))), **owner)

    def _file_fact(self) -> Act | None:
        runs = [
            (record, run)
            for record, _ in self._turns()
            for run in self.dump.all(keys.runs(record.turn_id), RunRecord)
            if run.status is RunStatus.LOST or self._chance(0.1)
        ]
        if not runs:
            return None
        record, run = self._some(runs)
        unknown = [
            one.call_id
            for one in self.dump.all(keys.executions(record.turn_id), ExecutionRecord)
            if one.state is ExecutionState.UNKNOWN or self._chance(0.1)
        ]
        tool = None
        if unknown:
            tool = c.ToolCommit(call_id=self._some(unknown), state=ExecutionState.COMPLETED, result=body_of({}))
        return self._command(
            c.FileFact,
            thread_id=record.thread_id,
            turn_id=record.turn_id,
            run_id=run.run_id,
            tool=tool,
            model=replace(self._model(run.run_id), usage=Usage(3, 4)) if self._chance(0.5) else None,
        )

    # ---- hands and operators ----

    def _execution(self, *likely: ExecutionState) -> tuple[TurnRecord, ExecutionRecord] | None:
        found = [
            (record, one)
            for record, _ in self._turns()
            for one in self.dump.all(keys.executions(record.turn_id), ExecutionRecord)
            if one.kind is ExecutionKind.EXTERNAL or self._chance(0.1)
        ]
        wanted = [one for one in found if one[1].state in likely]
        return self._some(wanted if wanted and self._chance(0.9) else found)

    def _claim_execution(self) -> Act | None:
        found = self._execution(ExecutionState.INTENT, ExecutionState.RUNNING, ExecutionState.UNKNOWN)
        if found is None:
            return None
        owner = self._some(HANDS)
        if self._chance(0.7):
            self._act(Renew(owner, 30_000))
        if self.unheard and self._chance(0.5):
            # The answer was lost, and this host has done nothing since.
            return Do(replace(self.unheard.pop(), again=True), self._seed())
        act = self._command(
            c.ClaimExecution,
            thread_id=found[0].thread_id,
            turn_id=found[0].turn_id,
            call_id=found[1].call_id if self._chance(0.97) else "nobody",
            owner=owner,
            dead=self._some(((),) * 4 + (tuple(hand for hand in HANDS if hand != owner),)),
        )
        if not self._chance(0.1):
            return act
        self.unheard.append(act.command)
        return replace(act, lost=True)

    def _record_outcome(self) -> Act | None:
        found = self._execution(ExecutionState.RUNNING, ExecutionState.UNKNOWN)
        if found is None:
            return None
        state = self._some(
            (ExecutionState.COMPLETED,) * 4
            + (ExecutionState.FAILED, ExecutionState.CANCELLED, ExecutionState.UNKNOWN, ExecutionState.RUNNING)
            + (self._some(ExecutionState),)
        )
        return self._command(
            c.RecordOutcome,
            thread_id=found[0].thread_id,
            turn_id=found[0].turn_id,
            call_id=found[1].call_id,
            execution_id=found[1].execution_id if self._chance(0.97) else "x",
            state=state,
            result=self._some((None, body_of({}))),
            retry_after_ms=self._some((0, 1_000)),
        )

    def _reconcile(self) -> Act | None:
        found = self._execution(ExecutionState.UNKNOWN)
        if found is None:
            return None
        return self._command(
            c.ReconcileTool,
            thread_id=found[0].thread_id,
            turn_id=found[0].turn_id,
            call_id=found[1].call_id,
            request_id=self._request_id(),
            state=self._some((ExecutionState.COMPLETED, ExecutionState.CANCELLED, ExecutionState.UNKNOWN)),
            result=body_of({}),
            digest="{}",
            evidence_ref=self._some(("ticket", "ticket", "")),
        )

    def _release(self) -> Act | None:
        parked = [one for one in self._turns() if one[1].operator]
        found = self._some(parked) or self._turn()
        if found is None:
            return None
        return self._command(
            c.ReleaseTurn, thread_id=found[0].thread_id, turn_id=found[0].turn_id, request_id=self._request_id()
        )

    def _checkpoint_of(self, thread: ThreadRecord) -> int:
        """A position of a Thread, mostly one that is settled there."""
        prefix = keys.checkpoints(thread.thread_id)
        settled = [int(key.removeprefix(prefix)) for key in self.dump.records if key.startswith(prefix)]
        return self._some(settled) if settled and self._chance(0.95) else self._some((1, 2, thread.position + 1))

    def _native(self, head: int, *, empty: bool = False) -> c.NativeState:
        head += 0 if self._chance(0.97) else 1
        return c.NativeState(
            binding=self._some((BINDING,) * 9 + (NEXT,)), head=head, journal=b"" if empty else b"[1]", writer="w"
        )

    def _idle(self) -> ThreadRecord | None:
        """Any Thread, mostly one that is idle."""
        threads = list(self.dump.all(keys.THREADS, ThreadRecord))
        idle = [one for one in threads if not one.current]
        return self._some(idle if idle and self._chance(0.9) else threads)

    def _restore(self) -> Act | None:
        thread = self._idle()
        if thread is None:
            return None
        return self._command(
            c.RestoreThread,
            thread_id=thread.thread_id,
            request_id=self._request_id(),
            at=self._checkpoint_of(thread),
            expected_at=thread.settled_at if self._chance(0.95) else 1,
            native=self._native(thread.position),
        )

    def _fork(self) -> Act | None:
        source = self._idle()
        if source is None:
            return None
        session = SESSION if self._chance(0.5) else SessionKey(self._some(("app", "app", "elsewhere")), "source")
        return self._command(
            c.ForkThread,
            thread_id=self._some((*THREADS, "other", "branch-1", "branch-2")),
            request_id=self._request_id(),
            source=ThreadKey(session, source.thread_id),
            at=self._checkpoint_of(source),
            native=self._native(0),
        )

    def _repair(self) -> Act | None:
        parked = [one for one in self._turns() if one[1].operator or one[1].settle_tries]
        found = self._some(parked) or self._turn()
        if found is None:
            return None
        record, _ = found
        thread = self.dump.one(keys.thread(record.thread_id), ThreadRecord)
        at = 0 if self._chance(0.2) else self._checkpoint_of(thread)
        return self._command(
            c.RepairThread,
            thread_id=record.thread_id,
            turn_id=record.turn_id,
            request_id=self._request_id(),
            at=at,
            expected_at=thread.settled_at,
            native=self._native(thread.position, empty=not at),
        )

    def _time(self) -> Act:
        choice = self.random.randrange(6)
        if choice == 0:
            return Gone(self._some((*HOSTS, *HANDS)))
        if choice == 1:
            return Jump(self._some((-3_600_000, -1_000, 1_000, 3_600_000)))
        return Advance(self._some((1, 100, 1_000, 31_000, 120_000)))


class Helpers(Players):
    """At the end everybody does what they should: the hosts serve, the people answer, the hands report."""

    def finish(self) -> None:
        """Bring every Turn to its end, in a bounded number of rounds.

        That this is possible from wherever a history has come to means that no Turn can be stuck (S5): what holds it is
        something that somebody can do.
        """
        for _ in range(ROUNDS_TO_THE_END):
            self._act(Advance(600_000))
            self._act(Renew("helper", 30_000))
            for turn in [one for one in self._turns() if not one[1].status.terminal]:
                self._help(*turn)
            for thread in [one.thread_id for one in self.dump.all(keys.THREADS, ThreadRecord) if one.current]:
                self._serve(thread)
            if all(state.status.terminal for _, state in self._turns()):
                self._drop()
                return
        raise Stuck([(state.status, state.conditions) for _, state in self._turns() if not state.status.terminal])

    def _drop(self) -> None:
        """And when nothing of it is unfinished, all of it can go."""
        self._act(Do(c.CloseSession(session=SESSION), self._seed()))
        while self._act(Do(c.DropSession(session=SESSION), self._seed())).more:
            pass
        left = [key for key in self.dump.records if not key.startswith(keys.OBJECTS)]
        assert left == [keys.DROPPED] and self.dump.ready == {}

    def _ask(self, kind: type[Any], record: TurnRecord, /, **fields: Any) -> Any:
        if issubclass(kind, ONCE):
            fields["request_id"] = self._request_id()
        return self._act(Do(kind(**_of(record), **fields), self._seed()))

    def _help(self, record: TurnRecord, state: TurnState) -> None:
        """People, operators and hands."""
        if state.status is TurnStatus.PAUSED:
            self._ask(c.Resume, record, expected_revision=state.revision)
        if state.operator:
            self._ask(c.ReleaseTurn, record)
        for condition in state.conditions:
            if condition.ready:
                continue
            match condition.kind:
                case WaitKind.APPROVAL | WaitKind.EXTERNAL_RESULT:
                    self._ask(c.Respond, record, interaction_id=condition.id, **_answer(False))
                case WaitKind.SIGNAL:
                    self._ask(c.Signal, record, key=condition.id, payload=body_of({}), digest="{}")
                case WaitKind.TOOL_UNKNOWN:
                    self._ask(
                        c.ReconcileTool,
                        record,
                        call_id=condition.call_id,
                        state=ExecutionState.FAILED,
                        result=body_of({}),
                        digest="{}",
                        evidence_ref="ticket",
                    )
                case _:
                    self._look_at(record, condition.call_id, condition.id)

    def _look_at(self, record: TurnRecord, call_id: str, execution_id: str) -> None:
        """A dispatcher finds what stands in the ready index, and nothing else."""
        item = item_of(record.turn_id, call_id)
        found = {kind for kind, name in self.dump.ready if name == item}
        if not found & {keys.READY_DISPATCH, keys.READY_RUNNING}:
            return
        everybody = (*HOSTS, *HANDS)
        grant = self._ask(c.ClaimExecution, record, call_id=call_id, owner="helper", dead=everybody)
        if grant.action is not c.ExecutionAction.NOTHING:
            self._ask(
                c.RecordOutcome, record, call_id=call_id, execution_id=execution_id, state=ExecutionState.COMPLETED
            )

    def _serve(self, thread: str) -> None:
        """A host claims, does what can be done, and ends its Run; the Turn ends if nothing is open."""
        claim = c.Claim(
            session=SESSION,
            thread_id=thread,
            owner="helper",
            served=(BINDING.ready_class, NEXT.ready_class, OTHER.ready_class),
            dead=(*HOSTS, *HANDS),
        )
        claimed: c.Claimed = self._act(Do(claim, self._seed()))
        if claimed.purpose is c.ClaimPurpose.NOTHING:
            return
        owner = {
            "session": SESSION,
            "thread_id": thread,
            "turn_id": claimed.turn_id,
            "run_id": claimed.run_id,
            "fence": claimed.fence,
        }
        if claimed.purpose is c.ClaimPurpose.SETTLE:
            self._act(Do(c.SettleTurn(**owner, expected_position=claimed.position), self._seed()))
            return
        state: TurnState = self.dump.active(thread).turn
        answered = {one.call_id for one in state.conditions if one.ready and one.kind is WaitKind.APPROVAL}
        known = self.dump.all(keys.executions(claimed.turn_id), ExecutionRecord)
        tools = [self._taken(one, answered) for one in known]
        inputs = self.dump.all(keys.inputs(claimed.turn_id), InputRecord)
        step = c.CommitStep(
            **owner,
            expected_position=claimed.position,
            journal=b"[]",
            checkpoint=True,
            base=True,
            tools=tuple(tool for tool in tools if tool is not None),
            answers=tuple(one.id for one in state.conditions if one.ready and one.kind in ASKS),
            signals=tuple(one.id for one in state.conditions if one.ready and one.kind is WaitKind.SIGNAL),
            inputs=tuple(one.ordinal for one in inputs if one.state is SignalState.ACCEPTED),
        )
        receipt = self._act(Do(step, self._seed()))
        assert receipt is not None, "an owner's commit that says what is true was refused"
        left = self.dump.active(thread).turn.conditions
        kind = c.RunEndKind.SUSPENDED if left else c.RunEndKind.COMPLETED
        end = c.CommitStep(**owner, expected_position=receipt.position, end=c.RunEnd(kind=kind))
        assert self._act(Do(end, self._seed())) is not None

    def _taken(self, execution: ExecutionRecord, answered: set[str]) -> c.ToolCommit | None:
        """What a Run says of a call that it finds."""
        if execution.state.terminal:
            applied = execution.applied_ms != 0
            return None if applied else c.ToolCommit(call_id=execution.call_id, state=execution.state, applied=True)
        if execution.kind is ExecutionKind.LOCAL and execution.state is ExecutionState.RUNNING:
            return c.ToolCommit(call_id=execution.call_id, state=ExecutionState.FAILED, applied=True)
        return self._denied(execution.call_id) if execution.call_id in answered else None


# ---- what is left of a history when everything that does not matter is taken out ----


def _breaks(acts: list[Act]) -> Exception | None:
    history = History()
    try:
        for act in acts:
            history.play(act)
    except Exception as error:
        return error
    return None


def _reduced(acts: list[Act]) -> list[Act]:
    """A shorter history that breaks as well."""
    size = len(acts) // 2
    while size:
        start = 0
        while start < len(acts):
            shorter = acts[:start] + acts[start + size :]
            if _breaks(shorter):
                acts = shorter
            else:
                start += size
        size //= 2
    return acts


def _told(acts: list[Act]) -> str:
    lines: list[str] = []
    for act in acts:
        if isinstance(act, Do):
            fields = msgspec.json.decode(msgspec.json.encode(act.command))
            fields.pop("session")
            lines.append(f"{type(act.command).__name__} {fields}")
        else:
            lines.append(repr(act))
    return "\n".join(lines)


def _play(seed: int) -> Counter[tuple[type[Any], str]]:
    players = Helpers(seed)
    try:
        players.play(LENGTH)
        players.finish()
    except Stuck as stuck:
        pytest.fail(f"SEED={seed}: {stuck} cannot be brought to an end\n\n{_told(players.acts)}")
    except Broken:
        shorter = _reduced(players.acts)
        error = _breaks(shorter)
        pytest.fail(f"SEED={seed} breaks: {error!r}\n\n{_told(shorter)}")
    return players.history.seen


@pytest.mark.spec("PR-22", "EV-06", "EV-19", "Q-09", "RC-02")
def test_the_invariants_hold_after_every_command_of_a_random_history(monkeypatch: pytest.MonkeyPatch) -> None:
    # Short enough that a batch ends in the middle of everything.
    monkeypatch.setattr(pruning, "PRUNE_ROWS", 9)
    monkeypatch.setattr(positions, "POSITIONS_BATCH", 3)
    seen: Counter[tuple[type[Any], str]] = Counter()
    count = 1 if "SEED" in os.environ else HISTORIES
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        seen += _play(seed)
    if count == 1:
        return
    missing = [
        (kind.__name__, outcome)
        for kind in RULES
        for outcome in ("succeeded", "refused", *(("fenced",) if kind in OWNER_COMMANDS else ()))
        if not seen[kind, outcome]
    ]
    assert not missing, f"the histories never saw {missing}"
