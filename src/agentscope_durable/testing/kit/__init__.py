"""The users' kit: prove that *your* agent survives a kill at each point (docs/testing.md).

Nothing is loaded before it is used: pytest imports `kit.plugin` at every start of anybody who has this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentscope_durable.testing.kit.durable import Durable, Survival
    from agentscope_durable.testing.kit.effects import effect
    from agentscope_durable.testing.kit.story import Story
    from agentscope_durable.testing.scripted_model import Call

__all__ = ["Call", "Durable", "Story", "Survival", "effect"]

_HOMES = {
    "Call": "agentscope_durable.testing.scripted_model",
    "Durable": "agentscope_durable.testing.kit.durable",
    "Story": "agentscope_durable.testing.kit.story",
    "Survival": "agentscope_durable.testing.kit.durable",
    "effect": "agentscope_durable.testing.kit.effects",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
