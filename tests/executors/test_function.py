"""`FunctionExecutor` keeps the promises of an executor."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.records import RunStepRef
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.spi.executor import Cancelled, ExecutionRequest, Running, Succeeded, ToolError, Unknown
from agentscope_durable.spi.in_process import REMEMBERED_MAX
from agentscope_durable.testing.executor import ExecutorContract


def request(name: str, execution_id: str = "x1", arguments: str = "{}") -> ExecutionRequest:
    return ExecutionRequest(
        session=SessionKey("app", "c1"),
        thread_id="main",
        turn_id="t1",
        call_id="c1",
        execution_id=execution_id,
        name=name,
        route="hands",
        arguments=arguments,
        origin=RunStepRef("r", "s"),
    )


class _FunctionContract(ExecutorContract):
    """Both kinds of function; `done` counts effects by number."""

    @pytest.fixture(autouse=True)
    def _world(self) -> None:
        self.done: list[int] = []

    def request(self, kind: str, number: int = 1) -> ExecutionRequest:
        return request(kind, f"{kind}-{number}", f'{{"number": {number}}}')

    def effects(self, number: int = 1) -> int:
        return self.done.count(number)


class TestCoroutines(_FunctionContract):
    @pytest.fixture
    def executor(self) -> FunctionExecutor:
        self.gate = asyncio.Event()

        async def succeeds(number: int) -> str:
            self.done.append(number)
            return "done"

        async def refuses(number: int) -> str:
            raise ToolError("no")

        async def raises(number: int) -> str:
            self.done.append(number)
            raise RuntimeError("after the effect")

        async def slow(number: int) -> str:
            self.done.append(number)
            await self.gate.wait()
            return "slow"

        return FunctionExecutor({"succeeds": succeeds, "refuses": refuses, "raises": raises, "slow": slow})

    def release(self) -> None:
        self.gate.set()

    async def test_what_runs_here_can_be_asked_for_and_stopped(self, executor: FunctionExecutor) -> None:
        running = await self._begin(executor)
        assert await executor.query(self.request("slow")) == Running()
        assert isinstance(await executor.cancel(self.request("slow")), Cancelled)

        assert isinstance(await running, Cancelled)


class TestPlainFunctions(_FunctionContract):
    @pytest.fixture
    def executor(self) -> FunctionExecutor:
        self.gate = threading.Event()

        def succeeds(number: int) -> str:
            self.done.append(number)
            return "done"

        def refuses(number: int) -> str:
            raise ToolError("no")

        def raises(number: int) -> str:
            self.done.append(number)
            raise RuntimeError("after the effect")

        def slow(number: int) -> str:
            self.done.append(number)
            assert self.gate.wait(90)
            return "slow"

        return FunctionExecutor({"succeeds": succeeds, "refuses": refuses, "raises": raises, "slow": slow})

    def release(self) -> None:
        self.gate.set()

    async def test_a_thread_cannot_be_stopped(self, executor: FunctionExecutor) -> None:
        running = await self._begin(executor)
        assert await executor.cancel(self.request("slow")) == Running()
        self.release()

        assert await running == Succeeded(value="slow")


async def test_arguments_are_checked_before_anything_is_called() -> None:
    called = []

    async def tool(unit: str, force: bool = False) -> str:
        called.append(unit)
        return unit

    executor = FunctionExecutor({"tool": tool})
    for number, arguments in enumerate(
        ('{"unit": "a", "x": 1}', "{}", "not json", "[1]", '{"unit": "a", "unit": "b"}')
    ):
        outcome = await executor.execute(request("tool", f"x{number}", arguments))
        assert isinstance(outcome, Succeeded) and outcome.error
    assert called == []
    assert await executor.execute(request("tool", "last", '{"unit": "a"}')) == Succeeded(value="a")


async def test_a_stopped_caller_leaves_an_unknown_outcome() -> None:
    started = asyncio.Event()

    async def tool() -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    executor = FunctionExecutor({"tool": tool})
    running = asyncio.create_task(executor.execute(request("tool")))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert isinstance(await executor.query(request("tool")), Unknown)
    assert isinstance(await executor.execute(request("tool")), Unknown), "it is not done again"


async def test_who_waits_for_a_call_that_was_given_up_is_not_told_that_it_was_stopped() -> None:
    """It runs in a thread and goes on."""
    started, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def tool() -> str:
        loop.call_soon_threadsafe(started.set)
        assert gate.wait(90)
        return "done"

    executor = FunctionExecutor({"tool": tool})
    running = asyncio.create_task(executor.execute(request("tool")))
    await started.wait()
    waiting = asyncio.create_task(executor.execute(request("tool")))
    await asyncio.sleep(0)
    running.cancel()

    assert isinstance(await waiting, Unknown)
    gate.set()


async def test_what_is_remembered_is_bounded() -> None:
    async def tool() -> str:
        return "ok"

    executor = FunctionExecutor({"tool": tool})
    for number in range(REMEMBERED_MAX + 10):
        await executor.execute(request("tool", f"x{number}"))

    assert len(executor._calls) == REMEMBERED_MAX


@pytest.mark.parametrize("kind", ["sync", "async", "task"])
@pytest.mark.parametrize(
    "error",
    [SystemExit(2), StopIteration(), BaseException("odd"), GeneratorExit(), asyncio.CancelledError()],
    ids=repr,
)
async def test_whatever_a_tool_raises_is_an_unknown_outcome_and_ends_no_host(kind: str, error: BaseException) -> None:
    def plain() -> str:
        raise error

    async def coroutine() -> str:
        raise error

    async def from_a_task() -> str:
        return await asyncio.create_task(coroutine())

    if kind == "task" and isinstance(error, SystemExit):
        pytest.skip("SystemExit that ends a task ends the program")
    executor = FunctionExecutor({"tool": {"sync": plain, "async": coroutine, "task": from_a_task}[kind]})
    async with asyncio.timeout(90):
        outcome = await executor.execute(request("tool"))
        assert isinstance(outcome, Unknown)
        assert await executor.query(request("tool")) == await executor.execute(request("tool")) == outcome


async def test_more_functions_block_at_once_than_the_loop_has_threads_for() -> None:
    gate, inside = threading.Barrier(41, timeout=30), []

    def tool() -> str:
        inside.append(threading.current_thread().name)
        gate.wait()
        return "ok"

    executor = FunctionExecutor({"tool": tool})
    running = [asyncio.create_task(executor.execute(request("tool", f"x{number}"))) for number in range(40)]
    async with asyncio.timeout(90):
        while len(inside) < 40:
            await asyncio.sleep(0.01)
        gate.wait()
        assert await asyncio.gather(*running) == [Succeeded(value="ok")] * 40
