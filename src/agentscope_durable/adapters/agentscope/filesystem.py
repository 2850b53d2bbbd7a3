"""Durable files for AgentScope's own file tools: a backend over the Thread's workspace.

Rule 1: a file is an entry. `/workspace/src/a.py` under the namespace `["workspace"]` has the namespace
`["workspace", "src"]` and the key `a.py`; a directory is there as long as something is in it.
Rule 2: paths come from models. What is outside the root does not exist, and what could only be a way out ("..", control
characters) is refused by name.
Rule 3: nothing is run here. Whoever needs commands needs a machine: the refusal says where those are.
Rule 4: what a tool is told went wrong has had no effect, and is said as such, so that the call's outcome is known.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import posixpath
import re
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import msgspec

from agentscope_durable.adapters.agentscope.tools import REPLAY_RULE
from agentscope_durable.adapters.agentscope.workspace import DurableWorkspace, WorkspaceEntry, WorkspaceItem
from agentscope_durable.contracts.change import PAGE_MAX
from agentscope_durable.contracts.errors import DurableError, InvalidRequest
from agentscope_durable.contracts.status import ReplayRule
from agentscope_durable.contracts.workspace import ENTRY_BYTES_MAX, EntryPath, check_namespace, check_path
from agentscope_durable.spi.executor import ToolError

__all__ = ["RemoteFilesystem"]

TEXT, BASE64 = "text", "base64"
"""The one member of a file's value: its text, or its bytes where they are none."""
GLOB_PATHS: Final = 250
"""Paths that `Glob` returns unless it is asked for more, as AgentScope's own does."""
NO_COMMANDS: Final = (
    "durable files run no commands, and {command!r} is one: use the tools Read, Write, Edit and Glob on them; for a "
    "shell give the agent a tool that is bound to a route, whose executor has a machine or a sandbox"
)

_ON_NO_DISK = re.compile("[\x00\ud800-\udfff]")


