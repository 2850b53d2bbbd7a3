"""What must hold after a crash, wherever it came: the five standing checks, as functions.

A test kills a process at a failpoint, lets another one finish, and asks these. Each returns what is wrong, in words;
`[]` means that it holds, so a failing test prints every broken promise at once.

    S1 `submits_once`        every acknowledged submit is there exactly once
    S2 `effects_once`        every effect has exactly one tool call, and no call has two
    S3 `calls_answered`, `transcript_valid`   each tool call is followed by exactly one result, in order
    S4 `replay_agrees`       the events from the first one on give the projection that `snapshot()` gives
    S5 `nothing_stuck`       nothing is claimable and unclaimed, held by the dead, or waiting without a reason

Beside them stands `answers_once`: a committed model answer was not asked for again.

They read through `SessionBackend` alone, so they check any store and any host, a remote one included. Read with all
hosts closed: what a running host is about to do is not stuck yet.

`FAILPOINTS` are the places where a process can be killed, `arm` makes one deadly, and `observe` tells which are passed.
From outside a process, `DURABLE_FAILPOINT=name:nth` in its environment does the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from agentscope_durable._failpoints import NAMES as FAILPOINTS
from agentscope_durable._failpoints import arm, observe
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.events import EventPage, PublicEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.projection import SnapshotView, tool_key
from agentscope_durable.contracts.questions import (
    GetSnapshot,
    ListEvents,
    ListModelCalls,
    ListRuns,
    ListThreads,
    ListTools,
    ListTurns,
)
from agentscope_durable.contracts.records import Binding
from agentscope_durable.contracts.status import ModelStatus, RunStatus, TurnStatus
from agentscope_durable.contracts.views import ModelCallView, Page, RunView, ThreadView, ToolView, TurnView
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.spi.backend import SessionBackend
from agentscope_durable.spi.record_store import ReadyScan

__all__ = [
    "FAILPOINTS",
    "Point",
    "answers_once",
    "arm",
    "calls_answered",
    "effects_once",
    "events_of",
    "nothing_stuck",
    "observe",
    "points",
    "replay_agrees",
    "submits_once",
    "transcript_valid",
]

PAGE = 500


# ------------------------------------------------------------ where a process can be killed


class Point(NamedTuple):
    """The `nth` time a process passes a failpoint, from 1. As text it is what `DURABLE_FAILPOINT` takes."""

    name: str
    nth: int

    def __str__(self) -> str:
        return f"{self.name}:{self.nth}"


def points(passed: Iterable[str]) -> list[Point]:
    """Every place to kill a process that passed these failpoints, in this order."""
    seen: Counter[str] = Counter()
    found: list[Point] = []
    for name in passed:
        seen[name] += 1
        found.append(Point(name, seen[name]))
    return found


# ------------------------------------------------------------ reading a whole Session


async def events_of(backend: SessionBackend, session: SessionKey) -> list[PublicEvent]:
    """All events that are kept, in order."""
    found: list[PublicEvent] = []
    cursor: str | None = None
    while True:
        page: EventPage = await backend.query(ListEvents(session=session, cursor=cursor, limit=PAGE))
        found += page.events
        if page.cursor == page.high_watermark:
            return found
        cursor = page.cursor


async def _listed(
    backend: SessionBackend, question: ListThreads | ListTurns | ListRuns | ListModelCalls
) -> AsyncIterator[Any]:
    """What a question lists, page after page."""
    while True:
        page: Page = await backend.query(question)
        for item in page:
            yield item
        if page.cursor is None:
            return
        question = replace(question, cursor=page.cursor)


def _threads(backend: SessionBackend, session: SessionKey) -> AsyncIterator[ThreadView]:
    return _listed(backend, ListThreads(session=session, limit=PAGE))


async def _turns(backend: SessionBackend, session: SessionKey) -> AsyncIterator[TurnView]:
    async for thread in _threads(backend, session):
        async for turn in _listed(backend, ListTurns(session=session, thread_id=thread.thread_id, limit=PAGE)):
            yield turn


def _runs(backend: SessionBackend, turn: TurnView) -> AsyncIterator[RunView]:
    return _listed(backend, ListRuns(session=turn.session, thread_id=turn.thread_id, turn_id=turn.turn_id, limit=PAGE))


def _model_calls(backend: SessionBackend, turn: TurnView, run: RunView) -> AsyncIterator[ModelCallView]:
    return _listed(
        backend,
        ListModelCalls(
            session=turn.session, thread_id=turn.thread_id, turn_id=turn.turn_id, run_id=run.run_id, limit=PAGE
        ),
    )


async def _tools(backend: SessionBackend, turn: TurnView) -> list[ToolView]:
    return await backend.query(ListTools(session=turn.session, thread_id=turn.thread_id, turn_id=turn.turn_id))


# ------------------------------------------------------------ S1


async def submits_once(backend: SessionBackend, session: SessionKey, acknowledged: Mapping[str, str]) -> list[str]:
    """S1. Every acknowledged submit is there exactly once.

    Args:
        acknowledged: request id to the Turn id its caller was told.
    """
    wrong: list[str] = []
    admitted: dict[str, list[str]] = {}
    ordinals: dict[str, list[int]] = {}
    async for turn in _turns(backend, session):
        admitted.setdefault(turn.request_id, []).append(turn.turn_id)
        ordinals.setdefault(turn.thread_id, []).append(turn.ordinal)
    for request_id, turn_id in acknowledged.items():
        if admitted.get(request_id) != [turn_id]:
            wrong.append(f"S1: request {request_id!r} was acknowledged as {turn_id}, and is {admitted.get(request_id)}")
    wrong += [f"S1: request {name!r} made {len(ids)} Turns" for name, ids in admitted.items() if len(ids) > 1]
    wrong += [
        f"S1: the Turns of thread {name!r} are numbered {numbers}"
        for name, numbers in ordinals.items()
        if numbers != list(range(1, len(numbers) + 1))
    ]
    return wrong


# ------------------------------------------------------------ S2


async def effects_once(
    backend: SessionBackend,
    session: SessionKey,
    effects: Iterable[tuple[str, str]],
    *,
    rerunnable: frozenset[str] = frozenset(),
) -> list[str]:
    """S2. Every effect has exactly one tool call, and no call has two.

    Args:
        effects: (Turn id, call id), once for each line of a ledger outside the product.
        rerunnable: names of tools declared safe to run again, which may have had their effect more than once.
    """
    wrong: list[str] = []
    calls: dict[tuple[str, str], ToolView] = {}
    async for turn in _turns(backend, session):
        for tool in await _tools(backend, turn):
            if (turn.turn_id, tool.call_id) in calls:
                wrong.append(f"S2: call {tool.call_id!r} of {turn.turn_id} is listed twice")
            calls[turn.turn_id, tool.call_id] = tool
    for (turn_id, call_id), count in Counter(effects).items():
        tool = calls.get((turn_id, call_id))
        if tool is None:
            wrong.append(f"S2: an effect of call {call_id!r} of {turn_id}, and there is no such call")
        elif count > 1 and tool.name not in rerunnable:
            wrong.append(f"S2: call {call_id!r} of {turn_id} ({tool.name}) had its effect {count} times")
    return wrong


# ------------------------------------------------------------ S3


async def calls_answered(backend: SessionBackend, session: SessionKey) -> list[str]:
    """S3, as everyone sees it: each call of an ended Turn has one result, which entered the agent's state once.

    What was asked for and never answered is told only of a Turn that COMPLETED: a cancelled or failed one closes its
    calls in its settlement.
    """
    wrong: list[str] = []
    told: dict[tuple[str, str, str], list[str]] = {}
    for event in await events_of(backend, session):
        if event.type in ("tool.requested", "tool.completed", "tool.applied"):
            place = (event.thread_id or "", event.turn_id or "", str(event.data["callId"]))
            told.setdefault(place, []).append(event.type.removeprefix("tool."))
    for (_, turn_id, call_id), story in told.items():
        if story not in (["requested"], ["requested", "completed"], ["requested", "completed", "applied"]):
            wrong.append(f"S3: call {call_id!r} of {turn_id} was told as {story}")
    async for turn in _turns(backend, session):
        for tool in await _tools(backend, turn):
            place = (turn.thread_id, turn.turn_id, tool.call_id)
            if place not in told:
                wrong.append(f"S3: call {tool_key(*place)} has no event")
            if turn.status is not TurnStatus.COMPLETED:
                continue
            if not tool.state.terminal or tool.applied_at_ms is None:
                wrong.append(
                    f"S3: {turn.turn_id} has completed and its call {tool.call_id!r} is {tool.state}"
                    f"{'' if tool.applied_at_ms is None else ' and applied'}"
                )
    return wrong


def transcript_valid(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """S3, as a provider checks it: messages in OpenAI's form, each call followed by its one result, in order."""
    wrong: list[str] = []
    waiting: list[str] = []
    seen: set[str] = set()
    for number, message in enumerate(messages):
        role = message.get("role")
        if role == "tool":
            call_id = str(message.get("tool_call_id"))
            if not waiting:
                wrong.append(f"S3: message {number} is a result of {call_id!r}, and nothing waits for one")
            elif waiting[0] != call_id:
                wrong.append(f"S3: message {number} is a result of {call_id!r} where that of {waiting[0]!r} belongs")
                waiting = [one for one in waiting if one != call_id]
            else:
                _ = waiting.pop(0)
            continue
        if waiting:
            wrong.append(f"S3: message {number} ({role}) comes before the results of {waiting}")
            waiting = []
        for call in message.get("tool_calls") or ():
            if call["id"] in seen:
                wrong.append(f"S3: message {number} has the call id {call['id']!r} for the second time")
            seen.add(call["id"])
            waiting.append(call["id"])
    if waiting:
        wrong.append(f"S3: the transcript ends without the results of {waiting}")
    return wrong


