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
    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT, ledger=EffectLedger(job["ledger"])))
    while True:
        try:
            async with (
                PostgresBackend.open(job["dsn"], schema=job["schema"]) as backend,
                DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05, lease=job["lease"]) as runtime,
            ):
                await runtime.start()
                await asyncio.Event().wait()
        except Retry:
            # It could not start, for its database was away. Whoever looks after processes starts it again.
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
