"""C69: deleting old checkpoints emptied state that later deltas built on, and broke branching from older turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentscope_durable.contracts.identity import ThreadKey
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, say
from tests.runtime.conftest import KEY, Hosts

SCRIPT = (say("hm"), final("I know: {context}"))


def state_in(exported: bytes) -> list[Any]:
    """The checkpoint rows of an export, which are all of the state."""
    return json.loads(exported)["journal"][2]


@pytest.mark.case("C69")
@pytest.mark.spec("EV-19")
async def test_what_is_pruned_is_never_what_a_position_or_a_fork_stands_on(hosts: Hosts) -> None:
    runtime = await hosts.open(SCRIPT)
    operations = HostOperations(hosts.backend, checkpoints={"agent": ScriptedHarness.restore})
    session = await runtime.create_session(KEY, "agent")
    for text in "abcd":
        await session.call(text, text)
    thread = session.main_thread()
    page = await thread.checkpoints()
    branch = await thread.fork(page.items[1].position, ThreadKey(KEY, "branch"), "fork")
    assert str(await branch.call("e", "e")) == "I know: a, b, e"
    await thread.restore(page.items[2].position, page.current, "restore")

    async def every_state() -> dict[tuple[str, str], bytes]:
        return {
            (one.thread_id, checkpoint.position): await operations.export_checkpoint(one.key, checkpoint.position)
            for one in (thread, branch)
            for checkpoint in await one.checkpoints()
        }

    before = await every_state()
    receipt = await operations.prune_events(KEY, older_than=0)
    assert receipt.dropped > 0

    assert await every_state() == before, "each kept position restores byte-equal"
    for number, (thread_id, position) in enumerate(before):
        one = session.get_thread(thread_id)
        target = ThreadKey(KEY, f"fork-{number}")
        copy = await one.fork(position, target, f"fork-{number}")
        restored = await one.restore(position, (await one.checkpoints()).current, f"restore-{number}")
        wanted = state_in(before[thread_id, position])
        assert state_in(await operations.export_checkpoint(one.key, restored.position)) == wanted
        [forked] = await copy.checkpoints()
        told = state_in(await operations.export_checkpoint(target, forked.position))
        assert [row for row in told if row[0] in "mk"] == [row for row in wanted if row[0] in "mk"]
    # A fork goes on whatever becomes of its source.
    await operations.prune_events(KEY, older_than=0)
    assert str(await branch.call("f", "f")) == "I know: a, b, e, f"
    assert str(await session.get_thread("fork-0").call("g", "g")) == "I know: a, g"
