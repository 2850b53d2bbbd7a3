"""An AgentScope workspace whose files are durable: instructions, file tools, and the place things are offloaded to.

Rule: what AgentScope's own workspaces do with a shell or a connection (skills, MCP servers) is not done here. They are
given to the agent in its toolkit.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, Final

from agentscope_durable.adapters.agentscope.filesystem import RemoteFilesystem
from agentscope_durable.contracts.errors import Misuse

__all__ = ["agent_workspace"]

FOLDER: Final = "thread"
"""Under `sessions/`. These files belong to one Thread as they are, and a session's id need not be a name of a file."""
INSTRUCTIONS: Final = """<workspace>You have durable files under {root}: what you write there is kept, and is there \
when this conversation goes on later. Use absolute paths. There is no shell: use Read, Write, Edit and Glob.
{root}/sessions and {root}/data hold earlier parts of this conversation, large tool results and media that were moved \
out of it; they are managed by the system.</workspace>"""


def agent_workspace(given: Any) -> Any:
    """What an agent is given as its workspace: durable files stand behind AgentScope's own class."""
    return _workspace_class()(given) if isinstance(given, RemoteFilesystem) else given


@cache
def _workspace_class() -> Any:
    from agentscope.message import Base64Source, DataBlock, HintBlock, ToolResultBlock
    from agentscope.workspace import WorkspaceBase

    class DurableFiles(WorkspaceBase):
        """See the top of this file."""

        def __init__(self, files: RemoteFilesystem) -> None:
            super().__init__(workspace_id="durable")
            self._files = files
            self.workdir = files.root
            self.is_alive = True

        def get_backend(self) -> Any:
            return self._files

        async def initialize(self) -> None:
            """Nothing to set up."""

        async def close(self) -> None:
            """Nothing to give back."""

        async def get_instructions(self) -> str:
            return INSTRUCTIONS.format(root=self._files.root)

        async def list_tools(self) -> list[Any]:
            return self._files.tools()

        async def list_skills(self, **_options: Any) -> list[Any]:
            return []

        async def list_mcps(self, **_options: Any) -> list[Any]:
            return []

        async def add_mcp(self, *_arguments: Any, **_options: Any) -> Any:
            raise Misuse("durable files hold no MCP servers: give them to the agent's Toolkit(mcps=...)")

        async def add_skill(self, *_arguments: Any, **_options: Any) -> Any:
            raise Misuse("durable files hold no skills: give them to the agent's Toolkit(skills_or_loaders=...)")

        remove_mcp = add_mcp
        add_skill_archive = remove_skill = add_skill

        async def offload_context(self, session_id: str, msgs: list[Any]) -> str:
            """A file of its own for each part, so that none is written again as the conversation grows."""
            lines = [(await self._without_media(message)).model_dump_json() for message in msgs]
            del session_id
            folder = f"{self.workdir}/sessions/{FOLDER}"
            number = len(await self._files.list_dir(folder)) + 1
            while await self._files.file_exists(path := f"{folder}/context-{number:04d}.jsonl"):
                number += 1
            if lines:
                await self._files.write_file(path, ("\n".join(lines) + "\n").encode())
            return path

        async def offload_tool_result(self, session_id: str, tool_result: Any) -> str:
            del session_id
            return await super().offload_tool_result(FOLDER, tool_result)

        async def _without_media(self, message: Any) -> Any:
            copied = deepcopy(message)
            if not isinstance(copied.content, str):
                copied.content = [await self._offloaded(block) for block in copied.content]
            return copied

        async def _offloaded(self, block: Any) -> Any:
            if isinstance(block, DataBlock) and isinstance(block.source, Base64Source):
                return await self.offload_data_block(block)
            if isinstance(block, ToolResultBlock) and isinstance(block.output, list):
                block.output = [await self._offloaded(item) for item in block.output]
            elif isinstance(block, HintBlock) and isinstance(block.hint, list):
                block.hint = [await self._offloaded(item) for item in block.hint]
            return block

    return DurableFiles
