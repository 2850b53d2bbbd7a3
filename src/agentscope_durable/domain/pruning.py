"""What may be dropped of a timeline, so that everything but the replay of it stays (EV-19, PR-04, PR-14).

Rule 1: the fold of what is left is the fold of everything. So only two kinds of events go: those no projection shows,
and those whose every word a later event of the same thing says again.
Rule 2: an event that holds a body stays. Records name it by its number, and a body is stored once (D9).
Rule 3: numbers stand still. What is dropped leaves an empty place in its row, and the row its private facts and its
native block: no checkpoint, no Step and no model call loses anything (C69).
Rule 4: a batch is one commit of bounded size. Between two batches the Session is as whole as before the first (C70).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

import msgspec
from msgspec.structs import replace

from agentscope_durable.contracts.change import Change, Column, LogRange, LogRow, Prune, Reads, Unchanged, View
from agentscope_durable.contracts.commands import Pruned, PruneEvents
from agentscope_durable.contracts.errors import InvalidCursor
from agentscope_durable.contracts.events import PAYLOADS
from agentscope_durable.contracts.log import StoredEvent, decode_events, encode_events
from agentscope_durable.domain.change import begin
from agentscope_durable.domain.projection import EventProjection

__all__ = ["PRUNE_ROWS", "is_shown_by_nobody", "prune_events", "reads_prune", "superseded"]

PRUNE_ROWS: Final = 100
"""Commits whose events one batch drops: some milliseconds of the writer."""

_CALL: Final = frozenset(
    {"tool.requested", "tool.started", "tool.completed", "tool.unknown", "tool.cancel_requested", "tool.applied"}
)
_MARKS: Final = frozenset({"signal.withdrawn", "signal.expired"})
_BODIES: Final = frozenset({"arguments", "result"})
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def superseded(events: Sequence[tuple[int, StoredEvent]]) -> set[int]:
    """Numbers of the events a fold need not see, because later ones among these say all that they say.

    Args:
        events: of one Session, in order; some may be missing.
    """
    said: dict[tuple[str, ...], set[str]] = {}
    firsts: dict[tuple[str, ...], int] = {}
    unneeded: set[int] = set()
    for sequence, event in reversed(events):
        words = _words(event)
        if words is None:
            continue
        subject, says, holds_body = words
        later = said.setdefault(subject, set())
        if says <= later and not holds_body:
            unneeded.add(sequence)
        later |= says
        if event.type in _CALL and event.type != "tool.applied":
            # It may be the one that tells of the call at all.
            firsts[subject] = sequence
    return unneeded - set(firsts.values())


def _words(event: StoredEvent) -> tuple[tuple[str, ...], set[str], bool] | None:
    """What an event is about, what it says of it, and whether records may refer to it. None: it stands for itself.

    The Run an event belongs to is said too: it is the one that what it is about is with from then on (FI-09).
    """
    if event.type in ("turn.status", "turn.recovery"):
        says = {"recovery"} if event.type == "turn.recovery" else {"recovery", "turn"}
        return ("turn", event.turn_id), says, False
    if event.type not in _CALL and not event.type.startswith("signal."):
        return None
    try:
        fields = _fields.decode(event.payload)
        name = str(bytes(fields.pop("callId" if event.type in _CALL else "requestId")), "utf-8")
    except (KeyError, ValueError):
        # Whoever folds it says what is wrong with it.
        return None
    run = {"run"} if event.run_id else set[str]()
    if event.type in _CALL:
        return ("call", event.turn_id, name), fields.keys() | run, not _BODIES.isdisjoint(fields)
    # An input that was taken back or came too late marks its message too.
    message = fields.get("messageId") if event.type in _MARKS else None
    marks = set[str]() if message is None else {f"{event.type} {str(bytes(message), 'utf-8')}"}
    return ("signal", name), {"state"} | marks | run, False


def reads_prune(_: PruneEvents) -> Reads:
    # Where the batch begins stands in the head: the decision asks for its page.
    return Reads()


def prune_events(c: PruneEvents, seed: bytes, view: View, now_ms: int) -> Change | Unchanged:
    """Drop the next batch of events that may go. Commits are dropped whole, the oldest first.

    Raises:
        InvalidCursor: there are not that many events.
    """
    draft = begin(view, c.session, seed, now_ms)
    through = view.next_seq - 1 if c.through is None else c.through
    if through >= view.next_seq:
        raise InvalidCursor("this cursor is ahead of the timeline", path="through")
    if through <= view.pruned_through:
        return Unchanged(Pruned(through=view.pruned_through, dropped=0, more=False))
    page = LogRange(after=view.pruned_through, limit=PRUNE_ROWS, through=through, columns=(Column.EVENTS,))
    batch = list(takewhile(lambda row: _last(row) <= through and row.at_ms <= now_ms - c.older_than_ms, view.log(page)))
    if not batch:
        return Unchanged(Pruned(through=view.pruned_through, dropped=0, more=False))
    rows, dropped = _left(batch)
    pruned = _last(batch[-1])
    change = draft.change(Pruned(through=pruned, dropped=dropped, more=len(batch) == PRUNE_ROWS))
    # Nobody waits for it: there is nothing new to see.
    return replace(change, prune=Prune(pruned, rows), hints=())


def _left(batch: Iterable[LogRow]) -> tuple[tuple[tuple[int, bytes], ...], int]:
    """What is left of rows that lose something, and how many events they lose."""
    rows = [(row, decode_events(row.events, row.first)) for row in batch]
    events = [
        (sequence, event)
        for row, found in rows
        for sequence, event in enumerate(found, row.first)
        if event is not None and not is_shown_by_nobody(event)
    ]
    kept = {sequence for sequence, _ in events} - superseded(events)
    left: list[tuple[int, bytes]] = []
    dropped = 0
    for row, found in rows:
        stays = [event if sequence in kept else None for sequence, event in enumerate(found, row.first)]
        lost = stays.count(None) - found.count(None)
        if lost:
            dropped += lost
            left.append((row.first, encode_events(stays)))
    return tuple(left), dropped


def is_shown_by_nobody(event: StoredEvent) -> bool:
    """Whether no projection shows it. What this release does not know, a newer one may show: it stays."""
    known = event.type in PAYLOADS or event.type.startswith("x.")
    return known and not EventProjection.folds(event.type)


def _last(row: LogRow) -> int:
    return row.first + row.count - 1
