"""Why does my Turn not advance? Each row of the table, with the situation that a person meets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentscope_durable.backend.queries.explanation import QUEUE_SHOWN_MAX
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import NotFound
from agentscope_durable.contracts.explanation import Explanation, Reason
from agentscope_durable.contracts.status import Actor, TurnStatus, WaitKind
from agentscope_durable.contracts.status import ReasonKind as R
from agentscope_durable.runtime.definitions import Definition
from agentscope_durable.runtime.handles import DurableTurn
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import ExecutorCapabilities, Succeeded, Unknown
from agentscope_durable.spi.record_store import ReadyPage, ReadyScan
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Fail,
    Gates,
    ScriptedHarness,
    Stall,
    Wait,
    approval,
    external,
    final,
    local,
    manual,
    say,
    together,
)
from tests.runtime.conftest import KEY, SECONDS, Hosts, kill, refused, turn_is, until
from tests.runtime.test_recovery import LEASE_MS
from tests.runtime.test_settlement import Remote


async def explained(turn: DurableTurn, *kinds: R) -> tuple[Explanation, list[Reason]]:
    """What `explain` says, once it has these rows in this order; a host's own moves take their moment."""
    seen: list[list[R]] = []

    async def so() -> bool:
        seen.append([reason.kind for reason in (await turn.explain()).reasons])
        return seen[-1] == list(kinds)

    try:
        await until(so)
    except TimeoutError:
        raise AssertionError(f"expected {kinds}, and it said {seen[-1]}") from None
    explanation = await turn.explain()
    assert explanation.summary == explanation.reasons[0].text
    for reason in explanation.reasons:
        assert reason.text.endswith((".", "!", "?")) or ":" in reason.text, reason.text
        assert "submit it again" not in reason.next_action
    return explanation, list(explanation.reasons)


async def submitted(hosts: Hosts, script: Any, **options: Any) -> DurableTurn:
    runtime = await hosts.open(script, **options)
    session = await runtime.create_session(KEY, "agent")
    return await session.submit("r1", "go")


# ------------------------------------------------------------ the queue


@pytest.mark.spec("DX-01", "DX-02")
async def test_queued_behind_a_head_that_waits_or_is_paused(hosts: Hosts) -> None:
    runtime = await hosts.open([approval("deploy"), final()])
    session = await runtime.create_session(KEY, "agent")
    head = await session.submit("r1", "go")
    turns = [await session.submit(f"next-{number}", "go") for number in range(3)]
    await turn_is(head, TurnStatus.WAITING)

    _, [behind] = await explained(turns[2], R.QUEUED_BEHIND)
    assert behind.id == head.turn_id
    assert "behind 3 Turns" in behind.text and "WAITING" in behind.text
    assert "Resolve or cancel the head" in behind.next_action and "another Thread" in behind.next_action
    assert behind.actor is Actor.USER
    assert behind.commands == (("explain", head.turn_id), ("cancel", head.turn_id))

    await head.pause("p1")
    _, [behind] = await explained(turns[0], R.QUEUED_BEHIND)
    assert "behind one Turn" in behind.text and "PAUSED" in behind.text

    # Independent work in another Thread is not held up.
    other = await session.create_thread("other", "agent")
    free = await other.submit("free", "go")
    await turn_is(free, TurnStatus.WAITING)
    await head.cancel("c1")
    await turn_is(turns[0], TurnStatus.WAITING)


async def test_a_long_queue_is_not_counted_to_its_end(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", "go") for number in range(QUEUE_SHOWN_MAX + 5)]

    last = (await turns[-1].explain()).reasons[0]
    near = (await turns[QUEUE_SHOWN_MAX].explain()).reasons[0]

    assert "behind many Turns" in last.text
    assert f"behind {QUEUE_SHOWN_MAX} Turns" in near.text


# ------------------------------------------------------------ queued, and nobody takes it


@pytest.mark.spec("DX-03")
async def test_no_host_was_started(hosts: Hosts) -> None:
    turn = await submitted(hosts, [final()], start=False)

    explanation, [row] = await explained(turn, R.NO_HOST)

    assert row.actor is Actor.OPERATOR
    assert "start()" in row.next_action and "agent@v1" in row.next_action
    assert explanation.binding.definition_version == "v1"
    assert explanation.hosts == ()


@pytest.mark.spec("DX-03")
async def test_every_host_that_has_the_definition_is_full(hosts: Hosts) -> None:
    gates = Gates()
    host = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates), parallelism=1)
    session = await host.create_session(KEY, "agent")
    busy = await session.submit("r1", "go")
    await gates.reached("g")
    other = await session.create_thread("other", "agent")
    turn = await other.submit("r2", "go")

    explanation, [row] = await explained(turn, R.HOSTS_FULL)

    assert f"{host.owner} 1 of 1" in row.text
    assert "parallelism" in row.next_action
    [shown] = explanation.hosts
    assert (shown.owner, shown.parallelism, shown.holds, shown.serves) == (host.owner, 1, 1, True)
    gates.open("g")
    await busy.wait(SECONDS)
    await turn.wait(SECONDS)


