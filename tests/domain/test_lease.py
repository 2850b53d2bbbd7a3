"""One host owns a Thread, under a number that only rises; whoever takes over closes what the lost one left open."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import HEAD_CLAIM_BYTES
from agentscope_durable.contracts.commands import ClaimPurpose, RunEndKind
from agentscope_durable.contracts.errors import Fenced, NotFound
from agentscope_durable.contracts.log import ModelFact, StepFact, Usage
from agentscope_durable.contracts.records import ACTIVE_THREADS_MAX, Binding, RunRecord, encode
from agentscope_durable.contracts.status import (
    ExecutionState,
    ModelStatus,
    ReplayRule,
    RunStatus,
    StepPhase,
    StepStatus,
)
from agentscope_durable.domain.run_view import Told, model_call_view
from tests.domain.stage import LEASE_MS, Owner, Stage, external, local, text

S = ExecutionState
NOTHING = ClaimPurpose.NOTHING


# ---- claim ----


def test_a_claim_takes_the_current_turn_under_a_new_fence_and_begins_a_run() -> None:
    stage = Stage()
    turn = stage.submit()
    owner = stage.claim("a")

    assert owner.claimed == c.Claimed(
        purpose=ClaimPurpose.RUN,
        turn_id=turn,
        fence=1,
        run_id=f"{turn}.1",
        run_number=1,
        position=1,
        now_ms=stage.clock(),
        binding=stage.binding,
        request_id=stage.view(turn).request_id,
        input_seq=3,
    )
    assert (stage.status(turn), stage.view(turn).runs) == ("RUNNING", 1)
    run = stage.run(turn)
    assert (run.owner, run.fence, run.status, run.first_at) == ("a", 1, RunStatus.RUNNING, 1)
    assert stage.ready(keys.READY_LEASE) is not None and stage.ready(keys.READY_TURN) is None


@pytest.mark.spec("RT-12")
def test_a_host_takes_only_what_it_serves() -> None:
    stage = Stage()
    turn = stage.submit()
    stage.alive("a")
    newer = replace(stage.binding, definition_version="v2")

    for served in ((), (newer.ready_class,), (Binding("assistant", "v1", "state-2").ready_class,)):
        command = replace(stage.claim_command(), served=served)
        assert stage.do(command).purpose is NOTHING
        assert stage.change is None
    both = replace(stage.claim_command(), served=(newer.ready_class, stage.binding.ready_class))
    assert stage.do(both).turn_id == turn


def test_nobody_takes_a_thread_from_a_living_host_nor_twice() -> None:
    stage = Stage()
    stage.running("a")

    for owner in ("a", "b"):
        assert stage.claim(owner).claimed == c.Claimed(purpose=NOTHING)
    with stage.refuses(NotFound):
        stage.claim(thread="nowhere")


def test_a_host_that_has_dropped_its_run_takes_it_over_as_from_a_lost_one() -> None:
    stage = Stage()
    turn = stage.running("a").claimed.turn_id
    dropped = replace(stage.claim_command("a"), dropped=1)

    assert stage.do(replace(dropped, dropped=2)).purpose is NOTHING, "it stands under another fence"
    taken = stage.do(dropped)
    assert (taken.purpose, taken.fence, taken.lost_run) == (ClaimPurpose.RUN, 2, f"{turn}.1")
    assert stage.run(turn, 1).status is RunStatus.LOST
    # Its answer was lost: it finds what it has taken, and takes nothing more.
    again = stage.do(replace(dropped, again=True))
    assert (again.fence, again.run_id) == (2, taken.run_id)
    assert stage.do(dropped).purpose is NOTHING


def test_so_many_threads_of_a_session_run_at_once_and_the_next_waits_for_room() -> None:
    stage = Stage()
    for number in range(ACTIVE_THREADS_MAX + 1):
        stage.do(c.CreateThread(session=stage.session, thread_id=f"t{number}", binding=stage.binding))
        stage.submit(f"r{number}", thread=f"t{number}")
    owners = [stage.claim(thread=f"t{number}") for number in range(ACTIVE_THREADS_MAX)]

    last = f"t{ACTIVE_THREADS_MAX}"
    assert stage.claim(thread=last).claimed.purpose is NOTHING
    assert stage.due(last) == 0
    owners[0].answers()
    assert stage.claim(thread=last).claimed.purpose is ClaimPurpose.RUN


def test_no_further_thread_is_taken_while_the_head_is_full_and_a_single_one_never_waits() -> None:
    stage = Stage()
    stage.do(c.CreateThread(session=stage.session, thread_id="research", binding=stage.binding))
    stage.submit("r2", thread="research")
    owner = stage.running()
    owner.step(tools=tuple(external(f"{n} {'x' * 100}") for n in range(200)))
    head = stage.world.dump.head
    assert head is not None and len(encode(head)) > HEAD_CLAIM_BYTES

    assert stage.claim("b", thread="research").claimed.purpose is NOTHING
    assert stage.due("research") == 0
    stage.dies("a")
    assert stage.claim("b").claimed.lost_run == owner.run, "what is owned already is taken over"
    stage.cancel(owner.turn)
    stage.dies("b")
    stage.claim("d").settle()
    assert stage.claim("b", thread="research").claimed.purpose is ClaimPurpose.RUN


@pytest.mark.spec("Q-09", "RC-02")
def test_a_stale_owner_is_refused_whatever_it_says_and_nothing_of_it_is_stored() -> None:
    stage = Stage()
    stale = stage.running("a")
    stale.checkpoint()
    stage.pass_time(LEASE_MS)
    owner = stage.claim("b")
    assert owner.claimed.fence == 2

    late = [
        stale.step_command(),
        stale.step_command(end=c.RunEnd(kind=RunEndKind.COMPLETED)),
        replace(stale.step_command(), expected_position=owner.position),
        replace(stale.step_command(), run_id=owner.run),
        replace(owner.step_command(), run_id=stale.run),
        replace(owner.step_command(), fence=3),
        replace(owner.step_command(), turn_id="t-other"),
        stale.settle_command(),
    ]
    for command in late:
        with stage.refuses(Fenced) as refused:
            stage.do(command)
        assert refused.value.current == 2
    with stage.refuses(Fenced):
        stale.postpone()
    owner.answers()
    with stage.refuses(Fenced) as refused:
        owner.step()
    assert refused.value.current == 0, "nobody owns it"


def test_a_host_that_never_heard_the_answer_to_its_claim_is_given_it_again() -> None:
    stage = Stage()
    owner = stage.running("a")
    again = replace(stage.claim_command("a"), again=True)

    assert stage.do(again) == owner.claimed
    assert stage.change is None
    assert stage.do(replace(again, owner="b")) == c.Claimed(purpose=NOTHING)
    owner.checkpoint(steps=(owner.fact(1),), reasoning=1, attempt=2)
    stage.pause(owner.turn)
    told = stage.do(again)
    assert (told.pause, told.position, told.checkpoint_at, told.base_at, told.reasoning, told.attempt) == (
        True,
        2,
        2,
        2,
        1,
        2,
    )
    stage.cancel(owner.turn)
    owner.end(RunEndKind.CANCELLED)
    told = stage.do(again)
    assert (told.purpose, told.run_id, told.cancel) == (ClaimPurpose.SETTLE, "", True)


@pytest.mark.parametrize("owned", [False, True], ids=["given back", "owned by a lost host"])
def test_a_turn_in_flight_of_a_writer_this_host_does_not_read_is_left_for_another(owned: bool) -> None:
    stage = Stage()
    owner = stage.running("a")
    owner.checkpoint()
    if owned:
        stage.dies("a")
    else:
        owner.end(RunEndKind.RELEASED)

    refusing = replace(stage.claim_command("b"), refused=("2.0.8",))
    stage.alive("b")
    assert stage.do(refusing) == c.Claimed(purpose=NOTHING)
    assert stage.change is None
    stage.claim("d").answers()
    second = stage.submit("r2")
    assert stage.do(refusing).turn_id == second, "a Turn that has not begun starts anew with what this host writes"


# ---- takeover ----


@pytest.mark.spec("RC-01", "RC-18", "RC-20")
def test_when_a_lease_has_expired_another_host_goes_on_from_what_was_committed() -> None:
    stage = Stage()
    turn = stage.submit()
    lost = stage.claim("a")
    lost.checkpoint(steps=(lost.fact(1),), reasoning=1, attempt=1)
    stage.pass_time(LEASE_MS - 1)
    stage.alive("b")
    assert stage.claim("b").claimed.purpose is NOTHING, "until then it may commit and renew"
    stage.pass_time(1)

    owner = stage.claim("b")

    claimed = owner.claimed
    assert (claimed.turn_id, claimed.fence, claimed.run_number, claimed.lost_run) == (turn, 2, 2, lost.run)
    assert (claimed.base_at, claimed.checkpoint_at, claimed.position) == (2, 2, 3)
    assert (claimed.reasoning, claimed.attempt, claimed.resumed_from) == (1, 1, f"{lost.run}.s1")
    assert [stage.run(turn, n).status for n in (1, 2)] == [RunStatus.LOST, RunStatus.RUNNING]
    assert [stage.run(turn, n).resumed_from for n in (1, 2)] == ["", f"{lost.run}.s1"]
    assert stage.view(turn).recovery is None, "a lost host is no failure of the Turn"
    owner.answers()
    assert stage.status(turn) == "COMPLETED"


def test_a_host_that_is_known_to_be_dead_is_taken_over_before_its_lease_expires() -> None:
    stage = Stage()
    lost = stage.running("a")

    assert stage.claim("b", dead=("c",)).claimed.purpose is NOTHING
    assert stage.claim("b", dead=("c", "a")).claimed.lost_run == lost.run


def test_a_jump_of_the_clock_steals_no_lease_and_freezes_none() -> None:
    stage = Stage()
    stage.running("a")
    stage.clock.jump(3_600_000)
    assert stage.claim("b").claimed.purpose is NOTHING

    stage.clock.jump(-7_200_000)
    stage.pass_time(LEASE_MS)
    assert stage.claim("b").claimed.fence == 2


def test_an_owner_whose_lease_has_expired_goes_on_as_long_as_nobody_has_taken_over() -> None:
    stage = Stage()
    owner = stage.running("a")
    stage.pass_time(10 * LEASE_MS)

    owner.checkpoint()
    owner.answers()
    assert stage.status(owner.turn) == "COMPLETED"


@pytest.mark.spec("MC-08", "MC-10")
def test_what_a_lost_run_left_open_is_closed_as_lost_with_what_is_known() -> None:
    stage = Stage()
    lost = stage.running("a")
    early = Usage(input_tokens=10)
    told: list[ModelFact] = []
    for models in (
        (lost.model(ModelStatus.STARTED, 1),),
        (lost.model(ModelStatus.COMPLETED, 1, usage=Usage(10, 5), complete=True),),
        (lost.model(ModelStatus.STARTED, 2, message="m2"),),
        # What is known before the end is committed on its own: the same request, not another one.
        (lost.model(ModelStatus.STARTED, 2, message="m2", usage=early),),
        (lost.model(ModelStatus.STARTED, 3, message="m3"),),
    ):
        lost.step(steps=(lost.fact(1, StepPhase.MODEL),), models=models)
        told.extend(models)
    active = stage.world.dump.active("main")
    assert active is not None and active.run.calls == 3
    stage.dies("a")
    stage.claim("b")

    facts = stage.private()
    ended = [fact for fact in facts if isinstance(fact, ModelFact)]
    assert [(fact.model_call_id, fact.status, fact.usage) for fact in ended] == [
        (f"{lost.run}.m2", ModelStatus.LOST, None),
        (f"{lost.run}.m3", ModelStatus.LOST, None),
    ]
    [step] = [fact for fact in facts if isinstance(fact, StepFact)]
    assert (step.step_id, step.status) == (f"{lost.run}.s1", StepStatus.INTERRUPTED)
    assert [e.data["messageId"] for e in stage.events("message.abandoned")] == ["m2", "m3"]
    assert [e.data["status"] for e in stage.events("run.ended")] == ["LOST"]
    assert [(e.step_id, e.data["status"]) for e in stage.events("step.ended")] == [(f"{lost.run}.s1", "INTERRUPTED")]

    run = stage.get(keys.run(lost.turn, 1), RunRecord)
    views = {
        number: model_call_view(
            run, [Told(fact, 1) for fact in (*told, *ended) if fact.model_call_id == f"{lost.run}.m{number}"]
        )
        for number in (2, 3)
    }
    assert [view.status for view in views.values()] == [ModelStatus.LOST, ModelStatus.LOST]
    assert views[3].usage is None and views[3].usage_complete is False
    assert views[2].usage is not None and views[2].usage.input_tokens == 10 and views[2].usage_complete is False
    assert views[2].usage.output_tokens is None


# ---- local tools of a lost host (D18) ----


def test_a_local_tool_that_may_not_run_twice_is_unknown_when_its_host_is_lost() -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.starts_local("c1", ReplayRule.NEVER)
    stage.dies("a")

    owner = stage.claim("b")

    assert stage.execution(owner.turn).state is S.UNKNOWN
    owner.suspends()
    assert (stage.reasons(owner.turn), stage.due()) == (["tool_unknown"], None)


def test_a_local_tool_that_may_be_run_again_holds_nothing_when_its_host_is_lost() -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.starts_local("c1", ReplayRule.SAFE)
    stage.dies("a")

    owner = stage.claim("b")
    assert stage.execution(owner.turn).state is S.RUNNING
    assert owner.starts_local("c1", ReplayRule.SAFE).ready == 0
    assert stage.execution(owner.turn).attempt == 2
    owner.tool("c1", S.COMPLETED, applied=True)
    owner.answers()
    assert stage.status(owner.turn) == "COMPLETED"


@pytest.mark.parametrize("how", ["paused", "parked"])
def test_it_holds_nothing_either_when_the_turn_comes_to_rest_there(how: str) -> None:
    """Nobody runs it any more: a Turn that waited for it would wait for ever."""
    stage = Stage()
    lost = stage.running("a")
    turn = lost.turn
    lost.starts_local("c1", ReplayRule.SAFE)
    if how == "paused":
        stage.pause(turn)
        stage.dies("a")
        stage.claim("b")
        assert stage.status(turn) == "PAUSED"
        stage.resume(turn)
    else:
        stage.dies("a")
        stage.claim("b", takeovers_max=0)
        assert stage.reasons(turn) == ["operator"]
        stage.release_turn(turn)

    assert (stage.reasons(turn), stage.due()) == ([], 0)
    assert stage.claim("d").starts_local("c1", ReplayRule.SAFE)


@pytest.mark.parametrize("rule", ReplayRule)
def test_a_cancelled_turn_does_not_wait_for_a_mere_reading(rule: ReplayRule) -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.starts_local("c1", rule)
    stage.cancel(lost.turn)
    stage.dies("a")

    owner = stage.claim("b")

    if rule is ReplayRule.SAFE:
        assert (owner.claimed.purpose, stage.execution(lost.turn).state) == (ClaimPurpose.SETTLE, S.CANCELLED)
        owner.settle()
    else:
        assert (owner.claimed.purpose, stage.execution(lost.turn).state) == (NOTHING, S.UNKNOWN)
        assert (stage.status(lost.turn), stage.reasons(lost.turn)) == ("WAITING", ["tool_unknown"])


# ---- late facts of a lost host (D13) ----


def file_tool(stage: Stage, lost: Owner, call: str = "c1", state: ExecutionState = S.COMPLETED) -> c.Done:
    return stage.do(
        c.FileFact(
            session=stage.session,
            thread_id="main",
            turn_id=lost.turn,
            run_id=lost.run,
            tool=c.ToolCommit(call_id=call, state=state),
        )
    )


def test_the_lost_host_may_still_say_what_its_own_tool_did() -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.starts_local("c1")
    stage.dies("a")
    owner = stage.claim("b")
    owner.suspends()
    fence, revision = owner.claimed.fence, stage.state(lost.turn).revision

    for state in (S.DENIED, S.RUNNING, S.UNKNOWN):
        assert file_tool(stage, lost, state=state) == c.Done(changed=False)
    assert file_tool(stage, lost) == c.Done(changed=True)

    assert (stage.execution(lost.turn).state, stage.due()) == (S.COMPLETED, 0)
    assert stage.state(lost.turn).revision > revision and stage.thread().fence == fence
    assert file_tool(stage, lost) == c.Done(changed=False), "said again, and nothing changes"


def test_it_is_the_run_that_started_the_tool_that_knows_not_the_one_that_asked_for_it() -> None:
    stage = Stage()
    asked = stage.running("a")
    asked.asks("c2", "i1")
    asked.suspends()
    stage.respond(asked.turn, "i1", True)
    started = stage.claim("b")
    started.tool("c2", S.RUNNING, name="delete", answers=("i1",))
    stage.dies("b")
    stage.claim("d")
    assert stage.execution(asked.turn, "c2").origin.run_id == asked.run

    assert file_tool(stage, asked, "c2") == c.Done(changed=False)
    assert file_tool(stage, started, "c2") == c.Done(changed=True)


def test_usage_of_a_lost_request_is_filed_once_and_it_stays_lost() -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.begins(models=(lost.model(),))
    fact = c.FileFact(
        session=stage.session,
        thread_id="main",
        turn_id=lost.turn,
        run_id=lost.run,
        model=lost.model(ModelStatus.COMPLETED, usage=Usage(3, 4), complete=True),
    )
    assert stage.do(fact) == c.Done(changed=False), "its Run goes on, and says so itself"
    stage.dies("a")
    stage.claim("b")

    assert stage.do(fact) == c.Done(changed=True)
    assert stage.do(fact) == c.Done(changed=False)
    assert keys.late(lost.run, f"{lost.run}.m1/1") in stage.world.dump.records
    for wrong in (
        replace(fact, model=lost.model(ModelStatus.STARTED)),
        replace(fact, run_id=f"{lost.turn}.2"),
        replace(fact, run_id="nonsense"),
    ):
        assert stage.do(wrong) == c.Done(changed=False)


# ---- a pause at the moment of the loss ----


def test_a_host_that_is_lost_while_pausing_has_paused() -> None:
    stage = Stage()
    lost = stage.running("a")
    stage.pause(lost.turn)
    stage.dies("a")

    assert stage.claim("b").claimed == c.Claimed(purpose=NOTHING, turn_id=lost.turn, now_ms=stage.clock())
    assert (stage.status(lost.turn), stage.signals()["pause"]) == ("PAUSED", "APPLIED")
    assert stage.run(lost.turn).status is RunStatus.LOST
    assert stage.claim("b").claimed == c.Claimed(purpose=NOTHING), "nothing is left to take over"
    stage.resume(lost.turn)
    assert stage.claim("b").claimed.run_number == 2


# ---- poison (D13) ----


@pytest.mark.case("C28")
def test_a_turn_that_kills_every_host_is_parked_and_the_count_survives_whatever_happens() -> None:
    stage = Stage()
    stage.do(c.CreateThread(session=stage.session, thread_id="research", binding=stage.binding))
    turn = stage.submit()
    for takeover in range(6):
        owner = stage.claim(f"host {takeover}")
        assert owner.turn == turn
        if takeover == 3:
            # It is no way out to pause it in between.
            stage.pause(turn)
            owner.end(RunEndKind.PAUSED)
            stage.resume(turn)
            owner = stage.claim("another")
        stage.dies("another")
        stage.dies(f"host {takeover}")

    assert stage.claim("last").claimed.purpose is NOTHING

    assert (stage.status(turn), stage.reasons(turn), stage.due()) == ("WAITING", ["operator"], None)
    assert "6 times" in stage.state(turn).operator
    stage.pass_time(10**9)
    assert stage.claim("last").claimed.purpose is NOTHING
    other = stage.submit("r2", thread="research")
    assert stage.claim(thread="research").turn == other

    stage.release_turn(turn)
    assert (stage.state(turn).takeovers, stage.due()) == (0, 0)
    stage.claim("last").answers()
    assert stage.status(turn) == "COMPLETED"


@pytest.mark.case("C28")
def test_asking_the_model_again_is_no_progress() -> None:
    stage = Stage()
    turn = stage.submit()
    for number in range(6):
        owner = stage.claim(f"host {number}")
        assert owner.turn == turn
        owner.checkpoint(steps=(owner.fact(),), models=(owner.model(),), reasoning=1, attempt=number + 1)
        stage.dies(f"host {number}")

    assert stage.claim("last").claimed.purpose is NOTHING
    assert stage.reasons(turn) == ["operator"]


def test_a_new_checkpoint_is_progress_and_starts_the_count_again() -> None:
    stage = Stage()
    turn = stage.submit()
    for number in range(10):
        owner = stage.claim(f"host {number}", takeovers_max=1)
        assert owner.turn == turn
        owner.checkpoint()
        stage.dies(f"host {number}")
    assert stage.state(turn).takeovers == 0


def test_a_checkpoint_that_only_begins_something_is_no_progress() -> None:
    """A model or a tool that kills its host is begun before it does so."""
    stage = Stage()
    turn = stage.submit()
    for number in range(3):
        owner = stage.claim(f"host {number}", takeovers_max=2)
        owner.checkpoint(steps=(owner.fact(1),), models=(owner.model(),))
        owner.checkpoint(tools=(local("c1", ReplayRule.SAFE),))
        stage.dies(f"host {number}")
    assert stage.claim("last", takeovers_max=2).claimed.purpose is NOTHING
    assert stage.reasons(turn) == ["operator"]

    for more in (
        {"models": "COMPLETED"},
        {"tools": (c.ToolCommit(call_id="c1", state=S.COMPLETED),)},
        {"messages": (c.MessageOut(message_id="m1", content=text("so")),)},
    ):
        stage = Stage()
        stage.submit()
        for number in range(5):
            owner = stage.claim(f"host {number}", takeovers_max=2)
            assert owner.run
            owner.checkpoint(steps=(owner.fact(1),), models=(owner.model(),), tools=(local("c1", ReplayRule.SAFE),))
            fields = {**more, "models": (owner.model(ModelStatus.COMPLETED),)} if "models" in more else more
            owner.checkpoint(**fields)
            if "tools" in more:
                break
            stage.dies(f"host {number}")
        assert stage.state(owner.turn).takeovers == 0


def test_a_parked_turn_can_always_be_cancelled() -> None:
    stage = Stage()
    lost = stage.running("a")
    stage.dies("a")
    stage.claim("b", takeovers_max=0)

    stage.cancel(lost.turn)

    assert (stage.reasons(lost.turn), stage.due()) == ([], 0)
    stage.claim("b").settle()
    assert stage.status(lost.turn) == "CANCELLED"


# ---- giving back ----


@pytest.mark.spec("RC-18", "LF-08")
def test_a_host_that_goes_gives_the_turn_back_and_uses_up_nothing() -> None:
    stage = Stage()
    owner = stage.running("a")
    owner.checkpoint()
    owner.starts_local("c1", ReplayRule.NEVER)
    owner.end(RunEndKind.RELEASED)

    assert (stage.status(owner.turn), stage.view(owner.turn).recovery, stage.due()) == ("RUNNING", None, 0)
    assert stage.run(owner.turn).status is RunStatus.RELEASED
    assert stage.execution(owner.turn).state is S.UNKNOWN, "what it was doing nobody knows"
    again = stage.claim("b").claimed
    assert (again.run_number, again.lost_run, stage.state(owner.turn).takeovers) == (2, "", 0)


@pytest.mark.spec("RT-49")
def test_a_run_that_ends_well_is_not_the_end_of_its_turn() -> None:
    stage = Stage()
    owner = stage.running()
    owner.asks()
    owner.suspends()

    assert stage.run(owner.turn).status is RunStatus.SUSPENDED
    assert stage.status(owner.turn) == "WAITING"


def test_a_takeover_reads_everything_it_needs_in_two_rounds() -> None:
    stage = Stage()
    lost = stage.running("a")
    for number in range(10):
        lost.starts_local(f"c{number}")
    stage.dies("a")

    stage.claim("b")

    assert stage.rounds == 2, "whether the owner lives, and then all that it left"
    assert stage.view(lost.turn).status == "RUNNING"
