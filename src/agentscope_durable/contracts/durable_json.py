"""The one strict JSON codec for what enters from outside.

Rule 1: a value that enters is carried exactly or refused with its path. Refused: a repeated key, a second root, NaN and
Infinity, a number that would lose precision (an integer beyond 2^53-1, a decimal that no float stands for), a lone
surrogate, nesting beyond 128, an object that is not JSON. Exact large numbers travel as strings.
Rule 2: what has already happened is never refused. `sanitize_text` and `tool_value` never raise: an effect that took
place must not be lost because its description cannot be written down.
Rule 3: a digest is SHA-256 over RFC 8785, so 1 and 1.0 are one value, and the order of keys is no difference.

It is tempting to let a C parser do it all. Every one of them keeps the last of two equal keys and rounds numbers
silently, and both were real failures elsewhere. So a C parser runs with hooks, and the walk that finds the path runs
only when something was refused. Our own rows are decoded plainly: they passed here once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from decimal import Decimal, DecimalException
from hashlib import sha256
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

import msgspec
import rfc8785

from agentscope_durable.contracts.errors import InvalidRequest

__all__ = [
    "DEPTH_MAX",
    "EXACT_INTEGER_MAX",
    "UNREADABLE",
    "JsonValue",
    "canonical",
    "digest",
    "loads",
    "sanitize_text",
    "tool_value",
    "value",
]

if TYPE_CHECKING:
    JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
else:
    # A Struct with a field of this type must not make msgspec follow a recursive alias.
    JsonValue = Any

DEPTH_MAX: Final = 128
"""Objects and arrays around a value, the root included."""

EXACT_INTEGER_MAX: Final = 2**53 - 1
"""The largest integer that every JSON reader keeps exactly; the smallest is its negative."""

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What msgspec raises for stored or foreign bytes that are not what they should be.

Nesting without end is a RecursionError there and no error of msgspec's. It is raised long before a stack ends.
"""

_EXACT_DIGITS_MAX: Final = len(str(EXACT_INTEGER_MAX))
_PATH_CHARS_MAX: Final = 256
_KEY_CHARS_MAX: Final = 64

_INTEGER: Final = f"an integer beyond ±{EXACT_INTEGER_MAX} is not exact in JSON: send it as a string"
_DECIMAL: Final = "a number loses precision: send it as a string"
_NOT_FINITE: Final = "NaN and Infinity are not JSON"
_SURROGATE: Final = "a lone surrogate is not text"
_REPEATED: Final = "a key is repeated"
_DEPTH: Final = f"nesting is deeper than {DEPTH_MAX}"


class _Refused(Exception):
    """Why, and the way back to the root, innermost first. Becomes an InvalidRequest at the door."""

    def __init__(self, reason: str) -> None:
        self.reason: str = reason
        self.way: list[str | int] = []
        super().__init__(reason)

    def invalid_request(self) -> InvalidRequest:
        return InvalidRequest(self.reason, path=_path(self.way[::-1]))


# ------------------------------------------------------------ paths

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _path(segments: list[str | int]) -> str:
    """`$.content[0]["a key"]`, cut after 256 characters; always printable ASCII, since it ends up in logs."""
    parts: list[str] = []
    left = _PATH_CHARS_MAX
    for segment in segments:
        if isinstance(segment, int):
            part = f"[{segment}]"
        else:
            key = segment if len(segment) <= _KEY_CHARS_MAX else segment[:_KEY_CHARS_MAX] + "..."
            part = f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{json.dumps(key)}]"
        left -= len(part)
        if left < 0:
            parts.append("...")
            break
        parts.append(part)
    return "$" + "".join(parts)


# ------------------------------------------------------------ text


def _strict_text(text: str) -> str:
    if not text.isascii():
        try:
            _ = text.encode()
        except UnicodeEncodeError:
            raise _Refused(_SURROGATE) from None
    return text


def sanitize_text(text: str) -> str:
    """Text that already happened, as text that can be stored (PT-13). Never raises.

    A lone surrogate becomes U+FFFD; two halves that stand beside each other (a model's stream may cut between them)
    become the character they mean. Everything else, U+0000 and U+FFFF included, stays.
    """
    try:
        _ = text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    # A member of a StrEnum becomes its text.
    return text if type(text) is str else str.__str__(text)


