"""A task is taken once, however many times it is asked (group AD)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from agentscope_durable.contracts.errors import (
    Closed,
    InvalidRequest,
    NotFinished,
    RequestConflict,
    Terminal,
    TooLarge,
    TurnCancelled,
    TurnFailed,
    Uncertain,
    WaitTimeout,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.messages import INPUT_BYTES_MAX, Base64, Image, Input, Text
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.testing.scripted_harness import (
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    approval,
    final,
    local,
    manual,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused, texts, turn_is


@pytest.mark.spec("AD-02", "AD-11")
async def test_a_repeated_submit_returns_the_turn_it_already_made(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    first = await session.submit("r1", "a")
    events = len(await all_events(session))
    again = await session.submit("r1", "a")

    assert again.turn_id == first.turn_id
    assert len(await all_events(session)) == events
    assert await texts(session) == [("user", "a")]


@pytest.mark.spec("AD-03")
async def test_the_same_id_with_other_content_is_a_conflict_and_changes_nothing(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    await session.submit("r1", "a")

    error = await refused(session.submit("r1", "b"), RequestConflict)

    assert (error.request_id, error.field) == ("r1", "input")
    assert await texts(session) == [("user", "a")]


@pytest.mark.spec("AD-04", "AD-05", "AD-28")
async def test_a_request_id_covers_operation_target_and_every_argument(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    one = await session.submit("r1", "a")
    two = await session.submit("r2", "b")

    assert (await refused(other.submit("r1", "a"), RequestConflict)).field == "thread"
    assert (await refused(one.steer("r1", "a"), RequestConflict)).field == "operation"
    await one.cancel("c1")
    assert (await refused(two.cancel("c1"), RequestConflict)).field == "turn"
    assert (await two.status()).status is TurnStatus.QUEUED
    await two.pause("p1")
    view = await two.status()
    await two.resume("u1", view.revision)
    assert (await refused(two.resume("u1", view.revision + 1), RequestConflict)).field == "expected_revision"
    await two.signal("s1", "x.one", 1)
    assert (await refused(two.signal("s1", "x.two", 1), RequestConflict)).field == "key"
    assert (await refused(two.signal("s1", "x.one", 2), RequestConflict)).field == "payload"
    assert (await other.submit("r3", "a")).turn_id not in (one.turn_id, two.turn_id)


@pytest.mark.spec("AD-06")
async def test_request_ids_of_two_sessions_are_independent(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    first = await (await runtime.create_session(SessionKey("app", "1"), "agent")).submit("r1", "a")
    second = await (await runtime.create_session(SessionKey("app", "2"), "agent")).submit("r1", "b")

    assert first.turn_id != second.turn_id


@pytest.mark.spec("AD-07", "BE-29")
async def test_a_lost_answer_is_settled_by_the_same_request(hosts: Hosts) -> None:
    class LosesAnswers:
        """Carries commands out and loses the first answer."""

        lost = 0

        def __getattr__(self, name: str):
            return getattr(hosts.backend, name)

        async def execute(self, command, **options):
            receipt = await hosts.backend.execute(command, **options)
            if not self.lost and type(command).__name__ == "SubmitTurn":
                self.lost += 1
                raise Uncertain("submit", request_id=command.request_id)
            return receipt

    runtime = await hosts.open([final()], start=False, backend=LosesAnswers())
    session = await runtime.create_session(KEY, "agent")
    await refused(session.submit("r1", "a"), Uncertain)
    turn = await session.submit("r1", "a")

    assert [view.turn_id for view in await session.list_turns()] == [turn.turn_id]


@pytest.mark.spec("AD-08", "AD-21")
async def test_a_repeat_after_the_end_runs_nothing(hosts: Hosts) -> None:
    harness = ScriptedHarness([final("ok")])
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn.wait(SECONDS)
    for _ in range(3):
        async with turn.stream_events() as events:
            await anext(events)
    again = await session.submit("r1", "a")

    assert again.turn_id == turn.turn_id
    assert str(await again.result()) == "ok"
    assert len(await again.list_runs()) == 1
    assert harness.ledger.count("model") == 1


@pytest.mark.spec("AD-09", "RT-24")
async def test_racing_identical_submits_admit_one_turn(hosts: Hosts) -> None:
    one, two = await hosts.open([final()], start=False), await hosts.open([final()], start=False)
    await one.create_session(KEY, "agent")
    handles = [runtime.get_session(KEY) for runtime in (one, two)]
    turns = await asyncio.gather(*(handle.submit("r1", "a") for handle in handles for _ in range(20)))

    assert len({turn.turn_id for turn in turns}) == 1
    assert len(await handles[0].list_turns()) == 1


@pytest.mark.spec("AD-10", "AD-11")
async def test_a_receipt_means_admitted_and_a_repeat_gets_the_same(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), final("{inputs}")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await gates.reached("g")
    steered = await turn.steer("s1", "left")
    again = await turn.steer("s1", "left")
    gates.open("g")
    await turn.wait(SECONDS)

    assert (steered.request_id, steered.operation, steered.turn_id) == ("s1", "steer", turn.turn_id)
    assert again == steered
    applied = [e for e in await all_events(turn) if e.type == "signal.applied" and e.data["requestId"] == "s1"]
    assert len(applied) == 1
    assert await turn.steer("s1", "left") == steered


@pytest.mark.spec("AD-13", "IN-06", "AD-12")
async def test_what_the_user_says_is_a_public_message_with_its_request(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), manual("ask"), final()], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "one")
    await gates.reached("g")
    await turn.steer("r2", "two")
    await turn.inject("r3", "three")
    gates.open("g")
    await turn_is(turn, TurnStatus.WAITING)
    (question,) = await turn.pending_interactions()
    await turn.respond("r4", question.interaction_id, {"answer": 4})
    await turn.wait(SECONDS)

    said = [message for message in await session.history() if message.role == "user"]
    assert [(m.request_id, m.input_kind, m.interaction_id) for m in said] == [
        ("r1", "submit", None),
        ("r2", "steer", None),
        ("r3", "inject", None),
        ("r4", "respond", question.interaction_id),
    ]


@pytest.mark.spec("AD-15")
async def test_a_closed_thread_or_session_takes_no_turn(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    thread = await session.create_thread("x", "agent")
    await thread.close()
    assert (await refused(thread.submit("r1", "a"), Closed)).kind == "thread"
    await session.close()
    assert (await refused(session.submit("r2", "a"), Closed)).kind == "session"
    await session.close()
    await thread.close()


@pytest.mark.spec("AD-18", "AD-19", "AD-20", "RT-58")
async def test_call_can_time_out_and_be_called_again(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    error = await refused(session.call("r1", "a", timeout=0.01), WaitTimeout)
    turn = session.get_turn(error.turn_id)
    assert error.thread_key == session.main_thread().key
    assert isinstance(error, TimeoutError)
    await refused(turn.result(), NotFinished)
    waiting = asyncio.create_task(turn.wait())
    await gates.reached("g")
    waiting.cancel()
    await refused(waiting, asyncio.CancelledError)
    gates.open("g")

    assert str(await session.call("r1", "a", timeout=SECONDS)) == "ok"
    assert len(await session.list_turns()) == 1


async def test_a_wait_that_runs_out_says_what_the_turn_waits_for(hosts: Hosts) -> None:
    runtime = await hosts.open(ScriptedHarness([approval("t"), final("ok")]))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)

    error = await refused(turn.wait(0.01), WaitTimeout)

    [question] = await turn.pending_interactions()
    assert view.waiting_on[0].id == question.interaction_id != question.call_id
    assert error.waits_for == f"approval {question.interaction_id!r}", "what respond() takes"
    assert f"it waits for {error.waits_for}. The Turn goes on" in str(error)


@pytest.mark.parametrize("timeout", [0, -1, -1e306, -(10**400), timedelta(days=-9)])
async def test_a_wait_whose_time_has_passed_looks_once(hosts: Hosts, timeout: Any) -> None:
    runtime = await hosts.open([final("ok")])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.wait(SECONDS)
    assert str(await turn.wait(timeout)) == "ok"

    await runtime.drain(SECONDS)
    later = await runtime.get_session(KEY).submit("r2", "a")
    error = await refused(later.wait(timeout), WaitTimeout)
    assert "did not end within 0 ms" in str(error)


@pytest.mark.spec("RT-58")
async def test_no_failure_looks_like_success_or_a_timeout(hosts: Hosts) -> None:
    harness = ScriptedHarness({"bad": [Fail(kind="ValueError", message="no luck")], "stop": [approval("t")]})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    failed = await session.submit("r1", "bad")
    error = await refused(failed.wait(SECONDS), TurnFailed)
    assert error.reason == "ValueError: no luck"
    assert error.turn_id == failed.turn_id
    stopped = await session.submit("r2", "stop")
    await turn_is(stopped, TurnStatus.WAITING)
    await stopped.cancel("c1")
    await refused(stopped.wait(SECONDS), TurnCancelled)
    await refused(stopped.result(), TurnCancelled)
    await refused(session.call("r2", "stop"), TurnCancelled)


@pytest.mark.spec("AD-22")
async def test_there_is_no_shortcut_that_submits_and_watches(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")

    assert not hasattr(session, "stream")
    assert not hasattr(session.main_thread(), "stream")


@pytest.mark.spec("AD-23")
async def test_the_order_of_keys_is_no_difference(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    first = await session.submit("r1", {"version": "1", "content": [{"type": "text", "text": "a"}]})
    again = await session.submit("r1", {"content": [{"text": "a", "type": "text"}], "version": "1"})
    plain = await session.submit("r1", "a")
    typed = await session.submit("r1", Input("1", [Text("a")]))

    assert {first.turn_id, again.turn_id, plain.turn_id, typed.turn_id} == {first.turn_id}


@pytest.mark.spec("AD-24")
@pytest.mark.parametrize(
    ("request_id", "given"),
    [
        ("", "a"),
        ("r\n1", "a"),
        ("r" * 257, "a"),
        (1, "a"),
        ("r1", ""),
        ("r1", " \n"),
        ("r1", 5),
        ("r1", Input("2", [Text("a")])),
        ("r1", Input("1", [])),
        ("r1", {"version": "1", "content": [{"type": "text", "text": "a", "extra": 1}]}),
        ("r1", "\ud800"),
        ("r1", Input("1", [Image(Base64("###", "image/png"))])),
        ("r1", "a" * (INPUT_BYTES_MAX + 1)),
    ],
    ids=lambda value: str(value)[:12].encode("ascii", "replace").decode().replace("\n", " "),
)
async def test_a_bad_request_is_refused_before_anything_is_sent(hosts: Hosts, request_id, given) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    before = len(await all_events(session))
    with pytest.raises((InvalidRequest, TooLarge)):
        await session.submit(request_id, given)

    assert len(await all_events(session)) == before
    assert len(await session.list_turns()) == 0
    turn = await session.submit("r0", "a")
    before = len(await all_events(session))
    for add in (turn.steer, turn.inject):
        # One rule for all that people say.
        with pytest.raises((InvalidRequest, TooLarge)):
            await add(request_id, given)
    assert len(await all_events(session)) == before


@pytest.mark.spec("AD-25", "RT-22")
async def test_the_submit_handle_observes_the_turn(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")], start=False)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    assert (await turn.status()).status is TurnStatus.QUEUED
    await runtime.start()
    await turn.wait(SECONDS)

    assert (await turn.status()).status is TurnStatus.COMPLETED


@pytest.mark.spec("AD-26", "Q-07", "Q-08", "CT-07")
async def test_the_documented_investigation_is_steered_and_the_turn_behind_it_never_begins(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([Stall(gate="g"), local("look"), final("looked, then: {inputs}")], gates=gates)
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    first = await session.submit("r1", "investigate")
    await gates.reached("g")
    second = await session.submit("r2", "write a report")
    await first.steer("s1", "only the exporter")
    await second.cancel("c1")
    assert (await second.status()).status is TurnStatus.CANCELLED
    gates.open("g")

    assert str(await first.wait(SECONDS)) == "looked, then: only the exporter"
    assert len(await second.list_runs()) == 0


@pytest.mark.spec("AD-27", "RT-06", "RT-39")
async def test_the_documented_second_thread(hosts: Hosts) -> None:
    runtime = await hosts.open([final("heard {context}")])
    session = await runtime.create_session(KEY, "agent")
    await session.call("r0", "main only", SECONDS)
    research = await session.create_thread("research", "agent")
    assert str(await research.call("r1", "one", SECONDS)) == "heard one"
    assert str(await research.call("r2", "two", SECONDS)) == "heard one, two"
    assert [message.text for message in await session.history()] == ["main only", "heard main only"]


@pytest.mark.spec("AD-29", "AD-02")
async def test_recognition_outlives_the_turn_and_its_events(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn.wait(SECONDS)
    await runtime.close()
    later = await hosts.open([final("ok")])
    session = later.get_session(KEY)

    assert (await session.submit("r1", "a")).turn_id == turn.turn_id
    await refused(session.submit("r1", "b"), RequestConflict)
    await refused(turn_of(later, turn).steer("r1", "a"), (RequestConflict, Terminal))


def turn_of(runtime, turn):
    return runtime.get_session(turn.thread_key.session).get_thread(turn.thread_key.thread_id).get_turn(turn.turn_id)
