"""Controls of a Turn under way: admitted at once, applied at a boundary (group CT)."""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.contracts.errors import Conflict, DurableError, InvalidRequest, RevisionConflict, Terminal
from agentscope_durable.contracts.status import ExecutionState, RunStatus, TurnStatus, WaitKind
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Emit,
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    Wait,
    approval,
    external,
    final,
    local,
    manual,
    say,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused, turn_is, until


async def running(hosts: Hosts, script, gate: str, **options):
    """A Turn that stands at a gate."""
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness(script, gates=gates), **options)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached(gate)
    return runtime, turn, gates


@pytest.mark.spec("CT-01", "CT-06", "CT-23")
async def test_input_joins_at_the_next_boundary_in_its_order(hosts: Hosts) -> None:
    _, turn, gates = await running(hosts, [say("first answer", gate="g"), final("{inputs}")], "g")
    await turn.steer("s1", "a")
    await turn.inject("s2", "b")
    gates.open("g")

    assert str(await turn.wait(SECONDS)) == "a, b"
    applied = [event.data["requestId"] for event in await all_events(turn) if event.type == "signal.applied"]
    assert applied == ["s1", "s2"]


@pytest.mark.spec("CT-02")
async def test_steering_revokes_no_tool(hosts: Hosts) -> None:
    _, turn, gates = await running(hosts, [local("t", gate="g", value="done"), final("{results} then {inputs}")], "g")
    await turn.steer("s1", "left")
    gates.open("g")

    assert str(await turn.wait(SECONDS)) == "done then left"
    (tool,) = await turn.list_tools()
    assert tool.state is ExecutionState.COMPLETED


@pytest.mark.spec("CT-03")
async def test_withdraw_takes_back_what_is_not_applied(hosts: Hosts) -> None:
    _, turn, gates = await running(hosts, [Stall(gate="g"), say("x"), Stall(gate="h"), final("[{inputs}]")], "g")
    await turn.steer("s1", "a")
    await turn.steer("s2", "b")
    await turn.withdraw("w1", "s1")
    gates.open("g")
    await gates.reached("h")
    await refused(turn.withdraw("w2", "s2"), Conflict)
    gates.open("h")

    assert str(await turn.wait(SECONDS)) == "[b]"
    said = {message.request_id: message for message in await turn.history() if message.role == "user"}
    assert said["s1"].withdrawn and not said["s2"].withdrawn


@pytest.mark.spec("CT-04", "CT-21")
@pytest.mark.parametrize("attempt", range(6))
async def test_withdraw_and_application_race_and_one_wins(hosts: Hosts, attempt: int) -> None:
    _, turn, gates = await running(hosts, [Stall(gate="g"), final("[{inputs}]")], "g")
    await turn.steer("s1", "a")
    gates.open("g")
    for _ in range(attempt * 3):
        await asyncio.sleep(0)
    try:
        await turn.withdraw("w1", "s1")
        withdrawn = True
    except DurableError:
        withdrawn = False

    assert str(await turn.wait(SECONDS)) == ("[]" if withdrawn else "[a]")
    kinds = [e.type for e in await all_events(turn) if e.type in ("signal.applied", "signal.withdrawn")]
    assert kinds == (["signal.withdrawn"] if withdrawn else ["signal.applied"])


@pytest.mark.spec("CT-05", "CT-24", "CT-15")
async def test_an_ended_turn_refuses_every_new_control_and_stays_as_it_is(hosts: Hosts) -> None:
    harness = ScriptedHarness({"bad": [Fail(kind="ValueError")], "ask": [approval("t")], "": [final("ok")]})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    good, bad, gone = [await session.submit(f"r-{text}", text) for text in ("good", "bad", "ask")]
    await turn_is(gone, TurnStatus.WAITING)
    await gone.cancel("c-gone")
    await turn_is(gone, TurnStatus.CANCELLED)
    for turn, status in ((good, TurnStatus.COMPLETED), (bad, TurnStatus.FAILED), (gone, TurnStatus.CANCELLED)):
        before, events = await turn.status(), await all_events(session)
        assert before.status is status
        for control in (
            turn.steer(f"1{status}", "a"),
            turn.inject(f"2{status}", "a"),
            turn.cancel(f"3{status}"),
            turn.pause(f"4{status}"),
            turn.resume(f"5{status}", before.revision),
            turn.signal(f"6{status}", "x.a", None),
            turn.withdraw(f"7{status}", "nothing"),
        ):
            assert (await refused(control, Terminal)).status == status
        assert await turn.status() == before
        assert await all_events(session) == events
    receipt = await gone.cancel("c-gone")
    assert receipt.request_id == "c-gone"