# ------------------------------------------------------------ Python objects


def _scalar(obj: object, text: Callable[[str], str]) -> JsonValue:
    """One value that is no container, checked; a subclass becomes what it is a kind of."""
    if obj is None or obj is True or obj is False:
        return obj
    if isinstance(obj, str):
        return text(str.__str__(obj))
    if isinstance(obj, int):
        if not -EXACT_INTEGER_MAX <= obj <= EXACT_INTEGER_MAX:
            raise _Refused(_INTEGER)
        return int(obj)
    if isinstance(obj, float):
        if not isfinite(obj):
            raise _Refused(_NOT_FINITE)
        return float(obj)
    hint = {
        "Decimal": ": send it as a string",
        "bytes": ": send it as base64 text",
        "datetime": ": send it as an ISO 8601 string",
        "set": ": send it as a list",
    }.get(type(obj).__name__, "")
    raise _Refused(f"a {type(obj).__name__} is not JSON{hint}")


def _copy(obj: object, left: int, text: Callable[[str], str]) -> JsonValue:
    """A plain copy of `obj` with at most `left` levels of containers. The path is put together on the way out."""
    # The ordinary cases are spelt out in each loop: a call for every leaf would double the time; so would `cast`.
    # None: a key that is no str has no place in a path; the object that holds it is named.
    segment: str | int | None = None
    if isinstance(obj, dict):
        if left == 0:
            raise _Refused(_DEPTH)
        fields: dict[str, JsonValue] = {}
        try:
            for key, item in cast("dict[Any, Any]", obj).items():
                if type(key) is not str:
                    if not isinstance(key, str):
                        segment = None
                        raise _Refused(f"a key is a {type(key).__name__}, not a str")
                    key = str.__str__(key)
                segment = key
                if not key.isascii():
                    key = text(key)
                    if key in fields:
                        raise _Refused(_REPEATED)
                kind = type(item)
                if (
                    (kind is str and item.isascii())
                    or item is None
                    or kind is bool
                    or (kind is int and -EXACT_INTEGER_MAX <= item <= EXACT_INTEGER_MAX)
                    or (kind is float and isfinite(item))
                ):
                    fields[key] = item
                else:
                    fields[key] = _copy(item, left - 1, text)
        except _Refused as refused:
            if segment is not None:
                refused.way.append(segment)
            raise
        return fields
    if isinstance(obj, list | tuple):
        if left == 0:
            raise _Refused(_DEPTH)
        items: list[JsonValue] = []
        index = 0
        try:
            for index, item in enumerate(cast("list[Any]", obj)):  # noqa: B007
                kind = type(item)
                if (
                    (kind is str and item.isascii())
                    or item is None
                    or kind is bool
                    or (kind is int and -EXACT_INTEGER_MAX <= item <= EXACT_INTEGER_MAX)
                    or (kind is float and isfinite(item))
                ):
                    items.append(item)
                else:
                    items.append(_copy(item, left - 1, text))
        except _Refused as refused:
            refused.way.append(index)
            raise
        return items
    return _scalar(obj, text)


def value(obj: object) -> JsonValue:
    """A Python object as a plain JSON value, copied, or a refusal with its path (MG-09, PT-04, PT-06, PT-09).

    Accepts dict with str keys, list, tuple (becomes a list), str, int, float, bool, None, and their subclasses, which
    become the plain type. -0.0 stays -0.0 (its digest is that of 0). What is returned shares no container with `obj`.

    Raises:
        InvalidRequest: see Rule 1 of this module; `path` names the place, like "$.targets[0].id".
    """
    try:
        return _copy(obj, DEPTH_MAX, _strict_text)
    except _Refused as refused:
        raise refused.invalid_request() from None