# ------------------------------------------------------------ S4


async def replay_agrees(backend: SessionBackend, session: SessionKey) -> list[str]:
    """S4. The events from the first one on are dense, and their fold is what `snapshot()` answers."""
    wrong: list[str] = []
    events = await events_of(backend, session)
    sequences = [event.sequence for event in events]
    if sequences != list(range(1, len(events) + 1)):
        wrong.append(f"S4: the events are numbered {sequences}")
    fold = EventProjection(session)
    for event in events:
        _ = fold.accept(event)
    snapshot: SnapshotView = await backend.query(GetSnapshot(session=session))
    if fold.cursor != snapshot.cursor:
        wrong.append(f"S4: the fold stands at {fold.cursor} and the snapshot at {snapshot.cursor}")
    mine, theirs = (msgspec.to_builtins(one) for one in (fold.projection, snapshot.projection))
    wrong += [
        f"S4: the fold has {part} {mine.get(part)} and the snapshot {theirs.get(part)}"
        for part in sorted({*mine, *theirs})
        if mine.get(part) != theirs.get(part)
    ]
    return wrong


# ------------------------------------------------------------ S5


async def nothing_stuck(backend: SessionBackend, session: SessionKey, *, routes: Iterable[str] = ()) -> list[str]:
    """S5. Nothing is claimable and unclaimed, held by a dead host, or waiting without a reason that can be seen.

    Args:
        routes: of external tools, whose executions must not be left lying about.
    """
    wrong: list[str] = []
    owners: set[str] = {owner.owner for owner in await backend.owners()}
    busy = False
    async for turn in _turns(backend, session):
        async for run in _runs(backend, turn):
            owners.add(run.owner)
            if run.status is RunStatus.RUNNING and (turn.lease is None or not turn.lease.alive):
                wrong.append(f"S5: {run.run_id} is RUNNING and no living host owns it")
        held = turn.lease is not None and turn.lease.alive
        if turn.lease is not None and not held:
            wrong.append(f"S5: {turn.turn_id} is leased by {turn.lease.owner}, which is gone")
        if turn.status.terminal:
            if turn.waiting_on:
                wrong.append(f"S5: {turn.turn_id} has ended and waits for {turn.waiting_on}")
            continue
        busy = True
        if not held and not turn.waiting_on and turn.ordinal == await _first_open(backend, turn):
            wrong.append(f"S5: {turn.turn_id} is {turn.status} and waits for nothing that can be seen")
    partition = keys.partition(session)
    alive = {owner.owner for owner in await backend.owners() if owner.alive}
    for owner in sorted(owners - alive):
        for kind in (keys.READY_LEASE, keys.READY_RUNNING):
            wrong += [
                f"S5: {kind} {item} is left with {owner}" async for item in _ready(backend, kind, owner, partition)
            ]
    if not busy:
        async for thread in _threads(backend, session):
            pinned = Binding(**msgspec.structs.asdict(thread.binding))
            wrong += [
                f"S5: thread {item!r} can be claimed and has nothing to do"
                async for item in _ready(backend, keys.READY_TURN, pinned.ready_class, partition)
            ]
        for route in routes:
            wrong += [
                f"S5: an execution {item} of an ended Turn waits on route {route!r}"
                async for item in _ready(backend, keys.READY_DISPATCH, route, partition)
            ]
    return wrong


