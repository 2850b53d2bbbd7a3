"""What people say to an agent and what it answers, as everyone else sees it.

Rule 1: an input is text, images, audio and video, and nothing else. A native message of an agent library is refused:
it would tie stored tasks to one release of that library.
Rule 2: a shape is checked where it enters, in `as_input`, and nowhere again. Making a `Text` checks nothing, so that
reading a stored one costs nothing.
Rule 3: a public message holds no native reasoning (MG-05).
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, TypeAlias, cast

import msgspec

from agentscope_durable.contracts import durable_json
from agentscope_durable.contracts.discreet import Discreet, Words
from agentscope_durable.contracts.durable_json import JsonValue
from agentscope_durable.contracts.errors import InvalidRequest, TooLarge
from agentscope_durable.contracts.ids import InteractionId, MessageId, RequestId

__all__ = [
    "INPUT_BYTES_MAX",
    "INPUT_VERSION",
    "Audio",
    "Base64",
    "Content",
    "Image",
    "Input",
    "InputKind",
    "Message",
    "Role",
    "Source",
    "Text",
    "Url",
    "Video",
    "as_input",
    "input_digest_value",
]

INPUT_VERSION: Final = "1"

INPUT_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a whole input as JSON, base64 included. Larger media belongs behind a Url."""


class Url(Discreet, frozen=True, rename="camel", tag="url"):
    """Media that is fetched where it is needed (MG-04)."""

    url: Words
    """Absolute: it begins with a scheme."""
    media_type: str


class Base64(Discreet, frozen=True, rename="camel", tag="base64"):
    """Media that travels along (MG-04)."""

    data: Words
    """RFC 4648 section 4: standard alphabet, padded, no line breaks."""
    media_type: str


Source: TypeAlias = Url | Base64


class Text(Discreet, frozen=True, rename="camel", tag="text"):
    """Text, any length within the bound of the whole input; U+0000 is a character like others."""

    text: Words


class Image(msgspec.Struct, frozen=True, rename="camel", tag="image"):
    """A picture."""

    source: Source


class Audio(msgspec.Struct, frozen=True, rename="camel", tag="audio"):
    """A recording."""

    source: Source


class Video(msgspec.Struct, frozen=True, rename="camel", tag="video"):
    """A film."""

    source: Source


Content: TypeAlias = Text | Image | Audio | Video


class Input(msgspec.Struct, frozen=True, rename="camel"):
    """What is submitted: `Input("1", [Text("Describe this image"), Image(Url(...))])` (MG-01).

    A list of content is kept as a tuple, so that an admitted input cannot change. Validated by `as_input`.
    """

    version: str = INPUT_VERSION
    content: Sequence[Content] = ()

    def __post_init__(self) -> None:
        if isinstance(self.content, list):
            msgspec.structs.force_setattr(self, "content", tuple(self.content))


class InputKind(StrEnum):
    """Which operation a user's message came with."""

    SUBMIT = "submit"
    STEER = "steer"
    INJECT = "inject"
    RESPOND = "respond"


class Role(StrEnum):
    """Who speaks in a public message."""

    USER = "user"
    ASSISTANT = "assistant"


class Message(Discreet, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One public message: a user's, or a complete answer (MG-05, MG-06)."""

    id: MessageId
    """Logical: every attempt and revision of one message has the same."""
    role: Role
    content: Sequence[Content] = ()
    sequence: int
    """Its place in the Session's timeline: the number of the event that completed it first."""
    attempt: int = 1
    """Which request to the model produced it; from 1."""
    revision: int = 1
    """Rises when the same message is completed again; the highest one is valid."""
    request_id: RequestId | None = None
    """The request that brought it. None: an agent's message."""
    input_kind: InputKind | None = None
    """None: an agent's message."""
    interaction_id: InteractionId | None = None
    """What a response answers. None: it is no response."""
    created_at_ms: int
    """Of the store's clock."""
    incomplete: bool = False
    """The answer was cut short and nothing will follow."""
    withdrawn: bool = False
    """The user took it back before it was applied."""
    expired: bool = False
    """Its Turn ended before it was applied."""
    structured: JsonValue = None
    """Structured output, as the agent's schema asked for it. None: there is none."""

    def __post_init__(self) -> None:
        if isinstance(self.content, list):
            msgspec.structs.force_setattr(self, "content", tuple(self.content))

    @property
    def text(self) -> str:
        """The text of all its Text parts, one after the other."""
        return "".join(part.text for part in self.content if isinstance(part, Text))

    def __str__(self) -> str:
        return self.text


# ------------------------------------------------------------ admission

_MEDIA_TYPE = re.compile(r"[\w!#$&^.+-]{1,127}/[\w!#$&^.+-]{1,127}(?:;[ -~]{1,255})?", re.ASCII)
# A scheme, then anything printable: what a URL may further be is for whoever fetches it.
_ABSOLUTE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s\x00-\x1f\x7f-\x9f]+")


