"""Readings of the PostgreSQL store that wait for a connection go together, in one statement.

Rule 1: a reading never waits for company: where a connection is free it goes at once.
Rule 2: what is wrong with one of them is that one's: where they fail together for another reason than the server's
state, each goes alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from agentscope_durable.contracts.errors import Retry
from agentscope_durable.spi.record_store import Reads, Records
from agentscope_durable.stores.records._postgres_clock import ServerClock
from agentscope_durable.stores.records._postgres_reading import Answer, Question
from agentscope_durable.stores.records._postgres_tables import Tables

__all__ = ["Readings"]

TOGETHER_MAX: Final = 64
"""Readings in one statement at most."""
ROWS_MAX: Final = 1000
"""Rows that readings may ask for together. One that asks for more goes alone."""


class _Reading:
    def __init__(self, partition: str, reads: Reads) -> None:
        self.partition = partition
        self.reads = reads
        self.rows = (
            1
            + len(reads.keys)
            + len(reads.owners)
            + sum(page.limit for page in reads.ranges)
            + sum(stream.limit for stream in reads.streams)
            + (reads.log.limit if reads.log is not None else 0)
        )
        self.answered: asyncio.Future[Records] = asyncio.get_running_loop().create_future()

    def told(self, answer: Answer, clock: ServerClock) -> Records:
        head, reads, partition = answer.head(self.partition), self.reads, self.partition
        clock.witness(head.at_ms)
        return Records(
            head=head.head,
            rev=head.rev,
            next_seq=head.next_seq,
            pruned_through=head.pruned,
            now_ms=clock.now(),
            keys={key: answer.keys[partition, key] for key in reads.keys if (partition, key) in answer.keys},
            ranges={r: answer.pages.get((partition, r), []) for r in reads.ranges},
            owners={owner: answer.owner(owner) for owner in reads.owners},
            log=answer.logs.get((partition, reads.log), []) if reads.log else [],
            streams={r: answer.streams.get((partition, r), []) for r in reads.streams},
        )


class Readings:
    """Where readings go.

    Args:
        ask: sends one statement that only reads.
        at_once: statements under way at once; the connections there are.
    """

    def __init__(
        self, ask: Callable[..., Awaitable[list[Any]]], tables: Tables, clock: ServerClock, *, at_once: int
    ) -> None:
        self._ask = ask
        self._tables = tables
        self._clock = clock
        self._at_once = at_once
        self._waiting: deque[_Reading] = deque()
        self._serving = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, partition: str, reads: Reads) -> Records:
        reading = _Reading(partition, reads)
        self._waiting.append(reading)
        if self._serving < self._at_once:
            # Counted here and not by tasks that have ended: between its last look and its end one serves nobody.
            self._serving += 1
            task = asyncio.create_task(self._serve(), name="postgres-readings")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await reading.answered

    async def close(self) -> None:
        """Come back when every reading has its answer."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self) -> None:
        try:
            while together := self._next():
                await self._carry(together)
        except BaseException:
            # The loop is being shut down: nobody may wait for ever.
            for reading in self._waiting:
                reading.answered.cancel()
            raise
        finally:
            self._serving -= 1

    def _next(self) -> list[_Reading]:
        together: list[_Reading] = []
        rows = 0
        while self._waiting and len(together) < TOGETHER_MAX:
            reading = self._waiting[0]
            if together and rows + reading.rows > ROWS_MAX:
                break
            self._waiting.popleft()
            if not reading.answered.done():
                together.append(reading)
                rows += reading.rows
        return together

    async def _carry(self, together: Sequence[_Reading]) -> None:
        question = Question()
        try:
            for reading in together:
                question.add(reading.partition, reading.reads)
            parts, arguments = question.statement()
            answer = question.answered(await self._ask(self._tables.reading(parts), *arguments))
            self._clock.hear(answer.server_ms)
        except Exception as error:  # noqa: BLE001 - it is told to those who asked
            if len(together) > 1 and not isinstance(error, Retry):
                for reading in together:
                    await self._carry([reading])
                return
            for reading in together:
                _end(reading, error)
            return
        except BaseException:
            for reading in together:
                reading.answered.cancel()
            raise
        for reading in together:
            if reading.answered.done():
                continue
            try:
                reading.answered.set_result(reading.told(answer, self._clock))
            except Exception as error:  # noqa: BLE001 - it is told to the one who asked
                _end(reading, error)


def _end(reading: _Reading, error: Exception) -> None:
    if not reading.answered.done():
        reading.answered.set_exception(error)