@pytest.mark.spec("DX-03")
async def test_a_host_that_has_it_does_not_reach_the_storage(hosts: Hosts, clock: ManualClock) -> None:
    host = await hosts.open([final()])
    # It is there and renews nothing: cut off, or frozen.
    kill(host)
    turn = await submitted(hosts, [final()], start=False)
    clock.advance(LEASE_MS + 5000)

    _, [row] = await explained(turn, R.HOST_SILENT)

    assert row.id == host.owner
    assert "has not renewed its lease for 35 s" in row.text
    assert "storage" in row.next_action


@pytest.mark.spec("DX-03")
async def test_no_living_host_has_the_definition_it_is_pinned_to(hosts: Hosts) -> None:
    turn = await submitted(hosts, [final()], start=False)
    living = await hosts.open([final()], version="v2")

    explanation, [row] = await explained(turn, R.DEFINITION_MISSING)

    assert row.id == "agent@v1"
    assert "agent@v1 (state scripted-1)" in row.text and f"{living.owner}: agent@v2" in row.text
    assert row.next_action == (
        "Start a host that has agent@v1 (state scripted-1) registered; the Turn waits as long as it takes."
    )
    [waiting] = (await turn.status()).waiting_on
    assert (waiting.id, waiting.next_action) == (row.id, row.next_action), "a status says the same"
    assert [(host.owner, host.serves, host.definitions) for host in explanation.hosts] == [
        (living.owner, False, ("agent@v2",))
    ]


@pytest.mark.spec("DX-03", "PT-10")
async def test_a_living_host_has_the_definition_and_keeps_its_state_in_another_format(hosts: Hosts) -> None:
    api = await hosts.open(definitions=[Definition("agent", "v1", "agentscope-thread-journal-v99")])
    turn = await (await api.create_session(KEY, "agent")).submit("r1", "go")
    living = await hosts.open([final()])

    _, [row] = await explained(turn, R.DEFINITION_MISSING)

    assert "agent@v1 (state agentscope-thread-journal-v99), which no living host has" in row.text
    assert f"{living.owner}: agent@v1 (state scripted-1)" in row.text
    assert row.next_action == (
        "Start a host that has agent@v1 (state agentscope-thread-journal-v99) registered, with the release of its"
        " adapter that reads this state: the living ones have agent@v1 with state scripted-1."
    )
    [waiting] = (await turn.status()).waiting_on
    assert (waiting.id, waiting.next_action) == (row.id, row.next_action)


async def test_the_only_host_that_has_it_is_draining(hosts: Hosts) -> None:
    gates = Gates()
    host = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates), lease=0.3)
    session = await host.create_session(KEY, "agent")
    await session.submit("r1", "go")
    await gates.reached("g")
    other = await session.create_thread("other", "agent")
    draining = asyncio.create_task(host.drain(None))
    await until(lambda: host._host.draining)
    turn = await other.submit("r2", "go")

    _, [row] = await explained(turn, R.HOSTS_DRAINING)

    assert host.owner in row.text and row.next_action == "Start another host."
    gates.open("g")
    await draining


async def test_a_host_has_room_and_has_not_come_to_it_yet(hosts: Hosts) -> None:
    class Slow(TransactionalSessionBackend):
        """Its host has not looked for work yet."""

        async def ready(self, scan: ReadyScan) -> ReadyPage:
            return ReadyPage([], 0, None)

    host = await hosts.open([final()], backend=Slow(hosts.backend.records))
    turn = await submitted(hosts, [final()], start=False)

    _, [row] = await explained(turn, R.HOST_SOON)

    assert row.id == host.owner and "room" in row.text


