"""A host that drops its Run after each Step and takes it over: what is stored is all that the next Step has."""

from __future__ import annotations

import pytest

from agentscope_durable.contracts.commands import Claim
from agentscope_durable.contracts.errors import Misuse, Uncertain
from agentscope_durable.contracts.status import RunStatus, TurnStatus
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final, local, say
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, turn_is

SCRIPT = [say("first"), local("look"), approval("send"), final("{results}")]


async def test_every_step_begins_from_what_is_stored(hosts: Hosts) -> None:
    harness = ScriptedHarness(SCRIPT)
    runtime = await hosts.open(harness, recover_every_step=True)
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    view = await turn_is(turn, TurnStatus.WAITING)
    await turn.respond("p1", view.waiting_on[0].id, True)

    assert str(await turn.wait(SECONDS)) == "ok, ok"
    runs = (await turn.list_runs()).items
    assert len([run for run in runs if run.status is RunStatus.LOST]) >= len(SCRIPT)
    assert {run.owner for run in runs} == {runtime.owner}
    fences = [run.fence for run in runs]
    assert fences == sorted(set(fences))
    # No answer was asked for again and no tool ran twice: each Run went on where the former one stood.
    assert harness.ledger.count("model") == len(SCRIPT)
    assert [line["tool"] for line in harness.ledger.lines("tool")] == ["look", "send"]
    assert hosts.errors == []


async def test_a_takeover_whose_answer_is_lost_is_no_second_one(hosts: Hosts) -> None:
    """The claim that took the dropped Run over is sent again, and finds what it has taken."""
    backend = hosts.backend
    lost: list[int] = []

    class Losing:
        def __getattr__(self, name: str) -> object:
            return getattr(backend, name)

        async def execute(self, command: object, **options: object) -> object:
            answer = await backend.execute(command, **options)  # type: ignore[arg-type]
            if isinstance(command, Claim) and command.dropped and not command.again:
                lost.append(command.dropped)
                raise Uncertain("the commit", reason="a test lost the answer")
            return answer

    harness = ScriptedHarness(SCRIPT[:2])
    runtime = await hosts.open(harness, recover_every_step=True, backend=Losing())
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")

    assert str(await turn.wait(SECONDS)) == "done"
    assert lost == sorted(set(lost)), "each Run is dropped and taken over once"
    started = [event.run_id for event in await all_events(turn) if event.type == "run.started"]
    assert len(started) == len(lost) + 1 == len((await turn.list_runs()).items)
    assert harness.ledger.count("tool") == 1


async def test_the_switch_is_a_variable_of_the_surroundings(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_RECOVER_EVERY_STEP", "yes")
    with pytest.raises(Misuse, match="1 or 0, not 'yes'"):
        DurableRuntime(backend=hosts.backend)
    monkeypatch.setenv("DURABLE_RECOVER_EVERY_STEP", "1")
    runtime = await hosts.open([say("first"), final()])
    turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "a")
    assert await turn.wait(SECONDS) is not None
    assert len((await turn.list_runs()).items) > 1
