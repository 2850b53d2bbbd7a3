"""The one fold, by itself: events in, projection out."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentscope_durable.contracts.errors import CorruptRecord, CursorExpired, EventGap, InvalidRequest
from agentscope_durable.contracts.events import Committed, EventFilter, PublicEvent, cursor_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.messages import Image, Text, Url
from agentscope_durable.contracts.projection import Projection, SnapshotView, tool_key
from agentscope_durable.contracts.records import TurnRecord, TurnState
from agentscope_durable.contracts.status import (
    ExecutionKind,
    ExecutionState,
    InteractionState,
    ResourceStatus,
    SignalState,
    TurnStatus,
)
from agentscope_durable.contracts.views import RunStepRefView, TurnView
from agentscope_durable.domain.projection import EventProjection, matches
from agentscope_durable.domain.turn_view import turn_view

SESSION = SessionKey("app", "s1")
BINDING = {"harness": "assistant", "definitionVersion": "v1", "stateVersion": "agentscope-thread-journal-v2"}


class Timeline:
    """A Session's events under construction, numbered as the store would."""

    def __init__(self) -> None:
        self.events: list[PublicEvent] = []

    def add(
        self,
        event_type: str,
        thread: str | None = None,
        turn: str | None = None,
        run: str | None = None,
        /,
        **data: Any,
    ) -> PublicEvent:
        sequence = len(self.events) + 1
        event = PublicEvent(
            type=event_type,
            session=SESSION,
            sequence=sequence,
            at_ms=1000 + sequence,
            data=data,
            thread_id=thread,
            turn_id=turn,
            run_id=run,
        )
        self.events.append(event)
        return event

    def session(self, *threads: str) -> None:
        self.add("session.created", createdAtMs=1000)
        for thread in threads:
            self.add("thread.created", thread, binding=BINDING, createdAtMs=1000)

    def turn(self, thread: str, turn: str, ordinal: int, status: TurnStatus, revision: int = 1) -> None:
        record = TurnRecord(turn, thread, ordinal, f"request-{turn}", 1000, 1, TurnState())
        view = turn_view(SESSION, record, TurnState(status=status, revision=revision, updated_ms=1000))
        self.add("turn.status", thread, turn, turn=msgspec.to_builtins(view))

    def message(self, thread: str, turn: str, message: str, text: str, run: str | None = None, **data: Any) -> None:
        content = [{"type": "text", "text": text}]
        data.setdefault("role", "assistant" if run else "user")
        self.add("message.completed", thread, turn, run, messageId=message, content=content, **data)

    def tool(self, event_type: str, thread: str, turn: str, call: str, run: str | None = None, **data: Any) -> None:
        self.add(event_type, thread, turn, run, callId=call, **data)

    def requested(self, thread: str, turn: str, call: str, run: str = "run1", **data: Any) -> None:
        data = {"name": "search", "kind": "LOCAL", "state": "RUNNING", "arguments": {"q": call}} | data
        self.tool("tool.requested", thread, turn, call, run, origin={"runId": run, "stepId": f"{run}.s1"}, **data)


def fold(events: list[PublicEvent], filter: EventFilter | None = None) -> EventProjection:
    projection = EventProjection(SESSION, filter)
    for event in events:
        assert projection.accept(event)
    return projection


# ---- identity and order ----


@pytest.mark.spec("PR-16")
def test_a_missing_event_is_an_error_in_a_whole_session_fold() -> None:
    line = Timeline()
    line.session("main", "research")
    projection = EventProjection(SESSION)
    _ = projection.accept(line.events[0])

    with pytest.raises(EventGap) as caught:
        _ = projection.accept(line.events[2])

    assert isinstance(caught.value, CursorExpired), "whoever handles an expired cursor handles this too"
    assert (caught.value.cursor, caught.value.oldest) == (1, 2)
    assert projection.sequence == 1


@pytest.mark.spec("ST-34")
def test_a_fold_that_starts_after_pruned_events_says_so_at_its_first_event() -> None:
    line = Timeline()
    line.session("main")

    with pytest.raises(EventGap):
        _ = EventProjection(SESSION).accept(line.events[1])


