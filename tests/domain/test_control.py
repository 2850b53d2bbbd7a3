"""Controls of a Turn, in every state it can be in: what each admits, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.commands import ExecutionAction, RunEndKind
from agentscope_durable.contracts.errors import (
    InputsChanged,
    InputSettled,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    RevisionConflict,
    Terminal,
)
from agentscope_durable.contracts.records import PENDING_INPUTS_MAX, InputRecord
from agentscope_durable.contracts.status import Audience, ExecutionState, ModelStatus, SignalState, TurnStatus
from agentscope_durable.contracts.views import RecoveryPolicy
from agentscope_durable.domain.rules import RULES
from tests.domain.stage import FOR_GOOD, Owner, Stage, external

S = ExecutionState


# ---- a Turn in each state ----


def queued(stage: Stage) -> str:
    return stage.submit()


def queued_behind(stage: Stage) -> str:
    stage.submit("r0")
    return stage.submit()


def running(stage: Stage) -> str:
    return stage.running().turn


def given_back(stage: Stage) -> str:
    owner = stage.running()
    owner.end(RunEndKind.RELEASED)
    return owner.turn


def waiting(stage: Stage) -> str:
    owner = stage.running()
    owner.asks()
    owner.suspends()
    return owner.turn


def in_backoff(stage: Stage) -> str:
    owner = stage.running()
    owner.fails()
    return owner.turn


def pausing(stage: Stage) -> str:
    owner = stage.running()
    stage.pause(owner.turn, "first pause")
    return owner.turn


def paused(stage: Stage) -> str:
    turn = stage.submit()
    stage.claim().end(RunEndKind.RELEASED)
    stage.pause(turn, "first pause")
    return turn


def parked(stage: Stage) -> str:
    turn = stage.submit()
    for host in "abc":
        owner = stage.claim(host, takeovers_max=1)
        stage.dies(host)
        assert owner.turn in (turn, "")
    stage.claim("d", takeovers_max=1)
    assert stage.reasons(turn) == ["operator"]
    return turn


def cancelling(stage: Stage) -> str:
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    owner.suspends()
    stage.cancel(owner.turn, "first cancel")
    return owner.turn


def failing(stage: Stage) -> str:
    owner = stage.running()
    owner.calls_hands()
    stage.dispatch(owner.turn)
    owner.fails(FOR_GOOD)
    return owner.turn


LIVE: list[Callable[[Stage], str]] = [
    queued,
    queued_behind,
    running,
    given_back,
    waiting,
    in_backoff,
    pausing,
    paused,
    parked,
    cancelling,
    failing,
]


def completed(stage: Stage) -> str:
    owner = stage.running()
    owner.answers()
    return owner.turn


def failed(stage: Stage) -> str:
    owner = stage.running()
    owner.fails(FOR_GOOD)
    stage.claim("b").settle()
    return owner.turn


def cancelled(stage: Stage) -> str:
    turn = stage.submit()
    stage.cancel(turn, "first cancel")
    return turn


ENDED: list[Callable[[Stage], str]] = [completed, failed, cancelled]

in_every_live_state = pytest.mark.parametrize("state", LIVE, ids=lambda state: state.__name__)
in_every_ended_state = pytest.mark.parametrize("state", ENDED, ids=lambda state: state.__name__)


def owner_of(stage: Stage, turn: str) -> Owner | None:
    """The host that owns the Turn now, as it sees itself."""
    active = stage.world.dump.active("main")
    if active is None or active.turn_id != turn:
        return None
    claimed = c.Claimed(
        purpose=c.ClaimPurpose.RUN,
        turn_id=turn,
        fence=active.fence,
        run_id=active.run.run_id,
        position=active.position,
    )
    return Owner(stage, "main", claimed)


# ---- steer and inject ----


@in_every_live_state
@pytest.mark.parametrize("kind", ["steer", "inject"])
@pytest.mark.spec("CT-26")
def test_an_input_is_kept_for_the_next_boundary_and_alone_moves_nothing(
    state: Callable[[Stage], str], kind: str
) -> None:
    stage = Stage()
    turn = state(stage)
    before, due, reasons = stage.state(turn), stage.due(), stage.reasons(turn)

    getattr(stage, kind)(turn, "s", "left")

    after = stage.state(turn)
    assert (after.inputs, after.steers) == (1, int(kind == "steer"))
    assert (after.status, after.conditions, after.recovery) == (before.status, before.conditions, before.recovery)
    assert (stage.due(), stage.reasons(turn)) == (due, reasons)
    assert stage.signals()["s"] == "ACCEPTED"
    assert stage.messages()[-1] == "left"


@pytest.mark.spec("CT-06", "CT-21")
def test_an_input_is_applied_by_the_very_commit_whose_checkpoint_contains_it() -> None:
    stage = Stage()
    owner = stage.running()
    stage.steer(owner.turn, "s1", "left")
    stage.inject(owner.turn, "s2", "note")
    receipt = owner.begins()
    assert receipt.inputs == 2
    assert set(stage.signals().values()) == {"ACCEPTED"}

    receipt = owner.checkpoint(inputs=(1, 2))

    assert receipt.inputs == 0
    assert stage.signals() == {"s1": "APPLIED", "s2": "APPLIED"}
    change = stage.change
    assert change is not None and change.entry is not None and change.entry.journal == b"[]"
    assert {keys.input_(owner.turn, 1), keys.input_(owner.turn, 2)} <= set(dict(change.puts))
    with stage.refuses(InputsChanged):
        owner.checkpoint(inputs=(1,))


def test_a_turn_keeps_so_many_inputs_and_no_more() -> None:
    stage = Stage()
    owner = stage.running()
    for number in range(PENDING_INPUTS_MAX):
        stage.inject(owner.turn, f"i{number}")

    with stage.refuses(LimitExceeded) as refused:
        stage.inject(owner.turn, "one more")
    assert refused.value.limit == PENDING_INPUTS_MAX
    owner.checkpoint(inputs=(1,))
    assert stage.inject(owner.turn, "one more")


def test_there_is_no_third_kind_of_input() -> None:
    stage = Stage()
    command = c.AddInput(
        session=stage.session,
        thread_id="main",
        turn_id=stage.submit(),
        request_id="s",
        kind="shout",
        content=stage.submit_command().content,
        digest="hi",
    )
    with stage.refuses(InvalidRequest) as refused:
        stage.do(command)
    assert refused.value.path == "kind"


# ---- withdraw ----


@in_every_live_state
def test_an_input_that_no_checkpoint_contains_is_taken_back(state: Callable[[Stage], str]) -> None:
    stage = Stage()
    turn = state(stage)
    stage.steer(turn, "s", "left")

    stage.withdraw(turn, "s")

    assert (stage.state(turn).inputs, stage.state(turn).steers) == (0, 0)
    assert stage.signals()["s"] == "WITHDRAWN"
    assert stage.messages()[-1] == "left (withdrawn)"
    with stage.refuses(InputSettled) as refused:
        stage.withdraw(turn, "s", "again")
    assert refused.value.state == "WITHDRAWN"


@pytest.mark.spec("CT-03", "CT-04")
def test_withdraw_and_application_race_and_exactly_one_wins() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    stage.steer(turn, "s1")
    stage.steer(turn, "s2")

    owner.checkpoint(inputs=(1,))
    with stage.refuses(InputSettled) as refused:
        stage.withdraw(turn, "s1", "too late")
    assert refused.value.state == "APPLIED"

    stage.withdraw(turn, "s2", "in time")
    with stage.refuses(InputsChanged):
        owner.checkpoint(inputs=(2,))
    assert stage.get(keys.input_(turn, 2), InputRecord).state is SignalState.WITHDRAWN
    assert owner.checkpoint().inputs == 0


def test_only_an_input_of_this_turn_can_be_taken_back() -> None:
    stage = Stage()
    turn, other = stage.submit("r1"), stage.submit("r2")
    stage.steer(other, "s")

    for target in ("s", "r1", "nothing"):
        with stage.refuses(NotFound):
            stage.withdraw(turn, target, f"w {target}")


# ---- cancel ----


@pytest.mark.parametrize("state", [queued, queued_behind], ids=lambda state: state.__name__)
@pytest.mark.parametrize("resting", [False, True], ids=["queued", "paused"])
@pytest.mark.spec("CT-07")
def test_a_turn_that_never_ran_is_cancelled_at_once(state: Callable[[Stage], str], resting: bool) -> None:
    stage = Stage()
    turn = state(stage)
    stage.inject(turn, "n", "note")
    if resting:
        stage.pause(turn)

    receipt = stage.cancel(turn)

    assert (stage.status(turn), stage.view(turn).runs) == ("CANCELLED", 0)
    assert receipt.revision == stage.state(turn).revision
    assert stage.signals()["cancel"] == "APPLIED"
    assert stage.signals()["n"] == "EXPIRED"
    # A pause that was reached was applied, and stays so.
    assert stage.signals().get("pause") == ("APPLIED" if resting else None)


@pytest.mark.spec("CT-08", "SE-08")
def test_a_turn_with_work_outside_is_cancelled_when_that_has_stopped_and_not_before() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.calls_hands()
    stage.dispatch(turn)
    owner.suspends()

    stage.cancel(turn)

    assert (stage.status(turn), stage.view(turn).cancel_requested) == ("WAITING", True)
    assert stage.reasons(turn) == ["tool_running"]
    assert (stage.due(), stage.signals()["cancel"]) == (None, "ACCEPTED")
    assert stage.dispatch(turn).action is ExecutionAction.CANCEL
    stage.outcome(turn, S.RUNNING, retry_after_ms=1000)
    assert (stage.due(), stage.status(turn)) == (None, "WAITING"), "asked to stop is not stopped"

    stage.outcome(turn, S.CANCELLED)
    assert stage.due() == 0
    stage.claim("b").settle(applied=("c1",))
    assert (stage.status(turn), stage.signals()["cancel"]) == ("CANCELLED", "APPLIED")


@pytest.mark.parametrize("state", [given_back, waiting, in_backoff, paused, parked], ids=lambda state: state.__name__)
@pytest.mark.spec("CT-17")
def test_a_cancelled_turn_that_nobody_owns_can_be_settled_at_once(state: Callable[[Stage], str]) -> None:
    stage = Stage()
    turn = state(stage)
    runs = stage.view(turn).runs

    stage.cancel(turn)

    view = stage.view(turn)
    assert (view.status, view.cancel_requested, stage.due()) == ("WAITING", True, 0)
    assert view.recovery is None or view.recovery.next_retry_at_ms is None
    owner = stage.claim("z")
    assert owner.claimed.purpose is c.ClaimPurpose.SETTLE
    owner.settle()
    assert (stage.status(turn), stage.view(turn).runs) == ("CANCELLED", runs)


@pytest.mark.case("C34")
@pytest.mark.spec("CT-17")
def test_cancel_does_not_wait_for_a_retry_that_is_a_day_away() -> None:
    stage = Stage()
    owner = stage.running()
    day = 24 * 3_600_000
    owner.fails(policy=RecoveryPolicy(initial_backoff_ms=day, max_backoff_ms=day))
    assert stage.due() == day

    stage.cancel(owner.turn)
    stage.claim("b").settle()

    assert stage.status(owner.turn) == "CANCELLED"
    stage.pass_time(2 * day)
    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING


def test_a_second_cancel_is_admitted_and_told_at_once_that_the_first_one_is_at_work() -> None:
    stage = Stage()
    turn = cancelling(stage)

    assert stage.cancel(turn, "second").request_id == "second"

    assert stage.signals()["second"] == "EXPIRED"
    [told] = [e.data for e in stage.events("signal.expired") if e.data["requestId"] == "second"]
    assert "first cancel" in told["reason"]
    assert stage.signals()["first cancel"] == "ACCEPTED"


def test_a_run_that_did_not_see_the_cancel_leaves_a_turn_that_says_why_it_waits() -> None:
    """The Run ends in its own way while an effect is under way: without a reason nobody would know (P9)."""
    for end in (RunEndKind.SUSPENDED, RunEndKind.RELEASED, RunEndKind.PAUSED):
        stage = Stage()
        owner = stage.running()
        owner.calls_hands()
        stage.dispatch(owner.turn)
        stage.cancel(owner.turn)
        owner.end(end)

        assert (stage.status(owner.turn), stage.reasons(owner.turn)) == ("WAITING", ["tool_running"])


# ---- pause ----


@pytest.mark.spec("CT-09", "CT-10")
def test_an_owned_turn_pauses_at_its_next_boundary() -> None:
    stage = Stage()
    owner = stage.running()
    owner.checkpoint(steps=(owner.fact(),), models=(owner.model(),))

    stage.pause(owner.turn)

    assert (stage.status(owner.turn), stage.signals()["pause"]) == ("PAUSING", "ACCEPTED")
    receipt = owner.checkpoint(models=(owner.model(ModelStatus.COMPLETED),))
    assert receipt.pause and stage.status(owner.turn) == "PAUSING"
    owner.end(RunEndKind.PAUSED)
    assert (stage.status(owner.turn), stage.signals()["pause"]) == ("PAUSED", "APPLIED")
    assert stage.due() is None


@pytest.mark.parametrize(
    "state",
    [queued, queued_behind, given_back, waiting, in_backoff, parked],
    ids=lambda state: state.__name__,
)
@pytest.mark.spec("CT-09")
def test_a_turn_that_nobody_owns_is_paused_at_once(state: Callable[[Stage], str]) -> None:
    stage = Stage()
    turn = state(stage)
    before = stage.state(turn)

    stage.pause(turn)

    after = stage.state(turn)
    assert (after.status, stage.signals()["pause"]) == (TurnStatus.PAUSED, "APPLIED")
    assert after.paused_revision == after.revision == before.revision + 1
    assert (after.conditions, after.recovery, after.operator) == (before.conditions, before.recovery, before.operator)


def test_a_second_pause_says_what_is_true_of_it() -> None:
    stage = Stage()
    turn = pausing(stage)
    stage.pause(turn, "while pausing")
    assert stage.signals()["while pausing"] == "EXPIRED", "it is not paused yet, and the first request sees to it"

    owner = owner_of(stage, turn)
    assert owner is not None
    owner.end(RunEndKind.PAUSED)
    stage.pause(turn, "while paused")
    assert stage.signals()["while paused"] == "APPLIED"
    assert stage.signals()["first pause"] == "APPLIED"


@pytest.mark.parametrize("state", [cancelling, failing], ids=lambda state: state.__name__)
def test_a_turn_that_is_being_settled_is_not_paused(state: Callable[[Stage], str]) -> None:
    stage = Stage()
    turn = state(stage)
    reasons = stage.reasons(turn)

    stage.pause(turn, "p")

    assert (stage.status(turn), stage.reasons(turn)) == ("WAITING", reasons)
    assert stage.signals()["p"] == "EXPIRED"


@pytest.mark.spec("CT-12")
def test_a_pause_cancels_nothing_that_was_sent() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.step(tools=(external("c1"), external("c2")))
    stage.dispatch(turn, "c1")
    stage.pause(turn)
    owner.end(RunEndKind.PAUSED)

    assert not stage.execution(turn, "c1").cancel_requested
    assert stage.execution(turn, "c1").state is S.RUNNING
    assert stage.dispatch(turn, "c2").action is ExecutionAction.START


@pytest.mark.spec("CT-13", "IN-08")
def test_while_it_is_paused_results_and_answers_are_stored_and_nothing_moves() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.calls_hands("c1")
    owner.asks("c2", "i1")
    stage.dispatch(turn)
    stage.pause(turn)
    owner.end(RunEndKind.PAUSED)

    stage.outcome(turn)
    stage.respond(turn, "i1", True)

    assert stage.execution(turn).received_ms
    assert (stage.status(turn), stage.due()) == ("PAUSED", None)
    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING
    stage.resume(turn)
    assert (stage.status(turn), stage.due()) == ("RUNNING", 0)
    assert stage.claim("b").begins().ready == 2


# ---- resume ----


@pytest.mark.spec("CT-11")
def test_resume_takes_any_revision_of_this_pause_and_no_other() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.calls_hands("c1")
    owner.asks("c2", "i1")
    stage.dispatch(turn)
    owner.suspends()
    before = stage.state(turn).revision
    stage.pause(turn, "p1")
    first = stage.state(turn).revision
    stage.outcome(turn)
    stage.respond(turn, "i1")
    assert stage.state(turn).revision > first

    for revision in (before, stage.state(turn).revision + 1):
        with stage.refuses(RevisionConflict) as refused:
            stage.resume(turn, f"u{revision}", revision=revision)
        assert (refused.value.expected, refused.value.actual) == (revision, stage.state(turn).revision)
    assert stage.status(turn) == "PAUSED"
    stage.resume(turn, "u1", revision=first)

    stage.pause(turn, "p2")
    with stage.refuses(RevisionConflict):
        stage.resume(turn, "u2", revision=first)
    stage.resume(turn, "u3")
    assert stage.status(turn) == "RUNNING"
    with stage.refuses(RevisionConflict) as refused:
        stage.resume(turn, "u4", revision=stage.state(turn).revision)
    assert "is RUNNING" in str(refused.value)


@pytest.mark.spec("CT-14")
def test_resume_lifts_only_the_pause() -> None:
    def with_approval(stage: Stage, owner: Owner) -> None:
        owner.asks()

    def with_running_tool(stage: Stage, owner: Owner) -> None:
        owner.calls_hands()
        stage.dispatch(owner.turn)

    def with_unknown_tool(stage: Stage, owner: Owner) -> None:
        owner.calls_hands()
        stage.dispatch(owner.turn)
        stage.outcome(owner.turn, S.UNKNOWN)

    def with_signal(stage: Stage, owner: Owner) -> None:
        owner.step(waits=(c.WaitCondition("x.go"),))

    for prepare, reason in (
        (with_approval, "approval"),
        (with_running_tool, "tool_running"),
        (with_unknown_tool, "tool_unknown"),
        (with_signal, "signal"),
    ):
        stage = Stage()
        owner = stage.running()
        prepare(stage, owner)
        stage.pause(owner.turn)
        owner.end(RunEndKind.PAUSED)

        stage.resume(owner.turn)

        assert (stage.status(owner.turn), stage.reasons(owner.turn), stage.due()) == ("WAITING", [reason], None)


def test_a_turn_that_never_ran_is_queued_again_by_resume() -> None:
    stage = Stage()
    turn = stage.submit()
    stage.pause(turn)
    stage.resume(turn)

    assert (stage.status(turn), stage.due()) == ("QUEUED", 0)


@pytest.mark.parametrize("state", [s for s in LIVE if s is not paused], ids=lambda state: state.__name__)
def test_what_is_not_paused_cannot_be_resumed(state: Callable[[Stage], str]) -> None:
    stage = Stage()
    turn = state(stage)

    with stage.refuses(RevisionConflict):
        stage.resume(turn)


# ---- signals ----


@pytest.mark.spec("CT-18")
@pytest.mark.parametrize("key", ["pause", "cancel", "", "x", "x.", "X.app", ".x.app"])
def test_a_signal_cannot_pretend_to_be_a_control(key: str) -> None:
    stage = Stage()
    turn = stage.submit()

    with stage.refuses(InvalidRequest) as refused:
        stage.signal(turn, key)
    assert refused.value.path == "key"
    assert stage.signal(turn, "x.app.ready").operation == "signal"


@in_every_live_state
def test_a_signal_that_nobody_waits_for_is_kept(state: Callable[[Stage], str]) -> None:
    stage = Stage()
    turn = state(stage)
    before, due = stage.state(turn), stage.due()

    stage.signal(turn, "x.go")

    after = stage.state(turn)
    assert (after.status, after.conditions, stage.due()) == (before.status, before.conditions, due)
    assert (after.signals, stage.signals()["signal"]) == (1, "ACCEPTED")


@pytest.mark.spec("CT-20", "CT-25")
def test_a_signal_wakes_the_turn_that_waits_for_it_and_is_used_once() -> None:
    assert RULES[c.Signal].audience is Audience.PUBLIC
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.step(waits=(c.WaitCondition("x.go"),), end=c.RunEnd(kind=RunEndKind.SUSPENDED))
    assert (stage.reasons(turn), stage.due()) == (["signal"], None)

    stage.signal(turn, "x.other", "s0")
    assert stage.due() is None
    stage.signal(turn, "x.go", "s1")
    stage.signal(turn, "x.go", "s2")
    assert (stage.reasons(turn), stage.due()) == ([], 0)

    owner = stage.claim("b")
    owner.checkpoint(signals=("x.go",))
    assert stage.signals() == {"s0": "ACCEPTED", "s1": "APPLIED", "s2": "ACCEPTED"}
    owner.checkpoint(waits=(c.WaitCondition("x.go"),))
    assert stage.state(turn).conditions[0].ready, "the second one was kept for the next wait"
    owner.checkpoint(signals=("x.go",))
    owner.answers()
    assert stage.signals() == {"s0": "EXPIRED", "s1": "APPLIED", "s2": "APPLIED"}


@pytest.mark.spec("CT-19", "CT-20")
def test_a_wait_ends_at_its_time_and_without_a_time_only_with_the_signal() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    deadline = stage.clock() + 5_000
    owner.step(waits=(c.WaitCondition("x.k", deadline), c.WaitCondition("x.ever")))
    owner.suspends()
    assert stage.due() == 5_000

    stage.pass_time(4_999)
    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING
    stage.pass_time(1)
    owner = stage.claim("b")
    assert owner.begins().ready == 1
    owner.checkpoint(signals=("x.k",))
    owner.suspends()

    stage.pass_time(10**12)
    assert (stage.reasons(turn), stage.due()) == (["signal"], None)
    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING


def test_who_waits_again_for_the_same_key_waits_once() -> None:
    stage = Stage()
    owner = stage.running()
    owner.step(waits=(c.WaitCondition("x.go", 1),))
    owner.step(waits=(c.WaitCondition("x.go"),))

    [condition] = stage.state(owner.turn).conditions
    assert condition.deadline_ms == 0
    for key in ("pause", "y.go"):
        with stage.refuses(InvalidRequest):
            owner.step(waits=(c.WaitCondition(key),))
    with stage.refuses(NotFound):
        owner.step(signals=("x.other",))


def test_many_keys_are_waited_for_in_one_commit() -> None:
    stage = Stage()
    owner = stage.running()
    wanted = tuple(f"x.{n}" for n in range(20))
    for key in wanted:
        stage.signal(owner.turn, key, key)

    owner.step(waits=tuple(c.WaitCondition(key) for key in wanted))
    owner.step(signals=wanted)

    assert set(stage.signals().values()) == {"APPLIED"}


# ---- after the end ----


CONTROLS: list[tuple[str, Callable[[Stage, str], Any]]] = [
    ("steer", lambda stage, turn: stage.steer(turn, "late")),
    ("inject", lambda stage, turn: stage.inject(turn, "late")),
    ("withdraw", lambda stage, turn: stage.withdraw(turn, "early", "late")),
    ("cancel", lambda stage, turn: stage.cancel(turn, "late")),
    ("pause", lambda stage, turn: stage.pause(turn, "late")),
    ("resume", lambda stage, turn: stage.resume(turn, "late")),
    ("signal", lambda stage, turn: stage.signal(turn, "x.go", "late")),
]


@in_every_ended_state
@pytest.mark.parametrize(("name", "ask"), CONTROLS, ids=[name for name, _ in CONTROLS])
@pytest.mark.spec("CT-15", "CT-24")
def test_a_control_of_a_turn_that_has_ended_is_refused_and_changes_nothing(
    state: Callable[[Stage], str], name: str, ask: Callable[[Stage, str], Any]
) -> None:
    stage = Stage()
    turn = state(stage)

    with stage.refuses(Terminal) as refused:
        ask(stage, turn)

    assert (refused.value.turn_id, refused.value.status) == (turn, stage.status(turn))
    assert refused.value.code == "TERMINAL"


@pytest.mark.parametrize(("name", "ask"), CONTROLS, ids=[name for name, _ in CONTROLS])
@pytest.mark.spec("CT-05", "CT-24")
def test_a_control_that_was_admitted_before_the_end_is_settled_with_it_and_keeps_its_receipt(
    name: str, ask: Callable[[Stage, str], Any]
) -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    stage.inject(turn, "early")
    if name == "resume":
        stage.pause(turn, "p")
        owner.end(RunEndKind.PAUSED)
    command: list[Any] = []
    do = stage.do
    stage.do = lambda c, **options: command.append(c) or do(c, **options)  # type: ignore[method-assign]
    receipt = ask(stage, turn)
    stage.do = do  # type: ignore[method-assign]
    if name == "resume":
        owner = stage.claim("b")
    if name == "pause":
        owner.end(RunEndKind.PAUSED)
        stage.resume(turn, "u")
        owner = stage.claim("b")
    owner.answers(finish_reason="exceed_max_iters")

    assert stage.status(turn) == "COMPLETED"
    assert "ACCEPTED" not in stage.signals().values()
    assert stage.do(command[0]) == receipt
    assert stage.change is None


def test_controls_need_a_turn_of_the_thread_they_name() -> None:
    stage = Stage()
    stage.do(c.CreateThread(session=stage.session, thread_id="research", binding=stage.binding))
    turn = stage.submit()

    for ask in (stage.steer, stage.cancel, stage.pause, stage.resume, stage.signal):
        with stage.refuses(NotFound) as refused:
            ask(turn, request_id="c", thread="research", **({"revision": 1} if ask == stage.resume else {}))
        assert refused.value.kind == "turn"
