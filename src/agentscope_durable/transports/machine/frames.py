"""What two processes say to each other: frames of JSON, each behind its length.

Rule: a peer is not trusted. What is too long, malformed or of another version ends the connection, and nothing else. It
may come from another release, or from a program that is none of ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.events import EventDelta, PreviewStarted
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.live import Preview

__all__ = [
    "FRAME_BYTES_MAX",
    "KEYS_MAX",
    "VERSION",
    "Frame",
    "Frames",
    "Hello",
    "Hints",
    "Interest",
    "Malformed",
    "Show",
    "encode",
    "interests",
    "show",
]

VERSION = 1
FRAME_BYTES_MAX = 256 * 1024
"""Bytes of one frame. A preview that is larger is left out, and ends there."""
KEYS_MAX = 1024
"""Keys in one frame."""
KEY_CHARS_MAX = 256

_LENGTH_BYTES = 4


class Malformed(Exception):
    """This is no frame of ours."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first frame of either side."""

    version: int
    name: str


class Interest(msgspec.Struct, frozen=True, tag="interest"):
    """What a process wants to be told.

    Attributes:
        keys: of hints and of Sessions' previews.
        wanted: False to be told no more of these.
        anew: these keys replace all that were named before.
        everything: every hint, whatever its key; previews are always named.
    """

    keys: tuple[str, ...] = ()
    wanted: bool = True
    anew: bool = False
    everything: bool = False


class Hints(msgspec.Struct, frozen=True, tag="hints"):
    keys: tuple[str, ...]


class Show(msgspec.Struct, frozen=True, tag="show"):
    session: SessionKey
    preview: PreviewStarted | EventDelta


Frame = Hello | Interest | Hints | Show

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """Raises Malformed: it is too long, or its text cannot be encoded."""
    try:
        body = _encoder.encode(frame)
    except UNREADABLE as error:
        raise Malformed(str(error)) from error
    if len(body) > FRAME_BYTES_MAX:
        raise Malformed("too long")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def interests(keys: list[str], *, wanted: bool = True, anew: bool = False, everything: bool = False) -> list[Interest]:
    """As many frames as these keys need."""
    parts = [tuple(keys[start : start + KEYS_MAX]) for start in range(0, len(keys), KEYS_MAX)] or [()]
    first, *others = parts
    return [
        Interest(first, wanted=wanted, anew=anew, everything=everything),
        *(Interest(part, wanted=wanted, everything=everything) for part in others),
    ]


class Frames:
    """Cuts what arrives on one connection into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now.

        Raises:
            Malformed: this is no connection of ours.
        """
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            length = int.from_bytes(self._bytes[start:begin], "big")
            if length > FRAME_BYTES_MAX:
                raise Malformed("too long")
            if len(self._bytes) - begin < length:
                break
            yield _decoded(bytes(self._bytes[begin : begin + length]))
            start = begin + length
        del self._bytes[:start]


def _decoded(body: bytes) -> Frame:
    try:
        frame = _decoder.decode(body)
    except UNREADABLE as error:
        raise Malformed(str(error)) from error
    if isinstance(frame, Hello) and frame.version != VERSION:
        raise Malformed(f"version {frame.version}")
    if isinstance(frame, Hints | Interest) and (
        len(frame.keys) > KEYS_MAX or any(len(key) > KEY_CHARS_MAX for key in frame.keys)
    ):
        raise Malformed("too many keys, or too long ones")
    return frame


def show(session: SessionKey, preview: Preview) -> bytes:
    return encode(Show(session, preview))
