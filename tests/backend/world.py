"""A Session in a store, a host that runs its Threads by hand, somebody who asks, and somebody who does anything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.bodies import Body, body_of
from agentscope_durable.contracts.errors import (
    DurableError,
)
from agentscope_durable.contracts.events import EventFilter, EventPage, PublicEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.log import StepFact, StoredEvent, encode_events
from agentscope_durable.contracts.messages import Message
from agentscope_durable.contracts.projection import Projection, SnapshotView
from agentscope_durable.contracts.records import Binding, Failure, ThreadRecord, decode
from agentscope_durable.contracts.results import HostNotice
from agentscope_durable.contracts.status import (
    Audience,
    ExecutionKind,
    ExecutionState,
    InteractionKind,
    InteractionState,
    StepPhase,
)
from agentscope_durable.contracts.views import (
    Page,
    TurnView,
)
from agentscope_durable.domain import ids
from agentscope_durable.domain.projection import EventProjection
from agentscope_durable.spi.record_store import Change, Entry, Reads, Records, Unchanged, View
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.manual_clock import ManualClock

SESSION = SessionKey("app", "s1")
BINDING = Binding("assistant", "v1", "agentscope-thread-journal-v2")
HOST = "host-1"
EVERYTHING = EventFilter()
LARGE = "x" * 100_000
NOTICE = msgspec.json.encode(HostNotice(classes=(BINDING.ready_class,)))


class Objects:
    """Large bodies in a dictionary."""

    persistent = False

    def __init__(self) -> None:
        self.content: dict[tuple[str, str], bytes] = {}

    async def put(self, partition: str, digest: str, content: bytes) -> None:
        self.content[partition, digest] = content

    async def get(self, partition: str, digest: str) -> bytes:
        return self.content[partition, digest]

    async def exists(self, partition: str, digest: str) -> bool:
        return (partition, digest) in self.content

    async def delete(self, partition: str, digest: str) -> None:
        self.content.pop((partition, digest), None)

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        return sorted(digest for place, digest in self.content if place == partition and digest > after)[:limit]

    async def close(self) -> None:
        pass


class CountingStore(MemoryRecordStore):
    """Counts what queries read."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.read_count = 0
        self.rows = 0

    async def read(self, partition: str, reads: Reads) -> Records:
        records = await super().read(partition, reads)
        self.read_count += 1
        self.rows += len(records.keys) + len(records.log)
        self.rows += sum(map(len, records.ranges.values())) + sum(map(len, records.streams.values()))
        return records


