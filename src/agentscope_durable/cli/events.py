"""The command `events`: what happened, page by page or as it happens.

Rule: only facts have a place to go on from. Following survives the hosts, because it reads the store; what it prints of
text on its way is lost with them, and comes again as a fact.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any, Final

import msgspec

from agentscope_durable.cli.extra import Console, Group, Live, Text, typer
from agentscope_durable.cli.options import DEFAULT_STORE, LIMIT, Json, Limit, OneThread, Store, Target
from agentscope_durable.cli.output import cell, console, document, instant, note, tell, visible
from agentscope_durable.cli.previews import Preview, Previews
from agentscope_durable.cli.store import Opened, looked
from agentscope_durable.contracts.events import (
    Committed,
    EventDelta,
    EventPage,
    PreviewStarted,
    PublicEvent,
    SessionStreamEvent,
    SnapshotReset,
)
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.runtime.handles import DurableSession, DurableThread, DurableTurn

__all__ = ["add", "summary"]

LOOKED_AT_MAX: Final = 10_000
"""Events one listing looks at to fill its page; then it says where to go on."""
PAGE_MAX: Final = 1000
SUMMARY_CHARS: Final = 120

Handle = DurableSession | DurableThread | DurableTurn


def events(
    target: Target,
    thread: OneThread = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="CURSOR", help="Go on after this cursor; default: all that is kept."),
    ] = None,
    limit: Limit = LIMIT,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens, until Ctrl+C.")] = False,
    previews: Annotated[
        bool | None,
        typer.Option("--previews/--no-previews", help="Text on its way, too; default: when following on a terminal."),
    ] = None,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """What happened in a Session, a Thread or a Turn. With --json --follow one document a line."""
    if not follow:
        tell(looked(store, lambda there: _page(there, target, thread, after, limit)), as_json, _show_page)
        return
    wanted = previews if previews is not None else sys.stdout.isatty() and not as_json
    sink: _Lines | _Screen = _Lines() if as_json else _Screen()
    if previews and not as_json and not sys.stdout.isatty():
        note("text on its way is shown on a terminal, or with --json")
    try:
        looked(store, lambda there: _follow(there, target, thread, after, wanted, sink))
    except KeyboardInterrupt:
        if sink.cursor is not None:
            note(f"go on with: --after {sink.cursor}")
        raise


async def _handle(there: Opened, target: str, thread: str | None) -> Handle:
    where = await there.target(target)
    return where.get_thread(thread) if thread is not None and isinstance(where, DurableSession) else where


async def _page(there: Opened, target: str, thread: str | None, after: str | None, limit: int) -> EventPage:
    """A page of events that match, found among at most LOOKED_AT_MAX."""
    handle = await _handle(there, target, thread)
    page = await handle.list_events(after, limit)
    found, looked_at = list(page.events), limit
    while len(found) < limit and page.cursor != page.high_watermark and looked_at < LOOKED_AT_MAX:
        page = await handle.list_events(page.cursor, PAGE_MAX)
        looked_at += PAGE_MAX
        room = limit - len(found)
        if len(page.events) > room:
            found += page.events[:room]
            return EventPage(tuple(found), found[-1].cursor, page.high_watermark)
        found += page.events
    return EventPage(tuple(found), page.cursor, page.high_watermark)


def _show_page(screen: Console, page: EventPage) -> None:
    for event in page.events:
        screen.print(_line(event))
    if page.cursor != page.high_watermark:
        note(f"more: --after {page.cursor}")
    else:
        note(f"{'the last' if page.events else 'no events here'}: --after {page.cursor} goes on from here")


async def _follow(
    there: Opened, target: str, thread: str | None, after: str | None, previews: bool, sink: _Lines | _Screen
) -> None:
    handle = await _handle(there, target, thread)
    with sink.open():
        async with handle.stream_events(after=after, deltas=frozenset(EventDeltaType) if previews else ()) as stream:
            async for event in stream:
                sink.take(event)


# ------------------------------------------------------------ as JSON


class _Lines:
    """One document a line."""

    cursor: str | None = None

    def open(self) -> AbstractContextManager[object]:
        return nullcontext()

    def take(self, event: SessionStreamEvent) -> None:
        match event:
            case Committed():
                self.cursor = event.cursor
                document({"type": "event", "cursor": event.cursor, "event": event.event})
            case SnapshotReset(snapshot=snapshot):
                self.cursor = snapshot.cursor
                document({"type": "reset", "cursor": snapshot.cursor, "snapshot": snapshot})
            case PreviewStarted() | EventDelta():
                document(_preview_document(event))


def _preview_document(preview: PreviewStarted | EventDelta) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": "preview.started" if isinstance(preview, PreviewStarted) else "preview.delta",
        "kind": preview.kind,
        "threadId": preview.thread_id,
        "turnId": preview.turn_id,
        "messageId": preview.message_id,
        "attempt": preview.attempt,
    }
    if preview.call_id is not None:
        told["callId"] = preview.call_id
    if isinstance(preview, EventDelta):
        return told | {"offset": preview.offset, "text": preview.text}
    return told if preview.name is None else told | {"name": preview.name}


# ------------------------------------------------------------ for people


class _Screen:
    """Facts one below the other; below them what is on its way, drawn over and over."""

    cursor: str | None = None

    def __init__(self) -> None:
        self._screen = console()
        self._previews = Previews()
        self._live = Live(console=self._screen, auto_refresh=False, transient=True)

    def open(self) -> AbstractContextManager[object]:
        return self._live if self._screen.is_terminal else nullcontext()

    def take(self, event: SessionStreamEvent) -> None:
        match event:
            case Committed(event=fact):
                self._previews.fact(fact)
                self._draw()
                self._screen.print(_line(fact))
                self.cursor = event.cursor
            case SnapshotReset(snapshot=snapshot):
                self._previews.clear()
                self._draw()
                self._screen.print(cell(f"events up to {snapshot.cursor} are no longer kept; going on from there"))
                self.cursor = snapshot.cursor
            case PreviewStarted():
                self._previews.started(event)
            case EventDelta():
                self._previews.delta(event)
                self._draw()

    def _draw(self) -> None:
        if self._screen.is_terminal:
            previews = tuple(self._previews)
            # One row stays free: what is drawn over must not scroll away.
            rows = max(1, (self._screen.height - 1) // max(1, len(previews)))
            lines = [line for preview in previews for line in _on_its_way(self._screen, preview, rows)]
            self._live.update(Group(*lines), refresh=True)


def _on_its_way(screen: Console, preview: Preview, rows: int) -> list[Text]:
    """The end of a preview in at most so many rows: what came last is what is looked at."""
    about = f"{preview.name or 'arguments'} {preview.call_id}" if preview.call_id else preview.message_id
    said = Text(visible(f"… {about}: {preview.tail}"), style="dim")
    lines = list(said.wrap(screen, screen.width, overflow="fold", no_wrap=False))
    if len(lines) > rows > 1:
        return [Text(visible(f"… {about}: …"), style="dim", overflow="ellipsis", no_wrap=True), *lines[1 - rows :]]
    return lines[-rows:]


def _line(event: PublicEvent) -> Text:
    where = event.turn_id or event.thread_id or ""
    return cell(f"#{event.sequence} {instant(event.at_ms)} {event.type} {where} {summary(event)}".rstrip())


def summary(event: PublicEvent) -> str:
    """What an event says, in a few words."""
    data = event.data
    match event.type.split("."):
        case ["turn", "status"]:
            turn = data["turn"]
            reasons = [waiting["kind"] for waiting in turn.get("waitingOn", ())]
            words = [turn["status"], *([f"waits for {', '.join(reasons)}"] if reasons else ())]
            words += [f"{turn['error']['kind']}: {turn['error']['message']}"] if "error" in turn else []
        case ["message", "completed"]:
            said = "".join(part.get("text", f"[{part['type']}]") for part in data.get("content", ()))
            words = [f"{data['role']}: {said}"]
        case ["interaction", "requested"]:
            words = [data["kind"], data["name"], data["interactionId"]]
        case ["tool", _]:
            words = [data.get("name", ""), data.get("state", ""), data["callId"]]
        case [kind, _] if kind in ("run", "step", "signal", "interaction", "message"):
            known = ("number", "phase", "status", "operation", "requestId", "outcome", "reason", "messageId", "attempt")
            words = [str(data[name]) for name in known if name in data]
        case _:
            words = [msgspec.json.encode(data).decode()] if data else []
    text = " ".join(word for word in words if word)
    return text if len(text) <= SUMMARY_CHARS else f"{text[: SUMMARY_CHARS - 1]}…"


def add(app: Any) -> None:
    app.command()(events)