class RemoteFilesystem:
    """An AgentScope `BackendBase` whose files are entries of a workspace (WS-03)::

        files = RemoteFilesystem(binding.workspace(), ["workspace"])
        AgentBuilder(..., workspace=files)              # or toolkit=Toolkit(tools=files.tools())

    Use the tools it gives: they are AgentScope's own, and known to be safe to run again, so that a call that was cut
    off is made again as if it had not been. A `Write(backend=files)` made by hand works, but stands as a tool with an
    effect: a call that was cut off waits for a person.

    Modification times are the numbers of contents: they rise, and a content that a checkpoint brings back has its own
    one again, so what an agent has read of it is still known to be read.

    Args:
        store: the workspace.
        namespace: where in it the files are; their root is the path of its names.
    """

    def __new__(cls, store: DurableWorkspace, namespace: Sequence[str] = ("workspace",)) -> RemoteFilesystem:
        # As pathlib does: what is made is the class that AgentScope's tools know, which is loaded when it is needed.
        return object.__new__(_backend_class() if cls is RemoteFilesystem else cls)

    def __init__(self, store: DurableWorkspace, namespace: Sequence[str] = ("workspace",)) -> None:
        self._store = store
        self._under = check_namespace(namespace)
        for name in self._under:
            if "/" in name:
                raise InvalidRequest("a name of a root of files has no '/'", path="namespace")
        self.root = "/" + "/".join(self._under)

    def tools(self) -> list[Any]:
        """Read, Write, Edit and Glob on these files; new ones each time."""
        return [make(backend=self) for make in _tool_classes()]

    # ---- paths ----

    def _inside(self, path: str) -> EntryPath | None:
        """The names of a path in the workspace; None when it is outside the root, or no path at all."""
        try:
            return self._path(path)
        except ToolError:
            return None

    def _path(self, path: str) -> EntryPath:
        """
        Raises:
            ToolError: not an absolute path within the root.
        """
        if not isinstance(path, str) or not path.startswith("/"):
            raise ToolError(f"files have absolute paths under {self.root}, and {path!r} is none")
        names = tuple(name for name in path.split("/") if name not in ("", "."))
        if names[: len(self._under)] != self._under:
            raise ToolError(f"{path!r} is outside {self.root}, where the files are")
        if len(names) > len(self._under):
            with _refusing():
                return check_path(names, path=path)
        return names

    def _file(self, path: str) -> EntryPath:
        names = self._path(path)
        if len(names) == len(self._under):
            raise ToolError(f"{path!r} is the directory of all files")
        return names

    def _text(self, names: EntryPath) -> str:
        return "/" + "/".join(names)

    # ---- the primitives ----

    async def exec_shell(self, command: list[str], *, cwd: str | None = None, timeout: float | None = None) -> Any:
        """Refused, but for `mkdir -p`, which has nothing to do: AgentScope 2.0.8 asks it before each write.

        Raises:
            ToolError: for any other command, and for a directory that cannot be here; nothing was run.
        """
        from agentscope.tool import ExecResult

        if list(command[:2]) == ["mkdir", "-p"]:
            for path in command[2:]:
                _ = self._path(path)
            return ExecResult(0, b"", b"")
        raise ToolError(NO_COMMANDS.format(command=" ".join(map(str, command))[:200]))

    async def read_file(self, path: str) -> bytes:
        """
        Raises:
            FileNotFoundError, IsADirectoryError: as on a disk.
        """
        names = self._inside(path)
        item = None if names is None or len(names) == len(self._under) else await self._item(names)
        if item is not None:
            return content_of(item.value)
        if await self.is_dir(path):
            raise IsADirectoryError(f"{path} is a directory")
        raise FileNotFoundError(f"there is no file {path}")

    async def write_file(self, path: str, data: bytes) -> None:
        """
        Raises:
            ToolError: it cannot be a file here; nothing was written.
        """
        names = self._file(path)
        for depth in range(len(self._under) + 1, len(names)):
            if await self._item(names[:depth]) is not None:
                raise ToolError(f"{self._text(names[:depth])} is a file, so {path} cannot be in it")
        if await self.is_dir(path):
            raise ToolError(f"{path} is a directory")
        with _refusing():
            _ = await self._store.put(names[:-1], names[-1], value_of(data))

    async def write_stream(self, path: str, stream: AsyncIterator[bytes]) -> None:
        data = bytearray()
        async for chunk in stream:
            data += chunk
            if len(data) > ENTRY_BYTES_MAX:
                raise ToolError(f"a durable file has at most {ENTRY_BYTES_MAX} bytes")
        await self.write_file(path, bytes(data))

    async def _item(self, names: EntryPath) -> WorkspaceItem | None:
        return await self._store.get(names[:-1], names[-1])

    # ---- what is derived ----

    async def getcwd(self) -> str:
        return self.root

    async def expanduser(self, path: str) -> str:
        return self.root + path[1:] if path == "~" or path.startswith("~/") else path

    async def file_exists(self, path: str) -> bool:
        return await self.stat(path) is not None

    async def is_dir(self, path: str) -> bool:
        names = self._inside(path)
        if names is None:
            return False
        return len(names) == len(self._under) or bool((await self._store.entries(names, limit=1)).items)

    async def list_dir(self, path: str, *, recursive: bool = False) -> list[str]:
        """Names of what is in a directory; recursively: paths of all files under it."""
        if recursive:
            return [self._text((*entry.namespace, entry.key)) for entry in await self._under_path(path)]
        return [entry.name for entry in await self.scandir(path)]

    async def scandir(self, path: str) -> list[Any]:
        from agentscope.tool import DirEntry

        names = self._inside(path)
        found: dict[str, DirEntry] = {}
        for entry in await self._under_path(path):
            assert names is not None
            rest = (*entry.namespace, entry.key)[len(names) :]
            before = found.get(rest[0])
            newest = max(float(entry.number), 0.0 if before is None or before.mtime is None else before.mtime)
            found[rest[0]] = DirEntry(rest[0], is_dir=len(rest) > 1, mtime=newest)
        return list(found.values())

    async def _under_path(self, path: str) -> list[WorkspaceEntry]:
        names = self._inside(path)
        if names is None:
            return []
        found: list[WorkspaceEntry] = []
        cursor: str | None = None
        while True:
            page = await self._store.entries(names, cursor=cursor, limit=PAGE_MAX)
            found += page.items
            cursor = page.cursor
            if cursor is None:
                return found

    async def stat(self, path: str) -> Any:
        from agentscope.tool import DirEntry

        names = self._inside(path)
        if names is None:
            return None
        name = posixpath.basename(self._text(names))
        item = await self._item(names) if len(names) > len(self._under) else None
        if item is not None:
            return DirEntry(name, is_dir=False, size_bytes=len(content_of(item.value)), mtime=float(item.number))
        return DirEntry(name, is_dir=True) if await self.is_dir(path) else None

    async def stat_mtime(self, path: str) -> float | None:
        """The number of the file's content; None for what is no file."""
        names = self._inside(path)
        item = None if names is None or len(names) == len(self._under) else await self._item(names)
        return None if item is None else float(item.number)

    async def matching(self, pattern: str, base: str) -> list[str]:
        """Paths of the files under a directory that match a pattern like `src/**/*.py`, the newest first."""
        names = self._path(base)
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        found = [
            (entry.number, self._text((*entry.namespace, entry.key)))
            for entry in await self._under_path(base)
            if matches(parts, (*entry.namespace, entry.key)[len(names) :])
        ]
        return [path for _, path in sorted(found, reverse=True)]

    async def delete_path(self, path: str) -> None:
        """A file, or everything in a directory; nothing when there is neither."""
        names = self._inside(path)
        if names is None:
            return
        with _refusing():
            if len(names) > len(self._under) and await self._store.delete(names[:-1], names[-1]):
                return
            for entry in await self._under_path(path):
                _ = await self._store.delete(entry.namespace, entry.key)


def matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the names of a path match the parts of a pattern: `**` any number of them, `*` and `?` within one."""
    # What is matched so far may end at several places: those where the rest of the pattern may begin.
    reached = {0}
    for part in parts:
        if part == "**":
            reached = set(range(min(reached), len(names) + 1)) if reached else reached
        else:
            # As AgentScope has it, a bracket is a bracket.
            plain = part.replace("[", "[[]")
            reached = {i + 1 for i in reached if i < len(names) and fnmatch.fnmatchcase(names[i], plain)}
    return len(names) in reached


# ------------------------------------------------------------ contents


def value_of(data: bytes) -> dict[str, str]:
    """A file's content as JSON."""
    try:
        return {TEXT: data.decode()}
    except UnicodeDecodeError:
        return {BASE64: base64.b64encode(data).decode()}


def content_of(value: Any) -> bytes:
    """The bytes of a file; a value that was not written as one is given as its JSON."""
    match value:
        case {"text": str() as text, **rest} if not rest:
            return text.encode()
        case {"base64": str() as encoded, **rest} if not rest:
            try:
                return base64.b64decode(encoded, validate=True)
            except binascii.Error:
                return msgspec.json.encode(value)
        case _:
            return msgspec.json.encode(value)


@contextmanager
def _refusing() -> Generator[None]:
    """What the workspace refuses has had no effect: said in the way that makes the call's outcome certain (Rule 4)."""
    try:
        yield
    except DurableError as error:
        raise ToolError(str(error)) from error


# ------------------------------------------------------------ what AgentScope knows


@cache
def _backend_class() -> Any:
    from agentscope.tool import BackendBase

    return type("RemoteFilesystem", (RemoteFilesystem, BackendBase), {"__module__": __name__})


@cache
def _tool_classes() -> tuple[Any, ...]:
    from agentscope.message import TextBlock, ToolResultState
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import Edit, Glob, Read, ToolChunk, Write

    class Checked:
        """AgentScope asks the machine's own disk about a path before it asks a person, and the disk raises for one that
        no disk can have. Such a path is denied with its reason: the agent goes on, and nobody is asked."""

        async def check_permissions(self, tool_input: dict[str, Any], context: Any) -> Any:
            refused = _no_path(tool_input)
            if refused is not None:
                return PermissionDecision(behavior=PermissionBehavior.DENY, message=refused)
            return await super().check_permissions(tool_input, context)  # pyright: ignore[reportAttributeAccessIssue]

        async def match_rule(self, rule_content: Any, tool_input: dict[str, Any]) -> bool:
            if _no_path(tool_input) is not None:
                return False
            return await super().match_rule(rule_content, tool_input)  # pyright: ignore[reportAttributeAccessIssue]

    class DurableGlob(Glob):
        """Finds durable files by their paths; the newest first."""

        def __init__(self, backend: Any) -> None:
            super().__init__(backend=backend)
            self._files: RemoteFilesystem = backend

        async def call(
            self, pattern: str, path: str | None = None, head_limit: int | None = None, offset: int = 0
        ) -> Any:
            base = path or self._files.root
            if not await self._files.is_dir(base):
                text = f"Directory not found: {base}"
                return ToolChunk(content=[TextBlock(text=text)], state=ToolResultState.ERROR, is_last=True)
            found = await self._files.matching(pattern, base)
            limit = GLOB_PATHS if head_limit is None else head_limit
            shown = found[offset:][: limit or None]
            text = "\n".join(shown) if shown else f"No files found matching pattern: {pattern}"
            if len(found) > offset + len(shown):
                text += f"\n\n[{len(found)} files match; these are {len(shown)} of them, from number {offset}]"
            return ToolChunk(content=[TextBlock(text=text)], state=ToolResultState.RUNNING, is_last=True)

    def replayed(tool: Any) -> Any:
        # All it does is in the workspace, which is committed with its result or not at all.
        return type(tool.__name__, (Checked, tool), {REPLAY_RULE: ReplayRule.SAFE})

    return replayed(Read), replayed(Write), replayed(Edit), replayed(DurableGlob)


def _no_path(tool_input: dict[str, Any]) -> str | None:
    """Why what a call names could be no file on any disk; None if it could be one."""
    path = tool_input.get("file_path") or tool_input.get("path")
    found = _ON_NO_DISK.search(path) if isinstance(path, str) else None
    if found is None:
        return None
    return f"a path must not contain U+{ord(found.group()):04X} (character {found.start()})"
