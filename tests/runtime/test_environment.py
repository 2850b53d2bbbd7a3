"""The real world: its chance never repeats itself, in a child process neither."""

from __future__ import annotations

import os
import subprocess
import sys

from agentscope_durable.spi.environment import DRAWN_AT_ONCE, SYSTEM


def test_random_bytes_are_as_many_as_asked_for_and_never_the_same() -> None:
    lengths = [1, 16, 16, DRAWN_AT_ONCE - 1, 16, DRAWN_AT_ONCE, 3 * DRAWN_AT_ONCE, 0, 16]
    assert [len(SYSTEM.random_bytes(length)) for length in lengths] == lengths
    drawn = [SYSTEM.random_bytes(16) for _ in range(DRAWN_AT_ONCE)]
    assert len(set(drawn)) == len(drawn)


def test_a_child_of_a_fork_draws_other_bytes_than_its_parent() -> None:
    program = (
        "import os\n"
        "from agentscope_durable.spi.environment import SYSTEM\n"
        "SYSTEM.random_bytes(1)\n"
        "child = os.fork()\n"
        "os.write(1, SYSTEM.random_bytes(16).hex().encode() + b'\\n')\n"
        "os._exit(0) if child == 0 else os.waitpid(child, 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert len(set(told.stdout.split())) == 2
