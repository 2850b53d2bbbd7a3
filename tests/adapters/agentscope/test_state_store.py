"""A Thread begins with what a program of AgentScope 2.0 left behind, and its copy leads back to such a program."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agentscope")

from agentscope.agent import Agent
from agentscope.message import AssistantMsg, TextBlock, ToolCallBlock, UserMsg
from agentscope.state import AgentState

from agentscope_durable.adapters.agentscope import AGENT_STATE, AgentScopeAdapter, AppStateStore, mirror
from agentscope_durable.adapters.agentscope.mirror import Mirror
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import Incompatible, Misuse, NotFound, Unavailable
from agentscope_durable.contracts.journal import JournalEventType
from agentscope_durable.runtime.classify import retryable
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.records.sqlite import SqliteRecordStore
from agentscope_durable.testing.scripted_model import Call, by_round, scripted_model
from tests.adapters.agentscope.agents import Agents, tool
from tests.adapters.agentscope.scenarios import Mirrored, Slot
from tests.adapters.agentscope.stage import SESSION, Stage, check_transcript, texts
from tests.adapters.agentscope.test_crash_matrix import Forks
from tests.every_store import STORES, shelf


@pytest.fixture(params=STORES)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[TransactionalSessionBackend]:
    async with shelf(request.param, tmp_path) as place:
        yield TransactionalSessionBackend(await place.records())


class Kept:
    """A state store in memory that counts what it is asked."""

    def __init__(self, value: str | None = None) -> None:
        self.value = value
        self.gets = self.puts = 0
        self.fails: type[Exception] | None = None

    async def get(self, user_id: str, session_id: str, key: str = AGENT_STATE) -> str | None:
        assert (user_id, session_id, key) == ("app", "conversation", AGENT_STATE)
        self.gets += 1
        if self.fails is not None:
            raise self.fails("the secret of the store")
        return self.value

    async def put(self, user_id: str, session_id: str, key: str, value: str) -> None:
        self.puts += 1
        if self.fails is not None:
            raise self.fails("the secret of the store")
        self.value = value


def old_state(*more: Any) -> str:
    state = AgentState(session_id="conversation")
    state.context = [UserMsg("user", "what I said"), AssistantMsg("a", [TextBlock(text="what it said")]), *more]
    return state.model_dump_json()


def answers(messages: Any, tools: Any, choice: Any, n: int) -> str:
    return f"answer {n}"


async def entries(stage: Stage) -> list[str]:
    return [entry.type for _, batch in await stage.batches() for entry in batch.entries]


async def committed(stage: Stage) -> str:
    return (await stage.state()).model_dump_json()


# ------------------------------------------------------------ where a Thread begins


@pytest.mark.spec("AS-20", "AS-21")
async def test_an_empty_main_thread_begins_with_the_old_state_once(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    store = Kept(old_state())
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage(backend=backend)
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    kinds = await entries(stage)
    assert kinds[0] == JournalEventType.MIGRATION_BASELINE and kinds.count(JournalEventType.MIGRATION_BASELINE) == 1
    (at, first), *_ = await stage.batches()
    assert first.base and at == min(at for at, _ in await stage.batches())
    assert texts(await stage.state()) == ["what it said", "answer 0"]

    # Whatever stands there later is not taken in any more.
    store.value = old_state(UserMsg("user", "written by somebody else"))
    assert (await stage.play(await stage.submit("r2", "go"))).status == "COMPLETED"
    assert "somebody else" not in await committed(stage)
    assert (await entries(stage)).count(JournalEventType.MIGRATION_BASELINE) == 1


@pytest.mark.spec("AS-21")
async def test_an_old_state_in_the_middle_of_a_call_is_one_the_agent_can_go_on_with(tmp_path: Path) -> None:
    call = ToolCallBlock(id="c1", name="deploy", input="{}", state="pending")
    store = Kept(old_state(UserMsg("user", "deploy"), AssistantMsg("a", [call])))
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    check_transcript(await stage.state())
    assert store.value == await committed(stage)


@pytest.mark.spec("AS-21")
@pytest.mark.parametrize("value", ["not json", "{}x", '{"context": 7}'])
async def test_an_old_state_that_cannot_be_read_is_not_replaced_by_an_empty_one(tmp_path: Path, value: str) -> None:
    store = Kept(value)
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage()
    _ = await stage.submit("r1", "go")
    await stage.step()
    (error,) = stage.errors
    assert isinstance(error, Incompatible) and "'conversation' in the state store" in str(error)
    assert await stage.batches() == [] and store.value == value and agents.requests == 0


@pytest.mark.spec("AS-21")
@pytest.mark.parametrize("how", ["raises", "does not answer"])
async def test_a_state_store_that_is_away_keeps_the_turn_waiting(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Kept(old_state())
    if how == "raises":
        store.fails = ConnectionError
    else:
        monkeypatch.setattr(mirror, "STATE_STORE_SECONDS_MAX", 0.0)
        monkeypatch.setattr(store, "get", lambda *_: asyncio.get_running_loop().create_future())
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    await stage.step()
    assert isinstance(stage.errors[0], ConnectionError if how == "raises" else Unavailable)
    assert retryable(stage.errors[0]), "it is tried again later"
    assert await stage.batches() == [] and agents.requests == 0
    if how == "raises":
        store.fails = None
        assert (await stage.play(turn)).status == "COMPLETED"
        assert (await entries(stage))[0] == JournalEventType.MIGRATION_BASELINE


# ------------------------------------------------------------ the copy


@pytest.mark.spec("AS-23")
async def test_the_copy_is_written_once_for_each_turn_that_ends_and_never_ahead(
    tmp_path: Path, backend: TransactionalSessionBackend
) -> None:
    store = Kept()
    seen: list[str | None] = []

    async def act() -> str:
        return "done"

    agents = Agents(
        tmp_path,
        by_round(Call("act", {}, id="a1"), "done", Call("act", {}, id="a2"), "done again"),
        tools=lambda: [tool(act)],
        adapter={"state_store": store},
    )
    stage = await agents.stage(
        backend=backend, caching=True, on_commit=lambda _n, _side, _step: seen.append(store.value)
    )
    settled: list[str | None] = [None]
    for number in (1, 2):
        assert (await stage.play(await stage.submit(f"r{number}", "go"))).status == "COMPLETED"
        assert store.value == await committed(stage)
        assert store.puts == number
        settled.append(store.value)
    # At every commit what stood there was what had been settled before it.
    assert set(seen) == set(settled[:2]) and seen == sorted(seen, key=lambda value: settled.index(value))


@pytest.mark.spec("AS-23", "SE-04")
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_turn_that_is_settled_is_copied_as_well(tmp_path: Path, how: str) -> None:
    store = Kept()

    async def act() -> str:
        if how == "cancelled":
            await stage.cancel(turn)
        return "done"

    def script(messages: Any, tools: Any, choice: Any, n: int) -> Any:
        if n == 0:
            return Call("act", {}, id="a1")
        raise ValueError("a defect of the model")

    agents = Agents(tmp_path, script, tools=lambda: [tool(act)], adapter={"state_store": store})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == how.upper()
    assert store.value == await committed(stage)
    copied = AgentState.model_validate_json(store.value or "")
    check_transcript(copied)
    agent = Agent("a", "sys", scripted_model(["goes on"]), state=copied)
    assert (await agent.reply(UserMsg("user", "and now?"))).get_text_content() == "goes on"


@pytest.mark.spec("AS-31")
@pytest.mark.parametrize("place", ["slot:before", "slot:after", "commit:last:after"])
async def test_a_copy_whose_writer_was_killed_is_made_up_by_the_next_turn(tmp_path: Path, place: str) -> None:
    forks = Forks()
    try:
        if place.startswith("commit"):
            passed = forks.play(tmp_path / "whole", "mirrored")["passed"]
            place = [name for name in passed if name.startswith("commit")][-1]
        folder = tmp_path / "cut"
        assert forks.play(folder, "mirrored", place) == {"killed": 9}
    finally:
        forks.close()

    records = await SqliteRecordStore.open(folder / "durable.db")
    seen: list[str | None] = []
    slot = Slot(folder)

    async def look(_number: int, _side: str, _step: Any) -> None:
        seen.append(await slot.get("app", "conversation"))

    scenario = Mirrored(folder, lambda _place: None)
    stage = Stage(
        scenario.adapter,
        backend=TransactionalSessionBackend(records, FileObjectStore(folder / "objects")),
        on_commit=look,
    )
    stage.name = "next"
    ((first),) = await stage.turns()
    assert first.status == "COMPLETED", "the kill has undone nothing"
    settled = await committed(stage)
    stood = await slot.get("app", "conversation")
    assert stood == (settled if place == "slot:after" else None)

    assert (await stage.play(await stage.submit("r2", "go"))).status == "COMPLETED"
    assert seen[0] == settled, "made up before the next Turn changes anything"
    assert set(seen) == {settled}, "and never ahead"
    assert await slot.get("app", "conversation") == await committed(stage)
    await records.close()


@pytest.mark.spec("AS-31")
async def test_a_copy_can_be_made_up_without_a_turn(tmp_path: Path, backend: TransactionalSessionBackend) -> None:
    store = Kept()
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage(backend=backend)
    adapter = agents.adapter()
    assert await adapter.copy_state(backend, SESSION) is False, "nothing is settled"
    store.fails = OSError
    # The first Run asks what the Thread begins with, so the store fails only after that.
    store.fails = None
    turn = await stage.submit("r1", "go")
    stage.on_commit = lambda _n, _side, _step: setattr(store, "fails", OSError)
    assert (await stage.play(turn)).status == "COMPLETED"
    assert store.value is None
    assert await adapter.copy_state(backend, SESSION) is False

    store.fails = None
    built, requests = agents.built, agents.requests
    assert await adapter.copy_state(backend, SESSION) is True
    assert store.value == await committed(stage)
    assert (agents.built, agents.requests) == (built, requests)
    puts = store.puts
    assert await adapter.copy_state(backend, SESSION) is True and store.puts == puts, "it stood there already"
    with pytest.raises(Misuse, match="state_store"):
        await AgentScopeAdapter.for_react(agents.describe).copy_state(backend, SESSION)


@pytest.mark.spec("AS-31")
async def test_a_state_store_that_hangs_holds_a_turn_up_no_longer_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Kept()
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")

    def hang(_number: int, _side: str, _step: Any) -> None:
        monkeypatch.setattr(mirror, "STATE_STORE_SECONDS_MAX", 0.0)
        monkeypatch.setattr(store, "get", lambda *_: asyncio.get_running_loop().create_future())

    stage.on_commit = hang
    with caplog.at_level(logging.WARNING, "agentscope_durable"):
        assert (await stage.play(turn)).status == "COMPLETED"
    assert stage.errors == []
    assert [record.getMessage() for record in caplog.records] == ["the agent_state copy was not written: TimeoutError"]


async def test_copies_of_one_session_are_written_in_their_order() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    class Slow(Kept):
        async def put(self, user_id: str, session_id: str, key: str, value: str) -> None:
            if value == "first":
                began.set()
                await go.wait()
            await super().put(user_id, session_id, key, value)

    store = Slow()
    mirrored = Mirror(store)
    async with asyncio.TaskGroup() as copies:
        first = copies.create_task(mirrored.copy(SESSION, "first"))
        await began.wait()
        second = copies.create_task(mirrored.copy(SESSION, "second"))
        go.set()
    assert (first.result(), second.result(), store.value) == (True, True, "second")


# ------------------------------------------------------------ AgentScope's own storage


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncGenerator[Any]:
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("aiosqlite")
    pytest.importorskip("apscheduler")
    from agentscope.app.storage import AsyncSQLAlchemyStorage

    async with AsyncSQLAlchemyStorage(f"sqlite+aiosqlite:///{tmp_path}/app.db") as made:
        yield made


async def app_session(storage: Any, state: AgentState | None) -> None:
    """A session of the application, and the agent it belongs to."""
    from agentscope.agent import ContextConfig, ReActConfig
    from agentscope.app.storage import AgentData, AgentRecord, SessionConfig

    data = AgentData(name="a", context_config=ContextConfig(), react_config=ReActConfig())
    await storage.upsert_agent("app", AgentRecord(id="agent-1", user_id="app", data=data))
    _ = await storage.upsert_session("app", "agent-1", SessionConfig(workspace_id="w"), state, "conversation")


@pytest.mark.spec("AS-20", "AS-21", "AS-23")
async def test_agentscopes_own_storage_is_where_a_thread_begins_and_what_is_kept_up(
    tmp_path: Path, storage: Any, backend: TransactionalSessionBackend
) -> None:
    await app_session(storage, AgentState.model_validate_json(old_state()))
    agents = Agents(tmp_path, answers, adapter={"state_store": AppStateStore(storage, "agent-1")})
    stage = await agents.stage(backend=backend)
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert (await entries(stage))[0] == JournalEventType.MIGRATION_BASELINE

    record = await storage.get_session("app", "agent-1", "conversation")
    assert record.state.model_dump_json() == await committed(stage)
    agent = Agent("a", "sys", scripted_model(["as before"]), state=record.state)
    assert (await agent.reply(UserMsg("user", "x"))).get_text_content() == "as before"


@pytest.mark.spec("AS-31")
async def test_a_session_that_the_application_never_used_is_no_state_and_one_it_has_not_is_no_failure(
    tmp_path: Path, storage: Any
) -> None:
    store = AppStateStore(storage, "agent-1")
    with pytest.raises(NotFound, match="conversation"):
        await store.put("app", "conversation", AGENT_STATE, old_state())
    agents = Agents(tmp_path, answers, adapter={"state_store": store})
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert stage.errors == [] and JournalEventType.MIGRATION_BASELINE not in await entries(stage)

    await app_session(storage, None)
    assert await store.get("app", "conversation") is None
    assert await store.get("app", "conversation", "another slot") is None
    assert await agents.adapter().copy_state(stage.backend, SESSION) is True
    record = await storage.get_session("app", "agent-1", "conversation")
    assert record.state.model_dump_json() == await committed(stage)
