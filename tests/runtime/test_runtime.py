"""A host and its handles (group RT)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from agentscope_durable.assembly import LocalBackend, MemoryBackend
from agentscope_durable.contracts.errors import (
    DefinitionConflict,
    InvalidRequest,
    Misuse,
    NoExecutionConfiguration,
    NotFound,
    Unfinished,
    WrongLoop,
)
from agentscope_durable.contracts.events import EventDelta, EventFilter
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.keys import READY_TURN, partition
from agentscope_durable.contracts.options import EventDeltaType
from agentscope_durable.contracts.status import (
    ModelStatus,
    ResourceStatus,
    RunStatus,
    StepPhase,
    StepStatus,
    TurnStatus,
    WaitKind,
)
from agentscope_durable.executors.function import FunctionExecutor
from agentscope_durable.runtime.runtime import Definition, DurableRuntime, Harness, HarnessResolver
from agentscope_durable.testing.scripted_harness import (
    STATE_VERSION,
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    approval,
    external,
    final,
    local,
    manual,
    say,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, kill, refused, texts, turn_is, until


@pytest.mark.spec("RT-04")
def test_importing_starts_nothing() -> None:
    program = (
        "import sys, threading, agentscope_durable as d, asyncio\n"
        "[getattr(d, name) for name in d.__all__ if name != 'LocalBackend']\n"
        "import agentscope_durable.testing.scripted_harness, agentscope_durable.backend.transaction\n"
        "assert threading.active_count() == 1, threading.enumerate()\n"
        "assert not {'apsw', 'agentscope', 'typer', 'rich'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stderr == ""


@pytest.mark.spec("RT-05", "RT-11", "RT-12")
async def test_a_session_appears_with_its_main_thread(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    await session.create_thread("x", "agent")
    threads = (await session.list_threads()).items

    assert [thread.thread_id for thread in threads] == ["main", "x"]
    assert {thread.binding.definition_version for thread in threads} == {"v1"}
    assert [event.type for event in await all_events(session)] == [
        "session.created",
        "thread.created",
        "thread.created",
    ]


@pytest.mark.spec("RT-12", "RT-37", "RT-50", "AD-16")
async def test_a_thread_keeps_the_version_it_was_made_with(hosts: Hosts) -> None:
    first = await hosts.open([final("by v1")], start=False)
    old = await first.create_session(KEY, "agent")
    harnesses = [
        Harness("agent", "v1", ScriptedHarness([final("by v1")])),
        Harness("agent", "v2", ScriptedHarness([final("by v2")])),
    ]
    runtime = await hosts.open(harnesses=harnesses)
    events = len(await all_events(old))
    again = await runtime.create_session(KEY, "agent")
    new = await runtime.create_session(SessionKey("app", "c2"), "agent")

    assert len(await all_events(again)) == events
    assert (await again.main_thread().view()).binding.definition_version == "v1"
    assert (await new.main_thread().view()).binding.definition_version == "v2"
    assert str(await again.call("r1", "a", SECONDS)) == "by v1"
    assert str(await new.call("r1", "a", SECONDS)) == "by v2"


@pytest.mark.spec("AD-16")
async def test_another_definition_for_the_same_key_is_a_conflict(hosts: Hosts) -> None:
    runtime = await hosts.open(definitions=[Definition("one", "1", "s"), Definition("two", "1", "s")])
    session = await runtime.create_session(KEY, "one")
    await session.create_thread("x", "one")
    await session.create_thread("x", "one")

    await refused(runtime.create_session(KEY, "two"), DefinitionConflict)
    await refused(session.create_thread("x", "two"), DefinitionConflict)


@pytest.mark.spec("RT-13", "RT-31")
def test_a_runtime_needs_a_backend_and_sound_numbers() -> None:
    harness = Harness("agent", "v1", ScriptedHarness())
    with pytest.raises(TypeError):
        DurableRuntime(harnesses=[harness])  # type: ignore[call-arg]
    with pytest.raises(Misuse):
        DurableRuntime(backend=None, harnesses=[harness])  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="not open"):
        DurableRuntime(backend=LocalBackend.open("nowhere"), harnesses=[harness])  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="a list"):
        DurableRuntime(backend=MemoryBackend(), harnesses=harness)  # type: ignore[arg-type]


async def test_a_harness_is_registered_once(hosts: Hosts) -> None:
    harness = Harness("agent", "v1", ScriptedHarness())
    with pytest.raises(Misuse):
        DurableRuntime(backend=hosts.backend, harnesses=[harness, Harness("agent", "v1", ScriptedHarness())])
    with pytest.raises(Misuse):
        DurableRuntime(backend=hosts.backend, parallelism=0)
    with pytest.raises(InvalidRequest):
        DurableRuntime(backend=hosts.backend, harnesses=[Harness("", "v1", ScriptedHarness())])


@pytest.mark.spec("RT-15", "RT-23", "RT-29")
async def test_a_handle_is_an_identity_that_any_host_can_make(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.wait(SECONDS)
    bare = await hosts.open()
    again = bare.get_session(KEY).get_thread("main").get_turn(turn.turn_id)

    assert (await again.status()).status is TurnStatus.COMPLETED
    assert await texts(bare.get_session(KEY).main_thread()) == [("user", "a"), ("assistant", "ok")]
    assert (await bare.get_session(KEY).snapshot()).projection.turns.keys() == {turn.turn_id}


@pytest.mark.spec("RT-16")
async def test_sessions_are_listed_by_namespace(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    for number in range(5):
        await runtime.create_session(SessionKey("A", f"s{number}"), "agent")
    await runtime.create_session(SessionKey("AB", "s"), "agent")
    await runtime.create_session(SessionKey("B", "s"), "agent")
    seen = []
    cursor = None
    while True:
        page = await runtime.list_sessions("A", cursor, 2)
        seen += [view.session.session_id for view in page]
        cursor = page.cursor
        if cursor is None:
            break

    assert seen == ["s0", "s1", "s2", "s3", "s4"]


@pytest.mark.spec("RT-18", "RT-19", "RT-20")
async def test_the_handles_have_their_operations(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    timeline = {"list_events", "stream_events", "subscribe_events", "history", "snapshot"}
    queue = {"submit", "call", "get_turn", "list_turns", "view", "close"}
    controls = {"steer", "inject", "withdraw", "cancel", "pause", "resume", "signal", "respond", "pending_interactions"}
    reading = {"list_runs", "get_run", "list_steps", "get_step", "list_model_calls", "get_model_call", "list_tools"}

    threads = {"main_thread", "create_thread", "get_thread", "list_threads"}

    assert timeline | queue | threads <= set(dir(session))
    assert timeline | queue <= set(dir(session.main_thread()))
    assert timeline | controls | reading | {"status", "result", "wait", "turn_id"} <= set(dir(turn))


@pytest.mark.spec("RT-20")
async def test_an_event_has_one_number_through_every_handle(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn.wait(SECONDS)
    everything = await all_events(session)
    of_turn = await all_events(turn)
    of_thread = await all_events(session.main_thread())

    assert [event.sequence for event in everything] == list(range(1, len(everything) + 1))
    assert of_turn == [event for event in everything if event.turn_id == turn.turn_id]
    assert of_thread == [event for event in everything if event.thread_id == "main"]


@pytest.mark.spec("RT-21", "RT-22", "ST-18")
async def test_questions_start_nothing(hosts: Hosts) -> None:
    harness = ScriptedHarness([final()])
    runtime = await hosts.open(harness, start=False)
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    for question in (
        turn.status(),
        turn.history(),
        turn.snapshot(),
        turn.list_runs(),
        turn.list_tools(),
        turn.pending_interactions(),
        session.snapshot(),
        session.list_turns(),
        session.list_threads(),
        session.view(),
        session.main_thread().view(),
        runtime.capabilities(),
        runtime.capabilities("agent"),
        runtime.execution_capabilities(),
    ):
        await question
    async with turn.stream_events() as events:
        await anext(events)

    view = await turn.status()
    assert view.status is TurnStatus.QUEUED
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.HOST]
    assert harness.ledger.lines() == []


@pytest.mark.spec("RT-28", "RT-30")
async def test_an_api_host_admits_and_never_runs(hosts: Hosts) -> None:
    api = await hosts.open(definitions=[Definition("agent", "v1", STATE_VERSION)])
    session = await api.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await refused(api.start(), NoExecutionConfiguration)
    assert (await turn.status()).status is TurnStatus.QUEUED
    await hosts.open([final("ok")])

    assert str(await turn.wait(SECONDS)) == "ok"


@pytest.mark.spec("RT-28")
async def test_a_resolver_finds_definitions_by_name(hosts: Hosts) -> None:
    async def resolve(name: str):
        return Definition(name, "v7", "s") if name == "known" else None

    api = await hosts.open(definition_resolver=resolve)
    session = await api.create_session(KEY, "known")

    assert (await session.main_thread().view()).binding.definition_version == "v7"
    error = await refused(api.create_session(SessionKey("app", "c2"), "unknown"), NotFound)
    assert "harnesses= or definitions=, or a definition_resolver" in str(error)


@pytest.mark.spec("RT-33", "RT-35")
async def test_capabilities_say_what_each_part_can_do(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], executors={"hands": FunctionExecutor({})}, start=False)
    everything = await runtime.execution_capabilities()
    (harness,) = everything.harnesses
    (executor,) = everything.executors

    assert (everything.persistent, everything.shared) == (
        hosts.backend.capabilities.persistent,
        hosts.backend.capabilities.shared,
    )
    assert (harness.harness, harness.recovery, harness.delivery) == ("agent", "TOOL_BOUNDARY", "DELTA")
    assert (executor.route, executor.cancel, executor.query) == ("hands", False, False)
    assert await runtime.capabilities("agent") == harness
    await refused(runtime.capabilities("other"), NotFound)


@pytest.mark.spec("RT-34", "RT-35")
async def test_capabilities_name_what_is_resolved_and_tell_of_one_version(hosts: Hosts) -> None:
    asked: list[Definition] = []

    def resolve(definition: Definition) -> ScriptedHarness | None:
        asked.append(definition)
        return ScriptedHarness([final()]) if definition.definition_version == "v7" else None

    runtime = await hosts.open(harnesses=[HarnessResolver("agent", resolve)], start=False)
    everything = await runtime.capabilities()
    assert (everything.harnesses, everything.resolved_harnesses) == ((), ("agent",))
    assert asked == []

    one = await runtime.capabilities(Definition("agent", "v7", STATE_VERSION))
    assert (one.harness, one.definition_version, one.state_version) == ("agent", "v7", STATE_VERSION)
    await refused(runtime.capabilities(Definition("agent", "v8", STATE_VERSION)), NotFound)
    await refused(runtime.capabilities("agent"), Misuse)


@pytest.mark.spec("RT-34", "RT-37", "RT-50")
async def test_a_resolver_makes_each_version_that_threads_are_pinned_to(hosts: Hosts) -> None:
    asked: list[str] = []

    async def resolve(definition: Definition) -> ScriptedHarness:
        asked.append(definition.definition_version)
        return ScriptedHarness([final(f"by {definition.definition_version}")])

    turns = []
    for version in ("v1", "v2", "v3"):
        api = await hosts.open(definitions=[Definition("agent", version, STATE_VERSION)])
        session = await api.create_session(SessionKey("app", version), "agent")
        turns += [await session.submit("r1", "a"), await session.submit("r2", "b")]
    registered = Harness("agent", "v1", ScriptedHarness([final("registered")]))
    await hosts.open(harnesses=[registered, HarnessResolver("agent", resolve)])

    answers = [str(await turn.wait(SECONDS)) for turn in turns]
    assert answers == ["registered", "registered", "by v2", "by v2", "by v3", "by v3"]
    assert sorted(asked) == ["v2", "v3"], "a version is made once and kept; a registered one is not asked for"


class _OtherState(ScriptedHarness):
    @property
    def state_version(self) -> str:
        return "another"


_RAISED: dict[str, type[BaseException]] = {
    "raises": LookupError,
    "exits": SystemExit,
    "cancels": asyncio.CancelledError,
}


@pytest.mark.spec("RT-34", "RT-36", "RT-37", "DX-03")
@pytest.mark.parametrize("answer", ["none", "raises", "exits", "cancels", "hangs", "another state", "missing route"])
async def test_what_a_resolver_does_not_make_is_left_to_other_hosts_and_holds_up_nothing(
    hosts: Hosts, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentscope_durable.runtime.definitions.RESOLVE_SECONDS", 0.05)
    asked: list[str] = []

    def resolve(definition: Definition) -> Any:
        asked.append(definition.definition_version)
        if definition.definition_version == "v2":
            return ScriptedHarness([final("by v2")])
        if answer == "hangs":
            return asyncio.get_running_loop().create_future()
        if answer in _RAISED:
            raise _RAISED[answer]("no such version")
        if answer == "none":
            return None
        if answer == "another state":
            return _OtherState([final()])
        return ScriptedHarness([external("elsewhere", "tool"), final()])

    api = await hosts.open(definitions=[Definition("agent", "v1", STATE_VERSION)])
    strange = [
        await (await api.create_session(SessionKey("app", f"s{number}"), "agent")).submit("r1", "a")
        for number in range(40)
    ]
    api = await hosts.open(definitions=[Definition("agent", "v2", STATE_VERSION)])
    mine = await (await api.create_session(KEY, "agent")).submit("r1", "a")
    # It says what it lacks with its next renewal.
    await hosts.open(harnesses=[HarnessResolver("agent", resolve)], parallelism=1, lease=1.5)

    assert str(await mine.wait(SECONDS)) == "by v2"
    later = await (await api.create_session(SessionKey("app", "c9"), "agent")).submit("r1", "a")
    assert str(await later.wait(SECONDS)) == "by v2"
    await until(lambda: "v1" in asked)
    assert asked.count("v1") == 1, "asked again only after a while, not for each of forty Turns"
    assert {(await turn.status()).status for turn in strange} == {TurnStatus.QUEUED}

    async def says_it_lacks() -> bool:
        [waits, *_] = (await strange[0].status()).waiting_on
        return (waits.kind, waits.id) == (WaitKind.DEFINITION_MISSING, "agent@v1")

    await until(says_it_lacks)


@pytest.mark.spec("RT-36", "RT-38")
async def test_finding_resolved_work_reads_no_more_with_more_of_it(hosts: Hosts) -> None:
    """One class of a thousand Turns is one row of the answer."""
    api = await hosts.open(definitions=[Definition("agent", "v1", STATE_VERSION)])
    for number in range(30):
        await (await api.create_session(SessionKey("app", f"s{number}"), "agent")).submit("r1", "a")
    prefix = Definition("agent", "v1", STATE_VERSION).binding.ready_class[: len("agent") + 1]

    assert await hosts.backend.ready_classes(READY_TURN, prefix) == [
        Definition("agent", "v1", STATE_VERSION).binding.ready_class
    ]


@pytest.mark.spec("RT-34")
@pytest.mark.parametrize(
    "wrong",
    [
        HarnessResolver("", lambda definition: None),
        HarnessResolver("agent", "not a function"),  # pyright: ignore[reportArgumentType]
    ],
    ids=["no name", "no function"],
)
async def test_a_wrong_resolver_is_refused_when_the_runtime_is_made(hosts: Hosts, wrong: HarnessResolver) -> None:
    with pytest.raises((Misuse, InvalidRequest)):
        DurableRuntime(backend=hosts.backend, harnesses=[wrong])
    twice = HarnessResolver("agent", lambda definition: None)
    with pytest.raises(Misuse, match="agent"):
        DurableRuntime(backend=hosts.backend, harnesses=[twice, twice])


@pytest.mark.spec("RT-34", "RC-01")
async def test_a_resolved_turn_is_taken_over_from_a_dead_host(hosts: Hosts) -> None:
    resolver = HarnessResolver("agent", lambda definition: ScriptedHarness([Stall(gate="never opened"), final("late")]))
    api = await hosts.open(definitions=[Definition("agent", "v5", STATE_VERSION)])
    turn = await (await api.create_session(KEY, "agent")).submit("r1", "a")
    first = await hosts.open(harnesses=[resolver], lease=0.2)
    await turn_is(turn, "RUNNING")
    kill(first)
    second = HarnessResolver("agent", lambda definition: ScriptedHarness([final(f"{definition.definition_version}")]))
    await hosts.open(harnesses=[second])

    assert str(await turn.wait(SECONDS)) == "v5"


@pytest.mark.spec("RT-36")
@pytest.mark.parametrize("backlog", [10, 60])
async def test_the_backlog_of_another_version_is_not_read(hosts: Hosts, backlog: int) -> None:
    api = await hosts.open(definitions=[Definition("agent", "v2", STATE_VERSION)])
    for number in range(backlog):
        await (await api.create_session(SessionKey("app", f"v2-{number}"), "agent")).submit("r1", "a")
    rows = []
    backend = hosts.backend

    class Counting:
        def __getattr__(self, name):
            return getattr(backend, name)

        async def ready(self, scan):
            page = await backend.ready(scan)
            rows.extend(item.partition for item in page.items)
            return page

    old = await hosts.open([final("by v1")], start=False)
    turn = await (await old.create_session(KEY, "agent")).submit("r1", "a")
    await hosts.open([final("by v1")], backend=Counting())
    await turn.wait(SECONDS)

    assert set(rows) == {partition(KEY)}


@pytest.mark.spec("RT-38", "Q-05")
async def test_parallelism_bounds_the_turns_in_hand(hosts: Hosts) -> None:
    gates = Gates()
    active: list[int] = []
    high = []

    async def busy() -> str:
        active.append(1)
        high.append(len(active))
        await gates.passed("g")
        active.pop()
        return "ok"

    harness = ScriptedHarness([local("busy"), final()], tools={"busy": busy}, gates=gates)
    runtime = await hosts.open(harness, parallelism=2)
    session = await runtime.create_session(KEY, "agent")
    threads = [await session.create_thread(f"t{number}", "agent") for number in range(5)]
    turns = [await thread.submit(f"r{number}", "a") for number, thread in enumerate(threads)]
    await until(lambda: len(active) == 2)
    gates.open("g")
    for turn in turns:
        await turn.wait(SECONDS)

    assert max(high) == 2


@pytest.mark.spec("RT-40", "RT-39")
async def test_another_thread_is_not_in_the_context(hosts: Hosts) -> None:
    runtime = await hosts.open([final("heard {context}")])
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    await session.call("r1", "secret of main", SECONDS)

    assert str(await other.call("r2", "of x", SECONDS)) == "heard of x"


@pytest.mark.spec("RT-42")
async def test_unfinished_work_is_not_closed(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    thread = await session.create_thread("x", "agent")
    turn = await thread.submit("r1", "a")
    await refused(thread.close(), Unfinished)
    await refused(session.close(), Unfinished)
    assert (await turn.status()).status is TurnStatus.QUEUED
    await runtime.start()
    await turn.wait(SECONDS)
    await thread.close()
    await session.close()

    assert (await session.view()).status is ResourceStatus.CLOSED


@pytest.mark.spec("RT-43")
async def test_a_view_tells_whether_it_is_open(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    thread = await session.create_thread("x", "agent")
    await thread.close()

    assert (await session.view()).status is ResourceStatus.OPEN
    assert (await thread.view()).status is ResourceStatus.CLOSED


@pytest.mark.spec("RT-07", "RT-08", "RT-44", "RT-09", "RT-46", "RT-47", "RC-20")
async def test_a_recovered_turn_has_a_run_for_each_invocation(hosts: Hosts) -> None:
    def executors():
        return {"hands": FunctionExecutor({"work": lambda: "worked"})}

    runtime = await hosts.open([external("hands", "work"), final("{results}")], executors=executors())
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    assert str(await turn.wait(SECONDS)) == "worked"
    first, second = (await turn.list_runs()).items
    before = (await turn.list_steps(first.run_id)).items
    after = (await turn.list_steps(second.run_id)).items

    assert (first.status, second.status) == (RunStatus.SUSPENDED, RunStatus.COMPLETED)
    assert first.run_id != second.run_id
    assert (first.number, second.number) == (1, 2)
    assert after[0].phase is StepPhase.APPLYING_RESULTS
    assert after[0].resumed_from_step_id == before[-1].step_id
    assert {step.step_id for step in before}.isdisjoint(step.step_id for step in after)
    assert await turn.get_run(second.run_id) == second
    assert await turn.get_step(second.run_id, after[-1].step_id) == after[-1]
    assert after[-1].status is StepStatus.COMPLETED
    page = await turn.list_runs(None, 1)
    assert (await turn.list_runs(page.cursor, 1)).items == (second,)
    await refused(turn.get_step(second.run_id, "nothing"), NotFound)


@pytest.mark.spec("RT-44", "MC-01")
async def test_model_calls_belong_to_a_run(hosts: Hosts) -> None:
    runtime = await hosts.open([say("one"), final("two")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn.wait(SECONDS)
    (run,) = (await turn.list_runs()).items
    calls = (await turn.list_model_calls(run.run_id)).items

    assert [call.status for call in calls] == [ModelStatus.COMPLETED, ModelStatus.COMPLETED]
    assert await turn.get_model_call(run.run_id, calls[1].model_call_id) == calls[1]
    of_step = await turn.list_model_calls(run.run_id, calls[0].step_id)
    assert of_step.items == calls[:1]
    await refused(turn.get_model_call(run.run_id, "nothing"), NotFound)


@pytest.mark.spec("RT-48")
async def test_finalization_is_a_visible_phase(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    await turn.wait(SECONDS)

    phases = [event.data["phase"] for event in await all_events(turn) if event.type == "step.phase"]
    assert phases == ["FINALIZATION"]


@pytest.mark.spec("RT-49", "IN-12")
async def test_a_stopped_run_is_no_ended_turn(hosts: Hosts) -> None:
    runtime = await hosts.open([approval("t"), final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)
    (run,) = (await turn.list_runs()).items

    assert run.status is RunStatus.SUSPENDED
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.APPROVAL]


@pytest.mark.spec("RT-56")
async def test_what_does_not_exist_is_not_found_at_the_first_operation(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    nowhere = runtime.get_session(SessionKey("app", "nowhere"))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")

    await refused(nowhere.snapshot(), NotFound)
    await refused(nowhere.submit("r1", "a"), NotFound)
    await refused(session.get_thread("no").submit("r2", "a"), NotFound)
    await refused(session.get_thread("no").view(), NotFound)
    await refused(session.get_turn("no").status(), NotFound)
    await refused(session.get_turn("no").cancel("c1"), NotFound)
    await refused(turn.get_run("no"), NotFound)
    await refused(turn.list_steps("no"), NotFound)
    await refused(turn.respond("r3", "no", True), NotFound)


async def test_a_bad_id_is_refused_where_the_handle_is_made(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")

    for make in (
        lambda: runtime.get_session(SessionKey("", "x")),
        lambda: session.get_thread("a\x00b"),
        lambda: session.get_turn(""),
        lambda: session.stream_events(after="nonsense"),
    ):
        with pytest.raises(InvalidRequest):
            make()


@pytest.mark.spec("RT-57")
async def test_each_level_has_its_own_snapshot_and_history(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    turns = [
        await session.submit("r1", "a"),
        await session.submit("r2", "b"),
        await other.submit("r3", "c"),
        await other.submit("r4", "d"),
    ]
    for turn in turns:
        await turn.wait(SECONDS)
    whole = await session.snapshot()
    narrow = await session.snapshot(EventFilter(thread_id="x"))
    thread = await other.snapshot()
    one = await turns[2].snapshot()

    assert thread.projection == narrow.projection
    assert set(thread.projection.turns) == {turns[2].turn_id, turns[3].turn_id}
    assert set(one.projection.turns) == {turns[2].turn_id}
    assert set(whole.projection.turns) == {turn.turn_id for turn in turns}
    assert await texts(turns[3]) == [("user", "d"), ("assistant", "ok")]
    assert sorted(text for _, text in await texts(other)) == ["c", "d", "ok", "ok"]
    with pytest.raises(InvalidRequest):
        await other.snapshot(EventFilter(thread_id="main"))


@pytest.mark.spec("RT-10")
async def test_retry_and_reconnect_make_no_thread(hosts: Hosts) -> None:
    runtime = await hosts.open([Fail(runs=1), final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    for _ in range(3):
        await session.submit("r1", "a")
        async with session.stream_events() as events:
            await anext(events)

    assert [thread.thread_id for thread in await session.list_threads()] == ["main"]


@pytest.mark.spec("RT-24")
async def test_many_coroutines_share_one_runtime(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")])
    session = await runtime.create_session(KEY, "agent")
    threads = await asyncio.gather(*(session.create_thread(f"t{n}", "agent") for n in range(10)))
    turns = await asyncio.gather(
        *(thread.submit(f"r{i}-{thread.thread_id}", "a") for i in range(5) for thread in threads)
    )
    answers = await asyncio.gather(*(turn.wait(SECONDS) for turn in turns))

    assert {str(answer) for answer in answers} == {"ok"}
    for thread in threads:
        assert [view.ordinal for view in await thread.list_turns()] == [1, 2, 3, 4, 5]


@pytest.mark.spec("RC-04", "RT-50")
async def test_a_host_without_the_executors_leaves_the_work_to_others(hosts: Hosts) -> None:
    script = [external("hands", "work"), final("{results}")]
    without = await hosts.open(script)
    session = await without.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    view = await turn.status()
    assert view.status is TurnStatus.QUEUED
    assert [reason.kind for reason in view.waiting_on] == [WaitKind.DEFINITION_MISSING]
    assert [type(error).__name__ for error in hosts.errors] == ["Incompatible"]
    await hosts.open(script, executors={"hands": FunctionExecutor({"work": lambda: "worked"})})

    assert str(await turn.wait(SECONDS)) == "worked"


async def test_another_loop_is_told_where_to_call(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(session.view())
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)

    assert isinstance(caught[0], WrongLoop)
    assert "run_coroutine_threadsafe" in str(caught[0])
    future = asyncio.run_coroutine_threadsafe(session.view(), asyncio.get_running_loop())
    assert (await asyncio.wrap_future(future)).status is ResourceStatus.OPEN


async def test_a_wait_on_another_event_loop_is_refused_and_takes_no_part(hosts: Hosts) -> None:
    """Also where others wait in the same Session, so that a reader of its timeline is at work."""
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="g"), final("ok")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", "a") for number in range(2)]
    waiting = [asyncio.create_task(turn.wait(SECONDS)) for turn in turns]
    await gates.reached("g")

    for timeout in (0, 1, None):
        error = await asyncio.to_thread(lambda timeout=timeout: asyncio.run(_refusal(turns[0].wait(timeout))))
        assert isinstance(error, WrongLoop)
    gates.open("g")

    assert [str(message) for message in await asyncio.gather(*waiting)] == ["ok", "ok"]


async def _refusal(work: Any) -> BaseException | None:
    try:
        await work
    except BaseException as error:
        return error
    return None


@pytest.mark.spec("RT-01", "RT-27")
async def test_the_native_journal_holds_no_queue_and_no_lease(hosts: Hosts) -> None:
    from agentscope_durable.contracts.questions import LoadThread
    from agentscope_durable.contracts.status import Audience

    runtime = await hosts.open([manual("ask")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn_is(turn, TurnStatus.WAITING)
    rows = await hosts.backend.query(
        LoadThread(session=KEY, thread_id="main", first=1, last=1000), audience=Audience.HOST
    )
    native = b"".join(row.journal for row in rows)

    assert rows
    assert runtime.owner.encode() not in native
    assert b"fence" not in native and b"lease" not in native


async def test_a_thread_handle_knows_its_key(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")

    assert session.get_thread("x").key == ThreadKey(KEY, "x")
    assert session.key == KEY
    assert "app" in repr(session) and "x" in repr(session.get_thread("x"))


async def test_one_kind_of_preview_may_be_asked_for_by_itself(hosts: Hosts) -> None:
    runtime = await hosts.open(ScriptedHarness([final("hello")]))
    session = await runtime.create_session(KEY, "agent")

    async with session.stream_events(deltas=EventDeltaType.MESSAGE) as events:
        turn = await session.submit("r1", "hi")
        await turn.wait(SECONDS)
        text = await anext(event.text async for event in events if isinstance(event, EventDelta))

    assert text == "hello"
    for unknown in ("mesage", {"mesage"}, None, 5):
        with pytest.raises(InvalidRequest, match="tool_arguments"):
            session.stream_events(deltas=unknown)  # type: ignore[arg-type]


@pytest.mark.spec("RT-14")
async def test_a_session_has_a_key_of_two_parts_and_a_pinned_definition(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(SessionKey("app", "a/b: ü"), "agent")
    view = await session.view()
    binding = (await session.main_thread().view()).binding

    assert view.session == SessionKey("app", "a/b: ü")
    assert (binding.harness, binding.definition_version, binding.state_version) == ("agent", "v1", STATE_VERSION)
    await refused(runtime.create_session(SessionKey("app", ""), "agent"), InvalidRequest)


@pytest.mark.spec("RC-21", "BE-05")
async def test_a_store_says_whether_processes_and_hosts_may_share_it(
    hosts: Hosts, request: pytest.FixtureRequest
) -> None:
    runtime = await hosts.open()
    view = await runtime.capabilities()

    said = (view.persistent, view.shared, view.hosts_shared)
    assert (
        said
        == {
            "memory": (False, False, False),
            "sqlite": (True, True, False),  # a file of one machine: another container has another one
            "postgres": (True, True, True),
        }[request.node.callspec.params["backend"]]
    )


@pytest.mark.spec("LF-04")
async def test_a_backend_closes_only_what_it_opened(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    await runtime.create_session(KEY, "agent")
    await runtime.close()
    await hosts.backend.close()

    assert (await (await hosts.open()).get_session(KEY).view()).status is ResourceStatus.OPEN
