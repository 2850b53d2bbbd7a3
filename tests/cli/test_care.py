"""`doctor`, `prune`, `sweep`, `vacuum`: what they say, the code they end with, and what they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agentscope_durable.assembly import LocalBackend
from agentscope_durable.contracts.errors import StoreReadOnly
from agentscope_durable.contracts.keys import spell
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.operations import HostOperations
from agentscope_durable.stores.objects.cloud import S3ObjectStore
from agentscope_durable.testing.scripted_harness import approval, final, say
from tests.cli.conftest import KEY, SESSION, Done, begun
from tests.cli.test_explain import suggested
from tests.kill.host import KEY as KILL_KEY
from tests.kill.test_kill import Folder
from tests.runtime.conftest import SECONDS, Hosts, turn_is
from tests.runtime.test_examination import altered, run, waiting  # noqa: F401 - a fixture
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, running

pytestmark = pytest.mark.backend("sqlite")
Typed = Callable[..., Any]


# ------------------------------------------------------------ doctor


async def test_a_sound_store_ends_with_0(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [approval("deploy"), final()])
    await turn_is(turn, TurnStatus.WAITING)

    people: Done = await typed("doctor")
    script: Done = await typed("doctor", "--deep", "--json")
    one: Done = await typed("doctor", "--session", SESSION, "--json")

    assert "The store is sound." in people.out and "wal" in people.out and "not made" in people.out
    assert script.json["sound"] is True and script.json["deep"] is True and script.json["store"]["journalMode"] == "wal"
    assert {check["name"]: check.get("lookedAt", 0) for check in script.json["checks"]}["records"] > 5
    assert next(check for check in one.json["checks"] if check["name"] == "hosts")["skipped"]
    assert (await typed("doctor", "--session", "app/nobody", "--json", code=3)).error["code"] == "NOT_FOUND"
    assert (await typed("doctor", "--session", "nobody", code=2)).err


@pytest.mark.case("C82")
async def test_damage_ends_with_10_and_names_the_record_and_the_way_out(
    waiting: tuple[Path, str],  # noqa: F811
    typed: Typed,
) -> None:
    database, turn_id = waiting
    at = altered(database)

    people: Done = await typed("doctor", code=10)
    script: Done = await typed("doctor", "--json", code=10)

    assert f"DAMAGE: position {at} of thread 'main' of session {SESSION}" in people.out
    assert "The store is DAMAGED." in people.out
    [finding] = [one for one in script.json["findings"] if one["check"] == "threads"]
    assert finding["severity"] == "damage" and finding["session"] == {"namespace": "app", "sessionId": "c1"}
    [repair] = suggested(people)
    assert repair == finding["commands"][0] and repair[:2] == ["repair", turn_id]


async def test_a_host_that_was_killed_ends_with_1_until_another_takes_over(tmp_path: Path, typed: Typed) -> None:
    folder = Folder(tmp_path)
    host = await folder.host()
    try:
        folder.open("work")
        await folder.reached("g")
        assert (await typed("doctor")).code == 0
        host.kill()
        await host.wait()

        done: Done = await typed("doctor", "--json", code=1)

        [finding] = done.json["findings"]
        assert (finding["check"], finding["severity"]) == ("hosts", "trouble")
        assert "No damage was found, and somebody has to do something." in (await typed("doctor", code=1)).out
        [turn] = (await typed("turns", spell(KILL_KEY), "--json")).json["items"]
        assert ", NOT ALIVE, fence " in (await typed("turn", turn["turnId"])).out
        assert finding["problem"] == "it is dead and still owns 1 Thread"
        folder.open("g")
        second = await folder.host()
        assert await asyncio.wait_for(second.wait(), SECONDS) == 0
        assert (await typed("doctor")).code == 0
    finally:
        for process in folder.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
    assert spell(KILL_KEY) in (await typed("sessions")).out


# ------------------------------------------------------------ prune


async def test_events_that_were_pruned_are_gone_and_everything_else_is_there(hosts: Hosts, typed: Typed) -> None:
    _, turn = await begun(hosts, [say("one"), final("two")])
    await turn.wait(SECONDS)
    before: Done = await typed("events", SESSION, "--json")
    third = (await typed("events", SESSION, "--limit", "3", "--json")).json["cursor"]

    for given in (
        [],
        ["--older-than", "soon"],
        ["--older-than", "-1"],
        ["--older-than", ""],
        ["--through", "nonsense"],
    ):
        assert (await typed("prune", SESSION, *given, code=2)).err.startswith("error: ")
    foreign = await typed("events", "app/other", "--json", code=3)
    assert foreign.err
    nothing: Done = await typed("prune", SESSION, "--older-than", "7d", "--json")
    assert nothing.json["dropped"] == 0
    done: Done = await typed("prune", SESSION, "--older-than", "0s")

    [dropped, replay, oldest] = done.out.splitlines()
    through = before.json["events"][-1]["sequence"]
    assert 0 < int(dropped.split()[1]) < through, "fewer than what is no longer replayed: a snapshot needs the others"
    assert f"begins after #{through}; the others up to there stay for snapshots" in replay
    assert oldest.rstrip().endswith(f"-{through}")
    gone: Done = await typed("events", SESSION, "--after", third, "--json", code=9)
    assert gone.error["code"] == "CURSOR_EXPIRED"
    assert "--follow" in gone.error["advice"] and "--after" in gone.error["advice"]
    kept: Done = await typed("events", SESSION, "--json")
    assert len(kept.json["events"]) < len(before.json["events"])
    assert kept.json["events"] == []
    assert f"no events here: --after {kept.json['cursor']} goes on" in (await typed("events", SESSION)).err
    assert "two" in (await typed("history", SESSION)).out
    assert (await typed("doctor", "--deep")).code == 0


# ------------------------------------------------------------ sweep


@pytest.mark.spec("OB-08")
async def test_bodies_that_nobody_refers_to_are_removed_and_strangers_only_on_request(
    hosts: Hosts, typed: Typed, tmp_path: Path
) -> None:
    _, turn = await begun(hosts, [final("x" * 100_000)])
    await turn.wait(SECONDS)
    lost = await hosts.backend.put_body(KEY, b"1" * 100_000)
    young: Done = await typed("sweep")
    assert "1 that nobody refers to yet" in young.out and "removed    0 bodies" in young.out

    stranger = f"{'0' * 64}-{'1' * 16}"
    folder = next(path for path in tmp_path.rglob(lost.name)).parent
    (folder / stranger).write_bytes(b"?")
    for dry_run in (["--dry-run"], []):
        told: Done = await typed("sweep", "--session", SESSION, "--strangers", *dry_run, "--json")
        assert told.json["strangers"] == [f"{SESSION}: {stranger}"]
        assert told.json.get("dryRun", False) == bool(dry_run)
        assert (folder / stranger).exists() == bool(dry_run)
    assert "strangers  0 that no record knows" in (await typed("sweep", "--strangers", "--dry-run")).out
    assert (folder / lost.name).exists()
    assert (await typed("sweep", "--session", "app/nobody", "--json", code=3)).error["code"] == "NOT_FOUND"
    assert (await typed("doctor", "--deep")).code == 0
    assert "xxx" in (await typed("history", SESSION)).out


@pytest.mark.spec("OB-01")
async def test_bodies_in_a_bucket_are_found_where_a_variable_names_it(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running("localbucket", tmp_path / "bucket") as server:
        objects = S3ObjectStore(prefix="mine", **server.options)
        async with LocalBackend.open(tmp_path, object_store=objects) as backend, AsyncExitStack() as stack:
            _, turn = await begun(Hosts(backend, stack), [final("x" * 100_000)])
            await turn.wait(SECONDS)
        nowhere: Done = await typed("history", SESSION, "--json", code=10)
        assert nowhere.error["type"] == "BodyMissing" and str(tmp_path) in nowhere.error["advice"]

        monkeypatch.setenv("DURABLE_OBJECTS", f"s3://{BUCKET}/mine?endpoint={server.endpoint}&region=us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        assert "xxx" in (await typed("history", SESSION)).out
        assert (await typed("doctor", "--deep")).code == 0
        assert (await typed("sweep", "--strangers", "--dry-run", "--json")).json["strangers"] == []
        monkeypatch.setenv("DURABLE_OBJECTS", "nonsense")
        assert "s3://bucket/prefix" in (await typed("history", SESSION, code=2)).err


# ------------------------------------------------------------ vacuum


async def test_a_vacuum_gives_room_back_when_every_host_is_gone(hosts: Hosts, typed: Typed, tmp_path: Path) -> None:
    runtime, turn = await begun(hosts, [final("done")])
    session = runtime.get_session(KEY)
    for number in range(20):
        await (await session.submit(f"x{number}", "y" * 40_000)).wait(SECONDS)

    refused: Done = await typed("vacuum", "--json", code=75)
    assert runtime.owner in refused.error["message"]
    assert refused.error["advice"] == "Stop every host: drain it, then close it. Then run the vacuum again"
    await runtime.close()
    run(tmp_path / "durable.db", "update log set events=null, events_sum=null where count>0 and length(events)>30000")

    done: Done = await typed("vacuum", "--json")
    people: Done = await typed("vacuum")

    assert done.json["beforeBytes"] - done.json["afterBytes"] > 15 * 40_000
    assert f"after   {done.json['afterBytes']} bytes" in people.out
    assert (await typed("result", turn.turn_id)).out == "done\n"


async def test_a_host_that_was_killed_does_not_keep_anybody_from_a_vacuum(tmp_path: Path, typed: Typed) -> None:
    folder = Folder(tmp_path)
    host = await folder.host()
    try:
        await folder.says("started")
        await typed("vacuum", code=75)
        host.kill()
        await host.wait()
        # Its lease runs for another hour; that it is dead its lock tells.
        assert (await typed("vacuum", "--json")).json["afterBytes"] > 0
    finally:
        if host.returncode is None:
            host.kill()
        await host.wait()


async def test_what_is_only_read_is_not_rewritten(hosts: Hosts, tmp_path: Path) -> None:
    async with LocalBackend.open(tmp_path, read_only=True) as backend:
        with pytest.raises(StoreReadOnly):
            await backend.vacuum()
        assert (await HostOperations(backend).doctor()).sound
