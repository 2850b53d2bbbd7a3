"""An object store of one's own: one file for each body, in a folder for each Session."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from agentscope_durable import DigestMismatch, HostClosed, InvalidRequest, NotFound

_NAME = re.compile(r"[0-9a-f]{64}(-[0-9a-f]{16})?")


class FolderObjects:
    """Keeps the promises of `spi.ObjectStore`: `test_own_store.py` proves that."""

    persistent = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._closed = False

    async def put(self, partition: str, name: str, content: bytes) -> None:
        path = self._path(partition, name)
        if hashlib.sha256(content).hexdigest() != name[:64]:
            raise DigestMismatch(name, "object", expected=name[:64], actual=hashlib.sha256(content).hexdigest())
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{os.urandom(8).hex()}")
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # Complete, and only then under its name.
        draft.replace(path)

    async def get(self, partition: str, name: str) -> bytes:
        path = self._path(partition, name)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise NotFound("object", name) from None
        actual = hashlib.sha256(content).hexdigest()
        if actual != name[:64]:
            raise DigestMismatch(name, "object", expected=name[:64], actual=actual)
        return content

    async def exists(self, partition: str, name: str) -> bool:
        return self._path(partition, name).exists()

    async def delete(self, partition: str, name: str) -> None:
        self._path(partition, name).unlink(missing_ok=True)

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        folder = self._path(partition, "0" * 64).parent
        found = sorted(path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)) if folder.exists() else []
        return [name for name in found if name > after][:limit]

    async def close(self) -> None:
        self._closed = True

    def _path(self, partition: str, name: str) -> Path:
        if self._closed:
            raise HostClosed("folder of objects")
        if not _NAME.fullmatch(name):
            raise InvalidRequest("that is no name of an object", path="name")
        # A name of a Session may be anything; its digest is a name that every disk takes.
        return self._folder / hashlib.sha256(partition.encode("utf-8", "surrogatepass")).hexdigest() / name
