"""C28: a recovery that always throws was tried for a day, or for ever when its age was unlimited."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.status import ReplayRule, TurnStatus, WaitKind
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.ledger import Ledger
from agentscope_durable.testing.scripted_harness import Action, ScriptedHarness, final, local, say
from tests.census.forks import ForkServer
from tests.runtime.conftest import KEY, turn_is

SCRIPTS: dict[str, list[Action]] = {
    "model": [say("never heard"), final()],
    "tool": [local("crash", rule=ReplayRule.SAFE), final()],
    "harmless": [final("fine")],
}
TAKEOVERS_MAX = 5


@pytest.mark.case("C28")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("poison", ["model", "tool"])
async def test_a_turn_that_kills_every_process_is_parked_for_a_person(
    forks: ForkServer, tmp_path: Path, poison: str
) -> None:
    job = {"folder": str(tmp_path), "poison": poison}
    kill_at = "model.request.before:2" if poison == "model" else ""
    deaths = 0
    for number in range(TAKEOVERS_MAX + 4):
        # The neighbour asks the model too, in the first process only.
        place = kill_at if number == 0 else kill_at.replace(":2", ":1")
        ended = forks.run("tests.cases.programs:poison", job, failpoint=place)
        if not ended.killed:
            break
        deaths += 1
    assert ended.code == 0, ended.output
    assert deaths == TAKEOVERS_MAX + 1

    async with LocalBackend.open(tmp_path / "store") as backend, DurableRuntime(backend=backend) as api:
        session = api.get_session(KEY)
        (view,) = await session.list_turns()
        assert view.status is TurnStatus.WAITING
        (waiting,) = view.waiting_on
        assert waiting.kind is WaitKind.OPERATOR
        assert str(TAKEOVERS_MAX + 1) in waiting.id + waiting.next_action or deaths == TAKEOVERS_MAX + 1
        turn = session.get_turn(view.turn_id)
        paused = await turn.pause("pause")
        await turn.resume("resume", (await turn.status()).revision)
        assert paused is not None
        assert [one.kind for one in (await turn.status()).waiting_on] == [WaitKind.OPERATOR]

        # Somebody has looked, and another program serves it now.
        await HostOperations(backend).release(turn, request_id="released")
    mended = ScriptedHarness({**SCRIPTS, "tool": SCRIPTS["tool"]}, ledger=Ledger(), tools={"crash": lambda: "ok"})
    async with LocalBackend.open(tmp_path / "store") as backend:
        runtime = DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", mended)], poll_interval=0.05)
        async with runtime:
            await runtime.start()
            await turn_is(runtime.get_session(KEY).get_turn(view.turn_id), "COMPLETED")


def told(ended: Any) -> dict[str, Any]:
    return json.loads(ended.output.splitlines()[-1])
