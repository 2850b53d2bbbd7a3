"""What every record store refuses before it writes, so that all of them refuse the same.

A refusal here is a defect of the caller (a decision or a query), found early instead of as half a
sentence of SQL.
"""

from __future__ import annotations

from agentscope_durable.contracts.errors import InvalidRequest, TooLarge
from agentscope_durable.contracts.keys import FOUND
from agentscope_durable.contracts.records import SessionHead, encode
from agentscope_durable.spi.record_store import HEAD_MAX_BYTES, PAGE_MAX, Entry, Erase, Prune, Reads

NO_ENTRY = Entry()
"""A commit without an entry still leaves a log row: its commit id must be found after a lost answer."""


def check_limit(limit: int) -> None:
    """A page is bounded, and a page that came back short is the last one: so a limit is never cut silently."""
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest(f"a page has a limit of 1 to {PAGE_MAX}, not {limit}", path="limit")


def check_found(key: str) -> None:
    if not key.startswith(FOUND):
        raise InvalidRequest(f"no index finds records like {key[:64]!r} in every partition", path="key")


def check_reads(reads: Reads) -> None:
    for page in reads.ranges:
        check_limit(page.limit)
    for page in reads.streams:
        check_limit(page.limit)
    if reads.log is not None:
        check_limit(reads.log.limit)


def check_entry(entry: Entry) -> None:
    if (entry.count > 0) != (entry.events != b"") or entry.count < 0:
        raise InvalidRequest(f"an entry of {len(entry.events)} bytes of events counts {entry.count}", path="count")


def check_prune(prune: Prune | None, *, after: int, before: int) -> None:
    """What is pruned stays pruned, and what has not been written is not pruned."""
    if prune is None:
        return
    if not after <= prune.through < before:
        raise InvalidRequest(f"events up to {prune.through} cannot be pruned: {after} are, {before - 1} there are")
    if any(not 0 < first <= prune.through for first, _ in prune.rows):
        raise InvalidRequest(f"a row is changed that is not pruned through {prune.through}")


def check_erase(erase: Erase | None) -> None:
    """A change stays a short one, whatever it erases."""
    if erase is not None and not 0 <= erase.rows <= PAGE_MAX:
        raise InvalidRequest(f"a change erases 0 to {PAGE_MAX} rows of the log, not {erase.rows}", path="rows")


def check_commit_id(commit_id: str) -> bytes:
    try:
        if len(commit_id) == 32:
            return bytes.fromhex(commit_id)
    except ValueError:
        pass
    raise InvalidRequest("a commit id is 32 hex digits", path="commit_id")


def encode_head(head: SessionHead) -> bytes:
    value = encode(head)
    if len(value) > HEAD_MAX_BYTES:
        raise TooLarge("session head", size_bytes=len(value), limit_bytes=HEAD_MAX_BYTES)
    return value
