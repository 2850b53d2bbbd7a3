"""A stage for stories: one Session in the store in memory, a clock moved by hand, and a verb for each command.

Every command goes the way the backend sends it (rule, reads, decide) and is decided twice, because a decision may run
again (D10). After each one the invariants are checked. Nothing here waits, so stories are plain functions.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import Body, body_of, object_digest
from agentscope_durable.contracts.change import Change, Need, ReadyRow, Unchanged, View
from agentscope_durable.contracts.errors import DurableError
from agentscope_durable.contracts.events import PublicEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import ModelFact, PrivateFact, StepFact, decode_facts
from agentscope_durable.contracts.records import (
    Binding,
    ExecutionRecord,
    Failure,
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
    ModelStatus,
    ReplayRule,
    StepPhase,
    StepStatus,
)
from agentscope_durable.contracts.views import RecoveryPolicy, TurnView
from agentscope_durable.domain.rules import RULES
from agentscope_durable.domain.turn_view import turn_view
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from tests.domain.invariants import World

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

SESSION = SessionKey("app", "conversation")
BINDING = Binding("assistant", "v1", "state-1")
MAIN = "main"
LEASE_MS = 30_000
NEED_ROUNDS = 2
"""D10: a rule may ask for more at most twice."""

TRY_AGAIN = Failure("TimeoutError", "the model did not answer", retryable=True)
FOR_GOOD = Failure("ValueError", "a defect")


def text(words: str) -> Body:
    return body_of([{"type": "text", "text": words}])


def now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that gives others their turn and waits for nothing, as those of the store in memory."""
    try:
        while True:
            assert coroutine.send(None) is None, "the store in memory waited for something"
    except StopIteration as done:
        return done.value


