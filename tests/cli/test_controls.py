"""Commands that control: each is one request, however often it is typed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.cli.app import app
from agentscope_durable.contracts.messages import INPUT_BYTES_MAX
from agentscope_durable.contracts.status import ExecutionState, TurnStatus, WaitKind
from agentscope_durable.runtime.handles import DurableSession, DurableThread, DurableTurn
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import ExecutorCapabilities, Unknown
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Gates,
    ScriptedHarness,
    Stall,
    Wait,
    approval,
    external,
    final,
    manual,
    say,
    together,
)
from tests.cli.conftest import KEY, SESSION, Done, Durable, begun
from tests.runtime.conftest import SECONDS, Hosts, texts, turn_is
from tests.runtime.test_settlement import Remote

pytestmark = pytest.mark.backend("sqlite")
Typed = Callable[..., Any]


class Lost(Remote):
    """An executor that cannot say what became of its work."""

    capabilities = ExecutorCapabilities()

    def __init__(self) -> None:
        super().__init__()
        self.outcome = Unknown("the line broke")


async def question(turn: DurableTurn, name: str) -> str:
    return next(view.interaction_id for view in await turn.pending_interactions() if view.name == name)


# ------------------------------------------------------------ one request, one effect


async def _submit(hosts: Hosts) -> tuple[list[str], list[str]]:
    await begun(hosts, [final()], start=False)
    return ["submit", SESSION, "go"], ["submit", SESSION, "something else"]


async def _steer(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [final()], start=False)
    return ["steer", turn.turn_id, "left"], ["steer", turn.turn_id, "right"]


async def _inject(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [final()], start=False)
    return ["inject", turn.turn_id, "left"], ["inject", turn.turn_id, "right"]


async def _withdraw(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [final()], start=False)
    await turn.steer("s1", "left")
    await turn.steer("s2", "right")
    return ["withdraw", turn.turn_id, "s1"], ["withdraw", turn.turn_id, "s2"]


async def _respond(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [together(approval("deploy"), approval("hold")), final()])
    await turn_is(turn, TurnStatus.WAITING)
    deploy = await question(turn, "deploy")
    return ["respond", turn.turn_id, deploy, "--approve"], ["respond", turn.turn_id, deploy, "--deny"]


async def _signal(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [Wait(key="x.k"), Wait(key="x.l"), final()])
    await turn_is(turn, TurnStatus.WAITING)
    return ["signal", turn.turn_id, "x.l"], ["signal", turn.turn_id, "x.l", "--payload", "1"]


async def _pause(hosts: Hosts) -> tuple[list[str], list[str]]:
    runtime, turn = await begun(hosts, [final()], start=False)
    other = await runtime.get_session(KEY).submit("r2", "go")
    return ["pause", turn.turn_id], ["pause", other.turn_id]


async def _resume(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [final()], start=False)
    await turn.pause("p1")
    revision = (await turn.status()).revision
    return ["resume", turn.turn_id, "--revision", str(revision)], ["resume", turn.turn_id, "--revision", "99"]


async def _cancel(hosts: Hosts) -> tuple[list[str], list[str]]:
    runtime, turn = await begun(hosts, [final()], start=False)
    other = await runtime.get_session(KEY).submit("r2", "go")
    return ["cancel", turn.turn_id], ["cancel", other.turn_id]


async def _reconcile(hosts: Hosts) -> tuple[list[str], list[str]]:
    _, turn = await begun(hosts, [external("hands", "work"), final()], executors={"hands": Lost()})
    await turn_is(turn, TurnStatus.WAITING, where=lambda view: view.waiting_on[0].kind is WaitKind.TOOL_UNKNOWN)
    [tool] = await turn.list_tools()
    settle = ["reconcile", turn.turn_id, tool.call_id, "--evidence", "ticket 7"]
    return [*settle, "--succeeded", '{"done": true}'], [*settle, "--failed", "it did not"]


async def _put_policy(hosts: Hosts) -> tuple[list[str], list[str]]:
    await begun(hosts, [final()], start=False)
    return ["put-policy", SESSION, "quota", "--value", '{"running": 2}'], ["put-policy", SESSION, "quota", "--remove"]


ENTRIES = {
    "submit": _submit, "steer": _steer, "inject": _inject, "withdraw": _withdraw, "respond": _respond,
    "signal": _signal, "pause": _pause, "resume": _resume, "cancel": _cancel, "reconcile": _reconcile,
    "put_policy": _put_policy,
}  # fmt: skip


def entries() -> set[str]:
    """Every command that takes a request id."""
    return {
        command.callback.__name__
        for command in app.registered_commands
        if command.callback is not None and "request_id" in inspect.signature(command.callback).parameters
    }


@pytest.mark.case("C80")
def test_every_command_that_changes_a_turn_takes_a_request_id() -> None:
    # `release` has a test of its own below, the others in `test_positions`.
    assert entries() == {*ENTRIES, "release", "restore", "fork", "repair"}


@pytest.mark.case("C80")
def test_every_operation_of_a_program_that_takes_a_request_id_is_one_of_these_commands() -> None:
    """So what is typed twice below is what a program calls twice; `call` is `submit` and waiting."""
    operations = {
        name
        for kind in (DurableSession, DurableThread, DurableTurn, HostOperations)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and "request_id" in inspect.signature(method).parameters
    }
    assert operations - {"call", "reconcile_tool"} | {"reconcile"} == entries()


@pytest.mark.case("C80")
@pytest.mark.parametrize("entry", ENTRIES)
async def test_a_request_that_is_typed_twice_happens_once(hosts: Hosts, typed: Typed, entry: str) -> None:
    command, other = await ENTRIES[entry](hosts)

    first: Done = await typed(*command, "--request-id", "mine", "--json")
    again: Done = await typed(*command, "--request-id", "mine", "--json")
    different: Done = await typed(*other, "--request-id", "mine", "--json", code=4)

    assert first.json == again.json
    assert first.json["requestId"] == "mine"
    assert different.error["code"] == "CONFLICT" and "'mine'" in different.error["message"]
    assert different.error["requestId"] == "mine"
    people: Done = await typed(*command, "--request-id", "mine")
    assert "mine" in people.out and people.err == ""


async def test_a_request_id_that_was_drawn_is_printed_and_can_be_used_again(hosts: Hosts, typed: Typed) -> None:
    await begun(hosts, [final()], start=False)

    first: Done = await typed("submit", SESSION, "more")
    drawn = first.err.removeprefix("request id: ").strip()
    again: Done = await typed("submit", SESSION, "more", "--request-id", drawn)
    other: Done = await typed("submit", SESSION, "more", "--json")

    assert drawn.startswith("cli-") and drawn in first.out
    assert again.out == first.out
    assert other.json["requestId"] not in (drawn, None) and other.err == ""


# ------------------------------------------------------------ what is said


@pytest.mark.parametrize("source", ["argument", "stdin", "file"])
async def test_a_task_is_read_from_where_it_stands(hosts: Hosts, typed: Typed, tmp_path: Path, source: str) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    text = "zwei Zeilen\nmit ü\n"
    (tmp_path / "task.txt").write_text(f"{text}\n", encoding="utf-8")
    given = {"argument": [text], "stdin": ["-"], "file": ["--file", str(tmp_path / "task.txt")]}[source]

    done: Done = await typed("submit", SESSION, *given, "--json", stdin=f"{text}\n".encode())

    turn = session.get_turn(done.json["turnId"])
    # The newline that ends a file, or what a program wrote, is not part of it.
    assert await texts(turn) == [("user", text)]


async def test_an_input_document_may_hold_more_than_text(hosts: Hosts, typed: Typed) -> None:
    runtime = await hosts.open([final()], start=False)
    session = await runtime.create_session(KEY, "agent")
    image = '{"type": "image", "source": {"type": "url", "url": "https://e.org/a.png", "mediaType": "image/png"}}'
    content = f'{{"version": "1", "content": [{{"type": "text", "text": "see"}}, {image}]}}'

    done: Done = await typed("submit", SESSION, content, "--document", "--json")

    [message] = (await session.get_turn(done.json["turnId"]).history()).items
    assert [type(part).__name__ for part in message.content] == ["Text", "Image"]


@pytest.mark.parametrize(
    ("given", "stdin", "said"),
    [
        ([], b"", "give the text"),
        (["a", "--file", "b"], b"", "give the text"),
        (["--file", "/nowhere/at/all"], b"", "cannot be read"),
        (["-"], b"\xff\xfe", "not UTF-8"),
        (["-"], b"", "nothing to say"),
        ([""], b"", "nothing to say"),
        (["[]", "--document"], b"", "is an object"),
        (['{"version": "1", "version": "1", "content": []}', "--document"], b"", "version"),
        (['{"version": "2", "content": [{"type": "text", "text": "a"}]}', "--document"], b"", "version"),
        (["{", "--document"], b"", ""),
        (["-", "--document"], b"[" * 100_000, "deeper"),
        (["-", "--document"], b'\xef\xbb\xbf{"version": "1", "content": []}', "JSON"),
        (["-", "--document"], b'{"version": "1", "content": [NaN]}', "NaN"),
        (["-", "--document"], b'{"version": "1", "content": [{"type": "text", "text": "\\ud83d"}]}', "surrogate"),
        (["-", "--document"], b'{"version": "1", "content": [{"type": "text", "text": 9007199254740993}]}', "string"),
        (["half of a pair: \ud83d"], b"", "surrogate"),
        (["go", "--request-id", "a\x00b"], b"", "control character"),
        (["go", "--request-id", "x" * 257], b"", "256"),
    ],
    ids=range(18),
)
async def test_what_is_no_input_is_refused_and_nothing_is_stored(
    hosts: Hosts, typed: Typed, given: list[str], stdin: bytes, said: str
) -> None:
    session = await (await hosts.open([final()], start=False)).create_session(KEY, "agent")

    done: Done = await typed("submit", SESSION, *given, stdin=stdin, code=2)

    assert said in done.err and "Traceback" not in done.err
    assert (await session.list_turns()).items == ()


def test_an_input_beyond_the_bound_is_not_even_read(durable: Durable) -> None:
    done = durable("submit", SESSION, "-", stdin=b"x" * (INPUT_BYTES_MAX + 10), code=2)

    assert "input" in done.err


# ------------------------------------------------------------ what they do


@pytest.mark.spec("DX-04")
async def test_questions_are_answered_by_their_kind(hosts: Hosts, typed: Typed) -> None:
    script = [together(approval("deploy", unit="x"), approval("notify"), manual("measure")), final("{results}")]
    _, turn = await begun(hosts, script)
    await turn_is(turn, TurnStatus.WAITING)
    deploy, notify, measure = [await question(turn, name) for name in ("deploy", "notify", "measure")]

    wrong: Done = await typed("respond", turn.turn_id, deploy, "--result", '"yes"', code=2)
    assert "true or false" in wrong.err
    for given in ([], ["--approve", "--deny"], ["--approve", "--result", "1"]):
        assert "one of" in (await typed("respond", turn.turn_id, deploy, *given, code=2)).err
    for arguments in ("[1]", "{", '{"a": 1, "a": 2}'):
        await typed("respond", turn.turn_id, deploy, "--approve", "--arguments", arguments, code=2)
    assert "approval" in (await typed("respond", turn.turn_id, notify, "--deny", "--arguments", "{}", code=2)).err

    await typed("respond", turn.turn_id, deploy, "--approve", "--arguments", '{"unit": "y"}')
    await typed("respond", turn.turn_id, notify, "--deny")
    assert (await typed("respond", turn.turn_id, notify, "--approve", code=4)).err.count("already answered") == 1
    await typed("respond", turn.turn_id, measure, "--result", '{"celsius": 21.5}')
    await turn.wait(SECONDS)

    tools = {tool.name: tool for tool in await turn.list_tools()}
    assert tools["deploy"].arguments == '{"unit":"y"}'
    assert tools["notify"].state is ExecutionState.DENIED
    assert tools["measure"].result["value"] == {"celsius": 21.5}


async def test_a_turn_is_steered_paused_resumed_and_cancelled(hosts: Hosts, typed: Typed) -> None:
    gates = Gates()
    _, turn = await begun(hosts, ScriptedHarness([Stall(gate="g"), say("{inputs}"), Stall(gate="h")], gates=gates))
    await gates.reached("g")

    await typed("steer", turn.turn_id, "the other way", "--request-id", "s1")
    await typed("inject", turn.turn_id, "never mind", "--request-id", "s2")
    await typed("withdraw", turn.turn_id, "s2")
    await typed("pause", turn.turn_id)
    gates.open("g")
    view = await turn_is(turn, TurnStatus.PAUSED)
    stale: Done = await typed("resume", turn.turn_id, "--revision", "1", code=4)
    assert "revision" in stale.err
    await typed("resume", turn.turn_id, "--revision", str(view.revision))
    await gates.reached("h")
    assert ("assistant", "the other way") in await texts(turn)
    await typed("cancel", turn.turn_id)
    await turn_is(turn, TurnStatus.CANCELLED)

    for command in (["pause"], ["cancel"], ["steer", "more"]):
        done: Done = await typed(command[0], turn.turn_id, *command[1:], "--json", code=5)
        assert done.error["code"] == "TERMINAL"


async def test_a_call_is_settled_with_evidence(hosts: Hosts, typed: Typed) -> None:
    command, _ = await _reconcile(hosts)
    turn_id, call_id = command[1], command[2]

    for given in ([], ["--failed", "a", "--cancelled", "b"]):
        await typed("reconcile", turn_id, call_id, "--evidence", "ticket 7", *given, code=2)
    assert "--evidence" in (await typed("reconcile", turn_id, call_id, "--failed", "a", code=2)).err
    await typed(*command)

    [tool] = (await typed("tools", turn_id, "--json")).json["items"]
    assert tool["state"] == "COMPLETED" and tool["result"]["value"] == {"done": True}
    assert (await typed("reconcile", turn_id, call_id, "--evidence", "t", "--cancelled", "c", code=4)).err


async def test_a_parked_turn_is_released_once(tmp_path: Path, typed: Typed) -> None:
    from contextlib import AsyncExitStack

    from agentscope_durable.backend.transaction import TransactionalSessionBackend
    from agentscope_durable.stores.records.sqlite import SqliteRecordStore
    from tests.runtime.conftest import kill
    from tests.runtime.test_recovery import LEASE_MS

    clock = ManualClock()
    gates = Gates()
    script = ScriptedHarness([Stall(gate="g"), final()], gates=gates)
    async with (
        await SqliteRecordStore.open(tmp_path / "durable.db", synchronous="NORMAL", clock=clock) as records,  # type: ignore[arg-type]
        AsyncExitStack() as stack,
    ):
        hosts = Hosts(TransactionalSessionBackend(records), stack)
        first, turn = await begun(hosts, script)
        await gates.reached("g")
        kill(first)
        clock.advance(LEASE_MS + 1)
        second = await hosts.open(script, takeovers_max=0)
        turn = second.get_session(KEY).get_turn(turn.turn_id)
        await turn_is(turn, TurnStatus.WAITING)
        await second.close()

        assert "durable release" in (await typed("explain", turn.turn_id)).out
        done: Done = await typed("release", turn.turn_id, "--request-id", "op1", "--json")
        again: Done = await typed("release", turn.turn_id, "--request-id", "op1", "--json")
        refused: Done = await typed("release", turn.turn_id, code=4)

        assert done.json == again.json == {"requestId": "op1", "operation": "release", "turnId": turn.turn_id}
        assert "released" in refused.err
