"""C73: the lock error was retried inside the body but not in the read just before it; elsewhere a large write held the
lock past a fixed 5 s.

SQLite's own trace tells which statements the product issues. A story that uses all of the product is told while another
process holds the write lock at every one of them: first for as long as the product waits, then for longer.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from agentscope_durable import _failpoints
from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.contracts.errors import Retry, StoreBusy
from agentscope_durable.contracts.events import EventFilter
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.stores.records import _sqlite_file
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Gates,
    ScriptedHarness,
    Stall,
    approval,
    external,
    final,
    local,
    say,
    together,
)
from tests.runtime.conftest import KEY, kill, turn_is

pytestmark = pytest.mark.backend("sqlite")

LARGE = "x" * (4 * INLINE_MAX_BYTES)
PATIENT = 20.0
"""A budget that no lock of this story lasts for, in seconds."""
IMPATIENT = 0.01
"""One that each of them outlasts."""


class Holder:
    """Another process that takes the write lock when it is told to, and lets it go when it is told to."""

    PROGRAM = """
        import apsw, sys
        connection = apsw.Connection(sys.argv[1])
        connection.set_busy_timeout(60_000)
        for line in sys.stdin:
            connection.execute("begin immediate" if line == "take\\n" else "rollback")
            print(line, end="", flush=True)
    """

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self.PROGRAM), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lock = threading.Lock()
        self.held = False
        self.times = 0

    def take(self) -> None:
        """Returns when it is held."""
        with self._lock:
            if not self.held:
                self._say("take")
                self.held = True
                self.times += 1

    def let_go(self) -> None:
        with self._lock:
            if self.held:
                self._say("let go")
                self.held = False

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{word}\n"

    def close(self) -> None:
        self._process.communicate()


class Trace:
    """Every statement of every connection to the store, with the lock held by another process where that can be.

    Inside a transaction that began with `begin immediate` the lock is the product's own: nobody else can hold it, which
    `within` lists. Everything else is in `at`.
    """

    def __init__(self, path: Path, *, every: int) -> None:
        self._path = path
        self.every = every
        self.holder: Holder | None = None
        self.at: Counter[str] = Counter()
        self.within: Counter[str] = Counter()
        self.begun: set[int] = set()
        self.refused = 0
        self._defect: BaseException | None = None

    def watch(self, connection: apsw.Connection) -> None:
        if Path(connection.filename).resolve() != self._path.resolve():
            return  # A new file under its draft name is nobody else's.

        def trace(event: dict[str, Any]) -> None:
            try:
                self._statement(connection, str(event["sql"]))
            except BaseException as error:
                self._defect = error
                raise

        connection.trace_v2(apsw.SQLITE_TRACE_STMT, trace)

    def _statement(self, connection: apsw.Connection, sql: str) -> None:
        kind = " ".join(sql.split())
        reads_only = connection.readonly("main")
        if connection.in_transaction and not reads_only:
            assert id(connection) in self.begun, f"{kind} runs in a transaction that did not begin with the lock"
            self.within[kind] += 1
            if kind in ("commit", "rollback"):
                self.begun.discard(id(connection))
            return
        # Each beginning of a transaction: there the product may have to wait. And the first time of everything else.
        # Beyond the budget it is each third beginning, or who asks again would be refused for ever.
        if self.holder is not None and (
            self.at[kind] % self.every == 0 if kind == "begin immediate" else self.at[kind] == 0
        ):
            self.holder.take()
        self.at[kind] += 1
        if kind == "begin immediate":
            self.begun.add(id(connection))

    def patience(self, budget: float) -> Callable[[int], bool]:
        """The product's own patience; the lock is let go as soon as somebody waits, or has given up."""
        wait = _sqlite_file._patience.__wrapped__(budget)  # type: ignore[attr-defined]

        def again(asked: int) -> bool:
            goes_on = wait(asked)
            if self.holder is not None:
                self.refused += not goes_on
                if budget == PATIENT or not goes_on:
                    self.holder.let_go()
            return goes_on

        return again

    def check(self) -> None:
        if self._defect is not None:
            raise self._defect


@contextlib.contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, folder: Path, *, every: int) -> Iterator[Trace]:
    trace = Trace(folder / "durable.db", every=every)
    real = _sqlite_file._patience

    def patience(budget: float) -> Callable[[int], bool]:
        return trace.patience(budget)

    patience.__wrapped__ = real  # type: ignore[attr-defined]
    monkeypatch.setattr(_sqlite_file, "_patience", patience)
    monkeypatch.setattr(apsw, "connection_hooks", [*apsw.connection_hooks, trace.watch])
    yield trace
    if trace.holder is not None:
        trace.holder.let_go()
        trace.holder.close()
    trace.check()


async def tried(call: Callable[[], Awaitable[Any]]) -> Any:
    """What a caller does whose call meets a lock: the error is of the branch that says "ask again"."""
    while True:
        try:
            return await call()
        except StoreBusy as error:
            assert isinstance(error, Retry)


