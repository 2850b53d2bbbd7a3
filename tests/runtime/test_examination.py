"""`doctor`: a sound store is called sound whatever was done to it, and damage is named by the record it is in (C82)."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.backend.queries.examination import CHECKS, DEEP
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts import examination, keys
from agentscope_durable.contracts.errors import Forbidden, NotFound
from agentscope_durable.contracts.events import cursor_of
from agentscope_durable.contracts.examination import Examination
from agentscope_durable.contracts.identity import SessionKey, ThreadKey
from agentscope_durable.contracts.questions import Examine
from agentscope_durable.contracts.status import Audience, Severity, TurnStatus, WaitKind
from agentscope_durable.domain.examination import RECORD_KINDS
from agentscope_durable.domain.objects import ORPHAN_AGE_MS
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.spi.executor import Succeeded
from agentscope_durable.testing.faulty_record_store import FaultyRecordStore
from agentscope_durable.testing.manual_clock import ManualClock
from agentscope_durable.testing.scripted_harness import (
    Gates,
    ScriptedHarness,
    Stall,
    approval,
    external,
    final,
    local,
    say,
    think,
)
from tests.backend.test_queries import Chance
from tests.runtime.conftest import KEY, SECONDS, Hosts, all_events, kill, turn_is, until
from tests.runtime.test_recovery import LEASE_MS
from tests.runtime.test_settlement import Remote

sqlite = pytest.mark.backend("sqlite")
SCRIPT = [say("one"), local("look"), say("two"), local("again"), approval("deploy"), final("done")]


def run(database: Path, statement: str, *values: Any) -> list[Any]:
    """What somebody does to the file who should not."""
    connection = apsw.Connection(str(database))
    found = connection.execute(statement, values).fetchall()
    connection.close()
    return found


def subjects(found: Examination, *severities: Severity) -> list[str]:
    return [finding.subject for finding in found.findings if not severities or finding.severity in severities]


@asynccontextmanager
async def store(place: Path, **options: Any) -> AsyncGenerator[tuple[LocalBackend, Hosts]]:
    async with (
        LocalBackend.open(place, synchronous="NORMAL", **options) as backend,
        AsyncExitStack() as stack,
    ):
        yield backend, Hosts(backend, stack)


@pytest.fixture
async def waiting(tmp_path: Path) -> tuple[Path, str]:
    """A store with two Turns that wait for an approval, one in each of two Threads; its host has left."""
    async with store(tmp_path) as (_, hosts):
        runtime = await hosts.open(ScriptedHarness({"first": [say("hello"), final("hi")], "": SCRIPT}))
        session = await runtime.create_session(KEY, "agent")
        await (await session.submit("r0", "first")).wait(SECONDS)
        turn = await session.submit("r1", "go")
        other = await (await session.create_thread("other", "agent")).submit("r2", "go")
        for one in (turn, other):
            await turn_is(one, TurnStatus.WAITING)
    return tmp_path / "durable.db", turn.turn_id


async def examined(database: Path, *, deep: bool = True) -> Examination:
    """Read-only, as the command does it; the files stay as they are."""
    place = database.parent
    before = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.rglob("*") if path.is_file()}
    async with LocalBackend.open(place, read_only=True) as backend:
        found = await HostOperations(backend).doctor(deep=deep)
    after = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in place.rglob("*") if path.is_file()}
    assert after == before
    assert found.sound is not any(finding.severity is not Severity.NOTE for finding in found.findings)
    return found


# ------------------------------------------------------------ sound


async def test_a_store_in_use_is_sound(hosts: Hosts) -> None:
    gates = Gates()
    scripts = {"": SCRIPT, "stall": [Stall(gate="g"), final()], "hands": [external("hands", "work"), final()]}
    runtime = await hosts.open(ScriptedHarness(scripts, gates=gates), executors={"hands": Remote()})
    session = await runtime.create_session(KEY, "agent")
    waits = await session.submit("r1", "go")
    await session.submit("r2", "queued")
    stalls = await (await session.create_thread("a", "agent")).submit("r3", "stall")
    await (await session.create_thread("b", "agent")).submit("r4", "hands")
    await turn_is(waits, TurnStatus.WAITING)
    await gates.reached("g")

    for deep in (False, True):
        found = await HostOperations(hosts.backend).doctor(deep=deep)
        assert (found.sound, found.findings, found.more) == (True, (), 0)
        assert [check.name for check in found.checks] == list(CHECKS)
        assert all((check.skipped is not None) >= (check.name in DEEP and not deep) for check in found.checks)
        looked_at = {check.name: check.looked_at for check in found.checks}
        assert looked_at["sessions"] == 1 and looked_at["threads"] == 3
    assert looked_at["records"] > 10
    gates.open("g")
    await stalls.wait(SECONDS)


@pytest.mark.backend("memory")
@pytest.mark.parametrize("seed", range(12))
async def test_after_any_history_a_store_is_sound(seed: int) -> None:
    world = await Chance(seed).live(150)

    found = await world.backend.query(Examine(deep=True), audience=Audience.OPERATOR)

    assert [finding for finding in found.findings if finding.check != "hosts"] == []


@sqlite
async def test_a_sound_file_says_how_it_is_set_up(waiting: tuple[Path, str]) -> None:
    found = await examined(waiting[0])

    assert found.sound and found.deep and found.findings == ()
    assert {"sqlite", "journalMode", "format", "pageSize"} <= found.store.keys()
    assert all(check.looked_at for check in found.checks if check.name not in ("locks", "objects", "hosts"))


async def test_it_is_for_operators_and_for_sessions_that_exist(hosts: Hosts) -> None:
    with pytest.raises(Forbidden):
        await hosts.backend.query(Examine(), audience=Audience.HOST)
    with pytest.raises(NotFound):
        await HostOperations(hosts.backend).doctor(session=SessionKey("app", "nobody"))


async def test_one_session_is_looked_at_alone(hosts: Hosts) -> None:
    runtime = await hosts.open([final()], start=False)
    for name in ("c1", "c2"):
        await runtime.create_session(SessionKey("app", name), "agent")

    found = await HostOperations(hosts.backend).doctor(session=KEY)

    counted = {check.name: check for check in found.checks}
    assert counted["sessions"].looked_at == 1
    assert counted["store"].skipped and counted["hosts"].skipped


# ------------------------------------------------------------ native state


def newest_native(database: Path, thread: str = "main", back: int = 0) -> tuple[int, int, bytes]:
    [(row, at, journal)] = run(
        database,
        "select id, at, journal from log where stream=? and journal is not null order by at desc limit 1 offset ?",
        thread,
        back,
    )
    return row, at, bytes(journal)


def altered(database: Path) -> int:
    row, at, journal = newest_native(database, back=1)
    # Another text of the same length: it still is what a journal may hold.
    place = journal.index(b'"') + 1
    changed = journal[:place] + (b"x" if journal[place : place + 1] != b"x" else b"y") + journal[place + 1 :]
    run(database, "update log set journal=? where id=?", changed, row)
    return at


def garbled(database: Path) -> int:
    row, at, journal = newest_native(database)
    run(database, "update log set journal=? where id=?", journal[:-5], row)
    return at


def torn_off(database: Path) -> int:
    [(row, at)] = run(database, "select id, at from log where stream='main' order by at desc limit 1")
    run(database, "delete from log where id=?", row)
    return at


def lost_in_the_middle(database: Path) -> int:
    row, at, _ = newest_native(database, back=1)
    run(database, "delete from log where id=?", row)
    return at


def doubled(database: Path) -> int:
    row, at, _ = newest_native(database)
    run(
        database,
        "insert into log select null, p, first, rev + 100000, 0, at_ms, commit_id, stream, at, null, private, journal,"
        " null, rest_sum from log where id=?",
        row,
    )
    return at


DAMAGES: list[Callable[[Path], int]] = [altered, garbled, torn_off, lost_in_the_middle, doubled]


@sqlite
@pytest.mark.case("C82")
@pytest.mark.spec("BE-20", "BE-21")
@pytest.mark.parametrize("deep", [False, True], ids=["", "deep"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_damage_is_named_by_its_position_and_stops_its_thread_alone(
    waiting: tuple[Path, str], damage: Callable[[Path], int], deep: bool
) -> None:
    database, turn_id = waiting
    at = damage(database)

    found = await examined(database, deep=deep)

    natives = [finding for finding in found.findings if finding.check == "threads"]
    assert [finding.subject for finding in natives] == [f"position {at} of thread 'main' of session app/c1"]
    [finding] = natives
    assert (finding.severity, finding.session, finding.thread_id) == (Severity.DAMAGE, KEY, "main")
    assert finding.turn_id == turn_id
    assert "Only this Thread is concerned" in finding.next_action
    # The Turn before ended well: from there the Thread can go on.
    assert finding.commands[0][:3] == ("repair", turn_id, "--position")
    assert finding.commands[0][3] in finding.next_action


@sqlite
@pytest.mark.case("C82")
async def test_the_other_thread_goes_on_and_the_damaged_one_can_be_repaired(waiting: tuple[Path, str]) -> None:
    database, turn_id = waiting
    altered(database)
    [finding] = [one for one in (await examined(database)).findings if one.check == "threads"]
    position, expected = finding.commands[0][3], finding.commands[0][5]

    async with store(database.parent) as (backend, hosts):
        runtime = await hosts.open(ScriptedHarness(SCRIPT))
        session = runtime.get_session(KEY)
        for thread, name in (
            ("main", turn_id),
            ("other", (await session.get_thread("other").list_turns()).items[0].turn_id),
        ):
            turn = session.get_thread(thread).get_turn(name)
            [asked] = await turn.pending_interactions()
            await turn.respond(f"a-{thread}", asked.interaction_id, True)
        await session.get_thread("other").get_turn(name).wait(SECONDS)
        damaged = session.get_turn(turn_id)
        await turn_is(damaged, TurnStatus.WAITING, where=lambda view: view.waiting_on[0].kind is WaitKind.OPERATOR)

        operations = HostOperations(backend, checkpoints={"agent": ScriptedHarness(SCRIPT).restore})
        await operations.export_checkpoint(ThreadKey(KEY, "main"), position)
        await operations.repair(damaged, position, expected_position=expected, request_id="fix")
        assert (await damaged.status()).status is TurnStatus.FAILED
        again = await session.submit("r9", "go")
        await turn_is(again, TurnStatus.WAITING)

    after = await examined(database)
    assert [one.check for one in after.findings] == ["log"], "what was damaged stays on record"


@sqlite
@pytest.mark.case("C82")
async def test_a_double_that_holds_nothing_is_no_damage(waiting: tuple[Path, str]) -> None:
    database, turn_id = waiting
    row, _, _ = newest_native(database)
    run(
        database,
        "insert into log select null, p, first, rev + 100000, 0, at_ms, commit_id, stream, at, null, null, null,"
        " null, 0 from log where id=?",
        row,
    )

    assert (await examined(database)).sound
    async with store(database.parent) as (_, hosts):
        session = (await hosts.open(ScriptedHarness(SCRIPT))).get_session(KEY)
        turn = session.get_turn(turn_id)
        [asked] = await turn.pending_interactions()
        await turn.respond("a1", asked.interaction_id, True)
        await turn.wait(SECONDS)


@sqlite
async def test_a_settled_position_that_is_damaged_is_not_one_to_go_back_to(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, hosts):
        runtime = await hosts.open(ScriptedHarness([say("hello"), final("hi")]))
        session = await runtime.create_session(KEY, "agent")
        for number in range(3):
            await (await session.submit(f"r{number}", "go")).wait(SECONDS)
        positions = [view.position for view in (await session.main_thread().checkpoints()).items]
    database = tmp_path / "durable.db"
    at = altered(database)

    found = await examined(database)

    [bad] = [finding for finding in found.findings if finding.check == "checkpoints"]
    [native] = [finding for finding in found.findings if finding.check == "threads"]
    assert positions[-1] in bad.subject and f"position {at}" in native.subject
    assert positions[1] in native.next_action


# ------------------------------------------------------------ the log and the records


@sqlite
async def test_an_altered_event_is_found_by_its_number(waiting: tuple[Path, str]) -> None:
    database, _ = waiting
    [(row, first, count, events)] = run(
        database, "select id, first, count, events from log where instr(events, cast('hello' as blob)) and count > 1"
    )
    run(database, "update log set events=? where id=?", bytes(events).replace(b"hello", b"hallo"), row)

    shallow, deep = await examined(database, deep=False), await examined(database)

    assert shallow.sound
    [finding] = deep.findings
    assert finding.check == "log" and f"events {first} to {first + count - 1}" in finding.subject
    assert "its events is not what was written" in finding.problem


@sqlite
@pytest.mark.parametrize("order", ["first limit 1 offset 2", "first desc limit 1"], ids=["middle", "end"])
async def test_events_that_are_gone_are_found_by_their_numbers(waiting: tuple[Path, str], order: str) -> None:
    database, _ = waiting
    [(row, first, count)] = run(database, f"select id, first, count from log where count > 0 order by {order}")
    run(database, "delete from log where id=?", row)

    found = await examined(database)

    missing = [finding.subject for finding in found.findings if finding.problem == "it is missing"]
    wanted = f"event {first}" if count == 1 else f"events {first} to {first + count - 1}"
    assert any(wanted in subject for subject in missing), missing


@sqlite
@pytest.mark.parametrize(
    ("key", "check"),
    [("thread/main", "sessions"), ("turn/%", "sessions"), ("message/%", "records"), ("odd/1", "records")],
)
async def test_a_record_that_cannot_be_read_is_named(waiting: tuple[Path, str], key: str, check: str) -> None:
    database, turn_id = waiting
    key = key.replace("turn/%", f"turn/{turn_id}")
    if key.startswith("odd/"):
        run(database, "insert into rec select p, 'odd/1', value from rec limit 1")
    else:
        run(database, "update rec set value=cast('{' as blob) where key like ?", key)

    found = await examined(database)

    named = [finding for finding in found.findings if finding.check == check]
    assert named and all(f"record '{key.rstrip('%')}" in finding.subject for finding in named), found.findings
    # The other Thread is looked at all the same.
    assert next(one for one in found.checks if one.name == "threads").looked_at >= 1


GIVEN = {"str": "x", "int": 1, "tuple[str, ...]": ("x",)}


def test_every_kind_of_record_is_known() -> None:
    made: set[str] = set()
    for name, maker in vars(keys).items():
        if not inspect.isfunction(maker) or name in ("entry_path", "former_at", "unescape"):
            continue
        parameters = [str(one.annotation) for one in inspect.signature(maker).parameters.values()]
        if all(kind in GIVEN for kind in parameters):
            made.add(str(maker(*(GIVEN[kind] for kind in parameters))))
    prefixes = {key.partition("/")[0] for key in made if "/" in key}

    # `msgid` is set aside for messages that are completed again under another key; nothing writes it yet.
    assert prefixes - {"msgid"} == RECORD_KINDS.keys()


@sqlite
async def test_a_head_that_cannot_be_read_is_its_sessions_alone(waiting: tuple[Path, str]) -> None:
    database, _ = waiting
    async with store(database.parent) as (_, hosts):
        await (await hosts.open([final()], start=False)).create_session(SessionKey("app", "c2"), "agent")
    run(database, "update head set value=cast('[]' as blob) where name=?", keys.partition(KEY))

    found = await examined(database)

    [finding] = [finding for finding in found.findings if finding.check == "sessions"]
    assert finding.subject == "session app/c1"
    assert next(one for one in found.checks if one.name == "threads").looked_at == 1


@sqlite
async def test_what_sqlite_finds_wrong_is_told(waiting: tuple[Path, str]) -> None:
    database, _ = waiting
    [(page,)] = run(database, "select rootpage from sqlite_schema where name='log_stream'")
    size = 8192
    content = bytearray(database.read_bytes())
    content[(page - 1) * size : (page - 1) * size + 100] = b"\xff" * 100
    database.write_bytes(content)

    found = await examined(database, deep=False)

    assert not found.sound
    assert "the file" in subjects(found, Severity.DAMAGE)


# ------------------------------------------------------------ large bodies


@pytest.fixture
async def large(tmp_path: Path) -> Path:
    """A store whose native state has bodies of their own."""
    async with store(tmp_path) as (_, hosts):
        runtime = await hosts.open(ScriptedHarness([think("x" * 200_000), approval("deploy"), final("done")]))
        session = await runtime.create_session(KEY, "agent")
        await turn_is(await session.submit("r1", "go"), TurnStatus.WAITING)
    return tmp_path


def bodies(place: Path) -> list[Path]:
    return sorted(path for path in (place / "objects").rglob("*") if path.is_file())


@sqlite
@pytest.mark.spec("OB-08")
async def test_a_body_that_is_gone_is_named_with_the_commit_that_needs_it(large: Path) -> None:
    assert (await examined(large / "durable.db")).sound
    body = bodies(large)[0]
    body.unlink()

    found = await examined(large / "durable.db", deep=False)

    [finding] = [finding for finding in found.findings if finding.check == "objects"]
    assert finding.subject == f"object {body.name}" and finding.severity is Severity.DAMAGE
    assert "position " in finding.problem and "thread 'main'" in finding.problem


@pytest.mark.case("C62")
async def test_a_store_that_is_away_is_no_damage(hosts: Hosts) -> None:
    """Found by the simulator: an object store that could not be reached was called damage, and a backup advised."""
    runtime = await hosts.open([final("done")])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r1", "hi")).wait(SECONDS)
    away = FaultyRecordStore(hosts.backend.records)
    away.fail("read", times=1000)

    found = await HostOperations(TransactionalSessionBackend(away)).doctor(deep=True)

    assert not found.sound
    assert subjects(found) == ["session app/c1"]
    assert subjects(found, Severity.DAMAGE) == []
    assert found.findings[0].problem.startswith("it cannot be read now")


class Meanwhile:
    """A store in which somebody does something just before the n-th look at a Session."""

    def __init__(self, records: Any, nth: int, act: Callable[[HostOperations], Awaitable[object]]) -> None:
        self._records = records
        self._act = act
        self.left = nth

    def __getattr__(self, name: str) -> Any:
        return getattr(self._records, name)

    async def read(self, partition: str, reads: Any) -> Any:
        if partition == keys.partition(KEY):
            self.left -= 1
            if self.left == 0:
                await self._act(HostOperations(TransactionalSessionBackend(self._records)))
        return await self._records.read(partition, reads)


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 6, 9])
async def test_a_session_that_is_dropped_while_it_is_looked_at_is_no_damage(hosts: Hosts, nth: int) -> None:
    """Found by the simulator: whatever was read after the drop was called damage, and a backup advised."""
    runtime = await hosts.open([say("one"), local("look"), final("done")])
    session = await runtime.create_session(KEY, "agent")
    await (await session.submit("r1", "hi")).wait(SECONDS)
    await session.close()
    records = Meanwhile(hosts.backend.records, nth, lambda host: host.drop_session(KEY, reason="over"))

    found = await HostOperations(TransactionalSessionBackend(records)).doctor(deep=True)

    assert records.left <= 0, "it was dropped"
    assert found.sound and subjects(found) == []


@pytest.mark.parametrize("nth", range(1, 13))
async def test_events_that_are_pruned_while_they_are_looked_at_are_no_damage(hosts: Hosts, nth: int) -> None:
    """Found by the simulator: commits that were pruned after the head had been read were said to be missing."""
    runtime = await hosts.open([say("one"), local("look"), final("done")])
    session = await runtime.create_session(KEY, "agent")
    for number in range(3):
        await (await session.submit(f"r{number}", "hi")).wait(SECONDS)
    through = cursor_of(KEY, (await all_events(session))[-3].sequence)
    records = Meanwhile(hosts.backend.records, nth, lambda host: host.prune_events(KEY, through=through))

    found = await HostOperations(TransactionalSessionBackend(records)).doctor(deep=True)

    assert records.left <= 0, "they were pruned"
    assert found.sound and subjects(found) == []


@sqlite
async def test_a_body_that_was_altered_is_found_when_it_is_read(large: Path) -> None:
    body = bodies(large)[0]
    body.chmod(0o644)
    body.write_bytes(body.read_bytes()[:-1] + b"?")

    assert (await examined(large / "durable.db", deep=False)).sound
    found = await examined(large / "durable.db")

    [finding] = [finding for finding in found.findings if finding.check == "objects"]
    assert body.name in finding.subject and "digest" in finding.problem


@sqlite
async def test_bodies_that_nobody_needs_are_noted_and_harm_nothing(large: Path) -> None:
    # Later than what was written so far.
    clock = ManualClock(4_000_000_000_000)
    async with store(large, clock=clock) as (backend, _):
        # Marked, put, and never referred to: its commit was lost.
        content = b'"orphan"' * 20_000
        lost = (await backend.put_body(KEY, content)).name
        young = await HostOperations(backend).doctor()
        clock.advance(ORPHAN_AGE_MS + 1)
        stranger = bodies(large)[0].with_name("f" * 64)
        stranger.write_bytes(b"?")
        await backend.objects.put("gone\x00session", lost, content)
        old = await HostOperations(backend).doctor()

    assert young.findings == ()
    assert old.sound and {finding.severity for finding in old.findings} == {Severity.NOTE}
    folder = hashlib.sha256(b"gone\x00session").hexdigest()
    assert set(subjects(old)) == {f"object {lost}", f"object {stranger.name}", f"folder {folder}"}


@sqlite
async def test_findings_are_listed_up_to_a_bound_and_counted_beyond(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentscope_durable.backend.queries.examination.report.FINDINGS_MAX", 5)
    for number in range(12):
        bodies(large)[0].with_name(f"{number:064x}").write_bytes(b"?")

    found = await examined(large / "durable.db")

    assert (len(found.findings), found.more) == (5, 7)
    assert examination.FINDINGS_MAX == 1000


# ------------------------------------------------------------ hosts, locks and the index


async def test_a_host_that_is_gone_and_still_owns_work(hosts: Hosts, clock: ManualClock) -> None:
    gates = Gates()
    host = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates))
    turn = await (await host.create_session(KEY, "agent")).submit("r1", "go")
    await gates.reached("g")
    assert (await HostOperations(hosts.backend).doctor()).sound
    kill(host)
    clock.advance(LEASE_MS + 1)

    found = await HostOperations(hosts.backend).doctor()

    [finding] = found.findings
    assert (finding.check, finding.severity, finding.subject) == ("hosts", Severity.TROUBLE, host.owner)
    assert finding.problem.endswith("still owns 1 Thread") and not found.sound
    gates.open("g")
    again = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates))
    await again.get_session(KEY).get_turn(turn.turn_id).wait(SECONDS)
    assert (await HostOperations(hosts.backend).doctor()).sound


class Mute(Remote):
    """It does what it is asked for and never says so, unless it is asked again."""

    async def execute(self, request: Any) -> Any:
        self.started.append(request.execution_id)
        await asyncio.Event().wait()


@pytest.mark.case("C18")
async def test_what_a_host_owns_that_has_lost_its_lease_is_told_and_taken_over(
    hosts: Hosts, backend: TransactionalSessionBackend
) -> None:
    """Nobody who looks through leases would find it. A host whose lease was renewed in another database was one."""
    gates = Gates()
    scripts = {
        "": [Stall(gate="g", obedient=False), final("done")],
        "call": [external("hands", "work"), final("called")],
    }
    remote = Mute()
    host = await hosts.open(ScriptedHarness(scripts, gates=gates), executors={"hands": remote})
    session = await host.create_session(KEY, "agent")
    turn = await session.submit("r1", "go")
    calling = await (await session.create_thread("other", "agent")).submit("r2", "call")
    await gates.reached("g")
    await turn_is(calling, TurnStatus.WAITING)
    await until(lambda: bool(remote.started))
    kill(host)
    await backend.records.release(host.owner)
    assert await backend.owners() == []

    found = await HostOperations(backend).doctor()

    [finding] = found.findings
    assert (finding.check, finding.severity, finding.subject) == ("hosts", Severity.TROUBLE, host.owner)
    assert finding.problem == "it has no lease and still owns 1 Thread, 1 call" and not found.sound
    gates.open("g")
    remote.outcome = Succeeded(value="worked")
    again = await hosts.open(ScriptedHarness(scripts, gates=gates), executors={"hands": remote})
    there = again.get_session(KEY)
    assert str(await there.get_turn(turn.turn_id).wait(SECONDS)) == "done"
    assert str(await there.get_thread("other").get_turn(calling.turn_id).wait(SECONDS)) == "called"
    assert len(remote.started) == 1
    assert (await HostOperations(backend).doctor()).sound


@sqlite
async def test_a_lock_file_of_no_host_is_noted(waiting: tuple[Path, str]) -> None:
    database, _ = waiting
    folder = database.parent / "hosts"
    folder.mkdir(exist_ok=True)
    (folder / "long-gone.lock").touch()

    found = await examined(database)

    assert found.sound
    assert [(finding.check, finding.subject) for finding in found.findings] == [("locks", "long-gone.lock")]


@sqlite
async def test_what_a_killed_making_of_the_store_left_is_noted(waiting: tuple[Path, str]) -> None:
    database, _ = waiting
    left = [f"durable.db.0123456789abcdef.new{ending}" for ending in ("", "-journal")]
    for name in left:
        (database.parent / name).touch()

    found = await examined(database)

    assert found.sound
    assert [(finding.check, finding.subject) for finding in found.findings] == [("store", name) for name in left]


@sqlite
@pytest.mark.case("C18")
async def test_work_that_no_host_would_find_is_found_and_its_remedy_works(tmp_path: Path) -> None:
    async with store(tmp_path) as (_, hosts):
        runtime = await hosts.open([final("done")], start=False)
        turn = await (await runtime.create_session(KEY, "agent")).submit("r1", "go")
    database = tmp_path / "durable.db"
    run(database, "delete from ready")

    [finding] = (await examined(database, deep=False)).findings

    assert (finding.check, finding.severity, finding.turn_id) == ("schedule", Severity.DAMAGE, turn.turn_id)
    assert "no host would ever find it" in finding.problem
    async with store(tmp_path) as (_, hosts):
        turn = (await hosts.open([final("done")])).get_session(KEY).get_turn(turn.turn_id)
        await turn.pause("p1")
        await turn.resume("s1", (await turn.status()).revision)
        await turn.wait(SECONDS)


@sqlite
async def test_an_owner_nobody_would_miss_and_work_of_another_definition(tmp_path: Path) -> None:
    clock = ManualClock()
    gates = Gates()
    async with store(tmp_path, clock=clock) as (backend, hosts):
        host = await hosts.open(ScriptedHarness([Stall(gate="g"), final()], gates=gates))
        session = await host.create_session(KEY, "agent")
        await session.submit("r1", "go")
        await gates.reached("g")
        await (await hosts.open([final()], version="v2", start=False)).create_session(SessionKey("app", "c2"), "agent")
        await host.get_session(SessionKey("app", "c2")).submit("r2", "go")
        run(tmp_path / "durable.db", "delete from ready where kind='lease'")
        run(tmp_path / "durable.db", "update ready set klass='other' where kind='turn'")

        found = await HostOperations(backend).doctor()
        gates.open("g")

    problems = {finding.session: finding.problem for finding in found.findings if finding.session}
    assert "no other host would ever learn" in problems[KEY]
    assert "hosts of another definition" in problems[SessionKey("app", "c2")]
