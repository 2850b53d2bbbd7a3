"""The pytest plugin: the fixture `durable`, and the options that repeat a failure.

Rule: it is loaded at every start of pytest wherever this package is installed, so it imports nothing that takes time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentscope_durable.testing.kit.durable import Durable, Stage

SEED = 7


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durable", "agents that survive a kill")
    group.addoption(
        "--durable-kill",
        metavar="PLACE[+PLACE]",
        help="kill at this place alone, as a failure says it: tool.local.after:1, or one and then another",
    )
    group.addoption(
        "--durable-telling",
        metavar="N",
        type=int,
        help="of `durable.simulate`, tell this one alone, as a failure says it",
    )
    group.addoption("--durable-seed", metavar="N", type=int, default=SEED, help="decides what is drawn (default: 7)")


@pytest.fixture(scope="session")
def _durable_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    from agentscope_durable.testing.kit.durable import Stage

    stage = Stage(tmp_path_factory.mktemp("durable"))
    yield stage
    stage.close()


@pytest.fixture
def durable(request: pytest.FixtureRequest, _durable_stage: Stage) -> Durable:
    """Kills an agent at each point and says what is wrong: docs/testing.md of agentscope-durable."""
    from agentscope_durable.testing.kit.durable import Durable, places

    kill: str | None = request.config.getoption("--durable-kill")
    seed: Any = request.config.getoption("--durable-seed")
    return Durable(
        request.module,
        request.node.nodeid,
        _durable_stage,
        seed=seed,
        only=None if kill is None else places(kill),
        telling=request.config.getoption("--durable-telling"),
    )
