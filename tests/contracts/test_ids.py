"""One rule for every id: 1 to 256 characters, nothing unprintable by definition, kept exactly."""

from __future__ import annotations

import sys
import unicodedata
from enum import StrEnum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.ids import (
    ID_CHARS_MAX,
    MAIN_THREAD_ID,
    SessionKey,
    ThreadKey,
    check_id,
    check_key,
)


def refusal_of(value: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_id("session_id", value)
    return caught.value


@pytest.mark.case("C87")
@pytest.mark.parametrize(
    "value",
    [
        "/",
        "..",
        "../../etc/passwd",
        "%2F",
        " ",
        " a ",
        ".",
        "?",
        "#",
        "a#b?c=d&e",
        "\U0001f469\u200d\U0001f680",
        "\u00e9",
        "e\u0301",
        "CON",
        "nul.txt",
        "trailing.",
        "UPPER",
        "upper",
        "\\",
        "'; drop table head; --",
        "\u202eabc",
        "\u00a0",
        "\ufeff",
        "\uffff",
        "x" * ID_CHARS_MAX,
        "\U0001f600" * ID_CHARS_MAX,
    ],
)
def test_an_id_that_some_disk_or_url_dislikes_is_kept_exactly(value: str) -> None:
    assert check_id("session_id", value) == value


@pytest.mark.case("C87")
def test_twins_stay_two_ids() -> None:
    twins = ["\u00e9", "e\u0301", "E\u0301", "A", "a", "a ", "a."]

    assert len({check_id("session_id", twin) for twin in twins}) == len(twins)
    assert len({SessionKey("n", twin) for twin in twins}) == len(twins)


@pytest.mark.case("C87")
@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("", "empty"),
        ("x" * (ID_CHARS_MAX + 1), "257"),
        ("x" * 512, "512"),
        (None, "NoneType"),
        (7, "int"),
        (b"a", "bytes"),
    ],
)
def test_an_id_of_no_or_too_many_characters_or_of_another_type_is_refused(value: object, word: str) -> None:
    error = refusal_of(value)

    assert error.path == "session_id"
    assert word in error.reason


@pytest.mark.case("C63")
@pytest.mark.parametrize("character", ["\x00", "\n", "\t", "\x1f", "\x7f", "\x85", "\x9f", "\ud800", "\udfff"])
def test_a_control_character_or_lone_surrogate_is_refused_by_its_number(character: str) -> None:
    error = refusal_of(f"ab{character}c")

    assert f"U+{ord(character):04X}" in error.reason
    assert "character 2" in error.reason
    assert str(error).isprintable()


def test_exactly_the_categories_cc_and_cs_are_refused() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        refused = unicodedata.category(character) in ("Cc", "Cs")
        try:
            check_id("session_id", character)
        except InvalidRequest:
            assert refused, hex(number)
        else:
            assert not refused, hex(number)


def test_a_refusal_does_not_repeat_the_id() -> None:
    assert "secret" not in str(refusal_of("secret\n"))


def test_a_member_of_an_enum_becomes_its_text() -> None:
    class Name(StrEnum):
        FIRST = "first"

    assert type(check_id("session_id", Name.FIRST)) is str


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=ID_CHARS_MAX))
def test_every_accepted_id_survives_the_wire_unchanged(value: str) -> None:
    key = ThreadKey(SessionKey(value, check_id("session_id", value)), value)

    check_key(key)
    assert msgspec.json.decode(msgspec.json.encode(key), type=ThreadKey) == key


def test_a_key_names_the_id_that_is_wrong() -> None:
    good = SessionKey("application", "conversation-1")
    check_key(good)
    check_key(ThreadKey(good))

    for key, path in [
        (SessionKey("", "s"), "namespace"),
        (SessionKey("n", "\n"), "session_id"),
        (ThreadKey(good, ""), "thread_id"),
        (ThreadKey(SessionKey("n", "")), "session_id"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            check_key(key)
        assert caught.value.path == path


@pytest.mark.parametrize("given", ["conversation-1", ("application", "conversation-1"), None])
def test_what_is_no_key_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="SessionKey"):
        check_key(given)  # type: ignore[arg-type]


@pytest.mark.spec("PT-11")
def test_a_key_is_camel_case_on_the_wire_and_frozen_in_python() -> None:
    key = ThreadKey(SessionKey("application", "conversation-1"))

    assert key.thread_id == MAIN_THREAD_ID == "main"
    assert msgspec.json.encode(key) == (
        b'{"session":{"namespace":"application","sessionId":"conversation-1"},"threadId":"main"}'
    )
    with pytest.raises(AttributeError):
        key.thread_id = "other"  # type: ignore[misc]
