"""The strict codec: what enters is carried exactly or refused with its path; what happened is never refused."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from enum import IntEnum, StrEnum
from hashlib import sha256
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.errors import InvalidRequest

LARGEST = 2**53 - 1


def refusal_of(text: str | bytes, **options: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        durable_json.loads(text, **options)
    return caught.value


def refusal_of_value(obj: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        durable_json.value(obj)
    return caught.value


# Text that UTF-8 can carry; everything else is a case of its own.
texts = st.text(st.characters(exclude_categories=["Cs"]))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-LARGEST, LARGEST)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5), max_leaves=25
)


def same(left: object, right: object) -> bool:
    """Equal to the last bit: 1 is not 1.0, and -0.0 is not 0.0."""
    return repr(left) == repr(right)


# ------------------------------------------------------------ what is carried


@given(values)
def test_every_json_value_comes_back_exactly(value: Any) -> None:
    assert same(durable_json.value(value), value)
    assert same(durable_json.loads(json.dumps(value)), value)
    assert same(durable_json.loads(json.dumps(value, ensure_ascii=False).encode()), value)


@pytest.mark.case("C63")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("a\x00b", id="U+0000"),
        pytest.param("\uffff", id="U+FFFF"),
        pytest.param("\U0001f469\u200d\U0001f680", id="emoji joined"),
        pytest.param("e\u0301 is not \u00e9", id="combining mark"),
        pytest.param("\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd", id="right to left"),
        pytest.param("x" * 1024 * 1024, id="one line of 1 MiB"),
    ],
)
def test_unusual_text_is_carried_exactly(text: str) -> None:
    assert durable_json.value({text: [text]}) == {text: [text]}
    for ascii_only in (True, False):
        written = json.dumps({text: [text]}, ensure_ascii=ascii_only).encode()
        assert durable_json.loads(written) == {text: [text]}
    assert durable_json.tool_value({text: text}) == ({text: text}, None)
    assert durable_json.sanitize_text(text) == text


def test_a_value_is_a_copy_of_plain_types() -> None:
    class Colour(StrEnum):
        RED = "red"

    class Size(IntEnum):
        BIG = 3

    inner = [1]
    given_ = OrderedDict({Colour.RED: (Size.BIG, inner)})

    copied = durable_json.value(given_)
    inner.append(2)

    assert copied == {"red": [3, [1]]}
    assert type(copied) is dict
    key, parts = next(iter(copied.items()))
    assert type(key) is str and type(parts) is list and type(parts[0]) is int


# ------------------------------------------------------------ what is refused


@pytest.mark.spec("PT-04")
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"a":1,"a":2}', "$.a"),
        ('{"a":1,"\\u0061":1}', "$.a"),
        ('{"x":[0,{"b":{},"c":1,"b":{}}]}', "$.x[1].b"),
        ('{"":1,"":1}', '$[""]'),
    ],
)
def test_a_repeated_key_is_refused_with_its_path(text: str, path: str) -> None:
    error = refusal_of(text)

    assert error.path == path
    assert "repeated" in error.reason


@pytest.mark.spec("PT-05")
@pytest.mark.parametrize("text", ["{}{}", "1 2", "[],", "null\nnull", '""""'])
def test_a_second_root_is_refused(text: str) -> None:
    assert "more than one root" in refusal_of(text).reason


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "[1,]", "{'a':1}", "01", "+1", ".5", "1.", "nul", '"\t"', '"\\x"', "/**/1", "\ufeff{}", "tru"],
)
def test_what_is_not_json_is_refused(text: str) -> None:
    error = refusal_of(text)

    assert error.path is None
    assert "not JSON" in error.reason or "root" in error.reason


@pytest.mark.parametrize("data", [b"\xff", b'"\xed\xa0\x80"', '{"a":1}'.encode("utf-16"), b'"\xc0\xaf"'])
def test_bytes_that_are_not_utf_8_are_refused(data: bytes) -> None:
    assert "UTF-8" in refusal_of(data).reason


@pytest.mark.spec("PT-06")
@pytest.mark.case("C65")
@pytest.mark.parametrize(
    "number",
    [
        "9007199254740992",
        "9007199254740993",
        "-9007199254740992",
        str(2**63),
        str(10**40),
        "9" * 5000,
        "0.1000000000000000055",
        "3.14159265358979323846264338327",
        "123456789012345678.5",
        "1e400",
        "-1e400",
        "1e-400",
        "1e99999999999999999999",
        "0e99999999999999999999",
    ],
)
def test_a_number_that_would_lose_precision_is_refused_with_its_path(number: str) -> None:
    error = refusal_of(f'{{"rows":[{{"id":1}},{{"id":{number}}}]}}')

    assert error.path == "$.rows[1].id"
    assert "as a string" in error.reason


