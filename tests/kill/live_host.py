"""A Brain or an observer in a process of its own: `python -m tests.kill.live_host '{"folder": ..., "role": ...}'`.

Both poll once in ten minutes: what happens sooner came through the folder's sockets. A Brain runs Turns whose answer
is half streamed at the gate `g`. An observer writes what it sees to the file `seen`, one JSON document a line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.events import Committed, EventDelta, PreviewStarted, SessionStreamEvent
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, final

KEY = SessionKey("kill", "live")
TEXT = "one two three four five six"
NEVER = 600.0
"""Seconds between two polls: no test waits for one."""


async def brain(folder: Path) -> None:
    harness = Harness("agent", "v1", ScriptedHarness([final(TEXT, gate="g")], gates=Gates(folder)))
    async with (
        LocalBackend.open(folder, synchronous="NORMAL") as backend,
        DurableRuntime(backend=backend, harnesses=[harness], poll_interval=NEVER, lease=3600.0) as runtime,
    ):
        await runtime.create_session(KEY, "agent")
        await runtime.start()
        EffectLedger(folder / "said").append("brain", owner=runtime.owner)
        await asyncio.Event().wait()


async def observer(folder: Path, *, read_only: bool) -> None:
    seen = EffectLedger(folder / "seen")
    async with (
        LocalBackend.open(folder, read_only=read_only) as backend,
        DurableRuntime(backend=backend, poll_interval=NEVER) as runtime,
        runtime.get_session(KEY).stream_events(deltas={EventDeltaType.MESSAGE}) as events,
    ):
        EffectLedger(folder / "said").append("observer")
        async for item in events:
            name, facts = told(item)
            seen.append(name, **facts)


def told(item: SessionStreamEvent) -> tuple[str, dict[str, Any]]:
    match item:
        case Committed(event):
            return "fact", {"type": event.type, "sequence": event.sequence, "turn": event.turn_id}
        case PreviewStarted():
            return "start", {"turn": item.turn_id, "attempt": item.attempt}
        case EventDelta():
            return "delta", {"turn": item.turn_id, "attempt": item.attempt, "offset": item.offset, "text": item.text}
        case _:
            return "reset", {}


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    if job["role"] == "brain":
        asyncio.run(brain(Path(job["folder"])))
    else:
        asyncio.run(observer(Path(job["folder"]), read_only=job.get("read_only", False)))