@pytest.mark.spec("CT-05", "SE-12", "CT-01")
@pytest.mark.parametrize("attempt", range(6))
async def test_a_steer_that_races_with_the_end_is_applied_or_refused(hosts: Hosts, attempt: int) -> None:
    _, turn, gates = await running(hosts, [final("[{inputs}]", gate="g")], "g")
    gates.open("g")
    for _ in range(attempt * 2):
        await asyncio.sleep(0)
    try:
        await turn.steer("s1", "late")
        admitted = True
    except Terminal:
        admitted = False

    assert str(await turn.wait(SECONDS)) == ("[late]" if admitted else "[]")
    assert (await turn.status()).pending_inputs == 0


@pytest.mark.spec("SE-12")
async def test_a_steer_reopens_a_final_answer_and_an_inject_expires(hosts: Hosts) -> None:
    _, turn, gates = await running(hosts, [final("[{inputs}]", gate="g")], "g")
    await turn.inject("s1", "only this")
    gates.open("g")
    assert str(await turn.wait(SECONDS)) == "[]"
    expired = [e.data["requestId"] for e in await all_events(turn) if e.type == "signal.expired"]
    assert expired == ["s1"]
    said = {message.request_id: message for message in await turn.history() if message.role == "user"}
    assert said["s1"].expired


@pytest.mark.spec("CT-07")
async def test_a_queued_turn_is_cancelled_at_once(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.cancel("c1")

    assert (await turn.status()).status is TurnStatus.CANCELLED
    assert len(await turn.list_runs()) == 0


@pytest.mark.spec("CT-08", "SE-08", "SE-09", "SE-10")
async def test_cancel_waits_until_a_running_execution_is_confirmed(hosts: Hosts) -> None:
    release = asyncio.Event()
    started = asyncio.Event()

    class Stubborn(FunctionExecutor):
        """Takes a cancel and goes on to its end."""

        async def cancel(self, request):
            from agentscope_durable.spi.executor import Running

            self.told = request.execution_id
            return Running()

    async def work() -> str:
        started.set()
        await release.wait()
        return "finished anyway"

    hands = Stubborn({"work": work})
    runtime = await hosts.open([external("hands", "work"), final()], executors={"hands": hands})
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await started.wait()
    await turn_is(turn, TurnStatus.WAITING)
    await turn.cancel("c1")
    await until(lambda: hasattr(hands, "told"))
    view = await turn.status()
    assert view.status is TurnStatus.WAITING
    assert view.cancel_requested
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.TOOL_RUNNING]
    release.set()
    await turn_is(turn, TurnStatus.CANCELLED)
    (tool,) = await turn.list_tools()

    assert tool.state is ExecutionState.COMPLETED
    assert tool.result["value"] == "finished anyway"
    assert tool.execution_id == hands.told
    assert tool.applied_at is None and tool.applied_at_ms is not None


@pytest.mark.spec("CT-08")
async def test_cancel_stops_a_coroutine_that_runs_here(hosts: Hosts) -> None:
    started = asyncio.Event()

    async def work() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    hands = FunctionExecutor({"work": work})
    runtime = await hosts.open([external("hands", "work"), final()], executors={"hands": hands})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await started.wait()
    await turn.cancel("c1")
    await turn_is(turn, TurnStatus.CANCELLED)
    (tool,) = await turn.list_tools()

    assert tool.state is ExecutionState.CANCELLED


@pytest.mark.spec("CT-09", "CT-10")
async def test_pause_goes_through_pausing_to_a_boundary(hosts: Hosts) -> None:
    _, turn, gates = await running(hosts, [local("t", gate="g"), final("{results}")], "g")
    await turn.pause("p1")
    assert (await turn.status()).status is TurnStatus.PAUSING
    gates.open("g")
    view = await turn_is(turn, TurnStatus.PAUSED)
    (tool,) = await turn.list_tools()
    assert tool.state is ExecutionState.COMPLETED
    (run,) = (await turn.list_runs()).items
    assert run.status is RunStatus.PAUSED
    await turn.resume("u1", view.revision)

    assert str(await turn.wait(SECONDS)) == "ok"
    seen = [e.data["turn"]["status"] for e in await all_events(turn) if e.type == "turn.status"]
    assert seen[-5:] == ["RUNNING", "PAUSING", "PAUSED", "RUNNING", "COMPLETED"] or "PAUSING" in seen