@pytest.mark.spec("PT-06")
@pytest.mark.case("C65")
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("9007199254740991", LARGEST),
        ("-9007199254740991", -LARGEST),
        ("0.1", 0.1),
        ("0.10", 0.1),
        ("1.0", 1.0),
        ("1e2", 100.0),
        ("1E+2", 100.0),
        ("100000000000000000000.0", 1e20),
        ("5e-324", 5e-324),
        ("1.7976931348623157e308", sys.float_info.max),
        ("-0.0", -0.0),
        ("0.000001", 1e-6),
    ],
)
def test_a_number_that_a_float_stands_for_is_carried(text: str, number: float) -> None:
    assert same(durable_json.loads(text), number)


@pytest.mark.spec("PT-06")
@given(st.decimals(allow_nan=False, allow_infinity=False).map(lambda d: format(d, "e")))
def test_a_decimal_is_carried_if_and_only_if_it_is_kept(text: str) -> None:
    try:
        carried = durable_json.loads(f"[{text}]")
    except InvalidRequest as error:
        assert error.path == "$[0]"
        assert not math.isfinite(float(text)) or Decimal(repr(float(text))) != Decimal(text)
    else:
        assert isinstance(carried, list) and isinstance(carried[0], int | float)
        assert Decimal(repr(carried[0])) == Decimal(text)


@pytest.mark.case("C65")
def test_exact_large_numbers_travel_as_strings() -> None:
    digits = {"id": str(10**40), "price": "3.14159265358979323846264338327"}

    assert durable_json.loads(durable_json.canonical(digits)) == digits


@pytest.mark.spec("PT-09")
@pytest.mark.case("C64")
@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_in_text_and_in_a_value_alike(name: str) -> None:
    for error in (refusal_of(f'{{"a":[{name}]}}'), refusal_of_value({"a": [float(name)]})):
        assert error.path == "$.a[0]"
        assert "NaN" in error.reason


@pytest.mark.case("C64")
def test_minus_zero_is_kept_and_has_the_digest_of_zero() -> None:
    assert same(durable_json.value(-0.0), -0.0)
    assert durable_json.digest(-0.0) == durable_json.digest(0) == durable_json.digest(0.0)


@pytest.mark.spec("PT-09")
@pytest.mark.case("C63")
@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"a":"\\ud800"}', "$.a"),
        ('{"a":["x","\\uDFFF y"]}', "$.a[1]"),
        ('{"a":"\\ude00\\ud83d"}', "$.a"),
        ('{"\\ud800":1}', '$["\\ud800"]'),
        ('["\ud800"]', "$[0]"),
    ],
)
def test_a_lone_surrogate_is_refused_with_its_path(text: str, path: str) -> None:
    error = refusal_of(text)

    assert error.path == path
    assert "surrogate" in error.reason
    assert str(error).isprintable()


