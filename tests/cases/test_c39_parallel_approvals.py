"""C39: ids came from the place in the graph only, so parallel approvals collided and answers went to the wrong tool."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.errors import AlreadyDecided
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final, together
from tests.census.forks import ForkServer
from tests.runtime.conftest import Hosts, all_events, refused, turn_is

CALLS = [
    approval("pay", amount=1, value="paid"),
    approval("pay", amount=1, value="paid"),
    approval("pay", amount=1, value="paid"),
    approval("send", value="sent"),
    approval("drop", value="dropped"),
]
SCRIPT = [together(*CALLS), final("{results}")]
DENIED = {1, 4}
ORDERS = list(itertools.permutations(range(5)))
SAMPLE = 12


async def ask(session: Any, request_id: str = "r1") -> tuple[Any, list[Any]]:
    turn = await session.submit(request_id, "go")
    await turn_is(turn, "WAITING", where=lambda view: len(view.waiting_on) == 5)
    return turn, sorted(await turn.pending_interactions(), key=lambda question: question.call_id)


async def check(turn: Any, ledger: Any) -> None:
    """Each answer reached its call: the denied did nothing, the others ran once, or are known not to have run."""
    calls = {call.call_id: call for call in await turn.list_tools()}
    ran = [line["call"] for line in ledger.lines("tool") if line["turn"] == turn.turn_id]
    assert len(ran) == len(set(ran))
    for number in range(5):
        call_id = f"c1.{number}"
        if number in DENIED:
            assert (calls[call_id].state.value, call_id in ran) == ("DENIED", False)
        else:
            assert calls[call_id].state.value == ("COMPLETED" if call_id in ran else "CANCELLED")
    asked = [event for event in await all_events(turn) if event.type == "interaction.requested"]
    assert len(asked) == 5


@pytest.mark.case("C39")
@pytest.mark.spec("IN-01")
async def test_each_answer_reaches_its_own_call_in_any_order(hosts: Hosts) -> None:
    harness = ScriptedHarness(SCRIPT)
    first = await hosts.open(harness, parallelism=4)
    second = await hosts.open(harness, parallelism=4)
    for number, order in enumerate(random.Random(39).sample(ORDERS, SAMPLE)):
        key = SessionKey("app", f"c{number}")
        turn, questions = await ask(await first.create_session(key, "agent"))
        assert len({question.interaction_id for question in questions}) == 5
        for place, index in enumerate(order):
            # The answers come by two hosts in turn.
            by = (first, second)[place % 2].get_session(key).get_turn(turn.turn_id)
            question = questions[index]
            await by.respond(f"a{index}", question.interaction_id, index not in DENIED)
            again = await by.respond(f"a{index}", question.interaction_id, index not in DENIED)
            assert again.request_id == f"a{index}"
            await refused(turn.respond(f"b{index}", question.interaction_id, True), AlreadyDecided)
        await turn_is(turn, "COMPLETED")
        await check(turn, harness.ledger)
        assert harness.ledger.count("tool", turn=turn.turn_id) == 5 - len(DENIED)


@pytest.mark.case("C39")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize("place", range(5))
def test_a_crash_between_two_answers_loses_none_and_asks_none_again(
    forks: ForkServer, tmp_path: Path, place: int
) -> None:
    """The process dies at the commit of the answer `place`; another one gives all answers again."""
    job = {"folder": str(tmp_path), "order": list(random.Random(place).choice(ORDERS)), "die_at": place}
    died = forks.run("tests.cases.programs:answer_in_order", job)
    assert died.killed, died.output
    ended = forks.run("tests.cases.programs:answer_in_order", {**job, "die_at": -1})
    assert ended.code == 0, ended.output
