"""A request is taken once, and Turns run in the order in which they were taken."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import Closed, NotFound, RequestConflict
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import RequestRecord, TurnRef
from agentscope_durable.contracts.views import CommandReceipt
from tests.domain.stage import BINDING, SESSION, Stage


def thread(stage: Stage, name: str) -> None:
    stage.do(c.CreateThread(session=stage.session, thread_id=name, binding=BINDING))


# ---- a request is taken once ----


@pytest.mark.spec("AD-02")
def test_a_repeated_submit_returns_the_turn_it_already_made() -> None:
    stage = Stage()
    command = stage.submit_command("r1", "restart the exporter")

    first = stage.do(command)
    again = stage.do(command)

    assert again == first
    assert stage.change is None
    assert stage.messages() == ["restart the exporter"]


@pytest.mark.spec("AD-03")
def test_another_input_under_the_same_id_is_a_conflict_that_names_it() -> None:
    stage = Stage()
    turn = stage.submit("r1", "a")

    with stage.refuses(RequestConflict) as refused:
        stage.submit("r1", "b")

    assert (refused.value.request_id, refused.value.field) == ("r1", "input")
    assert stage.messages() == ["a"]
    assert stage.view(turn).request_id == "r1"


@pytest.mark.spec("AD-04", "AD-05")
def test_an_id_belongs_to_one_operation_on_one_thread() -> None:
    stage = Stage()
    thread(stage, "research")
    turn = stage.submit("r1")

    with stage.refuses(RequestConflict) as elsewhere:
        stage.submit("r1", thread="research")
    with stage.refuses(RequestConflict) as otherwise:
        stage.steer(turn, "r1")

    assert (elsewhere.value.field, otherwise.value.field) == ("thread", "operation")
    assert stage.submit("r2", thread="research") != turn


@pytest.mark.case("C78")
def test_an_id_that_a_turn_was_submitted_with_is_no_id_for_a_control_of_it() -> None:
    stage = Stage()
    turn = stage.submit("r1")
    stage.claim("a").checkpoint()

    for control in (stage.steer, stage.inject, stage.cancel, stage.pause, stage.signal):
        with stage.refuses(RequestConflict) as refused:
            control(turn, request_id="r1")
        assert refused.value.field == "operation"

    stage.dies("a")
    owner = stage.claim("b")
    assert (owner.turn, owner.claimed.cancel, owner.claimed.pause) == (turn, False, False)
    owner.answers()
    assert stage.status(turn) == "COMPLETED"


@pytest.mark.spec("AD-06")
def test_two_sessions_know_nothing_of_each_others_ids() -> None:
    one = Stage()
    other = Stage(session=SessionKey("app", "another"), beside=one)

    one.submit("r1", "a")
    other.submit("r1", "b")

    assert (one.messages(), other.messages()) == (["a"], ["b"])


@pytest.mark.spec("AD-08")
def test_a_repeat_after_the_end_returns_the_turn_that_ended_and_runs_nothing() -> None:
    stage = Stage()
    owner = stage.running()
    owner.answers()

    assert stage.submit("r1") == owner.turn
    assert stage.status(owner.turn) == "COMPLETED"
    assert stage.due() is None
    with stage.refuses(RequestConflict):
        stage.submit("r1", "something else")


@pytest.mark.spec("AD-28")
def test_the_identity_of_a_request_covers_its_target_and_every_argument() -> None:
    stage = Stage()
    owner = stage.running()
    turn, other = owner.turn, stage.submit("r2")
    owner.asks("c1", "i1")
    owner.asks("c2", "i2")
    owner.suspends()
    stage.steer(turn, "s1")
    stage.steer(turn, "s2")
    stage.signal(turn, "x.go", "x1")
    stage.withdraw(turn, "s1", "w1")
    stage.respond(turn, "i1", True, "a1")
    stage.pause(turn, "p1")
    revision = stage.state(turn).revision
    stage.resume(turn, "u1", revision=revision)
    stage.cancel(turn, "k1")

    conflicts: list[tuple[Any, str]] = [
        (lambda: stage.steer(other, "s1"), "turn"),
        (lambda: stage.steer(turn, "s1", "right"), "input"),
        (lambda: stage.inject(turn, "s1"), "operation"),
        (lambda: stage.signal(turn, "x.stop", "x1"), "key"),
        (lambda: stage.signal(other, "x.go", "x1"), "turn"),
        (lambda: stage.withdraw(turn, "s2", "w1"), "target"),
        (lambda: stage.respond(turn, "i2", True, "a1"), "interaction"),
        (lambda: stage.respond(turn, "i1", False, "a1"), "response"),
        (lambda: stage.pause(other, "p1"), "turn"),
        (lambda: stage.resume(turn, "u1", revision=revision + 1), "expected_revision"),
        (lambda: stage.cancel(other, "k1"), "turn"),
    ]
    for ask, field in conflicts:
        with stage.refuses(RequestConflict) as refused:
            ask()
        assert refused.value.field == field
    assert (stage.status(other), stage.view(other).revision) == ("QUEUED", 1)


@pytest.mark.spec("AD-10", "AD-11")
def test_every_control_returns_a_receipt_and_a_repeat_returns_the_same_one() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.asks()
    owner.suspends()

    controls: list[tuple[str, Any]] = [
        ("steer", lambda: stage.steer(turn, "steer")),
        ("inject", lambda: stage.inject(turn, "inject")),
        ("withdraw", lambda: stage.withdraw(turn, "inject", "withdraw")),
        ("respond", lambda: stage.respond(turn, "i1", True, "respond")),
        ("signal", lambda: stage.signal(turn, "x.go", "signal")),
        ("pause", lambda: stage.pause(turn, "pause")),
        ("resume", lambda: stage.resume(turn, "resume", revision=stage.state(turn).paused_revision)),
        ("cancel", lambda: stage.cancel(turn, "cancel")),
    ]
    receipts: dict[str, Any] = {}
    for operation, ask in controls:
        receipt = receipts[operation] = ask()
        assert isinstance(receipt, CommandReceipt)
        assert (receipt.request_id, receipt.operation, receipt.turn_id) == (operation, operation, turn)
        assert (receipt.accepted_at_ms, receipt.revision) == (stage.clock(), stage.state(turn).revision)

    stage.pass_time(60_000)
    events = len(stage.events())
    stored = stage.get(keys.request("resume"), RequestRecord)
    stage.do(
        c.Resume(
            session=SESSION,
            thread_id="main",
            turn_id=turn,
            request_id="resume",
            expected_revision=int(stored.arguments["expected_revision"]),
        )
    )
    for operation, ask in controls:
        if operation != "resume":
            assert ask() == receipts[operation]
            assert stage.change is None
    assert len(stage.events()) == events


# ---- admission ----


@pytest.mark.spec("AD-12", "AD-13")
def test_each_of_the_four_inputs_is_a_public_message_of_the_commit_that_admits_it() -> None:
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.asks()
    owner.suspends()

    asked: list[tuple[str, str, Any]] = [
        ("r2", "submit", lambda: stage.submit("r2", "more work")),
        ("s", "steer", lambda: stage.steer(turn, "s", "left")),
        ("n", "inject", lambda: stage.inject(turn, "n", "note")),
        ("a", "respond", lambda: stage.respond(turn, "i1", True, "a")),
    ]
    for request_id, kind, ask in asked:
        before = len(stage.events())
        ask()
        [message] = [e.data for e in stage.events()[before:] if e.type == "message.completed"]
        assert (message["role"], message["requestId"], message["inputKind"]) == ("user", request_id, kind)
        assert message.get("interactionId") == ("i1" if kind == "respond" else None)
        # One change holds the message and the request: there is no moment with only one of them.
        assert stage.change is not None and keys.request(request_id) in dict(stage.change.puts)
    assert stage.messages() == ["hi", "more work", "left", "note", "True"]


@pytest.mark.spec("AD-14")
def test_the_place_of_a_turn_is_given_with_its_admission_and_never_changes() -> None:
    stage = Stage()
    turns = [stage.submit(f"r{n}") for n in range(5)]
    stage.cancel(turns[2])
    owner = stage.claim()
    owner.answers()

    order = stage.world.dump.all(keys.orders("main"), TurnRef)
    assert [ref.turn_id for ref in order] == turns
    assert [stage.view(turn).ordinal for turn in turns] == [1, 2, 3, 4, 5]


@pytest.mark.spec("AD-15")
def test_a_closed_thread_or_session_takes_no_new_turn() -> None:
    stage = Stage()
    thread(stage, "research")
    kept = stage.submit_command("r0", thread="research")
    stage.do(kept)
    stage.claim(thread="research").answers()
    stage.do(c.CloseThread(session=stage.session, thread_id="research"))

    with stage.refuses(Closed) as closed:
        stage.submit("r1", thread="research")
    assert (closed.value.kind, closed.value.identity, closed.value.code) == ("thread", "research", "CLOSED")

    stage.do(c.CloseSession(session=stage.session))
    with stage.refuses(Closed) as closed:
        stage.submit("r1")
    assert closed.value.kind == "session"
    assert stage.do(kept), "what was taken before is still recognised"


def test_nothing_is_submitted_to_what_does_not_exist() -> None:
    stage = Stage()

    with stage.refuses(NotFound) as nowhere:
        stage.submit(thread="nowhere")
    assert nowhere.value.kind == "thread"
    with stage.refuses(NotFound) as nobody:
        stage.do(replace(stage.submit_command(), session=SessionKey("app", "nobody's")))
    assert nobody.value.kind == "session"


# ---- the queue ----


@pytest.mark.spec("Q-01", "Q-07")
def test_turns_of_a_thread_start_in_the_order_of_their_admission() -> None:
    stage = Stage()
    turns = [stage.submit(f"r{n}") for n in range(5)]

    for place, turn in enumerate(turns):
        owner = stage.claim()
        assert owner.turn == turn
        assert {stage.status(later) for later in turns[place + 1 :]} <= {"QUEUED"}
        assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING
        owner.answers()
    assert stage.due() is None


@pytest.mark.spec("Q-02")
def test_a_head_that_waits_blocks_the_turns_behind_it() -> None:
    stage = Stage()
    owner = stage.running()
    behind = stage.submit("r2")
    owner.asks()
    owner.suspends()

    assert (stage.status(owner.turn), stage.status(behind)) == ("WAITING", "QUEUED")
    stage.pass_time(10**9)
    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING


@pytest.mark.spec("Q-03")
def test_a_head_that_is_paused_blocks_them_too() -> None:
    stage = Stage()
    head, behind = stage.submit("r1"), stage.submit("r2")
    stage.pause(head)

    assert stage.claim().claimed.purpose is c.ClaimPurpose.NOTHING
    stage.resume(head)
    assert stage.status(behind) == "QUEUED"
    stage.claim().answers()
    assert stage.claim().turn == behind


@pytest.mark.spec("Q-04")
def test_so_does_a_head_in_backoff() -> None:
    stage = Stage()
    owner = stage.running()
    behind = stage.submit("r2")
    owner.fails()

    assert stage.claim("b").claimed.purpose is c.ClaimPurpose.NOTHING
    stage.pass_time(1_000)
    assert stage.claim("b").turn == owner.turn != behind


@pytest.mark.spec("Q-06")
def test_another_thread_goes_on_while_one_head_is_blocked() -> None:
    stage = Stage()
    thread(stage, "research")
    head = stage.submit("r1")
    stage.pause(head)

    independent = stage.submit("r2", thread="research")
    stage.claim(thread="research").answers()

    assert (stage.status(head), stage.status(independent)) == ("PAUSED", "COMPLETED")


@pytest.mark.spec("Q-08")
def test_a_queued_turn_that_is_cancelled_is_skipped() -> None:
    stage = Stage()
    first, second, third = (stage.submit(f"r{n}") for n in range(3))
    stage.cancel(second)

    assert stage.status(second) == "CANCELLED"
    owner = stage.claim()
    assert owner.turn == first
    owner.answers()
    assert stage.claim().turn == third


def test_a_queued_turn_is_paused_in_its_place() -> None:
    stage = Stage()
    first, second, third = (stage.submit(f"r{n}") for n in range(3))
    stage.pause(second)
    stage.claim().answers()

    assert stage.claim().claimed.purpose is c.ClaimPurpose.NOTHING
    stage.resume(second)
    stage.claim().answers()
    assert [stage.status(turn) for turn in (first, second, third)] == ["COMPLETED", "COMPLETED", "QUEUED"]


def test_a_submit_with_its_seed_decides_the_same_ids_again() -> None:
    one, other = Stage(), Stage()
    seed = bytes(range(16))

    first = one.do(one.submit_command(), seed=seed)
    second = other.do(other.submit_command(), seed=seed)

    assert first == second