async def story(folder: Path, clock: ManualClock, begin: Callable[[], None], *, budget: float) -> None:
    """A store is opened, two hosts run Turns of every kind in it, one of them is lost, everything is asked."""
    gates = Gates()
    script = {
        "everything": [
            say(LARGE),
            together(local("large", value=LARGE), external("hands", "work"), approval("pay", amount=1)),
            Stall(gate="lost"),
            final(LARGE),
        ],
        "cancelled": [Stall(gate="never"), final()],
        "": [final()],
    }
    harness = Harness("agent", "v1", ScriptedHarness(script, gates=gates))

    def host(backend: LocalBackend, name: str) -> DurableRuntime:
        return DurableRuntime(
            backend=backend,
            harnesses=[harness],
            executors={"hands": FunctionExecutor({"work": lambda: LARGE})},
            poll_interval=0.02,
            lease=60,
            host_name=name,
            close_timeout=0.5,
        )

    async with LocalBackend.open(folder, synchronous="NORMAL", busy_timeout=budget, clock=clock) as backend:
        begin()
        operations = HostOperations(backend)
        first = host(backend, "first")
        session = await tried(lambda: first.create_session(KEY, "agent"))
        await tried(first.start)
        turn = await tried(lambda: session.submit("r1", "everything"))
        await turn_is(turn, where=lambda view: any(waiting.kind == "approval" for waiting in view.waiting_on))
        [question] = await turn.pending_interactions()
        await tried(lambda: turn.respond("a1", question.interaction_id, True, arguments={"amount": 2}))
        await gates.reached("lost")
        await tried(lambda: turn.steer("s1", LARGE))
        kill(first)

        clock.advance(61_000)
        gates.forget("lost")
        async with host(backend, "second") as second:
            await tried(second.start)
            session = second.get_session(KEY)
            turn = session.get_turn(turn.turn_id)
            await gates.reached("lost")
            gates.open("lost")
            await turn_is(turn, "COMPLETED")
            other = await tried(lambda: session.create_thread("other", "agent"))
            cancelled = await tried(lambda: other.submit("r2", "cancelled"))
            await gates.reached("never")
            await tried(lambda: cancelled.pause("p1"))
            view = await turn_is(cancelled, "PAUSED")
            await tried(lambda: cancelled.resume("u1", view.revision))
            await tried(lambda: cancelled.cancel("c1"))
            await turn_is(cancelled, "CANCELLED", where=lambda view: view.status is TurnStatus.CANCELLED)

            for handle in (session, turn):
                await handle.snapshot()
                await handle.history()
                await handle.list_events(limit=7)
            await session.snapshot(EventFilter(thread_id="other"))
            await session.list_threads()
            await session.list_turns()
            await second.list_sessions("app")
            for run in await turn.list_runs():
                await turn.list_steps(run.run_id)
                await turn.list_model_calls(run.run_id)
            await turn.list_tools()
            await operations.watchdog()
            await operations.measure(KEY)
            await operations.measure_store()
            await tried(session.close)

            # Nothing failed, and nothing that was tried again was counted as a failure.
            for one, status in ((turn, TurnStatus.COMPLETED), (cancelled, TurnStatus.CANCELLED)):
                view = await one.status()
                assert (view.status, view.recovery, view.error) == (status, None, None)
            assert [message.text for message in await turn.history()][-1] == LARGE
        await tried(backend.records.vacuum)  # type: ignore[attr-defined]
        assert await backend.records.integrity() == []  # type: ignore[attr-defined]


@pytest.mark.case("C73")
async def test_each_statement_waits_for_the_lock_and_succeeds(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced(monkeypatch, tmp_path, every=1) as trace:

        def begin() -> None:
            trace.holder = Holder(tmp_path / "durable.db")

        await story(tmp_path, clock, begin, budget=PATIENT)
        assert trace.refused == 0
        assert trace.holder is not None
        assert trace.holder.times >= trace.at["begin immediate"] > 30
        # What is written is written under the product's own lock, after a beginning that has waited.
        writes = {kind.split(" ")[0] for kind in trace.within} & {"insert", "update", "delete", "replace"}
        assert writes == {"insert", "delete"}
        assert {kind.split(" ")[0] for kind in trace.at} == {"begin", "pragma", "rollback", "select", "vacuum"}


@pytest.mark.case("C73")
async def test_past_the_budget_the_error_can_be_tried_again_and_no_turn_fails(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with traced(monkeypatch, tmp_path, every=3) as trace:

        def begin() -> None:
            trace.holder = Holder(tmp_path / "durable.db")

        await story(tmp_path, clock, begin, budget=IMPATIENT)
        assert trace.refused > 20


@pytest.mark.case("C73")
async def test_a_large_body_is_written_while_somebody_else_holds_the_lock(tmp_path: Path, clock: ManualClock) -> None:
    """So it is outside of any transaction, and nobody waits for it."""
    waits: list[bool] = []

    async with LocalBackend.open(tmp_path, busy_timeout=PATIENT, clock=clock) as backend:
        holder = Holder(tmp_path / "durable.db")

        def passed(name: str) -> None:
            if name == "object.put.before":
                holder.take()  # At once: the product has it not.
            elif name == "object.put.after":
                waits.append(holder.held)
                holder.let_go()

        harness = Harness("agent", "v1", ScriptedHarness([local("large", value=LARGE), final(LARGE)]))
        async with DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
            session = await runtime.create_session(KEY, "agent")
            await runtime.start()
            _failpoints.observe(passed)
            turn = await session.submit("r1", LARGE)
            await turn_is(turn, "COMPLETED")
        _failpoints.observe(None)
        holder.close()
        # The input, the result of the tool, the answer; the agent's state with them is one or more.
        assert len(waits) > 3 and all(waits)
        rows = apsw.Connection(str(tmp_path / "durable.db")).execute(
            "select max(length(events)), max(length(private)), max(length(journal)) from log"
        )
        assert all(size is None or size <= INLINE_MAX_BYTES for size in next(rows))