@pytest.mark.spec("CT-09", "CT-16")
async def test_a_final_answer_that_meets_a_pause_is_stored_and_not_asked_for_again(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([final("the answer", gate="g")], gates=gates)
    runtime = await hosts.open(harness)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    await turn.pause("p1")
    # The request was given up for the pause, or answered before it was seen: both are right.
    gates.open("g")
    view = await turn_is(turn, TurnStatus.PAUSED)
    asked = harness.ledger.count("model")
    answered = any(message.role == "assistant" for message in await turn.history())
    await turn.resume("u1", view.revision)

    assert str(await turn.wait(SECONDS)) == "the answer"
    assert harness.ledger.count("model") == asked + (0 if answered else 1)


@pytest.mark.spec("CT-11")
async def test_resume_takes_any_revision_seen_in_this_pause_and_no_other(hosts: Hosts) -> None:
    runtime = await hosts.open([manual("one"), final("{results}")])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    before = await turn_is(turn, TurnStatus.WAITING)
    await turn.pause("p1")
    first = await turn.status()
    await refused(turn.resume("u0", before.revision), RevisionConflict)
    await turn.resume("u1", first.revision)
    await turn.pause("p2")
    second = await turn.status()
    await refused(turn.resume("u2", first.revision), RevisionConflict)
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, "answer")
    assert (await turn.status()).status is TurnStatus.PAUSED
    await turn.resume("u3", second.revision)

    assert str(await turn.wait(SECONDS)) == "answer"


@pytest.mark.spec("CT-12", "CT-13", "CT-14")
async def test_a_pause_cancels_no_execution_and_its_result_is_kept(hosts: Hosts) -> None:
    release, started = asyncio.Event(), asyncio.Event()
    cancelled: list[str] = []

    class Watched(FunctionExecutor):
        async def cancel(self, request):
            cancelled.append(request.execution_id)
            return await super().cancel(request)

    async def work() -> str:
        started.set()
        await release.wait()
        return "worked"

    harness = ScriptedHarness([external("hands", "work"), final("{results}")])
    runtime = await hosts.open(harness, executors={"hands": Watched({"work": work})})
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await started.wait()
    await turn_is(turn, TurnStatus.WAITING)
    await turn.pause("p1")
    release.set()
    await until(lambda: _received(turn))
    view = await turn.status()
    assert view.status is TurnStatus.PAUSED
    assert harness.ledger.count("model") == 1
    await turn.resume("u1", view.revision)

    assert str(await turn.wait(SECONDS)) == "worked"
    assert cancelled == []


async def _received(turn) -> bool:
    (tool,) = await turn.list_tools()
    return tool.received_at_ms is not None


@pytest.mark.spec("CT-14")
async def test_resume_lifts_the_pause_and_nothing_else(hosts: Hosts) -> None:
    runtime = await hosts.open([approval("t"), final("{results}")])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn_is(turn, TurnStatus.WAITING)
    await turn.pause("p1")
    view = await turn.status()
    await turn.resume("u1", view.revision)

    view = await turn.status()
    assert view.status is TurnStatus.WAITING
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.APPROVAL]