class Stage:
    """One Session, from its creation on.

    Args:
        create: whether to create it.
        beside: another Session's stage, to stand in the same store.

    Attributes:
        rounds: how often the last command had to ask for more records.
        change: what the last command made true, None if nothing.
    """

    def __init__(
        self,
        *,
        session: SessionKey = SESSION,
        binding: Binding = BINDING,
        create: bool = True,
        beside: Stage | None = None,
    ) -> None:
        self.clock = ManualClock() if beside is None else beside.clock
        self.store = MemoryRecordStore(self.clock) if beside is None else beside.store
        self.session = session
        self.binding = binding
        self.world = World(self.store, session)
        self.rounds = 0
        self.change: Change | None = None
        self._commands = 0
        if create:
            self.do(c.CreateSession(session=session, binding=binding))

    # ---- the one door ----

    def do(self, command: Any, *, seed: bytes | None = None) -> Any:
        """Carry out a command as the backend does, and check what must hold after any command."""
        rule = RULES[type(command)]
        self._commands += 1
        seed = seed or self._commands.to_bytes(16, "big")
        self.rounds, self.change = 0, None

        def decide(view: View, now_ms: int) -> Change | Unchanged:
            try:
                first = rule.decide(command, seed, view, now_ms)
            except Need:
                self.rounds += 1
                raise
            again = rule.decide(command, seed, view, now_ms)
            assert _comparable(first) == _comparable(again), "a decision that runs again decides the same (D10)"
            self.change = first if isinstance(first, Change) else None
            return first

        try:
            committed = now(self.store.transact(keys.partition(command.session), rule.reads(command), decide))
        except DurableError:
            self.change = None
            self.world.unchanged()
            raise
        assert self.rounds <= NEED_ROUNDS, f"{type(command).__name__} asked {self.rounds} times for more records (D10)"
        if self.change is None:
            self.world.unchanged()
        else:
            self.world.committed()
        return committed.receipt

    def large(self, content: bytes) -> Body:
        """A body that was put as an object."""
        marked = self.do(c.RecordObject(session=self.session, digest=object_digest(content), size=len(content)))
        return Body(name=marked.name, size=len(content))

    @contextmanager
    def refuses(self, error: type[DurableError]) -> Iterator[pytest.ExceptionInfo[Any]]:
        """The command in this block is refused with exactly this error; `do` checks that nothing has changed."""
        with pytest.raises(error) as caught:
            yield caught
        assert type(caught.value) is error

    # ---- hosts and time ----

    def pass_time(self, milliseconds: int) -> None:
        self.clock.advance(milliseconds)

    def alive(self, *owners: str, lease_ms: int = LEASE_MS) -> None:
        for owner in owners:
            self.store.renew(owner, lease_ms, b"")

    def dies(self, owner: str) -> None:
        """The host is gone, and its lease with it."""
        now(self.store.release(owner))

    # ---- admission and controls ----

    def submit(self, request_id: str = "r1", words: str = "hi", *, thread: str = MAIN) -> str:
        """Admit a Turn and return its id."""
        return self.do(self.submit_command(request_id, words, thread=thread)).turn_id

    def submit_command(self, request_id: str = "r1", words: str = "hi", *, thread: str = MAIN) -> c.SubmitTurn:
        return c.SubmitTurn(
            session=self.session, thread_id=thread, request_id=request_id, content=text(words), digest=words
        )

    def _request(self, kind: type[Any], /, turn: str, request_id: str, thread: str, **fields: Any) -> Any:
        return self.do(
            kind(session=self.session, thread_id=thread, turn_id=turn, request_id=request_id, **fields),
        )

    def steer(self, turn: str, request_id: str = "steer", words: str = "left", *, thread: str = MAIN) -> Any:
        return self._request(c.AddInput, turn, request_id, thread, kind="steer", content=text(words), digest=words)

    def inject(self, turn: str, request_id: str = "inject", words: str = "note", *, thread: str = MAIN) -> Any:
        return self._request(c.AddInput, turn, request_id, thread, kind="inject", content=text(words), digest=words)

    def withdraw(self, turn: str, target: str, request_id: str = "withdraw", *, thread: str = MAIN) -> Any:
        return self._request(c.Withdraw, turn, request_id, thread, target_request_id=target)

    def cancel(self, turn: str, request_id: str = "cancel", *, thread: str = MAIN) -> Any:
        return self._request(c.Cancel, turn, request_id, thread)

    def pause(self, turn: str, request_id: str = "pause", *, thread: str = MAIN) -> Any:
        return self._request(c.Pause, turn, request_id, thread)

    def resume(self, turn: str, request_id: str = "resume", *, revision: int | None = None, thread: str = MAIN) -> Any:
        revision = self.state(turn).revision if revision is None else revision
        return self._request(c.Resume, turn, request_id, thread, expected_revision=revision)

    def signal(self, turn: str, key: str = "x.go", request_id: str = "signal", *, thread: str = MAIN) -> Any:
        return self._request(c.Signal, turn, request_id, thread, key=key, payload=body_of({}), digest="{}")

    def respond(
        self,
        turn: str,
        interaction: str,
        answer: Any = True,
        request_id: str = "respond",
        *,
        arguments: str | None = None,
        thread: str = MAIN,
    ) -> Any:
        """`arguments` is the text of a JSON object."""
        return self._request(
            c.Respond,
            turn,
            request_id,
            thread,
            interaction_id=interaction,
            response=body_of(answer),
            digest=str(answer),
            content=text(str(answer)),
            result=body_of({"value": answer}),
            is_bool=isinstance(answer, bool),
            approved=answer is True,
            arguments=None if arguments is None else body_of(arguments),
            arguments_digest=arguments or "",
        )

    # ---- the host that runs a Thread ----

    def claim_command(
        self, owner: str = "a", *, thread: str = MAIN, dead: tuple[str, ...] = (), takeovers_max: int = 5
    ) -> c.Claim:
        return c.Claim(
            session=self.session,
            thread_id=thread,
            owner=owner,
            served=(self.binding.ready_class,),
            dead=dead,
            takeovers_max=takeovers_max,
        )

    def claim(self, owner: str = "a", **options: Any) -> Owner:
        """A living host takes the Thread; what it obtained stands in `claimed`."""
        self.alive(owner)
        command = self.claim_command(owner, **options)
        return Owner(self, command.thread_id, self.do(command))

    def running(self, owner: str = "a", *, request_id: str = "r1", thread: str = MAIN) -> Owner:
        """A Turn that was just submitted and that a host runs."""
        self.submit(request_id, thread=thread)
        return self.claim(owner, thread=thread)

    # ---- dispatchers and operators ----

    def dispatch(
        self, turn: str, call: str = "c1", owner: str = "hands", *, dead: tuple[str, ...] = (), thread: str = MAIN
    ) -> c.ExecutionGrant:
        self.alive(owner)
        return self.do(
            c.ClaimExecution(session=self.session, thread_id=thread, turn_id=turn, call_id=call, owner=owner, dead=dead)
        )

    def outcome(
        self,
        turn: str,
        state: ExecutionState = ExecutionState.COMPLETED,
        call: str = "c1",
        *,
        result: Any = "done",
        retry_after_ms: int = 0,
        thread: str = MAIN,
        execution_id: str = "",
    ) -> c.OutcomeRecorded:
        return self.do(
            c.RecordOutcome(
                session=self.session,
                thread_id=thread,
                turn_id=turn,
                call_id=call,
                execution_id=execution_id or self.execution(turn, call).execution_id,
                state=state,
                result=body_of({"value": result}) if state.terminal else None,
                retry_after_ms=retry_after_ms,
            )
        )

    def reconcile(
        self,
        turn: str,
        call: str = "c1",
        state: ExecutionState = ExecutionState.COMPLETED,
        *,
        request_id: str = "reconcile",
        result: Any = "seen",
        evidence: str = "ticket-7",
        thread: str = MAIN,
    ) -> c.ReconcileReceipt:
        return self.do(
            c.ReconcileTool(
                session=self.session,
                thread_id=thread,
                turn_id=turn,
                call_id=call,
                request_id=request_id,
                state=state,
                result=body_of({"value": result}),
                digest=str(result),
                evidence_ref=evidence,
            )
        )

    def release_turn(self, turn: str, request_id: str = "release", *, thread: str = MAIN) -> c.Done:
        return self.do(c.ReleaseTurn(session=self.session, thread_id=thread, turn_id=turn, request_id=request_id))

    # ---- looking ----

    def get(self, key: str, kind: type[S]) -> S:
        return self.world.dump.one(key, kind)

    def turn(self, turn: str) -> TurnRecord:
        return self.get(keys.turn(turn), TurnRecord)

    def state(self, turn: str) -> TurnState:
        return self.world.dump.state(self.turn(turn))

    def status(self, turn: str) -> str:
        return self.state(turn).status.value

    def view(self, turn: str) -> TurnView:
        return turn_view(self.session, self.turn(turn), self.state(turn))

    def reasons(self, turn: str) -> list[str]:
        return [reason.kind.value for reason in self.view(turn).waiting_on]

    def thread(self, thread: str = MAIN) -> ThreadRecord:
        return self.get(keys.thread(thread), ThreadRecord)

    def execution(self, turn: str, call: str = "c1") -> ExecutionRecord:
        return self.get(keys.execution(turn, call), ExecutionRecord)

    def interaction(self, turn: str, interaction: str = "i1") -> InteractionRecord:
        return self.get(keys.interaction(turn, interaction), InteractionRecord)

    def run(self, turn: str, number: int = 1) -> RunRecord:
        return self.get(keys.run(turn, number), RunRecord)

    def ready(self, kind: str, item: str = MAIN) -> ReadyRow | None:
        return self.world.dump.ready.get((kind, item))

    def due(self, thread: str = MAIN) -> int | None:
        """Milliseconds until the Thread's Turn may be taken, None if it may not."""
        row = self.ready(keys.READY_TURN, thread)
        return None if row is None else max(0, row.due_ms - self.clock())

    def events(self, event_type: str = "") -> list[PublicEvent]:
        """All public events, or those whose type begins so."""
        return [event for event in self.world.events if event.type.startswith(event_type)]

    def signals(self) -> dict[str, str]:
        """What observers know of every accepted control and input."""
        return {name: signal.state.value for name, signal in self.world.fold.projection.signals.items()}

    def messages(self) -> list[str]:
        """The text of every public message, in order, with what became of it."""
        return [
            message.text + (" (withdrawn)" if message.withdrawn else "") + (" (expired)" if message.expired else "")
            for message in self.world.fold.projection.history()
        ]

    def private(self) -> list[PrivateFact]:
        """Private facts of the last commit."""
        row = self.store._sessions[keys.partition(self.session)].log[-1]
        return decode_facts(row.private, "the last commit")


