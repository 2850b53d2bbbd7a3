"""What the operator of a store may ask that nobody else may: over the fences between namespaces, by an id alone."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.errors import Forbidden, InvalidRequest, NotFound
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.questions import FindTurn, ListAllSessions
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.scripted_harness import final
from tests.runtime.conftest import Hosts

KEYS = [SessionKey("a", "1"), SessionKey("a", "2"), SessionKey("b", "1")]


async def test_a_turn_is_found_by_its_id_alone(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    turns = []
    for key in KEYS:
        session = await runtime.create_session(key, "agent")
        thread = await session.create_thread("side/thread", "agent")
        turns += [await session.submit("r1", "go"), await thread.submit("r2", "go")]
    operations = HostOperations(hosts.backend)

    for turn in turns:
        found = await operations.find_turn(turn.turn_id)
        assert (found.thread_key, found.turn_id) == (turn.thread_key, turn.turn_id)

    assert found.thread_key == ThreadKey(KEYS[2], "side/thread")
    with pytest.raises(NotFound, match="no-turn"):
        await operations.find_turn("no-turn")
    with pytest.raises(InvalidRequest):
        await operations.find_turn("\x1b[2J")


async def test_sessions_of_every_namespace_are_listed_in_pages(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    for key in KEYS:
        await runtime.create_session(key, "agent")
    operations = HostOperations(hosts.backend)

    first = await operations.list_sessions(limit=2)
    rest = await operations.list_sessions(first.cursor, limit=2)

    assert [view.session for view in (*first, *rest)] == KEYS
    assert rest.cursor is None


async def test_nobody_else_looks_over_the_fences(hosts: Hosts) -> None:
    for question in (ListAllSessions(), FindTurn(turn_id="t1")):
        with pytest.raises(Forbidden):
            await hosts.backend.query(question)
