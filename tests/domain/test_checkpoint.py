"""Restore, fork and repair: which positions there are, what is refused, and what one commit makes true."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.checkpoint import position_of, stream_position
from agentscope_durable.contracts.errors import (
    Closed,
    DefinitionConflict,
    HasHistory,
    InvalidRequest,
    InvalidTransition,
    LimitExceeded,
    NotFound,
    PositionConflict,
    RequestConflict,
    RevisionConflict,
    Unfinished,
)
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.records import Binding, CheckpointRecord
from agentscope_durable.contracts.status import ExecutionState, ReplayRule, SettledBy
from agentscope_durable.domain import resources
from tests.domain.stage import BINDING, FOR_GOOD, MAIN, SESSION, Owner, Stage

FORMER = b'[0,[],[["b"]],true]'
ELSEWHERE = SessionKey("app", "elsewhere")
SOURCE = ThreadKey(SESSION, MAIN)


def native(head: int, *, journal: bytes = FORMER, binding: Binding = BINDING) -> c.NativeState:
    return c.NativeState(binding=binding, head=head, journal=journal, writer="2.0.8")


def settled(stage: Stage, request_id: str = "r1") -> int:
    """A Turn that ends with a checkpoint; its stream position."""
    owner = stage.running(request_id=request_id)
    at = owner.checkpoint().position
    owner.answers(message=f"{owner.turn}.r1")
    return at


def restore(stage: Stage, at: int, request_id: str = "restore", *, expected: int | None = None, **fields: Any) -> Any:
    thread = stage.thread()
    return stage.do(
        c.RestoreThread(
            session=stage.session,
            thread_id=MAIN,
            request_id=request_id,
            at=at,
            expected_at=thread.settled_at if expected is None else expected,
            **{"native": native(thread.position), **fields},
        )
    )


def fork(
    stage: Stage,
    at: int,
    thread: str = "branch",
    request_id: str = "fork",
    *,
    source: ThreadKey = SOURCE,
    **fields: Any,
) -> Any:
    return stage.do(
        c.ForkThread(
            session=stage.session,
            thread_id=thread,
            request_id=request_id,
            source=source,
            at=at,
            **{"native": native(0), **fields},
        )
    )


def checkpoints(stage: Stage, thread: str = MAIN) -> dict[int, CheckpointRecord]:
    prefix = keys.checkpoints(thread)
    found = [key for key in stage.world.dump.records if key.startswith(prefix)]
    return {int(key.removeprefix(prefix)): stage.get(key, CheckpointRecord) for key in sorted(found)}


def parked(stage: Stage, reason: str = "DigestMismatch: a row was altered") -> Owner:
    """A Turn that waits for an operator."""
    owner = stage.running(request_id="damaged")
    owner.end(c.RunEndKind.SUSPENDED, operator=reason)
    return owner


def repair(stage: Stage, turn: str, at: int, request_id: str = "repair", **fields: Any) -> Any:
    thread = stage.thread()
    given = native(thread.position) if at else native(thread.position, journal=b"")
    return stage.do(
        c.RepairThread(
            session=stage.session,
            thread_id=MAIN,
            request_id=request_id,
            turn_id=turn,
            at=at,
            **{"expected_at": thread.settled_at, "native": given, **fields},
        )
    )


# ---- which positions there are ----


@pytest.mark.spec("CK-06")
def test_each_turn_that_ends_leaves_one_settled_position_and_nothing_in_between_is_one() -> None:
    stage = Stage()
    owner = stage.running()
    owner.checkpoint()
    owner.checkpoint()
    assert checkpoints(stage) == {}, "execution has not ended"
    last = owner.checkpoint().position
    owner.answers()

    record = checkpoints(stage)[last]
    assert list(checkpoints(stage)) == [last] == [stage.thread().settled_at]
    assert (record.settled, record.turn_id, record.writer) == (SettledBy.COMPLETED, owner.turn, "2.0.8")
    assert (record.base_at, record.digest, record.source) == (last, stage.thread().digest, None)
    with stage.refuses(NotFound):
        restore(stage, last - 1)


def test_a_cancelled_and_a_failed_turn_leave_the_state_they_were_settled_with() -> None:
    stage = Stage()
    for request_id, ends in (("r1", SettledBy.CANCELLED), ("r2", SettledBy.FAILED)):
        owner = stage.running(request_id=request_id)
        if ends is SettledBy.CANCELLED:
            stage.cancel(owner.turn, f"cancel-{request_id}")
            owner.end(c.RunEndKind.CANCELLED)
        else:
            owner.fails(FOR_GOOD)
            owner = stage.claim()
        owner.settle(journal=b"[]", checkpoint=True, base=True, writer="2.0.8")
        assert checkpoints(stage)[stage.thread().settled_at].settled is ends


def test_a_turn_that_changed_no_native_state_leaves_no_position_of_its_own() -> None:
    stage = Stage()
    at = settled(stage)
    owner = stage.running(request_id="r2")
    owner.answers(message="m2")
    stage.submit("r3")
    stage.cancel(stage.submit("r4"), "cancel")

    assert list(checkpoints(stage)) == [at]


@pytest.mark.spec("CK-12")
def test_a_position_is_a_text_that_only_its_own_thread_takes() -> None:
    mine, other = ThreadKey(SESSION, MAIN), ThreadKey(SESSION, "other")
    position = position_of(mine, 7)

    assert stream_position(mine, position) == 7
    with pytest.raises(InvalidRequest, match="another thread"):
        stream_position(other, position)
    for wrong in ("", "7", 7, None, position + "x", position[:-1], position.replace("p1", "p2"), f"{position[:-1]}-7"):
        with pytest.raises(InvalidRequest):
            stream_position(mine, wrong)


# ---- restore ----


@pytest.mark.spec("CK-11", "EV-26", "BE-25")
def test_a_restore_is_one_commit_that_appends_a_copy_and_says_so() -> None:
    stage = Stage()
    first, second = settled(stage, "r1"), settled(stage, "r2")
    before, kept = stage.thread(), checkpoints(stage)
    view = restore(stage, first)

    thread = stage.thread()
    at = before.position + 1
    assert (thread.position, thread.base_at, thread.checkpoint_at, thread.settled_at) == (at,) * 4
    assert thread.fence == before.fence + 1
    assert checkpoints(stage) == {**kept, at: checkpoints(stage)[at]}
    assert checkpoints(stage)[at].digest == thread.digest
    assert (view.position, view.settled, view.turn_id) == (
        position_of(SOURCE, at),
        SettledBy.RESTORED,
        None,
    )
    assert view.source.position == position_of(SOURCE, first)
    [told] = [event for event in stage.events() if event.type == "thread.restored"]
    assert told.data == {"position": view.position, "restoredFrom": view.source.position}
    assert (told.thread_id, told.turn_id, stage.events()[-1]) == (MAIN, None, told)

    # Every position is still one to come back to, those before the restore and the copy itself.
    for former in (second, first, at):
        assert restore(stage, former, f"again-{former}").source.position.endswith(f"-{former}")


@pytest.mark.spec("CK-05")
def test_a_thread_with_an_unfinished_turn_is_not_restored() -> None:
    stage = Stage()
    at = settled(stage)
    turn = stage.submit("r2")
    for thing in ("queued", "running"):
        with stage.refuses(Unfinished):
            restore(stage, at, thing)
        stage.claim()
    stage.cancel(turn)


@pytest.mark.spec("CK-05", "CK-14")
def test_a_thread_that_stands_elsewhere_is_not_restored() -> None:
    stage = Stage()
    first, second = settled(stage, "r1"), settled(stage, "r2")
    with stage.refuses(PositionConflict) as refused:
        restore(stage, first, expected=first)
    key = ThreadKey(SESSION, MAIN)
    assert (refused.value.expected, refused.value.actual) == (position_of(key, first), position_of(key, second))

    # Two who saw the same position: one wins.
    command = c.RestoreThread(
        session=SESSION, thread_id=MAIN, request_id="a", at=first, expected_at=second, native=native(6)
    )
    assert stage.thread().position == 6
    stage.do(command)
    with stage.refuses(PositionConflict):
        stage.do(replace(command, request_id="b"))


@pytest.mark.spec("CK-14")
def test_a_copy_that_was_made_before_another_commit_is_not_installed() -> None:
    stage = Stage()
    at = settled(stage)
    head = stage.thread().position
    stage.running(request_id="r2").answers(message="m2")

    with stage.refuses(RevisionConflict):
        restore(stage, at, native=native(head))


@pytest.mark.spec("AD-17", "AD-28")
def test_a_restore_is_done_once_and_its_id_covers_every_argument() -> None:
    stage = Stage()
    first, second = settled(stage, "r1"), settled(stage, "r2")
    command = c.RestoreThread(
        session=SESSION, thread_id=MAIN, request_id="restore", at=first, expected_at=second, native=native(6)
    )
    view = stage.do(command)
    settled(stage, "r3")

    for again in (command, replace(command, native=None), replace(command, native=native(99))):
        assert stage.do(again) == view
        assert stage.change is None
    for other, field in (({"at": second}, "position"), ({"expected_at": first}, "expected_position")):
        with stage.refuses(RequestConflict) as refused:
            stage.do(replace(command, **other))
        assert refused.value.field == field
    with stage.refuses(RequestConflict):
        fork(stage, first, request_id="restore")
    with stage.refuses(RequestConflict):
        restore(stage, first, "r1")
    assert len(stage.events("thread.restored")) == 1


def test_asking_whether_it_may_be_done_changes_nothing() -> None:
    stage = Stage()
    at = settled(stage)

    assert restore(stage, at, native=None) is None
    assert stage.change is None
    assert fork(stage, at, native=None) is None
    assert stage.change is None
    with stage.refuses(NotFound):
        restore(stage, at + 1, native=None)


def test_a_closed_thread_is_not_restored() -> None:
    stage = Stage()
    at = settled(stage)
    stage.do(c.CloseSession(session=SESSION))

    with stage.refuses(Closed):
        restore(stage, at)
    with stage.refuses(Closed):
        fork(stage, at)


def test_a_restore_without_native_state_is_refused() -> None:
    stage = Stage()
    at = settled(stage)

    with stage.refuses(InvalidRequest):
        restore(stage, at, native=native(stage.thread().position, journal=b""))


# ---- fork ----


@pytest.mark.spec("CK-08", "CK-16", "EV-26")
def test_a_fork_makes_its_target_in_the_commit_that_tells_of_it() -> None:
    stage = Stage()
    at = settled(stage)
    told = len(stage.events())
    view = fork(stage, at)

    created, forked = stage.events()[told:]
    assert (created.type, created.thread_id) == ("thread.created", "branch")
    assert (forked.type, forked.thread_id) == ("thread.forked", "branch")
    assert forked.data["source"]["position"] == position_of(SOURCE, at)
    assert stage.thread("branch").binding == stage.thread().binding == BINDING
    assert (view.thread_id, view.settled) == ("branch", SettledBy.FORKED)
    assert list(checkpoints(stage, "branch")) == [1]
    # It goes on by itself, and so does its source.
    assert stage.running(request_id="r2", thread="branch").claimed.base_at == 1
    assert stage.running(request_id="r3").turn


@pytest.mark.spec("CK-16")
def test_a_fork_into_a_thread_that_never_had_a_turn_takes_it_as_it_is() -> None:
    stage = Stage()
    at = settled(stage)
    stage.do(c.CreateThread(session=SESSION, thread_id="empty", binding=BINDING))
    told = len(stage.events())
    fork(stage, at, "empty")

    assert [event.type for event in stage.events()[told:]] == ["thread.forked"]


@pytest.mark.spec("CK-16", "CK-10")
def test_a_fork_overwrites_nothing() -> None:
    stage = Stage()
    at = settled(stage)
    stage.do(c.CreateThread(session=SESSION, thread_id="other", binding=Binding("other", "v1", "state-1")))
    stage.do(c.CreateThread(session=SESSION, thread_id="v2", binding=replace(BINDING, definition_version="v2")))
    stage.do(c.CreateThread(session=SESSION, thread_id="state", binding=replace(BINDING, state_version="state-2")))
    stage.do(c.CreateThread(session=SESSION, thread_id="cancelled", binding=BINDING))
    stage.cancel(stage.submit("r2", thread="cancelled"), thread="cancelled")
    stage.do(c.CreateThread(session=SESSION, thread_id="busy", binding=BINDING))
    stage.submit("r3", thread="busy")
    stage.do(c.CreateThread(session=SESSION, thread_id="closed", binding=BINDING))
    stage.do(c.CloseThread(session=SESSION, thread_id="closed"))
    fork(stage, at, "branch", "earlier")

    refusals = {
        MAIN: InvalidRequest,
        "other": DefinitionConflict,
        "v2": DefinitionConflict,
        "state": DefinitionConflict,
        "cancelled": HasHistory,
        "branch": HasHistory,
        "busy": Unfinished,
        "closed": Closed,
    }
    for thread, error in refusals.items():
        with stage.refuses(error):
            fork(stage, at, thread, f"fork-{thread}")


@pytest.mark.spec("CK-08")
def test_a_fork_stays_in_its_namespace() -> None:
    stage = Stage()
    with stage.refuses(InvalidRequest) as refused:
        fork(stage, 2, source=ThreadKey(SessionKey("other", "s"), MAIN))
    assert refused.value.path == "target_thread_key"


@pytest.mark.spec("CK-09")
def test_the_session_of_a_fork_must_exist() -> None:
    stage = Stage(create=False)
    with stage.refuses(NotFound) as refused:
        fork(stage, 2, source=ThreadKey(ELSEWHERE, MAIN))
    assert refused.value.kind == "session" and "create_session" in str(refused.value)


@pytest.mark.spec("AD-17", "AD-28")
def test_a_fork_is_done_once_and_its_id_covers_source_position_and_target() -> None:
    stage = Stage()
    first, second = settled(stage, "r1"), settled(stage, "r2")
    view = fork(stage, first)
    stage.running(request_id="r3", thread="branch")

    assert fork(stage, first) == view
    assert fork(stage, first, native=None) == view
    assert stage.change is None
    with stage.refuses(RequestConflict) as refused:
        fork(stage, first, "another")
    assert refused.value.field == "thread"
    assert keys.thread("another") not in stage.world.dump.records
    with stage.refuses(RequestConflict) as refused:
        fork(stage, second)
    assert refused.value.field == "position"
    with stage.refuses(RequestConflict) as refused:
        fork(stage, first, source=ThreadKey(ELSEWHERE, MAIN))
    assert refused.value.field == "source"


def test_a_fork_counts_among_the_threads_of_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentscope_durable.domain.checkpoint.THREADS_MAX", 2)
    assert resources.THREADS_MAX > 2
    stage = Stage()
    at = settled(stage)
    fork(stage, at, "one", "f1")
    with stage.refuses(LimitExceeded):
        fork(stage, at, "two", "f2")
    assert stage.world.dump.head is not None and stage.world.dump.head.thread_count == 2


# ---- repair ----


@pytest.mark.case("C82")
def test_a_repair_ends_the_parked_turn_and_lets_the_next_one_go_on_from_a_former_position() -> None:
    stage = Stage()
    first, second = settled(stage, "r1"), settled(stage, "r2")
    damaged = parked(stage)
    waiting = stage.submit("next")
    at = stage.thread().position + 1
    receipt = repair(stage, damaged.turn, first)

    view = stage.view(damaged.turn)
    assert (view.status, view.error.kind, view.error.message) == (
        "FAILED",
        "DigestMismatch",
        "DigestMismatch: a row was altered",
    )
    assert (receipt.status, receipt.position) == ("FAILED", position_of(SOURCE, at))
    assert list(checkpoints(stage)) == [first, second, at]
    assert [event.type for event in stage.events()[-2:]] == ["turn.status", "thread.restored"]
    following = stage.claim()
    assert (following.turn, following.claimed.base_at, following.claimed.checkpoint_at) == (waiting, at, at)


@pytest.mark.case("C82")
def test_where_no_position_is_good_a_repair_begins_anew() -> None:
    stage = Stage()
    owner = stage.running(request_id="damaged")
    owner.checkpoint(end=c.RunEnd(kind=c.RunEndKind.SUSPENDED, operator="CorruptRecord: the first one"))
    receipt = repair(stage, owner.turn, 0)

    assert (receipt.position, stage.status(owner.turn)) == (None, "FAILED")
    assert stage.events("thread.restored")[0].data == {}
    following = stage.running(request_id="next")
    assert (following.claimed.base_at, following.claimed.checkpoint_at, following.claimed.digest) == (0, 0, "")
    following.checkpoint()
    following.answers()
    assert len(checkpoints(stage)) == 1


@pytest.mark.spec("SE-08")
def test_a_repair_never_ends_a_turn_over_an_effect_that_nobody_knows() -> None:
    stage = Stage()
    at = settled(stage)
    owner = stage.running(request_id="damaged")
    owner.starts_local("c1", ReplayRule.NEVER)
    owner.end(c.RunEndKind.SUSPENDED, operator="DigestMismatch: a row")
    with stage.refuses(InvalidTransition) as refused:
        repair(stage, owner.turn, at)
    assert refused.value.status == "waiting for the outcome of a tool"

    stage.reconcile(owner.turn, "c1", ExecutionState.COMPLETED)
    repair(stage, owner.turn, at)
    assert stage.status(owner.turn) == "FAILED"
    assert stage.execution(owner.turn, "c1").applied_ms == 0, "the restored context does not contain it"


def test_a_repair_stops_what_has_not_started_and_closes_questions() -> None:
    stage = Stage()
    at = settled(stage)
    owner = stage.running(request_id="damaged")
    owner.calls_hands("c1")
    owner.asks("c2", "i1")
    owner.starts_local("c3", ReplayRule.SAFE)
    owner.end(c.RunEndKind.SUSPENDED, operator="its host was lost 6 times")
    stage.steer(owner.turn)
    repair(stage, owner.turn, at)

    assert [stage.execution(owner.turn, call).state.value for call in ("c1", "c2", "c3")] == ["CANCELLED"] * 3
    assert stage.interaction(owner.turn, "i1").state.value == "CLOSED"
    assert (stage.signals()["steer"], stage.view(owner.turn).error.kind) == ("EXPIRED", "Parked")


def test_a_cancelled_turn_that_cannot_be_settled_is_ended_as_cancelled() -> None:
    stage = Stage()
    at = settled(stage)
    owner = parked(stage)
    stage.cancel(owner.turn)
    with stage.refuses(InvalidTransition):
        repair(stage, owner.turn, at)  # a host may still settle it
    stage.claim().postpone(FOR_GOOD)
    receipt = repair(stage, owner.turn, at)

    assert (receipt.status, stage.status(owner.turn)) == ("CANCELLED", "CANCELLED")


def test_only_a_turn_that_cannot_go_on_by_itself_is_repaired() -> None:
    stage = Stage()
    at = settled(stage)
    queued = stage.submit("r2")
    with stage.refuses(InvalidTransition):
        repair(stage, queued, at)
    owner = stage.claim()
    with stage.refuses(InvalidTransition):
        repair(stage, owner.turn, at)
    owner.answers()
    parked_turn = parked(stage).turn
    with stage.refuses(PositionConflict):
        repair(stage, parked_turn, at, expected_at=0)
    with stage.refuses(NotFound):
        repair(stage, parked_turn, at + 1)
    stage.pause(parked_turn)
    first = repair(stage, parked_turn, at)
    assert repair(stage, parked_turn, at, expected_at=at) == first
    assert stage.change is None
    with stage.refuses(RequestConflict):
        repair(stage, parked_turn, 0, expected_at=at)
