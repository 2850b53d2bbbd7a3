"""A store of one's own, outside this repository: the contract suites prove it, and find every defect planted in it.

Each defect is one edit of `examples/own_store`. All of them run in one process that has the package and pytest, and
knows nothing of this repository: its folder, its settings and its tests are not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest

import agentscope_durable

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_store"
SECONDS_MAX = 400


class Defect(NamedTuple):
    """What is wrong, the edit that makes it so, and the promise that finds it."""

    file: str
    was: str
    now: str
    promise: str


RECORDS: dict[str, Defect] = {
    "a lost write": Defect(
        "journal_store",
        '        self._file.write(msgspec.json.encode(line) + b"\\n")\n        self._file.flush()\n',
        '        self._file.write(msgspec.json.encode(line) + b"\\n")\n',
        "durable",
    ),
    "a gap in the numbers": Defect(
        "journal_store", "        there.next_seq += count\n", "        there.next_seq += max(count, 1)\n", "numbered"
    ),
    "a change that is not atomic": Defect(
        "journal_store",
        "                line, first = checked(",
        "                there.records.update((key, value) for key, value in change.puts if value is not None)\n"
        "                self._partitions.setdefault(partition, there)\n"
        "                line, first = checked(",
        "atomic",
    ),
    "two changes that interleave": Defect(
        "journal_store",
        "        committed = self._transact(partition, reads, decide)\n        await asyncio.sleep(0)\n",
        "        stale = Partition()\n"
        "        stale.__dict__.update(vars(self._partitions.get(partition) or stale))\n"
        "        stale.records = dict(stale.records)\n"
        "        await asyncio.sleep(0)\n"
        "        late = lambda view, now_ms: decide(Seen(self, stale, view._reads), now_ms)\n"
        "        committed = self._transact(partition, reads, late)\n",
        "isolated",
    ),
    "a page that is cut without a word": Defect(
        "journal_store",
        "    if not 1 <= limit <= PAGE_MAX:\n",
        "    if not 1 <= limit:\n",
        "bounded",
    ),
    "nothing, where a question was due": Defect(
        "journal_store",
        "            raise Need(Reads(keys=(key,)))\n",
        "            return None\n",
        "repeatable",
    ),
    "a lease that never ends": Defect(
        "journal_store", "lease=(now_ms + lease_ms, now_ms, value)", "lease=(now_ms + 10**9, now_ms, value)", "timed"
    ),
    "an erasure of its own row": Defect(
        "journal_store",
        "            del there.log[: line.erase[0]]\n",
        "            there.log = there.log[line.erase[0] + 1 :]\n",
        "erased",
    ),
}
OBJECTS: dict[str, Defect] = {
    "content that is written over": Defect(
        "folder_objects",
        "        if hashlib.sha256(content).hexdigest() != name[:64]:\n",
        "        if False:\n",
        "immutable",
    ),
    "bytes that nobody checks": Defect(
        "folder_objects", "        if actual != name[:64]:\n", "        if False:\n", "verified"
    ),
    "one folder for everybody": Defect("folder_objects", "partition.encode(", "b''.decode().encode(", "scoped"),
    "memory that calls itself a disk": Defect(
        "folder_objects",
        "        self._folder = folder\n",
        "        self._folder = folder / os.urandom(4).hex()\n",
        "durable",
    ),
    "half a body": Defect(
        "folder_objects",
        "        draft.replace(path)\n",
        "        import asyncio\n"
        "        path.write_bytes(content[:1000])\n"
        "        await asyncio.sleep(0)\n"
        "        draft.replace(path)\n",
        "whole",
    ),
}


OPENED = {
    "Record": """    async def open(self, place):
        return await {module}.JournalStore.open(place / "journal")
""",
    "Object": """    async def open(self, place):
        return {module}.FolderObjects(place)

    async def damage(self, store, partition, name, content):
        store._path(partition, name).write_bytes(content)
""",
}


def outside(folder: Path) -> dict[str, str]:
    """An environment in which the package is all there is of this repository."""
    site = folder / "site"
    site.mkdir()
    (site / "agentscope_durable").symlink_to(Path(agentscope_durable.__file__).parent)
    return {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}


def run(project: Path, environment: dict[str, str]) -> dict[tuple[str, str], bool]:
    """(class, test) -> whether it passed."""
    shutil.copy(EXAMPLE / "pytest.ini", project)
    report = project / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "--strict-markers", "-p", "no:cacheprovider"]
        + ["-p", "no:xdist", "-p", "no:hypothesispytest", f"--junitxml={report}", "."],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {
        (str(case.get("classname")).rpartition(".")[2], str(case.get("name"))): not len(case)
        for case in ET.parse(report).getroot().iter("testcase")
    }


@pytest.mark.spec("BE-05", "BE-07", "BE-02")
def test_the_example_keeps_every_promise_where_nothing_of_this_repository_is(tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(EXAMPLE, project)
    passed = run(project, outside(tmp_path))

    assert {name for name, _ in passed} == {"TestRecords", "TestObjects", "TestBackend"}
    assert [test for test, good in passed.items() if not good] == []
    assert len(passed) > 70


@pytest.mark.spec("BE-05", "BE-07", "BE-02", "OB-07")
def test_every_planted_defect_is_found_by_the_promise_it_breaks(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    wanted: dict[str, str] = {}
    for kind, defects in (("Record", RECORDS), ("Object", OBJECTS)):
        for number, defect in enumerate(defects.values()):
            name = f"{kind}{number}"
            wanted[name] = defect.promise
            source = (EXAMPLE / f"{defect.file}.py").read_text(encoding="utf-8")
            assert source.count(defect.was) == 1, f"the example has changed: {defect.was!r}"
            (project / f"own_{name.lower()}.py").write_text(source.replace(defect.was, defect.now), encoding="utf-8")
            opened = OPENED[kind].format(module=f"own_{name.lower()}")
            (project / f"test_{name.lower()}.py").write_text(
                f"import own_{name.lower()}\nfrom agentscope_durable.testing import {kind}StoreContract\n\n\n"
                f"class Test{name}({kind}StoreContract):\n{opened}",
                encoding="utf-8",
            )

    passed = run(project, outside(tmp_path))

    found = {
        name: sorted(
            {test.split("_")[1] for (where, test), good in passed.items() if where == f"Test{name}" and not good}
        )
        for name in wanted
    }
    missed = {name: (promise, found[name]) for name, promise in wanted.items() if promise not in found[name]}
    assert not missed, f"defect -> (promise it breaks, those whose tests failed): {missed}"
