"""One Thread, one order (group Q)."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts import keys
from agentscope_durable.contracts.change import HEAD_CLAIM_BYTES, Reads
from agentscope_durable.contracts.ids import ID_CHARS_MAX
from agentscope_durable.contracts.records import encode
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import Fail, Gates, ScriptedHarness, Stall, approval, final, local, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, turn_is, until


@pytest.mark.spec("Q-01", "Q-10", "Q-11", "AD-14")
async def test_turns_start_in_the_order_of_their_admission(hosts: Hosts) -> None:
    first = await hosts.open([final()], start=False)
    session = await first.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", f"{number}") for number in range(5)]
    await first.close()
    runtime = await hosts.open([final()])
    session = runtime.get_session(KEY)
    await session.get_turn(turns[-1].turn_id).wait(SECONDS)
    started = [event.turn_id for event in await all_events(session) if event.type == "run.started"]
    listed, cursor = [], None
    while True:
        page = await session.list_turns(cursor, 2)
        listed += [view.turn_id for view in page]
        if (cursor := page.cursor) is None:
            break

    assert started == [turn.turn_id for turn in turns]
    assert listed == started


@pytest.mark.spec("Q-02", "Q-06")
async def test_a_waiting_head_blocks_its_thread_alone(hosts: Hosts) -> None:
    runtime = await hosts.open(ScriptedHarness({"ask": [approval("t"), final()], "": [final("ok")]}))
    session = await runtime.create_session(KEY, "agent")
    head = await session.submit("r1", "ask")
    following = await session.submit("r2", "go")
    await turn_is(head, TurnStatus.WAITING)
    research = await session.create_thread("research", "agent")
    assert str(await research.call("r3", "go", SECONDS)) == "ok"
    assert (await following.status()).status is TurnStatus.QUEUED
    (question,) = await head.pending_interactions()
    await head.respond("a1", question.interaction_id, True)

    assert str(await following.wait(SECONDS)) == "ok"


@pytest.mark.spec("Q-03")
async def test_a_paused_head_blocks_until_it_is_resumed(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")], start=False)
    session = await runtime.create_session(KEY, "agent")
    head = await session.submit("r1", "a")
    following = await session.submit("r2", "b")
    await head.pause("p1")
    await runtime.start()
    other = await session.create_thread("x", "agent")
    await other.call("r3", "c", SECONDS)
    view = await head.status()
    assert view.status is TurnStatus.PAUSED
    assert (await following.status()).status is TurnStatus.QUEUED
    await head.resume("u1", view.revision)

    assert str(await following.wait(SECONDS)) == "ok"


@pytest.mark.spec("Q-04", "CT-26", "RC-13")
async def test_a_head_in_backoff_blocks(hosts: Hosts, clock: ManualClock) -> None:
    harness = ScriptedHarness({"bad": [Fail(runs=1), final("{inputs}")], "": [final("ok")]})
    runtime = await hosts.open(harness)
    session = await runtime.create_session(KEY, "agent")
    head = await session.submit("r1", "bad")
    following = await session.submit("r2", "b")
    await turn_is(head, TurnStatus.WAITING)
    await head.steer("s1", "meanwhile")
    other = await session.create_thread("x", "agent")
    await other.call("r3", "c", SECONDS)
    assert (await following.status()).status is TurnStatus.QUEUED
    assert len(await head.list_runs()) == 1
    clock.advance(1001)
    assert str(await head.wait(SECONDS)) == "meanwhile"

    assert str(await following.wait(SECONDS)) == "ok"


@pytest.mark.spec("Q-05")
async def test_two_threads_run_at_the_same_time(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness({"": [Stall(gate="g"), final()]}, gates=gates))
    session = await runtime.create_session(KEY, "agent")
    other = await session.create_thread("x", "agent")
    one, two = await session.submit("r1", "a"), await other.submit("r2", "b")
    await turn_is(one, TurnStatus.RUNNING)
    await turn_is(two, TurnStatus.RUNNING)
    assert {(await turn.status()).status for turn in (one, two)} == {TurnStatus.RUNNING}
    gates.open("g")
    await one.wait(SECONDS)
    await two.wait(SECONDS)


@pytest.mark.spec("Q-08", "CT-07")
async def test_a_cancelled_queued_turn_is_skipped(hosts: Hosts) -> None:
    runtime = await hosts.open([final("ok")], start=False)
    session = await runtime.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", "a") for number in range(3)]
    await turns[1].cancel("c1")
    assert (await turns[1].status()).status is TurnStatus.CANCELLED
    await runtime.start()
    await turns[2].wait(SECONDS)
    started = [event.turn_id for event in await all_events(session) if event.type == "run.started"]

    assert started == [turns[0].turn_id, turns[2].turn_id]


@pytest.mark.spec("Q-09")
async def test_two_hosts_never_run_one_thread_at_once(hosts: Hosts) -> None:
    inside: list[str] = []
    overlaps: list[str] = []

    def harness() -> ScriptedHarness:
        async def work() -> str:
            if inside:
                overlaps.append("two at once")
            inside.append("one")
            await hosts.backend.dead_owners()
            inside.pop()
            return "ok"

        return ScriptedHarness([local("work"), final()], tools={"work": work})

    one, two = await hosts.open(harness()), await hosts.open(harness())
    session = await one.create_session(KEY, "agent")
    turns = [await session.submit(f"r{number}", "a") for number in range(50)]
    await turns[-1].wait(SECONDS)
    owners = {(await turn.list_runs()).items[0].owner for turn in turns}
    events = await all_events(session)
    order = [event.type for event in events if event.type in ("run.started", "run.ended")]

    assert overlaps == []
    assert order == ["run.started", "run.ended"] * 50
    assert owners <= {one.owner, two.owner}


@pytest.mark.spec("Q-12", "SE-06")
async def test_after_a_failed_or_cancelled_turn_the_next_has_a_clean_context(hosts: Hosts) -> None:
    gates = Gates()
    script = {
        "cancel": [local("t", gate="g"), final()],
        "fail": [local("t"), Fail(kind="ValueError")],
        "": [final("heard {context}")],
    }
    runtime = await hosts.open(ScriptedHarness(script, gates=gates))
    session = await runtime.create_session(KEY, "agent")
    cancelled = await session.submit("r1", "cancel")
    await gates.reached("g")
    await cancelled.cancel("c1")
    gates.open("g")
    await turn_is(cancelled, TurnStatus.CANCELLED)
    failed = await session.submit("r2", "fail")
    await turn_is(failed, TurnStatus.FAILED)

    assert str(await session.call("r3", "next", SECONDS)) == "heard cancel, fail, next"


@pytest.mark.spec("RT-38", "Q-05")
async def test_threads_with_the_longest_names_wait_for_each_other_and_none_fails(hosts: Hosts) -> None:
    gates = Gates()
    harness = ScriptedHarness([say("one"), local("t" * 200, value="v"), Stall(gate="g"), final("ok")], gates=gates)
    runtime = await hosts.open(harness, parallelism=64)
    session = await runtime.create_session(KEY, "agent")
    turns = []
    for number in range(50):
        thread = await session.create_thread("\N{GRINNING FACE}" * (ID_CHARS_MAX - 4) + f"{number:04}", "agent")
        turns.append(await thread.submit(f"r{number}", "a"))
    await gates.reached("g")

    async def full() -> bool:
        head = (await hosts.backend.records.read(keys.partition(KEY), Reads())).head
        return head is not None and len(encode(head)) > HEAD_CLAIM_BYTES

    await until(full)
    # The others could run and do not, and say that they wait for room.
    views = [await turn.status() for turn in turns]
    waiting = [view for view in views if view.status is TurnStatus.QUEUED]
    assert 0 < len(waiting) < len(turns)
    assert {reason.kind for view in waiting for reason in view.waiting_on} == {WaitKind.HOST}
    gates.open("g")

    assert [str(await turn.wait(SECONDS)) for turn in turns] == ["ok"] * 50
    assert hosts.errors == []
