"""The programs that the census runs in forked children."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentscope_durable import _failpoints
from tests.census.worlds import ScriptedWorld, World, judge, tell


def world_of(job: dict[str, Any]) -> World:
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    if job["world"] == "scripted":
        return ScriptedWorld(folder, job["dsn"])
    from tests.census.agentscope_world import AgentScopeWorld

    return AgentScopeWorld(folder, job["dsn"])


async def play(job: dict[str, Any]) -> None:
    """Tell the story, to its end or to the failpoint that is armed."""
    await tell(world_of(job))


async def trace(job: dict[str, Any]) -> None:
    """Tell the story and write down which failpoints it passed, in order."""
    passed: list[str] = []
    _failpoints.observe(passed.append)
    await tell(world_of(job))
    _failpoints.observe(None)
    print(json.dumps(passed))


async def verdict(job: dict[str, Any]) -> None:
    """What is wrong with what is stored."""
    print(json.dumps(await judge(world_of(job))))
