"""The workload on Absurd, which has PostgreSQL only: a task of ten steps, workers in processes of their own.

One at a time a worker and the client look every millisecond (their defaults are 250 ms and more). For many at once:
`workers` processes with `concurrency` threads each. A task of a dead worker is claimed again when its claim has ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import psycopg
from absurd_sdk import Absurd

from benchmarks.peers import work

given = work.job()
app = Absurd(given["dsn"])
log = work.Log(given["log"]) if "log" in given else None


@app.register_task(name="turn")
def turn(params: dict[str, Any], context: Any) -> Any:
    result = None
    for number in range(params["steps"]):
        result = context.step(f"s{number}", lambda number=number: work.payload(number))
    return result


@app.register_task(name="slow")
def slow(params: dict[str, Any], context: Any) -> Any:
    def step(number: int) -> dict[str, Any]:
        assert log is not None
        log.ran(params["turn"], number)
        time.sleep(work.STEP_SECONDS)
        return work.payload(number)

    for number in range(work.RECOVERED_STEPS):
        context.step(f"s{number}", lambda number=number: step(number))
    return params["turn"]


@app.register_task(name="long")
def long(params: dict[str, Any], context: Any) -> dict[str, float]:
    answer = {}
    done = 0

    def step() -> None:
        nonlocal done
        context.step(f"s{done}", lambda: work.payload(done))
        done += 1

    for history in work.HISTORIES:
        while done < history:
            step()
        taken = []
        for _ in range(given["turns"]):
            started = time.perf_counter()
            for _ in range(work.STEPS):
                step()
            taken.append(time.perf_counter() - started)
        answer[str(history)] = work.median_ms(taken) / work.STEPS
    return answer


def serve() -> None:
    app.start_worker(
        concurrency=given.get("concurrency", 1), poll_interval=0.001, claim_timeout=given.get("lease", 120)
    )


def prepare() -> None:
    environment = {**os.environ, "ABSURD_DATABASE_URL": given["dsn"]}
    control = os.path.join(os.path.dirname(sys.executable), "absurdctl")
    for arguments in (["init"], ["create-queue", "default"]):
        subprocess.run([control, *arguments], env=environment, check=True, capture_output=True)


def finished(task: Any) -> Any:
    while True:
        found = app.fetch_task_result(task)
        if found.state in ("completed", "failed", "cancelled"):
            assert found.state == "completed", found
            return found.result
        time.sleep(0.001)


def one(number: int) -> None:
    task = app.spawn("turn", {"steps": work.STEPS}, queue="default")
    assert len(finished(task["task_id"])["content"]) > 900


def in_flight() -> dict[str, float]:
    """64 tasks are always there. One query tells which are done, so that the client is not what is measured."""
    client = psycopg.connect(given["dsn"], autocommit=True)
    there: set[str] = set()
    done = 0
    started = time.perf_counter()
    while time.perf_counter() - started < given["seconds"]:
        while len(there) < work.WIDTH:
            there.add(str(app.spawn("turn", {"steps": work.STEPS}, queue="default")["task_id"]))
        time.sleep(0.005)
        rows = client.execute(
            "select task_id::text, completed_payload from absurd.t_default"
            " where task_id = any(%s::uuid[]) and state = 'completed'",
            (list(there),),
        ).fetchall()
        for task, result in rows:
            assert len(result["content"]) > 900
            there.remove(task)
            done += 1
    return {"steps/s": done * work.STEPS / (time.perf_counter() - started), "turns": done}


def main() -> dict[str, Any]:
    match given["test"]:
        case "worker":
            serve()
        case "begin":
            prepare()
            for number in range(work.RECOVERED_TURNS):
                app.spawn("slow", {"turn": number}, queue="default")
            serve()
        case "resume":
            serve()
        case _:
            pass
    prepare()
    command = [sys.executable, "-m", "benchmarks.peers.absurd_tasks"]
    import json

    job = json.dumps({**given, "test": "worker"})
    workers = [subprocess.Popen([*command, job]) for _ in range(given.get("workers", 1))]
    try:
        one(0)
        match given["test"]:
            case "sequential":
                return work.one_by_one(one, given["turns"])
            case "flight":
                return in_flight()
            case "growth":
                return finished(app.spawn("long", {}, queue="default")["task_id"])
            case other:
                raise ValueError(other)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


work.answer(**main())
