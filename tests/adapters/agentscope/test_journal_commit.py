"""How one execution's commits are scheduled: in order, together where they wait together, and none after a failure."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentscope_durable.contracts.errors import CorruptRecord, InvalidRequest
from agentscope_durable.contracts.journal import Base, Drop, Field, JournalBatch
from agentscope_durable.journal.checkpoint import fold
from agentscope_durable.journal.commit import CommitQueue
from agentscope_durable.journal.position import (
    POSITION_FIELD,
    AgentExecutionPosition,
    ExecutionPhase,
    FinalAnswer,
    PositionWriter,
    read_position,
)
from agentscope_durable.journal.scheduling import COMMIT_CHANNEL, Channel, Channels, JournalScheduling


class Store:
    """Makes commits when it is let."""

    def __init__(self) -> None:
        self.commits: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.begun = asyncio.Event()

    async def send(self, parts: list[str]) -> int:
        self.begun.set()
        _ = await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.commits.append(parts)
        return len(self.commits)


def queue_of(store: Store, **options: Any) -> CommitQueue[str, int]:
    return CommitQueue(store.send, channel=options.pop("channel", Channel("c", 4)), capacity=8, **options)


@pytest.mark.spec("TM-02", "TM-03")
async def test_parts_that_wait_together_are_committed_together_and_in_order() -> None:
    store = Store()
    store.gate.clear()
    queue = queue_of(store)
    queue.accept("a")
    await store.begun.wait()
    for part in "bcd":
        queue.accept(part)
    waiting = [asyncio.create_task(queue.flush()) for _ in range(2)]
    await asyncio.sleep(0)
    store.gate.set()

    assert await asyncio.gather(*waiting) == [2, 2]
    assert store.commits == [["a"], ["b", "c", "d"]]


@pytest.mark.spec("TM-03")
async def test_a_flush_waits_for_its_own_prefix_only() -> None:
    store = Store()
    queue = queue_of(store)
    store.gate.clear()
    queue.accept("a")
    await store.begun.wait()
    first = asyncio.create_task(queue.flush())
    await asyncio.sleep(0)
    queue.accept("b")
    second = asyncio.create_task(queue.commit("c"))
    await asyncio.sleep(0)
    store.gate.set()

    assert await first == 1 and await second == 2
    assert await queue.flush() == 2, "nothing is left to wait for"


@pytest.mark.spec("TM-04")
async def test_cancelling_who_waits_cancels_no_commit() -> None:
    store = Store()
    store.gate.clear()
    queue = queue_of(store)
    waiting = asyncio.create_task(queue.commit("a"))
    await store.begun.wait()
    _ = waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    store.gate.set()

    assert await queue.flush() == 1 and store.commits == [["a"]]


@pytest.mark.spec("TM-05")
async def test_after_a_commit_that_failed_nothing_more_is_made() -> None:
    class Lost(BaseException):
        pass

    store = Store()
    told: list[int] = []
    queue = queue_of(store, broken=lambda: told.append(1))
    store.error = Lost()
    with pytest.raises(Lost):
        await queue.commit("a")
    store.error = None
    with pytest.raises(Lost):
        queue.accept("b")
    with pytest.raises(Lost):
        await queue.flush()
    assert store.commits == [] and told == [1] and isinstance(queue.failure, Lost)


@pytest.mark.spec("TM-05")
async def test_a_closed_queue_leaves_the_commit_under_way_alone() -> None:
    store = Store()
    store.gate.clear()
    queue = queue_of(store)
    queue.accept("a")
    await store.begun.wait()
    queue.accept("b")
    queue.close(RuntimeError("given up"))
    store.gate.set()
    await queue.landed()

    assert store.commits == [["a"]]
    with pytest.raises(RuntimeError):
        await queue.record("c")


async def test_a_refusal_reaches_who_asked_and_nobody_else() -> None:
    store = Store()
    queue = queue_of(store, alone=lambda part: part == "alone", refusals=(LookupError,))
    store.gate.clear()
    before = asyncio.create_task(queue.commit("a"))
    await store.begun.wait()
    refused = asyncio.create_task(queue.commit("alone"))
    after = asyncio.create_task(queue.commit("b"))
    await asyncio.sleep(0)

    async def send(parts: list[str]) -> int:
        if parts == ["alone"]:
            raise LookupError
        store.commits.append(parts)
        return len(store.commits)

    queue._send = send  # pyright: ignore[reportPrivateUsage]
    store.gate.set()
    assert await before == 1
    with pytest.raises(LookupError):
        await refused
    assert await after == 2 and store.commits == [["a"], ["b"]]


@pytest.mark.spec("TM-07")
async def test_a_full_queue_holds_back_who_records() -> None:
    store = Store()
    store.gate.clear()
    queue = queue_of(store)
    for number in range(9):
        await queue.record(str(number))
        if number == 0:
            await store.begun.wait()
    late = asyncio.create_task(queue.record("late"))
    await asyncio.sleep(0)
    assert queue.waiting == 8 and not late.done()
    store.gate.set()
    await late
    _ = await queue.flush()
    assert store.commits[-1][-1] == "late"


@pytest.mark.spec("TM-01", "TM-09")
async def test_channels_are_bounded_and_apart() -> None:
    channels = Channels(JournalScheduling(commit_thread_cap=1))
    store = Store()
    store.gate.clear()
    one, two = queue_of(store, channel=channels.commit), queue_of(store, channel=channels.commit)
    one.accept("a")
    await store.begun.wait()
    two.accept("b")
    await asyncio.sleep(0)
    assert channels.commit.held == 1 and channels.commit.name == COMMIT_CHANNEL == "agentscope-session-commit"
    async with asyncio.timeout(90):
        async with channels.lease, channels.maintenance:
            # A stalled store keeps every commit; lease work goes on.
            assert (channels.lease.held, channels.maintenance.held) == (1, 1)
    assert store.commits == []
    store.gate.set()
    assert await one.flush() == 1 and await two.flush() == 2
    assert channels.commit.held == 0


@pytest.mark.spec("TM-06")
def test_settings_come_from_the_environment() -> None:
    assert JournalScheduling.from_environment({}) == JournalScheduling()
    given = {"AGENTSCOPE_JOURNAL_COMMIT_THREAD_CAP": "3", "AGENTSCOPE_JOURNAL_TASK_QUEUE_CAPACITY": "9"}
    found = JournalScheduling.from_environment(given)
    assert (found.commit_thread_cap, found.task_queue_capacity, found.lease_thread_cap) == (3, 9, 2)
    for wrong in ("0", "-1", "many", "1.5"):
        with pytest.raises(InvalidRequest):
            JournalScheduling.from_environment({"AGENTSCOPE_JOURNAL_LEASE_THREAD_CAP": wrong})


# ------------------------------------------------------------ the position


def folded(*batches: tuple[Any, ...]) -> Any:
    made = [(at, JournalBatch(at - 1, (), rows, at == 1)) for at, rows in enumerate(batches, 1)]
    return fold(made).fields.get(POSITION_FIELD)


@pytest.mark.spec("TP-01")
def test_a_position_is_stored_member_by_member_and_read_back() -> None:
    position = AgentExecutionPosition(turn_id="t1", agent="a")
    writer = PositionWriter()
    base = (Base(), *writer.rows(position, base=True))
    position.phase, position.reasoning = ExecutionPhase.REASONING, 1
    position.receipts["k"] = msgspec.Raw(b'{"x":1}')
    changed = writer.rows(position, base=False)
    assert {row.key for row in changed if isinstance(row, Field)} == {"phase", "reasoning", "receipt:k"}
    position.receipts = {}
    position.phase, position.final = ExecutionPhase.ENDED, FinalAnswer("m", "completed")
    position.carried = [msgspec.Raw(b'{"type":"hint"}')]
    last = writer.rows(position, base=False)

    assert read_position(folded(base)).phase is ExecutionPhase.READY
    between = read_position(folded(base, changed))
    assert (between.reasoning, bytes(between.receipts["k"])) == (1, b'{"x":1}')
    assert Drop(POSITION_FIELD, "receipt:k") in last
    assert read_position(folded(base, changed, last)) == position
    assert writer.rows(position, base=False) == ()
    assert read_position(None) == AgentExecutionPosition()


def test_a_position_that_is_none_is_an_error() -> None:
    with pytest.raises(CorruptRecord):
        read_position(msgspec.Raw(b'{"phase":"dancing"}'))


@pytest.mark.spec("TF-02")
def test_the_journal_knows_no_host_and_no_agent() -> None:
    code = (
        "import sys\n"
        "from agentscope_durable.journal import checkpoint, commit, host, models, position, scheduling, state_store\n"
        "loaded = {m.split('.')[1] for m in sys.modules if m.startswith('agentscope_durable.')}\n"
        "assert loaded <= {'contracts', 'journal', 'spi', '_failpoints'}, loaded\n"
        "assert 'agentscope' not in sys.modules"
    )
    source = Path(__file__).resolve().parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
