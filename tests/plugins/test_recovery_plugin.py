"""What is left out when every Step begins with a recovery: a list with reasons, and what it cannot change."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.plugins.recovery_plugin import COUNTS_RUNS, COUNTS_RUNS_FILE, digest_of

ROOT = Path(__file__).resolve().parents[2]
REASON_WORDS = 3
MARKED_MAX = 60
"""More tests that cannot live with a recovery in every Step are a sign that something else is wrong."""


def functions(path: Path) -> set[str]:
    """Tests of a file, those of its classes as `Class::test`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{one.name}"
                for one in node.body
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def test_each_test_that_counts_runs_is_there_and_says_why() -> None:
    for test, reason in COUNTS_RUNS.items():
        path, _, name = test.partition("::")
        assert name in functions(ROOT / path), f"{COUNTS_RUNS_FILE.name}: there is no {test}"
        assert len(reason.split()) >= REASON_WORDS, f"{COUNTS_RUNS_FILE.name}: {test} needs a reason"


def test_the_list_is_in_order_and_short() -> None:
    tests = [line.split(" ")[0] for line in COUNTS_RUNS_FILE.read_text(encoding="utf-8").splitlines()]
    tests = [test for test in tests if test.startswith("tests/")]
    assert tests == sorted(set(tests))
    assert len(tests) <= MARKED_MAX


SUITE = {
    "a_run": """
        import pytest

        from agentscope_durable import DurableRuntime, Harness, LocalBackend, SessionKey
        from agentscope_durable.testing.scripted_harness import ScriptedHarness, final, say

        @pytest.mark.asyncio
        async def test_it(tmp_path):
            harness = Harness("agent", "v1", ScriptedHarness([say("first"), final("second")]))
            async with (
                LocalBackend.open(tmp_path) as backend,
                DurableRuntime(backend=backend, harnesses=[harness]) as runtime,
            ):
                session = await runtime.create_session(SessionKey("app", "one"), "agent")
                await runtime.start()
                assert str(await (await session.submit("r", "go")).wait(timeout=60)) == "second"

        def test_beside_it(): ...
    """,
    "a_process": "def test_it(): subprocess.run([sys.executable, '-c', ''], check=True)",
    "a_process_by_asyncio": """
        import asyncio

        async def begin():
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
            await process.wait()

        def test_it():
            asyncio.run(begin())
    """,
    "a_shell": "def test_it(): subprocess.run('true', shell=True, env={**os.environ}, check=True)",
    "a_spawned_process": """
        import multiprocessing

        def test_it():
            process = multiprocessing.get_context("spawn").Process(target=os.getpid)
            process.start()
            process.join()
    """,
    "a_fork": "def test_it(): os.waitpid(os.fork() or os._exit(0), 0)",
    "a_fixture": """
        import pytest

        @pytest.fixture(scope="module")
        def host():
            subprocess.run([sys.executable, "-c", ""], check=True)

        def test_first(host): ...

        def test_second(host): ...
    """,
    "a_failure": "def test_it(): assert 0",
    "no_test_that_ran": "def test_it(): __import__('pytest').skip('not here')",
    "nothing": "def test_it(): ...",
    "another_program": "def test_it(): subprocess.run(['git', '--version'], check=True)",
    "a_process_without_the_switch": "def test_it(): subprocess.run([sys.executable, '-c', ''], check=True, env={})",
}
"""What a test may do. In the last three the switch can change nothing."""
UNCHANGED = ["a_process_without_the_switch", "another_program", "nothing"]


def run(folder: Path, *options: str) -> list[str]:
    """The tests of the folder that were run, by their files."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.plugins.recovery_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), *options, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "a_failure.py::test_it" in done.stdout, done.stdout + done.stderr
    return sorted(set(re.findall(r"test_\w+\.py::\w+", done.stdout)))


def test_what_the_switch_cannot_change_is_left_out_and_nothing_else(tmp_path: Path) -> None:
    suite, note = tmp_path / "suite", tmp_path / "build" / "note.json"
    suite.mkdir()
    for name, text in SUITE.items():
        lines = "import os, subprocess, sys\n" + textwrap.dedent(text)
        (suite / f"test_{name}.py").write_text(lines, encoding="utf-8")
    where = (f"--where-switch={note}", "-n", "2")
    every = run(suite, *where)
    assert {test.split(".py")[0] for test in every} == {f"test_{name}" for name in SUITE}

    assert run(suite, f"--note-switch={note}", "-n", "2") == every
    left_out = set(every) - set(run(suite, *where))
    assert left_out == {f"test_{name}.py::test_it" for name in UNCHANGED}

    # A test that nobody has seen yet, and sources that nobody has seen yet.
    (suite / "test_nothing.py").write_text("def test_it(): ...\n\ndef test_new(): ...\n", encoding="utf-8")
    assert "test_nothing.py::test_new" in run(suite, *where)
    seen = json.loads(note.read_text(encoding="utf-8"))
    note.write_text(json.dumps({**seen, "sources": "others"}), encoding="utf-8")
    assert {test.split(".py")[0] for test in run(suite, *where)} == {f"test_{name}" for name in SUITE}


def test_any_source_that_changed_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    before = digest_of(tmp_path)
    (tmp_path / "src" / "one.py").write_text("", encoding="utf-8")
    added = digest_of(tmp_path)
    (tmp_path / "src" / "one.py").write_text("one = 1\n", encoding="utf-8")
    changed = digest_of(tmp_path)
    (tmp_path / "src" / "one.py").rename(tmp_path / "src" / "two.py")
    assert len({before, added, changed, digest_of(tmp_path)}) == 4
