"""What every test has: the specification's markers, and random tests that can be repeated."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import settings

pytest_plugins = [
    "tests.plugins.spec_plugin",
    "tests.plugins.recovery_plugin",
    "tests.plugins.weather",
    "tests.servers.fixtures",
]

# No test judges speed (a loaded machine would fail it), and a failure prints how to repeat it.
settings.register_profile("durable", deadline=None, print_blob=True)
settings.load_profile("durable")

# Nearly all the time of an interpreter that a test starts is its imports. Where nothing may be left beside the sources,
# what it compiled is kept with what else is built.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    _ = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path(__file__).resolve().parents[1] / "build" / "pycache"))

# A shell that starts a command in the background lets it ignore Ctrl+C, and whatever it starts inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    _ = signal.signal(signal.SIGINT, signal.default_int_handler)
