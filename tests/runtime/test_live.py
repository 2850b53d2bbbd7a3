"""Previews that wait for an observer: bounded, and without a hole (D22)."""

from __future__ import annotations

import pytest

from agentscope_durable.assembly import LiveEvents
from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.live import PREVIEW_CHARS_MAX, PREVIEWS_MAX, PreviewQueue

KEY = SessionKey("app", "c1")


def start(message: str = "m", attempt: int = 1, call: str | None = None) -> PreviewStarted:
    return PreviewStarted("message" if call is None else "tool_arguments", "main", "t", message, attempt, call)


def delta(offset: int, text: str, message: str = "m", attempt: int = 1, call: str | None = None) -> EventDelta:
    return EventDelta(
        "message" if call is None else "tool_arguments", "main", "t", message, attempt, offset, text, call
    )


def queue() -> PreviewQueue:
    return PreviewQueue(lambda preview: True, lambda: None)


def drain(waiting: PreviewQueue) -> list[object]:
    found = []
    while waiting:
        found.append(waiting.pop())
    return found


def test_previews_come_in_their_order() -> None:
    waiting = queue()
    for preview in (start(), delta(0, "a"), delta(1, "b")):
        waiting(preview)

    assert drain(waiting) == [start(), delta(0, "a"), delta(1, "b")]


@pytest.mark.spec("ST-28")
def test_a_delta_without_its_beginning_is_dropped() -> None:
    waiting = queue()
    waiting(delta(0, "a"))
    waiting(delta(5, "f"))

    assert drain(waiting) == []


def test_a_gap_ends_the_preview() -> None:
    waiting = queue()
    for preview in (start(), delta(0, "a"), delta(3, "d"), delta(1, "b"), start(attempt=2), delta(0, "x", attempt=2)):
        waiting(preview)

    assert drain(waiting) == [start(), delta(0, "a"), start(attempt=2), delta(0, "x", attempt=2)]


def test_a_full_queue_joins_increments() -> None:
    waiting = queue()
    waiting(start())
    for number in range(10 * PREVIEWS_MAX):
        waiting(delta(number, "x"))
    found = drain(waiting)

    assert len(found) == PREVIEWS_MAX
    assert "".join(item.text for item in found[1:]) == "x" * 10 * PREVIEWS_MAX


def test_what_cannot_be_joined_ends_its_preview() -> None:
    waiting = queue()
    for number in range(PREVIEWS_MAX):
        waiting(start(f"m{number}"))
    waiting(delta(0, "a", "m0"))
    waiting(delta(1, "b", "m0"))
    waiting(start("late"))
    waiting(delta(0, "a", "late"))

    assert drain(waiting) == [start(f"m{number}") for number in range(PREVIEWS_MAX)]


def test_a_joined_increment_is_bounded() -> None:
    waiting = queue()
    waiting(start())
    for number in range(PREVIEWS_MAX):
        waiting(delta(number, "x"))
    waiting(delta(PREVIEWS_MAX, "y" * PREVIEW_CHARS_MAX))
    waiting(delta(PREVIEWS_MAX + PREVIEW_CHARS_MAX, "z"))

    assert not any("z" in getattr(item, "text", "") for item in drain(waiting))


def test_after_its_fact_nothing_of_a_message_is_shown() -> None:
    waiting = queue()
    waiting(start())
    waiting(delta(0, "a"))
    assert waiting.take_message("m") == [start(), delta(0, "a")]
    waiting.close_message("m")
    waiting(delta(1, "b"))

    assert drain(waiting) == []


def test_arguments_of_a_call_end_with_the_call() -> None:
    waiting = queue()
    for preview in (start(), start(call="c1"), delta(0, "{", call="c1"), delta(0, "a")):
        waiting(preview)
    assert waiting.take_call("t", "c1") == [start(call="c1"), delta(0, "{", call="c1")]
    waiting.close_call("t", "c1")
    waiting(delta(1, "}", call="c1"))

    assert drain(waiting) == [start(), delta(0, "a")]


@pytest.mark.spec("ST-24", "ST-26")
def test_local_events_reach_those_who_are_attached_and_an_error_reaches_nobody() -> None:
    live = LiveEvents.local()
    seen: list[object] = []

    def broken(preview: object) -> None:
        raise RuntimeError("an observer's defect")

    assert not live.wanted(KEY)
    live.attach(KEY, broken)
    live.attach(KEY, seen.append)
    assert live.wanted(KEY)
    live.publish(KEY, start())
    live.publish(SessionKey("app", "other"), start())
    live.detach(KEY, seen.append)
    live.detach(KEY, broken)
    live.publish(KEY, start())

    assert len(seen) == 1


def test_detaching_twice_is_fine() -> None:
    live = LiveEvents.local()
    listener = queue()
    live.attach(KEY, listener)
    live.detach(KEY, listener)
    live.detach(KEY, listener)

    assert not live.wanted(KEY)