@pytest.mark.spec("PR-17")
def test_a_filtered_fold_accepts_gaps() -> None:
    line = Timeline()
    line.session("main", "research")
    line.message("main", "t1", "m1", "not ours")
    line.message("research", "t2", "m2", "ours")
    narrow = EventFilter(thread_id="research")

    projection = fold([event for event in line.events if matches(narrow, event)], narrow)

    assert [event.sequence for event in line.events if matches(narrow, event)] == [3, 5]
    assert list(projection.projection.messages) == ["m2"]


def test_an_event_that_is_delivered_twice_is_folded_once() -> None:
    line = Timeline()
    line.session("main")
    projection = fold(line.events)
    before = projection.projection

    assert not projection.accept(line.events[0])
    assert not projection.accept(Committed(line.events[1]))
    assert projection.projection == before
    assert projection.cursor == cursor_of(SESSION, 2)


def test_an_event_of_another_session_is_refused() -> None:
    line = Timeline()
    line.session("main")

    with pytest.raises(InvalidRequest):
        _ = EventProjection(SessionKey("app", "other")).accept(line.events[0])


def test_a_payload_that_is_not_its_types_own_is_refused_and_not_counted() -> None:
    line = Timeline()
    line.session("main")
    line.add("message.completed", "main", "t1", messageId="m1")
    projection = fold(line.events[:2])

    with pytest.raises(CorruptRecord):
        _ = projection.accept(line.events[2])
    assert projection.sequence == 2


def test_what_this_release_does_not_know_is_counted_and_leaves_no_trace() -> None:
    line = Timeline()
    line.session("main")
    before = fold(line.events).projection
    line.add("x.app.note", "main", value={"a": 1})
    line.add("turn.delegated", "main", "t1", child="t9")

    assert fold(line.events).projection == before
    assert fold(line.events).sequence == 4


def test_a_projection_that_was_handed_out_does_not_change() -> None:
    line = Timeline()
    line.session("main")
    projection = fold(line.events)
    before = projection.projection
    line.message("main", "t1", "m1", "later")

    _ = projection.accept(line.events[-1])

    assert before.messages == {}
    assert list(projection.projection.messages) == ["m1"]
    assert projection.projection is projection.projection


# ---- resources and Turns ----


@pytest.mark.spec("PR-02", "EV-04")
def test_resources_open_and_close() -> None:
    line = Timeline()
    line.session("main", "research")
    line.add("thread.closed", "research")
    line.add("thread.closed", "main")
    line.add("session.closed")

    projection = fold(line.events).projection

    assert projection.session is not None
    assert (projection.session.status, projection.session.created_at_ms) == (ResourceStatus.CLOSED, 1000)
    assert {name: thread.status for name, thread in projection.threads.items()} == {
        "main": ResourceStatus.CLOSED,
        "research": ResourceStatus.CLOSED,
    }
    assert projection.threads["main"].binding.definition_version == "v1"


def test_a_turn_event_replaces_the_whole_view() -> None:
    line = Timeline()
    line.session("main")
    line.turn("main", "t1", 1, TurnStatus.QUEUED)
    line.turn("main", "t1", 1, TurnStatus.RUNNING, revision=2)

    turn = fold(line.events).projection.turns["t1"]

    assert (turn.status, turn.revision) == (TurnStatus.RUNNING, 2)
    assert isinstance(turn, TurnView)


@pytest.mark.spec("EV-21")
def test_recovery_data_follow_their_event() -> None:
    line = Timeline()
    line.session("main")
    line.turn("main", "t1", 1, TurnStatus.WAITING)
    recovery = {
        "policy": {"maxRetries": 3},
        "failures": 2,
        "nextRetryAtMs": 5000,
        "lastError": {"kind": "ValueError", "message": "no"},
    }
    line.add("turn.recovery", "main", "t1", recovery=recovery)

    found = fold(line.events).projection.turns["t1"].recovery

    assert found is not None
    assert (found.failures, found.next_retry_at_ms, found.last_error.kind) == (2, 5000, "ValueError")


