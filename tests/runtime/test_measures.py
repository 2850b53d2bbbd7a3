"""What operators can measure: how a Session grows, and how busy the store is (BE-28)."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.bodies import INLINE_MAX_BYTES
from agentscope_durable.contracts.errors import Forbidden, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import MeasureSession, MeasureStore
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused


@pytest.mark.spec("BE-28")
async def test_the_growth_of_a_session_can_be_measured(hosts: Hosts) -> None:
    runtime = await hosts.open(ScriptedHarness([say("x" * 1000), final()]))
    operations = HostOperations(hosts.backend)
    session = await runtime.create_session(KEY, "agent")
    other = await runtime.create_session(SessionKey("app", "other"), "agent")
    empty = await operations.measure(KEY)
    assert (empty.session, empty.commits, empty.events) == (KEY, 1, len(await all_events(session)))

    sizes = [empty]
    for number in range(4):
        await session.call(f"r{number}", "go", timeout=SECONDS)
        sizes.append(await operations.measure(KEY))
    assert sizes[-1].events == len(await all_events(session))
    grown = [after.log_bytes - before.log_bytes for before, after in zip(sizes, sizes[1:], strict=False)]
    # Each Turn has the same in it, so each adds the same, but for numbers that have become longer.
    assert min(grown) > 1000
    assert max(grown) < min(grown) * 1.2
    assert [after.commits - before.commits for before, after in zip(sizes, sizes[1:], strict=False)][1:] == [
        sizes[1].commits - sizes[0].commits
    ] * 3
    assert sizes[-1].records > sizes[0].records
    assert sizes[-1].record_bytes > sizes[0].record_bytes
    # The row that every commit rewrites does not grow; and a neighbour's growth is not this one's.
    assert sizes[-1].head_bytes < 500
    assert (await operations.measure(other.key)).log_bytes == empty.log_bytes


@pytest.mark.spec("BE-28")
@pytest.mark.backend("sqlite")
async def test_large_bodies_are_counted_where_they_are(tmp_path: Path) -> None:
    async with LocalBackend.open(tmp_path) as backend:
        operations = HostOperations(backend)
        runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness([final()]))])
        async with runtime:
            session = await runtime.create_session(KEY, "agent")
            await session.submit("r1", "x" * INLINE_MAX_BYTES)
            size = await operations.measure(KEY)
            assert size.objects == 1
            assert size.object_bytes > INLINE_MAX_BYTES > size.log_bytes
            store = await operations.measure_store()
            assert store.changes == size.commits
            assert 0 < store.transactions <= store.changes
            assert store.stored_bytes > size.log_bytes + size.record_bytes


@pytest.mark.spec("BE-28")
async def test_only_an_operator_measures(hosts: Hosts) -> None:
    for question in (MeasureSession(session=KEY), MeasureStore()):
        await refused(hosts.backend.query(question), Forbidden)
    await refused(HostOperations(hosts.backend).measure(KEY), NotFound)


@pytest.mark.spec("BE-28", "RT-21")
@pytest.mark.backend("sqlite")
async def test_a_store_can_be_measured_and_watched_without_writing_to_it(tmp_path: Path) -> None:
    async with LocalBackend.open(tmp_path) as backend:
        async with DurableRuntime(
            backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness([final()]))]
        ) as runtime:
            session = await runtime.create_session(KEY, "agent")
            await session.submit("r1", "go")
        operations = HostOperations(backend)
        before = await operations.measure(KEY), await operations.watchdog(0)
    assert before[1].unclaimed == 1
    async with LocalBackend.open(tmp_path, read_only=True) as backend:
        operations = HostOperations(backend)
        assert await operations.measure(KEY) == before[0]
        watched = await operations.watchdog(0)
        assert (watched.owned, watched.unclaimed, watched.complete) == (0, 1, True)
        store = await operations.measure_store()
        assert (store.changes, store.stored_bytes > 0) == (0, True)
