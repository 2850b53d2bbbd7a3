"""Runs the agent, on any machine that reaches the database.

    python brain.py postgresql://... --name brain-a --ledger ledger.jsonl

Start as many as you like; they share the work. SIGTERM ends one politely: it hands its Turns over. `kill -9` gives it
no chance to, and the others take its Turns when its lease is over.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import agent

from agentscope_durable import DurableRuntime, Harness, PostgresBackend
from agentscope_durable.adapters.agentscope import AgentScopeAdapter
from agentscope_durable.testing.ledger import EffectLedger


async def main(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    ledger = EffectLedger(options.ledger)
    adapter = AgentScopeAdapter.for_react(agent.make_agent(ledger, delay=options.word))
    async with PostgresBackend.open(options.database, schema=agent.SCHEMA) as backend:
        runtime = DurableRuntime(
            backend=backend,
            harnesses=[Harness(agent.NAME, agent.VERSION, adapter)],
            host_name=options.name,
            lease=options.lease,
            parallelism=options.parallelism,
        )
        async with runtime:
            await runtime.start()
            print(runtime.owner, flush=True)
            await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs the agent.")
    parser.add_argument("database", metavar="DATABASE", help="address of the PostgreSQL database")
    parser.add_argument("--name", default="brain", help="name of this host; default: brain")
    parser.add_argument("--ledger", default="ledger.jsonl", help="what happened outside; default: ledger.jsonl")
    parser.add_argument("--lease", type=float, default=3.0, metavar="SECONDS", help="default: 3; in production 30")
    parser.add_argument("--parallelism", type=int, default=4, metavar="TURNS", help="at the same time; default: 4")
    parser.add_argument("--word", type=float, default=0.1, metavar="SECONDS", help="for each word; default: 0.1")
    asyncio.run(main(parser.parse_args()))
