"""What an application opens by one name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import apsw
import pytest

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.contracts.errors import HostClosed, InvalidRequest, Misuse, NotADatabase, UnknownFormat
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.questions import GetSession
from agentscope_durable.contracts.records import STORAGE_FORMAT
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, think

KEY = SessionKey("app", "conversation")


@pytest.mark.spec("LO-01", "LO-02", "LO-03", "BE-04")
async def test_a_session_survives_in_its_folder_without_any_server(tmp_path: Path) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with LocalBackend.open(tmp_path) as backend, DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        await turn.wait(timeout=90)

    assert (tmp_path / "durable.db").is_file()
    async with LocalBackend.open(tmp_path) as backend, DurableRuntime(backend=backend) as runtime:
        sessions = await runtime.list_sessions("app")
        assert [view.session for view in sessions.items] == [KEY]
        again = runtime.get_session(KEY).get_turn(turn.turn_id)
        assert (await again.status()).status is TurnStatus.COMPLETED


@pytest.mark.spec("LO-05", "OB-04")
async def test_a_large_checkpoint_becomes_a_file_beside_the_database(tmp_path: Path) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((think("x" * 200_000), final("done"))))
    async with LocalBackend.open(tmp_path) as backend, DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
        session = await runtime.create_session(KEY, "agent")
        await runtime.start()
        turn = await session.submit("r1", "go")
        await turn.wait(timeout=90)

    objects = [path for path in (tmp_path / "objects").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in objects) > 150_000
    assert (tmp_path / "durable.db").stat().st_size < 150_000


@pytest.mark.spec("LO-06")
def test_neither_a_worker_nor_a_queue_nor_an_agent_library_is_loaded_to_run_locally() -> None:
    script = (
        "import sys; from agentscope_durable import DurableRuntime, LocalBackend; "
        "import agentscope_durable.stores.records.sqlite; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in "
        "('agentscope', 'openai', 'mcp', 'rocketmq', 'asyncpg', 'psycopg', 'boto3', 'typer', 'rich')))"
    )

    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout

    assert printed.strip() == "[]"


@pytest.mark.spec("PT-12", "BE-27")
@pytest.mark.parametrize("found", [7, 9, 0])
async def test_a_store_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path, found: int) -> None:
    assert STORAGE_FORMAT == 8
    backend = await LocalBackend.open(tmp_path)
    await backend.close()
    database = tmp_path / "durable.db"
    connection = apsw.Connection(str(database))
    connection.execute(f"pragma user_version={found}")
    connection.execute("pragma wal_checkpoint(truncate)").fetchall()
    connection.close()
    before = database.read_bytes()

    with pytest.raises(UnknownFormat):
        await LocalBackend.open(tmp_path)

    assert database.read_bytes() == before


@pytest.mark.spec("RT-04")
def test_importing_every_module_starts_nothing(tmp_path: Path) -> None:
    script = """
import importlib, os, pkgutil, threading
import agentscope_durable
for module in pkgutil.walk_packages(agentscope_durable.__path__, "agentscope_durable."):
    if not module.name.startswith("agentscope_durable.testing"):
        importlib.import_module(module.name)
here = "/proc/self/fd"
sockets = [os.readlink(f"{here}/{fd}") for fd in os.listdir(here) if os.path.exists(f"{here}/{fd}")]
assert threading.active_count() == 1, threading.enumerate()
assert not [name for name in sockets if name.startswith("socket:")], sockets
assert os.listdir(".") == [], os.listdir(".")
"""

    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)


async def test_a_folder_is_made_and_can_be_awaited_or_entered(tmp_path: Path) -> None:
    async with LocalBackend.open(tmp_path / "a" / "b") as backend:
        assert backend.capabilities.persistent
    again = await LocalBackend.open(tmp_path / "a" / "b")
    await again.close()

    assert (tmp_path / "a" / "b" / "durable.db").is_file()


@pytest.mark.spec("LO-07")
@pytest.mark.backend("sqlite")
async def test_a_closed_backend_has_let_go_of_its_folder(tmp_path: Path) -> None:
    harness = Harness("agent", "v1", ScriptedHarness((final("done"),)))
    async with LocalBackend.open(tmp_path) as backend, DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
        await runtime.start()
        session = await runtime.create_session(KEY, "agent")
        await session.call("r1", "go", timeout=90)
        assert _open_below(tmp_path)

    assert _open_below(tmp_path) == []
    # The log was moved into the file, and nobody is said to be there.
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["durable.db"]
    assert [path for path in (tmp_path / "hosts").rglob("*") if path.is_file()] == []
    for use in (backend.query(GetSession(session=KEY)), backend.owners(), backend.put_body(KEY, b"x" * 100_000)):
        with pytest.raises(HostClosed):
            await use
    await backend.close()
    shutil.rmtree(tmp_path)


def _open_below(folder: Path) -> list[str]:
    """Files of this folder that this process has open."""
    here = "/proc/self/fd"
    links = [os.readlink(f"{here}/{fd}") for fd in os.listdir(here) if os.path.exists(f"{here}/{fd}")]
    return [link for link in links if link.startswith(str(folder))]


async def test_opening_does_nothing_before_it_is_awaited(tmp_path: Path) -> None:
    LocalBackend.open(tmp_path / "later")

    assert not (tmp_path / "later").exists()


@pytest.mark.parametrize("made", [LocalBackend, PostgresBackend])
async def test_a_part_that_can_never_be_right_is_named_as_it_was_given_and_nothing_is_opened(
    tmp_path: Path, made: Any
) -> None:
    where = str(tmp_path / "store") if made is LocalBackend else "postgresql://nobody@192.0.2.1/nowhere"

    wrong: Any
    for wrong in ("s3://bucket/prefix", tmp_path):
        with pytest.raises(InvalidRequest, match=rf"{type(wrong).__name__} does not") as caught:
            await made.open(where, object_store=wrong)
        assert caught.value.path == "object_store"
    nothing: Any = object()
    with pytest.raises(Misuse, match="commit policy"):
        await made.open(where, policy=nothing)

    assert list(tmp_path.iterdir()) == []


async def test_what_cannot_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")

    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidRequest, match="cannot be made") as caught:
            await LocalBackend.open(place)
        assert str(place) in str(caught.value)


async def test_a_folder_with_a_foreign_database_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "durable.db").write_text("mine" * 1000)

    with pytest.raises(NotADatabase):
        await LocalBackend.open(tmp_path)

    assert (tmp_path / "durable.db").read_text() == "mine" * 1000