async def _first_open(backend: SessionBackend, turn: TurnView) -> int:
    """The ordinal of the unfinished Turn at the head of the Thread's queue: those behind it wait for it."""
    async for other in _turns(backend, turn.session):
        if other.thread_id == turn.thread_id and not other.status.terminal:
            return other.ordinal
    return 0


async def _ready(backend: SessionBackend, kind: str, klass: str, partition: str) -> AsyncIterator[str]:
    after: tuple[int, str, str] | None = None
    while True:
        page = await backend.ready(ReadyScan(kind, klass, after, PAGE))
        for item in page.items:
            if item.partition == partition:
                yield item.item
        if len(page.items) < PAGE:
            return
        last = page.items[-1]
        after = (last.due_ms, last.partition, last.item)


# ------------------------------------------------------------ models


async def answers_once(
    backend: SessionBackend, session: SessionKey, asked: Mapping[str, int] | None = None
) -> list[str]:
    """A committed model answer was not asked for again, and every request of an ended Turn has an end (P4).

    Args:
        asked: message id to the requests that reached the provider for it, from a ledger outside the product.
    """
    wrong: list[str] = []
    async for turn in _turns(backend, session):
        ends: dict[str, list[ModelStatus]] = {}
        async for run in _runs(backend, turn):
            async for call in _model_calls(backend, turn, run):
                ends.setdefault(call.message_id or "", []).extend(one.status for one in call.requests)
        for message_id, story in ends.items():
            if not message_id:
                continue
            if ModelStatus.COMPLETED in story[:-1]:
                wrong.append(f"P4: {message_id} was asked for again after its answer: {story}")
            if turn.status.terminal and ModelStatus.STARTED in story:
                wrong.append(f"P4: {turn.turn_id} has ended and a request of {message_id} has not: {story}")
            if asked is not None and asked.get(message_id, 0) > len(story):
                wrong.append(
                    f"P4: {message_id} was asked for {asked[message_id]} times and recorded {len(story)} times"
                )
    return wrong
