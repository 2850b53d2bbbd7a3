"""PT-10: what carries a version is refused, by name, when it is of another one. Here it is always version 99."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.backend.queries.rows import private_facts
from agentscope_durable.contracts.bodies import decode_reference
from agentscope_durable.contracts.change import LogRow
from agentscope_durable.contracts.errors import CorruptRecord, InvalidCursor, InvalidRequest, UnknownFormat
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.journal import JOURNAL_FORMAT, STATE_VERSION, JournalBatch
from agentscope_durable.contracts.log import decode_events
from agentscope_durable.contracts.messages import Input, Text
from agentscope_durable.contracts.records import TurnRecord, decode
from agentscope_durable.contracts.results import NOTICE_VERSION, HostNotice, read_notice
from agentscope_durable.contracts.status import TurnStatus, WaitKind
from agentscope_durable.runtime.runtime import Definition, DurableRuntime, Harness
from agentscope_durable.spi.environment import SYSTEM
from agentscope_durable.testing.scripted_harness import ScriptedHarness, approval, final
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, refused, turn_is, until


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.spec("PT-10", "BE-27")
@pytest.mark.backend("sqlite")
@pytest.mark.parametrize(
    "change",
    ["pragma user_version=99", "update meta set value='99.dev1' where key='revision'"],
    ids=["storage format", "its revision"],
)
@pytest.mark.parametrize("read_only", [False, True])
async def test_a_store_of_version_99_is_refused_and_keeps_every_byte(
    tmp_path: Path, change: str, read_only: bool
) -> None:
    async with (
        LocalBackend.open(tmp_path) as backend,
        DurableRuntime(backend=backend, harnesses=[Harness("agent", "v1", ScriptedHarness([final()]))]) as runtime,
    ):
        await (await runtime.create_session(KEY, "agent")).submit("r1", "go")
    connection = apsw.Connection(str(tmp_path / "durable.db"))
    connection.execute(change)
    connection.close()
    before = bytes_of(tmp_path)

    with pytest.raises(UnknownFormat, match="99"):
        await LocalBackend.open(tmp_path, read_only=read_only)
    assert bytes_of(tmp_path) == before


@pytest.mark.spec("PT-10", "AD-24")
@pytest.mark.parametrize(
    "given", [Input("99", (Text("go"),)), {"version": "99", "content": []}], ids=["object", "wire"]
)
async def test_an_input_of_version_99_is_refused_and_stores_nothing(hosts: Hosts, given: Any) -> None:
    runtime = await hosts.open([final()])
    session = await runtime.create_session(KEY, "agent")
    before = await all_events(session)
    error = await refused(session.submit("r1", given), InvalidRequest)
    assert error.path == "$.version"
    assert "'1'" in str(error)
    assert await all_events(session) == before
    assert len(await session.list_turns()) == 0


@pytest.mark.spec("PT-10")
async def test_a_cursor_of_version_99_is_refused_wherever_it_is_taken(hosts: Hosts) -> None:
    runtime = await hosts.open([final()])
    session = await runtime.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    await turn.wait(SECONDS)
    cursor = (await session.list_events()).events[0].cursor
    other = "e99" + cursor.removeprefix("e1")
    assert (await session.list_events(cursor)).events
    for ask in (session.list_events(other), turn.list_events(other)):
        error = await refused(ask, InvalidCursor)
        assert "version 99" in str(error)
    with pytest.raises(InvalidCursor, match="version 99"):
        session.stream_events(after=other)


@pytest.mark.spec("PT-10", "RC-04")
async def test_a_thread_with_native_state_of_version_99_is_left_to_a_host_that_reads_it(hosts: Hosts) -> None:
    """The version of the state is part of what a Thread is pinned to, with the number of the journal's format in it."""
    assert STATE_VERSION.endswith(f"-v{JOURNAL_FORMAT}")
    api = await hosts.open(definitions=[Definition("agent", "v1", "agentscope-thread-journal-v99")])
    turn = await (await api.create_session(KEY, "agent")).submit("r1", "go")
    runtime = await hosts.open([final()])
    other = await runtime.create_session(SessionKey("app", "other"), "agent")
    await other.call("r1", "go", timeout=SECONDS)

    view = await runtime.get_session(KEY).get_turn(turn.turn_id).status()
    assert (view.status, [waiting.kind for waiting in view.waiting_on]) == (
        TurnStatus.QUEUED,
        [WaitKind.DEFINITION_MISSING],
    )
    assert view.runs == 0


