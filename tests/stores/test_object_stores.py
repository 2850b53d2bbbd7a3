"""The object stores, by the contract every one keeps, and what a disk adds to it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agentscope_durable import _failpoints
from agentscope_durable.contracts.bodies import object_digest
from agentscope_durable.contracts.errors import StoreReadOnly
from agentscope_durable.spi.object_store import ObjectStore
from agentscope_durable.stores.objects import filesystem
from agentscope_durable.stores.objects.filesystem import FileObjectStore
from agentscope_durable.stores.objects.memory import MemoryObjectStore
from agentscope_durable.testing.object_store import InspectedObjectStoreContract, ObjectStoreContract

BODY = b"x" * 100_000
DIGEST = object_digest(BODY)


@pytest.mark.spec("OB-02", "OB-07")
class TestMemoryObjectStore(ObjectStoreContract):
    backend = "memory"

    async def open(self, place: Path) -> ObjectStore:
        return MemoryObjectStore()

    async def damage(self, store: ObjectStore, partition: str, digest: str, content: bytes) -> None:
        store._objects[partition, digest] = content


def files_of(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


@pytest.mark.spec("OB-02", "OB-07")
@pytest.mark.case("C87")
class TestFileObjectStore(InspectedObjectStoreContract):
    backend = "sqlite"

    async def open(self, place: Path) -> ObjectStore:
        return FileObjectStore(place / "objects")

    async def damage(self, store: ObjectStore, partition: str, digest: str, content: bytes) -> None:
        store._path(partition, digest).write_bytes(content)

    @pytest.mark.spec("OB-08")
    async def test_killed_at_any_point_of_a_put_nothing_but_whole_objects_is_there(self, tmp_path: Path) -> None:
        program = """
            import asyncio, sys
            from agentscope_durable.stores.objects.filesystem import FileObjectStore
            from agentscope_durable.contracts.bodies import object_digest
            body = b"x" * 100_000
            asyncio.run(FileObjectStore(sys.argv[1]).put("p", object_digest(body), body))
        """
        for point, there in (("object.put.before", False), ("object.put.after", True)):
            place = tmp_path / point
            done = subprocess.run(
                [sys.executable, "-c", textwrap.dedent(program), str(place)],
                env={**os.environ, "DURABLE_FAILPOINT": point},
                check=False,
            )
            assert done.returncode == -9
            store = FileObjectStore(place)
            assert await store.exists("p", DIGEST) == there
            assert await store.list("p") == ([DIGEST] if there else [])
            await store.put("p", DIGEST, BODY)
            assert await store.get("p", DIGEST) == BODY

    async def test_a_put_that_failed_leaves_nothing(self, tmp_path: Path) -> None:
        def fail(name: str) -> None:
            raise OSError("the disk is on fire")

        store = FileObjectStore(tmp_path)
        _failpoints.arm("object.put.before", fail)
        with pytest.raises(Exception, match="on fire"):
            await store.put("p", DIGEST, BODY)
        assert files_of(tmp_path) == []

    async def test_drafts_of_killed_processes_are_removed_later(self, tmp_path: Path) -> None:
        drafts = tmp_path / "drafts"
        drafts.mkdir()
        for name, age in (("old", 2 * filesystem.DRAFT_AGE_SECONDS), ("new", 0)):
            (drafts / name).write_bytes(b"half")
            stamp = (drafts / name).stat().st_mtime - age
            os.utime(drafts / name, (stamp, stamp))

        await FileObjectStore(tmp_path).put("p", DIGEST, BODY)

        assert os.listdir(drafts) == ["new"]

    async def test_a_disk_without_hard_links_will_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def link(source: Path, target: Path) -> None:
            raise PermissionError(1, "no links here")

        monkeypatch.setattr(os, "link", link)
        store = FileObjectStore(tmp_path)
        await store.put("p", DIGEST, BODY)

        assert await store.get("p", DIGEST) == BODY
        assert [path.name for path in files_of(tmp_path)] == [DIGEST]

    async def test_a_folder_that_cannot_be_written_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def link(source: Path, target: Path) -> None:
            raise OSError(30, "read-only file system")

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(StoreReadOnly):
            await FileObjectStore(tmp_path).put("p", DIGEST, BODY)

    async def test_no_name_on_the_disk_holds_an_id(self, tmp_path: Path) -> None:
        await FileObjectStore(tmp_path).put("CON/../../secret", DIGEST, BODY)

        [path] = files_of(tmp_path)
        assert path.name == DIGEST
        assert path.is_relative_to(tmp_path)
        assert all(set(part) <= set("0123456789abcdef") for part in path.relative_to(tmp_path).parts)