class Seeded:
    """Chance that repeats itself from one test to the next. Everything else of an environment is not used here."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def random_bytes(self, count: int) -> bytes:
        return next(self._numbers).to_bytes(count, "big")


class World:
    """A Session, a host that runs its Threads by hand, and somebody who asks."""

    def __init__(
        self, session: SessionKey = SESSION, *, store: Any = None, clock: ManualClock | None = None, backend: Any = None
    ) -> None:
        self.session = session
        self.clock = clock or ManualClock()
        self.store: Any = store or (CountingStore(self.clock) if backend is None else backend.records)
        self.backend = backend or TransactionalSessionBackend(self.store, Objects(), environment=Seeded())  # type: ignore[arg-type]
        self.runs: dict[str, c.Claimed] = {}
        self.steps: dict[str, int] = {}
        self.requests = itertools.count(1)

    async def do(self, command: Any) -> Any:
        return await self.backend.execute(command, audience=Audience.OPERATOR)

    async def ask(self, question: Any) -> Any:
        return await self.backend.query(question, audience=Audience.OPERATOR)

    async def body(self, value: object) -> Body:
        return await self.backend.put_body(self.session, msgspec.json.encode(value))

    async def text(self, text: str) -> Body:
        return await self.body([{"type": "text", "text": text}])

    async def open(self, *threads: str) -> World:
        await self.do(c.CreateSession(session=self.session, binding=BINDING))
        for thread in threads:
            await self.do(c.CreateThread(session=self.session, thread_id=thread, binding=BINDING))
        return self

    def request(self) -> str:
        return f"r{next(self.requests)}"

    async def submit(self, text: str = "do it", thread: str = "main") -> str:
        content = await self.text(text)
        receipt = await self.do(
            c.SubmitTurn(
                session=self.session, thread_id=thread, request_id=self.request(), content=content, digest=text[:20]
            )
        )
        return receipt.turn_id

    def alive(self, owner: str = HOST, notice: bytes = NOTICE) -> None:
        self.store.renew(owner, 30_000, notice)

    async def claim(self, thread: str = "main", owner: str = HOST, dead: tuple[str, ...] = ()) -> c.Claimed:
        self.alive(owner)
        claimed = await self.do(
            c.Claim(session=self.session, thread_id=thread, owner=owner, served=(BINDING.ready_class,), dead=dead)
        )
        if claimed.run_id:
            self.runs[thread] = claimed
            self.steps[claimed.run_id] = 0
        return claimed

    async def commit(self, thread: str = "main", **parts: Any) -> c.StepReceipt:
        run = self.runs[thread]
        receipt = await self.do(
            c.CommitStep(
                session=self.session,
                thread_id=thread,
                turn_id=run.turn_id,
                run_id=run.run_id,
                fence=run.fence,
                expected_position=run.position,
                **parts,
            )
        )
        self.runs[thread] = msgspec.structs.replace(run, position=receipt.position)
        if receipt.ended:
            del self.runs[thread]
        return receipt

    async def say(self, text: str, thread: str = "main", reasoning: int = 1, **more: Any) -> str:
        message_id = ids.message_id(self.runs[thread].turn_id, reasoning)
        out = c.MessageOut(message_id=message_id, content=await self.text(text), **more)
        await self.commit(thread, messages=(out,))
        return message_id

    async def finish(self, thread: str = "main", message_id: str = "") -> None:
        await self.commit(thread, end=c.RunEnd(kind=c.RunEndKind.COMPLETED, message_id=message_id))

    async def answer_turn(self, text: str, thread: str = "main") -> str:
        """A whole Turn: asked, answered, done."""
        turn = await self.submit(text, thread)
        await self.claim(thread)
        await self.finish(thread, await self.say(f"answer to {text}", thread))
        return turn

    async def events(self, narrow: EventFilter = EVERYTHING, limit: int = 1000) -> list[PublicEvent]:
        found: list[PublicEvent] = []
        cursor = None
        while True:
            page: EventPage = await self.ask(
                q.ListEvents(session=self.session, filter=narrow, cursor=cursor, limit=limit)
            )
            found.extend(page.events)
            cursor = page.cursor
            if cursor == page.high_watermark:
                return found

    async def snapshot(self, narrow: EventFilter = EVERYTHING) -> SnapshotView:
        return await self.ask(q.GetSnapshot(session=self.session, filter=narrow))

    async def turn(self, turn_id: str, thread: str = "main") -> TurnView:
        return await self.ask(q.GetTurn(session=self.session, thread_id=thread, turn_id=turn_id))

    async def history(self, narrow: EventFilter = EVERYTHING, limit: int = 100) -> list[Message]:
        return await self.pages(q.GetHistory(session=self.session, filter=narrow, limit=limit))

    async def pages(self, question: Any) -> list[Any]:
        """All items of a listing, page by page."""
        items: list[Any] = []
        cursor = None
        while True:
            page: Page = await self.ask(replace(question, cursor=cursor))
            assert len(page) <= question.limit
            items.extend(page.items)
            cursor = page.cursor
            if cursor is None:
                return items

    def fold(self, events: Sequence[PublicEvent], narrow: EventFilter | None = None) -> Projection:
        projection = EventProjection(self.session, narrow)
        for event in events:
            assert projection.accept(event)
        return projection.projection

    async def write(self, **entry: Any) -> None:
        """A log row written past every rule, as an older or a newer release may have left it."""

        def decide(view: View, now_ms: int) -> Change | Unchanged:
            assert view.head is not None
            return Change(head=view.head, commit_id=f"{now_ms:032x}", entry=Entry(**entry))

        await self.store.transact(keys.partition(self.session), Reads(), decide)

    async def prune(self, through: int) -> None:
        """Drop events in as many batches as it takes."""
        while (await self.do(c.PruneEvents(session=self.session, through=through))).more:
            pass


def stored_event(event_type: str, payload: dict[str, Any], turn: str = "", run: str = "") -> bytes:
    raw = msgspec.Raw(msgspec.json.encode(payload))
    return encode_events([StoredEvent(event_type, "main" if turn else "", turn, run, "", raw)])


# ---- random histories ----


async def everything(world: World) -> dict[str, Any]:
    """Every answer there is about the Session, but the listing of its events."""
    answers: dict[str, Any] = {}

    async def note(question: Any) -> Any:
        answers[repr(question)] = answer = await world.ask(question)
        return answer

    async def pages(question: Any) -> list[Any]:
        answers[repr(question)] = items = await world.pages(question)
        return items

    session = {"session": world.session}
    snapshot: SnapshotView = await note(q.GetSnapshot(**session))
    await note(q.GetSession(**session))
    for message in await pages(q.GetHistory(**session, limit=3)):
        await note(q.GetMessage(**session, message_id=message.id))
    for thread in await pages(q.ListThreads(**session)):
        narrow = EventFilter(thread.thread_id)
        await note(q.GetSnapshot(**session, filter=narrow))
        await pages(q.GetHistory(**session, filter=narrow))
        await native(world, thread.thread_id, answers)
    for turn in snapshot.projection.turns.values():
        where = session | {"thread_id": turn.thread_id, "turn_id": turn.turn_id}
        narrow = EventFilter(turn.thread_id, turn.turn_id)
        await note(q.GetSnapshot(**session, filter=narrow))
        await pages(q.GetHistory(**session, filter=narrow))
        await note(q.GetTurn(**where))
        await note(q.GetOutcome(**where))
        await note(q.ListTools(**where))
        await note(q.ListInteractions(**where, pending_only=False))
        await note(q.ListInteractions(**where))
        await note(q.OpenWork(**where))
        for run in await pages(q.ListRuns(**where)):
            await note(q.GetSnapshot(**session, filter=replace(narrow, run_id=run.run_id)))
            await pages(q.ListSteps(**where, run_id=run.run_id))
            await pages(q.ListModelCalls(**where, run_id=run.run_id))
    return answers


async def native(world: World, thread_id: str, answers: dict[str, Any]) -> None:
    """What a Thread's state is built from: at every position, to the byte."""
    key = keys.thread(thread_id)
    records = await world.store.read(keys.partition(world.session), Reads(keys=(key,)))
    thread = decode(ThreadRecord, records.keys[key], key=key)
    active = records.head.threads.get(thread_id)
    for last in range(1, (thread if active is None else active).position + 1):
        question = q.LoadThread(session=world.session, thread_id=thread_id, first=1, last=last)
        answers[repr(question)] = await world.ask(question)


