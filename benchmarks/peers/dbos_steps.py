"""The workload on DBOS: a workflow of ten steps. SQLite in WAL mode, which is faster than what DBOS leaves it in.

Variants: `sync` and `async` workflows. DBOS recovers the workflows of its own executor id when it starts.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from typing import Any

from dbos import DBOS, SetWorkflowID

from benchmarks.peers import work

given = work.job()
log = work.Log(given["log"]) if "log" in given else None


def open_dbos() -> None:
    url = given.get("dsn") or f"sqlite:///{given['folder']}/dbos.db"
    if given["store"] == "sqlite":
        connection = sqlite3.connect(f"{given['folder']}/dbos.db")
        connection.execute("pragma journal_mode=wal")
        connection.close()
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "run_admin_server": False,
            "log_level": "ERROR",
            "application_version": "1",
        }
    )


def settings() -> dict[str, str]:
    if given["store"] != "sqlite":
        return {}
    import sqlalchemy
    from dbos._dbos import _get_dbos_instance

    with _get_dbos_instance()._sys_db.engine.connect() as connection:
        return {
            name: str(connection.execute(sqlalchemy.text(f"pragma {name}")).scalar())
            for name in ("journal_mode", "synchronous")
        }


open_dbos()


@DBOS.step()
def step(number: int) -> dict[str, Any]:
    return work.payload(number)


@DBOS.step()
async def step_async(number: int) -> dict[str, Any]:
    return work.payload(number)


@DBOS.step()
def slow_step(turn: int, number: int) -> dict[str, Any]:
    assert log is not None
    log.ran(turn, number)
    time.sleep(work.STEP_SECONDS)
    return work.payload(number)


@DBOS.workflow()
def turn(steps: int) -> Any:
    result = None
    for number in range(steps):
        result = step(number)
    return result


@DBOS.workflow()
async def turn_async(steps: int) -> Any:
    result = None
    for number in range(steps):
        result = await step_async(number)
    return result


@DBOS.workflow()
def slow_turn(turn: int) -> int:
    for number in range(work.RECOVERED_STEPS):
        slow_step(turn, number)
    return turn


@DBOS.workflow()
def long_turn() -> dict[str, float]:
    """One workflow is all of a conversation that DBOS has; milliseconds of the ten steps after so many."""
    answer = {}
    done = 0
    for history in work.HISTORIES:
        while done < history:
            step(done)
            done += 1
        taken = []
        for _ in range(given["turns"]):
            started = time.perf_counter()
            for _ in range(work.STEPS):
                step(done)
                done += 1
            taken.append(time.perf_counter() - started)
        answer[str(history)] = work.median_ms(taken) / work.STEPS
    return answer


def one(number: int) -> None:
    assert len(DBOS.start_workflow(turn, work.STEPS).get_result()["content"]) > 900


async def one_async(number: int) -> None:
    handle = await DBOS.start_workflow_async(turn_async, work.STEPS)
    assert len((await handle.get_result())["content"]) > 900


def main() -> dict[str, Any]:
    DBOS.launch()
    asynchronous = given.get("mode") == "async"
    match given["test"]:
        case "sequential" if asynchronous:
            return asyncio.run(work.one_by_one_async(one_async, given["turns"]))
        case "sequential":
            return work.one_by_one(one, given["turns"])
        case "flight" if asynchronous:
            return asyncio.run(work.in_flight_async(one_async, given["seconds"]))
        case "flight":
            return work.in_flight(one, given["seconds"])
        case "growth":
            return DBOS.start_workflow(long_turn).get_result()
        case "begin":
            for number in range(work.RECOVERED_TURNS):
                with SetWorkflowID(f"w{number}"):
                    DBOS.start_workflow(slow_turn, number)
            time.sleep(1_000)
            return {}
        case "resume":
            for number in range(work.RECOVERED_TURNS):
                DBOS.retrieve_workflow(f"w{number}").get_result()
            return {}
        case other:
            raise ValueError(other)


found = main()
work.answer(settings=settings(), **found)
os._exit(0)
