"""The folder of an agent's local workspace: what was deleted between two Runs is not silently there again, and empty.

Rule 1: the folder is noted with the Thread's first commit. Before that it may be made on demand, as AgentScope does.
Rule 2: it is looked for before the factory is called, which may make it again.
Rule 3: nobody but a person can tell whether the agent may go on without what was in it (RC-22). The Turn waits for that
person, and goes on when the folder is there and the Turn was released.
"""

from __future__ import annotations

import os
from typing import Any

from agentscope_durable.spi.environment import Environment

__all__ = ["WorkspaceGone", "check_directory", "directory_of", "is_there"]


class WorkspaceGone(Exception):
    """The folder of the Thread's workspace was deleted."""

    def __init__(self, directory: str) -> None:
        super().__init__(
            f"the workspace {directory!r} of this Thread is gone: restore it, or make the folder to go on without what "
            "was in it"
        )


def directory_of(workspace: Any) -> str:
    """The folder of a workspace on this machine; "" for any other workspace, and for none."""
    if workspace is None:
        return ""
    from agentscope.workspace import LocalWorkspace

    return str(workspace.workdir) if isinstance(workspace, LocalWorkspace) else ""


async def is_there(directory: str, environment: Environment) -> bool:
    return not directory or await environment.call_in_thread(lambda: os.path.isdir(directory))


async def check_directory(noted: str, there: bool, directory: str, environment: Environment) -> None:
    """
    Args:
        noted: the folder as of the Thread's last commit; "" if it had none.
        there: whether that folder was there before the factory was called.
        directory: the folder the factory now gives.

    Raises:
        WorkspaceGone: what the agent worked in is not there any more.
    """
    if not noted or not directory:
        return
    if directory == noted:
        if not there:
            raise WorkspaceGone(directory)
    elif not await is_there(directory, environment):
        raise WorkspaceGone(directory)
