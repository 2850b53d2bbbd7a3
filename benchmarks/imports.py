"""(e) What does importing cost a process that never runs an agent?

Fresh interpreters, best and median of several, minus the interpreter's own start. The second figure imports
what an API host needs: the package, a backend on SQLite, the agent library nowhere.
"""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.measure import median

REPEATS = 9


def seconds(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def run() -> dict[str, dict[str, float]]:
    package = "import agentscope_durable"
    host = (
        "from agentscope_durable import DurableRuntime, LocalBackend; import agentscope_durable.stores.records.sqlite"
    )
    bare: list[float] = []
    packages: list[float] = []
    hosts: list[float] = []
    for _ in range(REPEATS):
        bare.append(seconds("pass"))
        packages.append(seconds(package))
        hosts.append(seconds(host))
    base = median(bare)
    return {
        "e import": {
            "package s": median(packages) - base,
            "API host s": median(hosts) - base,
            "interpreter s": base,
        }
    }


if __name__ == "__main__":
    print(run())
