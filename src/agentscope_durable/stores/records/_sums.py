"""What a log row says of itself: another sum, and it is not what was written."""

from __future__ import annotations

from zlib import crc32

__all__ = ["events_sum", "rest_sum", "signed"]


def events_sum(events: bytes) -> int:
    """Of its events."""
    return crc32(events)


def rest_sum(private: bytes, journal: bytes) -> int:
    """Of what pruning leaves."""
    return crc32(journal, crc32(private))


def signed(number: int) -> int:
    """The same 32 bits for a database that knows signed numbers only."""
    return number - (1 << 32) if number >= 1 << 31 else number
