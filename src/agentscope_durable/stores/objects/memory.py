"""Large bodies in this process's memory."""

from __future__ import annotations

from agentscope_durable.contracts.errors import HostClosed, NotFound
from agentscope_durable.stores.objects._digests import check_digest, check_limit, verify


class MemoryObjectStore:
    """An `ObjectStore` without a disk."""

    persistent = False

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], bytes] = {}
        self._closed = False

    async def put(self, partition: str, digest: str, content: bytes) -> None:
        self._check(digest)
        self._objects.setdefault((partition, digest), bytes(verify(digest, content)))

    async def get(self, partition: str, digest: str) -> bytes:
        self._check(digest)
        content = self._objects.get((partition, digest))
        if content is None:
            raise NotFound("object", digest)
        return verify(digest, content)

    async def exists(self, partition: str, digest: str) -> bool:
        self._check(digest)
        return (partition, digest) in self._objects

    async def delete(self, partition: str, digest: str) -> None:
        self._check(digest)
        self._objects.pop((partition, digest), None)

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        self._check(None)
        check_limit(limit)
        found = sorted(digest for owner, digest in self._objects if owner == partition and digest > after)
        return found[:limit]

    async def close(self) -> None:
        self._closed = True

    def _check(self, digest: str | None) -> None:
        if self._closed:
            raise HostClosed("object store")
        if digest is not None:
            check_digest(digest)