def test_a_pair_of_escaped_surrogates_is_one_character() -> None:
    assert durable_json.loads('"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.spec("PT-09")
@pytest.mark.parametrize("text", ["[]", "1", '"a"', "null", "true"])
def test_another_root_is_refused_where_an_object_is_needed(text: str) -> None:
    assert "object" in refusal_of(text, root="object").reason
    durable_json.loads(text)


@pytest.mark.parametrize(
    ("obj", "path", "word"),
    [
        ({"a": LARGEST + 1}, "$.a", "string"),
        ([-(2**63)], "$[0]", "string"),
        ({"a": {"b": [1, math.inf]}}, "$.a.b[1]", "NaN"),
        ({"a": "\udc00"}, "$.a", "surrogate"),
        ({"\ud800": 1}, '$["\\ud800"]', "surrogate"),
        ({"a": {1: 2}}, "$.a", "int"),
        ({None: 2}, "$", "NoneType"),
        ({"a": Decimal("1.5")}, "$.a", "Decimal"),
        ((b"x",), "$[0]", "bytes"),
        ({"at": datetime.now(UTC)}, "$.at", "datetime"),
        ({"s": {1}}, "$.s", "set"),
        (object(), "$", "object"),
        ({"f": len}, "$.f", "builtin"),
        ({"with space": {"ok": object()}}, '$["with space"].ok', "object"),
        ({"x" * 500: object()}, f'$["{"x" * 64}..."]', "object"),
    ],
)
@pytest.mark.spec("MG-09", "PT-06", "PT-09")
def test_an_object_that_is_not_json_is_refused_with_its_path(obj: object, path: str, word: str) -> None:
    error = refusal_of_value(obj)

    assert error.path == path
    assert word in error.reason


def test_a_refusal_never_repeats_the_value() -> None:
    secret = "sk-4242424242"

    assert "4242" not in str(refusal_of('{"a":424242424242424242424242}'))
    assert secret not in str(refusal_of_value({"a": [secret + "\ud800"]}))


# ------------------------------------------------------------ depth


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def test_128_levels_are_carried_and_129_are_refused() -> None:
    deepest = nested(128)
    assert durable_json.value(deepest) == deepest
    assert durable_json.loads(json.dumps(deepest)) == deepest
    assert durable_json.canonical(deepest) == json.dumps(deepest, separators=(",", ":")).encode()

    for error in (refusal_of(json.dumps(nested(129))), refusal_of_value(nested(129))):
        assert "deeper than 128" in error.reason
        assert error.path is not None and error.path.startswith("$[0][0][0]")
    with pytest.raises(InvalidRequest):
        durable_json.canonical(nested(129))


def test_the_place_where_it_is_too_deep_is_named() -> None:
    text = '{"a\\"]":["[[[",{"k":1,"deep":' + "[" * 200 + "]" * 200 + "}]}"

    path = refusal_of(text).path

    assert path is not None and path.startswith('$["a\\"]"][1].deep[0][0]')
    assert path.endswith("...")


@pytest.mark.parametrize("unit", ["[", '{"a":', '[{"a":'])
def test_a_depth_bomb_is_refused_before_it_is_parsed(unit: str) -> None:
    limit = sys.getrecursionlimit()
    # A program may have raised it; the parser would then recurse until the stack ends.
    sys.setrecursionlimit(1_000_000)
    try:
        assert "deeper than 128" in refusal_of(unit * 500_000).reason
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("fill", ["[" * 300, "{" * 300, '\\"[' * 300, "\\\\", '\\\\\\"' + "[" * 300])
def test_brackets_within_text_are_not_depth(fill: str) -> None:
    text = f'[{"[]," * 200}"{fill}"]'

    assert durable_json.loads(text) == json.loads(text)


def test_an_object_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)

    assert "deeper than 128" in refusal_of_value(loop).reason


@given(st.text(alphabet='[]{}"\\,:a1 ', max_size=40))
def test_any_text_is_read_as_the_plain_parser_does_or_refused(text: str) -> None:
    try:
        read = durable_json.loads(text)
    except InvalidRequest:
        return
    assert read == json.loads(text)


@given(st.text(alphabet='[]{}"\\,:a', max_size=20), st.integers(100, 160))
def test_depth_is_counted_before_parsing_as_the_parser_counts_it(noise: str, levels: int) -> None:
    text = json.dumps([noise, [noise] * 150, nested(levels - 1)])

    if levels <= 128:
        assert durable_json.loads(text) == json.loads(text)
    else:
        assert "deeper" in refusal_of(text).reason


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        durable_json.loads(data)


# ------------------------------------------------------------ what has already happened


@pytest.mark.case("C63")
@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udfff", "\ufffd"),
        ("ends with \ud83d", "ends with \ufffd"),
        ("\ud83d\ude00 cut by a stream", "\U0001f600 cut by a stream"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ufeff\x00\uffff", "\ufeff\x00\uffff"),
    ],
)
def test_a_lone_surrogate_that_happened_becomes_the_replacement_character(text: str, kept: str) -> None:
    assert durable_json.sanitize_text(text) == kept
    assert durable_json.tool_value({"out": [text]}) == ({"out": [kept]}, None)


@given(st.text(st.characters()))
def test_sanitized_text_can_be_stored_and_stays_the_same(text: str) -> None:
    once = durable_json.sanitize_text(text)

    assert once.encode().decode() == once
    assert durable_json.sanitize_text(once) == once


@pytest.mark.case("C64", "C65")
@pytest.mark.parametrize(
    "number", [math.nan, math.inf, -math.inf, 2**53, 2**63, 10**40, Decimal("0.1"), Decimal("3.14159265358979323846")]
)
def test_a_tool_value_json_cannot_carry_becomes_an_error_that_names_the_path(number: object) -> None:
    value, error = durable_json.tool_value({"rows": [{"id": number}]})

    assert value is None
    assert error is not None and "$.rows[0].id" in error


