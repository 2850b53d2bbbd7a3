"""`SessionEventClient`: a timeline for a host that polls by itself."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.errors import InvalidCursor, InvalidRequest, Misuse, NotFound
from agentscope_durable.contracts.events import Committed, EventFilter, cursor_of
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.replay import SessionEventClient
from agentscope_durable.testing.scripted_harness import final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused


@pytest.mark.spec("ST-20", "ST-19")
async def test_a_host_polls_by_itself_and_acknowledges(hosts: Hosts) -> None:
    runtime = await hosts.open([say("one"), final("two")])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "a")
    await turn.wait(SECONDS)
    everything = await all_events(session)
    client = SessionEventClient(hosts.backend, KEY)
    applied: list[int] = []
    saved = None

    while not client.caught_up:
        for fact in await client.poll(5):
            assert isinstance(fact, Committed)
            applied.append(fact.event.sequence)
            client.acknowledge(fact)
            saved = client.cursor
            if len(applied) == 7:
                # The host dies and starts again from what it has saved.
                client = SessionEventClient(hosts.backend, KEY, after=saved)
                break

    assert applied == [event.sequence for event in everything]
    assert await client.poll() == ()


@pytest.mark.spec("ST-19", "ST-20")
async def test_what_is_not_acknowledged_is_given_again(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    await session.submit("r1", "a")
    client = SessionEventClient(hosts.backend, KEY)

    first = await client.poll()
    assert len(first) == 4 and client.cursor is None
    assert await client.poll() == first
    client.acknowledge(first[2])
    assert client.cursor == first[2].cursor
    assert await client.poll() == first[3:]
    with pytest.raises(Misuse):
        client.acknowledge(first[2])


@pytest.mark.spec("ST-30", "FI-10")
async def test_it_keeps_to_its_filter_and_an_empty_page_is_not_the_end(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    for number in range(5):
        await session.submit(f"r{number}", "a")
    other = await session.create_thread("x", "agent")
    mine = await other.submit("mine", "b")
    client = SessionEventClient(hosts.backend, KEY, EventFilter(thread_id="x"))

    pages = []
    while not client.caught_up:
        page = await client.poll(4)
        pages.append(page)
        for fact in page:
            client.acknowledge(fact)

    assert pages[0] == ()
    assert [fact.event for page in pages for fact in page] == await all_events(other)
    of_turn = SessionEventClient(hosts.backend, KEY, EventFilter(thread_id="x", turn_id=mine.turn_id))
    assert [fact.event for fact in await of_turn.poll(4)] == await all_events(mine)


async def test_what_cannot_be_is_refused(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    await runtime.create_session(KEY, "agent")
    for cursor in ("", "nonsense", "e1-0-0", cursor_of(SessionKey("app", "other"), 1)):
        with pytest.raises(InvalidCursor):
            SessionEventClient(hosts.backend, KEY, after=cursor)
    with pytest.raises(InvalidRequest):
        SessionEventClient(hosts.backend, SessionKey("", ""))
    with pytest.raises(InvalidRequest, match="EventFilter"):
        SessionEventClient(hosts.backend, KEY, "main")  # type: ignore[arg-type]
    for limit in (0, -1, 1001, True, "5"):
        await refused(SessionEventClient(hosts.backend, KEY).poll(limit), InvalidRequest)
    await refused(SessionEventClient(hosts.backend, KEY, after=cursor_of(KEY, 1000)).poll(), InvalidCursor)
    await refused(SessionEventClient(hosts.backend, SessionKey("app", "nobody's")).poll(), NotFound)
