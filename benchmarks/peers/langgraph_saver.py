"""The workload on LangGraph with its SQLite or PostgreSQL saver: a graph of one node, `durability="sync"`.

Variants: `sync` and `async` savers; `delta` keeps the messages in a DeltaChannel, its answer to a state that grows.
Nobody resumes a thread by itself: after a crash the caller must know the thread ids and invoke each again.
"""

from __future__ import annotations

import asyncio
import operator
import sqlite3
import sys
import threading
import time
from typing import Annotated, Any, TypedDict

from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.graph import END, START, StateGraph

from benchmarks.peers import work

POOL = 20


class Whole(TypedDict):
    messages: Annotated[list, operator.add]
    done: int
    goal: int


class Delta(TypedDict):
    messages: Annotated[list, DeltaChannel(lambda state, writes: [*state, *[x for write in writes for x in write]])]
    done: int
    goal: int


def graph(job: dict[str, Any], saver: Any, log: work.Log | None = None) -> Any:
    def step(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        if log is not None:
            log.ran(config["configurable"]["thread_id"], state["done"])
            time.sleep(work.STEP_SECONDS)
        return {"messages": [work.payload(state["done"])], "done": state["done"] + 1}

    async def step_async(state: dict[str, Any], config: RunnableConfig) -> dict[str, Any]:
        return step(state, config)

    made = StateGraph(Delta if job.get("state") == "delta" else Whole)
    made.add_node("step", step_async if job.get("mode") == "async" else step)
    made.add_edge(START, "step")
    made.add_conditional_edges("step", lambda s: "step" if s["done"] < s["goal"] else END, {"step": "step", END: END})
    return made.compile(checkpointer=saver)


def config(thread: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}, "recursion_limit": 1_000_000}


def begin(steps: int) -> dict[str, Any]:
    return {"messages": [], "done": 0, "goal": steps}


def open_saver(job: dict[str, Any]) -> Any:
    if job["store"] == "sqlite":
        from langgraph.checkpoint.sqlite import SqliteSaver

        connection = sqlite3.connect(f"{job['folder']}/langgraph.db", check_same_thread=False)
        saver = SqliteSaver(connection)
        saver.setup()
        job["settings"] = {
            name: str(connection.execute(f"pragma {name}").fetchone()[0]) for name in ("journal_mode", "synchronous")
        }
        return saver
    from langgraph.checkpoint.postgres import PostgresSaver
    from psycopg.rows import dict_row
    from psycopg_pool import ConnectionPool

    pool = ConnectionPool(
        job["dsn"],
        min_size=POOL,
        max_size=POOL,
        kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
    )
    pool.wait()
    saver = PostgresSaver(pool)
    saver.setup()
    return saver


async def open_async_saver(job: dict[str, Any]) -> Any:
    if job["store"] == "sqlite":
        import aiosqlite
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

        saver = AsyncSqliteSaver(await aiosqlite.connect(f"{job['folder']}/langgraph.db"))
    else:
        from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
        from psycopg.rows import dict_row
        from psycopg_pool import AsyncConnectionPool

        pool = AsyncConnectionPool(
            job["dsn"],
            min_size=POOL,
            max_size=POOL,
            open=False,
            kwargs={"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row},
        )
        await pool.open(wait=True)
        saver = AsyncPostgresSaver(pool)
    await saver.setup()
    return saver


def run(job: dict[str, Any]) -> dict[str, Any]:
    made = graph(job, open_saver(job), work.Log(job["log"]) if "log" in job else None)

    def turn(number: int) -> None:
        result = made.invoke(begin(work.STEPS), config(f"t{number}"), durability="sync")
        assert len(result["messages"][-1]["content"]) > 900

    match job["test"]:
        case "sequential":
            return work.one_by_one(turn, job["turns"])
        case "flight":
            return work.in_flight(turn, job["seconds"])
        case "growth":
            answer = {}
            for history in work.HISTORIES:
                thread = config(f"g{history}")
                made.invoke({**begin(1), "messages": [work.payload(n) for n in range(history - 1)]}, thread)
                taken = []
                for _ in range(job["turns"]):
                    started = time.perf_counter()
                    made.invoke(begin(work.STEPS), thread, durability="sync")
                    taken.append(time.perf_counter() - started)
                answer[str(history)] = work.median_ms(taken) / work.STEPS
            return answer
        case "begin" | "resume":
            entered = begin(work.RECOVERED_STEPS) if job["test"] == "begin" else None
            threads = [
                threading.Thread(target=lambda n=n: made.invoke(entered, config(f"t{n}"), durability="sync"))
                for n in range(work.RECOVERED_TURNS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return {}
        case other:
            raise ValueError(other)


async def run_async(job: dict[str, Any]) -> dict[str, Any]:
    made = graph(job, await open_async_saver(job))

    async def turn(number: int) -> None:
        result = await made.ainvoke(begin(work.STEPS), config(f"t{number}"), durability="sync")
        assert len(result["messages"][-1]["content"]) > 900

    if job["test"] == "sequential":
        return await work.one_by_one_async(turn, job["turns"])
    return await work.in_flight_async(turn, job["seconds"])


if __name__ == "__main__":
    given = work.job()
    found = asyncio.run(run_async(given)) if given.get("mode") == "async" else run(given)
    work.answer(settings=given.get("settings", {}), **found)
    sys.stdout.flush()
    import os

    os._exit(0)  # its pools' threads take seconds to end
