"""An agent's files come back with its context, and go along into another Thread or Session."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter, RemoteFilesystem
from agentscope_durable.assembly import MemoryBackend
from agentscope_durable.contracts import keys
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.testing.scripted_model import Call, scripted_model
from tests.adapters.agentscope.agents import tool
from tests.adapters.agentscope.scenarios import bypass
from tests.every_store import STORES, shelf

KEY, OTHER = SessionKey("app", "one"), SessionKey("app", "two")
PATH = "/workspace/a.txt"


def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
    """The user says which tool to call: `Write text`, `Edit old new`, or `Large`."""
    asked = max(index for index, message in enumerate(messages) if message.role == "user")
    results = [block for message in messages[asked:] for block in message.content if block.type == "tool_result"]
    if results:
        return str(results[-1].output[0].text)
    what, *words = str(messages[asked].get_text_content()).split()
    arguments: dict[str, Any] = {"file_path": PATH}
    if what == "Write":
        arguments["content"] = words[0]
    elif what == "Large":
        what, arguments = "Write", {"file_path": "/workspace/large.txt", "content": words[0] * 70_000}
    elif what == "Edit":
        arguments |= {"old_string": words[0], "new_string": words[1]}
    return Call(what, arguments)


def make_agent(binding: Any) -> AgentBuilder:
    files = RemoteFilesystem(binding.workspace(), ["workspace"])
    model = scripted_model(script, chunk_chars=20_000)
    return AgentBuilder(name="a", system_prompt="sys", model=model, workspace=files, state=bypass())


@pytest.fixture(params=STORES)
async def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[DurableRuntime]:
    harness = Harness("assistant", "v1", AgentScopeAdapter.for_react(make_agent))
    async with shelf(request.param, tmp_path / "store") as place:
        backend = await place.backend()
        async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as made:
            await made.start()
            yield made


async def says(thread: Any, text: str) -> str:
    answer = await thread.call(f"{text[:40]}-{len((await thread.list_turns()).items)}", text, timeout=90)
    return answer.text


async def files(runtime: DurableRuntime, thread: ThreadKey) -> dict[str, tuple[Any, int]]:
    """Text and version of each file."""
    backend: Any = runtime._host.backend
    found: dict[str, tuple[Any, int]] = {}
    question = q.ListEntries(session=thread.session, thread_id=thread.thread_id)
    for listed in await backend.query(question, audience=Audience.HOST):
        entry = await backend.query(
            q.GetEntry(session=thread.session, thread_id=thread.thread_id, path=listed.path), audience=Audience.HOST
        )
        content = await backend.open_body(thread.session, entry.content)
        found["/".join(entry.path)] = (content.decode().removeprefix('{"text":"').removesuffix('"}'), entry.version)
    return found


async def numbers(runtime: DurableRuntime, thread: ThreadKey) -> int:
    """How far contents are counted."""
    backend: Any = runtime._host.backend
    question = q.GetWorkspace(session=thread.session, thread_id=thread.thread_id)
    return (await backend.query(question, audience=Audience.HOST)).numbers


async def positions(thread: Any) -> list[str]:
    return [checkpoint.position for checkpoint in await thread.checkpoints()]


@pytest.mark.spec("CK-07")
async def test_a_restore_brings_the_files_back_and_the_agent_edits_what_it_had_read(runtime: DurableRuntime) -> None:
    session = await runtime.create_session(KEY, "assistant")
    thread = session.main_thread()
    assert "written" in await says(thread, "Write one")
    assert "one" in await says(thread, "Read")
    await says(thread, "Edit one two")
    await says(thread, "Large x")
    written, read, edited, large = await positions(thread)

    await thread.restore(read, expected_position=large, request_id="back")
    assert await files(runtime, thread.key) == {"workspace/a.txt": ("one", 3)}
    assert "Successfully" in await says(thread, "Edit one three"), "what it had read then, it has read now"
    assert (await files(runtime, thread.key))["workspace/a.txt"] == ("three", 4)

    # And forward again: nothing was overwritten.
    await thread.restore(large, expected_position=(await positions(thread))[-1], request_id="forth")
    assert await files(runtime, thread.key) == {
        "workspace/a.txt": ("two", 5),
        "workspace/large.txt": ("x" * 70_000, 2),
    }
    await thread.restore(written, expected_position=(await positions(thread))[-1], request_id="back again")
    assert (await files(runtime, thread.key))["workspace/a.txt"][0] == "one"


@pytest.mark.spec("CK-07", "CK-16", "CK-17")
async def test_a_fork_takes_the_files_of_its_position_along_and_leaves_those_of_its_source(
    runtime: DurableRuntime, tmp_path: Path
) -> None:
    session = await runtime.create_session(KEY, "assistant")
    await runtime.create_session(OTHER, "assistant")
    thread = session.main_thread()
    await says(thread, "Write one")
    await says(thread, "Read")
    await says(thread, "Large x")
    await says(thread, "Edit one two")
    large = (await positions(thread))[2]
    before = await files(runtime, thread.key)

    for target in (ThreadKey(KEY, "branch"), ThreadKey(OTHER, "branch")):
        await thread.fork(large, target, request_id=f"fork-{target.session.session_id}")
        assert await files(runtime, target) == {
            "workspace/a.txt": ("one", 1),
            "workspace/large.txt": ("x" * 70_000, 1),
        }
        assert await numbers(runtime, target) == await numbers(runtime, thread.key), "no number stands for two contents"
        branch = runtime.get_session(target.session).get_thread("branch")
        assert "Successfully" in await says(branch, "Edit one branched")
        assert (await files(runtime, target))["workspace/a.txt"] == ("branched", 2)
    assert await files(runtime, thread.key) == before

    # The other Session needs nothing of the first one.
    objects = FileObjectStore(tmp_path / "store" / "objects")
    for digest in await objects.list(keys.partition(KEY)):
        await objects.delete(keys.partition(KEY), digest)
    branch = runtime.get_session(OTHER).get_thread("branch")
    assert "x" * 100 in (await files(runtime, ThreadKey(OTHER, "branch")))["workspace/large.txt"][0]
    await says(branch, "Read")
    assert "Successfully" in await says(branch, "Edit branched again")


@pytest.mark.spec("WS-05")
async def test_what_is_outside_the_store_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """A file in a mount stays as it is: a restore does not take it back, and a fork does not copy it."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def make(binding: Any) -> AgentBuilder:
        from agentscope.tool import Toolkit

        files = RemoteFilesystem(binding.workspace(), ["workspace"])

        async def publish() -> str:
            number = len(list(mount.iterdir())) + 1
            _ = (mount / f"{number}.txt").write_text("outside")
            await files.write_file(PATH, f"inside {number}".encode())
            return "published"

        model = scripted_model(lambda m, t, c, n: "done" if any_result(m) else Call("publish", {}))
        return AgentBuilder(name="a", system_prompt="sys", model=model, toolkit=Toolkit(tools=[tool(publish)]))

    backend = MemoryBackend()
    harness = Harness("assistant", "v1", AgentScopeAdapter.for_react(make))
    async with DurableRuntime(backend=backend, harnesses=[harness], poll_interval=0.05) as runtime:
        await runtime.start()
        thread = (await runtime.create_session(KEY, "assistant")).main_thread()
        for number in ("1", "2"):
            await thread.call(number, "go", timeout=90)
        first, second = await positions(thread)
        await thread.restore(first, expected_position=second, request_id="back")
        target = ThreadKey(KEY, "branch")
        await thread.fork(first, target, request_id="fork")

        assert sorted(path.name for path in mount.iterdir()) == ["1.txt", "2.txt"]
        assert await files(runtime, thread.key) == {"workspace/a.txt": ("inside 1", 3)}
        assert await files(runtime, target) == {"workspace/a.txt": ("inside 1", 1)}
    await backend.close()


def any_result(messages: list[Any]) -> bool:
    asked = max(index for index, message in enumerate(messages) if message.role == "user")
    return any(block.type == "tool_result" for message in messages[asked:] for block in message.content)