class Owner:
    """A host that has taken a Thread, as it sees itself: it goes on from the position of its last commit."""

    def __init__(self, stage: Stage, thread: str, claimed: c.Claimed) -> None:
        self.stage = stage
        self.thread = thread
        self.claimed = claimed
        self.turn = claimed.turn_id
        self.run = claimed.run_id
        self.position = claimed.position

    def _identity(self, run_id: str) -> dict[str, Any]:
        return {
            "session": self.stage.session,
            "thread_id": self.thread,
            "turn_id": self.turn,
            "run_id": run_id,
            "fence": self.claimed.fence,
        }

    def step_command(self, **fields: Any) -> c.CommitStep:
        return c.CommitStep(**{**self._identity(self.run), "expected_position": self.position, **fields})

    def step(self, **fields: Any) -> c.StepReceipt:
        receipt = self.stage.do(self.step_command(**fields))
        self.position = receipt.position
        return receipt

    def checkpoint(self, **fields: Any) -> c.StepReceipt:
        return self.step(journal=b"[]", checkpoint=True, base=True, writer="2.0.8", **fields)

    def end(self, kind: c.RunEndKind, **fields: Any) -> c.StepReceipt:
        return self.step(end=c.RunEnd(kind=kind, **fields))

    def suspends(self) -> c.StepReceipt:
        return self.end(c.RunEndKind.SUSPENDED)

    def answers(self, words: str = "the answer", *, message: str = "m1", **end: Any) -> c.StepReceipt:
        """The final answer and the end of the Turn, in one commit."""
        return self.step(
            messages=(c.MessageOut(message_id=message, content=text(words)),),
            end=c.RunEnd(kind=c.RunEndKind.COMPLETED, message_id=message, **end),
        )

    def fails(self, failure: Failure = TRY_AGAIN, policy: RecoveryPolicy | None = None) -> c.StepReceipt:
        return self.end(c.RunEndKind.FAILED, failure=failure, policy=policy or RecoveryPolicy())

    def begins(self, number: int = 1, phase: StepPhase = StepPhase.REASONING, **fields: Any) -> c.StepReceipt:
        return self.step(steps=(self.fact(number, phase),), **fields)

    def fact(
        self,
        number: int = 1,
        phase: StepPhase = StepPhase.REASONING,
        status: StepStatus = StepStatus.RUNNING,
        **fields: Any,
    ) -> StepFact:
        return StepFact(f"{self.run}.s{number}", self.run, number, phase, status, **fields)

    def model(
        self, status: ModelStatus = ModelStatus.STARTED, number: int = 1, *, message: str = "m1", **fields: Any
    ) -> ModelFact:
        return ModelFact(
            f"{self.run}.m{number}",
            self.run,
            f"{self.run}.s1",
            fields.pop("request", 1),
            status,
            message_id=message,
            attempt=fields.pop("attempt", 1),
            **fields,
        )

    # ---- tools ----

    def calls_hands(self, call: str = "c1", **fields: Any) -> c.StepReceipt:
        """Commit the intent of an external call."""
        return self.step(tools=(external(call),), **fields)

    def starts_local(self, call: str = "c1", rule: ReplayRule = ReplayRule.NEVER, **fields: Any) -> c.StepReceipt:
        return self.step(tools=(local(call, rule),), **fields)

    def tool(self, call: str, state: ExecutionState, **fields: Any) -> c.StepReceipt:
        answers = fields.pop("answers", ())
        return self.step(tools=(c.ToolCommit(call_id=call, state=state, **fields),), answers=answers)

    def asks(self, call: str = "c2", interaction: str = "i1", **fields: Any) -> c.StepReceipt:
        """Ask a person whether a local tool may run."""
        return self.step(tools=(gated(call),), interactions=(question(interaction, call),), **fields)

    def asks_for_result(self, call: str = "c3", interaction: str = "i2", **fields: Any) -> c.StepReceipt:
        """Ask a person to do what a tool would."""
        tool = c.ToolCommit(
            call_id=call, state=ExecutionState.INTENT, name="sign", kind=ExecutionKind.MANUAL, arguments=body_of("{}")
        )
        asked = question(interaction, call, InteractionKind.EXTERNAL_RESULT)
        return self.step(tools=(tool,), interactions=(asked,), **fields)

    # ---- settlement ----

    def settle(self, **fields: Any) -> c.Done:
        return self.stage.do(self.settle_command(**fields))

    def settle_command(self, **fields: Any) -> c.SettleTurn:
        return c.SettleTurn(**{**self._identity(""), "expected_position": self.position, **fields})

    def postpone(self, failure: Failure | None = None) -> c.Done:
        return self.stage.do(c.PostponeSettlement(**self._identity(""), failure=failure))


def external(call: str = "c1", *, route: str = "hands") -> c.ToolCommit:
    return c.ToolCommit(
        call_id=call,
        state=ExecutionState.INTENT,
        name="restart",
        kind=ExecutionKind.EXTERNAL,
        route=route,
        arguments=body_of("{}"),
    )


def local(
    call: str = "c1", rule: ReplayRule = ReplayRule.NEVER, state: ExecutionState = ExecutionState.RUNNING
) -> c.ToolCommit:
    return c.ToolCommit(call_id=call, state=state, name="write", rule=rule, arguments=body_of("{}"))


def gated(call: str = "c2") -> c.ToolCommit:
    return c.ToolCommit(call_id=call, state=ExecutionState.AWAITING_APPROVAL, name="delete", arguments=body_of("{}"))


def question(interaction: str, call: str, kind: InteractionKind = InteractionKind.APPROVAL) -> c.InteractionCommit:
    return c.InteractionCommit(
        interaction_id=interaction, call_id=call, kind=kind, name="delete", arguments=body_of("{}")
    )


def _comparable(decided: Change | Unchanged) -> tuple[object, bytes]:
    return replace(decided, receipt=None), msgspec.json.encode(decided.receipt)
