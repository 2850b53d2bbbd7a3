"""What every test has: the specification's markers, and random tests that can be repeated."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = ["tests.plugins.spec_plugin"]

# No test judges speed (a loaded machine would fail it), and a failure prints how to repeat it.
settings.register_profile("durable", deadline=None, print_blob=True)
settings.load_profile("durable")
