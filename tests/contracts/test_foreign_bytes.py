"""What comes from a client, a model or another host and is not what it should be: the documented answer, and no other.

Stored bytes are broken in tests/museum/test_broken_bytes.py.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentscope_durable.adapters.agentscope import workspace
from agentscope_durable.adapters.agentscope.codec import parse_arguments
from agentscope_durable.backend import sweep
from agentscope_durable.backend.queries.pages import cursor_after, uncursor
from agentscope_durable.contracts.errors import InvalidCursor, InvalidRequest
from agentscope_durable.contracts.events import cursor_of, sequence_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.transports.machine.frames import Frames, Malformed

KEY = SessionKey("app", "one")
DEEP = "[" * 100_000

READERS: dict[str, Callable[[Any], object]] = {
    "event": lambda cursor: sequence_of(KEY, cursor),
    "listing": lambda cursor: uncursor("turns", cursor, str, KEY),
    "sweep": sweep.place_of,
    "workspace": workspace.place_after,
}
WRITTEN = [cursor_of(KEY, 7), cursor_after("turns", "x", KEY), "s:a:app/one", "f:17:b", ""]


def encoded(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return base64.urlsafe_b64encode(raw).decode()


@st.composite
def cursors(draw: st.DrawFn) -> Any:
    """Anything a client may send back as a cursor: one of ours with a character changed, a JSON of its own, rubbish."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        cursor = draw(st.sampled_from(WRITTEN))
        at = draw(st.integers(0, len(cursor)))
        return cursor[:at] + draw(st.text(max_size=2)) + cursor[at + draw(st.integers(0, 2)) :]
    if kind == 1:
        return encoded(
            draw(st.sampled_from(['["turns","",1]', "null", "[]", '["a"]', "1e999", '"\\ud800"', "{}", '[["a"]]']))
        )
    if kind == 2:
        return draw(st.text(st.characters(), max_size=30))
    return draw(st.none() | st.integers() | st.binary(max_size=8) | st.lists(st.text(max_size=3), max_size=3))


@pytest.mark.parametrize("reader", READERS)
@given(cursor=cursors())
@example(cursor=encoded(DEEP))
@example(cursor=encoded(f'["turns","x",{DEEP}'))
@example(cursor="e1-" + "9" * 12 + "-" + "9" * 5000)
@example(cursor="\ud800")
@example(cursor="e1-000000000000-\u0663")
def test_any_cursor_is_read_or_is_no_cursor(reader: str, cursor: Any) -> None:
    if cursor is None:
        return  # the start of a listing
    try:
        READERS[reader](cursor)
    except InvalidRequest as error:
        assert isinstance(error, InvalidCursor) or error.path


@pytest.mark.parametrize("cursor", [7, b"s:a:b/c", ["s"]])
def test_what_is_no_text_is_no_cursor_of_a_sweep(cursor: object) -> None:
    with pytest.raises(InvalidCursor):
        sweep.place_of(cursor)  # type: ignore[arg-type]


@pytest.mark.parametrize("reader", ["listing", "workspace"])
def test_a_cursor_of_endless_nesting_is_no_cursor(reader: str) -> None:
    """It ended a request with RecursionError, which no client was told of (0033)."""
    with pytest.raises(InvalidCursor):
        READERS[reader](encoded(DEEP))


@given(st.text(st.characters(), max_size=40))
@example(DEEP)
@example('{"a":' * 5000)
@example('{"a":1e999}')
@example("\ud800")
def test_arguments_of_a_model_are_looked_at_and_never_trusted(text: str) -> None:
    assert isinstance(parse_arguments(text), dict)


def test_arguments_of_endless_nesting_are_none() -> None:
    """A model may write what it likes: this went through as RecursionError (0033)."""
    assert parse_arguments('{"a":' + DEEP) == {}


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_of_a_neighbour_are_frames_or_malformed(pieces: list[bytes]) -> None:
    frames = Frames()
    try:
        for piece in pieces:
            for _ in frames.take(piece):
                pass
    except Malformed:
        pass
