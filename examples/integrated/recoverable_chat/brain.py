"""Runs the agent: the process to kill.

    python brain.py FOLDER                  a scripted model, no network
    DURABLE_MODEL_BASE_URL=... DURABLE_MODEL=... DURABLE_MODEL_API_KEY=... python brain.py FOLDER

Ctrl-C and SIGTERM let what is in hand come to its end, for a bounded time; what is not finished by then, the next brain
goes on with. `kill -9` gives nobody a chance to do anything, and the next brain goes on, too.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path

import agent

from agentscope_durable import DurableRuntime, Harness, LocalBackend
from agentscope_durable.adapters.agentscope import AgentScopeAdapter

DRAIN_SECONDS = 10.0


async def main(folder: Path, *, seconds_a_word: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    adapter = AgentScopeAdapter.for_react(agent.make_agent(folder, seconds_a_word=seconds_a_word))
    async with LocalBackend.open(folder / "store") as backend:
        runtime = DurableRuntime(
            backend=backend,
            harnesses=[Harness(agent.NAME, agent.VERSION, adapter)],
            host_name="brain",
        )
        async with runtime:
            await runtime.start()
            (folder / "brain.pid").write_text(str(os.getpid()))
            print(f"brain {os.getpid()} is up", flush=True)
            await stop.wait()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)  # a second signal does not wait
            print(f"no new work; up to {DRAIN_SECONDS:.0f} s for what is in hand", flush=True)
            done = await runtime.drain(timeout=DRAIN_SECONDS)
    print("nothing is left in hand" if done else "the rest is left for the next brain", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs the agent of the chat.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--word", type=float, default=0.15, metavar="SECONDS", help="for each word; default: 0.15")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("agentscope_durable").setLevel(logging.INFO)
    asyncio.run(main(options.folder, seconds_a_word=options.word))
