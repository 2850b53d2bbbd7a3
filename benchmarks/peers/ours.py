"""The workload on this library as an application uses it: a runtime, a harness that makes steps, awaited Turns."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from agentscope_durable import DurableRuntime, Harness, LocalBackend, SessionKey
from agentscope_durable.contracts.commands import CommitStep, MessageOut, RunEnd, RunEndKind
from agentscope_durable.contracts.journal import Base, Block, CheckpointRow, Field, JournalBatch, MessageMeta
from agentscope_durable.contracts.log import StepFact
from agentscope_durable.contracts.status import StepPhase, StepStatus
from agentscope_durable.domain import ids
from agentscope_durable.spi.harness import HarnessCapabilities, RunContext, SettleContext, Settlement
from benchmarks.peers import work

NONE = msgspec.Raw(b"{}")


class State(msgspec.Struct):
    """Messages of the Thread, steps done in the present Turn, and the Turn it is."""

    messages: int = 0
    done: int = 0
    turn: str = ""


class StepHarness:
    """An agent whose steps each append one message of 1 KB to its state, and commit it. The input says how many.

    A step is one commit: what the function returned, as native state and as what the Turn's readers see of its end. A
    step that was under way when its host died is run again.
    """

    state_version = "steps-1"
    capabilities = HarnessCapabilities()
    routes: frozenset[str] = frozenset()

    def __init__(self, log: work.Log | None = None) -> None:
        self._log = log

    def accepts_writer(self, writer: str) -> bool:
        return True

    def classify(self, error: BaseException) -> bool | None:
        return None

    async def settle(self, context: SettleContext) -> Settlement:
        return Settlement()

    def restore(self, baseline: Any, /) -> tuple[CheckpointRow, ...]:
        return tuple(baseline.rows)

    async def run(self, context: RunContext) -> RunEnd | None:
        start = context.start
        state = context.cache_get() or fold(await context.journal())
        wanted = int(start.input.content[0].text)
        if state.turn != start.turn_id:
            state = State(messages=state.messages, turn=start.turn_id)
        number = 0
        while True:
            if context.stop is not None:
                return RunEnd(kind=RunEndKind.RELEASED)
            result = await self._step(start.request_id, state.done)
            number += 1
            state.done += 1
            last = state.done == wanted
            step = StepFact(
                ids.step_id(start.run_id, number), start.run_id, number, StepPhase.ACTING, StepStatus.COMPLETED,
                resumed_from=start.resumed_from if number == 1 else "",
            )  # fmt: skip
            rows: list[CheckpointRow] = [] if state.messages else [Base()]
            rows += [
                MessageMeta(state.messages, NONE, 0),
                Block(state.messages, 0, msgspec.Raw(msgspec.json.encode(result))),
                Field("program", None, msgspec.Raw(msgspec.json.encode(state))),
            ]
            state.messages += 1
            batch = JournalBatch(expected_head=context.position, checkpoint=tuple(rows), base=state.messages == 1)
            end, messages = None, ()
            if last:
                message = ids.message_id(start.turn_id, 1)
                content = await context.body([{"type": "text", "text": result["content"]}])
                messages = (MessageOut(message_id=message, content=content),)
                end = RunEnd(kind=RunEndKind.COMPLETED, message_id=message)
            await context.commit(
                CommitStep(
                    session=start.session, thread_id=start.thread_id, turn_id=start.turn_id, run_id=start.run_id,
                    fence=start.fence, expected_position=context.position, journal=batch.encode(), checkpoint=True,
                    base=batch.base, writer="steps", steps=(step,), messages=messages, end=end,
                )
            )  # fmt: skip
            if last:
                context.cache_put(state, 1_000)
                return None

    async def _step(self, turn: str, number: int) -> dict[str, Any]:
        if self._log is not None:
            self._log.ran(turn, number)
            await asyncio.sleep(work.STEP_SECONDS)
        return work.payload(number)


def fold(rows: Any) -> State:
    state = State()
    for row in rows:
        for part in JournalBatch.decode(row.journal, position=row.at).checkpoint:
            if isinstance(part, MessageMeta):
                state.messages = part.i + 1
            elif isinstance(part, Field):
                found = msgspec.json.decode(part.json, type=State)
                state.done, state.turn = found.done, found.turn
    return state


@asynccontextmanager
async def opened(job: dict[str, Any], log: work.Log | None = None) -> AsyncIterator[DurableRuntime]:
    async with AsyncExitStack() as stack:
        if job["store"] == "sqlite":
            backend: Any = await stack.enter_async_context(LocalBackend.open(Path(job["folder"])))
            settings = await backend.records.settings()
        else:
            from agentscope_durable.assembly import PostgresBackend

            backend = await stack.enter_async_context(PostgresBackend.open(job["dsn"], initialize_schema=True))
            settings = {}
        runtime = await stack.enter_async_context(
            DurableRuntime(
                backend=backend,
                harnesses=[Harness("steps", "v1", StepHarness(log))],
                parallelism=work.WIDTH,
                lease=job.get("lease", 30.0),
            )
        )
        job["settings"] = settings
        if job.get("run", True):
            await runtime.start()
        yield runtime


async def turns(runtime: DurableRuntime, session: str) -> Any:
    """A function that runs one Turn of n steps in this Session and reads its result."""
    handle = await runtime.create_session(SessionKey("bench", session), "steps")
    count = 0

    async def turn(steps: int) -> None:
        nonlocal count
        count += 1
        one = await handle.submit(f"r{count}", str(steps))
        assert len(str(await one.wait(timeout=600))) > 900

    return turn


async def main(job: dict[str, Any]) -> None:
    match job["test"]:
        case "sequential":
            async with opened(job) as runtime:
                turn = await turns(runtime, "one")
                answer = await work.one_by_one_async(lambda _: turn(work.STEPS), job["turns"])
        case "flight":
            async with opened(job) as runtime:
                lanes = [await turns(runtime, f"lane {lane}") for lane in range(work.WIDTH)]
                cpu, sys0 = time.process_time(), os.times().system
                answer = await work.in_flight_async(lambda n: lanes[n % work.WIDTH](work.STEPS), job["seconds"])
                answer["us sys/step"] = (os.times().system - sys0) / answer["turns"] / work.STEPS * 1e6
                answer["us CPU/step"] = (time.process_time() - cpu) / answer["turns"] / work.STEPS * 1e6
        case "growth":
            answer = {}
            async with opened(job) as runtime:
                turn = await turns(runtime, "long")
                there = 0
                for history in work.HISTORIES:
                    await turn(history - there)
                    there = history + job["turns"] * work.STEPS
                    taken = []
                    for _ in range(job["turns"]):
                        started = time.perf_counter()
                        await turn(work.STEPS)
                        taken.append(time.perf_counter() - started)
                    answer[str(history)] = work.median_ms(taken) / work.STEPS
        case "begin":
            log = work.Log(job["log"])
            async with opened(job, log) as runtime:
                for number in range(work.RECOVERED_TURNS):
                    session = await runtime.create_session(SessionKey("bench", f"k{number}"), "steps")
                    await session.submit(f"t{number}", str(work.RECOVERED_STEPS))
                await asyncio.Event().wait()
        case "resume":
            async with opened(job, work.Log(job["log"])) as runtime:
                for number in range(work.RECOVERED_TURNS):
                    session = runtime.get_session(SessionKey("bench", f"k{number}"))
                    (view,) = (await session.list_turns()).items
                    await session.get_turn(view.turn_id).wait(timeout=600)
            answer = {}
        case other:
            raise ValueError(other)
    work.answer(settings={key: str(value) for key, value in job["settings"].items()}, **answer)


if __name__ == "__main__":
    given = work.job()
    if os.environ.get("DURABLE_BENCH_LOOP") == "uvloop":
        import uvloop

        uvloop.run(main(given))
    else:
        asyncio.run(main(given))