def test_the_current_turn_of_a_thread_is_the_oldest_unfinished_one() -> None:
    line = Timeline()
    line.session("main")
    current: list[str | None] = []
    for turn, ordinal, status in (
        ("t1", 1, TurnStatus.QUEUED),
        ("t2", 2, TurnStatus.QUEUED),
        ("t3", 3, TurnStatus.QUEUED),
        ("t2", 2, TurnStatus.CANCELLED),
        ("t1", 1, TurnStatus.COMPLETED),
        ("t3", 3, TurnStatus.COMPLETED),
    ):
        line.turn("main", turn, ordinal, status)
        current.append(fold(line.events).projection.threads["main"].current_turn_id)

    assert current == ["t1", "t1", "t1", "t1", "t3", None]


# ---- messages ----


@pytest.mark.spec("PR-11", "PR-18", "EV-17", "EV-18")
def test_a_message_that_is_completed_again_keeps_its_place_and_takes_the_new_text() -> None:
    line = Timeline()
    line.message("main", "t1", "m1", "first", "run1")
    line.message("main", "t1", "m2", "second", "run1")
    line.message("main", "t1", "m1", "first, again", "run2", attempt=2)
    line.message("main", "t1", "m1", "first, at last", "run2", attempt=2, revision=2)
    line.message("main", "t1", "m1", "late and old", "run1", attempt=1, revision=9)

    projection = fold(line.events).projection
    history = projection.history()

    assert [(message.id, message.text, message.sequence) for message in history] == [
        ("m1", "first, at last", 1),
        ("m2", "second", 2),
    ]
    assert (history[0].attempt, history[0].revision, history[0].created_at_ms) == (2, 2, 1001)


@pytest.mark.spec("PR-12")
def test_messages_in_any_order_are_the_history_by_their_sequence() -> None:
    line = Timeline()
    for number in range(5):
        line.message("main", "t1", f"m{number}", str(number), "run1")
    projection = fold(line.events).projection
    shuffled = {name: projection.messages[name] for name in ("m3", "m0", "m4", "m2", "m1")}

    assert replace(projection, messages=shuffled).history() == projection.history()
    assert [message.text for message in projection.history()] == ["0", "1", "2", "3", "4"]


@pytest.mark.spec("EV-14", "MG-06")
def test_a_message_keeps_every_kind_of_content_and_its_structured_output() -> None:
    line = Timeline()
    content = [
        {"type": "text", "text": "see"},
        {"type": "image", "source": {"type": "url", "url": "https://a/b.png", "mediaType": "image/png"}},
    ]
    line.add(
        "message.completed",
        "main",
        "t1",
        "run1",
        messageId="m1",
        role="assistant",
        content=content,
        structured={"n": 1},
    )

    [message] = fold(line.events).projection.history()

    assert message.content == (Text("see"), Image(Url("https://a/b.png", "image/png")))
    assert message.structured == {"n": 1}


def test_a_user_message_says_which_request_brought_it() -> None:
    line = Timeline()
    line.message("main", "t1", "m1", "yes", requestId="r1", inputKind="respond", interactionId="i1")

    [message] = fold(line.events).projection.history()

    assert (message.request_id, message.input_kind, message.interaction_id) == ("r1", "respond", "i1")


@pytest.mark.parametrize(
    ("event_type", "flags"), [("signal.withdrawn", (True, False)), ("signal.expired", (False, True))]
)
def test_an_input_that_was_never_applied_stays_in_history_and_says_so(
    event_type: str, flags: tuple[bool, bool]
) -> None:
    line = Timeline()
    line.message("main", "t1", "m1", "and also", requestId="r2", inputKind="steer")
    line.add("signal.accepted", "main", "t1", requestId="r2", operation="steer")
    line.add(event_type, "main", "t1", requestId="r2", operation="steer", messageId="m1", reason="completed")

    projection = fold(line.events).projection

    assert (projection.messages["m1"].withdrawn, projection.messages["m1"].expired) == flags
    assert projection.messages["m1"].text == "and also"
    expected = SignalState.WITHDRAWN if flags[0] else SignalState.EXPIRED
    assert (projection.signals["r2"].state, projection.signals["r2"].operation) == (expected, "steer")


