"""Large bodies as files: `<directory>/<aa>/<hash of the Session>/<name>`.

Rule 1: a file appears under its name complete and on the disk, or not at all: written elsewhere, flushed,
then linked into place. An existing file is never written again.
Rule 2: no id becomes a file name. The Session is a hash, so that "..", "CON", or two ids that a disk takes
for one cannot meet there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from agentscope_durable import _failpoints
from agentscope_durable.contracts.errors import HostClosed, StoreFull, StoreReadOnly, Unavailable
from agentscope_durable.spi.environment import SYSTEM, Environment
from agentscope_durable.stores._disk import sync_directory
from agentscope_durable.stores.objects._names import check_limit, check_name, folder_name, not_found, verify

T = TypeVar("T")

DRAFT_AGE_SECONDS = 24 * 3600
"""Drafts of killed processes are removed when they are older than this."""


class FileObjectStore:
    """An `ObjectStore` in a folder, shared by every process that can see it.

    Args:
        directory: made when the first body is put.
        environment: where its threads and names come from.
    """

    persistent = True

    def __init__(self, directory: str | os.PathLike[str], *, environment: Environment = SYSTEM) -> None:
        self._directory = Path(directory)
        self._drafts = self._directory / "drafts"
        self._environment = environment
        self._swept = False
        self._closed = False

    async def put(self, partition: str, name: str, content: bytes) -> None:
        check_name(name)
        await self._call(lambda: self._put(partition, name, content))

    async def get(self, partition: str, name: str) -> bytes:
        check_name(name)
        path = self._path(partition, name)

        def read() -> bytes:
            try:
                return verify(name, path.read_bytes())
            except FileNotFoundError:
                raise not_found(name, f"the folder {str(self._directory)!r}") from None

        return await self._call(read)

    async def exists(self, partition: str, name: str) -> bool:
        check_name(name)
        return await self._call(self._path(partition, name).is_file)

    async def delete(self, partition: str, name: str) -> None:
        check_name(name)
        await self.remove_from(folder_name(partition), name)

    async def remove_from(self, folder: str, name: str) -> None:
        path = self._directory / folder[:2] / folder / name

        def remove() -> None:
            _failpoints.hit("object.delete.before")
            path.unlink(missing_ok=True)
            _failpoints.hit("object.delete.after")

        await self._call(remove)

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        return await self.names_in(folder_name(partition), after, limit)

    async def names_in(self, folder: str, after: str = "", limit: int = 1000) -> list[str]:
        check_limit(limit)
        place = self._directory / folder[:2] / folder

        def names() -> list[str]:
            try:
                return sorted(name for name in os.listdir(place) if name > after)[:limit]
            except FileNotFoundError:
                return []

        return await self._call(names)

    def folder_of(self, partition: str) -> str:
        return self._folder(partition).name

    async def folders(self, after: str = "", limit: int = 1000) -> list[str]:
        check_limit(limit)

        def names() -> list[str]:
            found: list[str] = []
            for above in sorted(self._directory.glob("??")):
                if above.name >= after[:2] and above.is_dir():
                    # A folder stays when its last body goes: another process may be about to put one there.
                    found += sorted(
                        name for name in os.listdir(above) if name > after and any(os.scandir(above / name))
                    )
                if len(found) >= limit:
                    break
            return found[:limit]

        return await self._call(names)

    async def close(self) -> None:
        self._closed = True

    def _put(self, partition: str, name: str, content: bytes) -> None:
        verify(name, content)
        path = self._path(partition, name)
        if path.exists():
            # Another process may have linked it a moment ago: its name must be as durable as if we had.
            sync_directory(path.parent)
            return
        self._sweep()
        for folder in (path.parent, self._drafts):
            _make(folder, self._directory.parent)
        draft = self._drafts / self._environment.random_bytes(16).hex()
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _failpoints.hit("object.put.before")
            _place(draft, path)
            sync_directory(path.parent)
            _failpoints.hit("object.put.after")
        finally:
            draft.unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what processes left behind that were killed while they wrote. Once per store."""
        if self._swept:
            return
        self._swept = True
        oldest = time.time() - DRAFT_AGE_SECONDS
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._drafts):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat().st_mtime < oldest:
                        os.unlink(entry.path)

    def _folder(self, partition: str) -> Path:
        folder = folder_name(partition)
        return self._directory / folder[:2] / folder

    def _path(self, partition: str, name: str) -> Path:
        return self._folder(partition) / name

    async def _call(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise HostClosed("object store")

        def translated() -> T:
            try:
                return work()
            except OSError as error:
                raise self._translate(error) from error

        return await self._environment.call_in_thread(translated)

    def _translate(self, error: OSError) -> Exception:
        location = str(self._directory)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(location)
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnly(location)
        return Unavailable(f"the object store {location!r} failed: {error}")


def _make(folder: Path, above: Path) -> None:
    """Make a folder and its parents below `above`, and their names durable."""
    missing: list[Path] = []
    while folder != above and not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(parents=True, exist_ok=True)
        sync_directory(new.parent)


def _place(draft: Path, path: Path) -> None:
    """Give the draft its name, unless something has that name already."""
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        # A disk without hard links. A rename may replace a file, but only by the same content.
        os.replace(draft, path)
