"""`checkpoints`, `restore`, `fork`, `repair`: each says what it does, and none can be taken for another (C83)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.adapters.agentscope import AgentBuilder, AgentScopeAdapter
from agentscope_durable.cli.app import app
from agentscope_durable.cli.extra import typer
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final
from agentscope_durable.testing.scripted_model import scripted_model
from tests.cli.conftest import KEY, SESSION, Done
from tests.cli.test_explain import suggested
from tests.runtime.conftest import SECONDS, Hosts, texts, turn_is
from tests.runtime.test_examination import SCRIPT, altered, waiting  # noqa: F401 - a fixture

pytestmark = pytest.mark.backend("sqlite")
Typed = Callable[..., Any]
CODEC = ("--codec", "tests.cli.test_positions:codec")

codec = ScriptedHarness([]).restore
"""As an application names its own: `--codec module:name`."""


async def three_turns(hosts: Hosts, typed: Typed) -> list[str]:
    """A Thread with three Turns behind it, whose agent repeats what it was told; returns its positions."""
    runtime = await hosts.open([final("{context}")])
    session = await runtime.create_session(KEY, "agent")
    for word in ("one", "two", "three"):
        await (await session.submit(word, word)).wait(SECONDS)
    page: Done = await typed("checkpoints", SESSION, "--json")
    return [item["position"] for item in page.json["items"]]


@pytest.mark.case("C83")
async def test_going_back_and_branching_off(hosts: Hosts, typed: Typed) -> None:
    positions = await three_turns(hosts, typed)
    people: Done = await typed("checkpoints", SESSION)
    assert all(position in people.out for position in positions)
    assert [line for line in people.out.splitlines() if "now" in line][0].startswith(positions[-1])

    stale = await typed("restore", SESSION, positions[0], "--expected", positions[1], *CODEC, code=4)
    assert positions[-1] in stale.err or "stands" in stale.err
    done: Done = await typed("restore", SESSION, positions[0], "--expected", positions[-1], *CODEC, "--json")
    new = done.json["checkpoint"]["position"]
    assert new not in positions and done.json["checkpoint"]["source"]["position"] == positions[0]
    assert (await typed("checkpoints", SESSION, "--json")).json["current"] == new

    runtime = await hosts.open()
    await (await hosts.open([final("{context}")], start=False)).create_session(SessionKey("app", "c2"), "agent")
    branch: Done = await typed("fork", SESSION, positions[1], "app/c2", "branch", *CODEC)
    assert "app/c2, thread branch" in branch.out and positions[1] in branch.out
    main = await runtime.get_session(KEY).submit("r4", "four")
    other = await runtime.get_session(SessionKey("app", "c2")).get_thread("branch").submit("r5", "five")
    await main.wait(SECONDS)
    await other.wait(SECONDS)
    assert (await texts(main))[-1] == ("assistant", "one, four")
    assert (await texts(other))[-1] == ("assistant", "one, two, five")
    assert (await typed("doctor", "--deep")).code == 0


@pytest.mark.case("C80")
@pytest.mark.parametrize("entry", ["restore", "fork"])
async def test_a_request_that_is_typed_twice_happens_once(hosts: Hosts, typed: Typed, entry: str) -> None:
    positions = await three_turns(hosts, typed)
    if entry == "restore":
        command = ["restore", SESSION, positions[0], "--expected", positions[-1], *CODEC]
        other = ["restore", SESSION, positions[1], "--expected", positions[-1], *CODEC]
    else:
        command = ["fork", SESSION, positions[0], SESSION, "branch", *CODEC]
        other = ["fork", SESSION, positions[1], SESSION, "branch", *CODEC]

    first: Done = await typed(*command, "--request-id", "mine", "--json")
    again: Done = await typed(*command, "--request-id", "mine", "--json")
    different: Done = await typed(*other, "--request-id", "mine", "--json", code=4)

    assert first.json == again.json and first.json["requestId"] == "mine"
    assert "'mine'" in different.error["message"]


@pytest.mark.case("C82")
async def test_the_repair_that_doctor_suggests_lets_the_thread_go_on(
    waiting: tuple[Path, str],  # noqa: F811
    hosts: Hosts,
    typed: Typed,
) -> None:
    database, turn_id = waiting
    altered(database)
    repair = suggested(await typed("doctor", code=10))[0]
    runtime = await hosts.open(ScriptedHarness(SCRIPT))
    turn = runtime.get_session(KEY).get_turn(turn_id)
    early: Done = await typed(*repair, *CODEC, code=4)
    assert "ended by a repair" in early.err
    [asked] = await turn.pending_interactions()
    await turn.respond("a1", asked.interaction_id, True)
    await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.waiting_on[0].kind is WaitKind.OPERATOR)
    assert suggested(await typed("explain", turn_id))[1] == ["doctor", "--session", SESSION]

    done: Done = await typed(*repair, *CODEC, "--request-id", "fix", "--json")
    again: Done = await typed(*repair, *CODEC, "--request-id", "fix", "--json")
    people: Done = await typed(*repair, *CODEC, "--request-id", "fix")

    assert done.json == again.json and done.json["status"] == "FAILED"
    assert turn_id in people.out
    assert (await turn.status()).status is TurnStatus.FAILED
    await turn_is(await runtime.get_session(KEY).submit("r9", "go"), TurnStatus.WAITING)


@pytest.mark.case("C83")
def test_no_argument_that_is_left_out_makes_one_command_another() -> None:
    group = typer.main.get_command(app)
    required = {
        name: {parameter.name for parameter in group.commands[name].params if parameter.required}  # type: ignore[attr-defined]
        for name in ("resume", "restore", "fork", "repair", "cancel")
    }

    assert required == {
        "resume": {"turn", "revision"},
        "restore": {"session", "position", "expected"},
        "fork": {"session", "position", "target", "target_thread"},
        "repair": {"turn"},
        "cancel": {"turn"},
    }


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["checkpoints", "app/nobody"], 3),
        (["checkpoints", SESSION, "--after", "nonsense"], 2),
        (["checkpoints", SESSION, "--limit", "0"], 2),
        (["restore", SESSION, "nonsense", "--expected", "POSITION", *CODEC], 2),
        (["restore", SESSION, "POSITION", "--expected", "nonsense", *CODEC], 2),
        (["restore", SESSION, "POSITION"], 2),
        (["restore", SESSION, "POSITION", "--expected", "POSITION"], 2),
        (["restore", SESSION, "POSITION", "--expected", "POSITION", "--codec", "no.such:thing"], 2),
        (["restore", SESSION, "POSITION", "--expected", "POSITION", "--codec", "tests.cli.test_positions:nothing"], 2),
        (["restore", SESSION, "POSITION", "--expected", "POSITION", "--codec", "nonsense"], 2),
        (["restore", SESSION, "POSITION", "--expected", "POSITION", "--codec", "tests.cli.conftest:SESSION"], 11),
        (["restore", SESSION, "POSITION", "--expected", "POSITION", "--thread", "nobody", *CODEC], 3),
        (["fork", SESSION, "POSITION", "other/c1", "branch", *CODEC], 2),
        (["fork", SESSION, "POSITION", SESSION, "main", *CODEC], 2),
        (["fork", SESSION, "POSITION", "app/nobody", "branch", *CODEC], 3),
        (["repair", "t-nobody"], 3),
    ],
    ids=range(16),
)
async def test_bad_input_is_named_and_changes_nothing(
    hosts: Hosts, typed: Typed, command: list[str], code: int
) -> None:
    positions = await three_turns(hosts, typed)
    filled = [positions[-1] if word == "POSITION" else word for word in command]

    done: Done = await typed(*filled, "--json", code=code)

    assert done.error["exitCode"] == code and done.out == ""
    assert len((await typed("checkpoints", SESSION, "--json")).json["items"]) == 3


async def test_a_state_of_agentscope_needs_no_codec_to_be_named(hosts: Hosts, typed: Typed) -> None:
    def make_agent(binding: Any) -> AgentBuilder:
        return AgentBuilder(name="assistant", system_prompt="", model=scripted_model(lambda *_: "Hello."))

    adapter = AgentScopeAdapter.for_react(make_agent, accept_untested_agentscope=True)
    runtime = await hosts.open(adapter)
    session = await runtime.create_session(KEY, "agent")
    for name in ("r1", "r2"):
        await (await session.submit(name, "Hi")).wait(SECONDS)
    positions = [item["position"] for item in (await typed("checkpoints", SESSION, "--json")).json["items"]]

    await typed("restore", SESSION, positions[0], "--expected", positions[1])
    await typed("fork", SESSION, positions[1], SESSION, "branch")

    for thread in (session.main_thread(), session.get_thread("branch")):
        turn = await thread.submit(f"again-{thread.thread_id}", "And?")
        assert str(await turn.wait(SECONDS)) == "Hello."