def tool_value(obj: object) -> tuple[JsonValue, None] | tuple[None, str]:
    """A value a tool has returned: `(value, None)`, or `(None, why it cannot be carried)` (PT-13). Never raises.

    Lone surrogates in text become U+FFFD. Anything else JSON cannot carry exactly gives a sentence naming the path,
    for a definite ERROR result: the effect counts as done.
    """
    try:
        return _copy(obj, DEPTH_MAX, sanitize_text), None
    except _Refused as refused:
        return None, f"the tool ran, but JSON cannot carry its result: {refused.reason}, at {_path(refused.way[::-1])}"
    except Exception as error:  # noqa: BLE001 - a foreign container may raise anything while it is read
        return None, f"the tool ran, but reading its result raised {type(error).__name__}"


# ------------------------------------------------------------ JSON text


def _integer(digits: str) -> int:
    # The length first: int() of very many digits is slow, and then raises.
    if len(digits) < _EXACT_DIGITS_MAX:
        return int(digits)
    if len(digits) > _EXACT_DIGITS_MAX + 1 or not -EXACT_INTEGER_MAX <= int(digits) <= EXACT_INTEGER_MAX:
        raise _Refused(_INTEGER)
    return int(digits)


def _decimal(digits: str) -> float:
    number = float(digits)
    if repr(number) == digits:
        return number
    try:
        if isfinite(number) and Decimal(digits) == Decimal(repr(number)):
            return number
    except DecimalException:  # an exponent of more than 18 digits
        pass
    raise _Refused(_DECIMAL)


def _constant(_name: str) -> float:
    raise _Refused(_NOT_FINITE)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _Refused(_REPEATED)
    return fields


_STRICT = json.JSONDecoder(
    object_pairs_hook=_fields, parse_int=_integer, parse_float=_decimal, parse_constant=_constant
)


class _Pairs:
    """An object as it was written, repeated keys included."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _kept(check: Callable[[str], object]) -> Callable[[str], object]:
    """The hook's refusal as a value in its place, so that a walk can find the place."""

    def keep(text: str) -> object:
        try:
            return check(text)
        except _Refused as refused:
            return refused

    return keep


_LENIENT = json.JSONDecoder(
    object_pairs_hook=_Pairs,
    parse_int=cast("Callable[[str], Any]", _kept(_integer)),
    parse_float=cast("Callable[[str], Any]", _kept(_decimal)),
    parse_constant=_kept(_constant),
)


def _first_refusal(parsed: object) -> _Refused | None:
    """The first refusal of a hook in the order of the text."""
    if isinstance(parsed, _Refused):
        return parsed
    steps: Iterable[tuple[str | int, object]] = ()
    if isinstance(parsed, _Pairs):
        steps = parsed.pairs
    elif isinstance(parsed, list):
        steps = enumerate(cast("list[object]", parsed))
    seen: set[str | int] = set()
    for segment, item in steps:
        refused = _Refused(_REPEATED) if segment in seen else _first_refusal(item)
        if refused is not None:
            refused.way.append(segment)
            return refused
        seen.add(segment)
    return None


# An opening bracket becomes the byte 1, a closing one the byte 255, which reads as -1 where bytes have a sign.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


def _too_deep(text: str) -> bool:
    """Whether brackets nest beyond the bound: before parsing, and without recursion.

    The parser recurses in C, and a program that raised the recursion limit would be killed by a few megabytes of "[".
    Up to the first character that is not JSON this counts as the parser does; what comes after it does not matter.
    """
    if text.count("[") + text.count("{") <= DEPTH_MAX:
        return False
    structure = text.encode("utf-8", "surrogatepass")
    if "\\" in text:
        # Escaped backslashes, then escaped quotes: afterwards every quote opens or closes a string.
        structure = structure.replace(b"\\\\", b"").replace(b'\\"', b"")
    steps = b"".join(structure.split(b'"')[::2]).translate(_STEPS, _NOT_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b")), default=0) > DEPTH_MAX


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)