def test_an_applied_signal_says_so() -> None:
    line = Timeline()
    line.add("signal.accepted", "main", "t1", requestId="r2", operation="pause")
    line.add("signal.applied", "main", "t1", requestId="r2", operation="pause")

    assert fold(line.events).projection.signals["r2"].state is SignalState.APPLIED


@pytest.mark.spec("EV-12")
def test_stored_message_deltas_are_put_together_until_the_message_is_complete() -> None:
    line = Timeline()
    line.add("message.delta", "main", "t1", "run1", messageId="m1", delta="Hel")
    line.add("message.delta", "main", "t1", "run1", messageId="m1", delta="lo")
    provisional = fold(line.events).projection.messages["m1"]
    line.message("main", "t1", "m1", "Hello!", "run1")
    line.add("message.delta", "main", "t1", "run1", messageId="m1", delta="?")

    final = fold(line.events).projection.messages["m1"]

    assert (provisional.text, provisional.incomplete) == ("Hello", True)
    assert (final.text, final.incomplete, final.sequence) == ("Hello!", False, 1)


@pytest.mark.spec("EV-12", "EV-17")
def test_text_of_an_abandoned_attempt_is_gone_and_that_of_a_new_one_is_not_glued_to_it() -> None:
    line = Timeline()
    line.add("message.delta", "main", "t1", "run1", messageId="m1", attempt=1, delta="Hel")
    line.add("message.delta", "main", "t1", "run1", messageId="m1", attempt=2, delta="Good")
    assert fold(line.events).projection.messages["m1"].text == "Good"
    line.add("message.abandoned", "main", "t1", "run1", messageId="m1", attempt=2, reason="lost")

    assert fold(line.events).projection.messages == {}


def test_abandoning_an_attempt_leaves_a_completed_message_alone() -> None:
    line = Timeline()
    line.message("main", "t1", "m1", "done", "run1")
    line.add("message.abandoned", "main", "t1", "run2", messageId="m1", attempt=1, reason="lost")

    assert fold(line.events).projection.messages["m1"].text == "done"


# ---- interactions ----


def test_a_question_is_asked_and_answered_or_closed() -> None:
    line = Timeline()
    asked = {"kind": "APPROVAL", "name": "rm", "arguments": {"path": "/"}, "openedAtMs": 5}
    line.add("interaction.requested", "main", "t1", "run1", interactionId="i1", callId="c1", **asked)
    line.add("interaction.requested", "main", "t1", "run1", interactionId="i2", callId="c2", **asked)
    pending = fold(line.events).projection.interactions
    answer = {"outcome": "answered", "requestId": "r3", "response": False}
    line.add("interaction.resolved", "main", "t1", interactionId="i1", callId="c1", **answer)
    line.add(
        "interaction.resolved", "main", "t1", interactionId="i2", callId="c2", outcome="closed", reason="cancelled"
    )

    done = fold(line.events).projection.interactions

    assert {i.state for i in pending.values()} == {InteractionState.PENDING}
    assert pending["i1"].arguments == {"path": "/"}
    assert (done["i1"].state, done["i1"].response, done["i1"].request_id) == (InteractionState.RESOLVED, False, "r3")
    assert (done["i2"].state, done["i2"].reason) == (InteractionState.CLOSED, "cancelled")


# ---- tools ----


@pytest.mark.spec("PR-05")
def test_the_same_call_id_in_two_turns_is_two_calls() -> None:
    line = Timeline()
    line.requested("main", "t1", "c/1")
    line.requested("main", "t2", "c/1", "run2")

    tools = fold(line.events).projection.tools

    assert set(tools) == {tool_key("main", "t1", "c/1"), tool_key("main", "t2", "c/1")}


def test_no_id_reaches_into_another_ids_place_in_a_tool_key() -> None:
    assert tool_key("a/b", "c", "d") != tool_key("a", "b/c", "d")
    assert tool_key("a%2Fb", "c", "d") != tool_key("a/b", "c", "d")