@pytest.mark.spec("CT-16", "RC-13")
async def test_pause_in_backoff_keeps_the_due_time(hosts: Hosts, clock: ManualClock) -> None:
    runtime = await hosts.open([Fail(runs=1), final("ok")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)
    due = view.recovery.next_retry_at_ms
    await turn.pause("p1")
    clock.advance(5000)
    await _a_scan(session)
    view = await turn.status()
    assert view.status is TurnStatus.PAUSED
    assert view.recovery.next_retry_at_ms == due
    assert len(await turn.list_runs()) == 1
    await turn.resume("u1", view.revision)

    assert str(await turn.wait(SECONDS)) == "ok"


async def _a_scan(session) -> None:
    """Until the host has looked for work at least once more: it ran something newer."""
    thread = await session.create_thread("probe", "agent")
    probe = await thread.submit("probe", "a")
    await turn_is(probe, TurnStatus.WAITING, TurnStatus.COMPLETED)


@pytest.mark.spec("CT-17")
@pytest.mark.case("C34")
async def test_cancel_skips_the_backoff(hosts: Hosts, clock: ManualClock) -> None:
    runtime = await hosts.open([Fail(), final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn_is(turn, TurnStatus.WAITING)
    await turn.cancel("c1")
    await turn_is(turn, TurnStatus.CANCELLED)

    assert len(await turn.list_runs()) == 1


@pytest.mark.spec("CT-16")
@pytest.mark.parametrize(("kind", "end"), [("ValueError", TurnStatus.FAILED), ("OSError", TurnStatus.PAUSED)])
async def test_a_failure_while_pausing_is_for_good_or_leaves_the_turn_paused(
    hosts: Hosts, clock: ManualClock, kind: str, end: TurnStatus
) -> None:
    gates = Gates()
    harness = ScriptedHarness([local("t", gate="g"), Fail(kind=kind, runs=1), final("ok")], gates=gates)
    runtime = await hosts.open(_Blind(harness))
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await gates.reached("g")
    await turn.pause("p1")
    gates.open("g")
    view = await turn_is(turn, TurnStatus.FAILED, TurnStatus.PAUSED)

    assert view.status is end
    if end is TurnStatus.PAUSED:
        assert view.recovery.next_retry_at_ms is not None


class _Blind:
    """A harness that does not look for a pause."""

    def __init__(self, inner) -> None:
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def run(self, context):
        class Context:
            def __getattr__(self, name):
                return False if name == "pause_requested" else getattr(context, name)

        return await self._inner.run(Context())


@pytest.mark.spec("CT-18")
async def test_an_extension_signal_cannot_pose_as_a_control(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    for key in ("pause", "cancel", "x.", "y.app"):
        await refused(turn.signal(f"s-{key}", key, None), InvalidRequest)

    assert (await turn.signal("s1", "x.app.ready", {})).operation == "signal"


@pytest.mark.spec("CT-19", "CT-20", "CT-25")
async def test_a_signal_or_its_deadline_wakes_a_turn(hosts: Hosts, clock: ManualClock) -> None:
    deadline = clock() + 10_000
    harness = ScriptedHarness(
        {
            "for ever": [Wait(key="x.k"), final("{results}")],
            "": [Wait(key="x.k", deadline_ms=deadline), final("{results}")],
        }
    )
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    patient, timed = await session.submit("r1", "for ever"), await other.submit("r2", "timed")
    view = await turn_is(timed, TurnStatus.WAITING)
    assert [(reason.kind, reason.id, reason.until_ms) for reason in view.waiting_on] == [
        (WaitKind.SIGNAL, "x.k", deadline)
    ]
    await turn_is(patient, TurnStatus.WAITING)
    clock.advance(10_001)
    assert str(await timed.wait(SECONDS)) == "timed out"
    assert (await patient.status()).status is TurnStatus.WAITING
    await patient.signal("s0", "x.other", "not this")
    await patient.signal("s1", "x.k", "this")

    assert str(await patient.wait(SECONDS)) == "this"


@pytest.mark.spec("CT-25")
async def test_a_signal_before_the_wait_is_kept(hosts: Hosts) -> None:
    runtime = await hosts.open([Wait(key="x.k"), final("{results}")], start=False)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.signal("s1", "x.k", "early")
    await runtime.start()

    assert str(await turn.wait(SECONDS)) == "early"


@pytest.mark.spec("CT-26")
@pytest.mark.case("C01")
async def test_stimuli_start_no_running_tool_again(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([local("t", gate="g"), final("{inputs}")], gates=gates)
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    for number in range(20):
        await turn.steer(f"s{number}", f"{number}")
        await turn.signal(f"x{number}", "x.some", number)
        hosts.backend.wakeups().publish(("*",))
        await runtime.start()
    runs = (await turn.list_runs()).items
    gates.open("g")
    await turn.wait(SECONDS)

    assert len(runs) == len((await turn.list_runs()).items) == 1
    assert harness.ledger.count("tool") == 1
    assert [e.type for e in await all_events(turn) if e.type == "tool.applied"] == ["tool.applied"]


@pytest.mark.spec("CT-26")
async def test_input_in_every_state_reaches_the_next_request_once(hosts: Hosts) -> None:
    runtime = await hosts.open([approval("t"), final("{inputs}")], start=False)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.steer("s1", "queued")
    await runtime.start()
    await turn_is(turn, TurnStatus.WAITING)
    await turn.steer("s2", "waiting")
    assert (await turn.status()).status is TurnStatus.WAITING
    await turn.pause("p1")
    await turn.inject("s3", "paused")
    view = await turn.status()
    assert view.status is TurnStatus.PAUSED
    await turn.resume("u1", view.revision)
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)

    assert str(await turn.wait(SECONDS)) == "queued, waiting, paused"


@pytest.mark.spec("EV-13")
async def test_an_application_event_is_committed(hosts: Hosts) -> None:
    runtime = await hosts.open([Emit(type="x.app.progress", value={"done": 1}), final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.wait(SECONDS)

    (event,) = [e for e in await all_events(turn) if e.type == "x.app.progress"]
    assert event.data["value"] == {"done": 1}