@pytest.mark.spec("AS-19")
async def test_no_host_reads_the_state_it_is_in_flight_with(hosts: Hosts) -> None:
    script = [approval("t"), final("ok")]
    first = await hosts.open(ScriptedHarness(script, writer="scripted 1"))
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    other = await hosts.open(ScriptedHarness(script, writer="scripted 2"), lease=0.3)
    turn = other.get_session(KEY).get_turn(turn.turn_id)
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)

    _, [row] = await explained(turn, R.WRITER_MISSING)

    assert "scripted 1" in row.text and "scripted 1" in row.next_action


# ------------------------------------------------------------ it waits for something outside


@pytest.mark.spec("DX-04")
async def test_an_approval_and_a_manual_result_name_what_to_type(hosts: Hosts) -> None:
    turn = await submitted(hosts, [together(approval("deploy"), manual("measure")), final()])
    await turn_is(turn, TurnStatus.WAITING)
    asked = {view.name: view.interaction_id for view in await turn.pending_interactions()}

    _, [approve, answer] = await explained(turn, R.APPROVAL, R.EXTERNAL_RESULT)

    assert approve.id == asked["deploy"] and "'deploy'" in approve.text
    assert approve.commands == (
        ("interactions", turn.turn_id),
        ("respond", turn.turn_id, asked["deploy"], "--approve"),
        ("respond", turn.turn_id, asked["deploy"], "--deny"),
    )
    assert answer.id == asked["measure"] and "'measure'" in answer.text
    assert answer.commands[-1] == ("respond", turn.turn_id, asked["measure"], "--result", "JSON")
    assert {approve.actor, answer.actor} == {Actor.USER}


@pytest.mark.spec("DX-04")
async def test_the_result_of_automatic_hands_comes_through_their_executor(hosts: Hosts) -> None:
    remote = Remote()
    turn = await submitted(hosts, [external("hands", "work"), final()], executors={"hands": remote})
    await until(lambda: bool(remote.queried))
    await turn_is(turn, TurnStatus.WAITING)

    _, [row] = await explained(turn, R.TOOL_RUNNING)

    [tool] = await turn.list_tools()
    assert row.id == tool.call_id and "'work'" in row.text and (tool.execution_id or "?") in row.text
    assert "through its executor" in row.next_action
    assert not any(command[0] == "respond" for command in row.commands)
    remote.outcome = Succeeded("done")
    await turn.wait(SECONDS)


async def test_a_call_that_no_living_host_can_start(hosts: Hosts, clock: ManualClock) -> None:
    remote = Remote()
    first = await hosts.open([external("hands", "work"), final()], executors={"hands": remote}, executor_parallelism=1)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await until(lambda: bool(remote.started))
    await turn_is(turn, TurnStatus.WAITING)
    await first.close()
    # This one could go on with the Turn, and has no hands.
    await hosts.open([final()], version="v1", name="agent")
    turn = (await hosts.open()).get_session(KEY).get_turn(turn.turn_id)

    _, [row] = await explained(turn, R.TOOL_RUNNING)

    assert row.actor is Actor.OPERATOR
    assert "'hands'" in row.next_action


@pytest.mark.spec("DX-07")
async def test_an_unknown_outcome_is_found_out_and_never_tried_again(hosts: Hosts) -> None:
    class Lost(Remote):
        capabilities = ExecutorCapabilities()

    remote = Lost()
    remote.outcome = Unknown("the line broke")
    turn = await submitted(hosts, [external("hands", "work"), final()], executors={"hands": remote})

    _, [row] = await explained(turn, R.TOOL_UNKNOWN)

    [tool] = await turn.list_tools()
    assert row.id == tool.call_id
    assert row.actor is Actor.OPERATOR
    assert "do not run it again" in row.next_action
    reconcile = ("reconcile", turn.turn_id, tool.call_id, "--evidence", "REFERENCE")
    assert row.commands[1:] == ((*reconcile, "--succeeded", "JSON"), (*reconcile, "--failed", "REASON"))


@pytest.mark.spec("DX-07")
async def test_a_cancel_that_does_not_end_says_which_call_it_waits_for(hosts: Hosts) -> None:
    remote = Remote()
    turn = await submitted(hosts, [external("hands", "work"), final()], executors={"hands": remote})
    await until(lambda: bool(remote.started))
    await turn_is(turn, TurnStatus.WAITING)
    await turn.cancel("c1")
    await until(lambda: bool(remote.cancelled))

    _, [row, call] = await explained(turn, R.CANCELLING, R.TOOL_RUNNING)

    [tool] = await turn.list_tools()
    assert tool.call_id in row.text and "'c1'" in row.text
    assert "Query the original execution" in row.next_action
    assert "asked to stop" in call.text
    remote.outcome = Succeeded("too late")
    await turn_is(turn, TurnStatus.CANCELLED)


