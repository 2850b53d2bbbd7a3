"""A process that plays a scenario and is killed at one place: `python -m tests.adapters.agentscope.crash`.

`one JOB` plays a job in this interpreter and prints its report. `serve` imports everything, opens nothing, and
forks a child for each job it reads: a child that is killed leaves only what was committed.

A job is `{"folder", "scenario", "kill"}`. `kill` is a point by its name, "" for none: `commit:3:before`,
`tool.local.after:1`, `model.request.before:2`, `stream:1`, `tool:add`. With a `dsn` the records are in a schema of that
PostgreSQL database, one for each folder.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from agentscope_durable import _failpoints
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.status import ExecutionKind, ExecutionState
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.records.postgres import PostgresRecordStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from tests.adapters.agentscope.scenarios import ALONE, SCENARIOS
from tests.adapters.agentscope.stage import Stage, check_transcript, shape
from tests.servers.stores import schema_of

ROUNDS = 80


class Points:
    """Places this process passes, in order; at one of them it dies."""

    def __init__(self, kill: str) -> None:
        self.kill = kill
        self.passed: list[str] = []
        self._hits: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        self.passed.append(name)
        if name == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def failpoint(self, name: str) -> None:
        if name.startswith(("model.request", "tool.local", "object.put")):
            self._hits[name] += 1
            self(f"{name}:{self._hits[name]}")


async def play(job: dict[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    points = Points(job.get("kill", ""))
    _failpoints.observe(points.failpoint)
    scenario = {**SCENARIOS, **ALONE}[job["scenario"]](folder, points)
    records: SqliteRecordStore | PostgresRecordStore
    if dsn := job.get("dsn"):
        records = await PostgresRecordStore.open(dsn, schema=schema_of(folder), initialize_schema=True)
    else:
        records = await SqliteRecordStore.open(folder / "durable.db", synchronous="NORMAL")
    try:

        async def on_commit(number: int, side: str, _step: Any) -> None:
            points(f"commit:{number}:{side}")
            if side == "after":
                # The user sees what is committed, and may say something at once.
                await scenario.controls(stage, turn)

        stage = Stage(
            scenario.adapter,
            backend=TransactionalSessionBackend(records, FileObjectStore(folder / "objects")),
            results=scenario.results(),
            on_commit=on_commit,
            caching=bool(job.get("caching")),
        )
        stage.name = f"p{os.getpid()}"
        owners = folder / "owners"
        former = owners.read_text().split() if owners.exists() else []
        stage.former = tuple(f"{name}-{number}" for name in former for number in range(1, 30))
        owners.write_text(" ".join([*former, stage.name]))
        await stage.open()
        turn = await stage.submit("r1", scenario.text)
        for _ in range(ROUNDS):
            view = await stage.view(turn)
            if view.status.terminal:
                break
            await scenario.controls(stage, turn)
            if await stage.step() or await stage.serve(turn):
                continue
            for record in (await stage.work(turn)).executions:
                if record.kind is ExecutionKind.LOCAL and record.state is ExecutionState.UNKNOWN:
                    await stage.reconcile(turn, record.call_id, scenario.evidence(record.name))
        return await report(stage, turn, scenario, points)
    finally:
        await records.close()


async def report(stage: Stage, turn: str, scenario: Any, points: Points) -> dict[str, Any]:
    view = await stage.view(turn)
    state = await stage.state()
    check_transcript(state)
    lines = scenario.ledger.lines()
    requests = Counter(line["name"] for line in lines)
    messages = [(m.input_kind or m.id.removeprefix(turn), m.role, m.text, m.structured) for m in await stage.messages()]
    calls = await stage.model_calls(turn)
    return {
        "status": view.status,
        "finish": None if view.result is None else view.result.finish_reason,
        "errors": [repr(error) for error in stage.errors],
        "state": json.loads(json.dumps(shape(state))),
        "summary": bool(state.summary),
        "iterations": state.cur_iter,
        "replies": len({m.id for m in state.context if m.role == "assistant"}),
        "structured": state.reply_context.structured_output,
        "tasks": [task.subject for task in state.tasks_context.tasks],
        "groups": state.tool_context.activated_groups,
        "messages": messages,
        "requests": requests["model/request"],
        "effects": {name: count for name, count in requests.items() if not name.startswith("model/")},
        "runs": view.runs,
        "lost": sum(request.status == "LOST" for call in calls for request in call.requests),
        "completed": sum(request.status == "COMPLETED" for call in calls for request in call.requests),
        "files": {path: _content(path, *entry) for path, entry in (await stage.files()).items()},
        "open": len((await stage.work(turn)).executions) + len((await stage.work(turn)).interactions),
        "passed": points.passed,
    }


def _content(path: str, value: Any, version: int) -> Any:
    """A file without what differs between two equal conversations: what was put aside has ids and times in it."""
    return value["text"].count("\n") if "/sessions/" in path else value, version


def run(job: dict[str, Any]) -> dict[str, Any]:
    try:
        return asyncio.run(play(job))
    except BaseException:
        return {"exception": traceback.format_exc()[-3000:]}


def forked(job: dict[str, Any]) -> dict[str, Any]:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        with os.fdopen(writes, "w") as pipe:
            json.dump(run(job), pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return {"killed": os.WTERMSIG(status)}
    return json.loads(text)


class Unused(ModuleType):
    """Stands for a library that AgentScope imports whether it is used or not: a quarter of an interpreter's start.

    While others are imported it has whatever an annotation names. A story that used it would fail.
    """

    loading = True

    def __getattr__(self, name: str) -> type[Exception]:
        if not self.loading or name.startswith("__"):
            raise AttributeError(f"no story uses {self.__name__}, so there is no {name}")
        return type(name, (Exception,), {})


def load(*unused: str) -> None:
    """Import all that a story uses."""
    for name in unused:
        sys.modules[name] = Unused(name)
    # Nothing of it is garbage: looking for some, again and again, would be a fifth of the time that this takes.
    gc.disable()
    import agentscope.agent
    import agentscope.middleware
    import agentscope.workspace  # noqa: F401
    import json_repair  # noqa: F401  # AgentScope imports it when it first reads arguments

    gc.enable()
    Unused.loading = False


def serve() -> None:
    load()
    # Children look for garbage among what they made themselves. To look through all that was imported would copy its
    # pages into each of them, and took three quarters of a child's time.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), flush=True)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    if sys.argv[1] == "serve":
        serve()
    else:
        load("openai")
        gc.freeze()
        for text in sys.argv[2:]:
            print(json.dumps(run(json.loads(text))), flush=True)