@pytest.mark.spec("PR-08", "PR-20", "EV-23")
def test_a_call_ends_is_received_and_is_applied_as_three_facts() -> None:
    line = Timeline()
    key = tool_key("main", "t1", "c1")
    line.requested("main", "t1", "c1", kind="EXTERNAL", state="INTENT", executionId="x1")
    intent = fold(line.events).projection.tools[key]
    line.tool("tool.started", "main", "t1", "c1", state="RUNNING")
    running = fold(line.events).projection.tools[key]
    line.tool("tool.completed", "main", "t1", "c1", state="COMPLETED", result={"value": 3}, receivedAtMs=7)
    received = fold(line.events).projection.tools[key]
    line.tool("tool.applied", "main", "t1", "c1", "run2", appliedAtMs=9, appliedAt={"runId": "run2", "stepId": "s2"})
    applied = fold(line.events).projection.tools[key]

    assert (intent.state, intent.kind, intent.execution_id) == (ExecutionState.INTENT, ExecutionKind.EXTERNAL, "x1")
    assert (running.state, running.received_at_ms) == (ExecutionState.RUNNING, None)
    assert (received.state, received.received_at_ms, received.applied_at_ms) == (ExecutionState.COMPLETED, 7, None)
    assert applied == replace(received, applied_at_ms=9, applied_at=RunStepRefView("run2", "s2"))
    assert applied.origin == RunStepRefView("run1", "run1.s1")
    assert (applied.name, applied.arguments, applied.result) == ("search", {"q": "c1"}, {"value": 3})


@pytest.mark.spec("PR-07")
def test_a_local_call_has_no_execution_id() -> None:
    line = Timeline()
    line.requested("main", "t1", "c1")

    assert fold(line.events).projection.tools[tool_key("main", "t1", "c1")].execution_id is None


@pytest.mark.spec("SE-10")
def test_a_result_that_settlement_applied_has_no_place_of_application() -> None:
    line = Timeline()
    line.requested("main", "t1", "c1")
    line.tool("tool.applied", "main", "t1", "c1", appliedAtMs=9)

    tool = fold(line.events).projection.tools[tool_key("main", "t1", "c1")]

    assert (tool.applied_at_ms, tool.applied_at) == (9, None)


def test_an_unknown_outcome_and_a_wish_to_stop_are_shown() -> None:
    line = Timeline()
    line.requested("main", "t1", "c1")
    line.tool("tool.cancel_requested", "main", "t1", "c1", state="RUNNING", cancelRequested=True)
    line.tool("tool.unknown", "main", "t1", "c1", state="UNKNOWN")

    tool = fold(line.events).projection.tools[tool_key("main", "t1", "c1")]

    assert (tool.state, tool.cancel_requested) == (ExecutionState.UNKNOWN, True)


@pytest.mark.spec("PR-06", "EV-12")
def test_stored_argument_fragments_are_put_together_until_the_final_arguments_are_there() -> None:
    line = Timeline()
    key = tool_key("main", "t1", "c1")
    line.add("tool.call.arguments", "main", "t1", "run1", callId="c1", delta='{"q":')
    nameless = fold(line.events).projection.tools[key]
    line.add("tool.call.arguments", "main", "t1", "run1", callId="c1", name="search", delta=' "a"}')
    assembled = fold(line.events).projection.tools[key]
    line.requested("main", "t1", "c1", arguments={"q": "a"})
    line.add("tool.call.arguments", "main", "t1", "run1", callId="c1", delta="too late")
    final = fold(line.events).projection.tools[key]

    assert (nameless.name, nameless.arguments) == ("", '{"q":')
    assert (assembled.name, assembled.arguments) == ("search", '{"q": "a"}')
    assert final.arguments == {"q": "a"}


# ---- filters ----


