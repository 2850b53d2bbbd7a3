"""The adapter as an application and a host see it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("agentscope")

from agentscope.agent import Agent
from agentscope.message import AssistantMsg, TextBlock, UserMsg
from agentscope.state import AgentState
from agentscope.tool import Toolkit
from agentscope.workspace import LocalWorkspace

from agentscope_durable.adapters.agentscope import STATE_VERSION, AgentBuilder, AgentScopeAdapter, ToolBinding, library
from agentscope_durable.adapters.agentscope.native import native_session_id
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import AgentFactoryError, Incompatible, MissingExtra
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.journal import CheckpointRow, Field, JournalBatch, JournalEventType
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.contracts.status import EventDelivery, RecoveryBoundary
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.journal.state_store import AGENT_STATE
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.spi.harness import Abandoned, HarnessAdapter
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.harness_adapter import HarnessAdapterContract
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_model import Call, Text, Thinking, by_round, scripted_model
from tests.adapters.agentscope.agents import Agents, allow, external, tool
from tests.adapters.agentscope.stage import Stage, check_transcript, of_type, opened, texts

SOURCE = Path(__file__).resolve().parents[3] / "src"


# ------------------------------------------------------------ what it says of itself


@pytest.mark.spec("AS-12", "AS-19")
def test_the_adapter_declares_what_it_was_tested_with_and_where_it_recovers(tmp_path: Path) -> None:
    adapter = Agents(tmp_path, ["x"]).adapter()

    assert adapter.state_version == STATE_VERSION == "agentscope-thread-journal-v2"
    assert adapter.capabilities.recovery is RecoveryBoundary.TOOL_BOUNDARY
    assert adapter.capabilities.delivery is EventDelivery.DELTA
    assert adapter.writer in library.TESTED


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SOURCE)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_importing_it_does_not_import_agentscope() -> None:
    run_python(
        "import sys, agentscope_durable.adapters.agentscope as a; a.AgentBuilder(name='x'); a.ToolBinding('t', 'r')\n"
        "assert not any(m.split('.')[0] in ('agentscope', 'pydantic', 'openai', 'mcp') for m in sys.modules)"
    )


def test_without_agentscope_it_names_the_extra() -> None:
    run_python(
        "import importlib.metadata as m, sys\n"
        "sys.modules['agentscope'] = None\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'agentscope': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "from agentscope_durable.adapters.agentscope import AgentScopeAdapter\n"
        "from agentscope_durable.contracts.errors import MissingExtra\n"
        "try: AgentScopeAdapter.for_react(lambda binding: None)\n"
        "except MissingExtra as error: assert error.extra == 'agentscope' and 'pip install' in str(error)\n"
        "else: raise SystemExit('it was made')"
    )
    assert issubclass(MissingExtra, ImportError)


def test_which_writers_it_continues(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    may = library.may_continue
    assert may("", installed="2.0.99", accept_untested=False)
    assert may("2.0.99", installed="2.0.99", accept_untested=False)
    assert may("2.0.8", installed="2.0.11", accept_untested=False)
    assert not may("2.0.8", installed="2.0.99", accept_untested=False)
    assert not may("2.0.99", installed="2.0.11", accept_untested=False)
    assert may("2.0.99", installed="2.0.11", accept_untested=True)
    monkeypatch.setattr(library, "_warned", set[str]())
    with caplog.at_level(logging.WARNING, logger="agentscope_durable"):
        library.warn_if_untested("2.0.99")
        library.warn_if_untested("2.0.99")
        library.warn_if_untested("2.0.11")
    assert len(caplog.records) == 1 and "2.0.99" in caplog.text


# ------------------------------------------------------------ the factory


def factory_of(kind: str, tmp_path: Path) -> Any:
    model = scripted_model(["never"], ledger=tmp_path / "ledger")
    arguments: dict[str, Any] = {"name": "a", "system_prompt": "sys", "model": model}
    kept = AgentBuilder(**arguments, toolkit=Toolkit())

    def factory(_binding: Any) -> Any:
        match kind:
            case "raises":
                raise KeyError("no config")
            case "agent":
                return Agent(**arguments)
            case "nothing":
                return None
            case "incomplete":
                return AgentBuilder(name="a", system_prompt="sys")
            case "unknown":
                return AgentBuilder(**arguments, colour="red")
            case "wrong":
                return AgentBuilder(**arguments, react_config="no")
            case _:
                return kept

    return factory


@pytest.mark.spec("AS-03", "AS-04")
@pytest.mark.parametrize("kind", ["raises", "agent", "nothing", "incomplete", "unknown"])
async def test_a_wrong_factory_is_found_before_a_model_is_asked(tmp_path: Path, kind: str) -> None:
    stage = await opened(lambda: AgentScopeAdapter.for_react(factory_of(kind, tmp_path)))
    view = await stage.play(await stage.submit("r1", "go"))

    assert view.status == "FAILED" and isinstance(stage.errors[0], AgentFactoryError)
    assert EffectLedger(tmp_path / "ledger").lines() == []


@pytest.mark.spec("AS-03", "AS-04")
async def test_the_same_description_twice_is_refused(tmp_path: Path) -> None:
    adapter = AgentScopeAdapter.for_react(factory_of("same", tmp_path))
    stage = await opened(lambda: adapter)
    _ = await stage.play(await stage.submit("r1", "go"))
    view = await stage.play(await stage.submit("r2", "go"))
    assert view.status == "FAILED" and "same AgentBuilder twice" in str(view.error.message)


@pytest.mark.spec("AS-03")
async def test_an_async_factory_is_called_for_each_run_with_its_binding(tmp_path: Path) -> None:
    seen: list[Any] = []
    agents = Agents(
        tmp_path, [[Call("ext", id="e1")], "done"], tools=lambda: [external("ext")], bindings={"ext": "hands"}
    )

    async def factory(binding: Any) -> AgentBuilder:
        seen.append(binding)
        return agents.describe(binding)

    stage = await opened(lambda: AgentScopeAdapter.for_react(factory, {"ext": "hands"}))
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"

    assert len(seen) == 2 and seen[0].definition.harness == "assistant"
    context = seen[0].context
    assert (context.user_id, context.session_id, context.thread_id, context.turn_id) == (
        "app",
        "conversation",
        "main",
        turn,
    )


@pytest.mark.spec("AS-03")
async def test_an_agent_that_is_renamed_would_not_see_its_calls(tmp_path: Path) -> None:
    names = iter(["a", "b"])

    def factory(_binding: Any) -> AgentBuilder:
        model = scripted_model(["one", "two"], ledger=tmp_path / "ledger")
        return AgentBuilder(name=next(names), system_prompt="sys", model=model)

    stage = await opened(lambda: AgentScopeAdapter.for_react(factory))
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    view = await stage.play(await stage.submit("r2", "go"))
    assert view.status == "FAILED" and "renamed" in str(view.error.message)


def test_a_factory_that_could_not_reach_something_may_be_called_again(tmp_path: Path) -> None:
    adapter = Agents(tmp_path, ["x"]).adapter()
    for cause, again in ((ConnectionRefusedError(), True), (TimeoutError(), True), (KeyError(), False)):
        error = AgentFactoryError("a", "x")
        error.__cause__ = cause
        assert adapter.classify(error) is again


async def test_the_first_state_may_bring_rules_of_its_own(tmp_path: Path) -> None:
    from agentscope.permission import PermissionContext, PermissionMode

    async def risky() -> str:
        return "done"

    def state() -> Any:
        return AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))

    agents = Agents(tmp_path, [[Call("risky", id="c1")], "done"], tools=lambda: [tool(risky, ask=True)], state=state)
    stage = await agents.stage()
    turn = await stage.submit("r1", "go")
    assert (await stage.play(turn)).status == "COMPLETED"
    assert of_type(await stage.events(), "interaction.requested") == []


# ------------------------------------------------------------ a workspace


class Workspace(LocalWorkspace):
    pass


@pytest.mark.spec("AS-02")
async def test_a_harness_agent_has_a_workspace(tmp_path: Path) -> None:
    asked: list[str] = []

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        asked.extend(t["function"]["name"] for t in tools or ())
        return "done"

    folder = tmp_path / "workspace"
    folder.mkdir()
    workspace = Workspace(workdir=str(folder))
    await workspace.initialize()
    agents = Agents(tmp_path, script, workspace=lambda: workspace)
    stage = await opened(lambda: AgentScopeAdapter.for_harness(agents.describe))
    view = await stage.play(await stage.submit("r1", "go"))

    assert view.status == "COMPLETED", stage.errors
    assert "Read" in asked and "Bash" in asked
    await workspace.close()


async def test_a_harness_agent_without_a_workspace_is_refused(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["never"])
    stage = await opened(lambda: AgentScopeAdapter.for_harness(agents.describe))
    view = await stage.play(await stage.submit("r1", "go"))
    assert view.status == "FAILED" and "workspace" in str(view.error.message) and agents.requests == 0


# ------------------------------------------------------------ the journal


@pytest.mark.spec("RT-45")
async def test_a_run_has_one_id_in_the_journal_and_for_everybody(tmp_path: Path) -> None:
    agents = Agents(tmp_path, ["done", "done again"])
    stage = await agents.stage()
    turns = [await stage.submit(f"r{number}", "go") for number in range(2)]
    for turn in turns:
        assert (await stage.play(turn)).status == "COMPLETED"

    named = {JournalEventType.RUN_START: [], JournalEventType.RUN_END: []}
    for _, batch in await stage.batches():
        for entry in batch.entries:
            if entry.type in named:
                named[entry.type].append(msgspec.json.decode(entry.payload)["run"])
    runs = [run.run_id for turn in turns for run in await stage.runs(turn)]
    assert len(runs) == 2
    assert named[JournalEventType.RUN_START] == runs
    assert named[JournalEventType.RUN_END] == runs


@pytest.mark.spec("TJ-27", "TJ-29", "TJ-30", "TJ-32", "TJ-33", "TP-01", "TP-04")
async def test_state_and_facts_of_a_commit_stand_together(tmp_path: Path) -> None:
    async def look() -> str:
        return "seen"

    agents = Agents(
        tmp_path, [["one", Call("look", id="c1"), Call("look", id="c2")], "two"], tools=lambda: [tool(look)]
    )
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    kinds = [entry.type for _, batch in await stage.batches() for entry in batch.entries]
    assert kinds[0] == JournalEventType.RUN_START and kinds[-1] == JournalEventType.RUN_END
    assert kinds.count(JournalEventType.MODEL_RESULT) == 2 and kinds.count(JournalEventType.STEP_START) == 2
    assert kinds.count(JournalEventType.TOOL_INTENT) == kinds.count(JournalEventType.TOOL_RESULT) == 2
    assert JournalEventType.RUN_OUTPUT in kinds
    positions = [at for at, _ in await stage.batches()]
    assert positions == sorted(set(positions))
    second = await stage.submit("r2", "again")
    stage.make_adapter = Agents(tmp_path, [["x"]] * 9).adapter
    _ = await stage.step()
    assert (await stage.view(second)).runs == 1


async def test_a_plain_turn_costs_seven_commits_and_what_they_hold_is_small(tmp_path: Path) -> None:
    async def add(a: int, b: int) -> str:
        return str(a + b)

    agents = Agents(
        tmp_path,
        [[Thinking("hm"), "let me add", Call("add", {"a": 1, "b": 2}, id="c1")], "it is 3"],
        tools=lambda: [tool(add)],
    )
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    assert stage.commits == 7
    sizes = [len(step.journal) for step in stage.contexts[0].commits]
    assert max(sizes[1:]) < 1200, sizes


@pytest.mark.case("C61")
async def test_a_state_that_cannot_be_read_here_waits_for_a_host_that_can(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [[Call("form", id="e1")], "done"], tools=lambda: [external("form")])
    stage = await agents.stage(results={"form": "filled in"})
    turn = await stage.submit("r1", "go")
    _ = await stage.step()
    await stage.serve(turn)
    rows = stage.rows
    broken = True

    async def read(first: int, last: int) -> Any:
        found = await rows(first, last)
        if broken:
            found = [
                msgspec.structs.replace(row, journal=row.journal.replace(b'"role":"assistant"', b'"role":"oracle"'))
                for row in found
            ]
        return found

    stage.rows = read  # type: ignore[method-assign]
    context = await _run_once(stage)
    assert isinstance(stage.errors[-1], Incompatible) and "context" in str(stage.errors[-1])
    assert context.commits == [] and agents.requests == 1
    broken = False
    stage.errors.clear()
    assert (await stage.play(turn)).status == "COMPLETED"


async def _run_once(stage: Stage) -> Any:
    """A Run that ends as a runtime ends one that this host cannot serve: given back, and no failure of the Turn."""
    from agentscope_durable.contracts import commands as c
    from tests.adapters.agentscope.stage import StageContext

    context = StageContext(stage, await stage.claim())
    await context.begin()
    try:
        _ = await stage.make_adapter().run(context)  # type: ignore[arg-type]
    except Incompatible as error:
        stage.errors.append(error)
    commits = list(context.commits)
    await context.commit(
        c.CommitStep(
            session=stage.session,
            thread_id=stage.thread_id,
            turn_id=context.claimed.turn_id,
            run_id=context.claimed.run_id,
            fence=context.claimed.fence,
            expected_position=context.position,
            end=c.RunEnd(kind=c.RunEndKind.RELEASED),
        )
    )
    context.commits = commits
    return context


# ------------------------------------------------------------ programs without a journal


class OldStore:
    """A state store of a program without a journal."""

    def __init__(self, **kept: str) -> None:
        self.kept = dict(kept)
        self.loads: list[str] = []
        self.fails = False

    async def get(self, user_id: str, session_id: str, key: str = AGENT_STATE) -> str | None:
        assert (user_id, key) == ("app", AGENT_STATE)
        self.loads.append(session_id)
        return self.kept.get(session_id)

    async def put(self, user_id: str, session_id: str, key: str, value: str) -> None:
        if self.fails:
            raise OSError("the disk is full")
        self.kept[session_id] = value


def old_state() -> str:
    state = AgentState(session_id="conversation")
    state.context = [
        UserMsg("user", "what I said"),
        AssistantMsg("a", [TextBlock(text="what it said")]),
        UserMsg("user", "thanks"),
    ]
    return state.model_dump_json()


@pytest.mark.spec("AS-20", "AS-21", "AS-23")
async def test_a_first_run_takes_the_old_state_and_the_copy_is_kept_up(tmp_path: Path) -> None:
    given: list[int] = []

    def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
        given.append(sum("what I said" in str(m.content) for m in messages))
        return f"answer {n}"

    store = OldStore(conversation=old_state())
    agents = Agents(tmp_path, script, adapter={"state_store": store})
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    first = (await stage.batches())[0][1]
    assert first.entries[0].type == JournalEventType.MIGRATION_BASELINE and first.base
    assert given == [1] and texts(await stage.state())[0] == "what it said"
    copied = AgentState.model_validate_json(store.kept["conversation"])
    assert copied.model_dump_json() == (await stage.state()).model_dump_json()
    agent = Agent("a", "sys", scripted_model(["as before"]), state=copied)
    assert (await agent.reply(UserMsg("user", "x"))).get_text_content() == "as before"


@pytest.mark.spec("AS-22")
async def test_a_named_thread_never_looks_at_the_old_state(tmp_path: Path) -> None:
    store = OldStore(conversation=old_state())
    agents = Agents(tmp_path, ["done"], adapter={"state_store": store})
    stage = await agents.stage(thread_id="research")
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"

    assert store.loads == [] and store.kept["conversation"] == old_state_of(store)
    kinds = [entry.type for _, batch in await stage.batches() for entry in batch.entries]
    assert JournalEventType.MIGRATION_BASELINE not in kinds and len((await stage.state()).context) == 2


def old_state_of(store: OldStore) -> str:
    return store.kept["conversation"]


@pytest.mark.spec("AS-31")
async def test_a_copy_that_fails_costs_nothing_and_is_made_up_for(tmp_path: Path) -> None:
    store = OldStore()
    agents = Agents(tmp_path, lambda m, t, c, n: f"answer {n}", adapter={"state_store": store})
    stage = await agents.stage()
    store.fails = True
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    assert store.kept == {} and stage.errors == []
    settled = (await stage.state()).model_dump_json()
    store.fails = False

    def look(_number: int, side: str, _step: Any) -> None:
        seen.append(store.kept.get("conversation"))

    seen: list[Any] = []
    stage.on_commit = look
    assert (await stage.play(await stage.submit("r2", "go"))).status == "COMPLETED"
    assert AgentState.model_validate_json(seen[0]).model_dump_json() == settled, "the settled state, before any commit"
    assert set(seen) == {seen[0]}, "never ahead of what is committed"


# ------------------------------------------------------------ under a runtime


class TestAgentScopeAdapter(HarnessAdapterContract):
    """The promises of the socket, over the real runtime."""

    @pytest.fixture
    async def backend(self, tmp_path: Path) -> AsyncGenerator[TransactionalSessionBackend]:
        self.ledger = EffectLedger(tmp_path / "ledger")
        self.storage = TransactionalSessionBackend(MemoryRecordStore(), wakeups=LocalWakeups())
        yield self.storage

    def make_adapter(self) -> HarnessAdapter:
        return AgentScopeAdapter.for_react(self._describe)

    def _describe(self, _binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool

        ledger = self.ledger

        async def act() -> str:
            """Act."""
            ledger.append("tool")
            return "acted"

        def script(messages: list[Any], tools: Any, choice: Any, n: int) -> Any:
            return "done" if str(messages[-1].content).count("tool_result") else ["first", Call("act")]

        model = scripted_model(script, ledger=ledger)
        toolkit = Toolkit(tools=[FunctionTool(act, permission=allow())])
        return AgentBuilder(name="a", system_prompt="sys", model=model, toolkit=toolkit)

    def open_host(self, adapter: HarnessAdapter) -> DurableRuntime:
        return DurableRuntime(
            backend=self.storage, harnesses=[Harness(self.definition, "1", adapter)], poll_interval=0.02
        )

    def effects(self, kind: str) -> int:
        return self.ledger.count("model/request" if kind == "model" else kind)

    def owner_in(self, rows: Sequence[CheckpointRow]) -> str:
        [owner] = [row.json for row in rows if isinstance(row, Field) and row.name == "session_id"]
        return json.loads(bytes(owner))

    def owner_named(self, thread: ThreadKey) -> str:
        return native_session_id(thread)


@pytest.mark.spec("AS-01", "AS-30", "EV-14")
async def test_the_main_use_streams_asks_and_takes_in_what_was_done_elsewhere(tmp_path: Path) -> None:
    """As the README shows it: stream, approve, perform elsewhere, wait."""

    async def restart(service: str) -> str:
        """Restart a service."""
        return f"{service} restarted"

    def make_agent(_binding: Any) -> AgentBuilder:
        from agentscope.tool import FunctionTool

        script = by_round(["on it", Call("restart", {"service": "exporter"}, id="c1")], [Text("The exporter is back.")])
        return AgentBuilder(
            name="operator",
            system_prompt="You operate services.",
            model=scripted_model(script, ledger=tmp_path / "ledger"),
            toolkit=Toolkit(tools=[FunctionTool(restart)]),
        )

    backend = TransactionalSessionBackend(MemoryRecordStore(), wakeups=LocalWakeups())
    adapter = AgentScopeAdapter.for_react(make_agent, {"restart": ToolBinding("restart", "hands")})
    async with DurableRuntime(
        backend=backend,
        harnesses=[Harness("operator", "v1", adapter)],
        executors={"hands": FunctionExecutor({"restart": restart})},
        poll_interval=0.02,
    ) as runtime:
        session = await runtime.create_session(SessionKey("app", "s"), "operator")
        await runtime.start()
        shown = ""
        async with session.stream_events(deltas={EventDeltaType.MESSAGE}) as events:
            turn = await session.submit("r1", "Restart the exporter")
            async for event in events:
                if type(event).__name__ == "EventDelta":
                    shown += event.text
                for question in await turn.pending_interactions():
                    await turn.respond("yes", question.interaction_id, True)
                if (await turn.status()).status.terminal:
                    break
        answer = await turn.wait(timeout=90)
        assert answer is not None and answer.text == "The exporter is back."
        history = (await session.history()).items
        assert [m.text for m in history] == ["Restart the exporter", "on it", "approved", "The exporter is back."]
        assert shown.startswith("on it")
    await backend.close()


@pytest.mark.spec("EV-22")
async def test_nothing_private_is_in_a_public_event(tmp_path: Path) -> None:
    agents = Agents(tmp_path, [[Thinking("PRIVATE-THOUGHT", "PRIVATE-SIGNATURE"), "done"]])
    stage = await agents.stage()
    assert (await stage.play(await stage.submit("r1", "go"))).status == "COMPLETED"
    # As JSON: a repr shows no content at all.
    public = msgspec.json.encode([await stage.events(), await stage.messages()]).decode()
    assert '"done"' in public and "PRIVATE" not in public and "execution_position" not in public
    state = await stage.state()
    assert "PRIVATE-THOUGHT" in state.model_dump_json(), "it is kept, and shown to nobody"
    check_transcript(state)


async def test_a_journal_of_this_adapter_is_read_with_no_agent_at_all(tmp_path: Path) -> None:
    from agentscope_durable.journal.checkpoint import fold

    def die(number: int, side: str, _step: Any) -> None:
        if side == "after" and number == 2:
            raise Abandoned

    agents = Agents(tmp_path, ["done"])
    stage = await agents.stage(on_commit=die)
    _ = await stage.submit("r1", "go")
    _ = await stage.step()
    batches: list[tuple[int, JournalBatch]] = await stage.batches()
    assert fold(batches).base_at == batches[0][0]
