"""A body is JSON that decisions carry but never read.

A small body travels inline. A large one (over `INLINE_MAX_BYTES`) is stored in the ObjectStore
before the transaction and travels as a name (D11). The two forms cannot be confused with each
other whatever the JSON says, because the difference is a position in the envelope, not a key.
"""

from __future__ import annotations

import hashlib

import msgspec

from agentscope_durable.contracts.discreet import Discreet
from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import CorruptRecord

INLINE_MAX_BYTES = 64 * 1024
"""Bodies above this leave the records."""


class Body(Discreet, frozen=True, array_like=True):
    """Encoded as `[json, "", 0]` inline, or `[null, name, size]` as a reference.

    Attributes:
        inline: the JSON bytes, or JSON null for a reference.
        name: of the object, as `object_name` makes it; empty when inline.
        size: bytes of the referenced JSON; 0 when inline.
    """

    inline: msgspec.Raw = msgspec.Raw(b"null")
    name: str = ""
    size: int = 0

    @property
    def is_reference(self) -> bool:
        return self.name != ""


def inline_body(json_bytes: bytes) -> Body:
    return Body(inline=msgspec.Raw(json_bytes))


def body_of(value: object) -> Body:
    """Encode a value that is JSON already (validated or our own) into an inline body."""
    return Body(inline=msgspec.Raw(msgspec.json.encode(value)))


def object_digest(content: bytes) -> str:
    """SHA-256, lower-case hex."""
    return hashlib.sha256(content).hexdigest()


def object_name(digest: str, tag: str) -> str:
    """What an object is called in its Session: a content that was swept and comes back has another tag.

    So no name is ever used again, and a removal that comes late, by whatever process, meets nothing that is needed.

    Args:
        tag: 16 lower-case hex digits.
    """
    return f"{digest}-{tag}"


COLUMN_REFERENCE = b"@"
"""First byte of a log column that is a reference; JSON never begins with it."""


def decode_reference(column: bytes) -> Body:
    """The reference in a column that begins with `@`.

    Raises:
        CorruptRecord: it is not one.
    """
    try:
        return msgspec.json.decode(column[1:], type=Body)
    except UNREADABLE as error:
        raise CorruptRecord("log column", "Body", str(error)) from error


def column_reference(column: bytes) -> Body | None:
    """The object a column refers to; None when it is inline."""
    return decode_reference(column) if column.startswith(COLUMN_REFERENCE) else None
