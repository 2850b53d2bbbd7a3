"""Text on its way: drawn in one place by message, attempt and offset, and gone when its fact comes (D22)."""

from __future__ import annotations

from typing import Any

from agentscope_durable.cli.previews import PREVIEWS_MAX, SHOWN_CHARS, Previews
from agentscope_durable.contracts.events import EventDelta, PreviewStarted, PublicEvent
from agentscope_durable.contracts.identity import SessionKey


def start(message: str = "t1.r1", attempt: int = 1, call: str | None = None) -> PreviewStarted:
    kind = "message" if call is None else "tool_arguments"
    return PreviewStarted(kind, "main", "t1", message, attempt, call_id=call, name=None if call is None else "deploy")


def delta(text: str, offset: int, message: str = "t1.r1", attempt: int = 1, call: str | None = None) -> EventDelta:
    kind = "message" if call is None else "tool_arguments"
    return EventDelta(kind, "main", "t1", message, attempt, offset, text, call_id=call)


def fact(kind: str, **data: Any) -> PublicEvent:
    return PublicEvent(type=kind, session=SessionKey("a", "s"), sequence=1, at_ms=1, data=data, turn_id="t1")


def shown(previews: Previews) -> list[tuple[str, int, str]]:
    return [(preview.call_id or preview.message_id, preview.attempt, preview.tail) for preview in previews]


def test_pieces_are_joined_where_they_belong() -> None:
    previews = Previews()
    previews.started(start())
    previews.started(start(call="c1"))
    previews.delta(delta("Hel", 0))
    previews.delta(delta('{"a"', 0, call="c1"))
    previews.delta(delta("lo", 3))

    assert shown(previews) == [("t1.r1", 1, "Hello"), ("c1", 1, '{"a"')]


def test_a_gap_ends_a_preview_until_its_fact() -> None:
    previews = Previews()
    previews.started(start())
    previews.delta(delta("Hel", 0))
    previews.delta(delta("!", 5))
    previews.delta(delta("lo", 3))

    assert not previews


def test_a_stranger_is_not_shown_from_its_middle() -> None:
    previews = Previews()
    previews.delta(delta("lo", 3))

    assert not previews


def test_a_later_attempt_replaces_the_earlier_one_and_is_never_glued_to_it() -> None:
    previews = Previews()
    previews.started(start())
    previews.delta(delta("Hel", 0))
    previews.started(start(attempt=2))
    previews.delta(delta("lo", 3))
    previews.delta(delta("Bye", 0, attempt=2))
    previews.started(start(attempt=1))

    assert shown(previews) == [("t1.r1", 2, "Bye")]


def test_the_fact_takes_its_preview_away() -> None:
    previews = Previews()
    for one in (start(), start("t1.r2"), start(call="c1"), start("t2.r1")):
        previews.started(one)

    previews.fact(fact("message.completed", messageId="t1.r1"))
    assert [name for name, *_ in shown(previews)] == ["t1.r2", "c1", "t2.r1"]
    previews.fact(fact("tool.requested", callId="c1"))
    assert [name for name, *_ in shown(previews)] == ["t1.r2", "t2.r1"]
    previews.started(start("t2.r1", call="c1"))
    previews.fact(fact("tool.requested", callId="c1"))
    assert [name for name, *_ in shown(previews)] == ["t1.r2", "t2.r1", "c1"], "another Turn has a call of that id"
    previews.fact(fact("turn.status", turn={"status": "CANCELLED"}))
    assert [name for name, *_ in shown(previews)] == ["t2.r1", "c1"]


def test_an_abandoned_attempt_is_void_and_a_later_one_is_not() -> None:
    previews = Previews()
    previews.started(start(attempt=2))
    previews.fact(fact("message.abandoned", messageId="t1.r1", attempt=1))
    assert shown(previews) == [("t1.r1", 2, "")]
    previews.fact(fact("message.abandoned", messageId="t1.r1", attempt=2))

    assert not previews


def test_the_screen_is_bounded() -> None:
    previews = Previews()
    for number in range(PREVIEWS_MAX + 5):
        previews.started(start(f"t1.r{number}"))
    last = f"t1.r{PREVIEWS_MAX + 4}"
    previews.delta(delta("x" * 10_000, 0, last))
    previews.delta(delta("y", 10_000, last))

    found = shown(previews)
    assert len(found) == PREVIEWS_MAX
    assert found[-1][2] == "x" * (SHOWN_CHARS - 1) + "y"
