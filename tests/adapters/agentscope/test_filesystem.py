"""Durable files in the hands of AgentScope's own tools, and what is not done on them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.tool import BackendBase, Bash, Toolkit, Write

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter, RemoteFilesystem, ToolError
from agentscope_durable.adapters.agentscope.filesystem import content_of, matches, value_of
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import InvalidRequest
from agentscope_durable.contracts.status import ExecutionState
from agentscope_durable.contracts.workspace import ENTRY_BYTES_MAX
from agentscope_durable.testing.scripted_model import Call, EffectLedger, by_round, rounds_so_far, scripted_model
from tests.adapters.agentscope.agents import tool
from tests.adapters.agentscope.scenarios import bypass
from tests.adapters.agentscope.stage import Stage, opened
from tests.every_store import STORES, shelf

ROOT = "/workspace"


@pytest.fixture(params=STORES)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[TransactionalSessionBackend]:
    async with shelf(request.param, tmp_path) as place:
        yield await place.backend(wakeups=None)


class Desk:
    """An agent that has durable files and no other tools, and a tool for what a test wants to look at."""

    def __init__(self, folder: Path, *rounds: Any, look: Any = None, tools: Any = None) -> None:
        self.ledger = EffectLedger(folder / "ledger")
        self.script = by_round(*rounds, "done")
        self.look = look
        self.tools = tools
        self.seen: list[Any] = []

    def describe(self, binding: Any) -> AgentBuilder:
        files = RemoteFilesystem(binding.workspace(), ["workspace"])
        tools = files.tools() if self.tools is None else self.tools(files)
        if self.look is not None:

            async def look() -> str:
                self.seen.append(await self.look(files))
                return "looked"

            tools.append(tool(look, is_read_only=True))
        model = scripted_model(self.script, ledger=self.ledger)
        return AgentBuilder(name="a", system_prompt="sys", model=model, toolkit=Toolkit(tools=tools), state=bypass())

    async def stage(self, **options: Any) -> Stage:
        return await opened(lambda: AgentScopeAdapter.for_react(self.describe), **options)


async def play(stage: Stage, request_id: str = "r1") -> list[tuple[str, str]]:
    """What each tool call came to, and what the agent was told."""
    view = await stage.play(await stage.submit(request_id, "go"))
    assert view.status == "COMPLETED" and stage.errors == []
    return [
        (str(block.state), block.output if isinstance(block.output, str) else "".join(o.text for o in block.output))
        for message in (await stage.state()).context
        for block in message.content
        if block.type == "tool_result"
    ]


# ------------------------------------------------------------ the agent's tools


@pytest.mark.spec("WS-03")
async def test_the_agents_own_tools_work_on_durable_files_over_turns_and_hosts(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    path = {"file_path": f"{ROOT}/src/a.py"}
    first = Desk(
        tmp_path,
        Call("Write", {**path, "content": "a = 1\n"}, id="w"),
        Call("Glob", {"pattern": "**/*.py"}, id="g"),
        Call("Read", path, id="r"),
    )
    stage = await first.stage(backend=backend)
    told = await play(stage)
    assert [state for state, _ in told] == ["success"] * 3
    assert told[1][1] == f"{ROOT}/src/a.py" and "a = 1" in told[2][1]

    # Another host, which has the store and nothing else.
    stage.name = "other"
    second = Desk(
        tmp_path,
        Call("Write", {**path, "content": "a = 1\n"}, id="w"),
        Call("Glob", {"pattern": "**/*.py"}, id="g"),
        Call("Read", path, id="r"),
        "done",
        Call("Edit", {**path, "old_string": "a = 1", "new_string": "a = 2"}, id="e"),
    )
    stage.make_adapter = lambda: AgentScopeAdapter.for_react(second.describe)
    told = await play(stage, "r2")
    assert told[-1] == ("success", f"Successfully replaced 1 occurrence in {ROOT}/src/a.py"), "read before, still known"
    assert await stage.files() == {"workspace/src/a.py": [{"text": "a = 2\n"}, 2]}


@pytest.mark.spec("AS-02", "WS-03")
async def test_durable_files_are_the_workspace_of_a_harness_agent(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    prompts: list[str] = []

    def script(messages: Any, tools: Any, choice: Any, n: int) -> Any:
        prompts.append(str(messages[0].content))
        names = {one["function"]["name"] for one in tools}
        assert {"Read", "Write", "Edit", "Glob"} <= names and "Bash" not in names
        return (
            "done"
            if rounds_so_far(messages)
            else Call("Write", {"file_path": f"{ROOT}/README.md", "content": "hello"}, id="w")
        )

    def make_agent(binding: Any) -> AgentBuilder:
        model = scripted_model(script, ledger=EffectLedger(tmp_path / "ledger"))
        files = RemoteFilesystem(binding.workspace(), ["workspace"])
        return AgentBuilder(name="a", system_prompt="sys", model=model, workspace=files, state=bypass())

    stage = await opened(lambda: AgentScopeAdapter.for_harness(make_agent), backend=backend)
    assert [state for state, _ in await play(stage)] == ["success"]
    assert f"durable files under {ROOT}" in prompts[0]
    assert await stage.files() == {"workspace/README.md": [{"text": "hello"}, 1]}


async def test_a_call_of_a_file_tool_is_recorded_as_safe_and_one_made_by_hand_is_not(tmp_path: Path) -> None:
    path = {"file_path": f"{ROOT}/a", "content": "x"}
    for made, rule in ((None, "safe"), (lambda files: [Write(backend=files)], "never")):
        folder = tmp_path / rule
        folder.mkdir()
        desk = Desk(folder, Call("Write", path, id="w"), tools=made)
        rules: list[Any] = []

        def look(_number: int, side: str, step: Any, rules: list[Any] = rules) -> None:
            rules.extend(t.rule for t in step.tools if side == "after" and t.state is ExecutionState.RUNNING)

        stage = await desk.stage(on_commit=look)
        assert [state for state, _ in await play(stage)] == ["success"]
        assert rules == [rule]
        assert await stage.files() == {"workspace/a": [{"text": "x"}, 1]}


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/etc/passwd", "outside /workspace"),
        ("/workspace/../etc/passwd", r"\"\.\.\"|outside|paths"),
        ("/workspace/a\x07b", "control character"),
        ("/workspacex/a", "outside /workspace"),
        ("/workspace", "read the file first"),
        ("/workspace/" + "n/" * 40 + "x", "names"),
        ("/workspace/" + "x" * 300, "characters"),
        ("/workspace/dir", "read the file first"),
        ("/workspace/dir/file/deeper", "is a file"),
    ],
)
async def test_a_path_that_is_no_file_here_is_refused_and_the_agent_is_told_why(
    tmp_path: Path, path: str, says: str
) -> None:
    import re

    desk = Desk(
        tmp_path,
        Call("Write", {"file_path": f"{ROOT}/dir/file", "content": "x"}, id="w1"),
        Call("Write", {"file_path": path, "content": "x"}, id="w2"),
        Call("Read", {"file_path": path}, id="r"),
    )
    stage = await desk.stage()
    told = await play(stage)
    assert told[1][0] == "error" and re.search(says, told[1][1]), told[1]
    assert told[2][0] == "error"
    assert list(await stage.files()) == ["workspace/dir/file"]


@pytest.mark.parametrize("character", ["\0", "\ud800"])
async def test_a_path_that_no_disk_can_have_is_denied_and_the_turn_goes_on(tmp_path: Path, character: str) -> None:
    """AgentScope's permission check asks the machine's disk, which raises for it."""
    path = f"{ROOT}/a{character}b"
    desk = Desk(
        tmp_path,
        Call("Write", {"file_path": path, "content": "x"}, id="w"),
        Call("Read", {"file_path": path}, id="r"),
        Call("Glob", {"pattern": "*", "path": path}, id="g"),
        Call("Edit", {"file_path": path, "old_string": "x", "new_string": "y"}, id="e"),
    )
    stage = await desk.stage()

    told = await play(stage)

    # What only looks is not asked about, and finds nothing.
    assert [state for state, _ in told] == ["denied", "error", "error", "denied"], told
    assert all(f"U+{ord(character):04X}" in told[number][1] for number in (0, 3)), told
    assert await stage.files() == {}


async def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    async def look(files: RemoteFilesystem) -> None:
        with pytest.raises(ToolError, match=str(ENTRY_BYTES_MAX)):
            await files.write_file(f"{ROOT}/large", b"x" * ENTRY_BYTES_MAX)

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 1_000_000

        with pytest.raises(ToolError, match=str(ENTRY_BYTES_MAX)):
            await files.write_stream(f"{ROOT}/large", endless())

    desk = Desk(tmp_path, Call("look", {}, id="l"), look=look)
    stage = await desk.stage()
    assert [state for state, _ in await play(stage)] == ["success"]
    assert desk.seen == [None] and await stage.files() == {}


async def test_a_command_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    desk = Desk(
        tmp_path, Call("Bash", {"command": "rm -rf /", "description": "d"}, id="b"), tools=lambda f: [Bash(backend=f)]
    )
    stage = await desk.stage()
    ((state, text),) = await play(stage)
    assert state == "error"
    assert "run no commands" in text and "Read, Write, Edit and Glob" in text and "route" in text
    (call,) = await stage.tools((await stage.turns())[0].turn_id)
    assert call.state == "COMPLETED", "nothing was run, and that is known"


def test_a_root_is_a_list_of_names() -> None:
    for namespace in ("workspace", ["a/b"], [".."], ["\n"], [7]):
        with pytest.raises(InvalidRequest):
            RemoteFilesystem(None, namespace)  # type: ignore[arg-type]
    assert RemoteFilesystem(None, []).root == "/"  # type: ignore[arg-type]
    assert isinstance(RemoteFilesystem(None), BackendBase)  # type: ignore[arg-type]


# ------------------------------------------------------------ as a backend


async def test_it_is_a_backend_as_agentscope_asks_for_one(tmp_path: Path, backend: TransactionalSessionBackend) -> None:
    async def look(files: RemoteFilesystem) -> None:
        assert await files.getcwd() == ROOT and await files.expanduser("~/x") == f"{ROOT}/x"
        assert await files.is_dir(ROOT) and not await files.file_exists(f"{ROOT}/a")
        await files.write_file(f"{ROOT}/a/b.txt", "zwölf\r\n".encode())
        await files.write_file(f"{ROOT}/a/c/d.bin", b"\xff\x00")
        await files.write_file(f"{ROOT}/e", b"")
        assert await files.read_file(f"{ROOT}//a/./b.txt") == "zwölf\r\n".encode()
        assert await files.read_file(f"{ROOT}/a/c/d.bin") == b"\xff\x00"
        assert b"".join([chunk async for chunk in files.read_stream(f"{ROOT}/a/b.txt", 2)]) == "zwölf\r\n".encode()  # type: ignore[attr-defined]
        assert await files.list_dir(ROOT) == ["a", "e"] and await files.list_dir(f"{ROOT}/a") == ["b.txt", "c"]
        assert await files.list_dir(ROOT, recursive=True) == [f"{ROOT}/a/b.txt", f"{ROOT}/a/c/d.bin", f"{ROOT}/e"]
        assert [(one.name, one.is_dir) for one in await files.scandir(f"{ROOT}/a")] == [("b.txt", False), ("c", True)]
        assert await files.is_dir(f"{ROOT}/a/c") and not await files.is_dir(f"{ROOT}/e")
        stat = await files.stat(f"{ROOT}/a/b.txt")
        assert (stat.name, stat.is_dir, stat.size_bytes) == ("b.txt", False, 8)
        before = await files.stat_mtime(f"{ROOT}/e")
        await files.write_file(f"{ROOT}/e", b"")
        after = await files.stat_mtime(f"{ROOT}/e")
        assert before is not None and after is not None and before < after
        assert await files.stat_mtime(ROOT) is None and await files.stat(f"{ROOT}/none") is None
        for missing in (f"{ROOT}/none", "/etc/hosts", "relative", f"{ROOT}/../x"):
            assert not await files.file_exists(missing) and await files.list_dir(missing) == []
            with pytest.raises(FileNotFoundError):
                await files.read_file(missing)
            await files.delete_path(missing)
        with pytest.raises(IsADirectoryError):
            await files.read_file(f"{ROOT}/a")
        assert (await files.exec_shell(["mkdir", "-p", f"{ROOT}/x/y"])).ok()
        for command in (["mkdir", "-p", "/etc/x"], ["ls"], ["sh", "-c", "x"], ["mkdir", f"{ROOT}/x"]):
            with pytest.raises(ToolError):
                await files.exec_shell(command)
        await files.delete_path(f"{ROOT}/a")
        assert await files.list_dir(ROOT) == ["e"]

    desk = Desk(tmp_path, Call("look", {}, id="l"), look=look)
    stage = await desk.stage(backend=backend)
    told = await play(stage)
    assert desk.seen == [None], told
    assert list(await stage.files()) == ["workspace/e"]


def test_any_bytes_are_a_value_and_any_value_has_bytes() -> None:
    for data in (b"", b"plain", "zwölf \U0001f600\n\r\x00".encode(), b"\xff\xfe", bytes(range(256))):
        assert content_of(value_of(data)) == data
    assert content_of({"text": "a", "more": 1}) == b'{"text":"a","more":1}'
    assert content_of({"base64": "not base64!"}) == b'{"base64":"not base64!"}'
    assert content_of([1, "two"]) == b'[1,"two"]'


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("*.py", "a.py", True), ("*.py", "src/a.py", False), ("**/*.py", "a.py", True), ("**/*.py", "x/y/a.py", True),
        ("src/**", "src/a/b", True), ("src/**", "lib/a", False), ("s?c/*", "src/a", True), ("**", "a", True),
        ("a[1].txt", "a[1].txt", True), ("a[1].txt", "a1.txt", False), ("**/b/**/*.c", "a/b/x/y/z.c", True),
        ("**/b/**/*.c", "a/x/z.c", False), ("./a/*", "a/b", True), ("*.PY", "a.py", False), ("", "a", False),
    ],
)  # fmt: skip
def test_patterns_match_as_agentscopes_do(pattern: str, path: str, found: bool) -> None:
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    assert matches(parts, path.split("/")) is found
