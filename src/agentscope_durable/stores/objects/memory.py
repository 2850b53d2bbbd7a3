"""Large bodies in this process's memory."""

from __future__ import annotations

from agentscope_durable.contracts.errors import HostClosed
from agentscope_durable.stores.objects._names import check_limit, check_name, not_found, verify


class MemoryObjectStore:
    """An `ObjectStore` without a disk."""

    persistent = False

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], bytes] = {}
        self._closed = False

    async def put(self, partition: str, name: str, content: bytes) -> None:
        self._check(name)
        self._objects.setdefault((partition, name), bytes(verify(name, content)))

    async def get(self, partition: str, name: str) -> bytes:
        self._check(name)
        content = self._objects.get((partition, name))
        if content is None:
            raise not_found(name, "this process's memory")
        return verify(name, content)

    async def exists(self, partition: str, name: str) -> bool:
        self._check(name)
        return (partition, name) in self._objects

    async def delete(self, partition: str, name: str) -> None:
        self._check(name)
        self._objects.pop((partition, name), None)

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        self._check(None)
        check_limit(limit)
        found = sorted(name for owner, name in self._objects if owner == partition and name > after)
        return found[:limit]

    async def close(self) -> None:
        self._closed = True

    def _check(self, name: str | None) -> None:
        if self._closed:
            raise HostClosed("object store")
        if name is not None:
            check_name(name)
