"""What only the operator of a host may do, and what hosts tell the store about objects."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from agentscope_durable.contracts import commands as c
from agentscope_durable.contracts import keys
from agentscope_durable.contracts.bodies import body_of
from agentscope_durable.contracts.errors import InvalidRequest, InvalidTransition, RequestConflict, Terminal
from agentscope_durable.contracts.records import ObjectRecord
from agentscope_durable.contracts.status import Audience
from agentscope_durable.domain.rules import RULES
from tests.domain.stage import Owner, Stage, text


def parked() -> tuple[Stage, Owner]:
    stage = Stage()
    lost = stage.running("a")
    stage.dies("a")
    stage.claim("b", takeovers_max=0)
    return stage, lost


def test_every_command_says_who_may_send_it_and_no_operators_command_is_public() -> None:
    assert {kind for kind, rule in RULES.items() if rule.audience is Audience.OPERATOR} == {
        c.ReconcileTool,
        c.ReleaseTurn,
        c.RepairThread,
        c.PutPolicy,
        c.PruneEvents,
        c.PruneCheckpoints,
        c.DropSession,
        c.SweepObjects,
        c.ForgetObjects,
    }
    assert set(RULES) == set(c.AnyCommand.__args__), "a command without a line in the table of contents"


def test_a_parked_turn_is_released_once_and_a_repeat_is_told_the_same() -> None:
    stage, lost = parked()
    assert stage.reasons(lost.turn) == ["operator"]

    first = stage.release_turn(lost.turn)
    assert (stage.due(), stage.reasons(lost.turn)) == (0, [])
    assert stage.release_turn(lost.turn) == first
    assert stage.change is None
    with stage.refuses(RequestConflict):
        stage.cancel(lost.turn, "release")
    with stage.refuses(InvalidTransition) as refused:
        stage.release_turn(lost.turn, "again")
    assert refused.value.to == "released"


def test_a_release_is_for_what_is_parked_and_has_not_ended() -> None:
    stage, lost = parked()
    behind = stage.submit("r2")
    with stage.refuses(InvalidTransition):
        stage.release_turn(behind)
    stage.cancel(lost.turn)
    with stage.refuses(InvalidTransition):
        stage.release_turn(lost.turn)
    stage.claim("b").settle()
    with stage.refuses(Terminal):
        stage.release_turn(lost.turn)


def test_what_is_still_open_holds_a_released_turn_as_before() -> None:
    stage = Stage()
    lost = stage.running("a")
    lost.asks()
    stage.dies("a")
    stage.claim("b", takeovers_max=0)
    assert stage.reasons(lost.turn) == ["approval", "operator"]

    stage.release_turn(lost.turn)

    assert (stage.reasons(lost.turn), stage.due()) == (["approval"], None)


def put_policy(stage: Stage, request_id: str, value: Any) -> c.PolicyReceipt:
    digest = "" if value is None else repr(value)
    return stage.do(
        c.PutPolicy(session=stage.session, key="limit/1", request_id=request_id, value=value, digest=digest)
    )


@pytest.mark.spec("BE-18")
def test_a_policy_is_one_record_that_is_written_and_removed_by_requests() -> None:
    stage = Stage()

    first = put_policy(stage, "p1", body_of({"turns": 3}))
    key = keys.policy("limit/1")
    assert msgspec.json.decode(stage.world.dump.records[key]) == [[{"turns": 3}, "", 0], "p1", first.accepted_at_ms]
    removed = put_policy(stage, "p2", None)
    assert (first.removed, removed.removed) == (False, True)
    assert key not in stage.world.dump.records
    assert put_policy(stage, "p1", body_of({"turns": 3})) == first, "a repeat is answered, and changes nothing"
    assert key not in stage.world.dump.records
    with stage.refuses(RequestConflict):
        put_policy(stage, "p1", None)
    with stage.refuses(InvalidRequest):
        put_policy(stage, "p3", stage.large(b"large"))
    assert not stage.events("policy"), "policies are no public matter"


@pytest.mark.parametrize("kind", ["submit", "steer", "respond", "result", "signal"])
def test_every_large_body_that_comes_from_outside_is_marked_as_referred_to(kind: str) -> None:
    """Otherwise a sweep would take it for an orphan after a day (D11)."""
    stage = Stage()
    owner = stage.running()
    turn = owner.turn
    owner.asks_for_result("c3", "i2")
    request = {"session": stage.session, "thread_id": "main", "request_id": "large"}
    large, other = stage.large(b"large"), stage.large(b"other")
    commands: dict[str, Any] = {
        "submit": lambda: c.SubmitTurn(**request, content=large, digest="d"),
        "steer": lambda: c.AddInput(**request, turn_id=turn, kind="steer", content=large, digest="d"),
        "respond": lambda: respond(content=large, response=other, result=body_of(1)),
        "result": lambda: respond(content=text("so"), response=other, result=large),
        "signal": lambda: c.Signal(**request, turn_id=turn, key="x.go", payload=large, digest="d"),
    }

    def respond(**bodies: Any) -> c.Respond:
        return c.Respond(**request, turn_id=turn, interaction_id="i2", digest="d", is_bool=False, **bodies)

    stage.do(commands[kind]())

    marks = {key: stage.get(key, ObjectRecord) for key in stage.world.dump.records if key.startswith("object/")}
    marked = {key for key, mark in marks.items() if mark.state == "referenced"}
    expected = {large.name, other.name} if kind in ("respond", "result") else {large.name}
    assert marked == set(map(keys.object_, expected))
