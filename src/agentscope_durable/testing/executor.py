"""The contract of an `Executor`: subclass it, give the fixtures, and every promise is tested by name.

class TestMyExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self): ...
    def request(self, kind, number=1): ...
    def effects(self, number=1): ...
    def release(self): ...
"""

from __future__ import annotations

import asyncio

import pytest

from agentscope_durable.spi.executor import Cancelled, ExecutionRequest, Executor, Outcome, Running, Succeeded, Unknown

__all__ = ["ExecutorContract"]

SECONDS = 90.0
"""A wait that takes this long has failed."""


class ExecutorContract:
    """Kinds of request: `succeeds` returns "done"; `refuses` raises ToolError("no"); `raises` raises something else
    after its effect; `slow` has its effect and then waits for `release`; `unknown` was never sent."""

    @pytest.fixture
    def executor(self) -> Executor:
        raise NotImplementedError

    def request(self, kind: str, number: int = 1) -> ExecutionRequest:
        """A request of this kind with its own execution id."""
        raise NotImplementedError

    def effects(self, number: int = 1) -> int:
        """How often the call `number` had its effect."""
        raise NotImplementedError

    def release(self) -> None:
        """Let `slow` end."""
        raise NotImplementedError

    async def _begin(self, executor: Executor, number: int = 1) -> asyncio.Task[Outcome]:
        running = asyncio.create_task(executor.execute(self.request("slow", number)))
        async with asyncio.timeout(SECONDS):
            while not self.effects(number):  # noqa: ASYNC110 - the effect may be outside this process
                await asyncio.sleep(0)
        return running

    async def test_a_result_is_returned(self, executor: Executor) -> None:
        assert await executor.execute(self.request("succeeds")) == Succeeded(value="done")

    async def test_a_tool_error_is_a_definite_result(self, executor: Executor) -> None:
        assert await executor.execute(self.request("refuses")) == Succeeded(value="no", error=True)

    async def test_once_an_execution_is_not_done_again(self, executor: Executor) -> None:
        """Once: executing an execution id again does not do the work again."""
        request = self.request("succeeds")
        first = await executor.execute(request)
        again = await executor.execute(request)

        assert again == first
        assert self.effects() == 1

    async def test_once_also_while_it_runs(self, executor: Executor) -> None:
        running = await self._begin(executor)
        again = asyncio.create_task(executor.execute(self.request("slow")))
        await asyncio.sleep(0)
        self.release()

        assert await running == await again
        assert self.effects() == 1

    async def test_honest_an_exception_is_unknown(self, executor: Executor) -> None:
        """Honest: an outcome that is not known is Unknown, never Failed. An exception means Unknown."""
        try:
            outcome = await executor.execute(self.request("raises"))
        except Exception as error:  # noqa: BLE001 - an executor may also simply raise
            outcome = Unknown(str(error))

        assert isinstance(outcome, Unknown)

    async def test_confirmed_cancelled_means_that_it_has_stopped(self, executor: Executor) -> None:
        """Confirmed: Cancelled is answered only when the work has stopped or never began."""
        running = await self._begin(executor)
        answer = await executor.cancel(self.request("slow"))
        if not isinstance(answer, Cancelled):
            assert isinstance(answer, Running | Unknown)
            self.release()
        outcome = await running

        assert isinstance(outcome, Cancelled) == isinstance(answer, Cancelled)

    async def test_bounded_a_question_about_a_stranger_is_answered(self, executor: Executor) -> None:
        """Bounded: `query` and `cancel` answer in bounded time."""
        async with asyncio.timeout(SECONDS):
            asked = await executor.query(self.request("unknown"))
            told = await executor.cancel(self.request("unknown"))

        assert not isinstance(asked, Succeeded)
        assert not isinstance(told, Succeeded)

    async def test_a_query_finds_what_is_declared(self, executor: Executor) -> None:
        running = await self._begin(executor)
        during = await executor.query(self.request("slow"))
        self.release()
        await running
        after = await executor.query(self.request("slow"))

        if executor.capabilities.query:
            assert isinstance(during, Running)
            assert isinstance(after, Succeeded)