@pytest.mark.case("C65")
def test_digits_that_a_tool_gives_as_text_stay_exact() -> None:
    assert durable_json.tool_value({"id": str(2**63)}) == ({"id": "9223372036854775808"}, None)


def test_two_keys_that_become_one_are_an_error_and_no_loss() -> None:
    lone = "\ud800"

    value, error = durable_json.tool_value({"\ufffd": 1, lone: 2})

    assert value is None
    assert error is not None and "repeated" in error


def test_a_tool_value_that_cannot_even_be_read_is_an_error() -> None:
    class Hostile(dict[str, object]):
        def items(self) -> Any:
            raise RuntimeError("no")

    value, error = durable_json.tool_value([Hostile()])

    assert value is None
    assert error is not None and "RuntimeError" in error


def test_no_result_is_a_value_and_no_error() -> None:
    assert durable_json.tool_value(None) == (None, None)


class Unmapped(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


def test_a_mapping_that_is_no_dict_is_refused_rather_than_guessed_at() -> None:
    assert "Unmapped" in refusal_of_value({"m": Unmapped()}).reason


# ------------------------------------------------------------ canonical form


@given(values)
def test_the_canonical_form_is_rfc_8785(value: Any) -> None:
    assert durable_json.canonical(value) == rfc8785.dumps(value)


ordinary = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-LARGEST, LARGEST)
    | st.floats(-1e16, 1e16, allow_nan=False)
    | st.decimals(-1000, 1000, places=3).map(float)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="ascii")), inner),
    max_leaves=20,
)


@given(ordinary)
def test_the_short_way_for_ordinary_values_writes_the_same_bytes(value: Any) -> None:
    assert durable_json.canonical(value) == rfc8785.dumps(value)


@pytest.mark.spec("PT-07")
@pytest.mark.case("C64", "C65")
@given(values)
def test_a_digest_is_the_same_before_and_after_the_wire(value: Any) -> None:
    before = durable_json.digest(value)

    for written in (json.dumps(value, indent=3), json.dumps(value, sort_keys=True, ensure_ascii=False)):
        assert durable_json.digest(durable_json.loads(written)) == before


@pytest.mark.spec("PT-07")
def test_a_digest_does_not_depend_on_order_and_white_space() -> None:
    one = durable_json.loads('{"b":[1,{"y":1,"x":2}],"a":null}')
    other = durable_json.loads(' { "a" : null, "b" : [ 1.0 , { "x" : 2, "y" : 1 } ] } ')

    assert durable_json.digest(one) == durable_json.digest(other)
    assert durable_json.digest(one) == sha256(b'{"a":null,"b":[1,{"x":2,"y":1}]}').hexdigest()


def test_the_examples_of_rfc_8785_section_3() -> None:
    # Section 3.2.2 and 3.2.4, with the number that this library refuses to read left out of the literals.
    value = {
        "numbers": [333333333.33333329, 1e30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000f\u000aA'\u0042\u0022\u005c\\\"/",
        "literals": [None, True, False],
    }
    assert (
        durable_json.canonical(value)
        == (
            '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
            '"string":"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        ).encode()
    )
    # Section 3.2.3: keys by UTF-16 code units, so that U+1F600 stands before U+FB33.
    unsorted = {
        "\u20ac": "Euro Sign",
        "\r": "Carriage Return",
        "\ufb33": "Hebrew Letter Dalet With Dagesh",
        "1": "One",
        "\U0001f600": "Emoji: Grinning Face",
        "\u0080": "Control",
        "\u00f6": "Latin Small Letter O With Diaeresis",
    }
    ordered = list(json.loads(durable_json.canonical(unsorted)))
    assert ordered == ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize(
    ("ieee", "written"),
    [
        # RFC 8785 appendix B.
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("ffefffffffffffff", "-1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"),
        ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_the_numbers_of_rfc_8785_appendix_b(ieee: str, written: str) -> None:
    number = struct.unpack(">d", bytes.fromhex(ieee))[0]

    assert durable_json.canonical(number) == written.encode()
    assert durable_json.canonical([number]) == f"[{written}]".encode()


@pytest.mark.parametrize("obj", [math.nan, {"a": 2**53}, ["\ud800"], {"a": object()}, {1: 2}, Decimal(1)])
def test_what_is_not_json_has_no_digest(obj: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        durable_json.digest(obj)
    assert caught.value.path is not None
