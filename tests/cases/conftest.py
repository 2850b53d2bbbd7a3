"""The cases use the hosts and backends of the runtime's stories, and a process that forks where a case says crash."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.census.forks import ForkServer
from tests.runtime.conftest import backend, clock, hosts

__all__ = ["backend", "clock", "hosts"]


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Real processes, one at a time, that know nothing of each other."""
    modules = ["tests.cases.programs"]
    if importlib.util.find_spec("agentscope") is not None:
        modules += ["agentscope.agent", "agentscope.event", "agentscope.middleware"]
    with ForkServer(*modules) as server:
        yield server
