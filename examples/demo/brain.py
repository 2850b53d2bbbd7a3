"""A process that runs Turns: the one that gets killed.

    python brain.py '{"folder": "/tmp/x", ...}'      one brain
    python brain.py --nursery                        a process that has imported everything and opened nothing; for each
                                                     line of options on its standard input it forks a brain

It tells on its standard output, one JSON object a line, what only this process can see: the model's words while they
come. Everything else is in the store, where the narrator reads it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import incident

from agentscope_durable import (
    DurableRuntime,
    EventDelta,
    EventDeltaType,
    FunctionExecutor,
    Harness,
    LocalBackend,
)
from agentscope_durable.adapters.agentscope import AgentScopeAdapter
from agentscope_durable.testing.census import arm

HOLD_AT = ("store.commit.before", 3)
"""After the external tool has returned: its result is committed, the Turn is claimed, the result is not yet applied."""


def tell(kind: str, **facts: Any) -> None:
    """One line, in one write: brains of one nursery share the pipe."""
    os.write(1, (json.dumps({"kind": kind, "pid": os.getpid(), **facts}) + "\n").encode())


def _hold(_name: str) -> None:
    tell("held")
    threading.Event().wait()


def _then_hold(function: Callable[..., Any]) -> Callable[..., Any]:
    """The tool as it is; when it has returned, the process stops where the narrator wants to kill it."""

    @wraps(function)
    async def performed(**arguments: Any) -> Any:
        value = await function(**arguments)
        name, nth = HOLD_AT
        arm(name, _hold, nth=nth)
        return value

    return performed


async def work(options: Mapping[str, Any]) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    folder = Path(options["folder"])
    ledger = incident.ledger_in(folder)
    functions = incident.executor_functions(ledger, pause=options["pause"])
    if options["hold"]:
        functions = {name: _then_hold(function) for name, function in functions.items()}
    adapter = AgentScopeAdapter.for_react(
        incident.make_agent(ledger, delay=options["delay"]), dict.fromkeys(functions, incident.ROUTE)
    )
    async with LocalBackend.open(folder / "store") as backend:
        runtime = DurableRuntime(
            backend=backend,
            harnesses=[Harness(incident.DEFINITION, incident.VERSION, adapter)],
            executors={incident.ROUTE: FunctionExecutor(functions)},
            poll_interval=options["poll"],
            host_name="brain",
        )
        async with runtime:
            await runtime.start()
            tell("up", owner=runtime.owner)
            show = asyncio.create_task(_show(runtime))
            await stopped.wait()
            show.cancel()


async def _show(runtime: DurableRuntime) -> None:
    session = runtime.get_session(incident.KEY)
    async with session.stream_events(deltas={EventDeltaType.MESSAGE}) as events:
        async for event in events:
            if isinstance(event, EventDelta):
                tell("delta", message=event.message_id, attempt=event.attempt, offset=event.offset, text=event.text)


def run(options: Mapping[str, Any]) -> None:
    logging.getLogger().setLevel(logging.CRITICAL)
    if options["failpoint"]:
        name, _, nth = options["failpoint"].partition(":")
        arm(name, nth=int(nth))
    asyncio.run(work(options))


def nursery() -> None:
    from agentscope.agent import Agent  # noqa: F401  # imported before the first fork, used after it

    tell("ready")
    children: set[int] = set()

    def reap(*_: Any) -> None:
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.discard(pid)
                tell("died", brain=pid, signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            code = 1
            try:
                run(json.loads(line))
                code = 0
            finally:
                os._exit(code)
        children.add(pid)
        tell("born", brain=pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    if sys.argv[1:] == ["--nursery"]:
        nursery()
    else:
        run(json.loads(sys.argv[1]))
