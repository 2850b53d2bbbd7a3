"""What is shown is shown and never obeyed; and how a Session is written."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.cli.extra import Console
from agentscope_durable.cli.output import ago, cell, instant, lasting, table, visible
from agentscope_durable.cli.store import parse_session, spell
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.identity import SessionKey

NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs")) | st.sampled_from("/%2Ff5"), min_size=1, max_size=20)


@given(NAMES, NAMES)
def test_a_session_is_read_back_as_it_was_written(namespace: str, session_id: str) -> None:
    key = SessionKey(namespace, session_id)

    assert parse_session(spell(key)) == key


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("app/c1", SessionKey("app", "c1")),
        ("app/2026/11/30", SessionKey("app", "2026/11/30")),
        ("a%2fb/c", SessionKey("a/b", "c")),
        ("100%/50% off", SessionKey("100%", "50% off")),
    ],
)
def test_what_a_person_types_is_a_session(text: str, key: SessionKey) -> None:
    assert parse_session(text) == key


@pytest.mark.parametrize("text", ["app", "", "/c1", "app/", "app/c\x1b1"])
def test_what_is_no_session_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_session(text)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain\ttext\nwith lines", "plain\ttext\nwith lines"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x9b31m", "\\x9b31m"),
        ("pay 100 \u202eSRO OT", "pay 100 \\u202eSRO OT"),
        ("a\u2066b\u2069c\u200f", "a\\u2066b\\u2069c\\u200f"),
        ("bell\x07 back\x08 return\r null\x00", "bell\\x07 back\\x08 return\\x0d null\\x00"),
        ("日本語 é 👍🏽", "日本語 é 👍🏽"),
    ],
)
def test_what_could_act_on_a_terminal_is_shown_instead(said: str, shown: str) -> None:
    assert visible(said) == shown


@given(st.text())
def test_a_cell_is_one_line_without_a_control_character(said: str) -> None:
    shown = cell(said).plain

    assert not any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in shown)


def test_times_are_read_by_everyone_alike() -> None:
    assert instant(1_796_044_350_811) == "2026-11-30 13:12:30.811Z"
    assert instant(None) == ""
    assert [lasting(ms) for ms in (0, 900, 61_000, 7_200_000, 259_200_000)] == [
        "0 s",
        "0.9 s",
        "1.02 min",
        "2 h",
        "3 d",
    ]
    assert ago(5000, 3000) == "2 s ago" and ago(3000, 5000) == "in 2 s"


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_an_id_to_type_stays_in_one_piece_in_a_narrow_terminal(columns: int) -> None:
    out = io.StringIO()
    names = ("RUN", "STATUS", "HOST", "STARTED", "ENDED", "ERROR")
    time = instant(1_796_044_350_811)
    rows = [(f"tzdayr4ovwej4nwf3.{n}", "COMPLETED", "vm-11722-3d9fa3a069fe74a8", time, time, None) for n in range(3)]

    table(Console(file=out, width=columns), names, rows)

    words = out.getvalue().split()
    assert [word for word in words if word.startswith("tzd")] == [row[0] for row in rows]
    assert max(map(len, out.getvalue().splitlines())) <= columns


def test_an_id_that_is_longer_than_a_terminal_loses_nothing() -> None:
    out, name = io.StringIO(), "app/" + "x" * 256

    table(Console(file=out, width=80), ("SESSION", "STATUS", "CREATED"), [(name, "OPEN", instant(0))])

    assert out.getvalue().count("x") == 256
