"""How long does a Turn stand still when its process is killed?

(d) From `kill -9` of the process that runs a Turn to the first commit of another one for the same Turn:
    at once          the other one runs already, on the same machine: the lock of the dead one tells (D14)
    beyond the lease the same with the lock withheld, so that only the lease tells: counted from its end
    cold start       nobody else runs; an interpreter is started at the moment of the kill (AgentScope's own import
                     is not in it: some 1.5 s more)

Every host is a process of its own with default options (it polls twice a second; no hint crosses processes). The clock
is the machine's, the same in all of them; a host tells the time of a commit when the store has made it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, median

RUNS = 16
LEASE_RUNS = 4
COLD_RUNS = 4
LEASE = 2.0
"""Seconds, where the lease is what tells. It is 30 by default."""
POLL_INTERVAL = 0.5
"""Seconds between two looks for work, by default."""
SECONDS_MAX = 30.0


# ------------------------------------------------------------ a host


def tell(what: str) -> None:
    os.write(1, (json.dumps({"what": what, "at": time.monotonic()}) + "\n").encode())


async def host(options: dict[str, Any]) -> None:
    """Run what there is until killed; tell the time of each durable write."""
    from agentscope_durable import DurableRuntime, Harness, LocalBackend, SessionKey, _failpoints
    from agentscope_durable.testing.scripted_harness import Gates, ScriptedHarness, Stall, final, say

    _failpoints.observe(lambda name: tell(name) if name.endswith(".after") else None)
    harness = ScriptedHarness([say("begun"), Stall(gate="for ever"), final()], gates=Gates(options["folder"]))
    async with LocalBackend.open(Path(options["folder"]), withhold_os_lock=options["withhold"]) as backend:
        runtime = DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", harness)], lease=options["lease"], host_name="bench"
        )
        async with runtime:
            await runtime.start()
            if options["submit"]:
                session = await runtime.create_session(SessionKey("bench", "takeover"), "agent")
                await session.submit("r1", "go")
            tell("up")
            await asyncio.Event().wait()


class Host:
    """A host process, and what it tells."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.told: list[tuple[str, float]] = []

    @classmethod
    async def start(cls, folder: Path, *, submit: bool, withhold: bool, lease: float) -> Host:
        options = {"folder": str(folder), "submit": submit, "withhold": withhold, "lease": lease}
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.takeover", json.dumps(options), stdout=asyncio.subprocess.PIPE
            )
        )

    async def next(self, what: str) -> float:
        """The time of the next one of these it tells."""
        assert self._process.stdout is not None
        async with asyncio.timeout(SECONDS_MAX):
            while True:
                line = await self._process.stdout.readline()
                assert line, "the host has ended"
                told = json.loads(line)
                self.told.append((told["what"], told["at"]))
                if told["what"] == what:
                    return told["at"]

    async def kill(self) -> float:
        """`kill -9`; when it was sent. What the host told until then is heard."""
        at = time.monotonic()
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        assert self._process.stdout is not None
        for line in (await self._process.stdout.read()).splitlines():
            told = json.loads(line)
            self.told.append((told["what"], told["at"]))
        return at

    def last(self, what: str) -> float:
        return max(at for name, at in self.told if name == what)


async def reached(folder: Path) -> None:
    """The Turn is in the middle of its work."""
    async with asyncio.timeout(SECONDS_MAX):
        while not (folder / "for ever.reached").exists():
            await asyncio.sleep(0.01)


# ------------------------------------------------------------ the measurements


async def once(k: int = 0, *, withhold: bool = False, lease: float = 30.0, cold: bool = False) -> tuple[float, float]:
    """Seconds from the kill, and from the end of the dead host's lease, to the next host's first commit.

    `k` from 0 to 7 says where between two of its looks for work the other host is.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = await Host.start(folder, submit=True, withhold=withhold, lease=lease)
        await first.next("up")
        await reached(folder)
        second = None
        if not cold:
            second = await Host.start(folder, submit=False, withhold=withhold, lease=lease)
            await second.next("up")
            await asyncio.sleep(1 + POLL_INTERVAL * k / 8)
        killed = await first.kill()
        if second is None:
            second = await Host.start(folder, submit=False, withhold=withhold, lease=lease)
        committed = await second.next("store.commit.after")
        await second.kill()
        return committed - killed, committed - (first.last("store.renew.after") + lease)


async def measure() -> dict[str, dict[str, float]]:
    at_once = [(await once(k % 8))[0] for k in range(RUNS)]
    beyond = [(await once(2 * k, withhold=True, lease=LEASE))[1] for k in range(LEASE_RUNS)]
    cold = [(await once(cold=True))[0] for _ in range(COLD_RUNS)]
    return {
        "d takeover": {
            "kill to commit p50 s": median(at_once),
            "kill to commit max s": max(at_once),
            "beyond the lease p50 s": median(beyond),
            "beyond the lease max s": max(beyond),
            "cold start p50 s": median(cold),
            "cold start max s": max(cold),
        }
    }


def run() -> dict[str, dict[str, float]]:
    return asyncio.run(measure())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(host(json.loads(sys.argv[1])))
    else:
        print(machine())
        for name, values in run().items():
            print(name, "  ".join(f"{key}={value:.4g}" for key, value in values.items()))
