"""One host of several on one PostgreSQL, in a process of its own: `python -m tests.kill.fleet '{"dsn": ...}'`.

It runs what there is until it is killed. What its model is asked and its tool does is in the ledger.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agentscope_durable.assembly import PostgresBackend
from agentscope_durable.contracts.errors import Retry
from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, local, say

SCRIPT = [say("one"), local("look", value="two", rule=ReplayRule.SAFE), say("three"), final("{results}, done")]


async def main(job: dict[str, Any]) -> None:
    harness = ScriptedHarness(SCRIPT, ledger=EffectLedger(job["ledger"]))
    while True:
        try:
            backend = await PostgresBackend.open(job["dsn"], schema=job["schema"])
            break
        except Retry:
            await asyncio.sleep(0.05)
    async with (
        backend,
        DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", harness)], poll_interval=0.05, lease=job["lease"]
        ) as runtime,
    ):
        await runtime.start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
