"""The workspace of a Thread in its agent's hands: what is written when, what a cut leaves of it, and who sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("agentscope")

from agentscope_durable.adapters.agentscope import AgentBuilder, DurableWorkspace
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import questions as q
from agentscope_durable.contracts.errors import (
    EntryBusy,
    EntryConflict,
    InvalidCursor,
    InvalidRequest,
    LimitExceeded,
    Misuse,
    TooLarge,
)
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import Audience
from agentscope_durable.contracts.workspace import ENTRIES_MAX, ENTRY_BYTES_MAX
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.scripted_model import Call, by_round
from tests.adapters.agentscope.agents import Agents, tool
from tests.adapters.agentscope.stage import Stage
from tests.every_store import STORES, shelf

NS = ["notes"]
Body = Callable[[DurableWorkspace], Any]


@pytest.fixture(params=STORES)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[TransactionalSessionBackend]:
    async with shelf(request.param, tmp_path) as place:
        yield await place.backend(wakeups=None)


class Writers(Agents):
    """An agent whose tools are given the workspace of their Run.

    Args:
        bodies: what each tool does with the workspace, by its name.
        safe: names of those that may be run again.
    """

    def __init__(self, folder: Path, script: Any, *, safe: tuple[str, ...] = (), **bodies: Body) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, script, adapter={"replay_rules": dict.fromkeys(safe, "safe")})
        self.bodies = bodies
        self.seen: list[Any] = []
        self.workspaces: list[DurableWorkspace] = []
        self.middlewares: list[Any] = []
        self.concurrent = False

    def describe(self, binding: Any) -> AgentBuilder:
        from agentscope.tool import Toolkit

        workspace = binding.workspace()
        self.workspaces.append(workspace)

        def made(name: str, body: Body) -> Any:
            async def run() -> str:
                self.ledger.append(name)
                self.seen.append(await body(workspace))
                return "done"

            run.__name__ = name
            return tool(run, is_concurrency_safe=self.concurrent)

        described = super().describe(binding)
        described.arguments["toolkit"] = Toolkit(tools=[made(name, body) for name, body in self.bodies.items()])
        described.arguments["middlewares"] = list(self.middlewares)
        return described


async def value(stage: Stage, key: str, namespace: tuple[str, ...] = tuple(NS)) -> tuple[Any, int] | None:
    """What is committed: the value, and its version."""
    view = await stage.ask(q.GetEntry(session=stage.session, thread_id=stage.thread_id, path=(*namespace, key)))
    return None if view is None else (await stage.open_body(view.content), view.version)


async def played(stage: Stage, request_id: str = "r1") -> str:
    return (await stage.play(await stage.submit(request_id, "go"))).status


def calling(*names: str) -> Any:
    return by_round([Call(name, {}, id=f"{name}-{number}") for number, name in enumerate(names)], "done")


# ------------------------------------------------------------ the five


@pytest.mark.spec("WS-01")
async def test_get_search_put_cas_and_delete(tmp_path: Path, backend: TransactionalSessionBackend) -> None:
    async def work(ws: DurableWorkspace) -> None:
        assert await ws.get(NS, "a") is None
        assert await ws.put(NS, "a", {"n": 1}) == 1
        assert await ws.put(NS, "a", {"n": 2}) == 2
        item = await ws.get(NS, "a")
        assert item is not None and (item.value, item.version, item.namespace, item.key) == (
            {"n": 2},
            2,
            ("notes",),
            "a",
        )
        item.value["n"] = 99
        assert (await ws.get(NS, "a")).value == {"n": 2}, "a value is the caller's own"  # type: ignore[union-attr]
        with pytest.raises(EntryConflict) as caught:
            await ws.cas(NS, "a", {"n": 3}, expected_version=1)
        assert (caught.value.expected, caught.value.actual) == (1, 2)
        assert await ws.cas(NS, "a", {"n": 3}, expected_version=2) == 3
        assert await ws.cas(NS, "new", [1], expected_version=0) == 1
        with pytest.raises(EntryConflict):
            await ws.cas(NS, "new", [2], expected_version=0)
        await ws.put([*NS, "deeper"], "b", "text")
        page = await ws.search(NS)
        assert [(one.namespace, one.key, one.value) for one in page] == [
            (("notes",), "a", {"n": 3}),
            (("notes", "deeper"), "b", "text"),
            (("notes",), "new", [1]),
        ]
        assert page.cursor is None
        with pytest.raises(EntryConflict):
            await ws.delete(NS, "a", expected_version=1)
        assert await ws.delete(NS, "a", expected_version=3) is True
        assert await ws.delete(NS, "a") is False
        assert await ws.put(NS, "a", {"n": 4}) == 4, "a version does not come back"

    for safe in ((), ("work",)):
        # Both ways of writing: at once, and held back for the result.
        agents = Writers(tmp_path / f"{len(safe)}", calling("work"), safe=safe, work=work)
        stage = await agents.stage(backend=backend, session=SessionKey("app", f"s{len(safe)}"))
        assert await played(stage) == "COMPLETED"
        assert stage.errors == []
        assert len(agents.seen) == 1, "what is asserted in the tool held"
        assert await value(stage, "a") == ({"n": 4}, 4)


@pytest.mark.spec("WS-01")
async def test_a_search_is_paged_over_what_is_committed_and_what_is_not(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    async def fill(ws: DurableWorkspace) -> None:
        for number in range(0, 30, 2):
            await ws.put(NS, f"{number:02d}", number)

    async def mix(ws: DurableWorkspace) -> list[Any]:
        for number in range(1, 30, 2):
            await ws.put(NS, f"{number:02d}", number)
        await ws.delete(NS, "04")
        await ws.put(NS, "06", "six")
        found: list[Any] = []
        cursor = None
        while True:
            page = await ws.search(NS, cursor=cursor, limit=7)
            assert len(page.items) <= 7
            found += [(item.key, item.value) for item in page]
            cursor = page.cursor
            if cursor is None:
                return found

    agents = Writers(tmp_path, calling("fill", "mix"), safe=("mix",), fill=fill, mix=mix)
    stage = await agents.stage(backend=backend)
    assert await played(stage) == "COMPLETED"
    expected = [(f"{n:02d}", "six" if n == 6 else n) for n in range(30) if n != 4]
    assert agents.seen[-1] == expected


@pytest.mark.spec("WS-04")
async def test_two_sessions_have_values_of_their_own_under_one_key(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    for name in ("one", "two"):

        async def write(ws: DurableWorkspace, name: str = name) -> Any:
            before = await ws.get(NS, "a")
            await ws.put(NS, "a", name)
            return before

        agents = Writers(tmp_path / name, calling("write"), write=write)
        stage = await agents.stage(backend=backend, session=SessionKey("app", name))
        assert await played(stage) == "COMPLETED"
        assert agents.seen == [None]
        assert await value(stage, "a") == (name, 1)


class Wire:
    """The door and nothing behind it: what goes through is JSON, as between two machines."""

    def __init__(self, backend: TransactionalSessionBackend) -> None:
        self._backend = backend
        self.asked: set[str] = set()

    @property
    def records(self) -> Any:
        """For the stage, which plays the world."""
        return self._backend.records

    async def execute(self, command: Any, *, audience: Audience = Audience.PUBLIC) -> Any:
        return _sent(await self._backend.execute(_sent(command), audience=audience))

    async def query(self, question: Any, *, audience: Audience = Audience.PUBLIC) -> Any:
        self.asked.add(type(question).__name__)
        answer = await self._backend.query(_sent(question), audience=audience)
        return tuple(map(_sent, answer)) if type(answer) is tuple else _sent(answer)

    async def put_body(self, session: SessionKey, content: bytes) -> Any:
        return _sent(await self._backend.put_body(session, content))

    async def open_body(self, session: SessionKey, body: Any) -> bytes:
        return await self._backend.open_body(session, _sent(body))


def _sent(value: Any) -> Any:
    workspace = type(value).__name__ in (
        "GetEntry",
        "ListEntries",
        "GetWorkspace",
        "EntryView",
        "WorkspaceView",
        "Body",
    )
    if workspace or type(value) is c.CommitStep:
        return msgspec.json.decode(msgspec.json.encode(value), type=type(value))
    return value


@pytest.mark.spec("WS-02")
async def test_a_host_needs_the_door_and_no_database(tmp_path: Path, backend: TransactionalSessionBackend) -> None:
    async def work(ws: DurableWorkspace) -> Any:
        await ws.put(NS, "a", {"large": "x" * 100_000})
        await ws.cas(NS, "b", 1, expected_version=0)
        await ws.put(NS, "b", 2)
        await ws.delete(NS, "c")
        return [(item.key, item.version) for item in await ws.search(NS)], await ws.get(NS, "a")

    wire: Any = Wire(backend)
    agents = Writers(tmp_path, calling("work"), work=work)
    stage = await agents.stage(backend=wire)
    assert await played(stage) == "COMPLETED"
    ((listed, item),) = agents.seen
    assert listed == [("a", 1), ("b", 2)] and item.value == {"large": "x" * 100_000}
    assert {"GetEntry", "ListEntries", "GetWorkspace"} <= wire.asked


# ------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("namespace", "key"),
    [
        ("notes", "a"), (["notes"], ""), (["notes"], ".."), ([".."], "a"), (["a", "."], "b"), (["a\x00"], "b"),
        (["notes"], "a\nb"), (["notes"], "x" * 257), (["n"] * 33, "a"), ([1], "a"), (["notes"], 7), ({"notes"}, "a"),
    ],
)  # fmt: skip
async def test_a_name_that_is_none_is_refused(tmp_path: Path, namespace: Any, key: Any) -> None:
    async def work(ws: DurableWorkspace) -> None:
        for asked in (
            ws.get,
            ws.delete,
            lambda n, k: ws.put(n, k, 1),
            lambda n, k: ws.cas(n, k, 1, expected_version=0),
        ):
            with pytest.raises(InvalidRequest):
                await asked(namespace, key)

    agents = Writers(tmp_path, calling("work"), work=work)
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert agents.seen == [None]
    assert (await stage.ask(q.GetWorkspace(session=stage.session, thread_id="main"))).entries == 0


async def test_what_is_no_value_no_version_and_no_cursor_is_refused(tmp_path: Path) -> None:
    async def work(ws: DurableWorkspace) -> None:
        for value in (object(), float("nan"), 2**60, {"a": {1, 2}}, "\ud800"):
            with pytest.raises(InvalidRequest):
                await ws.put(NS, "a", value)
        for version in (-1, None, True, "1"):
            with pytest.raises(InvalidRequest):
                await ws.cas(NS, "a", 1, expected_version=version)  # type: ignore[arg-type]
        for cursor in ("", "x", "bm90IGpzb24=", "WyIuLiJd"):
            with pytest.raises(InvalidCursor):
                await ws.search(NS, cursor=cursor)
        for limit in (0, 1001, True, "5"):
            with pytest.raises(InvalidRequest):
                await ws.search(NS, limit=limit)  # type: ignore[arg-type]
        for namespace in (["one"], ["two"]):
            for key in "ab":
                await ws.put(namespace, key, 1)
        further = (await ws.entries(["one"], limit=1)).cursor
        assert [entry.key for entry in await ws.entries(["one"], cursor=further)] == ["b"]
        with pytest.raises(InvalidCursor, match="another namespace"):
            await ws.entries(["two"], cursor=further)
        with pytest.raises(TooLarge) as caught:
            await ws.put(NS, "a", "x" * ENTRY_BYTES_MAX)
        assert caught.value.limit_bytes == ENTRY_BYTES_MAX

    agents = Writers(tmp_path, calling("work"), work=work)
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert agents.seen == [None]


@pytest.mark.parametrize("safe", [(), ("work",)])
async def test_a_full_workspace_says_so_and_takes_more_when_something_is_gone(tmp_path: Path, safe: Any) -> None:
    async def work(ws: DurableWorkspace) -> None:
        with pytest.raises(LimitExceeded) as caught:
            await ws.put(NS, "one more", 1)
        assert caught.value.limit == ENTRIES_MAX
        await ws.put(["full"], "0", "changed")
        await ws.delete(["full"], "1")
        await ws.put(NS, "one more", 1)

    async def fill(ws: DurableWorkspace) -> None:
        for number in range(ENTRIES_MAX):
            await ws.put(["full"], str(number), number)

    agents = Writers(tmp_path, calling("fill", "work"), safe=(*safe, "fill"), fill=fill, work=work)
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert agents.seen == [None, None]
    assert await value(stage, "one more") is not None


async def test_a_workspace_of_a_run_that_is_over_is_not_used_again(tmp_path: Path) -> None:
    async def work(ws: DurableWorkspace) -> None:
        await ws.put(NS, "a", 1)

    agents = Writers(tmp_path, calling("work"), work=work)
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    (workspace,) = agents.workspaces
    for use in (workspace.get(NS, "a"), workspace.put(NS, "a", 2), workspace.search(NS), workspace.delete(NS, "a")):
        with pytest.raises(Misuse, match="over"):
            await use


# ------------------------------------------------------------ what is true when


@pytest.mark.spec("WS-07")
async def test_a_tool_that_is_not_run_again_writes_at_once_and_a_safe_one_with_its_result(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    stages: list[Stage] = []

    async def write(ws: DurableWorkspace) -> Any:
        await ws.put(NS, "a", "written")
        return await value(stages[0], "a"), (await ws.get(NS, "a")).value  # type: ignore[union-attr]

    for safe, committed in (((), ("written", 1)), (("write",), None)):
        agents = Writers(tmp_path / str(len(safe)), calling("write"), safe=safe, write=write)
        stage = await agents.stage(backend=backend, session=SessionKey("app", f"s{len(safe)}"))
        stages[:] = [stage]
        assert await played(stage) == "COMPLETED"
        assert agents.seen == [(committed, "written")], "committed, and seen by the tool itself"
        assert await value(stage, "a") == ("written", 1)


@pytest.mark.spec("WS-07")
async def test_what_a_safe_tool_wrote_and_its_result_are_one_commit(tmp_path: Path) -> None:
    async def write(ws: DurableWorkspace) -> None:
        await ws.put(NS, "a", "x" * 100_000)
        await ws.put(NS, "b", 1)

    agents = Writers(tmp_path, calling("write"), safe=("write",), write=write)
    steps: list[c.CommitStep] = []
    stage = await agents.stage(
        backend=TransactionalSessionBackend(MemoryRecordStore(), MemoryObjectStore()),
        on_commit=lambda _n, side, step: steps.append(step) if side == "after" else None,
    )
    assert await played(stage) == "COMPLETED"
    (written,) = [step for step in steps if step.workspace]
    assert [(tool.call_id, tool.state) for tool in written.tools] == [("write-0", "COMPLETED")]
    assert [entry.path for entry in written.workspace] == [("notes", "a"), ("notes", "b")]
    assert [entry.content is not None and entry.content.is_reference for entry in written.workspace] == [True, False]
    assert await value(stage, "a") == ("x" * 100_000, 1)


@pytest.mark.parametrize("how", ["raises", "cancelled inside"])
async def test_what_a_safe_tool_wrote_before_it_broke_is_not_there(tmp_path: Path, how: str) -> None:
    async def write(ws: DurableWorkspace) -> None:
        await ws.put(NS, "a", "half")
        raise ValueError("a defect") if how == "raises" else asyncio.CancelledError

    agents = Writers(tmp_path, calling("write"), safe=("write",), write=write)
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert await value(stage, "a") is None


async def test_a_failure_that_a_tool_itself_reports_leaves_what_it_wrote(tmp_path: Path) -> None:
    from agentscope_durable.adapters.agentscope import ToolError

    async def write(ws: DurableWorkspace) -> None:
        await ws.put(NS, "log", "tried")
        raise ToolError("no such customer")

    agents = Writers(tmp_path, calling("write"), safe=("write",), write=write)
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert await value(stage, "log") == ("tried", 1)


async def test_calls_that_run_together_do_not_write_the_same_entry(tmp_path: Path) -> None:
    both = asyncio.Barrier(2)

    async def first(ws: DurableWorkspace) -> None:
        await ws.put(NS, "a", "first")
        await both.wait()
        await both.wait()

    async def second(ws: DurableWorkspace) -> Any:
        await both.wait()
        with pytest.raises(EntryBusy) as caught:
            await ws.put(NS, "a", "second")
        unseen = await ws.get(NS, "a")
        await ws.put(NS, "b", "second")
        await both.wait()
        return caught.value.call_id, unseen

    agents = Writers(tmp_path, calling("first", "second"), safe=("first", "second"), first=first, second=second)
    agents.concurrent = True
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert ("first-0", None) in agents.seen
    assert (await value(stage, "a"), await value(stage, "b")) == (("first", 1), ("second", 1))


async def test_calls_that_run_together_and_write_at_once_take_turns(tmp_path: Path) -> None:
    async def count(ws: DurableWorkspace) -> None:
        while True:
            item = await ws.get(NS, "n")
            try:
                await ws.cas(
                    NS, "n", 1 if item is None else item.value + 1, expected_version=0 if item is None else item.version
                )
            except EntryConflict:
                continue
            return

    names = [f"count{number}" for number in range(8)]
    agents = Writers(tmp_path, calling(*names), **dict.fromkeys(names, count))
    agents.concurrent = True
    stage = await agents.stage()
    assert await played(stage) == "COMPLETED"
    assert await value(stage, "n") == (8, 8)


# ------------------------------------------------------------ owners


@pytest.mark.spec("WS-06")
@pytest.mark.parametrize("safe", [(), ("write",)])
async def test_a_host_that_lost_the_thread_writes_nothing(tmp_path: Path, safe: Any) -> None:
    stages: list[Stage] = []

    async def write(ws: DurableWorkspace) -> None:
        # This host's lease has expired, and another one claims the Thread.
        claimed = await stages[0].claim()
        assert claimed.lost_run
        await ws.put(NS, "a", "stale")

    agents = Writers(tmp_path, calling("write"), safe=safe, write=write)
    stage = await agents.stage()
    stages.append(stage)
    turn = await stage.submit("r1", "go")
    await stage.step()
    assert await value(stage, "a") is None
    assert (await stage.view(turn)).status == "RUNNING", "the other host has it"
