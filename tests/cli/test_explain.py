"""`durable explain`: on one screen, why a Turn does not advance, and what to type next. What it says to type works."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import pytest

from agentscope_durable.cli.app import app
from agentscope_durable.cli.extra import typer
from agentscope_durable.contracts.status import ReasonKind, TurnStatus, WaitKind
from agentscope_durable.domain.explanation import explain
from agentscope_durable.testing.scripted_harness import Fail, approval, external, final, manual, together
from tests.cli.conftest import KEY, SESSION, Done, begun
from tests.cli.test_controls import Lost
from tests.domain.test_explanation import situations
from tests.runtime.conftest import SECONDS, Hosts, turn_is

pytestmark = pytest.mark.backend("sqlite")
Typed = Callable[..., Any]
SCREEN = 40


def suggested(done: Done) -> list[list[str]]:
    """The commands on the screen, as a shell reads them."""
    lines = (line.strip() for line in done.out.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("durable ")]


def test_every_command_any_row_suggests_exists_and_takes_these_arguments() -> None:
    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    seen: set[tuple[str, ...]] = set()
    for known in situations():
        seen |= {command for reason in explain(known).reasons for command in reason.commands}

    for command in seen:
        arguments = ["1" if word.isdigit() else word for word in command[1:]]
        context = commands[command[0]].make_context(command[0], arguments, parent=None)
        assert not context.args, command
    assert {command[0] for command in seen} >= {"respond", "resume", "release", "reconcile", "explain", "cancel"}


@pytest.mark.spec("DX-01", "DX-04")
async def test_the_answer_it_suggests_makes_the_turn_go_on(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [approval("deploy"), final("done")])
    await turn_is(turn, TurnStatus.WAITING)

    screen: Done = await typed("explain", turn.turn_id)

    assert len(screen.out.splitlines()) <= SCREEN
    assert f"{turn.turn_id} of {SESSION}, thread main: WAITING" in screen.out
    assert "agent@v1" in screen.out and "the user's move" in screen.out
    [approve] = [command for command in suggested(screen) if "--approve" in command]
    await typed(*approve)
    await turn.wait(SECONDS)
    ended: Done = await typed("explain", turn.turn_id)
    assert "COMPLETED" in ended.out


@pytest.mark.spec("DX-02")
async def test_a_queued_turn_leads_to_the_head_and_the_head_to_its_answer(hosts: Hosts, typed: Typed) -> None:
    runtime, head = await begun(hosts, [manual("measure"), final("{results}")])
    queued = await runtime.get_session(KEY).submit("r2", "go")
    await turn_is(head, TurnStatus.WAITING)

    first: Done = await typed("explain", queued.turn_id)
    assert suggested(first)[0] == ["explain", head.turn_id]
    second: Done = await typed(*suggested(first)[0])
    answer = next(command for command in suggested(second) if command[0] == "respond")
    await typed(*["21" if word == "JSON" else word for word in answer])

    assert str(await head.wait(SECONDS)) == "21"


@pytest.mark.spec("DX-05")
async def test_the_resume_it_suggests_has_the_revision(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [together(approval("a"), approval("b")), final()])
    await turn_is(turn, TurnStatus.WAITING)
    await turn.pause("p1")
    asked = await turn.pending_interactions()
    await turn.respond("a1", asked[0].interaction_id, True)

    screen: Done = await typed("explain", turn.turn_id)
    assert "is paused" in screen.out.splitlines()[3] and "arrived since" in screen.out
    await typed(*suggested(screen)[0])

    assert (await turn.status()).status is not TurnStatus.PAUSED


@pytest.mark.spec("DX-07")
async def test_the_reconciliation_it_suggests_settles_the_call(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [external("hands", "work"), final("{results}")], executors={"hands": Lost()})
    await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.waiting_on[0].kind is WaitKind.TOOL_UNKNOWN)

    screen: Done = await typed("explain", turn.turn_id)
    settle = next(command for command in suggested(screen) if "--succeeded" in command)
    filled = {"REFERENCE": "ticket 7", "JSON": '"it had worked"'}
    await typed(*[filled.get(word, word) for word in settle])

    assert str(await turn.wait(SECONDS)) == "it had worked"


@pytest.mark.spec("DX-03")
async def test_hosts_are_shown_with_what_they_serve_and_what_is_missing(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [final()], start=False)
    nobody: Done = await typed("explain", turn.turn_id)
    assert "start()" in nobody.out and "Hosts" not in nobody.out

    other = await hosts.open([final()], version="v2")
    screen: Done = await typed("explain", turn.turn_id)

    assert "pinned to agent@v1" in screen.out
    [row] = [line for line in screen.out.splitlines() if line.startswith(other.owner)]
    assert "alive" in row and "agent@v2" in row and "(this one)" not in row


@pytest.mark.spec("DX-06")
async def test_backoff_is_shown_with_its_time_and_its_cause(hosts: Hosts, typed: Typed) -> None:
    from agentscope_durable.contracts.views import RecoveryPolicy

    policy = RecoveryPolicy(max_retries=1, initial_backoff_ms=3_600_000, max_backoff_ms=3_600_000)
    _, turn = await begun(hosts, [Fail(kind="TimeoutError", message="no answer")], recovery_policy=policy)
    await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.recovery is not None)

    screen: Done = await typed("explain", turn.turn_id)

    assert "TimeoutError: no answer" in screen.out
    assert "until 20" in screen.out and ", in " in screen.out


async def test_the_document_has_the_rows_and_the_commands(hosts: Hosts, typed: Typed) -> None:
    runtime, turn = await begun(hosts, [approval("deploy"), final()])
    await turn_is(turn, TurnStatus.WAITING)

    told = (await typed("explain", turn.turn_id, "--json")).json

    assert told["turn"]["turnId"] == turn.turn_id
    [reason] = told["reasons"]
    assert reason["kind"] == ReasonKind.APPROVAL and reason["actor"] == "user"
    assert reason["commands"][1] == ["respond", turn.turn_id, reason["id"], "--approve"]
    assert told["summary"] == reason["text"]
    [host] = told["hosts"]
    assert host["owner"] == runtime.owner and host["serves"] is True


async def test_a_store_that_was_named_is_named_in_what_to_type(
    hosts: Hosts, typed: Typed, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    _, turn = await begun(hosts, [approval("deploy"), final()])
    await turn_is(turn, TurnStatus.WAITING)
    monkeypatch.delenv("DURABLE_STORE")

    screen: Done = await typed("explain", turn.turn_id, "--store", str(tmp_path))

    assert all(command[-2:] == ["--store", str(tmp_path)] for command in suggested(screen))
    await typed(*suggested(screen)[1])
    await turn.wait(SECONDS)