def two_threads() -> Timeline:
    line = Timeline()
    line.session("main", "research")
    for thread, turn in (("main", "t1"), ("research", "t2"), ("main", "t3")):
        line.turn(thread, turn, 1 if turn != "t3" else 2, TurnStatus.QUEUED)
        line.message(thread, turn, f"{turn}.input", "do it", requestId=turn, inputKind="submit")
        line.add("run.started", thread, turn, f"{turn}.1", number=1, owner="h", fence=1)
        line.requested(thread, turn, "c1", f"{turn}.1")
        line.message(thread, turn, f"{turn}.r1", "done", f"{turn}.1")
    return line


@pytest.mark.spec("FI-06", "FI-08")
def test_a_thread_filter_keeps_that_threads_resource_view_alone() -> None:
    projection = fold(two_threads().events, EventFilter(thread_id="main")).projection

    assert projection.session is None
    assert set(projection.threads) == {"main"}
    assert set(projection.turns) == {"t1", "t3"}
    assert {message.id.partition(".")[0] for message in projection.history()} == {"t1", "t3"}


@pytest.mark.spec("FI-05", "FI-07", "FI-08")
def test_a_turn_filter_keeps_neither_resources_nor_other_tasks() -> None:
    narrow = EventFilter(thread_id="main", turn_id="t1")
    line = two_threads()
    projection = fold(line.events, narrow).projection

    assert (projection.session, projection.threads) == (None, {})
    assert set(projection.turns) == {"t1"}
    assert set(projection.messages) == {"t1.input", "t1.r1"}
    assert set(projection.tools) == {tool_key("main", "t1", "c1")}
    assert not any(event.type.startswith(("thread.", "session.")) for event in line.events if matches(narrow, event))


@pytest.mark.spec("FI-09")
def test_a_run_filter_keeps_its_turn_and_what_is_with_that_run_now() -> None:
    line = two_threads()
    line.add("run.started", "main", "t1", "t1.2", number=2, owner="h", fence=2)
    line.message("main", "t1", "t1.r1", "done again", "t1.2", attempt=2)
    line.tool("tool.applied", "main", "t1", "c1", "t1.2", appliedAtMs=9, appliedAt={"runId": "t1.2", "stepId": "s"})
    line.turn("main", "t1", 1, TurnStatus.COMPLETED, revision=3)

    first = fold(line.events, EventFilter(thread_id="main", turn_id="t1", run_id="t1.1")).projection
    second = fold(line.events, EventFilter(thread_id="main", turn_id="t1", run_id="t1.2")).projection

    assert first.turns["t1"].status is TurnStatus.COMPLETED, "the logical state of the Turn, whichever Run made it"
    assert (first.session, first.threads, first.messages, first.tools) == (None, {}, {}, {})
    assert second.turns == first.turns
    assert {message.id: (message.text, message.sequence) for message in second.history()} == {
        "t1.r1": ("done again", 8)
    }
    assert set(second.tools) == {tool_key("main", "t1", "c1")}


def test_a_run_that_is_followed_from_a_snapshot_drops_what_moves_on() -> None:
    narrow = EventFilter(thread_id="main", turn_id="t1", run_id="t1.1")
    line = two_threads()
    projection = EventProjection(SESSION, narrow)
    projection.reset(fold(line.events, narrow).snapshot())
    assert set(projection.projection.messages) == {"t1.r1"}
    line.message("main", "t1", "t1.r1", "done again", "t1.2", attempt=2)

    _ = projection.accept(line.events[-1])

    assert projection.projection.messages == {}


@pytest.mark.spec("FI-09", "PR-15")
def test_what_comes_to_a_run_from_an_earlier_one_is_a_gap_and_a_snapshot_has_it() -> None:
    narrow = EventFilter(thread_id="main", turn_id="t1", run_id="t1.2")
    line = two_threads()
    line.add("run.started", "main", "t1", "t1.2", number=2, owner="h", fence=2)
    before = len(line.events)
    line.tool("tool.applied", "main", "t1", "c1", "t1.2", appliedAtMs=9, appliedAt={"runId": "t1.2", "stepId": "s"})
    line.message("main", "t1", "t1.r1", "told again", "t1.2", revision=2)
    wanted = fold(line.events, narrow)
    assert (len(wanted.projection.tools), len(wanted.projection.messages)) == (1, 1)

    from_snapshot = EventProjection(SESSION, narrow)
    from_snapshot.reset(fold(line.events[:before], narrow).snapshot())
    matching = fold([event for event in line.events[:before] if matches(narrow, event)], narrow)
    for follower in (from_snapshot, matching):
        for at in (before, before + 1):
            held = follower.snapshot()
            with pytest.raises(EventGap, match=f"the beginning of what event {at + 1} goes on with is missing"):
                follower.accept(line.events[at])
            assert follower.snapshot() == held, "it was not taken"
            follower.reset(fold(line.events[: at + 1], narrow).snapshot())
        assert follower.projection == wanted.projection