def _text_of(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except json.JSONDecodeError:
        return literal[1:-1]


def _path_of_depth(text: str) -> str:
    """Where nesting first exceeds the bound."""
    # For each open container: the present index of an array, or the present key of an object (None: not read yet).
    open_: list[str | int | None] = []
    for match in _TOKEN.finditer(text):
        mark = match.group()
        if mark in ("[", "{"):
            if len(open_) == DEPTH_MAX:
                break
            open_.append(0 if mark == "[" else None)
        elif not open_:
            continue
        elif mark in ("]", "}"):
            _ = open_.pop()
        elif mark == ",":
            top = open_[-1]
            open_[-1] = top + 1 if isinstance(top, int) else None
        elif open_[-1] is None:
            open_[-1] = _text_of(mark)
    return _path([segment for segment in open_ if segment is not None])


def loads(data: bytes | bytearray | memoryview | str, *, root: Literal["any", "object"] = "any") -> JsonValue:
    """JSON from outside, as a value, or a refusal with its path (PT-04, PT-05, PT-06, PT-09).

    Bytes must be UTF-8 without a byte order mark. The size of `data` is the caller's to bound.

    Args:
        data: one JSON text.
        root: "object" refuses any other root.

    Raises:
        InvalidRequest: see Rule 1 of this module; `path` names the place, or is None where the text is not JSON at all.
    """
    if isinstance(data, str):
        text = data
    else:
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from None
    if _too_deep(text):
        raise InvalidRequest(_DEPTH, path=_path_of_depth(text))
    try:
        parsed: JsonValue = _STRICT.decode(text)
    except _Refused as refused:
        raise _located(refused, text).invalid_request() from None
    except json.JSONDecodeError as error:
        raise _not_json(error) from None
    if "\\ud" in text or "\\uD" in text or (data is text and not text.isascii()):
        # Only here can a lone surrogate be: by an escape, or because a str came in.
        parsed = value(parsed)
    if root == "object" and not isinstance(parsed, dict):
        raise InvalidRequest("the root must be a JSON object", path="$")
    return parsed


def _located(refused: _Refused, text: str) -> _Refused:
    """The refusal with its path: hooks do not know where they are, so the text is read again, keeping everything."""
    try:
        return _first_refusal(_LENIENT.decode(text)) or refused
    except json.JSONDecodeError as error:
        raise _not_json(error) from None


def _not_json(error: json.JSONDecodeError) -> InvalidRequest:
    if error.msg == "Extra data":
        return InvalidRequest(f"the body has more than one root (character {error.pos})")
    return InvalidRequest(f"the body is not JSON: {error.msg} (line {error.lineno}, column {error.colno})")


# ------------------------------------------------------------ canonical form

_deterministic = msgspec.json.Encoder(order="deterministic")
_PLAIN_FLOAT_MIN: Final = 1e-3
_PLAIN_FLOAT_MAX: Final = 1e15


def _simple(obj: object, left: int) -> bool:
    """Whether msgspec's sorted output is RFC 8785 for this value: exact types, ASCII keys, ordinary floats."""
    if type(obj) is dict:
        for key, item in cast("dict[Any, Any]", obj).items():
            if type(key) is not str or not key.isascii():
                return False
            if type(item) is not str and (left == 0 or not _simple(item, left - 1)):
                return False
        return True
    if type(obj) is list:
        for item in cast("list[Any]", obj):
            if type(item) is not str and (left == 0 or not _simple(item, left - 1)):
                return False
        return True
    if type(obj) is int:
        return -EXACT_INTEGER_MAX <= obj <= EXACT_INTEGER_MAX
    if type(obj) is float:
        # Between these bounds both write the shortest decimal without an exponent; RFC 8785 writes 1.0 as 1.
        return _PLAIN_FLOAT_MIN <= abs(obj) < _PLAIN_FLOAT_MAX and not obj.is_integer()
    return type(obj) is str or obj is None or type(obj) is bool


def canonical(value_: object) -> bytes:
    """The RFC 8785 form: equal values have equal bytes (PT-07).

    Raises:
        InvalidRequest: not a JSON value; as `value`.
    """
    if _simple(value_, DEPTH_MAX - 1):
        try:
            return _deterministic.encode(value_)
        except UnicodeEncodeError:
            pass  # A lone surrogate: `value` names its path.
    return rfc8785.dumps(cast("Any", value(value_)))


def digest(value_: object) -> str:
    """SHA-256 of the canonical form, 64 hexadecimal digits (PT-07).

    Raises:
        InvalidRequest: not a JSON value; as `value`.
    """
    return sha256(canonical(value_)).hexdigest()
