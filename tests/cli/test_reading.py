"""Commands that only look: what they say is what the views say, and the store stays as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import GetHistory, ListInteractions
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.contracts.views import Page
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.testing.scripted_harness import Fail, ScriptedHarness, approval, final, local, say, together
from tests.cli.conftest import KEY, SESSION, begun
from tests.runtime.conftest import Hosts, turn_is

pytestmark = pytest.mark.backend("sqlite")
SCRIPT = [say("looking"), local("look", at="logs"), together(approval("deploy", unit="x"), approval("notify")), final()]


def encoded(view: Any) -> Any:
    """A view as it encodes itself."""
    return msgspec.json.decode(msgspec.json.encode(view))


@pytest.mark.spec("DX-01", "RT-16", "RT-44")
async def test_json_is_the_view_as_it_encodes_itself(hosts: Hosts, typed: Callable[..., Any]) -> None:
    runtime, turn = await begun(hosts, SCRIPT)
    await (await runtime.get_session(KEY).create_thread("side", "agent")).submit("r2", "other")
    await runtime.create_session(SessionKey("other", "1"), "agent")
    await turn_is(turn, TurnStatus.WAITING)
    await runtime.close()
    async with await hosts.open() as reader:
        session = reader.get_session(KEY)
        turn = session.get_turn(turn.turn_id)
        run = f"{turn.turn_id}.1"
        last = (await turn.list_runs()).items[-1].run_id
        every = ListInteractions(session=KEY, thread_id="main", turn_id=turn.turn_id, pending_only=False)
        wanted = {
            ("sessions",): await HostOperations(hosts.backend).list_sessions(),
            ("sessions", "--namespace", "app"): await reader.list_sessions("app"),
            ("session", SESSION): await session.view(),
            ("threads", SESSION): await session.list_threads(),
            ("turns", SESSION): await session.list_turns(),
            ("turns", SESSION, "--thread", "side"): await session.get_thread("side").list_turns(),
            ("turn", turn.turn_id): await turn.status(),
            ("runs", turn.turn_id): await turn.list_runs(),
            ("steps", run): await turn.list_steps(run),
            ("steps", turn.turn_id): await turn.list_steps(last),
            ("models", run): await turn.list_model_calls(run),
            ("models", run, "--step", f"{run}.s1"): await turn.list_model_calls(run, f"{run}.s1"),
            ("tools", turn.turn_id): Page(tuple(await turn.list_tools())),
            ("interactions", turn.turn_id): Page(tuple(await turn.pending_interactions())),
            ("interactions", turn.turn_id, "--all"): Page(tuple(await hosts.backend.query(every))),
            ("history", SESSION): await hosts.backend.query(GetHistory(session=KEY)),
            ("history", SESSION, "--thread", "side"): await session.get_thread("side").history(),
            ("history", turn.turn_id): await turn.history(),
            ("events", SESSION, "--limit", "1000"): await session.list_events(limit=1000),
            ("events", SESSION, "--thread", "side", "--limit", "1000"): await session.get_thread("side").list_events(
                limit=1000
            ),
            ("events", turn.turn_id, "--limit", "1000"): await turn.list_events(limit=1000),
        }
        for command, view in wanted.items():
            done = await typed(*command, "--json")
            assert done.json == encoded(view), command
            assert done.err == ""
            # For people, the same is said in words, and no row is cut or wrapped where nobody reads it.
            people = await typed(*command)
            assert people.out.strip(), command


async def test_what_a_person_reads_names_every_id(hosts: Hosts, typed: Callable[..., Any]) -> None:
    runtime, turn = await begun(hosts, SCRIPT)
    await turn_is(turn, TurnStatus.WAITING)
    asked = await turn.pending_interactions()

    assert SESSION in (await typed("sessions")).out
    assert turn.turn_id in (await typed("turns", SESSION)).out
    about = (await typed("turn", turn.turn_id)).out
    assert SESSION in about and "WAITING" in about and all(view.interaction_id in about for view in asked)
    questions = (await typed("interactions", turn.turn_id)).out
    assert all(view.interaction_id in questions for view in asked)
    assert '{"unit":"x"}' in questions
    assert "COMPLETED" in (await typed("tools", turn.turn_id)).out
    assert runtime.owner in (await typed("runs", turn.turn_id)).out
    assert "10/5" in (await typed("models", f"{turn.turn_id}.1")).out
    said = (await typed("history", SESSION)).out
    assert "user, " in said and "looking" in said
    assert "interaction.requested" in (await typed("events", SESSION)).out


async def test_pages_follow_each_other_by_the_cursor_that_is_shown(hosts: Hosts, typed: Callable[..., Any]) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    turns = [(await session.submit(f"r{number}", "go")).turn_id for number in range(5)]
    found: list[str] = []
    cursor: list[str] = []
    while True:
        done = await typed("turns", SESSION, "--limit", "2", *cursor, "--json")
        found += [view["turnId"] for view in done.json["items"]]
        people = await typed("turns", SESSION, "--limit", "2", *cursor)
        if done.json["cursor"] is None:
            assert "more" not in people.err
            break
        assert people.err.strip() == f"more: --cursor {done.json['cursor']}"
        cursor = ["--cursor", done.json["cursor"]]

    assert found == turns


async def test_a_page_of_events_is_filled_although_others_lie_between(hosts: Hosts, typed: Callable[..., Any]) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    first = await session.submit("first", "go")
    for number in range(30):
        await session.submit(f"r{number}", "go")
    await first.cancel("c1")
    await runtime.close()
    first = (await hosts.open()).get_session(KEY).get_turn(first.turn_id)
    wanted = [event.sequence for event in (await first.list_events(limit=1000)).events]

    found: list[int] = []
    after: list[str] = []
    while True:
        page = (await typed("events", first.turn_id, "--limit", "2", *after, "--json")).json
        found += [event["sequence"] for event in page["events"]]
        if page["cursor"] == page["highWatermark"]:
            break
        assert len(page["events"]) == 2
        after = ["--after", page["cursor"]]

    assert found == wanted and len(wanted) > 2


async def test_looking_leaves_a_store_as_it_is(hosts: Hosts, typed: Callable[..., Any], tmp_path: Path) -> None:
    runtime, turn = await begun(hosts, SCRIPT)
    await turn_is(turn, TurnStatus.WAITING)
    await runtime.close()
    await hosts.backend.close()

    def files() -> dict[str, str]:
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.rglob("*") if path.is_file()
        }

    before = files()
    for command in ("turn", "explain", "runs", "steps", "models", "tools", "interactions", "history", "events"):
        await typed(command, turn.turn_id)
    for command in ("session", "threads", "turns", "history", "events"):
        await typed(command, SESSION)
    await typed("sessions")

    assert files() == before


@pytest.mark.spec("RT-58")
async def test_the_exit_code_of_result_tells_how_it_ended(hosts: Hosts, typed: Callable[..., Any]) -> None:
    scripts = {"well": [final("fine")], "badly": [Fail(kind="ValueError", message="a defect")], "": [approval("t")]}
    runtime = await hosts.open(ScriptedHarness(scripts))
    session = await runtime.create_session(KEY, "agent")
    well, badly = await session.submit("r1", "well"), await session.submit("r2", "badly")
    waiting, queued = await session.submit("r3", "ask"), await session.submit("r4", "later")
    await queued.cancel("c1")
    await turn_is(waiting, TurnStatus.WAITING)

    assert (await typed("result", well.turn_id)).out == "fine\n"
    assert (await typed("result", well.turn_id, "--wait", "5", "--json")).json["content"] == [
        {"type": "text", "text": "fine"}
    ]
    assert "ValueError: a defect" in (await typed("result", badly.turn_id, code=20)).err
    assert "cancelled" in (await typed("result", queued.turn_id, code=21)).err
    assert "WAITING" in (await typed("result", waiting.turn_id, code=22)).err
    late = await typed("result", waiting.turn_id, "--wait", "0.01", "--json", code=124)
    assert late.error["code"] == "TIMEOUT" and late.out == ""
