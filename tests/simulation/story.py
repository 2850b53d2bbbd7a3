"""One story from beginning to end: clients ask, things go wrong, then everything is healed and must come to an end."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.errors import (
    Conflict,
    CursorExpired,
    DurableError,
    NotFound,
    Rejected,
    RequestConflict,
    Retry,
    SessionDropped,
    Unconfirmed,
)
from agentscope_durable.contracts.events import (
    Committed,
    EventDelta,
    EventFilter,
    PreviewStarted,
    SnapshotReset,
    cursor_of,
    sequence_of,
)
from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.contracts.questions import ExplainTurn, GetTurn
from agentscope_durable.contracts.status import ExecutionState, InteractionKind, TurnStatus, WaitKind
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.spi.executor import Cancelled, Failed, Succeeded
from agentscope_durable.testing.simulated_loop import SimulatedEnvironment
from tests.simulation.audit import TERMINAL, Asked, Audit, Violation
from tests.simulation.schedule import (
    CLIENTS,
    KEY,
    LARGE,
    STORY_SECONDS,
    Ask,
    Observer,
    Resource,
    Schedule,
    Submit,
    Wish,
    place,
)
from tests.simulation.verdict import check
from tests.simulation.world import AGENT, World

TRIES = 12
"""How often a client repeats a request whose answer it did not get."""
END_SECONDS = 3600.0
"""Simulated seconds after which everything must have ended once the faults have stopped."""
STEPS_MAX = 200_000
"""Callbacks after which a story goes round in circles: many times what the longest takes."""


@dataclass
class Outcome:
    """What came of a story."""

    plan: Schedule
    violation: Violation | None
    audit: Audit
    steps: int
    seconds: float
    trace: int

    @property
    def failed(self) -> bool:
        return self.violation is not None


class Client:
    """Asks, repeats what it got no answer to, and notes what it was told."""

    def __init__(self, story: Story, name: str) -> None:
        self.story = story
        self.name = name
        self.runtime: DurableRuntime = story.world.client(name)
        self.operations = HostOperations(
            story.world.backend(name, name),
            checkpoints=story.world.codecs,
            environment=SimulatedEnvironment(story.world.loop, f"operations {name}"),
        )

    def thread(self, place_: str) -> Any:
        session, name = place(place_)
        return self.runtime.get_session(session).get_thread(name)

    async def tell(self, asked: Asked, call: Any) -> Any:
        """Call until there is an answer, at most TRIES times, always with the same request id."""
        audit, loop = self.story.audit, self.story.world.loop
        audit.asked.append(asked)
        for attempt in range(TRIES):
            try:
                asked.receipt = await call()
                asked.error = None
                asked.ended = loop.time()
                return asked.receipt
            except (Retry, Unconfirmed) as error:
                asked.error = error
                audit.sometimes[f"a client was told {type(error).__name__}"] += 1
                await asyncio.sleep(0.2 * 2 ** min(attempt, 6))
            except Rejected as error:
                asked.error = error
                asked.ended = loop.time()
                return None
        return None

    async def do(self, wish: Wish) -> None:
        match wish:
            case Submit():
                await self.submit(wish)
            case Ask():
                await self.ask(wish)
            case Resource():
                await self.resource(wish)

    async def submit(self, wish: Submit) -> None:
        thread = self.thread(wish.thread)
        asked = Asked(
            "submit", wish.request, wish.turn, self.story.world.loop.time(), content=wish.text, thread=wish.thread
        )
        turn = await self.tell(asked, lambda: thread.submit(wish.request, wish.text))
        if turn is not None:
            asked.turn_id = turn.turn_id
            self.story.submitted.setdefault(wish.turn, (wish.thread, turn.turn_id))

    async def ask(self, wish: Ask) -> None:
        known = self.story.submitted.get(wish.turn)
        if known is None:
            return
        turn = self.thread(known[0]).get_turn(known[1])
        asked = Asked(wish.what, wish.request, wish.turn, self.story.world.loop.time(), target=wish.target)
        asked.turn_id = known[1]
        call: Any
        match wish.what:
            case "steer" | "inject":
                asked.content = f"{wish.what} {wish.request}" + (LARGE if wish.request.endswith("7") else "")
                method = turn.steer if wish.what == "steer" else turn.inject
                call = partial(method, wish.request, asked.content)
            case "withdraw":
                call = partial(turn.withdraw, wish.request, wish.target)
            case "cancel":
                call = partial(turn.cancel, wish.request)
            case "pause":
                call = partial(turn.pause, wish.request)
            case "signal":
                call = partial(turn.signal, wish.request, wish.target or "x.go", {"request": wish.request})
            case "resume":
                view = await self.look(turn.status)
                if view is None:
                    return
                call = partial(turn.resume, wish.request, view.revision)
            case "respond" | "refuse" | "edit":
                await self.respond(wish, turn, asked)
                return
            case "reconcile":
                await self.reconcile(wish.request, turn, asked)
                return
            case "release":
                call = partial(self.operations.release, turn, request_id=wish.request)
            case "repair":
                page = await self.look(self.thread(known[0]).checkpoints)
                if page is None:
                    return
                best = page.items[-1].position if page.items else None
                call = partial(
                    self.operations.repair, turn, best, expected_position=page.current, request_id=wish.request
                )
            case _:
                raise AssertionError(wish.what)
        await self.tell(asked, call)

    async def look(self, question: Any) -> Any:
        for _ in range(TRIES):
            try:
                return await question()
            except (Retry, Unconfirmed):
                await asyncio.sleep(0.5)
            except Rejected:
                return None
        return None

    async def respond(self, wish: Ask, turn: Any, asked: Asked) -> None:
        pending = await self.look(turn.pending_interactions)
        if not pending:
            return
        one = pending[len(wish.request) % len(pending)]
        asked.target = one.interaction_id
        if one.kind is InteractionKind.APPROVAL:
            edited = None
            if wish.what == "edit":
                edited = {**msgspec.json.decode(one.arguments), "seconds": 0.1, "edited": wish.request}
            answer = wish.what != "refuse"
            asked.content = "no" if not answer else "edited" if edited else "yes"
            await self.tell(asked, lambda: turn.respond(wish.request, one.interaction_id, answer, arguments=edited))
        else:
            asked.content = f"manual {wish.request}"
            await self.tell(asked, lambda: turn.respond(wish.request, one.interaction_id, asked.content))

    async def reconcile(self, request: str, turn: Any, asked: Asked) -> None:
        """Say of an unknown call what the world knows of it."""
        tools = await self.look(turn.list_tools)
        unknown = [tool for tool in tools or () if tool.state is ExecutionState.UNKNOWN]
        if not unknown:
            return
        tool = unknown[0]
        effects = self.story.world.effects
        effect = msgspec.json.decode(tool.arguments)["effect"]
        ended = effects.ended.get(effect)
        result: Any = (
            Succeeded(ended[-1])
            if ended
            else Failed("it began and broke")
            if effects.begun[effect]
            else Cancelled("it never began")
        )
        asked.target = tool.call_id
        await self.tell(
            asked,
            lambda: self.operations.reconcile_tool(
                turn, tool.call_id, request_id=request, result=result, evidence_ref="the world"
            ),
        )

    async def resource(self, wish: Resource) -> None:
        asked = Asked(wish.what, wish.request, -1, self.story.world.loop.time(), thread=wish.thread, target=wish.target)
        key, name = place(wish.thread)
        session, thread = self.runtime.get_session(key), self.thread(wish.thread)
        match wish.what:
            case "thread":
                await self.tell(asked, lambda: session.create_thread(name, AGENT))
            case "close_thread":
                await self.tell(asked, thread.close)
            case "close_session":
                await self.tell(asked, session.close)
            case "session":
                await self.tell(asked, lambda: self.runtime.create_session(key, AGENT))
            case "drop":
                await self.tell(asked, lambda: self.operations.drop_session(key, reason="the story wants it"))
            case "retain":
                await self.tell(asked, lambda: self.operations.retain(events_older_than=10, checkpoints_older_than=10))
            case "doctor":
                await self.doctor()
            case "prune":
                page = await self.look(session.snapshot)
                if page is not None:
                    last = sequence_of(key, page.cursor)
                    through = cursor_of(key, int(last * wish.pick))
                    await self.tell(asked, lambda: self.operations.prune_events(key, through=through))
            case "sweep":
                await self.tell(asked, lambda: self.operations.sweep_objects(strangers=wish.pick < 0.5))
                if asked.acknowledged and asked.receipt.swept:
                    self.story.audit.sometimes["a body was swept"] += 1
            case "forget":
                page = await self.look(thread.checkpoints)
                if page is not None and page.items:
                    chosen = page.items[int(wish.pick * len(page.items))].position
                    of = ThreadKey(key, name)
                    await self.tell(asked, lambda: self.operations.prune_checkpoints(of, through=chosen))
            case "restore" | "fork":
                await self.copy(wish, thread, asked)
            case _:
                raise AssertionError(wish.what)

    async def copy(self, wish: Resource, thread: Any, asked: Asked) -> None:
        page = await self.look(thread.checkpoints)
        if page is None or not page.items:
            return
        chosen = page.items[int(wish.pick * len(page.items))]
        asked.content = chosen.position
        if wish.what == "restore":
            await self.tell(asked, lambda: thread.restore(chosen.position, page.current, wish.request))
        else:
            target = ThreadKey(place(wish.thread)[0], wish.target)
            await self.tell(asked, lambda: thread.fork(chosen.position, target, wish.request))

    async def doctor(self) -> None:
        found = await self.look(lambda: self.operations.doctor(deep=True))
        if found is not None:
            damage = [finding for finding in found.findings if finding.severity.value == "damage"]
            if damage:
                self.story.audit.broken("P7", f"doctor finds damage: {damage}")


class Watcher:
    """Follows the Session and folds what it is told."""

    def __init__(self, story: Story, number: int, how: Observer) -> None:
        self.story = story
        self.how = how
        self.name = f"watcher{number}"
        self.session, self.only = place(how.of)
        self.narrow = EventFilter(thread_id=self.only or None)
        self.fold = EventProjection(self.session, self.narrow)
        self.last = self.began = 0
        self.seen: list[int] = []
        self.gone = False
        self.calls = 0
        self.resets = 0
        self.completed: set[str] = set()
        self.shown: dict[tuple[str, int], int] = {}

    @property
    def slow(self) -> float:
        return self.how.slow if self.story.world.faulty else 0.0

    async def run(self) -> None:
        await asyncio.sleep(self.how.at)
        runtime = self.story.world.client(self.name)
        session = runtime.get_session(self.session)
        deltas = ("message",) if self.how.deltas else ()
        if self.how.how == "subscription":
            session.subscribe_events(listener=self.listen, filter=self.narrow, deltas=deltas)
            return
        cursor: str | None = None
        while True:
            try:
                async with session.stream_events(after=cursor, filter=self.narrow, deltas=deltas) as stream:
                    async for item in stream:
                        self.take(item)
                        cursor = stream.cursor or cursor
                        await asyncio.sleep(self.slow)
            except SessionDropped:
                self.gone = True
                return
            except (Retry, Unconfirmed, NotFound, CursorExpired):
                self.shown.clear()
                await asyncio.sleep(1.0)

    async def listen(self, item: Any) -> None:
        self.calls += 1
        await asyncio.sleep(self.slow)
        if self.story.world.faulty and self.how.fails and self.calls % self.how.fails == 0:
            raise ValueError("an observer that fails")
        self.take(item)

    def take(self, item: Any) -> None:
        audit = self.story.audit
        match item:
            case Committed(event=event):
                if event.sequence != self.last + 1 and not (self.only and event.sequence > self.last):
                    audit.broken("P7", f"{self.name} was shown {event.sequence} after {self.last}")
                if self.only and event.thread_id != self.only:
                    audit.broken("P7", f"{self.name} of {self.only} was shown {event.type} of {event.thread_id}")
                self.last = event.sequence
                self.seen.append(event.sequence)
                self.fold.accept(event)
                if event.type == "message.completed":
                    self.completed.add(event.data["messageId"])
            case SnapshotReset(snapshot=snapshot):
                self.resets += 1
                audit.sometimes["an observer was given a snapshot"] += 1
                self.last = self.began = sequence_of(self.session, snapshot.cursor)
                self.seen.clear()
                self.fold.reset(snapshot)
            case PreviewStarted():
                if item.message_id in self.completed:
                    audit.broken("P7", f"{self.name} was shown a preview of {item.message_id} after its fact")
                self.shown[item.message_id, item.attempt] = 0
            case EventDelta():
                if item.message_id in self.completed:
                    audit.broken("P7", f"{self.name} was shown a delta of {item.message_id} after its fact")
                at = self.shown.get((item.message_id, item.attempt))
                if at is not None and item.offset != at:
                    audit.broken("P7", f"{self.name} was shown a preview with a hole at {at}")
                self.shown[item.message_id, item.attempt] = item.offset + len(item.text)
                audit.sometimes["a preview was shown"] += 1
            case _:
                raise AssertionError(item)


class Story:
    """See the top of this file."""

    def __init__(self, plan: Schedule) -> None:
        self.plan = plan
        self.audit = Audit()
        self.world = World(plan, self.audit)
        self.audit.world = self.world
        self.submitted: dict[int, tuple[str, str]] = {}
        self.watchers: list[Watcher] = []
        self.known_effects: dict[str, Any] = {}
        self.stuck: str = ""

    def play(self) -> Outcome:
        world, violation = self.world, None
        try:
            try:
                with warnings.catch_warnings():
                    # Who is killed in the middle leaves coroutines that it was about to await.
                    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
                    world.loop.run(self._all())
                    world.loop.run(self._judge())
            finally:
                world.shut()
        except Violation as found:
            violation = found
        except Exception as error:
            violation = Violation("crash", f"{type(error).__name__}: {error}")
            violation.__cause__ = error
        finally:
            world.close()
        if self.audit.problems:
            violation = self.audit.problems[0]
        return Outcome(self.plan, violation, self.audit, world.loop.steps, world.loop.time(), world.loop.trace)

    async def _all(self) -> None:
        world = self.world
        clients = {name: Client(self, name) for name in CLIENTS}
        for name, client in clients.items():
            world.loop.start(client.runtime.__aenter__(), actor=name)
        world.faulty = False
        await self._found(clients["x"])
        world.faulty = True
        world.arm()
        for slot in world.hosts:
            world.boot(slot)
        for number, how in enumerate(self.plan.observers):
            watcher = Watcher(self, number, how)
            self.watchers.append(watcher)
            world.loop.start(watcher.run(), actor=watcher.name)
        tasks = [
            world.loop.start(self._wish(clients[wish.client], wish), actor=wish.client) for wish in self.plan.wishes
        ]
        world.loop.start(self._probe(), actor="probe")
        await self._until(STORY_SECONDS)
        world.heal()
        self.healed_at = world.loop.time()
        await self._ended(clients["x"], tasks)
        await self._quiet()

    async def _found(self, client: Client) -> None:
        done = self.world.loop.start(client.runtime.create_session(KEY, AGENT), actor=client.name)
        await asyncio.wait({done})
        done.result()

    async def _wish(self, client: Client, wish: Wish) -> None:
        await asyncio.sleep(wish.at)
        await client.do(wish)

    async def _until(self, when: float) -> None:
        while self.world.loop.time() < when and not self.audit.problems:
            self._bounded()
            await asyncio.sleep(min(1.0, when - self.world.loop.time() + 0.001))

    def _bounded(self) -> None:
        if self.world.loop.steps > STEPS_MAX:
            raise Violation("P9", f"after {self.world.loop.steps} callbacks there is still {self.stuck or 'no end'}")

    async def _probe(self) -> None:
        """P9 at any time: a Turn that does not run and has not ended says why."""
        truth = TransactionalSessionBackend(self.world.truth, self.world.objects, environment=self.world.environment)
        while True:
            await asyncio.sleep(7.3)
            for turn_id, seen in list(self.audit.turns.items()):
                if seen.status in TERMINAL:
                    continue
                question = GetTurn(session=seen.session, thread_id=seen.thread, turn_id=turn_id)
                view = self.world.loop.drive(truth.query(question))
                if view.status is TurnStatus.WAITING and not view.waiting_on and view.lease is None:
                    self.audit.broken("P9", f"turn {turn_id} is WAITING and does not say for what")
                told = self.world.loop.drive(
                    truth.query(ExplainTurn(session=seen.session, thread_id=seen.thread, turn_id=turn_id))
                )
                if not told.reasons:
                    self.audit.broken("P9", f"turn {turn_id} is {view.status} and explain gives no reason")

    # ---- the end: P9, everything ends or says what it waits for ----

    async def _ended(self, client: Client, tasks: list[Any]) -> None:
        """Do everything that can be asked for, until every Turn has ended."""
        world = self.world
        deadline = world.loop.time() + END_SECONDS
        closer = world.loop.start(self._close_all(client, tasks), actor="x", name="closer")
        while not closer.done() and not self.audit.problems:
            self._bounded()
            if world.loop.time() > deadline:
                explained = await self._explain(client)
                raise Violation("P9", f"after {END_SECONDS} s without faults there is still {self.stuck}; {explained}")
            await asyncio.sleep(1.0)
        if closer.done():
            closer.result()

    async def _explain(self, client: Client) -> str:
        for turn_id, seen in self.audit.turns.items():
            if seen.status not in TERMINAL:
                turn = client.runtime.get_session(seen.session).get_thread(seen.thread).get_turn(turn_id)
                work = self.world.loop.start(turn.explain(), actor="x")
                await asyncio.wait({work})
                return str(work.result())
        return "every turn has ended"

    async def _close_all(self, client: Client, tasks: list[Any]) -> None:
        self.stuck = "a client waiting for an answer"
        await asyncio.gather(*tasks)
        number = 0
        while True:
            open_turns = [(one, seen) for one, seen in self.audit.turns.items() if seen.status not in TERMINAL]
            if not open_turns:
                return
            for turn_id, seen in open_turns:
                number += 1
                self.stuck = f"turn {turn_id}, {seen.statuses[-3:]}"
                turn = client.runtime.get_session(seen.session).get_thread(seen.thread).get_turn(turn_id)
                await self._advance(client, turn, f"end{number}")
            await asyncio.sleep(2.0)

    async def _advance(self, client: Client, turn: Any, request: str) -> None:
        """Do for this Turn what it says it waits for."""
        view = await turn.status()
        audit = self.audit
        asked = Asked("end", request, -1, self.world.loop.time(), turn_id=turn.turn_id)
        self.stuck += f" waiting on {[(one.kind.value, one.next_action) for one in view.waiting_on]}"
        try:
            if view.status is TurnStatus.PAUSED:
                await turn.resume(request, view.revision)
                return
            for one in view.waiting_on:
                match one.kind:
                    case WaitKind.APPROVAL | WaitKind.EXTERNAL_RESULT:
                        await client.respond(Ask(0.0, client.name, -1, request, "respond"), turn, asked)
                        return
                    case WaitKind.TOOL_UNKNOWN:
                        await client.reconcile(request, turn, asked)
                        return
                    case WaitKind.OPERATOR:
                        await client.operations.release(turn, request_id=request)
                        return
                    case WaitKind.SIGNAL:
                        await turn.signal(request, one.id, {"request": request})
                        return
                    case _:
                        pass
        except Conflict:
            audit.sometimes["the end met another hand"] += 1
        except Rejected as error:
            if view.status.terminal:
                audit.broken("P9", f"{view.status} turn refuses {error}")

    async def _quiet(self) -> None:
        """Observers must have been shown everything."""
        world = self.world
        deadline = world.loop.time() + 600.0
        while (behind := [one for one in self.watchers if self._behind(one)]) and not self.audit.problems:
            if world.loop.time() > deadline:
                told = {one.name: (one.last, self._wanted(one)[-1:]) for one in behind}
                raise Violation("P7", f"observers were not shown everything: {told}")
            await asyncio.sleep(1.0)

    def _wanted(self, watcher: Watcher) -> list[int]:
        """Numbers of the events that it has to be shown, since it was last given a snapshot."""
        events = self.audit.events.get(keys.partition(watcher.session), [])
        return [
            event.sequence for event in events if event.sequence > watcher.began and watcher.only in ("", event.thread)
        ]

    def _behind(self, watcher: Watcher) -> bool:
        """Somebody who looks at what is being dropped is told that it is gone, and shown no more."""
        if watcher.gone or watcher.session in self.audit.dropped:
            return False
        wanted = self._wanted(watcher)
        if wanted and wanted[-1] > watcher.last:
            return True
        if watcher.seen != wanted:
            self.audit.broken("P7", f"{watcher.name} was shown {watcher.seen}, and not {wanted}")
        return False

    async def _judge(self) -> None:
        """Within the loop, since a store may answer from threads; nothing else runs meanwhile."""
        if not self.audit.problems:
            check(self)


def play(plan: Schedule) -> Outcome:
    return Story(plan).play()


__all__ = ["DurableError", "Outcome", "RequestConflict", "Story", "play"]
