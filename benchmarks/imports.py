"""(e) What does importing cost a process that never runs an agent?

Fresh interpreters, the median of several, minus the interpreter's own start, with compiled bytecode as an installed
package has it. The second figure imports what an API host needs: the package, a backend on SQLite, the agent library
nowhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.measure import median

REPEATS = 9


def seconds(statement: str, bytecode: str) -> float:
    """Wall time of a fresh interpreter that runs `statement`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = bytecode
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True, env=environment)
    return time.perf_counter() - started


def run() -> dict[str, dict[str, float]]:
    package = "import agentscope_durable"
    host = (
        "from agentscope_durable import DurableRuntime, LocalBackend; import agentscope_durable.stores.records.sqlite"
    )
    bare: list[float] = []
    packages: list[float] = []
    hosts: list[float] = []
    with tempfile.TemporaryDirectory() as bytecode:
        seconds(host, bytecode)
        for _ in range(REPEATS):
            bare.append(seconds("pass", bytecode))
            packages.append(seconds(package, bytecode))
            hosts.append(seconds(host, bytecode))
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
