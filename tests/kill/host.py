"""A host in a process of its own, so that a test can kill it: `python -m tests.kill.host '{"folder": ...}'`.

It opens the folder, or a schema in PostgreSQL, submits "go" as request r1 if asked to, runs Turns if asked to, writes
`submitted` and `ended` to the folder's `said` file as they happen, and ends when the Turn has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.errors import TurnFailed
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, external, final, local, say

KEY = SessionKey("kill", "session")
SCRIPT = [say("one"), local("t", value="2"), external("hands", "work"), Stall(gate="g"), final("{results}")]


async def main(job: dict[str, Any]) -> None:
    folder = Path(job["folder"])
    ledger, said = EffectLedger(folder / "ledger"), EffectLedger(folder / "said")
    gates = Gates(folder)

    async def work() -> str:
        ledger.append("work")
        await gates.passed("work")
        return "worked"

    harness = Harness("agent", "v1", ScriptedHarness(SCRIPT, ledger=ledger, gates=gates))
    opening: Any = (
        PostgresBackend.open(job["dsn"], schema=job["schema"])
        if "dsn" in job
        else LocalBackend.open(folder, synchronous="NORMAL", withhold_os_lock=job.get("withhold_os_lock", False))
    )
    async with (
        opening as backend,
        DurableRuntime(
            backend=backend,
            harnesses=[harness],
            executors={"hands": FunctionExecutor({"work": work})},
            poll_interval=0.05,
            lease=job.get("lease", 3600.0),
            close_timeout=0.5,
        ) as runtime,
    ):
        session = await runtime.create_session(KEY, "agent")
        if job.get("run", True):
            await runtime.start()
            said.append("started", owner=runtime.owner)
        turn = await session.submit("r1", "go")
        said.append("submitted", turn=turn.turn_id)
        if job.get("hang"):
            await asyncio.Event().wait()
        try:
            said.append("ended", answer=str(await turn.wait()))
        except TurnFailed as error:
            said.append("failed", reason=error.reason)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
