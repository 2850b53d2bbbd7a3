"""What every test has: the specification's markers, and random tests that can be repeated."""

from __future__ import annotations

import signal

from hypothesis import settings

pytest_plugins = ["tests.plugins.spec_plugin", "tests.servers.fixtures"]

# No test judges speed (a loaded machine would fail it), and a failure prints how to repeat it.
settings.register_profile("durable", deadline=None, print_blob=True)
settings.load_profile("durable")

# A shell that starts a command in the background lets it ignore Ctrl+C, and whatever it starts inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    _ = signal.signal(signal.SIGINT, signal.default_int_handler)
