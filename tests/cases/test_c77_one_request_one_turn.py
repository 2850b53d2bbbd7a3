"""C77: a retry after a lost response made a second run and a second bill. C78: an id in use started something else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentscope_durable.contracts.errors import RequestConflict
from agentscope_durable.runtime.runtime import Definition, DurableRuntime
from agentscope_durable.testing.scripted_harness import (
    STATE_VERSION,
    Gates,
    ScriptedHarness,
    Stall,
    final,
)
from tests.cases.programs import job_of, opening
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, Hosts, all_events, refused, turn_is

CLIENTS = 20
INPUT = {
    "version": "1",
    "content": [
        {"type": "text", "text": "look at this"},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png", "mediaType": "image/png"}},
    ],
}
SAME_INPUT = {
    "content": [
        {"text": "look at this", "type": "text"},
        {"source": {"mediaType": "image/png", "url": "https://example.org/a.png", "type": "url"}, "type": "image"},
    ],
    "version": "1",
}


@pytest.mark.case("C77")
@pytest.mark.spec("AD-02", "AD-03")
async def test_twenty_clients_with_one_request_get_one_turn(hosts: Hosts) -> None:
    harness = ScriptedHarness([final()])
    runtime = await hosts.open(harness)
    clients = [await hosts.open() for _ in range(CLIENTS)]
    await runtime.create_session(KEY, "agent")

    turns = await asyncio.gather(
        *(
            client.get_session(KEY).submit("r1", INPUT if number % 2 else SAME_INPUT)
            for number, client in enumerate(clients)
        )
    )
    (turn_id,) = {turn.turn_id for turn in turns}
    session = runtime.get_session(KEY)
    await turn_is(session.get_turn(turn_id), "COMPLETED")

    # After it has ended, and from a client that was not there before.
    assert (await session.submit("r1", SAME_INPUT)).turn_id == turn_id
    assert (await (await hosts.open()).get_session(KEY).submit("r1", INPUT)).turn_id == turn_id
    assert len(await session.list_turns()) == 1
    assert harness.ledger.count("model") == 1

    events = await all_events(session)
    error = await refused(session.submit("r1", "something else"), RequestConflict)
    assert (error.request_id, error.field) == ("r1", "input")
    other = await session.create_thread("other", "agent")
    error = await refused(other.submit("r1", INPUT), RequestConflict)
    assert "thread" in error.field
    kept = [event.type for event in (await all_events(session))[len(events) :]]
    assert kept == ["thread.created"]


@pytest.mark.case("C77")
@pytest.mark.parametrize("backend", PERSISTENT)
async def test_it_is_the_same_request_after_a_restart(tmp_path: Path, backend: str) -> None:
    definitions = [Definition("agent", "v1", STATE_VERSION)]

    async def submit(request: object) -> str:
        async with (
            opening(job_of(backend, tmp_path)) as store,
            DurableRuntime(backend=store, definitions=definitions) as api,
        ):
            session = await api.create_session(KEY, "agent")
            return (await session.submit("r1", request)).turn_id

    assert await submit(INPUT) == await submit(SAME_INPUT)
    await refused(submit("something else"), RequestConflict)


@pytest.mark.case("C78")
@pytest.mark.spec("AD-03")
async def test_an_id_in_use_is_used_for_nothing_else(hosts: Hosts) -> None:
    gates = Gates()
    runtime = await hosts.open(ScriptedHarness([Stall(gate="busy"), final("{inputs}")], gates=gates))
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await gates.reached("busy")
    view = await turn.status()
    events = await all_events(session)

    for again in (
        lambda: turn.steer("r1", "go"),
        lambda: turn.inject("r1", "go"),
        lambda: turn.cancel("r1"),
        lambda: turn.pause("r1"),
        lambda: turn.resume("r1", view.revision),
        lambda: turn.signal("r1", "x.app.go"),
        lambda: turn.withdraw("r1", "r1"),
    ):
        error = await refused(again(), RequestConflict)
        assert error.request_id == "r1"
    await turn.steer("s1", "quickly")
    await refused(turn.inject("s1", "quickly"), RequestConflict)
    await refused(session.submit("s1", "quickly"), RequestConflict)

    assert [event.type for event in (await all_events(session))[len(events) :]].count("signal.accepted") == 1
    gates.open("busy")
    await turn_is(turn, "COMPLETED")
    assert str(await turn.result()) == "quickly"
    assert len(await session.list_turns()) == 1