async def test_a_failure_for_good_that_waits_for_its_effects(hosts: Hosts) -> None:
    remote = Remote()
    script = [together(external("hands", "work"), approval("t")), Fail(kind="ValueError"), final()]

    class FailsOnResume(ScriptedHarness):
        async def run(self, context):
            if context.start.number == 2:
                raise ValueError("a defect")
            return await super().run(context)

    turn = await submitted(hosts, FailsOnResume(script), executors={"hands": remote})
    await turn_is(turn, TurnStatus.WAITING)
    (question,) = await turn.pending_interactions()
    await turn.respond("a1", question.interaction_id, True)

    _, [row, _] = await explained(turn, R.FAILING, R.TOOL_RUNNING)

    assert "ValueError: a defect" in row.text
    remote.outcome = Succeeded("done")
    await turn_is(turn, TurnStatus.FAILED)


async def test_a_settlement_that_is_tried_again(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()

    class Clumsy(ScriptedHarness):
        async def settle(self, context):
            raise OSError("not now")

    turn = await submitted(hosts, Clumsy([local("t", gate="g"), final()], gates=gates))
    await gates.reached("g")
    await turn.cancel("c1")
    gates.open("g")

    _, [_, row] = await explained(turn, R.CANCELLING, R.SETTLEMENT)

    assert row.until_ms == clock() + 1000


async def test_a_signal_or_its_deadline(hosts: Hosts, clock: ManualClock) -> None:
    deadline = clock() + 10_000
    scripts = {"for ever": [Wait(key="x.k"), final()], "": [Wait(key="x.k", deadline_ms=deadline), final()]}
    runtime = await hosts.open(ScriptedHarness(scripts))
    session = await runtime.create_session(KEY, "agent")
    patient = await session.submit("r1", "for ever")
    timed = await (await session.create_thread("x", "agent")).submit("r2", "timed")

    _, [row] = await explained(patient, R.SIGNAL)
    assert (row.id, row.until_ms, row.actor) == ("x.k", None, Actor.USER)
    assert row.commands == (("signal", patient.turn_id, "x.k"),)
    _, [row] = await explained(timed, R.SIGNAL)
    assert (row.until_ms, row.actor) == (deadline, Actor.NOBODY)


@pytest.mark.spec("DX-06")
async def test_in_backoff_the_row_says_when_and_why(hosts: Hosts, clock: ManualClock) -> None:
    turn = await submitted(hosts, [Fail(kind="TimeoutError", message="no answer"), final()])
    view = await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.recovery is not None)

    _, [row] = await explained(turn, R.RETRY)

    assert view.recovery is not None
    assert row.until_ms == view.recovery.next_retry_at_ms == clock() + 1000
    assert "1 invocation has failed, of at most 4" in row.text and "TimeoutError: no answer" in row.text
    assert "Another host or a signal does not make it sooner" in row.next_action


# ------------------------------------------------------------ a person holds it


@pytest.mark.spec("DX-05")
async def test_a_result_arrived_and_it_is_still_paused(hosts: Hosts) -> None:
    turn = await submitted(hosts, [together(approval("deploy"), approval("notify")), final()])
    await turn_is(turn, TurnStatus.WAITING)
    await turn.pause("p1")
    first, second = await turn.pending_interactions()

    _, [paused, *_] = await explained(turn, R.PAUSED, R.APPROVAL, R.APPROVAL)
    assert "arrived" not in paused.text
    await turn.respond("a1", first.interaction_id, True)
    _, [paused, held] = await explained(turn, R.PAUSED, R.APPROVAL)
    view = await turn.status()

    assert "1 answer or result has arrived since" in paused.text
    assert held.id == second.interaction_id
    assert paused.commands == (("resume", turn.turn_id, "--revision", str(view.revision)),)
    # What it says to type is what lifts the pause.
    await turn.resume("res", int(paused.commands[0][-1]))
    assert (await turn.status()).status is not TurnStatus.PAUSED


