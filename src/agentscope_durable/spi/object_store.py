"""The socket for large bodies."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class ObjectStore(Protocol):
    """Keeps immutable bodies by name, scoped to a Session.

    A name is the SHA-256 of the content as 64 lower-case hex digits, or that and a tag: "-" and 16 hex digits more. A
    content that was swept comes back under another tag, so that no removal, however late, meets what came after it.

    Promises, each checked by name in the contract suite:

    immutable   Content is never overwritten; putting the same content again is no change (OB-07).
    verified    `get` checks the digest and raises `DigestMismatch` rather than return wrong bytes.
    scoped      A body put for one Session is not readable through another.
    durable     A put that returned survives `kill -9`, if `persistent`.
    whole       A reader sees the entire body or NotFound, never a part of it.
    """

    @property
    def persistent(self) -> bool: ...

    async def put(self, partition: str, name: str, content: bytes) -> None: ...

    async def get(self, partition: str, name: str) -> bytes: ...

    async def exists(self, partition: str, name: str) -> bool: ...

    async def delete(self, partition: str, name: str) -> None:
        """Remove a body; absent is fine. Only the sweep calls this."""
        ...

    async def list(self, partition: str, after: str = "", limit: int = 1000) -> list[str]:
        """Names of one Session in order."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class CheckedObjectStore(Protocol):
    """An object store that can try out whether it keeps its promises where it is used."""

    async def check(self) -> None:
        """Raise what is wrong; once it was right, cheap. A backend asks when it is opened to be written."""
        ...