@pytest.mark.spec("PT-10", "RC-04")
async def test_native_state_that_a_library_of_version_99_wrote_is_named(hosts: Hosts) -> None:
    gate = ScriptedHarness([approval("t"), final()], writer="scripted 99")
    first = await hosts.open(gate)
    turn = await (await first.create_session(KEY, "agent")).submit("r1", "go")
    await turn_is(turn, "WAITING")
    [question] = await turn.pending_interactions()
    await first.close()

    second = await hosts.open(ScriptedHarness([approval("t"), final()]))
    turn = second.get_session(KEY).get_turn(turn.turn_id)
    await turn.respond("a1", question.interaction_id, True)

    async def named() -> bool:
        return any("scripted 99" in one.next_action for one in (await turn.status()).waiting_on)

    await until(named)
    view = await turn.status()
    assert view.recovery is view.error is None
    assert question.interaction_id not in {one.interaction_id for one in await turn.pending_interactions()}


# ------------------------------------------------------------ what stands inside a store that was opened


def row(**columns: Any) -> LogRow:
    plain = {"first": 1, "count": 1, "rev": 1, "at_ms": 1, "commit_id": "0" * 32, "stream": "main", "at": 1}
    return LogRow(**{**plain, "events": b"", "private": b"", "journal": b"", **columns})


@pytest.mark.spec("PT-10", "BE-21")
@pytest.mark.parametrize(
    "read",
    [
        lambda: JournalBatch.decode(b'[1,[],[["v99","of the future"]],false]', position=1),
        lambda: JournalBatch.decode(b'{"version":99}', position=1),
        lambda: private_facts(row(private=b'[["v99","of the future"]]')),
        lambda: decode_events(b'{"version":99}', 1),
        lambda: decode(TurnRecord, b'{"version":99}', key="turn/t"),
        lambda: decode_reference(b'@{"version":99}'),
    ],
    ids=["a journal row", "a journal batch", "a private fact", "events", "a record", "a reference to an object"],
)
def test_a_form_of_version_99_is_no_form_of_ours(read: Any) -> None:
    """The number of the store stands for all that is in it. What is none of it all the same is never taken for it."""
    with pytest.raises(CorruptRecord):
        read()


# ------------------------------------------------------------ what hosts tell each other


@pytest.mark.spec("PT-10")
def test_a_notice_of_version_99_is_not_read_beyond_its_number() -> None:
    ours = HostNotice(classes=("agent",), routes=("hands",), draining=True)
    assert read_notice(msgspec.json.encode(ours)) == ours
    for published in (
        msgspec.json.encode(HostNotice(version=99, classes=("agent",))),
        b'[99,{"what":"the future brings"}]',
        b"[99]",
    ):
        notice = read_notice(published)
        assert notice == HostNotice(version=99)
        assert not notice.serves("agent", "agent")
    # And what is no notice at all.
    for published in (b"{}", b'"x"', b"\xff", b'["agent"]'):
        assert read_notice(published).version not in (NOTICE_VERSION, 99)
    assert read_notice(b"") == HostNotice()


@pytest.mark.spec("PT-10")
async def test_a_host_of_version_99_holds_its_lease_and_is_not_taken_for_one_that_serves(hosts: Hosts) -> None:
    api = await hosts.open([final()], start=False)
    turn = await (await api.create_session(KEY, "agent")).submit("r1", "go")
    await SYSTEM.call_in_thread(lambda: hosts.backend.records.renew("host-99", 60_000, b'[99,{"serves":"all"}]'))

    [reason] = (await turn.status()).waiting_on
    assert reason.kind is WaitKind.DEFINITION_MISSING
    assert "version 99" in reason.next_action
    assert f"reads version {NOTICE_VERSION}" in reason.next_action
    assert [lease.alive for lease in await hosts.backend.owners() if lease.owner == "host-99"] == [True]

    # Nobody waits for it: a host of our version runs the Turn.
    runtime = await hosts.open([final()])
    assert str(await runtime.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)) == "done"