class Chance:
    """Somebody who does anything at any time. What is refused changes nothing and is no matter."""

    def __init__(self, seed: int, world: World | None = None) -> None:
        self.world = world or World()
        self.random = random.Random(seed)
        self.turns: list[tuple[str, str]] = []
        self.threads = ["main"]
        self.calls = itertools.count(1)
        self.kinds: dict[str, ExecutionKind] = {}
        self.said: dict[str, tuple[int, int]] = {}

    async def live(self, acts: int) -> World:
        world = await self.world.open()
        for _ in range(acts):
            world.clock.advance(self.random.choice([0, 0, 1, 500, 5000]))
            act = self.random.choice(self.ACTS)
            try:
                await act(self)
            except (DurableError, KeyError):
                continue
        return world

    def _turn(self) -> dict[str, Any]:
        thread, turn = self.random.choice(self.turns) if self.turns else ("main", "t")
        return {"session": SESSION, "thread_id": thread, "turn_id": turn}

    async def thread(self) -> None:
        name = self.random.choice(["research", "a/b"])
        await self.world.do(c.CreateThread(session=SESSION, thread_id=name, binding=BINDING))
        self.threads.append(name)

    async def submit(self) -> None:
        thread = self.random.choice(self.threads)
        self.turns.append((thread, await self.world.submit("task", thread)))

    async def claim(self) -> None:
        owner = self.random.choice(["host-1", "host-2"])
        dead = ("host-1", "host-2") if self.random.random() < 0.3 else ()
        await self.world.claim(self.random.choice(self.threads), owner, tuple(d for d in dead if d != owner))

    async def say(self) -> None:
        thread = self.random.choice(self.threads)
        reasoning = self.random.randint(1, 3)
        message_id = ids.message_id(self.world.runs[thread].turn_id, reasoning)
        first_seq, revision = self.said.get(message_id, (0, 0))
        await self.world.say(f"version {revision}", thread, reasoning, revision=revision + 1, first_seq=first_seq)
        message = await self.world.ask(q.GetMessage(session=SESSION, message_id=message_id))
        self.said[message_id] = (message.sequence, revision + 1)

    async def step(self) -> None:
        thread = self.random.choice(self.threads)
        run = self.world.runs[thread].run_id
        number = self.world.steps[run] = self.world.steps[run] + 1
        await self.world.commit(
            thread, steps=(StepFact(ids.step_id(run, number), run, number, StepPhase.REASONING),), reasoning=number
        )

    async def tool(self) -> None:
        call = f"c{next(self.calls)}"
        kind = self.kinds[call] = self.random.choice(list(ExecutionKind))
        state = self.random.choice(
            [ExecutionState.RUNNING, ExecutionState.INTENT]
            if kind is ExecutionKind.LOCAL
            else [ExecutionState.INTENT, ExecutionState.REQUESTED]
        )
        await self.world.commit(
            self.random.choice(self.threads),
            tools=(c.ToolCommit(call_id=call, state=state, name="tool", kind=kind, arguments=body_of({"n": 1})),),
        )

    async def outcome(self) -> None:
        thread = self.random.choice(self.threads)
        call = f"c{self.random.randint(1, 6)}"
        where = {"session": SESSION, "thread_id": thread, "turn_id": self.world.runs[thread].turn_id}
        if call in {view.call_id for view in await self.world.ask(q.ListInteractions(**where))}:
            # The agent waits for the answer first.
            return
        state = self.random.choice(
            [ExecutionState.RUNNING, ExecutionState.COMPLETED, ExecutionState.FAILED, ExecutionState.UNKNOWN]
        )
        result = body_of({"value": call}) if state.terminal else None
        applied = state.terminal and self.random.random() < 0.5
        await self.world.commit(
            thread,
            tools=(c.ToolCommit(call_id=call, kind=self.kinds[call], state=state, result=result, applied=applied),),
        )

    async def hands(self) -> None:
        where = self._turn() | {"call_id": f"c{self.random.randint(1, 6)}"}
        if self.random.random() < 0.5:
            await self.world.do(c.ClaimExecution(**where, owner="hands"))
        else:
            state = self.random.choice([ExecutionState.COMPLETED, ExecutionState.UNKNOWN])
            await self.world.do(
                c.RecordOutcome(
                    **where,
                    execution_id=ids.execution_id(where["turn_id"], where["call_id"]),
                    state=state,
                    result=body_of({"value": 2}) if state.terminal else None,
                )
            )

    async def reconcile(self) -> None:
        await self.world.do(
            c.ReconcileTool(
                **self._turn(),
                call_id=f"c{self.random.randint(1, 6)}",
                request_id=self.world.request(),
                state=ExecutionState.COMPLETED,
                result=body_of({"value": 3}),
                digest="d",
                evidence_ref="ticket",
            )
        )

    async def question(self) -> None:
        thread = self.random.choice(self.threads)
        call = f"c{next(self.calls)}"
        self.kinds[call] = ExecutionKind.LOCAL
        interaction = ids.interaction_id(self.world.runs[thread].turn_id, call)
        await self.world.commit(
            thread,
            tools=(
                c.ToolCommit(
                    call_id=call, state=ExecutionState.AWAITING_APPROVAL, name="rm", arguments=body_of("text")
                ),
            ),
            interactions=(
                c.InteractionCommit(
                    interaction_id=interaction,
                    call_id=call,
                    kind=self.random.choice(list(InteractionKind)),
                    name="rm",
                    arguments=body_of("text"),
                ),
            ),
        )

    async def respond(self) -> None:
        where = self._turn()
        interaction = ids.interaction_id(where["turn_id"], f"c{self.random.randint(1, 6)}")
        # Refused where no approval asks; a text like the model's own, small or not.
        edited = self.random.choice([None, None, None, '{"x":2}', LARGE])
        await self.world.do(
            c.Respond(
                **where,
                request_id=self.world.request(),
                interaction_id=interaction,
                response=body_of(True),
                result=body_of({"value": True}),
                digest="d",
                content=body_of([{"type": "text", "text": "yes"}]),
                is_bool=True,
                approved=True,
                arguments=None if edited is None else await self.world.body(edited),
                arguments_digest="" if edited is None else "2",
            )
        )

    async def answers(self) -> None:
        thread = self.random.choice(self.threads)
        where = {"session": SESSION, "thread_id": thread, "turn_id": self.world.runs[thread].turn_id}
        asked = await self.world.ask(q.ListInteractions(**where, pending_only=False))
        answered = [view.interaction_id for view in asked if view.state is InteractionState.RESOLVED]
        await self.world.commit(thread, answers=tuple(answered[:1]))

    async def add(self) -> None:
        kind = self.random.choice(["steer", "inject"])
        content = await self.world.text("more")
        await self.world.do(
            c.AddInput(**self._turn(), request_id=self.world.request(), kind=kind, content=content, digest="d")
        )

    async def inputs(self) -> None:
        await self.world.commit(self.random.choice(self.threads), inputs=(self.random.randint(1, 2),))

    async def control(self) -> None:
        kind = self.random.choice([c.Cancel, c.Pause])
        await self.world.do(kind(**self._turn(), request_id=self.world.request()))

    async def resume(self) -> None:
        where = self._turn()
        view = await self.world.turn(where["turn_id"], where["thread_id"])
        await self.world.do(c.Resume(**where, request_id=self.world.request(), expected_revision=view.revision))

    async def withdraw(self) -> None:
        target = f"r{self.random.randint(1, 20)}"
        await self.world.do(c.Withdraw(**self._turn(), request_id=self.world.request(), target_request_id=target))

    async def signal(self) -> None:
        await self.world.do(
            c.Signal(**self._turn(), request_id=self.world.request(), key="x.app.go", payload=body_of(1), digest="d")
        )

    async def wait(self) -> None:
        wait = c.WaitCondition("x.app.go", self.random.choice([0, self.world.clock.wall_ms() + 3000]))
        await self.world.commit(self.random.choice(self.threads), waits=(wait,))

    async def end(self) -> None:
        kind = self.random.choice(list(c.RunEndKind))
        failure = Failure("ValueError", "no", self.random.random() < 0.7) if kind is c.RunEndKind.FAILED else None
        await self.world.commit(self.random.choice(self.threads), end=c.RunEnd(kind=kind, failure=failure))

    async def settle(self) -> None:
        thread = self.random.choice(self.threads)
        head = (await self.world.store.read(keys.partition(SESSION), Reads())).head
        assert head is not None
        active = head.threads[thread]
        owner = {
            "session": SESSION,
            "thread_id": thread,
            "turn_id": active.turn_id,
            "run_id": active.run.run_id,
            "fence": active.fence,
        }
        if self.random.random() < 0.8:
            await self.world.do(c.SettleTurn(**owner, expected_position=active.position))
        else:
            await self.world.do(c.PostponeSettlement(**owner, failure=Failure("OSError", "later")))
        self.world.runs.pop(thread, None)

    async def close(self) -> None:
        if self.random.random() < 0.1:
            await self.world.do(c.CloseSession(session=SESSION))
        else:
            await self.world.do(c.CloseThread(session=SESSION, thread_id=self.random.choice(self.threads)))

    ACTS = (
        *(submit, claim, claim, claim, say, say, step, tool, tool, outcome, outcome, hands, hands, question, question),
        *(respond, respond, answers, add, add, inputs, control, resume, withdraw, signal, wait, end, end, settle),
        *(reconcile, close, thread),
    )
