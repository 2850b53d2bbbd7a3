"""`close`, `drop`, `prune-checkpoints`, `retain`: what they say, as text and as JSON, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.scripted_harness import approval, final
from tests.cli.conftest import KEY, SESSION, Done, begun
from tests.cli.test_positions import CODEC
from tests.runtime.conftest import SECONDS, Hosts, turn_is

pytestmark = pytest.mark.backend("sqlite")
Typed = Callable[..., Any]


async def test_a_session_is_closed_and_then_dropped(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [final("done")])
    await turn.wait(SECONDS)

    refused: Done = await typed("drop", SESSION, "--json", code=4)
    assert "is open" in refused.error["message"]
    closed: Done = await typed("close", SESSION, "--json")
    assert closed.json["status"] == "CLOSED" and closed.json["closedAtMs"] > 0
    assert "CLOSED" in (await typed("close", SESSION)).out, "a repeat is no change"

    would: Done = await typed("drop", SESSION, "--dry-run", "--json")
    assert would.json["droppedAtMs"] is None and would.json["events"] > 0
    assert "not yet" in (await typed("drop", SESSION, "--dry-run")).out
    assert "done" in (await typed("history", SESSION)).out

    people: Done = await typed("drop", SESSION, "--reason", "asked for")
    assert f"session  {SESSION}" in people.out and "asked for" in people.out
    script: Done = await typed("drop", SESSION, "--json")
    assert (script.json["events"], script.json["reason"]) == (would.json["events"], "asked for")
    gone: Done = await typed("history", SESSION, "--json", code=9)
    assert gone.error["code"] == "DROPPED"
    listed: Done = await typed("sessions", "--json")
    assert [one["status"] for one in listed.json["items"]] == ["DROPPED"]
    assert (await typed("sessions", "--namespace", "app", "--json")).json["items"] == []
    assert (await typed("doctor", "--deep")).code == 0


async def test_a_session_or_thread_with_unfinished_work_is_not_closed(hosts: Hosts, typed: Typed) -> None:
    runtime, turn = await begun(hosts, [approval("deploy"), final()])
    await turn_is(turn, "WAITING")
    await runtime.get_session(KEY).create_thread("side", "agent")
    assert "1 unfinished turn" in (await typed("close", SESSION, "--json", code=4)).error["message"]
    side: Done = await typed("close", SESSION, "--thread", "side", "--json")
    assert (side.json["threadId"], side.json["status"]) == ("side", "CLOSED")
    assert (await typed("close", SESSION, "--thread", "nobody", "--json", code=3)).error["code"] == "NOT_FOUND"
    assert (await turn.status()).status == "WAITING"


async def test_positions_that_were_dropped_say_so(hosts: Hosts, typed: Typed) -> None:
    runtime, turn = await begun(hosts, [final("done")])
    await turn.wait(SECONDS)
    await runtime.get_session(KEY).call("r2", "again")
    listed: Done = await typed("checkpoints", SESSION, "--json")
    first, current = [one["position"] for one in listed.json["items"]]

    assert (await typed("prune-checkpoints", SESSION, "--json", code=2)).error["code"] == "INVALID_REQUEST"
    done: Done = await typed("prune-checkpoints", SESSION, "--through", current, "--json")
    assert done.json["positions"] == 1
    assert "0 positions" in (await typed("prune-checkpoints", SESSION, "--older-than", "0s")).out
    gone: Done = await typed("restore", SESSION, first, "--expected", current, "--json", *CODEC, code=9)
    assert gone.error["code"] == "DROPPED" and gone.error["facts"]["position"] == first


async def test_retain_lets_go_by_age_and_says_what_went(hosts: Hosts, typed: Typed) -> None:
    runtime, turn = await begun(hosts, [final("done")])
    await turn.wait(SECONDS)
    for number in range(3):
        session = await runtime.create_session(SessionKey("app", f"old-{number}"), "agent")
        await session.close()

    assert (await typed("retain", "--json", code=2)).error["code"] == "INVALID_REQUEST"
    wrong: Done = await typed("retain", "--closed-older-than", "soon", "--json", code=2)
    assert wrong.error["facts"]["path"] == "--closed-older-than"
    nothing: Done = await typed("retain", "--closed-older-than", "30d")
    assert "dropped             0 sessions" in nothing.out
    would: Done = await typed("retain", "--closed-older-than", "0s", "--dry-run")
    assert would.out.count("would drop app/old-") == 3
    done: Done = await typed("retain", "--closed-older-than", "0s", "--events-older-than", "0s", "--json")
    [report] = [json.loads(line) for line in done.out.splitlines()]
    assert [one["sessionId"] for one in report["dropped"]] == ["old-0", "old-1", "old-2"]
    assert report["looked"] == 4 and report["events"] > 0
    assert (await HostOperations(hosts.backend).drop_session(SessionKey("app", "old-1"))).reason == "retained no longer"
    assert (await typed("history", SESSION)).code == 0
