"""C39: ids came from the place in the graph only, so parallel approvals collided and answers went to the wrong tool.

Five gated calls of one model answer, three of them of the same tool with equal arguments. One of each kind is approved
as it is, one is approved with other arguments, one is denied.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.contracts.errors import AlreadyDecided, NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.runtime import DurableRuntime
from agentscope_durable.testing.ledger import EffectLedger
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final, together
from tests.cases.programs import job_of, opening
from tests.census.forks import ForkServer
from tests.every_store import PERSISTENT
from tests.runtime.conftest import KEY, Hosts, all_events, refused, turn_is, until

CALLS = [
    approval("pay", amount=1),
    approval("pay", amount=1),
    approval("pay", amount=1),
    approval("send", to="a"),
    approval("drop", what="x"),
]
SCRIPT = [together(*CALLS), final("{results}")]
ANSWERS: list[tuple[bool, dict[str, Any] | None]] = [
    (True, None),
    (False, None),
    (True, {"amount": 2}),
    (True, {"to": "b"}),
    (False, None),
]
DENIED = {index for index, (yes, _) in enumerate(ANSWERS) if not yes}
EFFECTS: dict[int, tuple[str, dict[str, Any]]] = {
    0: ("pay", {"amount": 1}),
    2: ("pay", {"amount": 2}),
    3: ("send", {"to": "b"}),
}
"""What each call that was let start does."""
ALL = os.environ.get("DURABLE_MATRIX") == "all"
SAMPLE = 12
ORDERS = list(itertools.permutations(range(5)))
CHOSEN = ORDERS if ALL else random.Random(39).sample(ORDERS, SAMPLE)


def tools(ledger: EffectLedger) -> dict[str, Callable[..., str]]:
    """The gated tools. Each says in the ledger what it was called with."""

    def doing(name: str) -> Callable[..., str]:
        def do(**arguments: Any) -> str:
            ledger.append(name, **arguments)
            return f"{name} done"

        return do

    return {name: doing(name) for name in ("pay", "send", "drop")}


async def answer(turn: Any, question: Any) -> Any:
    """The answer to this question, under the request id that belongs to it."""
    index = int(question.call_id.rpartition(".")[2])
    yes, arguments = ANSWERS[index]
    return await turn.respond(f"a{index}", question.interaction_id, yes, arguments=arguments)


async def asked(turn: Any) -> list[Any]:
    """The five questions, whether somebody has answered some of them or not, in the order of the calls."""
    questions: list[Any] = []

    async def all_there() -> bool:
        questions[:] = (await turn.snapshot()).projection.interactions.values()
        return len(questions) == len(CALLS)

    await until(all_there)
    return sorted(questions, key=lambda question: question.call_id)


async def check(turn: Any, ledger: EffectLedger) -> None:
    """Each answer reached its call: the denied did nothing, each other one did what its answer says, at most once."""
    calls = {call.call_id: call for call in await turn.list_tools()}
    ran = [line["call"] for line in ledger.lines("tool") if line["turn"] == turn.turn_id]
    assert len(ran) == len(set(ran))
    shown = {question.call_id: question for question in (await turn.snapshot()).projection.interactions.values()}
    for index, (yes, arguments) in enumerate(ANSWERS):
        call_id = f"c1.{index}"
        question, call = shown[call_id], calls[call_id]
        assert (question.response, question.request_id) == (yes, f"a{index}")
        edited = None if question.edited_arguments is None else json.loads(question.edited_arguments)
        assert edited == arguments
        assert json.loads(question.arguments) == CALLS[index].calls[0].arguments
        assert json.loads(call.arguments) == (arguments or CALLS[index].calls[0].arguments)
        if yes:
            # A process that died between a tool's start and its effect leaves a call that evidence has settled.
            assert call.state.value == ("COMPLETED" if call_id in ran else "CANCELLED")
        else:
            assert (call.state.value, call_id in ran) == ("DENIED", False)
    for index, (name, facts) in EFFECTS.items():
        assert ledger.count(name, **facts) == (f"c1.{index}" in ran), (name, facts)
    assert ledger.count("drop") == 0
    questions = [event for event in await all_events(turn) if event.type == "interaction.requested"]
    assert len({event.data["interactionId"] for event in questions}) == len(questions) == 5


@pytest.mark.case("C39")
@pytest.mark.spec("IN-01", "IN-09")
async def test_each_answer_reaches_its_own_call_in_any_order(hosts: Hosts) -> None:
    ledger = EffectLedger()
    harness = ScriptedHarness(SCRIPT, ledger=ledger, tools=tools(ledger))
    first = await hosts.open(harness, parallelism=4)
    second = await hosts.open(harness, parallelism=4)
    for number, order in enumerate(CHOSEN):
        before = len(ledger.lines())
        session = await first.create_session(SessionKey("app", f"c{number}"), "agent")
        turn = await session.submit("r1", "go")
        questions = await asked(turn)
        assert len({question.interaction_id for question in questions}) == 5
        for place, index in enumerate(order):
            # The answers come by two hosts in turn.
            by = (first, second)[place % 2].get_session(session.key).get_turn(turn.turn_id)
            receipt = await answer(by, questions[index])
            assert await answer(by, questions[index]) == receipt
            for other in (True, False):
                await refused(turn.respond(f"b{index}", questions[index].interaction_id, other), AlreadyDecided)
        await turn_is(turn, "COMPLETED")
        mine = EffectLedger()
        for line in ledger.lines()[before:]:
            mine.append(**line)
        await check(turn, mine)
        assert [mine.count(name, **facts) for name, facts in EFFECTS.values()] == [1, 1, 1]


@pytest.mark.case("C39")
@pytest.mark.parametrize(("backend", "place"), [*(("sqlite", n) for n in range(5)), ("postgres", 2)])
def test_a_crash_between_two_answers_loses_none_and_asks_none_again(
    forks: ForkServer, tmp_path: Path, backend: str, place: int
) -> None:
    """The process dies at the commit of the answer `place`; another one gives all answers again."""
    job = {**job_of(backend, tmp_path), "order": list(random.Random(place).choice(ORDERS)), "die_at": place}
    died = forks.run("tests.cases.programs:answer_in_order", job)
    assert died.killed, died.output
    ended = forks.run("tests.cases.programs:answer_in_order", {**job, "die_at": -1})
    assert ended.code == 0, ended.output


@pytest.mark.case("C39")
@pytest.mark.spec("IN-07")
@pytest.mark.parametrize("backend", PERSISTENT)
def test_each_answer_may_come_from_another_process_that_dies_of_it(
    forks: ForkServer, tmp_path: Path, backend: str
) -> None:
    job = {**job_of(backend, tmp_path), "order": list(random.Random(1).choice(ORDERS))}
    for place in range(5):
        died = forks.run("tests.cases.programs:answer_in_order", {**job, "from": place, "die_at": place})
        assert died.killed, died.output
    ended = forks.run("tests.cases.programs:answer_in_order", {**job, "from": 5, "die_at": -1})
    assert ended.code == 0, ended.output


@pytest.mark.case("C39")
@pytest.mark.spec("IN-03")
@pytest.mark.parametrize(("backend", "seed"), [*(("sqlite", n) for n in range(3)), ("postgres", 0)])
async def test_two_processes_answer_at_the_same_time_and_one_is_killed(
    forks: ForkServer, tmp_path: Path, backend: str, seed: int
) -> None:
    """Both give every answer, each in its own order and under the same request ids; the agent runs in one of them."""
    chance = random.Random(seed)
    job = {**job_of(backend, tmp_path), "order": list(chance.choice(ORDERS)), "die_at": chance.randrange(5)}
    running = asyncio.create_task(asyncio.to_thread(forks.run, "tests.cases.programs:answer_in_order", job))
    async with opening(job) as store, DurableRuntime(backend=store) as runtime:
        session = runtime.get_session(KEY)
        found: list[Any] = []

        async def submitted() -> bool:
            try:
                found[:] = await session.list_turns()
            except NotFound:
                return False
            return bool(found)

        await until(submitted)
        turn = session.get_turn(found[0].turn_id)
        questions = await asked(turn)
        for index in chance.choice(ORDERS):
            await answer(turn, questions[index])
    died = await running
    assert died.killed, died.output
    ended = await asyncio.to_thread(forks.run, "tests.cases.programs:answer_in_order", {**job, "die_at": -1})
    assert ended.code == 0, ended.output
