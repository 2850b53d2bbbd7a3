"""One execution's commits: accepted in order, made in order, several at once where they wait together.

Rule 1: one commit at a time (TM-02). What is accepted while it is under way goes into the next one, all of it, so that
ten tools that end together cost two commits and not ten.
Rule 2: `flush` waits for what was accepted before it, and only waits: cancelling whoever waits cancels nothing (TM-03,
TM-04).
Rule 3: after a commit that failed, nothing more is accepted or made (TM-05). Whoever is about to have an effect waits
for its commit first, and so never begins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from agentscope_durable.journal.scheduling import Channel

__all__ = ["CommitQueue"]

P = TypeVar("P")
R = TypeVar("R")


class _Waiter(NamedTuple, Generic[R]):
    number: int
    done: asyncio.Future[R]


class CommitQueue(Generic[P, R]):
    """Accepts parts and commits them.

    Args:
        send: makes one commit of the parts given, in order.
        channel: where a commit waits for its turn among other executions.
        capacity: parts that may wait; `record` waits when there are as many (TM-07).
        alone: parts that must not share a commit with others.
        broken: told once when a commit has failed, or the queue was closed.
        refusals: errors that say that nothing was changed and the caller knows what to do. They reach whoever waits
            for the part, and the queue goes on.
    """

    def __init__(
        self,
        send: Callable[[list[P]], Awaitable[R]],
        *,
        channel: Channel,
        capacity: int,
        alone: Callable[[P], bool] = lambda _part: False,
        refusals: tuple[type[Exception], ...] = (),
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._channel = channel
        self._capacity = capacity
        self._alone = alone
        self._refusals = refusals
        self._broken = broken
        self._parts: deque[P] = deque()
        self._accepted = 0
        self._settled = 0
        self._last: R | None = None
        self._failure: BaseException | None = None
        self._waiters: deque[_Waiter[R]] = deque()
        self._room = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Parts that no commit has taken yet."""
        return len(self._parts)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def accept(self, part: P) -> None:
        """Put a part in order behind all others. It is committed soon, whether or not anybody waits.

        Raises:
            BaseException: a former commit failed, or the queue was closed.
        """
        if self._failure is not None:
            raise self._failure
        self._parts.append(part)
        self._accepted += 1
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._run(), name="agentscope-session-commit")

    async def record(self, part: P) -> None:
        """`accept`, after waiting for room."""
        await self._for_room()
        self.accept(part)

    async def commit(self, part: P) -> R:
        """`record`, and wait for the very commit that holds the part. Returns what that one did.

        Raises:
            BaseException: what the commit raised.
        """
        await self._for_room()
        self.accept(part)
        return await self._wait()

    async def _for_room(self) -> None:
        while len(self._parts) >= self._capacity and self._failure is None:
            self._room.clear()
            _ = await self._room.wait()

    async def _wait(self) -> R:
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(self._accepted, done))
        return await done

    async def flush(self) -> R | None:
        """Wait until everything accepted so far is committed. Returns the last commit's result; None if none was made.

        Raises:
            BaseException: what a commit raised; the same for everybody who waits for it or comes later.
        """
        if self._failure is not None:
            raise self._failure
        if self._accepted == self._settled:
            return self._last
        return await self._wait()

    def close(self, error: BaseException) -> None:
        """Accept nothing more and make no further commit; one that is under way is left to itself."""
        if self._failure is None:
            self._fail(error)

    async def landed(self) -> None:
        """Wait until no commit is under way."""
        if self._sender is not None and not self._sender.done():
            _ = await asyncio.wait({self._sender})

    async def _run(self) -> None:
        while self._parts and self._failure is None:
            async with self._channel:
                if self._failure is not None:
                    return
                taken = self._take()
                through = self._accepted - len(self._parts)
                try:
                    self._last = await self._send(taken)
                except self._refusals as refusal:
                    self._settle(through, refusal)
                except BaseException as error:
                    self._fail(error)
                    if isinstance(error, asyncio.CancelledError):
                        raise
                else:
                    self._settle(through, None)
            self._room.set()

    def _take(self) -> list[P]:
        taken = [self._parts.popleft()]
        while self._parts and not self._alone(taken[0]) and not self._alone(self._parts[0]):
            taken.append(self._parts.popleft())
        return taken

    def _settle(self, through: int, error: BaseException | None) -> None:
        self._settled = through
        while self._waiters and self._waiters[0].number <= through:
            done = self._waiters.popleft().done
            if done.done():
                continue
            if error is not None:
                done.set_exception(error)
            else:
                assert self._last is not None
                done.set_result(self._last)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._parts.clear()
        while self._waiters:
            done = self._waiters.popleft().done
            if not done.done():
                done.set_exception(error)
        self._room.set()
        self._broken()