async def test_a_pause_that_waits_for_its_boundary(hosts: Hosts) -> None:
    gates = Gates()
    turn = await submitted(hosts, ScriptedHarness([Stall(gate="g", obedient=False), say("one"), final()], gates=gates))
    await gates.reached("g")
    await turn.pause("p1")

    _, [row, running] = await explained(turn, R.PAUSING, R.RUNNING)

    assert "boundary" in row.text and "Run 1 is under way" in running.text
    gates.open("g")
    await turn_is(turn, TurnStatus.PAUSED)


async def test_a_turn_that_was_parked_for_an_operator(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    first = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates))
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("g")
    kill(first)
    clock.advance(LEASE_MS + 1)
    # One loss without a new checkpoint is one too many for this one.
    second = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates), takeovers_max=0)
    turn = second.get_session(KEY).get_turn(turn.turn_id)

    _, [row] = await explained(turn, R.OPERATOR)

    assert "its host was lost once" in row.text and row.actor is Actor.OPERATOR
    assert ("release", turn.turn_id) in row.commands and ("cancel", turn.turn_id) in row.commands
    gates.open("g")
    await HostOperations(hosts.backend).release(turn, request_id="op1")
    await turn.wait(SECONDS)


# ------------------------------------------------------------ it runs, or its host is gone


@pytest.mark.spec("DX-08")
async def test_a_running_turn_is_observed_again_and_not_submitted_again(hosts: Hosts) -> None:
    gates = Gates()
    turn = await submitted(hosts, ScriptedHarness([local("look"), final("done", gate="g")], gates=gates))
    await gates.reached("g")

    explanation, [row] = await explained(turn, R.RUNNING)

    assert explanation.turn.lease is not None
    assert row.id == explanation.turn.lease.owner and "renewed its lease" in row.text
    assert "A model has been asked for" in row.text and "The last commit was" in row.text
    assert "opens its stream again" in row.next_action and "submits nothing" in row.next_action
    assert row.commands == (("events", turn.turn_id, "--follow"),)
    gates.open("g")
    await turn.wait(SECONDS)


async def test_inputs_that_wait_for_the_next_boundary(hosts: Hosts) -> None:
    gates = Gates()
    turn = await submitted(hosts, ScriptedHarness([Stall(gate="g"), final()], gates=gates))
    await gates.reached("g")
    await turn.steer("s1", "the other way")

    _, [_, row] = await explained(turn, R.RUNNING, R.INPUTS)

    assert "1 accepted input waits" in row.text
    gates.open("g")
    await turn.wait(SECONDS)


async def test_a_turn_whose_host_is_gone(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    host = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates))
    turn = await (await host.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("g")
    kill(host)
    clock.advance(LEASE_MS + 1)

    _, [gone, silent] = await explained(turn, R.OWNER_GONE, R.HOST_SILENT)

    assert gone.id == silent.id == host.owner
    assert "fence 1" in gone.text and "has not renewed its lease for 30 s" in gone.text


@pytest.mark.spec("DX-08")
async def test_a_turn_that_has_ended_says_how(hosts: Hosts) -> None:
    scripts = {
        "well": [final("fine")],
        "badly": [Fail(kind="ValueError", message="a defect")],
        "long": [Stall(gate="g"), final()],
    }
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness(scripts, gates=gates))
    session = await runtime.create_session(KEY, "agent")
    well, badly = await session.submit("r1", "well"), await session.submit("r2", "badly")
    cancelled = await session.submit("r3", "long")
    await turn_is(badly, TurnStatus.FAILED)
    await gates.reached("g")
    await cancelled.cancel("c1")
    await turn_is(cancelled, TurnStatus.CANCELLED)

    _, [row] = await explained(well, R.ENDED)
    assert "COMPLETED" in row.text and "reads on from its cursor, or from a snapshot" in row.next_action
    _, [row] = await explained(badly, R.ENDED)
    assert "FAILED: ValueError: a defect" in row.text and "new request id" in row.next_action
    _, [row] = await explained(cancelled, R.ENDED)
    assert "CANCELLED" in row.text and "new request id" in row.next_action


@pytest.mark.spec("RT-56", "RT-21")
async def test_asking_finds_what_there_is_and_changes_nothing(hosts: Hosts) -> None:
    turn = await submitted(hosts, [final()], start=False)
    before = await turn.list_events()

    await turn.explain()
    await refused((await hosts.open()).get_session(KEY).get_turn("nothing").explain(), NotFound)

    assert await turn.list_events() == before
    assert (await turn.status()).waiting_on[0].kind is WaitKind.HOST