@pytest.mark.spec("FI-09", "PR-15")
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1))
def test_a_run_that_is_followed_from_any_snapshot_is_never_shown_in_part(seed: int, at: float) -> None:
    line = random_timeline(random.Random(seed), whole=True)
    narrow = EventFilter(thread_id="main", turn_id="t1", run_id="t1.2")
    cut = int(at * len(line.events))
    projection = EventProjection(SESSION, narrow)
    projection.reset(fold(line.events[:cut], narrow).snapshot())

    for number, event in enumerate(line.events[cut:], cut + 1):
        try:
            _ = projection.accept(event)
        except EventGap:
            projection.reset(fold(line.events[:number], narrow).snapshot())
        assert projection.projection == fold(line.events[:number], narrow).projection


@pytest.mark.parametrize(
    ("narrow", "sequences"),
    [
        (EventFilter(), list(range(1, 19))),
        (EventFilter(thread_id="research"), [3, 9, 10, 11, 12, 13]),
        (EventFilter(thread_id="main", turn_id="t1"), [4, 5, 6, 7, 8]),
        (EventFilter(thread_id="main", turn_id="t1", run_id="t1.1"), [4, 6, 7, 8]),
    ],
)
@pytest.mark.spec("FI-12")
def test_a_filter_selects_events_and_renumbers_none(narrow: EventFilter, sequences: list[int]) -> None:
    assert [event.sequence for event in two_threads().events if matches(narrow, event)] == sequences


# ---- snapshots ----


def test_a_snapshot_with_another_filter_or_session_is_refused() -> None:
    line = two_threads()
    whole = fold(line.events).snapshot()

    with pytest.raises(InvalidRequest):
        EventProjection(SESSION, EventFilter(thread_id="main")).reset(whole)
    with pytest.raises(InvalidRequest):
        EventProjection(SessionKey("app", "other")).reset(whole)


def test_a_projection_is_of_a_session_under_a_filter_and_of_nothing_else() -> None:
    for session, narrow in ((SESSION, "main"), (SESSION, 5), ("s1", None), (None, None)):
        with pytest.raises(InvalidRequest):
            EventProjection(session, narrow)  # type: ignore[arg-type]


FILTERS = (
    EventFilter(),
    EventFilter(thread_id="main"),
    EventFilter(thread_id="research", turn_id="t2"),
    EventFilter(thread_id="main", turn_id="t1", run_id="t1.1"),
)


