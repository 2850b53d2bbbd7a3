"""Pages of a listing, their bounds and their cursors."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec

from agentscope_durable.contracts.durable_json import UNREADABLE
from agentscope_durable.contracts.errors import InvalidCursor, InvalidRequest
from agentscope_durable.contracts.events import session_mark
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.spi.record_store import PAGE_MAX

__all__ = [
    "PAGE_BYTES_MAX",
    "cursor_after",
    "cut",
    "cut_rows",
    "is_full",
    "one_more",
    "page_limit",
    "position_of",
    "uncursor",
]

PAGE_BYTES_MAX: Final = 8 * 1024 * 1024
"""Bodies in one page of events or messages. A page ends early rather than hold more; one item always fits."""

T = TypeVar("T")


def page_limit(limit: int) -> int:
    """The limit a question names, 1 to PAGE_MAX."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"a limit is a whole number from 1 to {PAGE_MAX}", path="limit")
    return limit


def one_more(limit: int) -> int:
    """How many to read to know whether there is another page. A page of PAGE_MAX may be followed by an empty one."""
    return min(limit + 1, PAGE_MAX)


def is_full(items: Sequence[object], size: int) -> bool:
    """Whether a page with these items ends before `size` bytes are in it."""
    return bool(items) and size > PAGE_BYTES_MAX


def cut(
    listing: str, names: Sequence[str], limit: int, session: SessionKey | None = None
) -> tuple[Sequence[str], str | None]:
    """The names of a page, and the cursor after them if there are more."""
    more = len(names) > limit or len(names) == PAGE_MAX
    names = names[:limit]
    return names, cursor_after(listing, names[-1], session) if more else None


def cut_rows(
    listing: str, rows: Sequence[tuple[str, bytes]], limit: int, session: SessionKey
) -> tuple[Sequence[tuple[str, bytes]], str | None]:
    """`cut`, of records."""
    _, cursor = cut(listing, [key for key, _ in rows], limit, session)
    return rows[:limit], cursor


def cursor_after(listing: str, value: object, session: SessionKey | None = None) -> str:
    """An opaque cursor of a listing: text that survives a URL. It is of one Session, if the listing is."""
    document = [listing, _mark(session), value]
    return base64.urlsafe_b64encode(msgspec.json.encode(document)).decode().rstrip("=")


def uncursor(listing: str, cursor: str, kind: type[T], session: SessionKey | None = None) -> T:
    """What a cursor of this listing holds.

    Raises:
        InvalidCursor: it is malformed, or of another listing or Session.
    """
    try:
        encoded = cursor.encode("ascii")
        document = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        name, mark, value = msgspec.json.decode(document, type=tuple[str, str, msgspec.Raw])
        if name == listing and mark == _mark(session):
            return msgspec.json.decode(value, type=kind)
        if name == listing:
            raise InvalidCursor("this cursor belongs to another session", path="cursor")
    except (AttributeError, binascii.Error, *UNREADABLE):
        pass
    raise InvalidCursor(f"this is not a cursor of {listing}", path="cursor")


def _mark(session: SessionKey | None) -> str:
    return "" if session is None else session_mark(session)


def position_of(listing: str, cursor: str | None, prefix: str, session: SessionKey | None = None) -> str:
    """The key a listing goes on after; "" at its start."""
    if cursor is None:
        return ""
    key = uncursor(listing, cursor, str, session)
    if not key.startswith(prefix):
        raise InvalidCursor(f"this is not a cursor of these {listing}", path="cursor")
    return key