def _check_text(text: object, path: str) -> str:
    if not isinstance(text, str):
        raise InvalidRequest(f"expected a str, not {type(text).__name__}", path=path)
    if not text.isascii():
        try:
            _ = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"a lone surrogate is not text (character {error.start})", path=path) from None
    return text


def _check_source(source: object, path: str) -> None:
    if isinstance(source, Url):
        if not _ABSOLUTE_URL.fullmatch(_check_text(source.url, f"{path}.url")):
            raise InvalidRequest("a URL must be absolute and without white space", path=f"{path}.url")
    elif isinstance(source, Base64):
        data = _check_text(source.data, f"{path}.data")
        try:
            # Strict: no line breaks, no other alphabet, nothing after the padding (which may still be too long).
            decoded = binascii.a2b_base64(data, strict_mode=True) if len(data) % 4 == 0 else None
        except ValueError:
            decoded = None
        if decoded is None:
            raise InvalidRequest("the data is not base64 (standard alphabet, padded)", path=f"{path}.data")
        if not decoded:
            raise InvalidRequest("the data is empty", path=f"{path}.data")
    else:
        raise InvalidRequest(f"a source is a Url or a Base64, not {_name(source)}", path=path)
    if not _MEDIA_TYPE.fullmatch(_check_text(source.media_type, f"{path}.mediaType")):
        raise InvalidRequest("a media type looks like image/png", path=f"{path}.mediaType")


def _name(obj: object) -> str:
    """The type of a foreign object with where it comes from: "agentscope.message._base.Msg"."""
    kind = type(obj)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _unknown_field(given: object, known: object, path: str) -> str | None:
    """The path of a field that was given but is not one of the type."""
    if isinstance(given, Mapping) and isinstance(known, Mapping):
        for name, item in cast("Mapping[str, object]", given).items():
            if name not in known:
                return f"{path}.{name}"
            found = _unknown_field(item, cast("Mapping[str, object]", known)[name], f"{path}.{name}")
            if found is not None:
                return found
    elif isinstance(given, list | tuple) and isinstance(known, list | tuple):
        pairs = zip(cast("Sequence[object]", given), cast("Sequence[object]", known), strict=False)
        for index, (item, counterpart) in enumerate(pairs):
            found = _unknown_field(item, counterpart, f"{path}[{index}]")
            if found is not None:
                return found
    return None


def _from_document(document: Mapping[str, object]) -> Input:
    """An input in its wire form. A field nobody knows is refused: it may be what the caller meant most."""
    try:
        read = msgspec.convert(document, Input)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `")
        raise InvalidRequest(reason, path=place.removesuffix("`") or "$") from None
    unknown = _unknown_field(document, msgspec.to_builtins(read), "$")
    if unknown is not None:
        raise InvalidRequest("there is no such field", path=unknown)
    return read


def as_input(given: str | Input | Mapping[str, JsonValue]) -> Input:
    """A validated input; `as_input(s)` equals `Input("1", [Text(s)])` (MG-01, MG-03, MG-07, MG-08).

    Args:
        given: text, an Input, or an input in its wire form (a dict with version and content).

    Raises:
        InvalidRequest: another type (a native message, say), another version, no content or nothing but white space, a
            part or source that is not one of this module, base64 that does not decode, a lone surrogate. `path` names
            the place.
        TooLarge: more than INPUT_BYTES_MAX bytes as JSON.
    """
    if isinstance(given, str):
        given = Input(INPUT_VERSION, (Text(str.__str__(given)),))
    elif isinstance(given, Mapping):
        given = _from_document(given)
    elif not isinstance(given, Input):
        raise InvalidRequest(
            f"{_name(given)} is not an input: give a str or Input({INPUT_VERSION!r}, [Text(...), Image(...), ...])",
            path="$",
        )
    if given.version != INPUT_VERSION:
        raise InvalidRequest(f"this release reads input version {INPUT_VERSION!r} only", path="$.version")
    if not isinstance(given.content, tuple):
        raise InvalidRequest(f"content is a list, not {_name(given.content)}", path="$.content")
    if not given.content:
        raise InvalidRequest("content is empty", path="$.content")
    for index, part in enumerate(given.content):
        path = f"$.content[{index}]"
        if isinstance(part, Text):
            _ = _check_text(part.text, f"{path}.text")
        elif isinstance(part, Image | Audio | Video):
            _check_source(part.source, f"{path}.source")
        else:
            raise InvalidRequest(f"a part is a Text, Image, Audio or Video, not {_name(part)}", path=path)
    if all(isinstance(part, Text) and not part.text.strip() for part in given.content):
        # A model refuses it, and would refuse the conversation that contains it from then on.
        raise InvalidRequest("it says nothing: there is no text but white space, and no media", path="$.content")
    size_bytes = len(msgspec.json.encode(given))
    if size_bytes > INPUT_BYTES_MAX:
        raise TooLarge("input", size_bytes=size_bytes, limit_bytes=INPUT_BYTES_MAX)
    return given


def input_digest_value(checked: Input) -> JsonValue:
    """What the identity of a request is made of: the wire form, as a plain JSON value."""
    return durable_json.value(msgspec.to_builtins(checked))