def random_timeline(chance: random.Random, *, whole: bool = False) -> Timeline:
    """Events in an order that could happen, with recovery, revisions and calls that move to later Runs.

    `whole`: what is continued has begun, once, and what is told again has a higher revision.
    """
    line = Timeline()
    told: dict[str, int] = {}
    requested: set[str] = set()
    line.session("main", "research")
    turns = {"main": ["t1", "t3"], "research": ["t2"]}
    for thread, turn, ordinal in (("main", "t1", 1), ("main", "t3", 2), ("research", "t2", 1)):
        line.turn(thread, turn, ordinal, TurnStatus.QUEUED)
    ended: set[str] = set()
    revision = 1
    for _ in range(chance.randrange(60)):
        thread = chance.choice(list(turns))
        turn = chance.choice(turns[thread])
        run = f"{turn}.{chance.randint(1, 2)}"
        revision += 1
        match chance.randrange(9):
            case 0 if turn not in ended:
                status = chance.choice(list(TurnStatus))
                line.turn(thread, turn, 1 + turns[thread].index(turn), status, revision)
                if status.terminal:
                    ended.add(turn)
            case 1 | 2:
                attempt, version = chance.randint(1, 2), chance.randint(1, 2)
                name = f"{turn}.r{chance.randint(1, 2)}"
                if whole:
                    attempt, version = 1, told.get(name, 0) + 1
                    told[name] = version
                line.message(thread, turn, name, f"text {revision}", run, attempt=attempt, revision=version)
            case 3:
                call = f"c{chance.randint(1, 2)}"
                if whole and f"{turn} {call}" in requested:
                    continue
                requested.add(f"{turn} {call}")
                line.requested(thread, turn, call, run)
            case 4 | 5 if whole and {f"{turn} c1", f"{turn} c2"} - requested:
                continue
            case 4:
                state = chance.choice(["RUNNING", "COMPLETED", "UNKNOWN"])
                event_type = {"RUNNING": "tool.started", "COMPLETED": "tool.completed", "UNKNOWN": "tool.unknown"}[
                    state
                ]
                line.tool(event_type, thread, turn, f"c{chance.randint(1, 2)}", chance.choice([None, run]), state=state)
            case 5:
                line.tool("tool.applied", thread, turn, f"c{chance.randint(1, 2)}", run, appliedAtMs=revision)
            case 6:
                event_type = chance.choice(["signal.accepted", "signal.applied", "signal.withdrawn", "signal.expired"])
                name = f"{turn}.r{chance.randint(1, 2)}"
                line.add(event_type, thread, turn, requestId=f"q-{turn}", operation="steer", messageId=name)
            case 7:
                asked = {"kind": "APPROVAL", "name": "rm", "arguments": None, "openedAtMs": 5}
                line.add("interaction.requested", thread, turn, run, interactionId=f"i-{turn}", callId="c1", **asked)
            case _:
                answer = {"outcome": "answered", "response": True, "requestId": "q"}
                line.add("interaction.resolved", thread, turn, interactionId=f"i-{turn}", callId="c1", **answer)
    return line


@pytest.mark.spec("PR-15", "ST-33")
@given(seed=st.integers(0, 2**32), at=st.floats(0, 1))
def test_a_snapshot_and_the_events_after_it_give_what_all_events_give(seed: int, at: float) -> None:
    line = random_timeline(random.Random(seed))
    cut = int(at * len(line.events))
    for narrow in FILTERS:
        if narrow.run_id is not None:
            # A Run's snapshot forgets what is with other Runs; see the test above for what it drops.
            continue
        stored = msgspec.json.encode(fold(line.events[:cut], narrow).snapshot())
        projection = EventProjection(SESSION, narrow)
        projection.reset(msgspec.json.decode(stored, type=SnapshotView))

        for event in line.events[cut:]:
            _ = projection.accept(event)

        assert projection.projection == fold(line.events, narrow).projection


@pytest.mark.spec("PR-17", "FI-12")
@given(seed=st.integers(0, 2**32))
def test_the_matching_events_alone_give_the_same_as_all_of_them(seed: int) -> None:
    line = random_timeline(random.Random(seed))
    for narrow in FILTERS:
        if narrow.run_id is not None:
            continue
        matching = [event for event in line.events if matches(narrow, event)]

        assert fold(matching, narrow).projection == fold(line.events, narrow).projection


@pytest.mark.spec("PR-01")
@given(seed=st.integers(0, 2**32))
def test_a_projection_is_json(seed: int) -> None:
    projection = fold(random_timeline(random.Random(seed)).events).projection

    stored = msgspec.json.encode(projection)

    assert msgspec.json.decode(stored, type=Projection) == projection
    assert b"_" not in b"".join(key.encode() for key in _names(msgspec.json.decode(stored)))


def _names(value: Any) -> set[str]:
    """The field names in a projection: keys of maps by id are not names."""
    names: set[str] = set()
    for field, entries in value.items():
        names.add(field)
        if field != "session":
            for entry in entries.values():
                names |= set(entry)
    return names
