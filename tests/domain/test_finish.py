"""When a Turn ends nothing of it stays open, in the very commit that ends it, and the next one may start."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import PAGE_MAX, ReadyRow
from agentscope_durable.contracts.commands import RunEndKind
from agentscope_durable.contracts.records import PENDING_INPUTS_MAX, InputRecord, SignalRecord
from agentscope_durable.contracts.status import ExecutionState, InteractionState, SignalState
from agentscope_durable.domain.control import INPUTS_MAX, SIGNALS_MAX
from tests.domain.stage import FOR_GOOD, Owner, Stage

S = ExecutionState


def completes(stage: Stage, owner: Owner) -> None:
    owner.answers(finish_reason="exceed_max_iters")


def fails(stage: Stage, owner: Owner) -> None:
    owner.fails(FOR_GOOD)
    stage.claim("z").settle()


def is_cancelled(stage: Stage, owner: Owner) -> None:
    stage.cancel(owner.turn)
    owner.end(RunEndKind.CANCELLED)
    owner.settle()


ENDS = pytest.mark.parametrize("end", [completes, fails, is_cancelled], ids=lambda end: end.__name__)


@ENDS
@pytest.mark.spec("CT-05")
def test_whatever_was_accepted_and_not_applied_ends_visibly(end: Callable[[Stage, Owner], None]) -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.asks("c2", "i1")
    stage.steer(turn, "s1", "left")
    stage.inject(turn, "n1", "note")
    stage.steer(turn, "s2", "taken back")
    stage.withdraw(turn, "s2")
    stage.inject(turn, "n2", "taken in")
    owner.checkpoint(inputs=(4,))
    stage.signal(turn, "x.go", "x1")
    stage.signal(turn, "x.stop", "x2")
    owner.step(waits=(c.WaitCondition("x.go"), c.WaitCondition("x.never")))

    end(stage, owner)

    told = stage.signals()
    assert {name: told[name] for name in ("s1", "n1", "s2", "n2", "x1", "x2")} == {
        "s1": "EXPIRED",
        "n1": "EXPIRED",
        "s2": "WITHDRAWN",
        "n2": "APPLIED",
        "x1": "EXPIRED",
        "x2": "EXPIRED",
    }
    reason = stage.status(turn).lower()
    expired = [e.data for e in stage.events("signal.expired") if e.data["requestId"] in ("s1", "n1", "x1", "x2")]
    assert {event["reason"] for event in expired} == {reason}
    assert stage.messages()[:5] == ["hi", "left (expired)", "note (expired)", "taken back (withdrawn)", "taken in"]
    assert stage.interaction(turn).state is InteractionState.CLOSED
    assert stage.execution(turn, "c2").state is S.CANCELLED
    view = stage.view(turn)
    assert (view.waiting_on, view.pending_inputs, view.cancel_requested) == ((), 0, False)


@ENDS
def test_all_of_it_is_one_commit_and_is_read_in_one_round(end: Callable[[Stage, Owner], None]) -> None:
    stage = Stage()
    owner = stage.running()
    behind = stage.submit("r2")
    for number in range(PENDING_INPUTS_MAX):
        stage.inject(owner.turn, f"n{number}")
    for number in range(20):
        stage.signal(owner.turn, f"x.k{number}", f"x{number}")
    for number in range(10):
        owner.asks(f"c{number}", f"i{number}")

    end(stage, owner)

    assert stage.rounds <= 2
    change = stage.change
    assert change is not None and change.entry is not None
    assert change.entry.count > PENDING_INPUTS_MAX + 20 + 10
    dump = stage.world.dump
    inputs = list(dump.all(keys.inputs(owner.turn), InputRecord))
    signals = list(dump.all(keys.all_signals(owner.turn), SignalRecord))
    assert {one.state for one in (*inputs, *signals)} == {SignalState.EXPIRED}
    assert stage.thread().current == behind


@ENDS
def test_the_oldest_queued_turn_is_next_and_a_host_may_take_it_at_once(end: Callable[[Stage, Owner], None]) -> None:
    stage = Stage()
    owner = stage.running()
    turns = [stage.submit(f"r{n}") for n in (2, 3, 4)]
    stage.cancel(turns[0], "k2")

    end(stage, owner)

    assert stage.thread().current == turns[1]
    assert keys.queue("main", 3) not in stage.world.dump.records
    assert stage.ready(keys.READY_TURN) == ReadyRow(keys.READY_TURN, stage.binding.ready_class, 0, "main", turns[1])
    assert stage.ready(keys.READY_LEASE) is None
    assert stage.claim("b").turn == turns[1]


def test_a_paused_successor_is_next_and_is_not_offered() -> None:
    stage = Stage()
    owner = stage.running()
    behind = stage.submit("r2")
    stage.pause(behind)
    owner.answers()

    assert (stage.thread().current, stage.due()) == (behind, None)
    stage.resume(behind)
    assert stage.due() == 0


def test_the_last_turn_leaves_an_idle_thread() -> None:
    stage = Stage()
    owner = stage.running()
    owner.checkpoint()
    owner.answers()

    thread = stage.thread()
    assert (thread.current, thread.settled_at, thread.checkpoint_at, thread.position) == ("", 2, 2, 3)
    assert (stage.ready(keys.READY_TURN), stage.ready(keys.READY_LEASE)) == (None, None)
    assert stage.world.dump.head is not None and stage.world.dump.head.threads == {}
    record = stage.turn(owner.turn)
    assert (record.first_at, record.last_at) == (1, 3)


def test_a_turn_that_never_ran_ends_as_completely_as_any() -> None:
    stage = Stage()
    turn, behind = stage.submit("r1"), stage.submit("r2")
    for number in range(5):
        stage.steer(turn, f"s{number}")
    stage.signal(turn, "x.go", "x1")

    stage.cancel(turn)

    assert stage.rounds <= 2
    assert {name: state for name, state in stage.signals().items() if name != "cancel"} == dict.fromkeys(
        ("s0", "s1", "s2", "s3", "s4", "x1"), "EXPIRED"
    )
    assert stage.thread().current == behind


def test_a_turn_accepts_so_many_signals_that_its_end_can_read_them_all() -> None:
    assert SIGNALS_MAX <= PAGE_MAX and INPUTS_MAX <= PAGE_MAX
