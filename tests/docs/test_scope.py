"""What the project says about itself is what its metadata says."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from agentscope_durable.assembly import LocalBackend, PostgresBackend
from agentscope_durable.backend.transaction import TransactionalSessionBackend
from agentscope_durable.contracts.errors import NotFound
from agentscope_durable.contracts.identity import SessionKey
from agentscope_durable.contracts.status import TurnStatus
from agentscope_durable.runtime.hints import LocalWakeups
from agentscope_durable.runtime.runtime import DurableRuntime, Harness
from agentscope_durable.stores.records.memory import MemoryRecordStore
from agentscope_durable.testing.scripted_harness import ScriptedHarness, final

ROOT = Path(__file__).parents[2]


@pytest.mark.spec("RT-53")
def test_it_says_alpha_in_the_readme_in_the_version_and_in_the_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert "**Alpha.**" in (ROOT / "README.md").read_text()
    assert re.search(r"\.dev\d+$", project["version"])
    assert "Development Status :: 3 - Alpha" in project["classifiers"]


@pytest.mark.spec("RT-51")
def test_only_what_the_checks_run_is_claimed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [name for name in project["classifiers"] if name.startswith("Programming Language :: Python :: ")]

    assert pythons == ["Programming Language :: Python :: 3.11"]
    assert "Python 3.11 on Linux is what the checks run" in (ROOT / "README.md").read_text()


def words(page: str) -> str:
    """The text of a page without its line breaks."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def names_of_the_package() -> set[str]:
    """Every name that a module of the package defines, imports or mentions as an attribute, and every module's name."""
    found: set[str] = set()
    for path in (ROOT / "src" / "agentscope_durable").rglob("*.py"):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                    found.add(name)
                case _:
                    pass
    return found


@pytest.mark.spec("BE-30")
def test_the_cited_project_is_a_reference_for_one_cut_and_nothing_of_it_is_here() -> None:
    page = words("architecture.md")
    assert "https://github.com/vercel-labs/durable-harness" in page
    assert "It is a reference for that cut alone" in page
    assert "no code, format or API of that project is used" in page

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    assert not [name for name in required if "harness" in name]
    assert not [name for name in names_of_the_package() if "harness_world" in name or "durable_harness" in name.lower()]


@pytest.mark.spec("AS-24")
def test_the_session_log_of_a_beta_is_no_part_of_an_upgrade() -> None:
    page = words("versioning.md")
    assert "The `SessionLog` of a beta of AgentScope, its API and its files, is no part of this" in page

    assert not [name for name in names_of_the_package() if "sessionlog" in name.lower().replace("_", "")]
    assert "sessionlog" not in (ROOT / "tests" / "public_api.txt").read_text().lower().replace("_", "")


@pytest.mark.spec("BE-26")
@pytest.mark.backend("sqlite")
async def test_another_backend_neither_reads_nor_moves_what_is_in_sqlite(tmp_path: Path, database: str) -> None:
    assert "nothing is looked for, copied or moved, and the old store stays as it is" in words("versioning.md")
    key = SessionKey("app", "c1")
    harness = Harness("agent", "v1", ScriptedHarness([final()]))
    async with (
        LocalBackend.open(tmp_path / "first") as backend,
        DurableRuntime(backend=backend, harnesses=[harness]) as runtime,
    ):
        await (await runtime.create_session(key, "agent")).submit("r1", "in flight")
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}

    memory = TransactionalSessionBackend(MemoryRecordStore(), wakeups=LocalWakeups())
    async with (
        LocalBackend.open(tmp_path / "second") as folder,
        PostgresBackend.open(database, schema="durable", initialize_schema=True) as postgres,
    ):
        for backend in (folder, memory, postgres):
            async with DurableRuntime(backend=backend, harnesses=[harness]) as runtime:
                await runtime.start()
                assert len(await runtime.list_sessions("app")) == 0
                with pytest.raises(NotFound):
                    await runtime.get_session(key).view()
                # The same names are free here: it is another store.
                session = await runtime.create_session(key, "agent")
                assert str(await session.call("r1", "something else", timeout=90)) == "done"
    assert {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()} == before

    async with (
        LocalBackend.open(tmp_path / "first") as backend,
        DurableRuntime(backend=backend, harnesses=[harness]) as runtime,
    ):
        [turn] = await runtime.get_session(key).list_turns()
        assert turn.status is TurnStatus.QUEUED
